"""Gradients of tables that are read by the distance of key and query: summed along diagonals before they go to the table.

A read such as ``table[bucket(j - i), head]`` has a gradient for every score, but only tokens + tokens - 1 different places. Adding
T² elements to a small table one by one means sorting them; their sums along diagonals come from one pass over the matrix.
"""
from __future__ import annotations

import functools

import torch

from ..algebra import simplify
from ..program import Expr, add, axis, const, loads, substitute

QUERY, KEY = axis("i"), axis("j")


@functools.lru_cache(maxsize=512)
def by_distance(index: tuple[Expr, ...]) -> bool:
    """Whether a place stays the same when query and key move on together."""
    moved = {QUERY: add(QUERY, const(1)), KEY: add(KEY, const(1))}
    return all(simplify(substitute(x, moved)) == simplify(x) for x in index) and not any(loads(x) for x in index)


def summed(values: torch.Tensor) -> torch.Tensor:
    """Σ_i values[…, i, i + distance] for every distance from 1 - i's length to j's length - 1: (…, i, j) → (…, i + j - 1)."""
    *kept, rows, columns = values.shape
    width = rows + columns - 1
    out = torch.empty(*kept, width, dtype=values.dtype, device=values.device)
    # Each row one place further left than the one above: with a step of width - 1 diagonals stand in columns.
    skewed = torch.zeros(rows * width, dtype=values.dtype, device=values.device)
    place = skewed.as_strided((rows, columns), (width - 1, 1), rows - 1) if width > 1 else skewed.view(1, 1)
    for one, sums in zip(values.reshape(-1, rows, columns), out.view(-1, width), strict=True):
        place.copy_(one)
        torch.sum(skewed.view(rows, width), 0, out=sums)
    return out


@functools.lru_cache(maxsize=512)
def at_distance(index: tuple[Expr, ...], rows: int) -> tuple[Expr, ...]:
    """The places of those sums, by their number, which takes the name of the key's axis."""
    return tuple(simplify(substitute(x, {QUERY: const(rows - 1)})) for x in index)
