"""The executor in plain PyTorch: walks tiles with the online softmax, forward and backward, for any spec on any device.

Memory is linear in the sequence. Source of the method: Dao, "FlashAttention-2" (2023), algorithms 1 and 2; delta, the sum
of gradient times weight over a row, is Σ_e grad_out·out because the weight program is linear in the weight.

Row statistics are (maximum, log of the sum), so that a weight is exp(score - maximum - log sum) even beside a fill of -1e9.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .adjoint import UPSTREAM, ZERO, adjoint
from .elements import Box, contract, product
from .program import DOT, WEIGHT, Expr, depends, loads, walk
from .spec import AttentionSpec
from .tiling import Call, allocate_out, key_tiles, omitted, pieces, prepare, row_tiles, run, lengths, split_dims

NEG_INF = float("-inf")


def score_of(call: Call, program: Expr, box: Box, query: torch.Tensor, key: torch.Tensor, memo: dict[Expr, torch.Tensor]) -> torch.Tensor:
    """A score program on a tile, of the rectangles of queries and keys; broadcasts to it. The memo keeps what it met."""
    if "dot" in depends(program):
        memo[DOT] = product(query, key.transpose(-1, -2))
    return run(call, program, box, memo)


def _writable(program: Expr, score: torch.Tensor, shape: list[int]) -> bool:
    """Whether the score is a tensor of its own, of the whole tile."""
    return list(score.shape) == shape and program.op not in ("load", "const", "axis", "size", "float", "int")


def _exp(x: torch.Tensor) -> torch.Tensor:
    """exp, in place. Through exp2: PyTorch's exp on the CPU takes thirty times as long where the result underflows, as masks do."""
    return x.mul_(math.log2(math.e)).exp2_()


# ---- forward

class _Rows:
    """The online softmax of one tile of queries: running maximum, sum and accumulator."""

    def __init__(self, call: Call, box: Box) -> None:
        self.call = call
        self.box = box
        shape = lengths(box, call.score_axes[:-1])
        options = {"dtype": call.dtype, "device": call.device}
        self.maximum = torch.full([*shape, 1], NEG_INF, **options)
        self.total = torch.zeros([*shape, 1], **options)
        self.output = torch.zeros([*shape, call.sizes["e"]], **options)
        self.fresh = True
        if call.spec.extra_terms:
            terms = [run(call, t, box, {}).expand(shape) for t in call.spec.extra_terms]
            self._absorb(torch.stack(terms, -1))

    def _absorb(self, score: torch.Tensor, write: bool = False) -> torch.Tensor:
        """Take scores into maximum and total; their exponentials. The old accumulator is scaled to the new maximum."""
        new = torch.maximum(self.maximum, score.amax(-1, keepdim=True))
        shift = torch.where(new == NEG_INF, 0.0, new)      # -inf - -inf is NaN: a row without a live key stays at 0
        weight = _exp(score.sub_(shift) if write else score - shift)
        total = weight.sum(-1, keepdim=True)
        if self.fresh:
            self.total = total
        else:
            scale = _exp(self.maximum - shift)
            self.total = self.total * scale + total
            self.output.mul_(scale)
        self.maximum, self.fresh = new, False
        return weight

    def step(self, tile: Box, program: Expr, query: torch.Tensor) -> None:
        """One tile of keys."""
        call, spec = self.call, self.call.spec
        memo: dict[Expr, torch.Tensor] = {}
        key = call.rectangle(spec.key, tile, ("j", "d"))
        score = score_of(call, program, tile, query, key, memo)
        shape = lengths(tile, call.score_axes)
        write = _writable(program, score, shape)
        weight = self._absorb(score.expand(shape), write)
        if spec.weight != WEIGHT:
            weight = run(call, spec.weight, tile, {WEIGHT: weight}).expand(shape)
        self.output += product(weight, call.rectangle(spec.value, tile, ("j", "e")))

    def unseen(self) -> bool:
        """Whether some row saw no live key."""
        return bool((self.maximum <= self.call.ranges.masked_below).any())

    def poison(self, step: int) -> None:
        """Give rows that are -inf everywhere the weights NaN, and what the weight program makes of them; or make rows 0."""
        call, spec = self.call, self.call.spec
        empty = self.maximum == NEG_INF
        if spec.empty_rows != "nan":
            dead = empty if spec.empty_rows == "zero" else empty | self.total.isnan()
            self.output.masked_fill_(dead, 0.0)
            self.maximum, self.total = self.maximum.masked_fill(dead, NEG_INF), self.total.masked_fill(dead, 0.0)   # backward sees it
        if spec.empty_rows != "nan" or call.sizes["j"] == 0 or not bool(empty.any()):
            return
        if all(x.op != "where" for x in walk(spec.weight)):
            self.output.masked_fill_(empty, float("nan"))
            return
        for a, b in pieces(call.sizes["j"], step):
            tile = self.box | {"j": (a, b)}
            shape = lengths(tile, call.score_axes)
            nothing = torch.where(empty, float("nan"), 0.0).to(call.dtype).expand(shape)
            weight = run(call, spec.weight, tile, {WEIGHT: nothing}).expand(shape)
            extra = product(weight, call.rectangle(spec.value, tile, ("j", "e")))
            self.output = torch.where(empty, self.output + extra, self.output)

    def result(self) -> torch.Tensor:
        """The normalised rows."""
        return self.output / torch.where(self.maximum == NEG_INF, 1.0, self.total)


