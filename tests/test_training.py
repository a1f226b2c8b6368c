"""Training an optimised model as one trains any other: autocast, gradient scaling, exact gradients, and what is refused of higher order."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnfuse
from attnfuse import ops
from attnfuse.program import add, apply, const, load, mul, where
from tests.build import B1, CAUSAL, I, J, S, attention, data
from tests.training import Block, Gpt, batches, close, fused, gradients

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- mixed precision

def steps(model: nn.Module, ids: list[Tensor], dtype: torch.dtype | None, scaler: torch.amp.GradScaler | None = None) -> list[float]:
    """Losses of some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for batch in ids:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_under_autocast_are_as_exact_as_eager_ones(dtype: str, seed: int) -> None:
    """Against the same model in float64: the error of each gradient is at most 1.2 times that of eager, above a floor."""
    eager = Gpt(width=64)
    (ids,) = batches(1)
    model = attnfuse.optimize(copy.deepcopy(eager), inner="eager")
    with torch.autocast("cpu", dtype=HALVES[dtype]):
        ours, theirs = gradients(model, ids), gradients(eager, ids)
    fused(model, 2)
    assert not torch.equal(ours["loss"], theirs["loss"]) or not torch.equal(ours["head.weight"], theirs["head.weight"])
    exact = gradients(copy.deepcopy(eager).double(), ids)
    assert ours.keys() == theirs.keys() == exact.keys()
    scale = max(float(g.norm()) for n, g in exact.items() if n != "loss")
    for name, want in exact.items():
        a, b = (float((g[name].double() - want).norm()) for g in (ours, theirs))
        assert ours[name].dtype == theirs[name].dtype
        assert a <= max(1.2 * b, 2e-3 * scale), f"{name}: {a} against eager's {b}"


@pytest.mark.parametrize("dtype", HALVES)
def test_losses_under_autocast_follow_eager(dtype: str, seed: int) -> None:
    eager = Gpt()
    model = attnfuse.optimize(copy.deepcopy(eager), inner="eager")
    ids = batches(1) * 12                              # the same again and again: what is learned shows, whatever was drawn
    ours, theirs = steps(model, ids, HALVES[dtype]), steps(eager, ids, HALVES[dtype])
    fused(model, 2)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-2, atol=0)
    assert theirs[-1] < theirs[0] - 0.5, "the model learns"


def test_gradient_scaling_skips_the_steps_that_eager_skips(seed: int) -> None:
    """A scale at which the gradients overflow float16 falls by half until they fit."""
    eager = Gpt()
    model = attnfuse.optimize(copy.deepcopy(eager), inner="eager")
    ids = batches(1) * 24
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0 ** 24) for _ in range(2)]
    ours, theirs = (steps(m, ids, torch.float16, s) for m, s in zip((model, eager), scalers, strict=True))
    fused(model, 2)
    scale, want = (s.get_scale() for s in scalers)
    assert want < 2.0 ** 24 and 0.5 <= scale / want <= 2, "a gradient at the very edge may overflow in one and not in the other"
    if scale == want:                                  # as many steps were taken
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=5e-2, atol=0)
    assert max(ours[-1], theirs[-1]) < theirs[0] - 0.5


# ---- exact gradients

def rn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * 0.6


def relative(n: int) -> Tensor:
    return torch.arange(n) - torch.arange(n)[:, None]


def causal(s: Tensor) -> Tensor:
    return s.masked_fill(relative(s.shape[-1]) > 0, float("-inf"))


