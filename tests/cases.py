"""The table of spellings and near-misses: one row a way to write attention (or something that only looks like it).

A row is a function of (q, k, v, extra…), its inputs, and what the passes must make of it: the score program they must find,
or the reason for which they must refuse. The same rows feed detection, numbers, gradients and the documentation.
Shapes are small and all different, so that a wrong axis cannot hide: B=2, H=4, Lq=7, Lk=9, D=16, Dv=8.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnfuse.refusal import Reason

B, H, LQ, LK, D, DV = 2, 4, 7, 9, 16, 8
LOW = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Case:
    """`score` (and `weight`, and what `rows` without a key are) as the spec has them where the chain must be rewritten, `reason`
    where it must not be; `given` are the programs of the weights that are read elsewhere too."""

    name: str
    fn: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    score: str | None = None
    weight: str = "p"
    reason: Reason | None = None
    train: bool = True
    rows: str = "nan"
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def rn(g: torch.Generator, *shape: int) -> Tensor:
    """Fresh normal numbers."""
    return torch.randn(*shape, generator=g)


def qkv(g: torch.Generator) -> tuple[Tensor, ...]:
    """Queries, keys and values of different lengths."""
    return rn(g, B, H, LQ, D), rn(g, B, H, LK, D), rn(g, B, H, LK, DV)


def square(g: torch.Generator) -> tuple[Tensor, ...]:
    """As many queries as keys."""
    return rn(g, B, H, LK, D), rn(g, B, H, LK, D), rn(g, B, H, LK, DV)


def plus(base: Callable[[torch.Generator], tuple[Tensor, ...]], *more: Callable[[torch.Generator], Tensor]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """`base` and further inputs."""
    return lambda g: (*base(g), *(m(g) for m in more))


def case(score: str | None = None, inputs: Callable[[torch.Generator], tuple[Tensor, ...]] = qkv, weight: str = "p", reason: Reason | None = None,
         train: bool = True, rows: str = "nan", given: tuple[str, ...] = ()) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Enter a function as a row under its own name."""
    def enter(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        CASES.append(Case(fn.__name__, fn, inputs, score, weight, reason, train, rows, given))
        return fn
    return enter


def t(x: Tensor) -> Tensor:
    """The last two dimensions exchanged."""
    return x.transpose(-2, -1)


# ---- the products

@case("0.25 * s")
def matmul(q, k, v):
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.25, dim=-1), v)


@case("s / 4")
def operator_and_division(q, k, v):
    return (q @ k.mT / 4.0).softmax(-1) @ v


@case("0.25 * s")
def einsum(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25).softmax(-1), v)


@case("0.25 * s")
def einsum_transposed_scores(q, k, v):
    """scores as (key, query), softmax over the first of the two"""
    return torch.einsum("zxkq,zxkd->zxqd", (torch.einsum("zxqd,zxkd->zxkq", q, k) * 0.25).softmax(2), v)


@case("0.25 * s")
def bmm_folded_heads(q, k, v):
    f = lambda x: x.reshape(B * H, x.size(-2), x.size(-1))
    return torch.bmm((torch.bmm(f(q), f(k).transpose(1, 2)) * 0.25).softmax(-1), f(v)).view(B, H, LQ, DV)


@case("0.25 * s")
def baddbmm(q, k, v):
    f = lambda x: x.reshape(B * H, x.size(-2), x.size(-1))
    scores = torch.baddbmm(torch.empty(B * H, LQ, LK, dtype=q.dtype), f(q), f(k).transpose(1, 2), beta=0, alpha=0.25)
    return torch.bmm(scores.softmax(-1), f(v)).view(B, H, LQ, DV)


@case("0.25 * s + 0.5 * m[b0, i, j]", plus(qkv, lambda g: rn(g, B * H, LQ, LK)))
def baddbmm_with_bias(q, k, v, m):
    f = lambda x: x.reshape(B * H, x.size(-2), x.size(-1))
    return torch.bmm(torch.baddbmm(m, f(q), f(k).transpose(1, 2), beta=0.5, alpha=0.25).softmax(-1), f(v)).view(B, H, LQ, DV)




@case("s")
def value_on_the_left(q, k, v):
    return t(t(v) @ t((q @ t(k)).softmax(-1)))


@case("s", lambda g: (rn(g, LQ, D), rn(g, LK, D), rn(g, LK, DV)))
def two_dimensional(q, k, v):
    return (q @ k.t()).softmax(-1) @ v


