"""Put what scores take from the distance of key and query into a table (`attnfuse.distances`), one table for all layers that share it.

    a = attnfuse.attention([q, k, v, table], …)                      score = s + table[bucket(j - i), b1]

    t = attnfuse.distance_table(q.new_empty(0), [table], [H, T, T], program)      once
    a = attnfuse.attention([q, k, v, t], …)                          in every layer: score = s + t[b1, j - i + |i| - 1]
"""
from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..distances import tabulated, worthwhile
from ..spec import AttentionSpec
from . import nodes
from .earlier import earlier, hint
from .tiles import Call

ENDS = frozenset({"_exit_inference_mode", "_set_grad_enabled"})
"""Behind these no table may be read that was made before: it may have no gradient that is wanted now."""


def tabulate(graph: Graph, spec: AttentionSpec, operands: list[Node], sizes: list[Any], place: Node, product: Node,
             call: Call) -> tuple[AttentionSpec, list[Node]]:
    """The spec and the operands of an attention, with tables by distance where they pay.

    Args: as of `tiles.attach`.
    """
    named = dict(zip(spec.size_names, sizes, strict=True))
    found = tabulated(spec) if worthwhile(hint(named["i"]), hint(named["j"])) else None
    device = nodes.value(operands[spec.query.operand]).device
    if found is None or any(nodes.value(operands[n]).device != device for some in found.sources for n in some):
        return spec, operands
    made, target, like = [], torch.ops.attnfuse.distance_table.default, None
    for table, sources in zip(found.tables, found.sources, strict=True):
        own, own_sizes, text = [operands[n] for n in sources], [named[n] for n in table.size_names], table.to_json()
        known = earlier(graph, target, own, own_sizes, text, place, ENDS)
        if known is None:
            like = like or call(graph, torch.Tensor.new_empty, (operands[spec.query.operand], (0,)), product)     # what a table has no gradient to
            known = call(graph, target, (like, own, own_sizes, text), product)
        made.append(known)
    return found.spec, [*(operands[n] for n in found.kept), *made]
