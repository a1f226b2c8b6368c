"""Splice the op into the original graph and take out what only the replaced chain needed.

Before:  s = q @ k.T;  p = softmax(s * 0.125);  o = p @ v;  return o
After:   a = attnfuse.attention([q, k.T, v], [B, H, T, T, D, D], None, spec);  o = a[0];  return o

and where p is read elsewhere:  w = attnfuse.weights([q, k.T], a[1], [B, H, T, T, D, D], None, spec of p)
"""
from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..program import Expr
from ..refusal import Reason, Refused
from ..settings import Settings
from . import nodes
from .assemble import Lifted
from .distance import tabulate
from .operands import Call
from .region import GraphFacts, Region
from .tiles import attach
from .trace import length, number
from .wanted import make_available, place

_SEED_BOUND = 2 ** 62


def replace(gm: GraphModule, region: Region, lifted: Lifted, facts: GraphFacts, replaced: Mapping[Node, Node],
            settings: Settings) -> list[tuple[Node, Node]]:
    """Insert the calls, before the product or before its weights are read; returns (old node, the one that stands for it), the
    product first. Nothing uses the new nodes yet. `replaced` are such pairs of other slices, whose results this one may read."""
    graph, want = gm.graph, region.wanted
    whole = [*region.inputs, *region.body]
    local = [replaced.get(n, n) for n in whole]
    at = place(graph, want, region.product, facts)
    if want is not None:
        read = [n for call in (lifted.call, *(w.call for w in lifted.weights)) for n in call.operands]
        make_available([local[n] for n in read], at, region.product, facts, want)
    with graph.inserting_before(at):
        maker = _Maker(graph, local, region.product, at)
        operands, sizes = maker.arguments(lifted.call)
        seed = _seed(graph, operands[0]) if lifted.spec.dropouts else None
        spec, operands = tabulate(graph, lifted.spec, operands, sizes, at, region.product, _call)
        spec, operands = attach(graph, spec, operands, sizes, at, region.product, settings, _call)
        call = _call(graph, torch.ops.attnfuse.attention.default, (operands, sizes, seed, spec.to_json()), region.product)
        out = maker.shaped(_call(graph, operator.getitem, (call, 0), region.product), lifted.permutation, None)
        out.meta["attnfuse"] = call.meta["attnfuse"] = lifted.spec.digest()
        pairs = [(region.product, out)]
        stats = _call(graph, operator.getitem, (call, 1), region.product) if lifted.weights else None
        for one in lifted.weights:
            operands, sizes = maker.arguments(one.call)
            drawn = seed if one.call.spec.dropouts else None
            spec, operands = tabulate(graph, one.call.spec, operands, sizes, at, region.product, _call)
            made = _call(graph, torch.ops.attnfuse.weights.default, (operands, stats, sizes, drawn, spec.to_json()), whole[one.node])
            pairs.append((whole[one.node], maker.shaped(made, one.permutation, one.shape)))
            made.meta["attnfuse"] = one.call.spec.digest()
    return pairs


class _Maker:
    """Makes the nodes around the calls of one slice: each cast, number and length once."""

    def __init__(self, graph: Graph, local: list[Node], product: Node, place: Node) -> None:
        self.graph, self.local, self.product, self.place = graph, local, product, place
        self.lengths: Lengths | None = None
        self.casts: dict[tuple[int, torch.dtype | None], Node] = {}

    def arguments(self, call: Call) -> tuple[list[Node], list[Any]]:
        """(operands, sizes) of a call."""
        nodes_ = [self._cast(n, dtype) for n, dtype in zip(call.operands, call.casts, strict=True)]
        if self.lengths is None:
            self.lengths = Lengths(self.graph, [self.local[n] for n in call.operands], self.place)
        sizes = [self.lengths.node(s) for s in call.sizes]
        return nodes_ + [_number(self.graph, self.lengths.number(x), nodes_[0]) for x in call.numbers], sizes

    def _cast(self, number: int, dtype: torch.dtype | None) -> Node:
        if (number, dtype) not in self.casts:
            self.casts[number, dtype] = _cast(self.graph, self.local[number], dtype)
        return self.casts[number, dtype]

    def shaped(self, node: Node, permutation: tuple[int, ...], shape: tuple[Expr, ...] | None) -> Node:
        """The result of an op with its dimensions in another order and, if `shape` says so, split or joined."""
        if permutation != tuple(range(len(permutation))):
            node = _call(self.graph, torch.permute, (node, permutation), self.product)
        if shape is not None:
            assert self.lengths is not None
            node = _call(self.graph, torch.reshape, (node, tuple(self.lengths.node(s) for s in shape)), self.product)
        return node


