"""Which tiles of an attention are computed, as a picture in characters.

    print(attnfuse.draw_tiles(report.sites[0].spec, {"i": 512, "j": 512}))
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from .spec import AttentionSpec
from .tilemap import TILE, look, masked

FULL, CUT, EMPTY = "█", "▒", "·"
_WIDTH = 64


def draw_tiles(spec: AttentionSpec, sizes: Mapping[str, int], operands: Mapping[str, torch.Tensor] | None = None, *, tile: int | None = None) -> str:
    """A picture of the score matrix, one character a tile: full (no mask in it), cut by a mask, or empty (never computed, but for rows that see no
    key at all).

    Args:
        spec: the attention, such as `Site.spec` of a report.
        sizes: lengths by name: ``i`` queries, ``j`` keys, and the scalars and batch axes that the mask depends on, where they are not 1.
        operands: the tensors that the mask reads, by their names in the equation (a padding mask, document ids). Where the mask depends on
            batch axes, the picture is of the first position.
        tile: queries and keys of a tile; by default 64, or as many times 64 as make the picture fit.

    Raises:
        ValueError: a length or a tensor that the mask needs is missing, or does not fit.

    >>> from attnfuse.program import DOT, axis, const, le, where
    >>> from attnfuse.spec import Access, AttentionSpec, Operand
    >>> i, j, d, e = (axis(n) for n in "ijde")
    >>> q, k, v = (Operand(n, "float32", 2) for n in "qkv")
    >>> causal = AttentionSpec((), (q, k, v), Access(0, (i, d)), Access(1, (j, d)), Access(2, (j, e)), where(le(j, i), DOT, const(-1e9)))
    >>> print(draw_tiles(causal, {"i": 256, "j": 256}))
    ▒···
    █▒··
    ██▒·
    ███▒
    queries down, keys across, 64 x 64 a tile: 6 full, 4 cut, 6 empty
    """
    n_queries, n_keys = (_length(sizes, n) for n in ("i", "j"))
    if tile is None:
        tile = TILE
        while -(-max(n_queries, n_keys) // tile) > _WIDTH:
            tile *= 2
    if tile < 1:
        raise ValueError(f"tiles of {tile}: a tile has at least one query and one key")
    shape = -(-n_queries // tile), -(-n_keys // tile)
    alive, full = _first(spec, sizes, operands or {}, tile) or (torch.ones(shape), torch.ones(shape))
    lines = ["".join(EMPTY if not a else FULL if f else CUT for a, f in zip(*row, strict=True)) for row in zip(alive.tolist(), full.tolist(), strict=True)]
    counts = ", ".join(f"{sum(line.count(c) for line in lines)} {name}" for c, name in ((FULL, "full"), (CUT, "cut"), (EMPTY, "empty")))
    return "\n".join([*lines, f"queries down, keys across, {tile} x {tile} a tile: {counts}"])


def _length(sizes: Mapping[str, int], name: str) -> int:
    length = sizes.get(name)
    if length is None or length < 1:
        raise ValueError(f"sizes[{name!r}] is {length}: the picture needs the number of {'queries' if name == 'i' else 'keys'}")
    return length


def _first(spec: AttentionSpec, sizes: Mapping[str, int], operands: Mapping[str, torch.Tensor], tile: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Which tiles are alive and full at the first batch position; None where there is no mask."""
    found = masked(spec)
    if found is None:
        return None
    own = []
    for number, fact in zip(found.sources, found.mask.operands, strict=True):
        name = spec.operands[number].name
        if name not in operands:
            raise ValueError(f"the mask reads {name!r}, a tensor of {fact.rank} dimensions ({fact.dtype}): pass it as operands={{{name!r}: …}}")
        if operands[name].dim() != fact.rank:
            raise ValueError(f"{name!r} has {operands[name].dim()} dimensions; the mask reads one of {fact.rank}")
        own.append(operands[name])
    missing = [n for n in found.mask.scalars if n not in sizes]
    if missing:
        raise ValueError(f"the mask depends on {', '.join(missing)}: give {'its value' if len(missing) == 1 else 'their values'} in sizes")
    lengths = [1 if n in found.mask.batch else sizes[n] for n in found.mask.size_names]
    try:
        alive, full = look(found.mask, own, lengths, own[0].device if own else torch.device("cpu"), tile)
    except (IndexError, RuntimeError) as problem:
        raise ValueError(f"the tensors do not fit {sizes['i']} queries and {sizes['j']} keys: {problem}") from problem
    return alive.reshape(-1, *alive.shape[-2:])[0], full.reshape(-1, *full.shape[-2:])[0]
