"""How a kernel reads a tile of rows of queries, keys, values or grad_out: by pointers and strides, or by a descriptor.

On Hopper, which has a tensor memory accelerator, a descriptor of the whole tensor lets one thread
fetch a tile: no addresses in registers, and what lies beyond an edge arrives as zeros. The accelerator asks for rows that lie
densely, other steps of a multiple of 16 bytes, and at most five dimensions; `describable` says whether a call's layout has that.

    k = tl.load(k_ptr + offs_n[:, None] * k_stride_n + offs_d[None, :] * k_stride_d)        # pointers
    k = k_desc.load([b0, b1 // 4, start_n, 0]).reshape([BLOCK_N, BLOCK_D])                  # descriptor
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..algebra import simplify
from ..program import Expr, axis, depends
from ..spec import Access, AttentionSpec

_UNIT = 16
"""Bytes: what addresses and steps have to be multiples of. Elements: by how many the compiler knows steps to be divisible."""
_MOST_DIMENSIONS = 5
_WITHIN = frozenset("ijde")

ROLES: dict[str, tuple[str, str]] = {"q": ("i", "d"), "k": ("j", "d"), "v": ("j", "e"), "do": ("i", "e")}
"""What can be described, and the axes of its tiles."""


def index_of(spec: AttentionSpec, name: str) -> tuple[Expr, ...]:
    """The index map of a role; grad_out lies as (batch…, i, e)."""
    if name == "do":
        return tuple(axis(a) for a in spec.out_axes)
    access: Access = {"q": spec.query, "k": spec.key, "v": spec.value}[name]
    return tuple(simplify(x) for x in access.index)


def described(spec: AttentionSpec, sizes: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Which of the tensors, by role, a descriptor can describe."""
    return tuple(n for n, t in tensors.items() if describable(index_of(spec, n), ROLES[n], sizes, t))


def describable(index: Sequence[Expr], own: tuple[str, str], sizes: Mapping[str, int], tensor: torch.Tensor) -> bool:
    """Whether tiles along the two axes `own` are boxes of the tensor, in a layout that the accelerator takes.

    A dimension that is longer than its axis would fill the edge of a tile with what lies there, so it does not do.
    """
    row, depth = own
    rows = [n for n, x in enumerate(index) if x == axis(row)]
    if not 2 <= len(index) <= _MOST_DIMENSIONS or len(rows) != 1 or index[-1] != axis(depth) or tensor.numel() == 0:
        return False
    if any(depends(x) & _WITHIN for n, x in enumerate(index) if n not in (rows[0], len(index) - 1)):
        return False
    if tensor.shape[rows[0]] != sizes[row] or tensor.shape[-1] != sizes[depth] or tensor.dtype not in (torch.float16, torch.bfloat16):
        return False
    if tensor.stride(-1) != 1 or (tensor.device.type != "meta" and tensor.data_ptr() % _UNIT):
        return False
    steps = [s * tensor.itemsize for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    return all(s > 0 and s % _UNIT == 0 for s in steps)


def uneven(spec: AttentionSpec, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """The roles whose rows are no multiple of 16 elements apart: of those the compiler does not know that it may read several at once."""
    return tuple(n for n, t in tensors.items()
                 if any(t.stride(k) % _UNIT for k, x in enumerate(index_of(spec, n)) if ROLES[n][0] in depends(x)))


def dense_uneven(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The same if every tensor lay densely."""
    return tuple(n for n, (_, depth) in ROLES.items() if sizes[depth] % _UNIT)


def dense(spec: AttentionSpec, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The roles that a descriptor could describe if every tensor lay densely: for plans of calls that are not there."""
    halves = {n: spec.operands[a.operand].dtype for n, a in (("q", spec.query), ("k", spec.key), ("v", spec.value))} | {"do": spec.out_dtype}
    return tuple(n for n, dtype in halves.items() if dtype in ("float16", "bfloat16") and sizes[ROLES[n][1]] * 2 % _UNIT == 0)


def descriptor(tensor: torch.Tensor, block: Sequence[int]) -> object:
    """Triton's descriptor of a tensor for which `describable` holds."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    dense = -(-tensor.shape[-1] * tensor.itemsize // _UNIT) * _UNIT // tensor.itemsize
    strides = [s if n > 1 else dense for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], list(block))


def descriptor_like(template: object, tensor: torch.Tensor | None) -> object:
    """The descriptor of another tensor of the same layout: what was checked of the first one holds for it."""
    made = object.__new__(type(template))
    made.__dict__.update(template.__dict__)
    made.base = tensor  # type: ignore[attr-defined]  # Triton's TensorDescriptor
    return made


@dataclass(frozen=True)
class Reader:
    """The text that reads a tile.

    Attributes:
        base: the pointer, or the descriptor.
        strides: what the names of the strides begin with.
        labels: of the rows (m or n) and of the depth (d or e).
        place: under a descriptor, where the tile begins.
    """

    base: str
    strides: str
    labels: tuple[str, str]
    place: tuple[str, ...] = ()

    def tile(self, masked: bool, padded: bool) -> str:
        """The tile; `masked` where rows, `padded` where depths may lie beyond the end."""
        row, depth = self.labels
        if self.place:
            load = f"{self.base}.load([{', '.join(self.place)}])"
            return load if len(self.place) == 2 else f"{load}.reshape([BLOCK_{row.upper()}, BLOCK_{depth.upper()}])"
        masks = [m for m, there in ((f"{row}_mask[:, None]", masked), (f"{depth}_mask[None, :]", padded)) if there]
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        return f"tl.load({self.base} + offs_{row}[:, None] * {self.strides}_stride_{row} + offs_{depth}[None, :] * {self.strides}_stride_{depth}{mask})"


def place_of(index: Sequence[Expr], own: tuple[str, str], label: str, text: Callable[[Expr], str]) -> tuple[str, ...]:
    """Where a tile begins in the tensor: `text` writes what depends on the batch alone."""
    return tuple(f"start_{label}" if x == axis(own[0]) else "0" if x == axis(own[1]) else text(x) for x in index)


def block_of(index: Sequence[Expr], own: tuple[str, str], rows: int, depth: int) -> tuple[int, ...]:
    """The shape of the box."""
    return tuple(rows if x == axis(own[0]) else depth if x == axis(own[1]) else 1 for x in index)
