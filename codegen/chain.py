"""What a backward pass computes at every score, decided once for a spec: programs, derivatives, exponents, dtypes of the products."""
from __future__ import annotations

import functools
from dataclasses import dataclass

from ..adjoint import UPSTREAM, ZERO, adjoint
from ..program import DOT, WEIGHT, Expr, loads, substitute
from ..spec import AttentionSpec
from ..tilemap import ranges_of
from .exponent import LOG2E, foldable, scale_of, unfilled
from .plan import HALF, product_dtype, products
from .text import prepare

ARRIVED = Expr("axis", attr="arrived", kind="float")
"""The gradient of a weight after the weight program; `UPSTREAM` is that of a score."""


@dataclass(frozen=True)
class Chain:
    """What is computed at every score of a backward pass.

    Attributes:
        score, inside: the score program, for cut tiles, and the one where all bounds hold, for full ones.
        folded, inside_folded: for each whether the maximum and the logarithm of the sum are one number, in units of log2(e). Where
            only the second holds, `inside` has -inf for fills: rows without a score far above them keep to cut tiles.
        unit, inside_unit: what a score is multiplied by before exp2; the programs have lost what became part of it.
        weight: the weight program. arrived: the gradient of a softmax weight, from `ARRIVED`.
        slope, slope_inside: the gradient of the raw product from `UPSTREAM`, that of the score, without `factor`.
        factor: by which the gradients of queries and keys are multiplied in the end.
        seen_above: a row's maximum at or below this means that it saw no allowed key.
    """

    score: Expr
    inside: Expr
    folded: bool
    inside_folded: bool
    unit: float
    inside_unit: float
    weight: Expr
    arrived: Expr
    slope: Expr
    slope_inside: Expr
    factor: float
    seen_above: float

    @property
    def mixed(self) -> bool:
        """Whether full tiles and cut tiles are normalised in two ways."""
        return self.folded != self.inside_folded

    def rows(self, inside: bool) -> tuple[str, ...]:
        """The row vectors that a tile's weights need."""
        return ("shift",) if (self.inside_folded if inside else self.folded) else ("largest", "log_sum")


@functools.lru_cache(maxsize=512)
def chain(spec: AttentionSpec, depth: int, value_depth: int) -> Chain:
    """The chain of a spec for given head dimensions.

    Raises:
        ValueError: an operation without a derivative.
    """
    constants = {"d": depth, "e": value_depth}
    ranges = ranges_of(spec)
    score, inside, weight = (prepare(x, constants) for x in (spec.score, inside_of(spec), spec.weight))
    arrived = prepare(substitute(adjoint(weight, WEIGHT), {UPSTREAM: ARRIVED}), constants)
    (factor, slope), (other, slope_inside) = (scale_of(prepare(adjoint(x, DOT), constants)) for x in (score, inside))
    if factor != other:
        factor, slope, slope_inside = 1.0, *(prepare(adjoint(x, DOT), constants) for x in (score, inside))
    below = ranges.masked_below
    (bare, a), (bare_inside, b) = unfilled(score), unfilled(inside)
    inside_folded = foldable(spec, bare, bare_inside)
    folded = inside_folded and not a | b
    unit = inside_unit = 1.0
    if inside_folded:
        inside_unit, inside = scale_of(bare_inside)
        below = max([below, *(f / 2 for f in a | b)])
    if folded:
        unit, score = scale_of(score)
    return Chain(score, inside, folded, inside_folded, unit * LOG2E, inside_unit * LOG2E, weight, arrived, slope, slope_inside, factor, below)


@functools.lru_cache(maxsize=512)
def inside_of(spec: AttentionSpec) -> Expr:
    """The score program where all bounds hold; the whole one if that would read by other expressions, which have other gradients."""
    inside = ranges_of(spec).inside
    return inside if set(loads(inside)) <= set(loads(spec.score)) else spec.score


@functools.lru_cache(maxsize=512)
def sweeps(spec: AttentionSpec, depth: int, value_depth: int) -> bool:
    """Whether rows without an allowed key have to be told from others: what the bounds leave out counts for them after all, for
    their weights are uniform or NaN; or they do not bear the program of full tiles."""
    ranges = ranges_of(spec)
    skips = bool(ranges.bounds) or spec.tiles is not None
    return chain(spec, depth, value_depth).mixed or skips and (ranges.speculative or spec.empty_rows == "nan")


def row_buffers(chain: Chain) -> tuple[str, ...]:
    """The row vectors that the row kernel leaves for the others."""
    return tuple(dict.fromkeys([*chain.rows(True), *chain.rows(False), "delta"]))


@functools.lru_cache(maxsize=512)
def flat(spec: AttentionSpec) -> bool:
    """Whether queries and keys have no gradient, since no score depends on their product."""
    return adjoint(spec.score, DOT) == ZERO


@dataclass(frozen=True)
class Types:
    """The dtypes in which products are taken: of the scores; of their gradient with queries and keys; of the weights with
    grad_out; of grad_out with the values. A computed factor is rounded to a half type only where the spec asks for that type."""

    score: str
    slope: str
    value: str
    arrived: str


@functools.lru_cache(maxsize=512)
def types(spec: AttentionSpec) -> Types:
    """The dtypes of a spec's products."""
    query, key, value = (spec.operands[a.operand].dtype for a in (spec.query, spec.key, spec.value))
    score, pv = products(spec)
    slope = spec.qk_dtype if spec.qk_dtype in HALF and {query, key} <= {spec.qk_dtype, "float32"} else "float32"
    return Types(score, slope, pv, product_dtype(spec.out_dtype, value, spec.pv_dtype))
