"""Attention inside one operator: nn.MultiheadAttention, the Transformer layers, and the operators of the inference fast path.

Everything is compared with eager in float64, in evaluation and, with gradients, in training.
"""
from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import attnfuse
from attnfuse.passes import expand, nodes, pipeline
from attnfuse.refusal import Reason
from attnfuse.report import Site
from attnfuse.settings import Settings

B, T, S, E, H = 2, 6, 9, 16, 4
Graphs = list[GraphModule]


def compiled(call: Callable[..., Any], dynamic: bool | None = None) -> tuple[Callable[..., Any], list[Site], Graphs]:
    """`call` with the passes alone, in a frame of its own (Dynamo passes over those of torch.nn); its sites and its graphs."""
    sites: list[Site] = []
    graphs: Graphs = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        out, report = pipeline.run(gm, Settings(strict=True))
        sites.extend(report.sites)
        graphs.append(out)
        return out.forward

    def frame(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    torch._dynamo.reset()
    return torch.compile(frame, backend=backend, dynamic=dynamic), sites, graphs


def numbers() -> torch.Generator:
    """Fresh every run; the seed is printed by pytest where a test fails."""
    seed = random.SystemRandom().randrange(2 ** 31)
    print("seed", seed)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def rn(g: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def opaque(graphs: Graphs) -> int:
    """Calls left in the graphs that hide an attention."""
    return sum(len(expand.opaque(g)) for g in graphs)


def same(model: nn.Module, call: Callable[..., Tensor], inputs: tuple[Tensor, ...], *, sites: int, train: bool) -> None:
    """The rewritten call gives eager's output (and gradients of inputs and parameters), with every site rewritten."""
    model.train(train)
    fused, found, graphs = compiled(call)
    results = []
    for fn in (call, fused):
        leaves = [x.clone().requires_grad_(train) for x in inputs]
        model.zero_grad()
        with torch.set_grad_enabled(train):
            out = fn(*leaves)
        if train:
            (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves), *(None if p.grad is None else p.grad.clone() for p in model.parameters())])
    assert [s.rewritten for s in found] == [True] * sites, [str(s.reason) for s in found]
    assert opaque(graphs) == 0
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, atol=1e-9, rtol=1e-9)


# ---- nn.MultiheadAttention

def padding(g: torch.Generator, keys: int) -> Tensor:
    """True where a key is padding; every row keeps its first key."""
    out = torch.rand(B, keys, generator=g) < 0.4
    out[:, 0] = False
    return out


def blocked(g: torch.Generator, *shape: int) -> Tensor:
    """True where a pair is masked; every query keeps the first key."""
    out = torch.rand(*shape, generator=g) < 0.4
    out[..., 0] = False
    return out


