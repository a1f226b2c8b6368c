"""What a kernel is called with: pointers, sizes and strides by name, each knowing how the host finds its number.

Offsets are split in two. Everything that depends on the batch axes only is a scalar of the program and is computed in 64
bits, once. Everything along i, j, d and e is a multiple of one integer that the host works out from the tensor's strides
(`Stride`), so a packed, transposed or repeated operand costs the kernel nothing and Triton sees a unit stride as the constant 1.
"""
from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..program import INTEGER, Expr, integer, walk


class Unsupported(Exception):
    """This attention has no generated kernel; the message says why. Another executor has to take it."""


@dataclass(frozen=True)
class Pointer:
    """A tensor: operand number `operand`, or the name of one that is none (``"out"``, ``"seed"``, ``"grad_out"``). With a
    `block` it is handed over as a descriptor of boxes of that shape, its dimensions in that `order` (see `reads`), else as an address."""

    name: str
    operand: int | str
    block: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Size:
    """The length of an axis, or a run-time integer of the spec."""

    name: str
    axis: str


@dataclass(frozen=True)
class Stride:
    """Σ coefficient(sizes) · stride of a dimension, over `terms`; of operand number `operand`, or of a tensor that is none."""

    name: str
    operand: int | str
    terms: tuple[tuple[int, Expr], ...]


@dataclass(frozen=True)
class Length:
    """The length of dimension `dim` of an operand."""

    name: str
    operand: int
    dim: int


Integer = Size | Stride | Length


class Names:
    """Identifiers: valid, unique, and the same for the same thing each time it is asked for."""

    def __init__(self, reserved: Sequence[str]) -> None:
        self._taken = set(reserved)
        self._known: dict[object, str] = {}

    def of(self, thing: object, hint: str) -> str:
        """The name of `thing`, made from `hint` when it is first asked for."""
        if thing not in self._known:
            base = re.sub(r"\W+", "_", hint).strip("_") or "t"
            base = f"t_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base
            name, count = base, 2
            while name in self._taken:
                name, count = f"{base}_{count}", count + 1
            self._taken.add(name)
            self._known[thing] = name
        return self._known[thing]


class Arguments:
    """Collects the arguments that the emitted code asks for, each once."""

    def __init__(self) -> None:
        self.pointers: dict[str, Pointer] = {}
        self.integers: dict[str, Integer] = {}

    def pointer(self, name: str, operand: int | str) -> str:
        """The argument that is a tensor's address."""
        self.pointers.setdefault(name, Pointer(name, operand))
        return name

    def descriptor(self, name: str, operand: int | str, block: tuple[int, ...], order: tuple[int, ...] = ()) -> str:
        """The argument that describes boxes of a tensor; by default its dimensions stay in their order."""
        self.pointers.setdefault(name, Pointer(name, operand, block, order or tuple(range(len(block)))))
        return name

    def integer(self, argument: Integer) -> str:
        """A number's argument."""
        self.integers.setdefault(argument.name, argument)
        return argument.name

    def ordered(self) -> tuple[tuple[Pointer, ...], tuple[Integer, ...]]:
        """Pointers, then sizes, strides and lengths; each kind in order of first use."""
        rank = {Size: 0, Length: 1, Stride: 2}
        return tuple(self.pointers.values()), tuple(sorted(self.integers.values(), key=lambda a: rank[type(a)]))


def on_host(expr: Expr) -> bool:
    """Whether the host can work an integer out from the sizes alone."""
    return all(x.op in ("const", "size") or x.op in INTEGER for x in walk(expr))


def evaluate(expr: Expr, sizes: Mapping[str, int]) -> int:
    """The number of an integer expression for which `on_host` holds."""
    found = integer(expr, sizes)
    assert found is not None
    return found


def number(argument: Integer, sizes: Mapping[str, int], shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]],
           own: Mapping[str, Sequence[int]]) -> int:
    """What the host passes for an argument; `own` holds the strides of what is not an operand."""
    if isinstance(argument, Size):
        return sizes[argument.axis]
    if isinstance(argument, Length):
        return shapes[argument.operand][argument.dim]
    steps = own[argument.operand] if isinstance(argument.operand, str) else strides[argument.operand]
    return sum(evaluate(coefficient, sizes) * steps[dim] for dim, coefficient in argument.terms)
