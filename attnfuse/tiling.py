"""One call of an attention, cut into tiles: what the executors in PyTorch share.

A tile covers a chunk of the batch axes, some queries and some keys. Everything between the two products is
`program.evaluate` on it, with operands read as views where they can be (`elements`), and only the tiles that can contribute
(`ranges`) are visited.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .elements import Box, Elements
from .philox import keep_factor
from .program import Env, Expr, add, axis, const, evaluate, integer, loads, mul, rewrite, walk
from .ranges import Ranges, analyse, full_range, key_range
from .reference import batch_index, check_call
from .spec import Access, AttentionSpec, dtype_of
from .tilemap import without

CPU_TILE, CPU_ROWS = 1 << 19, 128
"""Elements of a score tile, and its queries at most: larger tiles leave the processor's caches, smaller ones pay for their
Python (measured with 12 heads of 64 at 1024 and 4096 keys). Backward, which holds more of them at once, halves the tile."""
MERGE = 64
"""Fewer keys than this at which all bounds hold are not worth a tile of their own."""
GPU_TILE, GPU_ROWS = 1 << 24, 1024
"""The same where every operation is a launch."""


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
    spec = without(spec)
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
    return _allocate(spec, spec.out_axes, sizes, like)


def allocate_weights(spec: AttentionSpec, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """As `allocate_out`, for the weights (batch…, i, j)."""
    return _allocate(spec, spec.weight_axes, sizes, like)


def _allocate(spec: AttentionSpec, axes: Sequence[str], sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    named = dict(zip(spec.size_names, sizes, strict=True))
    shape = [named[a] for a in axes]
    dense = like.new_empty([shape[n] for n in spec.out_order], dtype=dtype_of(spec.out_dtype))
    return dense.permute([spec.out_order.index(n) for n in range(len(shape))])


def pieces(length: int, step: int) -> list[tuple[int, int]]:
    """[0, length) in half-open pieces of at most `step`."""
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _chunks(call: Call, budget: int) -> Iterator[Box]:
    """Boxes of the batch axes, together all of them, of at most `budget` positions; inner axes stay whole where they fit."""
    steps: list[int] = []
    for length in reversed(call.shape):
        steps.insert(0, max(min(length, budget), 1))
        budget = budget // length if 0 < length <= budget else 1
    for ranges in itertools.product(*(pieces(length, step) for length, step in zip(call.shape, steps, strict=True))):
        yield dict(zip(call.spec.batch, ranges, strict=True))


def row_tiles(call: Call, share: int = 1) -> Iterator[tuple[Box, int]]:
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
        for i in pieces(queries, rows):
            yield chunk | whole | {"i": i}, max(tile // max(batch * (i[1] - i[0]), 1), 16)


def key_tiles(call: Call, box: Box, step: int, everything: bool) -> Iterator[tuple[Box, Expr]]:
    """Boxes over the keys that can contribute to a box of queries, each with its score program."""
    keys, batch = call.sizes["j"], {a: box[a] for a in call.spec.batch}
    lo, hi = (0, keys) if everything else key_range(call.ranges, call.sizes, batch, *box["i"], keys)
    inner = full_range(call.ranges, call.sizes, batch, *box["i"], keys)
    if call.ranges.bounds and inner[1] - inner[0] < MERGE:   # a tile of its own would cost more than it saves
        inner = (lo, lo)
    for start, stop in ((lo, inner[0]), inner, (inner[1], hi)):
        score = call.ranges.inside if (start, stop) == inner else call.spec.score
        for a, b in pieces(stop - start, step):
            yield box | {"j": (start + a, start + b)}, score


def omitted(call: Call, box: Box, step: int) -> Iterator[tuple[Box, Expr]]:
    """The tiles that `key_tiles` left out."""
    keys = call.sizes["j"]
    lo, hi = key_range(call.ranges, call.sizes, {a: box[a] for a in call.spec.batch}, *box["i"], keys)
    for start, stop in ((0, lo), (hi, keys)):
        for a, b in pieces(stop - start, step):
            yield box | {"j": (start + a, start + b)}, call.spec.score


def split_dims(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor (batch…, i, x) with the batch dimensions of the split spec."""
    return tensor.view([*call.shape, *tensor.shape[-2:]]) if tensor.numel() else tensor.new_empty([*call.shape, *tensor.shape[-2:]])


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


def lengths(box: Box, order: Sequence[str]) -> list[int]:
    """The shape of a rectangle."""
    return [box[a][1] - box[a][0] for a in order]
