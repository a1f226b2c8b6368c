"""Plans of the forward kernel.

    >>> for plan in candidates(spec, request, device): try to launch; on OutOfResources take the next
"""
from __future__ import annotations

import math

from ..ranges import analyse
from ..spec import AttentionSpec
from . import space, tables
from .estimate import Work
from .plan import HALF, KernelPlan, Request, as_measured, gathers, is_simple, products, piece_of, reads_by_descriptor, tile_loads, within_map, work_of
from .reads import described_pairs
from .space import Choice
from .tables import Shape, Table
from .tiles import Device, Tile, padded

LEAST_VALUE_WIDTH = 64
"""Narrower value tiles are miscompiled for Hopper by ptxas 12.8.93 without a warning: in a loop whose value tile has rows of
32 or 64 bytes the shared-memory descriptors of all but the first product are read from registers that hold something else
(seen as reads out of bounds; tests/sass.py finds it in the machine code, and test_compile_only.py looks at what we ship)."""
LARGEST_HEAD = 256
"""The widest head that the kernels hold."""


def candidates(spec: AttentionSpec, request: Request, device: Device) -> tuple[KernelPlan, ...]:
    """Plans that fit the device, the preferred one first, then ever smaller ones: at least two.

    Raises:
        ValueError: a head dimension above 256.
    """
    work = work_for(spec, request, device)
    return space.descending(choices(spec, request, device), lambda shape: _plan(request, device, work, shape, ()))


def roomier(spec: AttentionSpec, request: Request, device: Device, preferred: KernelPlan) -> tuple[KernelPlan, ...]:
    """What to try where the kernel of a plan spills: `space.roomier`."""
    return space.roomier(choices(spec, request, device), device, preferred)


def choices(spec: AttentionSpec, request: Request, device: Device, inspected: bool = True) -> tuple[Choice, ...]:
    """Every plan that fits with its predicted cost, the preferred one first; at least the smallest tile, whether it fits or not.

    Without `inspected` also those for Hopper whose machine code was never looked at: for measurements that try each in a process of its own.

    Raises:
        ValueError: a head dimension above 256.
    """
    work = work_for(spec, request, device)
    table = _table(spec, request, device)
    width = max(work.block_d, work.block_e)
    limit, shapes = tables.rows(table, width)
    if table is tables.HOPPER and limit in tables.LARGER_HOPPER and not tile_loads(spec) and not spec.dropouts and spec.tiles is None:
        larger, keys, bounded = tables.LARGER_HOPPER[limit]
        plain = bounded or is_simple(spec) and not (analyse(spec).bounds or work.held.rows or work.held.columns)
        if request.keys >= keys and plain:
            shapes = (larger, *shapes)
    paired = table is tables.HOPPER and bool(described_pairs(spec, request.described)) and not spec.dropouts
    if paired:
        shapes = (*dict(tables.PAIRED_HOPPER if spec.tiles is None else tables.PAIRED_MAPPED).get(limit, ()), *shapes)
    shapes = within_map(spec, shapes)
    if gathers(spec) and "float32" in products(spec):
        shapes = shapes[1:]             # addresses and the parts of split operands together do not fit the registers
    listed = _twice(spec, request, device, work) if paired and spec.tiles is None else []
    for shape in shapes:
        plan = _fit(spec, request, device, work, shape)
        if plan and all(plan.shape != p.shape for p in listed):
            listed.append(plan)
    if not listed:
        listed.append(_plan(request, device, work, (16, 16, 4, 1), ()))
    measured = table in tables.MEASURED and device.unit == "wgmma" and as_measured(spec, request)
    return space.ranked(work, request, device, listed, measured, lambda shape: _plan(request, device, work, shape, ()), inspected)


