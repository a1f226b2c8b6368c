"""A softmax written by hand, or normalised once more, recognised by what it computes: weights over their own sum.

While weights are unfolded, sums and maxima over an axis become the bound expressions ``sum`` and ``max`` over a fresh axis
t, so that both sides of a quotient are programs and can be compared: the denominator must be the numerator's own function,
summed. Three quotients are a softmax of scores u:

    exp(u_j) / Σ_t exp(u_t)          and exp(u_j - log Σ_t exp(u_t))
    m_j exp(u_j) / Σ_t m_t exp(u_t)  with m of 0 and 1: the scores are -inf where m is 0
    m_j p_j / Σ_t m_t p_t            where p is itself a softmax of u: what it was normalised by cancels

The sum may divide the weights or, later, their product with the values. A maximum over the same axis subtracted inside
changes nothing and is dropped.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..program import FALSE, TRUE, WEIGHT, Expr, apply, axis, const, depends, rewrite, substitute, walk, where
from ..refusal import Reason, Refused
from .pointwise import as_kind, rule
from .repair import NAN, split
from .trace import Call, Value, aten

if TYPE_CHECKING:
    from .lift import Index, Lift


_MARK = Expr("axis", attr="<normalised>")
"""Stands for a weight that a quotient gives, beside which the weight that the quotient was made from must not be left."""
_LARGEST = 64.0
"""Greater constants are fills."""


def _reduced(lift: Lift, value: Value, call: Call, index: Index, op: str, kind: Literal["float", "bool"] = "float") -> Expr:
    """``op`` over one dimension of the argument, as an expression that binds a fresh axis (its name is the attr)."""
    source = call.args[0]
    dims = call.args[1] if len(call.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    keep = bool(call.args[2]) if len(call.args) > 2 else bool(call.kwargs.get("keepdim", False))
    if len(dims) != 1 or value.output != 0 or value.kind != kind:
        raise lift.no_rule(f"{call.target} of this form")
    dim = dims[0] % len(source.shape)
    name = lift.fresh_axis(source.shape[dim])
    at = (*index[:dim], axis(name), *index[dim + (1 if keep else 0):])
    inner = as_kind(lift.simplify(lift.at(source, at)), kind)
    if not {"dot", "weight"} & depends(inner):
        raise lift.no_rule("a reduction of something other than scores")
    return Expr(op, (inner,), name, kind)


@rule(aten.sum.dim_IntList)
def _sum(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.sum(-1)[i] = Σ_t x[i, t]"""
    return _reduced(lift, value, call, index, "sum")


