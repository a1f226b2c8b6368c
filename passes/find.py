"""Anchors: every softmax that may be an attention's, with the product that consumes its weights, and every fused call.

Before: a torch-level graph. After: a list of `Candidate`s; nothing is changed.

    s = q @ k.T;  p = softmax(s);  o = p @ v        →  Candidate(anchor=softmax, product=o, carried=(softmax,))
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..refusal import Reason, Refusal
from . import nodes

_REACH = 24
"""How many operations may lie between a softmax and the product with the values."""
_QUOTIENTS = frozenset({"div", "truediv", "true_divide", "divide", "__truediv__", "mul", "multiply", "__mul__", "__rmul__", "rmul"})
_OBSERVERS = frozenset({"size", "shape", "dtype", "device", "dim", "ndim", "numel", "sym_size"})


@dataclass(frozen=True)
class Candidate:
    """A softmax (or fused call), the value product if there is one (with the quotient that normalises it, if it comes later), and
    the nodes between that carry the weights."""

    anchor: Node
    product: Node | None
    carried: frozenset[Node] = frozenset()
    refusal: Refusal | None = None
    values: Node | None = None                 # where the values are summed, if the product is that divided by a sum of the weights


def find(gm: GraphModule) -> list[Candidate]:
    """All candidates of one graph, in graph order."""
    out: list[Candidate] = []
    by_hand: list[Candidate] = []
    for node in gm.graph.nodes:
        called = nodes.name(node)
        if called in nodes.SDPA:
            out.append(Candidate(node, node, frozenset({node})))
        elif called in nodes.SOFTMAX:
            out.extend(_follow(node))
        elif called in ("exp", "exp_"):
            # A softmax written by hand, if its weights reach a product; an exponential on its own is no candidate.
            by_hand.extend(c for c in _follow(node) if c.product is not None)
    for c in by_hand:
        if all(c.product is not known.product for known in out):
            out.append(c)
    return out


def _follow(anchor: Node) -> list[Candidate]:
    """The value products that a softmax's weights reach."""
    products, reached, ends = _reach(anchor)
    if products:
        return [_candidate(anchor, p, reached) for p in products]
    mixer = _mixer(anchor, ends)
    if mixer is not None:
        return [Candidate(anchor, None, refusal=Refusal(Reason.HEADS_MIXED, mixer.name, "find", f"by {nodes.name(mixer)}"))]
    return [Candidate(anchor, None, refusal=Refusal(Reason.NO_VALUE_PRODUCT, anchor.name, "find"))]


def _candidate(anchor: Node, product: Node, reached: set[Node]) -> Candidate:
    """One value product: (e @ v) / e.sum(-1) as a whole."""
    path, end = _divided(product, reached)
    if end is None:
        return Candidate(anchor, product, _between(anchor, product, reached))
    return Candidate(anchor, end, _between(anchor, end, reached | path), values=product)


def _divided(product: Node, reached: set[Node]) -> tuple[set[Node], Node | None]:
    """The quotient of a product and of something that the weights reach too; and what lies between: views and casts."""
    path, node = {product}, product
    while len(node.users) == 1 and len(path) < _REACH:
        (user,) = node.users
        called, others = nodes.name(user), [a for a in nodes.inputs(user) if a is not node]
        if called in _QUOTIENTS and any(a in reached for a in others):
            return path, user
        if called not in nodes.TRANSPARENT or called in _QUOTIENTS or others:
            break
        node = user
        path.add(node)
    return set(), None


def _reach(start: Node) -> tuple[list[Node], set[Node], list[Node]]:
    """The products that a value reaches through light operations, these operations, and the heavy ones where it ends."""
    reached, products, ends = {start}, [], []
    queue = [(start, 0)]
    while queue:
        node, depth = queue.pop(0)
        for user in node.users:
            called = nodes.name(user)
            if called in nodes.CONTRACTION:
                if user not in products and user.users:         # one that was taken apart has none
                    products.append(user)
            elif called in nodes.HEAVY:
                ends.append(user)
            elif user.op != "output" and called not in nodes.SOFTMAX and called not in _OBSERVERS and \
                    nodes.is_builtin(user) and depth < _REACH and user not in reached:
                reached.add(user)
                queue.append((user, depth + 1))
    return products, reached, ends


def _mixer(anchor: Node, ends: list[Node]) -> Node | None:
    """The layer over the heads ("talking heads") behind which weights [batch, head, query, key] reach a product after all."""
    weights = nodes.value(anchor)
    if not isinstance(weights, torch.Tensor) or weights.dim() != 4:
        return None
    return next((n for n in ends if nodes.name(n) in ("linear", "conv2d") and _reach(n)[0]), None)


def _between(anchor: Node, product: Node, reached: set[Node]) -> frozenset[Node]:
    """The reached nodes on a path from the softmax to one product."""
    on_path: set[Node] = set()
    stack = [a for a in nodes.inputs(product) if a in reached]
    while stack:
        node = stack.pop()
        if node not in on_path:
            on_path.add(node)
            stack.extend(a for a in nodes.inputs(node) if a in reached)
            # w[w != w] = 0: what such a step reads of the weights stays in the chain.
            stack.extend(u for u in node.users if u in reached and node in nodes.mutated(u))
    return frozenset(on_path | {anchor})


def observers(candidate: Candidate) -> list[tuple[Node, Node]]:
    """(node that carries weights, its user outside the chain), not counting dead code and questions about shapes."""
    found: list[tuple[Node, Node]] = []
    for node in candidate.carried:
        if node is candidate.product:
            continue
        for user in node.users:
            if user is candidate.product or user in candidate.carried or nodes.name(user) in _OBSERVERS:
                continue
            if node in nodes.mutated(user) and all(u is candidate.product or u in candidate.carried for u in user.users):
                continue                              # an in-place step of the chain itself: `region` looks after who else sees it
            if not nodes.dead_end(user):
                found.append((node, user))
    return found
