"""The formulas of attention's traffic and time against the published figures, and the picture."""
from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnfuse
from attnfuse import measuring, roofline as r
from bench.headline import attention

A100 = (312e12, 2.039e12)
H100 = (989e12, 3.35e12)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def test_the_square_matrices_are_nearly_all_of_the_traffic() -> None:
    assert r.standard_attention_traffic(1024, 64) == 4 * 1024 ** 2 + 4 * 1024 * 64
    assert round(r.square_share(1024, 64), 2) == 0.94
    assert r.square_share(8192, 64) > 0.99
    assert r.standard_attention_traffic(1024, 64, k=4) == 10 * 1024 ** 2 + 4 * 1024 * 64
    assert r.standard_backward_traffic(1024, 64) == 7 * 1024 ** 2 + 8 * 1024 * 64


def test_ridge_points() -> None:
    assert round(r.ridge_point(*A100)) == 153 and round(r.ridge_point(*H100)) == 295


def test_llama_on_an_a100() -> None:
    times = r.attention_layer_times(8192, 128, 32, *A100)
    assert (round(1e3 * times["standard"], 1), round(1e3 * times["fused"], 1)) == (8.6, 3.5)
    scores, softmax, values = r.standard_kernels(8192, 128, 32)
    assert round(1e3 * softmax.seconds(*A100), 1) == 4.2
    assert round(softmax.flops / (scores.flops + softmax.flops + values.flops), 2) == 0.01
    assert round(scores.intensity) == round(values.intensity) == 124
    assert softmax.intensity == pytest.approx(1.25)
    assert r.fused_kernel(8192, 128, 32).intensity == pytest.approx(8192 / 2)


def test_figure_2_of_flash_attention() -> None:
    """GPT-2 medium, T = 1024, d = 64, batch 64 × 16 heads, fp16, an A100 with 192 KB of SRAM: 40.3 GB against 4.4."""
    bytes_a_number = 2 * 64 * 16
    standard = bytes_a_number * (r.standard_attention_traffic(1024, 64, k=4) + r.standard_backward_traffic(1024, 64))
    memory = 192 * 1024 // 2
    flash = bytes_a_number * (r.flash_attention_traffic(1024, 64, memory) + r.flash_backward_traffic(1024, 64, memory))
    assert standard / 1e9 == pytest.approx(40.3, rel=0.06)
    assert flash / 1e9 == pytest.approx(4.4, rel=0.06)
    # The arithmetic: the scores are computed once more in the backward pass, one product to six. The published 66.6 and 75.2 GFLOPs
    # differ by one product of 64 heads, a sixteenth of what batch 64 × 16 heads take.
    assert (75.2 - 66.6) * 1e9 == pytest.approx(64 * r.product_flops(1024, 64), rel=0.01)
    assert 1.1 < 75.2 / 66.6 < 7 / 6


def test_the_rule_of_flash_attention() -> None:
    assert r.flash_blocks(64, 98304) == (64, 384)
    assert r.flash_blocks(128, 1024) == (2, 2)
    for d in (16, 64, 128):
        for quarter in (1, 3, 16, 100, 500):            # the largest tile whose parts each fit a quarter of the memory
            columns = max(c for c in range(1, 2000) if c * d <= quarter * d)
            rows = max(n for n in range(1, 2000) if n * d <= quarter * d and n * columns <= quarter * d)
            assert r.flash_blocks(d, 4 * quarter * d) == (rows, columns)


def test_any_tile_of_the_rule_fits(rng: random.Random) -> None:
    for _ in range(200):
        d = rng.choice((16, 32, 64, 80, 128, 256))
        memory = rng.randrange(4 * d, 200_000)
        rows, columns = r.flash_blocks(d, memory)
        assert 1 <= rows <= columns and rows * columns <= columns * d
        assert 4 * (columns - 1) * d < memory, "a smaller tile would have filled the memory"


def test_traffic_is_monotone(rng: random.Random) -> None:
    for _ in range(200):
        T, d, k, memory = rng.randrange(1, 5000), rng.randrange(1, 257), rng.randrange(0, 8), rng.randrange(64, 100_000)
        assert r.standard_attention_traffic(T, d, k) < r.standard_attention_traffic(T + 1, d, k) < r.standard_attention_traffic(T + 1, d, k + 1)
        assert r.flash_attention_traffic(T, d, memory) >= r.flash_attention_traffic(T, d, 2 * memory) >= 4 * T * d
        assert r.flash_attention_traffic(T, d, 4 * T * d) == 2 * T * d + T * d + 2 * T + 3 * T * d + 4 * T, "one turn where all of K fits"


