"""The executor in plain PyTorch: walks tiles with the online softmax, forward and backward, for any spec on any device.

Memory is linear in the sequence. A tile covers a chunk of the batch axes, some queries and some keys; everything between the
two products is `program.evaluate` on that tile. Source of the method: Dao, "FlashAttention-2" (2023), algorithms 1 and 2;
delta, the sum of gradient times weight over a row, is Σ_e grad_out·out because the weight program is linear in the weight.

Row statistics are (maximum, log of the sum), so that a weight is exp(score - maximum - log sum) even beside a fill of -1e9.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .adjoint import UPSTREAM, ZERO, adjoint
from .elements import Box, Elements, contract, integer, product
from .philox import keep_factor
from .program import DOT, WEIGHT, Env, Expr, add, axis, const, depends, evaluate, loads, mul, rewrite, walk
from .ranges import Ranges, analyse, full_range, key_range
from .reference import batch_index, check_call
from .spec import Access, AttentionSpec, dtype_of

CPU_TILE, CPU_ROWS = 1 << 19, 128
"""Elements of a score tile, and its queries at most: larger tiles leave the processor's caches, smaller ones pay for their
Python (measured with 12 heads of 64 at 1024 and 4096 keys). Backward, which holds more of them at once, halves the tile."""
GPU_TILE, GPU_ROWS = 1 << 24, 1024
"""The same where every operation is a launch."""
NEG_INF = float("-inf")


@dataclass(frozen=True)
class Call:
    """One call, ready to be walked: the spec with grouped heads split, its sizes, and how operands are read."""

    spec: AttentionSpec
    sizes: dict[str, int]
    elements: Elements
    seed: torch.Tensor | None
    ranges: Ranges
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> list[int]:
        """Lengths of the batch axes."""
        return [self.sizes[a] for a in self.spec.batch]

    @property
    def score_axes(self) -> tuple[str, ...]:
        """Dimensions of a score tile."""
        return (*self.spec.batch, "i", "j")

    def rectangle(self, access: Access, box: Box, order: tuple[str, str]) -> torch.Tensor:
        """Elements of query, key or value in the dtype of the arithmetic: (batch…, *order)."""
        return self.elements.read(access.operand, access.index, box, (*self.spec.batch, *order)).to(self.dtype)


def prepare(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None) -> Call:
    """Check a call and split its grouped axes."""
    check_call(spec, operands, sizes, seed)
    named = dict(zip(spec.size_names, sizes, strict=True))
    for name in spec.batch:
        group = _group(spec, name, named)
        if group is not None and named[name] % group == 0:
            spec, length = _split(spec, name, group), named.pop(name)
            named |= {_outer(name): length // group, _inner(name): group}
    device = operands[spec.query.operand].device
    return Call(spec, named, Elements(operands, named, device), seed, analyse(spec), spec.compute_dtype, device)


# ---- grouped axes: b1 with reads at b1 // 4 becomes two axes, so that these reads are strided views

def _outer(name: str) -> str:
    return f"{name}//"


def _inner(name: str) -> str:
    return f"{name}%"


def _group(spec: AttentionSpec, name: str, sizes: dict[str, int]) -> int | None:
    """The n of the reads at ``name // n`` or ``name % n``, if there is exactly one."""
    found = {integer(n, sizes) for n in _divisors(spec, name)}
    return found.pop() if len(found) == 1 else None


@functools.lru_cache(maxsize=1024)
def _divisors(spec: AttentionSpec, name: str) -> tuple[Expr, ...]:
    own = axis(name)
    nodes = {x for e in spec.programs for x in walk(e)}
    return tuple({x.args[1] for x in nodes if x.op in ("floordiv", "mod") and x.args[0] == own})


@functools.lru_cache(maxsize=1024)
def _split(spec: AttentionSpec, name: str, group: int) -> AttentionSpec:
    """The same attention with the batch axis `name` enumerated by two axes."""
    own, outer, inner = axis(name), axis(_outer(name)), axis(_inner(name))

    def rule(node: Expr) -> Expr | None:
        if node.op in ("floordiv", "mod") and node.args[0] == whole:
            return outer if node.op == "floordiv" else inner
        return whole if node == own else None

    whole = add(mul(outer, const(group)), inner)
    new = lambda expr: rewrite(expr, rule)
    access = lambda a: Access(a.operand, tuple(map(new, a.index)))
    at = spec.batch.index(name)
    order = [n + (n > at) for n in spec.out_order]
    order.insert(order.index(at) + 1, at + 1)
    return replace(spec, batch=(*spec.batch[:at], _outer(name), _inner(name), *spec.batch[at + 1:]), query=access(spec.query),
                   key=access(spec.key), value=access(spec.value), score=new(spec.score), weight=new(spec.weight),
                   extra_terms=tuple(map(new, spec.extra_terms)), out_order=tuple(order))


