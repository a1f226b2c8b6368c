"""What all tests share: a clean compiler, small models, and a stand-in for the passes where they are not the subject."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from attnfuse.report import PassRecord, Report, Site
from attnfuse.settings import NAMES, PREFIX, Settings
from tests.seeds import draw

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # several workers share the cores

for _name in NAMES:  # a developer's environment must not decide what the tests see
    os.environ.pop(PREFIX + _name.upper(), None)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Dynamo keeps compiled code for the process: without this, one test would run another's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's own (`seeds.draw`), and set."""
    value = draw(request.node.nodeid)
    torch.manual_seed(value)
    return value


class Attention(nn.Module):
    """Causal attention as three products and a masked softmax; x [batch, tokens, width] → the same shape."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


class Stack(nn.Module):
    """Two attentions, a counter that each call raises, dropout, and, where asked for, a graph break between the layers."""

    calls: Tensor

    def __init__(self, break_graph: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.break_graph = break_graph
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = x + self.drop(layer(x))
            if self.break_graph:
                torch._dynamo.graph_break()
        return x


@pytest.fixture
def stack() -> Stack:
    """A `Stack` in evaluation mode."""
    return Stack().eval()


@pytest.fixture
def x() -> Tensor:
    """[2, 8, 16]"""
    return torch.randn(2, 8, 16)


Passes = Callable[[GraphModule, Settings], tuple[GraphModule, Report]]


@pytest.fixture
def set_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Passes], None]:
    """Put a function in the place of `passes.pipeline.run`."""
    from attnfuse.passes import pipeline
    return lambda run: monkeypatch.setattr(pipeline, "run", run)


@pytest.fixture
def counted(set_passes: Callable[[Passes], None]) -> list[GraphModule]:
    """Replace the passes by ones that change nothing and report one site a softmax; the list fills with the graphs."""
    seen: list[GraphModule] = []

    def run(gm: GraphModule, settings: Settings) -> tuple[GraphModule, Report]:
        seen.append(gm)
        found = [n for n in gm.graph.nodes if "softmax" in str(n.target)]
        sites = [Site(True, equation="out = p v", node=n.name, module="layers", source="conftest.py:1") for n in found]
        return gm, Report(sites=sites, passes=[PassRecord("find", 0.001)], snapshots=[("captured", str(gm.graph)), ("find", "same")])

    set_passes(run)
    return seen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files and generated pages instead of comparing")


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update"))
