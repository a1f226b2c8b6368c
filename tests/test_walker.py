"""The walker against the dense reference in float64: results and gradients, in tiles so small that every loop runs."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuse import tiling, walker
from attnfuse.adjoint import UPSTREAM, adjoint
from attnfuse.elements import Elements, contract, disjoint, product
from attnfuse.program import DOT, OPS, WEIGHT, Env, Expr, add, apply, axis, const, evaluate, le, load, mul, where
from attnfuse.reference import reference
from attnfuse.spec import Access, AttentionSpec, Operand
from tests.build import B0, B1, CAUSAL, D, FLOAT32_MIN, I, INF, J, S, added, attention, causal, data, padding, random_seed, window

SIZES = [2, 4, 37, 37, 8, 5]
MASK = (("mask", "bool", 2),)
SEED = torch.tensor([0x1234_5678_9ABC_DEF0])
Extra = Callable[[], list[torch.Tensor]]


def left_padding() -> list[torch.Tensor]:
    """Random padding whose first sample hides its first keys, so that under a causal mask its first rows see none."""
    mask = torch.rand(2, 37) > 0.3
    mask[0, :12] = False
    return [mask]


def floats(*shape: int) -> Extra:
    return lambda: [torch.randn(shape, dtype=torch.float64)]


def biased(index: Sequence[Expr]) -> Expr:
    return causal(add(S, load(3, tuple(index), "float")))


def dropping(p: float) -> Expr:
    return mul(WEIGHT, Expr("keep", attr=(0, p)))


ODD_ROWS = lambda: [torch.tensor([0.3, INF, -0.7, math.nan, 0.1, -INF, 1.2], dtype=torch.float64).repeat(2, 6)[:, :37]]
GATE = where(le(apply("add", I, const(2)), J), const(0.5), const(1.0))
BIAS = lambda rank: (("bias", "float64", rank),)
BUCKET = load(3, (load(4, (I, J), "int"), B1), "float")
TABLE = (("table", "float64", 2), ("bucket", "int64", 2))
RELATIVE = add(apply("sub", I, J), const(40))
SLOPE = apply("float", apply("sub", J, I))
ROWS = load(4, (B0, I), "bool")

CASES: dict[str, tuple[AttentionSpec, Extra]] = {
    "plain": (attention(), list),
    "constant scores": (attention(const(0.0)), list),
    "causal -inf": (attention(causal(S)), list),
    "causal finfo.min": (attention(causal(S, FLOAT32_MIN)), list),
    "causal added": (attention(added(S, CAUSAL)), list),
    "causal and left padding, two additions": (attention(added(added(S, CAUSAL), padding()), MASK), left_padding),
    "causal and left padding, one fill": (attention(where(apply("and", CAUSAL, padding()), S, const(FLOAT32_MIN)), MASK), left_padding),
    "causal and left padding, -1e9": (attention(where(apply("and", CAUSAL, padding()), S, const(-1e9)), MASK), left_padding),
    "a smaller fill behind a larger": (attention(added(causal(S, -1e9), padding()), MASK), left_padding),
    "empty rows nan": (attention(where(apply("and", CAUSAL, padding()), S, const(-INF)), MASK), left_padding),
    "empty rows zero": (attention(where(apply("and", CAUSAL, padding()), S, const(-INF)), MASK, empty_rows="zero"), left_padding),
    "repaired": (attention(where(apply("and", CAUSAL, padding()), S, const(-INF)), MASK, empty_rows="repaired"), left_padding),
    "repaired by an added mask": (attention(added(causal(S, -INF), padding(), -INF), MASK, empty_rows="repaired"), left_padding),
    "repaired rows of NaN and infinity": (attention(causal(add(S, load(3, (B0, I), "float")), FLOAT32_MIN), (("rows", "float64", 2),),
                                                    empty_rows="repaired"), ODD_ROWS),
    "repaired, gated and dropped": (attention(causal(add(S, load(3, (B0, I), "float"))), (("rows", "float64", 2),), weight=mul(dropping(0.3), GATE),
                                              empty_rows="repaired"), ODD_ROWS),
    "repaired with sinks": (attention(where(padding(4), S, const(-INF)), (("rows", "float64", 2), *MASK), extra_terms=(load(3, (B0, I), "float"),),
                                      empty_rows="repaired"), lambda: [*ODD_ROWS(), *left_padding()]),
    "window": (attention(where(window(9), S, const(-INF))), list),
    "window of a head": (attention(where(le(apply("sub", I, J), add(B1, const(1))), S, const(-1e9))), list),
    "chunks": (attention(where(apply("and", CAUSAL, apply("eq", apply("floordiv", I, const(8)), apply("floordiv", J, const(8)))), S,
                               const(-INF))), list),
    "future only": (attention(where(CAUSAL, const(-INF), S), empty_rows="zero"), list),
    "no key at all": (attention(where(le(J, const(-1)), S, const(-INF))), list),
    "no key at all, finite": (attention(where(le(J, const(-1)), S, const(-1e9))), list),
    "live keys last": (attention(where(le(const(30), J), S, const(-INF))), list),
    "masked by a tensor, live keys last": (attention(where(padding(), S, const(-INF)), MASK), lambda: [torch.arange(37).expand(2, 37) > 30]),
    "alibi": (attention(causal(add(S, mul(load(3, (B1,), "float"), SLOPE))), BIAS(1)), floats(4)),
    "softcap": (attention(causal(mul(const(3.0), apply("tanh", mul(const(1 / 3), S))))), list),
    "bias [1, H, T, T]": (attention(biased((const(0), B1, I, J)), BIAS(4)), floats(1, 4, 37, 37)),
    "bias [H, 1, T]": (attention(biased((B1, const(0), J)), BIAS(3)), floats(4, 1, 37)),
    "bias [B, H, T, 1]": (attention(biased((B0, B1, I, const(0))), BIAS(4)), floats(2, 4, 37, 1)),
    "bias [B, H, T, T]": (attention(biased((B0, B1, I, J)), BIAS(4)), floats(2, 4, 37, 37)),
    "bias transposed": (attention(biased((J, I, B1)), BIAS(3)), floats(37, 37, 4)),
    "scores that are read": (attention(load(3, (B0, B1, I, J), "float"), BIAS(4)), floats(2, 4, 37, 37)),
    "scalar bias": (attention(biased(()), BIAS(0)), floats()),
    "scale by a tensor": (attention(causal(mul(load(3, (), "float"), DOT)), BIAS(0)), floats()),
    "relative positions": (attention(add(S, load(3, (RELATIVE, B1), "float")), BIAS(2)), floats(80, 4)),
    "gathered table": (attention(add(S, BUCKET), TABLE), lambda: [torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 8, (37, 37))]),
    "bias read twice": (attention(add(add(S, load(3, (B1, I), "float")), load(3, (B1, J), "float")), BIAS(2)), floats(4, 37)),
    "sinks": (attention(causal(S), BIAS(1), extra_terms=(load(3, (B1,), "float"),)), floats(4)),
    "two sinks": (attention(added(S, padding(4)), (*BIAS(1), *MASK), extra_terms=(load(3, (B1,), "float"), const(0.0))),
                  lambda: [torch.randn(4, dtype=torch.float64), *left_padding()]),
    "sinks where no key is seen": (attention(where(padding(4), S, const(-INF)), (*BIAS(1), *MASK), extra_terms=(load(3, (B1,), "float"),)),
                                   lambda: [torch.randn(4, dtype=torch.float64), torch.tensor([[False], [True]]).expand(2, 37)]),
    "gate": (attention(S, BIAS(3), weight=mul(WEIGHT, apply("sigmoid", load(3, (B0, B1, I), "float")))), floats(2, 4, 37)),
    "weights masked after": (attention(S, MASK, weight=where(padding(), WEIGHT, const(0.0))), left_padding),
    "empty rows repaired": (attention(where(apply("and", CAUSAL, padding()), S, const(-INF)), (*MASK, ("rows", "bool", 2)),
                                      weight=where(ROWS, WEIGHT, const(0.0))), lambda: [*(m := left_padding()), m[0].cumsum(1) > 0]),
    "dropout": (attention(causal(S), weight=dropping(0.3)), list),
    "all dropped": (attention(causal(S), weight=dropping(1.0)), list),
    "result laid out (b, i, h, e)": (attention(causal(S), out_order=(0, 2, 1, 3)), list),
}


@pytest.fixture(params=["tiny tiles", "tiles as measured"], autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tiny tiles":
        monkeypatch.setattr(tiling, "CPU_TILE", 1 << 10)
        monkeypatch.setattr(tiling, "CPU_ROWS", 16)
        monkeypatch.setattr(tiling, "MERGE", 1)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what is allocated without a value with NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, equal_nan=True)


def compare(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], grad: torch.Tensor | None = None) -> None:
    """Result, statistics and gradients against the reference and autograd through it."""
    seed = SEED if spec.dropouts else None
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in operands]
    want = reference(spec, leaves, sizes, seed, dtype=torch.float64)
    out, stats = walker.forward(spec, operands, sizes, seed)
    close(out, want.detach())
    assert out.stride() == tiling.allocate_out(spec, sizes, operands[0]).stride()
    assert stats.shape == (*out.shape[:-1], 2)
    grad = torch.randn_like(want) if grad is None else grad
    wanted = [t for t in leaves if t.requires_grad]
    expected = iter(torch.autograd.grad(want, wanted, grad, allow_unused=True) if want.requires_grad else [None] * len(wanted))
    got = walker.backward(spec, grad, operands, out, stats, sizes, seed, [t.is_floating_point() for t in operands])
    for leaf, found in zip(leaves, got, strict=True):
        if leaf.requires_grad:
            assert found is not None and found.shape == leaf.shape and found.dtype == leaf.dtype
            right = next(expected)
            close(found, torch.zeros_like(leaf) if right is None else right)
        else:
            assert found is None


@pytest.mark.parametrize("name", CASES)
def test_against_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random_seed()
    spec, extra = CASES[name]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        poison(monkeypatch)
        compare(spec, data(spec, SIZES, extra()), SIZES)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("batch", [(), ("a",), ("a", "b"), ("a", "b", "c")])
@pytest.mark.parametrize("lengths", [(37, 23), (23, 37), (1, 37), (1, 1), (0, 5), (5, 0)])
def test_lengths_and_batch_axes(batch: tuple[str, ...], lengths: tuple[int, int]) -> None:
    random_seed()
    spec = attention(causal(S), batch=batch)
    sizes = [*(2, 3, 2)[:len(batch)], *lengths, 8, 5]
    compare(spec, data(spec, sizes), sizes)


def test_no_batch_and_no_depth() -> None:
    spec = attention()
    for sizes in ([0, 4, 7, 7, 8, 5], [2, 4, 7, 7, 0, 5], [2, 4, 7, 7, 8, 0]):
        compare(spec, data(spec, sizes), sizes)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("group", [2, 4])
def test_grouped_heads(group: int, layout: str) -> None:
    """Also with dropout, whose counters must not notice that the head axis is split."""
    random_seed()
    spec = attention(causal(S), group=group, weight=dropping(0.3), out_order=(0, 2, 1, 3))
    operands = data(spec, SIZES, group=group)
    if layout == "transposed":
        operands = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in operands]
    compare(spec, operands, SIZES)


def test_heads_that_do_not_divide_into_groups() -> None:
    random_seed()
    spec = attention(causal(S), group=3)
    operands = data(attention(), SIZES)
    compare(spec, [operands[0], operands[1][:, :2], operands[2][:, :2]], SIZES)


def test_batch_and_head_in_one_axis() -> None:
    random_seed()
    flat = axis("b")
    spec = attention(add(S, load(3, (apply("mod", flat, const(4)), I, J), "float")), (("bias", "float64", 3), ("mask", "bool", 2)), batch=("b",))
    spec = replace(spec, score=added(spec.score, load(4, (apply("floordiv", flat, const(4)), J), "bool")))
    sizes = [8, 37, 37, 8, 5]
    compare(spec, data(spec, sizes, [torch.randn(4, 37, 37, dtype=torch.float64), *left_padding()]), sizes)


def test_expanded_and_sliced_operands() -> None:
    """One key head expanded over the heads (stride 0), and slices of one packed tensor."""
    random_seed()
    spec = attention(causal(S))
    query, key, value = data(spec, SIZES)
    compare(spec, [query, key[:, :1].expand_as(key), value[:, :1].expand_as(value)], SIZES)
    sizes = [2, 4, 37, 37, 8, 8]
    compare(spec, list(torch.randn(2, 37, 3, 4, 8, dtype=torch.float64).permute(2, 0, 3, 1, 4)), sizes)


def test_one_tensor_as_query_key_and_value() -> None:
    random_seed()
    spec = attention(causal(S))
    spec = replace(spec, operands=spec.operands[:1], key=Access(0, (B0, B1, J, D)), value=Access(0, (B0, B1, J, axis("e"))))
    compare(spec, [torch.randn(2, 4, 37, 8, dtype=torch.float64)], [2, 4, 37, 37, 8, 8])


def test_shared_queries() -> None:
    """Queries without a batch axis: their gradient is summed over it."""
    random_seed()
    spec = replace(attention(causal(S)), query=Access(0, (I, D)), operands=(Operand("query", "float64", 2), *attention().operands[1:]))
    compare(spec, [torch.randn(37, 8, dtype=torch.float64), *data(attention(), SIZES)[1:]], SIZES)


@pytest.mark.parametrize("form", ["expanded", "transposed"])
def test_layouts_of_the_arriving_gradient(form: str) -> None:
    random_seed()
    spec = attention(causal(S))
    grad = torch.randn(2, 4, 5, 37, dtype=torch.float64).transpose(-1, -2) if form == "transposed" else torch.ones(()).double().expand(2, 4, 37, 5)
    compare(spec, data(spec, SIZES), SIZES, grad)


def test_only_what_is_needed() -> None:
    spec = attention(causal(S))
    operands = data(spec, SIZES)
    out, stats = walker.forward(spec, operands, SIZES)
    everything = walker.backward(spec, out, operands, out, stats, SIZES, None, [True] * 3)
    for n in range(3):
        found = walker.backward(spec, out, operands, out, stats, SIZES, None, [m == n for m in range(3)])
        assert [t is None for t in found] == [m != n for m in range(3)]
        assert torch.equal(found[n], everything[n])  # type: ignore[arg-type]  # neither is None
    assert walker.backward(spec, out, operands, out, stats, SIZES, None, [False] * 3) == [None] * 3


def test_statistics_are_a_pair_that_survives_a_large_fill() -> None:
    """With every key at -1e9 in float32, maximum plus logarithm would round the logarithm away."""
    spec = attention(where(le(J, const(-1)), S, const(-1e9)), dtype="float32")
    sizes = [1, 1, 3, 9, 8, 5]
    _, stats = walker.forward(spec, data(spec, sizes), sizes)
    assert torch.equal(stats[..., 0], torch.full((1, 1, 3), -1e9))
    torch.testing.assert_close(stats[..., 1], torch.full((1, 1, 3), math.log(9)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_types(dtype: str) -> None:
    """The result is that of the reference in float32, rounded once."""
    random_seed()
    spec = attention(added(S, CAUSAL), dtype=dtype)
    operands = data(spec, SIZES)
    out, stats = walker.forward(spec, operands, SIZES)
    assert out.dtype == operands[0].dtype and stats.dtype == torch.float32
    torch.testing.assert_close(out, reference(spec, operands, SIZES, dtype=torch.float64).to(out.dtype))
    leaves = [t.double().requires_grad_() for t in operands]
    reference(spec, leaves, SIZES, dtype=torch.float64).sum().backward()
    for leaf, grad in zip(leaves, walker.backward(spec, torch.ones_like(out), operands, out, stats, SIZES, None, [True] * 3), strict=True):
        assert grad is not None and grad.dtype == out.dtype
        error = (grad.double() - leaf.grad).norm() / leaf.grad.norm()  # type: ignore[union-attr, operator]
        assert error < 4 * torch.finfo(out.dtype).eps


def test_nan_and_inf_values_of_hidden_keys_stay_hidden() -> None:
    """The stated exception to what eager does: a whole tile that no row may see is not read."""
    spec = attention(where(le(J, const(7)), S, const(-INF)))
    query, key, value = data(spec, SIZES)
    value[:, :, 8:] = float("nan")
    out, _ = walker.forward(spec, [query, key, value], SIZES)
    assert not out.isnan().any()


def test_nan_scores_make_nan_rows() -> None:
    spec = attention(causal(S))
    query, key, value = data(spec, SIZES)
    query[0, 1, 20] = float("nan")
    out, _ = walker.forward(spec, [query, key, value], SIZES)
    assert out[0, 1, 20].isnan().all() and not out[0, 1, :20].isnan().any() and not out[1].isnan().any()


def test_dropout_rate_and_seed() -> None:
    spec = attention(S, weight=dropping(0.25), dtype="float32")
    sizes = [2, 4, 128, 128, 8, 8]
    operands = data(spec, sizes)
    operands[0].zero_()
    operands[2].fill_(1.0)
    first, again, other = (walker.forward(spec, operands, sizes, torch.tensor([seed]))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    kept = first.mean().item() * 0.75                  # of 8 · 128 · 128 weights: the deviation is 0.0012
    assert abs(kept - 0.75) < 0.006


def test_memory_is_linear() -> None:
    """No tensor is allocated that has as many elements as the score matrix of one head."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.untyped_storage().nbytes() // t.element_size())
            return out

    spec = attention(added(added(S, CAUSAL), padding()), MASK, dtype="float32")
    sizes = [1, 2, 2048, 2048, 8, 8]
    operands = data(spec, sizes, [torch.rand(1, 2048) > 0.2])
    with Watch():
        out, stats = walker.forward(spec, operands, sizes)
        walker.backward(spec, out, operands, out, stats, sizes, None, [True, True, True, False])
    assert largest <= max(tiling.CPU_TILE, operands[0].numel()) < 2048 * 2048


