"""What an earlier layer has made already: a call of one of our own operations whose result a later layer may read.

    m = attnfuse.tile_map(q, [mask], [T, T], mask's text)          first layer
    m                                                              every other one, as long as nothing has changed the mask
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from . import nodes


def earlier(graph: Graph, target: Any, operands: Sequence[Node], sizes: Sequence[Any], text: str, place: Node, ends: frozenset[str]) -> Node | None:
    """An equal call before `place`, unless something has changed an operand's memory since.

    Args:
        graph: where to look.
        target: the operation, called with (like, operands, sizes, text).
        operands, sizes, text: what it has to have been called with; sizes are ints and nodes.
        place: where the result is wanted.
        ends: names of operations behind which no earlier result may be read.
    """
    symbol = lambda s: str(nodes.value(s)) if isinstance(s, Node) else str(s)
    memory = {nodes.storage(n) for n in operands}
    found: Node | None = None
    for node in graph.nodes:
        if node is place:
            break
        if found is not None and (nodes.name(node) in ends or any(nodes.storage(t) in memory for t in nodes.mutated(node))):
            found = None
        if node.op == "call_function" and node.target is target:
            _, own, own_sizes, own_text = node.args
            same = own_text == text and list(own) == list(operands)  # type: ignore[call-overload]  # a list of nodes
            if same and [symbol(s) for s in own_sizes] == [symbol(s) for s in sizes]:
                found = node
    return found


def hint(size: Any) -> int:
    """A length as it was when the graph was captured; asking for it must not add a guard."""
    value = nodes.value(size) if isinstance(size, Node) else size
    return int(value.node.hint or 0) if isinstance(value, torch.SymInt) else int(value)
