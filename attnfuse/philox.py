"""Philox-4x32-7 in plain PyTorch: the same random bits as ``tl.philox``, so that every executor drops the same weights.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), the 4x32 generator; 7 rounds are
the fewest that pass all of BigCrush there. The key is the 64-bit seed. One counter (linear batch index, j', dropout stream, i')
gives four words and so eight numbers of 16 bits, for eight weights: i' is i without bit 3, which picks between words, and j' is j
without bit 3, likewise, and bit 0, which picks the half. In the tensor cores' layouts a thread holds all eight where queries are
the rows of a tile, four of them where keys are, so the generator runs once for them; and a tile of any size and shape, in forward
or backward, finds the same mask again.
"""
from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7


def philox(seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor | int, c3: torch.Tensor,
           rounds: int = ROUNDS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit words for 32-bit counters (int64 tensors that broadcast); int64 tensors in [0, 2³²).

    `seed` is an int64 tensor of one element.
    """
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = c0 & _MASK, c1 & _MASK, torch.as_tensor(c2, device=c0.device) & _MASK, c3 & _MASK
    for _ in range(rounds):
        # The 64 bits of a product are right though int64 overflows: torch's integers wrap. Shifted, its sign fills bits that are masked.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ key0).bitwise_and_(_MASK), ((p0 >> 32) ^ c3 ^ key1).bitwise_and_(_MASK)
        c1, c3 = p1.bitwise_and_(_MASK), p0.bitwise_and_(_MASK)
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def numbers(seed: torch.Tensor, stream: int, batch: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """The random number of the weight at (batch, i, j), an int64 tensor in [0, 2¹⁶)."""
    a, b, c, d = philox(seed, batch, (j >> 4 << 2) | (j >> 1 & 3), stream, (i >> 4 << 3) | (i & 7))
    odd_i, odd_j = (i & 8) != 0, (j & 8) != 0
    word = torch.where(odd_j, torch.where(odd_i, d, c), torch.where(odd_i, b, a))
    return torch.where(j & 1 != 0, word & 0xFFFF, word >> 16)


def keep_factor(seed: torch.Tensor, stream: int, p: float, batch: torch.Tensor, i: torch.Tensor, j: torch.Tensor,
                dtype: torch.dtype) -> torch.Tensor:
    """Dropout's factor for the weights at (batch, i, j): 0 with the probability p, else what keeps the mean; all 0 for p = 1."""
    if p >= 1.0:
        shape = torch.broadcast_shapes(batch.shape, i.shape, j.shape)
        return torch.zeros(shape, dtype=dtype, device=i.device)
    kept = numbers(seed, stream, batch, i, j) >= threshold(p)
    return kept.to(dtype) * scale(p)


def threshold(p: float) -> int:
    """Random numbers below this are dropped: p to the nearest multiple of 2⁻¹⁶, and below 1 where p is."""
    return min(round(p * 2 ** 16), 2 ** 16 - 1)


def scale(p: float) -> float:
    """What the kept weights are multiplied by, so that the mean is kept exactly."""
    return 1.0 / (1.0 - threshold(p) / 2 ** 16)
