"""Training on a GPU, by generated kernels: dropout, CUDA graphs, mixed precision, checkpointing, memory. `pytest -m gpu`."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnfuse
from attnfuse import ops
from bench.common import extra_memory
from tests.training import Gpt, batches, check_mask, close, dropping, fused, gradients, kept, masked_attention, revealing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an attention is computed by the tiled loop instead of a generated kernel."""
    def fail(reason: str) -> None:
        raise AssertionError(f"no generated kernel: {reason}")

    monkeypatch.setattr(ops, "_say_once", fail)


def rewritten(sites: int) -> None:
    """Fail unless the graph that was compiled last had so many attentions and all were rewritten."""
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == len(report.sites) == sites, str(report)


# ---- dropout

@pytest.mark.parametrize("inner, p", [("eager", 0.1), ("inductor", 0.5)])
def test_draws_are_independent_and_kept_weights_scaled(inner: str, p: float, seed: int) -> None:
    """Over rows, keys, heads, sequences, layers and steps; several tiles in each direction."""
    attend = attnfuse.optimize(dropping(p, 2), inner=inner)
    operands = revealing(2, 4, 200, device="cuda")
    check_mask(kept(torch.stack([attend(*operands) for _ in range(3)]), p), p)
    rewritten(2)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_backward_drops_what_forward_dropped(inner: str, seed: int) -> None:
    """The mask depends on the seed alone, so one call reveals it, and another is compared with the formula in float64."""
    p = 0.3
    attend = attnfuse.optimize(dropping(p), inner=inner)
    torch.manual_seed(seed)
    factor = kept(attend(*(x.requires_grad_() for x in revealing(2, 3, 100, device="cuda")))[0].detach(), p) / (1 - p)
    leaves = [torch.randn(2, 3, 100, n, device="cuda") for n in (8, 8, 100)]
    upstream = torch.randn(2, 3, 100, 100, device="cuda")
    found: list[list[Tensor]] = []
    for formula in (lambda *x: attend(*x)[0], lambda *x: masked_attention(*x, factor)):
        given = [x.clone().requires_grad_() for x in leaves]
        torch.manual_seed(seed)
        out = formula(*given)
        found.append([out.detach().double(), *(g.double() for g in torch.autograd.grad(out, given, upstream.to(out.dtype)))])
    rewritten(1)
    for got, want in zip(*found, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-5


def test_everything_dropped_is_zero(seed: int) -> None:
    attend = attnfuse.optimize(dropping(1.0), inner="eager")
    given = [torch.randn(2, 3, 100, 64, device="cuda", requires_grad=True) for _ in range(3)]
    out = attend(*given)
    grads = torch.autograd.grad((out + 1.0).square().sum(), given)
    rewritten(1)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in (out, *grads))


# ---- CUDA graphs