def test_flash_traffic_falls_with_memory_as_the_theorem_says() -> None:
    at = lambda memory: r.flash_attention_traffic(1 << 16, 64, memory)
    assert at(1 << 12) / at(1 << 14) == pytest.approx(4, rel=0.02)
    assert at(1 << 14) == pytest.approx(12 * (1 << 32) * 64 ** 2 / (1 << 14), rel=0.05)


def test_the_least_head_width_reaches_the_ridge(rng: random.Random) -> None:
    for _ in range(200):
        ridge, b = rng.uniform(10, 400), rng.choice((1, 2, 4))
        T = rng.randrange(int(b * ridge) + 1, 40_000)
        width = r.min_head_width(T, ridge, b)
        assert 2 * T * width / (b * (2 * width + T)) == pytest.approx(ridge)
    assert r.min_head_width(300, 153) == math.inf and r.min_head_width(306, 153) == math.inf
    assert r.min_head_width(8192, 153) == pytest.approx(158.9, abs=0.1)


def test_every_kernel_takes_the_longer_of_two_times(rng: random.Random) -> None:
    for _ in range(100):
        T, d, heads, k = rng.randrange(1, 9000), rng.randrange(1, 257), rng.randrange(1, 64), rng.randrange(1, 6)
        times = r.attention_layer_times(T, d, heads, *H100, k=k)
        moved = 2 * heads * r.standard_attention_traffic(T, d, k)
        assert sum(x.moved for x in r.standard_kernels(T, d, heads, k=k)) == moved, "the kernels move what the formula says"
        assert times["standard"] >= max(moved / H100[1], 2 * heads * r.product_flops(T, d) / H100[0]) * (1 - 1e-9)
        assert times["fused"] <= times["standard"]


@pytest.mark.parametrize("call", [
    lambda: r.standard_attention_traffic(0, 64), lambda: r.standard_attention_traffic(8, 64, k=-1), lambda: r.flash_blocks(64, 0),
    lambda: r.ridge_point(1e12, 0), lambda: r.min_head_width(-1, 153), lambda: r.attention_layer_times(8, 8, 0, *A100),
    lambda: r.plot([], *A100), lambda: r.min_head_width(8192, math.nan)])
def test_nonsense_is_named(call: object) -> None:
    with pytest.raises(ValueError, match="must|no kernel"):
        call()  # type: ignore[operator]


def test_measured_kernels_of_one_intensity_share_a_label() -> None:
    pytest.importorskip("matplotlib")
    kernels = [r.Kernel("mul", 1e9, 4e9, 1.1e-3), r.Kernel("softmax", 1e9, 4e9, 2.2e-3), r.Kernel("copy", 1.05e9, 4e9), r.Kernel("fused", 4e12, 1e9, 8e-3)]
    axes = r.plot(kernels, *H100)
    labels = [t.get_text() for t in axes.texts]
    assert "measured:\nsoftmax  2.2 ms\ncopy  1.19 ms predicted\nmul  1.1 ms" in labels
    assert sum("softmax" in x or "mul" in x for x in labels) == 1 and "fused\n8 ms measured" in labels
    filled = [line for line in axes.lines if len(line.get_xdata()) == 1 and line.get_markerfacecolor() != "white"]
    assert sorted(round(line.get_ydata()[0] / 1e9, 1) for line in filled) == [454.5, 909.1, 500000.0], "each of them is drawn"
    low, high = axes.get_ylim()
    assert low < 454.5e9 / 2 and high > H100[0]


def test_a_label_gives_way_to_what_was_measured_on_its_right() -> None:
    pytest.importorskip("matplotlib")
    side = lambda measured: next(t for t in r.plot([r.Kernel("bmm", 2.7e11, 4.8e9, 1.2e-3), r.Kernel("fused", 1.46e11, 5.5e8, measured)], *H100).texts
                                 if t.get_text().startswith("bmm")).get_ha()
    assert side(1.1e-3) == "right" and side(0.2e-3) == side(None) == "left"


# ---- measuring

CHAINS = {
    ("aten::copy_", "aten::clone", "aten::masked_fill"): "copy_", ("aten::masked_fill_", "aten::masked_fill"): "masked_fill_",
    ("aten::bmm", "aten::matmul"): "bmm", ("aten::_softmax", "aten::softmax"): "_softmax", ("aten::native_dropout", "aten::dropout"): "native_dropout",
    ("aten::fill_", "aten::ones"): "fill_", ("aten::fill_", "aten::zero_", "aten::zeros"): "zero_", ("aten::mul",): "mul",
    ("aten::index_select", "aten::embedding"): "index_select", ("aten::addmm", "aten::linear"): "addmm",
    ("aten::_flash_attention_forward", "aten::_scaled_dot_product_flash_attention", "aten::scaled_dot_product_attention"): "_scaled_dot_product_flash_attention",
    ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_flash_attention_backward", "aten::_scaled_dot_product_flash_attention_backward",
     "autograd::engine::evaluate_function: X"): "copy_",
    ("aten::_flash_attention_backward", "aten::_scaled_dot_product_flash_attention_backward"): "_scaled_dot_product_flash_attention_backward",
    ("aten::mul", "aten::_softmax_backward_data"): "mul", ("aten::_softmax_backward_data", "autograd::engine::evaluate_function: X"): "_softmax_backward_data",
    ("attnfuse::attention", "Torch-Compiled Region: 0/0"): "fused", ("aten::bmm", "attnfuse::weights"): "fused",
    ("attnfuse::attention_in_graph",): "fused", ("attnfuse::weights_in_graph",): "fused", ("aten::sum", "attnfuse::attention_backward_in_graph"): "attention_backward",
    ("aten::sum", "attnfuse::attention_backward"): "attention_backward", ("Torch-Compiled Region: 0/0",): "other", (): "other", ("mylib::nothing",): "other"}


