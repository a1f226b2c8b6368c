"""Simplification of scalar programs: integers by sympy, everything else by a table of small rules.

Normal form, on which passes and ranges rely: integer arithmetic is an expanded polynomial; comparisons of integers are
``le(a, b)`` or ``eq(a, b)``; ``not`` stands only before what has no opposite; constants are folded unless the result would
overflow float32 (two stacked ``finfo.min`` are -inf in float32 and not in float64: the executor decides).

    >>> i, j = axis("i"), axis("j")
    >>> print(simplify(apply("not", apply("gt", j, i))), "|", simplify(apply("sub", apply("add", i, j), i)))
    j <= i | j
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from .identities import RULES, fold
from .program import FALSE, OPS, TRUE, Expr, apply, axis, const, depends, size, walk

LONGEST = 1 << 24
"""No axis is longer: a bound for arithmetic in narrow integers."""
_ARITHMETIC = frozenset({"add", "sub", "mul", "neg"})
_NONE = (None, None)
Poly = Any
"""A sympy expression; what sympy says of its types is too narrow to be checked."""
Bounds = tuple[Poly | None, Poly | None]


class _FloorDiv(sympy.Function):
    """Opaque to sympy, so that nothing is assumed about its rounding."""


class _Mod(sympy.Function):
    """Remainder with the sign of the divisor."""


class Algebra:
    """Simplifies under known facts: the lengths of axes (numbers or polynomials in sizes) and least values of sizes.

    Args:
        lengths: axis name → its length, an integer program without axes; an axis that is not named has length ``|axis|``.
        least: size name → a number it is never below (by default 1 or 0 for lengths of axes; of other sizes nothing is known,
            for an integer that came with the call may be negative).
    """

    def __init__(self, lengths: Mapping[str, Expr] | None = None, least: Mapping[str, int] | None = None) -> None:
        self.lengths = dict(lengths or {})
        self.least = dict(least or {})
        self.loaded: dict[int, tuple[int, int]] = {}       # operand → least and greatest value of its elements, where known
        self._atoms: dict[sympy.Symbol, Expr] = {}
        self._done: dict[Expr, Expr] = {}
        self._polys: dict[Expr, Poly] = {}

    # ---- integers

    def poly(self, expr: Expr) -> Poly:
        """An integer program as an expanded polynomial over atoms (axes, sizes, loads, quotients …)."""
        if expr not in self._polys:
            self._polys[expr] = self._poly(expr)
        return self._polys[expr]

    def _poly(self, expr: Expr) -> Poly:
        if expr.op == "const":
            return sympy.Integer(expr.attr)
        if expr.op in _ARITHMETIC:
            args = [self.poly(a) for a in expr.args]
            out = {"add": lambda: args[0] + args[1], "sub": lambda: args[0] - args[1], "mul": lambda: args[0] * args[1],
                   "neg": lambda: -args[0]}[expr.op]()
            return _recombined(sympy.expand(out))
        if expr.op in ("floordiv", "mod"):
            return self._divide(expr.op, self.poly(expr.args[0]), self.poly(expr.args[1]))
        symbol = sympy.Symbol(f"{expr.op}:{expr.attr}" if not expr.args else repr(expr), integer=True)
        self._atoms[symbol] = expr
        return symbol

    def _divide(self, op: str, a: Poly, n: Poly) -> Poly:
        """Take out of a // n or a % n every term that n divides; drop the rest where it is proven to lie in [0, n)."""
        if n == 0:                                     # a length of an empty tensor: no element asks for the value
            return _FloorDiv(a, n) if op == "floordiv" else _Mod(a, n)
        whole, rest = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(a):
            ratio = sympy.cancel(term / n)
            if ratio.as_numer_denom()[1] == 1:
                whole += ratio
            else:
                rest += term
        if rest.is_Integer and n.is_Integer and n > 0:
            whole, rest = whole + rest // n, rest % n
        if self._within(rest, n):
            return sympy.expand(whole if op == "floordiv" else rest)
        common = self._common_factor(rest, n)
        if common is not None:                         # (g·y + r) // (g·m) = y // m and (g·y + r) % (g·m) = g·(y % m) + r
            g, y, r = common
            inner = self._divide(op, y, n / g)
            return sympy.expand(whole + inner if op == "floordiv" else g * inner + r)
        return sympy.expand(whole + _FloorDiv(rest, n) if op == "floordiv" else _Mod(rest, n))

    def _within(self, poly: Poly, n: Poly) -> bool:
        """Whether 0 <= poly < n is proven."""
        low, high = self.bounds(poly)
        return low is not None and high is not None and self.nonnegative(low) and self.nonnegative(n - 1 - high)

    def _common_factor(self, poly: Poly, n: Poly) -> tuple[Poly, Poly, Poly] | None:
        """(g, y, r) with poly = g·y + r, 0 <= r < g, and g a proper divisor of the number n."""
        if not n.is_Integer:
            return None
        terms = sympy.Add.make_args(poly)
        for g in sorted({abs(t.as_coeff_Mul()[0]) for t in terms}, reverse=True):
            if g.is_Integer and 1 < g < n and n % g == 0:
                multiple = [t for t in terms if t.as_coeff_Mul()[0] % g == 0]
                r = sympy.Add(*(t for t in terms if t not in multiple))
                if self._within(r, g):
                    return g, sympy.expand(sympy.Add(*multiple) / g), r
        return None

    def expr(self, poly: Poly) -> Expr:
        """Back from a polynomial; positive terms first, so that a difference prints as one."""
        terms = sorted(sympy.Add.make_args(poly), key=lambda t: (t.could_extract_minus_sign(), t.is_number, str(t)))
        out: Expr | None = None
        for term in terms:
            minus = out is not None and term.could_extract_minus_sign()
            piece = self._product(-term if minus else term)
            out = piece if out is None else apply("sub" if minus else "add", out, piece)
        return out or const(0)

    def _product(self, term: Poly) -> Expr:
        out: Expr | None = None
        for factor in sorted(sympy.Mul.make_args(term), key=lambda f: (f.is_number, str(f))):
            base, power = factor.as_base_exp()
            for _ in range(int(power)):
                piece = self._atom(base)
                out = piece if out is None else apply("mul", out, piece)
        assert out is not None
        return out

    def _atom(self, base: Poly) -> Expr:
        if base.is_Integer:
            return const(int(base))
        if isinstance(base, (_FloorDiv, _Mod)):
            a, n = (self.expr(x) for x in base.args)
            return apply("floordiv" if isinstance(base, _FloorDiv) else "mod", a, n)
        return self._atoms[base]  # type: ignore[index]

    def bounds(self, poly: Poly) -> Bounds:
        """Least and greatest value, as polynomials in sizes; None where nothing is known."""
        low: Poly | None = sympy.Integer(0)
        high: Poly | None = sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(poly)):
            a, b = self._term_bounds(term)
            low = None if low is None or a is None else low + a
            high = None if high is None or b is None else high + b
        return low, high

    def _term_bounds(self, term: Poly) -> Bounds:
        """Of one product. More than one varying factor counts only where all are known to be non-negative."""
        low, high, factor = sympy.Integer(1), sympy.Integer(1), sympy.Integer(1)
        for part in sympy.Mul.make_args(term):
            base, power = part.as_base_exp()
            if base.is_Integer:
                factor *= base ** power
                continue
            a, b = self._atom_bounds(base)
            if power != 1 or (low, high) != (1, 1):
                if a is None or not self.nonnegative(a) or low is None or not self.nonnegative(low):
                    return _NONE
            low = None if low is None or a is None else low * a ** power
            high = None if high is None or b is None else high * b ** power
        if factor < 0:
            low, high = high, low
        scale = lambda x: None if x is None else sympy.expand(x * factor)
        return scale(low), scale(high)

    def _atom_bounds(self, base: Poly) -> Bounds:
        if isinstance(base, _Mod):
            most: Poly = base.args[1]
            return (sympy.Integer(0), most - 1) if self.nonnegative(most - 1) else _NONE
        if isinstance(base, _FloorDiv):
            a, b = self.bounds(base.args[0])
            n: Poly = base.args[1]
            if not self.nonnegative(n - 1):
                return _NONE
            floor = lambda x: x // n if x is not None and x.is_Integer and n.is_Integer else None
            low = floor(a) if floor(a) is not None else sympy.Integer(0) if a is not None and self.nonnegative(a) else None
            return low, floor(b)
        expr = self._atoms.get(base)  # type: ignore[arg-type]
        if expr is None:
            return _NONE
        if expr.op == "axis":
            name = str(expr.attr)
            return sympy.Integer(0), self.poly(self.lengths.get(name, size(name))) - 1
        if expr.op == "size":
            return base, base           # kept as a symbol: nonnegative() knows its least value
        if expr.op == "int" and expr.args[0].kind == "bool":
            return sympy.Integer(0), sympy.Integer(1)
        if expr.op == "load" and expr.attr in self.loaded:
            low, high = self.loaded[expr.attr]  # type: ignore[index]
            return sympy.Integer(low), sympy.Integer(high)
        return _NONE

    def extreme(self, poly: Poly, sign: int) -> int | None:
        """The greatest (sign 1) or least (-1) value of a polynomial in sizes, if no size exceeds `LONGEST`; None where unknown."""
        total = 0
        for term in sympy.Add.make_args(sympy.expand(poly)):
            factor, rest = term.as_coeff_Mul()
            sizes = [f.as_base_exp() for f in sympy.Mul.make_args(rest) if f != 1]
            if not factor.is_Integer or any(not self._is_length(base) for base, _ in sizes):
                return None
            if not sizes or factor * sign > 0:
                total += int(factor) * LONGEST ** sum(int(power) for _, power in sizes)
        return total

    def _is_length(self, base: Poly) -> bool:
        expr = self._atoms.get(base)  # type: ignore[arg-type]
        return expr is not None and expr.op == "size" and self.nonnegative(base)

    def nonnegative(self, poly: Poly) -> bool:
        """Whether a polynomial in sizes is proven to be >= 0: every coefficient is, once sizes are written as least + t."""
        poly = sympy.expand(poly)
        if poly.is_Integer:
            return bool(poly >= 0)
        shift = {}
        for symbol in poly.free_symbols:
            expr = self._atoms.get(symbol)  # type: ignore[arg-type]
            if expr is None or expr.op != "size":
                return False
            name = str(expr.attr)
            least = self.least.get(name, 1 if name in _AXIS_NAMES else 0 if name.startswith("b") else None)
            if least is None:
                return False
            shift[symbol] = symbol + least
        if poly.atoms(_FloorDiv, _Mod):
            return False
        return all(c >= 0 for c in sympy.Poly(poly.subs(shift, simultaneous=True), *shift).coeffs())

    def affine(self, expr: Expr, axes: tuple[str, ...]) -> tuple[dict[str, Expr], Expr] | None:
        """`expr` = Σ coefficient·axis + rest with coefficients and rest free of `axes`; None where it is not of this form."""
        poly = self.poly(expr)
        symbols = {}
        for name in axes:
            symbols[name] = self.poly(axis(name))
        out: dict[str, Expr] = {}
        for name, symbol in symbols.items():
            coefficient = poly.coeff(symbol, 1)
            poly = sympy.expand(poly - coefficient * symbol)
            out[name] = self.expr(coefficient)
        rest = self.expr(poly)
        if any(depends(x) & set(axes) for x in (rest, *out.values())):
            return None
        return out, rest

    # ---- everything

    def simplify(self, expr: Expr) -> Expr:
        """The normal form of a program."""
        for node in walk(expr):
            if node in self._done:
                continue
            new = Expr(node.op, tuple(self._done[a] for a in node.args), node.attr, node.kind) if node.args else node
            out = self._step(new)
            self._done[node] = out if out == new else self.simplify(out)
            self._done.setdefault(self._done[node], self._done[node])
        return self._done[expr]

    def _step(self, node: Expr) -> Expr:
        if node.op in OPS and all(a.op == "const" for a in node.args):
            folded = fold(node)
            if folded is not None:
                return folded
        if node.kind == "int" and node.op in _ARITHMETIC | {"floordiv", "mod"}:
            return self.expr(self.poly(node))
        rule = RULES.get(node.op)
        return (rule(self, node) if rule else None) or node

    def compare(self, node: Expr) -> Expr | None:
        """le and eq of integers: decided where the bounds allow, else with the terms sorted onto both sides."""
        a, b = node.args
        if a.kind != "int" or b.kind != "int":
            return None
        gap = sympy.expand(self.poly(b) - self.poly(a))
        low, high = self.bounds(gap)
        if node.op == "le":
            if low is not None and self.nonnegative(low):
                return TRUE
            if high is not None and self.nonnegative(-high - 1):
                return FALSE
        else:
            if gap == 0:
                return TRUE
            if (low is not None and self.nonnegative(low - 1)) or (high is not None and self.nonnegative(-high - 1)):
                return FALSE
        # Negative terms go to the left; where there are none, the constant does.
        left = sympy.Add(*(-t for t in sympy.Add.make_args(gap) if t.could_extract_minus_sign() and not t.is_number))
        if left == 0:
            left = -gap.as_coeff_Add()[0]
        return apply(node.op, self.expr(left), self.expr(sympy.expand(gap + left)))


def _recombined(poly: Poly) -> Poly:
    """n·(x // n) + x % n = x: what taking an index apart and putting it together again leaves."""
    for rest in poly.atoms(_Mod):
        x, n = rest.args
        c = poly.coeff(rest, 1)
        quotient = _FloorDiv(x, n)
        if c != 0 and sympy.expand(poly.coeff(quotient, 1) - c * n) == 0:
            poly = sympy.expand(poly - c * n * quotient - c * rest + c * x)
    return poly


_AXIS_NAMES = frozenset({"i", "j", "d", "e"})


def simplify(expr: Expr) -> Expr:
    """The normal form of a program, with nothing known but that axes run from 0 to their length."""
    return Algebra().simplify(expr)


def affine(expr: Expr, axes: tuple[str, ...]) -> tuple[dict[str, Expr], Expr] | None:
    """`Algebra.affine` with nothing known about the sizes."""
    return Algebra().affine(expr, axes)
