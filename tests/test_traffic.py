"""Bytes read and written by eager runs: the rules, one near-miss each, whole attentions, and our own operations by prediction."""
from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch.utils.flop_counter import flop_registry

import attnfuse
from attnfuse import counting, roofline
from attnfuse.codegen import predict
from attnfuse.codegen.devices import CARDS, device, rates
from attnfuse.codegen.plan import Request
from attnfuse.codegen.plan_forward import candidates
from attnfuse.codegen.tiles import DEVICES, SMALLEST
from attnfuse.extents import distinct_bytes
from attnfuse.traffic import size
from bench.headline import attention
from tests.conftest import Attention, Stack
from tests.specs import BY_NAME, Shape

N = 4 * 8 * 16          # bytes of a [8, 16] float32


def counted(call: Callable[[], object], device: str | None = None) -> attnfuse.Traffic:
    with attnfuse.traffic(device) as t:
        call()
    return t


def matrix() -> Tensor:
    return torch.randn(8, 16)


# ---- the rules: (what is called, bytes read, bytes written)

RULES: dict[str, tuple[Callable[[Tensor], object], int, int]] = {
    "views made whole": (lambda x: x.t().reshape(4, 4, 8).transpose(0, 1)[1:].expand(7, 3, 4, 8).reshape(7, -1), N * 3 // 4, N * 3 // 4 * 7),
    "only views": (lambda x: x.t().unflatten(0, (4, 4)).transpose(0, 1)[1:].unsqueeze(0).expand(7, 3, 4, 8).detach(), 0, 0),
    "metadata": (lambda x: (x.shape, x.stride(), x.device, x.dtype, x.is_contiguous(), x.numel(), torch.result_type(x, 1)), 0, 0),
    "allocations": (lambda x: (torch.empty(5, 5), torch.empty_like(x), x.new_empty(3), torch.empty_strided((2, 2), (1, 2))), 0, 0),
    "pointwise": (lambda x: x + 1, N, N),
    "twice the same": (lambda x: x * x, N, N),
    "its own transpose": (lambda x: x @ x.t(), N, 4 * 64),
    "two halves": (lambda x: x[:, :8] + x[:, 8:], N, N // 2),
    "a slice": (lambda x: x[:, :4] * 2, N // 4, N // 4),
    "expanded": (lambda x: x[:1].expand(8, 16) + x.expand(3, 8, 16), N, 3 * N),
    "expanded alone": (lambda x: x[:, :1].expand(8, 1000).sum(), 4 * 8, 4),
    "in place": (lambda x: x.add_(1), N, N),
    "copied over": (lambda x: x.copy_(x[:1].clone()), 4 * 16 * 2, 4 * 16 + N),
    "filled": (lambda x: (x.zero_(), x.fill_(3)), 0, 2 * N),
    "filled through a view": (lambda x: x[:, 4:8].fill_(1.0), 0, N // 4),
    "made": (lambda x: (torch.zeros_like(x), torch.ones(8, 16), torch.randn_like(x)), 0, 3 * N),
    "clone": (lambda x: x.clone(), N, N),
    "cast": (lambda x: x.half(), N, N // 2),
    "no cast": (lambda x: x.to(torch.float32).contiguous(), 0, 0),
    "masked_fill": (lambda x: x.masked_fill(torch.empty(8, 16, dtype=torch.bool), 0.0), N + N + N // 4, 2 * N),
    "softmax": (lambda x: x.softmax(-1), N, N),
    "cat": (lambda x: torch.cat([x, x[:4]]), N, N * 3 // 2),
    "embedding": (lambda x: F.embedding(torch.zeros(3, dtype=torch.int64), torch.empty(100000, 16)), 3 * 64 + 24, 3 * 64 + 24),
    "windows": (lambda x: x.view(-1).as_strided((16, 16), (4, 1)) + 0.0, 4 * (15 * 4 + 16), 4 * 256),
    "out": (lambda x: torch.add(x, 1, out=torch.empty_like(x)), N, N),
    "several results": (lambda x: x.max(-1), N, 8 * 4 + 8 * 8),
    "turned in place": (lambda x: x.t_().unsqueeze_(0), 0, 0),
    "where a number": (lambda x: torch.where(torch.empty(8, 16, dtype=torch.bool), x, -3.0), N + N // 4 + 4, N + 4),
    "a program of programs": (lambda x: torch.ops.aten._safe_softmax(x, -1), 3 * N + 140, 2 * N + 140),
    "a convolution": (lambda x: F.conv1d(x.view(1, 8, 16), torch.empty(2, 8, 3)), N + 4 * 48, 4 * 2 * 14),
    "written into": (lambda x: x.index_put_((torch.empty(2, dtype=torch.int64),), torch.empty(())), 16 + 4, 2 * 64),
    "added into": (lambda x: torch.ops.aten.index_put_(x, [None, torch.empty(3, dtype=torch.int64)], torch.empty(8, 3), True), 24 + 96 + 96, 96),
    "rows added": (lambda x: x.index_add_(0, torch.empty(2, dtype=torch.int64), torch.empty(2, 16)), 16 + 128 + 128, 128),
    "scattered": (lambda x: x.scatter_(1, torch.empty(8, 2, dtype=torch.int64), 1.0), 128, 64),
    "nothing there": (lambda x: x[:0] + 1, 0, 0),
}


UNREAL = ("written into", "added into", "rows added", "scattered")


@pytest.mark.parametrize("where", ["real", "fake", "meta"])
@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str, where: str) -> None:
    call, read, written = RULES[rule]
    if where == "real" and rule in UNREAL:
        pytest.skip("its indices have no values")
    if rule == "embedding":
        written -= 24           # the indices are made inside
    if where == "real":
        t = counted(lambda x=matrix(): call(x))
    elif where == "fake":
        with FakeTensorMode():
            t = counted(lambda x=matrix(): call(x))
    else:
        with torch.device("meta"):
            t = counted(lambda x=matrix(): call(x))
    made = 24 if rule == "embedding" else 0
    assert (t.read, t.written - made) == (read, written), f"\n{t}"


def test_a_view_does_not_look_like_traffic_of_its_base() -> None:
    x = torch.randn(64, 64)
    assert counted(lambda: x.t()[3:].unsqueeze(0)).calls == []
    assert distinct_bytes([x.expand(100, 64, 64)]) == distinct_bytes([x, x.t(), x.view(-1)]) == 4 * 64 * 64
    assert distinct_bytes([x[:32], x[16:48]]) == 4 * 48 * 64, "views that overlap are not counted beyond their span"
    flat = x.view(-1)
    assert distinct_bytes([flat[:64].unfold(0, 16, 4), flat[4000:]]) == 4 * (64 + 96), "windows that slide over one another"


def test_random_pointwise_programs(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        shape = [rng.choice((1, 2, 3, 5)) for _ in range(rng.randrange(1, 4))]
        x, n = torch.randn(shape), 4
        y = torch.randn([s if rng.random() < 0.5 else 1 for s in shape])
        t = counted(lambda: x + y.expand(shape))
        assert (t.read, t.written) == (n * (x.numel() + y.numel()), n * x.numel()), (shape, y.shape)


def test_what_runs_is_unchanged(seed: int) -> None:
    model, x = Stack().train(), torch.randn(2, 8, 16, requires_grad=True)
    twin = copy.deepcopy(model)
    torch.manual_seed(seed)
    expected = model(x)
    expected.sum().backward()
    grad, x.grad = x.grad, None
    torch.manual_seed(seed)
    with attnfuse.traffic():
        out = twin(x)
        out.sum().backward()
    assert torch.equal(out, expected) and torch.equal(x.grad, grad)


def test_errors_are_the_model_s_own() -> None:
    with attnfuse.traffic() as t, pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(2, 3) + torch.ones(2, 4)
    assert t.total == 4 * (6 + 8)
    with pytest.raises(ValueError, match="unknown device 'gtx'.*a100, .*h100"), attnfuse.traffic("gtx"):
        pass


# ---- whole attentions

def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.mark.parametrize("tokens, width", [(128, 16), (96, 64)])
def test_standard_attention_moves_what_the_formula_says(tokens: int, width: int) -> None:
    with FakeTensorMode():
        q, k, v = (torch.randn(2, 3, tokens, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        grad = torch.randn_like(q)
        with attnfuse.traffic() as t:
            out = plain(q, k, v)
            assert t.total == 2 * 6 * roofline.standard_attention_traffic(tokens, width)
            assert t.flops == 6 * 2 * roofline.product_flops(tokens, width)
            torch.autograd.grad(out, (q, k, v), grad)
    forward_and_backward = roofline.standard_attention_traffic(tokens, width) + roofline.standard_backward_traffic(tokens, width)
    assert t.total == 2 * 6 * forward_and_backward


def headline(p: float, device: str | None) -> attnfuse.Traffic:
    """GPT-2 medium's attention, forward and backward, on fake tensors."""
    with FakeTensorMode():
        q, k, v = (torch.randn(64, 16, 1024, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
        grad = torch.randn_like(q)
        with attnfuse.traffic(device) as t:
            torch.autograd.grad(attention(q, k, v, p), (q, k, v), grad)
    return t


def test_the_headline_layer_against_the_counters_of_a_gpu() -> None:
    """An H200's counters say 58.7 GB in 19 kernels, 33.64 read and 25.06 written; its cache of 50 MB keeps the end of what a kernel wrote for
    the next one, and the two copies before a mask is filled in are not kernels there."""
    t = headline(0.1, "h200")
    assert [c.op for c in t.calls if not c.kernel] == ["copy_", "copy_"]
    listed = attnfuse.Traffic([c for c in t.calls if c.kernel])
    assert len(listed.calls) == 18, "the gradient of the result, ones in the counted run, is a nineteenth, of 134 MB"
    assert 1.0 < listed.read / 33.64e9 < 1.03 and 1.0 < (listed.written + 134e6) / 25.06e9 < 1.03
    assert headline(0.1, None).total > t.total - 6.5e9, "on a CPU dropout is three kernels and a mask of float16"


def test_our_own_operations_count_as_predicted() -> None:
    model, x = Stack().eval(), torch.randn(2, 8, 16, requires_grad=True)
    attnfuse.optimize(model, inner="eager")
    model(x).sum().backward()
    t = counted(lambda: model(x).sum().backward())
    ours = {r.op: r for r in t.by_op() if "attnfuse" in r.op}
    assert ours["attnfuse::attention"].calls == 2 and {n for n in ours if "backward" in n} == {
        f"attnfuse::attention_backward ({k})" for k in ("rows", "keys", "queries")}
    one = 2 * 2 * 8 * 8 * 4                                     # [2, 2, 8, 8] float32
    assert ours["attnfuse::attention"].moved == 2 * (4 * one + 2 * 2 * 8 * 8)
    assert not [r for r in t.by_op() if "softmax" in r.op]


def test_compiling_inside_the_block() -> None:
    model, x = attnfuse.optimize(Attention(), inner="eager"), torch.randn(2, 8, 16)
    with attnfuse.traffic() as t, torch.no_grad():
        model(x)
    assert sum(c.op == "attnfuse::attention" for c in t.calls) == 1


def test_the_fused_headline_layer_moves_a_fraction() -> None:
    spec = BY_NAME["dropout"].spec("float16")
    sizes = dict(zip(spec.size_names, (64, 16, 1024, 1024, 64, 64), strict=True))
    one = 2 * 64 * 16 * 1024 * 64
    kernels = (predict.forward(spec, sizes, [one] * 3, CARDS["h200"]), *predict.backward(spec, sizes, [one] * 3, [True] * 3, CARDS["h200"]))
    whole = predict.total("fused", kernels)
    assert (round(whole.moved / 1e9, 1), round(whole.most / 1e9, 1)) == (2.3, 8.4), "the peers were counted to move 2.8 to 3.3 GB"
    assert headline(0.1, "h200").total > 26 * whole.moved


def test_nested_modes() -> None:
    """Entered outside of the fake mode it sees what that makes of an operation: the same, for what has no decomposition there."""
    with attnfuse.traffic() as outer, attnfuse.traffic() as inner:
        matrix().softmax(-1)
    assert inner.total == outer.total > 0


def test_the_table(seed: int) -> None:
    t = counted(lambda: nn.Linear(16, 16)(matrix()).softmax(-1))
    lines = str(t).splitlines()
    assert lines[0].split()[:2] == ["operation", "kernels"] and lines[-1].startswith("total") and len(lines) == len(t.by_op()) + 2
    assert sum(r.moved for r in t.by_op()) == t.total == t.read + t.written
    assert all(k.intensity > 0 for k in t.kernels())
    assert [size(n) for n in (0, 999, 1000, 58.6e9, 4.04e15)] == ["0 B", "999 B", "1 KB", "58.6 GB", "4.04e+03 TB"]


# ---- devices and predictions

def test_devices_by_name() -> None:
    assert device("H100") is CARDS["h100"] and device("NVIDIA GeForce RTX 4090") is CARDS["rtx4090"] and device(" rtx_40 ") is CARDS["rtx4090"]
    assert round(roofline.ridge_point(CARDS["a100"].peak, CARDS["a100"].bandwidth)) == 153
    assert round(roofline.ridge_point(CARDS["h100"].peak, CARDS["h100"].bandwidth)) == 295
    assert device("sm_90 with 227 KB").shared == DEVICES["cuda", 90].shared and device("cc 8.9").shared == DEVICES["cuda", 89].shared
    assert device("sm_90 with 99 KB").shared == 99 * 1024 and device("sm90a").processors == 132 and device("gfx942").lanes == 64
    assert device("sm_80").peak == 0.0


@pytest.mark.parametrize("text", ["", "h900", "sm_77", "sm_90 with 5 KB", "sm_90 with many KB", "gfx1100", "90"])
def test_unknown_devices_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="known ones are a100|between 16 and 1024"):
        device(text)


def test_rates_of_what_the_driver_reports() -> None:
    from dataclasses import replace
    assert rates(replace(DEVICES["cuda", 90], name="NVIDIA H100 80GB HBM3")).peak == 989e12
    assert rates(replace(DEVICES["cuda", 90], name="NVIDIA H100 PCIe")).peak == 0.0 == rates(SMALLEST).peak


def test_predictions_hold_together(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        case = BY_NAME[rng.choice(("plain", "causal_inf", "window", "bias", "padding", "dropout", "alibi_causal"))]
        tokens, width = rng.choice((1, 17, 128, 1000, 4096, 65536)), rng.choice((16, 64, 80, 128, 256))
        spec = case.spec(rng.choice(("float16", "bfloat16", "float32")))
        sizes = dict(zip(spec.size_names, (rng.randrange(1, 5), 4, tokens, tokens, width, width), strict=True))
        held = [rng.randrange(1, 10 ** 6) for _ in spec.operands]
        card = rng.choice(list(CARDS.values()))
        for found in (predict.forward(spec, sizes, held, card), *predict.backward(spec, sizes, held, [True] * len(held), card)):
            assert sum(held) * (found.name != "rows") < found.moved <= found.most and 0 < found.written < found.moved
            assert 0 <= found.tail < 1 and (found.seconds is None or found.seconds >= found.moved / card.bandwidth * (1 - 1e-9))


def test_shared_heads_are_read_once() -> None:
    spec = BY_NAME["grouped"].spec("bfloat16")
    sizes = dict(zip(spec.size_names, (1, 8, 512, 512, 64, 64), strict=True))
    q, kv = 2 * 8 * 512 * 64, 2 * 4 * 512 * 64
    found = predict.forward(spec, sizes, [q, kv, kv], CARDS["h100"])
    assert found.moved == 2 * q + 2 * kv + 8 * 8 * 512


def test_a_cache_that_is_too_small_is_counted() -> None:
    spec = BY_NAME["plain"].spec("bfloat16")
    sizes = dict(zip(spec.size_names, (1, 1, 1 << 18, 1 << 18, 128, 128), strict=True))
    one = 2 * (1 << 18) * 128
    found = predict.forward(spec, sizes, [one] * 3, CARDS["rtx3090"])
    assert 4 * one < found.moved < found.most, "128 MB of keys and values against 6 MB"


@pytest.mark.parametrize("memory", [16384, 65536, 116736])
@pytest.mark.parametrize("width", [64, 128])
def test_flash_attention_s_rule_beside_our_plans(width: int, memory: int) -> None:
    """FlashAttention gives Q, K, V and O a tile of B_c × d numbers each; the planner, given as much memory, fits tiles at least that fine."""
    rows, columns = roofline.flash_blocks(width, memory // 2)
    assert 2 * (2 * rows * width + 2 * columns * width) <= memory + 8 * width
    card = device(f"sm_80 with {memory // 1024} KB")
    plan = candidates(BY_NAME["plain"].spec("float16"), Request(8, 4096, 4096, width, width), card)[0]
    assert plan.shared <= memory
    assert plan.block_n <= 2 * columns


# ---- reports

def test_a_report_says_what_is_saved(tmp_path: Path) -> None:
    model, x = Stack().eval(), torch.randn(2, 8, 16)
    report = attnfuse.explain(model, x)
    site = report.sites[0]
    one = 2 * 2 * 8 * 8 * 4
    assert site.sizes == (2, 2, 8, 8, 8, 8) and site.held == (one,) * 3
    assert {"_softmax", "bmm", "mul", "masked_fill_"} <= {c.op for c in site.written}
    assert site.fused is not None and site.traffic == (sum(c.moved for c in site.written), 4 * one + 2 * 2 * 8 * 8)
    assert report.traffic == tuple(2 * n for n in site.traffic)
    text = str(report).splitlines()
    assert "forward traffic" in text[1] and f"{size(report.traffic[0])} → {size(report.traffic[1])}" in text[2]
    assert report.to_dict()["traffic"] == {"written": report.traffic[0], "fused": report.traffic[1]}
    pytest.importorskip("matplotlib")
    said = " ".join(t.get_text() for t in report.plot(tmp_path / "r.png", device="a100", measured={"fused": 1e-3}).texts)
    assert "312 TFLOP/s" in said and "1 ms measured" in said and (tmp_path / "r.png").exists()
    with pytest.raises(ValueError, match="rates of sm_80 are not known"):
        report.plot(device="sm_80")


def test_what_a_site_is_said_to_move_is_what_eager_moves() -> None:
    q, k, v = torch.randn(3, 2, 4, 128, 32)
    report = attnfuse.explain(plain, q, k, v)
    assert report.traffic[0] == counted(lambda: plain(q, k, v)).total == 4 * 8 * roofline.standard_attention_traffic(128, 32)


def test_a_fused_call_is_not_taken_for_its_spelling() -> None:
    q, k, v = torch.randn(3, 1, 2, 256, 32)
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v)
    report = attnfuse.explain(f, q, k, v)
    assert report.rewritten == 1 and report.traffic[0] < 4 * 2 * 256 * 256, "eager does not write the scores here"


def test_lengths_that_are_symbols_stay_symbols() -> None:
    reports = []
    model = attnfuse.optimize(plain, inner="eager", dynamic=True)
    for tokens in (16, 24, 40):
        model(*torch.randn(3, 1, 2, tokens, 32))
        reports.append(attnfuse.last_report())
    assert reports[0] is reports[-1] is not None and reports[0].rewritten == 1, "one graph serves all lengths"
    assert reports[0].traffic == (0, 0) and "forward traffic" not in str(reports[0])
    with pytest.raises(ValueError, match="no rewritten site"):
        reports[0].plot()


def test_what_still_runs_is_not_counted_as_saved() -> None:
    """A bias that a product makes stays beside the fused op, as it does beside the attention as written."""
    def f(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        bias = rows @ rows.t()
        bias.mul_(2.0).add_(1.0)
        return (q @ k.transpose(-1, -2)).add_(bias).softmax(-1) @ v

    (q, k, v), rows = torch.randn(3, 1, 2, 16, 8), torch.randn(16, 4)
    report = attnfuse.explain(f, q, k, v, rows)
    assert report.rewritten == 1
    assert sorted(c.op for c in report.sites[0].written) == ["_softmax", "add_", "bmm", "bmm"]
    optimised = attnfuse.optimize(f, inner="eager")
    optimised(q, k, v, rows)
    written, ours = counted(lambda: f(q, k, v, rows)).total, counted(lambda: optimised(q, k, v, rows))
    fused = next(c.moved for c in ours.calls if c.op == "attnfuse::attention")
    assert report.traffic == (sum(c.moved for c in report.sites[0].written), fused)
    assert written - report.traffic[0] == sum(c.moved for c in counted(lambda: (rows @ rows.t()).mul_(2.0).add_(1.0)).calls)


@pytest.mark.parametrize("dtype, width", [(torch.float32, 300), (torch.float64, 16)])
def test_what_has_no_kernel_counts_its_operands(dtype: torch.dtype, width: int) -> None:
    q, k, v = (torch.randn(1, 2, 32, width, dtype=dtype, requires_grad=True) for _ in range(3))
    report = attnfuse.explain(plain, q, k, v)
    assert report.rewritten == 1 and report.sites[0].fused is None and report.sites[0].traffic is None and "forward traffic" not in str(report)
    optimised = attnfuse.optimize(plain, inner="eager")
    optimised(q, k, v)
    t = counted(lambda: optimised(q, k, v).sum().backward())
    one = dtype.itemsize * q.numel()
    assert [c.moved for c in t.calls if c.op == "attention"] == [4 * one + 2 * 32 * 2 * dtype.itemsize]
    assert [c.op for c in t.calls].count("attention_backward") == 1


def test_lengths_of_zero() -> None:
    optimised = attnfuse.optimize(plain, inner="eager")
    for tokens in (4, 0):
        q, k, v = torch.randn(3, 1, 2, tokens, 8)
        optimised(q, k, v)
        assert (counted(lambda: optimised(q, k, v)).total == 0) == (tokens == 0)


def test_flops_of_heads_that_share_keys_where_pytorch_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11's formula wants a key for every head and asserts it."""
    op = torch.ops.aten._scaled_dot_product_flash_attention
    real = flop_registry[op]

    def strict(query: Tensor, key: Tensor, value: Tensor, *args: object, **rest: object) -> int:
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return real(query, key, value, *args, **rest)

    monkeypatch.setitem(flop_registry, op, strict)
    q, k = (torch.empty(2, h, 16, 4, device="meta") for h in (8, 2))
    assert counting._flops(op.default, (q, k, k), {}, q) == counting._flops(op.default, (q, q, q), {}, q) == 2 * 2 * 2 * 8 * 16 * 16 * 4


def test_every_backward_kernel_is_predicted() -> None:
    """What attentions share at (i, j) has a kernel of its own: of tiles, or of block diagonals, whose results are linear in the length."""
    card = device("h200")

    def kinds(name: str, length: int) -> dict[str, int]:
        case = BY_NAME[name]
        operands, sizes = case.inputs(Shape((4, 2), length, length, 64, 64), torch.bfloat16, 0)
        spec = case.spec("bfloat16")
        held, needs = [distinct_bytes([t]) for t in operands], [t.is_floating_point() for t in operands]
        return {p.name: p.written for p in predict.backward(spec, dict(zip(spec.size_names, sizes, strict=True)), held, needs, card)}

    assert list(kinds("plain", 512)) == ["rows", "keys", "queries"] == list(kinds("bias", 512))
    assert kinds("bias", 512)["queries"] == 8 * 512 * 64 * 2 + 8 * 512 * 512 * 2
    assert kinds("bias_per_head", 512)["tiles"] == 2 * 512 * 512 * 4
    short, long = (kinds("wrapping_index", n)["diagonals"] for n in (512, 1024))
    assert 1.9 < long / short < 2.2
