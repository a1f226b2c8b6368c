"""What `roofline.measure` does: the seconds that each operation of a call takes on the GPU, by PyTorch's profiler.

    aten::masked_fill > aten::clone > aten::copy_        launches 0.9 ms        →    {"copy_": 0.9e-3}

A kernel belongs to the operation that `attnfuse.traffic` counts it by, so that points of both may stand in one picture: of the operations that
were open when it was launched, the outermost one that is not made of others.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import composed
from . import ops
from .counting import taken_apart

FUSED = "fused"
"""The name of our own forward kernels, as in `Report.kernels`."""
OTHER = "other"
"""What no operation launched, such as kernels that inductor generated."""


@dataclass(frozen=True)
class Launch:
    """Seconds on the GPU of what one operation launched itself, and the names of the events open at the time, that operation's first."""

    within: tuple[str, ...]
    seconds: float


def measure(call: Callable[[], object], times: int) -> dict[str, float]:
    """See `roofline.measure`."""
    from torch.profiler import ProfilerActivity, profile

    if times < 1:
        raise ValueError(f"times must be positive, not {times}")
    if not torch.cuda.is_available():
        raise ValueError("kernels are measured on a CUDA device, and PyTorch sees none here")
    call()                       # compiles and loads what has to be
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    found = by_operation(launches(seen.events() or (), kernel_seconds))
    if not found:
        raise RuntimeError("PyTorch's profiler saw no kernel: the call launched none, or the profiler may not trace this GPU")
    return {name: seconds / times for name, seconds in found.items()}


def kernel_seconds(event: Any) -> float:
    """Seconds of the kernels, copies and fills that an event of the profiler launched itself, not by way of another one."""
    return 1e-6 * sum(k.duration for k in event.kernels)


def launches(events: Iterable[Any], own: Callable[[Any], float]) -> list[Launch]:
    """The events of a profile (`torch.autograd.profiler_util.FunctionEvent`) that took time on the GPU, which `own` gives."""
    out = []
    for event in events:
        if getattr(event, "is_user_annotation", False):      # a mark on the GPU's time line spans kernels and is none
            continue
        seconds = own(event)
        if seconds > 0:
            within, at = [], event
            while at is not None:
                within.append(at.name)
                at = at.cpu_parent
            out.append(Launch(tuple(within), seconds))
    return out


def by_operation(found: Iterable[Launch]) -> dict[str, float]:
    """Seconds by operation, that with the most first."""
    total: dict[str, float] = {}
    for launch in found:
        name = operation(launch.within)
        total[name] = total.get(name, 0.0) + launch.seconds
    return dict(sorted(total.items(), key=lambda x: -x[1]))


def operation(within: Sequence[str]) -> str:
    """The name by which `attnfuse.traffic` counts a kernel.

    >>> operation(["aten::copy_", "aten::clone", "aten::masked_fill"]), operation(["aten::bmm", "aten::matmul"]), operation(["cudaLaunchKernel"])
    ('copy_', 'bmm', 'other')
    """
    known = [n for n in within if _is_program(n) is not None]
    if not known:
        return OTHER
    counted = next((n for n in reversed(known) if not _is_program(n)), known[0]).removesuffix(ops.IN_GRAPH)
    if counted in ("attnfuse::attention", "attnfuse::weights"):
        return FUSED
    name, inner = (n.rpartition("::")[2] for n in (counted, known[0]))
    if name in composed.PARTS and known[0] != counted:       # a part may launch by way of another operation, as zero_ does by fill_
        return next((p for p in composed.PARTS[name] if p == inner), name)
    return name


@functools.cache
def _is_program(event: str) -> bool | None:
    """Whether an operation is made of others; None for an event that is no operation."""
    namespace, _, name = event.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        overloads = [getattr(packet, o) for o in packet.overloads()]
    except (AttributeError, RuntimeError):
        return None
    known = [o for o in overloads if torch._C._dispatch_has_kernel(o.name())]         # some are of TorchScript alone
    functional = [o for o in known if not o._schema.overload_name.endswith("out")]
    return all(taken_apart(o) for o in functional or known)
