"""Abstract interpretation of a recorded slice: every tensor is a function of its indices, pulled on demand.

`Lift.at(tensor, index)` is the scalar program of one element. Starting from an element of the value product it unfolds
the weights, finds the softmax, unfolds the scores and stops at the raw dot product and at tensors that must be loaded.
Nothing is matched: what comes out is the meaning of what was written, or a `Refused`.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from ..algebra import Algebra
from ..program import WEIGHT, Expr, apply, axis, const, depends, load, loads, walk
from ..refusal import Reason, Refused
from . import manual, selection  # noqa: F401  (their rules enter the table)
from .pointwise import POINTWISE, as_kind, element
from .trace import Call, Value, aten, first_name
from .views import COPIES, VIEWS

Index = tuple[Expr, ...]
SOFTMAXES = frozenset({aten._softmax.default, aten._safe_softmax.default})
_LARGEST = 4000
"""Distinct nodes of a program beyond which a tensor is loaded instead."""


class NoRule(Exception):
    """An operation cannot be read through; the tensor must be loaded, here or further up."""


@dataclass
class Softmax:
    """The softmax that was found: its result, the index outside the key axis, the key axis's place and offset."""

    value: Value
    call: Call
    index: Index
    dim: int
    offset: int


@dataclass
class Level:
    """One way to hand over an operand of a product: a tensor, the index of its element, and the factor left outside."""

    value: Value
    index: Index
    factor: Expr
    saved: int = 0                   # copies, repeats, casts and factors left behind on the way here
    narrowed: torch.dtype | None = None


