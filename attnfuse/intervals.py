"""What values a program can take: interval arithmetic over `Expr`, with some predicates taken as known.

Booleans are the intervals within [0, 1]. Dot products and loaded floats are taken to be of ordinary size (`ORDINARY`);
a load may also be arbitrarily negative, as a mask is. None means that nothing is known.

    >>> from .program import DOT, axis, const, le, where
    >>> causal = le(axis("j"), axis("i"))
    >>> interval(where(causal, DOT, const(-1e9)), {causal: False})
    (-1000000000.0, -1000000000.0)
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .program import Expr, walk

Interval = tuple[float, float]
INF = math.inf
EVERYTHING: Interval = (-INF, INF)
ORDINARY = 1e8
"""No dot product and no loaded float exceeds this. Scores beyond it have lost every digit to softmax long before."""


def interval(expr: Expr, known: Mapping[Expr, bool], axes: Mapping[str, Interval] | None = None, sizes: Mapping[str, int] | None = None,
             round_constant: Callable[[float], float] = float) -> Interval:
    """Least and greatest value of `expr` over all positions at which the predicates in `known` have these values.

    Args:
        expr: the program.
        known: predicates that occur in it, and what they are taken to be.
        axes: bounds of axes, from 0 to infinity for one that is not named.
        sizes: lengths and scalars, likewise.
        round_constant: how a float constant reaches the arithmetic (float32 turns -1e300 into -inf).
    """
    memo: dict[Expr, Interval] = {}
    for node in walk(expr):
        if node in known:
            memo[node] = (1.0, 1.0) if known[node] else (0.0, 0.0)
        else:
            memo[node] = _leaf(node, axes or {}, sizes or {}, round_constant) or _apply(node, [memo[a] for a in node.args])
    return memo[expr]


def _leaf(node: Expr, axes: Mapping[str, Interval], sizes: Mapping[str, int], round_constant: Callable[[float], float]) -> Interval | None:
    if node.op == "const":
        value = round_constant(node.value) if node.kind == "float" else node.value
        return EVERYTHING if value != value else (value, value)
    if node.op == "axis":
        return axes.get(str(node.attr), (0, INF))
    if node.op == "size":
        known = sizes.get(str(node.attr))
        return EVERYTHING if known is None else (known, known)
    if node.op == "dot":
        return -ORDINARY, ORDINARY
    if node.op == "load":
        return {"float": (-INF, ORDINARY), "int": EVERYTHING, "bool": (0.0, 1.0)}[node.kind]
    return None


def _apply(node: Expr, args: list[Interval]) -> Interval:
    rule = _RULES.get(node.op)
    low, high = rule(*args) if rule else EVERYTHING
    if low != low or high != high:                     # inf - inf, 0 · inf
        low, high = EVERYTHING
    return (max(low, 0.0), min(high, 1.0)) if node.kind == "bool" else (low, high)


def _product(x: float, y: float) -> float:
    return 0.0 if x == 0.0 or y == 0.0 else x * y


def _mul(a: Interval, b: Interval) -> Interval:
    fixed = [x for x in (a, b) if x[0] == x[1]]
    if len(fixed) == 2 and any(math.isinf(x[0]) for x in fixed) and (0.0, 0.0) in fixed:
        return EVERYTHING                              # NaN
    ends = [_product(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _div(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0.0 <= b[1]:
        return EVERYTHING
    ends = [math.nan if math.isinf(x) and math.isinf(y) else x / y for x in a for y in b]
    return EVERYTHING if any(x != x for x in ends) else (min(ends), max(ends))


def _le(a: Interval, b: Interval) -> Interval:
    return (1.0 if a[1] <= b[0] else 0.0), (0.0 if a[0] > b[1] else 1.0)


def _lt(a: Interval, b: Interval) -> Interval:
    return (1.0 if a[1] < b[0] else 0.0), (0.0 if a[0] >= b[1] else 1.0)


def _eq(a: Interval, b: Interval) -> Interval:
    return (1.0 if a[0] == a[1] == b[0] == b[1] else 0.0), (0.0 if a[1] < b[0] or b[1] < a[0] else 1.0)


def _not(a: Interval) -> Interval:
    return 1.0 - a[1], 1.0 - a[0]


def _where(c: Interval, a: Interval, b: Interval) -> Interval:
    return a if c[0] == 1.0 else b if c[1] == 0.0 else (min(a[0], b[0]), max(a[1], b[1]))


def _bool(a: Interval) -> Interval:
    return (0.0 if a[0] <= 0.0 <= a[1] else 1.0), (0.0 if a == (0.0, 0.0) else 1.0)


def _abs(a: Interval) -> Interval:
    return (0.0 if a[0] <= 0.0 <= a[1] else min(abs(a[0]), abs(a[1]))), max(abs(a[0]), abs(a[1]))


def _floordiv(a: Interval, b: Interval) -> Interval:
    if b[0] != b[1] or not 0 < b[0] < INF:
        return EVERYTHING
    floor = lambda x: x if math.isinf(x) else x // b[0]
    return floor(a[0]), floor(a[1])


def _increasing(f: Callable[[float], float], least: float = -INF) -> Callable[[Interval], Interval]:
    """Interval rule of an increasing function; below `least` it is not defined."""
    def rule(a: Interval) -> Interval:
        return EVERYTHING if a[0] < least else (_value(f, a[0]), _value(f, a[1]))
    return rule


def _value(f: Callable[[float], float], x: float) -> float:
    try:
        return f(x)
    except OverflowError:
        return INF


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


def _log(x: float) -> float:
    return -INF if x == 0.0 else math.log(x)


_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]),
    "mul": _mul, "div": _div, "floordiv": _floordiv, "abs": _abs,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "le": _le, "lt": _lt, "eq": _eq,
    "ge": lambda a, b: _le(b, a),
    "gt": lambda a, b: _lt(b, a),
    "ne": lambda a, b: _not(_eq(a, b)),
    "and": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "or": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "not": _not, "where": _where, "bool": _bool,
    "float": lambda a: a,
    "int": lambda a: a if a[0] >= 0.0 and a[1] <= 1.0 and a[0] == a[1] or a == (0.0, 1.0) else EVERYTHING,
    "exp": _increasing(math.exp), "tanh": _increasing(math.tanh), "sigmoid": _increasing(_sigmoid), "erf": _increasing(math.erf),
    "log": _increasing(_log, 0.0), "log1p": _increasing(lambda x: _log(1.0 + x), -1.0), "sqrt": _increasing(math.sqrt, 0.0),
    "sin": lambda a: (-1.0, 1.0), "cos": lambda a: (-1.0, 1.0),
}