def causal(n: int) -> Tensor:
    """True above the diagonal."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


Masks = Callable[[torch.Generator], dict[str, Any]]
# name: options of the module, masks of the call, and what else: "cross" (other keys and values), "single" (no batch)
VARIANTS: dict[str, tuple[dict[str, Any], Masks, str]] = {
    "plain": ({}, lambda g: {}, ""),
    "padding": ({}, lambda g: {"key_padding_mask": padding(g, T)}, ""),
    "padding_float": ({}, lambda g: {"key_padding_mask": rn(g, B, T)}, ""),
    "mask": ({}, lambda g: {"attn_mask": blocked(g, T, T)}, ""),
    "mask_float": ({}, lambda g: {"attn_mask": rn(g, T, T)}, ""),
    "mask_heads": ({}, lambda g: {"attn_mask": blocked(g, B * H, T, T)}, ""),
    "mask_heads_float": ({}, lambda g: {"attn_mask": rn(g, B * H, T, T)}, ""),
    "mask_and_padding": ({}, lambda g: {"attn_mask": blocked(g, T, T), "key_padding_mask": padding(g, T)}, ""),
    "mask_heads_and_padding": ({}, lambda g: {"attn_mask": blocked(g, B * H, T, T), "key_padding_mask": padding(g, T)}, ""),
    "mask_and_padding_float": ({}, lambda g: {"attn_mask": rn(g, T, T), "key_padding_mask": rn(g, B, T)}, ""),
    "causal": ({}, lambda g: {"attn_mask": causal(T), "is_causal": True}, ""),
    "causal_and_padding": ({}, lambda g: {"attn_mask": causal(T), "is_causal": True, "key_padding_mask": padding(g, T)}, ""),
    "weights_by_head": ({}, lambda g: {"average_attn_weights": False}, ""),
    "zero_attention": ({"add_zero_attn": True}, lambda g: {"attn_mask": blocked(g, T, T), "key_padding_mask": padding(g, T)}, ""),
    "bias_of_keys": ({"add_bias_kv": True}, lambda g: {"attn_mask": rn(g, T, T), "key_padding_mask": rn(g, B, T)}, ""),
    "bias_and_zero": ({"add_bias_kv": True, "add_zero_attn": True}, lambda g: {}, ""),
    "no_bias": ({"bias": False}, lambda g: {"key_padding_mask": padding(g, T)}, ""),
    "odd_heads": ({"num_heads": 1}, lambda g: {}, ""),
    "sequence_first": ({"batch_first": False}, lambda g: {"key_padding_mask": padding(g, T)}, ""),
    "cross": ({}, lambda g: {"key_padding_mask": padding(g, S)}, "cross"),
    "cross_mask": ({"batch_first": False}, lambda g: {"attn_mask": blocked(g, T, S)}, "cross"),
    "other_widths": ({"kdim": 12, "vdim": 20}, lambda g: {"attn_mask": rn(g, T, S)}, "cross"),
    "other_widths_no_bias": ({"kdim": 12, "vdim": 20, "bias": False}, lambda g: {}, "cross"),
    "single": ({}, lambda g: {"attn_mask": blocked(g, T, T)}, "single"),
    "single_padding": ({"batch_first": False}, lambda g: {"key_padding_mask": padding(g, T)[0]}, "single"),
}


def attention(g: torch.Generator, name: str) -> tuple[nn.MultiheadAttention, tuple[Tensor, ...], dict[str, Any]]:
    """A variant's module in float64, its queries, keys and values (one tensor for self-attention), and its masks."""
    options, masks, kind = VARIANTS[name]
    model = nn.MultiheadAttention(**{"embed_dim": E, "num_heads": H, "batch_first": True, "dtype": torch.float64, **options})
    for p in model.parameters():
        p.data = rn(g, *p.shape) * 0.5
    shape = (lambda n, width: (n, width)) if kind == "single" else (lambda n, width: (B, n, width)) if model.batch_first else (lambda n, width: (n, B, width))
    x = rn(g, *shape(T, E))
    return model, (x, rn(g, *shape(S, model.kdim)), rn(g, *shape(S, model.vdim))) if kind == "cross" else (x,), masks(g)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["", "dead_weights"])
@pytest.mark.parametrize("name", VARIANTS)
def test_multihead_attention(name: str, need_weights: bool, train: bool) -> None:
    model, inputs, masks = attention(numbers(), name)

    def call(*x: Tensor) -> Tensor:
        return model(*(x if len(x) == 3 else (x[0], x[0], x[0])), need_weights=need_weights, **masks)[0]
    same(model, call, inputs, sites=1, train=train)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_dropout_is_rewritten(need_weights: bool, dynamic: bool | None) -> None:
    model = nn.MultiheadAttention(E, H, dropout=0.25, batch_first=True).train()
    fused, sites, _ = compiled(lambda x: model(x, x, x, need_weights=need_weights)[0], dynamic)
    out = fused(torch.randn(B, T, E))
    assert [len(s.spec.dropouts) for s in sites if s.spec] == [1]
    assert out.requires_grad and bool(out.isfinite().all())


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_multihead_attention_with_its_weights(name: str, average: bool, train: bool) -> None:
    model, inputs, masks = attention(numbers(), name)

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        return model(*(x if len(x) == 3 else (x[0], x[0], x[0])), **{"average_attn_weights": average, **masks})

    model.train(train)
    fused, sites, graphs = compiled(call)
    got, want = fused(*inputs), call(*inputs)
    assert [(s.rewritten, len(s.weights)) for s in sites] == [(True, 1)] and opaque(graphs) == 0
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, atol=1e-9, rtol=1e-9)
        assert a.stride() == b.stride()
    finite = lambda x: x.nan_to_num().square().sum()
    gradients = [torch.autograd.grad(finite(out) + finite(weights * 3.0), list(model.parameters()), allow_unused=True) for out, weights in (got, want)]
    if not any(bool(x.isnan().any()) for x in want):
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_dropped_weights_of_multihead_attention_are_those_that_it_used() -> None:
    model = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True, bias=False, dtype=torch.float64).train()
    with torch.no_grad():
        model.out_proj.weight.copy_(torch.eye(E))
    fused, sites, graphs = compiled(lambda x: model(x, x, x, average_attn_weights=False))
    x = torch.randn(B, T, E, dtype=torch.float64)
    out, weights = fused(x)
    values = F.linear(x, model.in_proj_weight[2 * E:]).unflatten(-1, (H, -1)).transpose(1, 2)
    torch.testing.assert_close((weights @ values).transpose(1, 2).flatten(2), out)
    assert [s.rewritten for s in sites] == [True] and 0.2 < float((weights == 0).double().mean()) < 0.8


