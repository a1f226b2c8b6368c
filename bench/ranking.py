"""Whether the planner's first choice is the fastest, on a GPU: the plans of each kernel that are predicted fastest, timed.

    python -m bench.ranking [--only NAME …] [--most 12] [--processes 8] [--folder bench/results]

Each case is attention in plain PyTorch, forward and backward: three kernels are planned, those of the result, of the gradients of keys and
values, and of the gradients of queries. For each the planner's own choice and the `--most` plans predicted fastest of all that fit run, also
shapes that it does not offer because nobody inspected their machine code. Such a plan may read where nothing is, which ends its process: so
every plan first runs in a process of its own kind (`--processes` of them, which compile beside one another), and what ended one, or
computes something else than the first choice, is left out and said. Then one process times the rest, with cold caches, and writes ranking.csv.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnfuse
from attnfuse.codegen import autotune, launch, launch_backward
from attnfuse.codegen.plan import KernelPlan
from attnfuse.codegen.tables import Shape
from bench.common import RESULTS, header, save
from bench.forward import causal, full
from bench.variants import functions

Written = Callable[..., Tensor]
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """Attention as written, its sizes, and the shapes of what it takes beside queries, keys and values."""

    written: Callable[[], Written]
    batch: int
    heads: int
    length: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    extra: tuple[tuple[int, ...], ...] = ()


def page(name: str) -> Callable[[], Written]:
    """A function of docs/variants.md."""
    return lambda: functions()[name]


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with dropout of the weights."""
    n = q.size(-2)
    keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    weights = (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).masked_fill(~keep, float("-inf")).softmax(-1)
    return torch.dropout(weights, 0.1, True) @ v


CASES: dict[str, Case] = {
    "causal 32": Case(lambda: causal, 8, 32, 2048, 32),
    "causal 64": Case(lambda: causal, 4, 32, 4096, 64),
    "full 64": Case(lambda: full, 4, 32, 4096, 64),
    "short 64": Case(lambda: causal, 64, 16, 1024, 64, torch.float16),
    "dropout 64": Case(lambda: dropping, 64, 16, 1024, 64, torch.float16),
    "full 96": Case(lambda: full, 8, 16, 2048, 96),
    "causal 128": Case(lambda: causal, 4, 16, 4096, 128),
    "full 128": Case(lambda: full, 4, 16, 4096, 128),
    "long 128": Case(lambda: causal, 1, 16, 16384, 128),
    "bias 128": Case(page("pair_bias"), 4, 16, 4096, 128, extra=((16, 4096, 4096),)),
    "bias 64": Case(page("pair_bias"), 4, 16, 4096, 64, extra=((16, 4096, 4096),)),
    "softcap 128": Case(page("softcap"), 4, 16, 4096, 128),
    "causal 256": Case(lambda: causal, 4, 8, 4096, 256),
    "full 256": Case(lambda: full, 4, 8, 4096, 256),
}


def run(case: Case) -> None:
    """One forward and one backward pass, through whatever stands in for `autotune.choose`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = (case.batch, case.heads, case.length, case.width)
    leaves = [torch.randn(shape, device=DEVICE, dtype=case.dtype, requires_grad=True) for _ in range(3)]
    extra = [torch.randn(s, device=DEVICE, dtype=case.dtype) for s in case.extra]
    with attnfuse.settings(autotune=True, strict=True):
        out = torch.compile(case.written(), backend="attnfuse", fullgraph=True)(*leaves, *extra)
        out.backward(torch.randn_like(out))


# ---- which plans

def offer_everything() -> None:
    """Let the launchers ask the planner for all that fits."""
    for module in (launch, launch_backward):
        module.choices = partial(module.choices, inspected=False)


def kernel_of(key: autotune.Key) -> str:
    """``forward``, or the kind of a backward kernel."""
    name = dict(key.facts)["kernel"]
    if name == "forward":
        return name
    return "queries" if "kind='queries'" in name else "values" if "key=False" in name else "keys"


def label(case: str, key: autotune.Key, plan: KernelPlan) -> str:
    """A plan of a case's kernel, as processes tell one another of it."""
    return f"{case}|{kernel_of(key)}|{plan.shape}"


# ---- trying each in a process that may end

def attempt_all(names: Sequence[str], most: int, part: int, of: int, known: set[str]) -> None:
    """Run every `of`-th plan from `part` on, but for those that are known, and print what was begun and what it came to."""
    offer_everything()
    now = ""

    def choose(key: autotune.Key, plans: Sequence[KernelPlan], attempt: autotune.Attempt, tolerance: float, time: object = None) -> None:
        first = None
        for plan in plans[part:most:of]:
            name = label(now, key, plan)
            if name in known:
                continue
            if first is None:
                first = [t.clone() for t in attempt(plans[0])[1]]
            print(f"begun|{name}", flush=True)
            try:
                same = all(autotune.close(a, b, tolerance) for a, b in zip(attempt(plan)[1], first, strict=True))
                torch.cuda.synchronize()
                print(f"{'ran' if same else 'differs'}|{name}", flush=True)
            except Exception as problem:                # of any kind: what a plan fails with is what is asked
                if "illegal memory access" in str(problem):
                    os._exit(1)
                print(f"failed: {type(problem).__name__}|{name}", flush=True)

    autotune.choose = choose  # type: ignore[assignment]  # the launchers look it up there
    for now in names:
        run(CASES[now])


