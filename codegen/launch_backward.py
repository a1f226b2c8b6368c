"""From a call of the backward pass to running kernels: which gradients, whose elements, which kernels, in what order.

    grad_q, grad_k, grad_v = backward(spec, grad_out, (q, k, v), out, stats, sizes, seed, (True, True, True))

Every element of a gradient is written by one program. Where two roles read the same operand each has a gradient of its own and
they are added; what an index map does not reach stays zero.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import tuning
from ..program import axis, const
from ..reference import check_call
from ..spec import AttentionSpec, dtype_of
from ..tilemap import mapped
from ..walker import backward_extra_terms
from . import autotune, cache, header, launch
from .arguments import Unsupported, number
from .backward import MARKED, emit
from .chain import chain, row_buffers, sweeps
from .diagonals import count, gathered
from .fallback import Steps
from .jobs import Captured, Job, axes_of
from .launcher import Launch, Together, contiguous, empty
from .owners import shared_axes
from .plan import KernelPlan, Request
from .plan_backward import arranged, candidates, choices, roomier as roomier_plans
from .reads import described, pairs, uneven
from .sums import Read
from .task import Role, Task, task
from .tiles import Device, present

Gradients = list["torch.Tensor | None"]
Named = Mapping[object, "torch.Tensor | None"]
"""The tensors of a call: operands by number, the others by name."""
Tuned = tuple[Sequence[KernelPlan], autotune.Key]
Buffer = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Name, shape, strides and dtype."""
Run = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, torch.Tensor, "torch.Tensor | None"], Gradients]

_runs: dict[object, Run] = {}
_functions: dict[tuple[AttentionSpec, KernelPlan, Job], Any] = {}
_MOST_RUNS = 4096


def backward(spec: AttentionSpec, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
             sizes: Sequence[int], seed: torch.Tensor | None, needs: Sequence[bool]) -> Gradients:
    """The gradients of the operands that `needs` names, each contiguous, of the operand's shape and dtype; None elsewhere.

    Args: as of `attnfuse.walker.backward`.

    Raises:
        Unsupported: no kernel can be generated for these gradients; nothing was computed.
        ValueError: the arguments do not fit the spec.
    """
    layouts = tuple([(t.shape, t.stride(), t.dtype, t.device) for t in (grad_out, out, stats, *operands)])
    key = (spec, tuple(sizes), layouts, tuple(needs), launch.aligned((grad_out, *operands)), launch.where(seed),
           torch.backends.cuda.matmul.allow_tf32)
    run = _runs.get(key)
    if run is None:
        check_call(spec, operands, sizes, seed)
        if len(_runs) >= _MOST_RUNS:
            _runs.clear()
        run = _runs[key] = _prepare(spec, grad_out, operands, out, stats, tuple(sizes), tuple(needs))
    return run(grad_out, operands, out, stats, seed)


# ---- deciding

def plans(spec: AttentionSpec, tensors: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], sizes: Mapping[str, int], device: Device,
          job: Job) -> tuple[KernelPlan, ...]:
    """The plans of one kernel that fit, best first; `tensors` are grad_out and the result."""
    return candidates(spec, request_for(spec, tensors, operands, sizes, device), device, job)


def roomier(spec: AttentionSpec, tensors: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], sizes: Mapping[str, int], device: Device,
            job: Job, preferred: KernelPlan) -> tuple[KernelPlan, ...]:
    """What is tried where one of `plans` spills."""
    return roomier_plans(spec, request_for(spec, tensors, operands, sizes, device), device, job, preferred)


def request_for(spec: AttentionSpec, tensors: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], sizes: Mapping[str, int],
                device: Device) -> Request:
    """What the planner may know of a call."""
    wide = launch.is_wide(spec, operands, dict(sizes), tensors)
    own = {"q": operands[spec.query.operand], "k": operands[spec.key.operand], "v": operands[spec.value.operand], "do": tensors[0]}
    own |= {role: operands[number] for role, number in pairs(spec).items()}
    return header.request_of(spec, dict(sizes), wide, launch.precision(device), described(spec, sizes, own), uneven(spec, own))


# ---- preparing and launching

