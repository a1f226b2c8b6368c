"""The emitter of the backward kernels: what they share, the row kernel and the kernel of the queries' gradient.

Each kernel owns what it writes, so that every run gives the same bits:

* rows: delta = Σ_e grad_out · out for each row (the weight program is linear in the weight), the row's normaliser, and
  which queries saw no allowed key;
* keys (`backward_keys`): one program a tile of keys, looping over the queries that can see them: dK and dV;
* queries: one program a tile of queries, looping over keys as forward does: dQ;
* tiles (`backward_tiles`): one program a tile of scores, for the gradient of a bias that several sequences or heads share.

The weights are computed again: ``p = exp(score - maximum - log_sum)``. With dP = grad_out · valueᵀ taken through the weight
program, dS = p · (dP - delta), and the score program's adjoint makes of it the gradient of the raw product and of every
tensor that it reads (`jobs`).
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..adjoint import UPSTREAM, ZERO, adjoint
from ..program import DOT, WEIGHT, Expr, depends, loads, substitute
from ..ranges import analyse
from ..spec import AttentionSpec
from .exponent import LOG2E, foldable, scale_of, unfilled
from .forward import RESERVED, Forward, Kernel, words
from .jobs import Captured, Job
from .plan import HALF, KernelPlan, product_dtype, products
from .reads import Reader, index_of, place_of, ROLES
from .scores import Body, level, literal, prepare
from .writer import Writer

ARRIVED = Expr("axis", attr="arrived", kind="float")
"""The gradient of a weight after the weight program; `UPSTREAM` is that of a score."""

RESERVED_BACKWARD = RESERVED + (
    "do dp ds dk dv dq shift largest_ptr log_sum delta unseen first_row scratch_row largest total shift_desc largest_desc log_sum_desc delta_desc grad_out_ptr grad_q_ptr grad_k_ptr grad_v_ptr shift_ptr log_sum_ptr "
    "delta_ptr unseen_ptr q_base do_base last_n n_before first last some_unseen mass total grad_out_desc rest n_rows rows k_base v_base grad_out_stride_m "
    "grad_out_stride_e grad_q_stride_m grad_q_stride_d grad_k_stride_n grad_k_stride_d grad_v_stride_n grad_v_stride_e o owner").split()


@dataclass(frozen=True)
class Chain:
    """What is computed at every score of a backward pass.

    Attributes:
        score, inside: the score program, for cut tiles, and the one where all bounds hold, for full ones.
        folded, inside_folded: for each whether the maximum and the logarithm of the sum are one number, in units of log2(e). Where
            only the second holds, `inside` has -inf for fills: rows without a score far above them keep to cut tiles.
        unit, inside_unit: what a score is multiplied by before exp2; the programs have lost what became part of it.
        weight: the weight program. arrived: the gradient of a softmax weight, from `ARRIVED`.
        slope, slope_inside: the gradient of the raw product from `UPSTREAM`, that of the score, without `factor`.
        factor: by which the gradients of queries and keys are multiplied in the end.
        seen_above: a row's maximum at or below this means that it saw no allowed key.
    """

    score: Expr
    inside: Expr
    folded: bool
    inside_folded: bool
    unit: float
    inside_unit: float
    weight: Expr
    arrived: Expr
    slope: Expr
    slope_inside: Expr
    factor: float
    seen_above: float

    @property
    def mixed(self) -> bool:
        """Whether full tiles and cut tiles are normalised in two ways."""
        return self.folded != self.inside_folded

    def rows(self, inside: bool) -> tuple[str, ...]:
        """The row vectors that a tile's weights need."""
        return ("shift",) if (self.inside_folded if inside else self.folded) else ("largest", "log_sum")


