"""A mask or bias that is computed in the model is computed in the kernel: its T×T tensor is gone from the graph."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import attnfuse
from attnfuse import dynamo

LENGTH, BATCH, HEADS, WIDTH = 512, 2, 4, 32
CALLS = {
    "causal": lambda s, at, keep, ids, p: s.masked_fill(at > at[:, None], float("-inf")),
    "causal and padding": lambda s, at, keep, ids, p: s + torch.where((at <= at[:, None]) & keep[:, None, None], 0.0, torch.finfo(s.dtype).min),
    "padding": lambda s, at, keep, ids, p: s + (1.0 - keep[:, None, None].to(s.dtype)) * torch.finfo(s.dtype).min,
    "window": lambda s, at, keep, ids, p: s.masked_fill((at - at[:, None]).abs() > 16, -1e9),
    "documents": lambda s, at, keep, ids, p: torch.where(ids[:, None, :, None] == ids[:, None, None, :], s, -torch.inf),
    "alibi": lambda s, at, keep, ids, p: s + p[:, None, None] * (at - at[:, None]),
    "row and column biases": lambda s, at, keep, ids, p: s + (p[:, None] * at)[:, :, None] + (p[:, None] * at)[:, None],
    "by distance": lambda s, at, keep, ids, p: s - p[:, None, None] * torch.log1p((at - at[:, None]).abs()),
    "tril": lambda s, at, keep, ids, p: s.masked_fill(torch.ones(LENGTH, LENGTH).tril() == 0, -1e9),
    "several": lambda s, at, keep, ids, p: (30 * torch.tanh(s / 30) + p[:, None, None] * (at - at[:, None]).abs()).masked_fill(
        ~((at <= at[:, None]) & keep[:, None, None] & (ids[:, None, :, None] == ids[:, None, None, :])), -torch.inf),
}


def largest(gm: GraphModule) -> int:
    """Elements of the largest tensor that a graph makes."""
    found = [n.meta.get("example_value") for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr")]
    return max(t.numel() for some in found for t in (some if isinstance(some, (tuple, list)) else [some]) if isinstance(t, Tensor))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(before, after) of each graph that is compiled."""
    found: list[tuple[int, int]] = []
    analyse = dynamo.analyse

    def watched(gm: GraphModule, settings: attnfuse.Settings) -> tuple[GraphModule, attnfuse.Report]:
        before = largest(gm)
        out, report = analyse(gm, settings)
        found.append((before, largest(out)))
        return out, report

    monkeypatch.setattr(dynamo, "analyse", watched)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_no_square_is_left(name: str, graphs: list[tuple[int, int]], seed: int) -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        return CALLS[name](q @ k.mT * 0.2, torch.arange(LENGTH), keep, ids, p).softmax(-1) @ v

    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, WIDTH)
    keep, ids = torch.arange(LENGTH).expand(BATCH, -1) < 400, torch.arange(LENGTH).div(100, rounding_mode="floor").expand(BATCH, -1)
    got = torch.compile(written, backend="attnfuse")(q, k, v, keep, ids, torch.rand(HEADS))
    assert got.shape == q.shape
    ((before, after),) = graphs
    assert before >= BATCH * HEADS * LENGTH ** 2 and after <= BATCH * HEADS * LENGTH * WIDTH < LENGTH ** 2


def test_a_bias_that_is_given_is_loaded(graphs: list[tuple[int, int]]) -> None:
    """What has a number of its own for every score is read where it lies."""
    bias = torch.randn(HEADS, LENGTH, LENGTH)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, WIDTH)
    torch.compile(lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v, backend="attnfuse")(q, k, v, bias)
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == 1 and report.sites[0].reads == (("bias", "b1, i, j", bias.nbytes),)
    assert f"equation 1 loads bias[b1, i, j] at every score ({bias.nbytes / 1e6:.3g} MB)" in str(report)


def test_a_sum_of_two_given_tensors_is_loaded_once(graphs: list[tuple[int, int]]) -> None:
    """Two squares that the model adds up: their sum is fewer bytes a score than both, and it is there already."""
    first, second = torch.randn(2, HEADS, LENGTH, LENGTH)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, WIDTH)
    torch.compile(lambda q, k, v, a, b: (q @ k.mT + (a + b)).softmax(-1) @ v, backend="attnfuse")(q, k, v, first, second)
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == 1 and [r[2] for r in report.sites[0].reads] == [first.nbytes]
