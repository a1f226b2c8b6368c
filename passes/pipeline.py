"""The way of a graph through the passes, and what happens when one of them says no.

    expand → find → slice_region → understand (replay, record, lift) → splice → separate → sweep

Invariant: the input graph is never changed; the output graph is well formed and equal in meaning; whatever goes wrong
with one site leaves that site as it was, with its reason in the report.
"""
from __future__ import annotations

import copy
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from .. import origin, ops  # noqa: F401  (defines torch.ops.attnfuse.attention)
from ..refusal import Reason, Refusal, Refused
from ..report import PassRecord, Report, Site
from ..settings import Settings
from ..spec import AttentionSpec
from ..tilemap import without
from . import nodes, verify
from .assemble import Lifted, assemble
from .distribute import distribute, sums
from .expand import Expansion, expand, opaque, settle
from .find import Candidate, find
from .measure import Measured, measure
from .region import GraphFacts, Region, merge_order, scores_observer, slice_region
from .replace import replace, sweep
from .replay import replay
from .separate import separate
from .trace import Value, record

log = logging.getLogger("attnfuse")


@dataclass
class State:
    """One graph on its way: the copy that is being rewritten and what is known of it so far."""

    gm: GraphModule
    settings: Settings
    expansions: list[Expansion] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    facts: GraphFacts | None = None
    regions: dict[Node, Region] = field(default_factory=dict)          # by anchor and product
    lifted: dict[Node, Lifted] = field(default_factory=dict)
    refused: dict[Node, Refusal] = field(default_factory=dict)
    done: list[Region] = field(default_factory=list)
    replaced: dict[Node, Node] = field(default_factory=dict)            # products and weights → what stands for them
    given: dict[Node, Node] = field(default_factory=dict)               # weights that are read elsewhere → what stood for them first
    made: list[Node] = field(default_factory=list)                      # what was spliced in
    tabulated: set[Node] = field(default_factory=set)                   # of `regions`, those whose calls read tables by distance
    failures: list[str] = field(default_factory=list)
    known: dict[str, Lifted | Refusal] = field(default_factory=dict)
    measured: dict[str, Measured | None] = field(default_factory=dict)  # by the text of a slice
    returned: Counter[str] = field(default_factory=Counter)             # specs of results that leave their graphs, of all graphs together


def run(gm: GraphModule, settings: Settings) -> tuple[GraphModule, Report]:
    """Rewrite every attention of a graph and of the bodies of its higher-order operations.

    Args:
        gm: a graph whose nodes carry fake tensors (``meta["example_value"]`` or ``meta["val"]``); it is not changed.
        settings: with ``strict`` an unexpected failure raises; otherwise it is reported and the graph left as it was.

    Returns:
        The rewritten graph (`gm` itself where there was nothing to do) and the report.
    """
    start = time.perf_counter()
    try:
        return _run(gm, settings)
    except Exception as e:
        if settings.strict:
            raise
        text = f"the analysis failed and the graph was left as it was: {type(e).__name__}: {e}"
        warnings.warn(f"attnfuse: {text}", stacklevel=2)
        log.debug("analysis failed", exc_info=True)
        site = Site(False, Refusal(Reason.FAILED, "", "pipeline", f"{type(e).__name__}: {e}"))
        return gm, Report([site], [PassRecord("pipeline", time.perf_counter() - start)], [text])


def _run(gm: GraphModule, settings: Settings) -> tuple[GraphModule, Report]:
    report = Report()
    if not any(find(g) or opaque(g) for g in _graphs(gm)):
        return gm, report
    whole = _copied(gm)
    if settings.dump:
        report.snapshots.append(("captured", str(gm.graph)))
    known: dict[str, Lifted | Refusal] = {}
    returned: Counter[str] = Counter()
    for part in _graphs(whole):
        state = State(part, settings, known=known, returned=returned)
        for one in PIPELINE:
            before = time.perf_counter()
            note = one(state)
            report.passes.append(PassRecord(one.__name__.strip("_"), time.perf_counter() - before, note))
            if settings.dump:
                report.snapshots.append((one.__name__.strip("_"), str(part.graph)))
        report.sites += _sites(state)
        report.failures += state.failures
    if not any(s.rewritten for s in report.sites):
        return gm, report
    return whole, report


