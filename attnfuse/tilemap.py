"""Masks that only their data tell: which tiles of 64 x 64 scores are empty, full, or cut by the mask.

`ranges` proves from a predicate such as ``j <= i`` where keys begin and end. Padding, documents, prefixes of run-time length
and dense boolean masks have no such proof, but whether a tile is empty can be looked up: a small kernel evaluates the conditions
of the score program at every position once, and the attention kernels follow lists of the tiles that are left.

    score = where(j <= i and ids[b0, i] == ids[b0, j], s, -inf)
    dead  = not (j <= i and ids[b0, i] == ids[b0, j])               the weight is 0 beside any live key
    full  = j <= i and ids[b0, i] == ids[b0, j]                     the score is `inside`
    inside = s

The map is a pair of integer tensors, (batch…, tiles of queries, 2 + tiles of keys) and the same turned round. A row holds how many
tiles are full, how many are not empty, then the numbers of all tiles: full ones, cut ones, empty ones, ascending within each kind.
It belongs to the mask, not to an attention: layers that share a mask share the map.
"""
from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from . import program
from .algebra import simplify
from .intervals import INF, interval
from .program import Env, Expr, apply, axis, const, depends, evaluate, load, rewrite, substitute, walk
from .ranges import DEAD, Ranges, analyse, assume, rounding
from .spec import AttentionSpec, Operand

TILE = 64
"""Queries and keys of a tile of the map. Kernels take tiles of this size or parts of them."""
_LOW = -9e8
"""An added float at or below this is a mask: so low that no ordinary score beside it counts (-1e9 is -999292928 in bfloat16)."""
COUNTS = 2
"""Numbers that stand before a row's list: of full tiles, of tiles that are not empty."""


@dataclass(frozen=True)
class Mask:
    """What a map is made from; `dead` and `full` are boolean programs over batch, i and j. Hashable, JSON round-trip.

    Attributes:
        batch: the batch axes on which the mask depends.
        operands: the tensors that it reads.
        dead: where it holds, the score's weight is 0 beside any live key. full: where it holds, the score is `Mapped.inside`.
        scalars: the integers that it uses beside the lengths of batch, i and j.
    """

    batch: tuple[str, ...]
    operands: tuple[Operand, ...]
    dead: Expr
    full: Expr
    scalars: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.batch, self.operands, self.dead, self.full, self.scalars)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]  # set in __post_init__: a mask is looked up at every call

    @property
    def size_names(self) -> tuple[str, ...]:
        """What the integers of a call are, in order."""
        return (*self.batch, "i", "j", *self.scalars)

    def to_json(self) -> str:
        """One line of JSON from which `from_json` rebuilds an equal mask."""
        data = {"batch": self.batch, "operands": [list(asdict(o).values()) for o in self.operands], "scalars": self.scalars,
                "programs": program.to_json((self.dead, self.full))}
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Mask:
        """Rebuild a mask."""
        return _from_json(text)


@functools.lru_cache(maxsize=1024)
def _from_json(text: str) -> Mask:
    data: dict[str, Any] = json.loads(text)
    dead, full = program.from_json(data["programs"])
    return Mask(tuple(data["batch"]), tuple(Operand(*o) for o in data["operands"]), dead, full, tuple(data["scalars"]))


@dataclass(frozen=True)
class Condition:
    """What a score may be masked by, and when: where `dead` holds the score is at most `fill`, where `full` holds `what` is `live`."""

    what: Expr
    dead: Expr
    full: Expr
    live: Expr
    fill: float


@dataclass(frozen=True)
class Mapped:
    """A spec's mask, which of the spec's operands it reads, and what the score is without it.

    Attributes:
        inside: the score program in full tiles.
        floats: the operands that full tiles do not read though they are floats: a gradient of theirs would miss those tiles.
        dense: whether the mask may turn out to be a bias, of which no tile is full: tiles that are cut are then as many as they can be.
        masked_below, speculative: as of `Ranges`, over all fills of the mask.
    """

    mask: Mask
    sources: tuple[int, ...]
    inside: Expr
    masked_below: float
    speculative: bool
    floats: tuple[int, ...]
    dense: bool


@functools.lru_cache(maxsize=4096)
def mapped(spec: AttentionSpec) -> Mapped | None:
    """The mask of a spec; None where nothing is masked that `ranges` does not bound already."""
    rest = analyse(spec).inside
    return masked(spec) if next(_conditions(rest, spec), None) else None


