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
from .earlier import earlier, hint

DEVICES = frozenset({"cuda"})
"""Where executors follow a map."""
ENDS = frozenset({"_exit_inference_mode"})
"""Behind it no map may be read that was made before: no gradient may keep a tensor of inference mode."""

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
    lengths = {name: hint(s) for name, s in zip(spec.size_names, sizes, strict=True)}
    if found is None or not worthwhile(lengths["i"], lengths["j"], max(lengths["d"], lengths["e"])):
        return spec, operands
    followed = nodes.value(query).device.type in DEVICES and settings.executor != "torch" and spec.compute_dtype == torch.float32
    if not followed or any(nodes.value(operands[n]).requires_grad for n in found.floats):
        return spec, operands
    named = dict(zip(spec.size_names, sizes, strict=True))
    own = [operands[n] for n in found.sources]
    own_sizes = [named[n] for n in found.mask.size_names]
    text = found.mask.to_json()
    target = torch.ops.attnfuse.tile_map.default
    made = earlier(graph, target, own, own_sizes, text, place, ENDS) or call(graph, target, (query, own, own_sizes, text), product)
    rows, columns = (call(graph, operator.getitem, (made, n), product) for n in range(2))
    count, rank = len(spec.operands), len(found.mask.batch) + 2
    both = (Operand("row_tiles", "int32", rank), Operand("column_tiles", "int32", rank))
    return replace(spec, operands=(*spec.operands, *both), tiles=(count, count + 1)), [*operands, rows, columns]
