"""Small things about expressions of the generated source: where a value is computed, its normal form, constants, how strongly a text binds."""
from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Literal

import torch

from ..algebra import simplify
from ..program import OPS, Env, Expr, apply, const, depends, rewrite
from ..program import evaluate as evaluate_program

Level = Literal["scalar", "row", "column", "tile"]

ATOM = 9
"""The strength of a name."""


def level(expr: Expr) -> Level:
    """Where a value is computed."""
    axes = depends(expr)
    if axes & {"dot", "weight", "keep", "arrived", "upstream"} or {"i", "j"} <= axes:
        return "tile"
    return "row" if "i" in axes else "column" if "j" in axes else "scalar"


def prepare(expr: Expr, constants: dict[str, int]) -> Expr:
    """The normal form with the kernel's constants put in; divisions by a constant become products."""

    def fold(node: Expr) -> Expr | None:
        if node.op == "size" and node.attr in constants:
            return const(constants[str(node.attr)])
        if node.op == "keep" and node.attr[1] >= 1.0:  # type: ignore[index]
            return const(0.0)
        if node.op in OPS and node.kind == "float" and node.args and all(a.op == "const" for a in node.args):
            env = Env({}, {}, lambda *_: torch.empty(0), torch.float64, torch.device("cpu"))
            value = float(evaluate_program(node, env))
            return const(value) if abs(value) < 1e38 else None
        if node.op == "div" and node.args[1].op == "const" and node.args[1].kind == "float":
            divisor = float(node.args[1].value)
            if divisor and math.isfinite(divisor) and 1e-30 < abs(divisor) < 1e30:
                return apply("mul", const(1.0 / divisor), node.args[0])
        return None

    return simplify(rewrite(simplify(rewrite(expr, fold)), fold))


def literal(value: float | int | bool) -> str:
    """A constant as Triton should see it: a float within float32, whose subnormals are zero."""
    if isinstance(value, bool) or isinstance(value, int):
        return repr(value)
    try:
        near = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        near = math.copysign(math.inf, value)
    if not math.isfinite(near):
        return f'float("{near}")'
    return repr(0.0 if abs(near) < 2.0 ** -126 else value)


@dataclass(frozen=True)
class Text:
    """An expression of the generated source and how strongly it binds (a name: 9)."""

    text: str
    strength: int = ATOM

    def within(self, strength: int) -> str:
        """In parentheses where it binds no more strongly than its surroundings."""
        return self.text if self.strength > strength else f"({self.text})"