# ---- tiles

def allocate_out(spec: AttentionSpec, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """An uninitialised result (batch…, i, e) whose dimensions lie in memory in the order `spec.out_order`."""
    named = dict(zip(spec.size_names, sizes, strict=True))
    shape = [named[a] for a in spec.out_axes]
    dense = like.new_empty([shape[n] for n in spec.out_order], dtype=dtype_of(spec.out_dtype))
    return dense.permute([spec.out_order.index(n) for n in range(len(shape))])


def _pieces(length: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _chunks(call: Call, budget: int) -> Iterator[Box]:
    """Boxes of the batch axes, together all of them, of at most `budget` positions; inner axes stay whole where they fit."""
    steps: list[int] = []
    for length in reversed(call.shape):
        steps.insert(0, max(min(length, budget), 1))
        budget = budget // length if 0 < length <= budget else 1
    pieces = [_pieces(length, step) for length, step in zip(call.shape, steps, strict=True)]
    for ranges in itertools.product(*pieces):
        yield dict(zip(call.spec.batch, ranges, strict=True))


def _row_tiles(call: Call, share: int = 1) -> Iterator[tuple[Box, int]]:
    """Boxes of batch axes and queries, each with the number of keys that its tiles should have.

    `share` is how many score tiles are alive at once.
    """
    tile, most = (CPU_TILE, CPU_ROWS) if call.device.type == "cpu" else (GPU_TILE, GPU_ROWS)
    tile = max(tile // share, 1)
    queries, keys = call.sizes["i"], call.sizes["j"]
    whole = {a: (0, call.sizes[a]) for a in ("d", "e")}
    rows = max(min(most, queries, tile), 1)
    for chunk in _chunks(call, max(tile // (rows * max(min(most, keys), 1)), 1)):
        batch = math.prod(stop - start for start, stop in chunk.values())
        for i in _pieces(queries, rows):
            yield chunk | whole | {"i": i}, max(tile // max(batch * (i[1] - i[0]), 1), 16)


def _key_tiles(call: Call, box: Box, step: int, everything: bool) -> Iterator[tuple[Box, Expr]]:
    """Boxes over the keys that can contribute to a box of queries, each with its score program."""
    keys, batch = call.sizes["j"], {a: box[a] for a in call.spec.batch}
    lo, hi = (0, keys) if everything else key_range(call.ranges, call.sizes, batch, *box["i"], keys)
    inner = full_range(call.ranges, call.sizes, batch, *box["i"], keys)
    for start, stop in ((lo, inner[0]), inner, (inner[1], hi)):
        score = call.ranges.inside if (start, stop) == inner else call.spec.score
        for a, b in _pieces(stop - start, step):
            yield box | {"j": (start + a, start + b)}, score


def _omitted(call: Call, box: Box, step: int) -> Iterator[tuple[Box, Expr]]:
    """The tiles that `_key_tiles` left out."""
    keys = call.sizes["j"]
    lo, hi = key_range(call.ranges, call.sizes, {a: box[a] for a in call.spec.batch}, *box["i"], keys)
    for start, stop in ((0, lo), (hi, keys)):
        for a, b in _pieces(stop - start, step):
            yield box | {"j": (start + a, start + b)}, call.spec.score


# ---- programs on a tile

def _env(call: Call, box: Box, order: tuple[str, ...]) -> Env:
    axes = call.elements.positions(box, order)
    keep = None
    if call.seed is not None and "j" in box:
        batch = batch_index(call.spec, axes, call.sizes, torch.zeros((), dtype=torch.int64, device=call.device))
        seed = call.seed
        keep = lambda stream, p: keep_factor(seed, stream, p, batch, axes["i"], axes["j"], call.dtype)
    raw = lambda operand, index: call.elements.operands[operand][index] if index else call.elements.operands[operand]
    return Env(axes, call.sizes, raw, call.dtype, call.device, keep=keep)


def run(call: Call, expr: Expr, box: Box, memo: dict[Expr, torch.Tensor]) -> torch.Tensor:
    """The value of a program on a tile; broadcasts to it. Loads become views where they can."""
    order = call.score_axes if "j" in box else call.score_axes[:-1]
    kinds = {"float": call.dtype, "int": torch.int64, "bool": torch.bool}
    for node in loads(expr):
        if node not in memo:
            memo[node] = call.elements.read(int(node.attr), node.args, box, order).to(kinds[node.kind])  # type: ignore[arg-type]
    return evaluate(expr, _env(call, box, order), memo)


def _shape(box: Box, order: Sequence[str]) -> list[int]:
    return [box[a][1] - box[a][0] for a in order]


def _score(call: Call, program: Expr, box: Box, query: torch.Tensor, key: torch.Tensor, memo: dict[Expr, torch.Tensor]) -> torch.Tensor:
    if "dot" in depends(program):
        memo[DOT] = product(query, key.transpose(-1, -2))
    return run(call, program, box, memo)


def _writable(program: Expr, score: torch.Tensor, shape: list[int]) -> bool:
    """Whether the score is a tensor of its own, of the whole tile."""
    return list(score.shape) == shape and program.op not in ("load", "const", "axis", "size", "float", "int")


# ---- forward

class _Rows:
    """The online softmax of one tile of queries: running maximum, sum and accumulator."""

    def __init__(self, call: Call, box: Box) -> None:
        self.call = call
        self.box = box
        shape = _shape(box, call.score_axes[:-1])
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
        weight = score.sub_(shift).exp_() if write else (score - shift).exp_()
        total = weight.sum(-1, keepdim=True)
        if self.fresh:
            self.total = total
        else:
            scale = torch.exp(self.maximum - shift)
            self.total = self.total * scale + total
            self.output.mul_(scale)
        self.maximum, self.fresh = new, False
        return weight

    def step(self, tile: Box, program: Expr, query: torch.Tensor) -> None:
        """One tile of keys."""
        call, spec = self.call, self.call.spec
        memo: dict[Expr, torch.Tensor] = {}
        key = call.rectangle(spec.key, tile, ("j", "d"))
        score = _score(call, program, tile, query, key, memo)
        shape = _shape(tile, call.score_axes)
        write = _writable(program, score, shape)
        weight = self._absorb(score.expand(shape), write)
        if spec.weight != WEIGHT:
            weight = run(call, spec.weight, tile, {WEIGHT: weight}).expand(shape)
        self.output += product(weight, call.rectangle(spec.value, tile, ("j", "e")))

    def unseen(self) -> bool:
        """Whether some row saw no live key."""
        return bool((self.maximum <= self.call.ranges.masked_below).any())

    def poison(self, step: int) -> None:
        """Give rows that are -inf everywhere the weights NaN, and what the weight program makes of them."""
        call, spec = self.call, self.call.spec
        empty = self.maximum == NEG_INF
        if spec.empty_rows == "zero" or call.sizes["j"] == 0 or not bool(empty.any()):
            return
        if all(x.op != "where" for x in walk(spec.weight)):
            self.output.masked_fill_(empty, float("nan"))
            return
        for a, b in _pieces(call.sizes["j"], step):
            tile = self.box | {"j": (a, b)}
            shape = _shape(tile, call.score_axes)
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
        (maximum, log of the sum) in natural logarithms and `spec.compute_dtype`; both -inf in a row whose scores are all -inf.

    Raises:
        ValueError: wrong number of operands or sizes, or a missing seed.
    """
    call = prepare(spec, operands, sizes, seed)
    out = allocate_out(spec, sizes, operands[spec.query.operand])
    stats = torch.empty([*out.shape[:-1], 2], dtype=call.dtype, device=call.device)
    split_out, split_stats = _split_dims(call, out), _split_dims(call, stats)
    for box, step in _row_tiles(call):
        rows = _Rows(call, box)
        query = call.rectangle(call.spec.query, box, ("i", "d"))
        for tile, program in _key_tiles(call, box, step, everything=False):
            rows.step(tile, program, query)
        if call.ranges.speculative and rows.unseen():
            for tile, program in _omitted(call, box, step):
                rows.step(tile, program, query)
        rows.poison(step)
        place = tuple(slice(*box[a]) for a in call.score_axes[:-1])
        split_out[place] = rows.result().to(out.dtype)
        split_stats[place] = torch.cat([rows.maximum, rows.total.log()], -1)
    return out, stats


def _split_dims(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor (batch…, i, x) with the batch dimensions of the split spec."""
    return tensor.view([*call.shape, *tensor.shape[-2:]]) if tensor.numel() else tensor.new_empty([*call.shape, *tensor.shape[-2:]])


# ---- backward

@dataclass
class _RowGradients:
    """What backward knows of one tile of queries; each (batch…, i, …)."""

    query: torch.Tensor
    grad_out: torch.Tensor
    delta: torch.Tensor
    maximum: torch.Tensor
    log_total: torch.Tensor
    grad_query: torch.Tensor

    def weights(self, score: torch.Tensor) -> torch.Tensor:
        """The normalised softmax weights."""
        return (score - self.maximum).sub_(self.log_total).exp_()


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
    grads = {n: torch.zeros(t.shape, dtype=call.dtype, device=call.device) for n, t in enumerate(operands) if needs[n]}
    split = [_split_dims(call, t) for t in (grad_out, out, stats)]
    for box, step in _row_tiles(call, share=2) if grads and call.sizes["j"] else ():
        place = tuple(slice(*box[a]) for a in call.score_axes[:-1])
        rows = _row_gradients(call, box, *(t[place].to(call.dtype) for t in split))
        unseen = bool((rows.maximum <= call.ranges.masked_below).any()) or bool(rows.maximum.isnan().any())
        for tile, program in _key_tiles(call, box, step, everything=unseen):
            _backward_tile(call, tile, program, rows, grads)
        for term in call.spec.extra_terms:
            _backward_extra(call, term, box, rows, grads)
        if call.spec.query.operand in grads:
            access = call.spec.query
            call.elements.add(grads[access.operand], access.index, box, (*call.spec.batch, "i", "d"), rows.grad_query)
    return [grads[n].to(t.dtype) if n in grads else None for n, t in enumerate(operands)]


def _row_gradients(call: Call, box: Box, grad_out: torch.Tensor, out: torch.Tensor, stats: torch.Tensor) -> _RowGradients:
    maximum, log_total = stats[..., :1], stats[..., 1:]
    if call.spec.empty_rows == "zero":                 # weights exp(-inf - 0 - inf) = 0
        empty = maximum == NEG_INF
        maximum, log_total = maximum.masked_fill(empty, 0.0), log_total.masked_fill(empty, float("inf"))
    query = call.rectangle(call.spec.query, box, ("i", "d"))
    delta = (grad_out * out).sum(-1, keepdim=True)
    return _RowGradients(query, grad_out, delta, maximum, log_total, torch.zeros_like(query, memory_format=torch.contiguous_format))


def _backward_tile(call: Call, tile: Box, program: Expr, rows: _RowGradients, grads: dict[int, torch.Tensor]) -> None:
    """Add what one tile of scores sends to every operand."""
    spec, shape = call.spec, _shape(tile, call.score_axes)
    key, value = call.rectangle(spec.key, tile, ("j", "d")), call.rectangle(spec.value, tile, ("j", "e"))
    memo: dict[Expr, torch.Tensor] = {}
    probability = rows.weights(_score(call, program, tile, rows.query, key, memo).expand(shape))
    weight, arrived = probability, product(rows.grad_out, value.transpose(-1, -2)).expand(shape)
    if spec.weight != WEIGHT:
        after: dict[Expr, torch.Tensor] = {WEIGHT: probability, UPSTREAM: arrived}
        weight = run(call, spec.weight, tile, after).expand(shape)
        arrived = run(call, adjoint(spec.weight, WEIGHT), tile, after).expand(shape)
        _add_loads(call, spec.weight, tile, after, grads)
    if spec.value.operand in grads:
        part = contract(weight, rows.grad_out, value.shape[:-2])
        call.elements.add(grads[spec.value.operand], spec.value.index, tile, (*spec.batch, "j", "e"), part)
    memo[UPSTREAM] = (arrived - rows.delta).mul_(probability)
    _add_loads(call, program, tile, memo, grads)
    _add_dot(call, program, tile, memo, rows, key, grads)


def _add_dot(call: Call, program: Expr, tile: Box, memo: dict[Expr, torch.Tensor], rows: _RowGradients, key: torch.Tensor,
             grads: dict[int, torch.Tensor]) -> None:
    """Gradients of query and key from that of the raw scores."""
    spec = call.spec
    slope = adjoint(program, DOT)
    if slope == ZERO or not grads.keys() & {spec.query.operand, spec.key.operand}:
        return
    grad = run(call, slope, tile, memo).expand(_shape(tile, call.score_axes))
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
            grad = run(call, slope, box, memo).expand(_shape(box, order))
            call.elements.add(grads[int(node.attr)], node.args, box, order, grad)  # type: ignore[arg-type]


def _backward_extra(call: Call, term: Expr, box: Box, rows: _RowGradients, grads: dict[int, torch.Tensor]) -> None:
    """An extra column has a weight and no value: its gradient is -weight · delta."""
    memo: dict[Expr, torch.Tensor] = {}
    shape = _shape(box, call.score_axes[:-1])
    score = run(call, term, box, memo).expand(shape).unsqueeze(-1)
    memo[UPSTREAM] = (rows.weights(score) * -rows.delta).squeeze(-1)
    _add_loads(call, term, box, memo, grads)
