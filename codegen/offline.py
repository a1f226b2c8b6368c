"""Compile a generated kernel without the device it is for, and read what the compiler says of it.

    report = compile_only(spec, sizes, operands, ("cuda", 90))
    report.shared, report.registers, report.spills
"""
from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..spec import AttentionSpec, dtype_of
from ..tiling import allocate_weights
from . import launch, launch_backward, launch_weights
from .arguments import Size, number
from .backward import emit as emit_backward
from .emission import Kernel
from .fallback import worth
from .forward import emit
from .jobs import WEIGHTS, Job
from .launcher import Usage
from .plan import KernelPlan
from .tiles import known

Target = tuple[str, int | str]
COLUMNS = 512
"""Of tensor memory a block, on Blackwell: of a kernel that wants more Triton makes one that stops at once, and refuses to launch it."""

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1", torch.uint8: "u8",
          torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class Compiled:
    """What the compiler reports: bytes of shared memory a block; registers a thread and bytes spilled, where a tool can tell; columns of tensor memory a
    block, on Blackwell."""

    plan: KernelPlan
    shared: int
    registers: int | None
    spills: int | None
    cubin: bytes | None = None
    columns: int = 0


def compile_only(spec: AttentionSpec, sizes: Sequence[int], operands: Sequence[torch.Tensor], target: Target,
                 plan: KernelPlan | None = None) -> Compiled:
    """Compile the forward kernel for ("cuda", 80), ("cuda", 90), ("cuda", 100) or ("hip", "gfx942").

    Args:
        spec, sizes: as of `launch.forward`.
        operands: tensors whose dtypes, shapes and strides count; the meta device will do.
        target: backend and architecture.
        plan: by default the one that would run: the preferred one for the target, or if that spills one of the roomier ones.

    Raises:
        Unsupported: this attention has no kernel.
    """
    if plan is None:
        return _settled(lambda p: compile_only(spec, sizes, operands, target, p), launch.plans(spec, operands, sizes, known(*target)),
                        lambda first: launch.roomier(spec, operands, sizes, known(*target), first))
    named = dict(zip(spec.size_names, sizes, strict=True))
    function, kernel = launch.function(spec, plan, launch.recorded(operands, sizes)), emit(spec, plan)
    shapes, strides = [tuple(t.shape) for t in operands], [tuple(t.stride()) for t in operands]
    integers = [number(a, named, shapes, strides, {"out": launch.out_strides(spec, named)}) for a in kernel.integers]
    special = {"out": dtype_of(spec.out_dtype), "stats": torch.float32, "seed": torch.int64}
    return _compile(function, kernel, plan, integers, dict(enumerate(t.dtype for t in operands)) | special, target)


def compile_backward(spec: AttentionSpec, sizes: Sequence[int], operands: Sequence[torch.Tensor], target: Target, job: Job,
                     plan: KernelPlan | None = None) -> Compiled:
    """Compile one backward kernel, the rest as of `compile_only`."""
    named = dict(zip(spec.size_names, sizes, strict=True))
    out = torch.empty_strided([named[a] for a in spec.out_axes], launch.out_strides(spec, named), dtype=dtype_of(spec.out_dtype), device="meta")
    if plan is None:
        return _settled(lambda p: compile_backward(spec, sizes, operands, target, job, p),
                        launch_backward.plans(spec, (out, out), operands, named, known(*target), job),
                        lambda first: launch_backward.roomier(spec, (out, out), operands, named, known(*target), job, first))
    function, kernel = launch_backward.function(spec, plan, job, launch.recorded(operands, sizes)), emit_backward(spec, plan, job)
    roles = {"grad_q": spec.query, "grad_k": spec.key, "grad_v": spec.value}
    gradients = {name: torch.empty(operands[a.operand].shape, dtype=operands[a.operand].dtype, device="meta") for name, a in roles.items()}
    integers = launch_backward.numbers(kernel, named, operands, {"out": out, "grad_out": out, **gradients})
    dtypes: dict[Any, torch.dtype] = dict(enumerate(t.dtype for t in operands)) | {n: t.dtype for n, t in gradients.items()}
    dtypes |= dict.fromkeys(("stats", "shift", "largest", "log_sum", "delta", *(c.label for c in job.captured)), torch.float32)
    dtypes |= {"out": out.dtype, "grad_out": out.dtype, "seed": torch.int64, "unseen": torch.int8}
    return _compile(function, kernel, plan, integers, dtypes, target)


