"""Rows of the table of spellings (tests/cases.py) with softmaxes that are normalised late, again, or by hand."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnfuse.refusal import Reason
from tests.cases import B, H, LK, LQ, case, plus, qkv, rn, t
from tests.cases_repair import CASES, FILLED, MASKED, exponentials, mask

__all__ = ["CASES"]


def partial(g: torch.Generator) -> Tensor:
    """True where a key is hidden; every query sees the fourth."""
    m = mask(g)
    m[..., 3] = False
    return m


PARTIAL = plus(qkv, partial)


# ---- normalised behind the value product

@case("s / 4")
def normalised_behind_the_product(q, k, v):
    e = exponentials(q @ t(k) / 4.0)
    return (e @ v) / e.sum(-1, keepdim=True)


@case("0.25 * s")
def normalised_by_a_factor(q, k, v):
    e = (q @ t(k) * 0.25).exp()
    return e.sum(-1, keepdim=True).reciprocal() * torch.einsum("bhij,bhjd->bhid", e, v)


@case(FILLED, MASKED, train=False)
def normalised_behind_views(q, k, v, m):
    e = exponentials((q @ t(k)).masked_fill(m, -math.inf))
    return (e @ v).transpose(1, 2) / e.sum(-1).transpose(1, 2)[..., None]


@case("s / 4", PARTIAL, weight="where(m[b0, 0, i, j], 0, p)")
def normalised_by_more_than_was_multiplied(q, k, v, m):
    e = exponentials(q @ t(k) / 4.0)
    return (e.masked_fill(m, 0.0) @ v) / e.sum(-1, keepdim=True)


@case("where(m[b0, 0, i, j], -inf, s / 4)", PARTIAL)
def exponentials_masked(q, k, v, m):
    e = exponentials(q @ t(k) / 4.0) * ~m
    return (e / e.sum(-1, keepdim=True)) @ v


@case(reason=Reason.NO_VALUE_PRODUCT)
def normalised_behind_the_product_with_epsilon(q, k, v):
    e = exponentials(q @ t(k) / 4.0)
    return (e @ v) / (e.sum(-1, keepdim=True) + 1e-6)


@case(reason=Reason.NO_VALUE_PRODUCT)
def normalised_behind_the_product_by_a_bounded_sum(q, k, v):
    e = exponentials(q @ t(k) / 4.0)
    return (e @ v) / e.sum(-1, keepdim=True).clamp(min=1.5)


@case(inputs=PARTIAL, reason=Reason.NO_VALUE_PRODUCT)
def normalised_by_less_than_was_multiplied(q, k, v, m):
    e = exponentials(q @ t(k) / 4.0)
    return (e @ v) / e.masked_fill(m, 0.0).sum(-1, keepdim=True)


@case(reason=Reason.NO_VALUE_PRODUCT)
def normalised_over_everything(q, k, v):
    e = (q @ t(k) / 4.0).exp()
    return (e @ v) / e.sum((-1, -2), keepdim=True)


@case(inputs=lambda g: (rn(g, B, H, LK, 16), rn(g, B, H, LK, 16), rn(g, B, H, LK, LK)), reason=Reason.NO_VALUE_PRODUCT)
def normalised_along_the_values(q, k, v):
    """the sum of query i divides column i"""
    e = (q @ t(k) / 4.0).exp()
    return (e @ v) / e.sum(-1)[..., None, :]


@case(reason=Reason.NO_VALUE_PRODUCT)
def normalised_product_seen_before(q, k, v):
    e = exponentials(q @ t(k) / 4.0)
    o = e @ v
    return o / e.sum(-1, keepdim=True), o


# ---- normalised again

@case("where(m[b0, 0, i, j], -inf, s / 4)", PARTIAL)
def normalised_again_behind_a_mask(q, k, v, m):
    p = (q @ t(k) / 4.0).softmax(-1) * ~m
    return (p / p.sum(-1, keepdim=True)) @ v


@case("where(m[b0, 0, i, j], -inf, s / 4)", PARTIAL)
def normalised_again_behind_a_float_mask(q, k, v, m):
    p = (q @ t(k) / 4.0).softmax(-1) * (1.0 - m.float()) * 2.0
    p /= p.sum(-1, keepdim=True)
    return p @ v


@case("where(m[b0, 0, i, j], -inf, s / 4)", PARTIAL)
def normalised_again_behind_the_product(q, k, v, m):
    p = (q @ t(k) / 4.0).softmax(-1).masked_fill(m, 0.0)
    return (p @ v) / p.sum(-1, keepdim=True)


@case("where(m[b0, 0, i, j], -inf, where(j <= i, s, -inf))", MASKED, train=False)
def normalised_again_behind_two_masks(q, k, v, m):
    """rows that nothing is left of are NaN either way"""
    p = (q @ t(k)).masked_fill(~torch.ones(LQ, LK, dtype=torch.bool).tril(), -math.inf).softmax(-1) * ~m
    return (p / p.sum(-1, keepdim=True)) @ v


@case("where(m[b0, 0, i, j], -inf, s)", MASKED, rows="repaired", train=False)
def normalised_again_and_repaired(q, k, v, m):
    p = (q @ t(k)).softmax(-1) * ~m
    return torch.nan_to_num(p / p.sum(-1, keepdim=True)) @ v


@case("s")
def normalised_again_for_nothing(q, k, v):
    p = (q @ t(k)).softmax(-1)
    return (p / p.sum(-1, keepdim=True)) @ v


@case("s", plus(qkv, lambda g: rn(g, H)), train=False)
def normalised_again_without_the_sink(q, k, v, sinks):
    """what the sink takes it gives back: nothing depends on it, and it has no gradient"""
    p = torch.cat([q @ t(k), sinks[None, :, None, None].expand(B, H, LQ, 1)], -1).softmax(-1)[..., :-1]
    return (p / p.sum(-1, keepdim=True)) @ v


@case(inputs=plus(qkv, lambda g: rn(g, H)), reason=Reason.WEIGHT_PROGRAM, train=False)
def normalised_again_without_the_sink_that_took_all(q, k, v, sinks):
    """rows masked by a number: everything is the sink's, and 0 / 0 is left"""
    s = (q @ t(k)).masked_fill((torch.arange(LQ) == 2)[:, None], -1e9)
    p = torch.cat([s, sinks[None, :, None, None].expand(B, H, LQ, 1)], -1).softmax(-1)[..., :-1]
    return (p / p.sum(-1, keepdim=True)) @ v


