"""The text with which kernels follow a map of tiles (`attnfuse.tilemap`) where their attention comes with one.

A list holds numbers of tiles of 64; a kernel whose own tiles are smaller takes each in parts.

    list_ptr = row_tiles_ptr + (b0.to(tl.int64) * tl.cdiv(n_queries, 64) + start_m // 64) * (tl.cdiv(n_keys, 64) + 2)
    n_full = tl.load(list_ptr)
    for step in range(0, n_full):
        start_n = tl.load(list_ptr + 2 + step) * 64             # but one turn ahead
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ..tilemap import COUNTS, TILE, mapped
from .emission import Emission
from .writer import Writer

Side = Literal["rows", "columns"]
CUT_STAGES = 2
"""Buffers of the loop over tiles that a mask cuts: one would wait for every tile (documents took a quarter longer), three cost the other loop room."""


def cut(emission: Emission, start: str, stop: str) -> str:
    """The head of the loop over tiles that the mask cuts: with a shorter pipeline than full tiles have, unless these may be most of all tiles."""
    found = mapped(emission.spec)
    assert found is not None        # `ranges_of` has made sure
    return emission.loop("step", f"{start}, {stop}", 0 if found.dense else CUT_STAGES)


def parts(block: int) -> int:
    """How many of a kernel's tiles a tile of the map has along one axis; raises ValueError where that is no whole number."""
    if TILE % block:
        raise ValueError(f"tiles of {block} do not divide those of the map, of {TILE}")
    return TILE // block


def locate(emission: Emission, side: Side) -> list[str]:
    """Lines that find the list of the program's own tile, ``list_ptr``, and its counts in the kernel's tiles, ``n_full`` and ``n_alive``."""
    spec, plan, programs = emission.spec, emission.plan, emission.programs
    found = mapped(spec)
    assert spec.tiles is not None and found is not None        # `ranges_of` has made sure
    operand = spec.tiles[side == "columns"]
    pointer = programs.pointer(operand)
    own, others, start = ("n_queries", "n_keys", "start_m") if side == "rows" else ("n_keys", "n_queries", "start_n")
    times = parts(plan.block_n if side == "rows" else plan.block_m)
    parts(plan.block_m if side == "rows" else plan.block_n)
    number = ""
    for name in found.mask.batch:
        own_axis = programs.axis(name)
        number = f"({number}) * {programs.size(name)} + {own_axis}" if number else f"{own_axis}.to(tl.int64)"
    rows = f"tl.cdiv({own}, {TILE})"
    row = f"({number}) * {rows} + {start} // {TILE}" if number else f"{start} // {TILE}"
    scaled = lambda text: text if times == 1 else f"{text} * {times}"
    return [f"n_listed = tl.cdiv({others}, {TILE})",
            f"list_ptr = {pointer} + ({row}) * (n_listed + {COUNTS})",
            f"n_full = {scaled('tl.load(list_ptr)')}",
            f"n_alive = {scaled('tl.load(list_ptr + 1)')}",
            f"list_ptr += {COUNTS}",
            *([f"n_listed *= {times}"] if times > 1 else [])]


@contextmanager
def walk(emission: Emission, w: Writer, label: str, block: int, start: str) -> Iterator[None]:
    """The loop over full tiles. The place of the next tile is read while this one is computed: read in the same turn it would cost the
    pipeline a buffer."""
    load = lambda step: place(block, step)
    w.line(f"next_{label} = {load(f'tl.minimum({start}, n_listed - 1)' if start != '0' else start)}")
    with w.block(emission.loop("step", f"{start}, n_full")):
        w.line(f"start_{label} = next_{label}")
        w.line("following = tl.minimum(step + 1, n_listed - 1)")
        w.line(f"next_{label} = {load('following')}")
        yield


def place(block: int, step: str) -> str:
    """Where the tile number `step` of the list begins."""
    times = parts(block)
    if times == 1:
        return f"tl.load(list_ptr + {step}) * {TILE}"
    return f"tl.load(list_ptr + {step} // {times}) * {TILE} + {step} % {times} * {block}"
