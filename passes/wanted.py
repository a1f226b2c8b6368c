"""Weights that something outside a chain reads as well: which tensors those are, and where in the graph the ops can stand.

Before:  p = softmax(s);  o = p @ v;  return o, p
After:   a = attnfuse.attention(…);  w = attnfuse.weights(…, a[1], …);  return a[0], w

The op's result takes the place of the tensor that is read. Tensors that share memory get one: the views between them stay in the graph.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, Node

from ..refusal import Reason, Refused
from . import nodes
from .find import Candidate, observers

if TYPE_CHECKING:
    from .region import GraphFacts

_MODES = frozenset({"_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode",
                    *(f"_{x}_{way}_nesting" for x in ("vmap", "grad", "jvp", "func") for way in ("increment", "decrement"))})
_PURE = nodes.TRANSPARENT | nodes.CONTRACTION | {
    "linear", "addmm", "layer_norm", "rms_norm", "conv1d", "conv2d", "add", "sub", "sym_size", "size", "cat", "stack", "where", "masked_fill",
    "relu", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "cos", "sin", "abs", "sqrt", "rsqrt", "square", "clamp"}
"""What may be moved to an earlier place: no effects, no random numbers."""


@dataclass(frozen=True)
class Wanted:
    """Tensors of weights that are read outside the chain.

    Attributes:
        nodes: those for which the op is to stand, in graph order.
        first: the earliest node that will read one of them.
        user: a reader, to name in a refusal.
        kept: the nodes that share memory with them and stay.
    """

    nodes: tuple[Node, ...]
    first: Node
    user: Node
    kept: frozenset[Node]

    def refused(self, detail: str) -> Refused:
        """The exception that says why these weights cannot be given."""
        return Refused(Reason.WEIGHTS_USED, self.user.name, "lift", f"by {nodes.name(self.user)}: {detail}")


def wanted(candidate: Candidate, facts: GraphFacts) -> Wanted | None:
    """The weights of a candidate that are read elsewhere, None where there are none.

    Raises Refused where any weights of the chain are changed in place, or these are recorded for a gradient when the product is not.
    """
    seen = sorted(observers(candidate), key=lambda pair: facts.position[pair[1]])
    if not seen:
        return None
    product, user = candidate.product, seen[0][1]
    assert product is not None
    # All of the chain's weights count: a dropout that drops nothing gives in truth the very tensor that it is given.
    memory = {nodes.storage(n) for n in candidate.carried} - {None}
    change = next((facts.mutations[at][0] for at in memory if facts.mutations.get(at)), None)  # type: ignore[index]
    if change is not None:
        raise Refused(Reason.INPLACE, change.name, "region", f"weights that {nodes.name(user)} reads are changed by {nodes.name(change)}")
    groups: dict[int, list[Node]] = {}
    for node, reader in seen:
        at, value = nodes.storage(node), nodes.value(node)
        if at is None:
            raise Refused(Reason.WEIGHTS_USED, reader.name, "region", f"by {nodes.name(reader)}")
        if (node in facts.no_grad) != (product in facts.no_grad) and (value.requires_grad or nodes.value(product).requires_grad):
            raise Refused(Reason.WEIGHTS_USED, reader.name, "region",
                          f"by {nodes.name(reader)}, where other gradients are recorded than at the product")
        groups.setdefault(at, []).append(node)
    found: list[Node] = []
    readers = [reader for _, reader in seen]
    kept: set[Node] = set()
    for group in groups.values():
        lines = [_line(node, candidate) for node in group]
        common = [n for n in lines[0] if all(n in line for line in lines)]
        if not common:
            raise Refused(Reason.WEIGHTS_USED, user.name, "region", f"by {nodes.name(user)}")
        source = common[0]
        found.append(source)
        between = {n for line in lines for n in line[:line.index(source)]}
        readers += between
        kept |= {source, *between}
    order = facts.position.__getitem__
    return Wanted(tuple(sorted(found, key=order)), min(readers, key=order), user, frozenset(kept))


def _line(node: Node, candidate: Candidate) -> list[Node]:
    """A node and what it is a view of, within the weights of a chain."""
    out = [node]
    while True:
        before = [a for a in nodes.inputs(out[-1]) if a in candidate.carried and nodes.storage(a) == nodes.storage(node)]
        if not before:
            return out
        out.append(before[0])


# ---- where the ops can stand

def place(graph: Graph, want: Wanted | None, product: Node, facts: GraphFacts) -> Node:
    """The node before which the ops go: the product, or where the weights are read first, but under the product's own modes."""
    if want is None:
        return product
    for node in graph.nodes:
        if node in (product, want.first):
            break
    else:
        raise AssertionError("neither the product nor a reader is in the graph")
    while not _same_mode(node, product, facts):
        node = node.prev
        if node.op in ("placeholder", "root"):
            raise Refused(Reason.WEIGHTS_USED, want.user.name, "replace", "no place for the weights under the product's modes")
    return node


def _same_mode(node: Node, product: Node, facts: GraphFacts) -> bool:
    """Whether what is inserted before a node runs under the modes that the product runs under."""
    before = node.prev
    while before not in facts.position and before.op != "root":      # what earlier rewrites inserted stands in its neighbours' modes
        before = before.prev
    same = all((before in some) == (product in some) for some in (facts.no_grad, facts.inference))
    return node is product or same and before not in facts.nested


def make_available(operands: Iterable[Node], at: Node, product: Node, facts: GraphFacts, want: Wanted) -> None:
    """Move what the operands are made by to before `at`, where they come later; raises Refused where that might change something."""
    position = {n: k for k, n in enumerate(at.graph.nodes)}
    for node in dict.fromkeys(operands):
        changes = facts.mutations.get(nodes.storage(node) or 0, [])
        late = next((m for m in changes if m in position and position[at] <= position[m] < position[product]), None)
        if late is not None:
            raise Refused(Reason.INPLACE, late.name, "replace", f"{nodes.name(late)} changes an operand after the weights are read")
        _move(node, at, position, facts, want)


def _move(node: Node, at: Node, position: dict[Node, int], facts: GraphFacts, want: Wanted) -> None:
    if node is at or node in want.kept:
        raise Refused(Reason.WEIGHTS_USED, want.user.name, "replace", f"by {nodes.name(want.user)}, of which the values are made")
    if position[node] < position[at]:
        return
    between = at
    while between is not node:
        if nodes.name(between) in _MODES:
            raise Refused(Reason.WEIGHTS_USED, want.user.name, "replace",
                          f"by {nodes.name(want.user)}, before another mode in which {node.name} is made")
        between = between.next
    touched = [nodes.storage(n) for n in (node, *nodes.inputs(node)) if isinstance(nodes.value(n), torch.Tensor)]
    pure = node.op == "get_attr" or node.op in ("call_function", "call_method") and nodes.is_builtin(node) and nodes.name(node) in _PURE
    if not pure or any(facts.mutations.get(x or 0) for x in touched):
        raise Refused(Reason.WEIGHTS_USED, want.user.name, "replace", f"by {nodes.name(want.user)}, before {node.name} is there")
    for source in nodes.inputs(node):
        _move(source, at, position, facts, want)
    at.prepend(node)
    position[node] = position[at] - 1                  # before `at`; their own order no longer matters
