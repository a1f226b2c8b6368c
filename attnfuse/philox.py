"""Philox-4x32-10 in plain PyTorch: the same random bits as ``tl.philox``, so that every executor drops the same weights.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), the 4x32 generator with 10 rounds.
The counter of a weight is (j, i, linear batch index, dropout stream) and the key is the 64-bit seed, so a tile of any
size and shape, in forward or backward, finds the same mask again.
"""
from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor | int) -> torch.Tensor:
    """First of the four 32-bit words for 32-bit counters (int64 tensors that broadcast); an int64 tensor in [0, 2³²).

    `seed` is an int64 tensor of one element.
    """
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2 = c0 & _MASK, c1 & _MASK, c2 & _MASK
    for _ in range(10):
        # The 64 bits of a product are right though int64 overflows: torch's integers wrap. Shifted, its sign fills bits that are masked.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ key0).bitwise_and_(_MASK), ((p0 >> 32) ^ c3 ^ key1).bitwise_and_(_MASK)
        c1, c3 = p1.bitwise_and_(_MASK), p0.bitwise_and_(_MASK)
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0


def keep_factor(seed: torch.Tensor, stream: int, p: float, batch: torch.Tensor, i: torch.Tensor, j: torch.Tensor,
                dtype: torch.dtype) -> torch.Tensor:
    """Dropout's factor for the weights at (batch, i, j): 0 with probability p, else 1/(1-p); all 0 for p = 1."""
    if p >= 1.0:
        shape = torch.broadcast_shapes(batch.shape, i.shape, j.shape)
        return torch.zeros(shape, dtype=dtype, device=i.device)
    kept = philox(seed, j, i, batch, stream) >= threshold(p)
    return kept.to(dtype) / (1.0 - p)


def threshold(p: float) -> int:
    """Random words below this are dropped."""
    return min(int(round(p * 2 ** 32)), 2 ** 32 - 1)