def test_wrong_calls_are_refused() -> None:
    spec = attention(causal(S), weight=dropping(0.1))
    operands = data(spec, SIZES)
    with pytest.raises(ValueError, match="seed"):
        walker.forward(spec, operands, SIZES)
    with pytest.raises(ValueError, match="integers"):
        walker.forward(spec, operands, SIZES[1:], SEED)
    with pytest.raises(ValueError, match="operands"):
        walker.forward(spec, operands[1:], SIZES, SEED)


# ---- parts

DIFFERENTIABLE = sorted(n for n, o in OPS.items() if (o.kind or "float") == "float" and n not in ("float", "where", "floordiv"))


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_derivative_of_every_operation(op: str) -> None:
    """Against autograd, with numbers of both signs where the function has them, and a tie for max and min."""
    random_seed()
    values = torch.randn(64, dtype=torch.float64)
    if op in ("log", "sqrt", "rsqrt", "pow"):
        values = values.abs() + 0.1
    others = torch.where(torch.arange(64) % 4 == 0, values, torch.randn(64, dtype=torch.float64).abs() + 0.5)
    names = [load(n, (I,), "float") for n in range(OPS[op].arity)]
    tensors = [t.requires_grad_() for t in (values, others)[:len(names)]]
    value = OPS[op].torch(*tensors)
    upstream = torch.randn(64, dtype=torch.float64)
    for name, want in zip(names, torch.autograd.grad(value, tensors, upstream, allow_unused=True), strict=True):
        memo = {n: t.detach() for n, t in zip(names, tensors, strict=True)} | {UPSTREAM: upstream}
        env = Env({"i": torch.arange(64)}, {}, lambda n, at: tensors[n], torch.float64, torch.device("cpu"))
        got = evaluate(adjoint(apply(op, *names), name), env, memo).expand(64)
        torch.testing.assert_close(got, torch.zeros(64, dtype=torch.float64) if want is None else want)


