"""Ten published variants of attention, bf16, on a GPU: attnfuse against inductor on the same plain code and FlexAttention written by hand.

    python -m bench.variants [--only NAME …] [--quick] [--max-autotune] [--folder bench/results] [--log FILE]

The plain code is that of docs/variants.md, where each variant has its reference. Forward alone (no gradients wanted) and forward with
backward: gradients of queries, keys, values and of what a variant learns. Batch 4, 16 heads, 4096 tokens, head dimension 128. Prints
a line a measurement and writes variants.csv after each variant, so that what was measured stays if the run is cut off, and
variants.png where matplotlib is there.

A column for each way: ms (the least of three medians) and peak memory beyond the inputs, MiB; ratios of the peers' times to attnfuse's; for attnfuse and
FlexAttention the time of their kernels alone, which a slow host does not change (`_kernels_ms`); the error of
attnfuse and of FlexAttention against the plain code in float64 on two heads (of the result, or the largest of the gradients'); why a way failed.
FlexAttention's block mask is made beforehand, as in a model that makes one for all of its layers, and its time stands apart in `flex_mask_ms`;
attnfuse's map of tiles is made within every call. `--max-autotune` adds `flex_max`, compiled with "max-autotune-no-cudagraphs".
"""
from __future__ import annotations

import argparse
import ast
import contextlib
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.profiler import ProfilerActivity, profile

import attnfuse
from bench import flex_forms as forms
from bench.common import RESULTS, extra_memory, header, milliseconds, relative_error, save

PAGE = Path(__file__).parent.parent / "docs" / "variants.md"
AXES = {"q": "bhid", "k": "bhjd", "v": "bhje", "slopes": "h", "ids": "bi", "bias": "hij", "table": "nh", "prefix": "b", "keep": "bj", "sinks": "h"}
"""What the dimensions of the inputs are, by name: b batch, h heads, i queries, j keys."""
HEADS_CHECKED = 2
ROUNDS = 3
"""Of measurements of each way, in turn; the fastest counts."""
SLOW = 100
"""Milliseconds: where FlexAttention takes longer, by its atomics, max-autotune would take minutes."""


@dataclass(frozen=True)
class Setup:
    """What is measured: sizes, dtype, device and how often."""

    batch: int = 4
    heads: int = 16
    length: int = 4096
    width: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    repeat_ms: int = 200
    max_autotune: bool = False


Extra = Callable[[Setup], Tensor]
"""An input beside q, k, v; floating ones are turned into the setup's dtype."""


@dataclass(frozen=True)
class Variant:
    """One variant.

    Attributes:
        name: in the table. function: the page's.
        flex: FlexAttention's form, of (q, k, v, block mask, extra…). mask: from the extra inputs to FlexAttention's `mask_mod`.
        mask_by_batch: whether it differs from sequence to sequence.
        extra: the inputs beside q, k, v, by name. learned: those of them that want a gradient.
        options: numbers that the page's function and `mask` take by name.
    """

    name: str
    function: str
    flex: Callable[..., Tensor]
    mask: Callable[..., forms.MaskMod] | None = None
    mask_by_batch: bool = False
    extra: dict[str, Extra] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    options: Callable[[Setup], dict[str, int]] = lambda setup: {}


def slopes(s: Setup) -> Tensor:
    """ALiBi's: a geometric sequence that ends at 2⁻⁸."""
    return 2.0 ** (-8.0 * torch.arange(1, s.heads + 1) / s.heads)


def ids(s: Setup) -> Tensor:
    """About eight documents a sequence, of random lengths."""
    return (torch.rand(s.batch, s.length) < 8 / s.length).cumsum(-1)


def prefix(s: Setup) -> Tensor:
    """From an eighth of the sequence to a half."""
    return s.length * torch.arange(1, s.batch + 1) // (2 * s.batch)


