"""Backward of attention written with `masked_fill`, bf16, on a GPU: attnfuse against inductor on the same code and PyTorch's fused kernels.

    python -m bench.backward [folder]

batch × T = 16384 tokens, hidden width 2048. Prints a table and writes backward.csv. Times are those of `torch.autograd.grad` alone, the
forward pass done before. The error is the largest of the three gradients', against float64 on four heads.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import attnfuse  # noqa: F401  (makes the backend known by name)
from bench.common import add_ratios, extra_memory, forward_flops, milliseconds, peer, relative_error, sweep
from bench.forward import causal, full

PEERS = ("cudnn", "fa2")


def gradients(forward: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], grad_out: torch.Tensor) -> Callable[[], Any]:
    """A call of the backward pass alone."""
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def error(written: Callable[..., torch.Tensor], grads: Any, leaves: tuple[torch.Tensor, ...], grad_out: torch.Tensor) -> float:
    """The largest relative error of the three gradients, on four heads of the first sequence."""
    part = [x.detach()[:1, :4].double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(written(*part), part, grad_out[:1, :4].double())
    return max(relative_error(got[:1, :4], want) for got, want in zip(grads, exact, strict=True))


def measure(width: int, length: int, is_causal: bool) -> dict[str, Any]:
    """One line: times in ms, TFLOP/s, ratios, memory, error."""
    batch, heads = 16384 // length, 2048 // width
    written = causal if is_causal else full
    leaves = tuple(torch.randn(batch, heads, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad_out = torch.randn_like(leaves[0])
    torch._dynamo.reset()
    row: dict[str, Any] = {"D": width, "T": length, "B": batch, "H": heads, "mask": "causal" if is_causal else "full", "dtype": "bfloat16"}
    forwards: dict[str, Callable[[], torch.Tensor]] = {n: peer(n, *leaves, is_causal) for n in PEERS}
    forwards |= {n: (lambda f=torch.compile(written, backend=n): f(*leaves)) for n in ("attnfuse", "inductor")}
    for name, forward in forwards.items():
        call = gradients(forward, leaves, grad_out)
        if name in ("attnfuse", "cudnn"):
            row["error" if name == "attnfuse" else f"error_{name}"] = f"{error(written, call(), leaves, grad_out):.2e}"
        row[f"{name}_ms"] = round(milliseconds(call), 4)
        if name in ("attnfuse", "inductor"):
            row[f"{name}_MiB"] = round(extra_memory(call), 1)
        del call
    return add_ratios(row, 2.5 * forward_flops(batch, heads, length, width, is_causal))


if __name__ == "__main__":
    sweep("backward", measure, (128, 64, 256))
