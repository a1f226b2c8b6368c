"""Plain attention on the CPU, handed to PyTorch's own fused kernel (the one behind ``scaled_dot_product_attention``).

Plain means: the score is ``c·dot`` plus a term of the key only (a padding mask, never T×T), or ``c·dot`` under the causal
bound ``j <= i``; the weights are used as they are, or with NaN repaired (the log-sum-exp tells where). Under ``j <= i`` every
row has a live key, so a finite fill has weight exactly 0 and is the same as -inf. A padding mask is given to the kernel only if
every row has a live key, which is looked up at each call: a row without one is uniform or NaN, and its log-sum-exp, one
number, could not tell how many keys share it.

Statistics are (log-sum-exp, 0), which any backward understands.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .elements import Box
from .intervals import interval
from .program import WEIGHT, Expr, add, apply, const, depends, mul, where
from .ranges import Bound, analyse
from .spec import Access, AttentionSpec
from .tiling import Call, allocate_out, prepare, run

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CAUSAL = Bound("upper", 1, const(0))
DTYPES = frozenset({"float32", "float64", "bfloat16", "float16"})
_DEAD = -1e8
"""Fills from here on are as good as -inf, which is what the fused kernel has. Not float16's least number, which scores may come near:
the tiled loop looks at each row."""


FEW = 32
"""Up to so many keys backward is left to the tiled loop. It has all weights of a row at once and sums delta from them, as eager does; the
fused kernel takes it from the result, whose rounding is more than what is left of a gradient where values hardly differ."""


@dataclass(frozen=True)
class Plain:
    """What the fused kernel is told: the scale, whether j <= i, and the term of (batch…, j) that is added."""

    scale: float
    causal: bool
    mask: Expr | None


@functools.lru_cache(maxsize=4096)
def plain(spec: AttentionSpec) -> Plain | None:
    """How the fused kernel would compute this attention on the CPU, or None where its meaning is another one."""
    dtypes = {spec.operands[a.operand].dtype for a in (spec.query, spec.key, spec.value)} | {spec.qk_dtype, spec.pv_dtype, spec.out_dtype}
    if len(dtypes) != 1 or not dtypes <= DTYPES or spec.weight != WEIGHT or spec.extra_terms or len(spec.batch) > 3:
        return None
    ranges = analyse(spec)
    if ranges.bounds not in ((), (CAUSAL,)) or ranges.speculative and ranges.masked_below > _DEAD / 2:
        return None
    parts = _linear(ranges.inside, 1.0)
    if parts is None:
        return None
    scale, rest = parts
    causal = bool(ranges.bounds)
    # The kernel masks before it scales: -inf would become +inf or NaN.
    if not 0.0 < scale < math.inf or rest is not None and (causal or not depends(rest) <= {*spec.batch, "j"}):
        return None
    return Plain(scale, causal, rest)


def _linear(score: Expr, outer: float) -> tuple[float, Expr | None] | None:
    """score = c·dot + rest, as (c, rest); None where it is not so. `outer` is the factor that the score gets later.

    A dead constant that replaces the score, as masked_fill writes it, counts as one that is added to it: both have weight 0.
    """
    if score.op == "dot":
        return 1.0, None
    if score.op in ("add", "sub"):
        a, b = score.args
        if "dot" not in depends(b):
            inner = _linear(a, outer)
            rest = b if score.op == "add" else apply("neg", b)
            return inner and (inner[0], add(inner[1], rest) if inner[1] else rest)
        return _linear(apply("add", b, a), outer) if score.op == "add" and "dot" not in depends(a) else None
    if score.op == "neg":
        return _linear(mul(const(-1.0), score.args[0]), outer)
    if score.op in ("mul", "div"):
        a, b = score.args
        if score.op == "mul" and a.op == "const":
            a, b = b, a
        if b.op != "const" or b.value == 0.0:
            return None
        factor = float(b.value) if score.op == "mul" else 1.0 / float(b.value)
        inner = _linear(a, outer * factor)
        return inner and (inner[0] * factor, apply(score.op, inner[1], b) if inner[1] else None)
    if score.op == "where" and "dot" not in depends(score.args[0]):
        c, a, b = score.args
        dead = [x for x in (a, b) if "dot" not in depends(x) and outer > 0 and interval(x, {})[1] * outer <= _DEAD]
        if len(dead) != 1:
            return None
        inner = _linear(b if dead[0] is a else a, outer)
        if inner is None:
            return None
        kept = inner[1] or const(0.0)
        return inner[0], where(c, dead[0], kept) if dead[0] is a else where(c, kept, dead[0])
    return None


@dataclass(frozen=True)
class _Arguments:
    """The kernel's tensors, each of four dimensions, and the axes that they stand for."""

    call: Call
    box: Box
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None

    def gradient(self, access: Access, columns: tuple[str, str], values: torch.Tensor) -> torch.Tensor:
        """The kernel's gradient of one tensor, as the operand's."""
        operand = self.call.elements.operands[access.operand]
        into = torch.zeros(operand.shape, dtype=values.dtype, device=values.device)
        order = (*self.call.spec.batch, *columns)
        self.call.elements.add(into, access.index, self.box, order, values.reshape([self.call.sizes[a] for a in order]))
        return into


