"""The variants of docs/variants.md as FlexAttention wants them: a `mask_mod` for what may be seen, a `score_mod` for what is added.

    forms.alibi(q, k, v, create_block_mask(forms.causal(slopes), None, None, T, T), slopes)

Each is what one would write by hand, and is held to the page's plain code by tests/test_variants.py. Masks take a variant's extra inputs,
in order, and give FlexAttention a function of (batch, head, query, key).
"""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CAP = 50.0


# ---- what may be seen

def causal(*extra: Tensor) -> MaskMod:
    """A query sees keys up to its own place."""
    return lambda b, h, i, j: j <= i


def window(*, width: int) -> MaskMod:
    """The last `width` of them."""
    return lambda b, h, i, j: (j <= i) & (i - j < width)


def documents(ids: Tensor) -> MaskMod:
    """Those of its own document."""
    return lambda b, h, i, j: (j <= i) & (ids[b, i] == ids[b, j])


def prefix_lm(prefix: Tensor) -> MaskMod:
    """And all of the prefix."""
    return lambda b, h, i, j: (j <= i) | (j < prefix[b])


def padding(keep: Tensor) -> MaskMod:
    """Real keys."""
    return lambda b, h, i, j: keep[b, j]


# ---- attention

def plain(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, *extra: Tensor) -> Tensor:
    """A mask alone."""
    return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]  # a pair only with return_aux


def alibi(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, slopes: Tensor) -> Tensor:
    """A slope a head times the distance."""
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i), mask)  # type: ignore[return-value]


def softcap(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> Tensor:
    """Scores within ±CAP; a number that the closure captures is refused where FlexAttention is not compiled."""
    return flex_attention(q, k, v, lambda s, b, h, i, j: CAP * torch.tanh(s / CAP), mask)  # type: ignore[return-value]


def pair_bias(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, bias: Tensor) -> Tensor:
    """A bias of [heads, queries, keys]."""
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j], mask)  # type: ignore[return-value]


def bucket(distance: Tensor, count: int = 32, furthest: int = 128) -> Tensor:
    """T5's bucket of a distance j - i, both directions."""
    half, exact = count // 2, count // 4
    steps = distance.abs()
    far = exact + (torch.log(steps.float() / exact) / math.log(furthest / exact) * (half - exact)).to(torch.int64)
    return torch.where(distance > 0, half, 0) + torch.where(steps < exact, steps, far.clamp(max=half - 1))


def t5(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, table: Tensor) -> Tensor:
    """A number of [buckets, heads] by the distance, no scale."""
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[bucket(j - i), h], mask, scale=1.0)  # type: ignore[return-value]


def sink(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, sinks: Tensor) -> Tensor:
    """One more score in the sum: with Z the sum without it, the result shrinks by Z / (Z + exp(sink)) = sigmoid(log Z - sink)."""
    out, aux = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
    return out * torch.sigmoid(aux.lse - sinks[:, None]).unsqueeze(-1).to(out.dtype)  # type: ignore[union-attr]