@rule(aten.amax.default, aten.max.dim)
def _max(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.amax(-1)[i] = max_t x[i, t]"""
    return _reduced(lift, value, call, index, "maximum")


@rule(aten.any.dim, aten.any.dims)
def _any(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """m.any(-1)[i] = any_t m[i, t]"""
    return _reduced(lift, value, call, index, "any", "bool")


@rule(aten.logsumexp.default)
def _logsumexp(lift: Lift, value: Value, call: Call, index: Index) -> Expr:
    """x.logsumexp(-1)[i] = log Σ_t exp(x[i, t])"""
    whole = _reduced(lift, value, call, index, "sum")
    return apply("log", Expr("sum", (apply("exp", whole.args[0]),), whole.attr, "float"))


def bound(expr: Expr) -> bool:
    """Whether something that runs over an axis is left in a program."""
    return any(x.op in ("sum", "maximum", "any") for x in walk(expr))


# ---- quotients

@dataclass(frozen=True)
class Normalised:
    """Weights that are a softmax: the weight program, the scores' program (None: those of the softmax that was there), where
    a score counts (elsewhere it is -inf), and whether NaN stands in whole rows alone."""

    weight: Expr
    score: Expr | None
    kept: Expr
    rows: bool


def normalised(lift: Lift, weight: Expr) -> Normalised | None:
    """What weights are that hold quotients by a sum over the keys; None where they are no softmax.

    >>> # exp(u_j) / Σ_t exp(u_t) · keep   →   weight · keep, u_j
    """
    found: list[tuple[Expr, Expr]] = []                # what is normalised (an exponential, or the weight), and where it counts
    by_logarithm = False

    def matched(node: Expr) -> Expr | None:
        nonlocal by_logarithm
        node, logarithm = _quotient(node)
        if node.op != "div" or node.args[1].op != "sum":
            return None
        top, below = node.args
        one = _summand(lift, below)
        if one is None:
            return None
        out = substitute(top, {one[0]: _MARK})
        if out == top:
            return None
        by_logarithm |= logarithm
        if one[1:] not in found:
            found.append(one[1:])
        return out

    out = rewrite(weight, matched)
    if len(found) != 1 or bound(out) or {"dot", "weight"} & depends(out):      # something else is divided, or stands beside
        return None
    out = lift.simplify(substitute(out, {_MARK: WEIGHT}))
    base, kept = found[0]
    if base == WEIGHT:
        return Normalised(out, None, kept, True)
    score = _without_maximum(lift, base.args[0])
    stable = score is not base.args[0]
    if bound(score):
        return None
    if not stable and not tame(score):
        raise Refused(Reason.NO_VALUE_PRODUCT, "", "lift", "exponentials without their maximum, of scores that may hold a finite mask")
    return Normalised(out, score, kept, stable or by_logarithm)


def _quotient(node: Expr) -> tuple[Expr, bool]:
    """x · (1 / Σ) as x / Σ, and exp(u - log Σ) as exp(u) / Σ (then True)."""
    if node.op == "mul":
        for x, other in (node.args, node.args[::-1]):
            if other.op == "div" and other.args[0] == const(1.0) and other.args[1].op == "sum":
                return apply("div", x, other.args[1]), False
    if node.op == "exp" and node.args[0].op == "sub" and node.args[0].args[1].op == "log":
        u, log = node.args[0].args
        return apply("div", apply("exp", u), log.args[0]), True
    return node, False


def _summand(lift: Lift, below: Expr) -> tuple[Expr, Expr, Expr] | None:
    """What a sum over all keys adds up at the key j: the whole, the exponential or weight in it, and where that counts."""
    if lift.algebra.lengths["j"] != lift.algebra.lengths[str(below.attr)]:
        return None
    whole = at_key(lift, below)
    bases = [x for x in walk(whole) if x == WEIGHT or x.op == "exp" and "dot" in depends(x)]
    if not bases:
        return None
    base = bases[-1]                                   # the outermost; what else there is fails to be a mask of it
    plain, broken = split(substitute(whole, {base: WEIGHT}))
    if base != WEIGHT and broken != NAN:
        return None                                    # exponentials are no weights yet: nothing says that they are at most 1
    kept = _kept(plain)
    if kept is None or broken not in (NAN, const(0.0)):        # either way the row is NaN: 0 / 0
        return None
    return whole, base, lift.simplify(kept)


def _kept(expr: Expr) -> Expr | None:
    """The predicate c of a program that is c·weight, times a constant; None where it is not."""
    if expr == WEIGHT:
        return TRUE
    if expr == const(0.0):
        return FALSE
    if expr.op == "mul":
        sides = ["weight" in depends(a) for a in expr.args]
        if sides.count(True) != 1:
            return None
        inner, factor = _kept(expr.args[sides.index(True)]), _predicate(expr.args[sides.index(False)])
        return None if inner is None or factor is None else apply("and", inner, factor)
    if expr.op == "where" and "weight" not in depends(expr.args[0]):
        a, b = (_kept(x) for x in expr.args[1:])
        return None if a is None or b is None or const(0.0) not in expr.args[1:] else where(expr.args[0], a, b)
    return None


def _predicate(factor: Expr) -> Expr | None:
    """The bool behind a factor of 0 and 1, or TRUE for a constant, which a quotient loses."""
    if factor.op == "const":
        return TRUE if 0.0 < abs(factor.attr) < math.inf else None  # type: ignore[operator]
    if factor.op in ("float", "int"):
        return factor.args[0] if factor.args[0].kind == "bool" else _predicate(factor.args[0])
    if factor.op == "where" and {*factor.args[1:]} == {const(0.0), const(1.0)}:
        return factor.args[0] if factor.args[1] == const(1.0) else apply("not", factor.args[0])
    if factor.op == "sub" and factor.args[0] in (const(1.0), const(1)):
        inner = _predicate(factor.args[1])
        return None if inner is None or factor.args[1].op == "const" else apply("not", inner)
    if factor.op == "mul":
        parts = [_predicate(x) for x in factor.args]
        return None if None in parts else apply("and", *parts)  # type: ignore[arg-type]
    return None


def tame(score: Expr) -> bool:
    """Whether no mask that is finite can be in a score. Without its maximum subtracted, a row that is masked everywhere is
    0 / 0 (or, by its logsumexp, all ones), where a softmax is uniform."""
    fill = lambda x: x.op == "const" and _LARGEST < abs(x.attr) < math.inf  # type: ignore[arg-type]
    return not any(x.kind == "float" and (x.op == "load" or fill(x)) for x in walk(score))


def _without_maximum(lift: Lift, u: Expr) -> Expr:
    """s_j of s_j - max_t s_t: a softmax does not change when a constant of the row is subtracted. (That of some of its columns may be
    infinite where the row is not.)"""
    if u.op == "sub":
        s, most = u.args[0], attached(u.args[1])
        if most.op == "maximum" and lift.algebra.lengths[str(most.attr)] == lift.algebra.lengths["j"] and at_key(lift, most) == s:
            return s
    return u


def attached(expr: Expr) -> Expr:
    """With the gradients that were stopped: a maximum that cancels sends none."""
    return rewrite(expr, lambda node: node.args[0] if node.op == "detached" else None)


def without_row_maximum(lift: Lift, score: Expr, extra: tuple[Expr, ...], offset: int) -> tuple[Expr, tuple[Expr, ...]]:
    """softmax(s - max(s)) = softmax(s): the maximum over the row's very scores, subtracted from every column, changes nothing.
    (One over queries or heads is no constant of the row; one over other columns may be infinite where the row is not.)"""
    lengths = lift.algebra.lengths
    columns = lift.simplify(apply("add", lengths["j"], const(len(extra))))
    while score.op == "sub" and attached(score.args[1]).op == "maximum":
        own, most = score.args[0], attached(score.args[1])
        if lengths[str(most.attr)] != columns or at_key(lift, most, offset) != own:
            break
        if any(x.op != "sub" or attached(x.args[1]) != most for x in extra):
            break
        score, extra = own, tuple(x.args[0] for x in extra)
    return score, extra


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

    return lift.simplify(substitute(rewrite(reduction.args[0], renamed), {Expr("weight", (axis("j"),)): WEIGHT}))
