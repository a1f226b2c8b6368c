"""Rows of the table of spellings (tests/cases.py) with NaN that is repaired behind the softmax. Masks leave a query without a key."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from attnfuse.refusal import Reason
from tests.cases import B, CASES, H, LK, LQ, case, plus, qkv, rn, square, t

__all__ = ["CASES"]
FILLED = "where(m[b0, 0, i, j], -inf, s)"
GATED = plus(qkv, lambda g: mask(g), lambda g: rn(g, H, 1, 1))


def mask(g: torch.Generator) -> Tensor:
    """True where a key is hidden; the third query sees none, the last one all."""
    m = torch.rand(B, 1, LQ, LK, generator=g) > 0.5
    m[:, :, 2], m[:, :, -1] = True, False
    return m


MASKED = plus(qkv, mask)


def weights(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """NaN in a row that sees no key."""
    return (q @ t(k)).masked_fill(m, -math.inf).softmax(-1)


def exponentials(s: Tensor) -> Tensor:
    """Of what is left when the maximum of a row is subtracted."""
    return (s - s.amax(-1, keepdim=True)).exp()


@case(FILLED, MASKED, rows="repaired")
def nan_to_num(q, k, v, m):
    return torch.nan_to_num(weights(q, k, m)) @ v


@case(FILLED, MASKED, rows="repaired")
def nan_to_num_in_place(q, k, v, m):
    return (weights(q, k, m) * 1.0).nan_to_num_(nan=0.0, posinf=1.0) @ v


@case(FILLED, MASKED, rows="repaired")
def nan_filled(q, k, v, m):
    p = weights(q, k, m)
    return p.masked_fill(torch.isnan(p), 0.0) @ v


@case(FILLED, MASKED, rows="repaired")
def nan_filled_in_place(q, k, v, m):
    p = weights(q, k, m) * 1.0
    p.masked_fill_(p.isnan(), 0.0)
    return p @ v


@case(FILLED, MASKED, rows="repaired")
def nan_chosen(q, k, v, m):
    p = weights(q, k, m)
    return torch.where(torch.isnan(p), torch.zeros_like(p), p) @ v


@case(FILLED, MASKED, rows="repaired")
def what_differs_from_itself_is_set(q, k, v, m):
    p = weights(q, k, m) * 1.0
    p[p != p] = 0
    return p @ v


@case(FILLED, MASKED, rows="repaired")
def only_what_is_finite(q, k, v, m):
    p = weights(q, k, m)
    return torch.where(p.isfinite(), p, 0.0) @ v


@case(FILLED, MASKED, rows="repaired")
def rows_with_a_nan_are_filled(q, k, v, m):
    p = weights(q, k, m)
    return p.masked_fill(p.isnan().any(-1, keepdim=True), 0.0) @ v


@case(FILLED, MASKED, rows="repaired")
def rows_of_nan_are_filled(q, k, v, m):
    p = weights(q, k, m)
    return p.masked_fill(p.isnan().all(-1, keepdim=True), 0.0) @ v


@case(FILLED, MASKED, weight="where(all[b0, 0, i, 0], 0, p)")
def rows_without_a_key_are_filled(q, k, v, m):
    """no question about the weights: the mask says which rows they are"""
    return weights(q, k, m).masked_fill(m.all(-1, keepdim=True), 0.0) @ v


@case("where(m[b0, i, j], -inf, s)", plus(qkv, lambda g: mask(g)[:, 0]), weight="where(all[b0, i], 0, p)")
def rows_without_a_key_are_set(q, k, v, m):
    p = weights(q, k, m[:, None]).transpose(1, 2) * 1.0
    p[m.all(-1)] = 0.0
    return p.transpose(1, 2) @ v


@case("s + bias[i, j]", plus(qkv, lambda g: torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0, 0.5, 0.0])[:, None].repeat(1, LK)), rows="repaired", train=False)
def every_kind_of_row_is_repaired(q, k, v, bias):
    return torch.nan_to_num((q @ t(k) + bias).softmax(-1)) @ v


def odd(q: Tensor) -> Tensor:
    """With a row of NaN, one of infinities, and one that is infinite somewhere."""
    q = q.clone()
    q[..., 1, :], q[..., 2, :], q[..., 4, 3] = math.nan, math.inf, -math.inf
    return q


@case("s", lambda g: (odd((x := qkv(g))[0]), *x[1:]), rows="repaired", train=False)
def rows_of_odd_queries_are_repaired(q, k, v):
    return torch.nan_to_num((q @ t(k)).softmax(-1)) @ v


@case("where(j <= i, 0.25 * s, -inf)", lambda g: (odd((x := square(g))[0]), *x[1:]), rows="repaired", train=False)
def rows_of_odd_queries_are_repaired_under_a_causal_mask(q, k, v):
    return torch.nan_to_num((q @ t(k) * 0.25).masked_fill(torch.ones(LK, LK, dtype=torch.bool).triu(1), -math.inf).softmax(-1)) @ v


@case(FILLED, MASKED, weight="where(j <= i, 2 * p, 0)", rows="repaired")
def repaired_behind_finite_factors(q, k, v, m):
    keep = torch.ones(LQ, LK, dtype=torch.bool).tril()
    return torch.nan_to_num((weights(q, k, m) * 2.0).masked_fill(~keep, 0.0)) @ v


@case(FILLED, MASKED, weight="p * where(j <= i, 1, 0)", rows="repaired")
def repaired_before_finite_factors(q, k, v, m):
    return torch.nan_to_num(weights(q, k, m)) * torch.ones(LQ, LK).tril() @ v


@case(FILLED, MASKED, rows="repaired")
def repaired_by_hand(q, k, v, m):
    e = exponentials((q @ t(k)).masked_fill(m, -math.inf))
    return torch.nan_to_num(e / e.sum(-1, keepdim=True)) @ v


@case(inputs=MASKED, reason=Reason.WEIGHT_PROGRAM)
def repaired_by_another_number(q, k, v, m):
    return torch.nan_to_num(weights(q, k, m), nan=0.1) @ v


@case(inputs=GATED, reason=Reason.WEIGHT_PROGRAM)
def repaired_behind_a_gate(q, k, v, m, gate):
    """a gate that is NaN would be repaired too"""
    return torch.nan_to_num(weights(q, k, m) * gate) @ v


@case(inputs=GATED, reason=Reason.WEIGHT_PROGRAM)
def repaired_behind_a_gate_within_bounds(q, k, v, m, gate):
    return torch.nan_to_num(weights(q, k, m) * gate.sigmoid()) @ v


@case(inputs=GATED, reason=Reason.WEIGHT_PROGRAM)
def repaired_before_a_gate(q, k, v, m, gate):
    """a gate that is infinite makes NaN of 0"""
    return torch.nan_to_num(weights(q, k, m)) * gate @ v


@case(inputs=MASKED, reason=Reason.WEIGHT_PROGRAM)
def repaired_behind_a_factor_that_overflows(q, k, v, m):
    return torch.nan_to_num(weights(q, k, m) * 3e38 * 3.0, posinf=1.0) @ v


@case(inputs=MASKED, reason=Reason.WEIGHT_PROGRAM, train=False)
def some_keys_repaired(q, k, v, m):
    p = weights(q, k, m)
    return torch.where(p.isnan() & (torch.arange(LK) > 4), 0.0, p) @ v


@case(inputs=MASKED, reason=Reason.WEIGHT_PROGRAM)
def other_rows_repaired(q, k, v, m):
    """what is NaN in the next row says nothing of this one"""
    p = weights(q, k, m)
    return torch.where(p.isnan().any(-1, keepdim=True).roll(1, -2), 0.0, p).nan_to_num() @ v


@case(inputs=qkv, reason=Reason.WEIGHT_PROGRAM)
def repaired_where_exponentials_overflow(q, k, v):
    """inf / inf of one key is repaired and the others are 0, where a softmax is what it is"""
    e = (q @ t(k) * 30.0).exp()
    return torch.nan_to_num(e / e.sum(-1, keepdim=True)) @ v


@case(reason=Reason.WEIGHT_PROGRAM)
def weights_chosen_by_their_scores(q, k, v):
    s = q @ t(k)
    return torch.where(s < 0, 0.0, s.softmax(-1)) @ v


@case(reason=Reason.WEIGHT_PROGRAM)
def weights_chosen_by_their_size(q, k, v):
    p = (q @ t(k)).softmax(-1)
    return torch.where(p > 0.1, p, 0.0) @ v


@case("s", rows="repaired")
def weights_that_are_not_less_than_nothing(q, k, v):
    """NaN is"""
    p = (q @ t(k)).softmax(-1)
    return torch.where(p >= 0, p, 0.0) @ v
