"""What the benchmarks share: timing, memory, the header that says on what it ran, and CSV rows with the peers of the same run."""
from __future__ import annotations

import csv
import gc
import math
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

RESULTS = Path(__file__).parent / "results"
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


def header() -> str:
    """The card and the versions; a CPU is named by its number of cores alone."""
    import triton
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return f"{on}; torch {torch.__version__}, triton {triton.__version__}, python {platform.python_version()}"


def milliseconds(fn: Callable[[], Any], repeat_ms: int = 200) -> float:
    """Median time of a call on the GPU. Garbage is collected before and not meanwhile, as by `timeit`: what compilers leave behind would be counted as
    the call's."""
    from triton.testing import do_bench
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        return float(do_bench(fn, warmup=50, rep=repeat_ms, return_mode="median"))
    finally:
        if collects:
            gc.enable()


def extra_memory(fn: Callable[[], Any]) -> float:
    """Peak memory that a call takes beyond what is there before it, MiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = fn()
    torch.cuda.synchronize()
    del out
    return (torch.cuda.max_memory_allocated() - before) / 2 ** 20


def peer(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """PyTorch's fused attention with one backend forced."""
    def call() -> torch.Tensor:
        with sdpa_kernel(PEERS[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return call


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """‖out - exact‖ / ‖exact‖ in float64; infinite where anything is NaN."""
    error = ((out.double() - exact).norm() / exact.norm()).item()
    return error if error == error else math.inf


def forward_flops(batch: int, heads: int, length: int, width: int, causal: bool) -> float:
    """4·B·H·T²·D, half of it where the mask is causal."""
    return 4.0 * batch * heads * length ** 2 * width * (0.5 if causal else 1.0)


def add_ratios(row: dict[str, Any], flops: float) -> dict[str, Any]:
    """The row with TFLOP/s and the ratios to inductor and to the best peer, from its times in ms."""
    row["TFLOP/s"] = round(flops / row["attnfuse_ms"] / 1e9, 1)
    row["inductor/attnfuse"] = round(row["inductor_ms"] / row["attnfuse_ms"], 2)
    row["best_peer/attnfuse"] = round(min(row[f"{n}_ms"] for n in PEERS if f"{n}_ms" in row) / row["attnfuse_ms"], 3)
    return row


def sweep(name: str, measure: Callable[[int, int, bool], dict[str, Any]], widths: Sequence[int], length: int = 4096) -> None:
    """Measure every head width with and without the causal mask, print the rows and save them; the folder is the first argument."""
    print(header())
    rows = []
    for width in widths:
        for is_causal in (True, False):
            rows.append(measure(width, length, is_causal))
            print({k: v for k, v in rows[-1].items() if k not in ("B", "H", "dtype")}, flush=True)
    save(name, rows, Path(sys.argv[1]) if len(sys.argv) > 1 else None)


def save(name: str, rows: Sequence[dict[str, Any]], folder: Path | None = None) -> None:
    """Write rows as CSV, the header line as a comment first."""
    target = (folder or RESULTS) / f"{name}.csv"
    target.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(k for r in rows for k in r))
    with open(target, "w", newline="") as f:
        f.write(f"# {header()}\n")
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows(rows)
