"""Plans of the backward kernels: the same resource model as forward's, with more tiles alive at once.

The kernel of dK and dV keeps K and V of a tile of keys and stages Q and grad_out; that of dQ keeps Q and grad_out and stages K
and V; the kernel of the rows only streams.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..ranges import analyse
from ..spec import AttentionSpec
from . import space, tables
from .chain import types
from .estimate import Work
from .jobs import Job, apart
from .memory import Sweep
from .plan import HALF, KernelPlan, Request, as_measured, gathers, piece_of, reads_by_descriptor, tile_loads, within_map, work_of
from .space import Choice
from .tables import Shape, Shapes, Table
from .tiles import Device, Tile, padded

_ROW_ELEMENTS = 8192
"""Elements of the result that one program of the row kernel takes."""
_LEAST_WIDTH = 64
"""On Hopper, of query, key and value tiles alike: see `plan_forward.LEAST_VALUE_WIDTH`; here every one of them is read both ways round."""
_LONG = 8
"""Operations a score with which the kernel of the keys spills 176 bytes and more."""
_THREE_BLOCKS = 168
"""Registers a thread with which three blocks of 128 threads share a processor's 65536."""


def arranged(spec: AttentionSpec, request: Request, device: Device, jobs: Sequence[Job]) -> tuple[Job, ...]:
    """The kernels as a device is to run them: the gradients of keys and values by one kernel, or by one each where their sums fill the registers."""
    if _apart(spec, request, device) is None:
        return tuple(jobs)
    return tuple(each for job in jobs for each in apart(job))


def _apart(spec: AttentionSpec, request: Request, device: Device) -> tuple[Shapes, Shapes] | None:
    """The shapes of a kernel for keys alone and of one for values alone, where they are to be."""
    if device.unit != "wgmma":
        return None
    how = "half" if all(t in HALF for t in _dtypes(spec)) else request.precision
    return tables.APART_HOPPER.get(how, {}).get(max(_widths(request, device)))


def _row(spec: AttentionSpec, request: Request, device: Device, job: Job) -> tuple[Table, int, Shapes]:
    """The table of a kernel's shapes, and its row for a call: the padded head dimension up to which it holds, and the shapes."""
    table, width = _table(spec, request, device, job), max(_widths(request, device))
    alone = _apart(spec, request, device) if job.kind == "keys" else None
    return (table, *(tables.rows(table, width) if alone is None else (width, alone[0 if job.arrivals else 1])))


def _widths(request: Request, device: Device) -> tuple[int, int]:
    """The padded head dimensions, of queries and keys and of values."""
    width = _LEAST_WIDTH if device.asynchronous else 16
    return max(padded(request.depth), width), max(padded(request.value_depth), width)


def _table(spec: AttentionSpec, request: Request, device: Device, job: Job) -> Table:
    kind = job.kind
    if any(t not in HALF for t in _dtypes(spec)):
        return tables.BACKWARD_BY_UNIT.get((device.unit, request.precision, "queries" if kind == "weights" else kind), tables.BACKWARD_FLOAT32)
    if kind in ("tiles", "diagonals"):
        return tables.TILES_HOPPER if device.asynchronous else tables.TILES_AMPERE
    if device.asynchronous:
        return tables.KEYS_HOPPER if kind == "keys" else tables.QUERIES_HOPPER
    return tables.KEYS_AMPERE if kind == "keys" else tables.QUERIES_AMPERE


def _dtypes(spec: AttentionSpec) -> tuple[str, ...]:
    found = types(spec)
    return found.score, found.slope, found.value, found.arrived


def candidates(spec: AttentionSpec, request: Request, device: Device, job: Job) -> tuple[KernelPlan, ...]:
    """Plans of one kernel that fit the device, the preferred one first, then ever smaller ones: at least two.

    Args:
        spec, request, device: as of `plan_forward.candidates`.
        job: what the kernel has to do.
    """
    if job.kind == "rows":
        return _streams(request)
    work = work_for(spec, request, device, job)
    return space.descending(choices(spec, request, device, job), lambda shape: _plan(spec, request, device, work, shape, job, ()))


def roomier(spec: AttentionSpec, request: Request, device: Device, job: Job, preferred: KernelPlan) -> tuple[KernelPlan, ...]:
    """What to try where the kernel of a plan spills: `space.roomier`."""
    if job.kind == "rows":
        return ()
    return space.roomier(choices(spec, request, device, job), device, preferred)


def choices(spec: AttentionSpec, request: Request, device: Device, job: Job, inspected: bool = True) -> tuple[Choice, ...]:
    """Every plan of a kernel that walks tiles with its predicted cost, the preferred one first; at least the smallest tile, whether it fits
    or not. `inspected` is as of `plan_forward.choices`."""
    work = work_for(spec, request, device, job)
    table, shapes = _shapes(spec, request, device, job, work)
    width, listed = max(work.block_d, work.block_e), []
    if table is tables.TILES_HOPPER and job.kind == "tiles" and width in tables.TILES_TWICE and spec.tiles is None:
        shape, registers = tables.TILES_TWICE[width]
        listed = space.twice(_plan(spec, request, device, work, shape, job, ()), registers, work, device)
    others = [shape for shape in dict.fromkeys(shapes) if all(shape != p.shape for p in listed)]
    listed += [plan for shape in others if space.fits((plan := _plan(spec, request, device, work, shape, job, ())).shared, device)]
    if not listed:
        listed.append(_plan(spec, request, device, work, (16, 16, 4, 1), job, ()))
    measured = table in tables.MEASURED and device.unit == "wgmma" and as_measured(spec, request)
    return space.ranked(work, request, device, listed, measured, lambda shape: _plan(spec, request, device, work, shape, job, ()), inspected)


