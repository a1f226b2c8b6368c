"""What the generated kernels of a call will move, compute, and take: the numbers beside which a measurement is put.

    found = forward(spec, sizes, held, CARDS["h100"])
    found.moved, found.flops, found.seconds

Traffic is that of the main memory: each kernel reads every operand once and writes its results once. What all programs of an attention
sweep (K and V in the forward pass) comes from the cache that the processors share, as long as the attentions in flight fit it; where they do
not, programs that run at one time still walk it side by side, so it is counted once for every round of the processors over the tiles.
Eager kernels are counted by the same rule (`attnfuse.traffic`), so the two may be subtracted. `Prediction.most` is without any cache.

Invariant: `Prediction.moved` is never less than the operands and results taken once, `Prediction.most` never less than `moved`.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..spec import AttentionSpec, dtype_of
from . import plan as kernel_plan
from . import plan_backward, plan_forward
from .estimate import Work, cycles
from .header import request_of, visited
from .jobs import Job
from .plan import KernelPlan, Request
from .reads import dense, dense_uneven
from .tiles import Device, work

STATISTICS = 8
"""Bytes of the two statistics of a row."""


@dataclass(frozen=True)
class Prediction:
    """One kernel, or several one after the other (`total`).

    Attributes:
        name: of the kernel.
        moved: bytes of main memory read and written, where the shared cache keeps what it can hold. written: those written.
        most: the same where no tile stays in a cache, so that every program reads what it sweeps.
        flops: of the products, over the tiles that are visited.
        programs, waves: thread blocks, and how often the processors are filled by them; the last wave may be part of one.
        seconds: max(flops / peak, bytes / bandwidth), times what the last wave wastes where arithmetic decides; None where
            the device's rates are not known.
        plan: tile shape and reasons; None for several kernels.
        expected: seconds by the model of `estimate`, never less than what the bytes take; None as `seconds`.
    """

    name: str
    moved: int
    written: int
    most: int
    flops: int
    programs: int
    waves: float
    seconds: float | None
    plan: KernelPlan | None = None
    expected: float | None = None

    @property
    def tail(self) -> float:
        """The share of the processors' time that the last, partly filled wave wastes."""
        return 1 - self.waves / math.ceil(self.waves) if self.waves else 0.0

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.moved if self.moved else math.inf


def total(name: str, parts: Sequence[Prediction]) -> Prediction:
    """Several kernels one after the other."""
    times = [p.seconds for p in parts if p.seconds is not None]
    expected = [p.expected for p in parts if p.expected is not None]
    moved, written, most, flops, programs = (sum(getattr(p, n) for p in parts) for n in ("moved", "written", "most", "flops", "programs"))
    return Prediction(name, moved, written, most, flops, programs, sum(p.waves for p in parts), sum(times) if len(times) == len(parts) else None,
                      expected=sum(expected) if len(expected) == len(parts) else None)


def forward(spec: AttentionSpec, sizes: dict[str, int], held: Sequence[int], device: Device, plan: KernelPlan | None = None) -> Prediction:
    """The forward kernel of a call.

    Args:
        spec: the attention.
        sizes: its lengths by name.
        held: bytes of the distinct elements of each operand, which say how far heads share keys and values.
        device: where it would run.
        plan: by default the preferred one.

    Raises:
        ValueError: there is no kernel (float64, or a head dimension above 256).
    """
    request = assumed(spec, sizes, device)
    plan = plan or plan_forward.candidates(spec, request, device)[0]
    share = visited(spec, sizes, plan.block_m)
    swept = _once(spec, held, ("key", "value"))
    written = _result(spec, sizes) + _statistics(spec, sizes)
    tiles = math.ceil(sizes["i"] / plan.block_m)
    work_ = plan_forward.work_for(spec, request, device)
    return _predict("forward", plan, spec, request, device, work_, sum(held) - swept, written, swept, tiles, share, 1.0)


def weights(spec: AttentionSpec, sizes: dict[str, int], held: Sequence[int], device: Device, plan: KernelPlan | None = None) -> Prediction:
    """The kernel that writes weights which are wanted beside the result; all as of `forward`, `spec` being that of the weights."""
    request = assumed(spec, sizes, device)
    plan = plan or plan_forward.candidates(spec, request, device)[0]
    swept = _once(spec, held, ("key",))
    own, written = sum(held) - swept + _statistics(spec, sizes), math.prod(sizes[a] for a in spec.weight_axes) * dtype_of(spec.out_dtype).itemsize
    share = visited(spec, sizes, plan.block_m)
    # One of forward's two products; the spec's values are its keys, of the same depth.
    work_ = plan_forward.work_for(spec, request, device)
    return _predict("weights", plan, spec, request, device, work_, own, written, swept, math.ceil(sizes["i"] / plan.block_m), share, 0.5)


