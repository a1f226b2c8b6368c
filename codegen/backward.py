"""What the emitters of the backward kernels share.

Each kernel owns what it writes, so that every run gives the same bits:

* rows (`backward_rows`): delta = Σ_e grad_out · out for each row (the weight program is linear in the weight), the row's normaliser, and
  which queries saw no allowed key;
* keys (`backward_keys`): one program a tile of keys, looping over the queries that can see them: dK and dV, or one of them;
* queries (`backward_queries`): one program a tile of queries, looping over keys as forward does: dQ;
* tiles (`backward_tiles`): one program a tile of scores, for the gradient of a bias that several sequences or heads share;
* diagonals (`backward_diagonals`): one program a block diagonal of scores, for that of what is read by the distance of key and query.

The weights are computed again: ``p = exp(score - maximum - log_sum)``. With dP = grad_out · valueᵀ taken through the weight
program, dS = p · (dP - delta), and the score program's adjoint makes of it the gradient of the raw product and of every
tensor that it reads (`jobs`).
"""
from __future__ import annotations

import functools
from collections.abc import Sequence

from ..adjoint import UPSTREAM, ZERO, adjoint
from ..program import WEIGHT, substitute
from ..spec import Access, AttentionSpec
from .chain import ARRIVED, chain, inside_of, sweeps, types
from .emission import RESERVED, Kernel, words
from .exponent import LOG2E
from .forward import Forward
from .jobs import Captured, Job
from .plan import KernelPlan
from .reads import ROLES, Reader, index_of, place_of
from .scores import Body
from .text import level, literal, prepare
from .writer import Writer

RESERVED_BACKWARD = RESERVED + (
    "n_unseen n_behind n_cut n_marks mark start_mark entry do dp ds dk dv dq shift log_sum delta first_row scratch_row largest total mass o owner first last "
    "last_n n_rows n_columns n_diagonals turn aside diagonal nearest first_m first_n n_steps in_tile rows rest some_unseen q_base k_base v_base do_base grad_out_ptr grad_out_desc grad_q_ptr grad_k_ptr grad_v_ptr "
    "shift_ptr shift_desc largest_ptr largest_desc log_sum_ptr log_sum_desc delta_ptr delta_desc unseen_ptr grad_out_stride_m "
    "grad_out_stride_e grad_q_stride_m grad_q_stride_d grad_k_stride_n grad_k_stride_d grad_v_stride_n grad_v_stride_e weights_ptr "
    "weights_stride_m weights_stride_n").split()


MARKED = 16
"""How many queries share a mark that some of them saw no allowed key: the smallest tile of queries, so that no tile is taken for more than it is."""
_MARKS_AT_ONCE = 1024

SHIFTS = {"shift": f"(largest + total) * {LOG2E}", "largest": "largest", "log_sum": f"total * {LOG2E}"}
"""What scores are shifted by before exp2, from the statistics of their rows."""


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

    def _first_row(self, dense: bool) -> list[str]:
        """Where the rows of this attention begin: in the scratch that kernels share, whose rows are padded to 16 bytes for
        descriptors, and (`dense`) in what has a row for each query."""
        lines = ["first_row = batch.to(tl.int64) * n_queries"] if dense else []
        return [*lines, "scratch_row = batch.to(tl.int64) * (tl.cdiv(n_queries, 4) * 4)"]

    def _statistics(self, empty: str = 'largest == float("-inf")') -> list[str]:
        """Lines that load the statistics of the rows; where all weights of a row are 0, which `empty` asks, those that give it."""
        lines = ["largest = tl.load(stats_ptr + (first_row + offs_m) * 2, mask=m_mask, other=0.0)",
                 "total = tl.load(stats_ptr + (first_row + offs_m) * 2 + 1, mask=m_mask, other=0.0)"]
        if self.spec.empty_rows != "nan":
            lines += [f'empty = {empty}        # every weight of such a row is 0',
                      "largest = tl.where(empty, 0.0, largest)", 'total = tl.where(empty, float("inf"), total)']
        return lines

    def _unseen_queries(self, w: Writer) -> None:
        """Variables: the queries [first, last) hold all rows of this attention that saw no allowed key; `last` is 0 where there are none."""
        self.arguments.pointer("unseen_ptr", "unseen")
        w.line(f"n_marks = tl.cdiv(n_queries, {MARKED})")
        w.line("first = n_queries")
        w.line("last = 0")
        with w.block(f"for start_mark in range(0, n_marks, {_MARKS_AT_ONCE}):"):
            w.line(f"mark = start_mark + tl.arange(0, {_MARKS_AT_ONCE})")
            w.line("unseen = tl.load(unseen_ptr + batch.to(tl.int64) * n_marks + mark, mask=mark < n_marks, other=0) != 0")
            w.line(f"first = tl.minimum(first, tl.min(tl.where(unseen, mark * {MARKED}, n_queries), 0))")
            w.line(f"last = tl.maximum(last, tl.max(tl.where(unseen, tl.minimum((mark + 1) * {MARKED}, n_queries), 0), 0))")

    def _widen(self, w: Writer) -> None:
        """A tile for which all keys count takes them through the whole program."""
        if self.spec.tiles is not None:
            w.line("n_full = tl.where(some_unseen, 0, n_full)")
            w.line("n_alive = tl.where(some_unseen, n_listed, n_alive)")
            return
        if self.lowers:
            w.line("start = tl.where(some_unseen, 0, start)")
            w.line("full_start = tl.where(some_unseen, 0, full_start)")
        w.line("full_stop = tl.where(some_unseen, 0, full_stop)")
        if self.bounded:
            w.line(f"stop = tl.where(some_unseen, n_keys, {self.stop})")
            self.stop = "stop"

    def _rows(self, names: Sequence[str], mask: bool) -> list[str]:
        """Loads of row vectors."""
        if "rows" in self.plan.described:
            for name in names:
                self.arguments.descriptor(f"{name}_desc", name, (1, self.plan.block_m))
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

    def _open(self, w: Writer, role: str, access: Access | None, labels: tuple[str, str]) -> None:
        """A reader for a tensor whose base changes with the attention (no access: the gradient of the result), and the line of that base."""
        base = f"{role}_base"
        self.readers[role], terms = self._reader(role, access, labels, base) if access else self._grad_out_reader(base)
        if role not in self.plan.described:
            pointer = f"{role if access else 'grad_out'}_ptr"
            w.line(f"{base} = {' + '.join([pointer, *terms])}")

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
            if level(one.node) != "tile" or self.job.kind in ("tiles", "diagonals"):
                w.line(f"{name} = tl.zeros({shape}, tl.float32)")

    def _scaled(self, name: str) -> str:
        """A gradient of queries or keys with the factor that the chain left out."""
        return name if self.chain.factor == 1.0 else f"({name} * {literal(self.chain.factor)})"


@functools.lru_cache(maxsize=512)
def emit(spec: AttentionSpec, plan: KernelPlan, job: Job) -> Kernel:
    """One kernel of the backward pass, or that of weights that are wanted.

    Raises:
        Unsupported: an index map that no kernel can follow, or keys and values shared by different heads.
    """
    from .backward_diagonals import Diagonals
    from .backward_keys import Keys
    from .backward_queries import Queries
    from .backward_rows import Rows
    from .backward_tiles import Tiles
    from .weights import Weights

    writers: dict[str, type[Recomputed]] = {"rows": Rows, "queries": Queries, "keys": Keys, "tiles": Tiles, "diagonals": Diagonals,
                                          "weights": Weights}
    return writers[job.kind](spec, plan, job).kernel()
