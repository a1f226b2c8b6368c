"""Reading and adding to rectangles of operands through index maps: strided views where a map is affine, else gathers.

A *box* gives each axis its half-open range of positions. A rectangle has one dimension for each axis of a given order, of
length 1 where the index map does not depend on the axis.

    >>> from .program import axis
    >>> box = {"i": (2, 4), "d": (0, 3)}
    >>> elements = Elements([torch.arange(12).view(4, 3)], {"i": 4, "d": 3}, torch.device("cpu"))
    >>> elements.read(0, (axis("i"), axis("d")), box, ("i", "d"))
    tensor([[ 6,  7,  8],
            [ 9, 10, 11]])
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .algebra import affine
from .program import Env, Expr, depends, evaluate, integer

Box = dict[str, tuple[int, int]]
Index = tuple[Expr, ...]
Strides = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of a view: its shape, strides and offset."""


@functools.lru_cache(maxsize=4096)
def _affine(index: Index) -> tuple[tuple[dict[str, Expr], Expr], ...] | None:
    """Every index as coefficients and rest; None where one is not affine."""
    axes = tuple(sorted(frozenset().union(*(depends(x) for x in index)))) if index else ()
    parts = tuple(affine(x, axes) for x in index)
    return None if any(p is None for p in parts) else parts  # type: ignore[return-value]  # no None is left


@dataclass(frozen=True)
class IndexMap:
    """An affine index map on concrete sizes: for each dimension its coefficients by axis and its constant."""

    slopes: tuple[dict[str, int], ...]
    offsets: tuple[int, ...]

    def inside(self, shape: Sequence[int], box: Box) -> bool:
        """Whether no index leaves the tensor; a negative index would wrap, which a view cannot."""
        for slopes, offset, length in zip(self.slopes, self.offsets, shape, strict=True):
            ends = [[slope * box[a][0], slope * (box[a][1] - 1)] for a, slope in slopes.items()]
            if offset + sum(map(min, ends)) < 0 or offset + sum(map(max, ends)) >= length:
                return False
        return True

    def view(self, tensor: torch.Tensor, box: Box, order: Sequence[str]) -> torch.Tensor | None:
        """The rectangle as a view; None where strides cannot express it."""
        found = self._strided(tensor, box, order)
        return None if found is None or found[1] else found[0]

    def read(self, tensor: torch.Tensor, box: Box, order: Sequence[str]) -> torch.Tensor | None:
        """As `view`, or a copy where axes are read backwards, for strides are never negative."""
        found = self._strided(tensor, box, order)
        return None if found is None else found[0].flip(found[1]) if found[1] else found[0]

    def _strided(self, tensor: torch.Tensor, box: Box, order: Sequence[str]) -> tuple[torch.Tensor, list[int]] | None:
        """A view, and the dimensions in which it has the rectangle backwards."""
        if any(stop <= start for start, stop in (box[a] for a in order)) or not self.inside(tensor.shape, box):
            return None
        steps = dict.fromkeys(order, 0)
        start = tensor.storage_offset()
        used: set[str] = set()
        for slopes, offset, stride in zip(self.slopes, self.offsets, tensor.stride(), strict=True):
            start += stride * offset
            for name, slope in slopes.items():
                steps[name] += stride * slope
                start += stride * slope * box[name][0]
                used.add(name)
        lengths = [box[a][1] - box[a][0] if a in used else 1 for a in order]
        turned = [n for n, step in enumerate(steps.values()) if step < 0]
        start += sum(step * (n - 1) for step, n in zip(steps.values(), lengths, strict=True) if step < 0)
        return tensor.as_strided(lengths, [abs(step) for step in steps.values()], start), turned