@case("s", lambda g: (rn(g, 2, 3, H, LQ, D), rn(g, 2, 3, H, LK, D), rn(g, 2, 3, H, LK, DV)))
def five_dimensional(q, k, v):
    return (q @ t(k)).softmax(-1) @ v


@case("s", lambda g: (rn(g, B, H, LK, D),))
def one_tensor_for_all(x):
    return (x @ t(x)).softmax(-1) @ x


@case("s", lambda g: (rn(g, B, LK, 3 * H * D),))
def packed_projection(x):
    q, k, v = (y.view(B, LK, H, D).transpose(1, 2) for y in x.split(H * D, dim=-1))
    return ((q @ t(k)).softmax(-1) @ v).transpose(1, 2).reshape(B, LK, H * D)


# ---- scales

@case("0.125 * s")
def scale_on_both_operands(q, k, v):
    return ((q * 0.5) @ t(k * 0.25)).softmax(-1) @ v


@case("-0.25 * s")
def negative_scale(q, k, v):
    return (-q @ t(k / 4.0)).softmax(-1) @ v


@case("s / temperature[b1, 0, 0]", plus(qkv, lambda g: torch.rand(H, 1, 1, generator=g) + 0.5))
def scale_tensor_per_head(q, k, v, temperature):
    return (q @ t(k) / temperature).softmax(-1) @ v


@case("s * c[]", plus(qkv, lambda g: torch.tensor(0.3)))
def scale_scalar_tensor(q, k, v, c):
    return (q @ t(k) * c).softmax(-1) @ v


@case("s", plus(qkv, lambda g: rn(g, D)))
def scale_along_depth(q, k, v, c):
    """a factor inside the sum stays with the queries"""
    return ((q * c) @ t(k)).softmax(-1) @ v


# ---- masks

@case("where(j <= i, s, -inf)", square)
def causal_tril(q, k, v):
    keep = torch.ones(LK, LK, dtype=torch.bool).tril()
    return (q @ t(k)).masked_fill(~keep, -math.inf).softmax(-1) @ v


@case("where(j <= i, s, -1e+09)", square)
def causal_by_a_tensor_like_the_scores(q, k, v):
    s = q @ t(k)
    keep = torch.ones_like(s, dtype=torch.bool).tril()
    return torch.where(keep, s, torch.full_like(s, -1e9)).softmax(-1) @ v


@case("s + where(j <= i, 0, -inf)", square)
def causal_triu_added(q, k, v):
    return (q @ t(k) + torch.full((LK, LK), -math.inf).triu(1)).softmax(-1) @ v


@case("where(j <= i + 2, s, -inf)")
def causal_bottom_right(q, k, v):
    keep = torch.ones(LQ, LK, dtype=torch.bool).tril(diagonal=LK - LQ)
    return torch.where(keep, q @ t(k), -math.inf).softmax(-1) @ v


@case("where(j <= i, where(j <= i - 4, -inf, s), -inf)", square)
def window_in_two_fills(q, k, v):
    i, j = torch.arange(LK)[:, None], torch.arange(LK)
    s = (q @ t(k)).masked_fill(i - j > 3, -math.inf)
    return s.masked_fill(j > i, -math.inf).softmax(-1) @ v


@case(f"s + where(pad[b0, j], 0, {LOW!r})", plus(qkv, lambda g: torch.rand(B, LK, generator=g) > 0.3))
def padding_bool(q, k, v, pad):
    return (q @ t(k) + torch.where(pad, 0.0, LOW)[:, None, None]).softmax(-1) @ v


@case(f"where(not(pad[b0, j]) or not(pad[b0, i]), {LOW!r}, s)", plus(square, lambda g: torch.rand(B, LK, generator=g) > 0.1))
def padding_by_both(q, k, v, pad):
    """Python's & of two views of an input is called and_, and changes nothing."""
    return (q @ t(k)).masked_fill(~(pad[:, None, None] & pad[:, None, :, None]), LOW).softmax(-1) @ v


@case("where(pad[b0, j] or pad[b0, i], s, -inf)", plus(square, lambda g: torch.rand(B, LK, generator=g) > 0.1))
def padding_by_either(q, k, v, pad):
    return torch.where(pad[:, None, None] | pad[:, None, :, None], q @ t(k), -math.inf).softmax(-1) @ v


@case("s + -10000 * (1 - float(pad[b0, j]))", plus(qkv, lambda g: (torch.rand(B, LK, generator=g) > 0.3).long()))
def padding_integer_bert(q, k, v, pad):
    return (q @ t(k) + (1.0 - pad[:, None, None, :].float()) * -10000.0).softmax(-1) @ v



