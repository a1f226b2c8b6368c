"""What the kernels of a backward pass have to produce, and which of them gives what.

Besides queries, keys and values the tensors that the programs read have gradients: biases, temperatures, gates, tables. Each
*read* has one, summed by the kernel that meets its index:

    read at            gradient's buffer            by
    (batch, i)         [batch…, i]                  the kernel of the queries, over keys
    (batch, j)         [batch…, j]                  the kernel of the keys, over queries
    (batch, i, j)      [batch…, i, j]               the kernel of the queries, which stores it tile by tile
    (some batch, i, j) [those batch axes…, i, j]    a kernel of tiles, which walks the other batch axes
    (some batch, j - i) [those batch axes…, tiles]  a kernel of block diagonals, which walks the others and the tiles on its diagonal

What the index does with its axes beyond that (a head of its own for every sequence, a table) is then summed by PyTorch.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..adjoint import ZERO, adjoint
from ..program import Expr, depends, loads
from ..spec import AttentionSpec
from .diagonals import by_distance

Kind = Literal["rows", "queries", "keys", "tiles", "diagonals", "weights"]


@dataclass(frozen=True)
class Captured:
    """A float that a program reads and whose tensor needs a gradient; `label` names the gradient of this read."""

    program: Literal["score", "weight"]
    node: Expr
    label: str

    @property
    def operand(self) -> int:
        """The number of the tensor."""
        return int(self.node.attr)  # type: ignore[arg-type]  # a load names its operand

    @property
    def axes(self) -> frozenset[str]:
        """What the place of the read depends on."""
        return depends(self.node)


@dataclass(frozen=True)
class Job:
    """What one kernel does.

    Attributes:
        kind: what its programs own: rows that are prepared, tiles of queries, tiles of keys, tiles of scores, block diagonals of scores;
            or, with no gradient at all, tiles of queries whose weights are wanted.
        query, key, value: whose gradients it writes.
        captured: and the reads whose gradients it sums.
        walked: the batch axes that each program of a kernel of tiles or diagonals walks.
    """

    kind: Kind
    query: bool = False
    key: bool = False
    value: bool = False
    captured: tuple[Captured, ...] = ()
    walked: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``keys_values_padding``, ``tiles_bias``: the gradients that it writes, and what its programs own where that does not say it."""
        roles = [self.kind] if self.kind in ("rows", "tiles", "diagonals") else []
        roles += [n for n, there in (("queries", self.query), ("keys", self.key), ("values", self.value)) if there]
        return "_".join([*roles, *(c.label.removeprefix("grad_") for c in self.captured)])

    @property
    def slopes(self) -> bool:
        """Whether it needs the gradients of the scores."""
        return self.query or self.key or any(c.program == "score" for c in self.captured)

    @property
    def arrivals(self) -> bool:
        """Whether it needs the gradients of the weights."""
        return self.slopes or bool(self.captured)


ROWS = Job("rows")
WEIGHTS = Job("weights")


def apart(job: Job) -> tuple[Job, ...]:
    """A kernel of both keys' and values' gradients as one for each: they compute the scores twice, and have the registers for larger tiles."""
    if job.kind != "keys" or not (job.key and job.value):
        return (job,)
    return replace(job, value=False), replace(job, key=False, captured=())


def captured(spec: AttentionSpec, needs: Sequence[bool]) -> tuple[Captured, ...]:
    """The reads of the score and weight programs whose gradients are wanted and not zero.

    Raises:
        ValueError: an operation without a derivative on the way.
    """
    out: list[Captured] = []
    times: Counter[str] = Counter()
    for program, expr in (("score", spec.score), ("weight", spec.weight)):
        for node in loads(expr):
            if node.kind == "float" and needs[int(node.attr)] and adjoint(expr, node) != ZERO:  # type: ignore[arg-type]
                name = f"grad_{spec.operands[int(node.attr)].name}"  # type: ignore[arg-type]
                times[name] += 1
                label = name if times[name] == 1 else f"{name}_{times[name]}"
                out.append(Captured(program, node, label))  # type: ignore[arg-type]
    return tuple(out)


def axes_of(spec: AttentionSpec, one: Captured) -> tuple[str, ...]:
    """The axes of the buffer that the kernels fill for a read, or of what becomes of the tiles that the kernel of diagonals stores."""
    own = one.axes
    if {"i", "j"} <= own:
        return (*(b for b in spec.batch if b in own), "i", "j")
    return (*spec.batch, "j" if "j" in own else "i")


def jobs(spec: AttentionSpec, sizes: Mapping[str, int], roles: frozenset[str], reads: Sequence[Captured],
         terms: bool) -> tuple[Job, ...]:
    """The kernels, in the order in which they run.

    Args:
        spec, sizes: as of `launch.forward`, the sizes by name.
        roles, reads, terms: whose gradients are wanted: of ``query key value``, of captured reads, of extra terms of the normaliser.
    """
    rows, columns, tiles, diagonals = [], [], {}, {}
    for one in reads:
        if not {"i", "j"} <= one.axes:
            (columns if "j" in one.axes else rows).append(one)
            continue
        walked = tuple(b for b in spec.batch if b not in one.axes)
        if by_distance(one.node.args):
            diagonals.setdefault(walked, []).append(one)
        elif all(sizes[b] == 1 for b in walked):
            rows.append(one)
        else:
            tiles.setdefault(walked, []).append(one)
    out: list[Job] = []
    if roles & {"key", "value"} or columns:
        out.append(Job("keys", key="key" in roles, value="value" in roles, captured=tuple(columns)))
    if "query" in roles or rows:
        out.append(Job("queries", query="query" in roles, captured=tuple(rows)))
    out += [Job("tiles", captured=tuple(some), walked=walked) for walked, some in tiles.items()]
    out += [Job("diagonals", captured=tuple(some), walked=walked) for walked, some in diagonals.items()]
    return (ROWS, *out) if out or terms else ()