class Elements:
    """The operands of one call, readable by rectangles.

    Args:
        operands: the tensors.
        sizes: lengths and scalars by name.
        device: where positions are made.
    """

    def __init__(self, operands: Sequence[torch.Tensor], sizes: Mapping[str, int], device: torch.device) -> None:
        self.operands = operands
        self.sizes = sizes
        self.device = device
        self._maps: dict[Index, IndexMap | None] = {}

    def map(self, index: Index) -> IndexMap | None:
        """The affine index map, or None."""
        if index not in self._maps:
            self._maps[index] = self._concrete(index)
        return self._maps[index]

    def _concrete(self, index: Index) -> IndexMap | None:
        parts = _affine(index)
        if parts is None:
            return None
        slopes: list[dict[str, int]] = []
        offsets: list[int] = []
        for coefficients, rest in parts:
            numbers = {a: integer(c, self.sizes) for a, c in coefficients.items()}
            offset = integer(rest, self.sizes)
            if offset is None or any(n is None for n in numbers.values()):
                return None
            slopes.append({a: n for a, n in numbers.items() if n})
            offsets.append(offset)
        return IndexMap(tuple(slopes), tuple(offsets))

    def positions(self, box: Box, order: Sequence[str]) -> dict[str, torch.Tensor]:
        """For each axis its positions, shaped to broadcast along that dimension."""
        return {a: torch.arange(*box[a], device=self.device).view([-1 if k == n else 1 for k in range(len(order))])
                for n, a in enumerate(order)}

    def _places(self, index: Index, box: Box, order: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """Index tensors of a rectangle."""
        raw = lambda operand, at: self.operands[operand][at] if at else self.operands[operand]
        env = Env(self.positions(box, order), self.sizes, raw, torch.float64, self.device)
        memo: dict[Expr, torch.Tensor] = {}
        return tuple(evaluate(x, env, memo) for x in index)

    def read(self, operand: int, index: Index, box: Box, order: Sequence[str]) -> torch.Tensor:
        """The rectangle `box` of an operand, in the operand's dtype; a view if that is possible."""
        tensor = self.operands[operand]
        plan = self.map(index)
        view = plan.read(tensor, box, order) if plan else None
        if view is not None:
            return view
        if not index:
            return tensor.view([1] * len(order))
        out = tensor[self._places(index, box, order)]
        return out.view([1] * (len(order) - out.dim()) + list(out.shape))

    def strides(self, shape: Sequence[int], index: Index, box: Box, order: Sequence[str]) -> Strides | None:
        """Where `add` puts a rectangle in a contiguous tensor of this shape; None where it has to scatter the elements."""
        plan = self.map(index)
        view = plan.view(torch.empty(shape, device="meta"), box, order) if plan else None
        return (tuple(view.shape), view.stride(), int(view.storage_offset())) if view is not None and disjoint(view) else None

    def add(self, into: torch.Tensor, index: Index, box: Box, order: Sequence[str], values: torch.Tensor) -> None:
        """Add a rectangle to a contiguous tensor of the operand's shape; what falls on one element adds up.

        `values` broadcasts over, or is summed over, the axes that the index map does not depend on.
        """
        plan = self.map(index)
        view = plan.view(into, box, order) if plan else None
        if view is not None and disjoint(view):
            view.add_(values.sum_to_size(view.shape))
            return
        places = self._places(index, box, order)
        shape = torch.broadcast_shapes(*(p.shape for p in places))
        shape = [1] * (values.dim() - len(shape)) + list(shape)
        full = [box[a][1] - box[a][0] for a in order]
        into.index_put_(places, values.expand(full).sum_to_size(shape), accumulate=True)


def disjoint(view: torch.Tensor) -> bool:
    """Whether no two elements of a view share memory."""
    reach = 0
    for stride, length in sorted((s, n) for s, n in zip(view.stride(), view.shape, strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (length - 1)
    return True


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b over broadcast batch dimensions: [*, m, k] @ [*, k, n] → [*, m, n].

    Where b has length 1 and a does not (a key head shared by a group of query heads), those dimensions of a join its rows,
    so that b is never repeated.
    """
    shared = [n for n in range(a.dim() - 2) if b.shape[n] == 1 and a.shape[n] > 1]
    if not shared:
        return a @ b
    kept = [n for n in range(a.dim() - 2) if n not in shared]
    order = [*kept, *shared, a.dim() - 2, a.dim() - 1]
    moved = a.permute(order)
    rows = moved.reshape([*moved.shape[:len(kept)], -1, a.shape[-1]])
    right = b.permute(order).reshape([*(b.shape[n] for n in kept), *b.shape[-2:]])
    out = (rows @ right).view([*torch.broadcast_shapes(rows.shape[:-2], right.shape[:-2]), *moved.shape[len(kept):-1], b.shape[-1]])
    return out.permute([order.index(n) for n in range(len(order))])


def contract(a: torch.Tensor, b: torch.Tensor, keep: Sequence[int]) -> torch.Tensor:
    """aᵀ @ b, summed over the batch dimensions where `keep` is 1: [*, m, p], [*, m, n] → [*keep, p, n]."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    summed = [n for n, length in enumerate(batch) if keep[n] == 1 and length > 1]
    if not summed:
        return a.transpose(-1, -2) @ b
    kept = [n for n in range(len(batch)) if n not in summed]
    order = [*kept, *summed, len(batch), len(batch) + 1]
    joined = [x.expand(*batch, *x.shape[-2:]).permute(order).reshape([*(batch[n] for n in kept), -1, x.shape[-1]]) for x in (a, b)]
    out = joined[0].transpose(-1, -2) @ joined[1]
    return out.reshape([*(1 if n in summed else length for n, length in enumerate(batch)), *out.shape[-2:]])