def test_branch_not_taken_gets_zero_even_of_nan() -> None:
    slope = adjoint(where(CAUSAL, DOT, const(-INF)), DOT)
    env = Env({"i": torch.tensor(0), "j": torch.tensor(1)}, {}, lambda n, at: at[0], torch.float64, torch.device("cpu"))
    assert evaluate(slope, env, {UPSTREAM: torch.tensor(float("nan"))}) == 0.0


def test_rectangles_are_views_where_maps_are_affine() -> None:
    tensor = torch.randn(4, 6, 10)
    elements = Elements([tensor], {"n": 2}, torch.device("cpu"))
    box = {"i": (1, 3), "j": (2, 5)}
    view = elements.read(0, (axis("i"), const(3), add(mul(const(2), axis("j")), const(1))), box, ("i", "j"))
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert torch.equal(view, tensor[1:3, 3, 5:11:2])
    gathered = elements.read(0, (axis("i"), const(3), apply("mod", axis("j"), const(3))), box, ("i", "j"))
    assert torch.equal(gathered, tensor[1:3, 3][:, [2, 0, 1]])
    wrapped = elements.read(0, (axis("i"), const(0), apply("sub", axis("j"), const(3))), box, ("i", "j"))
    assert torch.equal(wrapped, tensor[1:3, 0][:, [-1, 0, 1]])


