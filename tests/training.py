"""What the tests of training share: a small causal language model in plain PyTorch, and the statistics of a dropout mask."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnfuse


class Block(nn.Module):
    """Causal attention with dropout of the weights, then a feed-forward layer; x [batch, tokens, width] → the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        weights = self.drop(scores.masked_fill(~seen, float("-inf")).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    """A language model over bytes; ids [batch, tokens] → the mean loss of the next one.

    `reentrant` says which kind of activation checkpointing each block runs under; None is none.
    """

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, dropout: float = 0.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 64, bias=False)
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids[:, :-1]) + self.places(torch.arange(ids.shape[1] - 1, device=ids.device))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids[:, 1:].flatten())


def batches(steps: int, batch: int = 4, length: int = 25, device: str = "cpu") -> list[Tensor]:
    """Sequences with something to learn: each counts upwards from a random start by a random step."""
    start, step = torch.randint(0, 64, (steps, batch, 1)), torch.randint(1, 4, (steps, batch, 1))
    return list(((start + step * torch.arange(length)) % 64).to(device))


def gradients(model: nn.Module, *inputs: Tensor, call: nn.Module | None = None) -> dict[str, Tensor]:
    """The loss (the mean square of what is not a number yet) and the gradient of every parameter; `call` wraps the model."""
    model.zero_grad(set_to_none=True)
    out = (call or model)(*inputs)
    loss = out.square().mean() if out.dim() else out
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


def fused(model: nn.Module, sites: int) -> None:
    """Fail unless at least so many attentions of an optimised model were rewritten, and none was refused."""
    report = attnfuse.last_report(model)
    assert report is not None and report.rewritten == len(report.sites) >= sites, str(report)


def close(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Fail where the gradients of two models differ, or one lacks some."""
    assert got.keys() == want.keys() and any(bool(g.abs().sum() > 0) for g in want.values())
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


# ---- dropout

def dropping(p: float, layers: int = 1) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attentions over the same operands that drop weights, whether in training or not; stacked."""
    def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([F.dropout((q @ k.transpose(-1, -2)).softmax(-1), p, training=True) @ v for _ in range(layers)])
    return chain


def revealing(batch: int, heads: int, tokens: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Operands with which a dropped weight shows: equal scores make every weight 1/tokens, and the values are the identity."""
    q = torch.zeros(batch, heads, tokens, 8, **options)
    return q, q.clone(), torch.eye(tokens, **options).repeat(batch, heads, 1, 1)


def kept(out: Tensor, p: float) -> Tensor:
    """The mask, 0 and 1, of a result over `revealing` operands; fails where the kept weights are not 1/(1-p) times as large."""
    scaled = out.double() * out.shape[-1] * (1 - p)
    mask = scaled.round()
    torch.testing.assert_close(scaled, mask, rtol=0, atol=1e-5)
    assert bool(((mask == 0) | (mask == 1)).all())
    return mask


def check_mask(mask: Tensor, p: float) -> None:
    """Fail unless a mask (…, i, j) looks like independent draws, kept with probability 1-p; by chance once in 10⁵.

    Looked at: the mean; the means of the slices of every axis and pair of axes (rows, heads, rows of a head …), whose squares
    add up to a chi-square; the correlation with itself at every distance in memory, which is where a repeated head, row,
    layer or step shows; and the correlation of (i, j) with (j, i).
    """
    z = (mask - (1 - p)) / math.sqrt(p * (1 - p))
    n = z.numel()
    assert abs(float(z.mean())) * math.sqrt(n) < 6, f"kept {float(mask.mean())}, expected {1 - p}"
    for a in range(z.dim()):
        for b in range(a, z.dim()):
            means = z.mean([d for d in range(z.dim()) if d not in (a, b)]).flatten()
            square = float((means ** 2).sum()) * n / means.numel()
            assert abs(square - means.numel()) < 6 * math.sqrt(2 * means.numel()) + 20, f"axes {a}, {b}: {square} of {means.numel()}"
    spectrum = torch.fft.rfft(z.flatten()).abs() ** 2
    lags = torch.fft.irfft(spectrum, n)[1:].abs() / math.sqrt(n)
    assert float(lags.max()) < 7, f"correlated at a distance of {int(lags.argmax()) + 1} elements: {float(lags.max())} deviations"
    above = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(1)
    mirrored = (z * z.transpose(-1, -2))[..., above]
    assert abs(float(mirrored.mean())) * math.sqrt(mirrored.numel()) < 6, "(i, j) goes with (j, i)"


def masked_attention(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """The attention whose weights are multiplied by a given factor, in float64."""
    return ((q.double() @ k.double().transpose(-1, -2)).softmax(-1) * factor) @ v.double()
