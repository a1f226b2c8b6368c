"""Rows of the table of spellings (tests/cases.py) as the models of Hugging Face, timm and others have them, by the role that is
spelled: products, scales, masks, biases, relative positions, softmaxes, heads. With each row a model that does it so."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from attnfuse.refusal import Reason
from tests.cases import B, D, DV, H, LK, LOW, LQ, case, plus, qkv, rn, square, t
from tests.cases_wanted import CASES

__all__ = ["CASES"]
tokens = lambda g: (rn(g, B, LQ, H, D), rn(g, B, LK, H, D), rn(g, B, LK, H, DV))
"""Heads behind the tokens."""
first = lambda g: (rn(g, LQ, B, H, D), rn(g, LK, B, H, D), rn(g, LK, B, H, DV))
"""Tokens before the batch."""
keep = lambda g: (torch.rand(B, LK, generator=g) > 0.3).long()
hidden = lambda g: rn(g, B, LK, 3 * H * D)


# ---- products

@case("s")
def einsum_of_a_list(q, k, v):
    """cvt"""
    return torch.einsum("bhlt,bhtv->bhlv", [torch.einsum("bhlk,bhtk->bhlt", [q, k]).softmax(-1), v])


@case("s", tokens)
def einsum_with_an_ellipsis(q, k, v):
    """longt5"""
    return torch.einsum("...hqk,...khd->...qhd", torch.einsum("...qhd,...khd->...hqk", q, k).softmax(-1), v)


@case("s", tokens)
def einsum_from_tokens_to_heads(q, k, v):
    """funnel"""
    return torch.einsum("bnij,bjnd->bind", torch.einsum("bind,bjnd->bnij", q, k).softmax(-1), v)


@case("s", first)
def einsum_with_tokens_first(q, k, v):
    """xlnet"""
    return torch.einsum("bnij,jbnd->ibnd", torch.einsum("ibnd,jbnd->bnij", q, k).softmax(3), v)


@case("s", lambda g: (rn(g, B, LQ, D), rn(g, B, LK, D), rn(g, B, LK, DV)))
def einsum_with_spaces(q, k, v):
    """latent diffusion"""
    return torch.einsum("b i j, b j d -> b i d", torch.einsum("b i d, b j d -> b i j", q, k).softmax(dim=-1), v)


@case("s")
def einsum_of_transposed_keys(q, k, v):
    """prophetnet"""
    return torch.einsum("bntc,bncs->bnts", torch.einsum("bntc,bncs->bnts", q, t(k)).softmax(-1), v)


@case("s", lambda g: (rn(g, B, 3, H, LQ, D), rn(g, B, 3, H, LK, D), rn(g, B, 3, H, LK, DV)))
def einsum_of_five_dimensions(q, k, v):
    """prophetnet's predicted streams"""
    return torch.einsum("bnhts,bnhsc->bnhtc", torch.einsum("bnhtc,bnhsc->bnhts", [q, k]).softmax(-1), v)


@case("0.25 * s + alibi[b0, 0, j]", plus(qkv, lambda g: rn(g, B * H, 1, LK)))
def baddbmm_by_keywords(q, k, v, alibi):
    """bloom"""
    f = lambda x: x.reshape(B * H, x.size(-2), x.size(-1))
    scores = alibi.baddbmm(batch1=f(q), batch2=f(k).transpose(-1, -2), beta=1.0, alpha=0.25)
    return torch.bmm(scores.view(B, H, LQ, LK).softmax(-1).view(B * H, LQ, LK), f(v)).view(B, H, LQ, DV)


@case("s", lambda g: (rn(g, B, D, LQ), rn(g, B, D, LK), rn(g, B, DV, LK)))
def channels_first(q, k, v):
    """denoising diffusion: weights over (query, key) turned before the values"""
    return torch.bmm(v, torch.bmm(q.permute(0, 2, 1), k).softmax(dim=2).permute(0, 2, 1))


@case("s", lambda g: (rn(g, B, H, 2, 5, D), rn(g, B, H, 9, D), rn(g, B, H, 9, DV)))
def blocks_of_queries(q, k, v):
    """bigbird's first and last blocks"""
    return torch.einsum("bhlqk,bhkd->bhlqd", torch.einsum("bhlqd,bhkd->bhlqk", q, k).softmax(-1), v)


