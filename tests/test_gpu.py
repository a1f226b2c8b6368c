"""Generated kernels on a GPU in real dtypes: every mechanism, odd lengths, layouts, and whole models. `pytest -m gpu`."""
from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnfuse
from attnfuse import tilemap, walker
from attnfuse.codegen import autotune, fallback, launch, launch_backward, launch_weights, plan, space
from attnfuse.reference import reference, weights
from attnfuse.spec import AttentionSpec
from tests.oracle import rounding, truth
from tests.specs import BY_NAME, CASES, Case, Shape, with_map

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}
"""Largest relative Frobenius error: a few roundings of the dtype (the fp32 bound allows for sums of 1000 terms)."""
SHAPES = (Shape((2, 3), 200, 200, 64, 64), Shape((1, 2), 129, 65, 40, 72), Shape((2, 2), 1, 300, 128, 128), Shape((1, 2), 77, 1, 256, 16),
          Shape((1, 2), 150, 170, 200, 256))


@pytest.fixture(autouse=True)
def descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles by descriptors wherever they can be, which short sequences are not worth otherwise."""
    monkeypatch.setattr(plan, "LEAST_WORK", 0)
    monkeypatch.setattr(launch, "_runs", {})
    monkeypatch.setattr(launch_backward, "_runs", {})


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = launch._allocate
    monkeypatch.setattr(launch, "_allocate", lambda *args: tuple(t.fill_(12345.0) for t in allocate(*args)))


def arrange(case: Case, shape: Shape, dtype: str, seed: int, move, mapped: bool) -> tuple[AttentionSpec, list[torch.Tensor], tuple[int, ...]]:
    """(spec, operands, sizes) of a call on the GPU, with a map of its mask's tiles where that is asked for."""
    operands, sizes = case.inputs(shape, getattr(torch, dtype), seed)
    spec, operands = case.spec(dtype), [move(t.cuda()) for t in operands]
    return (*(with_map(spec, operands, sizes) if mapped else (spec, operands)), sizes)


def check(case: Case, shape: Shape, dtype: str, seed: int, move=lambda t: t, mapped: bool = False) -> None:
    spec, operands, sizes = arrange(case, shape, dtype, seed, move, mapped)
    drop = torch.tensor([seed + (seed << 32)], device="cuda") if spec.dropouts else None
    out, _ = launch.forward(spec, operands, sizes, drop)
    exact = reference(spec, operands, sizes, drop, dtype=torch.float64)
    assert torch.equal(out.isnan(), exact.isnan())
    distance = lambda x: ((x.double() - exact).nan_to_num().norm() / exact.nan_to_num().norm().clamp(min=1e-30)).item()
    # Squares of scores reach the thousands, where float32 itself has few digits left: then its own error is the measure.
    assert distance(out) <= max(DTYPES[dtype], 4 * distance(reference(spec, operands, sizes, drop))), distance(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.queries}x{s.keys}x{s.depth}")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_mechanism(case: Case, shape: Shape, dtype: str, seed: int) -> None:
    check(case, shape, dtype, seed)


@pytest.mark.parametrize("length", (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000))
@pytest.mark.parametrize("name", ("plain", "causal_padding_min"))
def test_every_length(name: str, length: int, seed: int) -> None:
    if name == "causal_padding_min" and length == 0:
        pytest.skip("there is no key to pad")
    check(BY_NAME[name], Shape((2, 2), length, length, 64, 64), "bfloat16", seed)


@pytest.mark.parametrize("move", (lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
                                  lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t,
                                  lambda t: t[:, :1].expand(t.shape) if t.dim() == 4 else t), ids=("transposed", "heads_last", "expanded"))
def test_every_layout(move, seed: int) -> None:
    check(BY_NAME["causal_inf"], Shape((2, 4), 150, 150, 64, 64), "bfloat16", seed, move)


def test_grid_beyond_65535(seed: int) -> None:
    check(BY_NAME["plain"], Shape((2, 32769), 4, 4, 16, 16), "float32", seed)