CHAINS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "causal": (lambda q, k, v: causal(scores(q, k)).softmax(-1) @ v, lambda: ()),
    "temperature": (lambda q, k, v, t: (scores(q, k) * t.exp()).softmax(-1) @ v, lambda: (rn(2, 1, 1),)),
    "softcap": (lambda q, k, v: causal(2.0 * torch.tanh(scores(q, k) / 2.0)).softmax(-1) @ v, lambda: ()),
    "bias": (lambda q, k, v, b: (scores(q, k) + b).softmax(-1) @ v, lambda: (rn(2, 5, 5),)),
    "table of distances": (lambda q, k, v, w: (scores(q, k) + w[relative(5) + 4].permute(2, 0, 1)).softmax(-1) @ v, lambda: (rn(9, 2),)),
    "slopes": (lambda q, k, v, m: causal(scores(q, k) + m[:, None, None] * relative(5)).softmax(-1) @ v, lambda: (rn(2),)),
    "sinks": (lambda q, k, v, s: torch.cat([causal(scores(q, k)), s[None, :, None, None].expand(1, 2, 5, 1)], -1).softmax(-1)[..., :-1] @ v,
              lambda: (rn(2),)),
    "gate of heads": (lambda q, k, v, g: (scores(q, k).softmax(-1) * g) @ v, lambda: (rn(2, 1, 1),)),
    "grouped": (lambda q, k, v: causal(scores(q, k[:, :1].repeat_interleave(2, 1))).softmax(-1) @ v[:, :1].repeat_interleave(2, 1), lambda: ()),
    "dropout": (lambda q, k, v: torch.dropout(causal(scores(q, k)).softmax(-1), 0.3, True) @ v, lambda: ()),
}


@pytest.mark.parametrize("name", CHAINS)
def test_gradcheck_of_optimised_chains(name: str, seed: int) -> None:
    """In float64, through Dynamo, the operator and its executors; captured tensors too."""
    chain, more = CHAINS[name]
    optimised = attnfuse.optimize(chain, inner="eager", fullgraph=True)

    def call(*inputs: Tensor) -> Tensor:
        torch.manual_seed(seed)                        # the same weights are dropped in every call
        return optimised(*inputs)

    inputs = (rn(1, 2, 5, 3), rn(1, 2, 5, 3), rn(1, 2, 5, 4), *more())
    assert torch.autograd.gradcheck(call, inputs, nondet_tol=0.0)
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == len(report.sites) == 1, str(report)


# ---- higher order and transforms: what is right, and what says clearly that it is not

WAYS_OUT = r'no second derivative.*set_stance."force_eager".*forward'


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of a gradient's norm, for the weights of the queries, keys and values."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), model.qkv.weight)[0]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_second_derivatives_are_refused_and_have_two_ways_out(inner: str, seed: int) -> None:
    block = Block(16, 2, 0.0)
    x = torch.randn(2, 8, 16)
    want = penalty(block, x)
    attnfuse.optimize(block, inner=inner)
    with pytest.raises(NotImplementedError, match=WAYS_OUT):
        penalty(block, x)
    fused(block, 1)
    for create in (False, True):                       # the first derivative is not touched
        y = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(block(y).square().sum(), y, create_graph=create)
        torch.testing.assert_close(grad, torch.autograd.grad(block.forward(y).square().sum(), y)[0])
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(penalty(block, x), want)
    torch.testing.assert_close(penalty(Direct(block), x), want)


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="this PyTorch has no regions")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_gradients_through_the_body_of_a_region(inner: str, seed: int) -> None:
    """Compiled once for its two calls and kept as a graph of its own, which loses the gradients of results whose values say that they have none."""
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v

    region = torch.compiler.nested_compile_region(lambda q, k, v: attend(q, k, v))
    leaves = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    twice = lambda f: lambda q, k, v: f(f(q, k, v), k, v)
    want = torch.autograd.grad(twice(attend)(*leaves).square().sum(), leaves)
    model = attnfuse.optimize(twice(region), inner=inner)
    out = model(*leaves)
    report = attnfuse.last_report()
    assert report is not None and report.rewritten >= 1, str(report)
    assert out.requires_grad
    for got, exact in zip(torch.autograd.grad(out.square().sum(), leaves), want, strict=True):
        torch.testing.assert_close(got, exact)