def replayed(p: float, layers: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """A training step of `dropping` under mode="reduce-overhead", warmed up: result and gradients of leaves, copied out."""
    attend = attnfuse.optimize(dropping(p, layers), mode="reduce-overhead")

    def step(leaves: list[Tensor]) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        given = [x.detach().requires_grad_() for x in leaves]
        out = attend(*given)
        grads = torch.autograd.grad(out.sum(), given)
        return [x.detach().clone() for x in (out, *grads)]

    return step


def test_replays_of_a_cuda_graph_draw_fresh_masks(seed: int) -> None:
    """And the same ones after the same `manual_seed`; backward replays with the mask of its forward."""
    torch._dynamo.utils.counters.clear()
    step, operands = replayed(0.5, 2), list(revealing(2, 4, 128, device="cuda"))
    for _ in range(3):                                 # runs as it is, is recorded, is replayed
        step(operands)
    rewritten(2)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    runs = []
    for s in (seed, seed, seed + 1):
        torch.manual_seed(s)
        runs.append([step(operands) for _ in range(3)])
    for first, again in zip(runs[0], runs[1], strict=True):
        assert all(map(torch.equal, first, again)), "one seed, two masks"
    masks = torch.stack([kept(out, 0.5) for run in (runs[0], runs[2]) for out, *_ in run])
    check_mask(masks, 0.5)
    for out, _, _, grad in runs[0]:                    # the result is linear in the values
        torch.testing.assert_close((grad * operands[2]).sum(), out.sum(), rtol=1e-4, atol=0)
        want = out.sum(0).sum(-2)                      # of key j: all that was kept of its weights
        torch.testing.assert_close(grad[..., 0], want, rtol=1e-4, atol=1e-5)


def losses(model: nn.Module, ids: list[Tensor], dtype: torch.dtype | None = None, scaler: torch.amp.GradScaler | None = None) -> Tensor:
    """Losses of some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = scaler or torch.amp.GradScaler("cuda", enabled=False)
    found = []
    for batch in ids:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = model(batch)
        found.append(loss.detach().clone())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.stack(found).cpu()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_losses_follow_eager(mode: str, seed: int) -> None:
    eager = Gpt(width=128).cuda()
    model = attnfuse.optimize(copy.deepcopy(eager), mode=mode)
    ids = batches(1, length=129, device="cuda") * 12
    ours, theirs = losses(model, ids), losses(eager, ids)
    fused(model, 2)
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=0)
    assert theirs[-1] < theirs[0] - 0.5, "the model learns"


# ---- mixed precision

@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_under_autocast_are_as_exact_as_eager_ones(dtype: str, seed: int) -> None:
    eager = Gpt(width=128).cuda()
    (ids,) = batches(1, length=129, device="cuda")
    model = attnfuse.optimize(copy.deepcopy(eager), inner="eager")
    with torch.autocast("cuda", dtype=HALVES[dtype]):
        ours, theirs = gradients(model, ids), gradients(eager, ids)
    fused(model, 2)
    exact = gradients(copy.deepcopy(eager).double(), ids)
    assert ours.keys() == theirs.keys() == exact.keys()
    scale = max(float(g.norm()) for n, g in exact.items() if n != "loss")
    for name, want in exact.items():
        a, b = (float((g[name].double() - want).norm()) for g in (ours, theirs))
        assert a <= max(1.2 * b, 2e-3 * scale), f"{name}: {a} against eager's {b}"


@pytest.mark.parametrize("dtype", HALVES)
def test_losses_under_autocast_and_scaling_follow_eager(dtype: str, seed: int) -> None:
    """In float16 from a scale at which the first steps overflow and are skipped."""
    eager = Gpt(width=128).cuda()
    model = attnfuse.optimize(copy.deepcopy(eager), inner="eager")
    ids = batches(1, length=129, device="cuda") * 24
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0 ** 24, enabled=dtype == "float16") for _ in range(2)]
    ours, theirs = (losses(m, ids, HALVES[dtype], s) for m, s in zip((model, eager), scalers, strict=True))
    fused(model, 2)
    scale, want = (s.get_scale() for s in scalers)
    assert (want < 2.0 ** 24 or dtype != "float16") and 0.5 <= scale / want <= 2
    if scale == want:                                  # as many steps were taken
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=1e-2)        # from 5 down to a hundredth or less: one batch, learned by heart
    assert max(ours[-1], theirs[-1]) < theirs[0] - 0.5


# ---- checkpointing

@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_the_mask(reentrant: bool, seed: int) -> None:
    """Same seed, same gradients as without checkpointing. Not with inner="eager": under PyTorch 2.11's aot_eager, without attnfuse
    too, a checkpointed model on a GPU draws other numbers than the plain one (gradients differ by 41 % of their largest)."""
    plain, checkpointed = Gpt(width=128, dropout=0.3).cuda(), Gpt(width=128, dropout=0.3, reentrant=reentrant).cuda()
    checkpointed.load_state_dict(plain.state_dict())
    found: list[dict[str, Tensor]] = []
    (ids,) = batches(1, length=129, device="cuda")
    for model in (plain, checkpointed):
        attnfuse.optimize(model)
        torch.manual_seed(seed)
        found.append(gradients(model, ids))
        fused(model, 2)
    close(found[1], found[0], rtol=1e-3, atol=1e-5)


# ---- memory

@pytest.mark.parametrize("p", [0.0, 0.1])
def test_memory_of_a_training_step_is_linear(p: float) -> None:
    """Twice the tokens, twice the memory; eager takes four times as much."""
    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[-2]
        seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.nn.functional.dropout(weights, p) @ v

    optimised: Any = attnfuse.optimize(written, inner="eager", dynamic=True)

    def peak(function: Any, tokens: int) -> float:
        leaves = [torch.randn(1, 4, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        step = lambda: torch.autograd.grad(function(*leaves).sum(), leaves)
        step()                                         # compiles
        return extra_memory(step)

    ours, eager = ([peak(f, n) for n in (1024, 2048, 4096)] for f in (optimised, written))
    rewritten(1)
    print(f"MiB: {ours} against {eager}")
    assert ours[2] / ours[1] < 2.2 and ours[1] / ours[0] < 2.2 and eager[2] / eager[1] > 3
    assert ours[2] < eager[2] / 10
