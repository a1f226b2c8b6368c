"""Lifting rules of operations that join tensors or choose elements: concatenation, padding, assignment, indexing, tables.

As in `pointwise`, a rule is `(lift, value, call, index) -> Expr`. What is chosen under a condition is loaded at an address that
exists wherever the condition does not hold (`_inside`).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..program import FALSE, TRUE, Expr, apply, axis, const, depends, loads, where
from .pointwise import Index, as_kind, element, rule
from .trace import Call, Value, arguments, aten, length, number
from .views import clamped

if TYPE_CHECKING:
    from .lift import Lift


@rule(aten.cat.default)
def _cat(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """cat([x, y])[i] = x[i] where i < len(x), else y[i - len(x)]; e.g. `torch.cat([x, y], 1)`, `torch.cat([b, x[0]])`"""
    tensors, dim = arguments(call, 2, 0)
    tensors = [t for t in tensors if t.shape != (const(0),) or value.shape == (const(0),)]       # legacy empty tensors
    dim %= len(value.shape)
    starts: list[Expr] = [const(0)]
    for t in tensors[:-1]:
        starts.append(lift.simplify(apply("add", starts[-1], t.shape[dim])))
    out: Expr | None = None
    for t, start in reversed(list(zip(tensors, starts, strict=True))):
        end = apply("add", start, t.shape[dim])
        inside = lift.simplify(apply("lt", index[dim], end))
        if inside == FALSE:
            continue
        at = lift.simplify(apply("sub", index[dim], start))
        piece = as_kind(_inside(lift, t, (*index[:dim], at, *index[dim + 1:])), value.kind)
        out = piece if out is None else where(inside, piece, out)
    if out is None:
        raise lift.no_rule("an index outside of a concatenation")
    return out


@rule(aten.constant_pad_nd.default)
def _pad(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """pad(x, (a, b), c)[i] = x[i - a] where 0 <= i - a < len(x), else c; e.g. `torch.nn.functional.pad(x, (1, 2), value=7.0)`,
    `torch.nn.functional.pad(x, (-1, 1))`"""
    source, pads, fill = arguments(call, 3, 0)
    inside: Expr = TRUE
    at = list(index)
    for k in range(len(pads) // 2):
        dim = len(index) - 1 - k
        at[dim] = lift.simplify(apply("sub", index[dim], length(pads[2 * k])))
        inside = apply("and", inside, apply("and", apply("ge", at[dim], const(0)), apply("lt", at[dim], source.shape[dim])))
    inside = lift.simplify(inside)
    if inside == FALSE:
        return as_kind(number(fill), value.kind)
    return where(inside, as_kind(_inside(lift, source, tuple(at)), value.kind), as_kind(number(fill), value.kind))


@rule(aten.slice_scatter.default)
def _slice_scatter(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """y = x.clone(); y[a:b] = s  →  y[i] = s[i - a] where a <= i < b, else x[i]; e.g. `torch.slice_scatter(x, y[1:], 0, 0, 2)`"""
    base, source, dim, start, _end, step = arguments(call, 6, 0, None, None, 1)
    if step != 1:
        raise lift.no_rule("assignment to a strided slice")
    dim %= len(index)
    begin = clamped(lift, number(start or 0), base.shape[dim])
    at = lift.simplify(apply("sub", index[dim], begin))
    inside = lift.simplify(apply("and", apply("ge", at, const(0)), apply("lt", at, source.shape[dim])))
    return _choose(lift, value, inside, (source, (*index[:dim], at, *index[dim + 1:])), (base, index))


def _choose(lift: Lift, value: Value, inside: Expr, new: tuple[Value, Index], old: tuple[Value, Index]) -> Expr:
    """The new element inside of what was assigned, the old one elsewhere."""
    if inside in (TRUE, FALSE):
        return lift.at(*(new if inside == TRUE else old))
    return where(inside, as_kind(_inside(lift, *new), value.kind), as_kind(lift.at(*old), value.kind))


def _inside(lift: Lift, source: Value, index: Index) -> Expr:
    """An element that is used only where its index is inside. What is loaded needs an address that exists everywhere, so there
    the index is clamped; a formula is kept as it is."""
    out = lift.at(source, index)
    if not loads(out):
        return out
    clamp = lambda at, s: lift.simplify(apply("max", const(0), apply("min", at, apply("sub", s, const(1)))))
    return lift.at(source, tuple(clamp(x, s) for x, s in zip(index, source.shape, strict=True)))


@rule(aten.copy.default)
def _copy(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.copy_(y)[i] = y[i]; e.g. `torch.ops.aten.copy.default(x, y)`"""
    return as_kind(element(lift, call.args[1], index), value.kind)


