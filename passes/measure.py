"""What a slice moves as it is written: its nodes run once more on fake tensors, under a counter.

    q @ k.T → s;  s * 0.125;  softmax;  p @ v        →    Measured(calls=(bmm, mul, _softmax, bmm), sizes=(8, 64, 64, …), held=(…))
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from ..counting import Counter, distinct_bytes
from ..traffic import Call
from . import nodes
from .assemble import Lifted
from .region import Region
from .replay import replay


@dataclass(frozen=True)
class Measured:
    """The kernels of a slice run in eager mode, the integers of the call that replaces it, and the bytes of the distinct elements of each
    of its operands."""

    calls: tuple[Call, ...]
    sizes: tuple[int, ...]
    held: tuple[int, ...]


def measure(region: Region, lifted: Lifted) -> Measured | None:
    """Count a slice; None where a length is symbolic, for counting would make it a number."""
    inputs = [nodes.value(n) for n in region.inputs]
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    mode = next((m for x in tensors if (m := getattr(x, "fake_mode", None)) is not None), None)
    symbolic = any(isinstance(n, torch.SymInt) for x in tensors for n in (*x.shape, *x.stride()))
    if mode is None or symbolic or any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in inputs) or any(s.op != "const" for s in lifted.sizes):
        return None
    calls: list[Call] = []
    with mode, torch.no_grad(), Counter(calls):
        replay(region, inputs, fused=True)
    local = [*region.inputs, *region.body]
    held = []
    for n, dtype in zip(lifted.operands, lifted.casts, strict=True):
        tensor = nodes.value(local[n])
        held.append(distinct_bytes([tensor]) // tensor.element_size() * (dtype or tensor.dtype).itemsize)
    held += [8] * len(lifted.numbers)
    return Measured(tuple(calls), tuple(int(s.value) for s in lifted.sizes), tuple(held))
