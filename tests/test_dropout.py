"""Dropout of the weights in optimised models: its distribution, its seeds, and the same mask in backward and under checkpointing."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnfuse
from attnfuse.philox import philox
from tests.training import Block, Gpt, batches, check_mask, close, dropping, fused, gradients, kept, masked_attention, revealing


def optimised(p: float, layers: int = 1, inner: str = "eager") -> Any:
    """`dropping`, compiled with its attentions fused."""
    return attnfuse.optimize(dropping(p, layers), inner=inner, fullgraph=True)


def count(sites: int) -> None:
    """Fail unless the last graph had so many attentions and all were rewritten."""
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == len(report.sites) == sites, str(report)


# ---- distribution

@pytest.mark.parametrize("rounds, counter, key, word", [
    (7, (0, 0, 0, 0), (0, 0), 0x5F6FB709),
    (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x5207DDC2),
    (10, (0, 0, 0, 0), (0, 0), 0x6627E8D5),
    (10, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
    (10, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
])
def test_known_answers_of_the_generator(rounds: int, counter: tuple[int, ...], key: tuple[int, int], word: int) -> None:
    """Those that its authors publish (Random123, kat_vectors)."""
    seed = torch.tensor([key[0] | (key[1] - (key[1] >> 31 << 32)) << 32])          # as a signed integer
    assert int(philox(seed, *(torch.tensor(c) for c in counter), rounds=rounds)[0]) == word


@pytest.mark.parametrize("inner, p", [("eager", 0.1), ("inductor", 0.5)])
def test_draws_are_independent_and_kept_weights_scaled(inner: str, p: float, seed: int) -> None:
    """Over rows, keys, heads, sequences, layers and steps."""
    attend = optimised(p, 2, inner)
    operands = revealing(2, 4, 64)
    check_mask(kept(torch.stack([attend(*operands) for _ in range(4)]), p), p)
    count(2)


BROKEN = {
    "rate": lambda m: torch.where(torch.rand_like(m) < 0.05, 0.0, m),
    "equal heads": lambda m: m[:, :1].expand_as(m),
    "equal steps": lambda m: m[:1].expand_as(m),
    "rows shifted by one": lambda m: torch.stack([m[..., 0, :].roll(n, -1) for n in range(64)], -2),
    "one row in two heads": lambda m: m.index_copy(1, torch.tensor([2]), torch.cat([m[:, :1, 5:], m[:, 2:3, :5]], 2)),
    "symmetric": lambda m: m.triu() + m.triu(1).transpose(-1, -2),
    "rows of different rates": lambda m: torch.where(torch.arange(64)[:, None] % 2 == 0, m, (torch.rand_like(m) > 0.56).double()),
}


@pytest.mark.parametrize("name", [None, *BROKEN])
def test_the_statistics_see_what_they_are_for(name: str | None, seed: int) -> None:
    mask = (torch.rand(4, 4, 64, 64) > 0.5).double()
    if name is None:
        check_mask(mask, 0.5)
        return
    with pytest.raises(AssertionError):
        check_mask(BROKEN[name](mask), 0.5)


def test_the_seed_decides(seed: int) -> None:
    attend = optimised(0.5, 2)
    operands = revealing(1, 2, 16)
    runs = []
    for s in (seed, seed, seed + 1):
        torch.manual_seed(s)
        runs.append([attend(*operands) for _ in range(2)])
    count(2)
    assert all(map(torch.equal, runs[0], runs[1]))
    assert not torch.equal(runs[0][0], runs[0][1]), "two steps drop the same weights"
    assert not torch.equal(runs[0][0], runs[2][0]), "two seeds drop the same weights"


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_backward_drops_what_forward_dropped(inner: str, seed: int) -> None:
    """The mask depends on the seed alone, so one call reveals it, and another is compared with the formula in float64."""
    p, attend = 0.3, optimised(0.3, 1, inner)
    grads: list[list[Tensor]] = []
    leaves = [torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 20)]
    upstream = torch.randn(2, 3, 20, 20)
    torch.manual_seed(seed)
    factor = kept(attend(*(x.requires_grad_() for x in revealing(2, 3, 20)))[0].detach(), p) / (1 - p)
    for formula in (lambda *x: attend(*x)[0], lambda *x: masked_attention(*x, factor)):
        given = [x.clone().requires_grad_() for x in leaves]
        torch.manual_seed(seed)
        out = formula(*given)
        out.backward(upstream.to(out.dtype))
        grads.append([out.detach().double(), *(x.grad.double() for x in given if x.grad is not None)])
    assert len(grads[0]) == 4 and 0 < factor.mean() < 2
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- the probabilities at the ends, evaluation

def test_nothing_dropped_is_no_dropout(seed: int) -> None:
    attend = optimised(0.0)
    q, k, v = torch.randn(3, 2, 3, 16, 8)
    torch.testing.assert_close(attend(q, k, v), dropping(0.0)(q, k, v), rtol=1e-5, atol=1e-6)
    count(1)
    site = attnfuse.last_report().sites[0]  # type: ignore[union-attr]
    assert site.spec is not None and not site.spec.dropouts


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_everything_dropped_is_zero(inner: str, seed: int) -> None:
    """As in eager: the result and every gradient are zero, and nothing is divided by 1 - p."""
    attend = optimised(1.0, 1, inner)
    given = [torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3)]
    out = attend(*given)
    (out + 1.0).square().sum().backward()
    count(1)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(out, dropping(1.0)(*given))
    assert all(x.grad is not None and torch.equal(x.grad, torch.zeros_like(x)) for x in given)


def test_one_key(seed: int) -> None:
    """Its weight is 1, and kept twice as large or dropped, each row and head for itself."""
    attend = optimised(0.5)
    out = attend(torch.randn(4, 4, 64, 8), torch.randn(4, 4, 1, 8), torch.ones(4, 4, 1, 1))
    count(1)
    assert bool(((out == 0) | (out == 2)).all())
    check_mask((out[0] / 2).double().reshape(4, 4, 8, 8), 0.5)


class Revealed(nn.Module):
    """An attention that can be told to drop weights in evaluation too."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.drop, self.always = nn.Dropout(0.5), always

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.drop((q @ k.transpose(-1, -2)).softmax(-1))
        return F.dropout(weights, 0.2, True) @ v if self.always else weights @ v


