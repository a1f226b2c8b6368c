"""The operators in compiled graphs: what compilers make of them, and how those of inductor's graphs are called."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attnfuse
from attnfuse import compiled, ops
from attnfuse.program import apply, const, where
from tests.build import CAUSAL, DROPOUT, FLOAT32_MIN, MASK, S, Tensors, attend, attention, causal, mask, padding, random_seed, trainable

SIZES = [2, 4, 9, 9, 8, 8]
BOTH = where(apply("and", CAUSAL, padding()), S, const(FLOAT32_MIN))
DROPPING = attention(BOTH, MASK, dtype="float32", weight=DROPOUT, out_order=(0, 2, 1, 3)).to_json()
FUSED = attention(causal(S), dtype="float32", out_order=(0, 2, 1, 3)).to_json()


def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """An attention as it stands in a rewritten graph, between other operations; with a mask it also drops weights."""
    batch, heads, queries, depth = query.shape
    sizes = [batch, heads, queries, key.shape[2], depth, depth]
    if hidden is None:
        out = attend(FUSED, [query * 2.0, key, value], sizes)
    else:
        out = attend(DROPPING, [query * 2.0, key, value, hidden], sizes, torch.randint(0, 2 ** 62, (1,)))
    return out.transpose(1, 2).reshape(batch, queries, heads * depth) + 1.0


def train(function: Callable[..., torch.Tensor], inputs: Tensors, *rest: torch.Tensor) -> Tensors:
    """The result and the gradients, from a fixed random state."""
    leaves = trainable(inputs)
    torch.manual_seed(3)
    out = function(*leaves, *rest)
    out.square().sum().backward()
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


def inputs_of(length: int) -> Tensors:
    return [torch.randn(2, 4, length, 8) for _ in range(3)]


def same(got: Tensors, want: Tensors) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(backend: str, dynamic: bool) -> None:
    random_seed()
    compiled = torch.compile(layer, backend=backend, dynamic=dynamic, fullgraph=True)
    for length in (9, 13, 17):
        inputs = inputs_of(length)
        same(train(compiled, inputs), train(layer, inputs))
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), layer(*inputs))
    with torch.inference_mode():
        inputs = inputs_of(13)
        torch.testing.assert_close(compiled(*inputs), layer(*inputs))


def test_inductor_calls_the_operators_without_autograd(seed: int) -> None:
    """In forward and backward, with what eager computes."""
    def attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()
        return (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1) @ v

    model = attnfuse.optimize(attend_causally)
    inputs = [t.double() for t in inputs_of(19)]
    same(train(model, inputs), train(attend_causally, inputs))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        train(model, inputs)
    assert {e.name for e in seen.events() if "attnfuse" in e.name} == {"attnfuse::attention_in_graph", "attnfuse::attention_backward_in_graph"}


class Looking(TorchDispatchMode):
    """Somebody who looks on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def recording(calls: list[str], name: str = "") -> Callable[..., Any]:
    """What stands for an operator of graphs: `compiled.shorten`'s, with notes of which way a call takes; by default ways that end at once."""
    dispatched, computes = (as_dispatched(name), ops.OPERATORS[name][0]) if name else (lambda *args, **named: None,) * 2

    def noting(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: (calls.append(way), function(*args, **named))[1]
    return compiled._shorter(noting("dispatched", dispatched), noting("computed", computes))


def as_dispatched(name: str) -> Callable[..., Any]:
    """An operator of graphs as PyTorch's dispatcher calls it, whatever is kept in its place."""
    return torch._C._get_operation_overload(f"attnfuse::{name}{ops.IN_GRAPH}", "")[0]


def test_compiled_graphs_call_what_computes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the dispatcher; with it, and the same results, while somebody looks on."""
    model, inputs = torch.compile(layer, backend="attnfuse", fullgraph=True), inputs_of(19)
    want = train(model, inputs)
    calls: list[str] = []
    for name in ("attention", "attention_backward"):
        op = getattr(torch.ops.attnfuse, name + ops.IN_GRAPH).default
        assert op._op.__module__ == compiled.__name__
        monkeypatch.setattr(op, "_op", recording(calls, name))
    same(train(model, inputs), want)
    assert calls == ["computed"] * 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        same(train(model, inputs), want)
    assert calls[2:] == ["dispatched"] * 2


def test_who_looks_on_sees_operators_of_graphs() -> None:
    """Every kind of call that the dispatcher knows what to do with and what computes does not."""
    calls: list[str] = []
    op, x = recording(calls), torch.randn(3)
    op([x, x], [3], None, "")
    op(torch.nn.Parameter(x), [x], [3])
    assert calls == ["computed"] * 2
    with FakeTensorMode() as mode:
        op([mode.from_tensor(x)], [3])
        op(x)
    op(mode.from_tensor(x), [x])
    op([x.to("meta")], [3])
    op([], [3])
    op([x], sizes=[3])
    op()
    with Looking():
        op([x], [3])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        op([x], [3])
    torch.vmap(lambda y: (op([y], [3]), y)[1])(x)
    torch.func.grad(lambda y: (op(y, [3]), y.sum())[1])(x)
    assert calls[2:] == ["dispatched"] * 11


def test_a_pytorch_whose_operators_are_called_otherwise_keeps_its_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [getattr(torch.ops.attnfuse, name + ops.IN_GRAPH).default for name in ops.OPERATORS]
    for op in ways:
        monkeypatch.setattr(op, "_op", None)
    compiled.shorten.__wrapped__()
    assert all(op._op is None for op in ways)


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_an_operator_without_autograd_is_the_same_otherwise(name: str) -> None:
    known, other = getattr(torch.ops.attnfuse, name).default, getattr(torch.ops.attnfuse, name + ops.IN_GRAPH).default
    assert str(other._schema) == str(known._schema).replace(f"attnfuse::{name}(", f"attnfuse::{name}{ops.IN_GRAPH}(") and other.tags == known.tags
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "Autograd")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CompositeExplicitAutograd")


def test_a_length_that_is_marked_dynamic_is_not_compiled_again() -> None:
    torch._dynamo.config.error_on_recompile, before = True, torch._dynamo.config.error_on_recompile
    try:
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for length in (9, 13, 65):
            inputs = trainable(inputs_of(length))
            for t in inputs:
                torch._dynamo.mark_dynamic(t, 2)
            same([compiled(*inputs).detach()], [layer(*inputs).detach()])
    finally:
        torch._dynamo.config.error_on_recompile = before


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_in_a_compiled_graph_follows_the_random_state(backend: str) -> None:
    """And the backward pass drops what the forward pass dropped."""
    random_seed()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    inputs, hidden = inputs_of(9), mask()
    first, again = train(compiled, inputs, hidden), train(compiled, inputs, hidden)
    assert all(map(torch.equal, first, again))
    torch.manual_seed(4)
    assert not torch.equal(compiled(*inputs, hidden), first[0])
    consistent(compiled, inputs, hidden)


def consistent(function: Callable[..., torch.Tensor], inputs: Tensors, hidden: torch.Tensor) -> None:
    """The result is linear in the value, so ⟨gradient, value⟩ = Σ result if backward saw the weights that forward saw."""
    value = inputs[2].clone().requires_grad_()
    out = function(inputs[0], inputs[1], value, hidden) - 1.0
    out.sum().backward()
    assert value.grad is not None
    torch.testing.assert_close((value.grad * value).sum(), out.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_checkpointing_keeps_the_dropout(backend: str | None, reentrant: bool) -> None:
    random_seed()
    function = lambda *args: checkpoint(layer, *args, use_reentrant=reentrant)
    inputs, hidden = inputs_of(9), mask()
    if backend is None:
        same(train(function, inputs, hidden), train(layer, inputs, hidden))
    consistent(torch.compile(function, backend=backend) if backend else function, inputs, hidden)
