"""Peak memory of one training step of one attention layer against its length: as written, through inductor, and fused.

    python -m bench.training_memory [--device cpu|cuda] [--length 512 1024 …] [--folder bench/results]

Forward and backward of a causal layer of width 256 with 4 heads, batch 1, without dropout and with 0.1 on the weights; float32 on a
CPU, bfloat16 on a GPU. Memory is what was in use at its highest less what was in use before the step. Writes
training_memory_<device>.csv and .png; the exponent is the slope of log(memory) over log(length), by least squares.
"""
from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnfuse
from attnfuse import demo
from bench.common import RESULTS, header, save

PROGRAMS = ("eager", "inductor", "attnfuse")
LENGTHS = {"cpu": [512, 1024, 2048, 4096], "cuda": [1024, 2048, 4096, 8192, 16384]}
MMAP = "MALLOC_MMAP_THRESHOLD_"
"""With this variable small, glibc gives every freed tensor back to the system; else what it hoards would hide the next peak."""


class Layer(nn.Module):
    """Causal attention as people write it; x [batch, tokens, width] → the same shape."""

    def __init__(self, dropout: float, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        weights = F.dropout(scores.masked_fill(~seen, float("-inf")).softmax(-1), self.dropout)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def program(layer: Layer, name: str) -> nn.Module:
    """A copy of the layer, compiled for all lengths as `name` says."""
    made = copy.deepcopy(layer)
    if name == "inductor":
        made.compile(dynamic=True)
    elif name == "attnfuse":
        attnfuse.optimize(made, dynamic=True)
    return made


def peak(made: nn.Module, tokens: int, device: torch.device) -> float:
    """MiB of one step beyond what was there, after a step that compiles."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(1, tokens, 256, device=device, dtype=dtype, requires_grad=True)
    step = lambda: torch.autograd.grad(made(x).square().mean(), [x, *made.parameters()])
    step()
    found = demo.peak_extra(step, device)
    if found is None:
        raise SystemExit("this system does not say how much memory a process had in use at its highest")
    return found / 2 ** 20


def exponent(rows: list[dict[str, Any]]) -> float:
    """The power of the length with which the memory of these rows grows."""
    points = [(math.log(r["T"]), math.log(r["MiB"])) for r in rows]
    x, y = (sum(c) / len(points) for c in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def measure(lengths: list[int], device: torch.device) -> list[dict[str, Any]]:
    """One row for each program, dropout and length."""
    rows: list[dict[str, Any]] = []
    for dropout in (0.0, 0.1):
        torch._dynamo.reset()
        layer = Layer(dropout).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        for name in PROGRAMS:
            made = program(layer, name)
            group = [{"program": name, "dropout": dropout, "T": n, "MiB": round(peak(made, n, device), 2)} for n in lengths]
            if name == "attnfuse" and not (attnfuse.last_report(made) or attnfuse.Report()).rewritten:
                raise SystemExit("the attention was not rewritten")
            rows += [{**r, "exponent": round(exponent(group), 2)} for r in group]
            print(*rows[-len(group):], sep="\n", flush=True)
    return rows


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Both axes logarithmic: a slope of one is linear growth."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, colour in zip(PROGRAMS, ("C3", "C1", "C0"), strict=True):
        for dropout, line in ((0.0, "-"), (0.1, "--")):
            group = [r for r in rows if (r["program"], r["dropout"]) == (name, dropout)]
            label = f"{name}, dropout {dropout:g}: T^{group[0]['exponent']}"
            axes.plot([r["T"] for r in group], [r["MiB"] for r in group], line, marker="o", color=colour, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="peak memory of a training step, MiB")
    ticks = sorted({r["T"] for r in rows})
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.set_title(header(), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    """Measure, write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.device == "cpu" and MMAP not in os.environ:  # read when the process starts
        os.execve(sys.executable, [sys.executable, "-m", "bench.training_memory", *sys.argv[1:]], {**os.environ, MMAP: "65536"})
    torch.manual_seed(0)
    rows = measure(arguments.length or LENGTHS[arguments.device], torch.device(arguments.device))
    name = f"training_memory_{arguments.device}"
    save(name, rows, arguments.folder)
    plot(rows, arguments.folder / f"{name}.png")


if __name__ == "__main__":
    main()