def test_weights_of_which_nothing_comes_are_not_read() -> None:
    model = nn.MultiheadAttention(E, H, batch_first=True).train()

    def call(x: Tensor) -> Tensor:
        out, weights = model(x, x, x)
        weights[:, None].expand(-1, H, -1, -1)
        return out

    fused, sites, graphs = compiled(call)
    x = torch.randn(B, T, E)
    torch.testing.assert_close(fused(x), call(x), atol=1e-5, rtol=1e-5)
    assert [s.rewritten for s in sites] == [True] and opaque(graphs) == 0
    assert not [n for n in graphs[0].graph.nodes if nodes.name(n) in ("expand", "multi_head_attention_forward")]


def test_a_call_that_is_not_rewritten_is_put_back_whole() -> None:
    """One of two calls is refused by a later pass, and is then in the graph as it was, with nothing left of its parts."""
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(E, H, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x, x, x, need_weights=False)[0]
            return self.b(x, x, x, attn_mask=causal(T), need_weights=False)[0]

    model, x = Two().train(), torch.randn(B, T, E)
    understand = pipeline.understand

    def refuse_causal(region: Any, settings: Settings) -> Any:
        found = understand(region, settings)
        if "i" not in str(found.spec.score):
            return found
        raise pipeline.Refused(Reason.UNKNOWN_OP, region.product.name, "lift")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "understand", lambda region, settings: refuse_causal(region, settings) if any(
            nodes.name(n) == "masked_fill_" for n in region.body) else understand(region, settings))
        fused, sites, graphs = compiled(model)
        torch.testing.assert_close(fused(x), model(x))
    assert [s.rewritten for s in sites] == [True, False]
    called = [nodes.name(n) for n in graphs[0].graph.nodes]
    assert called.count("linear") == 2 and called.count("multi_head_attention_forward") == 1
    assert "scaled_dot_product_attention" not in called and "attention" in called


def test_rows_without_a_key_are_what_the_captured_call_makes_of_them() -> None:
    """Zero in the fused form, NaN where weights are asked for. (Eager's fast path, which Dynamo does not capture, gives NaN.)"""
    g = numbers()
    model, x = attention(g, "plain")[0].eval(), rn(g, B, T, E)
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1] = True
    for need_weights in (False, True):
        call = lambda x, need_weights=need_weights: model(x, x, x, key_padding_mask=mask, need_weights=need_weights)[0]
        torch._dynamo.reset()
        with torch.no_grad():
            want = torch.compile(call, backend="eager")(x)
            fused, sites, _ = compiled(call)
            torch.testing.assert_close(fused(x), want, equal_nan=True, atol=1e-9, rtol=1e-9)
        assert bool(want[1].isnan().all()) is need_weights and sites[0].rewritten


# ---- layers