# ---- scales

@case("0.25 * s")
def queries_divided(q, k, v):
    """xlm"""
    return torch.matmul(q / math.sqrt(D), k.transpose(2, 3)).softmax(-1) @ v


@case("s")
def queries_divided_in_place(q, k, v):
    """longformer"""
    q = q * 1.0
    q /= math.sqrt(D)
    return (q @ t(k)).softmax(-1) @ v


@case("0.125 * s")
def scale_before_and_behind(q, k, v):
    """whisper"""
    return ((q * 0.5) @ t(k) * 0.25).softmax(-1) @ v


@case("0.25 * s / 8")
def scale_and_division(q, k, v):
    """informer"""
    return torch.div(q @ t(k) * 0.25, 8).softmax(-1) @ v


@case("30 * tanh(0.25 * s / 30)")
def scale_and_softcap(q, k, v):
    """gemma2"""
    s = torch.matmul(q, k.transpose(2, 3)) * 0.25
    s = s / 30.0
    s = torch.tanh(s)
    return F.softmax(s * 30.0, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@case("0.5 * (s / 8)")
def scales_in_place(q, k, v):
    """falcon"""
    s = q @ t(k)
    s /= 8.0
    s *= 0.5
    return F.softmax(s, dim=-1, dtype=s.dtype) @ v


@case("0.14433756988801055 * s")
def scale_by_the_root_of_a_tensor(q, k, v):
    """deberta"""
    scale = torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float) * 3)
    return torch.bmm(q.flatten(0, 1), t(k.flatten(0, 1)) / scale.to(q.dtype)).softmax(-1) @ v.flatten(0, 1)


# ---- masks

@case("0.25 * s + mask[b0, 0, i, j]", plus(qkv, lambda g: rn(g, B, 1, LQ, LK)))
def float_mask_of_all_heads(q, k, v, mask):
    """most of Hugging Face, given a mask of four dimensions"""
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@case(f"0.25 * s + where(j <= i and pad[b0, j], 0, {LOW!r})", plus(square, lambda g: torch.rand(B, LK, generator=g) > 0.3))
def hugging_face_causal(q, k, v, pad):
    """llama: positions compared, padding looked up at (batch, key), both as one float mask"""
    b, i, j = torch.arange(B), torch.arange(LK) + 0, torch.arange(LK) + 0
    allowed = q.new_ones((), dtype=torch.bool) & (j[None, None, None, :] <= i[None, None, :, None])
    allowed = allowed & pad.to(torch.bool)[b[:, None, None, None], j[None, None, None, :]]
    mask = torch.where(allowed.expand(B, -1, LK, LK), torch.zeros((), dtype=q.dtype), LOW)
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@case(f"s + where(i <= j + 2 and j <= i, 0, {LOW!r})", square)
def hugging_face_window(q, k, v):
    """gemma2, mistral"""
    i, j = torch.arange(LK)[None, None, :, None], torch.arange(LK)[None, None, None, :]
    allowed = q.new_ones((), dtype=torch.bool) & (j > i - 3) & (j <= i)
    mask = torch.where(allowed.expand(B, -1, LK, LK), torch.zeros((), dtype=q.dtype), LOW)
    return (torch.matmul(q, k.transpose(2, 3)) + mask).softmax(-1) @ v


@case(f"s + where(pad[b0, j], 0, {LOW!r})", plus(qkv, lambda g: torch.rand(B, LK, generator=g) > 0.3))
def hugging_face_bidirectional(q, k, v, pad):
    """bert: a comparison that always holds"""
    b, i, j = torch.arange(B), torch.arange(LQ)[None, None, :, None], torch.arange(LK)
    allowed = (i >= 0) & pad[b[:, None, None, None], j[None, None, None, :]]
    mask = torch.where(allowed.expand(B, -1, LQ, LK), torch.zeros((), dtype=q.dtype), LOW)
    return (torch.matmul(q, k.transpose(2, 3)) + mask).softmax(-1) @ v