def test_added_rectangles_that_overlap_add_up() -> None:
    into = torch.zeros(127)
    elements = Elements([into], {}, torch.device("cpu"))
    elements.add(into, (add(axis("i"), axis("j")),), {"i": (0, 64), "j": (0, 64)}, ("i", "j"), torch.ones(64, 64))
    assert into.tolist() == [*range(1, 65), *range(63, 0, -1)]
    # Added through a view, these would race on several threads: only views without overlap are written to.
    assert not disjoint(into.as_strided((64, 64), (1, 1))) and not disjoint(into.expand(2, 127))
    assert disjoint(torch.zeros(4, 5, 6)[1:, ::2, 1:].transpose(0, 2))


def test_products_over_shared_heads() -> None:
    random_seed()
    a, b = torch.randn(2, 3, 4, 5, 6), torch.randn(2, 3, 1, 6, 7)
    torch.testing.assert_close(product(a, b), a @ b)
    torch.testing.assert_close(product(a, b[:, :1]), a @ b[:, :1])
    torch.testing.assert_close(product(a[:, :1], b), a[:, :1] @ b)
    c = torch.randn(2, 3, 4, 5, 7)
    for keep in ([2, 3, 4], [2, 3, 1], [1, 3, 1], [2, 1, 4], [1, 1, 1]):
        whole = a.transpose(-1, -2) @ c
        torch.testing.assert_close(contract(a, c, keep), whole.sum_to_size([*keep, 6, 7]))