@functools.lru_cache(maxsize=512)
def chain(spec: AttentionSpec, depth: int, value_depth: int) -> Chain:
    """The chain of a spec for given head dimensions.

    Raises:
        ValueError: an operation without a derivative.
    """
    constants = {"d": depth, "e": value_depth}
    ranges = analyse(spec)
    score, inside, weight = (prepare(x, constants) for x in (spec.score, inside_of(spec), spec.weight))
    arrived = prepare(substitute(adjoint(weight, WEIGHT), {UPSTREAM: ARRIVED}), constants)
    (factor, slope), (other, slope_inside) = (scale_of(prepare(adjoint(x, DOT), constants)) for x in (score, inside))
    if factor != other:
        factor, slope, slope_inside = 1.0, *(prepare(adjoint(x, DOT), constants) for x in (score, inside))
    below = ranges.masked_below
    (bare, a), (bare_inside, b) = unfilled(score), unfilled(inside)
    inside_folded = foldable(spec, bare, bare_inside)
    folded = inside_folded and not a | b
    unit = inside_unit = 1.0
    if inside_folded:
        inside_unit, inside = scale_of(bare_inside)
        below = max([below, *(f / 2 for f in a | b)])
    if folded:
        unit, score = scale_of(score)
    return Chain(score, inside, folded, inside_folded, unit * LOG2E, inside_unit * LOG2E, weight, arrived, slope, slope_inside, factor, below)


def inside_of(spec: AttentionSpec) -> Expr:
    """The score program where all bounds hold; the whole one if that would read by other expressions, which have other gradients."""
    inside = analyse(spec).inside
    return inside if set(loads(inside)) <= set(loads(spec.score)) else spec.score


def sweeps(spec: AttentionSpec, depth: int, value_depth: int) -> bool:
    """Whether rows without an allowed key have to be told from others: what the bounds leave out counts for them after all, for
    their weights are uniform or NaN; or they do not bear the program of full tiles."""
    ranges = analyse(spec)
    return chain(spec, depth, value_depth).mixed or bool(ranges.bounds) and (ranges.speculative or spec.empty_rows == "nan")