def _graphs(gm: GraphModule) -> list[GraphModule]:
    """The graph, then the bodies that its higher-order operations call."""
    out = [gm]
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            body = getattr(gm, str(node.target), None) if "." not in str(node.target) else None
            if isinstance(body, GraphModule) and body not in out:
                out += _graphs(body)
    return out


def _copied(gm: GraphModule) -> GraphModule:
    """The same module with a graph of its own; parameters are shared. Bodies are copied too."""
    graph: Graph = copy.deepcopy(gm.graph)
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        # Dynamo keeps facts about inputs as attributes of their nodes, which a graph's copy leaves behind.
        for key, value in vars(old).items():
            if not hasattr(new, key):
                setattr(new, key, value)
    out = GraphModule(gm, graph, class_name=type(gm).__name__)
    for key, value in vars(gm).items():
        if key not in vars(out):
            out.__dict__[key] = value
    out.meta = dict(gm.meta)
    out.train(gm.training) if gm.training != out.training else None
    for node in graph.nodes:
        if node.op == "get_attr" and "." not in str(node.target) and isinstance(getattr(gm, str(node.target), None), GraphModule):
            setattr(out, str(node.target), _copied(getattr(gm, str(node.target))))
    return out


# ---- the passes: each takes the state, changes it, and returns a remark

def _expand(state: State) -> str:
    """Take apart the calls that hide an attention, and products of sums of softmaxes; a call that can't be is a candidate that was refused."""
    for call in opaque(state.gm):
        c = Candidate(call, None)
        _guarded(state, c, "expand", lambda c=c: state.expansions.append(expand(state.gm, c.anchor)))
    state.expansions += [distribute(state.gm, product) for product in sums(state.gm)]
    return f"{len(state.expansions)} calls taken apart"


def _find(state: State) -> str:
    """Collect the candidates."""
    position = {n: k for k, n in enumerate(state.gm.graph.nodes)}
    hidden = [Candidate(n, None, refusal=r) for n, r in state.refused.items()]
    state.candidates = sorted([*hidden, *find(state.gm)], key=lambda c: position[c.anchor])
    for c in state.candidates:
        if c.refusal is not None:
            state.refused[_key(c)] = c.refusal
    return f"{len(state.candidates)} candidates"


def _region(state: State) -> str:
    """Slice each candidate out."""
    facts = state.facts = GraphFacts(state.gm)
    for c in state.candidates:
        if c.product is not None:
            _guarded(state, c, "region", lambda c=c: state.regions.__setitem__(_key(c), slice_region(c, facts)))
    return f"{len(state.regions)} slices, {len({r.text for r in state.regions.values()})} different"


def _lift(state: State) -> str:
    """Understand each slice; equal slices once."""
    analysed = 0
    for c in state.candidates:
        region = state.regions.get(_key(c))
        if region is None:
            continue
        if region.text not in state.known:
            analysed += 1
            _guarded(state, c, "lift", lambda r=region: state.known.__setitem__(r.text, understand(r, state.settings)))
            if _key(c) in state.refused:
                state.known[region.text] = state.refused[_key(c)]
        found = state.known[region.text]
        if isinstance(found, Refusal):
            state.refused[_key(c)] = found
        else:
            _guarded(state, c, "lift", lambda c=c, r=region, f=found: _accept(state, c, r, f))
    return f"{analysed} analysed"


def _accept(state: State, c: Candidate, region: Region, lifted: Lifted) -> None:
    """A second consumer of the scores would have them computed all the same: leave such a chain alone."""
    local = [*region.inputs, *region.body]
    user = scores_observer(region, {local[n] for n in lifted.scores} - {region.product})
    if user is not None:
        raise Refused(Reason.SCORES_USED, user.name, "lift", f"by {nodes.name(user)}")
    state.lifted[_key(c)] = lifted


