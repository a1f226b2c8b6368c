"""The shared memory that the compiler takes for a kernel: what is kept, what is buffered, what changes its layout on the way.

    >>> half = Contents(2, 2, 2)
    >>> forward(Tile(64, 64, 64, 64, warps=4, stages=3), half, "wgmma") // 1024          # Q, and three buffers of K and of V
    56

The rules were read from what Triton 3.6 does with 1395 generated kernels of random shapes for sm_80, sm_90, sm_100 and gfx942 (allocations in its
intermediate code, `metadata.shared`), and of about 300 more of float32; of the former 1343 were within a tenth or 2 KiB, 44 above, 8 below:

* Products of Hopper (wgmma) and Blackwell (tcgen05) read tiles of at least 64 rows in shared memory, so a pipeline of n stages holds n
  buffers of what moves; all others copy to registers first and hold n - 1. Blackwell holds one more of what two products read.
* Loads become asynchronous copies, and so stages, where a thread copies at least four bytes: of half types where rows lie a multiple of
  16 elements apart. What does not is one buffer, and on Blackwell's pipelines up to two.
* The weights pass through shared memory where the threads that computed a row of them do not all need it: where the warps of a
  product are more than its rows fill, or lie along the columns of the next product.
* float32 operands in three bfloat16 parts: six bytes of what is kept (Blackwell keeps it in tensor memory), four of what is buffered,
  six of what a product of shared memory is about to read.
* AMD keeps operands in registers: a buffer lives only between a load and its product.
* What is not alive at one time shares its place; an index that was read crosses layouts in eight bytes.

Invariant: for the plans that are tried first the prediction is within a tenth, or 2 KiB, of the compiler's report (tests/test_compile_only.py).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .tiles import Tile, Unit

Sweep = Literal["forward", "queries", "keys", "tiles"]
"""Kernels that walk tiles: forward and that of the queries keep queries and walk keys, that of the keys the other way round."""

_BARRIERS = 128
"""Bytes of the barriers of asynchronous copies and products, with their alignment."""
_ROW_NUMBERS = 12
"""Bytes a row of what the kernel of the keys reads for each: at most three numbers of float32."""
_PARTS = 6
"""Bytes of a float32 number in three bfloat16 parts."""


@dataclass(frozen=True)
class Contents:
    """What the tiles of a kernel hold, whatever their shape.

    Attributes:
        qk, pv, out: bytes an element in main memory of queries and keys, of values, of the result's gradient.
        split: whether float32 operands are taken in three bfloat16 parts.
        copied: the roles (``q k v do``) that asynchronous copies can fetch.
        reads: bytes an element of all that is read at every (i, j), at places that are computed.
        narrow: of these, bytes of elements of less than four bytes: where keys are rows of a tile they lie crosswise and are not staged.
        boxed: of the narrow ones, those that descriptors can fetch, which stages them. boxed_wide: of the others.
        rows, columns: bytes a query, and a key, of what the programs read for each; only what moves is buffered.
        stores: bytes an element of what is written at every (i, j).
        indirect: whether something is read at an index that is read at every (i, j).
        key, value: of the kernel of the keys, whether it sums their gradients (or of what is read for them), and the values'. Without
            the keys' it keeps no values.
        barriers: whether tiles come by descriptors.
        uneven: whether rows of queries, keys or values are no multiple of 16 elements apart.
    """

    qk: int
    pv: int
    out: int
    split: bool = False
    copied: frozenset[str] = frozenset(("q", "k", "v", "do"))
    reads: int = 0
    narrow: int = 0
    rows: int = 0
    columns: int = 0
    stores: int = 0
    indirect: bool = False
    barriers: bool = False
    uneven: bool = False
    boxed: int = 0
    boxed_wide: int = 0
    key: bool = True
    value: bool = True


def forward(tile: Tile, held: Contents, unit: Unit) -> int:
    """Bytes a block of the forward kernel."""
    return _sweep("forward", tile, held, unit)


def backward(kind: Sweep, tile: Tile, held: Contents, unit: Unit) -> int:
    """Bytes a block of a backward kernel; `kind` is what its programs own."""
    return _tiles(tile, held, unit) if kind == "tiles" else _sweep(kind, tile, held, unit)


def _sweep(kind: Sweep, tile: Tile, held: Contents, unit: Unit) -> int:
    if unit == "mfma":
        return _amd(kind, tile, held)
    own = tile.block_n if kind == "keys" else tile.block_m
    wide = unit != "mma" and own >= 64          # products that read shared memory
    whole = wide and unit == "wgmma" and held.qk == 4 and not held.split       # of float32 as it is, in TF32
    kept, moving, epilogue = _parts(kind, tile, held)
    if held.split and unit == "tcgen05" and wide:
        kept = 0
    staged = {r: n for r, n in moving.items() if tile.stages > 1 and r in held.copied}
    loose = {r: n for r, n in moving.items() if r not in staged}
    buffers = (tile.stages if wide and not held.split else tile.stages - 1)
    total = kept
    for role, size in staged.items():
        again = wide and unit == "tcgen05" and not held.split and (kind == "keys" or kind == "queries" and role == "k")
        total += (buffers + again) * size
    vectors = tile.block_m * (held.rows + _ROW_NUMBERS) if kind == "keys" else tile.block_n * held.columns
    scores = tile.block_m * tile.block_n
    total += max(tile.stages - 1, 0) * (vectors + (held.reads - (held.narrow if kind == "keys" else 0)) * scores)
    if kind == "forward" and held.indirect and tile.stages > 1 and (wide and held.uneven or unit == "mma" and held.qk == 4):
        total += (tile.stages - (unit != "tcgen05" and not held.barriers)) * held.qk * scores      # what is read at an index that was read is staged too
    weights = _weights(kind, tile, held, unit, wide)
    if held.split:
        passing = _split(kind, tile, wide, loose, weights, unit)
    else:
        passing = _passing(kind, held, loose, weights, wide)
        turned = whole or wide and unit == "tcgen05" and held.qk == 4 and tile.stages == 1
        if kind == "keys" and turned and held.key and held.value:   # products read the right operand along its columns only: q and do, turned
            passing += tile.block_m * tile.columns(max(tile.block_d, tile.block_e)) * held.qk
        if wide and unit == "tcgen05" and tile.stages > 1 and loose:
            passing = sum(loose.values()) * (4 if kind == "keys" else 3) // 2
    across = _across(kind, tile, held, wide, unit)
    if staged or kind == "keys" and wide and unit == "tcgen05":
        passing += across
    else:
        beside = held.stores and not held.split or held.indirect and kind == "queries" and whole     # keys wait while it crosses
        passing = max(passing, across + (loose.get("k", 0) if beside else 0))
    if held.barriers or wide and unit == "tcgen05":
        total += _BARRIERS
    return max(total + passing, epilogue if kind != "forward" or not wide else 0)


def weights(tile: Tile, held: Contents) -> int:
    """Bytes that the kernel of weights takes at least: each tile crosses to the layout in which it is stored, beside the keys that follow."""
    return tile.stages * tile.block_n * tile.block_d * held.qk + tile.block_m * (tile.block_n + 8) * max(held.qk, held.pv)


def _parts(kind: Sweep, tile: Tile, held: Contents) -> tuple[int, dict[str, int], int]:
    """(bytes that are kept, bytes of a buffer of what moves, bytes of the result on its way to memory)."""
    m, n, d, e = tile.block_m, tile.block_n, tile.block_d, tile.block_e
    qk, pv, out = ((_PARTS if held.split and x == 4 else x) for x in (held.qk, held.pv, held.out))
    some_d, some_e = tile.columns(d), tile.columns(e)       # of what a single product takes; what two take waits for the second, but for parts
    for_two_d, for_two_e = (some_d, some_e) if held.split else (d, e)
    if kind == "forward":
        return m * d * qk, {"k": n * some_d * held.qk, "v": n * some_e * held.pv}, m * e * held.out
    if kind == "queries":
        return m * (d * qk + e * out), {"k": n * for_two_d * held.qk, "v": n * some_e * held.pv}, m * d * held.qk
    kept, result = n * (d * qk + held.key * e * pv), n * max(held.key * d * held.qk, held.value * e * held.pv)
    twice = held.key and held.value
    return kept, {"q": m * (for_two_d if held.key else some_d) * held.qk, "do": m * (for_two_e if twice else some_e) * held.out}, result


def _weights(kind: Sweep, tile: Tile, held: Contents, unit: Unit, wide: bool) -> int:
    """Bytes of the weights, or of the scores' gradients, where they pass through shared memory."""
    own = tile.block_n if kind == "keys" else tile.block_m
    size = tile.block_m * tile.block_n * (_PARTS if held.split and held.pv == 4 else held.pv)
    if wide:
        return size if kind != "forward" and unit == "wgmma" and tile.warps == 8 and own == 64 else 0
    crowded = own < 16 * tile.warps
    if unit == "mma":
        columns = tile.columns(tile.block_e if kind == "forward" else max(tile.block_d, tile.block_e))
        crowded = columns > own or kind != "forward" and own <= 16
    return size if crowded else 0