@case(f"where(buffer[0, 0, i, j], s, {LOW!r}) + mask[b0, 0, 0, j]", plus(square, lambda g: torch.ones(1, 1, 12, 12).tril().bool(), lambda g: rn(g, B, 1, 1, LK)))
def buffer_and_an_added_mask(q, k, v, buffer, mask):
    """gpt_neo: the registered triangle, cut to length, with the fill as a tensor"""
    fill = torch.tensor(LOW, dtype=q.dtype)
    s = torch.where(buffer[:, :, LK - LK:LK, :LK], torch.matmul(q, t(k)), fill)
    return F.softmax(s + mask, dim=-1).to(v.dtype) @ v


@case("s * b[0, 0, i, j] + -10000 * (1 - b[0, 0, i, j])", plus(square, lambda g: torch.ones(1, 1, LK, LK).tril()), train=False)
def buffer_multiplied(q, k, v, b):
    """openai-gpt"""
    return ((q @ t(k)) * b + -1e4 * (1 - b)).softmax(-1) @ v


@case(f"where(m[b0, 0, i, j], {LOW!r}, s)", plus(qkv, lambda g: torch.rand(B, 1, LQ, LK, generator=g) > 0.5))
def filled_by_a_tensor(q, k, v, m):
    """sew-d"""
    return (q @ t(k)).masked_fill(m, torch.tensor(LOW)).softmax(-1) @ v


@case("s + a[b0, 0, 0, j] + b[0, 0, i, j]", plus(qkv, lambda g: rn(g, B, 1, 1, LK), lambda g: rn(g, 1, 1, LQ, LK)))
def two_masks_added_in_place(q, k, v, a, b):
    """bigbird"""
    s = q @ t(k)
    s += a
    s += b
    return s.softmax(-1) @ v


@case("s - mul[i, j]", plus(qkv, lambda g: (torch.rand(LQ, LK, generator=g) > 0.5).long()))
def mask_subtracted(q, k, v, m):
    """xlnet"""
    return (q @ t(k) - 65500.0 * m).softmax(-1) @ v


@case(f"max(s + mask[b0, 0, 0, j], {LOW!r})", plus(qkv, lambda g: rn(g, B, 1, 1, LK)))
def bounded_below(q, k, v, mask):
    """xglm"""
    return torch.max(q @ t(k) + mask, torch.tensor(LOW)).softmax(-1) @ v


@case("s + -10000 * (1 - min(a[b0, j], b[b0, j]))", plus(qkv, lambda g: keep(g).float(), lambda g: keep(g).float()))
def smaller_of_two_masks(q, k, v, a, b):
    """bigbird"""
    return (q @ t(k) + (1.0 - torch.minimum(a, b)[:, None, None, :]) * -10000.0).softmax(-1) @ v


