"""Rows of the table of spellings (tests/cases.py) whose weights are read elsewhere too, and what looks like it."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnfuse.refusal import Reason
from tests.cases import B, D, DV, H, LK, LQ, case, plus, qkv, rn, t
from tests.cases_weights import CASES, PARTIAL

__all__ = ["CASES"]

S, P = "s / 4", ("p",)


def weighed(q: Tensor, k: Tensor) -> Tensor:
    """Plain weights."""
    return (q @ t(k) / 4.0).softmax(-1)


# ---- read by anything

@case(S, given=P)
def weights_returned(q, k, v):
    p = weighed(q, k)
    return p @ v, p


@case(S, given=P)
def weights_averaged_over_heads(q, k, v):
    p = weighed(q, k)
    return p @ v, p.mean(1)


@case(S, given=P)
def weights_detached(q, k, v):
    p = weighed(q, k)
    return p @ v, p.detach().amax(), (p > 0.1).float().mean()


@case(S, given=P)
def weights_read_without_gradient(q, k, v):
    p = weighed(q, k)
    with torch.no_grad():
        most = p.max(-1).values
    return p @ v, most


@case(S, given=P)
def entropy_of_the_weights(q, k, v):
    p = weighed(q, k)
    o = p @ v
    return o, -(p * (p + 1e-9).log()).sum(-1)


@case(S)
def weights_of_which_nothing_comes(q, k, v):
    p = weighed(q, k)
    p.mean(1).clamp(max=0.5)
    return p @ v


@case("2 * s", weight="3 * p", given=P)
def weights_of_factors(q, k, v):
    p = (q @ t(k * 2.0)).softmax(-1)
    return p @ (v * 3.0).contiguous(), p


# ---- at several places

@case(S, PARTIAL, weight="where(m[b0, 0, i, j], 0, p)", given=("p", "where(m[b0, 0, i, j], 0, p)"))
def weights_before_and_after_a_mask(q, k, v, m):
    p = weighed(q, k)
    w = p.masked_fill(m, 0.0)
    return w @ v, p, w.sum(-1)


@case(S, weight="where(j <= 5, p, 0)", given=P)
def weights_before_a_mask(q, k, v):
    p = weighed(q, k)
    return p.masked_fill(torch.arange(LK) > 5, 0.0) @ v, p


@case(S, plus(qkv, lambda g: rn(g, H, 1, 1)), weight="p * sigmoid(g[b1, 0, 0])", given=("p", "p * sigmoid(g[b1, 0, 0])"))
def weights_before_and_after_a_gate(q, k, v, g):
    p = weighed(q, k)
    w = p * g.sigmoid()
    return w @ v, p.square(), w


@case("where(i == 2, -inf, s / 4)", rows="repaired", train=False, given=("p", "p"))
def weights_before_and_after_a_repair(q, k, v):
    p = (q @ t(k) / 4.0).masked_fill(torch.arange(LQ)[:, None] == 2, -math.inf).softmax(-1)
    w = torch.nan_to_num(p)
    return w @ v, p, w


@case("where(i == 2, -inf, s / 4)", train=False, given=P)
def weights_with_rows_of_nan(q, k, v):
    p = (q @ t(k) / 4.0).masked_fill(torch.arange(LQ)[:, None] == 2, -math.inf).softmax(-1)
    return p @ v, p


@case("where(i == 2, -1e+09, s / 4)", given=P)
def weights_with_uniform_rows(q, k, v):
    p = (q @ t(k) / 4.0).masked_fill(torch.arange(LQ)[:, None] == 2, -1e9).softmax(-1)
    return p @ v, p


@case("where(j <= i, s / 4, -inf)", given=P)
def weights_under_a_causal_mask(q, k, v):
    keep = torch.ones(LQ, LK, dtype=torch.bool).tril()
    p = (q @ t(k) / 4.0).masked_fill(~keep, -math.inf).softmax(-1)
    return p @ v, p


# ---- in other shapes

@case(S, given=P)
def weights_of_folded_heads(q, k, v):
    f = lambda x: x.reshape(B * H, x.size(-2), x.size(-1))
    p = torch.bmm(f(q), t(f(k))).div(4.0).softmax(-1)
    return torch.bmm(p, f(v)).view(B, H, LQ, DV), p.view(B, H, LQ, LK).mean(1)


@case(S, given=P)
def weights_folded_after_the_softmax(q, k, v):
    p = weighed(q, k)
    w = p.view(B * H, LQ, LK)
    return torch.bmm(w, v.reshape(B * H, LK, DV)), p, w


@case(S, given=P)
def weights_unfolded_after_the_softmax(q, k, v):
    p = weighed(q, k).view(B * H, LQ, LK)
    return p.view(B, H, LQ, LK) @ v, p


@case("s", given=P)
def weights_transposed(q, k, v):
    p = torch.einsum("zxqd,zxkd->zxkq", q, k).softmax(2)
    return torch.einsum("zxkq,zxkd->zxqd", p, v), p


@case(S, given=P)
def weights_of_heads_last(q, k, v):
    p = torch.einsum("zxqd,zxkd->zqkx", q, k).div(4.0).softmax(2)
    return torch.einsum("zqkx,zxkd->zxqd", p, v), p


@case("s", lambda g: (rn(g, B, H, 1, D), rn(g, B, H, 1, D), rn(g, B, H, 1, DV)), given=P)
def weights_of_one_key(q, k, v):
    p = (q @ t(k)).softmax(-1)
    return p @ v, p


@case("s / 4", given=P)
def weights_by_hand(q, k, v):
    s = q @ t(k) / 4.0
    e = (s - s.amax(-1, keepdim=True)).exp()
    p = e / e.sum(-1, keepdim=True)
    return p @ v, p


@case("where(m[b0, 0, i, j], -inf, s / 4)", PARTIAL, given=P)
def weights_normalised_again(q, k, v, m):
    p = weighed(q, k) * ~m
    p = p / p.sum(-1, keepdim=True)
    return p @ v, p


# ---- read before the values are there

@case(S, weight="2 * p", given=P)
def weights_read_before_the_values_are_there(q, k, v):
    p = weighed(q, k)
    most = p.amax(-1)
    return p @ (v.cos() * 2.0), most


@case(reason=Reason.WEIGHTS_USED)
def values_drawn_after_the_weights_are_read(q, k, v):
    p = weighed(q, k)
    most = p.amax(-1)
    return (p @ F.dropout(v.cos(), 1e-9, True)), most


@case(reason=Reason.INPLACE, train=False)
def values_changed_after_the_weights_are_read(q, k, v):
    w = v.clone()
    p = weighed(q, k)
    most = p.amax(-1)
    w.mul_(2.0)
    return p @ w, most


@case(reason=Reason.WEIGHTS_USED, train=False)
def values_made_of_what_changes_after_the_weights_are_read(q, k, v):
    w = v.clone()
    p = weighed(q, k)
    most = p.amax(-1)
    w.mul_(2.0)
    return p @ w.cos(), most


@case(inputs=lambda g: (rn(g, B, H, LK, D), rn(g, B, H, LK, D), rn(g, DV, 1)), reason=Reason.WEIGHTS_USED)
def values_made_of_the_weights(q, k, w):
    p = weighed(q, k)
    return p @ F.linear(p.amax(-1, keepdim=True), w)


# ---- not what the values are weighed by

@case(reason=Reason.WEIGHTS_USED)
def exponentials_returned(q, k, v):
    s = q @ t(k) / 4.0
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v, e


@case(reason=Reason.WEIGHTS_USED)
def sums_of_exponentials_returned(q, k, v):
    s = q @ t(k) / 4.0
    e = (s - s.amax(-1, keepdim=True)).exp()
    total = e.sum(-1, keepdim=True)
    return (e / total) @ v, total


@case(inputs=PARTIAL, reason=Reason.WEIGHTS_USED)
def weights_returned_before_they_are_normalised_again(q, k, v, m):
    p = weighed(q, k)
    w = p * ~m
    return (w / w.sum(-1, keepdim=True)) @ v, p


@case(reason=Reason.WEIGHTS_USED)
def weights_with_their_sink(q, k, v):
    p = torch.cat([q @ t(k), torch.zeros(B, H, LQ, 1)], -1).softmax(-1)
    return p[..., :-1] @ v, p


@case(reason=Reason.WEIGHTS_USED)
def weights_stacked(q, k, v):
    p = weighed(q, k)
    both = torch.stack([p, p.square()], -1)
    return both[..., 0] @ v, both


@case(reason=Reason.WEIGHTS_USED)
def weights_flipped_there_and_back(q, k, v):
    """no view of the op's result"""
    p = weighed(q, k).flip(-2)
    return p.flip(-2) @ v, p


