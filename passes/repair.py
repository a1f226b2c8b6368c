"""NaN repair behind a softmax, recognised by what it makes of the two kinds of row that there are.

A row of softmax weights is NaN at every key or at none; where it is not, the weights lie in [0, 1]. A weight program is
asked for both: with ordinary weights its questions for NaN and infinity have answers that are known, and what is left must be
linear; with NaN for the weight it is 0 (the rows are repaired), NaN (they are not), or something that no kernel computes.

    >>> from ..program import WEIGHT, apply, const, where
    >>> program, row = split(where(apply("isnan", WEIGHT), const(0.0), WEIGHT))
    >>> print(program, row)
    p 0

What stands between softmax and repair, or behind it, must be finite: NaN · 0 is NaN, and so is a gate's NaN.
"""
from __future__ import annotations

import math

from ..algebra import simplify
from ..intervals import interval
from ..program import FALSE, TRUE, Expr, apply, const, depends, rewrite, substitute, walk

NAN = const(math.nan)
_LARGEST = 3e4
"""Weights times finite factors stay below this, so that no dtype turns them into infinities."""
_PROPAGATE = frozenset({"add", "sub", "mul", "div", "neg", "abs", "float", "exp", "log", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin",
                        "cos", "min", "max", "sum", "maximum"})
_COMPARE = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def split(weight: Expr) -> tuple[Expr, Expr]:
    """(the program for ordinary weights, what it gives where the weights are NaN: `NAN`, 0, or a program)."""
    if not any(x.kind == "bool" and "weight" in depends(x) for x in walk(weight)):
        return weight, NAN
    return rewrite(weight, lambda node: _answered(node) or simplify(node)), _broken(weight)


def finite(expr: Expr) -> bool:
    """Whether a value, and everything on the way to it, is a number of ordinary size whatever the ordinary weights are."""
    return all(_bounded(x) for x in walk(rewrite(expr, _named)) if x.kind == "float")


def _named(node: Expr) -> Expr | None:
    """Weights and dropout's factors as axes, whose bounds `interval` can be told."""
    if node.op == "weight":
        return Expr("axis", attr="<weight>")
    return Expr("axis", attr=f"<keep {node.attr[1]}>") if node.op == "keep" else None  # type: ignore[index]


def _range(expr: Expr) -> tuple[float, float]:
    axes = {"<weight>": (0.0, 1.0)}
    for x in walk(expr):
        if x.op == "axis" and str(x.attr).startswith("<keep"):
            p = float(str(x.attr)[6:-1])
            axes[str(x.attr)] = (0.0, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return interval(expr, {}, axes)


def _bounded(node: Expr) -> bool:
    low, high = _range(node)                           # of a captured number nothing is known
    return -_LARGEST <= low and high <= _LARGEST


def _answered(node: Expr) -> Expr | None:
    """The answer to a question about ordinary weights, where it is known."""
    if node.op == "any":
        return node.args[0] if node.args[0].op == "const" else None
    if node.kind != "bool" or "weight" not in depends(node):
        return None
    if node.op in _COMPARE | {"isnan"} and not all(a.op == "const" or finite(a) for a in node.args):
        return None
    if node.op == "isnan":
        return FALSE
    if node.op == "eq" and node.args[0] == node.args[1]:
        return TRUE
    if node.op in _COMPARE:
        low, high = _range(rewrite(node, _named))
        return const(bool(low)) if low == high else None
    return None


def _broken(weight: Expr) -> Expr:
    """What a program is where the weights are NaN."""
    known: dict[Expr, Expr] = {}
    for node in walk(weight):
        new = Expr(node.op, tuple(known[a] for a in node.args), node.attr, node.kind) if node.args else node
        known[node] = NAN if node.op == "weight" else _settled(new)
    return known[weight]


def _settled(node: Expr) -> Expr:
    """One step, its arguments already settled."""
    args = node.args
    if NAN in args and node.op in _PROPAGATE:
        return NAN
    if NAN in args and node.op in _COMPARE | {"isnan"}:
        return const(node.op in ("ne", "isnan"))
    if node.op == "where":
        c, a, b = args
        a, b = (simplify(substitute(x, {c: truth})) if c.op != "const" else x for x, truth in ((a, TRUE), (b, FALSE)))
        return simplify(Expr("where", (c, a, b), None, node.kind))
    if node.op == "isnan" and args[0].op == "where":
        c, a, b = args[0].args
        return simplify(apply("where", c, *(_settled(apply("isnan", x)) for x in (a, b))))
    if node.op == "isnan" and finite(args[0]):
        return FALSE
    if node.op == "eq" and args[0] == args[1] and args[0].kind == "float":
        return simplify(apply("not", _settled(apply("isnan", args[0]))))
    if node.op in _COMPARE and args[0].op == "where" and args[1].op == "const":
        c, a, b = args[0].args
        return simplify(apply("where", c, *(_settled(apply(node.op, x, args[1])) for x in (a, b))))
    if node.op == "div" and args == (const(0.0), const(0.0)):
        return NAN
    if node.op in ("mul", "div") and args[0] == const(0.0) or node.op == "mul" and args[1] == const(0.0):
        other = args[1] if args[0] == const(0.0) else args[0]
        fine = finite(other) and (node.op == "mul" or _range(other)[0] > 0.0)
        return const(0.0) if fine else node
    if node.op in ("any", "sum", "maximum") and args[0].op == "const" and (node.op != "sum" or args[0].attr == 0.0):
        return args[0]
    return simplify(node)
