"""What a slice moves as it is written: those of its nodes that the op replaces run once more on fake tensors, under a counter.

    q @ k.T → s;  s * 0.125;  softmax;  p @ v        →    Measured(calls=(bmm, mul, _softmax, bmm), sizes=(8, 64, 64, …), held=(…))
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..counting import Counter
from ..extents import distinct_bytes
from ..report import GivenWeights
from ..traffic import Call
from . import nodes
from .assemble import Lifted
from .operands import Call as OpCall
from .region import Region
from .replay import run_node


@dataclass(frozen=True)
class Measured:
    """The kernels of the replaced part of a slice, run in eager mode; the integers of the call that replaces it, and the bytes of the
    distinct elements of each of its operands; and the calls that give weights."""

    calls: tuple[Call, ...]
    sizes: tuple[int, ...]
    held: tuple[int, ...]
    weights: tuple[GivenWeights, ...] = ()


def measure(region: Region, lifted: Lifted) -> Measured | None:
    """Count a slice; None where a length is symbolic, for counting would make it a number."""
    inputs = [nodes.value(n) for n in region.inputs]
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    mode = next((m for x in tensors if (m := getattr(x, "fake_mode", None)) is not None), None)
    symbolic = any(isinstance(n, torch.SymInt) for x in tensors for n in (*x.shape, *x.stride()))
    symbolic |= any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in inputs)
    if mode is None or symbolic or any(s.op != "const" for s in lifted.call.sizes):
        return None
    local = [*region.inputs, *region.body]
    staying = _staying(region, [local[n] for n in lifted.call.operands])
    calls: list[Call] = []
    env: dict[Node, Any] = dict(zip(region.inputs, inputs, strict=True))
    with mode, torch.no_grad():
        for node in region.body:
            with nullcontext() if node in staying else Counter(calls):
                env[node] = run_node(node, env, fused=True)
    weights = tuple(GivenWeights(w.call.spec, _integers(w.call), _held(w.call, local)) for w in lifted.weights)
    return Measured(tuple(calls), _integers(lifted.call), _held(lifted.call, local), weights)


def _integers(call: OpCall) -> tuple[int, ...]:
    return tuple(int(s.value) for s in call.sizes)


def _held(call: OpCall, local: Sequence[Node]) -> tuple[int, ...]:
    """Bytes of the distinct elements of each operand."""
    held = []
    for n, dtype in zip(call.operands, call.casts, strict=True):
        tensor = nodes.value(local[n])
        held.append(distinct_bytes([tensor]) // tensor.element_size() * (dtype or tensor.dtype).itemsize)
    return (*held, *[8] * len(call.numbers))


def _staying(region: Region, operands: Sequence[Node]) -> set[Node]:
    """The nodes of a slice that still run when the op stands for it: its operands, what they are made of, and what changes them in place."""
    body, out, open_ = set(region.body), set[Node](), list(operands)
    while open_:
        while open_:
            node = open_.pop()
            if node in body and node not in out:
                out.add(node)
                open_ += node.all_input_nodes
        memory = {nodes.storage(n) for n in out}
        open_ = [n for n in region.body if n not in out and any(nodes.storage(t) in memory for t in nodes.mutated(n))]
    return out
