"""KernelPlan: how fast one attention is run, as a frozen value with the reasons; `candidates` offers several that fit.

Meaning is in the spec, speed is here. A plan never depends on a length beyond the class it falls into, so a model that
is called with many lengths keeps few kernels.

    >>> for plan in candidates(spec, request, device): try to launch; on OutOfResources take the next
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..program import depends, loads
from ..ranges import analyse
from ..spec import AttentionSpec, dtype_of
from ..tilemap import TILE
from .tiles import Device, Tile, footprint, padded, traffic, work

HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Request:
    """What a plan may know of a call: sizes by name, whether offsets inside one attention pass 2³¹, how float32 products are
    taken, and which tensors lie so that a descriptor can read them."""

    batch: int
    queries: int
    keys: int
    depth: int
    value_depth: int
    wide: bool = False
    precision: str = "ieee"
    described: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelPlan:
    """Tile shape and everything else that is speed and not meaning. Hashable; part of the key of a generated file.

    Attributes:
        block_m, block_n: queries and keys of a tile. block_d, block_e: head dimensions, padded to a power of two.
        depth, value_depth: the head dimensions themselves, constants of the kernel.
        warps, stages: threads a block (in warps), buffers of the software pipeline.
        index_bits: 32, or 64 where an offset inside one attention does not fit 31 bits.
        precision: how products of float32 operands are taken: ``"ieee"`` without tensor cores, ``"bf16x6"`` with them, each operand
            split into three bfloat16 parts (24 bits: measured nearer to the oracle than "ieee"), or ``"tf32"`` where the user allows it.
        reasons: one sentence for each choice.
        shared, registers: predicted bytes of shared memory a block and registers a thread.
        described: the roles (``q k v do``, and ``rows`` for what belongs to rows) that are read by descriptors; the others by
            pointers. See `reads`.
        most_registers: what the assembler may give a thread, so that more blocks share a processor; 0 for as many as there are.
    """

    block_m: int
    block_n: int
    block_d: int
    block_e: int
    depth: int
    value_depth: int
    warps: int
    stages: int
    index_bits: int
    precision: str
    reasons: tuple[str, ...]
    shared: int
    registers: int
    described: tuple[str, ...] = ()
    most_registers: int = 0

    def __str__(self) -> str:
        return (f"BLOCK_M={self.block_m} BLOCK_N={self.block_n} BLOCK_D={self.block_d} BLOCK_E={self.block_e} "
                f"num_warps={self.warps} num_stages={self.stages}")

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the constants."""
        own = {"num_warps": self.warps, "num_stages": self.stages}
        return own | {"maxnreg": self.most_registers} if self.most_registers else own


def product_dtype(left: str, right: str, wanted: str) -> str:
    """The dtype in which the tensor cores take a product of two operands that the spec wants in `wanted`.

    Half types stay what they are where that is exact (both alike: their product is exact in the float32 accumulator) or
    where the spec asks for that half type; otherwise float32.
    """
    if wanted in HALF:
        return wanted if {left, right} <= {wanted, "float32"} else "float32"
    return left if left == right and left in HALF else "float32"


def products(spec: AttentionSpec) -> tuple[str, str]:
    """The dtypes of Q·K and of P·V. The weights are float32 values: only `pv_dtype` allows rounding them to a half type."""
    query, key, value = (spec.operands[a.operand].dtype for a in (spec.query, spec.key, spec.value))
    pv = spec.pv_dtype if spec.pv_dtype in HALF and value in (spec.pv_dtype, "float32") else "float32"
    return product_dtype(query, key, spec.qk_dtype), pv


Shape = tuple[int, int, int, int]
Table = tuple[tuple[int, tuple[Shape, ...]], ...]

