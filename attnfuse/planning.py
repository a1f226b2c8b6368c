"""The commands `attnfuse plan` and `attnfuse roofline`: what a kernel would be, and what it could be, for shapes given by hand.

    print(plan_text(Shape(head_dim=128, tokens=8192, heads=32, causal=True), "bf16", "h100"))
    print(roofline_text(Shape(head_dim=128, tokens=8192, heads=32), "a100"))

Nothing is compiled and no GPU is needed. Both raise ValueError, with what would do, for what makes no sense.
"""
from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from . import roofline
from .codegen import plan_backward, plan_forward, predict
from .codegen.devices import CARDS, device as device_named
from .codegen.jobs import Job
from .codegen.plan import HALF, KernelPlan
from .codegen.space import Choice
from .codegen.tiles import KIB, Device
from .program import DOT, WEIGHT, Expr, apply, axis, const, le, mul, where
from .spec import Access, AttentionSpec, Operand, dtype_of
from .traffic import size

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "half": "float16", "float16": "float16", "fp32": "float32",
          "float32": "float32"}
_SHOWN = 8
"""Plans in a table."""
LARGEST = plan_forward.LARGEST_HEAD
"""The widest head that the kernels hold."""


@dataclass(frozen=True)
class Shape:
    """One attention layer: head widths, tokens, heads, batch, and what is special about it.

    Raises:
        ValueError: numbers that are not positive, or query heads that are no multiple of the key heads.
    """

    head_dim: int
    tokens: int
    heads: int = 1
    batch: int = 1
    keys: int | None = None
    kv_heads: int | None = None
    value_dim: int | None = None
    causal: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("head_dim", "tokens", "heads", "batch", "keys", "kv_heads", "value_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name.replace('_', ' ')} must be at least 1, not {value}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key heads: the first must be a multiple of the second")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"a dropout of {self.dropout}: expected at least 0 and less than 1")

    @property
    def sizes(self) -> dict[str, int]:
        """The integers of a call, by name."""
        return {"b0": self.batch, "b1": self.heads, "i": self.tokens, "j": self.keys or self.tokens, "d": self.head_dim,
                "e": self.value_dim or self.head_dim}

    def __str__(self) -> str:
        s = self.sizes
        shared = f" over {self.kv_heads} key heads" if self.kv_heads not in (None, self.heads) else ""
        lengths = f"{s['i']} tokens" if s["i"] == s["j"] else f"{s['i']} queries, {s['j']} keys"
        widths = f"head dimension {s['d']}" + (f" and {s['e']}" if s["e"] != s["d"] else "")
        return f"batch {s['b0']}, {s['b1']} heads{shared}, {lengths}, {widths}"


def dtype_named(text: str) -> str:
    """``"bf16"`` → ``"bfloat16"``; raises ValueError with the known names."""
    found = DTYPES.get(text.strip().lower().removeprefix("torch."))
    if found is None:
        raise ValueError(f"unknown dtype {text!r}: expected one of {', '.join(DTYPES)}")
    return found


def spec_of(shape: Shape, dtype: str) -> AttentionSpec:
    """The attention of a shape: scores scaled by 1/√d, a causal mask that ends at the last key, dropout, shared key heads."""
    b0, b1, i, j, d, e = (axis(n) for n in ("b0", "b1", "i", "j", "d", "e"))
    group = shape.heads // (shape.kv_heads or shape.heads)
    head = b1 if group == 1 else apply("floordiv", b1, const(group))
    score = mul(const(shape.head_dim ** -0.5), DOT)
    if shape.causal:
        past = shape.sizes["j"] - shape.sizes["i"]
        last = i if past == 0 else apply("add", i, const(past))
        score = where(le(j, last), score, const(-math.inf))
    weight = mul(WEIGHT, Expr("keep", attr=(0, shape.dropout))) if shape.dropout else WEIGHT
    return AttentionSpec(("b0", "b1"), tuple(Operand(n, dtype, 4) for n in "qkv"), Access(0, (b0, b1, i, d)), Access(1, (b0, head, j, d)),
                         Access(2, (b0, head, j, e)), score, weight, qk_dtype=dtype, pv_dtype=dtype, out_dtype=dtype)


