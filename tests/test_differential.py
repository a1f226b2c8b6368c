"""Differential: random attention-like chains, and programs written to violate one assumption each, compiled against eager.

A chain is a `Plan` that Hypothesis draws. The compiled function must give eager's values, gradients and changed inputs; the
truth is the same chain in float64, and the error may be a few times eager's own. Whether a chain is rewritten or refused is
not the question here: a refusal is right as long as nothing changes. Each plan runs on the fused CPU kernel and on the
walker with tiles of a few elements. A NaN must stand where eager's stands.
"""
from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnfuse import ops, tiling
from tests.test_passes import rewrite

LOW = torch.finfo(torch.float32).min
Chain = Callable[..., Any]


# ---- running and comparing

@dataclass
class Outcome:
    """What a call gave: its results, its arguments afterwards, and the gradients of the leaves behind them."""

    results: list[Any]
    arguments: list[Any]
    gradients: list[Tensor | None]


def call(fn: Chain, inputs: list[Any], train: bool) -> Outcome:
    """Run on copies; floating inputs are not leaves, so that they may be changed in place."""
    leaves = [x.detach().clone().as_strided(x.shape, x.stride()) if _dense(x) else x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
    for x in leaves:
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_(train)
    arguments = [_handed(x) if isinstance(x, Tensor) and x.is_floating_point() and train else x for x in leaves]
    with torch.set_grad_enabled(train):
        results = fn(*arguments)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    if train:
        torch.manual_seed(5)
        loss = sum((r.double() * torch.randn(r.shape, dtype=torch.float64)).sum() for r in results if isinstance(r, Tensor) and r.requires_grad)
        if isinstance(loss, Tensor):
            loss.backward()
    return Outcome(results, arguments, [x.grad if isinstance(x, Tensor) else None for x in leaves])


def _dense(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() > 0 and x.untyped_storage().nbytes() == x.numel() * x.itemsize and not x.is_contiguous()


class _Handed(torch.autograd.Function):
    """The identity with memory of its own and the same strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: D102
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) if 0 not in x.stride() else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: D102
        return grad


def _handed(x: Tensor) -> Tensor:
    return _Handed.apply(x)


def doubled(inputs: list[Any]) -> list[Any]:
    """The same inputs for the truth."""
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]


def agree(got: Outcome, want: Outcome, truth: Outcome) -> None:
    """Fail where the compiled call is not eager's up to a few times eager's own error."""
    assert len(got.results) == len(want.results)
    pairs = [*zip(got.results, want.results, truth.results, strict=True), *zip(got.arguments, want.arguments, truth.arguments, strict=True)]
    for a, b, c in pairs:
        _close(a, b, c, rows=True)
    broken = any(isinstance(b, Tensor) and b.is_floating_point() and not bool(b.isfinite().all()) for b in want.results)
    for a, b, c in zip(got.gradients, want.gradients, truth.gradients, strict=True):
        zero = lambda g: g is None or not bool(g.abs().sum() > 0)
        if a is None or b is None:
            assert zero(a) and zero(b), "a gradient arrives where eager has none, or the other way round"
        elif not broken:
            _close(a, b, c, rows=False)


def _close(a: Any, b: Any, c: Any, *, rows: bool) -> None:
    if not isinstance(b, Tensor):
        assert a == b
        return
    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    if not b.is_floating_point():
        assert torch.equal(a, b)
        return
    assert torch.equal(a.isnan(), b.isnan()), "NaN elsewhere than in eager"
    a, b, c = (x.detach().double() for x in (a, b, c))
    finite = b.isfinite() & c.isfinite()
    assert torch.equal(a[~b.isfinite()].nan_to_num(), b[~b.isfinite()].nan_to_num())
    ours, eager = ((x - c).masked_fill(~finite, 0.0).abs() for x in (a, b))
    size = c.masked_fill(~finite, 0.0).abs()
    if rows and a.dim():
        ours, eager, size = (x.amax(-1) if x.shape[-1] else x.sum(-1) for x in (ours, eager, size))
    elif a.numel():
        ours, eager, size = ours.max(), eager.max(), size.max()
    floor = (2e-5 if b.numel() and rows else 4e-5) * size.clamp(min=1.0)
    bad = ours > 5 * eager + floor
    assert not bool(bad.any()), f"off by {float(ours[bad].max()):.3g}, eager by {float(eager[bad].max()):.3g}"


@contextlib.contextmanager
def walked(tile: int, rows: int, merge: int) -> Iterator[None]:
    """The walker computes everything, in tiles of at most this many elements and queries."""
    before = tiling.CPU_TILE, tiling.CPU_ROWS, tiling.MERGE
    tiling.CPU_TILE, tiling.CPU_ROWS, tiling.MERGE = tile, rows, merge
    try:
        with ops.force_executor("walker"):
            yield
    finally:
        tiling.CPU_TILE, tiling.CPU_ROWS, tiling.MERGE = before


def check(fn: Chain, inputs: list[Any], *more: list[Any], train: bool = True, exact: Chain | None = None, dynamic: bool | None = None) -> list[Any]:
    """Compare the compiled `fn` with eager on each list of inputs, by both executors; returns the sites."""
    compiled, reports = rewrite(fn, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in (inputs, *more):
            try:
                want = call(fn, given, train)
            except (RuntimeError, IndexError, ValueError):
                hypothesis.reject()                     # eager itself does not allow it
            truth = call(exact or fn, doubled(given), train)
            agree(call(compiled, given, train), want, truth)
            with walked(64, 3, 2):
                agree(call(compiled, given, train), want, truth)
    return [s for r in reports for s in r.sites]


# ---- plans

@dataclass(frozen=True)
class Sizes:
    """Lengths of one call."""

    batch: tuple[int, ...]
    groups: int                      # query heads to a key head
    q: int
    k: int
    d: int
    e: int

    @property
    def heads(self) -> int:
        """Query heads; 1 where there is no head axis."""
        return self.batch[-1] if self.batch else 1


@dataclass(frozen=True)
class Plan:
    """Everything that was drawn."""

    sizes: Sizes
    longer: tuple[int, int] | None = None          # a second pair of lengths: then one dynamic compilation serves both
    layout: str = "contiguous"
    shared: bool = False
    scaled: str = "none"
    product: str = "matmul"
    steps: tuple[tuple[Any, ...], ...] = ()
    softmax: str = "function"
    after: str = "none"
    value: str = "matmul"
    repeat: str = "expand"
    seen: str = "none"
    change: str = "none"
    stop: str = "none"
    ending: str = "none"
    seed: int = field(default=0)


KEYS = ("causal", "tril", "triu", "window", "offset", "bool", "uint8", "int64", "ids", "positions", "catted", "padded", "gathered", "set",
        "sliced", "rows", "left", "narrow", "rolled", "modulo", "floored", "half")
FILLS = (-math.inf, -1e9, LOW, -1e4, -10.0)
APPLIED = ("fill", "fill_", "where", "where_not", "add", "sub", "mulsub", "iadd")
BIASES = ("float", "float16", "int", "table", "alibi", "buffer", "minus", "negated", "clamped", "embedded", "uint8")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A chain of everything in the table of operations."""
    one = lambda *xs: draw(st.sampled_from(xs))
    batch = one((), (2,), (2, 4), (2, 4), (2, 4), (1, 4), (2, 1, 2), (2, 1))
    groups = one(1, 1, 2) if batch and batch[-1] % 2 == 0 else 1
    shared = groups == 1 and draw(st.integers(0, 9)) == 0
    q = one(7, 5, 1, 2, 13, 0)
    k = q if shared or draw(st.booleans()) else one(9, 1, 2, 6, 11, 17, 0)
    d = one(8, 4, 1, 3)
    sizes = Sizes(batch, groups, q, k, d, d if shared else one(8, 3, 1, 4))
    number = lambda name, *xs: st.tuples(st.just(name), st.sampled_from(xs))
    mask = st.tuples(st.just("mask"), st.sampled_from(KEYS), st.sampled_from(FILLS), st.sampled_from(APPLIED), st.integers(0, 31))
    step = st.one_of(
        number("scale", 0.5, -0.7, 2, 1.0), number("divide", 2.0, 3), number("softcap", 2.0, 30.0), number("shift", 1.5, -2), number("scale_", 0.5),
        *(st.tuples(st.just(name)) for name in ("temperature", "float", "double", "bounded")), mask, mask,
        st.tuples(st.just("bias"), st.sampled_from(BIASES), st.integers(0, 31)))
    rarely = lambda *xs: one(*xs) if draw(st.integers(0, 3)) == 0 else "none"
    longer = None
    if min(q, k) > 1 and draw(st.integers(0, 3)) == 0:
        longer = (q + 6, k + 6)
    return Plan(
        sizes, longer, one("contiguous", "contiguous", "transposed", "strided", "expanded"), shared, one("none", "q", "k", "both", "tensor", "clone_"),
        one("matmul", "mT", "einsum", "bmm", "baddbmm", "turned", "permuted", "einsum_kq"), tuple(draw(st.lists(step, max_size=4))),
        one("function", "function", "method", "float32", "by_hand", "plain_exp", "logsumexp", "log", "turned", "late", "detached"),
        rarely("gate", "filled", "dropout0", "eval", "repaired", "refilled", "set_", "again", "again_late", "doubled_", "multiplied", "cast"), one("matmul", "einsum", "bmm", "left", "einsum_bhd"),
        one("expand", "interleave", "grouped"), rarely("scores", "weights", "mask", "view", "first"),
        rarely("bias_before", "bias_between", "bias_after", "k_between", "v_between", "result_", "merged_"),
        rarely("bias", "k", "v", "scores", "weights", "bias_no_grad", "scores_no_grad"), rarely("merge", "merge_flat", "other", "residual"),
        draw(st.integers(0, 2 ** 20)))


def extra_shape(sizes: Sizes, bits: int) -> tuple[int, ...]:
    """A shape that broadcasts to the scores: every bit keeps one dimension, and leading dimensions of 1 are dropped half of the time."""
    full = (*sizes.batch, sizes.q, sizes.k)
    shape = [n if bits >> (len(full) - 1 - p) & 1 else 1 for p, n in enumerate(full)]
    while bits & 1 and len(shape) > 1 and shape[0] == 1:
        shape.pop(0)
    return tuple(shape)


def inputs_of(plan: Plan, sizes: Sizes) -> list[Any]:
    """q, k, v, then one tensor a step (whether it needs it or not), then a bias that is changed in place."""
    g = torch.Generator().manual_seed(plan.seed)
    rn = lambda *shape: torch.randn(*shape, generator=g)

    def laid(*shape: int) -> Tensor:
        if plan.layout == "transposed" and len(shape) > 2:
            return rn(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-3, -2)
        if plan.layout == "strided":
            return rn(*shape[:-1], 2 * shape[-1])[..., ::2]
        if plan.layout == "expanded" and len(shape) > 2:
            return rn(1, *shape[1:]).expand(shape)
        return rn(*shape)

    few = (*sizes.batch[:-1], sizes.batch[-1] // sizes.groups) if sizes.groups > 1 else sizes.batch
    out: list[Any] = [laid(*sizes.batch, sizes.q, sizes.d)]
    out += [] if plan.shared else [laid(*few, sizes.k, sizes.d), laid(*few, sizes.k, sizes.e)]
    for step in plan.steps:
        out.append(_extra(step, sizes, rn, g))
    out.append(rn(sizes.q, sizes.k))
    out.append(torch.rand(sizes.heads, 1, 1, generator=g) + 0.5)
    return out


def _extra(step: tuple[Any, ...], sizes: Sizes, rn: Callable[..., Tensor], g: torch.Generator) -> Tensor:
    kind = step[1] if len(step) > 1 else ""
    shape = extra_shape(sizes, step[-1]) if step[0] in ("mask", "bias") else ()
    if step[0] == "temperature":
        return torch.rand(sizes.heads, 1, 1, generator=g) + 0.5
    if kind in ("bool", "set", "half"):
        return torch.rand(shape, generator=g) > 0.4
    if kind in ("uint8", "int64"):
        return torch.randint(0, 3, shape, generator=g).to(torch.uint8 if kind == "uint8" else torch.int64)
    if kind in ("ids", "positions", "narrow"):
        return torch.randint(0, 3, (max(sizes.q, sizes.k, 1),), generator=g).to(torch.int32 if kind == "narrow" else torch.int64)
    if kind in ("rows", "left"):
        return torch.randint(0, sizes.k + 1, (sizes.heads,), generator=g)
    if kind == "int":
        return torch.randint(-4, 5, shape, generator=g)
    if kind == "float16":
        return rn(*shape).half()
    if kind in ("table", "gathered", "embedded"):
        return rn(sizes.q + sizes.k + 1, sizes.heads)
    if kind == "alibi":
        return torch.rand(sizes.heads, generator=g)
    if kind in ("buffer", "sliced"):
        return rn(sizes.q + 5, sizes.k + 5)
    return rn(*shape) if shape else rn(1)


def chain_of(plan: Plan, exact: bool = False) -> Chain:
    """The function that a plan stands for; `exact` leaves out the casts, for the truth."""
    steps = plan.steps

    def masked(kind: str, x: Tensor, n: int, m: int) -> Tensor:
        """True where the score is to go."""
        i, j = torch.arange(n)[:, None], torch.arange(m)
        if kind == "causal":
            return j > i
        if kind == "tril":
            return ~torch.ones(n, m, dtype=torch.bool).tril(m - n)
        if kind == "triu":
            return torch.triu(torch.ones(n, m), diagonal=1).bool()
        if kind == "window":
            return (i - j).abs() > 2
        if kind == "offset":
            return (j < i - 1) | (j > i + 3)
        if kind == "bool":
            return x
        if kind == "uint8":
            return (1 - x) > 1                          # wraps around where x is 2
        if kind == "int64":
            return 1 - x == 0
        if kind == "half":
            return (1.0 - x.half()).bool()
        if kind == "ids":
            return x[:n, None] != x[None, :m]
        if kind == "narrow":
            return x[None, :m] - x[:n, None] > 0
        if kind == "positions":
            return (j + x[:m]) > (i + x[:n, None])
        if kind == "catted":
            return torch.cat([torch.zeros(n, 2, dtype=torch.bool), torch.ones(n, m, dtype=torch.bool).triu(1)], -1)[:, -m:] if m else j > i
        if kind == "padded":
            return F.pad(j[:max(m - 1, 0)] > 2, (0, min(m, 1)), value=True)
        if kind == "gathered":
            return x[(j - i).clamp(-n, m) + n][..., 0] > 0
        if kind == "set":
            out = torch.zeros(n, m, dtype=torch.bool)
            out[:, -3:] = True
            out[-2:, :4] = False
            out[:1] = x.reshape(-1)[:1]
            return out
        if kind == "sliced":
            return x[-n:, -m:] > 0 if n and m else j > i
        if kind == "rows":
            return j >= x[:, None, None]
        if kind == "left":
            return j < x[:, None, None]
        if kind == "rolled":
            return (j > 2).roll(1).flip(0)
        if kind == "modulo":
            return (i - j) % 3 == 1
        return (j - 4) // 3 > (i - 2) // 2

    def applied(s: Tensor, gone: Tensor, fill: float, how: str) -> Tensor:
        if how == "fill":
            return s.masked_fill(gone, fill)
        if how == "fill_":
            return s.masked_fill_(gone, fill)
        if how == "where":
            return torch.where(gone, fill, s)
        if how == "where_not":
            return torch.where(~gone, s, torch.full((), fill, dtype=s.dtype))
        fill = -1e9 if math.isinf(fill) else fill
        if how == "add":
            return s + torch.where(gone, fill, 0.0)
        if how == "sub":
            return s - gone.to(s.dtype) * -fill
        if how == "mulsub":
            keep = 1 - gone.to(s.dtype)
            return s * keep + (1.0 - keep) * fill
        s += gone * fill
        return s

    def biased(s: Tensor, kind: str, x: Tensor, n: int, m: int) -> Tensor:
        i, j = torch.arange(n)[:, None], torch.arange(m)
        if kind == "minus":
            return s - x
        if kind == "negated":
            return -x + s
        if kind == "clamped":
            return torch.add(s, x.clamp(-0.5, 0.7), alpha=2)
        if kind == "uint8":
            return s + (x > 0).to(torch.uint8) * 2
        if kind == "table":
            return s + x[(j - i) + n].permute(2, 0, 1).squeeze(0)
        if kind == "embedded":
            return s + F.embedding(j - i + n, x, padding_idx=1)[..., 0]
        if kind == "alibi":
            return s + x[:, None, None] * (j - i)
        if kind == "buffer":
            return s + x[-n:, :m] if n else s
        return s + x

    def grown(x: Tensor, like: Tensor, groups: int) -> Tensor:
        if groups == 1:
            return x
        if plan.repeat == "interleave":
            return x.repeat_interleave(groups, -3)
        return x.unsqueeze(-3).expand(*x.shape[:-2], groups, *x.shape[-2:]).reshape(*like.shape[:-2], *x.shape[-2:])

    def scored(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        flat = lambda x: x.reshape(-1, *x.shape[-2:])
        shape = (*q.shape[:-1], k.shape[-2])
        if plan.product == "mT":
            return q @ k.mT
        if plan.product == "einsum":
            return torch.einsum("...id,...jd->...ij", q, k)
        if plan.product == "einsum_kq":
            return torch.einsum("...jd,...id->...ij", k, q)
        if plan.product == "bmm":
            return torch.bmm(flat(q), flat(k).transpose(1, 2)).view(shape)
        if plan.product == "baddbmm":
            return torch.baddbmm(bias[None].to(q.dtype), flat(q), flat(k).transpose(1, 2), beta=0.5, alpha=0.5).view(shape)
        if plan.product == "turned":
            return (k @ q.transpose(-1, -2)).transpose(-1, -2)
        if plan.product == "permuted" and q.dim() == 4:
            return torch.matmul(q.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3), k.permute(0, 1, 3, 2))
        return torch.matmul(q, k.transpose(-2, -1))

    def weighed(s: Tensor) -> Tensor:
        if plan.softmax == "method":
            return s.softmax(dim=s.dim() - 1)
        if plan.softmax == "float32" and not exact:
            return torch.softmax(s, -1, dtype=torch.float32)
        if plan.softmax == "by_hand":
            e = (s - s.amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True)
        if plan.softmax == "late":
            return (s - s.amax(-1, keepdim=True)).exp()
        if plan.softmax == "detached":
            return F.softmax(s - s.detach().amax(-1, keepdim=True), dim=-1)
        if plan.softmax == "plain_exp":
            e = s.exp()
            return e / e.sum(-1, keepdim=True)
        if plan.softmax == "logsumexp":
            return (s - s.logsumexp(-1, keepdim=True)).exp()
        if plan.softmax == "log":
            return F.log_softmax(s, -1).exp()
        if plan.softmax == "turned":
            return s.transpose(-1, -2).softmax(-2).transpose(-1, -2)
        return F.softmax(s, dim=-1)

    def adjusted(p: Tensor, gate: Tensor) -> Tensor:
        n, m = p.shape[-2:]
        if plan.after == "gate":
            return p * gate
        if plan.after == "filled":
            return p.masked_fill(torch.arange(m) > torch.arange(n)[:, None] + 1, 0.0)
        if plan.after == "dropout0":
            return F.dropout(p, 0.0, True)
        if plan.after == "eval":
            return F.dropout(p, 0.4, False)
        if plan.after == "repaired":
            return torch.nan_to_num(p, 0.0)
        if plan.after == "refilled":
            return p.masked_fill(p.isnan().any(-1, keepdim=True), 0.0) * 0.5
        if plan.after == "set_":
            p = p * 1.0
            p[p != p] = 0.0
            return p
        if plan.after == "again":
            p = p * (torch.arange(m) != 1)
            return p / p.sum(-1, keepdim=True)
        if plan.after == "again_late":
            return p.masked_fill(torch.arange(m) > torch.arange(n)[:, None] + 1, 0.0)
        if plan.after == "doubled_":
            return (p * 1.0).mul_(2.0)
        if plan.after == "multiplied":
            return p * (torch.arange(m) != 1)
        if plan.after == "cast" and not exact:
            return p.double().float()
        return p

    def summed(p: Tensor, v: Tensor) -> Tensor:
        flat = lambda x: x.reshape(-1, *x.shape[-2:])
        if plan.value == "einsum":
            return torch.einsum("...ij,...jd->...id", p, v)
        if plan.value == "bmm":
            return torch.bmm(flat(p), flat(v)).view(*p.shape[:-1], v.shape[-1])
        if plan.value == "left":
            return (v.transpose(-1, -2) @ p.transpose(-1, -2)).transpose(-1, -2)
        if plan.value == "einsum_bhd" and p.dim() == 4:
            return torch.einsum("bhij,bhjd->bihd", p, v).transpose(1, 2)
        return p @ v

    def chain(*given: Tensor) -> Any:
        q, (k, v) = given[0], (given[0], given[0]) if plan.shared else given[1:3]
        extras, bias, gate = given[1 if plan.shared else 3:-2], given[-2], given[-1]
        gate = gate if q.dim() > 2 else gate[0]
        groups = plan.sizes.groups
        single = q.dim() < 3
        if plan.stop == "k":
            k = k.detach()
        if plan.stop == "v":
            v = v.detach()
        if plan.change == "bias_before":
            bias.mul_(0.5)
        if plan.scaled in ("q", "both"):
            q = q * 0.5
        if plan.scaled in ("k", "both"):
            k = k / 3.0
        if plan.scaled == "tensor":
            q = q * gate
        if plan.scaled == "clone_":
            q = q.clone()
            q.mul_(0.5)
        if groups > 1 and plan.repeat == "grouped":
            q = q.unflatten(-3, (-1, groups)).flatten(-3, -2)
            k, v = k.contiguous(), v
        else:
            k, v = grown(k, q, groups), grown(v, q, groups)
        s = scored(q, k, bias) if not (groups > 1 and plan.repeat == "grouped") else q @ k.transpose(-1, -2)
        if groups > 1 and plan.repeat == "grouped":
            s = s.unflatten(-2, (groups, -1)).flatten(-4, -3)
            v = grown(v, s, groups) if v.dim() == s.dim() else v
        n, m = s.shape[-2:]
        raw, seen_mask = s, None
        if plan.stop == "scores":
            s = s.detach()
        if plan.stop == "scores_no_grad":
            with torch.no_grad():
                s = s * 2.0
        view = s.view(-1) if plan.seen == "view" else None
        for step, x in zip(steps, extras, strict=True):
            if plan.stop == "bias" and x.is_floating_point():
                x = x.detach()
            if plan.stop == "bias_no_grad" and x.is_floating_point():
                with torch.no_grad():
                    x = x * 0.5
            if single and step[0] in ("temperature",) or single and len(step) > 1 and step[1] in ("rows", "left", "alibi"):
                x = x[0] if step[0] == "temperature" else x[:1]
            if step[0] == "scale":
                s = s * step[1]
            elif step[0] == "scale_":
                s = s.mul_(step[1])
            elif step[0] == "divide":
                s = s / step[1]
            elif step[0] == "temperature":
                s = s / x
            elif step[0] == "softcap":
                s = torch.tanh(s / step[1]) * step[1]
            elif step[0] == "shift":
                s = step[1] + s
            elif step[0] == "bounded":
                s = s.clamp(min=-20.0)
            elif step[0] == "float":
                s = s if exact else s.float()
            elif step[0] == "double":
                s = s if exact else s.double().float()
            elif step[0] == "bias":
                s = biased(s, step[1], x, n, m)
            else:
                gone = masked(step[1], x, n, m)
                gone = gone[0] if single and gone.dim() > 2 else gone
                seen_mask = gone
                s = applied(s, gone, step[2], step[3])
        if plan.change == "bias_between":
            s = s + bias
            bias.mul_(2.0)
        if plan.change == "k_between":
            k.add_(1.0)
        if plan.change == "bias_after":
            s = s + bias
        w = weighed(s)
        p = adjusted(w, gate)
        if plan.stop == "weights":
            p = p.detach()
        if plan.change == "v_between":
            v.mul_(2.0)
        o = summed(p.to(v.dtype), v)
        if plan.softmax == "late" or plan.after == "again_late":
            o = o / (p if plan.after == "again_late" else w).sum(-1, keepdim=True)
        if plan.change == "bias_after":
            bias.zero_()
        if plan.change == "result_":
            o.add_(1.0)
        if plan.ending == "merge" and o.dim() > 2:
            o = o.transpose(-3, -2).reshape(*o.shape[:-3], o.shape[-2], -1)
        if plan.ending == "merge_flat" and o.dim() > 2:
            o = o.transpose(-3, -2).contiguous().flatten(-2)
        if plan.ending == "other" and o.dim() > 2:
            o = o.transpose(-2, -1).reshape(-1, *o.shape[-1:])
        if plan.ending == "residual":
            o = o + o.mean()
        if plan.change == "merged_":
            o = o.mul_(2.0)
        also = {"scores": raw, "weights": p, "mask": seen_mask, "view": view, "first": p[..., :1]}.get(plan.seen)
        return o if also is None else (o, also)

    return chain


def _holds(plan: Plan) -> None:
    """One plan, by both executors; twice where one compilation is to serve two lengths."""
    more = []
    if plan.longer is not None:
        q, k = plan.longer
        more.append(inputs_of(plan, Sizes(plan.sizes.batch, plan.sizes.groups, q, k, plan.sizes.d, plan.sizes.e)))
    check(chain_of(plan), inputs_of(plan, plan.sizes), *more, exact=chain_of(plan, exact=True), dynamic=True if more else None)


def _sweep(examples: int, seed: int) -> None:
    quiet = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.data_too_large]

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=False, database=None, suppress_health_check=quiet, print_blob=False)
    @hypothesis.given(plans())
    def holds(plan: Plan) -> None:
        _holds(plan)

    holds()


def test_random_chains(seed: int) -> None:
    _sweep(30, seed)


@pytest.mark.slow
def test_many_random_chains(seed: int) -> None:
    _sweep(3000, seed)


# ---- near-misses: each program violates one assumption; a row is (inputs, may gradients be taken, must it be refused: None for "either")

NEAR: dict[str, tuple[Chain, Callable[[], list[Any]], bool, bool | None]] = {}
B, H, LQ, LK, D = 2, 4, 7, 9, 8


def qkv(*more: Callable[[], Any], q: int = LK, k: int = LK, e: int = D) -> Callable[[], list[Any]]:
    """Fresh inputs."""
    return lambda: [torch.randn(B, H, q, D), torch.randn(B, H, k, D), torch.randn(B, H, k, e), *(m() for m in more)]


def near(inputs: Callable[[], list[Any]] = qkv(), train: bool = True, refused: bool | None = None) -> Callable[[Chain], Chain]:
    """Enter a program under its own name."""
    def enter(fn: Chain) -> Chain:
        NEAR[fn.__name__] = fn, inputs, train, refused
        return fn
    return enter


def s_(q: Tensor, k: Tensor) -> Tensor:
    """Raw scores."""
    return q @ k.transpose(-1, -2)


bias = lambda: torch.randn(H, LK, LK)
integers = lambda dtype: lambda: torch.randint(0, 3, (B, 1, 1, LK)).to(dtype)


@near(qkv(bias), refused=False)
def detached_bias(q, k, v, b):
    return (s_(q, k) + b.detach() * 2).softmax(-1) @ v


@near(refused=True)
def detached_weights(q, k, v):
    return s_(q, k).softmax(-1).detach() @ v


@near(refused=True)
def detached_scores(q, k, v):
    return s_(q, k).detach().softmax(-1) @ v


@near(qkv(bias), refused=False)
def bias_without_gradient(q, k, v, b):
    with torch.no_grad():
        b = b * 2 + 1
    return (s_(q, k) + b).softmax(-1) @ v


@near(refused=True)
def scores_without_gradient(q, k, v):
    with torch.no_grad():
        s = s_(q, k)
    return s.softmax(-1) @ v


@near(lambda: [torch.randn(B, H, LQ, D), torch.randn(B, 1, LK, D), torch.randn(B, 1, LK, D)])
def repeated_without_gradient(q, k, v):
    with torch.no_grad():
        k = k.repeat_interleave(H, 1)
    return s_(q, k).softmax(-1) @ v.repeat_interleave(H, 1)


@near(qkv(bias), refused=True)
def changed_without_gradient(q, k, v, b):
    b = b * 1
    with torch.no_grad():
        b.mul_(3.0)
    return (s_(q, k) + b).softmax(-1) @ v


@near(qkv(bias))
def detached_in_a_checkpoint(q, k, v, b):
    return checkpoint(lambda q, k, v, b: (s_(q, k) + b.detach()).softmax(-1) @ v, q, k, v, b, use_reentrant=False)


@near(refused=True)
def maximum_over_queries(q, k, v):
    s = s_(q, k)
    return (s - s.amax(-2, keepdim=True)).softmax(-1) @ v


@near(refused=True)
def maximum_over_heads(q, k, v):
    s = s_(q, k)
    return (s - s.amax(1, keepdim=True)).softmax(-1) @ v


@near(train=False, refused=True)
def maximum_of_some_columns(q, k, v):
    """which are -inf in a row where others are not"""
    s = s_(q, k).masked_fill((torch.arange(LK)[:, None] == 2) & (torch.arange(LK) < 3), -math.inf)
    return (s - s[..., :3].amax(-1, keepdim=True)).softmax(-1) @ v


@near(qkv(bias), refused=False)
def maximum_of_a_bias_without_gradient(q, k, v, b):
    return (s_(q, k) + b.amax(-2, keepdim=True).detach()).softmax(-1) @ v


@near(qkv(bias), refused=False)
def maximum_of_a_detached_bias(q, k, v, b):
    with torch.no_grad():
        most = b.max(-2, keepdim=True).values
    return (s_(q, k) + b.detach().amax(-2, keepdim=True) + most).softmax(-1) @ v


@near(refused=True)
def scaled_by_a_detached_maximum(q, k, v):
    s = s_(q, k)
    return (s / s.detach().amax(-1, keepdim=True).exp()).softmax(-1) @ v


@near(qkv(bias), refused=True)
def larger_of_two_detached(q, k, v, b):
    s = s_(q, k)
    return (s - torch.max(s, b).detach()).softmax(-1) @ v


@near(refused=True)
def detached_maximum_over_queries(q, k, v):
    s = s_(q, k)
    return (s - s.detach().amax(-2, keepdim=True)).softmax(-1) @ v


@near(refused=True)
def detached_scores_compared(q, k, v):
    s = s_(q, k)
    return s.masked_fill(s.detach() < s.detach().amax(-1, keepdim=True) - 1.0, -1e9).softmax(-1) @ v


@near(refused=True)
def normalised_by_a_detached_sum(q, k, v):
    e = s_(q, k).exp()
    return (e @ v) / e.sum(-1, keepdim=True).detach()


@near(qkv(lambda: torch.rand(LK, LK) > 0.5), refused=False)
def elements_assigned_by_a_mask(q, k, v, m):
    a = torch.zeros(LK, LK)
    a[m] = -1.0
    a[m[0]] = 2.0
    return (s_(q, k) + a).softmax(-1) @ v


@near(qkv(lambda: torch.rand(LK) > 0.5))
def rows_assigned_by_a_mask(q, k, v, m):
    a = torch.zeros(LK, LK)
    a[m] = torch.arange(LK) * 0.1
    return (s_(q, k) + a).softmax(-1) @ v


@near()
def rows_assigned_by_number(q, k, v):
    a = torch.zeros(LK, LK)
    a[torch.tensor([1, 3])] = 0.5
    return (s_(q, k) + a).softmax(-1) @ v


@near(train=False, refused=True)
def weights_changed_behind_the_product(q, k, v):
    p = s_(q, k).softmax(-1) * 1.0
    o = p.detach() @ v
    p[p != p] = 0.0
    return o, p * 2.0


@near(qkv(lambda: torch.rand(B, LK) > 0.5), refused=False)
def exponentials_of_a_masked_row(q, k, v, m):
    """whose sum is 0: NaN for every value"""
    s = s_(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp() * (m[:, None, None] & (torch.arange(LK) > 1)[:, None])
    return (e @ v) / e.sum(-1, keepdim=True)


@near(qkv(lambda: torch.randn(B, LK)), train=False, refused=True)
def gate_of_another_softmax(q, k, v, x):
    return (x[:, None, None, :] + torch.zeros(LK, 1)).softmax(-1) * s_(q, k).softmax(-1) @ v


@near(qkv(lambda: torch.randn(B, LK)), refused=False)
def floats_compared(q, k, v, x):
    return torch.where(x[:, None, :, None] <= x[:, None, None, :], s_(q, k), -1e9).softmax(-1) @ v


@near(qkv(lambda: torch.rand(B, LK) > 0.5), refused=False)
def bools_compared(q, k, v, x):
    return torch.where(x[:, None, :, None] <= x[:, None, None, :], s_(q, k), -1e9).softmax(-1) @ v


@near(qkv(integers(torch.uint8)))
def unsigned_wraps_around(q, k, v, m):
    return (s_(q, k) + (1 - m) * 0.1 + (-m) * 0.01 + m * 200).softmax(-1) @ v


@near(qkv(integers(torch.uint8)))
def unsigned_beside_a_negative_number(q, k, v, m):
    return s_(q, k).masked_fill(m > -1, -1e9).softmax(-1) @ v


@near(qkv(integers(torch.int64)))
def narrowing_casts_wrap_around(q, k, v, m):
    return (s_(q, k) + (m * 200).to(torch.int8) * 0.1 + (m * 2_000_000_000).int() * 1e-9).softmax(-1) @ v


@near(qkv(lambda: torch.tensor([2 ** 31 - 1] * 3 + [-2] * 3 + [0] * (LK - 6), dtype=torch.int32)), train=False)
def sentinels_subtracted(q, k, v, p):
    return s_(q, k).masked_fill(p[None, :] - p[:, None] > 0, -1e9).softmax(-1) @ v


@near(qkv(lambda: torch.arange(LK) + 5000), train=False)
def parity_of_squares(q, k, v, m):
    return s_(q, k).masked_fill(m ** 2 % 2 == 0, -1e9).softmax(-1) @ v


@near(qkv(lambda: torch.arange(LK) + 4000), train=False)
def identities_in_half(q, k, v, ids):
    ids = ids.half()
    return s_(q, k).masked_fill(ids[None] != ids[:, None], -1e9).softmax(-1) @ v


@near(lambda: [torch.randn(1, 270, D) for _ in range(3)], train=False)
def positions_in_bfloat16(q, k, v):
    i = torch.arange(270, dtype=torch.bfloat16)
    return s_(q, k).masked_fill(i[None] > i[:, None], -1e9).softmax(-1) @ v


@near(qkv(lambda: torch.arange(LK).double() * 10 + 1.7e9), train=False)
def times_in_float64(q, k, v, t):
    apart = (t[None] - t[:, None]).abs()
    return (s_(q, k) - 0.01 * apart.float()).masked_fill(apart > 35, -1e9).softmax(-1) @ v


@near(qkv(lambda: torch.randn(20, H)), refused=False)
def embedding_with_a_padding_row(q, k, v, w):
    at = torch.arange(LK) - torch.arange(LK)[:, None] + LK
    return (s_(q, k) + F.embedding(at, w, padding_idx=3).permute(2, 0, 1)).softmax(-1) @ v


@near(qkv(bias), refused=False)
def slice_from_before_the_start(q, k, v, b):
    m = torch.zeros(LK, LK)
    m[:, -100:].fill_(-0.5)
    return (s_(q, k) + b[..., -100:] + m * torch.arange(LK)).softmax(-1) @ v


@near(refused=False)
def dimensions_from_the_end(q, k, v):
    m = torch.zeros(LK, LK)
    m.narrow(-1, 0, 3).fill_(-1e9)
    m.select(-1, 5).fill_(-2.0)
    m = torch.slice_scatter(m, torch.ones(LK, 3), dim=-1, start=-400, end=3)
    return (s_(q, k) + m).softmax(-1) @ v


@near(refused=True)
def diagonal_filled(q, k, v):
    m = torch.zeros(LK, LK)
    m.fill_diagonal_(-1e9)
    return (s_(q, k) + m).softmax(-1) @ v


@near(train=False)
def by_hand_without_maximum_in_a_masked_row(q, k, v):
    e = s_(q, k).masked_fill(torch.arange(LK)[:, None] == 2, -1e9).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@near(train=False)
def by_logsumexp_in_a_masked_row(q, k, v):
    s = s_(q, k).masked_fill(torch.arange(LK)[:, None] == 2, LOW)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@near(refused=None)
def layers_with_different_layouts(q, k, v):
    a = s_(q.sin(), k).softmax(-1) @ v
    b = s_(q.cos(), k).softmax(-1) @ v
    return a.transpose(1, 2).reshape(B, LK, -1), b.transpose(2, 3).view(B * H, D, LK)


@near(refused=False)
def copy_that_keeps_strides(q, k, v):
    return (s_(q, k).softmax(-1) @ v).transpose(1, 2).clone().transpose(1, 2).view(B * H, LK, D)


@near(refused=False)
def two_copies_of_the_result(q, k, v):
    o = (s_(q, k).softmax(-1) @ v).transpose(1, 2)
    a, b = o.reshape(B, LK, -1), o.contiguous()
    a.mul_(2.0)
    return a, b


@near(refused=True)
def result_changed_in_place(q, k, v):
    return (s_(q, k).softmax(-1) @ v).mul_(2.0)


@near(refused=False)
def values_on_the_left(q, k, v):
    return v.transpose(-1, -2) @ s_(q, k).softmax(-1).transpose(-1, -2)


@near(qkv(bias), train=False, refused=True)
def relu_by_place(q, k, v, b):
    s = s_(q, k) + b
    F.relu(b, True)
    return s.softmax(-1) @ v


@near(train=False, refused=True)
def lists_changed(q, k, v):
    s = s_(q, k)
    torch._foreach_mul_([k, q], 2.0)
    return s.softmax(-1) @ v


@near(qkv(bias), train=False, refused=True)
def changed_in_a_checkpoint(q, k, v, b):
    s = s_(q, k) + b
    x = checkpoint(lambda b: b.mul_(2.0) + 1, b, use_reentrant=False)
    return s.softmax(-1) @ v + x.sum()


@near(qkv(bias), train=False, refused=True)
def changed_through_a_view_of_a_view(q, k, v, b):
    s = s_(q, k) + b
    b.view(-1).detach().split(10)[0].unbind()[3].fill_(9.0)
    return s.softmax(-1) @ v


@near(qkv(bias), refused=True)
def operand_changed_after_the_product(q, k, v, b):
    twice = q.detach() * 2
    o = (s_(twice, k.detach()) + b).softmax(-1) @ v
    twice.mul_(2.0)
    return o


@near(qkv(bias))
def mask_changed_between_layers(q, k, v, b):
    m, o = b.detach().clone(), 0
    for n in range(3):
        o = o + (s_(q, k) + m).softmax(-1) @ v
        m[..., n] = -1e9
    return o


@near(qkv(bias), train=False, refused=True)
def scores_written_to_a_buffer(q, k, v, b):
    s = s_(q, k)
    b.copy_(s[0])
    return s.softmax(-1) @ v


@near(refused=True)
def scores_and_their_transpose(q, k, v):
    s = s_(q, k)
    return (s + s.transpose(-1, -2)).softmax(-1) @ v


@near(refused=True)
def weights_shifted_by_one(q, k, v):
    return F.pad(s_(q, k).softmax(-1), (1, -1)) @ v


@near(qkv(lambda: torch.tensor([0.0, math.inf] + [0.0] * (LK - 2))), train=False)
def infinite_mask(q, k, v, m):
    return (s_(q, k) + m).softmax(-1) @ v


@near(refused=True)
def softmax_twice(q, k, v):
    return s_(q, k).softmax(-1).softmax(-1) @ v


@pytest.mark.parametrize("name", NEAR)
def test_near_miss(name: str, seed: int) -> None:
    fn, inputs, train, refused = NEAR[name]
    sites = check(fn, inputs(), train=train)
    assert sites
    if refused is not None:
        assert any(s.rewritten for s in sites) is not refused, [s.equation if s.rewritten else s.reason for s in sites]


def test_keys_that_autocast_narrowed_are_values_too() -> None:
    """the values stay in float32"""
    def fn(q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            s = torch.einsum("bid,bjd->bij", q, k)
        return s.float().softmax(-1) @ k

    k = torch.full((1, 3, 4), 1 + 2.0 ** -10)
    compiled, _ = rewrite(fn)
    assert torch.equal(compiled(torch.zeros(1, 3, 4), k), fn(torch.zeros(1, 3, 4), k))


@pytest.mark.parametrize("n", [3, 0, -2, -5, 100])
def test_an_integer_that_came_with_the_call_may_be_negative(n: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        return torch.where(torch.arange(k.size(-2)) + n >= 0, s_(q, k), -1e9).softmax(-1) @ v

    compiled, reports = rewrite(fn, dynamic=True)
    for number in (7, n):
        x = [torch.randn(2, 9, 4) for _ in range(3)]
        torch.testing.assert_close(compiled(*x, number), fn(*x, number))
    assert all(s.rewritten for r in reports for s in r.sites)


def test_grouped_heads_of_any_number() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return s_(q, k.repeat_interleave(2, 1)).softmax(-1) @ v.repeat_interleave(2, 1)

    compiled, _ = rewrite(fn, dynamic=True)
    for b, n in ((2, 5), (3, 7), (5, 4)):
        x = [torch.randn(b, h, n, 16) for h in (4, 2, 2)]
        torch.testing.assert_close(compiled(*x), fn(*x))
