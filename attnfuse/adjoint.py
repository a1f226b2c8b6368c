"""Derivatives of scalar programs, as programs: reverse mode over `Expr`.

``adjoint(f, x)`` is what a gradient arriving at f, named `UPSTREAM`, sends to x. It keeps autograd's conventions where they
matter: the branch of a ``where`` that was not taken gets exactly 0 even if the gradient is NaN, a tie of ``max`` is shared.

    >>> from .program import DOT, axis, const, le, mul, where
    >>> print(adjoint(where(le(axis("j"), axis("i")), mul(const(0.125), DOT), const(-1e9)), DOT))
    0.125 * where(j <= i, upstream, 0)
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable

from .algebra import simplify
from .program import Expr, add, apply, const, mul, walk, where

UPSTREAM = Expr("axis", attr="upstream", kind="float")
"""The gradient that arrives; given to `program.evaluate` through its memo."""
ZERO = const(0.0)

Rule = Callable[[Expr, Expr], tuple[Expr | None, ...]]
"""(node, gradient of the node) → gradient of each argument, None where there is none."""


def _neg(x: Expr) -> Expr:
    return apply("neg", x)


def _div(a: Expr, b: Expr) -> Expr:
    return apply("div", a, b)


def _extreme(op: str) -> Rule:
    def rule(n: Expr, g: Expr) -> tuple[Expr | None, ...]:
        a, b = n.args
        half, tie = mul(const(0.5), g), apply("eq", a, b)
        return (where(tie, half, where(apply(op, a, b), g, ZERO)), where(tie, half, where(apply(op, b, a), g, ZERO)))
    return rule


def _pow(n: Expr, g: Expr) -> tuple[Expr | None, ...]:
    a, b = n.args
    base = ZERO if b == ZERO else mul(g, mul(b, apply("pow", a, apply("sub", b, const(1.0)))))
    if b.op == "const":
        return base, None
    flat = apply("and", apply("eq", a, ZERO), apply("ge", b, ZERO))
    return where(apply("eq", b, ZERO), ZERO, base), mul(g, where(flat, ZERO, mul(n, apply("log", a))))


def _one(slope: Callable[[Expr, Expr], Expr]) -> Rule:
    """Rule of a function of one argument from its derivative, given (argument, value)."""
    return lambda n, g: (mul(g, slope(n.args[0], n)),)


_FLAT: Rule = lambda n, g: (None,) * len(n.args)

RULES: dict[str, Rule] = {
    "add": lambda n, g: (g, g),
    "sub": lambda n, g: (g, _neg(g)),
    "mul": lambda n, g: (mul(g, n.args[1]), mul(g, n.args[0])),
    "div": lambda n, g: (_div(g, n.args[1]), _neg(_div(mul(g, n), n.args[1]))),
    "mod": lambda n, g: (g, _neg(mul(g, apply("floor", _div(*n.args))))),
    "min": _extreme("lt"), "max": _extreme("gt"), "pow": _pow,
    "neg": lambda n, g: (_neg(g),),
    "abs": _one(lambda x, y: apply("sign", x)),
    "exp": _one(lambda x, y: y),
    "log": lambda n, g: (_div(g, n.args[0]),),
    "log1p": lambda n, g: (_div(g, add(n.args[0], const(1.0))),),
    "sqrt": lambda n, g: (_div(g, mul(const(2.0), n)),),
    "rsqrt": _one(lambda x, y: mul(const(-0.5), mul(y, mul(y, y)))),
    "tanh": _one(lambda x, y: apply("sub", const(1.0), mul(y, y))),
    "sigmoid": _one(lambda x, y: mul(y, apply("sub", const(1.0), y))),
    "erf": _one(lambda x, y: mul(const(2.0 / math.sqrt(math.pi)), apply("exp", _neg(mul(x, x))))),
    "sin": _one(lambda x, y: apply("cos", x)),
    "cos": _one(lambda x, y: _neg(apply("sin", x))),
    "where": lambda n, g: (None, where(n.args[0], g, ZERO), where(n.args[0], ZERO, g)),
    "float": lambda n, g: (g,),
    "sign": _FLAT, "floor": _FLAT, "ceil": _FLAT, "round": _FLAT, "floordiv": _FLAT,
}


@functools.lru_cache(maxsize=4096)
def adjoint(expr: Expr, leaf: Expr) -> Expr:
    """The gradient of `leaf` (any sub-expression of kind float) where `UPSTREAM` is the gradient of `expr`; constant 0 if none.

    Raises ValueError where an operation on the way has no derivative rule.
    """
    order = list(walk(expr))
    active = _active(order, leaf)
    gradient: dict[Expr, Expr] = {expr: UPSTREAM}
    for node in reversed(order):
        arrived = gradient.get(node)
        if arrived is None or node == leaf or not node.args or node not in active:
            continue
        rule = RULES.get(node.op)
        if rule is None:
            raise ValueError(f"no derivative of {node.op!r}")
        for arg, sent in zip(node.args, rule(node, arrived), strict=True):
            if sent is not None and arg in active:
                gradient[arg] = add(gradient[arg], sent) if arg in gradient else sent
    return simplify(gradient.get(leaf, ZERO))


def _active(order: list[Expr], leaf: Expr) -> set[Expr]:
    """The float nodes that depend on `leaf`; `order` has arguments before their users."""
    active: set[Expr] = set()
    for node in order:
        if node == leaf or (node.kind == "float" and node.op != "load" and any(a in active for a in node.args)):
            active.add(node)
    return active
