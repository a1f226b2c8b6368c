"""Which (query, key) pairs can contribute: bounds on j proven from the predicates of the score program.

A comparison such as ``j <= i`` in the score program is a *bound* if, wherever it fails, the score is dead: so small
whatever the dot product and the loaded values are that its weight is exactly 0 beside any live key. Deadness is decided by
interval arithmetic on the whole program with the comparison set to false, so a comparison under an ``or``, under another
``where``, or before a softcap is a bound only if it really empties the pair.

Two kinds of dead: -inf, of which nothing ever comes; and a large finite fill (finfo.min, -1e9), which counts after all in
a row that has no live key. With finite fills skipping is *speculative*: a row whose running maximum ends at or below
`Ranges.masked_below` has to visit the keys that were left out.
"""
from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from .algebra import affine, simplify
from .intervals import INF, interval
from .program import FALSE, TRUE, Expr, apply, axis, const, depends, loads, substitute, walk
from .spec import AttentionSpec

DEAD = -6e4
"""Scores at or below this count as masked: float16's finfo.min still does, -1e4 and -100 do not. Between here and
`masked_below` lie 3e4 units, and exp of that is 0 even in float64."""


@dataclass(frozen=True)
class Bound:
    """Only keys with ``j <= slope*i + offset`` (upper) or ``j >= slope*i + offset`` (lower) contribute.

    `slope` is 0 or 1; `offset` an integer program over batch axes, sizes and scalars.
    """

    side: Literal["upper", "lower"]
    slope: int
    offset: Expr

    def __str__(self) -> str:
        line = simplify(apply("add", axis("i"), self.offset)) if self.slope else self.offset
        return f"j {'<=' if self.side == 'upper' else '>='} {line}"


@dataclass(frozen=True)
class Ranges:
    """Which keys a query can see.

    Attributes:
        bounds: all of them hold wherever a score is alive.
        inside: the score program where all bounds hold; it keeps a predicate that says more than its bounds do.
        masked_below: a running maximum at or below this means that the row saw no live key; -inf where all fills are.
        speculative: some fill is finite, so a row without a live key must visit every key.
    """

    bounds: tuple[Bound, ...]
    inside: Expr
    masked_below: float
    speculative: bool


@functools.lru_cache(maxsize=4096)
def analyse(spec: AttentionSpec) -> Ranges:
    """The ranges of a spec."""
    score = simplify(spec.score)
    bounds: list[Bound] = []
    holds: dict[Expr, Expr] = {}
    fills: list[float] = []
    for atom in _comparisons(score):
        for truth in (True, False):
            predicate = atom if truth else simplify(apply("not", atom))
            exact = bounds_of(predicate)
            found = exact or _same_block(predicate)
            if not found:
                continue
            fill = interval(score, assume(atom, not truth), round_constant=rounding(spec))[1]
            if fill > DEAD:
                continue
            bounds.extend(b for b in found if b not in bounds)
            if exact:
                holds[atom] = TRUE if truth else FALSE
            fills.append(fill)
    finite = [f for f in fills if f > -INF]
    inside = simplify(substitute(score, holds)) if holds else score
    return Ranges(tuple(bounds), inside, max(finite) / 2 if finite else -INF, bool(finite))


def rounding(spec: AttentionSpec) -> Callable[[float], float]:
    """How a float constant reaches the arithmetic of a spec."""
    return float if spec.compute_dtype == torch.float64 else _float32


def _float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(INF, value)


def _comparisons(score: Expr) -> Iterator[Expr]:
    """Comparisons of integers that say something about the key."""
    for node in walk(score):
        if node.op in ("le", "eq") and node.args[0].kind == node.args[1].kind == "int" and "j" in depends(node):
            yield node


def assume(atom: Expr, truth: bool) -> dict[Expr, bool]:
    """The comparison and its opposite, which the normal form spells as another comparison."""
    return {simplify(apply("not", atom)): not truth, atom: truth}


def bounds_of(predicate: Expr) -> list[Bound]:
    """Bounds on j that together are equivalent to the predicate; none where there are none of our form."""
    if predicate.op not in ("le", "eq"):
        return []
    a, b = predicate.args
    gaps = _linear_gaps(apply("sub", b, a))
    if gaps is not None and predicate.op == "eq":
        back = _linear_gaps(apply("sub", a, b))
        gaps = None if back is None else gaps + back
    found = [_bound(gap) for gap in gaps or []]
    return [] if any(x is None for x in found) else [x for x in found if x is not None]


