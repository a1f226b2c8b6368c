"""How long a kernel will take, and how many registers: a model of one processor, from a handful of constants.

    >>> work = Work("forward", 128, 128, Contents(2, 2, 2, barriers=True))
    >>> round(steps(work, Tile(128, 64, 128, 128, warps=4, stages=2), device("h200"), 98 * 1024).cycles)        # for 128x64 scores
    1959

One step of a program is one tile. It needs the tensor cores, the other lanes (exponentials, the programs' arithmetic), shared memory and
the shared cache for some cycles each. R programs on a processor overlap, so of each R steps the busiest unit is busy all the time and the
rest of a step is hidden R-fold:

    step = busiest + (products + others + FIXED - busiest) / R

Constants: EFFICIENCY, EXPONENTIALS, SIMPLE, FIXED, GROUPS and _BACKWARD are those with which kernels measured on an H200 come out (bfloat16, 4096
tokens, causal and full, head dimensions 64, 128 and 256: bench/NOTES.md has the sixteen figures): fourteen within 16 %; the other two spill
registers, of which the model knows nothing. LATENCY and CACHE are round numbers. For other devices only the rates of their data sheets differ, and nothing
was measured there. Registers are fitted to the kernels of `memory`, good to about 30: that ranks, and does not promise.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .memory import Contents, Sweep
from .tiles import KIB, Device, Tile, Unit

EFFICIENCY = 0.78
"""What tensor cores reach of their data sheet under full power."""
EXPONENTIALS = 16
"""A processor and cycle."""
SIMPLE = 4.5
"""Operations a score of the online softmax beside its exponential."""
FIXED = 300
"""Cycles of a step in which nothing is busy: barriers, dependences."""
GROUPS = 1.4
"""How much two groups of four warps, each with rows of its own, are like two programs: they do not wait for each other all the time."""
LATENCY = 700
"""Cycles from a load to its data, hidden by stages."""
CACHE = 40
"""Bytes that a processor gets a cycle from the cache that all share."""
SHARED = 128
"""Bytes a cycle of shared memory."""
_FILE = 65536
"""Registers of a processor (of AMD's, of its four units together: twice that)."""
_DRAWING = 40
"""Operations for one random number of dropout."""
_PRODUCTS: dict[Sweep, tuple[int, int]] = {"forward": (1, 1), "queries": (2, 1), "tiles": (1, 1)}
"""Products along the depth of queries and keys, and along that of values, of a step; the kernel of the keys has as many as it has sums."""
_BACKWARD = 2
"""Operations a score that backward has beyond forward's."""

# (constant, a number of the sums, of the scores, of what is kept, of what moves), numbers a thread; by whether products read shared memory.
# Of Blackwell's large products sums lie in tensor memory and come by when they are scaled.
_REGISTERS: dict[tuple[bool, Sweep], tuple[float, float, float, float, float]] = {
    (False, "forward"): (70, 1.25, 1.6, 0.5, 0.45), (False, "keys"): (64, 0.9, 1.3, 0.9, 0.45), (False, "queries"): (60, 0.0, 2.3, 0.8, 0.7),
    (True, "forward"): (35, 0.8, 1.6, 0.0, 0.0), (True, "keys"): (50, 0.8, 3.2, 0.0, 0.0), (True, "queries"): (30, 1.5, 2.4, 0.0, 0.0),
    (False, "tiles"): (60, 1.0, 2.0, 0.0, 0.7), (True, "tiles"): (40, 1.0, 2.0, 0.0, 0.0)}
_REGISTERS_TENSOR: dict[Sweep, tuple[float, float, float, float, float]] = {
    "forward": (45, 0.7, 1.8, 0.0, 0.5), "keys": (50, 0.8, 3.0, 0.0, 0.3), "queries": (50, 0.5, 3.0, 0.0, 0.3), "tiles": (40, 1.0, 2.0, 0.0, 0.0)}
_REGISTERS_AMD = (85.0, 1.2, 5.0, 1.0, 2.7)
_REGISTERS_SPLIT = (98.0, 0.0, 1.4, 4.1, 2.7)
_REGISTERS_SPLIT_WIDE = (60.0, 1.5, 2.0, 0.0, 2.7)
"""Of operands in parts where products read those that are kept in shared memory, on Hopper; good to about 80."""
_POINTERS = 35
"""Registers of the addresses of a tile that products of shared memory would not need."""
_UNEVEN = 50
"""And of one that is read element by element."""
_USABLE_AMD = 0.7
"""Half of AMD's registers hold sums of products only; beyond this share kernels were seen to spill."""
_SPILL = 50
"""So many registers too many take as long again: a guess, to keep away from them."""


@dataclass(frozen=True)
class Work:
    """What a kernel does with a tile, whatever its shape.

    Attributes:
        kind: what it walks. block_d, block_e: padded head dimensions. held: see `memory`.
        times: how often tensor cores take a product: 1 for half types, 2 for TF32, 6 for three bfloat16 parts; 0 without tensor cores.
        operations: of the score and weight programs, a score. draws: of dropout, a score.
        bounded: whether only a part of the tiles is visited.
        largest: queries and keys of a tile at most, where a map of tiles says so.
    """

    kind: Sweep
    block_d: int
    block_e: int
    held: Contents
    times: int = 1
    operations: int = 1
    draws: int = 0
    bounded: bool = False
    largest: int = 128

    def fetched(self, described: bool) -> Work:
        """The same where tiles come by descriptors, if they do: then every tile is copied asynchronously."""
        held = self.held
        return replace(self, held=replace(held, barriers=True, copied=Contents.copied, narrow=held.narrow - held.boxed)) if described else self


@dataclass(frozen=True)
class Step:
    """Cycles of a processor for one tile, when `blocks` programs share it, and what is busiest; `registers` a thread."""

    cycles: float
    blocks: int
    registers: int
    busiest: str


def registers(work: Work, tile: Tile, unit: Unit, lanes: int) -> int:
    """Registers a thread, about; where a plan says how many there may be, no more than that: what it spills then is not predicted."""
    m, n, d, e, threads = tile.block_m, tile.block_n, tile.block_d, tile.block_e, tile.warps * lanes
    own = n if work.kind == "keys" else m
    wide = unit in ("wgmma", "tcgen05") and own >= 64
    held, reads = work.held, work.held.reads > 0
    base, sums, scores, kept, moving = (_REGISTERS_AMD if unit == "mfma" else _REGISTERS_SPLIT_WIDE if held.split and wide and unit == "wgmma" else
                                          _REGISTERS_SPLIT if held.split else
                                          _REGISTERS_TENSOR[work.kind] if wide and unit == "tcgen05" else _REGISTERS[wide, work.kind])
    totals = {"forward": m * e, "queries": m * d, "keys": n * (held.key * d + held.value * e), "tiles": m * n}[work.kind]
    still = {"forward": m * d, "queries": m * (d + e), "keys": n * (d + held.key * e), "tiles": 0}[work.kind]
    walks = (m if work.kind == "keys" else n) * tile.columns(max(d, e))
    scores += 1.5 * reads + 0.5 * held.stores + (2.5 if work.draws and not wide else 0.0)
    scores += (4.7 if work.kind == "forward" else 14.0) if held.indirect else 0.0
    pointers = (_POINTERS if wide and not held.barriers else 0) + (_UNEVEN if held.copied < Contents.copied else 0)
    need = math.ceil(base + pointers + (sums * totals + scores * m * n + kept * still + moving * walks) / threads)
    return min(need, tile.most_registers or need)


def steps(work: Work, tile: Tile, device: Device, shared: int, most: int = 16) -> Step:
    """One step of a kernel.

    Args:
        work, tile: what is done, in which shape. shared: bytes of shared memory a block. most: programs that there are for a processor.
    """
    m, n, d, e = tile.block_m, tile.block_n, tile.block_d, tile.block_e
    own, moved = (n, m) if work.kind == "keys" else (m, n)
    wide = device.asynchronous and own >= 64
    need = registers(work, tile, device.unit, device.lanes)
    blocks = min(most, _blocks(device, tile, shared, need))

    held = work.held
    along_d, along_e = _PRODUCTS.get(work.kind, (1 + held.key, held.key + held.value))
    flops = 2 * m * n * (along_d * d + along_e * e)
    rate = device.width * EFFICIENCY * (0.6 if device.asynchronous and not wide else 1.0)
    products = flops * work.times / rate if work.times else flops / (2 * device.lanes_simple)
    operations = SIMPLE + work.operations + work.draws * _DRAWING + (_BACKWARD if work.kind != "forward" else 0)
    others = m * n * (1 / EXPONENTIALS + operations / device.lanes_simple) + (m * e / device.lanes_simple if work.kind == "forward" else 0)
    size = max(work.held.qk, work.held.pv)
    swept = moved * (d + e) * size
    readers = max(1, own // 64) if wide else max(1, min(tile.warps, own // 16))
    inside = (swept * (1 + readers * (along_d + along_e) / 2) + (own * d * size if wide else 0)) / SHARED
    outside = (swept + m * n * work.held.reads) / CACHE
    units = {"products": products, "exponentials and arithmetic": others, "shared memory": inside, "the shared cache": outside}
    busiest = max(units, key=lambda u: units[u])
    apart = blocks * (GROUPS if tile.warps >= 8 and own >= 128 else 1.0)
    cycles = units[busiest] + max(products + others + FIXED - units[busiest], FIXED) / apart
    ahead = (tile.stages if wide else tile.stages - 1) if tile.stages > 1 else 0
    cycles += max(0.0, LATENCY - ahead * cycles * blocks) / blocks
    cycles *= 1 + max(0, need - limit(device, tile)) / _SPILL
    return Step(cycles, blocks, need, busiest)


def limit(device: Device, tile: Tile) -> int:
    """Registers that a thread may have before some are spilled."""
    there = min(device.registers, _file(device) // (tile.warps * device.lanes))
    return int(there * _USABLE_AMD) if device.unit == "mfma" else there


def _file(device: Device) -> int:
    return _FILE * (2 if device.unit == "mfma" else 1)


def _blocks(device: Device, tile: Tile, shared: int, need: int) -> int:
    """Programs that share a processor."""
    threads = tile.warps * device.lanes
    rounded = min(-(-need // 8) * 8, limit(device, tile) + 1)
    return max(1, min(device.capacity // (shared + KIB), _file(device) // (rounded * threads), 2048 // threads, 16))


def cycles(work: Work, tile: Tile, device: Device, shared: int, queries: int, keys: int, batch: int) -> float:
    """Cycles of the whole launch: all programs of all attentions, wave by wave."""
    length, walked, own, moving = ((keys, queries, tile.block_n, tile.block_m) if work.kind == "keys" else
                                   (queries, keys, tile.block_m, tile.block_n))
    programs = batch * math.ceil(length / own)
    step = steps(work, tile, device, shared, max(1, math.ceil(programs / device.processors)))
    visited = walked / moving
    cut = 1.0
    if work.bounded:
        visited = max(1.0, (walked + own) / 2 / moving)
        cut = own / moving + 1
    alone = (math.ceil(visited) if not work.bounded else visited) * step.cycles + cut * LATENCY / step.blocks        # cut tiles have little of a pipeline
    alone += (1500 + own * (tile.block_d + tile.block_e) * work.held.qk / CACHE) / step.blocks
    together = device.processors * step.blocks
    waves = programs / together
    return alone * step.blocks * (math.ceil(waves) if waves < _MANY else waves)


_MANY = 4
"""Waves from which on the last one does not count."""
