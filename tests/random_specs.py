"""Random attentions for the generated kernels: masks, fills, biases, scales, gates, dropout, sinks and what rows without keys become, mixed."""
from __future__ import annotations

import random
from dataclasses import replace

import torch

from attnfuse.program import DOT, WEIGHT, Expr, add, apply, const, le, load, mul, size, where
from tests.specs import CAUSAL, INF, MIN, Captured, Case, Shape, b0, b1, both, floats, i, j, left_padded, minus, randn, whole

FILLS = (INF, MIN, -65504.0, -1e9, -1e4, -10.0)


class _Draw:
    """One random case under construction; captured tensors are numbered as they are taken."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.captured: list[Captured] = []

    def take(self, one: Captured) -> int:
        self.captured.append(replace(one, name=f"{one.name}{len(self.captured)}"))
        return 2 + len(self.captured)

    def floats(self, name: str, *axes: str, scale: float = 1.0, positive: bool = False) -> Expr:
        """A captured float tensor over named axes, read there."""
        make = randn(*axes, scale=scale)
        if positive:
            make = lambda s, g: torch.rand([s[a] for a in axes], generator=g) + 0.5
        at = {"b0": b0, "b1": b1, "i": i, "j": j}
        return load(self.take(Captured(name, self.rng.choice((None, "float32")), len(axes), make)), tuple(at[a] for a in axes), "float")

    def predicate(self) -> Expr:
        """Which pairs are allowed."""
        kind = self.rng.randrange(9)
        past = minus(size("j"), size("i"))
        if kind == 0:
            return CAUSAL
        if kind == 1:
            return le(j, add(i, past))
        if kind == 2:
            return both(CAUSAL, le(minus(i, const(self.rng.randrange(1, 30))), j))
        if kind == 3:
            return le(apply("abs", minus(i, j)), const(self.rng.randrange(1, 20)))
        if kind == 4:
            return load(self.take(Captured("padding", "bool", 2, left_padded)), (b0, j), "bool")
        if kind == 5:
            return load(self.take(Captured("rows", "bool", 2, lambda s, g: torch.rand(s["b0"], s["i"], generator=g) > 0.3)), (b0, i), "bool")
        if kind == 6:
            ids = self.take(Captured("segments", "int32", 2, lambda s, g: torch.arange(max(s["i"], s["j"])).div(11, rounding_mode="floor")
                                     .int().repeat(s["b0"], 1)))
            return apply("eq", load(ids, (b0, i), "int"), load(ids, (b0, j), "int"))
        if kind == 7:
            return load(self.take(Captured("mask", "bool", 2, lambda s, g: torch.rand(s["i"], s["j"], generator=g) > 0.4)), (i, j), "bool")
        return apply(self.rng.choice(("or", "and")), self.predicate(), self.predicate())

    def masked(self, score: Expr) -> Expr:
        """A mask, selected or added."""
        predicate, fill = self.predicate(), self.rng.choice(FILLS)
        how = self.rng.randrange(3)
        if how == 0:
            return add(score, where(predicate, const(0.0), const(fill)))
        return where(predicate, score, const(fill)) if how == 1 else where(apply("not", predicate), const(fill), score)

    def biased(self, score: Expr) -> Expr:
        """Something added to the scores, or multiplied with them."""
        kind = self.rng.randrange(8)
        if kind == 0:
            buckets = self.take(Captured("buckets", "int64", 2, whole(0, 5, "i", "j")))
            table = self.take(Captured("table", None, 2, lambda s, g: torch.randn(5, s["b1"], generator=g)))
            return add(score, load(table, (load(buckets, (i, j), "int"), b1), "float"))
        if kind == 1:
            return add(score, mul(self.floats("slopes", "b1", scale=0.2), floats(minus(j, i))))
        if kind == 2:
            return mul(self.floats("temperature", *self.rng.choice(((), ("b1",), ("b0", "b1", "i"))), positive=True), score)
        if kind == 3:
            return mul(const(3.0), apply("tanh", mul(const(1 / 3.0), score)))
        axes = self.rng.choice((("b1", "i", "j"), ("i", "j"), ("b0", "b1", "i", "j"), ("b0", "i", "j"), ("b0", "j"), ("b1", "i"), ("b1",), ("j",)))
        return add(score, self.floats("bias", *axes))

    def weight(self) -> Expr:
        """What happens behind the softmax."""
        out = WEIGHT
        if self.rng.random() < 0.25:
            out = mul(out, Expr("keep", attr=(0, self.rng.choice((0.1, 0.5)))))
        if self.rng.random() < 0.2:
            out = mul(self.floats("gate", *self.rng.choice((("b1",), ("b0", "b1", "i"), ("b1", "j"), ("b1", "i", "j")))), out)
        if self.rng.random() < 0.1:
            out = where(CAUSAL, out, const(0.0))
        return out


def random_case(seed: int) -> tuple[Case, Shape, str]:
    """(case, shape, dtype of queries, keys and values), the same for the same seed."""
    rng = random.Random(seed)
    draw = _Draw(rng)
    score = mul(const(rng.choice((0.125, 0.5, 1.0))), DOT)
    for _ in range(rng.randrange(4)):
        score = draw.masked(score) if rng.random() < 0.6 else draw.biased(score)
    weight = draw.weight()
    terms = (draw.floats("sink", "b1"),) if rng.random() < 0.2 else ()
    groups = rng.choice((1, 1, 2))
    shape = Shape((rng.choice((1, 2)), rng.choice((1, 2, 4))), rng.randrange(1, 75), rng.randrange(1, 75), rng.choice((8, 16, 20)), rng.choice((8, 16, 24)))
    case = Case(f"random {seed}", score, weight, tuple(draw.captured), terms, groups=groups, empty_rows=rng.choice(("nan", "nan", "nan", "zero")))
    return case, shape, rng.choice(("float32", "float16"))
