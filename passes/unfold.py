"""From the result of a recorded slice to its weights and scores, and the first half of what is proven of its axes.

`pull` unfolds a general element of the result: the value product behind it, the weights, the softmax (or what is one by its
meaning) and the scores. `main_dot`, `sides` and `query_axis` then tell the attention's product from others, keys from queries.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_leaves

from ..program import TRUE, Expr, apply, axis, const, depends, loads, walk, where
from ..refusal import Reason, Refused
from .lift import SOFTMAXES, Index, Level, Lift, Softmax
from .manual import bound, normalised, tame, without_row_maximum
from .pointwise import as_kind, element
from .repair import NAN, split
from .trace import Value, aten
from .views import VIEWS

_PRODUCTS = frozenset({aten.bmm.default, aten.mm.default})
_EXPONENTIALS = frozenset({aten.exp.default})
_NORMALISERS = {aten.div.Tensor: "div", aten.mul.Tensor: "mul"}
_MOST_EXTRA_TERMS = 16


@dataclass
class Parts:
    """What one pull of a slice gives, before the axes have roles."""

    lift: Lift
    weight: Expr
    score: Expr
    softmax: Softmax | None                # None: written by hand
    extra: tuple[Expr, ...]
    values: list[Level]
    product: Value
    e: str
    repaired: bool                         # rows of NaN are 0


def pull(lift: Lift, out: Value) -> Parts:
    """Unfold weights and scores from a general element of the result."""
    value, index, divided = _product_behind(lift, out, tuple(axis(f"x{k}") for k in range(len(out.shape))))
    if value.call is None or value.call.target not in _PRODUCTS:
        raise Refused(Reason.NO_VALUE_PRODUCT, "", "lift", f"ends in {value.call.target if value.call else 'an input'}")
    left, right = value.call.args[:2]
    *batch, row, column = index
    lift.algebra.lengths["j"] = left.shape[-1]
    sides = [(left, (*batch, row, axis("j"))), (right, (*batch, axis("j"), column))]
    carrying = [_reaches(s, SOFTMAXES) for s, _ in sides]
    if not any(carrying):
        carrying = [_reaches(s, _EXPONENTIALS) for s, _ in sides]
    if carrying.count(True) != 1:
        raise Refused(Reason.NO_VALUE_PRODUCT, "", "lift", "weights on both sides" if all(carrying) else "no weights on either side")
    weights, other = sides if carrying[0] else sides[::-1]
    e = column if carrying[0] else row
    if e.op != "axis" and lift.algebra.lengths.get("e") is None:
        if e != const(0):
            raise Refused(Reason.AXIS_ROLES, "", "lift", f"the values' own axis is {e}")
        # A value width of one leaves no trace in the index: it is the product's own last (or last but one) dimension.
        e = axis(f"x{len(out.shape) - (1 if carrying[0] else 2)}")
    weight = lift.at(*weights)
    for op, x, at in divided:
        weight = apply(op, weight, as_kind(element(lift, x, at), "float"))
    weight, score, extra, rows = softmax_of(lift, lift.simplify(weight))
    weight, broken = split(weight)
    if broken not in (NAN, const(0.0)) or broken != NAN and not rows:
        raise Refused(Reason.WEIGHT_PROGRAM, "", "lift", f"where the weights are NaN they become {str(broken)[:120]}")
    levels = lift.levels(*other, depth=str(e.attr))
    return Parts(lift, weight, score, lift.found, extra, levels, value, str(e.attr), broken != NAN)


def _product_behind(lift: Lift, value: Value, index: Index) -> tuple[Value, Index, list[tuple[str, Any, Index]]]:
    """The value product that a result is made of by views, casts and quotients; its index, and what it is divided or multiplied by."""
    divided: list[tuple[str, Any, Index]] = []
    while value.call is not None and value.call.target not in _PRODUCTS:
        call = value.call
        if call.target in VIEWS:
            value, index = VIEWS[call.target](lift, value, call, index)
        elif call.target is aten._to_copy.default:
            value = call.args[0]
        elif call.target in _NORMALISERS:
            op, (a, b) = _NORMALISERS[call.target], call.args[:2]
            main, other = (b, a) if op == "mul" and isinstance(b, Value) and not _is_product(a) else (a, b)
            divided.append((op, other, index))
            value, index = main, lift.broadcast(main, index)
        else:
            break
    return value, index, divided


def _is_product(value: Value) -> bool:
    """Whether a tensor is a product but for views and casts."""
    while value.call is not None and (value.call.target in VIEWS or value.call.target is aten._to_copy.default):
        value = value.call.args[0]
    return value.call is not None and value.call.target in _PRODUCTS


def softmax_of(lift: Lift, weight: Expr) -> tuple[Expr, Expr, tuple[Expr, ...], bool]:
    """(weight program, score program, further columns, whether NaN stands in whole rows alone) of unfolded weights."""
    found = lift.found
    by_hand = normalised(lift, weight) if bound(weight) or "dot" in depends(weight) else None
    if found is None or "weight" not in depends(weight):
        if by_hand is None or by_hand.score is None:
            raise Refused(Reason.NO_VALUE_PRODUCT, "", "lift", "the weights could not be read through, or are no softmax")
        score, extra = by_hand.score, ()
    else:
        outer = lambda s: (s.value.number, s.offset, s.index[:s.dim], s.index[s.dim + 1:])
        if any(outer(row) != outer(found) for row in lift.rows) or by_hand is not None and by_hand.score is not None:
            raise Refused(Reason.WEIGHT_PROGRAM, "", "lift", "weights of more than one softmax")
        score, extra = without_row_maximum(lift, *_scores(lift, found), found.offset)
    if by_hand is None:
        return weight, score, extra, True
    if by_hand.kept != TRUE or extra:
        if not tame(score):
            # A weight that a number made 0, as finfo.min does, is 0 / 0 when it is all that is left: NaN, not a uniform row.
            raise Refused(Reason.WEIGHT_PROGRAM, "", "lift", "weights normalised again behind a mask, whose scores may hold a finite one")
        score = lift.simplify(where(by_hand.kept, score, const(-math.inf)))
    return by_hand.weight, score, (), by_hand.rows


def _scores(lift: Lift, found: Softmax) -> tuple[Expr, tuple[Expr, ...]]:
    """The score of key j, and those of columns outside the keys."""
    source = found.call.args[0]
    columns, n = source.shape[found.dim], lift.algebra.lengths["j"]
    more = lift.simplify(apply("sub", columns, n))
    if more.op != "const" or not 0 <= more.attr <= _MOST_EXTRA_TERMS:  # type: ignore[operator]
        raise Refused(Reason.SOFTMAX_AXIS, "", "lift", "the values are fewer than the weights")
    at = lambda x: lift.simplify(lift.at(source, (*found.index[:found.dim], lift.simplify(x), *found.index[found.dim + 1:])))
    score = as_kind(at(apply("add", axis("j"), const(found.offset))), "float")
    before = [at(const(c)) for c in range(found.offset)]
    behind = [at(apply("add", n, const(c))) for c in range(found.offset, int(more.attr))]  # type: ignore[arg-type]
    return score, tuple(before + behind)


def _reaches(value: Value, targets: frozenset[Any]) -> bool:
    """Whether a tensor is computed from the result of one of `targets`."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        v = stack.pop()
        if v.number in seen or v.call is None:
            continue
        if v.call.target in targets:
            return True
        seen.add(v.number)
        stack.extend(arguments_of(v))
    return False