LAYERS: dict[str, tuple[dict[str, Any], Masks]] = {
    "plain": ({}, lambda g: {}),
    "gelu": ({"activation": "gelu"}, lambda g: {"src_key_padding_mask": padding(g, T)}),
    "norm_first": ({"norm_first": True}, lambda g: {"src_key_padding_mask": padding(g, T)}),
    "norm_first_gelu": ({"norm_first": True, "activation": "gelu"}, lambda g: {"src_mask": blocked(g, T, T)}),
    "mask_heads": ({}, lambda g: {"src_mask": blocked(g, B * H, T, T)}),
    "mask_and_padding": ({}, lambda g: {"src_mask": blocked(g, T, T), "src_key_padding_mask": padding(g, T)}),
    "mask_float": ({}, lambda g: {"src_mask": torch.zeros(T, T, dtype=torch.float64).masked_fill(causal(T), -torch.inf)}),
    "causal": ({}, lambda g: {"src_mask": causal(T), "is_causal": True}),
    "silu": ({"activation": F.silu}, lambda g: {}),
    "no_bias": ({"bias": False}, lambda g: {}),
    "sequence_first": ({"batch_first": False}, lambda g: {"src_key_padding_mask": padding(g, T)}),
}


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", LAYERS)
def test_encoder_layer(name: str, train: bool) -> None:
    g = numbers()
    options, masks = LAYERS[name]
    model = nn.TransformerEncoderLayer(**{"d_model": E, "nhead": H, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True,
                                          "dtype": torch.float64, **options})
    given = masks(g)
    x = rn(g, B, T, E) if options.get("batch_first", True) else rn(g, T, B, E)
    same(model, lambda x: model(x, **given), (x,), sites=1, train=train)


def test_a_float_mask_in_the_fast_path_blocks_where_it_is_not_zero() -> None:
    """What the operator does, whatever the documentation says: it casts the mask to bool."""
    g = numbers()
    model = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True, dtype=torch.float64).eval()
    mask, x = rn(g, T, T).masked_fill(~blocked(g, T, T), 0.0), rn(g, B, T, E)
    same(model, lambda x: model(x, src_mask=mask), (x,), sites=1, train=False)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_and_decoder(norm_first: bool, train: bool) -> None:
    g = numbers()
    options: dict[str, Any] = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, **options), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, **options), 2)
    pad = padding(g, S)

    def call(source: Tensor, target: Tensor) -> Tensor:
        memory = encoder(source, src_key_padding_mask=pad)
        return decoder(target, memory, tgt_mask=causal(T), tgt_is_causal=True, memory_key_padding_mask=pad)
    same(nn.ModuleList([encoder, decoder]), call, (rn(g, B, S, E), rn(g, B, T, E)), sites=6, train=train)


def test_an_encoder_that_would_use_nested_tensors() -> None:
    """Compiled, it does not: then its layers are rewritten like all others."""
    g = numbers()
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True, dtype=torch.float64), 2).eval()
    pad = torch.zeros(B, T, dtype=torch.bool)
    pad[1, 4:] = True
    fused, sites, graphs = compiled(lambda x: model(x, src_key_padding_mask=pad))
    with torch.no_grad():
        x = rn(g, B, T, E)
        got, want = fused(x), model(x, src_key_padding_mask=pad)
    assert [s.rewritten for s in sites] == [True, True] and opaque(graphs) == 0
    torch.testing.assert_close(got[~pad], want[~pad])          # eager gives zeros where there is padding


def test_the_report_tells_where_the_calls_are() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True), 2, enable_nested_tensor=False)
            self.pool = nn.MultiheadAttention(E, H, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.encoder(x)
            return self.pool(x, x, x)

    report = attnfuse.explain(Model().train(), torch.randn(B, T, E))
    assert [s.module for s in report.sites] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "pool"]
    line = Model.forward.__code__.co_firstlineno
    assert [s.source.split("test_torch_nn.py:")[1] for s in report.sites] == [str(line + 1), str(line + 1), str(line + 2)]


# ---- what surrounds a call