def _replace(state: State) -> str:
    """Splice the op in."""
    accepted = [c for c in state.candidates if _key(c) in state.lifted and _key(c) not in state.refused]
    for c in accepted:                                 # before a slice that shares its weights is changed
        region = state.regions[_key(c)]
        if region.text not in state.measured:
            state.measured[region.text] = _measured(region, state.lifted[_key(c)])
    for c in accepted:
        _guarded(state, c, "replace", lambda k=_key(c): _splice(state, k))
    return f"{len(state.done)} rewritten"


def _splice(state: State, key: Node) -> None:
    """One replacement, taken back where it cannot be completed."""
    region, lifted = state.regions[key], state.lifted[key]
    assert state.facts is not None
    local = [*region.inputs, *region.body]
    if any(w.call.spec.dropouts and local[w.node] in state.given for w in lifted.weights):     # each attention draws for itself
        raise Refused(Reason.WEIGHTS_USED, region.product.name, "replace", "another product has the same weights, with the same ones dropped")
    merged = merge_order(region.product, len(lifted.permutation)) is not None
    before = set(state.gm.graph.nodes)
    try:
        pairs = replace(state.gm, region, lifted, state.facts, state.replaced, state.settings)
        for n, (old, new) in enumerate(pairs):
            verify.same_metadata(old, new, layout=n > 0 or not merged)
    except Exception:
        for n in reversed([n for n in state.gm.graph.nodes if n not in before]):
            state.gm.graph.erase_node(n)
        raise
    for old, new in pairs:
        old.replace_all_uses_with(new)
    state.replaced.update(pairs)
    for old, new in pairs[1:]:
        # Later nodes are told by the memory of the tensor that they were traced with.
        new.meta.update({k: old.meta[k] for k in ("example_value", "val") if k in old.meta})
        state.given.setdefault(old, new)
    made = [n for n in state.gm.graph.nodes if n not in before]
    state.made += made
    state.done.append(region)
    called = next(without(AttentionSpec.from_json(str(n.args[-1]))) for n in made if n.target is torch.ops.attnfuse.attention.default)
    if called != lifted.spec:
        state.tabulated.add(key)
    for spec in (lifted.spec, called):
        origin.note(spec, nodes.module_path(region.candidate.anchor), nodes.source_line(region.candidate.anchor))


def _separate(state: State) -> str:
    """Keep results apart that later compilers would take for one."""
    return f"{separate(state.gm, state.returned)} calls made unequal"


def _measured(region: Region, lifted: Lifted) -> Measured | None:
    """What the slice moves as it is written; a remark of the report, so that nothing is lost where it cannot be counted."""
    try:
        return measure(region, lifted)
    except Exception:
        log.debug("a slice could not be counted", exc_info=True)
        return None


def _sweep(state: State) -> str:
    """Erase what only the replaced chains needed, put back calls that were taken apart for nothing, and check the graph."""
    done = {r.product for r in state.done}
    spare = [n for e in state.expansions for n in settle(e, rewritten=not done.isdisjoint(e.made))]
    spare += [n for n in state.made if n.target is not torch.ops.attnfuse.attention.default]       # weights that only a rewritten chain read
    spare += [n for made in (*state.made, *(n for r in state.done for n in r.body)) for user in made.users for n in nodes.dead_end(user)]
    gone = sweep(state.gm, state.done, spare)
    verify.sound(state.gm)
    state.gm.recompile()
    return f"{gone} nodes erased"


PIPELINE: tuple[Callable[[State], str], ...] = (_expand, _find, _region, _lift, _replace, _separate, _sweep)


def _key(c: Candidate) -> Node:
    return c.product or c.anchor