def _prepare(spec: AttentionSpec, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
             sizes: tuple[int, ...], needs: tuple[bool, ...]) -> Run:
    """A launcher for one layout: for each kernel the first plan that the device takes."""
    named = dict(zip(spec.size_names, sizes, strict=True))
    device = operands[spec.query.operand].device
    launch.check_supported(spec, operands, sizes)
    shape = tuple(named[a] for a in spec.out_axes)
    if tuple(grad_out.shape) != shape or tuple(out.shape) != shape or tuple(stats.shape) != (*shape[:-1], 2):
        raise ValueError(f"gradient, result and statistics of shapes {tuple(grad_out.shape)}, {tuple(out.shape)} and {tuple(stats.shape)} "
                         f"for a result of shape {shape}")
    if stats.dtype != torch.float32 or grad_out.dtype != out.dtype or str(out.dtype) != f"torch.{spec.out_dtype}":
        raise Unsupported(f"gradient, result and statistics in {grad_out.dtype}, {out.dtype} and {stats.dtype}")
    used = {spec.query.operand, spec.key.operand, spec.value.operand, *spec.captured}
    if any(t.device != device for t in (grad_out, out, stats, *(operands[n] for n in used))):
        raise Unsupported("the operands, the result and its gradient are on different devices")
    found = mapped(spec) if spec.tiles is not None else None
    if found is not None and any(needs[n] for n in found.floats):
        raise Unsupported("a gradient of a mask that full tiles do not read")
    try:
        chain(spec, named["d"], named["e"])
        wanted = task(spec, operands, named, needs)
    except ValueError as problem:
        raise Unsupported(f"a score or weight program without a derivative ({problem})") from problem
    if math.prod(shape) == 0 or named["j"] == 0:
        wanted = Task()
    if wanted.jobs and device.type != "cuda" and not launch.interpreting():
        raise Unsupported(f"a generated kernel needs a GPU; the operands are on {device}")
    entry = present(device)
    request = request_for(spec, (grad_out, out), operands, named, entry)
    wanted = replace(wanted, jobs=arranged(spec, request, entry, wanted.jobs))
    offered = {job: Steps(list(candidates(spec, request, entry, job)), functools.partial(roomier_plans, spec, request, entry, job)) for job in wanted.jobs}
    for job, steps in offered.items():
        for plan in steps.plans:
            emit(spec, plan, job)      # what no kernel can follow shows here, before anything runs
    tuned: dict[Job, Tuned] = {}
    if tuning.asked(spec) and autotune.possible(device):
        where = launch.class_of_call(request, entry)
        tuned = {job: ([c.plan for c in choices(spec, request, entry, job)], autotune.Key.of(spec, repr(job), where, entry.name))
                 for job in wanted.jobs if job.kind != "rows"}
    return _Backward(spec, sizes, needs, wanted, offered, launch.recorded(operands, sizes), device, tuned).run


@dataclass(frozen=True)
class Bound:
    """What launches a kernel, on which tensors, and how many queries its tile has."""

    launch: Launch
    pointers: tuple[object, ...]
    block: int = 0

    def __call__(self, tensors: Named) -> None:
        self.launch([tensors[p] for p in self.pointers])

    def among(self, order: Sequence[object]) -> tuple[Launch, list[int]]:
        """With the places of its tensors among others, as `Together` wants it."""
        return self.launch, [order.index(p) for p in self.pointers]


@dataclass
class _Kernel:
    """One kernel of a layout: the plans that are left, those to be timed, and, once one ran, what launches it."""

    job: Job
    steps: Steps
    tuned: Tuned | None = None
    bound: Bound | None = None


