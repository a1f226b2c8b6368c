"""A product of a sum of two softmaxes is a sum of two products: differential attention, taken apart where it stands.

Before:  o = (softmax(s1) - λ · softmax(s2)) @ v
After:   o = softmax(s1) @ v - (λ · softmax(s2)) @ v            each of which is an attention

The sum stays in the graph, unused, until it is known whether an attention came of it (`expand.settle`). Source of the form: Ye et al.,
"Differential Transformer", 2024, equation 1.
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from . import nodes
from .expand import Expansion
from .region import GraphFacts

_SUMS: dict[str, Any] = {"add": operator.add, "__add__": operator.add, "sub": operator.sub, "subtract": operator.sub, "__sub__": operator.sub}
_PRODUCTS = frozenset({"matmul", "bmm", "__matmul__"})
_REACH = 12
"""How many operations may lie between a softmax and the sum."""


def sums(gm: GraphModule) -> list[Node]:
    """The value products of a graph whose weights are the sum or difference of two softmaxes, in graph order."""
    called = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method") and nodes.name(n) in _PRODUCTS and n.users]
    found = [n for n in called if _parts(n) is not None]
    facts = GraphFacts(gm) if found else None
    return [n for n in found if facts is not None and _as_summed(n, facts)]


def distribute(gm: GraphModule, product: Node) -> Expansion:
    """Take one product apart and give its users the result; `product` is one of `sums`."""
    weights = product.args[0]
    assert isinstance(weights, Node)
    parts = _parts(product)
    assert parts is not None
    graph = gm.graph
    with graph.inserting_before(product):
        halves = [_made(graph, product, (part, product.args[1]), product.op, product.target) for part in parts]
        total = _made(graph, product, tuple(halves), "call_function", _SUMS[nodes.name(weights)])
    product.replace_all_uses_with(total)
    return Expansion(product, [(total, [product])], [*halves, total])


def _as_summed(product: Node, facts: GraphFacts) -> bool:
    """Whether the product may read the summands where so far it reads their sum: nothing changes them once they are summed (a change behind
    the product too would spoil what it keeps for a gradient), and gradients are recorded at both places or at neither."""
    weights, parts = product.args[0], _parts(product)
    assert isinstance(weights, Node) and parts is not None
    here = facts.position
    changed = any(here[m] > here[weights] for part in parts for m in facts.mutations.get(nodes.storage(part) or 0, []))
    return not changed and all((weights in some) == (product in some) for some in (facts.no_grad, facts.inference))


def _made(graph: Graph, product: Node, args: tuple[Any, ...], op: str, target: Any) -> Node:
    """A new node with the bookkeeping of the product, and a value as the product's, in memory of its own."""
    made = graph.create_node(op, target, args)
    made.meta.update(nodes.bookkeeping(product))
    value = nodes.value(product)
    with value.fake_mode, torch.no_grad():
        made.meta[nodes.value_key(product)] = torch.empty_like(value)
    return made


def _parts(product: Node) -> tuple[Node, Node] | None:
    """The two summands, each of which comes from a softmax that the other does not; None where the weights are no such sum."""
    if len(product.args) != 2 or product.kwargs or not all(isinstance(a, Node) for a in product.args):
        return None
    weights = product.args[0]
    assert isinstance(weights, Node)
    if nodes.name(weights) not in _SUMS or len(weights.users) != 1 or len(weights.args) != 2 or weights.kwargs:
        return None
    first, second = weights.args
    if not isinstance(first, Node) or not isinstance(second, Node):
        return None
    whole = nodes.value(weights)
    for part in (first, second):
        value = nodes.value(part)
        if not isinstance(value, torch.Tensor) or value.shape != whole.shape or value.dtype != whole.dtype or not value.is_floating_point():
            return None
    a, b = _softmaxes(first), _softmaxes(second)
    return (first, second) if a - b and b - a and not a & b else None


def _softmaxes(node: Node) -> set[Node]:
    """The softmaxes that a node is made from by light operations."""
    found: set[Node] = set()
    seen, queue = {node}, [(node, 0)]
    while queue:
        one, depth = queue.pop()
        called = nodes.name(one)
        if called in nodes.SOFTMAX:
            found.add(one)
            continue
        if called in nodes.CONTRACTION or called in nodes.HEAVY or depth >= _REACH or not nodes.is_builtin(one):
            continue
        for source in nodes.inputs(one):
            if source not in seen:
                seen.add(source)
                queue.append((source, depth + 1))
    return found