def work_for(spec: AttentionSpec, request: Request, device: Device) -> Work:
    """What the kernel does with a tile, for the resource model; raises ValueError as `candidates` does."""
    block_d, block_e = padded(request.depth), padded(request.value_depth)
    if device.asynchronous:
        block_e = max(block_e, LEAST_VALUE_WIDTH)
    if max(block_d, block_e) > LARGEST_HEAD:
        raise ValueError(f"head dimensions {request.depth} and {request.value_depth}; the kernel holds up to {LARGEST_HEAD}")
    return work_of(spec, request, "forward", block_d, block_e, products(spec))


def _table(spec: AttentionSpec, request: Request, device: Device) -> Table:
    if any(t not in HALF for t in products(spec)):
        return tables.FORWARD_BY_UNIT.get((device.unit, request.precision), tables.FLOAT32)
    return tables.HOPPER if device.asynchronous else tables.AMPERE


def _fit(spec: AttentionSpec, request: Request, device: Device, work: Work, shape: Shape) -> KernelPlan | None:
    """One row of the table fitted to the call, or None where it does not fit the device."""
    block_m, block_n, warps, stages = shape
    width, reasons = max(work.block_d, work.block_e), []
    rows = max(16, padded(request.queries)) if request.queries < block_m else block_m
    fill = request.batch * math.ceil(max(request.queries, 1) / block_m)
    if rows < block_m:
        reasons.append(f"BLOCK_M {rows}: there are no more queries")
        block_m = rows
        warps = min(warps, 4) if work.block_d <= 128 else warps
    elif block_m == 128 and fill < device.processors and request.queries > 64:
        reasons.append(f"BLOCK_M 64: tiles of 128 would leave some of {device.processors} processors idle")
        block_m, warps = 64, max(4, warps // 2)
    if (tile_loads(spec) or spec.dropouts) and block_m == 128 and warps == 4:
        reasons.append("8 warps: the programs read or draw a tile of their own, which needs registers")
        warps = 8
    if gathers(spec) and width >= 128 and device.asynchronous and block_m >= 64:
        reasons.append("64x64 with 8 warps: the score program reads at indices that it has read, whose addresses fill registers")
        block_m, warps, stages = 64, 8, min(stages, 2)
    elif gathers(spec) and width >= 128 and block_n > 16:
        reasons.append(f"BLOCK_N {block_n // 2}: the score program reads at indices that it has read, whose addresses fill registers")
        block_n //= 2
    if not space.compiles(work, Tile(block_m, block_n, work.block_d, work.block_e, warps, stages), device):
        stages = 1
        reasons.append("one stage: Triton fails on pipelines of such tiles for AMD")
    plan = _plan(request, device, work, (block_m, block_n, warps, stages), tuple(reasons))
    return plan if space.fits(plan.shared, device) else None


def _twice(spec: AttentionSpec, request: Request, device: Device, work: Work) -> list[KernelPlan]:
    """The plan of which two blocks share a processor, if the call is large enough for its shape."""
    width = max(work.block_d, work.block_e)
    if width not in tables.PAIRED_TWICE:
        return []
    shape, registers = tables.PAIRED_TWICE[width]
    plan = _fit(spec, request, device, work, shape)
    return space.twice(plan, registers, work, device) if plan and plan.shape == shape else []


def _plan(request: Request, device: Device, work: Work, shape: Shape, reasons: tuple[str, ...]) -> KernelPlan:
    block_m, block_n, warps, stages = shape
    piece = piece_of(work, request, device)
    tile = Tile(block_m, block_n, work.block_d, work.block_e, warps, stages, piece=piece)
    if request.wide:
        reasons = (*reasons, "64-bit offsets: an operand spans more than 2^31 elements within one attention")
    described = tuple(n for n in reads_by_descriptor(request, device, block_m, block_n) if n != "do")
    if described:
        reasons = (*reasons, f"tiles of {', '.join(described)} are fetched by descriptors")
    return KernelPlan(block_m, block_n, work.block_d, work.block_e, request.depth, request.value_depth, warps, stages,
                      64 if request.wide else 32, request.precision, reasons, space.memory_of(work, tile, bool(described), device),
                      space.pressure(work, tile, bool(described), device), described, piece=piece)