def _shapes(spec: AttentionSpec, request: Request, device: Device, job: Job, work: Work) -> tuple[Table, list[Shape]]:
    """The table of a kernel's shapes, and those of them that suit the call."""
    table, limit, row = _row(spec, request, device, job)
    shapes = list(row)
    full = not analyse(spec).bounds and spec.tiles is None and not (limit == 256 and job.captured)
    if table is tables.QUERIES_HOPPER and full and (limit == 64 or gathers(spec) or not tile_loads(spec)):
        shapes.insert(0, tables.QUERIES_FULL[limit])
    shapes = list(within_map(spec, shapes))
    if job.kind == "diagonals":
        shapes = [s for s in shapes if s[0] == s[1]]
    if device.unit == "wgmma" and work.times > 1:
        return table, [s for s in shapes if _fills(job, s, request, device)] or shapes
    crowded = gathers(spec)                     # addresses that are read fill registers
    if table is tables.KEYS_HOPPER and limit == 128:
        crowded |= _computes_much(work)
    if table is tables.QUERIES_AMPERE and limit == 64:
        crowded |= _is_padded(request, work)    # and so do masks of the depth
    return table, shapes[1:] if crowded else shapes


def work_for(spec: AttentionSpec, request: Request, device: Device, job: Job) -> Work:
    """What a kernel does with a tile, for the resource model."""
    block_d, block_e = _widths(request, device)
    kind: Sweep = "queries" if job.kind in ("rows", "weights") else "tiles" if job.kind == "diagonals" else job.kind
    stores = 4 * sum({"i", "j"} <= c.axes for c in job.captured) if kind == "queries" else 0
    work = work_of(spec, request, kind, block_d, block_e, _dtypes(spec), stores)
    return replace(work, held=replace(work.held, key=job.arrivals, value=job.value)) if job.kind == "keys" else work


def _fills(job: Job, shape: Shape, request: Request, device: Device) -> bool:
    """Whether tiles that are larger than 64 are worth it: there is more than one such tile's half, and enough of them for all processors."""
    own, length = (shape[1], request.keys) if job.kind == "keys" else (shape[0], request.queries)
    programs = request.batch * math.ceil(length / own) if job.kind != "tiles" else device.processors      # of scores there are more
    return own <= 64 or length > 64 and programs >= device.processors


def _computes_much(work: Work) -> bool:
    """Whether the kernel of the keys would spill hundreds of bytes in its first shape: by two random numbers a score, or a long program."""
    return work.draws > 1 or work.operations >= _LONG


def _is_padded(request: Request, work: Work) -> bool:
    """Whether head dimensions fill a part of their tiles, so that loads are masked."""
    return request.depth < work.block_d or request.value_depth < work.block_e


def _streams(request: Request) -> tuple[KernelPlan, ...]:
    """The kernel of the rows."""
    block_d, block_e = padded(request.depth), padded(request.value_depth)
    reasons = ("it only streams", *(("64-bit offsets: an operand spans more than 2^31 elements within one attention",) if request.wide else ()))
    return tuple(KernelPlan(rows, 16, block_d, block_e, request.depth, request.value_depth, 4, 1, 64 if request.wide else 32, request.precision,
                            reasons, 1024, math.ceil(2 * rows * block_e / 128) + 24)
                 for rows in (max(16, _ROW_ELEMENTS // block_e), 16))


def _plan(spec: AttentionSpec, request: Request, device: Device, work: Work, shape: Shape, job: Job, reasons: tuple[str, ...]) -> KernelPlan:
    block_m, block_n, warps, stages = shape
    piece = piece_of(work, request, device)
    tile = Tile(block_m, block_n, work.block_d, work.block_e, warps, stages, piece=piece)
    if request.wide:
        reasons = (*reasons, "64-bit offsets: an operand spans more than 2^31 elements within one attention")
    described = reads_by_descriptor(request, device, block_m, block_n)
    if job.kind == "keys" and described:
        described = (*described, "rows")        # else every thread fetches its own elements of what belongs to a row, in each tile
    if described:
        reasons = (*reasons, f"tiles of {', '.join(described)} are fetched by descriptors")
    shared, registers = space.memory_of(work, tile, bool(described), device), space.pressure(work, tile, bool(described), device)
    if job.kind == "diagonals" and device.unit == "wgmma":
        shared += 4 * block_m * block_n         # what was read at the scores may wait beside queries and keys for their product
    most = 0
    narrow = max(work.block_d, work.block_e) <= 64 and work.times == 1 and not _is_padded(request, work)
    if job.kind == "queries" and device.asynchronous and spec.dropouts and warps == 4 and narrow:
        most = _THREE_BLOCKS
        reasons = (*reasons, f"at most {most} registers a thread, so that a processor holds three blocks: drawing for dropout would leave two")
    return KernelPlan(block_m, block_n, work.block_d, work.block_e, request.depth, request.value_depth, warps, stages,
                      64 if request.wide else 32, request.precision, reasons, shared, registers, described, most, piece)
