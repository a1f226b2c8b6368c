"""The identities that put scalar programs into normal form: constants, choices, logic, comparisons, casts. Integers are `algebra`'s.

Each rule is `(algebra, node) -> replacement`, or None to leave the node; its arguments are already in normal form. A rule holds for
every value that its arguments may have, NaN included, in the arithmetic that programs are evaluated in.

    >>> from .algebra import simplify
    >>> from .program import DOT, axis, const, le, where
    >>> print(simplify(where(le(axis("j"), const(-1)), DOT, const(0.0))))
    0
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .program import FALSE, TRUE, Expr, apply, const, depends, substitute

if TYPE_CHECKING:
    from .algebra import Algebra

FLOAT32_MAX = 3.4028234663852886e38


def fold(node: Expr) -> Expr | None:
    """The value of an operation on constants, or None where it is better left to the executor."""
    values = [a.attr for a in node.args]
    try:
        out = _FOLD[node.op](*values)
    except (KeyError, ValueError, OverflowError, ZeroDivisionError):
        return None
    if node.kind == "float":
        out = float(out)
        finite = all(math.isfinite(v) for v in values)  # type: ignore[arg-type]
        if math.isnan(out) or (finite and abs(out) > FLOAT32_MAX and any(abs(v) > 1 for v in values)):  # type: ignore[arg-type, operator]
            return None
        return const(out)
    return const(bool(out)) if node.kind == "bool" else const(int(out))


_FOLD: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "min": min, "max": max, "pow": lambda a, b: math.pow(a, b),
    "neg": lambda a: -a, "abs": abs, "exp": math.exp, "log": math.log, "sqrt": math.sqrt, "rsqrt": lambda a: 1 / math.sqrt(a),
    "tanh": math.tanh, "floor": math.floor, "ceil": math.ceil,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "and": lambda a, b: a and b, "or": lambda a, b: a or b,
    "xor": lambda a, b: a != b, "not": lambda a: not a, "isnan": lambda a: a != a,
    "where": lambda c, a, b: a if c else b, "float": float, "int": lambda a: math.trunc(a), "bool": lambda a: a != 0,
}


# ---- the rules: each returns the replacement, or None to leave the node

def _is(expr: Expr, value: float) -> bool:
    return expr.op == "const" and expr.kind != "bool" and expr.attr == value


def _add(_: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    return b if _is(a, 0.0) else a if _is(b, 0.0) else None


def _sub(_: Algebra, n: Expr) -> Expr | None:
    return n.args[0] if _is(n.args[1], 0.0) else None


def _mul(_: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    if n.kind == "bool":
        return apply("and", a, b)
    if _is(a, 1.0) or _is(b, 1.0):
        return b if _is(a, 1.0) else a
    if a.op == "const" and b.op == "mul" and any(x.op == "const" for x in b.args):      # c·(d·x) = (c·d)·x
        inner = next(x for x in b.args if x.op == "const")
        other = b.args[1] if b.args[0] is inner else b.args[0]
        folded = fold(apply("mul", a, inner))
        return apply("mul", folded, other) if folded else None
    return apply("mul", b, a) if b.op == "const" and a.op != "const" else None


def _div(_: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    if a.kind != "float" or b.kind != "float":
        return apply("div", apply("float", a), apply("float", b))
    return a if _is(b, 1.0) else None


def _where(alg: Algebra, n: Expr) -> Expr | None:
    c, a, b = n.args
    if c.op == "const":
        return a if c.attr else b
    if a == b:
        return a
    if c.op == "not":
        return apply("where", c.args[0], b, a)
    if c.op == "le" and c.args[0].kind == "int" and "j" in depends(c.args[1]) - depends(c.args[0]):
        # One way to say it: the key stands on the left.
        return apply("where", apply("not", c), b, a)
    if n.kind == "bool":
        if a.op == "const":
            return apply("or", c, b) if a.attr else apply("and", apply("not", c), b)
        if b.op == "const":
            return apply("or", apply("not", c), a) if b.attr else apply("and", c, a)
    if c.op == "le" and c.args[0].op == "axis" and _is(c.args[1], 0) and alg.simplify(substitute(b, {c.args[0]: const(0)})) == a:
        return b                                       # the first element agrees with the rule for all others
    return None


def _and(_: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    if FALSE in (a, b):
        return FALSE
    return b if a == TRUE else a if b == TRUE or a == b else None


def _or(_: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    if TRUE in (a, b):
        return TRUE
    return b if a == FALSE else a if b == FALSE or a == b else None


def _xor(_: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    if a.op == "const" or b.op == "const":
        c, x = (a, b) if a.op == "const" else (b, a)
        return apply("not", x) if c.attr else x
    return None


def _not(_: Algebra, n: Expr) -> Expr | None:
    (a,) = n.args
    if a.op == "not":
        return a.args[0]
    if a.op in ("and", "or"):
        return apply("or" if a.op == "and" else "and", *(apply("not", x) for x in a.args))
    if a.op == "le" and a.args[0].kind == "int":
        return apply("le", apply("add", a.args[1], const(1)), a.args[0])
    return None


def _eq(alg: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    if a.op == "const" and b.op != "const":
        return apply("eq", b, a)
    if a.kind == "bool" and b.kind == "bool":
        return apply("not", apply("xor", a, b))
    inner = _from_bool(a)
    if inner is not None and b.op == "const":          # float(mask) == 0  →  not mask
        return inner if b.attr == 1 else apply("not", inner) if b.attr == 0 else FALSE
    return alg.compare(n)


def _ne(_: Algebra, n: Expr) -> Expr:
    return apply("not", apply("eq", *n.args))


def _lt(_: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    return apply("le", apply("add", a, const(1)), b) if a.kind == b.kind == "int" else None


def _gt(_: Algebra, n: Expr) -> Expr | None:
    return apply("lt", n.args[1], n.args[0]) if n.args[0].kind == "int" else None


def _ge(_: Algebra, n: Expr) -> Expr | None:
    return apply("le", n.args[1], n.args[0]) if n.args[0].kind == "int" else None


def _cast(alg: Algebra, n: Expr) -> Expr | None:
    (a,) = n.args
    if a.kind == n.kind:
        return a
    inner = _from_bool(a)
    if inner is not None:
        return inner if n.op == "bool" else apply(n.op, inner) if a.args[0] is not inner or a.op != n.op else None
    if n.op == "bool":
        if a.op == "where" and all(x.op == "const" for x in a.args[1:]):
            return apply("where", a.args[0], *(apply("bool", x) for x in a.args[1:]))
        return apply("not", apply("eq", a, const(0))) if a.kind == "int" else None
    return None


def _from_bool(a: Expr) -> Expr | None:
    """The bool behind float(b), int(b) or float(int(b))."""
    while a.op in ("float", "int"):
        a = a.args[0]
        if a.kind == "bool":
            return a
    return None


def _minmax(alg: Algebra, n: Expr) -> Expr | None:
    a, b = n.args
    if a == b:
        return a
    if n.kind == "int":
        order = alg.compare(apply("le", a, b))
        if order in (TRUE, FALSE):
            return (a if order == TRUE else b) if n.op == "min" else (b if order == TRUE else a)
    return None


def _abs(alg: Algebra, n: Expr) -> Expr | None:
    (a,) = n.args
    if a.kind == "int":
        low, high = alg.bounds(alg.poly(a))
        if low is not None and alg.nonnegative(low):
            return a
        if high is not None and alg.nonnegative(-high):
            return apply("neg", a)
    return None


def _exp(_: Algebra, n: Expr) -> Expr | None:
    inner = n.args[0]
    return inner.args[0] if inner.op == "log" and inner.args[0].op == "weight" else None     # a weight is never negative


RULES: dict[str, Callable[[Any, Expr], Expr | None]] = {
    "exp": _exp, "add": _add, "sub": _sub, "mul": _mul, "div": _div, "where": _where, "and": _and, "or": _or, "xor": _xor, "not": _not,
    "eq": _eq, "ne": _ne, "le": lambda alg, n: alg.compare(n), "lt": _lt, "gt": _gt, "ge": _ge, "float": _cast, "int": _cast, "bool": _cast,
    "min": _minmax, "max": _minmax, "abs": _abs,
}
