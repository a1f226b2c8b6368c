"""Report: what was found in a model's graphs, what was rewritten, and why the rest was not.

    attnfuse: 2 of 3 attention sites rewritten; 1 graph, 0.31 s in the passes
      sites  module    source       forward traffic     result
          2  h.0…1     gpt.py:31    54.5 GB → 1.09 GB   rewritten, equation 1
          1  pool      gpt.py:58                        scores_used: the scores are used elsewhere (by std) [lift]
      1  out[b0, b1, i, e] = Σ_j p · v[b0, b1, j, e];  p = softmax_j(0.125 * s);  s = Σ_d q[b0, b1, i, d] · k[b0, b1, j, d]

Invariant: every softmax-like node and attention call of a graph has exactly one `Site`, rewritten or with its reason.
"""
from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .program import depends, loads, show
from .refusal import Refusal
from .roofline import Kernel
from .spec import AttentionSpec, dtype_of
from .traffic import Call, Traffic, size

if TYPE_CHECKING:
    from .codegen.tiles import Device
    from .distances import Tabulated

WIDTH = 116
"""Columns of the text."""


@dataclass(frozen=True)
class GivenWeights:
    """One call of the op that gives weights: its spec, its integers in the order of that, bytes of the distinct elements of its operands."""

    spec: AttentionSpec
    sizes: tuple[int, ...]
    held: tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """One place where attention was looked for.

    Attributes:
        rewritten: whether the op now stands for it.
        reason: why not, where it was not.
        equation: its meaning, where it was understood (also of a site that was understood and still left alone).
        module: path of the module in the model, ``"h.3.attn"``.
        source: ``"file.py:123"``, a line of the user's code.
        node: name of the anchor in its graph.
        graph: number of the graph, in the order of compilation.
        spec: the meaning.
        layer_hash: equal for regions that were analysed once.
        notes: remarks, a sentence each.
        written: the kernels of its forward pass as it is written and what they move; empty where it was not rewritten, or where a length
            is symbolic.
        fused: the generated kernel's (with those of its weights), as predicted, for the GPU that is there or else an H100.
        sizes, held: the integers of the call, in the order of the spec; the bytes of the distinct elements of its operands.
        weights: the meaning of the weights that are read elsewhere too, and computed by a kernel of their own.
        given: the calls that give them; empty where a length is symbolic.
        tabulated: whether its call reads tables by distance (`distances`), which its meaning does not know.
    """

    rewritten: bool
    reason: Refusal | None = None
    equation: str | None = None
    module: str = ""
    source: str = ""
    node: str = ""
    graph: int = 0
    spec: AttentionSpec | None = None
    layer_hash: str = ""
    notes: tuple[str, ...] = ()
    written: tuple[Call, ...] = ()
    fused: Call | None = None
    sizes: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    weights: tuple[AttentionSpec, ...] = ()
    given: tuple[GivenWeights, ...] = ()
    tabulated: bool = False

    @property
    def called(self) -> tuple[AttentionSpec, tuple[int, ...]] | None:
        """The spec of its call, with the tables that it reads and without a map of its mask, and `held` for that; None where there is no spec."""
        found = self._tabulated
        if found is None:
            return None if self.spec is None else (self.spec, self.held)
        return found.spec, (*(self.held[n] for n in found.kept), *(count for _, _, count in self.tables)) if self.held else ()

    @property
    def _tabulated(self) -> Tabulated | None:
        from .distances import tabulated
        return tabulated(self.spec) if self.tabulated and self.spec is not None else None

    @property
    def tables(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """(expression, lengths, bytes) of every table by distance that its call reads. Empty where a length is symbolic."""
        found = self._tabulated
        if found is None or self.spec is None or not self.held:
            return ()
        from .distances import shape
        named = dict(zip(self.spec.size_names, self.sizes))
        lengths = [tuple(shape(t, [named[n] for n in t.size_names])) for t in found.tables]
        return tuple((show(t.program, {n: o.name for n, o in enumerate(t.operands)}), size_, math.prod(size_) * dtype_of(t.dtype).itemsize)
                     for t, size_ in zip(found.tables, lengths, strict=True))

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes moved forward (as written, fused), None where they are not known."""
        return (sum(c.moved for c in self.written), self.fused.moved) if self.written and self.fused else None

    @property
    def reads(self) -> tuple[tuple[str, str, int], ...]:
        """What the kernel loads at every score, (name, index, bytes): what had no formula of fewer bytes. Everything else that the scores
        depend on is computed, read from `tables`, or lies along queries or keys. Empty where the site was not rewritten or a length is symbolic."""
        if self.called is None or not self.held:
            return ()
        (spec, held), first = self.called, len(self.called[0].operands) - len(self.tables)
        names = {n: o.name for n, o in enumerate(spec.operands)}
        found = {x: int(x.attr) for e in (spec.score, spec.weight) for x in loads(e) if {"i", "j"} <= depends(x)}  # type: ignore[arg-type]
        return tuple((names[n], ", ".join(show(a, names) for a in x.args), held[n]) for x, n in found.items() if n < first)

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON knows."""
        reason = None if self.reason is None else {
            "code": self.reason.reason.name.lower(), "text": self.reason.reason.value, "node": self.reason.node,
            "stage": self.reason.stage, "detail": self.reason.detail}
        return {"rewritten": self.rewritten, "reason": reason, "equation": self.equation, "module": self.module, "source": self.source,
                "node": self.node, "graph": self.graph, "spec": None if self.spec is None else json.loads(self.spec.to_json()),
                "weights": [json.loads(w.to_json()) for w in self.weights], "layer_hash": self.layer_hash, "notes": list(self.notes),
                "reads": [list(r) for r in self.reads], "tables": [[text, list(lengths), count] for text, lengths, count in self.tables],
                "traffic": None if self.traffic is None else dict(zip(("written", "fused"), self.traffic))}


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph: its name, the seconds it took, and what it has to say."""

    name: str
    seconds: float
    note: str = ""


@dataclass
class Report:
    """What happened to the graphs of a model.

    Attributes:
        sites: every site, in the order of the graphs.
        passes: every pass that ran.
        failures: what went wrong and left a graph as it was, a sentence each.
        graphs: how many graphs were looked at.
        snapshots: (name, printed graph), ``captured`` first and then one a pass; only with the setting `dump`.
    """

    sites: list[Site] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    graphs: int = 1
    snapshots: list[tuple[str, str]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time spent in the passes."""
        return sum(p.seconds for p in self.passes)

    @property
    def rewritten(self) -> int:
        """How many sites were rewritten."""
        return sum(s.rewritten for s in self.sites)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes moved forward by the rewritten sites (as written, fused); sites of which they are not known count nothing."""
        known = [s.traffic for s in self.sites if s.traffic is not None]
        return sum(w for w, _ in known), sum(f for _, f in known)

    def kernels(self, measured: Mapping[str, float] | None = None) -> list[Kernel]:
        """The points of `plot`: an operation of the sites as written, over all sites, and ``fused``, with seconds that were measured by name."""
        sites = [s for s in self.sites if s.written and s.fused is not None]
        points = Traffic([c for s in sites for c in s.written]).kernels()
        fused = [s.fused for s in sites if s.fused is not None]
        points += [Kernel("fused", sum(c.flops for c in fused), sum(c.moved for c in fused))] if fused else []
        return [replace(p, measured=(measured or {}).get(p.name)) for p in points]

    def plot(self, path: str | os.PathLike[str] | None = None, *, device: str | Device | None = None,
             measured: Mapping[str, float] | None = None) -> Any:
        """A roofline picture of the rewritten sites' forward pass: the kernels as written, and the fused one.

        Args:
            path: a file to write, of any kind that matplotlib knows.
            device: the GPU whose roof is drawn, by name (`attnfuse.codegen.devices`); by default the one that is there, else an H100.
            measured: seconds that were measured, by the name of an operation or ``"fused"``, over all sites.

        Returns:
            Matplotlib's axes.

        Raises:
            ImportError: matplotlib is not there (``pip install attnfuse[plot]``).
            ValueError: the report has no site whose traffic is known; an unknown device, or one whose rates are not known.
        """
        from . import roofline
        from .predicting import named
        chosen = named(device)
        if not chosen.peak:
            raise ValueError(f"the rates of {chosen.name} are not known; name a card such as 'h100'")
        points = self.kernels(measured)
        if not points:
            raise ValueError("the report has no rewritten site whose traffic is known")
        sites = f"{self.rewritten} attention site{'' if self.rewritten == 1 else 's'}"
        return roofline.plot(points, chosen.peak, chosen.bandwidth, path, title=f"{sites}, forward, on {chosen.name}")

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON knows; the snapshots are left out."""
        return {"graphs": self.graphs, "rewritten": self.rewritten, "seconds": self.seconds, "traffic": dict(zip(("written", "fused"), self.traffic)),
                "sites": [s.to_dict() for s in self.sites],
                "passes": [{"name": p.name, "seconds": p.seconds, "note": p.note} for p in self.passes], "failures": list(self.failures)}


def merge(reports: Iterable[Report]) -> Report:
    """One report for several graphs, numbered in the order in which they come.

    >>> merge([Report(sites=[Site(True)]), Report(sites=[Site(True)])]).sites[1].graph
    1
    """
    whole = Report(graphs=0)
    for part in reports:
        whole.sites += [replace(s, graph=s.graph + whole.graphs) for s in part.sites]
        whole.passes += part.passes
        whole.failures += part.failures
        whole.snapshots += part.snapshots
        whole.graphs += part.graphs
    return whole


def dump(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write a report of one graph and its snapshots under `folder`, and return the new folder.

    The layout is ``graph_000/00_captured.txt, 01_<pass>.txt, …, report.json``; a number that is taken is passed over, so that
    processes may share the folder. Raises OSError where the folder cannot be written.
    """
    number = 0
    while True:
        place = Path(folder) / f"graph_{number:03d}"
        try:
            place.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
    for order, (name, text) in enumerate(report.snapshots):
        (place / f"{order:02d}_{name}.txt").write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    (place / "report.json").write_text(json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return place


# ---- text

def fold(paths: Iterable[str]) -> str:
    """Several module paths as one pattern, the number that varies given as a range.

    >>> fold(["h.0.attn", "h.1.attn", "h.2.attn"]), fold(["a.0", "a.2"]), fold(["x", "y"])
    ('h.0…2.attn', 'a.{0,2}', 'x, y')
    """
    distinct = list(dict.fromkeys(paths))
    if len(distinct) <= 1:
        return distinct[0] if distinct else ""
    parts = [re.split(r"(\d+)", p) for p in distinct]
    same_length = len({len(p) for p in parts}) == 1
    varying = [n for n in range(len(parts[0])) if len({p[n] for p in parts}) > 1] if same_length else []
    if len(varying) == 1 and varying[0] % 2 == 1:
        at = varying[0]
        numbers = sorted(int(p[at]) for p in parts)
        whole = numbers == list(range(numbers[0], numbers[-1] + 1))
        middle = f"{numbers[0]}…{numbers[-1]}" if whole else "{" + ",".join(map(str, numbers)) + "}"
        return "".join(parts[0][:at]) + middle + "".join(parts[0][at + 1:])
    return ", ".join(distinct) if len(distinct) == 2 else f"{distinct[0]}, …, {distinct[-1]} ({len(distinct)} modules)"


def _reason(site: Site) -> str:
    """The reason as code and text, without the node's name, which differs from layer to layer."""
    if site.reason is None:
        return "left as it is"
    return str(replace(site.reason, node=""))


def _groups(sites: Iterable[Site]) -> dict[tuple[bool, str, str], list[Site]]:
    """Sites that read alike: the rewritten ones by equation, the others by reason and source line."""
    groups: dict[tuple[bool, str, str], list[Site]] = {}
    for s in sites:
        key = (True, s.equation or "", "") if s.rewritten else (False, _reason(s), s.source)
        groups.setdefault(key, []).append(s)
    return groups


def _head(report: Report) -> str:
    graphs = f"{report.graphs} graph{'' if report.graphs == 1 else 's'}"
    cost = f"{graphs}, {report.seconds:.2f} s in the passes"
    if not report.sites:
        return f"attnfuse: no candidates; {cost}"
    plural = "" if len(report.sites) == 1 else "s"
    return f"attnfuse: {report.rewritten} of {len(report.sites)} attention site{plural} rewritten; {cost}"


def _saving(sites: Iterable[Site]) -> str:
    """``54.5 GB → 1.09 GB``: what the sites move forward as written, and fused; empty where it is not known."""
    known = [s.traffic for s in sites if s.traffic is not None]
    return f"{size(sum(w for w, _ in known))} → {size(sum(f for _, f in known))}" if known else ""


def _equation(number: int, equation: str) -> list[str]:
    """An equation with its number, a line for each part, folded to fit a terminal."""
    lead = f"  {number}  "
    lines: list[str] = []
    for part in equation.split(";  "):
        indent = lead if not lines else " " * len(lead)
        lines += textwrap.wrap(part, WIDTH, initial_indent=indent, subsequent_indent=" " * (len(lead) + 4), break_long_words=False)
    return lines


def _lines(report: Report) -> list[str]:
    """The readable form: a headline, a row for each group, the equations, the remarks and the failures."""
    groups = _groups(report.sites)
    equations = list(dict.fromkeys(s.equation for g in groups.values() for s in g if s.equation))
    known_traffic = any(s.traffic for s in report.sites)
    rows = [("sites", "module", "source", *(("forward traffic",) if known_traffic else ()), "result")] if groups else []
    for (rewritten, text, _), sites in groups.items():
        sources = list(dict.fromkeys(os.path.basename(s.source) for s in sites if s.source))
        source = sources[0] + (f" (+{len(sources) - 1})" if len(sources) > 1 else "") if sources else ""
        known = [equations.index(s.equation) + 1 for s in sites[:1] if s.equation]
        result = "rewritten, weights too" if rewritten and sites[0].weights else "rewritten" if rewritten else text
        rows.append((str(len(sites)), fold(s.module for s in sites), source, *((_saving(sites),) if known_traffic else ()),
                     result + (f", equation {known[0]}" if known else "")))
    widths = [max((len(r[c]) for r in rows), default=0) for c in range(len(rows[0]) - 1 if rows else 0)]
    lines = [_head(report)]
    lines += ["  ".join([f"  {r[0]:>{widths[0]}}", *(f"{x:<{w}}" for x, w in zip(r[1:-1], widths[1:])), r[-1]]) for r in rows]
    for number, equation in enumerate(equations, 1):
        lines += _equation(number, equation)
        reads = dict.fromkeys(r for s in report.sites if s.equation == equation and s.rewritten for r in s.reads)
        lines += [f"     equation {number} loads {name}[{index}] at every score ({size(count)})" for name, index, count in reads]
        tables = dict.fromkeys(t for s in report.sites if s.equation == equation and s.rewritten for t in s.tables)
        lines += [f"     equation {number} reads {text} from a table by distance, {list(lengths)} ({size(count)})" for text, lengths, count in tables]
    lines += [f"  note: {text}" for text in dict.fromkeys(x for s in report.sites for x in s.notes)]
    lines += [f"  failure: {text}" for text in dict.fromkeys(report.failures)]
    return lines
