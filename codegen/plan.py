"""KernelPlan: how fast one attention is run, as a frozen value with the reasons; and what a planner may know of a call and of a spec.

Meaning is in the spec, speed is here. A plan never depends on a length beyond the class it falls into, so a model that
is called with many lengths keeps few kernels. Plans are made by `plan_forward` and `plan_backward`, from the shapes of `space`.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..program import WEIGHT, Expr, depends, loads, walk
from ..ranges import analyse
from ..spec import AttentionSpec, dtype_of
from ..tilemap import TILE
from .estimate import Work
from .memory import Contents, Sweep
from .reads import described_pairs
from .tables import PIECE, PIECES, Shape
from .tiles import Device, Tile, traffic, work

HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Request:
    """What a plan may know of a call.

    Attributes:
        batch, queries, keys, depth, value_depth: the sizes. wide: whether offsets inside one attention pass 2³¹.
        precision: how float32 products are taken. described: which tensors lie so that a descriptor can read them.
        uneven: the roles (``q k v do``) whose rows are no multiple of 16 elements apart, so that a thread reads element by element.
    """

    batch: int
    queries: int
    keys: int
    depth: int
    value_depth: int
    wide: bool = False
    precision: str = "ieee"
    described: tuple[str, ...] = ()
    uneven: tuple[str, ...] = ()


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
        described: the roles (``q k v do``, ``pair3`` for a float of operand 3 for every score, ``rows`` for what belongs to rows) that
            are read by descriptors; the others by pointers. See `reads`.
        piece: columns of a head dimension that a product takes at a time; 0 for all of them. See `pieces`.
        most_registers: what the assembler may give a thread, so that more blocks share a processor, or so that it need not spill for that; 0 for what
            it finds best.
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
    piece: int = 0

    def __str__(self) -> str:
        most = f" maxnreg={self.most_registers}" if self.most_registers else ""
        return (f"BLOCK_M={self.block_m} BLOCK_N={self.block_n} BLOCK_D={self.block_d} BLOCK_E={self.block_e} "
                f"num_warps={self.warps} num_stages={self.stages}{most}{f' PIECE={self.piece}' if self.piece else ''}")

    @property
    def tile(self) -> Tile:
        """Its shape."""
        return Tile(self.block_m, self.block_n, self.block_d, self.block_e, self.warps, self.stages, self.most_registers, self.piece)

    @property
    def shape(self) -> Shape:
        """What tells the plans of one call apart: queries and keys of a tile, warps, stages."""
        return self.block_m, self.block_n, self.warps, self.stages

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


def within_map(spec: AttentionSpec, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """The shapes with tiles no larger than those of a map, where the attention comes with one."""
    if spec.tiles is None:
        return tuple(shapes)
    return tuple(s for s in shapes if max(s[:2]) <= TILE and s[:2] != (64, 32))     # which was not inspected under a map


LEAST_WORK = 2 ** 30
"""Multiplications of one product from which on descriptors are worth what the host spends on making them, a few microseconds a launch."""


def reads_by_descriptor(request: Request, device: Device, block_m: int, block_n: int) -> tuple[str, ...]:
    """Which roles the kernels of a plan read by descriptors: those that can be, where that is worth it.

    Not in tiles of fewer than 64 rows: for some of those tests/sass.py finds products that read wrong places (see `plan_forward.LEAST_VALUE_WIDTH`).
    """
    work = request.batch * request.queries * request.keys * request.depth
    fits = device.boxes and not request.wide and min(block_m, block_n) >= 64
    return request.described if fits and work >= LEAST_WORK else ()


def piece_of(work: Work, request: Request, device: Device) -> int:
    """How many columns of a head dimension a product takes at a time; 0 for all."""
    if work.times <= 1:
        return 0
    least = PIECES.get((device.unit, request.precision), {}).get(work.kind)
    return PIECE if least and max(work.block_d, work.block_e) >= least else 0


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


def is_simple(spec: AttentionSpec) -> bool:
    """Whether scores are made by sums, products, comparisons and selections alone, and weights stay as they are. A tanh (a soft cap) or a mask after
    softmax makes the largest forward tile at 128 spill 112 and 368 bytes; the soft cap then took 2.39 ms for 1.87."""
    return spec.weight == WEIGHT and all(x.op in _SIMPLE for x in walk(spec.score) if x.args and depends(x) & _TILED)


_SIMPLE = frozenset("add sub mul div abs min max float load where le lt eq and or not".split())


@dataclass(frozen=True)
class _Facts:
    """What the resource model needs of the programs: see `memory.Contents` and `estimate.Work`."""

    reads: int
    narrow: tuple[tuple[int, int], ...]
    wide: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    indirect: bool
    operations: int
    draws: int
    bounded: bool


@functools.lru_cache(maxsize=512)
def _facts(spec: AttentionSpec) -> _Facts:
    size = lambda x: dtype_of(spec.operands[int(x.attr)].dtype).itemsize  # type: ignore[arg-type]  # a load names its operand
    tiled: Callable[[Expr], bool] = lambda x: {"i", "j"} <= depends(x)
    found = {x for e in (spec.score, spec.weight) for x in loads(e)}
    inner = {y for x in found for a in x.args for y in loads(a) if tiled(y)}
    direct = [x for x in found if tiled(x) and x not in inner and not any(tiled(y) for a in x.args for y in loads(a))]
    sized = [(int(x.attr), size(x)) for x in direct]  # type: ignore[arg-type]
    narrow, wide = (tuple(x for x in sized if (x[1] < 4) == small) for small in (True, False))
    rows = sum(size(x) for x in found if "i" in depends(x) and "j" not in depends(x))
    columns = sum(size(x) for x in found if "j" in depends(x) and "i" not in depends(x))
    operations = sum(1 for e in (analyse(spec).inside, spec.weight) for x in walk(e) if x.args and x.op != "load" and depends(x) & _TILED)
    return _Facts(sum(map(size, direct)), narrow, wide, rows, columns, gathers(spec), operations, len(spec.dropouts), bool(analyse(spec).bounds))


def as_measured(spec: AttentionSpec, request: Request) -> bool:
    """Whether a call is like those that were measured: plain programs, with or without a mask of bounds, and many tokens."""
    return spec.tiles is None and not (tile_loads(spec) or spec.dropouts or gathers(spec)) and min(request.queries, request.keys) > 512


_TILED = frozenset(("i", "j", "dot", "weight"))


def work_of(spec: AttentionSpec, request: Request, kind: Sweep, block_d: int, block_e: int, dtypes: tuple[str, ...], stores: int = 0) -> Work:
    """What a kernel does with a tile, for the resource model; `dtypes` are those of its products, `stores` bytes that it writes for each score."""
    facts = _facts(spec)
    qk, pv = element_bytes(spec)
    exact = any(t not in HALF for t in dtypes)
    out = dtype_of(spec.out_dtype).itemsize
    sizes = {"q": qk, "k": qk, "v": pv, "do": out}
    copied = frozenset(r for r, n in sizes.items() if n >= 4 or r not in request.uneven)
    boxes = described_pairs(spec, request.described)
    narrow, boxed, boxed_wide = (sum(n for number, n in reads if number in among) for reads, among in
                                 ((facts.narrow, range(len(spec.operands))), (facts.narrow, boxes), (facts.wide, boxes)))
    held = Contents(qk, pv, out, exact and request.precision == "bf16x6", copied, facts.reads, narrow, facts.rows, facts.columns, stores,
                    facts.indirect, uneven=bool(request.uneven), boxed=boxed, boxed_wide=boxed_wide)
    times = {"ieee": 0, "tf32": 2, "bf16x6": 6}[request.precision] if exact else 1
    mapped = spec.tiles is not None
    return Work(kind, block_d, block_e, held, times, facts.operations, facts.draws, facts.bounded or mapped, TILE if mapped else Work.largest)


def predict(spec: AttentionSpec, plan: KernelPlan, request: Request, visited: float) -> tuple[int, int]:
    """(bytes of HBM traffic, FLOPs) of a call under a plan, where a share `visited` of the tiles is computed."""
    qk_bytes, pv_bytes = element_bytes(spec)
    flops = work(request.batch, request.queries, request.keys, plan.depth, plan.value_depth, visited)
    moved = traffic(request.batch, request.queries, request.keys, plan.depth, plan.value_depth, plan.block_m, qk_bytes, pv_bytes,
                    dtype_of(spec.out_dtype).itemsize, visited)
    return moved, flops