def test_offsets_beyond_32_bits(seed: int) -> None:
    """Rows so far apart that row · stride passes 2³¹."""
    step = 2 ** 31 // 16 + 64
    base = torch.empty(16 * step + 4096, dtype=torch.float16, device="cuda")

    def far(t: torch.Tensor) -> torch.Tensor:
        if t.shape[-2] != 17:
            return t
        out = base.as_strided(t.shape, (0, 0, step, 1), far.offset)
        far.offset += 1024
        return out.copy_(t)

    far.offset = 0
    check(BY_NAME["plain"], Shape((1, 1), 5, 17, 16, 16), "float16", seed, far)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_half_products_from_a_model(dtype: str, seed: int) -> None:
    """A compiled chain keeps the accuracy of eager: 1.2 times its error in norm, twice in the worst element."""
    import attnfuse  # noqa: F401

    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 4, 513, 64, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))

    def written(q, k, v):
        n = q.size(-2)
        keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        return (q @ k.mT * 0.125).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v

    torch._dynamo.reset()
    with torch.no_grad():
        fused, eager, exact = torch.compile(written, backend="attnfuse")(q, k, v), written(q, k, v), written(q.double(), k.double(), v.double())
    error = lambda x: ((x.double() - exact).norm() / exact.norm()).item()
    worst = lambda x: (x.double() - exact).abs().max().item()
    assert error(fused) <= max(1.2 * error(eager), 1e-6) and worst(fused) <= max(2 * worst(eager), 1e-5)


# ---- backward

BACKWARD = {"bfloat16": 1.2e-2, "float16": 1.5e-3, "float32": 3e-6}
"""As `DTYPES`; a gradient passes through one rounded factor more."""


def check_backward(case: Case, shape: Shape, dtype: str, seed: int, move=lambda t: t, mapped: bool = False) -> list[torch.Tensor | None]:
    """The gradients of all operands from generated kernels, against autograd through the reference in float64."""
    spec, operands, sizes = arrange(case, shape, dtype, seed, move, mapped)
    drop = torch.tensor([seed + (seed << 32)], device="cuda") if spec.dropouts else None
    out, stats = launch.forward(spec, operands, sizes, drop)
    grad_out = move(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype).cuda())
    needs = [t.is_floating_point() for t in operands]
    grads = launch.backward(spec, grad_out, operands, out, stats, sizes, drop, needs)
    exact = [g for g in truth(spec, operands, sizes, drop, grad_out, needs) if g is not None]
    explained = [x for x, need in zip(rounding(spec, operands, sizes, drop, grad_out, needs), needs, strict=True) if need]
    scale = max(x.nan_to_num().norm().item() for x in (*exact, grad_out))

    @functools.cache
    def walked() -> list[torch.Tensor | None]:
        plain = lambda t: t.float() if t.is_floating_point() else t
        own = case.spec("float32")
        wide = [*map(plain, operands[:len(own.operands)])]
        _, statistics = walker.forward(own, wide, sizes, drop)
        return [*walker.backward(own, grad_out.float(), wide, out.float(), statistics, sizes, drop, needs[:len(wide)]), None, None]

    def method(number: int) -> float:
        """The error of the method itself, in float32 from the same rounded result: where a row has one weight of almost 1 its
        gradient is a difference that cancels, and scores in the hundreds are computed again with an error of a last place."""
        want = exact[number]
        got = [g for g, need in zip(walked(), needs) if need][number]  # noqa: B905  (a map has no gradients)
        return (got.double() - want).nan_to_num().norm().item() / max(want.nan_to_num().norm().item(), 1e-1 * scale, 1e-30)  # type: ignore[union-attr]

    for number, (got, want) in enumerate(zip([g for g, need in zip(grads, needs, strict=True) if need], exact, strict=True)):
        assert got is not None and torch.equal(got.isnan(), want.isnan())
        # A gradient that cancels to nothing beside the others is as wrong as their size makes it.
        size = max(want.nan_to_num().norm().item(), 1e-1 * scale, 1e-30)
        error = (got.double() - want).nan_to_num().norm().item() / size
        # The rounded result's share of delta is multiplied by the slopes of squared scores: as in test_codegen_backward.py.
        least = (10 if case.name == "powers" and dtype == "float16" else 1) * BACKWARD[dtype]
        limit = max(least, explained[number] / size, (4 if dtype == "float32" else 1.5) * method(number))
        assert error <= limit, (number, error, method(number))
    return grads


