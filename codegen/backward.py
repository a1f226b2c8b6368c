"""The emitter of the backward kernels: what they share, the row kernel and the kernel of the queries' gradient.

Three kernels, each owning what it writes, so that every run gives the same bits:

* rows: delta = Σ_e grad_out · out for each row (the weight program is linear in the weight), the row's normaliser, and
  which queries saw no allowed key;
* keys (`backward_keys`): one program a tile of keys, looping over the queries that can see them: dK and dV;
* queries: one program a tile of queries, looping over keys as forward does: dQ.

The weights are computed again: ``p = exp(score - maximum - log_sum)``. With dP = grad_out · valueᵀ taken through the weight
program, dS = p · (dP - delta), and the score program's adjoint makes of it the gradient of the raw product.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

from ..adjoint import UPSTREAM, ZERO, adjoint
from ..program import DOT, WEIGHT, Expr, depends, substitute
from ..ranges import analyse
from ..spec import AttentionSpec
from .exponent import LOG2E, foldable, scale_of
from .forward import RESERVED, Forward, Kernel, words
from .plan import HALF, KernelPlan, product_dtype, products
from .scores import Body, literal, prepare
from .writer import Writer

ARRIVED = Expr("axis", attr="arrived", kind="float")
"""The gradient of a weight after the weight program; `UPSTREAM` is that of a score."""

RESERVED_BACKWARD = RESERVED + (
    "do dp ds dk dv dq shift log_sum delta unseen first_row largest total grad_out_ptr grad_q_ptr grad_k_ptr grad_v_ptr shift_ptr log_sum_ptr "
    "delta_ptr unseen_ptr q_base do_base last_n n_before n_after first last unseen_start unseen_stop after grad_out_stride_m "
    "grad_out_stride_e grad_q_stride_m grad_q_stride_d grad_k_stride_n grad_k_stride_d grad_v_stride_n grad_v_stride_e o owner").split()


@dataclass(frozen=True)
class Chain:
    """What is computed at every score of a backward pass.

    Attributes:
        score, inside: the score program, and the one where all bounds hold, both without the factor that is part of `unit`.
        folded: whether the maximum and the logarithm of the sum are one number, in units of log2(e).
        unit: what a score is multiplied by before exp2.
        weight: the weight program. arrived: the gradient of a softmax weight, from `ARRIVED`.
        slope, slope_inside: the gradient of the raw product from `UPSTREAM`, that of the score, without `factor`.
        factor: by which the gradients of queries and keys are multiplied in the end.
        seen_above: a row's normaliser at or below this means that it saw no allowed key.
    """

    score: Expr
    inside: Expr
    folded: bool
    unit: float
    weight: Expr
    arrived: Expr
    slope: Expr
    slope_inside: Expr
    factor: float
    seen_above: float


@functools.lru_cache(maxsize=512)
def chain(spec: AttentionSpec, depth: int, value_depth: int) -> Chain:
    """The chain of a spec for given head dimensions.

    Raises:
        ValueError: an operation without a derivative.
    """
    constants = {"d": depth, "e": value_depth}
    ranges = analyse(spec)
    score, inside, weight = (prepare(x, constants) for x in (spec.score, ranges.inside, spec.weight))
    arrived = prepare(substitute(adjoint(weight, WEIGHT), {UPSTREAM: ARRIVED}), constants)
    (factor, slope), (other, slope_inside) = (scale_of(prepare(adjoint(x, DOT), constants)) for x in (score, inside))
    if factor != other:
        factor, slope, slope_inside = 1.0, *(prepare(adjoint(x, DOT), constants) for x in (score, inside))
    folded, unit = foldable(spec, score, inside), LOG2E
    if folded:
        (a, plain), (b, plain_inside) = scale_of(score), scale_of(inside)
        if a == b:
            unit, score, inside = a * LOG2E, plain, plain_inside
    return Chain(score, inside, folded, unit, weight, arrived, slope, slope_inside, factor, ranges.masked_below * (LOG2E if folded else 1.0))


def sweeps(spec: AttentionSpec) -> bool:
    """Whether what the bounds leave out counts after all for a row without an allowed key: its weights are uniform, or NaN."""
    ranges = analyse(spec)
    return bool(ranges.bounds) and (ranges.speculative or spec.empty_rows == "nan")


def flat(spec: AttentionSpec) -> bool:
    """Whether queries and keys have no gradient, since no score depends on their product."""
    return adjoint(spec.score, DOT) == ZERO


@dataclass(frozen=True)
class Types:
    """The dtypes in which products are taken: of the scores; of their gradient with queries and keys; of the weights with
    grad_out; of grad_out with the values. A computed factor is rounded to a half type only where the spec asks for that type."""

    score: str
    slope: str
    value: str
    arrived: str


def types(spec: AttentionSpec) -> Types:
    """The dtypes of a spec's products."""
    query, key, value = (spec.operands[a.operand].dtype for a in (spec.query, spec.key, spec.value))
    score, pv = products(spec)
    slope = spec.qk_dtype if spec.qk_dtype in HALF and {query, key} <= {spec.qk_dtype, "float32"} else "float32"
    return Types(score, slope, pv, product_dtype(spec.out_dtype, value, spec.pv_dtype))