class Direct(nn.Module):
    """Calls a block's forward, which is never compiled."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block, self.qkv = block, block.qkv

    def forward(self, x: Tensor) -> Tensor:
        return self.block.forward(x)


def test_the_operator_names_the_ways_out_of_a_second_derivative(seed: int) -> None:
    """Where no compiler stands between: a graph that an own inner compiler runs as it is."""
    block = attnfuse.optimize(Block(16, 2, 0.0), inner=lambda gm, inputs: gm.forward)
    with pytest.raises(NotImplementedError, match=WAYS_OUT):
        penalty(block, torch.randn(2, 8, 16))
    fused(block, 1)


def functional(model: nn.Module) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """The loss of one sample as a function of the parameters, and these."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return lambda p, x: torch.func.functional_call(model, p, (x[None],)).square().sum(), parameters


def test_functional_gradients_of_an_optimised_model(seed: int) -> None:
    """Dynamo steps aside under torch.func, so the model runs as written: right, if not fused."""
    block, x = Block(16, 2, 0.0), torch.randn(3, 8, 16)
    loss, parameters = functional(block)
    want = [torch.func.grad(loss)(parameters, sample) for sample in x]
    attnfuse.optimize(block, inner="eager")
    close(torch.func.grad(loss)(parameters, x[0]), want[0])
    samples = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for n in range(3):
        close({name: g[n] for name, g in samples.items()}, want[n])


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_functional_gradients_inside_the_compiled_function_are_left_alone(transform: str, seed: int) -> None:
    block, x = Block(16, 2, 0.0), torch.randn(3, 8, 16)
    loss, parameters = functional(block)
    written: Callable[..., Any] = torch.func.grad(loss)
    if transform == "vmap":
        written = torch.func.vmap(written, (None, 0))
    given = x if transform == "vmap" else x[0]
    close(attnfuse.optimize(written, inner="eager")(parameters, given), written(parameters, given))
    report = attnfuse.last_report()
    assert report is not None and [s.reason.reason for s in report.sites if s.reason] == [attnfuse.Reason.VMAP], str(report)


@pytest.mark.parametrize("executor", ["auto", "walker"])
def test_backward_under_vmap_is_one_call_a_sample(executor: Any, seed: int) -> None:
    spec = attention(where(CAUSAL, add(S, load(3, (B1, I, J), "float")), const(float("-inf"))), (("bias", "float64", 3),))
    sizes = [2, 3, 6, 6, 4, 4]
    operands = data(spec, sizes, [torch.randn(3, 6, 6, dtype=torch.float64)])
    upstream = torch.randn(4, 2, 3, 6, 4, dtype=torch.float64)
    with ops.force_executor(executor):
        out, stats = torch.ops.attnfuse.attention(operands, sizes, None, spec.to_json())
        one = lambda g: torch.ops.attnfuse.attention_backward(g, operands, out, stats, sizes, None, spec.to_json(), [True] * 4)
        together = torch.vmap(one)(upstream)
        for n in range(4):
            for got, want in zip(together, one(upstream[n]), strict=True):
                torch.testing.assert_close(got[n], want)


def test_functional_gradients_of_the_operator_itself_are_an_error() -> None:
    """PyTorch has none for operators of a library. Only a graph from `rewrite` that is called under torch.func gets there."""
    spec = attention()
    query, key, value = data(spec, [2, 3, 6, 6, 4, 4])
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: torch.ops.attnfuse.attention([q, key, value], [2, 3, 6, 6, 4, 4], None, spec.to_json())[0].sum())(query)


def test_operator_gradcheck_of_a_bias_that_is_squared_and_a_sink(seed: int) -> None:
    """Two reads of one trained tensor, and a term of the normaliser, in one program."""
    table = load(3, (J,), "float")
    spec = attention(add(apply("tanh", add(S, table)), mul(table, table)), (("table", "float64", 1), ("sink", "float64", 1)),
                     extra_terms=(load(4, (B1,), "float"),))
    sizes = [1, 2, 5, 5, 3, 3]
    operands = data(spec, sizes, [torch.randn(5, dtype=torch.float64), torch.randn(2, dtype=torch.float64)])
    call = lambda *t: torch.ops.attnfuse.attention(list(t), sizes, None, spec.to_json())[0]
    assert torch.autograd.gradcheck(call, [t.clone().requires_grad_() for t in operands])


