"""DDP and FSDP2 over an optimised model, two processes: losses as eager's in one process, and the attention really fused.

Optimise and wrap in either order, or optimise the blocks. The CPU runs over gloo; with two GPUs `pytest -m gpu` runs the same over
NCCL, compiled by inductor.
"""
from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import attnfuse
from tests.distributed import WORLD, Found, Run, train
from tests.training import close, gradients

RUNS = {
    "ddp": [Run("ddp", "optimize", optimizer="AdamW"), Run("ddp", "wrap"), Run("ddp", "blocks")],
    "fsdp2": [Run("fsdp2", "optimize"), Run("fsdp2", "wrap", optimizer="AdamW"), Run("fsdp2", "blocks")],
}


GLOO = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch was built without gloo")


def check(runs: list[Run], folder: Path, seed: int) -> None:
    mp.spawn(train, args=(runs, str(folder), seed), nprocs=WORLD)
    every = [Found(**x) for x in json.loads((folder / "found.json").read_text())]
    assert len(every) == len(runs)
    for run, found in zip(runs, every, strict=True):
        print(run, found)
        assert found.rewritten >= 1 and found.left == 0
        assert len(set(found.losses)) == run.steps
        torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(found.eager), rtol=1e-3, atol=0)
        if run.kind == "ddp" and run.order != "blocks":
            assert found.graphs > 1, "one bucket: nothing was cut"


@GLOO
@pytest.mark.parametrize("kind", RUNS)
def test_losses_as_eager(kind: str, tmp_path: Path, seed: int) -> None:
    check(RUNS[kind], tmp_path, seed)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", RUNS)
def test_losses_as_eager_over_nccl(kind: str, tmp_path: Path, seed: int) -> None:
    check([replace(run, backend="nccl", inner="inductor") for run in RUNS[kind]], tmp_path, seed)


class Biased(nn.Module):
    """Attention with a trained bias, larger than a bucket of DDP, inside the chain."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(64, 192), nn.Parameter(torch.randn(4, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + ((q @ k.transpose(-1, -2) * 0.25 + self.bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


@GLOO
@pytest.mark.parametrize("cut", [True, False])
def test_a_chain_that_a_bucket_cuts_is_left_as_written(cut: bool, tmp_path: Path, seed: int) -> None:
    """And whole, so rewritten, where Dynamo is told not to cut; the gradients are eager's in both."""
    eager = nn.Sequential(Biased(264), Biased(264))
    x = torch.randn(1, 264, 64)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        inner = copy.deepcopy(eager)
        # An inner compiler of its own, for a report of its own.
        model = attnfuse.optimize(DistributedDataParallel(inner, bucket_cap_mb=1), inner=lambda gm, inputs: gm.forward)
        with torch._dynamo.config.patch(optimize_ddp=cut):
            close(gradients(inner, x, call=model), gradients(eager, x), rtol=1e-3)
        report = attnfuse.last_report(model)
        assert report is not None and any(not s.rewritten for s in report.sites) == cut, str(report)
    finally:
        dist.destroy_process_group()
