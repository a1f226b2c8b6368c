"""The operators: what PyTorch demands of one, and that the CPU's fused kernel means the same."""
from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import attnfuse
from attnfuse import cpu, ops, walker
from attnfuse.program import DOT, add, apply, const, le, load, mul, where
from attnfuse.reference import reference
from attnfuse.spec import AttentionSpec
from tests.build import (
    B1, CAUSAL, DROPOUT, FLOAT32_MIN, I, INF, J, MASK, S, Tensors, added, attend, attention, causal, data, mask, padding, random_seed, trainable,
    window)

SIZES = [2, 4, 9, 9, 8, 8]
SEED = torch.tensor([77])


PLAIN: dict[str, tuple[AttentionSpec, list[int], Callable[[], Tensors]]] = {
    "plain": (attention(), SIZES, list),
    "causal -inf": (attention(causal(S)), SIZES, list),
    "causal finfo.min": (attention(added(S, CAUSAL), out_order=(0, 2, 1, 3)), SIZES, list),
    "more queries than keys": (attention(causal(S)), [2, 4, 9, 5, 8, 8], list),
    "more keys than queries": (attention(causal(S)), [2, 4, 5, 9, 8, 8], list),
    "divided": (attention(apply("div", DOT, const(3.0))), SIZES, list),
    "padding filled": (attention(where(padding(), S, const(-INF)), MASK), SIZES, lambda: [mask()]),
    "padding added": (attention(added(S, padding()), MASK), SIZES, lambda: [mask()]),
    "padding, then scaled": (attention(mul(const(0.25), added(DOT, padding())), MASK), SIZES, lambda: [mask()]),
    "key bias by head": (attention(add(S, load(3, (B1, J), "float")), (("bias", "float64", 2),)), SIZES,
                         lambda: [torch.randn(4, 9, dtype=torch.float64)]),
    "one batch axis": (attention(causal(S), batch=("b",)), [3, 9, 9, 8, 8], list),
    "no batch axis": (attention(causal(S), batch=()), [9, 9, 8, 8], list),
    "three batch axes": (attention(causal(S), batch=("a", "b", "c")), [2, 3, 2, 9, 9, 8, 8], list),
    "one query": (attention(), [2, 4, 1, 9, 8, 8], list),
}

NOT_PLAIN: dict[str, AttentionSpec] = {
    "causal and padding": attention(where(apply("and", CAUSAL, padding()), S, const(-INF)), MASK),
    "window": attention(where(window(3), S, const(-INF))),
    "causal, bottom right": attention(where(le(J, add(I, const(1))), S, const(-INF))),
    "small fill": attention(causal(S, -100.0)),
    "float16's least number": attention(causal(S, -65504.0)),
    "float16's least number for padding": attention(where(padding(), S, const(-65504.0)), MASK),
    "small padding fill": attention(where(padding(), S, const(-100.0)), MASK),
    "row bias": attention(add(S, load(3, (I,), "float")), (("bias", "float64", 1),)),
    "scale by a tensor": attention(mul(load(3, (), "float"), DOT), (("scale", "float64", 0),)),
    "score squared": attention(mul(DOT, DOT)),
    "softcap": attention(apply("tanh", S)),
    "dropout": attention(weight=DROPOUT),
    "sinks": attention(extra_terms=(const(0.0),)),
    "negative scale, which the kernel applies after its mask": attention(causal(apply("neg", S))),
    "no scale": attention(causal(mul(const(0.0), DOT))),
    "wider products": replace(attention(dtype="bfloat16"), pv_dtype="float32"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_attention_takes_the_fused_kernel_and_agrees(name: str) -> None:
    random_seed()
    spec, sizes, extra = PLAIN[name]
    operands = data(spec, sizes, extra())
    assert cpu.forward(spec, operands, sizes) is not None
    agree(spec, operands, sizes)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_the_fused_kernel_does_not_mean(name: str) -> None:
    """A near-miss of each guard; where the operands are of float64 the operator is still right."""
    random_seed()
    spec = NOT_PLAIN[name]
    assert cpu.plain(spec) is None
    if spec.qk_dtype == "float64":
        extra = [mask() if o.dtype == "bool" else torch.randn([9] * o.rank, dtype=torch.float64) for o in spec.operands[3:]]
        agree(spec, data(spec, SIZES, extra), SIZES, SEED)


def agree(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None = None) -> None:
    """Result and gradients of the operator against the reference."""
    ours, theirs = trainable(operands), trainable(operands)
    out = attend(spec, ours, sizes, seed)
    want = reference(spec, theirs, sizes, seed, dtype=torch.float64)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-10, equal_nan=True)
    grad = torch.randn_like(want)
    pick = lambda tensors: [t for t in tensors if t.requires_grad]
    for a, b in zip(torch.autograd.grad(out, pick(ours), grad), torch.autograd.grad(want, pick(theirs), grad, materialize_grads=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, equal_nan=True)


def test_grouped_heads_take_the_fused_kernel() -> None:
    random_seed()
    spec = attention(causal(S), group=2)
    operands = data(spec, SIZES, group=2)
    assert cpu.forward(spec, operands, SIZES) is not None
    agree(spec, operands, SIZES)


def test_transposed_operands_take_the_fused_kernel() -> None:
    """Also a key that lies in memory as [.., d, j], whose last dimension has no stride 1."""
    random_seed()
    spec = attention(causal(S))
    query, key, value = data(spec, SIZES)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key = key.transpose(2, 3).contiguous().transpose(2, 3)
    assert cpu.forward(spec, [query, key, value], SIZES) is not None
    agree(spec, [query, key, value], SIZES)


@pytest.mark.parametrize("fill", [-INF, FLOAT32_MIN, -1e9])
def test_a_row_without_a_live_key_is_kept_from_the_fused_kernel(fill: float) -> None:
    """It is uniform over all keys, or NaN; a single log-sum-exp beside -1e9 would make its weights add up to 9."""
    random_seed()
    spec = attention(where(padding(), S, const(fill)), MASK)
    hidden = mask()
    hidden[1] = False
    operands = data(spec, SIZES, [hidden])
    assert cpu.forward(spec, operands, SIZES) is None
    agree(spec, operands, SIZES)


@pytest.mark.parametrize("sizes", [[2, 4, 0, 5, 8, 8], [2, 4, 5, 0, 8, 8], [0, 4, 5, 5, 8, 8], [2, 4, 5, 5, 0, 8], [2, 4, 5, 5, 8, 3]])
def test_lengths_that_the_fused_kernel_does_not_take(sizes: list[int]) -> None:
    spec = attention()
    operands = data(spec, sizes)
    assert cpu.forward(spec, operands, sizes) is None
    ours = trainable(operands)
    out = attend(spec, ours, sizes)
    torch.testing.assert_close(out, reference(spec, operands, sizes))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), ours))


