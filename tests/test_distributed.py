"""DDP and FSDP2 over an optimised model, two processes: losses as eager's in one process, and the attention really fused.

Optimise and wrap in either order, or optimise the blocks. The CPU runs over gloo; with two GPUs `pytest -m gpu` runs the same over
NCCL, compiled by inductor.
"""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed import WORLD, Found, Run, train

RUNS = {
    "ddp": [Run("ddp", "optimize", optimizer="AdamW"), Run("ddp", "wrap"), Run("ddp", "blocks")],
    "fsdp2": [Run("fsdp2", "optimize"), Run("fsdp2", "wrap", optimizer="AdamW"), Run("fsdp2", "blocks")],
}


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


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
@pytest.mark.parametrize("kind", RUNS)
def test_losses_as_eager(kind: str, tmp_path: Path, seed: int) -> None:
    check(RUNS[kind], tmp_path, seed)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", RUNS)
def test_losses_as_eager_over_nccl(kind: str, tmp_path: Path, seed: int) -> None:
    check([replace(run, backend="nccl", inner="inductor") for run in RUNS[kind]], tmp_path, seed)