def test_one_compilation_serves_a_range_of_lengths() -> None:
    model = nn.MultiheadAttention(E, H, batch_first=True).train()
    fused, sites, graphs = compiled(lambda x, m: model(x, x, x, key_padding_mask=m, need_weights=False)[0], dynamic=True)
    warnings.filterwarnings("error", message="Raw SymFloat")          # the probability of dropout, which Dynamo keeps open at first
    for batch, n in ((2, 5), (3, 6), (4, 17)):
        x, m = torch.randn(batch, n, E), torch.arange(n).expand(batch, n) >= n - 2
        torch.testing.assert_close(fused(x, m), model(x, x, x, key_padding_mask=m, need_weights=False)[0], atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1 and [s.rewritten for s in sites] == [True]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "behind"])
def test_autocast_entered_in_the_graph(inside: bool) -> None:
    model = nn.MultiheadAttention(E, H, batch_first=True).train()

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x, x, x, need_weights=False)[0] if inside else x @ x.mT
        return y if inside else model(x, x, x, need_weights=False)[0] + y.float().mean()

    fused, sites, _ = compiled(call)
    x = torch.randn(B, T, E)
    got, want = fused(x), call(x)
    assert [s.rewritten for s in sites] == [True], sites[0].reason
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_memory_of_the_output_is_known() -> None:
    """A change of the output between the two products of a later attention is seen, through a view of it too."""
    model = nn.MultiheadAttention(E, H).eval()

    def call(x: Tensor) -> Tensor:
        y = model(x, x, x, need_weights=False)[0]
        scores = torch.einsum("qbe,kbe->bqk", x, y)
        y.view(-1).add_(1.0)
        return torch.einsum("bqk,kbe->qbe", scores.softmax(-1), x)

    fused, sites, _ = compiled(call)
    x = torch.randn(T, B, E)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), call(x), atol=1e-5, rtol=1e-5)
    assert [s.rewritten for s in sites] == [True, False]


def test_under_vmap_the_call_stays() -> None:
    model = nn.MultiheadAttention(E, H, batch_first=True).train()
    call = torch.func.vmap(lambda x: model(x, x, x, need_weights=False)[0])
    fused, sites, graphs = compiled(call)
    x = torch.randn(3, B, T, E)
    torch.testing.assert_close(fused(x), call(x))
    assert not any(s.rewritten for s in sites)


def test_an_exported_module() -> None:
    """Export takes the call apart by itself and keeps what is made of the weights, as dead code that hides nothing."""
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.MultiheadAttention(E, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x, x, x)[0]

    x = torch.randn(B, T, E)
    exported = torch.export.export(Model().eval(), (x,)).module()
    fused, report = attnfuse.rewrite(exported, (x,), {"strict": True})
    assert [s.rewritten for s in report.sites] == [True], report
    assert not [n for n in fused.graph.nodes if nodes.name(n) in ("softmax", "mean")]
    torch.testing.assert_close(fused(x), exported(x), atol=1e-5, rtol=1e-5)


# ---- the operators themselves

def operator_inputs(g: torch.Generator) -> tuple[Tensor, ...]:
    """x, and the weights and biases of the projections."""
    return rn(g, B, T, E), rn(g, 3 * E, E), rn(g, 3 * E), rn(g, E, E), rn(g, E)


def native(x: Any, w: Any, b: Any, pw: Any, pb: Any, mask: Any = None, code: int | None = None, weights: bool = False, key: Any = None) -> Any:
    """The operator of nn.MultiheadAttention's fast path."""
    key = x if key is None else key
    return torch._native_multi_head_attention(x, key, key, E, H, w, b, pw, pb, mask, weights, True, code)


