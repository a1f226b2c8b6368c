"""Lifting rules of operations that only move elements: index of the result → the tensor read and the index there.

Each rule is `(lift, value, call, index) -> (Value, index)`. Together with `pointwise` this is the table that
defines what attnfuse understands; docs/add-a-rule.md shows how to extend it.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..program import Expr, apply, const
from .trace import Call, Value, arguments, aten, length, number

if TYPE_CHECKING:
    from .lift import Lift

Index = tuple[Expr, ...]
ViewRule = Callable[["Lift", Value, Call, Index], tuple[Value, Index]]
VIEWS: dict[Any, ViewRule] = {}
COPIES = frozenset({aten.clone.default, aten.expand.default, aten.repeat.default, aten.lift_fresh_copy.default})
"""Of these, the ones that cost a copy or, like expand, a gradient of the expanded size: worth reading through."""


def view(*targets: Any) -> Callable[[ViewRule], ViewRule]:
    """Enter a rule for some operations."""
    def enter(rule: ViewRule) -> ViewRule:
        VIEWS.update(dict.fromkeys(targets, rule))
        return rule
    return enter


@view(aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)
def _same(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x.clone()[i] = x[i]; e.g. `x.clone()`"""
    return call.args[0], index


@view(aten.permute.default)
def _permute(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x.permute(1, 0)[i, j] = x[j, i]; e.g. `x.permute(1, 0)`"""
    source, order = call.args
    where = [o % len(order) for o in order]
    return source, tuple(index[where.index(k)] for k in range(len(order)))


@view(aten.expand.default)
def _expand(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x of shape (1, n): x.expand(m, n)[i, j] = x[0, j]; e.g. `x[:1].expand(5, 4)`"""
    return call.args[0], lift.broadcast(call.args[0], index)


@view(aten.unsqueeze.default)
def _unsqueeze(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x.unsqueeze(0)[0, i] = x[i]; e.g. `x.unsqueeze(1)`"""
    source, dim = call.args
    dim %= len(index)
    return source, index[:dim] + index[dim + 1:]


@view(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x of shape (1, n): x.squeeze(0)[i] = x[0, i]; e.g. `x[:1].squeeze(0)`, `x[:, 2:3].squeeze()`"""
    source = call.args[0]
    rank = len(source.shape)
    dims = range(rank) if len(call.args) == 1 else call.args[1] if isinstance(call.args[1], (list, tuple)) else [call.args[1]]
    gone = {d % rank for d in dims if rank and source.shape[d % rank] == const(1)}
    rest = iter(index)
    return source, tuple(const(0) if k in gone else next(rest) for k in range(rank))


@view(aten.select.int)
def _select(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x.select(0, 3)[i] = x[3, i]; e.g. `x.select(1, 3)`, `x[-1]`"""
    source, dim, at = call.args
    dim %= len(source.shape)
    return source, (*index[:dim], _wrapped(lift, number(at), source.shape[dim]), *index[dim:])


@view(aten.slice.Tensor)
def _slice(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x[2::3][i] = x[2 + 3·i]; e.g. `x[1:, ::2]`, `x[-2:]`"""
    source, dim, start, end, step = arguments(call, 5, 0, None, None, 1)
    dim %= len(source.shape)
    if step == 1 and (end is None or isinstance(end, int) and end >= sys.maxsize):     # what is left of the end, however far it counts
        begin = lift.simplify(apply("sub", source.shape[dim], value.shape[dim]))
    else:
        begin = clamped(lift, number(start or 0), source.shape[dim])
    at = lift.simplify(apply("add", begin, apply("mul", const(step), index[dim])))
    return source, (*index[:dim], at, *index[dim + 1:])


def _wrapped(lift: Lift, at: Expr, size: Expr) -> Expr:
    """An index that may count from the end."""
    negative = lift.simplify(apply("lt", at, const(0)))
    return lift.simplify(apply("where", negative, apply("add", at, size), at))


def clamped(lift: Lift, start: Expr, size: Expr) -> Expr:
    """Where a slice begins: it may count from the end, and stops at either end."""
    begin = lift.simplify(apply("min", _wrapped(lift, start, size), size))
    return begin if start.op == "const" and start.attr >= 0 else lift.simplify(apply("max", const(0), begin))  # type: ignore[operator]


@view(aten.split_with_sizes.default)
def _split_with_sizes(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x.split([2, 3])[1][i] = x[2 + i]; e.g. `x.split([1, 3], 1)[1]`"""
    source, sizes, dim = arguments(call, 3, 0)
    start: Expr = const(0)
    for s in sizes[:value.output]:
        start = apply("add", start, length(s))
    return _shifted(lift, source, dim, start, index)


def _shifted(lift: Lift, source: Value, dim: int, start: Expr, index: Index) -> tuple[Value, Index]:
    dim %= len(source.shape)
    return source, (*index[:dim], lift.simplify(apply("add", start, index[dim])), *index[dim + 1:])


@view(aten.flip.default)
def _flip(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x of length n: x.flip(0)[i] = x[n - 1 - i]; e.g. `x.flip(1)`"""
    source, dims = call.args
    out = list(index)
    for d in dims:
        out[d] = lift.simplify(apply("sub", apply("sub", source.shape[d], const(1)), out[d]))
    return source, tuple(out)


@view(aten.repeat.default)
def _repeat(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x of length n: x.repeat(3)[i] = x[i % n]; e.g. `x.repeat(2, 3)`"""
    source = call.args[0]
    own = index[len(index) - len(source.shape):]
    return source, tuple(lift.simplify(apply("mod", x, s)) for x, s in zip(own, source.shape, strict=True))


@view(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(lift: Lift, value: Value, call: Call, index: Index) -> tuple[Value, Index]:
    """x of shape (m, n): x.view(m·n)[i] = x[i // n, i % n]; e.g. `x.view(12)`, `x.view(2, 6)`"""
    source = call.args[0]
    return source, reshaped(lift, value.shape, source.shape, index)


def reshaped(lift: Lift, outer: Sequence[Expr], inner: Sequence[Expr], index: Index) -> Index:
    """Index into `inner` of the element at `index` of `outer`, both of the same number of elements.

    Dimensions are taken in groups of equal product, so that untouched ones stay untouched:
    (b, t, h·d) → (b, t, h, d) reads only the last two. Dimensions of length 1 carry no information.
    """
    out: list[Expr] = [const(0)] * len(inner)
    a = [k for k, s in enumerate(outer) if s != const(1)]
    b = [k for k, s in enumerate(inner) if s != const(1)]
    while a and b:
        left, right = [a.pop(0)], [b.pop(0)]
        while True:
            here, there = product(lift, [outer[k] for k in left]), product(lift, [inner[k] for k in right])
            if here == there:
                break
            if b and (not a or _divides(lift, there, here)):
                right.append(b.pop(0))
            elif a:
                left.append(a.pop(0))
            else:
                raise lift.no_rule("view of lengths that do not factor")
        _group(lift, [outer[k] for k in left], [index[k] for k in left], [inner[k] for k in right], right, out)
    return tuple(out)


def _group(lift: Lift, outer: list[Expr], index: list[Expr], inner: list[Expr], places: list[int], out: list[Expr]) -> None:
    """One group: flatten its outer index and take it apart again by the inner lengths."""
    flat: Expr = const(0)
    for s, x in zip(outer, index, strict=True):
        flat = lift.simplify(apply("add", apply("mul", flat, s), x))
    for n, place in enumerate(places):
        step = product(lift, inner[n + 1:])
        at = lift.simplify(apply("floordiv", flat, step)) if step != const(1) else flat
        out[place] = at if n == 0 else lift.simplify(apply("mod", at, inner[n]))


def product(lift: Lift, lengths: Sequence[Expr]) -> Expr:
    """How many elements a tensor of these lengths has."""
    out: Expr = const(1)
    for s in lengths:
        out = apply("mul", out, s)
    return lift.simplify(out)


def _divides(lift: Lift, part: Expr, whole: Expr) -> bool:
    """Whether `part` < `whole` in the sense that more inner lengths are needed: numbers by size, symbols by division."""
    if part.op == "const" and whole.op == "const":
        return part.attr < whole.attr  # type: ignore[operator]
    return lift.simplify(apply("mod", whole, part)) == const(0)
