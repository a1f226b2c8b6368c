"""The kernels that make a map of tiles (`attnfuse.tilemap`): what each tile holds, then the lists.

One program a tile evaluates the mask's two predicates at its 64 x 64 positions and stores two bits. A second kernel, which is the
same for every mask, sorts each row of these and each column into a list.

    rows, columns = launch(mask, operands, sizes, device)
"""
from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..algebra import simplify
from ..program import Expr, apply
from ..ranges import bounds_of
from ..spec import dtype_of
from ..tilemap import COUNTS, TILE, Mask, shapes
from . import cache, header
from .arguments import Arguments, Names, number
from .emission import RESERVED, Kernel, wrapped
from .launcher import Launch, Together, contiguous, empty
from .scores import Body, Programs
from .text import level, prepare
from .writer import Writer

ALIVE, FULL = 1, 2
"""The bits of a tile: some position is not dead; every position within the lengths is full."""
CHUNK = 128
"""Tiles of a row that the sorting kernel takes at once."""
OPTIONS = {"num_warps": 4}
"""What Triton is told of the kernel that looks at the tiles."""

_LISTS = f'''
@triton.jit(do_not_specialize=["n_rows", "n_columns", "n_queries", "n_keys", "n_first"])
def list_tiles(bits_ptr, rows_ptr, columns_ptr, n_rows, n_columns, n_queries, n_keys, n_first, CHUNK: tl.constexpr):
    """One row of the map: how many tiles are full, how many are not empty, then full, cut and empty ones. The first programs make the rows
    of tiles of queries, the others those of tiles of keys."""
    pid = tl.program_id(0)
    if pid < n_first:
        number, n_lists, n_entries, length = pid, n_rows, n_columns, n_keys
        list_stride, entry_stride = n_columns, 1
        lists_ptr = rows_ptr
    else:
        number, n_lists, n_entries, length = pid - n_first, n_columns, n_rows, n_queries
        list_stride, entry_stride = 1, n_columns
        lists_ptr = columns_ptr
    bits_ptr += (number // n_lists).to(tl.int64) * n_lists * n_entries + number % n_lists * list_stride
    lists_ptr += number.to(tl.int64) * (n_entries + {COUNTS})
    n_full = 0
    n_alive = 0
    for start in range(0, n_entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        bits = tl.load(bits_ptr + entry * entry_stride, mask=entry < n_entries, other=0)
        full = (bits == {ALIVE | FULL}) & ((entry + 1) * {TILE} <= length)        # full tiles are read without a mask
        n_full += tl.sum(full.to(tl.int32), 0)
        n_alive += tl.sum((bits & {ALIVE}).to(tl.int32), 0)
    tl.store(lists_ptr, n_full)
    tl.store(lists_ptr + 1, n_alive)
    next_full = {COUNTS}
    next_cut = {COUNTS} + n_full
    next_empty = {COUNTS} + n_alive
    for start in range(0, n_entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        bits = tl.load(bits_ptr + entry * entry_stride, mask=entry < n_entries, other=0)
        full = (bits == {ALIVE | FULL}) & ((entry + 1) * {TILE} <= length)
        empty = (bits & {ALIVE}) == 0
        cut = (full | empty) ^ True
        before_full = tl.cumsum(full.to(tl.int32), 0) - 1
        before_cut = tl.cumsum(cut.to(tl.int32), 0) - 1
        before_empty = tl.cumsum(empty.to(tl.int32), 0) - 1
        place = tl.where(full, next_full + before_full, tl.where(cut, next_cut + before_cut, next_empty + before_empty))
        tl.store(lists_ptr + place, entry, mask=entry < n_entries)
        next_full += tl.sum(full.to(tl.int32), 0)
        next_cut += tl.sum(cut.to(tl.int32), 0)
        next_empty += tl.sum(empty.to(tl.int32), 0)
'''