@pytest.mark.parametrize("within", CHAINS)
def test_a_kernel_belongs_to_the_operation_that_is_counted(within: tuple[str, ...]) -> None:
    assert measuring.operation(within) == CHAINS[within]


def test_seconds_are_summed_by_operation() -> None:
    """Made-up events: their own kernels count, those of what they call count there, and marks on the time line do not."""
    def event(name: str, parent: object = None, *microseconds: float, mark: bool = False) -> SimpleNamespace:
        return SimpleNamespace(name=name, cpu_parent=parent, kernels=[SimpleNamespace(duration=m) for m in microseconds], is_user_annotation=mark)

    outer = event("aten::masked_fill")
    clone = event("aten::clone", outer)
    events = [outer, clone, event("aten::copy_", clone, 5.0, 2.0), event("aten::masked_fill_", outer, 3.0), event("aten::copy_", None, 1.0),
              event("a mark", None, 100.0, mark=True), event("cudaLaunchKernel", None, 4.0)]
    found = measuring.by_operation(measuring.launches(events, measuring.kernel_seconds))
    assert {n: round(1e6 * s) for n, s in found.items()} == {"copy_": 8, "other": 4, "masked_fill_": 3} and list(found) == ["copy_", "other", "masked_fill_"]


def test_operations_of_a_profile_are_those_of_the_count() -> None:
    """The time that a CPU takes stands in for that of kernels: every operation of the count is in the profile by its name."""
    from torch.profiler import ProfilerActivity, profile

    q, k, v = torch.randn(3, 1, 2, 64, 16)
    with attnfuse.traffic() as counted:
        attention(q, k, v, 0.0)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        attention(q, k, v, 0.0)
    found = measuring.by_operation(measuring.launches(seen.events(), lambda e: 1e-6 * e.self_cpu_time_total))
    assert {c.op for c in counted.calls} - set(found) == set()
    assert {"copy_", "masked_fill_", "_softmax", "bmm", "mul"} <= set(found)
    report = attnfuse.explain(lambda q, k, v: attention(q, k, v, 0.0), q, k, v)
    assert {x.name for x in report.kernels()} <= {*found, "fused"} and any(x.measured for x in report.kernels(found))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_measuring_takes_a_gpu() -> None:
    with pytest.raises(ValueError, match="on a CUDA device, and PyTorch sees none"):
        r.measure(lambda: None)
    with pytest.raises(ValueError, match="times must be positive"):
        r.measure(lambda: None, times=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_of_an_attention_are_measured() -> None:
    q, k, v = (torch.randn(16, 16, 1024, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    written = lambda q, k, v: attention(q, k, v, 0.1)
    with torch.no_grad():
        report = attnfuse.explain(written, q, k, v, run=False)
        found = r.measure(lambda: written(q, k, v))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            written(q, k, v)
        end.record()
        torch.cuda.synchronize()
        fused = attnfuse.optimize(written, inner="eager", fullgraph=True)
        ours = r.measure(lambda: fused(q, k, v))
    assert {x.name for x in report.kernels()} <= {*found, "fused"}, f"measured: {found}"
    assert sum(found.values()) == pytest.approx(start.elapsed_time(end) / 1e4, rel=0.3)
    assert 0 < ours["fused"] < sum(found.values()) / 3
    assert all(x.measured for x in report.kernels(found | ours))


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kernels = [*r.standard_kernels(8192, 128, 32), r.fused_kernel(8192, 128, 32), r.Kernel("ours", 1.1e12, 2.7e8, 5e-3)]
    axes = r.plot(kernels, *A100, tmp_path / "roofline.png", title="one layer")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000
    said = " ".join(t.get_text() for t in axes.texts)
    assert all(word in said for word in ("ridge 153", "softmax", "fused", "ours", "measured", "2.04 TB/s", "312 TFLOP/s"))
    assert r.plot(kernels, *A100, axes=axes) is axes