@pytest.fixture
def poisoned_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = launch_backward.empty
    monkeypatch.setattr(launch_backward, "empty", lambda *args: scratch(*args).fill_(77))


@pytest.mark.usefixtures("poisoned_backward")
@pytest.mark.parametrize("dtype, shape", [
    ("bfloat16", Shape((1, 2), 300, 300, 64, 64)), ("bfloat16", Shape((1, 2), 129, 165, 40, 72)), ("float16", Shape((1, 2), 200, 130, 128, 128)),
    ("float32", Shape((1, 2), 130, 130, 64, 64)), ("bfloat16", Shape((1, 2), 77, 90, 256, 16)), ("float32", Shape((1, 2), 150, 170, 200, 256)),
], ids=lambda x: x if isinstance(x, str) else f"{x.queries}x{x.keys}x{x.depth}")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_backward_of_every_mechanism(case: Case, dtype: str, shape: Shape, seed: int) -> None:
    check_backward(case, shape, dtype, seed)


MAPPED = [case for case in CASES if tilemap.mapped(case.spec()) is not None]


@pytest.mark.usefixtures("poisoned_backward")
@pytest.mark.parametrize("dtype, shape", [
    ("bfloat16", Shape((2, 2), 330, 300, 64, 64)), ("float16", Shape((1, 2), 256, 512, 128, 128)), ("float32", Shape((2, 1), 200, 130, 40, 72)),
], ids=lambda x: x if isinstance(x, str) else f"{x.queries}x{x.keys}x{x.depth}")
@pytest.mark.parametrize("case", MAPPED, ids=lambda c: c.name)
def test_attention_along_a_map(case: Case, dtype: str, shape: Shape, seed: int) -> None:
    check(case, shape, dtype, seed, mapped=True)
    check_backward(case, shape, dtype, seed, mapped=True)


@pytest.mark.parametrize("case", MAPPED, ids=lambda c: c.name)
def test_the_kernels_make_the_map(case: Case, seed: int) -> None:
    spec, operands, sizes = arrange(case, Shape((2, 3), 1000, 20000, 16, 16), "bfloat16", seed, lambda t: t, mapped=True)
    found = tilemap.mapped(spec)
    assert found is not None and spec.tiles is not None
    named = dict(zip(spec.size_names, sizes, strict=True))
    got = launch.tile_map(found.mask, [operands[n] for n in found.sources], [named[n] for n in found.mask.size_names], operands[0].device)
    assert all(torch.equal(a, operands[n]) for a, n in zip(got, spec.tiles, strict=True))