def tried(names: Sequence[str], most: int, processes: int) -> dict[str, str]:
    """What each plan came to, by ``case|kernel|shape``."""
    def worker(part: int) -> dict[str, str]:
        found: dict[str, str] = {}
        while True:
            command = [sys.executable, "-m", "bench.ranking", "--try", str(part), str(processes), "--most", str(most), "--only", *names]
            with tempfile.NamedTemporaryFile("w+", suffix=".json") as skip:
                json.dump(sorted(found), skip)
                skip.flush()
                done = subprocess.run([*command, "--known", skip.name], capture_output=True, text=True, check=False)
            before = len(found)
            for line in done.stdout.splitlines():
                what, _, name = line.partition("|")
                if name.count("|") == 2:
                    found[name] = "ended its process" if what == "begun" else what
            if done.returncode == 0:
                return found
            if len(found) == before:
                raise RuntimeError(f"a process that tries plans ends before it tries one:\n{done.stderr[-2000:]}")

    with ThreadPoolExecutor(processes) as pool:
        return {name: what for found in pool.map(worker, range(processes)) for name, what in found.items()}


# ---- timing

def timed(names: Sequence[str], most: int, ran: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each kernel: the first choice, the fastest, and every time."""
    offer_everything()
    rows: list[dict[str, Any]] = []
    now = ""

    def choose(key: autotune.Key, plans: Sequence[KernelPlan], attempt: autotune.Attempt, tolerance: float, time: object = None) -> None:
        outcome = {p: ran.get(label(now, key, p), "not tried") for p in plans[:most]}
        times = autotune.timings([p for p, what in outcome.items() if what == "ran"], attempt, tolerance, autotune.timer)
        rows.append(row_of(CASES[now], now, kernel_of(key), len(plans), plans[0].shape, times,
                           {p.shape: what for p, what in outcome.items() if what != "ran"}))
        print(line(rows[-1]), flush=True)

    autotune.choose = choose  # type: ignore[assignment]  # the launchers look it up there
    for now in names:
        run(CASES[now])
    return rows


def row_of(case: Case, name: str, kernel: str, fitting: int, first: Shape, times: dict[Shape, float], others: dict[Shape, str]) -> dict[str, Any]:
    """A line of the table. `first` is the planner's choice; `times` are in ms; `others` says why a plan was not timed."""
    best = min(times, key=lambda s: times[s]) if times else None
    return {"case": name, "kernel": kernel, "B": case.batch, "H": case.heads, "T": case.length, "D": case.width,
            "dtype": str(case.dtype).removeprefix("torch."), "fit": fitting, "timed": len(times), "first": text(first),
            "first_ms": round(times[first], 4) if first in times else "", "best": text(best) if best else "",
            "best_ms": round(times[best], 4) if best else "", "best/first": round(times[best] / times[first], 3) if best and first in times else "",
            "all_ms": " ".join(f"{text(s)}:{t:.4g}" for s, t in sorted(times.items(), key=lambda x: x[1])),
            "left_out": "; ".join(f"{text(s)} {why}" for s, why in others.items())}


def text(shape: Shape) -> str:
    """``64x128/4/2``: tile, warps, stages."""
    return f"{shape[0]}x{shape[1]}/{shape[2]}/{shape[3]}"


def line(row: dict[str, Any]) -> str:
    """A measurement as it is printed."""
    return f"{row['case']:12} {row['kernel']:8} first {row['first']} {row['first_ms']} ms, best {row['best']} {row['best_ms']} ms of {row['timed']}: " \
           f"{row['best/first']}  {row['left_out']}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.ranking", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(CASES), default=list(CASES))
    parser.add_argument("--most", type=int, default=12, help="plans of a kernel that are timed")
    parser.add_argument("--processes", type=int, default=8, help="that try plans beside one another")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--try", nargs=2, type=int, dest="part", help=argparse.SUPPRESS)
    parser.add_argument("--known", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> None:
    """Try, then time."""
    given = arguments()
    if given.part:
        attempt_all(given.only, given.most, *given.part, set(json.loads(given.known.read_text())))
        return
    print(header())
    save("ranking", timed(given.only, given.most, tried(given.only, given.most, given.processes)), given.folder)


if __name__ == "__main__":
    main()
