"""From a recorded slice to an AttentionSpec: find the two products, prove what every axis is, choose the operands.

The axes of the result are called x0, x1, … until their roles are known. Proven roles: ``j`` is what the value product
sums over and the softmax runs over; ``e`` is the axis that only the values have; ``i`` is one on which neither keys nor
values depend; ``d`` is what the score product sums over; the others are batch axes.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ..algebra import Algebra
from ..program import Expr, apply, axis, const, depends, linear_in_weight, load, loads, rewrite, size, substitute, walk
from ..refusal import Reason, Refused
from ..settings import Settings
from ..spec import Access, AttentionSpec, EmptyRows, Operand
from . import nodes
from .lift import Level, Lift, NoRule
from .manual import bound
from .pointwise import as_kind
from .region import Region, memory_order, merge_order
from .trace import Value, aten
from .unfold import Parts, arguments_of, main_dot, pull, query_axis, sides, uses

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class Lifted:
    """A spec and how to call it: which of the slice's nodes are the operands (numbered inputs first, then body), to which
    dtype they are cast, the symbolic floats that follow them as tensors of no dimensions, the integers of the call over the graph's length symbols, the order of the result's dimensions
    that gives back the product's, and the nodes that carry the raw scores."""

    spec: AttentionSpec
    operands: tuple[int, ...]
    casts: tuple[torch.dtype | None, ...]
    numbers: tuple[Expr, ...]
    sizes: tuple[Expr, ...]
    permutation: tuple[int, ...]
    scores: tuple[int, ...]


def assemble(region: Region, values: list[Value | None], least: dict[str, int], settings: Settings) -> Lifted:
    """The meaning of a slice whose nodes (inputs, then body) have the given recorded values; raises Refused."""
    out = values[len(region.inputs) + region.body.index(region.product)]
    if out is None:
        raise Refused(Reason.FAILED, region.product.name, "lift", "the product is not a tensor")
    algebra = Algebra({f"x{k}": s for k, s in enumerate(out.shape)}, least)
    try:
        lift = Lift(algebra)
        parts = pull(lift, out)
        main = main_dot(parts)
        others = {v.number for n, (v, _, _) in enumerate(lift.dots) if n != main} - {lift.dots[main][0].number}
        lift = Lift(algebra, opaque=others)
        parts = pull(lift, out)
        main = main_dot(parts)
        key, query = sides(parts, main)
        i = query_axis(parts, key, query, out)
        priced = Lift(algebra, opaque=others, price=(i, "j"))
        parts = pull(priced, out)
        main = main_dot(parts)
        key, query = sides(parts, main)
    except NoRule as e:
        raise Refused(Reason.UNKNOWN_OP, region.product.name, "lift", str(e)) from e
    return _Spec(region, values, parts, main, query, key, i, out, settings).build()