def test_evaluation_and_training_take_turns(seed: int) -> None:
    model = attnfuse.optimize(Revealed(False), inner="eager")
    operands, random = revealing(2, 2, 32), torch.randn(3, 2, 2, 32, 8)
    for training in (True, False, True, False):
        out = model.train(training)(*operands)
        if training:
            check_mask(kept(out, 0.5), 0.5)
        else:
            torch.testing.assert_close(model(*random), model.forward(*random), rtol=1e-5, atol=1e-6)
    fused(model, 2)


def test_dropout_that_stays_on_in_evaluation(seed: int) -> None:
    model = attnfuse.optimize(Revealed(True).eval(), inner="eager")
    with torch.no_grad():
        check_mask(kept(model(*revealing(2, 4, 64)), 0.2), 0.2)
    fused(model, 1)


def test_two_dropouts_of_one_weight_are_two_draws(seed: int) -> None:
    model = attnfuse.optimize(Revealed(True).train(), inner="eager")
    out = model(*revealing(2, 4, 64))
    fused(model, 1)
    check_mask(kept(out, 0.6), 0.6)                    # kept with probability 0.5 · 0.8


# ---- checkpointing

@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_checkpointing_inside_the_model(inner: str, reentrant: bool, seed: int) -> None:
    """Same seed, same gradients as without checkpointing: the recomputed forward drops the same weights."""
    plain, checkpointed = Gpt(layers=1, dropout=0.3), Gpt(layers=1, dropout=0.3, reentrant=reentrant)
    checkpointed.load_state_dict(plain.state_dict())
    found = []
    (ids,) = batches(1)
    for model in (plain, checkpointed):
        attnfuse.optimize(model, inner=inner)
        torch.manual_seed(seed)
        found.append(gradients(model, ids))
        fused(model, 1)
    close(found[1], found[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_checkpointing_around_an_optimised_block(inner: str, reentrant: bool, seed: int) -> None:
    block = attnfuse.optimize(Block(16, 2, 0.3), inner=inner)
    x, upstream = torch.randn(2, 2, 12, 16)
    found = []
    for call in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        given = {"x": x.clone().requires_grad_(), **dict(block.named_parameters())}
        torch.manual_seed(seed)
        out = call(given["x"])
        block.zero_grad()
        out.backward(upstream)
        found.append({"out": out.detach(), **{n: t.grad.clone() for n, t in given.items() if t.grad is not None}})
    assert len(found[0]) == 2 + len(list(block.parameters()))
    fused(block, 1)
    close(found[1], found[0])


# ---- accumulation

def test_accumulated_gradients_are_the_sum_of_the_steps(seed: int) -> None:
    """Each micro-batch draws its own mask; what it adds is what it gives alone from the same random state."""
    model = attnfuse.optimize(Gpt(dropout=0.3), inner="eager")
    parts = batches(3)
    alone: list[dict[str, Tensor]] = []
    torch.manual_seed(seed)
    for ids in parts:
        alone.append(gradients(model, ids))
    model.zero_grad()
    torch.manual_seed(seed)
    for ids in parts:
        model(ids).backward()
    fused(model, 2)
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    close(got, {n: torch.stack([g[n] for g in alone]).sum(0) for n in got})


def test_accumulation_is_the_whole_batch(seed: int) -> None:
    """Without dropout, against eager on all sequences at once."""
    eager = Gpt()
    model = attnfuse.optimize(copy.deepcopy(eager), inner="eager")
    (ids,) = batches(1, batch=6)
    for part in ids.split(2):
        (model(part) / 3).backward()
    fused(model, 2)
    want = gradients(eager, ids)
    del want["loss"]
    close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, want)
