"""The shape of a tile, what a device has, and the arithmetic that both need. What a tile takes of a device is in `memory` and `estimate`.

    >>> DEVICES["cuda", 90].shared // KIB
    227
"""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

KIB = 1024

Unit = Literal["mma", "wgmma", "tcgen05", "mfma"]
"""What takes products: of registers (Ampere, Ada, small Blackwells), of shared memory (Hopper; datacentre Blackwell), AMD's."""


@dataclass(frozen=True)
class Device:
    """Limits that a plan must respect, and the rates from which a time is predicted.

    Attributes:
        name, backend: to print; ``"cuda"`` or ``"hip"``.
        shared: usable shared memory a block, bytes. processors, registers, lanes: a device, a thread, a warp.
        boxes: whether tiles are fetched as boxes, by descriptors: on Hopper, where that was measured. Blackwell has the unit too,
            but the same tiles take more memory there.
        peak: FLOP/s of dense products of float16 or bfloat16 with float32 sums; 0 where it is not known.
        bandwidth: of the main memory, bytes/s; 0 where it is not known.
        cache: the last cache that all processors share, bytes.
        unit: what takes products. width: FLOPs of products of half types a processor a cycle. lanes_simple: float32 operations that are
            not products a processor a cycle.
    """

    name: str
    backend: str
    shared: int
    processors: int
    registers: int = 255
    lanes: int = 32
    boxes: bool = False
    peak: float = 0.0
    bandwidth: float = 0.0
    cache: int = 0
    unit: Unit = "mma"
    width: int = 1024
    lanes_simple: int = 128

    @property
    def asynchronous(self) -> bool:
        """Whether products read their operands from shared memory (Hopper and datacentre Blackwell), which frees registers."""
        return self.unit in ("wgmma", "tcgen05")

    @property
    def capacity(self) -> int:
        """Shared memory of a processor, for all of its blocks, bytes: on NVIDIA's a KiB more than one block may have."""
        return self.shared + KIB if self.backend == "cuda" else self.shared


DEVICES: dict[tuple[str, int], Device] = {
    ("cuda", 80): Device("A100", "cuda", 163 * KIB, 108, width=2048, lanes_simple=64),
    ("cuda", 86): Device("RTX 30", "cuda", 99 * KIB, 84, width=512),
    ("cuda", 87): Device("Orin", "cuda", 163 * KIB, 16),
    ("cuda", 89): Device("RTX 40 / L40", "cuda", 99 * KIB, 128, width=512),
    ("cuda", 90): Device("H100 / H200", "cuda", 227 * KIB, 132, boxes=True, unit="wgmma", width=4096),
    ("cuda", 100): Device("B200", "cuda", 227 * KIB, 148, unit="tcgen05", width=8192),
    ("cuda", 103): Device("B300", "cuda", 227 * KIB, 148, unit="tcgen05", width=8192),
    ("cuda", 120): Device("RTX 50", "cuda", 99 * KIB, 170, width=512),
    ("hip", 90): Device("MI200", "hip", 64 * KIB, 104, 512, 64, unit="mfma"),
    ("hip", 94): Device("MI300X", "hip", 64 * KIB, 304, 512, 64, unit="mfma", width=2048),
}
"""By backend and architecture (compute capability; for AMD the first two digits after ``gfx``). For compiling without a device."""

SMALLEST = Device("unknown", "cuda", 48 * KIB, 64)
"""What is assumed of a device that neither the table nor its driver describes."""


def known(backend: str, arch: int | str) -> Device:
    """The table's entry for a target such as ("cuda", 90) or ("hip", "gfx942"); `SMALLEST` for one it does not hold."""
    if isinstance(arch, str):
        arch = int(arch.removeprefix("gfx")[:2])
    return DEVICES.get((backend, arch), SMALLEST)


@functools.lru_cache(maxsize=64)
def present(device: torch.device) -> Device:
    """The limits of a device that is there, as its driver reports them, else as the table has them."""
    if device.type != "cuda":
        return SMALLEST
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return known("hip", facts.gcnArchName.split(":")[0])
    entry = known("cuda", facts.major * 10 + facts.minor)
    shared = getattr(facts, "shared_memory_per_block_optin", 0) or entry.shared
    return replace(entry, name=facts.name, shared=shared, processors=facts.multi_processor_count)


@dataclass(frozen=True)
class Tile:
    """Rows of queries, rows of keys, padded depths of query·key and of value, and how many threads and buffers work on them; what registers a
    thread may have, 0 for as many as there are; how many columns of a depth a product takes at a time, 0 for all."""

    block_m: int
    block_n: int
    block_d: int
    block_e: int
    warps: int
    stages: int
    most_registers: int = 0
    piece: int = 0

    def columns(self, depth: int) -> int:
        """How many of the columns of a depth are on their way at a time."""
        return min(depth, self.piece) if self.piece else depth


def padded(length: int) -> int:
    """The power of two, at least 16, that a head dimension is padded to in the kernel."""
    return max(16, 1 << max(0, length - 1).bit_length())


def work(batch: int, queries: int, keys: int, depth: int, value_depth: int, visited: float) -> int:
    """Floating-point operations of both products, where a share `visited` of the tiles is computed."""
    return int(2 * batch * queries * keys * (depth + value_depth) * visited)


def traffic(batch: int, queries: int, keys: int, depth: int, value_depth: int, block_m: int, qk_bytes: int, pv_bytes: int,
            out_bytes: int, visited: float) -> int:
    """Bytes that a forward pass moves if no tile stays in a cache: Q and the result once, K and V once a tile of queries."""
    tiles = math.ceil(queries / block_m)
    own = queries * (depth * qk_bytes + value_depth * out_bytes + 8)
    swept = int(tiles * keys * (depth * qk_bytes + value_depth * pv_bytes) * visited)
    return batch * (own + swept)
