"""Forward of attention written with `masked_fill`, bf16, on a GPU: attnfuse against inductor on the same code and PyTorch's fused kernels.

    python -m bench.forward [folder]

batch × T = 16384 tokens, hidden width 2048. Prints a table and writes forward.csv. The error is against float64 on four heads.
"""
from __future__ import annotations

from typing import Any

import torch

import attnfuse  # noqa: F401  (makes the backend known by name)
from bench.common import PEERS, add_ratios, extra_memory, forward_flops, milliseconds, peer, relative_error, sweep


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As people write it."""
    n = q.size(-2)
    keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same without a mask."""
    return (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).softmax(-1) @ v


def measure(width: int, length: int, is_causal: bool) -> dict[str, Any]:
    """One line: times in ms, TFLOP/s, ratios, memory, error."""
    batch, heads = 16384 // length, 2048 // width
    written = causal if is_causal else full
    q, k, v = (torch.randn(batch, heads, length, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch._dynamo.reset()
    runs = {"attnfuse": torch.compile(written, backend="attnfuse"), "inductor": torch.compile(written, backend="inductor")}
    calls: dict[str, Any] = {n: (lambda f=f: f(q, k, v)) for n, f in runs.items()}
    calls |= {n: peer(n, q, k, v, is_causal) for n in PEERS}
    row: dict[str, Any] = {"D": width, "T": length, "B": batch, "H": heads, "mask": "causal" if is_causal else "full", "dtype": "bfloat16"}
    with torch.no_grad():
        out = calls["attnfuse"]()
        exact = written(*(x[:1, :4].double() for x in (q, k, v)))
        row["error"] = f"{relative_error(out[:1, :4], exact):.2e}"
        row["error_cudnn"] = f"{relative_error(calls['cudnn']()[:1, :4], exact):.2e}"
        for name, call in calls.items():
            row[f"{name}_ms"] = round(milliseconds(call), 4)
        for name in ("attnfuse", "inductor"):
            row[f"{name}_MiB"] = round(extra_memory(calls[name]), 1)
    flops = forward_flops(batch, heads, length, width, is_causal)
    return add_ratios(row, flops)


if __name__ == "__main__":
    sweep("forward", measure, (64, 128, 256))
