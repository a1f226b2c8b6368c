"""The emitter of the forward kernel: spec and plan → the source of one Triton function.

Sections, always in this order: which tile · scalars · load Q · row vectors · key range · loop over K tiles (scores, mask,
online softmax, accumulate) · epilogue. The key loop is split: tiles in which every bound of `Ranges` holds run the program
without those predicates and without masks; the others run the whole program with the tail masked. Where fills are finite
the skipped tiles are visited after all if some row saw no allowed key (speculative skipping).

Invariant: the text is a function of (spec, plan) alone.
"""
from __future__ import annotations

import functools
import math

from ..program import WEIGHT, Expr, const, depends, substitute, walk
from ..ranges import Bound, analyse
from ..spec import AttentionSpec
from . import listed
from .emission import Emission, Kernel, words
from .exponent import LN2, LOG2E, foldable, scale_of, unfilled
from .plan import KernelPlan, products
from .reads import Reader
from .scores import Body
from .text import literal, prepare
from .writer import Writer


@functools.lru_cache(maxsize=512)
def emit(spec: AttentionSpec, plan: KernelPlan) -> Kernel:
    """The forward kernel of a spec under a plan.

    Raises:
        Unsupported: an index map of query, key or value that is not affine in its own two axes.
    """
    return Forward(spec, plan).kernel()


def readable_name(spec: AttentionSpec, plan: KernelPlan) -> str:
    """A name that says what the kernel does: ``attention_forward_causal_d128_bfloat16``."""
    return "_".join(["attention_forward", *words(spec, plan)])