def row_buffers(chain: Chain) -> tuple[str, ...]:
    """The row vectors that the row kernel leaves for the others."""
    return tuple(dict.fromkeys([*chain.rows(True), *chain.rows(False), "delta"]))


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
    """What the kernels of dK, dV, dQ and of captured tensors share: the chain, and the text of one tile's gradients.

    Attributes:
        sums: by captured read, the variable that holds its gradient so far.
    """

    reserved = RESERVED_BACKWARD

    def __init__(self, spec: AttentionSpec, plan: KernelPlan, job: Job) -> None:
        self.job = job
        super().__init__(spec, plan)
        self.sums = {c: self.names.of(("sum", c), f"{c.label}_sum") for c in job.captured}

    def name(self) -> str:
        return "_".join(["attention_backward", self.job.name, *words(self.spec, self.plan)])

    def _choose_exponent(self) -> None:
        """The exponent is that of the chain; forward's own stays out of it."""
        self.chain = chain(self.spec, self.plan.depth, self.plan.value_depth)
        self.types = types(self.spec)
        self.written = None
        self.sweeps = sweeps(self.spec, self.plan.depth, self.plan.value_depth)

    def _precise(self, dtype: str) -> str:
        return self.precision if dtype == "float32" else ""

    def _first_row(self, dense: bool) -> list[str]:
        """Where the rows of this attention begin: in the scratch that kernels share, whose rows are padded to 16 bytes for
        descriptors, and (`dense`) in what has a row for each query."""
        lines = ["first_row = batch.to(tl.int64) * n_queries"] if dense else []
        return [*lines, "scratch_row = batch.to(tl.int64) * (tl.cdiv(n_queries, 4) * 4)"]

    def _linear(self) -> str:
        """The row-major number of the batch position."""
        text = ""
        for name in self.spec.batch:
            own = self.programs.axis(name)
            text = f"({text}) * {self.programs.size(name)} + {own}" if " " in text else f"{text} * {self.programs.size(name)} + {own}" if text else own
        return text

    def _rows(self, names: Sequence[str], mask: bool) -> list[str]:
        """Loads of row vectors."""
        if "rows" in self.plan.described:
            for name in names:
                self.arguments.pointer(f"{name}_desc", name, (1, self.plan.block_m))
            return [f"{name} = {name}_desc.load([batch, start_m]).reshape([BLOCK_M])" for name in names]
        for name in names:
            self.arguments.pointer(f"{name}_ptr", name)
        tail = ", mask=m_mask, other=0.0" if mask else ""
        return [f"{name} = tl.load({name}_ptr + scratch_row + offs_m{tail})" for name in names]

    def _grad_out_reader(self, base: str = "") -> tuple[Reader, list[str]]:
        """As `_reader`, for the gradient of the result."""
        argument = self._input("do", "grad_out")
        if "do" in self.plan.described:
            place = place_of(index_of(self.spec, "do"), ROLES["do"], "m", lambda x: self.programs.scalar(x).text)
            return Reader(argument, "grad_out", ("m", "e"), place), []
        return Reader(base or argument, "grad_out", ("m", "e")), self._row_strides("grad_out", "grad_out")

    def _weights(self, body: Body, inside: bool) -> list[str]:
        """Lines from ``qk`` to the softmax weight ``p``."""
        chain = self.chain
        score = body.tile(chain.inside if inside else chain.score)
        lines, row = body.take(), self.programs.along["row"]
        if score != "qk":
            lines.append(f"score = {score}")
            score = "score"
        unit = literal(chain.inside_unit if inside else chain.unit)
        folded = chain.rows(inside) == ("shift",)
        if folded:
            lines.append(f"p = tl.exp2({score} * {unit} - shift{row})")
        else:
            lines.append(f"p = tl.exp2(({score} - largest{row}) * {unit} - log_sum{row})")
        if self.spec.empty_rows == "repaired":         # exp2 of -inf is 0, but the score may be NaN or +inf
            lines.append(f'p = tl.where({"shift" if folded else "log_sum"}{row} < float("inf"), p, 0.0)')
        return lines

    def _gradients(self, body: Body, inside: bool, mask: str) -> list[str]:
        """Lines from ``dp`` and ``p`` to ``ds``, the gradient of the raw product without the chain's factor. On the way what
        the captured reads get is added up, where `mask` (if any) holds."""
        lines = self._captured(body, "weight", inside, mask)
        if self.job.slopes and self.chain.arrived != ARRIVED:
            arrived = body.tile(self.chain.arrived)
            lines += [*body.take(), f"dp = {arrived}"]
        if not self.job.slopes:
            return lines
        lines += [f"ds = p * (dp - delta{self.programs.along['row']})", *self._exact_delta()]
        lines += self._captured(body, "score", inside, mask)
        slope = self.chain.slope_inside if inside else self.chain.slope
        if (self.job.query or self.job.key) and slope != UPSTREAM:
            text = body.tile(slope)
            lines += [*body.take(), f"ds = {text}"]
        return lines

    def _captured(self, body: Body, program: str, inside: bool, mask: str) -> list[str]:
        lines: list[str] = []
        for one in self.job.captured:
            if one.program != program:
                continue
            expr = self.spec.weight if program == "weight" else inside_of(self.spec) if inside else self.spec.score
            slope = adjoint(expr, one.node)
            if program == "weight":
                slope = substitute(slope, {UPSTREAM: ARRIVED})
            if slope == ZERO:
                continue
            own = lambda x: f"tl.where({mask}, {x}, 0.0)" if mask else x
            text = body.tile(prepare(slope, self.programs.constants))
            lines += body.take()
            lines += self._add_captured(one, own(text))
            if one in self._corrected:
                text = body.tile(prepare(substitute(slope, {UPSTREAM: WEIGHT}), self.programs.constants))
                lines += [*body.take(), f"{self.sums[one]}_slope += tl.sum({own(text)}, 1)"]
        return lines

    def _exact_delta(self) -> list[str]:
        """Lines that sum what delta is the sum of, where that is corrected."""
        return ["total += tl.sum(p * dp, 1)", "mass += tl.sum(p, 1)"] if self._corrected else []

    @property
    def _corrected(self) -> tuple[Captured, ...]:
        """Reads whose gradient sums the scores' gradients over keys; only a kernel of queries has any.

        The scores' gradients of a row add up to nothing only as exactly as delta fits the very numbers that are summed, and such
        a gradient multiplies the remainder by its row's scores. The sum is linear in delta, so the kernel sums delta along
        with it and corrects it in the end.
        """
        return ()

    def _add_captured(self, one: Captured, tile: str) -> list[str]:
        """What becomes of one tile of a captured read's gradient: here it is summed over the axis that the kernel walks."""
        return [f"{self.sums[one]} += tl.sum({tile}, 1)"]

    def _zero_sums(self, w: Writer, shape: str) -> None:
        for one, name in self.sums.items():
            if level(one.node) != "tile" or self.job.kind == "tiles":
                w.line(f"{name} = tl.zeros({shape}, tl.float32)")

    def _cast_between(self, name: str, have: str, want: str) -> str:
        """A loaded tile in the dtype of a product."""
        return name if have == want else f"{name}.to(tl.{want})"

    def _scaled(self, name: str) -> str:
        return name if self.chain.factor == 1.0 else f"{name} * {literal(self.chain.factor)}"


