"""Attentions whose scores take something from the distance of key and query, and others that only look so; for the tests of tables."""
from __future__ import annotations

import math

import torch

from attnfuse import distances
from attnfuse.program import DOT, WEIGHT, Expr, add, apply, axis, const, le, load, mul, size, where
from attnfuse.spec import AttentionSpec
from tests.specs import CAUSAL, INF, MIN, PADDING, SCALED, SLOPES, Captured, Case, both, floats, minus, padding, whole

b0, b1, i, j = (axis(n) for n in ("b0", "b1", "i", "j"))
DISTANCE = minus(j, i)
FAR = apply("abs", DISTANCE)
BUCKETS = Captured("table", None, 2, lambda s, g: torch.randn(32, s["b1"], generator=g))
RATES = Captured("rates", "float32", 1, lambda s, g: torch.rand(s["b1"], generator=g) + 0.1)
near = add(apply("max", apply("min", DISTANCE, const(5)), const(-5)), const(5))
power = lambda base, exponent: apply("pow", base, exponent)


def bucket(distance: Expr) -> Expr:
    """T5's bucket of 32, both directions."""
    far = apply("abs", distance)
    large = add(apply("int", mul(const(8.0), apply("div", apply("log", apply("div", floats(far), const(8.0))), const(math.log(16.0))))), const(8))
    return add(mul(const(16), apply("int", le(const(1), distance))), where(le(far, const(7)), far, apply("min", large, const(15))))


def t5(operand: int, distance: Expr = DISTANCE) -> Expr:
    """The bias of a head at a distance."""
    return load(operand, (bucket(distance), b1), "float")


TABULATED = (
    Case("t5", add(DOT, t5(3)), captured=(BUCKETS,)),
    Case("t5_causal", where(CAUSAL, add(DOT, t5(3)), const(INF)), captured=(BUCKETS,)),
    Case("t5_causal_added", add(DOT, add(t5(3), where(CAUSAL, const(0.0), const(MIN)))), captured=(BUCKETS,)),
    Case("t5_padding", where(both(CAUSAL, padding), add(DOT, t5(4)), const(MIN)), captured=(PADDING, BUCKETS)),
    Case("t5_padding_inf", where(both(CAUSAL, padding), add(DOT, t5(4)), const(INF)), captured=(PADDING, BUCKETS)),
    Case("t5_window", where(both(CAUSAL, le(minus(i, const(7)), j)), add(DOT, t5(3)), const(INF)), captured=(BUCKETS,)),
    Case("t5_grouped", add(SCALED, t5(3)), captured=(BUCKETS,), groups=2),
    Case("t5_dropped", add(SCALED, t5(3)), mul(WEIGHT, Expr("keep", attr=(0, 0.25))), captured=(BUCKETS,)),
    Case("t5_for_all_heads", add(SCALED, load(3, (bucket(DISTANCE),), "float")), captured=(Captured("table", None, 1, lambda s, g: torch.randn(32)),)),
    Case("t5_for_each_sequence", add(SCALED, load(3, (b0, bucket(DISTANCE)), "float")),
         captured=(Captured("table", "float32", 2, lambda s, g: torch.randn(s["b0"], 32)),)),
    Case("clipped", add(SCALED, load(3, (b1, near), "float")), captured=(Captured("table", "float32", 2, lambda s, g: torch.randn(s["b1"], 11)),)),
    Case("through_a_list", add(SCALED, load(4, (load(3, (add(minus(i, j), minus(size("j"), const(1))),), "int"), b1), "float")),
         captured=(Captured("number", "int64", 1, lambda s, g: torch.randint(0, 32, (s["i"] + s["j"],), generator=g)), BUCKETS)),
    Case("logarithmic", minus(SCALED, mul(load(3, (b1,), "float"), apply("log1p", mul(load(4, (b1,), "float"), floats(FAR))))),
         captured=(SLOPES, RATES)),
    Case("wave", add(SCALED, apply("cos", mul(const(0.1), floats(DISTANCE))))),
    Case("gate", SCALED, mul(WEIGHT, apply("exp", mul(load(3, (b1,), "float"), floats(apply("neg", FAR))))), captured=(RATES,)),
    Case("of_a_number", minus(SCALED, apply("log1p", mul(load(3, (const(1),), "float"), floats(FAR)))), captured=(RATES,)),
    Case("two", add(add(SCALED, t5(3)), mul(load(4, (b1,), "float"), apply("sqrt", floats(FAR)))), captured=(BUCKETS, RATES)),
)
"""What gets a table."""

INLINE = (
    Case("nothing", SCALED),
    Case("alibi", add(SCALED, mul(load(3, (b1,), "float"), floats(DISTANCE))), captured=(SLOPES,)),
    Case("squared", add(SCALED, power(floats(DISTANCE), const(2.0)))),
    Case("a_plain_read", add(SCALED, load(3, (b1, add(DISTANCE, minus(size("i"), const(1)))), "float")),
         captured=(Captured("bias", "float32", 2, lambda s, g: torch.randn(s["b1"], s["i"] + s["j"] - 1)),)),
    Case("of_the_query_too", add(SCALED, load(3, (b0, i, near), "float")),
         captured=(Captured("table", "float32", 3, lambda s, g: torch.randn(s["b0"], s["i"], 11)),)),
    Case("of_a_sum", add(SCALED, load(3, (apply("min", add(i, j), const(31)), b1), "float")), captured=(BUCKETS,)),
    Case("of_twice_the_key", add(SCALED, t5(3, minus(add(j, j), i))), captured=(BUCKETS,)),
    Case("of_positions_that_are_given", add(SCALED, t5(4, minus(load(3, (b0, j), "int"), load(3, (b0, i), "int")))),
         captured=(Captured("ids", "int64", 2, whole(0, 50, "b0", "j")), BUCKETS)),
    Case("of_the_product", mul(SCALED, apply("exp", mul(const(-0.1), mul(DOT, floats(FAR)))))),
    Case("of_dropout", SCALED, mul(WEIGHT, mul(Expr("keep", attr=(0, 0.25)), mul(const(0.5), floats(le(FAR, const(9))))))),
    Case("a_mask", add(SCALED, where(CAUSAL, const(0.0), const(INF)))),
    Case("a_mask_by_logarithm", add(SCALED, apply("log", floats(CAUSAL)))),
    Case("a_window_of_a_bias", where(le(load(3, (near,), "float"), const(0.5)), SCALED, const(INF)),
         captured=(Captured("table", "float32", 1, lambda s, g: torch.linspace(0.0, 1.0, 11)),)),
    Case("what_lets_a_fill_be_low", minus(where(both(CAUSAL, padding), SCALED, const(-1e9)), apply("exp", mul(const(0.1), floats(FAR)))), captured=(PADDING,)),
    Case("what_may_outweigh_a_fill", add(where(CAUSAL, SCALED, const(-1e9)), apply("exp", floats(FAR)))),
)
"""What has to stay as it is, for its meaning, its bounds, or because a read would cost as much."""


def with_tables(spec: AttentionSpec, operands: list[torch.Tensor], sizes: tuple[int, ...]) -> tuple[AttentionSpec, list[torch.Tensor]]:
    """The same call with its tables made; fails where it has none."""
    found = distances.tabulated(spec)
    assert found is not None
    named = dict(zip(spec.size_names, sizes, strict=True))
    made = [distances.build(t, [operands[n] for n in s], [named[n] for n in t.size_names], operands[0].device)
            for t, s in zip(found.tables, found.sources, strict=True)]
    return found.spec, [*(operands[n] for n in found.kept), *made]
