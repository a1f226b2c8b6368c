"""The shapes a kernel could have, which of them a device holds, and in what order they are tried.

    choices = ranked(work, request, device, listed, measured, make)
    choices[0].plan                     # what runs
    descending(choices, make)           # what is tried when a device refuses it: ever smaller

Enumerated are all of 16 to 128 queries by 16 to 128 keys, 4 or 8 warps, 1 to 4 stages; what is left out has a reason (`unfit`). Ranked by the
predicted cycles of the launch (`estimate`), with two exceptions. Where shapes were measured, or machine code inspected, for float32 operands,
where registers decide, and where the model was not fitted, the order of `tables` stands; elsewhere another shape has to be predicted faster by
`HANDICAP` to replace the table's first.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .estimate import Step, Work, cycles, limit, registers, steps
from .memory import backward, forward
from .plan import KernelPlan, Request
from .tables import Shape
from .tiles import KIB, Device, Tile, padded

HANDICAP = 1.3
MARGIN = 1.02
"""What a shape must leave of the device's shared memory, for what the model does not see."""
SPARE = 0.92
"""The share of its registers that it may be predicted to take: the model is good to about thirty."""
SPARE_AMD = 0.57
"""The same on AMD, where the model is coarser."""
SMALLER = 0.9
"""Of the shared memory of a plan that was refused, what the next one may take at most."""
HOPELESS = 1.5
"""So many times its registers: kernels that read at indices that are read spill then, even by a model that sees too much in them."""
ALL_REGISTERS = 255
"""That a thread can have; with eight warps they are all that a processor has."""
MOST_TRIED = 5
"""Plans that are compiled in the place of one that spills."""
TOLERATED = 1024
"""Bytes a thread that a kernel may spill before smaller tiles are tried: on an H200 13 of 14 kernels that spilled 8 to 650 took 0.5 to 0.98 of the time of
the next smaller tiles, which spilled less or nothing (bench/NOTES.md)."""
LIGHT = 3
"""Operations a score of programs that spill next to nothing in 128 registers. Five spilled 72 bytes, a mask of columns in cut tiles 288, in the kernel of
tiles 80; there a second read for every score 176, random numbers 256."""
_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Choice:
    """A plan that fits, the cycles that its launch is predicted to take of the device, and one step of it.

    `listed` is the rank in the table of known shapes, None for one that was only enumerated; `settled` whether the order is the table's, whatever
    is predicted, and `measured` whether that is of measurements.
    """

    plan: KernelPlan
    cycles: float
    step: Step
    listed: int | None = None
    measured: bool = False
    settled: bool = False


def memory_of(work: Work, tile: Tile, described: bool, device: Device) -> int:
    """Predicted bytes of shared memory a block."""
    held = work.fetched(described).held
    return forward(tile, held, device.unit) if work.kind == "forward" else backward(work.kind, tile, held, device.unit)


def pressure(work: Work, tile: Tile, described: bool, device: Device) -> int:
    """Predicted registers a thread."""
    return registers(work.fetched(described), tile, device.unit, device.lanes)


def unfit(work: Work, tile: Tile, device: Device, inspected: bool = True) -> str | None:
    """Why a shape that is in no table is not offered; None where it is. Without `inspected` what fits on Hopper is offered untried."""
    if max(tile.block_m, tile.block_n) > work.largest:
        return f"larger than the tiles of the map, of {work.largest}"
    own, moved = (tile.block_n, tile.block_m) if work.kind == "keys" else (tile.block_m, tile.block_n)
    if device.unit == "wgmma" and inspected:
        return "on Hopper only shapes whose machine code was inspected: ptxas 12.8.93 misreads descriptors in some"
    if work.times != 1:
        return "products of float32 operands fill the registers: only shapes that were compiled"
    if work.kind == "tiles" or work.held.indirect:
        return "the model was not fitted to reads at indices that are read, nor to the kernel of tiles: only shapes that were compiled"
    if not compiles(work, tile, device):
        return "Triton 3.6 fails on it for AMD"
    if own < 16 * tile.warps // 2:
        return f"{tile.warps} warps for {own} rows"
    if tile.stages > 1 and moved * max(work.block_d, work.block_e) < 128 * tile.warps:
        return "too small a tile to be copied by all threads"
    need, most = pressure(work, tile, False, device), limit(device, tile)
    if need > most * (SPARE_AMD if device.unit == "mfma" else SPARE):
        return f"about {need} registers a thread of {most}"
    shared = memory_of(work, tile, False, device)
    return None if fits(shared, device) else f"{shared} bytes of shared memory of {device.shared}"