def _same_block(predicate: Expr) -> list[Bound]:
    """Bounds that follow from i // n == j // n, chunked attention, without being equivalent to it: |i - j| <= n - 1."""
    if predicate.op != "eq" or any(a.op != "floordiv" or a.args[1].op != "const" for a in predicate.args):
        return []
    (a, n), (b, m) = (x.args for x in predicate.args)
    if n != m or n.value < 1:
        return []
    gaps = [simplify(apply("add", apply("sub", *pair), const(n.value - 1))) for pair in ((a, b), (b, a))]
    found = [_bound(gap) for gap in gaps]
    return [x for x in found if x is not None] if None not in found else []


def _linear_gaps(gap: Expr) -> list[Expr] | None:
    """Integer programs without abs, min and max that are all >= 0 exactly where `gap` is: |x| <= w is x <= w and -x <= w."""
    gap = simplify(gap)
    bent = next((x for x in walk(gap) if x.op in ("abs", "min", "max") and x.kind == "int" and depends(x) & {"i", "j"}), None)
    if bent is None:
        return [gap]
    mark = axis("<bent>")
    parts = affine(substitute(gap, {bent: mark}), ("<bent>",))
    if parts is None or parts[0]["<bent>"] != const(1 if bent.op == "min" else -1):
        return None
    branches = (bent.args[0], apply("neg", bent.args[0])) if bent.op == "abs" else bent.args
    out: list[Expr] = []
    for branch in branches:
        more = _linear_gaps(substitute(gap, {bent: branch}))
        if more is None:
            return None
        out += more
    return out


def _bound(gap: Expr) -> Bound | None:
    """The bound that says gap >= 0, where gap = ±j + (0 or ∓1)·i + offset."""
    parts = affine(gap, ("i", "j"))
    if parts is None:
        return None
    coefficients, rest = parts
    i, j = coefficients["i"], coefficients["j"]
    if i.op != "const" or j.op != "const" or j.value not in (1, -1) or loads(rest):
        return None
    slope = -i.value * j.value
    if slope not in (0, 1):
        return None
    if j.value == -1:
        return Bound("upper", slope, rest)
    return Bound("lower", slope, simplify(apply("neg", rest)))


# ---- on concrete numbers

def _offset(bound: Bound, sizes: Mapping[str, int], batch: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Least and greatest offset over a box of batch positions (half-open)."""
    axes = {name: (start, stop - 1) for name, (start, stop) in batch.items()}
    low, high = interval(bound.offset, {}, axes, sizes)
    return _integer(low), _integer(high)


def _integer(x: float) -> int:
    """Infinity as an integer that is far beyond any length."""
    return int(min(max(x, -(2 ** 62)), 2 ** 62))


def _box(sizes: Mapping[str, int], batch: Mapping[str, int | tuple[int, int]] | None) -> dict[str, tuple[int, int]]:
    """Half-open ranges of the batch positions; where they are not given, everything that the sizes allow."""
    if batch is None:
        return {name: (0, max(length, 1)) for name, length in sizes.items()}
    return {name: (at, at + 1) if isinstance(at, int) else at for name, at in batch.items()}


def key_range(ranges: Ranges, sizes: Mapping[str, int], batch: Mapping[str, int | tuple[int, int]] | None, i0: int, i1: int,
              n_keys: int) -> tuple[int, int]:
    """Keys [lo, hi) outside which no query of [i0, i1) has a live score.

    Args:
        ranges: from `analyse`.
        sizes: lengths and scalars by name.
        batch: position, or half-open range of positions, of each batch axis; None for all of them.
        i0, i1: the queries; i1 > i0.
        n_keys: number of keys.
    """
    lo, hi = 0, n_keys
    box = _box(sizes, batch)
    for bound in ranges.bounds:
        least, greatest = _offset(bound, sizes, box)
        if bound.side == "upper":
            hi = min(hi, bound.slope * (i1 - 1) + greatest + 1)
        else:
            lo = max(lo, bound.slope * i0 + least)
    lo = min(lo, n_keys)
    return lo, max(lo, hi)


def full_range(ranges: Ranges, sizes: Mapping[str, int], batch: Mapping[str, int | tuple[int, int]] | None, i0: int, i1: int,
               n_keys: int) -> tuple[int, int]:
    """Keys [lo, hi) at which all bounds hold for every query of [i0, i1). Arguments as of `key_range`, inside which it lies."""
    lo, hi = 0, n_keys
    box = _box(sizes, batch)
    for bound in ranges.bounds:
        least, greatest = _offset(bound, sizes, box)
        if bound.side == "upper":
            hi = min(hi, bound.slope * i0 + least + 1)
        else:
            lo = max(lo, bound.slope * (i1 - 1) + greatest)
    outer = key_range(ranges, sizes, batch, i0, i1, n_keys)
    lo = min(max(lo, outer[0]), outer[1])
    return lo, min(max(lo, hi), outer[1])
