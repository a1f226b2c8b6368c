"""The page of published variants: it prints what it says, and each variant is rewritten and stays what it was.

FlexAttention's forms in the benchmark are held to the page's functions, values and gradients, by its dense fallback on the CPU.
"""
from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import attnfuse
from attnfuse import tilemap
from bench import variants as bench
from tests.test_readme import DOCS, blocks

PAGE = DOCS / "variants.md"
TEN = ("causal", "alibi", "softcap", "window", "documents", "pair_bias", "t5", "prefix_lm", "padding", "sink")
MORE = ("blockwise", "grouped", "cosine", "decomposed", "differential")
UNMASKED = ("pair_bias", "t5", "cosine", "decomposed")
Call = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


class Shown:
    """The page as it ran: what each block printed, and what was given to `show`, by the function's name."""

    def __init__(self, folder: Path) -> None:
        self.printed: list[str] = []
        self.calls: dict[str, Call] = {}
        module = sys.modules["variants_page"] = types.ModuleType("variants_page")
        for number, text in enumerate(blocks(PAGE, "python")):
            file, out = folder / f"variants{number}.py", io.StringIO()
            file.write_text(text, encoding="utf-8")
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(file), "exec"), vars(module))
            self.printed.append(out.getvalue())
            if not number:
                module.show = self.recorded(module.show)  # type: ignore[attr-defined]
        self.functions = module

    def recorded(self, show: Callable[..., None]) -> Callable[..., None]:
        """`show`, which also remembers its arguments."""
        def call(attention: Callable[..., Tensor], *inputs: Tensor) -> None:
            self.calls[attention.__name__] = attention, inputs
            show(attention, *inputs)
        return call

    def fresh(self, name: str) -> Call:
        """A function of the page and new random inputs of the page's shapes, in float64."""
        attention, inputs = self.calls[name]
        names = inspect.signature(attention).parameters
        return attention, tuple(drawn(n, x) for n, x in zip(names, inputs))


def drawn(name: str, like: Tensor) -> Tensor:
    """Random values of the kind of `like`: masks and lengths vary as well; no row is without a key."""
    if name == "ids":
        return torch.randint(0, 5, like.shape).sort(-1).values
    if name == "prefix":
        return torch.randint(0, 513, like.shape)
    if name == "keep":
        return torch.arange(like.shape[-1]) < torch.randint(1, like.shape[-1] + 1, (like.shape[0], 1))
    return torch.randn(like.shape, dtype=torch.float64)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    yield Shown(tmp_path_factory.mktemp("variants"))
    del sys.modules["variants_page"]


def test_the_page_prints_what_it_says(shown: Shown, update: bool) -> None:
    text = PAGE.read_text(encoding="utf-8")
    printed = iter([p for p in shown.printed if p])
    whole = re.sub(r"^```text\n.*?^```$", lambda _: f"```text\n{next(printed)}```", text, flags=re.MULTILINE | re.DOTALL)
    assert not list(printed), "a block that prints is followed by no block of text"
    if update:
        PAGE.write_text(whole, encoding="utf-8")
    else:
        assert text == whole, "run pytest tests/test_variants.py --update"


def test_the_page_shows_all(shown: Shown) -> None:
    assert tuple(shown.calls) == (*TEN, *MORE)
    for name, output in zip(shown.calls, [p for p in shown.printed if p], strict=True):
        assert output.count("softmax_j") == (2 if name == "differential" else 1)
        assert ("empty" in output) == (name not in UNMASKED), f"{name}: a mask that leaves tiles out has a picture"