@rule(aten.index.Tensor)
def _index(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x[a, b][i] = x[a[i], b[i]]; the index tensors broadcast, and stand where the first does if they are neighbours; e.g. `x[n % 3, k]`,
    `x[:, k]`, `x[k[:2] - 3]`"""
    source, indices = call.args[0], list(call.args[1])
    indices += [None] * (len(source.shape) - len(indices))
    tensors = [t for t in indices if t is not None]
    if any(t.dtype == torch.bool for t in tensors):
        raise lift.no_rule("indexing by a mask")
    places = [k for k, t in enumerate(indices) if t is not None]
    rank = max(len(t.shape) for t in tensors)
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    own = index[first:first + rank]
    rest = iter(index[:first] + index[first + rank:])
    at: list[Expr] = []
    for k, t in enumerate(indices):
        if t is None:
            at.append(next(rest))
            continue
        x = lift.simplify(element(lift, t, own))
        at.append(lift.simplify(where(apply("lt", x, const(0)), apply("add", x, source.shape[k]), x)))
    return lift.at(source, tuple(at))


@rule(aten.index_put.default)
def _index_put(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """y = x.clone(); y[m] = 3, one number where a mask says so; e.g. `torch.index_put(x, [m], torch.tensor(3.0))`,
    `torch.index_put(x, [m[:, 0]], torch.tensor(3.0))`"""
    source, indices, new, accumulate = arguments(call, 4, False)
    if len(indices) != 1 or indices[0] is None or indices[0].dtype != torch.bool or accumulate or any(s != const(1) for s in new.shape):
        raise lift.no_rule("assignment to chosen elements")
    mask = lift.at(indices[0], index[:len(indices[0].shape)])
    return where(mask, as_kind(lift.at(new, (const(0),) * len(new.shape)), value.kind), as_kind(lift.at(source, index), value.kind))


@rule(aten.index_select.default)
def _index_select(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.index_select(0, a)[i] = x[a[i]]; e.g. `x.index_select(1, k)`"""
    source, dim, chosen = call.args
    dim %= len(source.shape)
    return lift.at(source, (*index[:dim], lift.simplify(lift.at(chosen, (index[dim],))), *index[dim + 1:]))


@rule(aten.gather.default)
def _gather(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.gather(1, a)[i, j] = x[i, a[i, j]]; e.g. `x.gather(1, n)`"""
    source, dim, chosen = call.args[:3]
    dim %= len(source.shape)
    return lift.at(source, (*index[:dim], lift.simplify(lift.at(chosen, index)), *index[dim + 1:]))


@rule(aten.embedding.default)
def _embedding(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """embedding(w, a)[i, d] = w[a[i], d], unless some rows have a gradient of their own; e.g. `torch.nn.functional.embedding(n, x)`"""
    table, chosen = call.args[:2]
    padding, scaled = arguments(call, 4, -1, False)[2:]
    if padding != -1 or scaled:
        raise lift.no_rule("an embedding with a padding row")
    return lift.at(table, (lift.simplify(lift.at(chosen, index[:-1])), index[-1]))


@rule(aten.cumsum.default)
def _cumsum(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """The running sum of what does not vary along the axis: x.cumsum(0)[i] = (i + 1)·x; e.g. `x[:, :1].expand(3, 5).cumsum(1)`"""
    source, dim = call.args[:2]
    dim %= len(index)
    step = lift.fresh_axis(source.shape[dim])
    x = lift.simplify(as_kind(lift.at(source, (*index[:dim], axis(step), *index[dim + 1:])), value.kind))
    if step in depends(x):
        raise lift.no_rule("a running sum of values that vary")
    return apply("mul", x, as_kind(apply("add", index[dim], const(1)), value.kind))
