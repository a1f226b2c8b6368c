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
from dataclasses import dataclass, replace

import torch

from ..spec import AttentionSpec, dtype_of
from . import plan as kernel_plan
from . import plan_backward, plan_forward
from .diagonals import count
from .estimate import Work, cycles
from .header import request_of, visited
from .jobs import Captured, Job, axes_of, captured, jobs
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
             plans: Mapping[Job, KernelPlan] | None = None) -> tuple[Prediction, ...]:
    """The kernels of the backward pass of a call: that of the rows, of the keys, of the queries, and those of tiles and of block diagonals for
    what is read at (i, j) and shared by attentions.

    Args: as of `forward`; `needs` names the operands whose gradients are wanted, `plans` those by kernel that are not the preferred ones.

    Raises:
        ValueError: as of `forward`, or an operation without a derivative.
    """
    request = assumed(spec, sizes, device)
    roles = frozenset(r for r in ("query", "key", "value") if needs[getattr(spec, r).operand])
    result, row = _result(spec, sizes), _statistics(spec, sizes)
    streamed = _time(device, 0, 2 * result + 2 * row)
    out = [Prediction("rows", 2 * result + 2 * row, row, 2 * result + 2 * row, 0, 0, 0.0, streamed, expected=streamed)]
    for job in plan_backward.arranged(spec, request, device, jobs(spec, sizes, roles, captured(spec, needs), False)[1:]):
        plan = (plans or {}).get(job) or plan_backward.candidates(spec, request, device, job)[0]
        out.append(_backward(job, plan, spec, sizes, held, request, device))
    return tuple(out) if len(out) > 1 else ()


def _backward(job: Job, plan: KernelPlan, spec: AttentionSpec, sizes: dict[str, int], held: Sequence[int], request: Request,
              device: Device) -> Prediction:
    """One of them that walks tiles."""
    rows, columns = math.ceil(sizes["i"] / plan.block_m), math.ceil(sizes["j"] / plan.block_n)
    own_rows = _once(spec, held, ("query",)) + _result(spec, sizes) + _statistics(spec, sizes)      # grad_out, and what is known of a row
    own_keys, read = _once(spec, held, ("key", "value")), sum(held) + _result(spec, sizes) + _statistics(spec, sizes)
    if not job.arrivals:                    # the kernel of the values alone reads none
        read -= own_keys - _once(spec, held, ("key",))
    written = _once(spec, held, [r for r, wanted in (("query", job.query), ("key", job.key), ("value", job.value)) if wanted])
    written += sum(_buffer(spec, sizes, held, job, one, plan.block_m) for one in job.captured)
    work_, share = plan_backward.work_for(spec, request, device, job), visited(spec, sizes, plan.block_m)
    name = "values" if job.value and not job.arrivals else job.kind
    predicted = lambda swept, tiles, products: _predict(name, plan, spec, request, device, work_, read - swept, written, swept, tiles, share, products)
    if job.kind == "keys":
        return predicted(own_rows, columns, (1 + job.arrivals + job.key + job.value) / 2)
    if job.kind == "queries":
        return predicted(own_keys, rows, 1 + job.query / 2)
    # A tile takes its own rows and keys, of every attention that is walked.
    programs = rows * columns if job.kind == "tiles" else rows + columns - 1
    programs *= math.prod(sizes[b] for b in spec.batch if b not in job.walked)
    found = predicted(own_rows + own_keys, max(1, math.ceil(programs / max(request.batch, 1))), 1.0)
    return replace(found, most=max(found.moved, read + written + int(share * (own_rows * columns + own_keys * rows))), programs=programs)


def _buffer(spec: AttentionSpec, sizes: dict[str, int], held: Sequence[int], job: Job, one: Captured, block: int) -> int:
    """Bytes that a kernel writes for a captured read: of the tensor's own dtype where that is its gradient, else of float32."""
    if job.kind == "diagonals":
        return 4 * math.prod(sizes[b] for b in spec.batch if b not in job.walked) * count(sizes["i"], sizes["j"], block) * block ** 2
    elements = math.prod(sizes[a] for a in axes_of(spec, one))
    whole = held[one.operand]
    return whole if elements * dtype_of(spec.operands[one.operand].dtype).itemsize == whole else 4 * elements


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
