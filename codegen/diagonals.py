"""Gradients of tables that are read by the distance of key and query: summed along diagonals before they go to the table.

A read such as ``table[bucket(j - i), head]`` has a gradient for every score, but only tokens + tokens - 1 different places. A kernel sums the
tiles of scores along block diagonals (`backward_diagonals`); their own diagonals are summed here.
"""
from __future__ import annotations

import functools

import torch

from .. import distances
from ..algebra import simplify
from ..distances import QUERY
from ..program import Expr, const, loads, substitute


def by_distance(index: tuple[Expr, ...]) -> bool:
    """Whether a place stays the same when query and key move on together, and is not itself read."""
    return all(distances.by_distance(x) for x in index) and not any(loads(x) for x in index)


def count(rows: int, columns: int, block: int) -> int:
    """How many block diagonals there are."""
    return -(-rows // block) + -(-columns // block) - 1


def gathered(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The sums along diagonals, (…, rows + columns - 1), from the least distance to the greatest, of a matrix whose tiles are summed along
    block diagonals: (…, block diagonals, block, block)."""
    block = tiles.shape[-1]
    width = 2 * block - 1
    # Each row one place further left than the one above, as in a matrix of rows that are one longer than they are read.
    skewed = torch.nn.functional.pad(tiles.flip(-2), (0, block)).flatten(-2)[..., :block * width].unflatten(-1, (block, width)).sum(-2)
    out = torch.nn.functional.pad(skewed[..., :block].flatten(-2), (0, block))
    out[..., block:] += torch.nn.functional.pad(skewed[..., block:], (0, 1)).flatten(-2)
    return out.narrow(-1, -(-rows // block) * block - rows, rows + columns - 1)


@functools.lru_cache(maxsize=512)
def at_distance(index: tuple[Expr, ...], rows: int) -> tuple[Expr, ...]:
    """The places of those sums, by their number, which takes the name of the key's axis."""
    return tuple(simplify(substitute(x, {QUERY: const(rows - 1)})) for x in index)