@dataclass
class _Spec:
    """Chooses operands and writes the spec down under its final names."""

    region: Region
    nodes: list[Value | None]
    parts: Parts
    main: int
    query: list[Level]
    key: list[Level]
    i: str
    out: Value
    settings: Settings

    def build(self) -> Lifted:
        p = self.parts
        if any({"dot", "j"} & depends(x) for x in p.extra):
            raise Refused(Reason.NOT_EXPRESSIBLE, "", "lift", "further columns of the softmax are products")
        q = self._choose(self.query, (self.i, "d"), "queries")
        k = self._choose(self.key, ("j", "d"), "keys")
        v = self._choose(p.values, ("j", p.e), "values")
        dot = Expr("dot")
        for level in (q, k):
            dot = p.lift.simplify(apply("mul", level.factor, dot))
        score = p.lift.simplify(substitute(p.score, {Expr("dot", attr=self.main): dot}))
        weight = p.lift.simplify(apply("mul", v.factor, p.weight))
        if any(x.op == "detached" for e in (score, weight) for x in walk(e)):
            raise Refused(Reason.NOT_EXPRESSIBLE, "", "lift", "scores that send no gradient")
        if bound(weight):
            raise Refused(Reason.WEIGHT_PROGRAM, "", "lift", "a sum or maximum over the weights")
        if "dot" in depends(weight):
            raise Refused(Reason.WEIGHT_PROGRAM, "", "lift", "scores decide on the weights a second time")
        if bound(score):
            raise Refused(Reason.ROW_DEPENDENT, "", "lift", "a sum or maximum over the row")
        if any(x.op == "dot" and x.attr is not None for x in walk(score)):
            raise Refused(Reason.NOT_EXPRESSIBLE, "", "lift", "more than one product in the score")
        if "keep" in depends(score):
            raise Refused(Reason.ROW_DEPENDENT, "", "lift", "dropout of scores")
        if not linear_in_weight(weight):
            raise Refused(Reason.WEIGHT_PROGRAM, "", "lift", str(weight)[:160])
        self._check_dropout(weight)
        return self._named(q, k, v, score, weight)

    def _choose(self, levels: list[Level], inner: tuple[str, str], what: str) -> Level:
        """The level that saves most, and of those the shallowest; its index must be affine in the tile's two axes."""
        foreign = {f"x{n}" for n in range(len(self.out.shape))} & {self.i, self.parts.e} | {"j", "d"}
        fit: list[Level] = []
        for level in levels:
            affine = all(self.parts.lift.algebra.affine(x, inner) is not None and not loads(x) for x in level.index)
            if level.value.nodes and affine and not uses(level) & (foreign - set(inner)):
                fit.append(level)
        if not fit:
            raise Refused(Reason.NOT_EXPRESSIBLE, "", "lift", f"the {what} are no strided view of a tensor of the graph")
        most = max(level.saved for level in fit)
        return next(level for level in fit if level.saved == most)

    def _check_dropout(self, weight: Expr) -> None:
        """Dropout counts by position: every position must have drawn its own number. An axis of length 1 has one position."""
        lengths = {f"x{n}": s for n, s in enumerate(self.out.shape)} | {"j": self.parts.lift.algebra.lengths["j"]}
        axes = {x for x, s in lengths.items() if s != const(1)} - {self.parts.e}
        for x in walk(weight):
            if x.op == "keep":
                drawn = frozenset().union(*(depends(e) for e in self.parts.lift.streams[x.attr[0]][1]))  # type: ignore[index]
                if not axes <= drawn:
                    raise Refused(Reason.WEIGHT_PROGRAM, "", "lift", "one dropout mask for several heads or rows")

    def _named(self, q: Level, k: Level, v: Level, score: Expr, weight: Expr) -> Lifted:
        """Rename axes, number operands, name the lengths."""
        rank = len(self.out.shape)
        batch = [f"x{n}" for n in range(rank) if f"x{n}" not in (self.i, self.parts.e)]
        final = {x: f"b{n}" for n, x in enumerate(batch)} | {self.i: "i", self.parts.e: "e"}
        rename = {axis(x): axis(y) for x, y in final.items()}
        lengths = self.parts.lift.algebra.lengths
        axes = {**{final[f"x{n}"]: s for n, s in enumerate(self.out.shape)}, "j": lengths["j"], "d": lengths["d"]}
        order = [*(f"b{n}" for n in range(len(batch))), "i", "j", "d", "e"]
        tensors: list[Value] = []
        casts: list[torch.dtype | None] = []
        number: dict[tuple[int, torch.dtype | None], int] = {}           # a tensor read in two precisions is two operands

        def enter(value: Value, cast: torch.dtype | None) -> None:
            if (value.number, cast) not in number:
                number[value.number, cast] = len(tensors)
                tensors.append(value)
                casts.append(cast)

        for level in (q, k, v):
            enter(level.value, level.narrowed)
        programs = [score, weight, *self.parts.extra]
        for x in (x for e in programs for x in loads(e)):
            enter(self.parts.lift.values[int(x.attr)], None)  # type: ignore[arg-type]
        self._check_tensors(tensors, (q, k, v))
        symbols = {s: name for name in reversed(order) for s in [axes[name]] if s.op == "size"}
        scalars: dict[Expr, str] = {}
        numbers: dict[Expr, int] = {}                  # a float that Dynamo keeps symbolic is handed over as a tensor of no dimensions

        def final_name(x: Expr) -> Expr | None:
            if x.op == "load":
                return load(number[int(x.attr), None], x.args, x.kind)  # type: ignore[arg-type]
            if x.op == "size":
                if x.kind == "float":
                    numbers.setdefault(x, len(tensors) + len(numbers))
                    return load(numbers[x], (), "float")
                return size(symbols[x]) if x in symbols else size(scalars.setdefault(x, f"n{len(scalars)}"))
            return rename.get(x)

        done = lambda e: rewrite(e, final_name)
        access = lambda level: Access(number[level.value.number, level.narrowed], tuple(done(x) for x in level.index))
        product = self.parts.lift.dots[self.main][0].dtype
        wide = lambda n: (casts[n] or tensors[n].dtype)
        score, weight, *extra = (done(as_kind(x, "float")) for x in programs)
        labels = zip(_labels(tensors, (q, k, v)), tensors, strict=True)
        operands = [Operand(name, str(wide(n)).removeprefix("torch."), len(t.shape)) for n, (name, t) in enumerate(labels)]
        spec = AttentionSpec(
            batch=tuple(order[:len(batch)]), operands=(*operands, *(Operand(f"c{n}", "float64", 0) for n in range(len(numbers)))),
            query=access(q), key=access(k), value=access(v), score=score, weight=weight, extra_terms=tuple(extra),
            empty_rows=self._empty_rows(),
            qk_dtype=str(product).removeprefix("torch."), pv_dtype=str(self.parts.product.dtype).removeprefix("torch."),
            out_dtype=str(self.out.dtype).removeprefix("torch."), scalars=tuple(scalars.values()),
            out_order=self._layout(final, rank))
        if len(spec.programs) and sum(1 for e in spec.programs for _ in walk(e)) > 4000:
            raise Refused(Reason.UNKNOWN_OP, "", "lift", "the score program grew too large")
        local = {id(n): k for k, n in enumerate([*self.region.inputs, *self.region.body])}
        inverse = [spec.out_axes.index(final[f"x{n}"]) for n in range(rank)]
        return Lifted(spec, tuple(local[id(t.nodes[0])] for t in tensors), tuple(casts), tuple(numbers),
                      tuple(axes[name] for name in order) + tuple(scalars), tuple(inverse), self._score_nodes(local))

    def _empty_rows(self) -> EmptyRows:
        """What becomes of rows without a key: as written, unless the user wants them to be 0."""
        if self.parts.repaired:
            return "repaired"
        safe = self.parts.softmax is not None and self.parts.softmax.call.target is aten._safe_softmax.default
        return "zero" if safe or self.settings.fully_masked_rows == "zero" else "nan"

    def _check_tensors(self, tensors: list[Value], products: tuple[Level, ...]) -> None:
        """Kinds, devices, and that no operand is itself made from the scores."""
        for level in products:
            if level.value.dtype not in _FLOATS:
                raise Refused(Reason.DTYPE, _first(level.value), "lift", str(level.value.dtype))
        devices = {t.device for t in tensors}
        if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            raise Refused(Reason.DEVICE, "", "lift", ", ".join(sorted(map(str, devices))))
        chain = {self.parts.lift.dots[self.main][0].number}
        for t in tensors:
            if t.nodes[0] in self.region.changed_later:
                raise Refused(Reason.MUTATED_OPERAND, _first(t), "lift", "it is changed after the product and needed for the gradient")
            if _made_from(t, chain):
                raise Refused(Reason.ROW_DEPENDENT, _first(t), "lift", "an operand is computed from the scores")

    def _layout(self, final: dict[str, str], rank: int) -> tuple[int, ...]:
        """Memory order of the op's result: that of the product (a fused call may give its heads interleaved). Where its only
        consumer permutes it and makes that contiguous (the usual merge of heads), the permuted order saves the copy."""
        axes = [*(f"b{n}" for n in range(rank - 2)), "i", "e"]
        order = merge_order(self.region.product, rank) or memory_order(nodes.value(self.region.product))
        return tuple(axes.index(final[f"x{k}"]) for k in order or range(rank))

    def _score_nodes(self, local: dict[int, int]) -> tuple[int, ...]:
        """The nodes that hold the raw product or what is computed from it on the way to the softmax."""
        dot = {self.parts.lift.dots[self.main][0].number}
        found = []
        for k, v in enumerate(self.nodes):
            if v is not None and v is not self.out and _made_from(v, dot):
                found.append(k)
        return tuple(found)


def _made_from(value: Value, numbers: set[int]) -> bool:
    seen: set[int] = set()
    stack = [value]
    while stack:
        v = stack.pop()
        if v.number in numbers:
            return True
        if v.number not in seen:
            seen.add(v.number)
            stack.extend(arguments_of(v))
    return False


def _first(value: Value) -> str:
    return value.nodes[0].name if value.nodes else ""


def _labels(tensors: list[Value], roles: tuple[Level, ...]) -> list[str]:
    """Short names to print: the roles, and for captured tensors what their users called them."""
    out: list[str] = []
    for t in tensors:
        role = next((r for r, level in zip("qkv", roles, strict=True) if level.value is t), None)
        name = role or re.sub(r"_?\d+$", "", re.sub(r".*_(parameters|buffers|kwargs|args)_", "", _first(t).strip("_"))).strip("_")
        name = re.sub(r"^l_", "", name) or "t"
        out.append(name if name not in out else f"{name}{sum(o.rstrip('0123456789') == name for o in out) + 1}")
    return out
