"""Plans of the backward kernels: the same resource model as forward's, with more tiles alive at once.

The kernel of dK and dV keeps K and V of a tile of keys and stages Q and grad_out; that of dQ keeps Q and grad_out and stages K
and V; the kernel of the rows only streams. Each gets its own ladder of plans, the preferred one first.
"""
from __future__ import annotations

import math

from ..ranges import analyse
from ..spec import AttentionSpec
from .chain import types
from .jobs import Job, Kind
from .plan import HALF, KernelPlan, Request, Shape, element_bytes, gathers, reads_by_descriptor, tile_loads, within_map
from .tiles import Device, padded

_ROW_ELEMENTS = 8192
"""Elements of the result that one program of the row kernel takes."""
_LEAST_WIDTH = 64
"""On Hopper, of query, key and value tiles alike: see `plan._LEAST_VALUE_WIDTH`; here every one of them is read both ways round."""

_THREE_BLOCKS = 168
"""Registers a thread with which three blocks of 128 threads share a processor's 65536."""

Table = tuple[tuple[int, tuple[Shape, ...]], ...]

# (largest padded head dimension, [(BLOCK_M, BLOCK_N, warps, stages), …]). Hopper's first choices were the fastest of five to seven
# measured on an H200 at 4096 tokens (bench/NOTES.md), those for 256 before tiles were read by descriptors. That of dK and dV spills at
# 256 and is the fastest all the same. There is no 32x64 for keys and no 64x32 for queries at 256: tests/sass.py finds misread
# descriptors in those. Ampere's and float32's were only compiled.
_SMALLEST: tuple[Shape, ...] = ((32, 32, 4, 1), (16, 16, 4, 1))
_KEYS_HOPPER: Table = (
    (64, ((64, 64, 4, 3), (32, 64, 4, 2), *_SMALLEST)),
    (128, ((64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1), *_SMALLEST)),
    (256, ((64, 64, 8, 2), (64, 64, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
_QUERIES_HOPPER: Table = (
    (64, ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 1), *_SMALLEST)),
    (128, ((64, 64, 4, 2), (64, 32, 4, 1), *_SMALLEST)),
    (256, ((128, 32, 8, 2), (128, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
_QUERIES_FULL: dict[int, Shape] = {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 1)}
"""Without bounds larger tiles of queries lose nothing at the edges: Hopper's first choice then."""
_KEYS_AMPERE: Table = (
    (64, ((32, 64, 4, 2), (32, 64, 4, 1), *_SMALLEST)),
    (128, ((32, 64, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
)
_QUERIES_AMPERE: Table = (
    (64, ((64, 64, 4, 2), (64, 32, 4, 2), *_SMALLEST)),
    (128, ((64, 32, 4, 2), (64, 32, 4, 1), *_SMALLEST)),
    (256, ((64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
_TILES_HOPPER: Table = (
    (128, ((128, 64, 8, 1), (64, 64, 4, 1), *_SMALLEST)),
    (256, ((64, 64, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
_TILES_AMPERE: Table = (
    (128, ((64, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
)
_FLOAT32: Table = (
    (64, ((32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
    (256, ((16, 16, 8, 1), (16, 16, 4, 1))),
)


def _table(spec: AttentionSpec, device: Device, kind: Kind) -> Table:
    found = types(spec)
    if any(t not in HALF for t in (found.score, found.slope, found.value, found.arrived)):
        return _FLOAT32
    if kind == "tiles":
        return _TILES_HOPPER if device.asynchronous else _TILES_AMPERE
    if device.asynchronous:
        return _KEYS_HOPPER if kind == "keys" else _QUERIES_HOPPER
    return _KEYS_AMPERE if kind == "keys" else _QUERIES_AMPERE


def candidates(spec: AttentionSpec, request: Request, device: Device, job: Job) -> tuple[KernelPlan, ...]:
    """Plans of one kernel that fit the device, the preferred one first, then ever smaller ones: at least two.

    Args:
        spec, request, device: as of `plan.candidates`.
        job: what the kernel has to do.
    """
    width = _LEAST_WIDTH if device.asynchronous else 16
    block_d, block_e = max(padded(request.depth), width), max(padded(request.value_depth), width)
    if job.kind == "rows":
        return tuple(_plan(spec, request, device, (rows, 16, 4, 1), padded(request.depth), padded(request.value_depth), job, "it only streams")
                     for rows in (max(16, _ROW_ELEMENTS // padded(request.value_depth)), 16))
    largest = max(block_d, block_e)
    table = _table(spec, device, job.kind)
    shapes = list(next(rows for limit, rows in table if largest <= limit))
    if table is _QUERIES_HOPPER and not analyse(spec).bounds and spec.tiles is None:
        shapes.insert(0, _QUERIES_FULL[next(limit for limit, _ in table if largest <= limit)])
    shapes = within_map(spec, shapes)
    if gathers(spec):
        shapes = shapes[1:]             # addresses that are read fill registers
    out: list[KernelPlan] = []
    for rank, shape in enumerate(shapes):
        why = f"{shape[0]}x{shape[1]} with {shape[2]} warps and {shape[3]} stages: choice {rank + 1} for head dimensions up to {largest}"
        plan = _plan(spec, request, device, shape, block_d, block_e, job, why)
        if plan.shared <= device.shared:
            out.append(plan)
    while len(out) < 2:
        warps = 4 if not out or out[-1].warps != 4 or out[-1].block_n > 16 else 2
        out.append(_plan(spec, request, device, (16, 16, warps, 1), block_d, block_e, job, "the smallest tile there is"))
    return tuple(out)


def _plan(spec: AttentionSpec, request: Request, device: Device, shape: Shape, block_d: int, block_e: int, job: Job,
          why: str) -> KernelPlan:
    block_m, block_n, warps, stages = shape
    qk_bytes, pv_bytes = element_bytes(spec)
    if request.precision == "bf16x6":
        qk_bytes, pv_bytes = (6 if n == 4 else n for n in (qk_bytes, pv_bytes))        # three parts of two bytes
    row = block_d * qk_bytes + block_e * pv_bytes
    kept, moving = (block_n, block_m) if job.kind == "keys" else (block_m, block_n)
    tile = block_m * block_n
    shared = kept * row + stages * (moving * (row + 12) + tile_loads(spec) * tile * 4) + 2 * tile * max(qk_bytes, pv_bytes)
    shared = max(shared, kept * max(block_d, block_e) * 4)
    sums = {"keys": block_n * (block_d + block_e), "tiles": tile * len(job.captured)}.get(job.kind, block_m * block_d)
    registers = math.ceil((sums + tile * (3 + tile_loads(spec))) / (warps * device.lanes)) + 24
    reasons = [why]
    if job.kind == "rows":
        shared, registers = 1024, math.ceil(2 * block_m * block_e / (warps * device.lanes)) + 24
    if request.wide:
        reasons.append("64-bit offsets: an operand spans more than 2^31 elements within one attention")
    described = reads_by_descriptor(request, device, block_m, block_n) if job.kind != "rows" else ()
    if job.kind == "keys" and described:
        described = (*described, "rows")        # else every thread fetches its own elements of what belongs to a row, in each tile
    if described:
        reasons.append(f"tiles of {', '.join(described)} are fetched by descriptors")
    most = 0
    if job.kind == "queries" and device.asynchronous and spec.dropouts and warps == 4 and max(block_d, block_e) <= 64:
        most = _THREE_BLOCKS
        reasons.append(f"at most {most} registers a thread, so that a processor holds three blocks: drawing for dropout would leave two")
    return KernelPlan(block_m, block_n, block_d, block_e, request.depth, request.value_depth, warps, stages,
                      64 if request.wide else 32, request.precision, tuple(reasons), shared, registers, described, most)