def twice(plan: KernelPlan, registers: int, work: Work, device: Device) -> list[KernelPlan]:
    """The plan with at most so many registers a thread, so that two blocks share a processor: while one waits or computes weights, the other takes
    products. Empty where the processor's shared memory holds one block only, the programs would spill, or tiles do not come by descriptors, with which
    this was measured."""
    crowded = (work.bounded or work.kind == "tiles") and (work.held.rows or work.held.columns)
    one_read = work.held.reads <= 4 and work.held.narrow <= 2
    light = work.operations <= LIGHT and one_read and not work.draws and not crowded
    if not light or not plan.described or 2 * (plan.shared + KIB) > device.capacity:
        return []
    reason = f"at most {registers} registers a thread, so that two programs share a processor"
    return [replace(plan, registers=min(plan.registers, registers), most_registers=registers, reasons=(*plan.reasons, reason))]


def fits(shared: int, device: Device) -> bool:
    """Whether a block may have so many bytes of shared memory, with a margin."""
    return shared * MARGIN <= device.shared


def compiles(work: Work, tile: Tile, device: Device) -> bool:
    """Whether the compiler is known to take a shape: for AMD it fails on pipelines of small tiles that read a value at every (i, j)."""
    return not (device.unit == "mfma" and work.kind == "forward" and work.held.reads and tile.stages > 1 and tile.block_m < 64)


def enumerated(work: Work, request: Request, device: Device, inspected: bool = True) -> list[Shape]:
    """Every shape that fits and is not larger than the call."""
    rows = [m for m in _ROWS if m <= max(16, padded(request.queries))]
    columns = [n for n in _ROWS if n <= max(16, padded(request.keys))]
    found = [(m, n, warps, stages) for m in rows for n in columns for warps in (4, 8) for stages in (1, 2, 3, 4)]
    return [s for s in found if unfit(work, Tile(s[0], s[1], work.block_d, work.block_e, s[2], s[3]), device, inspected) is None]