@functools.lru_cache(maxsize=512)
def emit(mask: Mask, wide: bool) -> Kernel:
    """The kernel that looks at the tiles of a mask; `wide` for 64-bit offsets."""
    arguments, names = Arguments(), Names((*RESERVED, "bits_ptr", "bits", "within", "n_alive", "n_full", "n_within", "n_rows", "n_columns", "rest"))
    programs = Programs(mask, names, arguments, wide, {})
    for axis in ("i", "j"):
        programs.size(axis)
    which, body = Writer(), Body(programs, masked=True)
    _which_tile(which, mask, programs)
    one = simplify(apply("not", mask.dead)) == simplify(mask.full)      # what is not dead is full, as in most masks
    alive, full = (_along(body, programs, prepare(x, {})) for x in (mask.full if one else apply("not", mask.dead), mask.full))
    beyond = _beyond(mask, programs)
    tile = Writer()
    for axis, label in (("queries", "m"), ("keys", "n")):
        tile.line(f"offs_{label} = start_{label} + tl.arange(0, BLOCK_{label.upper()})")
        if wide:
            tile.line(f"offs_{label} = offs_{label}.to(tl.int64)")
        tile.line(f"{label}_mask = offs_{label} < n_{axis}")
    tile.extend([*programs.hoisted, *body.moving, *body.tiles])
    tile.line("within = m_mask[:, None] & n_mask[None, :]")
    tile.line(f"n_alive = tl.sum((within & ({alive})).to(tl.int32))")
    tile.line("n_full = n_alive" if one else f"n_full = tl.sum((within & ({full})).to(tl.int32))")
    tile.line("n_within = tl.minimum(n_queries - start_m, BLOCK_M) * tl.minimum(n_keys - start_n, BLOCK_N)")
    tile.line(f"bits = tl.where(n_alive > 0, {ALIVE}, 0) + tl.where(n_full == n_within, {FULL}, 0)")
    arguments.pointer("bits_ptr", "bits")

    whole, batch = Writer(), ", ".join(mask.batch)
    whole.line(f'"""What one tile of the mask holds{f", of one {batch}" if batch else ""}."""')
    whole.extend([*which.lines, *programs.scalars])
    if beyond:
        whole.line(f"if {' | '.join(beyond)}:")
        whole.line("    tl.store(bits_ptr + pid, tl.zeros([], tl.int8))        # all of it lies beyond a bound")
        whole.line("else:")
    whole.extend(f"{'    ' if beyond else ''}{x}" for x in (*tile.lines, "tl.store(bits_ptr + pid, bits.to(tl.int8))"))
    return wrapped("tiles_of_mask", programs, whole, {"BLOCK_M": TILE, "BLOCK_N": TILE})


def _which_tile(w: Writer, mask: Mask, programs: Programs) -> None:
    """Lines that find the program's tile and its batch position."""
    w.line("# which queries and keys")
    w.line("n_rows = tl.cdiv(n_queries, BLOCK_M)")
    w.line("n_columns = tl.cdiv(n_keys, BLOCK_N)")
    w.line("pid = tl.program_id(0)")
    w.line("start_n = pid % n_columns * BLOCK_N")
    w.line("rest = pid // n_columns")
    w.line("start_m = rest % n_rows * BLOCK_M")
    rest = "rest // n_rows"
    for place, name in reversed(list(enumerate(mask.batch))):
        outer = programs.names.of(("outer", name), f"outer_{name}")
        w.line(f"{outer} = {rest}")
        w.line(f"{programs.axis(name)} = {outer}{f' % {programs.size(name)}' if place else ''}")
        rest = f"{outer} // {programs.size(name)}"


def _beyond(mask: Mask, programs: Programs) -> list[str]:
    """Conditions under which a whole tile is dead by a bound alone, as half of them are under ``j <= i``: then nothing is read."""
    found = []
    for part in _alternatives(mask.dead):
        for bound in bounds_of(simplify(apply("not", part))):
            offset = programs.scalar(bound.offset).within(5)
            if bound.side == "upper":
                reach = "tl.minimum(start_m + BLOCK_M, n_queries) - 1 + " if bound.slope else ""
                found.append(f"(start_n > {reach}{offset})")
            else:
                found.append(f"(start_n + BLOCK_N <= {'start_m + ' if bound.slope else ''}{offset})")
    return found


def _alternatives(condition: Expr) -> Iterator[Expr]:
    """Conditions of which one is enough."""
    if condition.op == "or":
        for part in condition.args:
            yield from _alternatives(part)
    else:
        yield condition


def _along(body: Body, programs: Programs, predicate: Any) -> str:
    """The text of a predicate, of the shape of a tile or broadcasting to it."""
    text = body.text(predicate)
    where = level(predicate)
    if where in ("tile", "scalar"):
        return text.text
    return f"{text.within(8)}{programs.along[where]}"