class Recomputed(Forward):
    """What the kernels of dK, dV and dQ share: the chain, and the text of one tile's gradients."""

    reserved = RESERVED_BACKWARD

    def _choose_exponent(self) -> None:
        """The exponent is that of the chain; forward's own stays out of it."""
        self.chain = chain(self.spec, self.plan.depth, self.plan.value_depth)
        self.types = types(self.spec)
        self.sweeps = sweeps(self.spec)

    def _precise(self, dtype: str) -> str:
        return self.precision if dtype == "float32" else ""

    def _first_row(self) -> str:
        return "first_row = batch.to(tl.int64) * n_queries"

    def _rows(self, mask: bool, delta: bool) -> list[str]:
        """Loads of the row vectors."""
        names = ["shift"] + ([] if self.chain.folded else ["log_sum"]) + (["delta"] if delta else [])
        for name in names:
            self.arguments.pointer(f"{name}_ptr", name)
        tail = ", mask=m_mask, other=0.0" if mask else ""
        return [f"{name} = tl.load({name}_ptr + first_row + offs_m{tail})" for name in names]

    def _weights(self, body: Body, inside: bool) -> list[str]:
        """Lines from ``qk`` to the softmax weight ``p``."""
        score = body.tile(self.chain.inside if inside else self.chain.score)
        lines, row = body.take(), self.programs.along["row"]
        if score != "qk":
            lines.append(f"score = {score}")
            score = "score"
        unit = literal(self.chain.unit)
        if self.chain.folded:
            lines.append(f"p = tl.exp2({score} * {unit} - shift{row})")
        else:
            lines.append(f"p = tl.exp2(({score} - shift{row}) * {unit} - log_sum{row})")
        if self.spec.empty_rows == "repaired":         # exp2 of -inf is 0, but the score may be NaN or +inf
            lines.append(f'p = tl.where({"shift" if self.chain.folded else "log_sum"}{row} < float("inf"), p, 0.0)')
        return lines

    def _slope(self, body: Body, inside: bool) -> list[str]:
        """Lines from ``dp`` and ``p`` to ``ds``, the gradient of the raw product without the chain's factor."""
        lines: list[str] = []
        if self.chain.arrived != ARRIVED:
            arrived = body.tile(self.chain.arrived)
            lines += [*body.take(), f"dp = {arrived}"]
        lines.append(f"ds = p * (dp - delta{self.programs.along['row']})")
        slope = self.chain.slope_inside if inside else self.chain.slope
        if slope != UPSTREAM:
            text = body.tile(slope)
            lines += [*body.take(), f"ds = {text}"]
        return lines

    def _cast_between(self, name: str, have: str, want: str) -> str:
        """A loaded tile in the dtype of a product."""
        return name if have == want else f"{name}.to(tl.{want})"

    def _scaled(self, name: str) -> str:
        return name if self.chain.factor == 1.0 else f"{name} * {literal(self.chain.factor)}"