def keep(s: Setup) -> Tensor:
    """Lengths from the whole sequence down to a bit more than half of it."""
    return torch.arange(s.length) < (s.length - s.length * torch.arange(s.batch) // (2 * s.batch))[:, None]


def pairs(s: Setup) -> Tensor:
    """A bias for every head and pair."""
    return torch.randn(s.heads, s.length, s.length)


VARIANTS: tuple[Variant, ...] = (
    Variant("causal", "causal", forms.plain, forms.causal),
    Variant("alibi", "alibi", forms.alibi, forms.causal, extra={"slopes": slopes}),
    Variant("alibi, learned", "alibi", forms.alibi, forms.causal, extra={"slopes": slopes}, learned=("slopes",)),
    Variant("softcap", "softcap", forms.softcap, forms.causal),
    Variant("window", "window", forms.plain, forms.window, options=lambda s: {"width": min(512, s.length // 4)}),
    Variant("documents", "documents", forms.plain, forms.documents, True, {"ids": ids}),
    Variant("bias", "pair_bias", forms.pair_bias, extra={"bias": pairs}),
    Variant("bias, learned", "pair_bias", forms.pair_bias, extra={"bias": pairs}, learned=("bias",)),
    Variant("t5, learned", "t5", forms.t5, extra={"table": lambda s: torch.randn(32, s.heads)}, learned=("table",)),
    Variant("prefix_lm", "prefix_lm", forms.plain, forms.prefix_lm, True, {"prefix": prefix}),
    Variant("padding", "padding", forms.plain, forms.padding, True, {"keep": keep}),
    Variant("sink, learned", "sink", forms.sink, forms.causal, extra={"sinks": lambda s: torch.randn(s.heads)}, learned=("sinks",)),
)


def functions(page: Path = PAGE) -> dict[str, Callable[..., Tensor]]:
    """The functions that a page defines, by name; none of its other statements is run but imports."""
    found: dict[str, Any] = {}
    for text in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        tree = ast.parse(text)
        tree.body = [x for x in tree.body if isinstance(x, (ast.Import, ast.ImportFrom, ast.FunctionDef))]
        exec(compile(tree, str(page), "exec"), found)
    return found


def plain(variant: Variant, setup: Setup) -> Callable[..., Tensor]:
    """The page's function with the variant's options."""
    function, options = functions()[variant.function], variant.options(setup)

    def written(*inputs: Tensor) -> Tensor:
        return function(*inputs, **options)
    return written


def inputs_of(variant: Variant, setup: Setup) -> dict[str, Tensor]:
    """q, k, v and the extra inputs on the device, by name, the same at every call."""
    shape = (setup.batch, setup.heads, setup.length, setup.width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = {n: torch.randn(shape) for n in "qkv"} | {n: make(setup) for n, make in variant.extra.items()}
    return {n: x.to(setup.device, setup.dtype if x.is_floating_point() else x.dtype) for n, x in made.items()}


def block_mask(variant: Variant, setup: Setup, inputs: dict[str, Tensor], make: Callable[..., BlockMask] = create_block_mask) -> BlockMask | None:
    """FlexAttention's mask, as `make` makes it; None where the variant has none."""
    if variant.mask is None:
        return None
    mask_mod = variant.mask(*(inputs[n] for n in variant.extra), **variant.options(setup))
    return make(mask_mod, setup.batch if variant.mask_by_batch else None, None, setup.length, setup.length, setup.device)


# ---- measuring

def first_heads(name: str, x: Tensor) -> Tensor:
    """The heads that are checked; every sequence, for a learned tensor's gradient sums over them."""
    return x.narrow(AXES[name].index("h"), 0, HEADS_CHECKED) if "h" in AXES[name] else x


def exactly(written: Callable[..., Tensor], inputs: dict[str, Tensor], wanted: Sequence[str], grad_out: Tensor | None) -> dict[str, Tensor]:
    """The plain code in float64 on the first heads: ``out``, or the gradients by name."""
    part = {n: first_heads(n, x.detach()) for n, x in inputs.items()}
    part = {n: x.double().requires_grad_(grad_out is not None and n in wanted) if x.is_floating_point() else x for n, x in part.items()}
    out = written(*part.values())
    if grad_out is None:
        return {"out": out}
    return dict(zip(wanted, torch.autograd.grad(out, [part[n] for n in wanted], grad_out[:, :HEADS_CHECKED].double()), strict=True))


def largest_error(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest relative error of the results."""
    return max(relative_error(x[:, :HEADS_CHECKED] if n == "out" else first_heads(n, x), exact[n]) for n, x in got.items())


def median_ms(call: Callable[[], Any], setup: Setup) -> float:
    """Median time of a call; on a CPU, where nothing is to be claimed, of three calls."""
    return milliseconds(call, setup.repeat_ms) if setup.device == "cuda" else statistics.median(once_ms(call) for _ in range(3))


def once_ms(call: Callable[[], Any]) -> float:
    """The time of one call, to its end on the device."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def kernels_ms(call: Callable[[], Any], times: int = 10) -> float:
    """The time that the kernels of a call take on the device, summed, the mean of some calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    return sum(e.device_time for e in seen.events() or () if e.device_type == DeviceType.CUDA) / times / 1e3


def attempt(row: dict[str, Any], way: str, call: Callable[[], dict[str, Tensor]], exact: dict[str, Tensor]) -> bool:
    """Run a way for the first time and put its error into the row, or why there is none. Whether it ran."""
    with forgiving(row, way):
        error = largest_error(call(), exact)
        if way in ("attnfuse", "flex"):
            row["error" if way == "attnfuse" else "error_flex"] = f"{error:.2e}"
        return True
    return False


def compare(row: dict[str, Any], calls: dict[str, Callable[[], Any]], setup: Setup) -> None:
    """Put times and memory of ways that ran into the row. They are timed in turn, after all of them were compiled: a step that waits for the host is
    as fast as the host is at the moment, which is slow while compilers are still about."""
    times: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            if times.get(name, 0.0) <= SLOW:
                with forgiving(row, name):
                    times[name] = min(times.get(name, math.inf), median_ms(call, setup))
    for name, ms in times.items():
        row[f"{name}_ms"] = round(ms, 4)
        if setup.device == "cuda":
            with forgiving(row, name):
                row[f"{name}_MiB"] = round(extra_memory(calls[name]), 1)
                if name != "inductor" and ms < SLOW:
                    row[f"{name}_kernels_ms"] = round(kernels_ms(calls[name]), 4)


@contextlib.contextmanager
def forgiving(row: dict[str, Any], way: str) -> Iterator[None]:
    """What fails inside is said in the row: a peer that fails must not end the run."""
    try:
        yield
    except Exception as problem:
        note(row, way, reason(problem))


def note(row: dict[str, Any], way: str, why: str) -> None:
    """Say in the row why something of a way is not there."""
    said = f"{way}: {why}"
    if said not in row.get("why", ""):
        row["why"] = "; ".join(x for x in (row.get("why"), said) if x)


def reason(problem: Exception) -> str:
    """A failure in one line."""
    lines = [x.strip() for x in str(problem).splitlines() if x.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:200]


def ways_of(variant: Variant, setup: Setup, inputs: dict[str, Tensor], row: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    """The functions that are compared, of q, k, v and the extra inputs. What is said of making the mask goes into the row."""
    written = plain(variant, setup)
    ways: dict[str, Callable[..., Tensor]] = {n: torch.compile(written, backend=n, fullgraph=True) for n in ("attnfuse", "inductor")}
    try:
        mask = block_mask(variant, setup, inputs)
    except Exception as problem:
        note(row, "flex, its mask", reason(problem))
        return ways
    with forgiving(row, "flex, its mask's time"):      # compiled, as its users do; a failure leaves the measurements of attention
        make = torch.compile(create_block_mask) if setup.device == "cuda" else create_block_mask
        if mask is not None:
            row["flex_mask_ms"] = round(median_ms(lambda: block_mask(variant, setup, inputs, make), setup), 4)
    modes = {"flex": None} | ({"flex_max": "max-autotune-no-cudagraphs"} if setup.max_autotune else {})
    for name, mode in modes.items():
        # On a CPU only its dense fallback has every feature, and that is not to be compiled.
        form = torch.compile(variant.flex, mode=mode, fullgraph=True) if setup.device == "cuda" else variant.flex
        ways[name] = lambda q, k, v, *extra, form=form: form(q, k, v, mask, *extra)
    return ways


def measure(variant: Variant, setup: Setup) -> list[dict[str, Any]]:
    """Two rows: forward, and forward with backward."""
    torch._dynamo.reset()
    inputs = inputs_of(variant, setup)
    wanted = ("q", "k", "v", *variant.learned)
    shared: dict[str, Any] = {}
    ways = ways_of(variant, setup, inputs, shared)
    grad_out = torch.randn_like(inputs["q"])
    rows = []
    for step in ("forward", "forward+backward"):
        trains = step != "forward"
        row: dict[str, Any] = {"variant": variant.name, "pass": step, "B": setup.batch, "H": setup.heads, "T": setup.length, "D": setup.width,
                               "dtype": str(setup.dtype).removeprefix("torch.")} | shared
        leaves = {n: x.detach().requires_grad_(trains and n in wanted) for n, x in inputs.items()}
        with torch.set_grad_enabled(trains):
            exact = exactly(plain(variant, setup), leaves, wanted, grad_out if trains else None)
            calls: dict[str, Callable[[], dict[str, Tensor]]] = {}
            for name, way in ways.items():
                call = call_of(way, leaves, wanted, grad_out if trains else None)
                with forgiving(row, name):
                    if name == "flex_max" and "flex" in calls and once_ms(calls["flex"]) > SLOW:
                        note(row, name, f"not asked for where the default takes over {SLOW} ms")
                    elif attempt(row, name, call, exact):
                        calls[name] = call
                if name == "attnfuse":
                    note_refusal(row)
            compare(row, calls, setup)
        rows.append(with_ratios(row))
        del exact
    return rows


def call_of(way: Callable[..., Tensor], leaves: dict[str, Tensor], wanted: Sequence[str], grad_out: Tensor | None) -> Callable[[], dict[str, Tensor]]:
    """One step: the result, or with `grad_out` the gradients by name."""
    def call() -> dict[str, Tensor]:
        out = way(*leaves.values())
        return {"out": out} if grad_out is None else dict(zip(wanted, torch.autograd.grad(out, [leaves[n] for n in wanted], grad_out), strict=True))
    return call


def note_refusal(row: dict[str, Any]) -> None:
    """A row says where its attention was not fused."""
    report = attnfuse.last_report()
    if report is None or report.rewritten != 1 or report.failures:
        note(row, "attnfuse", "not rewritten")


def with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the peers' times over attnfuse's."""
    for name in ("flex", "flex_max", "inductor"):
        if f"{name}_ms" in row and "attnfuse_ms" in row:
            row[f"{name}/attnfuse"] = round(row[f"{name}_ms"] / row["attnfuse_ms"], 3)
    return row


# ---- the run

@contextlib.contextmanager
def quiet(log: Path | None) -> Iterator[None]:
    """What compilers say on the error stream goes to a file or nowhere; a failure of the run is printed after it."""
    kept = os.dup(2)
    with open(log or os.devnull, "a") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def line(row: dict[str, Any]) -> str:
    """A measurement as it is printed."""
    shown = {k: v for k, v in row.items() if k not in ("variant", "pass", "B", "H", "T", "D", "dtype")}
    return f"{row['variant']:15} {row['pass']:17} " + "  ".join(f"{k} {v}" for k, v in shown.items())


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.variants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted({v.function for v in VARIANTS}), help="functions of the page")
    parser.add_argument("--quick", action="store_true", help="a few repeats of each call")
    parser.add_argument("--max-autotune", action="store_true", help="FlexAttention with max-autotune too")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--log", type=Path, help="a file for what compilers say")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name in ("batch", "heads", "length", "width"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setup(), name))
    return parser.parse_args(given)


def main() -> None:
    """Measure what was asked for."""
    given = arguments()
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    setup = Setup(given.batch, given.heads, given.length, given.width, dtype, given.device, 30 if given.quick else 200, given.max_autotune)
    print(header())
    rows: list[dict[str, Any]] = []
    with quiet(given.log):
        for variant in VARIANTS:
            if given.only is None or variant.function in given.only:
                start = time.perf_counter()
                found = measure(variant, setup)
                rows += found
                save("variants", rows, given.folder)
                print(*map(line, found), f"{'':15} {time.perf_counter() - start:.0f} s", sep="\n", flush=True)
    try:
        from bench.plot import variants
    except ImportError:
        print("no picture: matplotlib is not there; python -m bench.plot variants FOLDER draws it")
    else:
        variants(given.folder)


if __name__ == "__main__":
    main()
