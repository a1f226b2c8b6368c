"""Attention weights that are wanted too, by tiles in plain PyTorch: from the row statistics of a forward pass, for any spec.

    weights[b…, i, j] = weight program of exp(score - maximum - log of the sum)

The tensor that is asked for is the only one of its size: the gradient that arrives at it is walked in tiles like everything
else. Source of the gradient: with P the softmax and dP what arrives at it, that of the scores is P · (dP - Σ_j P · dP).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .elements import Box
from .program import WEIGHT, Expr, loads
from .spec import AttentionSpec
from .tiling import Call, allocate_weights, key_tiles, lengths, omitted, prepare, row_tiles, run, split_dims
from .walker import Normalised, RowGradients, accumulate, normaliser, place, score_of, zeros


def forward(spec: AttentionSpec, operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int],
            seed: torch.Tensor | None = None) -> torch.Tensor:
    """The weights, shape (batch…, i, j), of `spec.out_dtype`, in memory in the order `spec.out_order`.

    Args:
        spec: the attention, with the weight program, dtype and order of what is wanted.
        operands, sizes, seed: as of `reference.reference`; with the seed of the attention the same weights are dropped.
        stats: the row statistics of the attention, from any executor.

    Raises:
        ValueError: wrong number of operands or sizes, or a missing seed.
    """
    call = prepare(spec, operands, sizes, seed)
    out = allocate_weights(spec, sizes, operands[spec.query.operand])
    split_out, statistics = split_dims(call, out), split_dims(call, stats)
    for box, step in row_tiles(call) if call.sizes["j"] else ():
        given = statistics[place(call, box)].to(call.dtype)
        rows = Normalised(*normaliser(call.spec, given), torch.zeros_like(given[..., :1]))
        query = call.rectangle(call.spec.query, box, ("i", "d"))
        unseen = rows.unseen(call)
        for tile, program in key_tiles(call, box, step, everything=unseen):
            key = call.rectangle(call.spec.key, tile, ("j", "d"))
            score = score_of(call, program, tile, query, key, {}).expand(lengths(tile, call.score_axes))
            _store(call, split_out, tile, rows.weights(score))
        for tile, _ in () if unseen else omitted(call, box, step):
            _store(call, split_out, tile, torch.zeros(lengths(tile, call.score_axes), dtype=call.dtype, device=call.device))
    return out


def _store(call: Call, out: torch.Tensor, tile: Box, probability: torch.Tensor) -> None:
    """Write what the weight program makes of a tile of softmax weights; a weight of 0 too may be multiplied by NaN."""
    weight = call.spec.weight
    if weight != WEIGHT:
        probability = run(call, weight, tile, {WEIGHT: probability}).expand(probability.shape)
    out[(*place(call, tile), slice(*tile["j"]))] = probability.to(out.dtype)


# ---- backward

@dataclass
class _WeightGradients(RowGradients):
    """What backward knows of one tile of queries, where it is the weights whose gradient is given."""

    grad: torch.Tensor

    def arrived(self, call: Call, tile: Box) -> torch.Tensor:  # noqa: D102
        return self.grad[..., slice(*tile["j"])].to(call.dtype)


def backward(spec: AttentionSpec, grad: torch.Tensor, operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int],
             seed: torch.Tensor | None, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of the operands that `needs` names, each contiguous, of the operand's shape and dtype; None elsewhere.

    Args:
        spec, operands, stats, sizes, seed: as of `forward`.
        grad: gradient of the weights, (batch…, i, j), of any strides.
        needs: for each operand whether its gradient is wanted.

    Raises:
        ValueError: as `forward`; or a program with an operation that has no derivative.
    """
    call = prepare(spec, operands, sizes, seed)
    arrived, statistics = split_dims(call, grad), split_dims(call, stats)

    def rows(box: Box) -> RowGradients:
        given, query = statistics[place(call, box)].to(call.dtype), call.rectangle(call.spec.query, box, ("i", "d"))
        return _WeightGradients(*normaliser(call.spec, given), torch.zeros_like(given[..., :1]), query, zeros(query), arrived[place(call, box)])

    return accumulate(call, operands, needs, rows, exact=True)


def reads(spec: AttentionSpec) -> frozenset[int]:
    """The operands that weights depend on: all but the values, unless those have another role too."""
    programs: tuple[Expr, ...] = (spec.score, spec.weight, *spec.extra_terms)
    captured = (int(x.attr) for e in programs for x in loads(e))  # type: ignore[arg-type]  # a load names its operand
    return frozenset({spec.query.operand, spec.key.operand, *captured})
