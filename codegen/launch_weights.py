"""From a call of `attnfuse::weights` to a running kernel: plan, source, launch.

    weights = weights(spec, (q, k, bias), stats, sizes, seed)

The plans are forward's: the kernel keeps and stages less than it does, and its tiles pass through shared memory like P.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..reference import check_call
from ..spec import AttentionSpec
from ..tiling import allocate_weights
from . import launch, memory
from .arguments import Unsupported
from .backward import emit
from .fallback import Steps
from .header import request_of
from .jobs import WEIGHTS
from .launch_backward import function, numbers
from .launcher import Together
from .plan import KernelPlan, Request
from .plan_forward import candidates, roomier as roomier_plans, work_for
from .reads import described, uneven
from .tiles import Device, present

_ladders: dict[object, _Ladder] = {}
_MOST_LADDERS = 4096


def weights(spec: AttentionSpec, operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int],
            seed: torch.Tensor | None = None) -> torch.Tensor:
    """The weights, shape (batch…, i, j), laid out as `spec.out_order` says.

    Args: as of `attnfuse.weighing.forward`.

    Raises:
        Unsupported: no kernel can be generated for these weights or this device; nothing was computed.
        ValueError: the arguments do not fit the spec.
    """
    layouts = tuple([(t.shape, t.stride(), t.dtype, t.device) for t in (stats, *operands)])
    key = (spec, tuple(sizes), layouts, launch.aligned(operands), launch.where(seed), torch.backends.cuda.matmul.allow_tf32)
    ladder = _ladders.get(key)
    if ladder is None:
        check_call(spec, operands, sizes, seed)
        if spec.tiles is not None:
            raise ValueError("weights are computed without a map of tiles")
        if len(_ladders) >= _MOST_LADDERS:
            _ladders.clear()
        ladder = _ladders[key] = _prepare(spec, operands, stats, tuple(sizes))
    return ladder.run(operands, stats, seed)


def plans(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: Device) -> tuple[KernelPlan, ...]:
    """The plans that fit, best first.

    Raises:
        Unsupported: as of `launch.check_supported`.
    """
    launch.check_supported(spec, operands, sizes)
    request = _request(spec, operands, sizes, device)
    return _storing(spec, request, device, candidates(spec, request, device))


def roomier(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: Device, preferred: KernelPlan) -> tuple[KernelPlan, ...]:
    """What is tried where one of `plans` spills."""
    request = _request(spec, operands, sizes, device)
    return _storing(spec, request, device, roomier_plans(spec, request, device, preferred))


def _request(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: Device) -> Request:
    named = dict(zip(spec.size_names, sizes, strict=True))
    out = allocate_weights(spec, sizes, torch.empty(0, device="meta"))
    wide = launch.is_wide(spec, operands, named, (out,))
    own = {"q": operands[spec.query.operand], "k": operands[spec.key.operand]}
    return request_of(spec, named, wide, launch.precision(device), described(spec, named, own), uneven(spec, own))


def _storing(spec: AttentionSpec, request: Request, device: Device, found: tuple[KernelPlan, ...]) -> tuple[KernelPlan, ...]:
    """Forward's plans with the shared memory of this kernel, whose tiles cross to the layout in which they are stored."""
    held = work_for(spec, request, device).held
    return tuple(replace(p, shared=max(p.shared, memory.weights(p.tile, held))) for p in found)


def _prepare(spec: AttentionSpec, operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: tuple[int, ...]) -> _Ladder:
    named = dict(zip(spec.size_names, sizes, strict=True))
    device = operands[spec.query.operand].device
    launch.check_supported(spec, operands, sizes)
    if tuple(stats.shape) != (*(named[b] for b in spec.batch), named["i"], 2):
        raise ValueError(f"statistics of shape {tuple(stats.shape)} for weights over {', '.join(spec.weight_axes)}")
    if stats.dtype != torch.float32:
        raise Unsupported(f"statistics in {stats.dtype}")
    used = {spec.query.operand, spec.key.operand, *spec.captured}
    if any(t.device != device for t in (stats, *(operands[n] for n in used))):
        raise Unsupported("the operands and the statistics are on different devices")
    if math.prod(named[a] for a in spec.weight_axes) == 0:
        return _Ladder(spec, Steps([]), sizes, operands)
    if device.type != "cuda" and not launch.interpreting():
        raise Unsupported(f"a generated kernel needs a GPU; the operands are on {device}")
    entry = present(device)
    request = _request(spec, operands, sizes, entry)
    offered = _storing(spec, request, entry, candidates(spec, request, entry))
    for plan in offered:
        try:
            emit(spec, plan, WEIGHTS)   # what no kernel can follow shows here, before anything runs
        except ValueError as problem:
            raise Unsupported(f"a score or weight program that is not understood ({problem})") from problem
    steps = Steps(list(offered), lambda plan: _storing(spec, request, entry, roomier_plans(spec, request, entry, plan)))
    return _Ladder(spec, steps, sizes, operands)


class _Ladder:
    """One layout: plans in order of preference; one that the device turns out not to hold, or that spills, is left for another, for good."""

    def __init__(self, spec: AttentionSpec, steps: Steps, sizes: tuple[int, ...], operands: Sequence[torch.Tensor]) -> None:
        self.spec, self.steps, self.sizes = spec, steps, sizes
        self.named = dict(zip(spec.size_names, sizes, strict=True))
        self.call = launch.recorded(operands, sizes)
        self.device = operands[spec.query.operand].device
        self.several = self.device.type == "cuda" and torch.cuda.device_count() > 1
        self.bound: Any = None
        self.nothing = not steps.plans      # there is no element to write

    def run(self, operands: Sequence[torch.Tensor], stats: torch.Tensor, seed: torch.Tensor | None) -> torch.Tensor:
        """Launch; on the first call climb down until a plan is taken."""
        out = _allocate(self.spec, self.sizes, operands[self.spec.query.operand])
        tensors: dict[object, torch.Tensor | None] = {**dict(enumerate(operands)), "stats": stats.contiguous(), "weights": out, "seed": seed}
        if self.nothing:
            return out
        if self.several:
            with torch.cuda.device(self.device):
                self._launch(tensors, operands)
        else:
            self._launch(tensors, operands)
        return out

    def _launch(self, tensors: dict[object, torch.Tensor | None], operands: Sequence[torch.Tensor]) -> None:
        if self.bound is not None:
            return self.bound(tensors)

        def attempt(plan: KernelPlan) -> Any:
            bound = self._bind(plan, tensors, operands)
            bound(tensors)
            return bound

        self.bound = self.steps.first_that_runs(attempt)
        return None

    def _bind(self, plan: KernelPlan, tensors: dict[object, torch.Tensor | None], operands: Sequence[torch.Tensor]) -> Any:
        kernel = emit(self.spec, plan, WEIGHTS)
        programs = math.ceil(self.named["i"] / plan.block_m) * math.prod(self.named[b] for b in self.spec.batch)
        integers = numbers(kernel, self.named, operands, tensors)
        called = launch.caller(function(self.spec, plan, WEIGHTS, self.call), kernel, plan, (programs, 1, 1), integers)
        order = list(tensors)
        together = Together([(called, [order.index(p.operand) for p in kernel.pointers])], self.device)
        return lambda now: together(list(now.values()))


def _allocate(spec: AttentionSpec, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Memory that the kernel writes all of."""
    return allocate_weights(spec, sizes, like)
