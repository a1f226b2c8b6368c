"""Attention weights that are wanted beside the result: in PyTorch on the CPU against float64, and through whole programs."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnfuse
from attnfuse import ops, tiling, walker, weighing
from attnfuse.reference import weights as dense
from attnfuse.refusal import Reason
from attnfuse.report import Site
from attnfuse.settings import Settings
from tests.specs import BY_NAME, CASES, Case, Shape
from tests.test_passes import rewrite

Outputs = tuple[Tensor, ...]


# ---- the executors

@pytest.fixture(params=["tiny tiles", "tiles as measured"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tiny tiles":
        monkeypatch.setattr(tiling, "CPU_TILE", 1 << 10)
        monkeypatch.setattr(tiling, "CPU_ROWS", 16)
        monkeypatch.setattr(tiling, "MERGE", 1)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated for weights is full of a number that no attention gives."""
    allocate = tiling.allocate_weights
    monkeypatch.setattr(weighing, "allocate_weights", lambda *args: allocate(*args).fill_(12345.0))


def prepared(case: Case, shape: Shape, seed: int) -> tuple[Any, list[Tensor], tuple[int, ...], Tensor | None, Tensor]:
    """(spec, operands, sizes, seed of dropout, statistics) in float64."""
    operands, sizes = case.inputs(shape, torch.float64, seed)
    operands = [t.double() if t.is_floating_point() else t for t in operands]
    spec = replace(case.spec("float64"), operands=tuple(replace(o, dtype="float64") if t.is_floating_point() else o
                                                        for o, t in zip(case.spec("float64").operands, operands, strict=True)))
    drop = torch.tensor([seed + (seed << 32)]) if spec.dropouts else None
    return spec, operands, sizes, drop, walker.forward(spec, operands, sizes, drop)[1]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_mechanism(case: Case, tiles: None, seed: int) -> None:
    """Weights and their gradients, against autograd through the plain meaning."""
    for n, shape in enumerate((Shape(), Shape((1, 2), 70, 41, 20, 16), Shape((2, 1), 1, 7, 4, 0))):
        spec, operands, sizes, drop, stats = prepared(case, shape, seed + n)
        got = weighing.forward(spec, operands, stats, sizes, drop)
        leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in operands]
        want = dense(spec, leaves, sizes, drop, dtype=torch.float64)
        torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-11, equal_nan=True)
        grad = torch.randn_like(want)
        wanted = [t for t in leaves if t.requires_grad]
        exact = iter(torch.autograd.grad(want, wanted, grad, allow_unused=True))
        found = weighing.backward(spec, grad, operands, stats, sizes, drop, [t.is_floating_point() for t in operands])
        for mine, leaf in zip(found, leaves, strict=True):
            if leaf.requires_grad:
                theirs = next(exact)
                theirs = torch.zeros_like(leaf) if theirs is None else theirs
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("name", ["repaired_rows", "repaired_min", "repaired_sinks"])
def test_rows_are_nan_where_the_attention_repairs_them_later(name: str, seed: int) -> None:
    """The statistics only say which rows are repaired; before that they are NaN at every key."""
    spec, operands, sizes, drop, stats = prepared(BY_NAME[name], Shape(), seed)
    before = replace(spec, empty_rows="nan")
    got, want = weighing.forward(before, operands, stats, sizes, drop), dense(before, operands, sizes, drop, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, equal_nan=True)
    assert bool(got.isnan().any()) and not bool(weighing.forward(spec, operands, stats, sizes, drop).isnan().any())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (2, 0, 1, 3)])
def test_the_order_in_memory_is_that_of_the_spec(order: tuple[int, ...], seed: int) -> None:
    spec, operands, sizes, drop, stats = prepared(BY_NAME["causal_inf"], Shape((2, 3), 5, 7, 4, 8), seed)
    got = weighing.forward(replace(spec, out_order=order), operands, stats, sizes, drop)
    assert got.permute(order).is_contiguous()
    torch.testing.assert_close(got, dense(spec, operands, sizes, drop))