@functools.lru_cache(maxsize=4096)
def masked(spec: AttentionSpec) -> Mapped | None:
    """The mask of a spec, with what `ranges` bounds; None where no condition kills scores."""
    score, found = simplify(spec.score), conditions(spec)
    if not found:
        return None
    full = simplify(functools.reduce(lambda a, b: apply("and", a, b), [x.full for x in found]))
    dead = simplify(functools.reduce(lambda a, b: apply("or", a, b), [x.dead for x in found]))
    inside = simplify(substitute(score, {x.what: x.live for x in found}))
    finite = [x.fill for x in found if x.fill > -INF]
    mask, sources = _apart(spec, dead, full)
    floats = [x.what for x in found if x.what.kind == "float"]
    return Mapped(mask, sources, inside, max(finite) / 2 if finite else -INF, bool(finite),
                  tuple(dict.fromkeys(int(x.attr) for x in floats)),  # type: ignore[arg-type]  # a load names its operand
                  any(x.dead.op == "le" for x in found if x.what.kind == "float"))


def conditions(spec: AttentionSpec) -> tuple[Condition, ...]:
    """What may kill scores, those that `ranges` bounds among them."""
    return tuple(_conditions(simplify(spec.score), spec))


@functools.lru_cache(maxsize=4096)
def ranges_of(spec: AttentionSpec) -> Ranges:
    """What kernels go by: the ranges of a spec, or for one that comes with a map the program of its full tiles. Then there are no bounds,
    for the map has them."""
    if spec.tiles is None:
        return analyse(spec)
    found = mapped(spec)
    if found is None:
        raise ValueError("the spec names a map of tiles, and its score program has no mask to make one from")
    return Ranges((), found.inside, found.masked_below, found.speculative)


@functools.lru_cache(maxsize=4096)
def without(spec: AttentionSpec) -> AttentionSpec:
    """The attention as it was before it got a map, whose two tensors are its last operands: for executors that need none, and for what is
    kept of an attention by its meaning."""
    return spec if spec.tiles is None else replace(spec, operands=spec.operands[:-2], tiles=None)


def _conditions(score: Expr, spec: AttentionSpec) -> Iterator[Condition]:
    """What kills a score: boolean expressions that are no part of a larger one, integers and floats that are 0 or 1, and floats that
    are added as a mask is."""
    seen: set[Expr] = set()
    for node in walk(score):
        if node.kind == "bool" or node.op == "load":
            continue
        for x in node.args:
            if (x.kind == "bool" or x.op == "load") and x not in seen and depends(x) & {"i", "j"} and not depends(x) & {"dot", "keep", "weight"}:
                seen.add(x)
                found = _two_valued(score, x, spec) or _added(score, x, spec)
                if found is not None:
                    yield found


def _two_valued(score: Expr, x: Expr, spec: AttentionSpec) -> Condition | None:
    """A condition with one of whose values, false or true, 0 or 1, the score is dead. A number that is neither is neither."""
    fills = []
    for kills in (False, True):
        known = assume(x, kills) if x.kind == "bool" else {x: kills}
        fills.append(interval(score, known, round_constant=rounding(spec))[1])
    if (fills[0] <= DEAD) == (fills[1] <= DEAD):
        return None
    kills = fills[1] <= DEAD
    value = {"bool": bool, "int": int, "float": float}[x.kind]
    live = const(value(not kills))
    if x.kind == "bool":
        holds, fails = x, apply("not", x)
        return Condition(x, holds if kills else fails, fails if kills else holds, live, fills[kills])
    return Condition(x, apply("eq", x, const(value(kills))), apply("eq", x, live), live, fills[kills])


def _added(score: Expr, x: Expr, spec: AttentionSpec) -> Condition | None:
    """A float that is added to the score and may be a mask: the same for all heads (the last batch axis), read in place. It is one where it is
    0 or so low that nothing else counts."""
    shared = x.kind == "float" and spec.batch and spec.batch[-1] not in depends(x) and {axis("i"), axis("j")} <= set(x.args)
    if not shared:
        return None
    low = substitute(score, {x: apply("min", x, const(_LOW))})
    fill = interval(low, {}, round_constant=rounding(spec))[1]
    return Condition(x, apply("le", x, const(_LOW)), apply("eq", x, const(0.0)), const(0.0), fill) if fill <= DEAD else None