class Queries(Recomputed):
    """One emission of the kernel of dQ, whose loops are forward's."""

    def name(self) -> str:
        return "_".join(["attention_backward_queries", *words(self.spec, self.plan)])

    def _load_query(self, query: Writer, bases: Writer) -> None:
        super()._load_query(query, bases)
        query.gap("load the gradient of the result, and what the rows are normalised by")
        self.arguments.pointer("grad_out_ptr", "grad_out")
        terms = self._row_strides("grad_out", "grad_out")
        if terms:
            query.line(f"grad_out_ptr += {' + '.join(terms)}")
        mask = "m_mask[:, None] & e_mask[None, :]" if self.e_padded else "m_mask[:, None]"
        load = f"tl.load(grad_out_ptr + offs_m[:, None] * grad_out_stride_m + offs_e[None, :] * grad_out_stride_e, mask={mask}, other=0.0)"
        query.line(f"do = {self._cast_between(load, self.spec.out_dtype, self.types.arrived)}")
        query.line(self._first_row())
        query.extend(self._rows(mask=True, delta=True))

    def _state(self, w: Writer) -> None:
        w.gap()
        w.line("dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)")

    def _unseen(self) -> str:
        return f"m_mask & ((shift > {literal(self.chain.seen_above)}) ^ True)        # NaN is not seen either"

    def _tile(self, w: Writer, program: Expr, masked: bool) -> None:
        """One tile: scores, weights, their gradient, the product with K."""
        body, types, inside = Body(self.programs, masked), self.types, not masked
        weights = self._weights(body, inside)
        slope = self._slope(body, inside)
        key, value = (self.spec.operands[a.operand].dtype for a in (self.spec.key, self.spec.value))
        self._columns(w, masked)
        self._load(w, "k", "d", masked, self.d_padded, "")
        w.extend(body.moving)
        if "dot" in depends(self.chain.inside if inside else self.chain.score):
            w.line(f"qk = tl.dot(q, tl.trans({self._cast_between('k', key, types.score)}){self._precise(types.score)})")
        w.extend(weights)
        self._load(w, "v", "e", masked, self.e_padded, "")
        w.line(f"dp = tl.dot(do, tl.trans({self._cast_between('v', value, types.arrived)}){self._precise(types.arrived)})")
        w.extend(slope)
        if masked:
            w.line("ds = tl.where(n_mask[None, :], ds, 0.0)")
        rounded = self._cast_between("ds", "float32", types.slope)
        w.line(f"dq = tl.dot({rounded}, {self._cast_between('k', key, types.slope)}, dq{self._precise(types.slope)})")

    def _epilogue(self, w: Writer) -> None:
        w.gap("epilogue: the scores' own factor, store")
        self.arguments.pointer("grad_q_ptr", "grad_q")
        terms = self._strides(self.spec.query, "grad_q", ("i", "d"), ("m", "d"), tensor="grad_q")
        if terms:
            w.line(f"grad_q_ptr += {' + '.join(terms)}")
        mask = "m_mask[:, None] & d_mask[None, :]" if self.d_padded else "m_mask[:, None]"
        place = "grad_q_ptr + offs_m[:, None] * grad_q_stride_m + offs_d[None, :] * grad_q_stride_d"
        value = self._scaled("dq")
        value = f"({value})" if value != "dq" else value
        w.line(f"tl.store({place}, {value}.to(grad_q_ptr.dtype.element_ty), mask={mask})")