def arguments_of(value: Value) -> list[Value]:
    out: list[Value] = []
    for a in tree_leaves((value.call.args, value.call.kwargs) if value.call else ()):
        if isinstance(a, Value):
            out.append(a)
    return out


def main_dot(parts: Parts) -> int:
    """The product that is the attention's: one side depends on the key axis and the other does not. Of several, one that is
    indexed by the key axis itself (a relative term is indexed by a function of it), then the one with the longest sum."""
    used = [int(x.attr) for x in walk(parts.score) if x.op == "dot"]  # type: ignore[arg-type]
    one_key = parts.lift.algebra.lengths["j"] == const(1)
    fit: list[tuple[bool, int, int]] = []
    for n in used:
        _, call, index = parts.lift.dots[n]
        along_j = ["j" in depends(index[-2]), "j" in depends(index[-1])]
        if (one_key or along_j.count(True) == 1) and not any("j" in depends(b) for b in index[:-2]):
            width = call.args[0].shape[-1]
            fit.append((axis("j") in index[-2:], int(width.attr) if width.op == "const" else 0, n))  # type: ignore[arg-type]
    if not fit and used:
        raise Refused(Reason.AXIS_ROLES, "", "lift")
    if not fit:
        for x in loads(parts.score):
            if _reaches(parts.lift.values[int(x.attr)], _PRODUCTS) and int(x.attr) not in parts.lift.opaque:  # type: ignore[arg-type]
                raise Refused(Reason.UNKNOWN_OP, "", "lift", parts.lift.unread[int(x.attr)])  # type: ignore[arg-type]
        raise Refused(Reason.NO_SCORE_PRODUCT, "", "lift", f"the score is {str(parts.score)[:120]}")
    return max(fit, key=lambda f: f[:2])[2]


def sides(parts: Parts, main: int) -> tuple[list[Level], list[Level]]:
    """(key, query): the levels of the score product's two operands. A single key leaves no trace in the index: then the side
    that varies with fewer of the result's axes has the key."""
    _, call, index = parts.lift.dots[main]
    left, right = call.args[:2]
    *batch, row, column = index
    parts.lift.algebra.lengths["d"] = left.shape[-1]
    a = parts.lift.levels(left, (*batch, row, axis("d")), "d")
    b = parts.lift.levels(right, (*batch, axis("d"), column), "d")
    if parts.lift.algebra.lengths["j"] == const(1):
        return (a, b) if len(uses(a[-1])) < len(uses(b[-1])) else (b, a)
    return (a, b) if "j" in depends(row) else (b, a)


def uses(level: Level) -> frozenset[str]:
    return frozenset().union(*(depends(x) for x in level.index))


def query_axis(parts: Parts, key: list[Level], out: Value) -> str:
    """An axis of the result on which neither keys nor values depend: the last one that is not of length 1."""
    shared = uses(key[-1]) | uses(parts.values[-1])
    free = [k for k in range(len(out.shape)) if f"x{k}" not in shared and f"x{k}" != parts.e]
    if parts.e not in uses(parts.values[-1]) and out.shape[int(parts.e[1:])] != const(1):
        raise Refused(Reason.AXIS_ROLES, "", "lift", "the values do not vary along their own axis")
    if parts.e in depends(parts.score) | depends(parts.weight):
        raise Refused(Reason.AXIS_ROLES, "", "lift", "the weights vary along the values' axis")
    if not free:
        raise Refused(Reason.AXIS_ROLES, "", "lift", "keys or values vary along every axis of the result")
    long = [k for k in free if out.shape[k] != const(1)]
    return f"x{(long or free)[-1]}"