# ---- what PyTorch demands

OPCHECKED: dict[str, tuple[AttentionSpec, Callable[[], Tensors], torch.Tensor | None]] = {
    "plain": (attention(), list, None),
    "causal, laid out (b, i, h, e)": (attention(added(S, CAUSAL), out_order=(0, 2, 1, 3)), list, None),
    "padding": (attention(where(padding(), S, const(-1e9)), MASK), lambda: [mask()], None),
    "causal and padding": (attention(where(apply("and", CAUSAL, padding()), S, const(-1e9)), MASK, out_order=(2, 0, 1, 3)), lambda: [mask()], None),
    "dropout and bias": (attention(add(S, load(3, (I, J), "float")), (("bias", "float64", 2),), weight=DROPOUT),
                         lambda: [torch.randn(9, 9, dtype=torch.float64)], SEED),
}


@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck(name: str) -> None:
    spec, extra, seed = OPCHECKED[name]
    operands = data(spec, SIZES, extra())
    torch.library.opcheck(torch.ops.attnfuse.attention.default, (trainable(operands), SIZES, seed, spec.to_json()))
    out, stats = torch.ops.attnfuse.attention(operands, SIZES, seed, spec.to_json())
    needs = [t.is_floating_point() for t in operands]
    needs[1] = False
    torch.library.opcheck(torch.ops.attnfuse.attention_backward.default,
                          (out, operands, out, stats, SIZES, seed, spec.to_json(), needs))


@pytest.mark.parametrize("name", ["causal and padding", "dropout and bias"])
def test_gradcheck(name: str) -> None:
    spec, extra, seed = OPCHECKED[name]
    sizes = [1, 2, 5, 5, 3, 2]
    given = [torch.ones(1, 5, dtype=torch.bool)] if name == "causal and padding" else [torch.randn(5, 5, dtype=torch.float64)]
    operands = trainable(data(spec, sizes, given))
    assert torch.autograd.gradcheck(lambda *t: attend(spec, t, sizes, seed), operands)


def test_only_the_gradients_that_are_asked_for() -> None:
    spec = attention(causal(S))
    for n in range(3):
        operands = data(spec, SIZES)
        operands[n].requires_grad_()
        attend(spec, operands, SIZES).sum().backward()
        assert [t.grad is not None for t in operands] == [m == n for m in range(3)]
        needs = [m == n for m in range(3)]
        out, stats = torch.ops.attnfuse.attention(operands, SIZES, None, spec.to_json())
        (grad,) = torch.ops.attnfuse.attention_backward(torch.ones_like(out), operands, out, stats, SIZES, None, spec.to_json(), needs)
        torch.testing.assert_close(grad, operands[n].grad)