@pytest.mark.parametrize("name", [*TEN, *MORE])
def test_it_is_rewritten_and_stays_what_it_was(shown: Shown, name: str, seed: int) -> None:
    """Values and the gradients of every input, against autograd through the page's code, all in float64; then the values in float32."""
    attention, inputs = shown.fresh(name)
    fused = attnfuse.optimize(attention, inner="eager", fullgraph=True)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    learned = [x for x in leaves if x.requires_grad]
    want, got = attention(*leaves), fused(*leaves)
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == len(report.sites) == (2 if name == "differential" else 1)
    spec = report.sites[0].spec
    assert spec is not None and (tilemap.masked(spec) is None) == (name in UNMASKED)
    grad_out = torch.randn_like(want)
    pairs = [(got, want), *zip(torch.autograd.grad(got, learned, grad_out), torch.autograd.grad(want, learned, grad_out), strict=True)]
    for a, b in pairs:
        # A gradient that cancels errs by its terms: a million of them, of size 1, in float64.
        assert a.shape == b.shape and a.dtype == b.dtype and (a - b).norm() <= 1e-11 * b.norm() + 1e-9
    narrow = [x.float() if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        exact, eager = attention(*(x.double() if x.is_floating_point() else x for x in narrow)), attention(*narrow)
        error, plain = (((x.double() - exact).norm() / exact.norm()).item() for x in (fused(*narrow), eager))
    assert error <= 2 * plain + 1e-6


# ---- the benchmark

def test_the_benchmark_measures_what_the_page_shows() -> None:
    assert {v.function for v in bench.VARIANTS} == set(TEN)
    learned = {(v.function, *v.learned) for v in bench.VARIANTS}
    assert learned >= {("pair_bias",), ("pair_bias", "bias"), ("t5", "table"), ("sink", "sinks")}
    setup = bench.Setup()
    assert (setup.batch, setup.heads, setup.length, setup.width, setup.dtype) == (4, 16, 4096, 128, torch.bfloat16)
    assert next(v for v in bench.VARIANTS if v.name == "window").options(setup) == {"width": 512}


@pytest.mark.parametrize("variant", bench.VARIANTS, ids=lambda v: v.name.replace(", ", "_"))
def test_flex_attention_s_form_means_the_same(variant: bench.Variant, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Values and gradients in float64, compiled as on a GPU but for the kernels."""
    # Its backward is refused on a CPU for want of a kernel; the dense fallback, which is what runs here, has one.
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    setup = bench.Setup(2, 2, 160, 16, torch.float64, "cpu")
    named = bench.inputs_of(variant, setup)
    inputs = {n: torch.randn_like(x) if x.is_floating_point() else x for n, x in named.items()}
    wanted = ("q", "k", "v", *variant.learned)
    leaves = {n: x.requires_grad_(n in wanted) for n, x in inputs.items()}
    mask = bench.block_mask(variant, setup, leaves)
    q, k, v, *extra = leaves.values()
    got, want = torch.compile(variant.flex, backend="aot_eager", fullgraph=True)(q, k, v, mask, *extra), bench.plain(variant, setup)(*leaves.values())
    grad_out, learned = torch.randn_like(want), [leaves[n] for n in wanted]
    pairs = [(got, want), *zip(torch.autograd.grad(got, learned, grad_out), torch.autograd.grad(want, learned, grad_out), strict=True)]
    for a, b in pairs:                                 # log-sum-exp and its gradient are of float32
        assert a.shape == b.shape and (a - b).norm() <= 1e-6 * b.norm() + 1e-7


def test_a_way_that_fails_is_a_reason_in_its_row() -> None:
    def fails() -> dict[str, Tensor]:
        raise NotImplementedError("not on this device\nand more")

    setup, exact = bench.Setup(1, 2, 4, 4, torch.float32, "cpu"), {"out": torch.ones(1, 2, 4, 4, dtype=torch.float64)}
    row: dict[str, Any] = {}
    works = lambda: {"out": torch.full((1, 2, 4, 4), 1.5)}
    assert not bench.attempt(row, "flex", fails, exact) and bench.attempt(row, "attnfuse", works, exact)
    bench.compare(row, {"attnfuse": works}, setup)
    assert row.pop("attnfuse_ms") >= 0
    assert row == {"why": "flex: NotImplementedError: not on this device", "error": "5.00e-01"}
    bench.compare(row, {"flex": fails}, setup)         # in a later call, as for want of memory
    assert row["why"] == "flex: NotImplementedError: not on this device" and "flex_ms" not in row
    assert bench.with_ratios({"attnfuse_ms": 2.0, "flex_ms": 3.0})["flex/attnfuse"] == 1.5


def test_ways_are_timed_in_turn_and_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for slow ones, which have one turn."""
    turns, took = [], {"attnfuse": iter((3.0, 1.0, 2.0)), "inductor": iter((5.0, 6.0, 4.0)), "flex": iter((900.0,))}

    def median(call: Callable[[], str], setup: bench.Setup) -> float:
        turns.append(call())
        return next(took[turns[-1]])

    monkeypatch.setattr(bench, "median_ms", median)
    row: dict[str, Any] = {}
    bench.compare(row, {name: lambda name=name: name for name in took}, bench.Setup(device="cpu"))
    assert turns == ["attnfuse", "inductor", "flex", *["attnfuse", "inductor"] * 2]
    assert row == {"attnfuse_ms": 1.0, "inductor_ms": 4.0, "flex_ms": 900.0}


def test_a_row_says_where_nothing_was_fused(shown: Shown) -> None:
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    no_attention = lambda q, k, v: (q @ k.mT).softmax(-2) @ v
    for attention, inputs, said in ((*shown.calls["causal"], {}), (no_attention, (q, k, v), {"why": "attnfuse: not rewritten"})):
        attnfuse.optimize(attention, inner="eager")(*inputs)
        row: dict[str, Any] = {}
        bench.note_refusal(row)
        assert row == said
