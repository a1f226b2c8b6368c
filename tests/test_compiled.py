"""Operators of compiled graphs that are computed at once: only where PyTorch's dispatcher would do the same."""
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnfuse
from attnfuse import compiled, ops


class Seen(TorchDispatchMode):
    """Sees the operators that are called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Sees the functions that are called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass, which may mean anything by an operator."""


def call(operator: Any, x: Any, **kwargs: Any) -> str:
    return str(operator._op([x], [1, 2], None, "text", **kwargs))


@pytest.fixture
def operator() -> SimpleNamespace:
    """One whose two ways say which they are."""
    made = SimpleNamespace(_op=lambda *args, **kwargs: "dispatched")
    compiled.at_once(made, lambda *args: "at once")
    return made


@pytest.mark.parametrize("make", [
    lambda: torch.randn(3), lambda: torch.randn(3, requires_grad=True), lambda: torch.nn.Parameter(torch.randn(3)), lambda: torch.randn(4, 6)[1:, ::2].T,
    lambda: torch.randn(3, dtype=torch.complex64)], ids=["plain", "gradient", "parameter", "view", "complex"])
def test_ordinary_tensors_are_computed_at_once(operator: SimpleNamespace, make: Callable[[], torch.Tensor], seed: int) -> None:
    assert call(operator, make()) == "at once"
    with torch.no_grad(), torch.autocast("cpu"):
        assert call(operator, make()) == "at once"


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(3)


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3)


@pytest.mark.parametrize("make", [
    lambda: torch.randn(3).as_subclass(Own), fake, of_inference, lambda: torch._neg_view(torch.randn(3)), lambda: torch.randn(3, dtype=torch.complex64).conj(),
    lambda: torch.randn(3, device="meta"), lambda: torch.randn(3, 3).to_sparse(), lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])],
    ids=["subclass", "fake", "inference", "negated", "conjugated", "meta", "sparse", "nested"])
def test_other_tensors_are_dispatched(operator: SimpleNamespace, make: Callable[[], torch.Tensor], seed: int) -> None:
    assert call(operator, make()) == "dispatched"
    assert operator._op([torch.randn(3), make()], torch.randn(2)) == operator._op(make()) == "dispatched"


@pytest.mark.parametrize("on", [Seen, Functions, FakeTensorMode, lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])],
                         ids=["mode", "functions", "fake mode", "profiler"])
def test_who_sees_operators_sees_them(operator: SimpleNamespace, on: Callable[[], AbstractContextManager[Any]], seed: int) -> None:
    x = torch.randn(3)
    with on():
        assert call(operator, x) == "dispatched"
    assert call(operator, x) == "at once"


def test_transformations_and_tracers_see_operators(operator: SimpleNamespace, seed: int) -> None:
    x, ways = torch.randn(3, 2), []

    def inside(part: torch.Tensor) -> torch.Tensor:
        ways.extend([call(operator, part), call(operator, x)])          # also where what is called with is not transformed
        return part.sum()

    torch.vmap(inside)(x)
    torch.func.grad(inside)(x)
    torch.func.functionalize(inside)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                                   # tracing is deprecated, and used
        torch.jit.trace(inside, x, check_trace=False)
    torch.fx.experimental.proxy_tensor.make_fx(inside)(x)
    assert ways == ["dispatched"] * 10


def test_arguments_by_name_are_the_dispatchers(operator: SimpleNamespace, seed: int) -> None:
    assert call(operator, torch.randn(3), needs=[True]) == "dispatched"


def test_where_pytorch_has_other_parts_nothing_changes() -> None:
    other = SimpleNamespace(name="no function to replace")
    compiled.at_once(other, lambda *args: None)
    assert vars(other) == {"name": "no function to replace"}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the operators that compiled graphs have computed at once."""
    names: list[str] = []
    for name, (computes, _) in ops.OPERATORS.items():
        operator = getattr(torch.ops.attnfuse, name + ops.IN_GRAPH).default

        def note(*args: Any, name: str = name, computes: Callable[..., Any] = computes) -> Any:
            names.append(name)
            return computes(*args)

        monkeypatch.setattr(operator, "_op", operator._op)
        compiled.at_once(operator, note)
    yield names


def attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1) @ v


def test_a_compiled_graph_computes_what_eager_does(computed: list[str], seed: int) -> None:
    inputs = [torch.randn(2, 3, 19, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad_out = torch.randn(2, 3, 19, 8, dtype=torch.float64)
    got, expected = [], []
    for function, into in ((attnfuse.optimize(attend_causally), got), (attend_causally, expected)):
        out = function(*inputs)
        into.extend([out, *torch.autograd.grad(out, inputs, grad_out)])
    torch.testing.assert_close(got, expected)
    assert computed == ["attention", "attention_backward"]
