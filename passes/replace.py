"""Splice the op into the original graph and take out what only the replaced chain needed.

Before:  s = q @ k.T;  p = softmax(s * 0.125);  o = p @ v;  return o
After:   a = attnfuse.attention([q, k.T, v], [B, H, T, T, D, D], None, spec);  o = a[0];  return o
"""
from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..program import Expr
from ..refusal import Reason, Refused
from ..settings import Settings
from . import nodes
from .assemble import Lifted
from .region import Region
from .tiles import attach
from .trace import length, number

_SEED_BOUND = 2 ** 62


def replace(gm: GraphModule, region: Region, lifted: Lifted, settings: Settings) -> Node:
    """Insert the call before the value product and redirect the product's users to it; returns the node that stands for it."""
    graph = gm.graph
    product = region.product
    local = [*region.inputs, *region.body]
    with graph.inserting_before(product):
        operands = [_cast(graph, local[n], dtype) for n, dtype in zip(lifted.operands, lifted.casts, strict=True)]
        lengths = Lengths(graph, [local[n] for n in lifted.operands], product)
        sizes = [lengths.node(s) for s in lifted.sizes]
        operands += [_number(graph, lengths.number(x), operands[0]) for x in lifted.numbers]
        seed = _seed(graph, operands[0]) if lifted.spec.dropouts else None
        spec, operands = attach(graph, lifted.spec, operands, sizes, product, settings, _call)
        call = _call(graph, torch.ops.attnfuse.attention.default, (operands, sizes, seed, spec.to_json()), product)
        out = _call(graph, operator.getitem, (call, 0), product)
        if lifted.permutation != tuple(range(len(lifted.permutation))):
            out = _call(graph, torch.permute, (out, lifted.permutation), product)
    out.meta["attnfuse"] = call.meta["attnfuse"] = lifted.spec.digest()
    product.replace_all_uses_with(out)
    return out


def _call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node:
    """A call with the bookkeeping (module path, source line) of the node that it replaces, and its fake value."""
    made = graph.call_function(target, args)
    made.meta.update({k: like.meta[k] for k in ("nn_module_stack", "stack_trace", "source_fn_stack") if k in like.meta})
    values = map_arg(args, nodes.value)
    key = "val" if "val" in like.meta and "example_value" not in like.meta else "example_value"
    like_value = nodes.value(like)
    mode = getattr(like_value, "fake_mode", None)
    if mode is not None:
        with mode, torch.no_grad():
            made.meta[key] = target(*values)
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
            if nodes.mutated(node) and _memory_in_use(node, gm.graph, body):
                continue
            gm.graph.erase_node(node)
            body.discard(node)
            gone, again = gone + 1, True
    return gone


def _memory_in_use(node: Node, graph: Graph, body: set[Node]) -> bool:
    """Whether a later node still reads memory that this one changes (users that come before it in the graph do not count)."""
    changed = {nodes.storage(t) for t in nodes.mutated(node)}
    later = False
    for n in graph.nodes:
        if n is node:
            later = True
        elif later and any(nodes.storage(a) in changed for a in nodes.inputs(n)):
            return True
    return False
