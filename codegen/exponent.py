"""How scores become weights: whether log2(e) and the scale join one factor, and what then becomes of large fills.

``exp(0.125 * s - m)`` is ``exp2(s * 0.18 - m')``, one multiply-add an element, if nothing in the scores is so large that the
product rounds or overflows. A fill such as finfo.min would; but where it is only selected, never computed with, it is as good as
-inf in every row that has a score far above it. Rows that turn out to have none are computed by the program as it is written.
"""
from __future__ import annotations

import math

from ..program import Expr, const, depends, walk
from ..ranges import DEAD
from ..spec import AttentionSpec
from .plan import HALF, products

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
NOTHING = const(-math.inf)
LARGEST_FOLDED = 1e4
"""Above this a constant in the scores, times log2(e), would lose the digits of the scores beside it."""


def foldable(spec: AttentionSpec, *programs: Expr) -> bool:
    """Whether scores may be scaled by log2(e) before the maximum is taken: no value in them can be large beside the dot products.

    float32 operands keep the other order, which rounds once less.
    """
    plain = {"const", "axis", "size", "dot", "load", "add", "sub", "mul", "neg", "where", "tanh", "le", "lt", "ge", "gt", "eq", "ne", "and",
             "or", "xor", "not", "float", "int", "bool", "abs", "min", "max", "floordiv", "mod"}
    for node in (x for e in programs for x in walk(e)):
        if node.op not in plain or (node.op == "load" and node.kind == "float" and depends(node) & {"i", "j"}):
            return False
        if node.op == "const" and _large(node):
            return False
    return products(spec)[0] in HALF


def scale_of(expr: Expr) -> tuple[float, Expr]:
    """(c, x) with expr = c·x and c > 0, taken out of masks: ``where(p, 0.125 * s, -inf)`` is 0.125 · ``where(p, s, -inf)``."""
    if expr.op == "mul" and expr.args[0].op == "const" and 0.0 < float(expr.args[0].value) < math.inf:
        inner, rest = scale_of(expr.args[1])
        return float(expr.args[0].value) * inner, rest
    if expr.op == "where":
        masks = [a.op == "const" and math.isinf(float(a.value)) for a in expr.args[1:]]
        if masks.count(True) == 1:
            live = masks.index(False) + 1
            factor, rest = scale_of(expr.args[live])
            args = tuple(rest if n == live else a for n, a in enumerate(expr.args))
            return factor, Expr("where", args, None, expr.kind)
    return 1.0, expr


ABSORBS = -1e30
"""A fill below this, added to a score of ordinary size, leaves nothing of the score, in float32 and in float64."""


def _large(expr: Expr) -> set[float]:
    """The finite constants that do not bear being multiplied by log2(e)."""
    values = (x.value for x in walk(expr) if x.op == "const" and x.kind == "float")
    return {v for v in values if math.isfinite(v) and abs(v) > LARGEST_FOLDED}


def unfilled(expr: Expr) -> tuple[Expr, set[float]]:
    """The program with -inf for its large fills, and the fills that were: only those that are selected, not computed with.

        s + where(p, 0, finfo.min)  →  where(p, s, finfo.min)  →  where(p, s, -inf), {finfo.min}

    The two give the same weights in every row whose maximum lies above half the largest fill.
    """
    if expr.op == "add":
        for plain, mask in (expr.args, expr.args[::-1]):
            if mask.op == "where" and not _large(plain):
                c, x, y = mask.args
                zero, fill = (x, y) if x == const(0.0) else (y, x)
                if zero == const(0.0) and fill.op == "const" and -math.inf < fill.value < ABSORBS:
                    return Expr("where", (c, plain, NOTHING) if fill is y else (c, NOTHING, plain)), {fill.value}
    if expr.op != "where":
        return expr, set()
    branches, fills = [], set()
    for branch in expr.args[1:]:
        if branch.op == "const" and -math.inf < float(branch.value) <= DEAD:
            branches.append(NOTHING)
            fills.add(float(branch.value))
        else:
            inner, more = unfilled(branch)
            branches.append(inner)
            fills |= more
    return Expr("where", (expr.args[0], *branches), None, expr.kind), fills
