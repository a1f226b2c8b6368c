"""From a recorded slice to an AttentionSpec: find the two products, prove what every axis is, choose the operands.

The axes of the result are called x0, x1, … until their roles are known. Proven roles: ``j`` is what the value product
sums over and the softmax runs over; ``e`` is the axis that only the values have; ``i`` is one on which neither keys nor
values depend; ``d`` is what the score product sums over; the others are batch axes.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ..algebra import Algebra
from ..program import Expr, apply, axis, const, depends, linear_in_weight, loads, substitute, walk
from ..refusal import Reason, Refused
from ..settings import Settings
from ..spec import Access, AttentionSpec, EmptyRows
from . import nodes
from .lift import Level, Lift, NoRule
from .manual import bound
from .operands import Call, Frame, Operands
from .pointwise import as_kind
from .region import Region, memory_order, merge_order
from .trace import Value, aten, first_name
from .unfold import Parts, arguments_of, main_dot, pull, query_axis, sides, uses
from .wanted import Wanted
from .weights import layout, reading

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class Weights:
    """The call of `attnfuse::weights` that gives a tensor of weights: the slice's node that holds it, the order of the result's
    dimensions, and the shape to which it is then reshaped, if it is."""

    call: Call
    node: int
    permutation: tuple[int, ...]
    shape: tuple[Expr, ...] | None


@dataclass(frozen=True)
class Lifted:
    """The call of the op that stands for a slice, the order of the result's dimensions that gives back the product's, the nodes that
    carry the raw scores, and the weights that are read elsewhere too."""

    call: Call
    permutation: tuple[int, ...]
    scores: tuple[int, ...]
    weights: tuple[Weights, ...] = ()

    @property
    def spec(self) -> AttentionSpec:
        """The meaning."""
        return self.call.spec


def assemble(region: Region, values: list[Value | None], least: dict[str, int], settings: Settings) -> Lifted:
    """The meaning of a slice whose nodes (inputs, then body) have the given recorded values; raises Refused."""
    out = values[len(region.inputs) + region.body.index(region.product)]
    if out is None:
        raise Refused(Reason.FAILED, region.product.name, "lift", "the product is not a tensor")
    algebra = Algebra({f"x{k}": s for k, s in enumerate(out.shape)}, least)
    wide = out.dtype == torch.float64
    try:
        lift = Lift(algebra, wide=wide)
        parts = pull(lift, out)
        main = main_dot(parts)
        others = {v.number for n, (v, _, _) in enumerate(lift.dots) if n != main} - {lift.dots[main][0].number}
        lift = Lift(algebra, opaque=others, wide=wide)
        parts = pull(lift, out)
        main = main_dot(parts)
        key, _ = sides(parts, main)
        i = query_axis(parts, key, out)
        priced = Lift(algebra, opaque=others, price=(i, "j"), wide=wide)
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
        lengths = self.parts.lift.algebra.lengths
        known = {**{final[f"x{n}"]: s for n, s in enumerate(self.out.shape)}, "j": lengths["j"], "d": lengths["d"]}
        order = [*(f"b{n}" for n in range(len(batch))), "i", "j", "d", "e"]
        frame = Frame(self.parts.lift.values, {axis(x): axis(y) for x, y in final.items()}, tuple(order[:len(batch)]), {n: known[n] for n in order})
        local = {id(n): k for k, n in enumerate([*self.region.inputs, *self.region.body])}
        operands = Operands(frame, (q, k, v), (score, weight, *self.parts.extra))
        self._check_tensors(operands.tensors, (q, k, v))
        done = lambda e: operands.final(as_kind(e, "float"))
        product = self.parts.lift.dots[self.main][0].dtype
        call = operands.call(
            local, score=done(score), weight=done(weight), extra_terms=tuple(map(done, self.parts.extra)),
            query=operands.access(q), key=operands.access(k), value=operands.access(v), empty_rows=self._empty_rows(),
            qk_dtype=str(product).removeprefix("torch."), pv_dtype=str(self.parts.product.dtype).removeprefix("torch."),
            out_dtype=str(self.out.dtype).removeprefix("torch."), out_order=self._layout(final, rank))
        if sum(1 for e in call.spec.programs for _ in walk(e)) > 4000:
            raise Refused(Reason.UNKNOWN_OP, "", "lift", "the score program grew too large")
        inverse = [call.spec.out_axes.index(final[f"x{n}"]) for n in range(rank)]
        want = self.region.wanted
        weights = tuple(self._weights(n, want, frame, (q, k), score, call.spec, batch, local) for n in want.nodes) if want else ()
        return Lifted(call, tuple(inverse), self._score_nodes(), weights)

    def _weights(self, node: Node, want: Wanted, frame: Frame, roles: tuple[Level, Level], score: Expr, spec: AttentionSpec,
                 batch: list[str], local: dict[int, int]) -> Weights:
        """How a tensor of weights is given that something else reads: by the same attention without its values."""
        at = local.get(id(node))
        value = None if at is None else self.nodes[at]
        found = reading(self.parts, value, want)
        if at is None or value is None:                # `reading` has refused these
            raise want.refused("not what the values are weighed by")
        self._check_dropout(found.weight)
        lies = layout(self.parts.lift, found, value, node, (*batch, self.i, "j"), want)
        # Values are not read: a spec names some all the same, here the keys.
        frame = replace(frame, lengths={**frame.lengths, "e": frame.lengths["d"]})
        operands = Operands(frame, roles, (score, found.weight, *self.parts.extra))
        self._check_tensors(operands.tensors, roles)
        done = lambda e: operands.final(as_kind(e, "float"))
        query, key = map(operands.access, roles)
        if found.repaired != self.parts.repaired and self.settings.fully_masked_rows == "zero":
            raise want.refused("read before their NaN are repaired, under a setting that tells some of them from others")
        rows = "repaired" if found.repaired else "nan" if self.parts.repaired else spec.empty_rows
        call = operands.call(
            local, score=done(score), weight=done(found.weight), extra_terms=tuple(map(done, self.parts.extra)), query=query, key=key,
            empty_rows=rows, qk_dtype=spec.qk_dtype, pv_dtype=spec.pv_dtype,
            value=Access(key.operand, tuple(substitute(x, {axis("d"): axis("e")}) for x in key.index)),
            out_dtype=str(value.dtype).removeprefix("torch."), out_order=lies.memory)
        if call.spec.compute_dtype != spec.compute_dtype:
            raise want.refused(f"in {value.dtype}, the attention in {spec.compute_dtype}")
        return Weights(call, at, lies.permutation, lies.shape)

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
                raise Refused(Reason.DTYPE, first_name(level.value), "lift", str(level.value.dtype))
        devices = {t.device for t in tensors}
        if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            raise Refused(Reason.DEVICE, "", "lift", ", ".join(sorted(map(str, devices))))
        chain = {self.parts.lift.dots[self.main][0].number}
        for t in tensors:
            if t.nodes[0] in self.region.changed_later:
                raise Refused(Reason.MUTATED_OPERAND, first_name(t), "lift", "it is changed after the product and needed for the gradient")
            if _made_from(t, chain):
                raise Refused(Reason.ROW_DEPENDENT, first_name(t), "lift", "an operand is computed from the scores")

    def _layout(self, final: dict[str, str], rank: int) -> tuple[int, ...]:
        """Memory order of the op's result: that of the product (a fused call may give its heads interleaved). Where its only
        consumer permutes it and makes that contiguous (the usual merge of heads), the permuted order saves the copy."""
        axes = [*(f"b{n}" for n in range(rank - 2)), "i", "e"]
        order = merge_order(self.region.product, rank) or memory_order(nodes.value(self.region.product))
        return tuple(axes.index(final[f"x{k}"]) for k in order or range(rank))

    def _score_nodes(self) -> tuple[int, ...]:
        """The nodes that hold the raw product or what is computed from it on the way to the softmax."""
        dot = {self.parts.lift.dots[self.main][0].number}
        return tuple(k for k, v in enumerate(self.nodes) if v is not None and v is not self.out and _made_from(v, dot))


def _made_from(value: Value, numbers: set[int]) -> bool:
    """Whether a tensor is one of these, by number, or computed from one."""
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