@pytest.mark.usefixtures("poisoned_backward")
@pytest.mark.parametrize("name", ("plain", "causal_padding_min", "bias", "dropout", "grouped", "alibi_causal"))
def test_tiles_by_pointers(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST_WORK", 2 ** 62)
    check_backward(BY_NAME[name], Shape((1, 2), 300, 300, 128, 128), "bfloat16", seed)


@pytest.mark.usefixtures("poisoned_backward")
@pytest.mark.parametrize("length", (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000))
@pytest.mark.parametrize("name", ("plain", "causal_padding_min", "grouped"))
def test_backward_of_every_length(name: str, length: int, seed: int) -> None:
    check_backward(BY_NAME[name], Shape((2, 2), length, length, 64, 64), "bfloat16", seed)


@pytest.mark.usefixtures("poisoned_backward")
@pytest.mark.parametrize("move", (lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
                                  lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t,
                                  lambda t: t[:, :1].expand(t.shape) if t.dim() == 4 else t), ids=("transposed", "heads_last", "expanded"))
def test_backward_of_every_layout(move, seed: int) -> None:
    check_backward(BY_NAME["causal_inf"], Shape((2, 4), 150, 150, 64, 64), "bfloat16", seed, move)


def test_backward_with_a_grid_beyond_65535(seed: int) -> None:
    check_backward(BY_NAME["plain"], Shape((2, 32769), 4, 4, 16, 16), "float32", seed)


def test_backward_gives_the_same_bits_every_time(seed: int) -> None:
    first, second = (check_backward(BY_NAME["grouped"], Shape((2, 8), 500, 500, 64, 64), "bfloat16", seed) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_backward_of_a_model(dtype: str, seed: int) -> None:
    """Gradients of a compiled chain come from generated kernels, and are as exact as eager's."""
    import attnfuse  # noqa: F401

    torch.manual_seed(seed)
    leaves = [torch.randn(2, 4, 257, 64, device="cuda", dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3)]

    def written(q, k, v):
        n = q.size(-2)
        keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        return (q @ k.mT * 0.125).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    grad_out = torch.randn(2, 4, 257, 64, generator=torch.Generator().manual_seed(seed)).cuda().to(leaves[0].dtype)
    torch._dynamo.reset()
    launch_backward._runs.clear()
    run = lambda f, x, g: torch.autograd.grad(f(*x), x, g)
    fused, eager = run(torch.compile(written, backend="attnfuse"), leaves, grad_out), run(written, leaves, grad_out)
    assert launch_backward._runs
    wide = [x.detach().double().requires_grad_() for x in leaves]
    for a, b, exact in zip(fused, eager, run(written, wide, grad_out.double()), strict=True):
        error = lambda x: ((x.double() - exact).norm() / exact.norm()).item()  # noqa: B023
        assert error(a) <= max(1.2 * error(b), 1e-6)


@pytest.mark.parametrize("name", ("causal_inf", "bias", "dropout"))
def test_measured_plans_compute_the_same(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autotune results stay exact, forward and backward; the winners are on disk, and a process that finds them times nothing."""
    monkeypatch.setenv("ATTNFUSE_CACHE_DIR", str(tmp_path))
    autotune.forget()
    timed: list[float] = []
    real = autotune.on_gpu
    monkeypatch.setattr(autotune, "timer", lambda run: timed.append(real(run)) or timed[-1])
    before, counts = torch.cuda.get_rng_state(), []
    with attnfuse.settings(autotune=True):
        for _ in range(2):
            check(BY_NAME[name], Shape((2, 8), 1500, 1500, 64, 64), "bfloat16", seed)
            check_backward(BY_NAME[name], Shape((2, 8), 1500, 1500, 64, 64), "bfloat16", seed)
            counts.append(len(timed))
            assert len(timed) >= 6 and len(list(tmp_path.glob("tuned_*.json"))) >= 3
            autotune.forget()
            launch._runs.clear()
            launch_backward._runs.clear()
    assert counts[0] == counts[1], "the second time everything was read"
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_nothing_is_timed_while_a_graph_is_captured(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNFUSE_CACHE_DIR", str(tmp_path))
    case = BY_NAME["causal_inf"]
    operands, sizes = case.inputs(Shape((2, 4), 300, 300, 64, 64), torch.float16, seed)
    operands, spec = [t.cuda() for t in operands], case.spec("float16")
    expected, _ = launch.forward(spec, operands, sizes)           # compiled before the capture
    launch._runs.clear()
    autotune.forget()
    graph = torch.cuda.CUDAGraph()
    with attnfuse.settings(autotune=True), torch.cuda.graph(graph):
        out, _ = launch.forward(spec, operands, sizes)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and not list(tmp_path.glob("tuned_*.json"))


def test_a_kernel_that_spills_gives_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 1280 bytes a thread: the driver says so, another runs in its place, and the result is right."""
    real, tried = fallback._watched, list[tuple[plan.KernelPlan, int]]()

    def noted(attempt, one: plan.KernelPlan):
        found = real(attempt, one)
        tried.append((one, found[1].spills))
        return found

    first = launch.candidates
    monkeypatch.setattr(launch, "candidates", lambda *args: tuple(
        replace(p, block_m=64, block_n=64, warps=4, stages=1, piece=0, described=()) for p in first(*args)[:1]))
    monkeypatch.setattr(fallback, "_watched", noted)
    monkeypatch.setattr(launch, "_runs", {})
    check(BY_NAME["causal_inf"], Shape((4, 16), 1024, 1024, 256, 256), "float32", seed)
    assert tried[0][1] > space.TOLERATED and tried[-1][1] <= space.TOLERATED, tried
    assert tried[0][0].shape == (64, 64, 4, 1) != tried[-1][0].shape


# ---- weights that are wanted too

def check_weights(case: Case, shape: Shape, dtype: str, seed: int, move=lambda t: t, order: tuple[int, ...] = ()) -> None:
    """The generated kernel's weights, from the generated statistics, against the plain meaning in float64."""
    operands, sizes = case.inputs(shape, getattr(torch, dtype), seed)
    operands = [move(t.cuda()) for t in operands]
    attention = case.spec(dtype)
    spec = replace(attention, out_order=order)
    drop = torch.tensor([seed + (seed << 32)], device="cuda") if spec.dropouts else None
    _, stats = launch.forward(attention, operands, sizes, drop)
    got = launch.weights(spec, operands, stats, sizes, drop)
    exact, plain = (weights(spec, operands, sizes, drop, dtype=t) for t in (torch.float64, torch.float32))
    assert torch.equal(got.isnan(), exact.isnan()) and got.permute(spec.out_order).is_contiguous()
    distance = lambda x: ((x.double() - exact).nan_to_num().norm() / exact.nan_to_num().norm().clamp(min=1e-30)).item()
    assert distance(got) <= max(DTYPES[dtype], 2e-5, 4 * distance(plain)), distance(got)
    assert bool((got[exact == 0.0] == 0.0).all())


@pytest.fixture
def poisoned_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = launch_weights._allocate
    monkeypatch.setattr(launch_weights, "_allocate", lambda *args: allocate(*args).fill_(12345.0))
    monkeypatch.setattr(launch_weights, "_ladders", {})


@pytest.mark.usefixtures("poisoned_weights")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.queries}x{s.keys}x{s.depth}")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_weights_of_every_mechanism(case: Case, shape: Shape, dtype: str, seed: int) -> None:
    check_weights(case, shape, dtype, seed)


@pytest.mark.usefixtures("poisoned_weights")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (2, 0, 1, 3)])
@pytest.mark.parametrize("length", (1, 16, 17, 64, 65, 129, 1000))
@pytest.mark.parametrize("name", ("plain", "causal_padding_min", "window"))
def test_weights_of_every_length_and_order(name: str, length: int, order: tuple[int, ...], seed: int) -> None:
    check_weights(BY_NAME[name], Shape((2, 2), length, length, 64, 64), "bfloat16", seed, order=order)


