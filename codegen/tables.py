"""Tile shapes that are known to be good: measured, or at least compiled without spilling for every feature. Data, no decisions.

A row is (largest padded head dimension, [(BLOCK_M, BLOCK_N, warps, stages), …]) from the preferred shape to the smallest.

* Hopper's first choices were within a tenth of the fastest of ten measured on an H200 (bench/results/ranking.csv), most of them the fastest;
  those of kernels of keys or of values alone were the fastest of four (bench/NOTES.md). Their machine code was
  inspected (tests/sass.py): there are no tiles of 32 keys beside 64 queries, no 32x64 for keys and no 64x32 for queries at 256,
  since products read wrong descriptors in them.
* Hopper's of float32 were the fastest, or within a fifth of it and with fewer spills, of about a dozen measured at each head dimension: bench/NOTES.md.
* Ampere's, and those of float32 on Ampere and Blackwell, were compiled without spilling, or with the few bytes that tests/test_compile_only.py
  tolerates, and not measured. Of float32 they are the largest of those that did; exact products of 64 rows take more tensor memory than
  Blackwell has from a head dimension of 128 on.
"""
from __future__ import annotations

Shape = tuple[int, int, int, int]
Shapes = tuple[Shape, ...]
Table = tuple[tuple[int, Shapes], ...]

# ---- forward

