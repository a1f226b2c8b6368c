"""Predicted traffic beside the memory controllers' own counters: one layer forward and backward, on a GPU, under Nsight Compute.

    python -m bench.traffic [--only NAME …] [--folder bench/results]       needs ncu and leave to read counters
    python -m bench.traffic --predict h200                                  the predictions alone, on any machine

For each case (GPT-2 medium's layer, a longer one, one with a learned bias, one with grouped heads) and each way to run it (eager, PyTorch's
fused attention, the generated kernels): bytes read from and written to the main memory, as `attnfuse.traffic` predicts them and as
``dram__bytes_read.sum`` and ``dram__bytes_write.sum`` count them, kernel by kernel for the generated ones. The profiler empties the caches
before every kernel, which is what the prediction assumes: each kernel reads everything once. What a kernel leaves in the second-level cache is
written later and not counted as its own. Copies in one piece are not kernels: the profiler does not list them, and here they are not predicted
either. Writes traffic.csv, and every kernel that was counted to traffic_kernels.csv.
"""
from __future__ import annotations

import argparse
import contextlib
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnfuse
from attnfuse.traffic import Call, Traffic
from bench.common import RESULTS, header, save

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
BETWEEN = "spin_kernel"
"""What `torch.cuda._sleep` runs: it stands between two ways in the profiler's list."""
KERNELS = {"attnfuse::attention": "attention_forward", "attnfuse::attention_backward (rows)": "attention_backward_rows",
           "attnfuse::attention_backward (keys)": "attention_backward_keys", "attnfuse::attention_backward (queries)": "attention_backward_queries",
           "attnfuse::attention_backward (tiles)": "attention_backward_tiles", "attnfuse::attention_backward (diagonals)": "attention_backward_diagonals"}
"""How the names of generated functions begin, by what is predicted; the longest that fits counts."""
WAYS = ("eager", "sdpa", "attnfuse")