def _passing(kind: Sweep, held: Contents, loose: dict[str, int], weights: int, wide: bool) -> int:
    """Bytes of what lives within one step: buffers of what is not staged, and the weights. What only one product takes leaves its place at once."""
    if kind == "forward":
        return max(loose.get("k", 0), loose.get("v", 0) + weights)
    if not loose:
        return weights
    if kind == "queries":
        return loose.get("k", 0) + max(*((loose.get("v", 0),) if wide else loose.values()), weights)
    if not held.key:
        return max(*loose.values(), weights) if wide else max(loose.values()) + weights
    return sum(loose.values()) + (weights if wide else max(*loose.values(), weights))


def _split(kind: Sweep, tile: Tile, wide: bool, loose: dict[str, int], weights: int, unit: Unit) -> int:
    """The same where operands are in parts."""
    widest = tile.columns(max(tile.block_d, tile.block_e))
    if wide:
        return _PARTS * (tile.block_m * (widest + (0 if unit == "wgmma" else tile.block_n)) if kind == "keys" else tile.block_n * widest)
    return max(sum(loose.values()) if kind == "keys" else max(loose.values(), default=0), weights)


def _across(kind: Sweep, tile: Tile, held: Contents, wide: bool, unit: Unit) -> int:
    """Bytes of the scores' own reads and results where they cross between the layout of a load or a store and that of a product."""
    scores = tile.block_m * tile.block_n
    if held.indirect and (held.key or kind != "keys"):
        return scores * (4 if kind == "forward" and wide and tile.warps == 4 and tile.block_n >= 64 and held.qk < 4 else 8)
    if kind == "keys" and wide and unit == "tcgen05":
        return scores * held.narrow
    crosses = unit in ("mma", "mfma") or kind == "tiles" or unit == "wgmma" and held.qk == 4
    return scores * (4 if held.reads and tile.stages == 1 and crosses else held.stores)