@pytest.mark.parametrize("view", (lambda o: o, lambda o: o.transpose(1, 2).flatten(2), lambda o: nn.functional.dropout(o, 0.5, False)),
                         ids=("result", "merged heads", "dropout that drops nothing"))
@pytest.mark.parametrize("inner", ("eager", "inductor"))
def test_equal_attentions_are_separate_results(inner: str, view: Callable[[Tensor], Tensor], seed: int) -> None:
    """A target without a gradient beside the same attention with one: taken for one call, they would be one tensor, without a gradient."""
    class Twice(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            attend = lambda: view((q @ k.mT).softmax(-1) @ v)
            with torch.no_grad():
                target = attend()
            return attend(), target, attend()

    q, k, v = torch.randn(3, 2, 3, 5, 8)
    q.requires_grad_(True)
    wide = q.detach().double().requires_grad_(True)
    (want,) = torch.autograd.grad(Twice()(wide, k.double(), v.double())[0].square().sum(), wide)
    model = attnfuse.optimize(Twice(), inner=inner, settings=attnfuse.Settings(strict=True))
    out, target, third = model(q, k, v)
    fused(model, 3)
    assert (out.requires_grad, target.requires_grad, third.requires_grad) == (True, False, True)
    (got,) = torch.autograd.grad(out.square().sum(), q)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    assert len({t.untyped_storage().data_ptr() for t in (out, target, third)}) == 3


def test_equal_attentions_in_checkpoints(seed: int) -> None:
    """Each is computed again for itself: taken for one call, AOTAutograd can't tell which checkpoint keeps it."""
    class Twice(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            attend = lambda q: (q @ k.mT).softmax(-1) @ v
            first, second = (checkpoint(attend, q, use_reentrant=False) for _ in range(2))
            return first, second

    q, k, v = torch.randn(3, 2, 3, 5, 8)
    q.requires_grad_(True)
    wide = q.detach().double().requires_grad_(True)
    (want,) = torch.autograd.grad(sum(o.square().sum() for o in Twice()(wide, k.double(), v.double())), wide)
    model = attnfuse.optimize(Twice(), inner="eager", settings=attnfuse.Settings(strict=True))
    first, second = model(q, k, v)
    fused(model, 2)
    (got,) = torch.autograd.grad(first.square().sum() + second.square().sum(), q)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


class Exported(nn.Module):
    """Attention with a trained bias, or where a gradient is stopped."""

    def __init__(self, stop: str) -> None:
        super().__init__()
        self.q, self.v, self.stop = nn.Linear(8, 8), nn.Linear(8, 8), stop
        self.bias = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ x.mT
        if not self.stop:
            scores = scores + self.bias
        if self.stop == "scores":
            scores = scores.detach()
        if self.stop == "half of the scores":
            scores = scores - 0.5 * scores.detach()
        weights = scores.softmax(-1)
        return (weights.detach() if self.stop == "weights" else weights) @ self.v(x)


@pytest.mark.parametrize("stop", ("", "scores", "half of the scores", "weights"))
def test_an_exported_graph_says_by_name_where_gradients_stop(stop: str, seed: int) -> None:
    """None of its values says whether it wants one: detach does, and what reads a trained bias stops nothing."""
    model, x = Exported(stop), torch.randn(2, 3, 5, 8)
    fused_, report = attnfuse.rewrite(torch.export.export(model, (x,)).module(), (x,), {"strict": True})
    assert report.rewritten == (not stop), str(report)
    fused_(x).square().sum().backward()
    wide = copy.deepcopy(model).double()
    wide(x.double()).square().sum().backward()
    got = {n: p.grad for n, p in fused_.named_parameters()}
    for name, p in wide.named_parameters():
        assert (got[name] is None) == (p.grad is None), name
        if p.grad is not None:
            error = (got[name].double() - p.grad).norm()  # type: ignore[union-attr]
            assert error <= 1e-4 * p.grad.norm() + 1e-4 * wide.v.weight.grad.norm(), name  # type: ignore[union-attr]
