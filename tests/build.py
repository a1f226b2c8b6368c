"""Small specs for the tests of ranges, walker and operators: operands 0, 1, 2 are query, key, value; further ones follow."""
from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import torch

from attnfuse.program import DOT, WEIGHT, Expr, add, apply, axis, const, le, load, mul, where
from attnfuse.spec import Access, AttentionSpec, Operand

B0, B1, I, J, D, E = (axis(n) for n in ("b0", "b1", "i", "j", "d", "e"))  # noqa: E741
S = mul(const(0.25), DOT)
CAUSAL = le(J, I)
FLOAT32_MIN = torch.finfo(torch.float32).min
INF = math.inf
MASK = (("mask", "bool", 2),)
DROPOUT = mul(WEIGHT, Expr("keep", attr=(0, 0.4)))

Tensors = list[torch.Tensor]


def causal(score: Expr, fill: float = -INF) -> Expr:
    """`score` where j <= i, else `fill`."""
    return where(CAUSAL, score, const(fill))


def added(score: Expr, allowed: Expr, fill: float = FLOAT32_MIN) -> Expr:
    """`score` plus a mask of 0 and `fill`."""
    return add(score, where(allowed, const(0.0), const(fill)))


def window(width: int) -> Expr:
    """The last `width` keys up to i."""
    return apply("and", CAUSAL, apply("lt", apply("sub", I, J), const(width)))


def padding(operand: int = 3) -> Expr:
    """A mask [batch, key], True where the key may be seen."""
    return load(operand, (B0, J), "bool")


def attention(score: Expr = S, extra: Sequence[tuple[str, str, int]] = (), *, batch: tuple[str, ...] = ("b0", "b1"), dtype: str = "float64",
              group: int = 1, **parts: Any) -> AttentionSpec:
    """An attention over `batch`; `extra` operands as (name, dtype, rank); with `group` the last batch axis shares key heads."""
    axes = tuple(axis(n) for n in batch)
    shared = (*axes[:-1], apply("floordiv", axes[-1], const(group))) if group > 1 else axes
    rank = len(batch) + 2
    operands = tuple(Operand(n, dtype, rank) for n in ("query", "key", "value")) + tuple(Operand(*x) for x in extra)
    return AttentionSpec(batch, operands, Access(0, (*axes, I, D)), Access(1, (*shared, J, D)), Access(2, (*shared, J, E)), score,
                         qk_dtype=dtype, pv_dtype=dtype, out_dtype=dtype, **parts)


def random_seed() -> int:
    """A fresh seed for the data, printed so that a failure can be repeated, and set."""
    seed = secrets.randbelow(2 ** 31)
    print(f"data seed {seed}")
    torch.manual_seed(seed)
    return seed


def data(spec: AttentionSpec, sizes: Sequence[int], extra: Sequence[torch.Tensor] = (), group: int = 1) -> list[torch.Tensor]:
    """Random query, key and value, then `extra`."""
    named = dict(zip(spec.size_names, sizes, strict=True))
    batch = [named[a] for a in spec.batch]
    shared = [*batch[:-1], batch[-1] // group] if group > 1 else batch
    dtype = getattr(torch, spec.operands[0].dtype)
    return [torch.randn(*batch, named["i"], named["d"], dtype=dtype), torch.randn(*shared, named["j"], named["d"], dtype=dtype),
            torch.randn(*shared, named["j"], named["e"], dtype=dtype), *extra]


def mask() -> torch.Tensor:
    """Which of nine keys two sequences may see; one of them both."""
    found = torch.rand(2, 9) > 0.4
    found[:, 4] = True
    return found


def attend(spec: AttentionSpec | str, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None = None) -> torch.Tensor:
    """The operator's result."""
    text = spec if isinstance(spec, str) else spec.to_json()
    return torch.ops.attnfuse.attention(list(operands), list(sizes), seed, text)[0]


def trainable(operands: Sequence[torch.Tensor]) -> Tensors:
    """Copies, of which those of floats want gradients."""
    return [t.clone().requires_grad_() if t.is_floating_point() else t for t in operands]