HOPPER: Table = (
    (64, ((64, 64, 4, 2), (64, 64, 4, 3), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((128, 64, 8, 2), (64, 64, 8, 2), (32, 16, 4, 1), (16, 16, 4, 1))),
)
LARGER_HOPPER: dict[int, tuple[Shape, int, bool]] = {64: ((64, 128, 4, 2), 2048, True), 128: ((128, 64, 4, 2), 0, False)}
"""What is faster still while the programs are plain: (shape, from how many keys on, whether bounds may cut tiles, rows or columns be read, and
programs do more than `plan.is_simple` allows)."""
PAIRED_HOPPER: Table = ((128, ((128, 64, 8, 4), (128, 64, 8, 3))),)
"""Where a float for every score comes by descriptor."""
PAIRED_MAPPED: Table = ((128, ((64, 64, 4, 2),)),)
"""The same under a map of tiles."""
PAIRED_TWICE: dict[int, tuple[Shape, int]] = {128: ((128, 64, 8, 2), 128)}
"""The same before these, where a processor's shared memory holds two blocks: by padded head dimension the shape, and the registers a thread with which its
registers hold two as well."""
AMPERE: Table = (
    (64, ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((64, 32, 4, 3), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1))),
)
# Products of float32 operands: without tensor cores, unrolled (small tiles, many threads); in three bfloat16 parts; in TF32.
FLOAT32: Table = (
    (64, ((64, 32, 8, 1), (32, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1))),
    (128, ((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 4, 1))),
    (256, ((16, 16, 8, 1), (16, 16, 4, 1))),
)
SPLIT_AMPERE: Table = (
    (64, ((128, 32, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((32, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((32, 64, 8, 1), (16, 64, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
)
SPLIT_BLACKWELL: Table = ((64, ((64, 64, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))), *SPLIT_AMPERE[1:])
SPLIT_HOPPER: Table = (
    (64, ((64, 32, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((128, 32, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
)
TF32_AMPERE: Table = (
    (64, ((64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((64, 64, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
TF32_BLACKWELL: Table = (
    TF32_AMPERE[0],
    (128, ((128, 64, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((64, 64, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
TF32_HOPPER: Table = (
    (64, ((128, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
)
FORWARD_BY_UNIT: dict[tuple[str, str], Table] = {
    ("wgmma", "bf16x6"): SPLIT_HOPPER, ("mma", "bf16x6"): SPLIT_AMPERE, ("tcgen05", "bf16x6"): SPLIT_BLACKWELL,
    ("wgmma", "tf32"): TF32_HOPPER, ("mma", "tf32"): TF32_AMPERE, ("tcgen05", "tf32"): TF32_BLACKWELL,
}
"""By what takes products, and how; `FLOAT32` elsewhere."""

# ---- backward

_SMALLEST: tuple[Shape, ...] = ((32, 32, 4, 1), (16, 16, 4, 1))
KEYS_HOPPER: Table = (
    (64, ((64, 64, 4, 3), (32, 64, 4, 2), *_SMALLEST)),
    (128, ((64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1), *_SMALLEST)),
    (256, ((64, 64, 8, 2), (64, 64, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
QUERIES_HOPPER: Table = (
    (64, ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 1), *_SMALLEST)),
    (128, ((64, 64, 4, 2), (64, 32, 4, 1), *_SMALLEST)),
    (256, ((128, 32, 8, 2), (128, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
QUERIES_FULL: dict[int, Shape] = {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (128, 64, 8, 1)}
"""Hopper's first choice without bounds: larger tiles of queries lose nothing at the edges, and loops that all run alike want fewer buffers."""
KEYS_AMPERE: Table = (
    (64, ((32, 64, 4, 2), (32, 64, 4, 1), *_SMALLEST)),
    (128, ((32, 64, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
)
QUERIES_AMPERE: Table = (
    (64, ((64, 64, 4, 2), (64, 32, 4, 2), *_SMALLEST)),
    (128, ((64, 32, 4, 2), (64, 32, 4, 1), *_SMALLEST)),
    (256, ((64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
TILES_HOPPER: Table = (
    (128, ((128, 64, 8, 2), (128, 64, 8, 1), (64, 64, 8, 2), (64, 64, 4, 1), *_SMALLEST)),
    (256, ((64, 64, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
TILES_TWICE: dict[int, tuple[Shape, int]] = {128: ((128, 64, 8, 1), 128)}
"""As `PAIRED_TWICE`; by padded head dimension, as that."""
TILES_AMPERE: Table = (
    (128, ((64, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
)
BACKWARD_FLOAT32: Table = (
    (64, ((32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
    (256, ((16, 16, 8, 1), (16, 16, 4, 1))),
)
KEYS_SPLIT_HOPPER: Table = ((64, ((32, 128, 8, 1), (64, 64, 4, 1), (32, 64, 4, 1), *_SMALLEST)),)
QUERIES_SPLIT_HOPPER: Table = (
    (64, ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), *_SMALLEST)),
    (128, ((64, 32, 4, 1), (64, 16, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((64, 64, 8, 1), (64, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1))),
)
KEYS_TF32_HOPPER: Table = (
    (64, ((64, 128, 8, 1), (64, 64, 4, 1), (32, 64, 4, 1), *_SMALLEST)),
    (128, ((32, 128, 8, 1), (32, 64, 4, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
)
QUERIES_TF32_HOPPER: Table = (
    (64, ((128, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 1), *_SMALLEST)),
    (128, ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
    (256, ((64, 64, 8, 1), (64, 32, 4, 1), (16, 16, 8, 1), (16, 16, 4, 1))),
)
TILES_SPLIT_HOPPER: Table = (
    (64, ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), *_SMALLEST)),
    (256, ((128, 32, 8, 1), (64, 32, 4, 1), (16, 16, 8, 1), (16, 16, 4, 1))),
)
TILES_TF32_HOPPER: Table = ((256, ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), *_SMALLEST)),)
KEYS_SPLIT_AMPERE: Table = (
    (64, ((64, 32, 8, 1), (32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
    (256, ((16, 16, 8, 1), (16, 16, 4, 1))),
)
KEYS_SPLIT_BLACKWELL: Table = ((64, ((32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1))), *KEYS_SPLIT_AMPERE[1:])
QUERIES_SPLIT: Table = (
    (64, ((32, 64, 8, 1), (32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
    (256, ((32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1))),
)
TILES_SPLIT: Table = ((256, ((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1))),)
KEYS_TF32: Table = (
    (64, ((32, 64, 8, 1), (32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
    (128, ((32, 64, 8, 1), (32, 32, 4, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
    (256, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1))),
)
QUERIES_TF32: Table = (
    (128, ((64, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
    (256, ((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1))),
)
BACKWARD_BY_UNIT: dict[tuple[str, str, str], Table] = {
    ("wgmma", "bf16x6", "keys"): KEYS_SPLIT_HOPPER, ("wgmma", "tf32", "keys"): KEYS_TF32_HOPPER,
    ("wgmma", "bf16x6", "queries"): QUERIES_SPLIT_HOPPER, ("wgmma", "tf32", "queries"): QUERIES_TF32_HOPPER,
    ("wgmma", "bf16x6", "tiles"): TILES_SPLIT_HOPPER, ("wgmma", "tf32", "tiles"): TILES_TF32_HOPPER,
    ("mma", "bf16x6", "keys"): KEYS_SPLIT_AMPERE, ("tcgen05", "bf16x6", "keys"): KEYS_SPLIT_BLACKWELL,
    ("mma", "tf32", "keys"): KEYS_TF32, ("tcgen05", "tf32", "keys"): KEYS_TF32,
    ("mma", "bf16x6", "queries"): QUERIES_SPLIT, ("tcgen05", "bf16x6", "queries"): QUERIES_SPLIT,
    ("mma", "bf16x6", "tiles"): TILES_SPLIT, ("tcgen05", "bf16x6", "tiles"): TILES_SPLIT,
    ("mma", "tf32", "queries"): QUERIES_TF32, ("tcgen05", "tf32", "queries"): QUERIES_TF32,
}
"""By what takes products, how, and the kind of the kernel; `BACKWARD_FLOAT32` elsewhere."""

APART_HOPPER: dict[str, dict[int, tuple[Shapes, Shapes]]] = {
    "half": {256: (((64, 64, 4, 2), (64, 64, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
                   ((64, 128, 8, 2), (64, 64, 8, 1), (64, 64, 4, 2), (32, 32, 8, 1), (16, 16, 4, 1)))},
    "bf16x6": {128: (((32, 128, 8, 1), (16, 64, 4, 1), (32, 32, 8, 1), (16, 16, 4, 1)), ((32, 64, 4, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
               256: (((32, 64, 8, 1), (16, 64, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)), ((32, 128, 8, 1), (32, 64, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)))},
    "tf32": {256: (((32, 64, 4, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
                   ((64, 128, 8, 1), (32, 64, 4, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)))},
}
"""Where the gradients of keys and of values have a kernel each, on Hopper: their shapes, by how products are taken and padded head dimension. The
scores are computed twice, by tiles that one kernel of both has no registers for: a fifth faster for half types at 256."""
PIECES: dict[tuple[str, str], dict[str, int]] = {
    ("wgmma", "bf16x6"): {"forward": 128, "queries": 128, "keys": 256, "tiles": 128},
    ("wgmma", "tf32"): {"forward": 128, "queries": 128, "keys": 128, "tiles": 128},
    ("mma", "bf16x6"): {"forward": 256, "queries": 128, "keys": 256, "tiles": 128},
    ("tcgen05", "bf16x6"): {"forward": 256, "queries": 128, "keys": 128, "tiles": 128},
}
"""From which padded head dimension on products of float32 operands take it in pieces: by what takes them and how, and what the kernel walks."""
PIECE = 64
"""Columns of a piece: no fewer, see `plan_forward.LEAST_VALUE_WIDTH`."""

MEASURED = (HOPPER, KEYS_HOPPER, QUERIES_HOPPER)
"""Whose order is that of measurements, on Hopper."""


def rows(table: Table, width: int) -> tuple[int, Shapes]:
    """The row of a padded head dimension."""
    return next((limit, shapes) for limit, shapes in table if width <= limit)