def _apart(spec: AttentionSpec, dead: Expr, full: Expr) -> tuple[Mask, tuple[int, ...]]:
    """The predicates as a mask that knows nothing of its attention, so that equal masks of two layers are equal."""
    sources: list[int] = []

    def rule(node: Expr) -> Expr | None:
        if node.op != "load":
            return None
        number = int(node.attr)  # type: ignore[arg-type]
        if number not in sources:
            sources.append(number)
        return load(sources.index(number), node.args, node.kind)

    dead, full = rewrite(dead, rule), rewrite(full, rule)
    used = depends(dead) | depends(full)
    batch = tuple(b for b in spec.batch if b in used)
    sizes = {str(x.attr) for e in (dead, full) for x in walk(e) if x.op == "size"} - {*batch, "i", "j"}
    operands = tuple(Operand(f"mask{n}", spec.operands[s].dtype, spec.operands[s].rank) for n, s in enumerate(sources))
    return Mask(batch, operands, dead, full, tuple(sorted(sizes))), tuple(sources)


# ---- making it in PyTorch

def shapes(mask: Mask, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The shapes of the two tensors of a map; the sizes may be symbolic."""
    named = dict(zip(mask.size_names, sizes, strict=True))
    batch = [named[b] for b in mask.batch]
    rows, columns = (-(-named[a] // TILE) for a in ("i", "j"))
    return [*batch, rows, COUNTS + columns], [*batch, columns, COUNTS + rows]


def build(mask: Mask, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The map of a mask: for each tile of queries its tiles of keys, and the other way round, int32, of the shapes `shapes`.

    Args:
        mask: the predicates.
        operands: the tensors that they read.
        sizes: integers in the order of `mask.size_names`.
        device: where the operands are.
    """
    some, every = look(mask, operands, sizes, device)
    n_queries, n_keys = sizes[len(mask.batch):len(mask.batch) + 2]
    return _listed(some, every, n_keys), _listed(some.mT, every.mT, n_queries)


def look(mask: Mask, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device, tile: int = TILE) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each tile of `tile` x `tile` scores, (batch…, tiles of queries, tiles of keys): whether some score is not dead, and whether all that
    lie within the lengths are full. Arguments as of `build`."""
    named = dict(zip(mask.size_names, sizes, strict=True))
    order = (*mask.batch, "i", "j")
    read = lambda operand, index: operands[operand][index] if index else operands[operand]
    n_keys, columns = named["j"], -(-named["j"] // tile)
    alive, full = [], []
    for start in range(0, named["i"], tile):
        axes = {name: torch.arange(named[name], device=device).view([-1 if n == k else 1 for n in range(len(order))]) for k, name in enumerate(order)}
        axes["i"] = axes["i"].narrow(len(mask.batch), start, min(tile, named["i"] - start))
        env = Env(axes, named, read, torch.float32, device)
        shape = [axes[a].numel() for a in order]
        tiles = lambda x, beyond: torch.nn.functional.pad(x, (0, columns * tile - n_keys), value=beyond).unflatten(-1, (columns, tile))
        dead, whole = (evaluate(x, env).expand(shape) for x in (mask.dead, mask.full))
        alive.append(tiles(~dead, False).any(-1).any(-2))
        full.append(tiles(whole, True).all(-1).all(-2))
    if not alive:
        nothing = torch.zeros([named[b] for b in mask.batch] + [0, columns], dtype=torch.bool, device=device)
        return nothing, nothing
    return torch.stack(alive, -2), torch.stack(full, -2)


def _listed(alive: torch.Tensor, full: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of a map; only tiles that end before `length` may be full, for full tiles are read without a mask."""
    ends = torch.arange(1, alive.shape[-1] + 1, device=alive.device) * TILE
    full = full & alive & (ends <= length)
    kind = torch.where(full, 0, torch.where(alive, 1, 2))
    counts = torch.stack([full.sum(-1), alive.sum(-1)], -1)
    return torch.cat([counts, kind.argsort(dim=-1, stable=True)], -1).int().contiguous()


def worthwhile(queries: int, keys: int, depth: int) -> bool:
    """Whether there are tiles enough for some to be empty: a map costs two launches for all layers together. Beyond 128 head
    dimensions the kernels want larger tiles than a map's."""
    return math.ceil(queries / TILE) >= 4 and math.ceil(keys / TILE) >= 4 and depth <= 128
