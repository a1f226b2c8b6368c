"""Attentions built by hand, one for each mechanism of the score and weight programs; shared by the tests of all executors.

    for case in CASES: case.spec, case.inputs(shape, dtype, seed)
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from attnfuse import tilemap
from attnfuse.program import DOT, WEIGHT, Expr, add, apply, axis, const, le, load, mul, size, where
from attnfuse.spec import Access, AttentionSpec, Operand

MIN = torch.finfo(torch.float32).min
INF = float("-inf")
b0, b1, b2, i, j, d, e = (axis(n) for n in ("b0", "b1", "b2", "i", "j", "d", "e"))
SCALED = mul(const(0.125), DOT)
CAUSAL = le(j, i)
both = lambda a, b: apply("and", a, b)
floats = lambda x: apply("float", x)
minus = lambda a, b: apply("sub", a, b)

Make = Callable[[dict[str, int], torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Captured:
    """A tensor that the programs read: dtype (None: that of the queries) and how to make one."""

    name: str
    dtype: str | None
    rank: int
    make: Make


@dataclass(frozen=True)
class Shape:
    """Lengths of one call."""

    batch: tuple[int, ...] = (2, 4)
    queries: int = 33
    keys: int = 33
    depth: int = 16
    value_depth: int = 16


@dataclass(frozen=True)
class Case:
    """A named attention; `build` turns the dtype of its operands into the spec."""

    name: str
    score: Expr = SCALED
    weight: Expr = WEIGHT
    captured: tuple[Captured, ...] = ()
    extra_terms: tuple[Expr, ...] = ()
    scalars: tuple[tuple[str, int], ...] = ()
    empty_rows: str = "nan"
    batch: tuple[str, ...] = ("b0", "b1")
    groups: int = 1
    options: dict[str, object] = field(default_factory=dict, hash=False)

    def spec(self, dtype: str = "float32") -> AttentionSpec:
        """The spec with queries, keys and values of `dtype`."""
        lead = tuple(axis(n) for n in self.batch)
        heads = lead if self.groups == 1 else (*lead[:-1], apply("floordiv", lead[-1], const(self.groups)))
        rank = len(lead) + 2
        operands = [Operand(n, dtype, rank) for n in ("q", "k", "v")] + [Operand(c.name, c.dtype or dtype, c.rank) for c in self.captured]
        fields: dict[str, object] = dict(
            batch=self.batch, operands=tuple(operands), query=Access(0, (*lead, i, d)), key=Access(1, (*heads, j, d)),
            value=Access(2, (*heads, j, e)), score=self.score, weight=self.weight, extra_terms=self.extra_terms,
            scalars=tuple(n for n, _ in self.scalars), empty_rows=self.empty_rows, qk_dtype=dtype, pv_dtype=dtype, out_dtype=dtype)
        return AttentionSpec(**(fields | self.options))  # type: ignore[arg-type]

    def inputs(self, shape: Shape, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        """(operands, sizes), random from `seed`."""
        g = torch.Generator().manual_seed(seed)
        batch = shape.batch[:len(self.batch)] if len(self.batch) <= len(shape.batch) else (1, *shape.batch)
        grouped = (*batch[:-1], -(-batch[-1] // self.groups)) if batch else ()
        noise = lambda *s: torch.randn(s, generator=g).to(dtype)
        q, k = noise(*batch, shape.queries, shape.depth), noise(*grouped, shape.keys, shape.depth)
        v = noise(*grouped, shape.keys, shape.value_depth)
        sizes = dict(zip((*self.batch, "i", "j", "d", "e"), (*batch, shape.queries, shape.keys, shape.depth, shape.value_depth), strict=True))
        sizes |= dict(self.scalars)
        made = [c.make(sizes, g) for c in self.captured]
        return [q, k, v, *(t.to(dtype) if c.dtype is None else t for t, c in zip(made, self.captured, strict=True))], tuple(sizes.values())


def randn(*names: str, scale: float = 1.0) -> Make:
    """Normal noise over the named axes (or of the given fixed lengths)."""
    return lambda s, g: torch.randn([s[n] for n in names], generator=g) * scale


def left_padded(s: dict[str, int], g: torch.Generator) -> torch.Tensor:
    """Keys that count: in the first batch row only the last third, elsewhere all but a few at the end."""
    keep = torch.ones(s["b0"], s["j"], dtype=torch.bool)
    keep[0, :s["j"] - max(1, s["j"] // 3)] = False
    keep[1:, max(1, s["j"] - 3):] = False
    return keep


def odd_rows(s: dict[str, int], g: torch.Generator) -> torch.Tensor:
    """Ordinary numbers, but for every fifth query +inf, NaN or -inf in turn."""
    out = torch.randn(s["b0"], s["i"], generator=g)
    for n, odd in enumerate((math.inf, math.nan, -math.inf)):
        out[:, n + 1::15] = odd
    return out


ODD_ROWS = Captured("rows", "float32", 2, odd_rows)
PADDING = Captured("padding", "bool", 2, left_padded)
padding = load(3, (b0, j), "bool")
whole = lambda low, high, *names: (lambda s, g: torch.randint(low, high, [s[n] for n in names], generator=g))
past = minus(size("j"), size("i"))
SLOPES = Captured("slopes", "float32", 1, lambda s, g: 2.0 ** -torch.arange(1, s["b1"] + 1).float())
buckets = Captured("buckets", "int64", 2, whole(0, 3, "i", "j"))
table = Captured("table", None, 2, lambda s, g: torch.randn(64 + 2 * (s["i"] + s["j"]), s["b1"], generator=g))
relative = add(minus(i, j), add(size("j"), load(3, (i, j), "int")))

CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("unscaled", DOT),
    Case("one_batch_axis", batch=("b0",)),
    Case("three_batch_axes", batch=("b0", "b1", "b2")),
    Case("no_batch_axis", batch=()),
    Case("causal_inf", where(CAUSAL, SCALED, const(INF))),
    Case("causal_min", where(CAUSAL, SCALED, const(MIN))),
    Case("causal_half_min", where(both(CAUSAL, padding), SCALED, const(-65504.0)), captured=(PADDING,)),
    Case("causal_added", add(SCALED, where(CAUSAL, const(0.0), const(MIN)))),
    Case("causal_padding_min", where(both(CAUSAL, padding), SCALED, const(MIN)), captured=(PADDING,)),
    Case("causal_padding_1e9", where(both(CAUSAL, padding), SCALED, const(-1e9)), captured=(PADDING,)),
    Case("causal_padding_inf", where(both(CAUSAL, padding), SCALED, const(INF)), captured=(PADDING,)),
    Case("causal_padding_zero", where(both(CAUSAL, padding), SCALED, const(INF)), captured=(PADDING,), empty_rows="zero"),
    Case("causal_padding_repaired", where(both(CAUSAL, padding), SCALED, const(INF)), where(both(CAUSAL, padding), WEIGHT, const(0.0)),
         captured=(PADDING,)),
    Case("repaired", where(both(CAUSAL, padding), SCALED, const(INF)), captured=(PADDING,), empty_rows="repaired"),
    Case("repaired_rows", add(add(SCALED, where(CAUSAL, const(0.0), const(INF))), load(4, (b0, i), "float")), captured=(PADDING, ODD_ROWS),
         empty_rows="repaired"),
    Case("repaired_min", where(both(CAUSAL, padding), add(SCALED, load(4, (b0, i), "float")), const(MIN)), captured=(PADDING, ODD_ROWS),
         empty_rows="repaired"),
    Case("repaired_sinks", where(padding, SCALED, const(INF)), mul(WEIGHT, Expr("keep", attr=(0, 0.25))),
         captured=(PADDING, Captured("sinks", "float32", 2, odd_rows)), extra_terms=(load(4, (b0, i), "float"),), empty_rows="repaired"),
    Case("padding", where(padding, SCALED, const(INF)), captured=(PADDING,)),
    Case("two_fills", where(CAUSAL, where(padding, SCALED, const(MIN)), const(INF)), captured=(PADDING,)),
    Case("bottom_right", where(le(j, add(i, past)), SCALED, const(INF))),
    Case("bottom_right_min", where(le(j, add(i, past)), SCALED, const(MIN))),
    Case("window", where(both(CAUSAL, le(minus(i, const(7)), j)), SCALED, const(INF))),
    Case("window_min", where(both(CAUSAL, le(add(i, const(1)), add(j, const(20)))), SCALED, const(MIN))),
    Case("window_padding_min", where(both(padding, both(CAUSAL, le(i, add(j, const(18))))), SCALED, const(MIN)), captured=(PADDING,)),
    Case("band", where(le(apply("abs", minus(i, j)), const(5)), SCALED, const(INF))),
    Case("prefix", where(apply("or", CAUSAL, le(j, size("prefix"))), SCALED, const(INF)), scalars=(("prefix", 5),)),
    Case("future_only", where(le(add(i, const(1)), j), SCALED, const(INF))),
    Case("future_only_min", where(le(add(i, const(1)), j), SCALED, const(MIN))),
    Case("alibi", add(SCALED, mul(load(3, (b1,), "float"), floats(minus(j, i)))), captured=(SLOPES,)),
    Case("alibi_causal", where(CAUSAL, add(SCALED, mul(load(3, (b1,), "float"), floats(minus(j, i)))), const(INF)), captured=(SLOPES,)),
    Case("softcap", mul(const(3.0), apply("tanh", mul(const(1 / 3.0), SCALED)))),
    Case("softcap_causal", where(CAUSAL, mul(const(3.0), apply("tanh", mul(const(1 / 3.0), SCALED))), const(MIN))),
    Case("bias", add(SCALED, load(3, (b0, b1, i, j), "float")), captured=(Captured("bias", None, 4, randn("b0", "b1", "i", "j")),)),
    Case("bias_per_head", add(SCALED, load(3, (b1, i, j), "float")), captured=(Captured("bias", "float32", 3, randn("b1", "i", "j")),)),
    Case("rows_and_columns", add(add(SCALED, load(3, (b0, b1, i), "float")), load(4, (b0, j), "float")),
         captured=(Captured("rows", None, 3, randn("b0", "b1", "i")), Captured("columns", "float32", 2, randn("b0", "j")))),
    Case("grouped", where(CAUSAL, SCALED, const(INF)), groups=2),
    Case("integer_mask", add(SCALED, mul(minus(const(1.0), floats(load(3, (b0, j), "int"))), const(MIN))),
         captured=(Captured("mask", "int64", 2, whole(0, 2, "b0", "j")),)),
    Case("segments", where(apply("eq", load(3, (b0, i), "int"), load(3, (b0, j), "int")), SCALED, const(INF)),
         captured=(Captured("segments", "int32", 2, lambda s, g: torch.arange(max(s["i"], s["j"])).div(7, rounding_mode="floor")
                            .int().repeat(s["b0"], 1)),)),
    Case("scale_tensor", mul(load(3, (), "float"), DOT), captured=(Captured("scale", None, 0, lambda s, g: torch.tensor(0.3)),)),
    Case("scale_tensor_empty_rows", where(load(4, (b0, i), "bool"), mul(load(3, (), "float"), DOT), const(INF)),
         captured=(Captured("scale", None, 0, lambda s, g: torch.tensor(0.3)),
                   Captured("rows", "bool", 2, lambda s, g: torch.rand(s["b0"], s["i"], generator=g) > 0.3))),
    Case("scale_per_head", apply("div", DOT, load(3, (b1,), "float")), captured=(Captured("scale", "float32", 1, lambda s, g: torch.rand(s["b1"]) + 1.0),)),
    Case("scale_by_depth", apply("div", DOT, apply("sqrt", floats(size("d"))))),
    Case("sinks", where(CAUSAL, SCALED, const(INF)), captured=(Captured("sinks", None, 1, randn("b1")),), extra_terms=(load(3, (b1,), "float"),)),
    Case("sinks_min", where(both(CAUSAL, load(4, (b0, j), "bool")), SCALED, const(MIN)),
         captured=(Captured("sinks", None, 1, randn("b1")), PADDING), extra_terms=(load(3, (b1,), "float"), const(0.0))),
    Case("gate", weight=mul(apply("sigmoid", load(3, (b0, b1, i), "float")), WEIGHT), captured=(Captured("gate", None, 3, randn("b0", "b1", "i")),)),
    Case("mask_after", weight=where(CAUSAL, WEIGHT, const(0.0))),
    Case("dropout", where(CAUSAL, SCALED, const(INF)), mul(WEIGHT, Expr("keep", attr=(0, 0.25)))),
    Case("dropout_twice", SCALED, mul(mul(WEIGHT, Expr("keep", attr=(0, 0.5))), Expr("keep", attr=(3, 0.75)))),
    Case("dropout_all", SCALED, mul(WEIGHT, Expr("keep", attr=(0, 1.0)))),
    Case("gathered", add(SCALED, load(4, (relative, b1), "float")), captured=(buckets, table)),
    Case("wrapping_index", add(SCALED, load(3, (minus(i, j),), "float")),
         captured=(Captured("bias", "float32", 1, lambda s, g: torch.randn(s["i"] + s["j"], generator=g)),)),
    Case("modular", add(SCALED, floats(apply("mod", minus(i, j), const(3)))), captured=()),
    Case("quotients", add(SCALED, floats(apply("floordiv", minus(i, mul(const(2), j)), const(5)))), captured=()),
    Case("odd_functions", add(SCALED, mul(const(0.1), add(apply("round", DOT), add(apply("sign", DOT), apply("log1p", apply("abs", DOT))))))),
    Case("powers", add(SCALED, add(apply("pow", const(0.5), floats(apply("abs", minus(i, j)))), apply("pow", DOT, const(2.0))))),
    Case("other_order", where(CAUSAL, SCALED, const(INF)), options={"out_order": (0, 2, 1, 3)}),
)

BY_NAME = {case.name: case for case in CASES}


def with_map(spec: AttentionSpec, operands: list[torch.Tensor], sizes: tuple[int, ...]) -> tuple[AttentionSpec, list[torch.Tensor]]:
    """The same call with a map of its mask's tiles; as it is where there is no mask to make one of."""
    found = tilemap.mapped(spec)
    if found is None:
        return spec, operands
    named = dict(zip(spec.size_names, sizes, strict=True))
    maps = tilemap.build(found.mask, [operands[n] for n in found.sources], [named[n] for n in found.mask.size_names], operands[0].device)
    count, rank = len(operands), len(found.mask.batch) + 2
    both = (Operand("row_tiles", "int32", rank), Operand("column_tiles", "int32", rank))
    return replace(spec, operands=(*spec.operands, *both), tiles=(count, count + 1)), [*operands, *maps]


def variant(name: str, **changes: object) -> Case:
    """A case with some of its fields changed."""
    return replace(BY_NAME[name], **changes)  # type: ignore[arg-type]
