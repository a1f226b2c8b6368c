"""GPT-2 small on the CPU, as written, through inductor, and fused: time, peak extra memory, and what compiling costs.

    python bench/cpu_demo.py [--length 1024 4096] [--layers 12] [--repeats 3] [--csv bench/results/cpu_demo.csv]

One forward, batch 1, float32, logits of the last position, weights random. Everything is measured in one process and one
run; inductor's and attnfuse's own caches on disk are off, so that the first call is a real compilation.
"""
from __future__ import annotations

import argparse
import csv
import importlib.metadata
import os
import tempfile
from pathlib import Path

import torch

from attnfuse import demo

COLUMNS = ("hardware", "torch", "triton", "transformers", "model", "dtype", "batch", "tokens", "program", "seconds", "time_ratio",
           "peak_extra_mib", "memory_ratio", "first_call_seconds", "pass_seconds", "error_float64")


def version(package: str) -> str:
    """The installed version, or a dash."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def rows(lengths: list[int], layers: int, repeats: int) -> list[dict[str, object]]:
    """One row for each program at each length; the error is taken at the shortest length only."""
    model, what = demo.build(max(lengths), layers)
    fixed: dict[str, object] = {
        "hardware": f"CPU, {torch.get_num_threads()} cores", "torch": torch.__version__, "triton": version("triton"),
        "transformers": version("transformers"), "model": what, "dtype": "float32", "batch": 1}
    table: list[dict[str, object]] = []
    for length in lengths:
        ids = demo.tokens_of(length, torch.device("cpu"))
        found, logits = {}, {}
        for name in demo.PROGRAMS:
            found[name], logits[name] = demo.measure(name, demo.program(model, name), ids, repeats)
            print(f"{length} {name}: {found[name]}", flush=True)
        error = demo.relative_errors(model, ids, logits) if length == min(lengths) else {}
        base = found["eager"]
        for name, m in found.items():
            measured = m.extra is not None and bool(base.extra)
            table.append({
                **fixed, "tokens": length, "program": name, "seconds": f"{m.seconds:.4f}", "time_ratio": f"{m.seconds / base.seconds:.3f}",
                "peak_extra_mib": "" if m.extra is None else f"{m.extra / 2**20:.1f}",
                "memory_ratio": f"{(m.extra or 0) / (base.extra or 1):.3f}" if measured else "",
                "first_call_seconds": f"{m.first:.2f}", "pass_seconds": "" if m.passes is None else f"{m.passes:.2f}",
                "error_float64": f"{error[name]:.2e}" if name in error else ""})
    return table


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "cpu_demo.csv")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["XDG_CACHE_HOME"] = folder
        with torch._inductor.config.patch(force_disable_caches=True), demo.quiet():
            demo.usable_inner(print)  # inductor's own start is nobody's compile time
            table = rows(arguments.length, arguments.layers, arguments.repeats)
    arguments.csv.parent.mkdir(parents=True, exist_ok=True)
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    print(f"wrote {arguments.csv}")


if __name__ == "__main__":
    main()