class Queries(Recomputed):
    """One emission of a kernel that owns tiles of queries, with forward's loops: of dQ and of captured reads by row."""

    def _load_query(self, query: Writer, bases: Writer) -> None:
        super()._load_query(query, bases)
        query.gap("load the gradient of the result, and what the rows are normalised by")
        reader, terms = self._grad_out_reader()
        if terms:
            query.line(f"grad_out_ptr += {' + '.join(terms)}")
        query.line(f"do = {self._cast_between(reader.tile(True, self.e_padded), self.spec.out_dtype, self.types.arrived)}")
        query.extend(self._first_row(dense=bool(self.job.captured)))
        names = dict.fromkeys([*self.chain.rows(True), *self.chain.rows(False), *(["delta"] if self.job.slopes else [])])
        query.extend(self._rows(list(names), mask=True))

    @property
    def _corrected(self) -> tuple[Captured, ...]:
        return tuple(c for c in self.job.captured if c.program == "score" and level(c.node) != "tile")

    def _state(self, w: Writer) -> None:
        if self.sweeps:
            w.gap("a tile with a row that saw no allowed key, whose weights are those of ALL keys, takes every key through the whole program")
            row = "shift" if self.chain.folded else "largest"
            below = literal(self.chain.seen_above * (LOG2E if self.chain.folded else 1.0))
            w.line(f"some_unseen = tl.max((m_mask & (({row} > {below}) ^ True)).to(tl.int32), 0) > 0        # NaN is not seen either")
            if self.lowers:
                w.line("start = tl.where(some_unseen, 0, start)")
                w.line("full_start = tl.where(some_unseen, 0, full_start)")
            w.line("full_stop = tl.where(some_unseen, 0, full_stop)")
            if self.bounded:
                w.line(f"stop = tl.where(some_unseen, n_keys, {self.stop})")
                self.stop = "stop"
        w.gap()
        if self.job.query:
            w.line("dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)")
        self._zero_sums(w, "[BLOCK_M]")
        for name in (*(f"{self.sums[c]}_slope" for c in self._corrected), *(("total", "mass") if self._corrected else ())):
            w.line(f"{name} = tl.zeros([BLOCK_M], tl.float32)")

    def _sweep(self, w: Writer) -> None:
        """Nothing: `_state` has widened the range already."""

    def _tile(self, w: Writer, program: Expr, masked: bool) -> None:
        """One tile: scores, weights, their gradient, the product with K."""
        body, types, inside = Body(self.programs, masked), self.types, not masked
        weights = self._weights(body, inside)
        if masked and self._corrected:
            weights.append("p = tl.where(n_mask[None, :], p, 0.0)")
        gradients = self._gradients(body, inside, "n_mask[None, :]" if masked else "")
        key, value = (self.spec.operands[a.operand].dtype for a in (self.spec.key, self.spec.value))
        has_dot = "dot" in depends(self.chain.inside if inside else self.chain.score)
        self._columns(w, masked)
        if has_dot or self.job.query:
            w.line(f"k = {self.readers['k'].tile(masked, self.d_padded)}")
        w.extend(body.moving)
        if has_dot:
            w.line(f"qk = tl.dot(q, tl.trans({self._cast_between('k', key, types.score)}){self._precise(types.score)})")
        w.extend(weights)
        w.line(f"v = {self.readers['v'].tile(masked, self.e_padded)}")
        w.line(f"dp = tl.dot(do, tl.trans({self._cast_between('v', value, types.arrived)}){self._precise(types.arrived)})")
        w.extend(gradients)
        if not self.job.query:
            return
        if masked:
            w.line("ds = tl.where(n_mask[None, :], ds, 0.0)")
        rounded = self._cast_between("ds", "float32", types.slope)
        w.line(f"dq = tl.dot({rounded}, {self._cast_between('k', key, types.slope)}, dq{self._precise(types.slope)})")

    def _add_captured(self, one: Captured, tile: str) -> list[str]:
        """Row sums stay in registers; a gradient for every score is stored at once."""
        if level(one.node) != "tile":
            return super()._add_captured(one, tile)
        self.arguments.pointer(f"{one.label}_ptr", one.label)
        place = f"{one.label}_ptr + (first_row + offs_m)[:, None] * n_keys + offs_n[None, :]"
        return [f"tl.store({place}, {tile}, mask=m_mask[:, None] & (offs_n < n_keys)[None, :])"]

    def _epilogue(self, w: Writer) -> None:
        if self._corrected:
            w.gap("what delta should have been: the weights add up to one but for rounding, unless there are terms without values or no weights")
            w.line(f"delta -= {'total' if self.spec.extra_terms else 'tl.where(mass > 0.5, total / mass, total)'}")
            for one in self._corrected:
                w.line(f"{self.sums[one]} += delta * {self.sums[one]}_slope")
        w.gap("epilogue: the scores' own factor, store" if self.job.query else "epilogue: store")
        for one, name in self.sums.items():
            if level(one.node) != "tile":
                self.arguments.pointer(f"{one.label}_ptr", one.label)
                w.line(f"tl.store({one.label}_ptr + first_row + offs_m, {name}, mask=m_mask)")
        if not self.job.query:
            return
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
        w.extend(self._first_row(dense=True))
        w.line("largest = tl.load(stats_ptr + (first_row + offs_m) * 2, mask=m_mask, other=0.0)")
        w.line("total = tl.load(stats_ptr + (first_row + offs_m) * 2 + 1, mask=m_mask, other=0.0)")
        if self.spec.empty_rows != "nan":
            w.line('empty = largest == float("-inf")        # every weight of such a row is 0')
            w.line("largest = tl.where(empty, 0.0, largest)")
            w.line('total = tl.where(empty, float("inf"), total)')
        values = {"shift": f"(largest + total) * {LOG2E}", "largest": "largest", "log_sum": f"total * {LOG2E}", "delta": "delta"}
        for name in row_buffers(self.chain):
            value = values[name]
            self.arguments.pointer(f"{name}_ptr", name)
            w.line(f"tl.store({name}_ptr + scratch_row + offs_m, {value}, mask=m_mask)")
        if self.sweeps:
            self._mark(w)

    def _mark(self, w: Writer) -> None:
        """The first and the last query without an allowed key; maxima, so the order of the programs does not matter."""
        w.gap("the queries [n_queries - first, last) hold all rows that saw no allowed key: those count for keys beyond their bounds")
        self.arguments.pointer("unseen_ptr", "unseen")
        w.line(f"unseen = m_mask & ((largest > {literal(self.chain.seen_above)}) ^ True)        # NaN is not seen either")
        narrow = ".to(tl.int32)" if self.plan.index_bits == 64 else ""
        w.line(f"first = tl.max(tl.where(unseen, (n_queries - offs_m){narrow}, 0), 0)")
        w.line(f"last = tl.max(tl.where(unseen, (offs_m + 1){narrow}, 0), 0)")
        w.line("tl.atomic_max(unseen_ptr + batch.to(tl.int64) * 2, first, mask=last > 0)")
        w.line("tl.atomic_max(unseen_ptr + batch.to(tl.int64) * 2 + 1, last, mask=last > 0)")

    def _epilogue(self, w: Writer) -> None:
        """Nothing: everything is stored."""


@functools.lru_cache(maxsize=512)
def emit(spec: AttentionSpec, plan: KernelPlan, job: Job) -> Kernel:
    """One kernel of the backward pass.

    Raises:
        Unsupported: an index map that no kernel can follow, or keys and values shared by different heads.
    """
    from .backward_keys import Keys
    from .backward_tiles import Tiles

    writers: dict[str, type[Recomputed]] = {"rows": Rows, "queries": Queries, "keys": Keys, "tiles": Tiles}
    return writers[job.kind](spec, plan, job).kernel()
