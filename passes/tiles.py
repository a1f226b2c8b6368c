"""Give a rewritten attention the map of its mask's tiles (`attnfuse.tilemap`), one map for all layers that share the mask.

    m = attnfuse.tile_map(q, [mask], [B, T, T], spec of the mask)                          once
    a = attnfuse.attention([q, k, v, mask, m[0], m[1]], …)                                 in every layer
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..settings import Settings
from ..spec import AttentionSpec, Operand
from ..tilemap import mapped, worthwhile
from . import nodes

DEVICES = frozenset({"cuda"})
"""Where executors follow a map."""

Call = Callable[[Graph, Any, tuple[Any, ...], Node], Node]


def attach(graph: Graph, spec: AttentionSpec, operands: list[Node], sizes: list[Any], place: Node, product: Node,
           settings: Settings, call: Call) -> tuple[AttentionSpec, list[Node]]:
    """The spec and the operands of an attention, with a map where its mask needs one and there are tiles enough.

    Args:
        graph: where the product stands. place: new nodes go before it.
        spec, operands, sizes: of the call that is being made; sizes are ints and nodes.
        call: makes a node that calls a function, with the bookkeeping of another.
    """
    query = operands[spec.query.operand]
    found = mapped(spec)
    lengths = {name: _hint(s) for name, s in zip(spec.size_names, sizes, strict=True)}
    if found is None or not worthwhile(lengths["i"], lengths["j"], max(lengths["d"], lengths["e"])):
        return spec, operands
    followed = nodes.value(query).device.type in DEVICES and settings.executor != "torch" and spec.compute_dtype == torch.float32
    if not followed or any(nodes.value(operands[n]).requires_grad for n in found.floats):
        return spec, operands
    named = dict(zip(spec.size_names, sizes, strict=True))
    own = [operands[n] for n in found.sources]
    own_sizes = [named[n] for n in found.mask.size_names]
    text = found.mask.to_json()
    made = _earlier(graph, own, own_sizes, text, place) or call(graph, torch.ops.attnfuse.tile_map.default, (query, own, own_sizes, text), product)
    rows, columns = (call(graph, operator.getitem, (made, n), product) for n in range(2))
    count, rank = len(spec.operands), len(found.mask.batch) + 2
    both = (Operand("row_tiles", "int32", rank), Operand("column_tiles", "int32", rank))
    return replace(spec, operands=(*spec.operands, *both), tiles=(count, count + 1)), [*operands, rows, columns]


def _hint(size: Any) -> int:
    """A length as it was when the graph was captured; asking for it must not add a guard."""
    value = nodes.value(size) if isinstance(size, Node) else size
    return int(value.node.hint or 0) if isinstance(value, torch.SymInt) else int(value)


def _earlier(graph: Graph, operands: list[Node], sizes: list[Any], text: str, place: Node) -> Node | None:
    """A map of the same mask that an earlier layer made, unless something has changed the mask since, or the map was made under an inference
    mode that has ended: no gradient may keep such a tensor."""
    symbol = lambda s: str(nodes.value(s)) if isinstance(s, Node) else str(s)
    memory = {nodes.storage(n) for n in operands}
    found: Node | None = None
    for node in graph.nodes:
        if node is place:
            break
        if found is not None and (nodes.name(node) == "_exit_inference_mode" or any(nodes.storage(t) in memory for t in nodes.mutated(node))):
            found = None
        if node.op == "call_function" and node.target is torch.ops.attnfuse.tile_map.default:
            _, own, own_sizes, own_text = node.args
            same = own_text == text and list(own) == operands  # type: ignore[call-overload]  # a list of nodes
            if same and [symbol(s) for s in own_sizes] == [symbol(s) for s in sizes]:
                found = node
    return found
