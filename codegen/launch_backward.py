"""From a call of the backward pass to running kernels: which gradients, whose elements, which kernels, in what order.

    grad_q, grad_k, grad_v = backward(spec, grad_out, (q, k, v), out, stats, sizes, seed, (True, True, True))

Every element of a gradient is written by one program. Where two roles read the same operand each has a gradient of its own and
they are added; what an index map does not reach stays zero.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..adjoint import ZERO, adjoint
from ..program import loads
from ..reference import check_call
from ..spec import Access, AttentionSpec
from . import cache, header, launch
from .arguments import Unsupported, number
from .backward import chain, emit, flat, sweeps
from .owners import covers, owned, shared_axes
from .plan import KernelPlan
from .plan_backward import candidates
from .tiles import Device, present

Gradients = list["torch.Tensor | None"]
Run = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, torch.Tensor, "torch.Tensor | None"], Gradients]

_runs: dict[object, Run] = {}
_functions: dict[tuple[AttentionSpec, KernelPlan, str], Any] = {}
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
    key = (spec, tuple(sizes), layouts, tuple(needs), torch.backends.cuda.matmul.allow_tf32)
    run = _runs.get(key)
    if run is None:
        check_call(spec, operands, sizes, seed)
        if len(_runs) >= _MOST_RUNS:
            _runs.clear()
        run = _runs[key] = _prepare(spec, grad_out, operands, out, stats, tuple(sizes), tuple(needs))
    return run(grad_out, operands, out, stats, seed)


# ---- deciding

@dataclass(frozen=True)
class Role:
    """Query, key or value: the name of its gradient in the kernels, where it is read, and what enumerates its elements."""

    name: str
    access: Access
    axes: tuple[str, str]


@dataclass(frozen=True)
class Task:
    """What one call layout needs: the roles with a gradient and whether they reach all of their operand; the kernels, in order."""

    roles: tuple[Role, ...]
    covered: Mapping[str, bool]
    kernels: tuple[str, ...]


def task(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Mapping[str, int], needs: Sequence[bool]) -> Task:
    """The kernels that these gradients take.

    Raises:
        Unsupported: a captured tensor needs a gradient, or elements of a gradient have no single owner.
    """
    for expr in (spec.score, spec.weight, *spec.extra_terms):
        for node in loads(expr):
            if node.kind == "float" and needs[int(node.attr)] and adjoint(expr, node) != ZERO:  # type: ignore[arg-type]
                raise Unsupported(f"the gradient of {spec.operands[int(node.attr)].name}, which the scores or weights read: "  # type: ignore[arg-type]
                                  "the generated backward kernels have those of queries, keys and values only")
    shared = shared_axes(spec)
    roles, covered = [], {}
    dead = () if not flat(spec) else ("grad_q", "grad_k")
    for role in (Role("grad_q", spec.query, ("i", "d")), Role("grad_k", spec.key, ("j", "d")), Role("grad_v", spec.value, ("j", "e"))):
        if not needs[role.access.operand] or role.name in dead:
            continue
        lengths = {a: sizes[a] for a in role.axes}
        groups = {x.name: x for x in shared} if role.name != "grad_q" else {}
        for name in spec.batch:
            if name not in groups:
                lengths[name] = sizes[name]
            elif groups[name].group is not None:
                lengths[groups[name].owner] = groups[name].count(sizes)
        access = role.access if role.name == "grad_q" else owned(role.access, shared)
        shape = tuple(operands[access.operand].shape)
        covered[role.name] = covers(access, lengths, sizes, shape, spec.operands[access.operand].name)
        roles.append(role)
    names = {r.name for r in roles}
    kernels = ["rows"] if names else []
    if names & {"grad_k", "grad_v"}:
        kernels.append("_".join(x for x, there in (("keys", "grad_k" in names), ("values", "grad_v" in names)) if there))
    if "grad_q" in names:
        kernels.append("queries")
    return Task(tuple(roles), covered, tuple(kernels))


def plans(spec: AttentionSpec, tensors: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], sizes: Mapping[str, int], device: Device,
          what: str) -> tuple[KernelPlan, ...]:
    """The plans of one kernel that fit, best first; `tensors` are grad_out and the result."""
    wide = launch.is_wide(spec, operands, dict(sizes), tensors)
    request = header.request_of(spec, dict(sizes), wide, launch.precision(device))
    return candidates(spec, request, device, what)


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
    try:
        chain(spec, named["d"], named["e"])
        wanted = task(spec, operands, named, needs)
    except ValueError as problem:
        raise Unsupported(f"a score or weight program without a derivative ({problem})") from problem
    if math.prod(shape) == 0 or named["j"] == 0:
        wanted = Task((), {}, ())
    if wanted.kernels and device.type != "cuda" and not launch.interpreting():
        raise Unsupported(f"a generated kernel needs a GPU; the operands are on {device}")
    offered = {what: plans(spec, (grad_out, out), operands, named, present(device), what) for what in wanted.kernels}
    for what, some in offered.items():
        for plan in some:
            emit(spec, plan, what)      # what no kernel can follow shows here, before anything runs
    return _Backward(spec, sizes, needs, wanted, offered, launch.recorded(operands, sizes), device).run


class _Backward:
    """One layout's backward pass: buffers, then the kernels, each on the first of its plans that the device holds."""

    def __init__(self, spec: AttentionSpec, sizes: tuple[int, ...], needs: tuple[bool, ...], wanted: Task,
                 plans: Mapping[str, tuple[KernelPlan, ...]], call: header.Call, device: torch.device) -> None:
        self.spec, self.sizes, self.needs, self.task, self.call, self.device = spec, sizes, needs, wanted, call, device
        self.named = dict(zip(spec.size_names, sizes, strict=True))
        self.plans = {what: list(some) for what, some in plans.items()}
        self.bound: dict[str, Any] = {}
        self.several = device.type == "cuda" and torch.cuda.device_count() > 1
        self.rows = math.prod(self.named[b] for b in spec.batch)

    def run(self, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
            seed: torch.Tensor | None) -> Gradients:
        """All gradients."""
        if self.several:
            with torch.cuda.device(self.device):
                return self._run(grad_out, operands, out, stats, seed)
        return self._run(grad_out, operands, out, stats, seed)

    def _run(self, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
             seed: torch.Tensor | None) -> Gradients:
        tensors: dict[object, torch.Tensor | None] = dict(enumerate(operands))
        tensors |= {"grad_out": grad_out, "out": out, "stats": stats.contiguous(), "seed": seed, **self._buffers()}
        for role in self.task.roles:
            tensors[role.name] = self._allocate(role, operands[role.access.operand])
        for what in self.task.kernels:
            self._launch(what, tensors, operands)
        return [self._gradient(n, t, tensors) if self.needs[n] else None for n, t in enumerate(operands)]

    def _buffers(self) -> dict[str, torch.Tensor]:
        """What the row kernel leaves for the others."""
        if not self.task.kernels:
            return {}
        shape = (self.rows, self.named["i"])
        names = ("shift", "delta") if chain(self.spec, self.named["d"], self.named["e"]).folded else ("shift", "log_sum", "delta")
        found = {n: _scratch(shape, torch.float32, self.device) for n in names}
        if sweeps(self.spec):
            found["unseen"] = torch.zeros((self.rows, 2), dtype=torch.int32, device=self.device)
        return found

    def _alone(self, role: Role) -> bool:
        return sum(r.access.operand == role.access.operand for r in self.task.roles) == 1

    def _allocate(self, role: Role, operand: torch.Tensor) -> torch.Tensor:
        """The gradient that a role's kernel writes; where roles share an operand their gradients are rounded after the sum."""
        dtype = operand.dtype if self._alone(role) else torch.float32
        if self.task.covered[role.name]:
            return _scratch(operand.shape, dtype, operand.device)
        return torch.zeros(operand.shape, dtype=dtype, device=operand.device)

    def _gradient(self, number: int, operand: torch.Tensor, tensors: Mapping[object, torch.Tensor | None]) -> torch.Tensor:
        parts = [tensors[r.name] for r in self.task.roles if r.access.operand == number]
        if not parts:
            return torch.zeros(operand.shape, dtype=operand.dtype, device=operand.device)
        total = parts[0]
        for part in parts[1:]:
            total = total + part  # type: ignore[operator]  # roles have gradients
        return total.to(operand.dtype)  # type: ignore[union-attr]

    def _launch(self, what: str, tensors: Mapping[object, torch.Tensor | None], operands: Sequence[torch.Tensor]) -> None:
        """Run one kernel; on the first call climb down until a plan is taken."""
        if what in self.bound:
            return self.bound[what](tensors)
        while True:
            plan = self.plans[what][0]
            bound = self._bind(what, plan, tensors, operands)
            try:
                bound(tensors)
            except Exception as problem:
                if len(self.plans[what]) == 1 or not launch.too_large(problem):
                    raise
                self.plans[what].pop(0)
                continue
            self.bound[what] = bound
            return None

    def _bind(self, what: str, plan: KernelPlan, tensors: Mapping[object, torch.Tensor | None],
              operands: Sequence[torch.Tensor]) -> Callable[[Mapping[object, "torch.Tensor | None"]], None]:
        kernel = emit(self.spec, plan, what)
        integers = numbers(kernel, self.named, operands, tensors)
        call = launch.caller(function(self.spec, plan, what, self.call), kernel, plan, (self._programs(what, plan), 1, 1), integers)
        pointers = [p.operand for p in kernel.pointers]
        return lambda now: call([now[p] for p in pointers])

    def _programs(self, what: str, plan: KernelPlan) -> int:
        """How many programs a kernel takes: one a tile, of queries or of keys, and for keys one for all heads that share them."""
        if what in ("rows", "queries"):
            return math.ceil(self.named["i"] / plan.block_m) * self.rows
        owners = {x.name: x.count(self.named) for x in shared_axes(self.spec)}
        return math.ceil(self.named["j"] / plan.block_n) * math.prod(owners.get(b, self.named[b]) for b in self.spec.batch)


def numbers(kernel: Any, sizes: Mapping[str, int], operands: Sequence[torch.Tensor], tensors: Mapping[object, torch.Tensor | None]) -> list[int]:
    """What the host passes for a kernel's integers."""
    own = {name: t.stride() for name, t in tensors.items() if isinstance(name, str) and t is not None}
    shapes, strides = [tuple(t.shape) for t in operands], [tuple(t.stride()) for t in operands]
    return [number(a, sizes, shapes, strides, own) for a in kernel.integers]


def _scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a kernel writes all of."""
    return torch.empty(shape, dtype=dtype, device=device)


def function(spec: AttentionSpec, plan: KernelPlan, what: str, call: header.Call) -> Any:
    """The Triton function of one backward kernel, from its file on disk."""
    known = _functions.get((spec, plan, what))
    if known is None:
        kernel = emit(spec, plan, what)
        name = f"{kernel.name}_{cache.key(spec, plan, header.versions())}"
        path = cache.store(name, lambda: header.render_backward(spec, plan, kernel, call, what))
        known = _functions[spec, plan, what] = getattr(cache.load(path), kernel.name)
    return known