def compile_weights(spec: AttentionSpec, sizes: Sequence[int], operands: Sequence[torch.Tensor], target: Target,
                    plan: KernelPlan | None = None) -> Compiled:
    """Compile the kernel of weights, all as of `compile_only`; `spec` is that of the op `attnfuse::weights`."""
    if plan is None:
        return _settled(lambda p: compile_weights(spec, sizes, operands, target, p), launch_weights.plans(spec, operands, sizes, known(*target)),
                        lambda first: launch_weights.roomier(spec, operands, sizes, known(*target), first))
    named = dict(zip(spec.size_names, sizes, strict=True))
    function, kernel = launch_backward.function(spec, plan, WEIGHTS, launch.recorded(operands, sizes)), emit_backward(spec, plan, WEIGHTS)
    out = allocate_weights(spec, sizes, torch.empty(0, device="meta"))
    integers = launch_backward.numbers(kernel, named, operands, {"weights": out})
    special = {"weights": out.dtype, "stats": torch.float32, "seed": torch.int64}
    return _compile(function, kernel, plan, integers, dict(enumerate(t.dtype for t in operands)) | special, target)


def _settled(compiled: Callable[[KernelPlan], Compiled], plans: Sequence[KernelPlan], roomier: Callable[[KernelPlan], Sequence[KernelPlan]]) -> Compiled:
    """What is compiled for the plan that would run, should the device not refuse the preferred one: as `fallback.Steps` finds it."""
    best = first = compiled(plans[0])
    usage = Usage(first.registers or 0, first.spills or 0)
    for plan in roomier(first.plan) if usage.spills else ():
        if worth(plan, first.plan, usage, best.spills or 0) and (report := compiled(plan)).columns <= COLUMNS:
            best = min(best, report, key=lambda x: x.spills or 0)
    return best


def _compile(function: Any, kernel: Kernel, plan: KernelPlan, integers: Sequence[int], dtypes: Mapping[Any, torch.dtype],
             target: Target) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = _specialise(kernel, integers, dtypes, function.arg_names)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget(*target, known(*target).lanes), options=plan.options)
    registers, spills = _usage(compiled.asm["cubin"]) if target[0] == "cuda" else _amd_usage(compiled.asm.get("amdgcn", ""))
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    return Compiled(plan, compiled.metadata.shared, registers, spills, compiled.asm.get("cubin"), columns)


def _specialise(kernel: Kernel, integers: Sequence[int], dtypes: Mapping[Any, torch.dtype],
                names: Sequence[str]) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[object]]]]:
    """Types, constants and divisibilities of the arguments, as Triton's launcher would find them for aligned tensors."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(kernel.constants)
    aligned: list[str] = []
    for pointer in kernel.pointers:
        own = _TYPES[dtypes[pointer.operand]]
        if pointer.block:
            signature[pointer.name] = f"tensordesc<{own}{list(pointer.block)}>".replace(" ", "")
            continue
        signature[pointer.name] = f"*{own}"
        aligned.append(pointer.name)
    for argument, value in zip(kernel.integers, integers, strict=True):
        if value == 1 and not isinstance(argument, Size):
            constants[argument.name] = 1
            continue
        signature[argument.name] = "i32" if -2 ** 31 <= value < 2 ** 31 else "i64"
        if value % 16 == 0 and not isinstance(argument, Size):
            aligned.append(argument.name)
    ordered = {n: signature.get(n, "constexpr") for n in names}
    return ordered, constants, {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}


def cuobjdump(cubin: bytes, what: str) -> str:
    """What the disassembler that Triton ships says of a compiled kernel: ``"--dump-sass"`` or ``"--dump-resource-usage"``."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([knobs.nvidia.cuobjdump.path, what, str(path)], capture_output=True, text=True, check=False).stdout


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers a thread, bytes of local memory a thread)."""
    shown = cuobjdump(cubin, "--dump-resource-usage")
    registers, stack, local = (re.search(rf"{n}:(\d+)", shown) for n in ("REG", "STACK", "LOCAL"))
    if registers is None:
        return None, None
    return int(registers.group(1)), int(stack.group(1) if stack else 0) + int(local.group(1) if local else 0)


def _amd_usage(assembly: str) -> tuple[int | None, int | None]:
    """(vector registers, bytes of spilled ones) from the metadata at the end of an AMD assembly listing."""
    registers, spills = (re.search(rf"\.{n}:\s+(\d+)", assembly) for n in ("vgpr_count", "vgpr_spill_count"))
    return (int(registers.group(1)) if registers else None), (4 * int(spills.group(1)) if spills else None)