@case("s + slopes[b1] * float(j - i)", plus(square, lambda g: torch.rand(H, generator=g)))
def alibi(q, k, v, slopes):
    distance = torch.arange(LK)[None, :] - torch.arange(LK)[:, None]
    return (q @ t(k) + slopes[:, None, None] * distance).softmax(-1) @ v



@case("bias[b1, i, j] + s", plus(qkv, lambda g: rn(g, H, LQ, LK)))
def bias_first(q, k, v, bias):
    return (bias + q @ t(k)).softmax(-1) @ v


@case("2 * tanh(s / 2)")
def softcap(q, k, v):
    return (torch.tanh(q @ t(k) / 2.0) * 2.0).softmax(-1) @ v


@case("s + float(pos[j])", plus(qkv, lambda g: torch.arange(LK)))
def integers_added(q, k, v, pos):
    return (q @ t(k) + pos).softmax(-1) @ v


@case("s + table[j + 7 - i, b1]", plus(qkv, lambda g: rn(g, 2 * LK, H)))
def gathered_table(q, k, v, table):
    where = torch.arange(LK)[None, :] - torch.arange(LQ)[:, None] + LQ
    return (q @ t(k) + table[where].permute(2, 0, 1)).softmax(-1) @ v



@case("where(ids[b0, i] == ids[b0, j], s, -inf)", plus(square, lambda g: torch.randint(0, 2, (B, LK), generator=g).sort(-1)[0]))
def documents(q, k, v, ids):
    return (q @ t(k)).masked_fill((ids[:, None, :, None] != ids[:, None, None, :]), -math.inf).softmax(-1) @ v