def forward(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int],
            seed: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the row statistics.

    Args: as of `reference.reference`.

    Returns:
        out (batch…, i, e) of `spec.out_dtype`, in memory in the order `spec.out_order`; statistics (batch…, i, 2), the pairs
        (maximum, log of the sum) in natural logarithms and `spec.compute_dtype`; both -inf in a row whose scores are all -inf,
        or that is repaired.

    Raises:
        ValueError: wrong number of operands or sizes, or a missing seed.
    """
    call = prepare(spec, operands, sizes, seed)
    out = allocate_out(spec, sizes, operands[spec.query.operand])
    stats = torch.empty([*out.shape[:-1], 2], dtype=call.dtype, device=call.device)
    split_out, split_stats = split_dims(call, out), split_dims(call, stats)
    for box, step in row_tiles(call):
        rows = _Rows(call, box)
        query = call.rectangle(call.spec.query, box, ("i", "d"))
        for tile, program in key_tiles(call, box, step, everything=False):
            rows.step(tile, program, query)
        if call.ranges.speculative and rows.unseen():
            for tile, program in omitted(call, box, step):
                rows.step(tile, program, query)
        rows.poison(step)
        split_out[place(call, box)] = rows.result().to(out.dtype)
        split_stats[place(call, box)] = torch.cat([rows.maximum, rows.total.log()], -1)
    return out, stats


# ---- backward

@dataclass
class Normalised:
    """What the scores of rows are normalised by, and what their gradients lose; each (batch…, i, 1)."""

    maximum: torch.Tensor
    log_total: torch.Tensor
    dead: torch.Tensor | None        # rows whose weights are 0
    delta: torch.Tensor

    def weights(self, score: torch.Tensor) -> torch.Tensor:
        """The normalised softmax weights."""
        weights = _exp((score - self.maximum).sub_(self.log_total))
        return weights if self.dead is None else weights.masked_fill_(self.dead, 0.0)

    def unseen(self, call: Call) -> bool:
        """Whether some row saw no live key, or is NaN: then the keys beyond the bounds count for it too."""
        return bool((self.maximum <= call.ranges.masked_below).any()) or bool((self.maximum + self.log_total).isnan().any())


@dataclass
class RowGradients(Normalised):
    """What backward knows of one tile of queries; each (batch…, i, …)."""

    query: torch.Tensor
    grad_query: torch.Tensor

    def arrived(self, call: Call, tile: Box) -> torch.Tensor:
        """The gradient of the weights of a tile, behind the weight program."""
        raise NotImplementedError

    def add_value(self, call: Call, tile: Box, weight: torch.Tensor, grads: dict[int, torch.Tensor]) -> None:
        """Add what the values of a tile get to theirs, if they do."""


@dataclass
class _ResultGradients(RowGradients):
    """The same where it is the result whose gradient is given."""

    grad_out: torch.Tensor

    def arrived(self, call: Call, tile: Box) -> torch.Tensor:  # noqa: D102
        return product(self.grad_out, call.rectangle(call.spec.value, tile, ("j", "e")).transpose(-1, -2))

    def add_value(self, call: Call, tile: Box, weight: torch.Tensor, grads: dict[int, torch.Tensor]) -> None:  # noqa: D102
        access = call.spec.value
        if access.operand in grads:
            value = call.rectangle(access, tile, ("j", "e"))
            call.elements.add(grads[access.operand], access.index, tile, (*call.spec.batch, "j", "e"), contract(weight, self.grad_out, value.shape[:-2]))


def backward(spec: AttentionSpec, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
             sizes: Sequence[int], seed: torch.Tensor | None, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of the operands that `needs` names, each contiguous, of the operand's shape and dtype; None elsewhere.

    Args:
        spec, operands, sizes, seed: as of `forward`.
        grad_out: gradient of the result, of any strides.
        out, stats: what `forward` returned; the statistics of any executor will do.
        needs: for each operand whether its gradient is wanted.

    Raises:
        ValueError: as `forward`; or a program with an operation that has no derivative.
    """
    call = prepare(spec, operands, sizes, seed)
    split = [split_dims(call, t) for t in (grad_out, out, stats)]

    def rows(box: Box) -> RowGradients:
        given, result, statistics = (t[place(call, box)].to(call.dtype) for t in split)
        query = call.rectangle(call.spec.query, box, ("i", "d"))
        return _ResultGradients(*normaliser(call.spec, statistics), (given * result).sum(-1, keepdim=True), query, zeros(query), given)

    return accumulate(call, operands, needs, rows, exact=_needs_exact_delta(spec, needs))


