"""Which attentions are to be timed before their kernels are chosen: those of models compiled with `Settings.autotune`, or all.

    ask([site.called[0] for site in report.sites])   # the backend, for a model whose settings say so
    asked(spec)                                      # the launcher, at the first call of a layout

A setting of the context manager or the environment holds for every attention that first runs under it. A `settings=` argument holds for the
attentions of that model wherever they run: backward runs on a thread that a `with` block does not reach.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .settings import current
from .tilemap import without

if TYPE_CHECKING:
    from .spec import AttentionSpec

_asked: set[AttentionSpec] = set()


def ask(specs: Iterable[AttentionSpec | None]) -> None:
    """Time the kernels of these, in this process."""
    _asked.update(s for s in specs if s is not None)


def asked(spec: AttentionSpec) -> bool:
    """Whether the kernels of an attention are to be timed."""
    return without(spec) in _asked or current().autotune