def test_second_derivative_is_one_clear_error() -> None:
    spec = attention()
    operands = trainable(data(spec, SIZES))
    (grad,) = torch.autograd.grad(attend(spec, operands, SIZES).square().sum(), operands[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative; run the model as it is written"):
        grad.sum().backward()


def test_forward_mode_is_an_error_and_not_a_missing_tangent() -> None:
    spec = attention()
    query, key, value = data(spec, SIZES)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attend(spec, [q, key, value], SIZES), (query,), (query,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attend(spec, [torch.autograd.forward_ad.make_dual(query, query), key, value], SIZES)


def test_autocast_does_not_reach_the_products() -> None:
    """The spec's dtypes are the ones that the chain had; autocast was already taken into account when it was found."""
    for spec in (attention(dtype="float32"), attention(where(window(3), S, const(-INF)), dtype="float32")):
        operands = trainable(data(spec, SIZES))
        want = attend(spec, operands, SIZES)
        grads = torch.autograd.grad(want.sum(), operands)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attend(spec, operands, SIZES)
            assert torch.equal(out, want)
            assert all(map(torch.equal, torch.autograd.grad(out.sum(), operands), grads))


def test_gradients_are_ordinary_tensors() -> None:
    spec = attention(where(window(3), S, const(-INF)))
    operands = trainable(data(spec, SIZES))
    attend(spec, operands, SIZES).sum().backward()
    attend(spec, operands, SIZES).sum().backward()       # adds up
    for t in operands:
        assert t.grad is not None and torch.equal(copy.deepcopy(t.grad), t.grad) and t.grad.is_contiguous()


def test_vmap_is_one_call_a_sample() -> None:
    random_seed()
    spec = attention(where(apply("and", CAUSAL, padding()), S, const(-INF)), MASK)
    query, key, value = data(spec, SIZES)
    queries, masks = torch.randn(3, *query.shape, dtype=torch.float64), torch.stack([mask() for _ in range(3)], 1)
    one = lambda q, m: attend(spec, [q, key, value, m], SIZES)
    torch.testing.assert_close(torch.vmap(one, in_dims=(0, 1))(queries, masks),
                               torch.stack([one(q, m) for q, m in zip(queries, masks.unbind(1), strict=True)]), equal_nan=True)


def test_flops() -> None:
    """Of both kinds of operators."""
    spec = attention(causal(S), dtype="float32")
    sizes = [2, 4, 16, 32, 8, 4]
    want = 2 * (2 * 4 * 16 * 32) * (8 + 4 + 3 * 8 + 2 * 4)
    with FlopCounterMode(display=False) as counter:
        attend(spec, trainable(data(spec, sizes)), sizes).sum().backward()
    assert counter.get_total_flops() == want
    operands = data(spec, sizes)
    with FlopCounterMode(display=False) as counter:
        out, stats = torch.ops.attnfuse.attention_in_graph(operands, sizes, None, spec.to_json())
        torch.ops.attnfuse.attention_backward_in_graph(out, operands, out, stats, sizes, None, spec.to_json(), [True] * 3)
    assert counter.get_total_flops() == want


def test_fake_on_sizes_that_are_not_known() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    spec = attention(causal(S), out_order=(0, 2, 1, 3), dtype="float32")
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        n = shapes.create_unbacked_symint()
        operands = [torch.empty(2, 4, n, 8) for _ in range(3)]
        out, stats = torch.ops.attnfuse.attention(operands, [2, 4, n, n, 8, 8], None, spec.to_json())
        assert out.shape == (2, 4, n, 8) and out.stride(1) == 8 and stats.shape == (2, 4, n, 2)


# ---- who computes

def test_forced_executors() -> None:
    random_seed()
    spec = attention(causal(S))
    operands = data(spec, SIZES)
    results: dict[Any, Tensors] = {}
    for name in ("auto", "reference", "walker"):
        with ops.force_executor(name):  # type: ignore[arg-type]
            out, stats = torch.ops.attnfuse.attention(operands, SIZES, None, spec.to_json())
            results[name] = [out, stats.sum(-1), *walker.backward(spec, out, operands, out, stats, SIZES, None, [True] * 3)]  # type: ignore[list-item]
    for name in ("reference", "walker"):
        for a, b in zip(results[name], results["auto"], strict=True):
            torch.testing.assert_close(a, b)
    assert results["auto"][1].shape == (2, 4, 9) and ops._forced == "auto"
    with pytest.raises(ValueError, match="no executor 'fastest'"), ops.force_executor("fastest"):  # type: ignore[arg-type]
        pass


def test_a_reason_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_said", set())
    with pytest.warns(UserWarning, match="tiled loop in PyTorch: float64"):
        ops._say_once("float64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops._say_once("float64")


def test_without_generated_kernels_there_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they can't be imported, and where the kernel of this attention is not supported."""
    monkeypatch.setattr(ops, "_said", set())

    def missing() -> Any:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(ops, "_launch", missing)
    with pytest.warns(UserWarning, match="not available"):
        assert ops._generated("forward", attention(), [], [], None) is None

    class Launch:
        class Unsupported(Exception):
            pass

        @staticmethod
        def forward(*args: Any) -> Any:
            raise Launch.Unsupported("float64 products")

    monkeypatch.setattr(ops, "_launch", lambda: Launch)
    with pytest.warns(UserWarning, match="float64 products"):
        assert ops._generated("forward", attention(), [], [], None) is None


def test_statistics_of_the_fused_kernel_serve_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """(log-sum-exp, 0) is a pair whose sum is what the walker's is."""
    random_seed()
    monkeypatch.setattr(cpu, "FEW", 0)
    spec = attention(causal(S))
    operands = data(spec, SIZES)
    out, stats = cpu.forward(spec, operands, SIZES) or (torch.empty(0), torch.empty(0))
    assert math.isclose(float(stats[..., 1].abs().max()), 0.0)
    fused = cpu.backward(spec, out, operands, out, stats, SIZES, [True] * 3)
    walked = walker.backward(spec, out, operands, out, stats, SIZES, None, [True] * 3)
    assert fused is not None
    for a, b in zip(fused, walked, strict=True):
        torch.testing.assert_close(a, b)
    _, pair = walker.forward(spec, operands, SIZES)
    torch.testing.assert_close(pair.sum(-1), stats.sum(-1))
    assert cpu.backward(spec, out, operands, out, pair, SIZES, [True] * 3) is None


@pytest.mark.parametrize("keys", (cpu.FEW, cpu.FEW + 1))
def test_few_keys_leave_backward_to_the_loop(keys: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, called = attention(causal(S), dtype="float32"), []
    fused = cpu._FUSED_BACKWARD
    monkeypatch.setattr(cpu, "_FUSED_BACKWARD", lambda *a, **k: called.append(0) or fused(*a, **k))
    sizes = [2, 4, keys, keys, 8, 8]
    operands = trainable(data(spec, sizes))
    exact = [t.detach().double().requires_grad_() for t in operands]
    out = attend(spec, operands, sizes)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, operands, grad_out)
    want = torch.autograd.grad(reference(spec, exact, sizes, dtype=torch.float64), exact, grad_out.double())
    for got, true in zip(grads, want, strict=True):
        torch.testing.assert_close(got.double(), true, atol=1e-5, rtol=1e-5)
    assert len(called) == (keys > cpu.FEW)


def test_gradients_that_cancel_are_as_exact_as_eager(seed: int) -> None:
    """Of equal values the scores get no gradient: what is left is rounding, three times eager's if delta came from the rounded result."""
    def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * 0.125).softmax(-1) @ v

    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    inputs, grad_out = [normal(4, 8, 16, 64), normal(4, 8, 16, 64), normal(4, 8, 1, 64).repeat(1, 1, 16, 1)], normal(4, 8, 16, 64)
    fused = attnfuse.optimize(written, inner=lambda gm, inputs: gm.forward)

    def remainder(call: Callable[..., torch.Tensor]) -> float:
        leaves = trainable(inputs)
        return sum(x.double().norm().item() for x in torch.autograd.grad(call(*leaves), leaves[:2], grad_out))

    eager = remainder(written)
    for executor in ("auto", "walker"):
        with ops.force_executor(executor):
            found = remainder(fused)
        print(executor, found / eager)
        assert found <= 1.8 * eager


def test_scores_in_the_hundreds_leave_the_values_gradient_exact(seed: int) -> None:
    """The fused kernel's log-sum-exp of such scores is off in its fifth digit: weights from it are made to add up to one again."""
    def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).softmax(-1) @ v

    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    inputs, grad_out = [6 * normal(4, 8, 16, 16), 6 * normal(4, 8, 5, 16), normal(4, 8, 5, 16)], normal(4, 8, 16, 16)
    fused = attnfuse.optimize(written, inner=lambda gm, inputs: gm.forward)

    def of_values(call: Callable[..., torch.Tensor], weights: torch.Tensor) -> float:
        """The error of Σ_i weight · grad_out against the weights' own rounding, which scores of that size have: columns of ones see the sum."""
        leaf = inputs[2].clone().requires_grad_()
        (grad,) = torch.autograd.grad(call(inputs[0], inputs[1], leaf), leaf, torch.ones_like(grad_out))
        return float((grad.sum(-2) - weights.sum((-1, -2))[..., None]).abs().max())

    ones = torch.ones(4, 8, 16, 5, dtype=torch.float64) / 5           # weights of a row add up to one, so those of all rows to their number
    assert of_values(fused, ones) <= 2 * of_values(written, ones) + 4e-6