def class_of(request: Request, device: Device) -> tuple[int, int, int]:
    """(queries, keys, attentions) that stand for a class of calls, so that neighbouring lengths get one plan.

    Lengths above 512 are one class but for keys from 2048 on; what fills the device four times over is as good as endless.
    """
    def near(length: int, *most: int) -> int:
        return padded(length) if length <= 128 else next((x for x in most if length <= x), 4096)

    queries, keys = near(request.queries, 512), near(request.keys, 512, 2047)
    programs = request.batch * max(1, math.ceil(request.queries / 64))
    if programs >= 4 * device.processors:
        return queries, keys, 1 << 16
    tiles = max(1, math.ceil(queries / 64))
    return queries, keys, max(1, padded(programs) // tiles) if programs >= 16 else request.batch


def ranked(work: Work, request: Request, device: Device, listed: Sequence[KernelPlan], measured: bool,
           make: Callable[[Shape], KernelPlan], inspected: bool = True) -> tuple[Choice, ...]:
    """All plans, best first.

    Args:
        listed: plans of known shapes, in the order of their table. measured: whether that order is of measurements on this device.
        make: a plan of a shape.
        inspected: as of `unfit`.
    """
    sizes = class_of(request, device)
    settled = device.unit == "wgmma" or work.times != 1 or work.kind == "tiles" or work.held.indirect

    def choice(plan: KernelPlan, rank: int | None) -> Choice:
        tile = plan.tile
        own = work.fetched(bool(plan.described))
        taken, step = cycles(own, tile, device, plan.shared, *sizes), steps(own, tile, device, plan.shared)
        return Choice(plan, taken, step, rank, measured and rank == 0, settled)

    found = [choice(plan, rank) for rank, plan in enumerate(listed)]
    known = {p.shape for p in listed}
    for shape in enumerated(work, request, device, inspected):
        plan = make(shape) if shape not in known else None
        if plan is not None and plan.shape not in known:
            known.add(plan.shape)
            found.append(choice(plan, None))
    full = lambda c: c.step.registers / limit(device, Tile(c.plan.block_m, c.plan.block_n, 0, 0, c.plan.warps, 1))
    order = sorted(found, key=lambda c: c.cycles * (1.0 if c.listed == 0 and full(c) <= 1 else HANDICAP))
    if settled:
        hopeless = lambda c: device.unit != "wgmma" and work.held.indirect and full(c) > HOPELESS
        order.sort(key=lambda c: (hopeless(c), len(listed) if c.listed is None else c.listed))
    return tuple(order)


def descending(choices: Sequence[Choice], make: Callable[[Shape], KernelPlan]) -> tuple[KernelPlan, ...]:
    """The first choice, then ever smaller ones, with their reasons: what to try when a device, or a compiler, refuses a plan. At least
    two: where only one fits, the smallest tile that `make` can make follows."""
    first = choices[0]
    rest = f"of {len(choices)} shapes that fit" if len(choices) > 1 else "the only shape that fits"
    why = rest if len(choices) == 1 else "measured fastest of several on an H200" if first.measured else \
        f"known to compile well, and predicted within {HANDICAP - 1:.0%} of the fastest {rest}" if first.listed == 0 and not first.settled else \
        f"known to compile well, the first {rest}" if first.listed == 0 else f"predicted fastest {rest}"
    out = [_because(first.plan, f"{why}; bound by {first.step.busiest}, {first.step.blocks} programs a processor")]
    for one in (*choices[1:], min(choices, key=lambda c: (c.plan.shared, c.plan.registers))):
        if one.plan.shared <= SMALLER * out[-1].shared and one.plan.block_m * one.plan.block_n <= out[-1].block_m * out[-1].block_n:
            out.append(_because(one.plan, "the next smaller one, should the device refuse the larger"))
    if len(out) == 1:
        shape = (16, 16, 2 if out[0].shape[:3] == (16, 16, 4) else 4, 1)
        out.append(_because(make(shape), "the smallest tile there is"))
    return tuple(out)


def roomier(choices: Sequence[Choice], device: Device, preferred: KernelPlan) -> tuple[KernelPlan, ...]:
    """What to try where the kernel of a plan spills, with all the registers that a thread can have: the same, for left to itself the assembler spills a
    few for the sake of another block on a processor; then in their order those that are predicted to take fewer than each before, and no more memory."""
    most = ALL_REGISTERS if device.backend == "cuda" else 0
    found = [(preferred, "with all registers, for some spilled")] if most else []
    least = preferred.registers
    for one in choices:
        if one.plan.registers < least and one.plan.shared <= preferred.shared:
            least = one.plan.registers
            found.append((one.plan, "the next, for registers of larger ones spilled"))
    kept = lambda p: tuple(r for r in p.reasons if not r.startswith("at most"))       # registers, which it has all now
    return tuple(_because(replace(p, most_registers=most, reasons=kept(p)), why) for p, why in found[:MOST_TRIED])


def _because(plan: KernelPlan, why: str) -> KernelPlan:
    text = f"{plan.block_m}x{plan.block_n} with {plan.warps} warps and {plan.stages} stages: {why}"
    return replace(plan, reasons=(text, *plan.reasons))