@case(reason=Reason.WEIGHT_PROGRAM, train=False)
def normalised_again_behind_nothing(q, k, v):
    p = (q @ t(k)).softmax(-1) * 0.0
    return (p / p.sum(-1, keepdim=True)) @ v


@case(reason=Reason.WEIGHT_PROGRAM)
def normalised_again_by_some_keys(q, k, v):
    p = (q @ t(k)).softmax(-1)
    return (p / p[..., :5].sum(-1, keepdim=True)) @ v


@case(reason=Reason.NO_VALUE_PRODUCT)
def normalised_by_some_keys(q, k, v):
    e = (q @ t(k) / 4.0).exp()
    return (e @ v) / e[..., :5].sum(-1, keepdim=True)


@case(inputs=lambda g: (rn(g, B, H, LK, 16), rn(g, B, H, LK, 16), rn(g, B, H, LK, 8)), reason=Reason.NO_VALUE_PRODUCT)
def exponentials_beside_the_maximum_over_queries(q, k, v):
    s = q @ t(k)
    e = (s - s.amax(-2, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@case(reason=Reason.NO_VALUE_PRODUCT, train=False)
def exponentials_beside_the_maximum_of_some_columns(q, k, v):
    """which are -inf in a row where others are not"""
    s = (q @ t(k)).masked_fill((torch.arange(LQ)[:, None] == 2) & (torch.arange(LK) < 3), -math.inf)
    e = (s - s[..., :3].amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@case(inputs=plus(qkv, lambda g: rn(g, LK) * 100.0), reason=Reason.NO_VALUE_PRODUCT)
def exponentials_beside_another_maximum(q, k, v, bias):
    """which does not keep them from overflowing"""
    s = q @ t(k)
    e = (s - (s + bias).amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@case(reason=Reason.NO_VALUE_PRODUCT)
def two_exponentials(q, k, v):
    s = q @ t(k) / 4.0
    e = s.exp() * (s * 0.5).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@case(reason=Reason.NO_VALUE_PRODUCT)
def exponentials_repaired(q, k, v):
    """an overflow becomes a large number"""
    e = torch.nan_to_num((q @ t(k) * 30.0).exp(), posinf=1e30)
    return (e / e.sum(-1, keepdim=True)) @ v


@case(inputs=PARTIAL, reason=Reason.WEIGHT_PROGRAM, train=False)
def normalised_again_beside_finite_fills(q, k, v, m):
    """a weight that a number made 0 is all that is left: 0 / 0, not a uniform row"""
    p = (q @ t(k)).masked_fill(torch.arange(LK) > 2, -1e9).softmax(-1) * ((torch.arange(LK) > 2) & ~m)
    return (p / p.sum(-1, keepdim=True)) @ v


@case(inputs=plus(PARTIAL, lambda g: rn(g, LK)), reason=Reason.WEIGHT_PROGRAM)
def normalised_again_beside_an_added_mask(q, k, v, m, bias):
    p = (q @ t(k) + bias).softmax(-1) * ~m
    return (p / p.sum(-1, keepdim=True)) @ v


@case(inputs=PARTIAL, reason=Reason.WEIGHT_PROGRAM)
def normalised_again_with_epsilon(q, k, v, m):
    p = (q @ t(k)).softmax(-1) * ~m
    return (p / (p.sum(-1, keepdim=True) + 1e-9)) @ v


@case(inputs=PARTIAL, reason=Reason.WEIGHT_PROGRAM)
def normalised_again_by_another_mask(q, k, v, m):
    p = (q @ t(k)).softmax(-1)
    return (p * ~m / (p * ~m.roll(1, -1)).sum(-1, keepdim=True)) @ v


@case(inputs=PARTIAL, reason=Reason.WEIGHT_PROGRAM)
def normalised_again_and_added_to_what_it_was(q, k, v, m):
    p = (q @ t(k)).softmax(-1)
    return (p + p * ~m / (p * ~m).sum(-1, keepdim=True)) @ v


@case(inputs=PARTIAL, reason=Reason.WEIGHT_PROGRAM)
def normalised_again_by_a_mask_that_was_not_applied(q, k, v, m):
    p = (q @ t(k)).softmax(-1)
    return (p / (p * ~m).sum(-1, keepdim=True)) @ v


@case(inputs=lambda g: (rn(g, B, H, LK, 16), rn(g, B, H, LK, 16), rn(g, B, H, LK, 8)), reason=Reason.WEIGHT_PROGRAM)
def normalised_again_by_the_next_row(q, k, v):
    p = (q @ t(k)).softmax(-1)
    return (p / p.masked_fill(torch.arange(LK) > 5, 0.0).sum(-1, keepdim=True).roll(1, -2)) @ v


@case(inputs=PARTIAL, reason=Reason.NO_VALUE_PRODUCT)
def normalised_again_in_another_norm(q, k, v, m):
    return F.normalize((q @ t(k)).softmax(-1) * ~m, p=2.0, dim=-1) @ v


@case("s")
def maximum_detached(q, k, v):
    s = q @ t(k)
    return (s - s.detach().amax(-1, keepdim=True)).softmax(-1) @ v


@case("s / 4")
def maximum_without_gradient(q, k, v):
    s = q @ t(k) / 4.0
    with torch.no_grad():
        most = s.max(-1, keepdim=True).values
    e = (s - most).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@case("s / 4")
def detached_maximum_by_hand(q, k, v):
    s = q @ t(k) / 4.0
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return (e @ v) / e.sum(-1, keepdim=True)