@pytest.mark.parametrize("box", [{"b": (0, 3), "i": (0, 5), "j": (0, 4)}, {"b": (1, 3), "i": (2, 5), "j": (1, 2)}, {"b": (0, 1), "i": (4, 5), "j": (0, 4)}])
def test_what_is_read_backwards(box: dict[str, tuple[int, int]]) -> None:
    """Strides are not negative: a rectangle whose axis runs down is a copy for reading, and none to add to."""
    i, j, b = axis("i"), axis("j"), axis("b")
    table, sizes = torch.randn(3, 16)[:, ::2], {"b": 3, "i": 5, "j": 4}
    at = {a: torch.arange(*box[a]) for a in box}
    for place, row in ((apply("add", apply("sub", j, i), const(4)), at["j"] - at["i"][:, None] + 4), (apply("sub", const(4), i), (4 - at["i"])[:, None])):
        elements = Elements([table], sizes, torch.device("cpu"))
        got = elements.read(0, (b, place), box, ("b", "i", "j"))
        want = table[at["b"][:, None, None], row]
        assert torch.equal(got, want) and not got._is_view()
        into, exact = torch.zeros(3, 8), torch.zeros(3, 8)
        values = torch.randn(len(at["b"]), len(at["i"]), len(at["j"]))
        elements.add(into, (b, place), box, ("b", "i", "j"), values)
        exact.index_put_((at["b"][:, None, None], row), values.sum_to_size(want.shape), accumulate=True)
        torch.testing.assert_close(into, exact)
