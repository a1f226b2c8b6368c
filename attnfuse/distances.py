"""Tables by distance: what a score takes from the distance of its key and query alone is computed once for every distance.

    score = s + table[bucket(j - i), b1]
    t[b1, n] = table[bucket(n - (queries - 1)), b1]          one number for each of queries + keys - 1 distances
    score = s + t[b1, j - i + queries - 1]

A kernel or a walked tile then reads one number where it would compute a bucket's logarithm and gather. The table belongs to the
expression, not to an attention: layers with the same bias share it. Its gradient goes on to the tensors that the expression reads.

Which expressions (`tabulated`): the largest float ones in the score and weight programs that stay the same when query and key move on
together, that read nothing of the products, of dropout or of weights, and that cost more than the read which takes their place. No
condition outside an index is part of one: conditions are what bounds and maps of tiles are made from.
"""
from __future__ import annotations

import functools
import json
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from . import program
from .adjoint import UPSTREAM, ZERO, adjoint
from .algebra import affine, simplify
from .program import Env, Expr, add, apply, axis, const, depends, evaluate, load, loads, rewrite, size, substitute, walk
from .ranges import analyse
from .spec import Access, AttentionSpec, Operand, dtype_of
from .tilemap import conditions

LEAST = 256
"""Fewer queries or keys than this are not worth a table: it takes some fifty small launches."""
QUERY, KEY = axis("i"), axis("j")
PLACE = simplify(add(apply("sub", KEY, QUERY), apply("sub", size("i"), const(1))))
"""Where a table has the number of a distance; never negative."""
_NUMBER = axis("t")
_FROM_START = apply("sub", _NUMBER, apply("sub", size("i"), const(1)))
_POSITIONS = {QUERY: apply("max", apply("neg", _FROM_START), const(0)), KEY: apply("max", _FROM_START, const(0))}
"""The first query and key of each distance: positions that there are, so that nothing is read where the attention would not."""
_COSTLY = frozenset({"exp", "log", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos"})


@dataclass(frozen=True)
class Table:
    """One table, (batch…, queries + keys - 1). Hashable, JSON round-trip.

    Attributes:
        batch: the batch axes on which it depends.
        operands: the tensors that it reads.
        program: its elements, over batch, i and j, on which it depends through j - i.
        dtype: that of the scores.
        scalars: the integers that it uses beside the lengths of batch, i and j.
    """

    batch: tuple[str, ...]
    operands: tuple[Operand, ...]
    program: Expr
    dtype: str = "float32"
    scalars: tuple[str, ...] = field(default=())

    @property
    def size_names(self) -> tuple[str, ...]:
        """What the integers of a call are, in order."""
        return (*self.batch, "i", "j", *self.scalars)

    def to_json(self) -> str:
        """One line of JSON from which `from_json` rebuilds an equal table."""
        data = {"batch": self.batch, "operands": [list(asdict(o).values()) for o in self.operands], "dtype": self.dtype,
                "scalars": self.scalars, "program": program.to_json((self.program,))}
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Table:
        """Rebuild a table."""
        return _from_json(text)


@functools.lru_cache(maxsize=1024)
def _from_json(text: str) -> Table:
    data: dict[str, Any] = json.loads(text)
    (expr,) = program.from_json(data["program"])
    return Table(tuple(data["batch"]), tuple(Operand(*o) for o in data["operands"]), expr, data["dtype"], tuple(data["scalars"]))


@dataclass(frozen=True)
class Tabulated:
    """An attention that reads tables.

    Attributes:
        spec: the attention; its operands are those that it still reads, then the tables.
        kept: which operands of the attention as it was it still reads.
        tables: what the tables hold. sources: which operands of the attention as it was each of them reads.
    """

    spec: AttentionSpec
    kept: tuple[int, ...]
    tables: tuple[Table, ...]
    sources: tuple[tuple[int, ...], ...]


# ---- which expressions

@functools.lru_cache(maxsize=4096)
def by_distance(expr: Expr) -> bool:
    """Whether a value stays the same when query and key move on together. Then it is the same at all pairs of one distance: from one pair to
    the next nothing changes.

    >>> by_distance(load(3, (apply("abs", apply("sub", KEY, QUERY)),), "float")), by_distance(add(KEY, QUERY))
    (True, False)
    """
    moved = {QUERY: add(QUERY, const(1)), KEY: add(KEY, const(1))}
    return simplify(substitute(expr, moved)) == simplify(expr)


@functools.lru_cache(maxsize=1024)
def tabulated(spec: AttentionSpec) -> Tabulated | None:
    """The attention with tables by distance; None where none pays, or where one would change what bounds or a map know of the mask."""
    found = list(dict.fromkeys(x for e in (spec.score, spec.weight) for x in _outermost(e)))
    if not found:
        return None
    parts = [_apart(spec, x) for x in found]
    names = _names([t.operands for t, _ in parts], {o.name for o in spec.operands})
    operands = tuple(Operand(n, t.dtype, len(t.batch) + 1) for n, (t, _) in zip(names, parts, strict=True))
    reads = {x: load(len(spec.operands) + n, (*map(axis, t.batch), PLACE), "float") for n, (x, (t, _)) in enumerate(zip(found, parts, strict=True))}
    whole = replace(spec, operands=(*spec.operands, *operands), score=_reading(spec.score, reads), weight=_reading(spec.weight, reads))
    if not _same_limits(spec, whole):
        return None
    short, kept = _without_unread(whole)
    return Tabulated(short, kept[:-len(parts)], tuple(t for t, _ in parts), tuple(s for _, s in parts))


def _outermost(expr: Expr) -> list[Expr]:
    """The largest expressions of a program that a table is to hold, in order; conditions and indices are not looked into."""
    if expr.kind != "float":
        return []
    if _holds(expr):
        return [expr] if _pays(expr) else []
    return [] if expr.op == "load" else [x for a in expr.args for x in _outermost(a)]


def _holds(expr: Expr) -> bool:
    """Whether a float can be put in a table: it depends on both positions through their distance, and on no condition."""
    own = depends(expr)
    return {"i", "j"} <= own and not own & {"dot", "keep", "weight"} and not _decides(expr) and by_distance(expr)


def _decides(expr: Expr) -> bool:
    """Whether a condition on the positions is part of a value, but for the indices of what it reads."""
    if expr.op == "load" or not depends(expr) & {"i", "j"}:
        return False
    return expr.kind == "bool" or any(_decides(a) for a in expr.args)


def _pays(expr: Expr) -> bool:
    """Whether an expression costs more than a read: a transcendental function of the distance, or a read at an index that is computed. What is
    affine, such as ALiBi's slope times the distance, takes two operations."""
    return any({"i", "j"} <= depends(x) and (x.op in _COSTLY or _power(x) or _computed(x)) for x in walk(expr))


def _power(expr: Expr) -> bool:
    return expr.op == "pow" and expr.args[1] not in (const(2.0), const(2))


def _computed(expr: Expr) -> bool:
    """Whether a float is read at an index that is more than a sum of multiples of the positions."""
    return expr.op == "load" and expr.kind == "float" and any(affine(a, ("i", "j")) is None for a in expr.args if depends(a) & {"i", "j"})


def _reading(expr: Expr, reads: dict[Expr, Expr]) -> Expr:
    """A program in which the reads stand for what the tables hold; conditions and indices stay as they are."""
    if expr in reads:
        return reads[expr]
    if expr.kind != "float" or expr.op == "load" or not expr.args:
        return expr
    return Expr(expr.op, tuple(_reading(a, reads) for a in expr.args), expr.attr, expr.kind)


def _same_limits(spec: AttentionSpec, whole: AttentionSpec) -> bool:
    """Whether as much is known of the mask as before: its bounds, and what a map is made from. What is read is taken to be of ordinary size,
    and may be so low that nothing counts; what stands in its place need not be."""
    before, after = analyse(spec), analyse(whole)
    left = set(walk(simplify(whole.score)))
    same = {c for c in conditions(spec) if c.what in left} == set(conditions(whole))
    return same and (before.bounds, before.masked_below, before.speculative) == (after.bounds, after.masked_below, after.speculative)


def _apart(spec: AttentionSpec, expr: Expr) -> tuple[Table, tuple[int, ...]]:
    """An expression as a table that knows nothing of its attention, so that equal tables of two layers are equal."""
    sources = list(dict.fromkeys(int(x.attr) for x in loads(expr)))  # type: ignore[arg-type]  # a load names its operand
    batch = tuple(b for b in spec.batch if b in depends(expr))
    sizes = {str(x.attr) for x in walk(expr) if x.op == "size"} - {*batch, "i", "j"}
    operands = tuple(Operand(spec.operands[s].name, spec.operands[s].dtype, spec.operands[s].rank) for s in sources)
    own = _renumbered(expr, {s: n for n, s in enumerate(sources)})
    return Table(batch, operands, own, str(spec.compute_dtype).removeprefix("torch."), tuple(sorted(sizes))), tuple(sources)


def _names(read: Sequence[tuple[Operand, ...]], taken: set[str]) -> list[str]:
    """Names of tables, after the first tensor that each reads."""
    out: list[str] = []
    for operands in read:
        name = "_".join([*(o.name for o in operands[:1]), "by_distance"])
        count = 2
        while name in taken:
            name, count = f"{name.rstrip('0123456789')}{count}", count + 1
        taken.add(name)
        out.append(name)
    return out


def _renumbered(expr: Expr, number: dict[int, int]) -> Expr:
    return rewrite(expr, lambda x: load(number[int(x.attr)], x.args, x.kind) if x.op == "load" else None)  # type: ignore[arg-type]


def _without_unread(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[int, ...]]:
    """The spec without the operands that only its tables read, and which operands are left."""
    kept = tuple(sorted({spec.query.operand, spec.key.operand, spec.value.operand, *(int(x.attr) for e in spec.programs for x in loads(e))}))  # type: ignore[arg-type]
    number = {old: new for new, old in enumerate(kept)}
    own = lambda x: _renumbered(x, number)
    access = lambda a: Access(number[a.operand], tuple(map(own, a.index)))
    return replace(spec, operands=tuple(spec.operands[n] for n in kept), query=access(spec.query), key=access(spec.key), value=access(spec.value),
                   score=own(spec.score), weight=own(spec.weight), extra_terms=tuple(map(own, spec.extra_terms))), kept


def worthwhile(queries: int, keys: int) -> bool:
    """Whether there are so many more pairs than distances that a table pays."""
    return min(queries, keys) >= LEAST


# ---- making one in PyTorch

def shape(table: Table, sizes: Sequence[int]) -> list[int]:
    """The lengths of a table; the sizes may be symbolic."""
    named = dict(zip(table.size_names, sizes, strict=True))
    return [*(named[b] for b in table.batch), named["i"] + named["j"] - 1]


def build(table: Table, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """The table, of the shape `shape` and its own dtype.

    Args:
        table: what it holds.
        operands: the tensors that it reads.
        sizes: integers in the order of `table.size_names`, both lengths at least 1.
        device: where the operands are.
    """
    expr, env = _along(table), _env(table, operands, sizes, device)
    return evaluate(expr, env, _numbers(expr, env)).expand(shape(table, sizes)).contiguous()


def gradients(table: Table, grad: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int],
              needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of the operands that `needs` names, each contiguous, of the operand's shape and dtype; None elsewhere. `grad` is that of
    the table; the others are as of `build`."""
    expr, env = _along(table), _env(table, operands, sizes, grad.device)
    memo: dict[Expr, torch.Tensor] = {UPSTREAM: grad.to(env.dtype)}
    sums = {n: torch.zeros(t.shape, dtype=env.dtype, device=t.device) for n, t in enumerate(operands) if needs[n]}
    for node in loads(expr):
        slope = adjoint(expr, node) if node.kind == "float" and node.attr in sums else ZERO
        if slope != ZERO:
            for one in (slope, *node.args):
                memo |= _numbers(one, env, memo)
            values = evaluate(slope, env, memo).expand(grad.shape)
            _add(sums[int(node.attr)], [evaluate(x, env, memo) for x in node.args], values)  # type: ignore[arg-type]  # a load names its operand
    return [sums[n].to(t.dtype) if n in sums else None for n, t in enumerate(operands)]


@functools.lru_cache(maxsize=1024)
def _along(table: Table) -> Expr:
    """A table's program by the number of its distance."""
    return substitute(table.program, _POSITIONS)


def _env(table: Table, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> Env:
    """Every position of a table."""
    named, lengths = dict(zip(table.size_names, sizes, strict=True)), shape(table, sizes)
    rank = len(lengths)
    axes = {name: torch.arange(n, device=device).view([-1 if k == m else 1 for m in range(rank)])
            for k, (name, n) in enumerate(zip((*table.batch, str(_NUMBER.attr)), lengths, strict=True))}
    read = lambda operand, index: operands[operand][index] if index else operands[operand]
    return Env(axes, named, read, dtype_of(table.dtype), device)


def _numbers(expr: Expr, env: Env, known: Container[Expr] = ()) -> dict[Expr, torch.Tensor]:
    """The numbers of a program that are not known yet, made on the device: a copy from the host is what a CUDA graph may not capture."""
    dtypes = {"float": env.dtype, "int": torch.int64, "bool": torch.bool}
    return {x: torch.full((), env.sizes[str(x.attr)] if x.op == "size" else x.value, dtype=dtypes[x.kind], device=env.device)
            for x in walk(expr) if x.op in ("const", "size") and x not in known}


def _add(into: torch.Tensor, places: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Add values at places, which broadcast to them; what falls on one element adds up."""
    if not places:
        into.add_(values.sum())
        return
    lengths = torch.broadcast_shapes(*(p.shape for p in places))
    summed = values.sum_to_size([1] * (values.dim() - len(lengths)) + list(lengths))
    into.index_put_(tuple(places), summed.reshape(lengths), accumulate=True)     # a place that no axis moves is one number