def held(shape: Shape, dtype: str) -> list[int]:
    """Bytes of queries, keys and values."""
    s, b = shape.sizes, dtype_of(dtype).itemsize
    keys = b * s["b0"] * (shape.kv_heads or shape.heads) * s["j"]
    return [b * s["b0"] * s["b1"] * s["i"] * s["d"], keys * s["d"], keys * s["e"]]


# ---- plan

def plan_text(shape: Shape, dtype: str, device: str, backward: bool = False) -> str:
    """The candidates of a kernel with their cost, and the reasons for the choice; with `backward` of the backward kernels too.

    Raises:
        ValueError: an unknown dtype or device, or heads that no kernel holds.
    """
    name, card = dtype_named(dtype), device_named(device)
    if max(shape.sizes["d"], shape.sizes["e"]) > LARGEST:
        raise ValueError(f"a head dimension of {max(shape.sizes['d'], shape.sizes['e'])}: the kernels hold up to {LARGEST}")
    spec, sizes, bytes_ = spec_of(shape, name), shape.sizes, held(shape, name)
    lines = [f"{shape}, {name}{', causal' if shape.causal else ''}{f', dropout {shape.dropout:g}' if shape.dropout else ''}",
             f"on {_device_line(card)}", "", "forward"]
    request = predict.assumed(spec, sizes, card)
    found = plan_forward.choices(spec, request, card)
    chosen = plan_forward.candidates(spec, request, card)[0]
    lines += _candidates([predict.forward(spec, sizes, bytes_, card, p) for p in _shown(chosen, found)], card, len(found))
    if backward:
        jobs = plan_backward.arranged(spec, request, card, (Job("keys", key=True, value=True), Job("queries", query=True)))
        for number, job in enumerate(jobs):
            found = plan_backward.choices(spec, request, card, job)
            chosen = plan_backward.candidates(spec, request, card, job)[0]
            rows, *kernels = zip(*(predict.backward(spec, sizes, bytes_, [True] * 3, card, {job: p}) for p in _shown(chosen, found)), strict=True)
            if number == 0:
                lines += ["", "backward, kernel of the rows", f"  it only streams: {size(rows[0].moved)}{_time(rows[0])}"]
            lines += ["", f"backward, kernel of the {kernels[number][0].name}", *_candidates(list(kernels[number]), card, len(found))]
    return "\n".join(lines)


def _shown(chosen: KernelPlan, found: Sequence[Choice]) -> list[KernelPlan]:
    """The chosen plan with its reasons, and those that were ranked behind it."""
    return [chosen, *(c.plan for c in found[1:_SHOWN])]


def _device_line(card: Device) -> str:
    rates = f", {card.peak / 1e12:.4g} TFLOP/s, {card.bandwidth / 1e12:.3g} TB/s" if card.peak else \
        "; its rates are not known, so no time is predicted"
    return f"{card.name}: {card.shared // KIB} KB of shared memory a block, {card.registers} registers a thread, {card.processors} processors{rates}"


