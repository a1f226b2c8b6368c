"""A softmax written by hand, recognised by what it computes: exp(u_j) over Σ_t exp(u_t), or exp(u_j - log Σ_t exp(u_t)).

While weights are unfolded, sums and maxima over an axis become the bound expressions ``sum`` and ``max`` over a fresh axis
t, so that both sides of the quotient are programs and can be compared: the denominator must be the numerator's own
function, summed. A maximum over the same axis subtracted inside changes nothing and is dropped.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..program import WEIGHT, Expr, apply, axis, const, depends, rewrite, walk
from .pointwise import as_kind, rule
from .trace import Call, Value, aten

if TYPE_CHECKING:
    from .lift import Index, Lift


_LARGEST = 64.0
"""Greater constants are fills."""


def _reduced(lift: Lift, value: Value, call: Call, index: Index, op: str) -> Expr:
    """``op`` over one dimension of the argument, as an expression that binds a fresh axis (its name is the attr)."""
    source = call.args[0]
    dims = call.args[1] if len(call.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    keep = bool(call.args[2]) if len(call.args) > 2 else bool(call.kwargs.get("keepdim", False))
    if len(dims) != 1 or value.output != 0 or value.kind != "float":
        raise lift.no_rule(f"{call.target} of this form")
    dim = dims[0] % len(source.shape)
    name = lift.fresh_axis(source.shape[dim])
    at = (*index[:dim], axis(name), *index[dim + (1 if keep else 0):])
    inner = as_kind(lift.simplify(lift.at(source, at)), "float")
    if "dot" not in depends(inner):
        raise lift.no_rule("a reduction of something other than scores")
    return Expr(op, (inner,), name, "float")


@rule(aten.sum.dim_IntList)
def _sum(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.sum(-1)[i] = Σ_t x[i, t]"""
    return _reduced(lift, value, call, index, "sum")


@rule(aten.amax.default, aten.max.dim)
def _max(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.amax(-1)[i] = max_t x[i, t]"""
    return _reduced(lift, value, call, index, "maximum")


@rule(aten.logsumexp.default)
def _logsumexp(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.logsumexp(-1)[i] = log Σ_t exp(x[i, t])"""
    whole = _reduced(lift, value, call, index, "sum")
    return apply("log", Expr("sum", (apply("exp", whole.args[0]),), whole.attr, "float"))


def bound(expr: Expr) -> bool:
    """Whether a sum or maximum over an axis is left in a program."""
    return any(x.op in ("sum", "maximum") for x in walk(expr))


def softmax_by_hand(lift: Lift, weight: Expr) -> tuple[Expr, Expr] | None:
    """(weight program, score) of weights that are a quotient of exponentials, or None.

    >>> # exp(u_j) / Σ_t exp(u_t) · keep   →   (weight · keep, u_j)
    """
    scores: list[Expr] = []

    def matched(node: Expr) -> Expr | None:
        u = _score_of(lift, node)
        if u is None:
            return None
        if u not in scores:
            scores.append(u)
        return WEIGHT

    out = rewrite(weight, matched)
    if len(scores) != 1 or bound(out) or "dot" in depends(out):
        return None
    score = _without_maximum(lift, scores[0])
    if bound(score) or score is scores[0] and not _tame(score):
        return None
    return lift.simplify(out), score


def _tame(score: Expr) -> bool:
    """Whether no mask that is finite can be in a score. Without its maximum subtracted, a row that is masked everywhere is
    0 / 0 (or, by its logsumexp, all ones), where a softmax is uniform."""
    fill = lambda x: x.op == "const" and _LARGEST < abs(x.attr) < math.inf  # type: ignore[arg-type]
    return not any(x.kind == "float" and (x.op == "load" or fill(x)) for x in walk(score))


def _score_of(lift: Lift, node: Expr) -> Expr | None:
    """u of a node exp(u_j) / Σ_t exp(u_t) (division or product with the reciprocal) or exp(u_j - log Σ_t exp(u_t))."""
    if node.op == "div" and node.args[0].op == "exp" and node.args[1].op == "sum":
        top, below = node.args
    elif node.op == "mul" and any(_is_reciprocal(a) for a in node.args):
        a, b = node.args
        top, below = (b, a.args[1]) if _is_reciprocal(a) else (a, b.args[1])
    elif node.op == "exp" and node.args[0].op == "sub" and node.args[0].args[1].op == "log":
        u, log = node.args[0].args
        top, below = apply("exp", u), log.args[0]
    else:
        return None
    if top.op != "exp" or below.op != "sum":
        return None
    same = at_key(lift, below) == top
    return top.args[0] if same and lift.algebra.lengths["j"] == lift.algebra.lengths[str(below.attr)] else None


def _is_reciprocal(x: Expr) -> bool:
    return x.op == "div" and x.args[0].op == "const" and x.args[0].attr == 1.0 and x.args[1].op == "sum"


def _without_maximum(lift: Lift, u: Expr) -> Expr:
    """s_j of s_j - max_t s_t: a softmax does not change when a constant of the row is subtracted."""
    if u.op == "sub" and u.args[1].op == "maximum":
        s, most = u.args
        if at_key(lift, most) == s:
            return s
    return u


def at_key(lift: Lift, reduction: Expr, offset: int = 0) -> Expr:
    """What is summed (or maximised), at the key j, which is column j + `offset`; dot products are numbered by place, so they
    are looked up under their new index."""
    table: dict[Expr, Expr] = {axis(str(reduction.attr)): lift.simplify(apply("add", axis("j"), const(offset)))}

    def renamed(node: Expr) -> Expr | None:
        if node.op == "dot" and node.attr is not None:
            value, _, index = lift.dots[int(node.attr)]  # type: ignore[arg-type]
            moved = tuple(lift.simplify(rewrite(x, table.get)) for x in index)
            for n, (other, _, at) in enumerate(lift.dots):
                if other is value and at == moved:
                    return Expr("dot", attr=n)
        return table.get(node)

    return lift.simplify(rewrite(reduction.args[0], renamed))