def place(call: Call, box: Box) -> tuple[slice, ...]:
    """Where the rows of a box lie in a tensor (batch…, i, …)."""
    return tuple(slice(*box[a]) for a in call.score_axes[:-1])


def zeros(like: torch.Tensor) -> torch.Tensor:
    """To add up in: dense, whatever the strides of `like`."""
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def accumulate(call: Call, operands: Sequence[torch.Tensor], needs: Sequence[bool], rows_of: Callable[[Box], RowGradients], *,
               exact: bool) -> list[torch.Tensor | None]:
    """The gradients of the operands that `needs` names, each contiguous, of the operand's shape and dtype; None elsewhere.

    Args:
        call, operands, needs: as of `backward`.
        rows_of: what is known of the rows of a box.
        exact: whether delta is summed from the tiles, whatever `rows_of` says, also where that takes a pass of its own. Where one tile has
            all keys of its rows it costs nothing and is done always.
    """
    grads = {n: torch.zeros(t.shape, dtype=call.dtype, device=call.device) for n, t in enumerate(operands) if needs[n]}
    for box, step in row_tiles(call, share=2) if grads and call.sizes["j"] else ():
        rows = rows_of(box)
        unseen = rows.unseen(call)
        tiles = list(key_tiles(call, box, step, everything=unseen))
        alone = len(tiles) == 1
        if exact and not alone:
            rows.delta = _delta(call, tiles, rows)
        for tile, program in tiles:
            _backward_tile(call, tile, program, rows, grads, alone)
        for term in call.spec.extra_terms:
            _backward_extra(call, term, box, rows, grads)
        if call.spec.query.operand in grads:
            access = call.spec.query
            call.elements.add(grads[access.operand], access.index, box, (*call.spec.batch, "i", "d"), rows.grad_query)
    return [grads[n].to(t.dtype) if n in grads else None for n, t in enumerate(operands)]