def _candidates(found: list[predict.Prediction], card: Device, fitting: int) -> list[str]:
    """A table of plans, the chosen one first, and what there is to say of that one; `fitting` is how many plans there are."""
    rows: list[tuple[str, ...]] = [("", "tile", "warps", "stages", "shared", "registers", "traffic", "uncached", "predicted", "at least")]
    for n, one in enumerate(found):
        p = one.plan
        assert p is not None
        rows.append(("chosen" if n == 0 else f"or {n + 1}", f"{p.block_m}x{p.block_n}", str(p.warps), str(p.stages), f"{p.shared / KIB:.1f} KB",
                     str(p.registers), size(one.moved), size(one.most), *("" if t is None else _seconds(t) for t in (one.expected, one.seconds))))
    widths = [max(len(r[c]) for r in rows) for c in range(len(rows[0]))]
    lines = ["  " + "  ".join(f"{x:>{w}}" for x, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    best = found[0]
    assert best.plan is not None
    lines += [f"  why: {reason}" for reason in best.plan.reasons]
    if fitting > len(found):
        lines.append(f"  and {fitting - len(found)} more that fit")
    if card.peak and len(found) > 1:
        lines.append("  'predicted' is by a model of one processor, good to some 15 % where it was measured; 'at least' is what the roofline allows")
    arithmetic = f"{best.flops / 1e9:.4g} GFLOP, {best.intensity:.4g} FLOPs a byte"
    if card.peak:
        bound = "arithmetic" if best.intensity > roofline.ridge_point(card.peak, card.bandwidth) else "memory traffic"
        arithmetic += f" (ridge {roofline.ridge_point(card.peak, card.bandwidth):.0f}): bound by {bound}"
    lines.append(f"  {arithmetic}")
    lines.append(f"  {best.programs} programs are {best.waves:.2f} waves of {card.processors}, one a processor: the last one wastes {best.tail:.0%}")
    return lines


def _time(one: predict.Prediction) -> str:
    return "" if one.seconds is None else f", {_seconds(one.seconds)}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value >= 1e-4 else f"{value * 1e6:.3g} µs"


# ---- roofline

def roofline_text(shape: Shape, device: str, dtype: str = "bf16", elementwise: int = 1, picture: str | os.PathLike[str] | None = None) -> str:
    """Standard attention kernel by kernel beside a fused one, by the formulas of `attnfuse.roofline`; `picture` is a file to draw into.

    Raises:
        ValueError: unknown names, a device without known rates, a dtype whose products are not the device's peak, shapes for which the
            formulas do not hold.
    """
    name, card = dtype_named(dtype), device_named(device)
    s = shape.sizes
    if name not in HALF:
        raise ValueError(f"{dtype}: the peak rates are those of 16-bit products; expected bf16 or fp16")
    if not card.peak:
        raise ValueError(f"the rates of {card.name} are not known; known are {', '.join(CARDS)}")
    if s["i"] != s["j"] or s["d"] != s["e"] or shape.kv_heads not in (None, shape.heads) or shape.causal or shape.dropout:
        raise ValueError("the formulas are those of plain self-attention: as many keys as queries, one head width, no mask, a key head for each head")
    heads, rates = shape.batch * shape.heads, (card.peak, card.bandwidth)
    kernels = [*roofline.standard_kernels(s["i"], s["d"], heads, 2, elementwise), roofline.fused_kernel(s["i"], s["d"], heads, 2)]
    rows = [("kernel", "GFLOP", "traffic", "FLOPs/byte", "time", "bound by")]
    for x in kernels:
        rows.append((x.name, f"{x.flops / 1e9:.4g}", size(x.moved), f"{x.intensity:.4g}", _seconds(x.seconds(*rates)),
                     "arithmetic" if x.intensity > roofline.ridge_point(*rates) else "memory traffic"))
    widths = [max(len(r[c]) for r in rows) for c in range(6)]
    lines = [f"{shape}, {name}", f"on {_device_line(card)}, ridge {roofline.ridge_point(*rates):.0f} FLOPs a byte", ""]
    lines += [f"  {r[0]:<{widths[0]}}  " + "  ".join(f"{x:>{w}}" for x, w in zip(r[1:], widths[1:], strict=True)) for r in rows]
    times = roofline.attention_layer_times(s["i"], s["d"], heads, *rates, k=elementwise)
    blocks = roofline.flash_blocks(s["d"], card.shared // 2)
    flash = 2 * heads * roofline.flash_attention_traffic(s["i"], s["d"], card.shared // 2)
    width = roofline.min_head_width(s["i"], roofline.ridge_point(*rates))
    lines += ["", f"  standard {_seconds(times['standard'])}, fused {_seconds(times['fused'])}: {times['standard'] / times['fused']:.1f} times",
              f"  T×T matrices are {roofline.square_share(s['i'], s['d'], elementwise):.1%} of the standard traffic",
              f"  the scores' product reaches the ridge from a head dimension of {width:.0f} on" if width < math.inf else
              "  the scores' product is below the ridge at every head dimension: there are too few tokens",
              f"  FlashAttention's own tiles, B_r = {blocks[0]} and B_c = {blocks[1]}, would move {size(flash)}"]
    if picture is not None:
        roofline.plot(kernels, *rates, picture, title=f"{shape}, on {card.name}")
        lines.append(f"  wrote {picture}")
    return "\n".join(lines)
