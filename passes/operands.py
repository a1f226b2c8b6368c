"""The operands and integers of one call of an op: numbered as they are met, under the names that specs give their axes."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..program import Expr, load, loads, rewrite, size
from ..spec import Access, AttentionSpec, Operand
from .lift import Level
from .trace import Value, first_name


@dataclass(frozen=True)
class Call:
    """A spec and how to call its op: which of the slice's nodes are the operands (numbered inputs first, then body), to which dtype
    they are cast, the symbolic floats that follow them as tensors of no dimensions, and the integers of the call over the graph's
    length symbols."""

    spec: AttentionSpec
    operands: tuple[int, ...]
    casts: tuple[torch.dtype | None, ...]
    numbers: tuple[Expr, ...]
    sizes: tuple[Expr, ...]


@dataclass(frozen=True)
class Frame:
    """What all calls of a slice share: the values that were loaded, by number; the axes under their final names, and the lengths
    of those in the order of the call."""

    values: Mapping[int, Value]
    rename: Mapping[Expr, Expr]
    batch: tuple[str, ...]
    lengths: Mapping[str, Expr]


@dataclass
class Operands:
    """The tensors of one call. A tensor that is read in two precisions is two operands; a float that Dynamo keeps symbolic is
    handed over as a tensor of no dimensions."""

    frame: Frame
    roles: tuple[Level, ...]
    programs: Sequence[Expr]
    tensors: list[Value] = field(default_factory=list)
    casts: list[torch.dtype | None] = field(default_factory=list)
    _number: dict[tuple[int, torch.dtype | None], int] = field(default_factory=dict)
    _scalars: dict[Expr, str] = field(default_factory=dict)
    _floats: dict[Expr, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for level in self.roles:
            self._enter(level.value, level.narrowed)
        for x in (x for e in self.programs for x in loads(e)):
            self._enter(self.frame.values[int(x.attr)], None)  # type: ignore[arg-type]
        lengths = self.frame.lengths
        self._symbols = {s: name for name in reversed(list(lengths)) for s in [lengths[name]] if s.op == "size"}

    def _enter(self, value: Value, cast: torch.dtype | None) -> None:
        if (value.number, cast) not in self._number:
            self._number[value.number, cast] = len(self.tensors)
            self.tensors.append(value)
            self.casts.append(cast)

    def final(self, expr: Expr) -> Expr:
        """A program or index under final names and numbers."""
        return rewrite(expr, self._final)

    def _final(self, x: Expr) -> Expr | None:
        if x.op == "load":
            return load(self._number[int(x.attr), None], x.args, x.kind)  # type: ignore[arg-type]
        if x.op == "size":
            if x.kind == "float":
                self._floats.setdefault(x, len(self.tensors) + len(self._floats))
                return load(self._floats[x], (), "float")
            return size(self._symbols[x]) if x in self._symbols else size(self._scalars.setdefault(x, f"n{len(self._scalars)}"))
        return self.frame.rename.get(x)

    def access(self, level: Level) -> Access:
        """Where a role reads its operand."""
        return Access(self._number[level.value.number, level.narrowed], tuple(self.final(x) for x in level.index))

    def call(self, local: Mapping[int, int], **fields: Any) -> Call:
        """The call of the op whose spec has these fields (what they hold went through `final` and `access`); `local` numbers nodes."""
        wide = lambda n: self.casts[n] or self.tensors[n].dtype
        labels = zip(_labels(self.tensors, self.roles), self.tensors, strict=True)
        operands = [Operand(name, str(wide(n)).removeprefix("torch."), len(t.shape)) for n, (name, t) in enumerate(labels)]
        spec = AttentionSpec(batch=self.frame.batch, scalars=tuple(self._scalars.values()),
                             operands=(*operands, *(Operand(f"c{n}", "float64", 0) for n in range(len(self._floats)))), **fields)
        return Call(spec, tuple(local[id(t.nodes[0])] for t in self.tensors), tuple(self.casts), tuple(self._floats),
                    tuple(self.frame.lengths[a] for a in spec.axes) + tuple(self._scalars))


def _labels(tensors: Sequence[Value], roles: Sequence[Level]) -> list[str]:
    """Short names to print: the roles, and for captured tensors what their users called them."""
    out: list[str] = []
    for t in tensors:
        role = next((r for r, level in zip("qkv", roles) if level.value is t), None)
        name = role or re.sub(r"_?\d+$", "", re.sub(r".*_(parameters|buffers|kwargs|args)_", "", first_name(t).strip("_"))).strip("_")
        name = re.sub(r"^l_", "", name) or "t"
        out.append(name if name not in out else f"{name}{sum(o.rstrip('0123456789') == name for o in out) + 1}")
    return out
