"""Lifting rules of operations that compute elements: index of the result → a scalar program.

Each rule is `(lift, value, call, index) -> Expr`; `lift.at(tensor, index)` is the program of an argument's element.
Kinds follow the result's dtype: an argument of another kind is converted, a half-precision one is simply a ``float``.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..program import TRUE, Expr, apply, const, loads, walk, where
from .trace import Call, Value, arguments, aten, number

if TYPE_CHECKING:
    from .lift import Lift

Index = tuple[Expr, ...]
Rule = Callable[["Lift", Value, Call, Index], Expr]
POINTWISE: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Enter a rule for some operations."""
    def enter(one: Rule) -> Rule:
        POINTWISE.update(dict.fromkeys(targets, one))
        return one
    return enter


def element(lift: Lift, x: Any, index: Index) -> Expr:
    """The program of an argument: a broadcast tensor's element, or a number."""
    return lift.at(x, lift.broadcast(x, index)) if isinstance(x, Value) else number(x)


def as_kind(x: Expr, kind: str) -> Expr:
    """Convert between float, int and bool."""
    return x if x.kind == kind else apply(kind, x)


def together(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Two values in the wider of their kinds."""
    kind = next(k for k in ("float", "int", "bool") if k in (a.kind, b.kind))
    return as_kind(a, kind), as_kind(b, kind)


# ---- arithmetic

def _binary(op: str, example: str, *targets: Any) -> None:
    def one(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
        a, b = (as_kind(element(lift, x, index), value.kind) for x in call.args[:2])
        alpha = call.kwargs.get("alpha", 1)
        return apply(op, a, b if alpha == 1 else apply("mul", b, as_kind(number(alpha), value.kind)))
    one.__doc__ = f"elementwise {op}; alpha multiplies the second argument; e.g. `{example}`"
    POINTWISE.update(dict.fromkeys(targets, one))


_binary("add", "torch.add(x, y, alpha=2)", aten.add.Tensor, aten.add.Scalar)
_binary("sub", "x - b", aten.sub.Tensor, aten.sub.Scalar)
_binary("mul", "x * 3", aten.mul.Tensor, aten.mul.Scalar)
_binary("min", "torch.minimum(x, y)", aten.minimum.default)
_binary("max", "torch.maximum(n, n.flip(1))", aten.maximum.default)
_binary("mod", "n % 2", aten.remainder.Tensor, aten.remainder.Scalar)


@rule(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """a ** b; of integers as a product, for a power is a float; e.g. `x ** 2`, `n ** 3`"""
    a, b = (as_kind(element(lift, x, index), value.kind) for x in call.args[:2])
    if value.kind == "float":
        return apply("pow", a, b)
    if b.op != "const" or not 1 <= b.attr <= 4:  # type: ignore[operator]
        raise lift.no_rule("a power of integers")
    out = a
    for _ in range(int(b.attr) - 1):  # type: ignore[arg-type]
        out = apply("mul", out, a)
    return out


@rule(aten.div.Tensor, aten.div.Scalar)
def _div(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """a / b; e.g. `x / 3`, `n / 2`"""
    return apply("div", *(as_kind(element(lift, x, index), "float") for x in call.args[:2]))


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """a // b; truncation towards zero only where it is the same as the floor; e.g. `n // 2`, `x // 0.5`"""
    a, b = (as_kind(element(lift, x, index), value.kind) for x in call.args[:2])
    mode = call.kwargs.get("rounding_mode")
    if value.kind == "float":
        if mode == "floor":
            return apply("floor", apply("div", a, b))
        raise lift.no_rule(f"division with rounding mode {mode}")
    if mode == "floor" or lift.simplify(apply("and", apply("ge", a, const(0)), apply("ge", b, const(1)))) == TRUE:
        return apply("floordiv", a, b)
    raise lift.no_rule(f"division with rounding mode {mode}")


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """fmod(a, b), the remainder with the sign of a: a % b where a is not negative; e.g. `torch.arange(5).fmod(3)`"""
    a, b = (as_kind(element(lift, x, index), value.kind) for x in call.args[:2])
    if value.kind != "int" or lift.simplify(apply("and", apply("ge", a, const(0)), apply("ge", b, const(1)))) != TRUE:
        raise lift.no_rule("fmod of what may be negative")
    return apply("mod", a, b)


def _unary(op: str, kind: str | None, *targets: Any) -> None:
    def one(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
        x = element(lift, call.args[0], index)
        return apply(op, as_kind(x, kind or value.kind))
    source = "m" if op == "not" else "x" if kind is None or op == "isnan" else "x.abs()"
    one.__doc__ = f"elementwise {op}; e.g. `torch.{'logical_not' if op == 'not' else op}({source})`"
    POINTWISE.update(dict.fromkeys(targets, one))


for _op in ("exp", "log", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos"):
    _unary(_op, "float", getattr(aten, _op).default)
for _op in ("neg", "abs", "sign"):
    _unary(_op, None, getattr(aten, _op).default)
_unary("isnan", "float", aten.isnan.default)
_unary("not", "bool", aten.logical_not.default)


@rule(aten.floor.default, aten.ceil.default, aten.round.default)
def _rounding(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """floor(x); nothing to do for integers; e.g. `x.floor()`, `x.round()`"""
    x = element(lift, call.args[0], index)
    return apply(call.target._schema.name.split("::")[1], x) if x.kind == "float" else x


@rule(aten.reciprocal.default)
def _reciprocal(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """1 / x; e.g. `x.reciprocal()`"""
    return apply("div", const(1.0), as_kind(element(lift, call.args[0], index), "float"))


@rule(aten.relu.default)
def _relu(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """max(x, 0); e.g. `torch.ops.aten.relu.default(x)`"""
    x = element(lift, call.args[0], index)
    return apply("max", x, as_kind(const(0), x.kind))


@rule(aten.clamp.default, aten.clamp.Tensor)
def _clamp(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """min(max(x, low), high); e.g. `x.clamp(-1, 1)`, `n.clamp(min=1)`"""
    x = as_kind(element(lift, call.args[0], index), value.kind)
    low, high = (*call.args[1:], *(call.kwargs.get(k) for k in ("min", "max")[len(call.args) - 1:]))
    if low is not None:
        x = apply("max", x, as_kind(element(lift, low, index), value.kind))
    return x if high is None else apply("min", x, as_kind(element(lift, high, index), value.kind))


# ---- comparisons, logic, choice

_ROUNDED = (torch.float16, torch.bfloat16, torch.float64)
_ROUNDED_BESIDE_64 = (torch.float16, torch.bfloat16, torch.float32)
_EXACT = 256
"""Integers up to here are themselves in every float dtype."""


def _parts(x: Expr) -> set[str]:
    return {n.op for n in walk(x)}


def _decides(lift: Lift, value: Any, x: Expr, other: Expr | None) -> None:
    """Raise where a choice hangs on a float of another precision than a program's: which positions are equal in bfloat16, say.

    A score may be rounded, and one integer that was only cast, negated or shifted is safe beside a small one.
    """
    if not isinstance(value, Value) or x.kind != "float" or x.op == "const" or {"dot", "weight", "sum", "maximum"} & _parts(x):
        return
    if not lift.rounds(value, _ROUNDED_BESIDE_64 if lift.wide else _ROUNDED):
        return
    varying = {n for n in walk(x) if n.op in ("load", "axis", "size")} - {a for n in loads(x) for i in n.args for a in walk(i)}
    whole = all(n.kind != "float" or n.op in ("add", "sub", "neg", "float") or n.op == "const" and n.attr == int(n.attr)  # type: ignore[arg-type]
                for n in walk(x) if n.op != "const" or math.isfinite(n.attr))  # type: ignore[arg-type]
    small = other is not None and other.op == "const" and abs(other.attr) <= _EXACT and other.attr == int(other.attr)  # type: ignore[arg-type]
    if not small or not whole or len(varying) > 1:
        raise lift.no_rule("a choice by a rounded number")


def _comparison(op: str) -> None:
    def one(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
        a, b = call.args[:2]
        if isinstance(b, int) and a.kind == "int" and not a.dtype.is_complex and not torch.iinfo(a.dtype).min <= b <= torch.iinfo(a.dtype).max:
            raise lift.no_rule(f"{a.dtype} compared with {b}")              # which wraps around first
        x, y = element(lift, a, index), element(lift, b, index)
        _decides(lift, a, x, y)
        _decides(lift, b, y, x)
        return apply(op, *together(x, y))
    one.__doc__ = f"elementwise {op}; e.g. `torch.{op}(x, y)`, `torch.{op}(n, 1)`"
    overloads = getattr(aten, op)
    POINTWISE.update(dict.fromkeys((overloads.Tensor, overloads.Scalar), one))


for _op in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_op)


def _logical(op: str, *targets: Any) -> None:
    def one(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
        args = [element(lift, x, index) for x in call.args]
        if value.kind != "bool":
            raise lift.no_rule("bit operations on integers")
        return apply(op, *(as_kind(x, "bool") for x in args))
    one.__doc__ = f"logical {op}; of bools only; e.g. `{'~m' if op == 'not' else f'torch.logical_{op}(m, m[:, :1])'}`"
    POINTWISE.update(dict.fromkeys(targets, one))


_logical("and", aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.logical_and.default)
_logical("or", aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.logical_or.default)
_logical("xor", aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.logical_xor.default)
_logical("not", aten.bitwise_not.default)


@rule(aten.where.self)
def _where(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """where(c, a, b); e.g. `torch.where(m, x, y)`, `x.masked_fill(m, -1.0)`"""
    c, a, b = (element(lift, x, index) for x in call.args)
    return where(as_kind(c, "bool"), as_kind(a, value.kind), as_kind(b, value.kind))


@rule(aten._to_copy.default)
def _cast(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.to(dtype): a change of kind; between floats a program knows only one precision; e.g. `n.float()`, `m.long()`"""
    source, x = call.args[0], lift.at(call.args[0], index)
    if value.kind != "float":
        _decides(lift, source, x, const(0.0) if value.kind == "bool" else None)
    elif source.dtype == torch.float64 != value.dtype and x.op not in ("load", "const") and not {"dot", "weight", "sum", "maximum"} & _parts(x):
        raise lift.no_rule("arithmetic in float64")     # differences of times, say: in float32 nothing is left of them
    return as_kind(x, value.kind)


# ---- makers

@rule(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.fill.Scalar, aten.new_full.default)
def _full(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """The number it is filled with; e.g. `torch.full((3, 4), 2.5)`, `torch.full_like(x, 3)`"""
    fill = call.args[0] if call.target is aten.scalar_tensor.default else call.args[2] if call.target is aten.new_full.default else call.args[1]
    return as_kind(number(fill), value.kind)


@rule(aten.arange.start_step)
def _arange(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """arange(a, b, c)[i] = a + c·i; e.g. `torch.arange(1, 9, 2)`, `torch.arange(3.0)`"""
    start, _end, step = arguments(call, 3, 1)
    at = as_kind(index[0], value.kind)
    return apply("add", as_kind(number(start), value.kind), apply("mul", as_kind(number(step), value.kind), at))


# ---- the chain itself

@rule(aten.native_dropout.default)
def _dropout(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """dropout(x)[i] = x[i] · keep(p), the factor 0 or 1/(1-p)"""
    source, p, train = call.args
    if value.output != 0:
        raise lift.no_rule("dropout's mask")
    x = lift.at(source, index)
    if not train or p == 0:
        return x
    return apply("mul", x, lift.keep(value, index, float(p)))


@rule(aten._softmax.default, aten._safe_softmax.default)
def _softmax(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """The weight of the attention, if the axis is the one that the values are summed over"""
    return lift.softmax(value, call, index)


@rule(aten.bmm.default, aten.mm.default)
def _product(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """A raw dot product"""
    return lift.dot(value, call, index)