def _amd(kind: Sweep, tile: Tile, held: Contents) -> int:
    m, n = tile.block_m, tile.block_n
    size = 4 if held.split else held.pv
    kept, moving, epilogue = _parts(kind, tile, held)
    staged = {r: x for r, x in moving.items() if tile.stages > 1 and r in held.copied and x >= 4 * 64 * tile.warps}
    loose = {r: x for r, x in moving.items() if r not in staged}
    buffers = (tile.stages - 1) * sum(staged.values())
    through = kind != "forward" or m >= 64 or min(n, tile.block_e) <= 16 or size == 4
    weights = m * n * size if through else 0
    across = m * n * (8 if held.indirect else 0 if not held.reads else 4 if kind == "forward" else held.reads)
    once = [*loose.values(), weights, across]
    first = m * tile.block_d * held.qk if kind != "keys" else n * tile.block_d * held.qk
    other = kept - first
    return max(first, other, buffers + max(once), epilogue if kind != "keys" else 0)


def _tiles(tile: Tile, held: Contents, unit: Unit) -> int:
    """The kernel of tiles: everything moves, from one attention to the next."""
    m, n, d, e = tile.block_m, tile.block_n, tile.columns(tile.block_d), tile.columns(tile.block_e)
    q, k, v, do = m * d * held.qk, n * d * held.qk, n * e * held.pv, m * e * held.out
    wide = unit in ("wgmma", "tcgen05") and m >= 64
    if tile.stages > 1:
        own = held.reads * m * n + tile.block_m * held.rows + tile.block_n * held.columns
        return (tile.stages if wide else tile.stages - 1) * (q + k + v + do) + (tile.stages - 1) * own + _across("tiles", tile, held, wide, unit) + _BARRIERS
    if unit == "mfma" or held.split and not wide:
        return max(q, k, v, do, _across("tiles", tile, held, wide, unit))
    if wide and unit == "wgmma" and held.qk == 4:
        both = max(q, do, max(k, v) * _PARTS // 4) if held.split else max(q + k, v + do)
    else:
        both = max(q + k, v + do, q + do if wide and not held.barriers else 0) * (_PARTS if held.split else 4) // 4
    kept = m * n * held.boxed_wide if held.barriers else 0      # fetched once for all attentions, and not yet narrow enough for registers
    return max(both + kept, _across("tiles", tile, held, wide, unit)) + (_BARRIERS if wide else 0)