@pytest.mark.parametrize("name", ["causal_inf", "causal_padding_min", "dropout", "grouped", "sinks", "gate", "alibi"])
def test_opcheck(name: str, seed: int) -> None:
    spec, operands, sizes, drop, stats = prepared(BY_NAME[name], Shape((2, 2), 6, 6, 4, 4), seed)
    args = ([t.clone().requires_grad_(t.is_floating_point()) for t in operands], stats, list(sizes), drop, spec.to_json())
    torch.library.opcheck(torch.ops.attnfuse.weights.default, args)
    grad = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    needs = [t.is_floating_point() for t in operands]
    torch.library.opcheck(torch.ops.attnfuse.weights_backward.default, (grad, operands, stats, list(sizes), drop, spec.to_json(), needs),
                          test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))


@pytest.mark.parametrize("name", ["plain", "causal_inf", "causal_padding_repaired", "two_fills", "dropout_twice", "causal_padding_zero"])
def test_the_statistics_of_every_executor_serve(name: str, seed: int) -> None:
    operands, sizes = BY_NAME[name].inputs(Shape(), torch.float32, seed)
    spec = BY_NAME[name].spec()
    drop = torch.tensor([seed]) if spec.dropouts else None
    want = dense(spec, operands, sizes, drop, dtype=torch.float64)
    for attend in ("auto", "walker", "reference"):
        for weigh in ("auto", "walker", "reference"):
            with ops.force_executor(attend):
                stats = torch.ops.attnfuse.attention(operands, sizes, drop, spec.to_json())[1]
            with ops.force_executor(weigh):
                got = torch.ops.attnfuse.weights(operands, stats, sizes, drop, spec.to_json())
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_vmap_is_one_call_a_sample(seed: int) -> None:
    spec, operands, sizes, drop, stats = prepared(BY_NAME["causal_inf"], Shape((1, 2), 5, 5, 4, 4), seed)
    call = lambda q: torch.ops.attnfuse.weights([q, *operands[1:]], stats, list(sizes), drop, spec.to_json())
    many = torch.randn(3, *operands[0].shape, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(call)(many), torch.stack([call(q) for q in many]))
    gradient = lambda q: torch.ops.attnfuse.weights_backward(torch.ones(1, 2, 5, 5, dtype=torch.float64), [q, *operands[1:]], stats, list(sizes), drop,
                                                             spec.to_json(), [True, False, False])[0]
    torch.testing.assert_close(torch.vmap(gradient)(many), torch.stack([gradient(q) for q in many]))


def test_second_derivatives_and_tangents_are_errors(seed: int) -> None:
    spec, operands, sizes, drop, stats = prepared(BY_NAME["plain"], Shape((1, 1), 4, 4, 4, 4), seed)
    leaf = operands[0].requires_grad_()
    call = lambda q: torch.ops.attnfuse.weights([q, *operands[1:]], stats, list(sizes), drop, spec.to_json())
    (grad,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(call, (operands[0].detach(),), (operands[0].detach(),))


def test_flops(seed: int) -> None:
    """One product forward; backward the scores twice, and two more for queries and keys."""
    spec, operands, sizes, drop, stats = prepared(BY_NAME["plain"], Shape((2, 3), 5, 7, 4, 8), seed)
    args = ([t.requires_grad_() for t in operands], stats, list(sizes), drop, spec.to_json())
    with FlopCounterMode(display=False) as forward:
        out = torch.ops.attnfuse.weights(*args)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    one = 2 * 2 * 3 * 5 * 7 * 4
    assert (forward.get_total_flops(), backward.get_total_flops()) == (one, 4 * one)
    assert operands[2].grad is None, "the values have no part in their weights"


# ---- whole programs

def causal(q: Tensor, k: Tensor) -> Tensor:
    """Causal weights."""
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~keep, float("-inf")).softmax(-1)


def sites_of(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[Any, list[Site]]:
    """What the rewritten function returns, and its sites."""
    compiled, reports = rewrite(fn, **options)
    out = compiled(*inputs)
    return out, [s for r in reports for s in r.sites]


def three(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype, requires_grad=grad) for _ in range(3)]