class Rows(Recomputed):
    """One emission of the kernel that prepares the rows."""

    def name(self) -> str:
        return "_".join(["attention_backward_rows", *words(self.spec, self.plan)])

    def _inputs(self) -> None:
        for name in ("out", "grad_out", "stats"):
            self.arguments.pointer(f"{name}_ptr", name)

    def _which_tile(self, w: Writer) -> None:
        self.programs.size("i")
        w.line("# which queries of which attention")
        w.line("n_tiles = tl.cdiv(n_queries, BLOCK_M)")
        w.line("pid = tl.program_id(0)")
        w.line("batch = pid // n_tiles")
        self._positions(w, "batch", [(n, self.programs.size(n)) for n in self.spec.batch])
        wide = ".to(tl.int64)" if self.plan.index_bits == 64 else ""
        w.line(f"offs_m = {'(' if wide else ''}pid % n_tiles * BLOCK_M + tl.arange(0, BLOCK_M){')' if wide else ''}{wide}")
        w.line("m_mask = offs_m < n_queries")
        self._depths(w, "e")

    def _load_query(self, query: Writer, bases: Writer) -> None:
        mask = "m_mask[:, None] & e_mask[None, :]" if self.e_padded else "m_mask[:, None]"
        query.gap("delta: what the gradients of a row's scores have to lose to add up to nothing")
        for name, tensor in (("o", "out"), ("do", "grad_out")):
            terms = self._row_strides(tensor, tensor)
            if terms:
                query.line(f"{tensor}_ptr += {' + '.join(terms)}")
            place = f"{tensor}_ptr + offs_m[:, None] * {tensor}_stride_m + offs_e[None, :] * {tensor}_stride_e"
            query.line(f"{name} = tl.load({place}, mask={mask}, other=0.0).to(tl.float32)")
        query.line("delta = tl.sum(do * o, 1)")

    def _range(self, w: Writer) -> None:
        """Nothing: there are no keys."""

    def _state(self, w: Writer) -> None:
        """Nothing: there is no loop."""

    def _loops(self, w: Writer) -> None:
        w.gap("what the scores of a row are shifted by before exp2")
        w.line(self._first_row())
        w.line("largest = tl.load(stats_ptr + (first_row + offs_m) * 2, mask=m_mask, other=0.0)")
        w.line("total = tl.load(stats_ptr + (first_row + offs_m) * 2 + 1, mask=m_mask, other=0.0)")
        if self.spec.empty_rows != "nan":
            w.line('empty = largest == float("-inf")        # every weight of such a row is 0')
            w.line("largest = tl.where(empty, 0.0, largest)")
            w.line('total = tl.where(empty, float("inf"), total)')
        if self.chain.folded:
            values = {"shift": f"(largest + total) * {LOG2E}", "delta": "delta"}
        else:
            values = {"shift": "largest", "log_sum": f"total * {LOG2E}", "delta": "delta"}
        for name, value in values.items():
            self.arguments.pointer(f"{name}_ptr", name)
            w.line(f"tl.store({name}_ptr + first_row + offs_m, {value}, mask=m_mask)")
        if self.sweeps:
            self._mark(w)

    def _mark(self, w: Writer) -> None:
        """The first and the last query without an allowed key; maxima, so the order of the programs does not matter."""
        w.gap("the queries [n_queries - first, last) hold all rows that saw no allowed key: those count for keys beyond their bounds")
        self.arguments.pointer("unseen_ptr", "unseen")
        below = self.ranges.masked_below
        w.line(f"unseen = m_mask & ((largest > {literal(below)}) ^ True)        # NaN is not seen either")
        narrow = ".to(tl.int32)" if self.plan.index_bits == 64 else ""
        w.line(f"first = tl.max(tl.where(unseen, (n_queries - offs_m){narrow}, 0), 0)")
        w.line(f"last = tl.max(tl.where(unseen, (offs_m + 1){narrow}, 0), 0)")
        w.line("tl.atomic_max(unseen_ptr + batch.to(tl.int64) * 2, first, mask=last > 0)")
        w.line("tl.atomic_max(unseen_ptr + batch.to(tl.int64) * 2 + 1, last, mask=last > 0)")

    def _epilogue(self, w: Writer) -> None:
        """Nothing: everything is stored."""


@functools.lru_cache(maxsize=512)
def emit(spec: AttentionSpec, plan: KernelPlan, what: str) -> Kernel:
    """One kernel of the backward pass.

    Args:
        spec, plan: as of `forward.emit`.
        what: ``"rows"``, ``"queries"`` (dQ), ``"keys"`` (dK), ``"values"`` (dV) or ``"keys_values"`` (both).

    Raises:
        Unsupported: an index map that no kernel can follow, or keys and values shared by different heads.
    """
    from .backward_keys import Keys

    if what in ("rows", "queries"):
        return (Rows if what == "rows" else Queries)(spec, plan).kernel()
    return Keys(spec, plan, want_key="keys" in what, want_value="values" in what).kernel()
