"""The kernels of the headline layer's forward pass under the roof, as predicted and as measured: on a GPU.

    python -m bench.roofline_plot [--folder bench/results]        measures, writes roofline_measured.csv, and the picture where matplotlib is there
    python -m bench.roofline_plot --draw FOLDER                   draws FOLDER/roofline_measured.png from the CSV, on any machine

The layer is that of `bench.headline`, with dropout of 0.1: eager, each operation by PyTorch's profiler, and fused. `predicted_ms` is the least time
that the device allows for what is counted, over all kernels of an operation.
"""
from __future__ import annotations

import argparse
import csv
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnfuse
from attnfuse import roofline
from attnfuse.predicting import named
from bench.common import RESULTS, header, save
from bench.headline import BATCH, HEADS, LENGTH, WIDTH, attention

NAME = "roofline_measured"


def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The layer with its dropout."""
    return attention(q, k, v, 0.1)


def measured(shape: Sequence[int] = (BATCH, HEADS, LENGTH, WIDTH), times: int = 20) -> list[dict[str, Any]]:
    """A row for each operation of the report: FLOPs, bytes, milliseconds predicted and measured, and the rates of the device."""
    q, k, v = (torch.randn(*shape, device="cuda", dtype=torch.float16) for _ in range(3))
    with torch.no_grad():
        report = attnfuse.explain(layer, q, k, v, run=False)
        seen = roofline.measure(lambda: layer(q, k, v), times)
        fused = attnfuse.optimize(layer, inner="eager", fullgraph=True)
        seen |= {"fused": roofline.measure(lambda: fused(q, k, v), times)["fused"]}
    return rows_of(report.kernels(seen), named(None))


def rows_of(kernels: Sequence[roofline.Kernel], device: Any) -> list[dict[str, Any]]:
    """The table: what the picture needs, and the device's rates."""
    return [{"kernel": x.name, "flops": round(x.flops), "bytes": round(x.moved), "predicted_ms": round(1e3 * x.seconds(device.peak, device.bandwidth), 4),
             "measured_ms": "" if x.measured is None else round(1e3 * x.measured, 4), "device": device.name, "peak": device.peak,
             "bandwidth": device.bandwidth} for x in kernels]


def draw(folder: Path) -> Path:
    """The picture of a folder's table; raises ImportError without matplotlib."""
    with open(folder / f"{NAME}.csv") as f:
        versions = f.readline().strip("# \n")
        rows = list(csv.DictReader(f))
    kernels = [roofline.Kernel(r["kernel"], float(r["flops"]), float(r["bytes"]), float(r["measured_ms"]) / 1e3 if r["measured_ms"] else None) for r in rows]
    target = folder / f"{NAME}.png"
    axes = roofline.plot(kernels, float(rows[0]["peak"]), float(rows[0]["bandwidth"]))
    axes.set_title(f"forward, B={BATCH} H={HEADS} T={LENGTH} D={WIDTH}, float16, causal, dropout 0.1\n{versions}", fontsize=9)
    axes.figure.savefig(target, dpi=130)
    return target


def main() -> None:
    """Measure and write, or draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.roofline_plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the picture from the table in this folder, and measure nothing")
    given = parser.parse_args()
    if given.draw is None:
        print(header())
        rows = measured()
        print("\n".join(f"{r['kernel']:<20} predicted {r['predicted_ms']:>8} ms   measured {r['measured_ms']:>8} ms" for r in rows))
        save(NAME, rows, given.folder)
        if importlib.util.find_spec("matplotlib") is None:
            print("no matplotlib here: draw with --draw")
            return
    print(draw(given.draw or given.folder))


if __name__ == "__main__":
    main()