def test_gradcheck_through_optimize(seed: int) -> None:
    class Two(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Outputs:
            p = (q @ k.mT * 0.5 + bias).softmax(-1)
            return p @ v, p.mean(1), p.square()

    model = attnfuse.optimize(Two(), inner="eager")
    inputs = (*three(1, 2, 4, 3, grad=True), torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(model, inputs)
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == 1 and len(report.sites[0].weights) == 1


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_dropped_weights_are_those_that_the_values_were_weighed_by(inner: str, seed: int) -> None:
    """Returned before and after dropout; the gradient is that of the mask which can be seen."""
    class Dropping(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
            p = causal(q, k)
            w = F.dropout(p, 0.3, True)
            return w @ v, p, w

    model = attnfuse.optimize(Dropping(), inner=inner)
    inputs = three(2, 3, 20, 8, grad=True)
    out, p, w = model(*inputs)
    again = model(*inputs)[2]
    torch.testing.assert_close(out, w @ inputs[2])
    kept = (w != 0) & (p > 0)
    torch.testing.assert_close(w[kept], (p / 0.7)[kept], rtol=1e-4, atol=0)        # the probability is a multiple of 2⁻¹⁶
    assert 0.2 < float((~kept[p > 0]).double().mean()) < 0.4 and not torch.equal(again == 0, w == 0)
    factor = torch.where(kept, (w / p).detach(), 0.0)
    up = [torch.randn_like(x) for x in (out, p, w)]
    exact = (lambda p: (p * factor @ inputs[2], p, p * factor))(causal(inputs[0], inputs[1]))
    for a, b in zip(torch.autograd.grad((out, p, w), inputs, up), torch.autograd.grad(exact, inputs, up), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_again(reentrant: bool, seed: int) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        w = F.dropout(causal(q, k), 0.4, True)
        return w @ v, w

    compiled = attnfuse.optimize(lambda q, k, v: checkpoint(layer, q, k, v, use_reentrant=reentrant), inner="eager")
    inputs = three(1, 2, 12, 4, grad=True)
    out, w = compiled(*inputs)
    factor = torch.where(w != 0, (w / causal(*inputs[:2])).detach(), 0.0)
    up = [torch.randn_like(out), torch.randn_like(w)]
    p = causal(*inputs[:2]) * factor
    for a, b in zip(torch.autograd.grad((out, w), inputs, up), torch.autograd.grad((p @ inputs[2], p), inputs, up), strict=True):
        torch.testing.assert_close(a, b)


def last_of_three(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    for _ in range(3):
        p = causal(q, k)
        q = p @ v + 1.0
    return q, p.amax(-1)


@pytest.mark.parametrize("fn, products, count", [
    (last_of_three, 3, 1),
    (lambda q, k, v: (causal(q, k) @ v, v), 1, 0),
    (lambda q, k, v: ((p := causal(q, k)) @ v, p @ v.cos()), 2, 0),
    (lambda q, k, v: ((p := causal(q, k)) @ v, p @ v.cos(), p.amax()), 2, 1),
    (lambda q, k, v: ((p := causal(q, k)) @ (p @ v), v), 2, 0),
    (lambda q, k, v: ((p := causal(q, k)) @ (o := p @ v), o, p.sum()), 2, 1),
    (lambda q, k, v: (causal(causal(q, k) @ v, k) @ v, v), 2, 0),
    (lambda q, k, v: (((p := causal(q, k)) - 0.3 * causal(k, q)) @ v, p.amax(-1)), 2, 1),
    (lambda q, k, v: ((((p := causal(q, k)) @ v) @ k.mT + p).softmax(-1) @ v, v), 2, 1),
], ids=["the last of equal layers", "nobody", "another product", "another product and a maximum", "a product of a product", "that and a sum", "the next layer", "a difference",
        "the next layer's bias"])
def test_only_what_is_read_is_computed(fn: Callable[..., Outputs], products: int, count: int, seed: int) -> None:
    """Two products of the same weights are two attentions, of which neither writes its weights; nothing is computed as it was written too."""
    seen: list[Any] = []
    compiled = attnfuse.optimize(fn, inner=lambda gm, inputs: seen.append(gm) or gm.forward)
    inputs = three(1, 2, 9, 4, grad=True)
    got, want = compiled(*inputs), fn(*inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    up = [torch.randn_like(x) for x in want]
    for a, b in zip(*(torch.autograd.grad(x, inputs, up) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
    targets = [n.target for n in seen[0].graph.nodes]
    assert targets.count(torch.ops.attnfuse.attention.default) == products
    assert targets.count(torch.ops.attnfuse.weights.default) == count
    assert not any("softmax" in str(x) or "matmul" in str(x) and count == 0 for x in targets)


def test_two_products_of_the_same_dropped_weights(seed: int) -> None:
    """The second is taken of the weights themselves: an attention of its own would drop others."""
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        w = F.dropout(causal(q, k), 0.5, True)
        return w @ v, w @ (v * 2.0 + 1.0), w

    inputs = three(1, 2, 16, 4)
    (first, second, w), sites = sites_of(fn, *inputs)
    torch.testing.assert_close(first, w @ inputs[2])
    torch.testing.assert_close(second, w @ (inputs[2] * 2.0 + 1.0))
    assert [s.rewritten for s in sites] == [True, False] and sites[1].reason is not None
    assert "same ones dropped" in sites[1].reason.detail


def test_weights_need_no_gradient_where_only_the_values_do(seed: int) -> None:
    q, k, v = three(1, 2, 6, 4)
    v.requires_grad_()
    (out, p), sites = sites_of(lambda q, k, v: ((p := causal(q, k)) @ v, p), q, k, v)
    assert sites[0].rewritten and out.requires_grad and not p.requires_grad
    p.numpy()


def no_gradient_for_the_values(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    p = causal(q, k)
    most = p.amax(-1)
    with torch.no_grad():
        w = v.cos()
    return p @ w, most


def no_gradient_for_the_product(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    p = causal(q, k)
    with torch.no_grad():
        o = p @ v
    return p, o


def read_inside_first(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    p = causal(q, k)
    with torch.no_grad():
        most = p.amax(-1)
    return p @ v, most


@pytest.mark.parametrize("fn, rewritten", [(no_gradient_for_the_values, False), (no_gradient_for_the_product, False), (read_inside_first, True)])
def test_places_under_another_mode(fn: Callable[..., Outputs], rewritten: bool, seed: int) -> None:
    """The ops never stand where gradients are not recorded though the product's are."""
    inputs = three(1, 2, 6, 4, grad=True)
    out, sites = sites_of(fn, *inputs)
    assert sites[0].rewritten is rewritten
    if not rewritten:
        assert sites[0].reason is not None and sites[0].reason.reason is Reason.WEIGHTS_USED
    want = fn(*inputs)
    for a, b in zip(out, want, strict=True):
        torch.testing.assert_close(a, b)
        assert a.requires_grad == b.requires_grad
    both = [[x for x in xs if x.requires_grad] for xs in (out, want)]
    up = [torch.randn_like(x) for x in both[1]]
    for a, b in zip(*(torch.autograd.grad(x, inputs, up, allow_unused=True) for x in both), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_one_compilation_serves_a_range_of_lengths(seed: int) -> None:
    def folded(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        f = lambda x: x.reshape(-1, x.size(-2), x.size(-1))
        p = causal(f(q), f(k))
        return torch.bmm(p, f(v)), p.view(q.size(0), q.size(1), q.size(2), k.size(2)).mean(1)

    compiled, reports = rewrite(folded, dynamic=True)
    for b, n in ((2, 5), (3, 6), (2, 17)):
        x = three(b, 3, n, 4)
        for got, want in zip(compiled(*x), folded(*x), strict=True):
            torch.testing.assert_close(got, want)
    assert len(reports) == 1 and reports[0].sites[0].rewritten and len(reports[0].sites[0].weights) == 1


def test_rows_without_a_key_are_zero_where_that_is_wanted(seed: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        p = (q @ k.mT).masked_fill((torch.arange(5) == 2)[:, None], float("-inf")).softmax(-1)
        return p @ v, p

    (out, p), sites = sites_of(fn, *three(1, 2, 5, 4), settings=Settings(strict=True, fully_masked_rows="zero"))
    assert sites[0].rewritten and not bool(out[..., 2, :].any()) and not bool(p[..., 2, :].any())
    torch.testing.assert_close(p.sum(-1)[..., [0, 1, 3, 4]], torch.ones(1, 2, 4, dtype=torch.float64))

    def repaired(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        p = (q @ k.mT).masked_fill((torch.arange(5) == 2)[:, None], float("-inf")).softmax(-1)
        return torch.nan_to_num(p) @ v, p

    _, sites = sites_of(repaired, *three(1, 2, 5, 4), settings=Settings(strict=True, fully_masked_rows="zero"))
    assert not sites[0].rewritten and sites[0].reason is not None and "under a setting" in sites[0].reason.detail


def test_nothing_of_their_size_is_kept_for_backward(seed: int) -> None:
    """And without gradients nothing at all."""
    seen: list[Tensor] = []
    compiled = attnfuse.optimize(lambda q, k, v: ((p := causal(q, k)) @ v, p.amax(-1)), inner=lambda gm, x: gm.forward)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        compiled(*three(1, 2, 64, 4))
        assert not seen
        out, most = compiled(*three(1, 2, 64, 4, grad=True))
    square = [x for x in seen if x.numel() >= 2 * 64 * 64]
    assert len(square) <= 1 and all(x.data_ptr() == square[0].data_ptr() for x in square)      # the maximum keeps what it read


def test_a_report_says_so_and_counts_them(seed: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        p = causal(q, k)
        return p @ v, p

    inputs = three(2, 4, 32, 8, dtype=torch.float32)
    with_weights, without = attnfuse.explain(fn, *inputs), attnfuse.explain(lambda *x: fn(*x)[0], *inputs)
    assert "rewritten, weights too, equation 1" in str(with_weights) and "w[b0, b1, i, j] = p" in str(with_weights)
    assert "weights too" not in str(without)
    site, plain = with_weights.sites[0], without.sites[0]
    assert site.fused is not None and plain.fused is not None
    rows, matrix = 2 * 4 * 32, 2 * 4 * 32 * 32 * 4
    read = 2 * 2 * 4 * 32 * 8 * 4 + 8 * rows
    assert site.fused.written - plain.fused.written == matrix and site.fused.read - plain.fused.read == read
    assert len(site.to_dict()["weights"]) == 1 and plain.to_dict()["weights"] == []
    optimised = attnfuse.optimize(copy.copy(fn), inner="eager")
    optimised(*inputs)
    with attnfuse.traffic("h100") as counted:
        optimised(*inputs)
    assert [c.moved for c in counted.calls if c.op == "attnfuse::weights"] == [matrix + read]


# ---- models

@pytest.mark.parametrize("kind, options", [
    ("bert", {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}),
    ("llama", {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}),
])
@pytest.mark.parametrize("train", [False, True])
def test_hugging_face_models_with_output_attentions(kind: str, options: dict[str, int], train: bool, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**options, vocab_size=64, max_position_embeddings=32)
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").double().train(train)
    ids, mask = torch.randint(0, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    optimised = attnfuse.optimize(copy.deepcopy(model), inner="eager")
    got, want = (m(ids, attention_mask=mask, output_attentions=True) for m in (optimised, model))
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == len(report.sites) == 2, str(report)
    assert all(len(s.weights) == 1 for s in report.sites)
    assert len(got.attentions) == 2
    rounded = {"rtol": 1e-5, "atol": 1e-5} if kind == "llama" else {}                  # its softmax and its norms are in float32
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state, **rounded)
    for a, b in zip(got.attentions, want.attentions, strict=True):
        torch.testing.assert_close(a, b, **rounded)
        assert a.stride() == b.stride()
    for m, out in ((optimised, got), (model, want)):
        (out.last_hidden_state.square().sum() + sum(w.square().sum() * (n + 1) for n, w in enumerate(out.attentions))).backward()
    limit = 1e-4 if kind == "llama" else 1e-9
    largest = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    for a, b in zip(optimised.parameters(), model.parameters(), strict=True):
        if b.grad is not None:
            assert a.grad is not None and float((a.grad - b.grad).norm()) <= limit * max(float(b.grad.norm()), 1e-2 * largest)