def _call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node:
    """A call with the bookkeeping (module path, source line) of the node that it replaces, and its fake value.

    The value says whether there is a gradient, as that of `like` does: a graph that is kept as the body of another operation
    (`nested_compile_region`) has none for results of which its values deny one.
    """
    made = graph.call_function(target, args)
    made.meta.update(nodes.bookkeeping(like))
    values = map_arg(args, nodes.value)
    mode = getattr(nodes.value(like), "fake_mode", None)
    if mode is not None:
        with mode, torch.no_grad():
            made.meta[nodes.value_key(like)] = result = target(*values)
        for x in tree_leaves(result) if nodes.value(like).requires_grad else ():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
    return made


def _cast(graph: Graph, node: Node, dtype: torch.dtype | None) -> Node:
    """A cast that autocast would have made between the lines becomes one in the graph."""
    return node if dtype is None else _call(graph, torch.Tensor.to, (node, dtype), node)


def _number(graph: Graph, node: Node, like: Node) -> Node:
    """A symbolic float as a tensor of no dimensions: a new value needs no new kernel."""
    device = nodes.value(like).device
    made = graph.call_function(torch.scalar_tensor, (node,), {"dtype": torch.float64, "device": device})
    with nodes.value(like).fake_mode:
        made.meta["example_value"] = torch.scalar_tensor(nodes.value(node), dtype=torch.float64, device=device)
    return made


def _seed(graph: Graph, like: Node) -> Node:
    """One 64-bit number from PyTorch's own generator: `manual_seed`, checkpointing and CUDA graphs then do what they always do."""
    device = nodes.value(like).device
    made = graph.call_function(torch.randint, (0, _SEED_BOUND, (1,)), {"device": device, "dtype": torch.int64})
    mode = nodes.value(like).fake_mode
    with mode:
        made.meta["example_value"] = torch.randint(0, _SEED_BOUND, (1,), device=device, dtype=torch.int64)
    return made


class Lengths:
    """Makes the integers of a call: numbers as they are, symbols from a node that holds them or from a tensor's shape."""

    def __init__(self, graph: Graph, operands: list[Node], place: Node) -> None:
        self.graph, self.operands, self.place = graph, operands, place
        self.made: dict[Expr, Any] = {}

    def node(self, expr: Expr) -> Any:
        """An int, or a node whose value is the length."""
        if expr.op == "const":
            return expr.attr
        if expr not in self.made:
            self.made[expr] = self._make(expr)
        return self.made[expr]

    def _make(self, expr: Expr) -> Node:
        for tensor in [*self.operands, *self._earlier()]:
            value = nodes.value(tensor)
            if isinstance(value, torch.SymInt) and length(value) == expr:
                return tensor
            if isinstance(value, torch.Tensor):
                for dim, s in enumerate(value.shape):
                    if isinstance(s, torch.SymInt) and length(s) == expr:
                        return _call(self.graph, torch.ops.aten.sym_size.int, (tensor, dim), tensor)
        operation = _INTEGER.get(expr.op)
        if operation is None:
            raise Refused(Reason.DYNAMIC, self.place.name, "replace", f"no value at hand for the length {expr}")
        return _call(self.graph, operation, tuple(self.node(a) for a in expr.args), self.operands[0])

    def number(self, expr: Expr) -> Node:
        """The node whose value is a symbolic float."""
        for node in self._earlier():
            value = nodes.value(node)
            if isinstance(value, torch.SymFloat) and number(value) == expr:
                return node
        raise Refused(Reason.DYNAMIC, self.place.name, "replace", f"no value at hand for the number {expr.attr}")

    def _earlier(self) -> list[Node]:
        out: list[Node] = []
        for n in self.graph.nodes:
            if n is self.place:
                break
            if not isinstance(nodes.value(n), torch.Tensor) or n.op in ("placeholder", "get_attr"):
                out.append(n)
        return out


_INTEGER: dict[str, Any] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
                            "mod": operator.mod, "neg": operator.neg, "min": torch.sym_min, "max": torch.sym_max}


def sweep(gm: GraphModule, regions: list[Region], spare: Iterable[Node] = ()) -> int:
    """Erase the nodes of replaced chains that nothing uses any more; returns how many.

    Only nodes of the slices (and `spare` ones) go: an in-place operation of a slice changes memory that the slice itself made and that nobody
    outside sees (`region` has checked this), so it is dead once its result and every other view of that memory are.
    """
    body = {n for r in regions for n in r.body} | set(spare)
    gone = 0
    again = True
    while again:
        again = False
        for node in reversed(list(gm.graph.nodes)):
            if node not in body or node.users or nodes.name(node) in ("_enter_autocast", "_exit_autocast"):
                continue
            if nodes.mutated(node) and _memory_in_use(node, gm.graph):
                continue
            gm.graph.erase_node(node)
            body.discard(node)
            gone, again = gone + 1, True
    return gone


def _memory_in_use(node: Node, graph: Graph) -> bool:
    """Whether a later node still reads memory that this one changes (users that come before it in the graph do not count)."""
    changed = {nodes.storage(t) for t in nodes.mutated(node)}
    later = False
    for n in graph.nodes:
        if n is node:
            later = True
        elif later and any(nodes.storage(a) in changed for a in nodes.inputs(n)):
            return True
    return False