def render(mask: Mask, kernel: Kernel) -> str:
    """The whole text of a generated file."""
    reads = ", ".join(f"{n} = {o.dtype} of rank {o.rank}" for n, o in ((f"t{n}", o) for n, o in enumerate(mask.operands)))
    lines = ['"""Kernels that find the empty and the full tiles of a mask, generated by attnfuse.', "",
             *header.wrap(f"dead where {mask.dead}", "    "), *header.wrap(f"full where {mask.full}", "    "),
             *(header.wrap(reads, "    ") if reads else []), "",
             f"Versions: {', '.join(f'{k} {v}' for k, v in header.versions().items())}.", '"""',
             "import triton", "import triton.language as tl", "", ""]
    return "\n".join(line.replace("\\", "/") for line in lines) + f"\n{kernel.source}\n{_LISTS}"


# ---- running

Run = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
_runs: dict[object, Run] = {}
_MOST_RUNS = 1024


def launch(mask: Mask, operands: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The map of a mask, as `tilemap.build` gives it.

    Raises:
        Unsupported: there is no kernel for this mask.
        ValueError: the arguments do not fit the mask.
    """
    key = (mask, tuple(sizes), tuple([(t.shape, t.stride(), t.dtype, t.device) for t in operands]), device)
    run = _runs.get(key)
    if run is None:
        for tensor, fact in zip(operands, mask.operands, strict=True):
            if tensor.dtype != dtype_of(fact.dtype) or tensor.dim() != fact.rank or tensor.device != device:
                raise ValueError(f"operand {fact.name} is {tensor.dtype} of rank {tensor.dim()} on {tensor.device}, "
                                 f"the mask says {fact.dtype} of rank {fact.rank} on {device}")
        if len(_runs) >= _MOST_RUNS:
            _runs.clear()
        run = _runs[key] = _prepare(mask, operands, tuple(sizes), device)
    return run(operands)


def _prepare(mask: Mask, operands: Sequence[torch.Tensor], sizes: tuple[int, ...], device: torch.device) -> Run:
    named = dict(zip(mask.size_names, sizes, strict=True))
    reach = max((sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in operands), default=0)
    wide = reach >= 2 ** 30 or max(named["i"], named["j"]) >= 2 ** 15
    kernel = emit(mask, wide)
    module = _module(mask, wide)
    by_rows, by_columns = shapes(mask, sizes)
    n_rows, n_columns = by_rows[-2], by_columns[-2]
    batch = math.prod(by_rows[:-2])
    layouts = [tuple(t.shape) for t in operands], [tuple(t.stride()) for t in operands]
    integers = [number(a, named, *layouts, {}) for a in kernel.integers]
    at = {name: len(operands) + n for n, name in enumerate(("bits", "rows", "columns"))}
    places = [p.operand if isinstance(p.operand, int) else at["bits"] for p in kernel.pointers]
    plain = [None] * len(places)
    look = Launch(getattr(module, kernel.name), (batch * n_rows * n_columns, 1, 1), plain, integers, dict(kernel.constants), OPTIONS)
    lists = Launch(module.list_tiles, (batch * (n_rows + n_columns), 1, 1), [None] * 3,
                   [n_rows, n_columns, named["i"], named["j"], batch * n_rows], {"CHUNK": CHUNK}, {})
    launch = Together([(look, places), (lists, list(at.values()))], device)
    there = (batch, n_rows, n_columns)
    buffers = [(tuple(s), contiguous(s)) for s in (by_rows, by_columns, there)]

    def run(operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if 0 in there:
            return torch.zeros(by_rows, dtype=torch.int32, device=device), torch.zeros(by_columns, dtype=torch.int32, device=device)
        (rows, columns), bits = (empty(*b, torch.int32, device) for b in buffers[:2]), empty(*buffers[2], torch.int8, device)
        launch([*operands, bits, rows, columns])
        return rows, columns

    def run_elsewhere(operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.device(device):
            return run(operands)

    return run_elsewhere if device.type == "cuda" and torch.cuda.device_count() > 1 else run


@functools.lru_cache(maxsize=512)
def _module(mask: Mask, wide: bool) -> Any:
    kernel = emit(mask, wide)
    parts = (mask.to_json(), repr(wide), repr(sorted(header.versions().items())), cache.fingerprint())
    name = f"{kernel.name}_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:8]}"
    return cache.load(cache.store(name, lambda: render(mask, kernel)))
