"""How a kernel reads a tile of queries, keys, values or grad_out, or of a float for every score: by pointers and strides, or by a descriptor.

On Hopper, which has a tensor memory accelerator, a descriptor of the whole tensor lets one thread
fetch a tile: no addresses in registers, and what lies beyond an edge arrives as zeros. The accelerator asks for rows that lie
densely, other steps of a multiple of 16 bytes, and at most five dimensions; `describable` says whether a call's layout has that.
The dimension along the rows is the descriptor's last one, wherever it stands in the tensor: keys often come as ``k.transpose(-2, -1)``.

    k = tl.load(k_ptr + offs_n[:, None] * k_stride_n + offs_d[None, :] * k_stride_d)        # pointers
    k = k_desc.load([b0, b1 // 4, start_n, 0]).reshape([BLOCK_N, BLOCK_D])                  # descriptor

A bias [heads, queries, keys] gains most: by pointers a kernel that keeps its keys meets it crosswise and reads two bytes at a time, and the
tile crosses shared memory once more on its way into the layout of the product.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..algebra import simplify
from ..program import Expr, axis, depends, loads
from ..spec import Access, AttentionSpec, dtype_of
from .pieces import Piece

_UNIT = 16
"""Bytes: what addresses and steps have to be multiples of. Elements: by how many the compiler knows steps to be divisible."""
_MOST_DIMENSIONS = 5
_WITHIN = frozenset("ijde")

ROLES: dict[str, tuple[str, str]] = {"q": ("i", "d"), "k": ("j", "d"), "v": ("j", "e"), "do": ("i", "e")}
"""What can be described, and the axes of its tiles; beside them `pairs`."""
_PAIR = "pair"


def pairs(spec: AttentionSpec) -> dict[str, int]:
    """The operands that the programs read in place at (i, j), a float for every score: their numbers by role, ``pair3`` for number 3."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for node in (x for e in (spec.score, spec.weight) for x in loads(e) if x.kind == "float"):
        if row_of(node.args) is not None:
            places = tuple(n for a in ("i", "j") for n, x in enumerate(node.args) if x == axis(a))
            found.setdefault(int(node.attr), set()).add(places)  # type: ignore[arg-type]  # a load names its operand
    return {f"{_PAIR}{number}": number for number, places in found.items() if len(places) == 1}


def row_of(index: Sequence[Expr]) -> int | None:
    """The dimension that the queries run along where one does, another the keys, and nothing else moves within a tile."""
    moved = {n: x for n, x in enumerate(index) if depends(x) & _WITHIN}
    if len(moved) != 2 or set(moved.values()) != {axis("i"), axis("j")}:
        return None
    return next(n for n, x in moved.items() if x == axis("i"))


def boxed(index: Sequence[Expr], own: tuple[str, str]) -> tuple[tuple[int, ...], tuple[Expr, ...]]:
    """The order in which a descriptor takes the dimensions, the one along the second of a tile's axes last, and the index in that order."""
    last = axis(own[1])
    order = tuple(sorted(range(len(index)), key=lambda n: index[n] == last))
    return order, tuple(index[n] for n in order)


def described_pairs(spec: AttentionSpec, roles: Sequence[str]) -> dict[int, str]:
    """Those of `pairs` that are among the roles, by the number of their operand."""
    return {number: role for role, number in pairs(spec).items() if role in roles}


def axes_of(role: str) -> tuple[str, str]:
    """The axes of a role's tiles."""
    return ROLES.get(role, ("i", "j"))


def index_of(spec: AttentionSpec, name: str) -> tuple[Expr, ...]:
    """The index map of a role; grad_out lies as (batch…, i, e). Of a pair that is read at several places, one of them: they differ in the batch alone."""
    if name == "do":
        return tuple(axis(a) for a in spec.out_axes)
    if name.startswith(_PAIR):
        number = pairs(spec)[name]
        return next(x.args for e in (spec.score, spec.weight) for x in loads(e) if x.attr == number and row_of(x.args) is not None)
    access: Access = {"q": spec.query, "k": spec.key, "v": spec.value}[name]
    return tuple(simplify(x) for x in access.index)