def _guarded(state: State, c: Candidate, stage: str, step: Callable[[], Any]) -> None:
    """Run a step for one candidate; a refusal or failure concerns that candidate alone."""
    try:
        step()
    except Refused as e:
        r = e.refusal
        state.refused[_key(c)] = Refusal(r.reason, r.node or c.anchor.name, r.stage or stage, r.detail)
    except Exception as e:
        if state.settings.strict:
            raise
        detail = f"{type(e).__name__}: {e}"
        state.refused[_key(c)] = Refusal(Reason.FAILED, c.anchor.name, stage, detail[:300])
        state.failures.append(f"{stage} of {c.anchor.name}: {detail}")
        warnings.warn(f"attnfuse: {stage} of {c.anchor.name} failed and the site was left as it was: {detail[:300]}", stacklevel=2)
        log.debug("a site failed", exc_info=True)


def understand(region: Region, settings: Settings) -> Lifted:
    """Replay a slice on its own fake tensors, record it, and lift the record; raises Refused."""
    inputs = [nodes.value(n) for n in region.inputs]
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    mode = next((m for x in tensors if (m := getattr(x, "fake_mode", None)) is not None), None)
    if mode is None or any(type(x).__name__ != "FakeTensor" for x in tensors):
        odd = next((type(x).__name__ for x in tensors if type(x).__name__ != "FakeTensor"), "none")
        raise Refused(Reason.NOT_EXPRESSIBLE, region.product.name, "region", f"no fake tensors to analyse (found {odd})")
    _check_kinds(region, tensors)
    shapes = mode.shape_env
    before = (len(shapes.guards), len(shapes.replacements)) if shapes is not None else (0, 0)
    _, given, made = record(lambda *x: replay(region, x), inputs, mode)
    if shapes is not None and (len(shapes.guards), len(shapes.replacements)) != before:
        raise Refused(Reason.DYNAMIC, region.product.name, "region")
    values = [*given, *(v if isinstance(v, Value) else None for v in made)]
    for node, value in zip([*region.inputs, *region.body], values, strict=True):
        if value is not None and node is not region.product:
            value.nodes.append(node)
    for node, some in zip(region.body, made, strict=True):
        for value in tree_leaves(some) if node in region.stopped else ():
            value.stopped = True
    least = {} if shapes is None else {str(s): int(r.lower) for s, r in shapes.var_to_range.items() if r.lower.is_Integer}
    return assemble(region, values, least, settings)


def _check_kinds(region: Region, tensors: list[torch.Tensor]) -> None:
    for x in tensors:
        if x.layout != torch.strided or x.is_nested:
            raise Refused(Reason.NOT_EXPRESSIBLE, region.product.name, "region", f"a tensor of layout {x.layout}")
        if x.device.type == "meta":
            raise Refused(Reason.DEVICE, region.product.name, "region", "meta tensors")


def _sites(state: State) -> list[Site]:
    out: list[Site] = []
    done = {r.product for r in state.done}
    for c in state.candidates:
        key = _key(c)
        region, lifted = state.regions.get(key), state.lifted.get(key)
        measured = state.measured.get(region.text) if region and key in done else None
        given = _given(state, region, lifted) if region and lifted and key in done else []
        weights = tuple(lifted.weights[n].call.spec for n in given) if lifted else ()
        out.append(Site(
            rewritten=key in done, reason=None if key in done else state.refused.get(key), equation=_equation(lifted, weights) if lifted else None,
            module=nodes.module_path(c.anchor), source=nodes.source_line(c.anchor), node=c.anchor.name, spec=lifted.spec if lifted else None,
            layer_hash=sha256(region.text.encode()).hexdigest()[:8] if region else "", written=measured.calls if measured else (),
            sizes=measured.sizes if measured else (), held=measured.held if measured else (), weights=weights,
            given=tuple(measured.weights[n] for n in given) if measured else (), tabulated=key in state.tabulated))
    return out


def _given(state: State, region: Region, lifted: Lifted) -> list[int]:
    """Which weights of a rewritten slice are computed: not those that only another rewritten product read."""
    local, left = [*region.inputs, *region.body], set(state.gm.graph.nodes)
    return [n for n, w in enumerate(lifted.weights) if state.given.get(local[w.node]) in left]


def _equation(lifted: Lifted, weights: Sequence[AttentionSpec]) -> str:
    return ";  ".join([lifted.spec.equation(), *dict.fromkeys(w.weights_equation() for w in weights)])
