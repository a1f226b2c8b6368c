"""Ranges: which comparisons become bounds, which must not, and what they say on numbers."""
from __future__ import annotations

import itertools

import pytest
import torch

from attnfuse.intervals import interval
from attnfuse.program import DOT, Env, Expr, add, apply, axis, const, depends, evaluate, le, load, mul, size, where
from attnfuse.ranges import analyse, full_range, key_range
from attnfuse.reference import positions
from tests.build import B0, B1, CAUSAL, FLOAT32_MIN, I, INF, J, S, added, attention, causal, padding, window

MASK = (("mask", "bool", 2),)
LENGTHS = (("lengths", "int64", 1),)
GAP = apply("sub", I, J)
later = lambda n: le(J, add(I, const(n)))


def both(a: Expr, b: Expr) -> Expr:
    return apply("and", a, b)


BOUNDED: dict[str, tuple[Expr, tuple[tuple[str, str, int], ...], list[str], bool]] = {
    "causal -inf": (causal(S), (), ["j <= i"], False),
    "causal finfo.min": (causal(S, FLOAT32_MIN), (), ["j <= i"], True),
    "causal -1e9": (causal(S, -1e9), (), ["j <= i"], True),
    "added": (added(S, CAUSAL), (), ["j <= i"], True),
    "two masks added": (added(added(S, CAUSAL), padding()), MASK, ["j <= i"], True),
    "with padding": (where(both(CAUSAL, padding()), S, const(-INF)), MASK, ["j <= i"], False),
    "offset of a cache": (where(le(J, add(I, apply("sub", size("j"), size("i")))), S, const(-INF)), (), ["j <= i + |j| - |i|"], False),
    "strictly before": (where(apply("lt", J, I), S, const(-INF)), (), ["j <= i - 1"], False),
    "written the other way": (where(apply("gt", J, I), const(-INF), S), (), ["j <= i"], False),
    "negated": (where(apply("not", CAUSAL), const(-INF), S), (), ["j <= i"], False),
    "future only": (where(CAUSAL, const(-INF), S), (), ["j >= i + 1"], False),
    "window": (where(window(4), S, const(-INF)), (), ["j <= i", "j >= i - 3"], False),
    "two-sided window": (where(le(apply("abs", GAP), const(3)), S, const(-1e9)), (), ["j >= i - 3", "j <= i + 3"], True),
    "diagonal": (where(apply("eq", I, J), S, const(-INF)), (), ["j >= i", "j <= i"], False),
    "first keys": (where(le(J, const(5)), S, const(-INF)), (), ["j <= 5"], False),
    "float mask": (add(S, mul(apply("sub", const(1.0), apply("float", both(CAUSAL, padding()))), const(-1e9))), MASK, ["j <= i"], True),
    "int mask compared": (where(apply("eq", apply("int", both(CAUSAL, padding())), const(0)), const(-INF), S), MASK, ["j <= i"], False),
    "masked, then scaled": (mul(const(0.125), causal(DOT, -1e9)), (), ["j <= i"], True),
    "subtracted": (apply("sub", S, where(CAUSAL, const(0.0), const(-FLOAT32_MIN))), (), ["j <= i"], True),
    "float16's fill": (causal(S, -65504.0), (), ["j <= i"], True),
    "logarithm of a mask": (add(S, apply("log", apply("float", CAUSAL))), (), ["j <= i"], False),
    "softcap before": (causal(mul(const(5.0), apply("tanh", S))), (), ["j <= i"], False),
    "by minimum": (apply("min", S, where(CAUSAL, const(INF), const(-INF))), (), ["j <= i"], False),
    "a window that grows by head": (where(le(GAP, add(B1, const(1))), S, const(-INF)), (), ["j >= i - b1 - 1"], False),
    "both of two, by minimum": (where(le(J, apply("min", I, const(5))), S, const(-INF)), (), ["j <= i", "j <= 5"], False),
    "chunks": (where(both(CAUSAL, apply("eq", apply("floordiv", I, const(4)), apply("floordiv", J, const(4)))), S, const(-INF)), (),
               ["j <= i", "j >= i - 3", "j <= i + 3"], False),
    "a limit that grows by head": (where(le(J, add(I, B1)), S, const(-INF)), (), ["j <= b1 + i"], False),
    "with a bias": (added(add(S, load(3, (B1, I, J), "float")), CAUSAL), (("bias", "float64", 3),), ["j <= i"], True),
}