def backward(spec: AttentionSpec, sizes: dict[str, int], held: Sequence[int], needs: Sequence[bool], device: Device,
             plans: Mapping[str, KernelPlan] | None = None) -> tuple[Prediction, ...]:
    """The kernels of the backward pass of a call: that of the rows, of the keys and of the queries; captured reads ride along.

    Args: as of `forward`; `needs` names the operands whose gradients are wanted, `plans` those by kernel (``keys``, ``queries``) that
        are not the preferred ones.

    Raises:
        ValueError: as of `forward`.
    """
    request = assumed(spec, sizes, device)
    query, key, value = (needs[a.operand] for a in (spec.query, spec.key, spec.value))
    captured = sum(held[n] for n in spec.captured if needs[n])
    result, row = _result(spec, sizes), _statistics(spec, sizes)
    read = sum(held) + result + row                     # of the two larger kernels: operands, grad_out, what is known of a row
    streamed = _time(device, 0, 2 * result + 2 * row)
    out = [Prediction("rows", 2 * result + 2 * row, row, 2 * result + 2 * row, 0, 0, 0.0, streamed, expected=streamed)]
    if key or value:
        job = Job("keys", key=key, value=value)
        plan = (plans or {}).get("keys") or plan_backward.candidates(spec, request, device, job)[0]
        work_ = plan_backward.work_for(spec, request, device, job)
        swept = _once(spec, held, ("query",)) + result + row
        written = _once(spec, held, [r for r, wanted in (("key", key), ("value", value)) if wanted])
        out.append(_predict("keys", plan, spec, request, device, work_, read - swept, written, swept, math.ceil(sizes["j"] / plan.block_n),
                            visited(spec, sizes, plan.block_m), 1 + (key + value) / 2))
    if query or captured:
        job = Job("queries", query=query)
        plan = (plans or {}).get("queries") or plan_backward.candidates(spec, request, device, job)[0]
        work_ = plan_backward.work_for(spec, request, device, job)
        swept = _once(spec, held, ("key", "value"))
        written = _once(spec, held, ("query",)) * query + captured
        out.append(_predict("queries", plan, spec, request, device, work_, read - swept, written, swept, math.ceil(sizes["i"] / plan.block_m),
                            visited(spec, sizes, plan.block_m), 1 + query / 2))
    return tuple(out) if len(out) > 1 else ()


# ---- parts

def assumed(spec: AttentionSpec, sizes: dict[str, int], device: Device) -> Request:
    """What the planner needs to know of a call that is not there; raises ValueError where no kernel can be generated."""
    if spec.compute_dtype != torch.float32:
        raise ValueError("the kernels compute in float32, not in float64")
    request = request_of(spec, sizes, wide=False, precision="bf16x6" if device.backend == "cuda" else "ieee", described=dense(spec, sizes),
                         uneven=dense_uneven(sizes))
    if max(request.depth, request.value_depth) > plan_forward.LARGEST_HEAD:
        raise ValueError(f"head dimensions {request.depth} and {request.value_depth}; the kernels hold up to {plan_forward.LARGEST_HEAD}")
    return request


def _once(spec: AttentionSpec, held: Sequence[int], roles: Sequence[str]) -> int:
    """Bytes of the operands of some roles, an operand that has several of them once."""
    return sum(held[n] for n in {getattr(spec, r).operand for r in roles})


def _result(spec: AttentionSpec, sizes: dict[str, int]) -> int:
    """Bytes of the result, and of its gradient."""
    return math.prod(sizes[a] for a in spec.out_axes) * dtype_of(spec.out_dtype).itemsize


def _statistics(spec: AttentionSpec, sizes: dict[str, int]) -> int:
    return STATISTICS * math.prod(sizes[a] for a in (*spec.batch, "i"))


def _predict(name: str, plan: KernelPlan, spec: AttentionSpec, request: Request, device: Device, work_: Work, own: int, written: int, swept: int,
             tiles: int, share: float, products: float) -> Prediction:
    """A kernel each of whose programs keeps its own part and sweeps, over its tiles, the operands of its attention.

    Args:
        work_: what it does with a tile.
        own, written: bytes read once, and written. swept: bytes that every program of an attention sweeps.
        tiles: programs of an attention. share: of the tiles that is visited.
        products: how many times the arithmetic of the forward pass.
    """
    at_one_time = math.ceil(device.processors / max(tiles, 1))          # attentions whose programs run at one time
    kept = not device.cache or at_one_time * swept / max(request.batch, 1) <= device.cache
    rounds = 1 if kept else math.ceil(tiles / device.processors)
    moved, most = (own + written + int(swept * times) for times in (rounds, max(tiles * share, rounds)))
    flops = int(products * work(request.batch, request.queries, request.keys, request.depth, request.value_depth, share))
    waves = request.batch * tiles / device.processors
    filled = math.ceil(waves) / waves if waves else 1.0
    parts = 6 if "float32" in kernel_plan.products(spec) else 1        # float32 in three bfloat16 parts
    return Prediction(name, moved, written, most, flops, request.batch * tiles, waves, _time(device, flops * parts * filled, moved), plan,
                      _expected(work_, plan, request, device, moved))


def _expected(work_: Work, plan: KernelPlan, request: Request, device: Device, moved: int) -> float | None:
    """Seconds by the model of a processor; None where the clock is not known."""
    if not device.peak or not device.bandwidth:
        return None
    tile = plan.tile
    taken = cycles(work_.fetched(bool(plan.described)), tile, device, plan.shared, request.queries, request.keys, request.batch)
    return max(taken / (device.peak / (device.processors * device.width)), moved / device.bandwidth)


def _time(device: Device, flops: float, moved: float) -> float | None:
    return max(flops / device.peak, moved / device.bandwidth) if device.peak and device.bandwidth else None
