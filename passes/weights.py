"""What the op `attnfuse::weights` has to give for a tensor of weights that is read elsewhere: its program, and how its dimensions lie.

The analysis of the result has met the tensor at one index, a function of the result's axes and of j. There its element is a weight
program of the same softmax, or the chain is refused. The index also says how the op's result (batch…, i, j) becomes that tensor:

    read at (x0, x1, i, j)              as it is
    read at (x1, x0, j, i)              permute(1, 0, 3, 2)
    read at (x0 // 4, x0 % 4, i, j)     reshape(B, 4, T, T)
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..program import Expr, axis, const, depends, linear_in_weight, walk
from ..refusal import Refused
from . import nodes
from .lift import Index, Lift, NoRule
from .region import memory_order
from .repair import NAN, split
from .trace import Value
from .unfold import Parts, softmax_of
from .views import product, reshaped
from .wanted import Wanted


@dataclass(frozen=True)
class Reading:
    """A tensor of weights: where the result reads it, its weight program, and whether its rows of NaN are 0."""

    index: Index
    weight: Expr
    repaired: bool


@dataclass(frozen=True)
class Layout:
    """How the op's result (batch…, i, j) becomes the tensor: permuted, then (if not None) reshaped; and its own order in memory."""

    permutation: tuple[int, ...]
    shape: tuple[Expr, ...] | None
    memory: tuple[int, ...]


def reading(parts: Parts, value: Value | None, want: Wanted) -> Reading:
    """The program of a tensor of weights; raises Refused where it holds something else."""
    if value is None:
        raise want.refused("not what the values are weighed by")
    lift = parts.lift
    found = lift.readings(value)
    if len(found) != 1:
        raise want.refused("not what the values are weighed by" if not found else "weights that are read at more than one place")
    (index, element), = found.items()
    try:
        weight, score, extra, rows = softmax_of(lift, lift.simplify(element))
    except Refused as e:
        raise want.refused(e.refusal.detail or e.refusal.reason.value) from e
    weight, broken = split(weight)
    if score != parts.score or extra != parts.extra:
        raise want.refused("weights that are normalised otherwise")
    if broken not in (NAN, const(0.0)) or broken != NAN and not (rows and parts.repaired):
        raise want.refused("weights whose NaN become something else")
    if not linear_in_weight(weight) or any(x.op in ("sum", "maximum", "any", "dot", "detached") for x in walk(weight)):
        raise want.refused("not linear in the softmax")
    return Reading(index, weight, broken != NAN)


def layout(lift: Lift, at: Reading, value: Value, node: Node, own: Sequence[str], want: Wanted) -> Layout:
    """How the op's result, whose dimensions are the axes `own`, becomes a tensor; raises Refused where no view of it does."""
    lengths = {a: lift.algebra.lengths[a] for a in own}
    order = _order(at.index, own, lengths, value.shape)
    if order is None:
        raise want.refused("weights that are repeated, or of which a part is read")
    sizes = tuple(lengths[a] for a in order)
    try:
        expected = reshaped(lift, sizes, value.shape, tuple(const(0) if lengths[a] == const(1) else axis(a) for a in order))
    except NoRule as e:
        raise want.refused(str(e)) from e
    if expected != at.index or product(lift, sizes) != product(lift, value.shape):
        raise want.refused("weights that are repeated, or of which a part is read")
    memory = memory_order(nodes.value(node))
    same = sizes == value.shape
    if memory is None or not same and memory != tuple(range(len(value.shape))):
        raise want.refused("weights that do not lie densely")
    place = tuple(own.index(a) for a in order)
    return Layout(place, None if same else value.shape, tuple(place[d] for d in memory) if same else place)


def _order(index: Index, own: Sequence[str], lengths: Mapping[str, Expr], shape: Sequence[Expr]) -> list[str] | None:
    """The axes in the order in which an index meets them; None where it misses one. An axis of length 1 leaves no trace: it goes
    to a dimension of length 1, if there is one."""
    order: list[str] = []
    short = [a for a in own if lengths[a] == const(1)]
    for x, length in zip(index, shape, strict=True):
        order += [a for a in own if a in depends(x) and a not in order and a not in short]
        if length == const(1) and short:
            order.append(short.pop(0))
    order += short
    return order if len(order) == len(own) else None