@dataclass
class Lift:
    """The state of one analysis.

    Attributes:
        algebra: knows the lengths of the axes.
        opaque: numbers of values that are to be loaded, not read through.
        price: the axes (query, key); once they are known, a tensor is loaded where that moves fewer bytes than its formula.
        values: the loaded ones, by number. unread: why they were not read through.
        found: the softmax whose weights are unfolded. rows: the same met under a sum over the keys; it must be the same.
    """

    algebra: Algebra
    opaque: set[int] = field(default_factory=set)
    price: tuple[str, str] | None = None
    found: Softmax | None = None
    rows: list[Softmax] = field(default_factory=list)
    dots: list[tuple[Value, Call, Index]] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    unread: dict[int, str] = field(default_factory=dict)
    streams: list[tuple[int, Index]] = field(default_factory=list)
    wide: bool = False               # the scores are float64: float32 rounds, and float64 does not
    _rounds: dict[int, bool] = field(default_factory=dict)
    _memo: dict[tuple[int, Index], Expr] = field(default_factory=dict)
    _fresh: int = 0

    def simplify(self, expr: Expr) -> Expr:
        """Normal form under what is known of the lengths."""
        return self.algebra.simplify(expr)

    def no_rule(self, detail: str) -> NoRule:
        """The exception for a rule that meets what it does not cover."""
        return NoRule(detail)

    def fresh_axis(self, length: Expr) -> str:
        """A bound variable running over `length`."""
        self._fresh += 1
        name = f"t{self._fresh}"
        self.algebra.lengths[name] = length
        return name

    def broadcast(self, x: Value, index: Index) -> Index:
        """The index into a tensor that was broadcast to a larger shape: trailing dimensions, 0 where its length is 1."""
        own = index[len(index) - len(x.shape):] if x.shape else ()
        return tuple(const(0) if s == const(1) else e for s, e in zip(x.shape, own, strict=True))

    # ---- elements

    def at(self, value: Value, index: Index) -> Expr:
        """The program of one element; raises NoRule where it is neither computable nor loadable."""
        index = tuple(const(0) if s == const(1) else x for s, x in zip(value.shape, index, strict=True))
        key = (value.number, index)
        if key not in self._memo:
            self._memo[key] = self._at(value, index)
        return self._memo[key]

    def readings(self, value: Value) -> dict[Index, Expr]:
        """The elements of a tensor that have been met as functions of the key axis itself, by index: not those under a sum over it."""
        alone = self.algebra.lengths["j"] == const(1)
        axes = lambda index: frozenset().union(*(depends(x) for x in index))
        return {index: found for (number, index), found in self._memo.items() if number == value.number
                and ("j" in axes(index) or alone) and not any(a.startswith("t") for a in axes(index))}

    def _at(self, value: Value, index: Index) -> Expr:
        if value.constant is not None and value.constant.numel() == 1 and not value.dtype.is_complex:
            return const(value.constant.item())
        if value.call is None or value.number in self.opaque:
            return self.load(value, index, "an input of the chain")
        try:
            out = self._computed(value, value.call, index)
            if sum(1 for _ in walk(out)) > _LARGEST:
                raise NoRule("the formula grew too large")
        except NoRule as e:
            return self.load(value, index, str(e))
        if value.stopped:                              # of scores: to be found again where a maximum cancels, or else in the way
            return Expr("detached", (out,)) if {"dot", "weight"} & depends(out) else self.load(value, index, "")
        return self._cheaper(value, index, out)

    def _computed(self, value: Value, call: Call, index: Index) -> Expr:
        if call.target in VIEWS:
            return self.at(*VIEWS[call.target](self, value, call, index))
        rule = POINTWISE.get(call.target)
        if rule is None:
            raise NoRule(f"{call.target} has no rule")
        out = self.simplify(rule(self, value, call, index))
        if value.kind == "int" and not value.dtype.is_complex and not self._fits(out, value.dtype):
            raise NoRule(f"{value.dtype} that may wrap around")
        return out

    def _fits(self, out: Expr, dtype: torch.dtype) -> bool:
        """Whether an integer is proven to lie in the range of its dtype: programs know one kind of integer, and it does not wrap."""
        if dtype == torch.int64 or out.kind == "bool":
            return True
        bounds = self.algebra.bounds(self.algebra.poly(as_kind(out, "int")))
        low, high = (None if x is None else self.algebra.extreme(x, sign) for x, sign in zip(bounds, (-1, 1), strict=True))
        return low is not None and high is not None and torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max

    def _cheaper(self, value: Value, index: Index, out: Expr) -> Expr:
        """Formula or load? A formula over both query and key is kept while it loads no more bytes a score than the tensor."""
        if self.price is None or not value.nodes or {"dot", "weight", "keep"} & depends(out):
            return out
        both = [x for x in loads(out) if set(self.price) <= depends(x)]
        cost = sum(self.values[int(x.attr)].dtype.itemsize for x in both)  # type: ignore[arg-type]
        return self.load(value, index, "") if cost > value.dtype.itemsize else out

    def load(self, value: Value, index: Index, why: str) -> Expr:
        """An element read from memory: only of a tensor that the original graph holds."""
        if not value.nodes:
            raise NoRule(why)
        if value.dtype.is_complex or value.dtype.itemsize > 8:
            raise NoRule(f"a tensor of {value.dtype}")
        self.values[value.number] = value
        self.unread[value.number] = why
        if value.kind == "int" and value.dtype != torch.int64:
            self.algebra.loaded[value.number] = (torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max)
        return load(value.number, index, value.kind)  # type: ignore[arg-type]

    def rounds(self, value: Value, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Whether a tensor is computed through one of these dtypes (what is loaded is what it is, unless it is too wide)."""
        if value.number not in self._rounds:
            call = None if value.number in self.opaque else value.call
            found = value.dtype == torch.float64 and not self.wide
            if call is not None and not found:
                inside = [a for a in tree_leaves((call.args, call.kwargs)) if isinstance(a, Value)]
                found = value.dtype in dtypes and call.target not in VIEWS or any(self.rounds(a, dtypes) for a in inside)
            self._rounds[value.number] = found
        return self._rounds[value.number]

    # ---- what the special rules call

    def softmax(self, value: Value, call: Call, index: Index) -> Expr:
        """A softmax met while unfolding the weights: it must run over j, and be the only one."""
        dim = int(call.args[1]) % len(index)
        bound = [axis(a) for a in depends(index[dim]) if a.startswith("t")]
        if len(bound) == 1 and not any("j" in depends(x) for x in index):
            offset = self.simplify(apply("sub", index[dim], bound[0]))
            if offset.op == "const":                   # one weight of those that a sum or a question runs over
                self.rows.append(Softmax(value, call, index, dim, int(offset.attr)))  # type: ignore[arg-type]
                return Expr("weight", (bound[0],))
        # Where there is one key its index is 0, and j says nothing.
        alone = self.algebra.lengths["j"] == const(1) and index[dim].op == "const"
        offset = index[dim] if alone else self.simplify(apply("sub", index[dim], axis("j")))
        others = tuple(x for k, x in enumerate(index) if k != dim)
        if offset.op != "const" or any("j" in depends(x) for x in others):
            if bound:
                raise Refused(Reason.WEIGHT_PROGRAM, first_name(value), "lift", "a sum or maximum over the weights")
            raise Refused(Reason.SOFTMAX_AXIS, first_name(value), "lift", f"softmax over dimension {dim}")
        here = Softmax(value, call, index, dim, int(offset.attr))  # type: ignore[arg-type]
        if self.found is not None and (self.found.value is not value or self.found.index != index):
            raise NoRule("weights of more than one softmax")
        self.found = here
        return WEIGHT

    def dot(self, value: Value, call: Call, index: Index) -> Expr:
        """A product met while unfolding the scores: a leaf, numbered until it is known which one is the attention's."""
        for n, (known, _, at) in enumerate(self.dots):
            if known is value and at == index:
                return Expr("dot", attr=n)
        self.dots.append((value, call, index))
        return Expr("dot", attr=len(self.dots) - 1)

    def keep(self, value: Value, index: Index, p: float) -> Expr:
        """Dropout's factor. Streams are numbered by the operation that drops, so that two dropouts are independent."""
        if (value.number, index) not in self.streams:
            self.streams.append((value.number, index))
        return Expr("keep", attr=(self.streams.index((value.number, index)), p))

    # ---- operands of a product

    def levels(self, value: Value, index: Index, depth: str) -> list[Level]:
        """Every tensor through which a product's operand can be read: itself, and what lies behind views, copies, widening
        casts, repeats and factors that do not vary along `depth`. Shallowest first."""
        out: list[Level] = []
        here = Level(value, self._ones(value, index), const(1.0))
        while True:
            out.append(here)
            deeper = self._deeper(here, depth)
            if deeper is None:
                return out
            here = deeper

    def _ones(self, value: Value, index: Index) -> Index:
        return tuple(const(0) if s == const(1) else x for s, x in zip(value.shape, index, strict=True))

    def _deeper(self, here: Level, depth: str) -> Level | None:
        call = here.value.call
        if call is None or here.value.number in self.opaque or here.value.stopped:
            return None
        try:
            if call.target in VIEWS:
                source, index = VIEWS[call.target](self, here.value, call, here.index)
                costs = call.target in COPIES and not (call.target is aten.expand.default and source.shape == here.value.shape)
                return Level(source, self._ones(source, index), here.factor, here.saved + costs, here.narrowed)
            if call.target is aten._to_copy.default:
                return self._through_cast(here, call.args[0])
            if call.target in _FACTORS:
                return self._through_factor(here, call, depth)
        except (NoRule, Refused):
            return None
        return None

    def _through_cast(self, here: Level, source: Value) -> Level | None:
        if not source.dtype.is_floating_point or not here.value.dtype.is_floating_point or source.device != here.value.device:
            return None
        narrowing = source.dtype.itemsize > here.value.dtype.itemsize or {source.dtype, here.value.dtype} == {torch.float16, torch.bfloat16}
        if narrowing and here.value.nodes:
            return None                               # reading the narrow copy moves fewer bytes
        if narrowing:
            return Level(source, here.index, here.factor, here.saved, here.value.dtype)
        return Level(source, here.index, here.factor, here.saved + (source.dtype != here.value.dtype), here.narrowed)

    def _through_factor(self, here: Level, call: Call, depth: str) -> Level | None:
        """x · c and x / c where c does not vary along the summed axis: c leaves the sum."""
        op = _FACTORS[call.target]
        if op == "neg":
            return Level(call.args[0], here.index, self.simplify(apply("neg", here.factor)), here.saved + 1, here.narrowed)
        a, b = call.args[:2]
        sides = [(a, b), (b, a)] if op == "mul" and isinstance(b, Value) else [(a, b)]
        for main, other in sides:
            if not isinstance(main, Value) or not main.dtype.is_floating_point or len(main.shape) != len(here.index):
                continue
            try:
                c = self.simplify(as_kind(element(self, other, here.index), "float"))
            except NoRule:
                continue
            if depth in depends(c) or {"dot", "weight", "keep"} & depends(c):
                continue
            factor = self.simplify(apply(op, here.factor, c))
            return Level(main, self.broadcast(main, here.index), factor, here.saved + 1, here.narrowed)
        return None


_FACTORS = {aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div", aten.neg.default: "neg"}
