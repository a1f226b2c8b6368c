"""Products of sums of softmaxes: taken apart where an attention comes of it, left alone where not."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attnfuse
from tests.test_passes import rewrite

T, D = 24, 8


def causal(q: Tensor, k: Tensor) -> Tensor:
    keep = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT / math.sqrt(D)).masked_fill(~keep, -torch.inf).softmax(-1)


def differential(q, k, v, lam):
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return (causal(q1, k1) - lam * causal(q2, k2)) @ v


def added(q, k, v, lam):
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return torch.matmul(torch.add(causal(q1, k1), causal(q2, k2) * lam), v)


def batched(q, k, v, lam):
    """By bmm, with the difference first."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(-lam * causal(k, q) - causal(q, k), v)


def data(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, T, 2 * D, generator=g, dtype=dtype) for _ in range(3)] + [torch.rand((), generator=g, dtype=dtype)]


@pytest.mark.parametrize("fn", (differential, added, batched))
def test_both_are_rewritten(fn, seed: int) -> None:
    compiled, reports = rewrite(fn)
    inputs = [x.requires_grad_(True) for x in data(seed)]
    out = compiled(*inputs)
    exact = [x.detach().double().requires_grad_(True) for x in inputs]
    want = fn(*exact)
    assert [s.rewritten for r in reports for s in r.sites] == [True, True]
    assert (out.double() - want).norm() <= 1e-6 * want.norm()
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    for got, wanted in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, exact, grad.double()), strict=True):
        assert (got.double() - wanted).norm() <= 1e-5 * max(wanted.norm(), 1.0)


def test_under_autocast(seed: int) -> None:
    inputs = data(seed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = differential(*inputs), torch.compile(differential, backend="attnfuse")(*inputs)
    assert got.dtype == want.dtype == torch.bfloat16
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == 2
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


def one_softmax(q, k, v, lam):
    w = causal(q, k)
    return (w - lam * w) @ v


def returned(q, k, v, lam):
    w = causal(q, k) - lam * causal(k, q)
    return w @ v, w


def dropped(q, k, v, lam):
    return torch.dropout(causal(q, k) - lam * causal(k, q), 0.5, train=True) @ v


def scaled_sum(q, k, v, lam):
    return torch.sub(causal(q, k), causal(k, q), alpha=2) @ v


def a_bias_behind(q, k, v, lam):
    return (causal(q, k) + lam * torch.ones(T, T)) @ v


def from_the_same(q, k, v, lam):
    w = causal(q, k)
    return (w - lam * (w @ causal(k, q))) @ v


@pytest.mark.parametrize("fn, rewritten", [(one_softmax, 1), (returned, 0), (dropped, 0), (scaled_sum, 0), (a_bias_behind, 0), (from_the_same, 0)])
def test_what_is_not_taken_apart(fn, rewritten: int, seed: int) -> None:
    compiled, reports = rewrite(fn)
    inputs = data(seed)
    torch.manual_seed(seed)
    got = compiled(*inputs)
    torch.manual_seed(seed)
    want = fn(*inputs)
    assert sum(s.rewritten for r in reports for s in r.sites) == rewritten
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(a, b)


def test_what_comes_to_nothing_is_put_back(seed: int) -> None:
    """Softmaxes over the queries are no attention: the product stands as it was written."""
    def fn(q, k, v):
        return ((q @ k.mT).softmax(-2) - (k @ q.mT).softmax(-2)) @ v

    graphs: list[torch.fx.GraphModule] = []

    def backend(gm, example_inputs):
        from attnfuse.passes import pipeline
        from attnfuse.settings import Settings
        graphs.append(pipeline.run(gm, Settings(strict=True))[0])
        return graphs[-1].forward

    inputs = data(seed)[:3]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend=backend)(*inputs), fn(*inputs))
    assert sum("matmul" in str(n.target) for n in graphs[0].graph.nodes) == 3


def changed_behind_the_sum(q, k, v, lam):
    first, second = causal(q, k), causal(k, q)
    w = first - lam * second
    first.zero_()
    return w @ v


def a_factor_changed_behind_the_sum(q, k, v, lam):
    second = causal(k, q) * lam
    w = torch.sub(causal(q, k), second)
    second.view(-1).add_(1.0)
    return w @ v


def changed_behind_the_product(q, k, v, lam):
    """Changed once it is summed: a product of its own would have kept it for a gradient."""
    second = causal(k, q) * lam
    out = (causal(q, k) - second) @ v
    second.zero_()
    return out


def summed_without_a_gradient(q, k, v, lam):
    first, second = causal(q, k), causal(k, q)
    with torch.no_grad():
        w = first - lam * second
    return w @ v


def changed_before_the_sum(q, k, v, lam):
    """The near miss: what is summed is what the two products read."""
    second = causal(k, q) * 2
    second.mul_(lam)
    return (causal(q, k) - second) @ v


def without_a_gradient(q, k, v, lam):
    """The near miss: no gradient of the sum, and none of the product."""
    with torch.no_grad():
        out = (causal(q, k) - lam * causal(k, q)) @ v
    return out + q


@pytest.mark.parametrize("fn, apart, grad", [
    (changed_behind_the_sum, False, False), (a_factor_changed_behind_the_sum, False, False), (a_factor_changed_behind_the_sum, False, True),
    (changed_behind_the_product, False, True), (summed_without_a_gradient, False, True), (changed_before_the_sum, True, True),
    (without_a_gradient, True, True)])
def test_the_sum_is_read_as_it_was(fn, apart: bool, grad: bool, seed: int) -> None:
    """Two products read the summands where one read their sum: the values and the gradients may not tell."""
    compiled, reports = rewrite(fn)
    exact = [x.requires_grad_(grad) for x in data(seed, torch.float64)]
    inputs = [x.detach().clone().requires_grad_(grad) for x in exact]
    want, got = fn(*exact), compiled(*inputs)
    assert any(s.rewritten for r in reports for s in r.sites) == apart
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    assert got.requires_grad == want.requires_grad == grad
    if grad:
        for a, b in zip(*(torch.autograd.grad(o.sin().sum(), x, allow_unused=True) for o, x in ((got, inputs), (want, exact))), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