class Forward(Emission):
    """One emission of the forward kernel; the loops over keys also serve the kernel of dQ."""

    def __init__(self, spec: AttentionSpec, plan: KernelPlan) -> None:
        super().__init__(spec, plan)
        constants = self.programs.constants
        self.score = prepare(spec.score, constants)
        self.inside = prepare(self.ranges.inside, constants)
        self.weight = prepare(spec.weight, constants)
        self.terms = tuple(prepare(t, constants) for t in spec.extra_terms)
        self.qk_dtype, self.pv_dtype = products(spec)
        self.precision = f', input_precision="{plan.precision}"'
        self.sweeps = self.ranges.speculative
        self._choose_exponent()

    def _choose_exponent(self) -> None:
        """Whether the maximum is kept in units of log2(e), which factor of the scores joins that unit, and whether rows without a
        score above the fills have to be computed again, by the program `written`."""
        self.unit, self.masked_below = LOG2E, self.ranges.masked_below
        self.written: Expr | None = None
        (score, a), (inside, b) = unfilled(self.score), unfilled(self.inside)
        self.folded = foldable(self.spec, score, inside, *self.terms)
        if self.folded:
            if a | b:
                self.written, self.sweeps = self.score, False
                self.masked_below = max(max(a | b) / 2, self.masked_below)
            self.score, self.inside = score, inside
        if self.folded and not self.terms:
            (a_scale, score), (b_scale, inside) = scale_of(self.score), scale_of(self.inside)
            if a_scale == b_scale:
                self.unit, self.score, self.inside = a_scale * LOG2E, score, inside

    # ---- the whole

    def name(self) -> str:
        """Of the generated function."""
        return readable_name(self.spec, self.plan)

    def kernel(self) -> Kernel:
        """Write the loops first, then what they turned out to need, and put everything in order."""
        self._inputs()
        which, query, bases, loops, epilogue = Writer(), Writer(), Writer(), Writer(), Writer()
        self._which_tile(which)
        self._load_query(query, bases)
        self._range(loops)
        self._state(loops)
        self._loops(loops)
        self._epilogue(epilogue)

        body = Writer()
        body.line(f'"""{_summary(self.spec)}"""')
        body.extend(which.lines)
        if self.programs.scalars:
            body.gap("what depends on neither the query nor the key")
            body.extend(self.programs.scalars)
        self._append(body, query)
        if self.programs.hoisted:
            body.gap("what depends on the query alone")
            body.extend(self.programs.hoisted)
        for part in (bases, loops, epilogue):
            self._append(body, part)
        return self._wrap(body)

    def _inputs(self) -> None:
        """Pointers that come first among the arguments."""
        for role, access in (("q", self.spec.query), ("k", self.spec.key), ("v", self.spec.value)):
            self._input(role, access.operand)

    # ---- sections

    def _which_tile(self, w: Writer) -> None:
        spec = self.spec
        for axis in ("i", "j"):
            self.programs.size(axis)            # lengths come first among the arguments
        w.line("# which queries of which attention")
        w.line("n_tiles = tl.cdiv(n_queries, BLOCK_M)")
        w.line("pid = tl.program_id(0)")
        longest_last = any(b.slope and b.side == "upper" for b in analyse(spec).bounds)
        self._attention(w, "later queries see more keys: the longest tiles start first" if longest_last else "")
        w.line("start_m = tile * BLOCK_M")
        self._offsets(w, "m", "start_m")
        self._depths(w)
        w.line("m_mask = offs_m < n_queries")

    def _load_query(self, query: Writer, bases: Writer) -> None:
        spec = self.spec
        query.gap("load Q")
        reader, base = self._reader("q", spec.query, ("m", "d"))
        if base:
            query.call("q_ptr += ", [" + ".join(base)], "")
        self._keep(query, "q", reader, self._cast(self._dtype(spec.query), self.qk_dtype))
        self._key_bases(bases)

    def _key_bases(self, bases: Writer) -> None:
        spec = self.spec
        self.readers: dict[str, Reader] = {}
        for role, access, labels in (("k", spec.key, ("n", "d")), ("v", spec.value, ("n", "e"))):
            self.readers[role], base = self._reader(role, access, labels)
            if base:
                bases.line(f"{role}_ptr += {' + '.join(base)}")

    # ---- key range

    def _edges(self, side: str, row: str) -> list[str]:
        """Text of the outermost key that each bound of a side allows for the query `row`."""
        return [self._edge(bound, row) for bound in self.ranges.bounds if bound.side == side]

    def _edge(self, bound: Bound, row: str) -> str:
        offset = self.programs.scalar(bound.offset)
        if not bound.slope:
            return offset.text
        if offset.text == "0":
            return row
        return f"{row} - {offset.text[1:]}" if offset.text.startswith("-") and offset.strength == 7 else f"{row} + {offset.within(4)}"

    def _range(self, w: Writer) -> None:
        """Variables: keys [start, stop) may count; in [full_start, full_stop) every bound holds. All but `stop` lie on tile borders.
        Under a map they are lists of tiles."""
        if self.spec.tiles is not None:
            w.gap("the map's tiles of keys for these queries: full ones, then those that the mask cuts, then empty ones")
            w.extend(listed.locate(self, "rows"))
            return
        uppers = any(b.side == "upper" for b in self.ranges.bounds)
        lowers = any(b.side == "lower" for b in self.ranges.bounds)
        self.lowers, self.bounded = lowers, uppers or lowers
        w.gap("which keys these queries can see; in full tiles they see all of them" if self.bounded else "all tiles but the last are full")
        if any(b.slope for b in self.ranges.bounds):
            w.line("last_m = tl.minimum(start_m + BLOCK_M, n_queries) - 1")
        fold = lambda f, items: functools.reduce(lambda a, b: f"{f}({a}, {b})", items)
        narrow = lambda text: text if self.plan.index_bits == 32 else f"({text}).to(tl.int32)"
        stop, full = "n_keys", "n_keys"
        if uppers:
            stop = fold("tl.minimum", ["n_keys", *(f"{x} + 1" for x in self._edges("upper", "last_m"))])
            w.line(f"stop = tl.maximum({narrow(stop)}, 0)")
            full = fold("tl.minimum", ["n_keys", *(f"{x} + 1" for x in self._edges("upper", "start_m"))])
            stop = "stop"
        if lowers:
            start = fold("tl.maximum", ["0", *self._edges("lower", "start_m")])
            w.line(f"start = tl.minimum({narrow(start)}, {stop}) // BLOCK_N * BLOCK_N")
            full_start = fold("tl.maximum", ["start", *self._edges("lower", "last_m")])
            w.line(f"full_start = tl.minimum(tl.cdiv({narrow(full_start)}, BLOCK_N), tl.cdiv({stop}, BLOCK_N)) * BLOCK_N")
            w.line(f"full_stop = tl.maximum({narrow(full)} // BLOCK_N * BLOCK_N, full_start)")
        elif uppers:
            w.line(f"full_stop = tl.maximum({narrow(full)}, 0) // BLOCK_N * BLOCK_N")
        else:
            w.line("full_stop = n_keys // BLOCK_N * BLOCK_N")
        self.stop = stop
        self.start = "start" if lowers else "0"
        self.full_start = "full_start" if lowers else "0"

    def _state(self, w: Writer) -> None:
        w.gap("online softmax: the running maximum, the sum of the weights relative to it, and the weighted values")
        self._begin(w, self.folded)

    def _begin(self, w: Writer, folded: bool) -> None:
        """The state before the first tile: what the extra terms give."""
        texts = [self.programs.row(t) for t in self.terms]
        if not texts:
            w.line('row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)')
            w.line("row_sum = tl.zeros([BLOCK_M], tl.float32)")
        else:
            unit = f" * {LOG2E}" if folded else ""
            scaled = [f"({t}){unit}" if unit else t for t in texts]
            w.line(f"row_max = tl.zeros([BLOCK_M], tl.float32) + {functools.reduce(lambda a, b: f'tl.maximum({a}, {b})', scaled)}")
            w.line('safe_max = tl.where(row_max == float("-inf"), 0.0, row_max)')
            power = lambda t: f"tl.exp2({t} - safe_max)" if folded else f"tl.exp2(({t} - safe_max) * {LOG2E})"
            w.line(f"row_sum = {' + '.join(power(t) for t in scaled)}")
        self._zeros(w, "acc", "BLOCK_M", "e")

    # ---- the loops

    def _loops(self, w: Writer) -> None:
        if self.spec.tiles is not None:
            self._listed_loops(w)
            return
        w.gap("full tiles: every bound holds for every row" if self.bounded else "full tiles")
        with w.block(self.loop("start_n", f"{self.full_start}, full_stop, BLOCK_N")):
            self._tile(w, self.inside, masked=False)
        if self.lowers:
            w.gap("tiles that a bound or the end of the keys cuts, on both sides of the full ones")
            w.line("n_left = (full_start - start) // BLOCK_N")
            w.line(f"n_partial = n_left + tl.cdiv(tl.maximum({self.stop} - full_stop, 0), BLOCK_N)")
            with w.block(self.loop("step", "0, n_partial", self._cut_stages())):
                w.line("start_n = tl.where(step < n_left, start + step * BLOCK_N, full_stop + (step - n_left) * BLOCK_N)")
                self._tile(w, self.score, masked=True)
        else:
            w.gap("tiles that a bound or the end of the keys cuts" if self.bounded else "the last tile, where keys may be missing")
            with w.block(self.loop("start_n", f"full_stop, {self.stop}, BLOCK_N", self._cut_stages())):
                self._tile(w, self.score, masked=True)
        self._after(w)

    def _cut_stages(self) -> int:
        """Buffers of the loop over tiles that a bound cuts. With one it waits for each tile of keys and then for that of values; measured with
        descriptors, so that others keep what they were compiled with."""
        return listed.CUT_STAGES if self.bounded and self.plan.described and self.plan.stages > 1 else 1

    def _listed_loops(self, w: Writer) -> None:
        """The same loops over a map's list."""
        block = self.plan.block_n
        w.gap("full tiles")
        with listed.walk(self, w, "n", block, "0"):
            self._tile(w, self.inside, masked=False)
        w.gap("tiles that the mask or the end of the keys cuts")
        with w.block(listed.cut(self, "n_full", "n_alive")):
            w.line(f"start_n = {listed.place(block, 'step')}")
            self._tile(w, self.score, masked=True)
        self._after(w)

    def _after(self, w: Writer) -> None:
        """What rows without an allowed key still need."""
        if self.written is not None:
            self._again(w, self.written)
        elif self.sweeps:
            self._sweep(w)

    def _again(self, w: Writer, written: Expr) -> None:
        w.gap("In a row that saw nothing above the fills they count: let its tile start again, with every key and the scores as written.")
        w.line("row_max *= " + repr(LN2))
        w.line(f"unseen = m_mask & (row_max <= {literal(self.masked_below)})")
        with w.block("if tl.max(unseen.to(tl.int32), 0) > 0:"):
            self._begin(w, folded=False)
            with w.block(self.loop("start_n", "0, n_keys, BLOCK_N", 1)):
                self._tile(w, written, masked=True, folded=False)

    def _sweep(self, w: Writer) -> None:
        w.gap("A row that saw no allowed key weighs ALL keys by their filled scores, as written: let its tile visit the skipped ones.")
        w.line(f"unseen = m_mask & (row_max <= {literal(self.masked_below)})")
        if self.spec.tiles is not None:
            w.line("n_swept = tl.where(tl.max(unseen.to(tl.int32), 0) > 0, n_listed, n_alive)")
            with w.block(self.loop("step", "n_alive, n_swept", 1)):
                w.line(f"start_n = {listed.place(self.plan.block_n, 'step')}")
                self._tile(w, self.score, masked=True)
            return
        visited = f"tl.maximum(tl.cdiv({self.stop}, BLOCK_N) * BLOCK_N, full_stop)" if self.bounded else "full_stop"
        w.line(f"stop_tile = {visited}")
        if self.lowers:
            w.line("n_before = start // BLOCK_N")
        w.line(f"n_swept = {'n_before + ' if self.lowers else ''}tl.cdiv(tl.maximum(n_keys - stop_tile, 0), BLOCK_N)")
        w.line("n_swept = tl.where(tl.max(unseen.to(tl.int32), 0) > 0, n_swept, 0)")
        with w.block(self.loop("step", "0, n_swept", 1)):
            if self.lowers:
                w.line("start_n = tl.where(step < n_before, step * BLOCK_N, stop_tile + (step - n_before) * BLOCK_N)")
            else:
                w.line("start_n = stop_tile + step * BLOCK_N")
            self._tile(w, self.score, masked=True)

    def _columns(self, w: Writer, masked: bool) -> None:
        self._offsets(w, "n", "start_n")
        if masked:
            w.line("n_mask = offs_n < n_keys")

    def _tile(self, w: Writer, program: Expr, masked: bool, folded: bool | None = None) -> None:
        """One tile: scores, mask, online softmax, accumulate."""
        body = Body(self.programs, masked)
        score = body.tile(program)
        before = list(body.tiles)
        body.tiles.clear()
        plain = self.weight == WEIGHT
        weights = "p" if plain else body.tile(self.weight)
        self._columns(w, masked)
        if "dot" in depends(program):
            self._fetch(w, "k", self.readers["k"], masked, self._cast(self._dtype(self.spec.key), self.qk_dtype))
        w.extend(body.moving)
        if "dot" in depends(program):
            self._along(w, "qk", "q", "k", "", self._precise(self.qk_dtype))
        w.extend(before)
        name = "qk" if score == "qk" else "score"
        if name == "score":
            w.line(f"score = {score}")
        if masked:
            w.line(f'score = tl.where(n_mask[None, :], {name}, float("-inf"))')
            name = "score"
        self._softmax(w, name, self.folded if folded is None else folded)
        w.extend(body.tiles)
        self._fetch(w, "v", self.readers["v"], masked, self._cast(self._dtype(self.spec.value), self.pv_dtype))
        if not plain:
            w.line(f"weights = {weights}")
            weights = "weights"
        self._onto(w, "acc", f"{weights}{self._cast('float32', self.pv_dtype)}", "v", "", self._precise(self.pv_dtype), " * alpha[:, None]")

    def _precise(self, dtype: str) -> str:
        """How a product of operands of a dtype is taken."""
        return self.precision if dtype == "float32" else ""

    def _softmax(self, w: Writer, score: str, folded: bool) -> None:
        unit = literal(self.unit if folded else LOG2E)
        largest = f"tl.max({score}, 1) * {unit}" if folded else f"tl.max({score}, 1)"
        w.line(f"new_max = tl.maximum(row_max, {largest})")
        w.line('safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)        # a row may have met only -inf so far')
        if folded:
            w.line(f"p = tl.exp2({score} * {unit} - safe_max[:, None])")
            w.line("alpha = tl.exp2(row_max - safe_max)")
        else:
            w.line(f"p = tl.exp2(({score} - safe_max[:, None]) * {unit})")
            w.line(f"alpha = tl.exp2((row_max - safe_max) * {unit})")
        w.line("row_sum = row_sum * alpha + tl.sum(p, 1)")
        w.line("row_max = new_max")

    # ---- epilogue

    def _epilogue(self, w: Writer) -> None:
        spec = self.spec
        repaired = spec.empty_rows == "nan" and any(x.op == "where" or (x.op == "const" and x == const(0.0)) for x in walk(self.weight))
        if repaired:
            self._repair(w)
        w.gap("epilogue: normalise, store the result and the row statistics")
        terms = self._row_strides("out", "out")
        for piece in self.pieces["e"]:
            w.line(self._normalised(piece.suffix, repaired))
        if terms:
            w.line(f"out_ptr += {' + '.join(terms)}")
        for piece in self.pieces["e"]:
            self._store_columns(w, "out", "m", f"result{piece.suffix}.to(tl.{spec.out_dtype})", piece)
        self.arguments.pointer("out_ptr", "out")
        self.arguments.pointer("stats_ptr", "stats")
        w.line("stats_offset = (batch.to(tl.int64) * n_queries + offs_m) * 2")
        largest = f"row_max * {LN2}" if self.folded and self.written is None else "row_max"
        if spec.empty_rows == "repaired":
            largest = f'tl.where(row_sum > 0.0, {largest}, float("-inf"))'
        w.line(f"tl.store(stats_ptr + stats_offset, {largest}, mask=m_mask)")
        w.line("tl.store(stats_ptr + stats_offset + 1, tl.log(row_sum), mask=m_mask)")

    def _normalised(self, suffix: str, repaired: bool) -> str:
        """The line that divides what was summed by the row's sum."""
        empty_rows, value = self.spec.empty_rows, f"acc{suffix} / row_sum[:, None]"
        if empty_rows == "zero":
            return f"result{suffix} = tl.where(row_sum[:, None] == 0.0, 0.0, {value})"
        if empty_rows == "repaired":
            return f"result{suffix} = tl.where(row_sum[:, None] > 0.0, {value}, 0.0)        # the sum may be NaN"
        if repaired:
            return f"result{suffix} = tl.where((empty & (kept == 0))[:, None], 0.0, {value})"
        return f"result{suffix} = {value}"

    def _repair(self, w: Writer) -> None:
        """Softmax of a row of -inf is NaN; what discards single weights afterwards may discard all of those."""
        w.gap("The weights of a row without keys are NaN; it is 0 after all where the weight program drops every one of them.")
        w.line("empty = m_mask & (row_sum == 0.0)")
        w.line("kept = tl.zeros([BLOCK_M], tl.int32)")
        w.line("n_checked = tl.where(tl.max(empty.to(tl.int32), 0) > 0, n_keys, 0)")
        with w.block("for start_n in range(0, n_checked, BLOCK_N):"):
            body = Body(self.programs, masked=True)
            weights = body.tile(substitute(self.weight, {WEIGHT: const(math.nan)}))
            self._columns(w, masked=True)
            w.extend(body.moving)
            w.extend(body.tiles)
            w.line(f"weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + ({weights})")
            w.line("kept = tl.maximum(kept, tl.max(((weights != weights) & n_mask[None, :]).to(tl.int32), 1))")


def _summary(spec: AttentionSpec) -> str:
    batch = ", ".join(spec.batch)
    return f"One tile of queries of one attention ({batch})." if batch else "One tile of queries."