@case("where(j <= i, s, -inf)", square)
def packed_positions_that_are_plain(q, k, v):
    """what transformers derives from position ids when there is no padding mask: known values, nothing of it may stay"""
    positions = torch.arange(LK)[None]
    documents = (positions.diff(prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    keep = (torch.arange(LK)[None, :] <= torch.arange(LK)[:, None]) & (documents[:, :, None] == documents[:, None, :])
    return (q @ t(k)).masked_fill(~keep[:, None], -math.inf).softmax(-1) @ v


@case("s + where(j <= 2, 0, pad[b0, max(0, j - 3)])", plus(qkv, lambda g: rn(g, B, LK - 3)))
def padding_with_a_prefix(q, k, v, pad):
    """a loaded piece of a concatenation is read at addresses that exist, also where it is not used"""
    return (q @ t(k) + torch.cat([torch.zeros(B, 3), pad], -1)[:, None, None]).softmax(-1) @ v


@case("s + where(2 <= j and j <= 7, 0, -1)")
def padding_of_a_formula(q, k, v):
    return (q @ t(k) + F.pad(torch.zeros(LQ, LK - 3), (2, 1), value=-1.0)).softmax(-1) @ v


@case("s")
def mask_of_ones_vanishes(q, k, v):
    return (q @ t(k)).masked_fill(torch.zeros(LQ, LK, dtype=torch.bool), -math.inf).softmax(-1) @ v


@case("where(j <= i, s, -inf)", square)
def fill_in_place(q, k, v):
    s = q @ t(k)
    s.masked_fill_(torch.ones(LK, LK, dtype=torch.bool).triu(1), -math.inf)
    return s.softmax(-1) @ v


# ---- the softmax and what follows it

@case("s")
def softmax_in_float(q, k, v):
    return F.softmax(q @ t(k), dim=-1, dtype=torch.float32).to(q.dtype) @ v


@case("s")
def log_softmax_exponentiated(q, k, v):
    return F.log_softmax(q @ t(k), -1).exp() @ v


@case("s / 4")
def by_hand(q, k, v):
    s = q @ t(k) / 4.0
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@case("where(j <= i, s, -inf)", square)
def by_hand_with_max_and_mask(q, k, v):
    s = (q @ t(k)).masked_fill(torch.ones(LK, LK, dtype=torch.bool).triu(1), -math.inf)
    e = torch.exp(s - s.max(dim=-1, keepdim=True).values)
    return torch.matmul(e / e.sum(dim=-1, keepdim=True), v)


@case("0.25 * s")
def by_hand_without_maximum(q, k, v):
    e = torch.exp(q @ t(k) * 0.25)
    return (e / e.sum(-1)[..., None]) @ v


@case("0.25 * s")
def by_hand_logsumexp(q, k, v):
    s = q @ t(k) * 0.25
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


@case("s")
def maximum_subtracted_before(q, k, v):
    s = q @ t(k)
    return (s - s.amax(-1, keepdim=True)).softmax(-1) @ v


@case("s", plus(qkv, lambda g: torch.rand(H, generator=g)), weight="p * gate[b1]")
def head_gate(q, k, v, gate):
    return ((q @ t(k)).softmax(-1) * gate[:, None, None]) @ v



@case("s", plus(qkv, lambda g: rn(g, H)))
def sink(q, k, v, sinks):
    s = torch.cat([q @ t(k), sinks[None, :, None, None].expand(B, H, LQ, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


@case("s", plus(qkv, lambda g: rn(g, H)))
def sink_with_the_maximum_subtracted(q, k, v, sinks):
    """the maximum over the keys and the sink, subtracted before the softmax as gpt-oss does"""
    s = torch.cat([q @ t(k), sinks[None, :, None, None].expand(B, H, LQ, 1)], -1)
    s = s - s.max(dim=-1, keepdim=True).values
    return s.softmax(-1)[..., :-1] @ v


@case("s")
def dropout_in_eval(q, k, v):
    return F.dropout((q @ t(k)).softmax(-1), 0.5, False) @ v


@case("s", lambda g: (rn(g, B, 8, LQ, D), rn(g, B, 2, LK, D), rn(g, B, 2, LK, DV)))
def grouped_queries(q, k, v):
    k, v = (x[:, :, None].expand(B, 2, 4, LK, x.size(-1)).reshape(B, 8, LK, x.size(-1)) for x in (k, v))
    return (q @ t(k)).softmax(-1) @ v


@case("s", lambda g: (rn(g, B, 8, LQ, D), rn(g, B, 2, LK, D), rn(g, B, 2, LK, DV)))
def grouped_queries_repeated(q, k, v):
    return (q @ t(k.repeat_interleave(4, 1))).softmax(-1) @ v.repeat_interleave(4, 1)


@case("0.25 * s")
def fused_call(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@case("where(j <= i, 0.5 * s, -inf)", square)
def fused_call_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)


@case("0.25 * s", lambda g: (rn(g, B, 1, LQ, D), rn(g, B, 1, LK, D), rn(g, B, 1, LK, DV)))
def one_head(q, k, v):
    return (q @ t(k) * 0.25).softmax(-1) @ v


@case("s", lambda g: (rn(g, B, H, 1, D), rn(g, B, H, LK, D), rn(g, B, H, LK, DV)))
def one_query(q, k, v):
    return (q @ t(k)).softmax(-1) @ v


@case("s", lambda g: (rn(g, B, H, LQ, D), rn(g, B, H, 1, D), rn(g, B, H, 1, DV)))
def one_key(q, k, v):
    return (q @ t(k)).softmax(-1) @ v


# ---- near-misses: each is one guard's

@case(inputs=square, reason=Reason.SOFTMAX_AXIS)
def softmax_over_queries(q, k, v):
    return (q @ t(k)).softmax(-2) @ v


@case(reason=Reason.SOFTMAX_AXIS)
def softmax_over_heads(q, k, v):
    return (q @ t(k)).softmax(1) @ v


@case(reason=Reason.NO_VALUE_PRODUCT)
def normalised_by_another_sum(q, k, v):
    """exponentials over the sum of other exponentials are no softmax"""
    s = q @ t(k)
    return (s.exp() / (s * 0.5).exp().sum(-1, keepdim=True)) @ v


@case(reason=Reason.NO_VALUE_PRODUCT)
def normalised_over_queries_by_hand(q, k, v):
    e = (q @ t(k)).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


@case(reason=Reason.NO_VALUE_PRODUCT)
def not_normalised(q, k, v):
    return (q @ t(k)).exp() @ v


@case(reason=Reason.ROW_DEPENDENT)
def mean_subtracted_and_scaled(q, k, v):
    s = q @ t(k)
    return (s / s.sum(-1, keepdim=True)).softmax(-1) @ v


@case(reason=Reason.SCORES_USED)
def scores_returned(q, k, v):
    s = q @ t(k)
    return s.softmax(-1) @ v, s


@case(inputs=square, reason=Reason.SCORES_USED)
def scores_seen_after_fill(q, k, v):
    s = q @ t(k)
    seen = s.view(B, H, LK * LK)
    s.masked_fill_(torch.ones(LK, LK, dtype=torch.bool).triu(1), -math.inf)
    return s.softmax(-1) @ v, seen


@case(reason=Reason.MUTATED_OPERAND, train=False)
def key_changed_before_the_product(q, k, v):
    s = q @ t(k)
    k.mul_(2.0)
    return s.softmax(-1) @ v


@case(reason=Reason.INPLACE, train=False)
def result_reshaped_in_place(q, k, v):
    o = (q @ t(k)).softmax(-1) @ v
    o.unsqueeze_(2)
    return o


@case(inputs=lambda g: (rn(g, B, LQ, D), rn(g, LK, D), rn(g, B, LK, DV)), reason=Reason.INPLACE, train=False)
def keys_reshaped_in_place_later(q, k, v):
    k = k + 0.0
    o = (q @ t(k)).softmax(-1) @ v
    return o, k.unsqueeze_(0)


@case(reason=Reason.WEIGHT_PROGRAM)
def weights_squared(q, k, v):
    return (q @ t(k)).softmax(-1).square() @ v


@case(reason=Reason.WEIGHT_PROGRAM)
def weights_shifted(q, k, v):
    return ((q @ t(k)).softmax(-1) + 0.1) @ v


@case(reason=Reason.ROW_DEPENDENT)
def scores_normalised_by_their_row(q, k, v):
    s = q @ t(k)
    return (s / s.abs().amax(-1, keepdim=True)).softmax(-1) @ v


@case(reason=Reason.SCORES_USED)
def top_k(q, k, v):
    s = q @ t(k)
    return s.masked_fill(s < s.topk(3, -1)[0][..., -1:], -math.inf).softmax(-1) @ v


@case(inputs=plus(qkv, lambda g: rn(g, H, H)), reason=Reason.AXIS_ROLES)
def talking_heads(q, k, v, mix):
    s = torch.einsum("bhij,hg->bgij", q @ t(k), mix)
    return s.softmax(-1) @ v


@case(inputs=lambda g: (rn(g, B, H, LQ, LK), rn(g, B, H, LK, DV)), reason=Reason.NO_SCORE_PRODUCT)
def no_product_before(s, v):
    return s.softmax(-1) @ v


@case(reason=Reason.NO_VALUE_PRODUCT)
def no_product_after(q, k, v):
    return (q @ t(k)).softmax(-1).sum(-1) + v.sum()


@case(inputs=plus(qkv, lambda g: rn(g, H, H)), reason=Reason.HEADS_MIXED)
def talking_heads_by_linear(q, k, v, w):
    """weights of all heads go through a linear layer over the heads"""
    p = (q @ t(k)).softmax(-1)
    return F.linear(p.permute(0, 2, 3, 1), w).permute(0, 3, 1, 2) @ v


@case(inputs=plus(qkv, lambda g: rn(g, H, H, 1, 1)), reason=Reason.HEADS_MIXED)
def talking_heads_by_convolution(q, k, v, w):
    return F.conv2d((q @ t(k)).softmax(-1), w) @ v


@case(inputs=lambda g: (rn(g, B, LQ, D), rn(g, 5, D), rn(g, D, 5)), reason=Reason.NO_VALUE_PRODUCT)
def router_before_a_layer(x, w, u):
    """no heads that a layer could mix"""
    return F.linear(F.linear(x, w).softmax(-1), u) @ x.mT


@case(inputs=plus(qkv, lambda g: rn(g, 3, LK)), reason=Reason.NO_VALUE_PRODUCT)
def weights_into_a_classifier(q, k, v, w):
    """a layer on the weights, but no values"""
    return F.linear((q @ t(k)).softmax(-1), w) + v.sum()


@case(inputs=plus(qkv, lambda g: rn(g, B, H, LQ, LK).abs()), reason=Reason.WEIGHT_PROGRAM)
def normalised_once_more(q, k, v, g):
    p = (q @ t(k)).softmax(-1) * g
    return (p / p.sum(-1, keepdim=True)) @ v


@case(inputs=lambda g: (*(torch.randint(-3, 4, (B, H, n, D), generator=g) for n in (LQ, LK)), rn(g, B, H, LK, DV)), reason=Reason.DTYPE, train=False)
def integer_queries(q, k, v):
    return (q @ t(k)).float().softmax(-1) @ v


@case(inputs=lambda g: tuple(torch.complex(rn(g, B, H, 5, 4), rn(g, B, H, 5, 4)) for _ in range(3)), reason=Reason.UNKNOWN_OP, train=False)
def complex_queries(q, k, v):
    return (q @ t(k)).real.softmax(-1).to(v.dtype) @ v