# (largest padded head dimension, [(BLOCK_M, BLOCK_N, warps, stages), …] from the preferred one to the one that always fits).
# The first choices for Hopper were the fastest of five to eight measured on an H200 (4096 tokens; float32: 2048), see bench/NOTES.md.
# Ampere's were compiled without spilling. Hopper has no tiles of 32 keys beside 64 queries: with biases or gathers tests/sass.py finds
# products that read wrong descriptors in them.
_HOPPER: Table = (
    (64, ((64, 64, 4, 3), (64, 64, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((128, 64, 8, 2), (64, 64, 8, 2), (32, 16, 4, 1), (16, 16, 4, 1))),
)
_LARGER_HOPPER: dict[int, tuple[Shape, int, bool]] = {64: ((64, 128, 4, 2), 2048, True), 128: ((128, 64, 4, 2), 0, False)}
"""What is faster still while the programs are plain: (shape, from how many keys on, whether bounds may cut tiles)."""
_AMPERE: Table = (
    (64, ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((64, 32, 4, 3), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1))),
)
# Products of float32 operands: without tensor cores, unrolled (small tiles, many threads); in three bfloat16 parts; in TF32.
_FLOAT32: Table = (
    (64, ((64, 32, 8, 1), (32, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1))),
    (128, ((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 4, 1))),
    (256, ((16, 16, 8, 1), (16, 16, 4, 1))),
)
_SPLIT: Table = (
    (64, ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
)
_TF32: Table = (
    (64, ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((32, 32, 8, 1), (16, 16, 4, 1))),
)


_LEAST_VALUE_WIDTH = 64
"""Narrower value tiles are miscompiled for Hopper by ptxas 12.8.93 without a warning: in a loop whose value tile has rows of
32 or 64 bytes the shared-memory descriptors of all but the first product are read from registers that hold something else
(seen as reads out of bounds; tests/sass.py finds it in the machine code, and test_compile_only.py looks at what we ship)."""


def _table(spec: AttentionSpec, request: Request, device: Device) -> Table:
    qk, pv = products(spec)
    if qk not in HALF or pv not in HALF:
        return {"tf32": _TF32, "bf16x6": _SPLIT}.get(request.precision, _FLOAT32)
    return _HOPPER if device.asynchronous else _AMPERE


def candidates(spec: AttentionSpec, request: Request, device: Device) -> tuple[KernelPlan, ...]:
    """Plans that fit the device, the preferred one first, then ever smaller ones: at least two.

    Raises:
        ValueError: a head dimension above 256.
    """
    block_d, block_e = padded(request.depth), padded(request.value_depth)
    if device.asynchronous:
        block_e = max(block_e, _LEAST_VALUE_WIDTH)
    if max(block_d, block_e) > 256:
        raise ValueError(f"head dimensions {request.depth} and {request.value_depth}; the kernel holds up to 256")
    table = _table(spec, request, device)
    limit, shapes = next((limit, rows) for limit, rows in table if max(block_d, block_e) <= limit)
    if table is _HOPPER and limit in _LARGER_HOPPER and not tile_loads(spec) and not spec.dropouts and spec.tiles is None:
        larger, keys, bounded = _LARGER_HOPPER[limit]
        if request.keys >= keys and (bounded or not analyse(spec).bounds):
            shapes = (larger, *shapes)
    shapes = within_map(spec, shapes)
    if gathers(spec) and "float32" in products(spec):
        shapes = shapes[1:]             # addresses and the parts of split operands together do not fit the registers
    out: list[KernelPlan] = []
    for rank, shape in enumerate(shapes):
        plan = _fit(spec, request, device, shape, block_d, block_e, rank)
        if plan and all((plan.block_m, plan.block_n, plan.warps, plan.stages) != (p.block_m, p.block_n, p.warps, p.stages) for p in out):
            out.append(plan)
    for warps in (4, 2):
        if len(out) < 2 and all((p.block_m, p.block_n, p.warps) != (16, 16, warps) for p in out):
            out.append(_plan(spec, request, device, (16, 16, warps, 1), block_d, block_e, ("the smallest tile there is",)))
    return tuple(out)


def within_map(spec: AttentionSpec, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """The shapes with tiles no larger than those of a map, where the attention comes with one."""
    if spec.tiles is None:
        return tuple(shapes)
    cut = ((min(m, TILE), min(n, TILE), warps, stages) for m, n, warps, stages in shapes)
    return tuple(dict.fromkeys(s for s in cut if s[:2] != (64, 32)))        # which Hopper's table leaves out for its reasons


def _fit(spec: AttentionSpec, request: Request, device: Device, shape: Shape, block_d: int, block_e: int,
         rank: int) -> KernelPlan | None:
    """One row of the table fitted to the call, or None where it does not fit the device."""
    block_m, block_n, warps, stages = shape
    reasons = [f"{block_m}x{block_n} with {warps} warps and {stages} stages: "
               f"choice {rank + 1} for head dimensions up to {max(block_d, block_e)}"]
    rows = max(16, padded(request.queries)) if request.queries < block_m else block_m
    fill = request.batch * math.ceil(max(request.queries, 1) / block_m)
    if rows < block_m:
        reasons.append(f"BLOCK_M {rows}: there are no more queries")
        block_m = rows
        warps = min(warps, 4) if block_d <= 128 else warps
    elif block_m == 128 and fill < device.processors and request.queries > 64:
        reasons.append(f"BLOCK_M 64: tiles of 128 would leave some of {device.processors} processors idle")
        block_m, warps = 64, max(4, warps // 2)
    if (tile_loads(spec) or spec.dropouts) and block_m == 128 and warps == 4:
        reasons.append("8 warps: the programs read or draw a tile of their own, which needs registers")
        warps = 8
    if gathers(spec) and max(block_d, block_e) >= 128 and device.asynchronous and block_m >= 64:
        reasons.append("64x64 with 8 warps: the score program reads at indices that it has read, whose addresses fill registers")
        block_m, warps, stages = 64, 8, min(stages, 2)
    elif gathers(spec) and max(block_d, block_e) >= 128 and block_n > 16:
        reasons.append(f"BLOCK_N {block_n // 2}: the score program reads at indices that it has read, whose addresses fill registers")
        block_n //= 2
    plan = _plan(spec, request, device, (block_m, block_n, warps, stages), block_d, block_e, tuple(reasons))
    return plan if plan.shared <= device.shared else None


def _plan(spec: AttentionSpec, request: Request, device: Device, shape: Shape, block_d: int, block_e: int,
          reasons: tuple[str, ...]) -> KernelPlan:
    block_m, block_n, warps, stages = shape
    tile = Tile(block_m, block_n, block_d, block_e, warps, stages)
    qk_bytes, pv_bytes = element_bytes(spec)
    if request.precision == "bf16x6":
        qk_bytes, pv_bytes = (6 if n == 4 else n for n in (qk_bytes, pv_bytes))        # three parts of two bytes
    cost = footprint(tile, qk_bytes, pv_bytes, tile_loads(spec), device.lanes)
    if request.wide:
        reasons = (*reasons, "64-bit offsets: an operand spans more than 2^31 elements within one attention")
    described = tuple(n for n in reads_by_descriptor(request, device, block_m, block_n) if n != "do")
    if described:
        reasons = (*reasons, f"tiles of {', '.join(described)} are fetched by descriptors")
    return KernelPlan(block_m, block_n, block_d, block_e, request.depth, request.value_depth, warps, stages,
                      64 if request.wide else 32, request.precision, reasons, cost.shared, cost.registers, described)


LEAST_WORK = 2 ** 30
"""Multiplications of one product from which on descriptors are worth what the host spends on making them, a few microseconds a launch."""


def reads_by_descriptor(request: Request, device: Device, block_m: int, block_n: int) -> tuple[str, ...]:
    """Which roles the kernels of a plan read by descriptors: those that can be, where that is worth it.

    Not in tiles of fewer than 64 rows: for some of those tests/sass.py finds products that read wrong places (see `_LEAST_VALUE_WIDTH`).
    """
    work = request.batch * request.queries * request.keys * request.depth
    fits = device.boxes and not request.wide and min(block_m, block_n) >= 64
    return request.described if fits and work >= LEAST_WORK else ()


def element_bytes(spec: AttentionSpec) -> tuple[int, int]:
    """Bytes an element in shared memory: of query and key, and of value."""
    size = lambda name: dtype_of(name).itemsize
    query, key, value = (spec.operands[a.operand].dtype for a in (spec.query, spec.key, spec.value))
    qk, pv = products(spec)
    return max(size(query), size(key), size(qk)), max(size(value), size(pv))


def tile_loads(spec: AttentionSpec) -> int:
    """How many loads of the score and weight programs have both i and j."""
    found = {x for e in (spec.score, spec.weight) for x in loads(e) if {"i", "j"} <= depends(x)}
    return len(found)


def gathers(spec: AttentionSpec) -> bool:
    """Whether a program reads at an index that it reads at every (i, j)."""
    outer = [x for e in (spec.score, spec.weight) for x in loads(e)]
    return any({"i", "j"} <= depends(y) for x in outer for a in x.args for y in loads(a))


def predict(spec: AttentionSpec, plan: KernelPlan, request: Request, visited: float) -> tuple[int, int]:
    """(bytes of HBM traffic, FLOPs) of a call under a plan, where a share `visited` of the tiles is computed."""
    qk_bytes, pv_bytes = element_bytes(spec)
    flops = work(request.batch, request.queries, request.keys, plan.depth, plan.value_depth, visited)
    moved = traffic(request.batch, request.queries, request.keys, plan.depth, plan.value_depth, plan.block_m, qk_bytes, pv_bytes,
                    dtype_of(spec.out_dtype).itemsize, visited)
    return moved, flops
