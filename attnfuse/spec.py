"""AttentionSpec: what one attention means, as a frozen value between the finder and the generator.

    out[b…, i, e] = Σ_j  weight(p[b…, i, j]) · value[b…, j, e]        p = softmax over j of score(s[b…, i, j])
    s[b…, i, j]   = Σ_d  query[b…, i, d] · key[b…, j, d]

Where the weights are wanted too they have a spec of their own, for the op `attnfuse::weights`: the same attention, with the weight
program, dtype and memory order of the tensor (batch…, i, j) that is wanted.

Every operand is a strided tensor read through an index map, so neither a transposed view nor a repeated key head is
ever copied. Axis lengths are not part of the meaning: they come with the call (`AttentionSpec.size_names` gives the order).
"""
from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch

from . import program
from .program import DOT, WEIGHT, Expr

EmptyRows = Literal["nan", "zero", "repaired"]
VERSION = 3
"""Of the serialised form, and of what the operators give for it: a spec written by another version, such as in a graph that a compiler stored, is refused."""


@dataclass(frozen=True)
class Operand:
    """One tensor handed to the attention: a name to print, its dtype (``"bfloat16"``) and its number of dimensions."""

    name: str
    dtype: str
    rank: int


@dataclass(frozen=True)
class Access:
    """An operand and the index (one integer expression a dimension) at which an element is read."""

    operand: int
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class AttentionSpec:
    """The meaning of an attention. Hashable, comparable, JSON round-trip, printable as an equation.

    Attributes:
        batch: names of the axes that only enumerate independent attentions (batch, head, …): ``("b0", "b1")``.
        operands: every tensor that is read.
        query, key, value: how their elements are read; query over (batch, i, d), key over (batch, j, d), value over (batch, j, e).
        score: the score program, over ``dot`` and the axes.
        weight: the weight program, linear in ``weight`` (dropout, gates, masks after the softmax).
        extra_terms: scores over (batch, i) of further columns that enter the normaliser and no value (attention sinks).
        scalars: names of the run-time integers that the programs use beside the axis lengths.
        empty_rows: what a row is whose scores are all -inf: ``"nan"`` as a softmax written in PyTorch gives, or ``"zero"``,
            whatever the weight program says. ``"repaired"``: so is every row whose weights are NaN, for a score that is NaN or
            +inf too, as ``nan_to_num`` behind the softmax makes it.
        qk_dtype, pv_dtype: the dtype in which the two products are taken; an operand that is narrower is widened at the load,
            and with ``pv_dtype="float32"`` the weights must not be rounded to a half type.
        out_dtype: dtype of the result.
        out_order: the order in memory, slowest first, of the result's dimensions (batch…, i, e); of weights, of (batch…, i, j).
        tiles: the operands that hold a map of the mask's tiles (`tilemap`), by rows and by columns; None where there is none. They say
            how fast an attention is and nothing of what it means.
    """

    batch: tuple[str, ...]
    operands: tuple[Operand, ...]
    query: Access
    key: Access
    value: Access
    score: Expr = DOT
    weight: Expr = WEIGHT
    extra_terms: tuple[Expr, ...] = ()
    scalars: tuple[str, ...] = ()
    empty_rows: EmptyRows = "nan"
    qk_dtype: str = "float32"
    pv_dtype: str = "float32"
    out_dtype: str = "float32"
    out_order: tuple[int, ...] = field(default=())
    tiles: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.out_order:
            object.__setattr__(self, "out_order", tuple(range(len(self.batch) + 2)))
        self._check()
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, f) for f in self.__dataclass_fields__)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]  # set in __post_init__: a spec is looked up at every call

    def _check(self) -> None:
        """Raise ValueError where the parts do not fit together."""
        own = set(self.batch)
        places = {"query": own | {"i", "d"}, "key": own | {"j", "d"}, "value": own | {"j", "e"}}
        for name, allowed in places.items():
            access: Access = getattr(self, name)
            if len(access.index) != self.operands[access.operand].rank:
                raise ValueError(f"{name}: {len(access.index)} indices for a tensor of rank {self.operands[access.operand].rank}")
            used = frozenset().union(*(program.depends(x) for x in access.index))
            if not used <= allowed:
                raise ValueError(f"{name} may not depend on {sorted(used - allowed)}")
        if not program.depends(self.score) <= own | {"i", "j", "dot"}:
            raise ValueError(f"the score program depends on {sorted(program.depends(self.score))}")
        if not program.depends(self.weight) <= own | {"i", "j", "weight", "keep"}:
            raise ValueError(f"the weight program depends on {sorted(program.depends(self.weight))}")
        if not program.linear_in_weight(self.weight):
            raise ValueError(f"the weight program {self.weight} is not linear in the weight")
        if any(not program.depends(t) <= own | {"i"} for t in self.extra_terms):
            raise ValueError("an extra term of the normaliser may depend on the batch axes and i only")
        if self.empty_rows not in get_args(EmptyRows):
            raise ValueError(f"empty rows cannot be {self.empty_rows!r}")
        if sorted(self.out_order) != list(range(len(self.batch) + 2)):
            raise ValueError(f"out_order {self.out_order} is not a permutation of the result's dimensions")

    # ---- names

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes: batch…, i, j, d, e."""
        return (*self.batch, "i", "j", "d", "e")

    @property
    def size_names(self) -> tuple[str, ...]:
        """What the integers of a call are, in order: the axis lengths (batch…, i, j, d, e), then the run-time scalars."""
        return (*self.axes, *self.scalars)

    @property
    def out_axes(self) -> tuple[str, ...]:
        """The result's dimensions: batch…, i, e."""
        return (*self.batch, "i", "e")

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """Dimensions of a score or weight: batch…, i, j."""
        return (*self.batch, "i", "j")

    @property
    def programs(self) -> tuple[Expr, ...]:
        """All expressions, in a fixed order."""
        return (self.score, self.weight, *self.extra_terms, *self.query.index, *self.key.index, *self.value.index)

    @property
    def dropouts(self) -> tuple[tuple[int, float], ...]:
        """(stream, p) of every dropout of the weights."""
        return tuple(x.attr for x in program.walk(self.weight) if x.op == "keep")  # type: ignore[misc]

    @property
    def captured(self) -> tuple[int, ...]:
        """The operands that the score and weight programs read."""
        found = {int(x.attr) for e in (self.score, self.weight, *self.extra_terms) for x in program.loads(e)}  # type: ignore[arg-type]
        return tuple(sorted(found))

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or float64 where any part of the attention is in float64: the dtype of scores, softmax and sums."""
        wide = "float64" in (self.qk_dtype, self.pv_dtype, self.out_dtype)
        return torch.float64 if wide else torch.float32

    # ---- text

    def equation(self) -> str:
        """The attention in one line, with the operands' names."""
        names = {n: o.name for n, o in enumerate(self.operands)}
        read = lambda a: f"{names[a.operand]}[{', '.join(program.show(x, names) for x in a.index)}]"
        score = program.show(self.score, names)
        weight = self._shown_weight()
        extra = "".join(f" ∪ {{{program.show(t, names)}}}" for t in self.extra_terms)
        repair = {"nan": "", "zero": ", empty rows 0", "repaired": ", NaN rows 0"}[self.empty_rows]
        return (f"out[{', '.join(self.out_axes)}] = Σ_j {weight} · {read(self.value)};  p = softmax_j({score}{extra}{repair});  "
                f"s = Σ_d {read(self.query)} · {read(self.key)}")

    def weights_equation(self) -> str:
        """What `attnfuse::weights` gives for this spec: ``w[b0, b1, i, j] = p``, where p is the softmax of `equation`."""
        return f"w[{', '.join(self.weight_axes)}] = {self._shown_weight()}"

    def _shown_weight(self) -> str:
        names = {n: o.name for n, o in enumerate(self.operands)}
        return program.show(program.substitute(self.weight, {WEIGHT: Expr("axis", attr="p", kind="float")}), names)

    def __str__(self) -> str:
        return self.equation()

    def to_json(self) -> str:
        """One line of JSON from which `from_json` rebuilds an equal spec."""
        return _to_json(self)

    @staticmethod
    def from_json(text: str) -> AttentionSpec:
        """Rebuild a spec; raises ValueError on text that is not one, or is of another version."""
        return _from_json(text)

    def digest(self) -> str:
        """Eight hexadecimal digits that name this meaning, the same in every process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]


@functools.lru_cache(maxsize=4096)
def _to_json(spec: AttentionSpec) -> str:
    lead = (spec.score, spec.weight, *spec.extra_terms)
    access = (spec.query, spec.key, spec.value)
    data: dict[str, Any] = {
        "version": VERSION, "batch": spec.batch, "scalars": spec.scalars, "operands": [list(asdict(o).values()) for o in spec.operands],
        "access": [[a.operand, len(a.index)] for a in access], "extra": len(spec.extra_terms), "empty_rows": spec.empty_rows,
        "dtypes": [spec.qk_dtype, spec.pv_dtype, spec.out_dtype], "out_order": spec.out_order,
        "tiles": spec.tiles, "programs": program.to_json((*lead, *(x for a in access for x in a.index))),
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


@functools.lru_cache(maxsize=4096)
def _from_json(text: str) -> AttentionSpec:
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError(f"an AttentionSpec of version {data['version']}; this attnfuse reads version {VERSION}")
        exprs = program.from_json(data["programs"])
        start = 2 + data["extra"]
        access: list[Access] = []
        for operand, rank in data["access"]:
            access.append(Access(operand, exprs[start:start + rank]))
            start += rank
        qk, pv, out = data["dtypes"]
        return AttentionSpec(
            batch=tuple(data["batch"]), operands=tuple(Operand(*o) for o in data["operands"]), query=access[0], key=access[1],
            value=access[2], score=exprs[0], weight=exprs[1], extra_terms=exprs[2:2 + data["extra"]], scalars=tuple(data["scalars"]),
            empty_rows=data["empty_rows"], qk_dtype=qk, pv_dtype=pv, out_dtype=out, out_order=tuple(data["out_order"]),
            tiles=tuple(data["tiles"]) if data["tiles"] else None)
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as e:
        raise ValueError(f"not a serialised AttentionSpec: {e!r}") from e


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` → ``torch.bfloat16``; raises ValueError for what is not a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
