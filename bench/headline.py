"""The attention of one GPT-2 medium layer, forward and backward, float16, on a GPU: what plain eager code costs and what it becomes.

    python -m bench.headline [folder]

Batch 64, 16 heads, 1024 tokens, head dimension 64, causal mask, with and without dropout of 0.1. One step is the forward pass and the
gradients of queries, keys and values. Prints a table and writes headline.csv; memory is the peak beyond what is there before the step.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

import attnfuse  # noqa: F401  (makes the backend known by name)
from bench.common import PEERS, extra_memory, header, milliseconds, save

BATCH, HEADS, LENGTH, WIDTH = 64, 16, 1024, 64


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float) -> torch.Tensor:
    """Attention as it is written in models."""
    keep = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-1, -2) * WIDTH ** -0.5
    weights = scores.masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1)
    return F.dropout(weights, p, training=True) @ v


def fused(name: str) -> Callable[..., torch.Tensor]:
    """PyTorch's fused attention with one backend forced."""
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float) -> torch.Tensor:
        with sdpa_kernel(PEERS[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
    return call


def step(forward: Callable[..., torch.Tensor], leaves: list[torch.Tensor], p: float, grad_out: torch.Tensor) -> Callable[[], Any]:
    """One forward and backward pass."""
    return lambda: torch.autograd.grad(forward(*leaves, p), leaves, grad_out)


def measure(p: float) -> list[dict[str, Any]]:
    """A row for each way to run it."""
    leaves = [torch.randn(BATCH, HEADS, LENGTH, WIDTH, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
    grad_out = torch.randn_like(leaves[0])
    torch._dynamo.reset()
    ways: dict[str, Callable[..., torch.Tensor]] = {n: torch.compile(attention, backend=n) for n in ("attnfuse", "inductor")}
    ways |= {"eager": attention, "fa2": fused("fa2"), "cudnn": fused("cudnn")}
    rows = []
    for name, forward in ways.items():
        call = step(forward, leaves, p, grad_out)
        call()
        rows.append({"B": BATCH, "H": HEADS, "T": LENGTH, "D": WIDTH, "dtype": "float16", "mask": "causal", "dropout": p, "way": name,
                     "ms": round(milliseconds(call), 3), "extra_GiB": round(extra_memory(call) / 1024, 2)})
    best = min(r["ms"] for r in rows if r["way"] in ("fa2", "cudnn"))
    for row in rows:
        row["best_peer/this"] = round(best / row["ms"], 3)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    print(header())
    save("headline", [row for p in (0.0, 0.1) for row in measure(p)], Path(sys.argv[1]) if len(sys.argv) > 1 else None)
