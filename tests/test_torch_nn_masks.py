"""Stacks of torch.nn that look at the values of their mask, which ends the graph inside torch.nn: their layers are compiled by themselves.

Values and gradients are compared with eager in float64.
"""
from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import attnfuse
from attnfuse.api import COMPILED
from tests.test_torch_nn import causal, numbers, rn

B, T, S, E, H = 2, 6, 9, 16, 4
OPTIONS: dict[str, Any] = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
Inputs = Callable[[torch.Generator], tuple[tuple[Tensor, ...], dict[str, Any]]]


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, **OPTIONS), 2)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, **OPTIONS), 2)


class Model(nn.Module):
    """A stack between two layers of the user's own."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack, self.before, self.behind = stack, nn.Linear(E, E, dtype=torch.float64), nn.Linear(E, E, dtype=torch.float64)

    def forward(self, x: Tensor, *rest: Tensor, **masks: Any) -> Tensor:
        return self.behind(self.stack(self.before(x), *rest, **masks)) * 2.0


bias = lambda g: rn(g, T, T)
blocked = lambda g: torch.rand(T, T, generator=g) > 0.7
CASES: dict[str, tuple[Callable[[], nn.Module], int, Inputs]] = {
    "encoder, causal": (encoder, 2, lambda g: ((rn(g, B, T, E),), {"mask": causal(T)})),
    "encoder, bias": (encoder, 2, lambda g: ((rn(g, B, T, E),), {"mask": bias(g)})),
    "encoder, bools": (encoder, 2, lambda g: ((rn(g, B, T, E),), {"mask": blocked(g).fill_diagonal_(False)})),
    "encoder, causal and padding": (encoder, 2, lambda g: ((rn(g, B, T, E),), {
        "mask": causal(T), "src_key_padding_mask": torch.tensor([[0.0] * T, [0.0] * 4 + [-torch.inf] * 2], dtype=torch.float64)})),
    "decoder, causal": (decoder, 4, lambda g: ((rn(g, B, T, E), rn(g, B, S, E)), {"tgt_mask": causal(T)})),
    "decoder, both": (decoder, 4, lambda g: ((rn(g, B, T, E), rn(g, B, S, E)), {"tgt_mask": bias(g), "memory_mask": rn(g, T, S)})),
    "transformer": (lambda: nn.Transformer(E, H, 2, 2, **OPTIONS), 6, lambda g: ((rn(g, B, S, E), rn(g, B, T, E)), {"tgt_mask": causal(T)})),
    "a model around an encoder": (lambda: Model(encoder()), 2, lambda g: ((rn(g, B, T, E),), {"mask": causal(T)})),
    "a model around an encoder, no mask": (lambda: Model(encoder()), 2, lambda g: ((rn(g, B, T, E),), {})),
}


def optimised(model: nn.Module, graphs: list[GraphModule]) -> nn.Module:
    torch._dynamo.reset()
    return attnfuse.optimize(model, inner=lambda gm, _: graphs.append(gm) or gm.forward, settings={"strict": True})


def fused(graphs: list[GraphModule]) -> int:
    return sum("attnfuse" in str(n.target) for gm in graphs for n in gm.graph.nodes)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_stack(name: str, train: bool) -> None:
    make, sites, inputs = CASES[name]
    g = numbers()
    model = make().train(train)
    eager, graphs = copy.deepcopy(model), []
    optimised(model, graphs)
    args, kwargs = inputs(g)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in (model, eager):
            x = args[0].clone().requires_grad_(train)
            with torch.set_grad_enabled(train):
                out = one(x, *args[1:], **kwargs)
            if train:
                out.sin().sum().backward()
            results.append((out.detach(), x.grad, [p.grad for p in one.parameters()]))
    # In evaluation PyTorch's fast path takes a bias for a mask that blocks wherever it is not zero: NaN, in eager as well.
    torch.testing.assert_close(*results, equal_nan=name == "encoder, bias" and not train)
    # Layers of one kind share a graph; how many there are is up to what the compiler can tell apart.
    assert fused(graphs) and all(s.rewritten for s in attnfuse.last_report(model).sites)      # type: ignore[union-attr]
    assert not any("multi_head_attention" in str(n.target) or "encoder_layer" in str(n.target) for gm in graphs for n in gm.graph.nodes)
    report = attnfuse.explain(eager, *args, **kwargs)
    assert report.rewritten and all(s.rewritten for s in report.sites)
    if "no mask" in name:
        assert len(graphs) == 1 and fused(graphs) == sites          # captured as a whole, the layers' own calls inlined


def test_nested_tensors_stay_out_of_the_compiler() -> None:
    """A stack that runs by itself makes them of a padded batch; Dynamo would end the process. This is why a layer chooses."""
    g = numbers()
    model = Model(encoder()).eval()
    eager, graphs = copy.deepcopy(model), []
    optimised(model, graphs)
    pad = torch.tensor([[False] * T, [False] * 4 + [True] * 2])
    x = rn(g, B, T, E)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model.stack(x, src_key_padding_mask=pad), eager.stack(x, src_key_padding_mask=pad))
    assert not graphs


def test_copies_pickles_and_keys() -> None:
    g = numbers()
    model = Model(encoder()).eval()
    eager, graphs = copy.deepcopy(model), []
    optimised(model, graphs)
    assert list(model.state_dict()) == list(eager.state_dict())
    copied = copy.deepcopy(model)
    assert all(COMPILED in vars(layer) for m in (model, copied) for layer in m.stack.layers)
    loaded = pickle.loads(pickle.dumps(model))
    assert not any(vars(layer).get(COMPILED) for layer in loaded.stack.layers)
    before = [vars(layer)[COMPILED] for layer in model.stack.layers]
    attnfuse.explain(model, x := rn(g, B, T, E), mask=causal(T))
    assert before == [vars(layer)[COMPILED] for layer in model.stack.layers]
    with torch.no_grad():
        torch.testing.assert_close(copied(x, mask=causal(T)), eager(x, mask=causal(T)))
    assert fused(graphs)


def test_layers_of_the_user_are_left_to_the_compiler() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, **masks: Any) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    model = Model(nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, **OPTIONS), 2))
    model.stack.layers = nn.ModuleList([Layer(), Layer()])
    optimised(model, [])
    assert not any(COMPILED in vars(layer) and vars(layer)[COMPILED] for layer in model.stack.layers)