@case(reason=Reason.WEIGHTS_USED)
def weights_in_another_order_and_then_folded(q, k, v):
    p = t(t(weighed(q, k)).contiguous())
    return torch.bmm(p.reshape(B * H, LQ, LK), v.reshape(B * H, LK, DV)), p


@case(S, given=P)
def weights_in_another_order(q, k, v):
    p = t(t(weighed(q, k)).contiguous())
    return p @ v, p


@case(reason=Reason.WEIGHTS_USED)
def weights_shared_by_heads(q, k, v):
    p = (q[:, 0] @ t(k[:, 0])).softmax(-1)
    return p[:, None] @ v, p


@case(reason=Reason.WEIGHTS_USED)
def weights_repeated(q, k, v):
    p = (q[:, :1] @ t(k[:, :1])).softmax(-1).expand(B, H, LQ, LK)
    return p @ v, p


@case(reason=Reason.WEIGHTS_USED)
def weights_squared_for_no_key(q, k, v):
    """not linear in the softmax, though what the values get is"""
    p = weighed(q, k)
    w = p.square()
    return torch.where(torch.arange(LK) >= 0, p, w) @ v, w


@case(reason=Reason.WEIGHTS_USED)
def weights_that_are_nan_returned(q, k, v):
    p = weighed(q, k)
    lost = p.isnan()
    return p.masked_fill(lost, 0.0) @ v, lost