def described(spec: AttentionSpec, sizes: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Which of the tensors, by role, a descriptor can describe."""
    return tuple(n for n, t in tensors.items() if describable(index_of(spec, n), axes_of(n), sizes, t))


def describable(index: Sequence[Expr], own: tuple[str, str], sizes: Mapping[str, int], tensor: torch.Tensor) -> bool:
    """Whether tiles along the two axes `own` are boxes of the tensor, in a layout that the accelerator takes.

    A dimension that is longer than its axis would fill the edge of a tile with what lies there, so it does not do.
    """
    row, depth = own
    if not 2 <= len(index) <= _MOST_DIMENSIONS or tensor.numel() == 0:
        return False
    order, index = boxed(index, own)
    tensor = tensor.permute(order)
    rows = [n for n, x in enumerate(index) if x == axis(row)]
    if len(rows) != 1 or index[-1] != axis(depth) or any(depends(x) & _WITHIN for n, x in enumerate(index[:-1]) if n != rows[0]):
        return False
    floats = (torch.float16, torch.bfloat16, *([torch.float32] if own == axes_of(_PAIR) else []))
    if tensor.shape[rows[0]] != sizes[row] or tensor.shape[-1] != sizes[depth] or tensor.dtype not in floats:
        return False
    if tensor.stride(-1) != 1 or (tensor.device.type != "meta" and tensor.data_ptr() % _UNIT):
        return False
    steps = [s * tensor.itemsize for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    return all(s > 0 and s % _UNIT == 0 for s in steps)


def uneven(spec: AttentionSpec, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """The roles whose rows are no multiple of 16 elements apart: of those the compiler does not know that it may read several at once."""
    return tuple(n for n, t in tensors.items() if n in ROLES
                 and any(t.stride(k) % _UNIT for k, x in enumerate(index_of(spec, n)) if ROLES[n][0] in depends(x)))


def dense_uneven(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The same if every tensor lay densely."""
    return tuple(n for n, (_, depth) in ROLES.items() if sizes[depth] % _UNIT)


def dense(spec: AttentionSpec, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The roles that a descriptor could describe if every tensor lay densely: for plans of calls that are not there."""
    halves = {n: spec.operands[a.operand].dtype for n, a in (("q", spec.query), ("k", spec.key), ("v", spec.value))} | {"do": spec.out_dtype}
    found = [n for n, dtype in halves.items() if dtype in ("float16", "bfloat16") and sizes[ROLES[n][1]] * 2 % _UNIT == 0]
    size = lambda number: dtype_of(spec.operands[number].dtype).itemsize
    return (*found, *(n for n, number in pairs(spec).items() if size(number) <= 4 and sizes["j"] * size(number) % _UNIT == 0))


def descriptor(tensor: torch.Tensor, order: Sequence[int], block: Sequence[int]) -> object:
    """Triton's descriptor of a tensor for which `describable` holds, its dimensions in the order of `boxed`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensor = tensor.permute(*order)
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

    def tile(self, masked: bool, piece: Piece) -> str:
        """Some columns of the tile; `masked` where rows may lie beyond the end."""
        row, depth = self.labels
        if self.place:
            load = f"{self.base}.load([{', '.join(self.place)}])"
            return load if len(self.place) == 2 else f"{load}.reshape([BLOCK_{row.upper()}, BLOCK_{depth.upper()}])"
        masks = [m for m, there in ((f"{row}_mask[:, None]", masked), (f"{piece.mask}[None, :]", piece.padded)) if there]
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        return f"tl.load({self.base} + offs_{row}[:, None] * {self.strides}_stride_{row} + {piece.offsets}[None, :] * {self.strides}_stride_{depth}{mask})"


def place_of(index: Sequence[Expr], own: tuple[str, str], label: str, text: Callable[[Expr], str]) -> tuple[str, ...]:
    """Where a tile begins in the descriptor's dimensions: `text` writes what depends on the batch alone."""
    return tuple(f"start_{label}" if x == axis(own[0]) else "0" if x == axis(own[1]) else text(x) for x in boxed(index, own)[1])


def block_of(index: Sequence[Expr], own: tuple[str, str], rows: int, depth: int) -> tuple[int, ...]:
    """The shape of the box in the descriptor's dimensions."""
    return tuple(rows if x == axis(own[0]) else depth if x == axis(own[1]) else 1 for x in boxed(index, own)[1])