@pytest.mark.parametrize("p", (0.0, 0.25))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_model_that_returns_its_weights(dtype: str, p: float, seed: int) -> None:
    """Result, weights and gradients are as exact as eager's; what was dropped of the weights is what the values were weighed by."""
    import attnfuse  # noqa: F401

    torch.manual_seed(seed)
    leaves = [torch.randn(2, 4, 257, 64, device="cuda", dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3)]

    def written(q, k, v, factor=None):
        n = q.size(-2)
        keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        w = (q @ k.mT * 0.125).masked_fill(~keep, float("-inf")).softmax(-1)
        w = torch.nn.functional.dropout(w, p, True) if factor is None else w * factor.to(w.dtype)
        return w @ v, w

    torch._dynamo.reset()
    launch_weights._ladders.clear()
    out, w = torch.compile(written, backend="attnfuse")(*leaves)
    assert launch_weights._ladders
    factor = torch.where(w != 0, 1.0 / (1.0 - p), 0.0) if p else torch.ones_like(w)
    up = [torch.randn_like(out), torch.randn_like(w)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact, eager = written(*wide, factor.double()), written(*leaves, factor)
    for got, theirs, want in zip((out, w, *torch.autograd.grad((out, w), leaves, up)), (*eager, *torch.autograd.grad(eager, leaves, up)),
                                 (*exact, *torch.autograd.grad(exact, wide, [u.double() for u in up])), strict=True):
        error = lambda x: ((x.double() - want).norm() / want.norm()).item()  # noqa: B023
        assert error(got) <= max(1.2 * error(theirs), 2e-5 if p else 1e-6), (error(got), error(theirs))
