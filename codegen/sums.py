"""From the buffer of a captured read, which kernels wrote, to the gradient of its tensor: what falls on one element adds up.

    table[j - i + 7, b1]        buffer [b1, tiles]     →  sums along diagonals [b1, i + j - 1]  →  += into [15, heads]
    slopes[b1]                  buffer [b0, b1, i]     →  += into [heads]
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..elements import Elements, Strides
from ..program import Expr
from ..spec import AttentionSpec
from .diagonals import at_distance, by_distance
from .jobs import Captured, axes_of


@dataclass(frozen=True)
class Read:
    """How the buffer of a read is added to its tensor, worked out for one layout.

    Attributes:
        label, operand: the name of the buffer and the number of the tensor.
        index, box, axes: where it goes, as of `Elements.add`.
        distances: whether it is summed along diagonals first.
        view: the same place as a view of the tensor; None where its elements have to be scattered.
    """

    label: str
    operand: int
    index: tuple[Expr, ...]
    box: dict[str, tuple[int, int]]
    axes: tuple[str, ...]
    distances: bool
    view: Strides | None

    @staticmethod
    def of(spec: AttentionSpec, one: Captured, shape: Sequence[int], sizes: Mapping[str, int], device: torch.device) -> Read:
        """The read `one` of a tensor of this shape."""
        axes, index = axes_of(spec, one), one.node.args
        box = {a: (0, sizes[a]) for a in axes}
        distances = axes[-2:] == ("i", "j") and by_distance(index)
        if distances:
            index, axes = at_distance(index, sizes["i"]), (*axes[:-2], "j")
            box = {**{a: box[a] for a in axes[:-1]}, "j": (0, sizes["i"] + sizes["j"] - 1)}
        view = Elements([], sizes, device).strides(shape, index, box, axes)
        return Read(one.label, one.operand, index, box, axes, distances, view)

    def add(self, into: torch.Tensor, values: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Add the buffer, or its sums along diagonals, to a contiguous tensor of the operand's shape."""
        if self.view is None:
            Elements(operands, sizes, into.device).add(into, self.index, self.box, self.axes, values)
        else:
            into.as_strided(*self.view).add_(values.sum_to_size(self.view[0]))