@case(reason=Reason.WEIGHTS_USED, train=False)
def weights_repaired_otherwise(q, k, v):
    p = (q @ t(k)).masked_fill(torch.arange(LQ)[:, None] == 2, -math.inf).softmax(-1)
    w = torch.nan_to_num(p, nan=0.5)
    return w.masked_fill(p.isnan(), 0.0) @ v, w


@case(reason=Reason.WEIGHTS_USED, train=False)
def weights_repaired_beside_those_that_are_not(q, k, v):
    p = (q @ t(k)).masked_fill(torch.arange(LQ)[:, None] == 2, -math.inf).softmax(-1)
    w = torch.nan_to_num(p)
    return torch.where(p.isnan(), p, w) @ v, w


@case(reason=Reason.WEIGHTS_USED)
def weights_in_another_precision(q, k, v):
    p = (q @ t(k)).softmax(-1, dtype=torch.float64)
    return p.float() @ v, p


@case(reason=Reason.WEIGHTS_USED)
def weights_cut_out_of_a_longer_softmax(q, k, v):
    """they do not lie densely"""
    p = torch.cat([q @ t(k), torch.zeros(B, H, LQ, 1)], -1).softmax(-1)[..., :-1]
    return p @ v, p


# ---- scores beside them, changes to them

@case(reason=Reason.SCORES_USED)
def scores_returned_beside_weights(q, k, v):
    s = q @ t(k)
    p = s.softmax(-1)
    return p @ v, p, s


@case(reason=Reason.INPLACE, train=False)
def weights_changed_afterwards(q, k, v):
    p = weighed(q, k)
    o = p @ v
    p.mul_(2.0)
    return o, p


@case(reason=Reason.INPLACE, train=False)
def weights_changed_through_a_view(q, k, v):
    p = weighed(q, k)
    first = p[:, 0]
    o = p @ v
    first.zero_()
    return o, p


@case(reason=Reason.INPLACE, train=False)
def weights_changed_behind_a_dropout_that_drops_nothing(q, k, v):
    """which gives the tensor itself"""
    p = weighed(q, k)
    w = F.dropout(p, 0.5, False)
    o = w @ v
    w.mul_(2.0)
    return o, p


@case(reason=Reason.INPLACE, train=False)
def weights_changed_before_the_product(q, k, v):
    p = weighed(q, k)
    seen = p.amax()
    p.mul_(2.0)
    return p @ v, seen
