"""From a call to a running kernel: plan, source, launch. Everything that can be decided once for a call's layout is.

    out, stats = forward(spec, (q, k, v, bias), sizes, seed)

`stats` holds two float32 numbers a row, (maximum, log of the sum of exp(score - maximum)), shape (*batch, i, 2), so that
``weight = exp(score - maximum - log_sum)``.
"""
from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from .. import tuning
from ..program import Expr, walk
from ..reference import check_call
from ..spec import AttentionSpec, dtype_of
from ..tilemap import Mask
from . import autotune, cache, header
from .arguments import Unsupported, number
from .emission import Kernel
from .fallback import Steps
from .forward import emit
from .launcher import Launch, Together, contiguous, empty
from .plan import KernelPlan, Request, tile_loads
from .plan_forward import LARGEST_HEAD, candidates, choices, roomier as roomier_plans
from .reads import described, pairs, uneven
from .space import class_of
from .tiles import Device, present

__all__ = ["Unsupported", "forward", "backward", "weights", "source", "bind", "plans", "check_supported"]

Run = Callable[[Sequence[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]

_runs: dict[object, Run] = {}
_functions: dict[tuple[AttentionSpec, KernelPlan], Any] = {}
_MOST_RUNS = 4096
_PRODUCT_DTYPES = ("float16", "bfloat16", "float32")
_LOADABLE = (*_PRODUCT_DTYPES, "float64", "bool", "uint8", "int8", "int16", "int32", "int64")


def forward(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int],
            seed: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, shape (batch…, i, e), laid out as `spec.out_order` says, and the row statistics, shape (batch…, i, 2).

    Args:
        spec, operands, sizes, seed: as of `attnfuse.reference.reference`.

    Raises:
        Unsupported: no kernel can be generated for this attention or device; nothing was computed.
        ValueError: the arguments do not fit the spec.
    """
    layouts = tuple([(t.shape, t.stride(), t.dtype, t.device) for t in operands])
    key = (spec, tuple(sizes), layouts, aligned(operands), where(seed), torch.backends.cuda.matmul.allow_tf32)
    run = _runs.get(key)
    if run is None:
        check_call(spec, operands, sizes, seed)
        if len(_runs) >= _MOST_RUNS:
            _runs.clear()
        run = _runs[key] = _prepare(spec, operands, tuple(sizes))
    return run(operands, seed)


def backward(spec: AttentionSpec, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
             sizes: Sequence[int], seed: torch.Tensor | None, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of the operands that `needs` names: `launch_backward.backward`."""
    return _built_on_this("launch_backward").backward(spec, grad_out, operands, out, stats, sizes, seed, needs)


def weights(spec: AttentionSpec, operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int],
            seed: torch.Tensor | None = None) -> torch.Tensor:
    """The attention weights themselves, from the row statistics of `forward`: `launch_weights.weights`."""
    return _built_on_this("launch_weights").weights(spec, operands, stats, sizes, seed)


def tile_map(mask: Mask, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The map of a mask's tiles: `tile_map.launch`."""
    return _built_on_this("tile_map").launch(mask, operands, sizes, device)


@functools.cache
def _built_on_this(name: str) -> Any:
    """A module beside this one that imports it."""
    return importlib.import_module(f"{__package__}.{name}")


def source(spec: AttentionSpec, sizes: Sequence[int], operands: Sequence[torch.Tensor], device: torch.device | Device) -> str:
    """The text of the file of the plan that `forward` prefers; `operands` may be on the meta device.

    Raises:
        Unsupported: there is none.
    """
    plan = plans(spec, operands, sizes, device if isinstance(device, Device) else present(torch.device(device)))[0]
    return header.render(spec, plan, emit(spec, plan), recorded(operands, sizes))


# ---- deciding

def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, which takes CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def check_supported(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
    """Raise `Unsupported` for what has no kernel, whatever the device; ValueError for operands of another dtype than the spec's."""
    for tensor, fact in zip(operands, spec.operands, strict=True):
        if tensor.dtype != dtype_of(fact.dtype):
            raise ValueError(f"operand {fact.name} is {tensor.dtype}, the spec says {fact.dtype}")
        if fact.dtype not in _LOADABLE:
            raise Unsupported(f"operand {fact.name} has dtype {fact.dtype}")
    names = [spec.operands[a.operand].dtype for a in (spec.query, spec.key, spec.value)]
    if spec.compute_dtype != torch.float32 or any(n not in _PRODUCT_DTYPES for n in (*names, spec.out_dtype)):
        raise Unsupported(f"queries, keys and values of {', '.join(names)}: the kernel computes in float32")
    named = dict(zip(spec.size_names, sizes, strict=True))
    if max(named["d"], named["e"]) > LARGEST_HEAD:
        raise Unsupported(f"head dimensions {named['d']} and {named['e']}: the kernel holds up to {LARGEST_HEAD}")


def plans(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: Device) -> tuple[KernelPlan, ...]:
    """The plans that fit, best first.

    Raises:
        Unsupported: as of `check_supported`.
    """
    check_supported(spec, operands, sizes)
    return candidates(spec, request_for(spec, operands, dict(zip(spec.size_names, sizes, strict=True)), device), device)


def roomier(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: Device, preferred: KernelPlan) -> tuple[KernelPlan, ...]:
    """What is tried where one of `plans` spills."""
    return roomier_plans(spec, request_for(spec, operands, dict(zip(spec.size_names, sizes, strict=True)), device), device, preferred)


def request_for(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: dict[str, int], device: Device) -> Request:
    """What the planner may know of a call."""
    own = {"q": operands[spec.query.operand], "k": operands[spec.key.operand], "v": operands[spec.value.operand]}
    own |= {role: operands[number] for role, number in pairs(spec).items()}
    return header.request_of(spec, sizes, is_wide(spec, operands, sizes), precision(device), described(spec, sizes, own), uneven(spec, own))


def aligned(operands: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Which tensors begin at a multiple of 16 bytes: part of a layout, since only those can be described."""
    return tuple([t.data_ptr() % 16 == 0 for t in operands])


def where(seed: torch.Tensor | None) -> torch.device | None:
    """The device of the seed, if there is one: part of a layout, since a kernel that is known takes any address."""
    return None if seed is None else seed.device


def precision(device: Device) -> str:
    """How float32 products are taken: TF32 only as the user allows it, else exactly or in parts that lose nothing."""
    if device.backend != "cuda" or interpreting():
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "bf16x6"


def is_wide(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: dict[str, int], gradients: Sequence[torch.Tensor] = ()) -> bool:
    """Whether some offset within one attention may not fit 31 bits. Batch offsets do not count: they are 64 bits wide always.

    `gradients` are tensors (batch…, i, e) of any strides that a backward kernel reads as well; what it writes is dense.
    """
    limit = 2 ** 31 - 2 ** 20           # a tile may reach beyond the last row before its mask cuts it off
    if any(_magnitude(x, tuple(sizes.items())) >= limit for e in spec.programs for x in walk(e) if x.kind == "int"):
        return True                     # the programs' own integers: a squared distance passes 31 bits at 46341 tokens
    if any(sum((n - 1) * s for n, s in zip(t.shape[-2:], t.stride()[-2:], strict=True)) >= limit for t in gradients):
        return True
    if gradients and (any(t.numel() >= limit for t in operands) or tile_loads(spec) and sizes["i"] * sizes["j"] >= limit):
        return True                     # a read of every score, whatever it is read from, may have a gradient for every score
    extents = [sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in operands]
    if all(x < limit for x in extents) and sizes["i"] * sizes["e"] * max(1, math.prod(sizes[b] for b in spec.batch)) < limit:
        return False
    return _widest(spec, operands, sizes) >= limit


@functools.lru_cache(maxsize=4096)
def _magnitude(expr: Expr, sizes: tuple[tuple[str, int], ...]) -> int:
    """A bound for the absolute value of an integer program on tiles that may reach a little beyond the last position. Loads
    do not count: those of 64 bits stay as wide as they are, and what is computed with them too."""
    named = dict(sizes)
    if expr.op == "const":
        return abs(int(expr.value))
    if expr.op in ("axis", "size"):
        return named.get(str(expr.attr), 1) + 256
    parts = [_magnitude(a, sizes) for a in expr.args if a.kind == "int" and expr.op != "load"]
    if expr.op == "mul":
        return math.prod(parts)
    return sum(parts) if expr.op in ("add", "sub") else max(parts, default=1)


def _widest(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: dict[str, int]) -> int:
    """The largest offset within one attention, over all operands and the result."""
    from ..program import depends, loads

    found = []
    for access, own in ((spec.query, {"i", "d"}), (spec.key, {"j", "d"}), (spec.value, {"j", "e"})):
        tensor = operands[access.operand]
        found.append(sum((tensor.shape[n] - 1) * tensor.stride(n) for n, x in enumerate(access.index) if depends(x) & own))
    for load in (x for e in (spec.score, spec.weight, *spec.extra_terms) for x in loads(e)):
        tensor = operands[int(load.attr)]  # type: ignore[arg-type]
        found.append(sum((tensor.shape[n] - 1) * tensor.stride(n) for n, x in enumerate(load.args) if depends(x) & {"i", "j"}))
    strides = out_strides(spec, sizes)
    found.append(sizes["i"] * strides[-2] + sizes["e"] * strides[-1])
    return max(found)


def out_strides(spec: AttentionSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    """Strides of the result, dense in the order of memory that the spec asks for."""
    shape = [sizes[a] for a in spec.out_axes]
    strides, step = [0] * len(shape), 1
    for dim in reversed(spec.out_order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


# ---- preparing and launching

def recorded(operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> header.Call:
    return header.Call(tuple(int(n) for n in sizes), tuple((tuple(t.shape), tuple(t.stride())) for t in operands))


def _prepare(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> Run:
    """A launcher for one layout: the first plan that the device takes."""
    device = operands[spec.query.operand].device
    used = {spec.query.operand, spec.key.operand, spec.value.operand, *spec.captured}
    if any(operands[n].device != device for n in used):
        raise Unsupported(f"operands on {', '.join(sorted({str(operands[n].device) for n in used}))}")
    check_supported(spec, operands, sizes)
    named = dict(zip(spec.size_names, sizes, strict=True))
    if math.prod(named[a] for a in spec.out_axes) == 0 or named["j"] == 0:
        if named["e"] == 0 and math.prod(named[a] for a in spec.weight_axes):
            raise Unsupported("values without columns, of which only the weights could be wanted")
        return _nothing(spec, named, device)
    if device.type != "cuda" and not interpreting():
        raise Unsupported(f"a generated kernel needs a GPU; the operands are on {device}")
    entry = present(device)
    request = request_for(spec, operands, named, entry)
    offered = candidates(spec, request, entry)
    for plan in offered:
        emit(spec, plan)                # an index map that no kernel can follow shows here, before anything runs
    steps = Steps(list(offered), functools.partial(roomier_plans, spec, request, entry))
    if not tuning.asked(spec) or not autotune.possible(device):
        return _Ladder(spec, steps, sizes, operands).run
    ranked = [c.plan for c in choices(spec, request, entry)]
    return _Ladder(spec, steps, sizes, operands, ranked, autotune.Key.of(spec, "", class_of_call(request, entry), entry.name)).run


def class_of_call(request: Request, device: Device) -> tuple[object, ...]:
    """What a measured plan holds for beside the attention: the class of lengths, and how the tensors lie."""
    return (*class_of(request, device), request.depth, request.value_depth, request.wide, request.precision, request.described, request.uneven)


def _nothing(spec: AttentionSpec, sizes: dict[str, int], device: torch.device) -> Run:
    """The result without elements, or the zeros that a sum over no keys is."""

    layout = _layout(spec, sizes)

    def run(operands: Sequence[torch.Tensor], seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, stats = _allocate(layout, device)
        return out.zero_(), stats.fill_(-math.inf)

    return run


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Of a result: its shape, strides and dtype, and the shape and strides of its statistics."""


def _layout(spec: AttentionSpec, sizes: dict[str, int]) -> Layout:
    shape = tuple(sizes[a] for a in spec.out_axes)
    rows = (*shape[:-1], 2)
    return shape, out_strides(spec, sizes), dtype_of(spec.out_dtype), rows, contiguous(rows)


def _allocate(layout: Layout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    shape, strides, dtype, rows, steps = layout
    return empty(shape, strides, dtype, device), empty(rows, steps, torch.float32, device)


class _Ladder:
    """Plans in order of preference; one that the device turns out not to hold, or that spills, is left for another, for good.

    `tuned` are the plans among which the fastest is looked for at the first call, none where nothing is to be timed.
    """

    def __init__(self, spec: AttentionSpec, steps: Steps, sizes: tuple[int, ...],
                 operands: Sequence[torch.Tensor], tuned: Sequence[KernelPlan] = (), key: autotune.Key | None = None) -> None:
        self.spec, self.steps, self.sizes, self.tuned, self.key = spec, steps, sizes, tuned, key
        self.call = recorded(operands, sizes)
        self.bound: Run | None = None

    def run(self, operands: Sequence[torch.Tensor], seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch; on the first call look for the fastest plan if asked to, and climb down until one is taken.

        Raises:
            Unsupported: the device, or its compiler, takes none of the plans.
        """
        if self.bound is not None:
            return self.bound(operands, seed)

        def attempt(plan: KernelPlan) -> tuple[Run, tuple[torch.Tensor, torch.Tensor]]:
            bound = bind(function(self.spec, plan, self.call), emit(self.spec, plan), plan, self.spec, self.sizes, operands)
            return bound, bound(operands, seed)

        def trial(plan: KernelPlan) -> tuple[Callable[[], object], Sequence[torch.Tensor]]:
            bound, (out, _) = attempt(plan)
            return (lambda: bound(operands, seed)), [out]

        with autotune.on(operands[self.spec.query.operand].device):
            if self.key is not None and self.tuned and self.steps.plans:
                self.steps.prefer(autotune.choose(self.key, self.tuned, trial, autotune.tolerance(self.spec)))
            self.bound, result = self.steps.first_that_runs(attempt)
        return result


def function(spec: AttentionSpec, plan: KernelPlan, call: header.Call) -> Any:
    """The Triton function of a spec under a plan, from its file on disk."""
    known = _functions.get((spec, plan))
    if known is None:
        kernel = emit(spec, plan)
        name = f"{kernel.name}_{cache.key(spec, plan, header.versions())}"
        path = cache.store(name, lambda: header.render(spec, plan, kernel, call))
        known = _functions[spec, plan] = getattr(cache.load(path), kernel.name)
    return known


def bind(function: Any, kernel: Kernel, plan: KernelPlan, spec: AttentionSpec, sizes: tuple[int, ...],
         operands: Sequence[torch.Tensor]) -> Run:
    """A launcher of a Triton function for one layout of operands; only their addresses may change from call to call."""
    named = dict(zip(spec.size_names, sizes, strict=True))
    device = operands[spec.query.operand].device
    shapes, strides = [tuple(t.shape) for t in operands], [tuple(t.stride()) for t in operands]
    layout = _layout(spec, named)
    integers = [number(a, named, shapes, strides, {"out": layout[1]}) for a in kernel.integers]
    places = {name: len(operands) + n for n, name in enumerate(("out", "stats", "seed"))}
    grid = (math.ceil(named["i"] / plan.block_m) * math.prod(named[b] for b in spec.batch), 1, 1)
    called = [p.operand if isinstance(p.operand, int) else places[p.operand] for p in kernel.pointers]
    launch = Together([(caller(function, kernel, plan, grid, integers), called)], device)

    def run(operands: Sequence[torch.Tensor], seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, stats = _allocate(layout, device)
        launch([*operands, out, stats, seed])
        return out, stats

    def run_elsewhere(operands: Sequence[torch.Tensor], seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.device(device):
            return run(operands, seed)

    return run_elsewhere if device.type == "cuda" and torch.cuda.device_count() > 1 else run


class Options(Protocol):
    """What a launch asks of a plan."""

    @property
    def options(self) -> Mapping[str, int]:
        """What Triton is told beside the constants."""
        ...


def caller(function: Any, kernel: Kernel, plan: Options, grid: tuple[int, int, int], integers: Sequence[int]) -> Launch:
    """Launches a generated kernel on tensors in the order of its pointers; everything else is fixed."""
    boxes = [(p.order, p.block) if p.block else None for p in kernel.pointers]
    return Launch(function, grid, boxes, integers, dict(kernel.constants), plan.options)