class _Backward:
    """One layout's backward pass: buffers, then the kernels, each on the first of its plans that the device holds. What the layout
    decides is worked out once: which buffers there are and how they become gradients."""

    def __init__(self, spec: AttentionSpec, sizes: tuple[int, ...], needs: tuple[bool, ...], wanted: Task,
                 steps: Mapping[Job, Steps], call: header.Call, device: torch.device,
                 tuned: Mapping[Job, Tuned] | None = None) -> None:
        self.spec, self.sizes, self.needs, self.task, self.call, self.device = spec, sizes, needs, wanted, call, device
        self.named = dict(zip(spec.size_names, sizes, strict=True))
        self.kernels = [_Kernel(job, steps[job], (tuned or {}).get(job)) for job in wanted.jobs]
        self.along = {c.label: kernel for kernel in self.kernels if kernel.job.kind == "diagonals" for c in kernel.job.captured}
        self.several = device.type == "cuda" and torch.cuda.device_count() > 1
        self.rows = math.prod(self.named[b] for b in spec.batch)
        self.shapes = [shape for shape, _ in call.operands]
        self.dtypes = [dtype_of(o.dtype) for o in spec.operands]
        self.direct = frozenset(x.label for x in wanted.reads if self._is_gradient(x))
        self.together: Together | None = None
        self.scratch: list[Buffer] = []
        self.zeros: list[Buffer] = []
        for role in wanted.roles:
            self._place_role(role)
        for one in wanted.reads:
            self._place_read(one)
        if wanted.jobs:
            self._place_rows()
        self.order: tuple[object, ...] = (*range(len(self.shapes)), "grad_out", "out", "stats", "seed", *(b[0] for b in (*self.scratch, *self.zeros)))
        self.reads = [Read.of(spec, x, self.shapes[x.operand], self.named, device) for x in wanted.reads if x.label not in self.direct]
        self.summed = sorted({x.operand for x in self.reads} | wanted.terms)
        self.parts = [self._parts(n) if need else () for n, need in enumerate(needs)]
        self.whole = {r.access.operand: self.order.index(r.name) for r in wanted.roles if self._alone(r.access.operand)}
        self.made = any(need and n not in self.whole for n, need in enumerate(needs))

    def run(self, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
            seed: torch.Tensor | None) -> Gradients:
        """All gradients."""
        if self.several:
            with torch.cuda.device(self.device):
                return self._run(grad_out, operands, out, stats, seed)
        return self._run(grad_out, operands, out, stats, seed)

    def _run(self, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
             seed: torch.Tensor | None) -> Gradients:
        tensors: list[torch.Tensor | None] = [*operands, grad_out, out, stats.contiguous(), seed]
        tensors += [empty(shape, strides, dtype, self.device) for _, shape, strides, dtype in self.scratch]
        tensors += [empty(shape, strides, dtype, self.device).zero_() for _, shape, strides, dtype in self.zeros]
        if self.together is not None:
            self.together(tensors)
        else:
            self._first(dict(zip(self.order, tensors, strict=True)), operands)
        if self.made:
            return self._made(tensors, operands, stats, seed)
        return [tensors[self.whole[n]] if need else None for n, need in enumerate(self.needs)]

    def _made(self, tensors: Sequence[torch.Tensor | None], operands: Sequence[torch.Tensor], stats: torch.Tensor,
              seed: torch.Tensor | None) -> Gradients:
        """The gradients where some are not what a kernel wrote."""
        named: Named = dict(zip(self.order, tensors, strict=True))
        sums = self._sums(named, operands, stats, seed) if self.summed else {}
        return [tensors[self.whole[n]] if n in self.whole else self._gradient(n, named, sums) if need else None
                for n, need in enumerate(self.needs)]

    def _place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, full: bool = True) -> None:
        """A contiguous buffer: that kernels write all of, or that begins as zeros."""
        (self.scratch if full else self.zeros).append((name, shape, contiguous(shape), dtype))

    def _place_rows(self) -> None:
        """What the row kernel leaves for the others."""
        depths = self.named["d"], self.named["e"]
        for name in row_buffers(chain(self.spec, *depths)):
            self._place(name, (self.rows, -(-self.named["i"] // 4) * 4), torch.float32)        # rows of 16 bytes, for descriptors
        if sweeps(self.spec, *depths):
            self._place("unseen", (self.rows, -(-self.named["i"] // MARKED)), torch.int8)

    def _alone(self, number: int) -> bool:
        """Whether the gradient of an operand is what one kernel writes, so that it needs no sum in float32."""
        roles = sum(r.access.operand == number for r in self.task.roles)
        return roles + sum(r.operand == number for r in self.task.reads) + (number in self.task.terms) == 1

    def _place_role(self, role: Role) -> None:
        """The gradient that a role's kernel writes; where an operand has several they are rounded after the sum."""
        number = role.access.operand
        dtype = self.dtypes[number] if self._alone(number) else torch.float32
        self._place(role.name, self.shapes[number], dtype, self.task.covered[role.name])

    def _is_gradient(self, one: Captured) -> bool:
        """Whether the buffer of a read is the gradient of its tensor, element by element."""
        axes, shape = axes_of(self.spec, one), self.shapes[one.operand]
        place = [x for n, x in enumerate(one.node.args) if x != const(0) or shape[n] != 1]
        return place == [axis(a) for a in axes] and math.prod(shape) == math.prod(self.named[a] for a in axes) and self._alone(one.operand)

    def _place_read(self, one: Captured) -> None:
        """The buffer of a captured read; tiles that the kernel of the queries skips stay zero. For block diagonals it suits every plan."""
        along = self.along.get(one.label)
        if along is not None:
            plans = [*along.steps.plans, *(r for p in along.steps.plans for r in along.steps.roomier(p)), *(along.tuned[0] if along.tuned else ())]
            return self._place(one.label, (max(math.prod(self._diagonal_tiles(along.job, p.block_m)) for p in plans),), torch.float32)
        dtype = self.dtypes[one.operand] if one.label in self.direct else torch.float32
        shape = tuple(self.named[a] for a in axes_of(self.spec, one))
        skips = {"i", "j"} <= one.axes and any(one in job.captured for job in self.task.jobs if job.kind == "queries")
        self._place(one.label, shape, dtype, not skips)

    def _parts(self, number: int) -> tuple[str, ...]:
        """The names of the buffers that add up to an operand's gradient, beside what `_sums` gives."""
        return (*(r.name for r in self.task.roles if r.access.operand == number),
                *(x.label for x in self.task.reads if x.operand == number and x.label in self.direct))

    def _diagonal_tiles(self, job: Job, block: int) -> tuple[int, ...]:
        """What a kernel of block diagonals stores for a read: (batch…, block diagonals, block, block)."""
        kept = (self.named[b] for b in self.spec.batch if b not in job.walked)
        return (*kept, count(self.named["i"], self.named["j"], block), block, block)

    def _by_distance(self, label: str, buffer: torch.Tensor) -> torch.Tensor:
        """What a kernel of block diagonals summed for a read, (batch…, distances)."""
        kernel = self.along[label]
        assert kernel.bound is not None         # it wrote the buffer
        shape = self._diagonal_tiles(kernel.job, kernel.bound.block)
        return gathered(buffer[:math.prod(shape)].view(shape), self.named["i"], self.named["j"])

    def _sums(self, tensors: Named, operands: Sequence[torch.Tensor], stats: torch.Tensor,
              seed: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """By operand, what captured reads and extra terms add up to, in float32."""
        total = {n: torch.zeros(self.shapes[n], dtype=torch.float32, device=self.device) for n in self.summed}
        for one in self.reads:
            values = tensors[one.label]
            if one.distances:
                values = self._by_distance(one.label, values)  # type: ignore[arg-type]  # allocated for every read
            one.add(total[one.operand], values, operands, self.named)  # type: ignore[arg-type]
        if self.task.terms:
            shape = [*(self.named[b] for b in self.spec.batch), self.named["i"]]
            delta = tensors["delta"][:, :self.named["i"]].reshape(shape)  # type: ignore[index]  # there is a row kernel
            backward_extra_terms(self.spec, operands, stats, delta, self.sizes, seed, {n: total[n] for n in self.task.terms})
        return total

    def _gradient(self, number: int, tensors: Named, sums: Mapping[int, torch.Tensor]) -> torch.Tensor:
        parts = [tensors[name].view(self.shapes[number]) for name in self.parts[number]]  # type: ignore[union-attr]  # allocated above
        parts += [sums[number]] if number in sums else []
        if not parts:
            return torch.zeros(self.shapes[number], dtype=self.dtypes[number], device=self.device)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(self.dtypes[number])

    def _first(self, tensors: Named, operands: Sequence[torch.Tensor]) -> None:
        """Run the kernels for the first time; from then on they are launched together."""
        for kernel in self.kernels:
            if kernel.bound is not None:            # an earlier first time ended at a later kernel
                kernel.bound(tensors)
            else:
                self._launch(kernel, tensors, operands)
        order = list(tensors)
        found = [kernel.bound for kernel in self.kernels if kernel.bound is not None]
        self.together = Together([x.among(order) for x in found], self.device)

    def _launch(self, kernel: _Kernel, tensors: Named, operands: Sequence[torch.Tensor]) -> None:
        """Run a kernel for the first time: look for the fastest plan if asked to, and climb down until one is taken."""
        job = kernel.job

        def attempt(plan: KernelPlan, into: Named = tensors) -> Bound:
            bound = self._bind(job, plan, into, operands)
            bound(into)
            return bound

        if kernel.tuned is not None and kernel.steps.plans:
            plans, key = kernel.tuned
            scratch = {n: _scratch_like(t) if n in self._written(job) and t is not None else t for n, t in tensors.items()}

            def trial(plan: KernelPlan) -> tuple[Callable[[], object], Sequence[torch.Tensor]]:
                bound, given = attempt(plan, scratch), list(scratch.values())
                alone = Together([bound.among(list(scratch))], self.device)
                return (lambda: alone(given)), [scratch[n] for n in self._written(job)]  # type: ignore[misc]  # all are there

            kernel.steps.prefer(autotune.choose(key, plans, trial, autotune.tolerance(self.spec)))
        kernel.bound = kernel.steps.first_that_runs(attempt)

    def _written(self, job: Job) -> tuple[str, ...]:
        """The names of what a kernel writes, other than that of the rows."""
        roles = {"grad_q": job.query, "grad_k": job.key, "grad_v": job.value}
        return (*(r.name for r in self.task.roles if roles[r.name]), *(c.label for c in job.captured))

    def _bind(self, job: Job, plan: KernelPlan, tensors: Named, operands: Sequence[torch.Tensor]) -> Bound:
        kernel = emit(self.spec, plan, job)
        integers = numbers(kernel, self.named, operands, tensors)
        call = launch.caller(function(self.spec, plan, job, self.call), kernel, plan, (self._programs(job, plan), 1, 1), integers)
        return Bound(call, tuple(p.operand for p in kernel.pointers), plan.block_m)

    def _programs(self, job: Job, plan: KernelPlan) -> int:
        """How many programs a kernel takes: one a tile, of queries, of keys (for all heads that share them) or of scores, or a block diagonal."""
        if job.kind == "diagonals":
            return math.prod(self._diagonal_tiles(job, plan.block_m)[:-2])
        queries, keys = math.ceil(self.named["i"] / plan.block_m), math.ceil(self.named["j"] / plan.block_n)
        if job.kind == "tiles":
            return queries * keys * math.prod(self.named[b] for b in self.spec.batch if b not in job.walked)
        if job.kind != "keys":
            return queries * self.rows
        owners = {x.name: x.count(self.named) for x in shared_axes(self.spec)}
        return keys * math.prod(owners.get(b, self.named[b]) for b in self.spec.batch)


def numbers(kernel: Any, sizes: Mapping[str, int], operands: Sequence[torch.Tensor], tensors: Named) -> list[int]:
    """What the host passes for a kernel's integers."""
    own = {name: t.stride() for name, t in tensors.items() if isinstance(name, str) and t is not None}
    shapes, strides = [tuple(t.shape) for t in operands], [tuple(t.stride()) for t in operands]
    return [number(a, sizes, shapes, strides, own) for a in kernel.integers]


def _scratch_like(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same layout, for trials."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def function(spec: AttentionSpec, plan: KernelPlan, job: Job, call: header.Call) -> Any:
    """The Triton function of one backward kernel, from its file on disk."""
    known = _functions.get((spec, plan, job))
    if known is None:
        kernel = emit(spec, plan, job)
        name = f"{kernel.name}_{cache.key(spec, plan, header.versions(), repr(job))}"
        path = cache.store(name, lambda: header.render_backward(spec, plan, kernel, call, job))
        known = _functions[spec, plan, job] = getattr(cache.load(path), kernel.name)
    return known