@dataclass(frozen=True)
class Case:
    """A layer: sizes, dtype, and the heads of keys and values, dropout and bias it has. It is causal unless it has a bias."""

    batch: int
    heads: int
    length: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    key_heads: int | None = None
    dropout: float = 0.0
    bias: bool = False

    def inputs(self, device: str) -> list[Tensor]:
        """Queries, keys, values and the bias, all of which want gradients."""
        heads = (self.heads, self.key_heads or self.heads, self.key_heads or self.heads)
        shapes = [(self.batch, h, self.length, self.width) for h in heads] + [(self.heads, self.length, self.length)] * self.bias
        return [torch.randn(s, device=device, dtype=self.dtype, requires_grad=True) for s in shapes]

    def written(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """As it is written in models."""
        group = self.heads // (self.key_heads or self.heads)
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * self.width ** -0.5
        if bias is not None:
            scores = scores + bias
        else:
            keep = torch.ones(self.length, self.length, dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~keep, torch.finfo(q.dtype).min)
        return F.dropout(scores.softmax(-1), self.dropout, self.dropout > 0) @ v

    def fused(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """PyTorch's own."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, dropout_p=self.dropout,
                                              enable_gqa=self.key_heads is not None)

    def way(self, name: str) -> Callable[..., Tensor]:
        """The layer run in one of the ways."""
        if name == "attnfuse":
            return attnfuse.optimize(self.written, inner="eager", fullgraph=True)
        return self.written if name == "eager" else self.fused


CASES = {
    "headline": Case(64, 16, 1024, 64, torch.float16, dropout=0.1),
    "long": Case(2, 16, 8192, 128),
    "bias": Case(4, 16, 4096, 128, bias=True),
    "grouped": Case(2, 32, 8192, 128, key_heads=8),
}


def step(way: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """One forward and backward pass; the gradients are dropped."""
    out = way(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


# ---- what is predicted

def predictions(case: Case, device: str | None = None) -> dict[str, Traffic]:
    """The traffic of every way on the GPU that is there; for one by name, where none is, of those that are not PyTorch's own kernels there."""
    torch._dynamo.reset()
    found = {}
    for name in WAYS if device is None else ("eager", "attnfuse"):
        with FakeTensorMode() if device else contextlib.nullcontext():      # tensors without memory stand in for a GPU's
            inputs, way = case.inputs("cpu" if device else "cuda"), case.way(name)
            step(way, inputs)                          # compiled outside of the count
            with attnfuse.traffic(device) as found[name]:
                step(way, inputs)
    return found


# ---- what is counted

def profiled(names: Sequence[str]) -> None:
    """Run every way of every case once between the profiler's start and stop, a spinning kernel after each."""
    for name in names:
        case = CASES[name]
        torch._dynamo.reset()
        for way in (case.way(w) for w in WAYS):
            inputs = case.inputs("cuda")
            step(way, inputs)                          # compiled and loaded
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            step(way, inputs)
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def counted(names: Sequence[str]) -> dict[tuple[str, str], list[Call]]:
    """The kernels of every case and way with the bytes that the counters saw.

    Raises:
        RuntimeError: there is no ncu, or it may not read counters here.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("ncu (Nsight Compute) is not on the PATH; --predict h200 prints the predictions without it")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "counters.csv")
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--metrics", f"{READ},{WRITTEN}", "--csv", "--page", "raw",
                   "--print-units", "base", "--log-file", str(report), sys.executable, "-m", "bench.traffic", "--profiled", "--only", *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        text = report.read_text() if report.exists() else ""
        if done.returncode or READ not in text:
            raise RuntimeError(f"ncu read no counters (exit {done.returncode}): {(text + done.stdout + done.stderr)[-1500:]}")
    groups = parsed(text)
    wanted = [(name, way) for name in names for way in WAYS]
    if len(groups) != len(wanted):
        raise RuntimeError(f"ncu saw {len(groups)} runs where there were {len(wanted)}")
    return dict(zip(wanted, groups, strict=True))


def parsed(text: str) -> list[list[Call]]:
    """The profiler's table, one list of kernels for each stretch that a spinning kernel ends."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    names, units, *kernels = rows
    name, read, written = (names.index(x) for x in ("Kernel Name", READ, WRITTEN))
    if {units[read], units[written]} != {"byte"}:
        raise RuntimeError(f"the counters are in {units[read]} and {units[written]}, not in bytes")
    groups: list[list[Call]] = [[]]
    for row in kernels:
        if BETWEEN in row[name]:
            groups.append([])
        else:
            groups[-1].append(Call(row[name], *(round(float(row[n].replace(",", ""))) for n in (read, written))))
    return groups[:-1]


# ---- the table

def rows_of(name: str, way: str, case: Case, predicted: Traffic, seen: Sequence[Call]) -> list[dict[str, Any]]:
    """The whole of a way, then each generated kernel; bytes in GB."""
    found = [("all", [c for c in predicted.calls if c.kernel], seen)]
    if way == "attnfuse":
        for op in dict.fromkeys(c.op for c in predicted.calls if c.op in KERNELS):
            found.append((op.removeprefix("attnfuse::"), [c for c in predicted.calls if c.op == op], [c for c in seen if generated(c.op) == op]))
    out = []
    for part, ours, theirs in found:
        row: dict[str, Any] = {"case": name, "B": case.batch, "H": case.heads, "T": case.length, "D": case.width,
                               "dtype": str(case.dtype).removeprefix("torch."), "way": way, "part": part}
        for kind, calls in (("predicted", ours), ("counted", theirs)):
            row |= {f"{kind}_read_GB": _gb(c.read for c in calls), f"{kind}_written_GB": _gb(c.written for c in calls),
                    f"{kind}_GB": _gb(c.moved for c in calls)}
        row["counted/predicted"] = round(row["counted_GB"] / row["predicted_GB"], 3) if theirs and row["predicted_GB"] else ""
        row["kernels"] = len(theirs)
        out.append(row)
    return out


def kernel_rows(name: str, way: str, seen: Sequence[Call]) -> list[dict[str, Any]]:
    """Every kernel that was counted, in the order in which they ran; bytes in MB."""
    return [{"case": name, "way": way, "number": n, "kernel": short(c.op), "read_MB": round(c.read / 1e6, 3), "written_MB": round(c.written / 1e6, 3)}
            for n, c in enumerate(seen)]


def short(function: str, width: int = 100) -> str:
    """The name of a kernel without namespaces, result and parameters, and with as much of its template arguments as fits.

    >>> short("void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<c10::Half>>(int, T2)")
    'vectorized_elementwise_kernel<4, FillFunctor<Half>>'
    """
    plain = re.sub(r"\((?:anonymous namespace|int|bool|unsigned int|long)\)|<unnamed>", "", function)
    plain = re.sub(r"\w*::", "", plain)
    depth = 0
    for n, c in enumerate(plain):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            plain = plain[:n]
            break
    plain = re.sub(r"^(?:void|__global__)\s+", "", plain.strip())
    return plain if len(plain) <= width else plain[:width - 1] + "…"


def generated(function: str) -> str | None:
    """Which predicted kernel a generated function is."""
    fitting = [op for op, start in KERNELS.items() if function.startswith(start)]
    return max(fitting, key=lambda op: len(KERNELS[op])) if fitting else None


def _gb(values: Iterator[int]) -> float:
    return round(sum(values) / 1e9, 4)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.traffic", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(CASES), default=list(CASES))
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--predict", metavar="DEVICE", help="print what is predicted for a device by name, and count nothing")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> None:
    """Predict, count, compare."""
    given = arguments()
    if given.profiled:
        profiled(given.only)
        return
    if given.predict:
        for name in given.only:
            for way, found in predictions(CASES[name], given.predict).items():
                print(f"{name}, {way}\n{found}\n")
        return
    print(header())
    predicted = {name: predictions(CASES[name]) for name in given.only}        # first: a failure here costs no run under the profiler
    seen = counted(given.only)
    rows = [row for name in given.only for way, found in predicted[name].items() for row in rows_of(name, way, CASES[name], found, seen[name, way])]
    for row in rows:
        print({k: v for k, v in row.items() if k not in ("B", "H", "T", "D", "dtype")})
    save("traffic", rows, given.folder)
    save("traffic_kernels", [row for (name, way), calls in seen.items() for row in kernel_rows(name, way, calls)], given.folder)


if __name__ == "__main__":
    main()
