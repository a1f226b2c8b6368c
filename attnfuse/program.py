"""Scalar programs: what happens to one score, one weight or one index, as an immutable expression.

Between the two products of an attention everything is a function of the position (batch axes, query ``i``, key ``j``)
and of the raw dot product. `Expr` is that function. It knows three kinds of value, ``float``, ``int`` and ``bool``;
``float`` means the arithmetic of the executor (float32, or float64 for float64 attention), whatever the dtypes of the
operands: widening happens at the load.

Invariant: an `Expr` is a value. Equal programs are equal objects with equal hashes, and survive a trip through JSON.

    >>> s = mul(DOT, const(0.125))
    >>> print(where(le(axis("j"), axis("i")), s, const(float("-inf"))))
    where(j <= i, 0.125 * s, -inf)
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["float", "int", "bool"]
Attr = float | int | bool | str | tuple[int, float] | None


@dataclass(frozen=True)
class Expr:
    """One node: the operation, its arguments, the kind of its value, and what else it needs to know (`attr`).

    Leaves: ``const`` (attr: the number), ``axis`` (attr: the axis's name; its value is the position), ``size`` (attr: the
    name of an axis, whose length it is, or of a run-time integer), ``dot`` (the raw product ⟨query_i, key_j⟩),
    ``weight`` (the softmax weight), ``keep`` (attr: (stream, p); dropout's factor, 0 or 1/(1-p)).
    ``load`` reads operand number `attr` at the integer expressions in `args`. Every other op is in `OPS`.
    """

    op: str
    args: tuple[Expr, ...] = ()
    attr: Attr = None
    kind: Kind = "float"

    def __post_init__(self) -> None:
        # Programs are compared, hashed and memoised all the time: pay for the deep hash once.
        object.__setattr__(self, "_hash", hash((self.op, self.args, repr(self.attr), self.kind)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]  # set in __post_init__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # repr tells -0.0 from 0.0, 1 from 1.0 and lets NaN equal itself; == would not.
        return (isinstance(other, Expr) and hash(self) == hash(other) and self.op == other.op and self.kind == other.kind
                and repr(self.attr) == repr(other.attr) and self.args == other.args)

    def __str__(self) -> str:
        return show(self)

    @property
    def value(self) -> Any:
        """The number of a ``const``."""
        if self.op != "const":
            raise ValueError(f"{self} is not a constant")
        return self.attr


@dataclass(frozen=True)
class Op:
    """What a pointwise operation is: how PyTorch computes it, how it prints, and the kind of its value.

    `kind` None means "the kind of its arguments". `infix` is the operator and its binding strength.
    """

    arity: int
    torch: Callable[..., torch.Tensor]
    kind: Kind | None = None
    infix: tuple[str, int] | None = None


OPS: dict[str, Op] = {
    "add": Op(2, torch.add, infix=("+", 4)),
    "sub": Op(2, torch.sub, infix=("-", 4)),
    "mul": Op(2, torch.mul, infix=("*", 5)),
    "div": Op(2, torch.true_divide, kind="float", infix=("/", 5)),
    "floordiv": Op(2, lambda a, b: torch.div(a, b, rounding_mode="floor"), infix=("//", 5)),
    "mod": Op(2, torch.remainder, infix=("%", 5)),
    "min": Op(2, torch.minimum),
    "max": Op(2, torch.maximum),
    "pow": Op(2, torch.pow, kind="float", infix=("**", 7)),
    "neg": Op(1, torch.neg),
    "abs": Op(1, torch.abs),
    "sign": Op(1, torch.sign),
    "exp": Op(1, torch.exp, kind="float"),
    "log": Op(1, torch.log, kind="float"),
    "log1p": Op(1, torch.log1p, kind="float"),
    "sqrt": Op(1, torch.sqrt, kind="float"),
    "rsqrt": Op(1, torch.rsqrt, kind="float"),
    "tanh": Op(1, torch.tanh, kind="float"),
    "sigmoid": Op(1, torch.sigmoid, kind="float"),
    "erf": Op(1, torch.erf, kind="float"),
    "sin": Op(1, torch.sin, kind="float"),
    "cos": Op(1, torch.cos, kind="float"),
    "floor": Op(1, torch.floor, kind="float"),
    "ceil": Op(1, torch.ceil, kind="float"),
    "round": Op(1, torch.round, kind="float"),
    "eq": Op(2, torch.eq, kind="bool", infix=("==", 3)),
    "ne": Op(2, torch.ne, kind="bool", infix=("!=", 3)),
    "lt": Op(2, torch.lt, kind="bool", infix=("<", 3)),
    "le": Op(2, torch.le, kind="bool", infix=("<=", 3)),
    "gt": Op(2, torch.gt, kind="bool", infix=(">", 3)),
    "ge": Op(2, torch.ge, kind="bool", infix=(">=", 3)),
    "and": Op(2, torch.logical_and, kind="bool", infix=("and", 2)),
    "or": Op(2, torch.logical_or, kind="bool", infix=("or", 1)),
    "xor": Op(2, torch.logical_xor, kind="bool"),
    "not": Op(1, torch.logical_not, kind="bool"),
    "isnan": Op(1, torch.isnan, kind="bool"),
    "where": Op(3, torch.where),
    # Conversions between the kinds. "int" truncates towards zero as a cast does; "bool" is "differs from zero".
    "float": Op(1, lambda a: a, kind="float"),
    "int": Op(1, lambda a: a, kind="int"),
    "bool": Op(1, lambda a: a != 0, kind="bool"),
}

INTEGER: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod, "neg": operator.neg,
    "abs": abs, "min": min, "max": max,
}
"""What `integer` computes, on Python's own numbers."""

LEAVES = frozenset({"const", "axis", "size", "dot", "weight", "keep", "load"})


# ---- building

def const(value: float | int | bool) -> Expr:
    """A number; its Python type fixes the kind."""
    kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    return Expr("const", attr=value, kind=kind)


def axis(name: str) -> Expr:
    """The position along an axis, an int from 0."""
    return Expr("axis", attr=name, kind="int")


def size(name: str) -> Expr:
    """The length of an axis, or a run-time integer, known when the attention is called."""
    return Expr("size", attr=name, kind="int")


def load(operand: int, index: tuple[Expr, ...], kind: Kind) -> Expr:
    """Element `index` of operand number `operand`."""
    if any(x.kind != "int" for x in index):
        raise ValueError("indices of a load must be integer expressions")
    return Expr("load", tuple(index), operand, kind)


def apply(op: str, *args: Expr) -> Expr:
    """An operation of `OPS`; raises ValueError for an unknown name or a wrong number of arguments."""
    rule = OPS.get(op)
    if rule is None or rule.arity != len(args):
        raise ValueError(f"no operation {op!r} of {len(args)} arguments")
    kind = rule.kind or (args[-1].kind if op == "where" else args[0].kind)
    return Expr(op, tuple(args), None, kind)


def add(a: Expr, b: Expr) -> Expr:
    """a + b"""
    return apply("add", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    """a * b"""
    return apply("mul", a, b)


def le(a: Expr, b: Expr) -> Expr:
    """a <= b"""
    return apply("le", a, b)


def where(c: Expr, a: Expr, b: Expr) -> Expr:
    """a where c holds, else b"""
    return apply("where", c, a, b)


DOT = Expr("dot")
WEIGHT = Expr("weight")
TRUE = const(True)
FALSE = const(False)


# ---- asking

def walk(expr: Expr) -> Iterator[Expr]:
    """Every distinct node, arguments before their users."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(expr, False)]
    while stack:
        node, ready = stack.pop()
        if node in seen:
            continue
        if ready:
            seen.add(node)
            yield node
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))


@functools.lru_cache(maxsize=1 << 16)
def depends(expr: Expr) -> frozenset[str]:
    """The axes a value depends on; a dot product counts as ``dot``, a weight as ``weight``, dropout as both ``i`` and ``j``.

    >>> sorted(depends(add(axis("i"), load(3, (axis("b0"), axis("j")), "int"))))
    ['b0', 'i', 'j']
    """
    own = {"axis": {expr.attr}, "dot": {"dot"}, "weight": {"weight"}, "keep": {"i", "j", "keep"}}.get(expr.op, set())
    return frozenset(own).union(*(depends(a) for a in expr.args)) if expr.args else frozenset(own)  # type: ignore[arg-type]


def loads(expr: Expr) -> list[Expr]:
    """The distinct loads, in order of first use."""
    return [x for x in walk(expr) if x.op == "load"]


def rewrite(expr: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild bottom-up; where `rule` returns an expression it replaces the (already rebuilt) node."""
    done: dict[Expr, Expr] = {}
    for node in walk(expr):
        new = node if not node.args else Expr(node.op, tuple(done[a] for a in node.args), node.attr, node.kind)
        done[node] = rule(new) or new
    return done[expr]


def substitute(expr: Expr, table: Mapping[Expr, Expr]) -> Expr:
    """Replace whole sub-expressions."""
    return rewrite(expr, table.get)


def linear_in_weight(expr: Expr) -> bool:
    """Whether a weight program is `factor * weight`, so that it may be applied before the softmax is normalised.

    >>> linear_in_weight(mul(WEIGHT, const(2.0))), linear_in_weight(add(WEIGHT, const(1.0)))
    (True, False)
    """
    if expr.op == "weight":
        return True
    if expr.op == "const":
        return expr.attr == 0.0
    uses = ["weight" in depends(a) for a in expr.args]
    if expr.op == "mul":
        return sum(uses) == 1 and linear_in_weight(expr.args[uses.index(True)])
    if expr.op == "div":
        return uses == [True, False] and linear_in_weight(expr.args[0])
    if expr.op in ("neg", "float"):
        return linear_in_weight(expr.args[0])
    if expr.op in ("add", "sub"):
        return all(linear_in_weight(a) for a in expr.args)
    if expr.op == "where":
        return not uses[0] and all(linear_in_weight(a) for a in expr.args[1:])
    return False


# ---- evaluating

@dataclass(frozen=True)
class Env:
    """What a program is evaluated with.

    `axes` maps an axis to its positions, int64 tensors that broadcast against each other; `sizes` maps names to ints;
    `read` returns the elements of an operand at index tensors; `dot`, `weight` are tensors; `keep` makes dropout's factor;
    `dtype` is what ``float`` means.
    """

    axes: Mapping[str, torch.Tensor]
    sizes: Mapping[str, int]
    read: Callable[[int, tuple[torch.Tensor, ...]], torch.Tensor]
    dtype: torch.dtype
    device: torch.device
    dot: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    keep: Callable[[int, float], torch.Tensor] | None = None


def evaluate(expr: Expr, env: Env, memo: dict[Expr, torch.Tensor] | None = None) -> torch.Tensor:
    """The value of a program over all positions in `env`, as a tensor that broadcasts to them.

    `memo` may come filled: a value found there is taken as it is (so that a caller can differentiate with respect to it).
    """
    memo = {} if memo is None else memo
    dtypes = {"float": env.dtype, "int": torch.int64, "bool": torch.bool}
    for node in walk(expr):
        if node in memo:
            continue
        dtype = dtypes[node.kind]
        if node.op == "const":
            out = torch.tensor(node.attr, dtype=dtype, device=env.device)
        elif node.op == "axis":
            out = env.axes[str(node.attr)]
        elif node.op == "size":
            out = torch.tensor(env.sizes[str(node.attr)], dtype=dtype, device=env.device)
        elif node.op == "load":
            out = env.read(int(node.attr), tuple(memo[a] for a in node.args)).to(dtype)  # type: ignore[arg-type]
        elif node.op in ("dot", "weight"):
            out = env.dot if node.op == "dot" else env.weight
            if out is None:
                raise ValueError(f"the program uses the {node.op}, which this evaluation does not have")
        elif node.op == "keep":
            if env.keep is None:
                raise ValueError("the program drops weights, and no seed was given")
            out = env.keep(*node.attr)  # type: ignore[misc]
        else:
            out = OPS[node.op].torch(*(memo[a] for a in node.args))
        memo[node] = out.to(dtype)
    return memo[expr]


def integer(expr: Expr, sizes: Mapping[str, int]) -> int | None:
    """The value of an integer program over constants and sizes; None where it needs more than these."""
    done: dict[Expr, int] = {}
    for node in walk(expr):
        if node.op == "const":
            done[node] = int(node.value)
        elif node.op == "size":
            done[node] = sizes[str(node.attr)]
        elif node.op in INTEGER:
            done[node] = INTEGER[node.op](*(done[a] for a in node.args))
        else:
            return None
    return done[expr]


# ---- printing and JSON

def number(value: float | int | bool) -> str:
    """A number as short as it can be without becoming another one."""
    if isinstance(value, float) and math.isfinite(value):
        short = f"{value:.6g}"
        return short if float(short) == value else repr(value)
    return str(value)


def show(expr: Expr, names: Mapping[int, str] | None = None, strength: int = 0) -> str:
    """Readable form; `names` gives the operands' names."""
    if expr.op == "const":
        return number(expr.attr)  # type: ignore[arg-type]
    if expr.op == "axis":
        return str(expr.attr)
    if expr.op == "size":
        return f"|{expr.attr}|"
    if expr.op in ("dot", "weight"):
        return {"dot": "s", "weight": "p"}[expr.op]
    if expr.op == "keep":
        stream, p = expr.attr  # type: ignore[misc]
        return f"dropout{stream or ''}({number(float(p))})"  # type: ignore[arg-type]
    if expr.op == "load":
        name = (names or {}).get(int(expr.attr), f"t{expr.attr}")  # type: ignore[arg-type]
        return f"{name}[{', '.join(show(a, names) for a in expr.args)}]"
    rule = OPS[expr.op]
    if rule.infix:
        sign, own = rule.infix
        a, b = expr.args
        if expr.op in ("add", "mul") and b.op == "const" and a.op != "const":
            a, b = (b, a) if expr.op == "mul" else (a, b)
        text = f"{show(a, names, own)} {sign} {show(b, names, own + 1)}"
        return f"({text})" if own < strength else text
    return f"{expr.op}({', '.join(show(a, names) for a in expr.args)})"


def to_json(exprs: tuple[Expr, ...]) -> dict[str, Any]:
    """Several programs as one table of nodes, each shared sub-expression once."""
    table: dict[Expr, int] = {}
    rows: list[list[Any]] = []
    for expr in exprs:
        for node in walk(expr):
            if node not in table:
                table[node] = len(rows)
                attr = {"nan": repr(node.attr)} if isinstance(node.attr, float) and not math.isfinite(node.attr) else node.attr
                rows.append([node.op, [table[a] for a in node.args], attr, node.kind])
    return {"nodes": rows, "roots": [table[e] for e in exprs]}


def from_json(data: dict[str, Any]) -> tuple[Expr, ...]:
    """Inverse of `to_json`; raises ValueError on an operation that this version does not know."""
    nodes: list[Expr] = []
    for op, args, attr, kind in data["nodes"]:
        if op not in OPS and op not in LEAVES:
            raise ValueError(f"unknown operation {op!r} in a serialised program")
        attr = float(attr["nan"]) if isinstance(attr, dict) else tuple(attr) if isinstance(attr, list) else attr
        nodes.append(Expr(op, tuple(nodes[a] for a in args), attr, kind))
    return tuple(nodes[r] for r in data["roots"])
