"""One process of a group that trains optimised models: `train`, for tests/test_distributed.py, by DDP or FSDP2, over gloo or NCCL.

Every process takes its share of each batch; the mean of their losses is compared with eager on the whole batch in one process.
"""
from __future__ import annotations

import copy
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import attnfuse
from attnfuse import dynamo
from tests.training import Gpt, batches

WORLD = 2
WIDTH = 192
"""Wide enough that a block has more parameters than one bucket of DDP takes."""


@dataclass(frozen=True)
class Run:
    """One model's training.

    Attributes:
        kind: how parameters are kept: whole everywhere (DDP), or in shards (FSDP2).
        order: ``"optimize"`` first, then wrap; ``"wrap"`` first; ``"blocks"``: optimise each block, then wrap the whole.
        backend: ``"gloo"`` on the CPU, ``"nccl"`` on as many GPUs as processes.
        optimizer: ``"SGD"`` or ``"AdamW"``.
    """

    kind: Literal["ddp", "fsdp2"]
    order: Literal["optimize", "wrap", "blocks"]
    backend: str = "gloo"
    optimizer: str = "SGD"
    inner: str = "eager"
    steps: int = 4


@dataclass(frozen=True)
class Found:
    """What came of it: the losses, those of eager, and how many attentions were rewritten, and left, in how many graphs."""

    losses: list[float]
    eager: list[float]
    graphs: int
    rewritten: int
    left: int


def wrapped(model: Gpt, run: Run, device: torch.device) -> nn.Module:
    """The model, optimised and distributed in the order asked for."""
    if run.order == "optimize":
        attnfuse.optimize(model, inner=run.inner)
    elif run.order == "blocks":
        for block in model.blocks:
            attnfuse.optimize(block, inner=run.inner)
    outer: nn.Module = model
    if run.kind == "ddp":
        # The gradients go out in several buckets, between which Dynamo cuts the graph.
        outer = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None, bucket_cap_mb=1)
    else:
        mesh = init_device_mesh(device.type, (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if run.order == "wrap":
        attnfuse.optimize(outer, inner=run.inner)
    return outer


def optimizer_of(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """AdamW or SGD, at rates at which the losses move."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3) if run.optimizer == "AdamW" else torch.optim.SGD(model.parameters(), lr=0.2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """One step; its loss."""
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def one(run: Run, rank: int, device: torch.device, seed: int) -> Found:
    """Train one model, in this process its share, and eager on everything."""
    torch._dynamo.reset()
    for backend in dynamo._backends.values():
        backend.reports.clear()
    torch.manual_seed(seed)
    ids = [x.to(device) for x in batches(run.steps, batch=2 * WORLD)]
    eager = Gpt(WIDTH).to(device)
    model = wrapped(copy.deepcopy(eager), run, device)
    optimizer, single = optimizer_of(model, run), optimizer_of(eager, run)
    losses, want = [], []
    for batch in ids:
        mean = step(model, optimizer, batch.chunk(WORLD)[rank]) / WORLD
        dist.all_reduce(mean)
        losses.append(float(mean))
        want.append(float(step(eager, single, batch)))
    reports = [r for backend in dynamo._backends.values() for r in backend.reports]
    sites = [s for r in reports for s in r.sites]
    return Found(losses, want, len(reports), sum(s.rewritten for s in sites), sum(not s.rewritten for s in sites))


def train(rank: int, runs: list[Run], folder: str, seed: int) -> None:
    """Do all the runs in this process; the first one writes what it found to a file of the folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    backend = runs[0].backend
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    try:
        found = [asdict(one(run, rank, device, seed)) for run in runs]
        if rank == 0:
            Path(folder, "found.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