def rewritten(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[GraphModule, GraphModule, Site]:
    """A symbolically traced function, what the passes make of it, and its one site."""
    gm = symbolic_trace(fn)
    out, report = attnfuse.rewrite(gm, inputs, {"strict": True})
    assert len(report.sites) == 1
    return gm, out, report.sites[0]


MASKS: dict[str, tuple[int | None, Callable[[torch.Generator], Tensor]]] = {
    "none": (None, lambda g: None),  # type: ignore[dict-item,return-value]
    "pairs": (0, lambda g: torch.rand(T, T, generator=g) < 0.5),
    "padding": (1, lambda g: torch.tensor([[False] * T, [True] * T])),
    "all": (2, lambda g: torch.rand(B, H, T, T, generator=g) < 0.7),
    "all_whatever_the_code": (None, lambda g: torch.rand(B, H, T, T, generator=g) < 0.7),
    "float": (2, lambda g: rn(g, B, H, T, T).masked_fill(torch.rand(B, H, T, T, generator=g) < 0.5, 0.0)),
    "integer": (0, lambda g: (torch.rand(T, T, generator=g) < 0.5).long() * 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_native_operator(name: str) -> None:
    """Masked rows are NaN in both."""
    g = numbers()
    code, make = MASKS[name]
    mask = make(g)
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0, :] = True
    inputs = operator_inputs(g) if mask is None else (*operator_inputs(g), mask)
    fn = (lambda x, w, b, pw, pb: native(x, w, b, pw, pb)[0]) if mask is None else (lambda x, w, b, pw, pb, m: native(x, w, b, pw, pb, m, code)[0])
    gm, out, site = rewritten(fn, inputs)
    assert site.rewritten, site.reason
    torch.testing.assert_close(out(*inputs), gm(*inputs), equal_nan=True, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["none", "padding"])
def test_the_native_operator_with_its_weights(name: str) -> None:
    g = numbers()
    code, make = MASKS[name]
    mask = make(g)
    inputs = operator_inputs(g) if mask is None else (*operator_inputs(g), mask)
    both = lambda *x: ((y := native(*x[:5], x[5] if len(x) > 5 else None, code, weights=True))[0], y[1])
    gm, out, site = rewritten((lambda x, w, b, pw, pb: both(x, w, b, pw, pb)) if mask is None else (lambda x, w, b, pw, pb, m: both(x, w, b, pw, pb, m)),
                              inputs)
    assert site.rewritten and len(site.weights) == 1, site.reason
    for a, b in zip(out(*inputs), gm(*inputs), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, atol=1e-9, rtol=1e-9)


def test_the_native_operator_with_other_keys() -> None:
    g = numbers()
    inputs = (*operator_inputs(g), rn(g, B, T, E))
    gm, out, site = rewritten(lambda x, w, b, pw, pb, y: native(x, w, b, pw, pb, key=y)[0], inputs)
    assert site.rewritten, site.reason
    torch.testing.assert_close(out(*inputs), gm(*inputs), atol=1e-9, rtol=1e-9)


REFUSED: dict[str, tuple[Reason, str, Callable[..., Any], Callable[[torch.Generator], tuple[Tensor, ...]]]] = {
    "two_dimensions_without_a_code": (Reason.UNKNOWN_OP, "type None", lambda *x: native(*x)[0], lambda g: (torch.zeros(T, T, dtype=torch.bool),)),
    "an_unknown_code": (Reason.UNKNOWN_OP, "type 3", lambda *x: native(*x, 3)[0], lambda g: (torch.zeros(T, T, dtype=torch.bool),)),
    "padding_called_pairs": (Reason.UNKNOWN_OP, "type 0", lambda *x: native(*x, 0)[0], lambda g: (torch.zeros(B, T, dtype=torch.bool),)),
    "a_shape_to_broadcast": (Reason.UNKNOWN_OP, "type 2", lambda *x: native(*x, 2)[0], lambda g: (torch.zeros(1, 1, T, T, dtype=torch.bool),)),
    "three_dimensions": (Reason.UNKNOWN_OP, "type 2", lambda *x: native(*x, 2)[0], lambda g: (torch.zeros(B, T, T, dtype=torch.bool),)),
    "keys_of_another_length": (Reason.UNKNOWN_OP, "different shapes", lambda *x: native(*x[:5], key=x[5])[0], lambda g: (rn(g, B, S, E),)),
    "weights_alone": (Reason.NO_VALUE_PRODUCT, "not used", lambda *x: native(*x[:5], weights=True)[1], lambda g: ()),
    "weights_that_are_not_given": (Reason.WEIGHTS_USED, "gives none", lambda *x: ((y := native(*x[:5]))[0], y[1]), lambda g: ()),
    "all_of_it_returned": (Reason.WEIGHTS_USED, "by output", lambda *x: native(*x[:5], weights=True), lambda g: ()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_native_operator_refused(name: str) -> None:
    reason, detail, fn, more = REFUSED[name]
    g = numbers()
    inputs = (*operator_inputs(g), *more(g))
    wrapped = {5: lambda a, b, c, d, e: fn(a, b, c, d, e), 6: lambda a, b, c, d, e, f: fn(a, b, c, d, e, f)}[len(inputs)]
    gm, out, site = rewritten(wrapped, inputs)
    assert site.reason is not None and (site.reason.reason, site.reason.stage) == (reason, "expand") and detail in site.reason.detail, site.reason
    assert [str(n.target) for n in out.graph.nodes] == [str(n.target) for n in gm.graph.nodes]


def test_an_output_that_nobody_uses_is_no_attention() -> None:
    gm = symbolic_trace(lambda x, w, b, pw, pb: (native(x, w, b, pw, pb, weights=True)[1], x)[1])
    _, report = attnfuse.rewrite(gm, operator_inputs(numbers()), {"strict": True})
    assert [s.reason.reason for s in report.sites if s.reason] == [Reason.NO_VALUE_PRODUCT]


def test_nested_tensors_are_refused() -> None:
    gm = symbolic_trace(lambda x, w, b, pw, pb: native(x, w, b, pw, pb)[0])
    inputs = operator_inputs(numbers())
    for node, x in zip([n for n in gm.graph.nodes if n.op == "placeholder"], inputs, strict=True):
        node.meta["example_value"] = torch.nested.nested_tensor([x[0], x[1, :3]]) if node.name == "x" else x
    _, report = pipeline.run(gm, Settings(strict=True))
    assert [(s.reason.reason, s.reason.detail) for s in report.sites if s.reason] == [(Reason.NOT_EXPRESSIBLE, "a nested tensor")]


def test_a_definition_that_fixes_a_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return query * int(query.shape[0]), None

    monkeypatch.setitem(expand.DEFINITIONS, "multi_head_attention_forward", fixed)
    model = nn.MultiheadAttention(E, H).train()
    fused, sites, graphs = compiled(lambda x: model(x, x, x, need_weights=False)[0], dynamic=True)
    fused(torch.randn(T, B, E))
    assert [s.reason.reason for s in sites if s.reason] == [Reason.DYNAMIC] and opaque(graphs) == 1


def test_a_number_that_is_not_in_the_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(expand.DEFINITIONS, "multi_head_attention_forward",
                        lambda query, *args, **kwargs: (query * (torch.sym_float(query.shape[0]) / 7), None))
    model = nn.MultiheadAttention(E, H).train()
    fused, sites, graphs = compiled(lambda x: model(x, x, x, need_weights=False)[0], dynamic=True)
    fused(torch.randn(T, B, E))
    assert [s.reason.reason for s in sites if s.reason] == [Reason.DYNAMIC] and opaque(graphs) == 1


def test_a_definition_that_gives_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = expand.DEFINITIONS["multi_head_attention_forward"]
    monkeypatch.setitem(expand.DEFINITIONS, "multi_head_attention_forward",
                        lambda *args, **kwargs: (real(*args, **kwargs)[0].transpose(0, 1).contiguous().transpose(0, 1), None))
    model = nn.MultiheadAttention(E, H).train()
    fused, sites, graphs = compiled(lambda x: model(x, x, x, need_weights=False)[0])
    fused(torch.randn(T, B, E))
    assert [s.reason.reason for s in sites if s.reason] == [Reason.METADATA] and opaque(graphs) == 1
    assert len(graphs[0].graph.nodes) == len([n for n in graphs[0].graph.nodes if n.op != "call_function"]) + 2       # the call and its output


def test_a_version_whose_source_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(expand.DEFINITIONS, "multi_head_attention_forward", F.multi_head_attention_forward)
    model = nn.MultiheadAttention(E, H).train()
    fused, sites, graphs = compiled(lambda x: model(x, x, x, need_weights=False)[0])
    fused(torch.randn(T, B, E))
    assert [s.reason.reason for s in sites if s.reason] == [Reason.UNKNOWN_OP] and opaque(graphs) == 1