def normaliser(spec: AttentionSpec, stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(maximum, log of the sum, which rows have weights of 0 because the spec says so); NaN where all weights of a row are."""
    maximum, log_total = stats[..., :1], stats[..., 1:]
    empty, dead = maximum == NEG_INF, None
    if spec.empty_rows != "nan":                       # 0 for those: they have no keys to visit
        empty = dead = empty if spec.empty_rows == "repaired" else empty & ~log_total.isnan()       # a generated maximum passes over NaN
    return maximum.masked_fill(empty, math.nan if dead is None else 0.0), log_total, dead


def _needs_exact_delta(spec: AttentionSpec, needs: Sequence[bool]) -> bool:
    """Whether a gradient is wanted that sums the scores' gradients over keys (a temperature, a term per head or query).

    The scores' gradients of a row add up to zero only as exactly as delta fits the very numbers that are summed; such a
    gradient sees the remainder, multiplied by its row's scores. Then delta is summed from the tiles, at the price of a pass.
    """
    return any(needs[int(x.attr)] and "j" not in depends(x) for e in (spec.score, *spec.extra_terms) for x in loads(e))  # type: ignore[arg-type]


def _delta(call: Call, tiles: Iterable[tuple[Box, Expr]], rows: RowGradients) -> torch.Tensor:
    """Delta of each row from the tiles themselves."""
    total, mass = torch.zeros_like(rows.delta), torch.zeros_like(rows.delta)
    for tile, program in tiles:
        probability, _, arrived = _recomputed(call, tile, program, rows, {}, {})
        total += (probability * arrived).sum(-1, keepdim=True)
        mass += probability.sum(-1, keepdim=True)
    return _mean(call, total, mass)


def _mean(call: Call, total: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """What weights, or a sum by them, would be if they added up to one, as they do but for rounding; `mass` is what they add up to. With sinks
    they add up to less, and rows without weights have none: both stay as they are."""
    return total if call.spec.extra_terms else torch.where(mass > 0.5, total / mass, total)


def _recomputed(call: Call, tile: Box, program: Expr, rows: RowGradients, memo: dict[Expr, torch.Tensor], after: dict[Expr, torch.Tensor],
                alone: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(softmax weights, weights after the weight program, gradient of the softmax weights) of a tile; the memos keep what
    the two programs computed on the way. Where the tile is `alone` its weights add up to one whatever the statistics' rounding."""
    spec, shape = call.spec, lengths(tile, call.score_axes)
    key = call.rectangle(spec.key, tile, ("j", "d"))
    probability = rows.weights(score_of(call, program, tile, rows.query, key, memo).expand(shape))
    if alone:
        probability = _mean(call, probability, probability.sum(-1, keepdim=True))
    weight, arrived = probability, rows.arrived(call, tile).expand(shape)
    if spec.weight != WEIGHT:
        after.update({WEIGHT: probability, UPSTREAM: arrived})
        weight = run(call, spec.weight, tile, after).expand(shape)
        arrived = run(call, adjoint(spec.weight, WEIGHT), tile, after).expand(shape)
    return probability, weight, arrived


def _backward_tile(call: Call, tile: Box, program: Expr, rows: RowGradients, grads: dict[int, torch.Tensor], alone: bool) -> None:
    """Add what one tile of scores sends to every operand; `alone` where it has all keys of its rows, which then settles their delta."""
    spec = call.spec
    key = call.rectangle(spec.key, tile, ("j", "d"))
    memo: dict[Expr, torch.Tensor] = {}
    after: dict[Expr, torch.Tensor] = {}
    probability, weight, arrived = _recomputed(call, tile, program, rows, memo, after, alone)
    if after:
        _add_loads(call, spec.weight, tile, after, grads)
    rows.add_value(call, tile, weight, grads)
    if alone:
        rows.delta = (probability * arrived).sum(-1, keepdim=True)
    memo[UPSTREAM] = (arrived - rows.delta).mul_(probability)
    _add_loads(call, program, tile, memo, grads)
    _add_dot(call, program, tile, memo, rows, key, grads)


def _add_dot(call: Call, program: Expr, tile: Box, memo: dict[Expr, torch.Tensor], rows: RowGradients, key: torch.Tensor,
             grads: dict[int, torch.Tensor]) -> None:
    """Gradients of query and key from that of the raw scores."""
    spec = call.spec
    slope = adjoint(program, DOT)
    if slope == ZERO or not grads.keys() & {spec.query.operand, spec.key.operand}:
        return
    grad = run(call, slope, tile, memo).expand(lengths(tile, call.score_axes))
    if spec.query.operand in grads:
        rows.grad_query += product(grad, key).sum_to_size(rows.query.shape)
    if spec.key.operand in grads:
        part = contract(grad, rows.query, key.shape[:-2])
        call.elements.add(grads[spec.key.operand], spec.key.index, tile, (*spec.batch, "j", "d"), part)


def _add_loads(call: Call, program: Expr, box: Box, memo: dict[Expr, torch.Tensor], grads: dict[int, torch.Tensor]) -> None:
    """Gradients of the floats that a program reads; `memo` holds the program's values and the gradient that arrives."""
    order = call.score_axes if "j" in box else call.score_axes[:-1]
    for node in loads(program):
        if node.kind != "float" or node.attr not in grads:
            continue
        slope = adjoint(program, node)
        if slope != ZERO:
            grad = run(call, slope, box, memo).expand(lengths(box, order))
            call.elements.add(grads[int(node.attr)], node.args, box, order, grad)  # type: ignore[arg-type]


def _backward_extra(call: Call, term: Expr, box: Box, rows: Normalised, grads: dict[int, torch.Tensor]) -> None:
    """An extra column has a weight and no value: its gradient is -weight · delta."""
    memo: dict[Expr, torch.Tensor] = {}
    shape = lengths(box, call.score_axes[:-1])
    score = run(call, term, box, memo).expand(shape).unsqueeze(-1)
    memo[UPSTREAM] = (rows.weights(score) * -rows.delta).squeeze(-1)
    _add_loads(call, term, box, memo, grads)


def backward_extra_terms(spec: AttentionSpec, operands: Sequence[torch.Tensor], stats: torch.Tensor, delta: torch.Tensor, sizes: Sequence[int],
                         seed: torch.Tensor | None, grads: dict[int, torch.Tensor]) -> None:
    """Add the gradients of what the extra terms read to `grads` (operand number → contiguous tensor of its shape).

    Args:
        spec, operands, stats, sizes, seed: as of `backward`.
        delta: Σ_e grad_out · out, (batch…, i).
    """
    call = prepare(spec, operands, sizes, seed)
    statistics, lost = split_dims(call, stats), split_dims(call, delta.unsqueeze(-1))
    rows = Normalised(*normaliser(call.spec, statistics), lost)
    box = {a: (0, call.sizes[a]) for a in (*call.spec.batch, "i")}
    for term in call.spec.extra_terms:
        _backward_extra(call, term, box, rows, grads)