UNBOUNDED: dict[str, tuple[Expr, tuple[tuple[str, str, int], ...]]] = {
    "prefix": (where(apply("or", CAUSAL, le(J, const(5))), S, const(-INF)), ()),
    "under another where": (where(padding(), causal(S), S), MASK),
    "small fill": (causal(S, -1e4), ()),
    "-100 added": (added(S, CAUSAL, -100.0), ()),
    "softcap after": (mul(const(30.0), apply("tanh", mul(const(1 / 30), added(S, CAUSAL)))), ()),
    "lifted back": (add(causal(S, -1e9), const(1e9)), ()),
    "scaled away": (mul(const(1e-9), causal(DOT, -1e9)), ()),
    "negated fill": (apply("neg", causal(S, -INF)), ()),
    "maximum": (apply("max", causal(S), const(-5.0)), ()),
    "exponent": (apply("exp", causal(S)), ()),
    "read bound": (where(le(J, load(3, (B0,), "int")), S, const(-INF)), LENGTHS),
    "rows only": (where(le(I, const(5)), S, const(-INF)), ()),
    "two steps a key": (where(le(mul(const(2), J), I), S, const(-INF)), ()),
    "every second key": (where(le(mul(const(2), J), const(7)), S, const(-INF)), ()),
    "either of two, by maximum": (where(le(J, apply("max", I, const(5))), S, const(-INF)), ()),
    "a bias of any size": (add(causal(S, -1e9), mul(const(100.0), load(3, (B0, J), "float"))), (("bias", "float64", 2),)),
    "blocks of two sizes": (where(apply("eq", apply("floordiv", I, const(4)), apply("floordiv", J, const(8))), S, const(-INF)), ()),
    "blocks of documents": (where(apply("eq", apply("floordiv", load(3, (B0,), "int"), const(4)), apply("floordiv", J, const(4))), S,
                                  const(-INF)), LENGTHS),
    "anti-diagonal": (where(le(add(I, J), const(9)), S, const(-INF)), ()),
    "both branches alive": (where(CAUSAL, S, mul(const(2.0), S)), ()),
    "xor": (where(apply("xor", CAUSAL, padding()), S, const(-INF)), MASK),
    "product with the mask": (mul(S, apply("float", CAUSAL)), ()),
    "a mask that may undo it": (add(causal(S, -1e9), mul(load(3, (B0, J), "float"), const(-1e9))), (("mask", "float64", 2),)),
    "outside a window": (where(le(const(3), apply("abs", GAP)), S, const(-INF)), ()),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds(name: str) -> None:
    score, extra, expected, speculative = BOUNDED[name]
    ranges = analyse(attention(score, extra))
    assert sorted(map(str, ranges.bounds)) == sorted(expected)
    assert ranges.speculative == speculative
    assert (ranges.masked_below > -INF) == speculative


@pytest.mark.parametrize("name", UNBOUNDED)
def test_near_misses(name: str) -> None:
    score, extra = UNBOUNDED[name]
    assert analyse(attention(score, extra)).bounds == ()


@pytest.mark.parametrize("name", BOUNDED)
def test_dead_outside_and_unchanged_inside(name: str) -> None:
    """Every pair that a bound excludes is dead on random data; where all hold, `inside` is the score."""
    score, extra, _, _ = BOUNDED[name]
    spec = attention(score, extra)
    ranges = analyse(spec)
    sizes = {"b0": 1, "b1": 2, "i": 9, "j": 11, "d": 1, "e": 1}
    axes = positions(spec, sizes, torch.device("cpu"), ("b0", "b1", "i", "j"))
    tensors = {3: torch.rand(1, 11) > 0.5 if extra == MASK else torch.randn(2, 9, 11, dtype=torch.float64)}
    shape = [1, 2, 9, 11]
    env = Env(axes, sizes, lambda n, index: tensors[n][index], torch.float64, torch.device("cpu"), dot=torch.randn(shape, dtype=torch.float64))
    whole, inside = (evaluate(x, env).expand(shape) for x in (score, ranges.inside))
    for b1, i, j in itertools.product(range(2), range(9), range(11)):
        lo, hi = key_range(ranges, sizes, {"b0": 0, "b1": b1}, i, i + 1, 11)
        if lo <= j < hi:
            assert torch.equal(whole[0, b1, i, j], inside[0, b1, i, j])
        else:
            assert whole[0, b1, i, j] < (2 * ranges.masked_below if ranges.speculative else -1e30) * 0.99


@pytest.mark.parametrize("name", BOUNDED)
def test_ranges_of_tiles(name: str) -> None:
    """The range of a tile is the union, the full range the intersection, of its rows' ranges."""
    score, extra, _, _ = BOUNDED[name]
    ranges = analyse(attention(score, extra))
    sizes = {"b0": 1, "b1": 2, "i": 9, "j": 11}
    for i0, i1 in itertools.combinations(range(10), 2):
        rows = [set(range(*key_range(ranges, sizes, {"b0": 0, "b1": b}, i, i + 1, 11))) for b in range(2) for i in range(i0, i1)]
        outer = set(range(*key_range(ranges, sizes, None, i0, i1, 11)))
        inner = set(range(*full_range(ranges, sizes, None, i0, i1, 11)))
        assert set().union(*rows) <= outer and inner <= set.intersection(*rows)
        assert inner <= outer
        if "head" not in name:
            assert inner == set.intersection(*rows)


def test_empty_ranges_lie_within_the_keys() -> None:
    ranges = analyse(attention(where(both(CAUSAL, le(const(20), J)), S, const(-INF))))
    for at in range(9):
        lo, hi = key_range(ranges, {"b0": 1, "b1": 1, "i": 9, "j": 11}, None, at, at + 1, 11)
        assert 0 <= lo == hi <= 11


def test_constants_are_rounded_as_the_arithmetic_rounds_them() -> None:
    """float64's least number is -inf in float32, where it needs no speculation, and finite in float64."""
    least = torch.finfo(torch.float64).min
    assert not analyse(attention(causal(S, least), dtype="float32")).speculative
    assert analyse(attention(causal(S, least), dtype="float64")).speculative


def test_masked_below_separates_fills_from_scores() -> None:
    ranges = analyse(attention(added(causal(S, -1e9), padding()), MASK))
    assert -1e9 < ranges.masked_below < -1e8
    mixed = analyse(attention(where(le(GAP, const(3)), causal(S, -1e9), const(-INF))))
    assert mixed.speculative and -1e9 < mixed.masked_below


def test_intervals_contain_every_value() -> None:
    """Of each operation, on numbers from both signs, against evaluation."""
    numbers = [-3.0, -1.0, -0.25, 0.0, 0.5, 2.0]
    choose = lambda n: where(le(axis("i"), const(n)), const(numbers[n]), const(numbers[(n + 3) % 6]))
    env = lambda i: Env({"i": torch.tensor(i)}, {}, lambda n, x: torch.zeros(()), torch.float64, torch.device("cpu"))
    for op in ("add", "sub", "mul", "div", "min", "max", "le", "lt", "ge", "gt", "eq", "ne"):
        for m, n in itertools.product(range(6), range(6)):
            expr = apply(op, choose(m), choose(n))
            low, high = interval(expr, {})
            for i in range(7):
                value = float(evaluate(expr, env(i)))
                assert value != value or low <= value <= high, (op, m, n, i)
    for op in ("neg", "abs", "exp", "log", "log1p", "sqrt", "tanh", "sigmoid", "erf", "sin", "cos", "sign", "floor", "bool"):
        for n in range(6):
            expr = apply(op, choose(n))
            low, high = interval(expr, {})
            for i in range(7):
                value = float(evaluate(expr, env(i)))
                assert value != value or low - 1e-12 <= value <= high + 1e-12, (op, n, i)


def test_inside_needs_no_axis_where_only_bounds_needed_it() -> None:
    assert analyse(attention(added(S, window(4)))).inside == S
    assert depends(analyse(attention(added(added(S, CAUSAL), padding()), MASK)).inside) == {"dot", "b0", "j"}