def _arguments(spec: AttentionSpec, plan: Plain, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> _Arguments | None:
    """The kernel's arguments; None where the kernel cannot take this call."""
    named = dict(zip(spec.size_names, sizes, strict=True))
    if named["d"] != named["e"] or 0 in (named[a] for a in spec.axes):
        return None
    call = prepare(spec, operands, sizes, None)
    box: Box = {a: (0, n) for a, n in call.sizes.items() if a in call.spec.axes}
    batch = [named[a] for a in spec.batch]
    four = [1, 1] if not batch else [1, *batch] if len(batch) == 1 else [batch[0] * batch[1], batch[2]] if len(batch) == 3 else batch

    def whole(access: Access, columns: tuple[str, str]) -> torch.Tensor:
        order = (*call.spec.batch, *columns)
        tensor = call.elements.read(access.operand, access.index, box, order)
        tensor = tensor.expand([call.sizes[a] for a in order]).reshape([*four, *tensor.shape[-2:]])
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    mask = None
    if plan.mask is not None:
        split = plain(call.spec)                       # the mask in terms of the axes into which `prepare` may split one
        if split is None or split.mask is None:
            return None
        mask = run(call, split.mask, box | {"i": (0, 1)}, {})
        if not bool((mask.amax(-1) > _DEAD / 2).all()):  # also where it is NaN
            return None
        mask = mask.expand([call.sizes[a] for a in call.spec.batch] + [1, named["j"]])
        mask = mask.reshape([*four, 1, named["j"]])
    query, key, value = whole(call.spec.query, ("i", "d")), whole(call.spec.key, ("j", "d")), whole(call.spec.value, ("j", "e"))
    return _Arguments(call, box, query, key, value, mask)


def forward(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `walker.forward`, by the fused kernel; None where the attention is not plain."""
    plan = plain(spec)
    arguments = _arguments(spec, plan, operands, sizes) if plan else None
    if plan is None or arguments is None:
        return None
    result, lse = _FUSED(arguments.query, arguments.key, arguments.value, 0.0, plan.causal, attn_mask=arguments.mask, scale=plan.scale)
    if spec.empty_rows == "repaired":
        dead = lse.isfinite().logical_not()
        result.masked_fill_(dead.unsqueeze(-1), 0.0)
        lse.masked_fill_(dead, -math.inf)
    out = allocate_out(spec, sizes, result)
    result = result.reshape(out.shape)
    lse = lse.reshape(out.shape[:-1]).to(spec.compute_dtype)
    stats = torch.stack([lse, torch.zeros_like(lse)], -1).contiguous()
    return (result if result.stride() == out.stride() else out.copy_(result)), stats


def backward(spec: AttentionSpec, grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
             sizes: Sequence[int], needs: Sequence[bool]) -> list[torch.Tensor | None] | None:
    """As `walker.backward`, by the fused kernel; None where the attention is not plain, a mask wants a gradient, or keys are few."""
    plan = plain(spec)
    if sizes[spec.size_names.index("j")] <= FEW:
        return None
    accesses = (spec.query, spec.key, spec.value)
    numbers = [a.operand for a in accesses]
    if plan is None or len(set(numbers)) != 3 or any(need and n not in numbers for n, need in enumerate(needs)):
        return None
    if bool((stats[..., 1] != 0).any()):               # of another executor
        return None
    if spec.empty_rows == "repaired" and bool((stats[..., 0] == -math.inf).any()):
        return None
    arguments = _arguments(spec, plan, operands, sizes)
    if arguments is None:
        return None
    shape = [*arguments.query.shape[:3], arguments.value.shape[3]]
    rows = lambda x: x if x.stride(-1) == 1 else x.contiguous()            # the kernel takes the last dimension to be contiguous
    grads = _FUSED_BACKWARD(rows(grad_out.reshape(shape)), arguments.query, arguments.key, arguments.value, rows(out.reshape(shape)),
                            stats[..., 0].reshape(shape[:3]), 0.0, plan.causal, attn_mask=arguments.mask, scale=plan.scale)
    results: list[torch.Tensor | None] = [None] * len(operands)
    split = arguments.call.spec
    for n, access, columns, grad in zip(numbers, (split.query, split.key, split.value), (("i", "d"), ("j", "d"), ("j", "e")), grads, strict=True):
        if needs[n]:
            results[n] = arguments.gradient(access, columns, grad)
    return results
