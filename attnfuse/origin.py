"""Where in the user's code a meaning was first met, so that a generated file can say so. It is no part of the meaning: a process
that got its compiled graph from a cache never saw the model's lines, and its files leave the place out."""
from __future__ import annotations

from .spec import AttentionSpec
from .tilemap import without

_places: dict[str, str] = {}


def note(spec: AttentionSpec, module: str, source: str) -> None:
    """Remember the first place of a spec: a module's path and ``file.py:123``."""
    place = " ".join(x for x in (source.replace("\\", "/").rsplit("/", 1)[-1], f"({module})" if module else "") if x)
    if place:
        _places.setdefault(spec.digest(), place)


def of(spec: AttentionSpec) -> str | None:
    """``model.py:18 (layers.0)``, or None where this process has not met the spec in a graph.

    >>> from .spec import Access, Operand
    >>> from .program import axis
    >>> i, j, d, e = map(axis, "ijde")
    >>> q, k, v = (Operand(n, "float32", 2) for n in "qkv")
    >>> of(AttentionSpec((), (q, k, v), Access(0, (i, d)), Access(1, (j, d)), Access(2, (j, e)), empty_rows="zero")) is None
    True
    """
    return _places.get(without(spec).digest())