@case("where(i <= j - 1 or not(j // 4 == i // 4), -inf, s)", square)
def chunks(q, k, v):
    """llama4"""
    i, j = torch.arange(LK)[:, None], torch.arange(LK)[None, :]
    return (q @ t(k)).masked_fill(~((j <= i) & (j // 4 == i // 4)), -math.inf).softmax(-1) @ v


@case("where(i <= j - 1 and n[b0] <= j, -inf, s)", plus(square, lambda g: torch.randint(1, LK, (B,), generator=g)))
def prefix(q, k, v, n):
    """prefix language models: the first keys are seen by all"""
    i, j = torch.arange(LK)[:, None], torch.arange(LK)[None, :]
    return (q @ t(k)).masked_fill(~((j <= i) | (j < n[:, None, None]))[:, None], -math.inf).softmax(-1) @ v


# ---- biases and relative positions

@case("0.25 * s + bias[b1, i, j] + -100 * float(m[b0 % 2, i, j])",
      lambda g: (rn(g, 4, H, 9, D), rn(g, 4, H, 9, D), rn(g, 4, H, 9, DV), rn(g, H, 9, 9), torch.rand(2, 9, 9, generator=g) > 0.5))
def windows_with_bias_and_shift_mask(q, k, v, bias, m):
    """swin: the mask of a window is that of its number modulo the windows of an image"""
    s = (q * 0.25) @ t(k) + bias.unsqueeze(0)
    s = s.view(2, 2, H, 9, 9) + (m * -100.0).unsqueeze(1).unsqueeze(0)
    return s.view(-1, H, 9, 9).softmax(-1) @ v


@case("s + rows[b0, i, j // 3] + columns[b0, i, j % 3]", lambda g: (rn(g, B, 9, D), rn(g, B, 9, D), rn(g, B, 9, DV), rn(g, B, 9, 3), rn(g, B, 9, 3)))
def rows_and_columns_of_an_image(q, k, v, rows, columns):
    """sam, vitdet: a bias that is a sum over two axes"""
    s = (q @ t(k)).view(B, 3, 3, 3, 3)
    s = s + rows.view(B, 3, 3, 3)[:, :, :, :, None] + columns.view(B, 3, 3, 3)[:, :, :, None, :]
    return s.reshape(B, 9, 9).softmax(-1) @ v


@case("s + einsum[b0, b1, i, j]", plus(square, lambda g: rn(g, LK, LK, D)))
def product_with_relative_positions(q, k, v, table):
    """wav2vec2-bert"""
    return (q @ t(k) + torch.einsum("bhld,lrd->bhlr", q, table)).softmax(-1) @ v


@case("s + relative[b0, b1, i, j + 8 - i]", plus(square, lambda g: rn(g, 2 * LK - 1, D)))
def positions_gathered(q, k, v, table):
    """deberta: the queries' product with every distance, gathered at theirs"""
    at = torch.arange(LK)[None, :] - torch.arange(LK)[:, None] + LK - 1
    relative = torch.einsum("bhld,rd->bhlr", q, table)
    return (0 + q @ t(k) + relative.gather(-1, at.expand(B, H, LK, LK))).softmax(-1) @ v


@case("s + where((17 * i + j + 9) % 18 <= 0, 0, x[b0, b1, (17 * i + j + 9) // 18, max(0, (17 * i + j + 9) % 18 - 1)])", plus(square, lambda g: rn(g, 2 * LK - 1, D)))
def positions_shifted(q, k, v, table):
    """transformer-xl, conformer: a matrix is padded by a column and read in rows that are one longer"""
    x = q @ table.t()
    x = F.pad(x, (1, 0)).view(B, H, 2 * LK, LK)[:, :, 1:].reshape(B, H, LK, 2 * LK - 1)[..., :LK]
    return (q @ t(k) + x).softmax(-1) @ v


@case("s + bias[b0, b1, i, at[j]]", plus(qkv, lambda g: rn(g, B, H, LQ, 2 * LK), lambda g: torch.randperm(2 * LK, generator=g)[:LK]))
def columns_selected(q, k, v, bias, at):
    """xlnet"""
    return (q @ t(k) + torch.index_select(bias, 3, at)).softmax(-1) @ v


@case("s * logit_scale[b1, 0, 0] + 16 * sigmoid(table[j + 8 - i, b1])", plus(square, lambda g: torch.rand(H, 1, 1, generator=g), lambda g: rn(g, 2 * LK - 1, H)))
def cosine_with_a_learned_scale(q, k, v, logit_scale, table):
    """swinv2"""
    at = torch.arange(LK)[None, :] - torch.arange(LK)[:, None] + LK - 1
    s = F.normalize(q, dim=-1) @ t(F.normalize(k, dim=-1)) * logit_scale
    return (s + 16 * torch.sigmoid(table[at.view(-1)].view(LK, LK, -1).permute(2, 0, 1))).softmax(-1) @ v


# ---- softmax, dropout

@case("s")
def softmax_by_places(q, k, v):
    """type_as, and the arguments in another order"""
    p = F.softmax((q @ t(k)).float(), dtype=torch.float32, dim=3).type_as(q)
    return torch.matmul(F.dropout(p, 0.0, True).type(v.dtype), v)


@case("s")
def dropout_by_its_module(q, k, v):
    return torch.nn.Dropout(0.3).eval()(torch.nn.Softmax(dim=-1)(q @ t(k))) @ v


# ---- heads

@case("s", lambda g: (rn(g, B, LK, 3 * H * D),))
def heads_unbound(x):
    """timm"""
    q, k, v = x.reshape(B, LK, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return ((q @ t(k)).softmax(dim=-1) @ v).transpose(1, 2).reshape(B, LK, H * D)


@case("s", lambda g: (rn(g, B, LK, 3 * H * D),))
def heads_in_chunks(x):
    """maxvit: three parts of every head"""
    q, k, v = x.view(B, LK, H, 3 * D).transpose(1, 2).chunk(3, dim=3)
    return ((q @ t(k)).softmax(dim=-1) @ v).permute(0, 2, 1, 3).contiguous().view(B, LK, H * D)


@case("s", lambda g: (rn(g, B, LK, 3 * H * D),))
def heads_sliced(x):
    """bloom: query, key and value of a head are neighbours"""
    x = x.view(B, LK, H, 3, D)
    q, k, v = (x[..., n, :].transpose(1, 2).reshape(B * H, LK, D) for n in range(3))
    o = torch.bmm(torch.bmm(q, t(k)).softmax(-1), v)
    return o.view(B, H, LK, D).permute(0, 2, 1, 3).reshape(B, LK, H * D)


@case("s", lambda g: (rn(g, B, 3 * H * D, 3, 3),))
def heads_of_an_image(x):
    """levit, coatnet: values on the left, the result an image again"""
    q, k, v = x.view(B, H, 3 * D, 9).split([D, D, D], dim=2)
    return (v @ t((t(q) @ k).softmax(dim=-1))).view(B, H * D, 3, 3)


@case("s", lambda g: (rn(g, B, LQ, H * D), rn(g, B, LK, H * D), rn(g, B, LK, H * DV)))
def keys_permuted_to_columns(q, k, v):
    """openai-gpt"""
    q, k, v = q.view(B, LQ, H, D).permute(0, 2, 1, 3), k.view(B, LK, H, D).permute(0, 2, 3, 1), v.view(B, LK, H, DV).permute(0, 2, 1, 3)
    return torch.matmul(torch.matmul(q, k).softmax(-1), v).permute(0, 2, 1, 3).contiguous().flatten(-2)


@case("s", lambda g: (rn(g, B, 8, LQ, D), rn(g, B, 2, LK, D), rn(g, B, 2, LK, DV)))
def keys_tiled(q, k, v):
    """jetmoe: heads share keys by their number modulo the key heads"""
    return (q @ t(k.repeat(1, 4, 1, 1))).softmax(-1) @ v.repeat(1, 4, 1, 1)


@case("s", lambda g: (rn(g, B, 8, LQ, D), rn(g, B, 1, LK, D), rn(g, B, 1, LK, DV)))
def one_key_head_broadcast(q, k, v):
    """falcon"""
    k, v = (torch.broadcast_to(x, (B, 8, *x.shape[2:])) for x in (k, v))
    return (q @ t(k)).softmax(-1) @ v


@case("s", lambda g: (rn(g, B, H, 12, D), rn(g, B, H, 12, D), rn(g, B, H, 12, DV)))
def banded(q, k, v):
    """every query has keys of its own, three neighbours"""
    k, v = (F.pad(x, (0, 0, 1, 1)).unfold(2, 3, 1) for x in (k, v))
    p = torch.einsum("bhid,bhidw->bhiw", q, k).softmax(-1)
    return (p[..., None, :] @ t(v)).squeeze(-2)


# ---- what real models do that is refused

@case(inputs=plus(qkv, lambda g: rn(g, H)), reason=Reason.WEIGHT_PROGRAM)
def two_kinds_of_weights(q, k, v, gate):
    """convit: a second softmax, of positions, mixed in by a gate"""
    g = torch.sigmoid(gate).view(1, -1, 1, 1)
    positions = -(torch.arange(LQ)[:, None] - torch.arange(LK)).abs() * 1.0
    p = (1.0 - g) * (q @ t(k)).softmax(dim=-1) + g * positions.softmax(dim=-1)
    p /= p.sum(dim=-1).unsqueeze(-1)
    return p @ v


@case(reason=Reason.WEIGHT_PROGRAM)
def hard_assignment(q, k, v):
    """groupvit: one-hot in value, soft in its gradient"""
    soft = (q @ t(k)).softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.max(-1, keepdim=True)[1], 1.0)
    return (hard - soft.detach() + soft) @ v


@case(inputs=lambda g: (rn(g, B, H, LQ, D), rn(g, B, H, LK, D), rn(g, B, H, 4, D), rn(g, B, H, LK, DV), rn(g, B, H, 4, DV)), reason=Reason.WEIGHTS_USED)
def local_and_global_keys(q, k, k_global, v, v_global):
    """pegasus_x: one softmax, cut in two"""
    p = torch.cat([q @ t(k_global), q @ t(k)], -1).softmax(-1)
    return p[..., :4] @ v_global + p[..., 4:] @ v
