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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..algebra import affine, simplify
from ..program import WEIGHT, Expr, const, depends, loads, substitute, walk
from ..ranges import Bound, Ranges, analyse
from ..spec import Access, AttentionSpec
from .arguments import Arguments, Integer, Names, Pointer, Size, Stride, Unsupported, on_host
from .exponent import LN2, LOG2E, foldable, scale_of, unfilled
from .helpers import HELPERS
from .plan import KernelPlan, products
from .reads import ROLES, Reader, block_of, index_of, place_of
from .scores import Body, Programs, level, literal, prepare
from .writer import Writer

RESERVED = (
    "tl triton float range q k v q_ptr k_ptr v_ptr out_ptr stats_ptr seed_ptr seed out p qk score row_max row_sum acc new_max "
    "safe_max alpha pid tile batch n_tiles start_m start_n offs_m offs_n offs_d offs_e m_mask n_mask d_mask e_mask last_m start stop full_start full_stop "
    "stop_tile unseen n_partial n_left n_swept n_before step empty kept n_checked result n_queries n_keys stats_offset BLOCK_M BLOCK_N "
    "BLOCK_D BLOCK_E HEAD_DIM VALUE_DIM weights d_mask e_mask out_stride_m out_stride_e q_stride_m q_stride_d k_stride_n k_stride_d "
    "v_stride_n v_stride_e q_desc k_desc v_desc i j d e").split() + list(HELPERS)


@dataclass(frozen=True)
class Kernel:
    """A generated function: its name, its source (helpers first), and how it is called: pointers, integers, then constants."""

    name: str
    source: str
    pointers: tuple[Pointer, ...]
    integers: tuple[Integer, ...]
    constants: tuple[tuple[str, int], ...]


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


def words(spec: AttentionSpec, plan: KernelPlan) -> list[str]:
    """What the name of a kernel says of its attention."""
    bounds, found = analyse(spec).bounds, []
    if any(b.slope and b.side == "upper" for b in bounds):
        found.append("window" if any(b.slope and b.side == "lower" for b in bounds) else "causal")
    found += [word for word, there in (("sinks", spec.extra_terms), ("bias", any(level(x) == "tile" for x in loads(spec.score))),
                                       ("dropout", spec.dropouts)) if there]
    found.append(f"d{plan.depth}" + (f"x{plan.value_depth}" if plan.value_depth != plan.depth else ""))
    return [*found, spec.operands[spec.query.operand].dtype]


class Forward:
    """One emission. `programs` collects arguments and hoisted lines while the loop bodies are written, so those come first."""

    reserved = RESERVED
    fixed: Literal["row", "column"] = "row"

    def __init__(self, spec: AttentionSpec, plan: KernelPlan) -> None:
        self.spec, self.plan = spec, plan
        self.arguments = Arguments()
        self.names = Names(self.reserved)
        constants = {"d": plan.depth, "e": plan.value_depth}
        self.programs = Programs(spec, self.names, self.arguments, plan.index_bits == 64, constants, self.fixed)
        self.ranges: Ranges = analyse(spec)
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
        self.unit, self.written, self.masked_below = LOG2E, None, self.ranges.masked_below
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

    def _input(self, role: str, operand: int | str) -> str:
        """The argument for a tensor that is read in tiles: an address or a descriptor, as the plan has it."""
        name = operand if isinstance(operand, str) else role
        if role not in self.plan.described:
            return self.arguments.pointer(f"{name}_ptr", operand)
        rows = self.plan.block_m if ROLES[role][0] == "i" else self.plan.block_n
        depth = self.plan.block_d if ROLES[role][1] == "d" else self.plan.block_e
        return self.arguments.pointer(f"{name}_desc", operand, block_of(index_of(self.spec, role), ROLES[role], rows, depth))

    def _reader(self, role: str, access: Access, labels: tuple[str, str], base: str = "",
                programs: Programs | None = None) -> tuple[Reader, list[str]]:
        """How a role's tiles are read from `access`, and the summands of the base that its pointer needs first (none under a descriptor).

        `base` is the variable that will hold the pointer; `programs` takes the lines that the place needs.
        """
        argument = self._input(role, access.operand)
        if role in self.plan.described:
            index = tuple(simplify(x) for x in access.index)
            place = place_of(index, ROLES[role], labels[0], lambda x: (programs or self.programs).scalar(x).text)
            return Reader(argument, role, labels, place), []
        return Reader(base or argument, role, labels), self._strides(access, role, ROLES[role], labels, programs=programs)

    @staticmethod
    def _append(body: Writer, part: Writer) -> None:
        """A section after the others, with a blank line between."""
        if part.lines:
            body.gap()
            body.extend(part.lines)

    def _wrap(self, body: Writer) -> Kernel:
        name = self.name()
        pointers, integers = self.arguments.ordered()
        plan = self.plan
        sizes = [a.name for a in integers if isinstance(a, Size)]
        out = Writer()
        for helper in sorted(self.programs.helpers):
            out.extend(HELPERS[helper].strip("\n").split("\n"))
            out.line()
            out.line()
        # A length of 1 or a multiple of 16 must not make another kernel.
        out.call("@triton.jit(do_not_specialize=[", [f'"{n}"' for n in sizes], "])")
        constants = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_D": plan.block_d, "BLOCK_E": plan.block_e}
        text = "\n".join(body.lines)
        used = tuple((n, v) for n, v in (*constants.items(), ("HEAD_DIM", plan.depth), ("VALUE_DIM", plan.value_depth)) if n in text)
        out.call(f"def {name}(", [*(p.name for p in pointers), *(a.name for a in integers), *(f"{n}: tl.constexpr" for n, _ in used)], "):")
        out.extend(f"    {line}" if line else "" for line in body.lines)
        return Kernel(name, out.text(), pointers, integers, used)

    # ---- sections

    def _which_tile(self, w: Writer) -> None:
        spec, plan = self.spec, self.plan
        for axis in ("i", "j"):
            self.programs.size(axis)            # lengths come first among the arguments
        w.line("# which queries of which attention")
        w.line("n_tiles = tl.cdiv(n_queries, BLOCK_M)")
        w.line("pid = tl.program_id(0)")
        if any(b.slope and b.side == "upper" for b in self.ranges.bounds):
            w.line("tile = n_tiles - 1 - pid % n_tiles        # later queries see more keys: the longest tiles start first")
        else:
            w.line("tile = pid % n_tiles")
        w.line("batch = pid // n_tiles")
        self._positions(w, "batch", [(n, self.programs.size(n)) for n in spec.batch])
        wide = ".to(tl.int64)" if plan.index_bits == 64 else ""
        w.line("start_m = tile * BLOCK_M")
        w.line(f"offs_m = {'(' if wide else ''}start_m + tl.arange(0, BLOCK_M){')' if wide else ''}{wide}")
        self._depths(w)
        w.line("m_mask = offs_m < n_queries")

    def _positions(self, w: Writer, rest: str, axes: Sequence[tuple[str, str]]) -> None:
        """Split a row-major number into positions along axes, each given with the text of its length."""
        for number, (name, length) in reversed(list(enumerate(axes))):
            axis = self.programs.axis(name)
            if number == 0:
                w.line(f"{axis} = {rest}")
            elif number == 1:
                w.line(f"{axis} = {rest} % {length}")
                rest = f"{rest} // {length}"
            else:
                outer = self.names.of(("outer", name), f"outer_{name}")
                w.line(f"{axis} = {rest} % {length}")
                w.line(f"{outer} = {rest} // {length}")
                rest = outer

    def _depths(self, w: Writer, names: str = "de") -> None:
        """Positions along the head dimensions, with masks where the kernel pads them."""
        plan = self.plan
        wide = ".to(tl.int64)" if plan.index_bits == 64 else ""
        self.d_padded, self.e_padded = plan.depth < plan.block_d, plan.value_depth < plan.block_e
        for name in names:
            w.line(f"offs_{name} = tl.arange(0, BLOCK_{name.upper()}){wide}")
        if self.d_padded and "d" in names:
            w.line("d_mask = offs_d < HEAD_DIM")
        if self.e_padded and "e" in names:
            w.line("e_mask = offs_e < VALUE_DIM")

    def _strides(self, access: Access, name: str, axes: tuple[str, str], labels: tuple[str, str], tensor: str = "",
                 programs: Programs | None = None) -> list[str]:
        """Arguments for the steps along an operand's own two axes; the summands of its base go to the returned list.

        `tensor` names what is addressed if it is not the operand but has its shape: its gradient. `programs` takes the lines
        that the base needs.
        """
        terms: dict[str, list[tuple[int, Expr]]] = {a: [] for a in axes}
        outer: list[tuple[int, Expr]] = []
        for dim, index in enumerate(access.index):
            parts = affine(index, axes)
            if parts is None or any(not on_host(c) for c in parts[0].values()):
                raise Unsupported(f"{name} is read at {index}, which is not a multiple of {' and '.join(axes)} plus a batch offset")
            for axis, coefficient in parts[0].items():
                if coefficient != const(0):
                    terms[axis].append((dim, coefficient))
            rest = prepare(parts[1], self.programs.constants)
            if rest != const(0):
                outer.append((dim, rest))
        for axis, label in zip(axes, labels, strict=True):
            self.arguments.integer(Stride(f"{name}_stride_{label}", tensor or access.operand, tuple(terms[axis])))
        return Body(programs or self.programs, masked=False).base_terms(access.operand, tuple(outer), name, tensor)

    def _load_query(self, query: Writer, bases: Writer) -> None:
        spec = self.spec
        query.gap("load Q")
        reader, base = self._reader("q", spec.query, ("m", "d"))
        if base:
            query.call("q_ptr += ", [" + ".join(base)], "")
        query.line(f"q = {reader.tile(True, self.d_padded)}{self._cast(spec.query, self.qk_dtype)}")
        self._key_bases(bases)

    def _key_bases(self, bases: Writer) -> None:
        spec = self.spec
        self.readers: dict[str, Reader] = {}
        for role, access, labels in (("k", spec.key, ("n", "d")), ("v", spec.value, ("n", "e"))):
            self.readers[role], base = self._reader(role, access, labels)
            if base:
                bases.line(f"{role}_ptr += {' + '.join(base)}")

    def _cast(self, access: Access, dtype: str) -> str:
        return "" if self.spec.operands[access.operand].dtype == dtype else f".to(tl.{dtype})"

    # ---- key range

    def _edges(self, side: str, row: str) -> list[str]:
        """Text of the outermost key that each bound of a side allows for the query `row`."""
        out: list[str] = []
        for bound in self.ranges.bounds:
            if bound.side == side:
                out.append(self._edge(bound, row))
        return out

    def _edge(self, bound: Bound, row: str) -> str:
        offset = self.programs.scalar(bound.offset)
        if not bound.slope:
            return offset.text
        if offset.text == "0":
            return row
        return f"{row} - {offset.text[1:]}" if offset.text.startswith("-") and offset.strength == 7 else f"{row} + {offset.within(4)}"

    def _range(self, w: Writer) -> None:
        """Variables: keys [start, stop) may count; in [full_start, full_stop) every bound holds. All but `stop` lie on tile borders."""
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
        w.line("acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)")

    # ---- the loops

    def _loops(self, w: Writer) -> None:
        w.gap("full tiles: every bound holds for every row" if self.bounded else "full tiles")
        with w.block(f"for start_n in range({self.full_start}, full_stop, BLOCK_N):"):
            self._tile(w, self.inside, masked=False)
        if self.lowers:
            w.gap("tiles that a bound or the end of the keys cuts, on both sides of the full ones")
            w.line("n_left = (full_start - start) // BLOCK_N")
            w.line(f"n_partial = n_left + tl.cdiv(tl.maximum({self.stop} - full_stop, 0), BLOCK_N)")
            with w.block("for step in tl.range(0, n_partial, num_stages=1):"):
                w.line("start_n = tl.where(step < n_left, start + step * BLOCK_N, full_stop + (step - n_left) * BLOCK_N)")
                self._tile(w, self.score, masked=True)
        else:
            w.gap("tiles that a bound or the end of the keys cuts" if self.bounded else "the last tile, where keys may be missing")
            with w.block(f"for start_n in tl.range(full_stop, {self.stop}, BLOCK_N, num_stages=1):"):
                self._tile(w, self.score, masked=True)
        if self.written is not None:
            self._again(w)
        elif self.sweeps:
            self._sweep(w)

    def _again(self, w: Writer) -> None:
        w.gap("In a row that saw nothing above the fills they count: let its tile start again, with every key and the scores as written.")
        w.line("row_max *= " + repr(LN2))
        w.line(f"unseen = m_mask & (row_max <= {literal(self.masked_below)})")
        with w.block("if tl.max(unseen.to(tl.int32), 0) > 0:"):
            self._begin(w, folded=False)
            with w.block("for start_n in tl.range(0, n_keys, BLOCK_N, num_stages=1):"):
                self._tile(w, self.written, masked=True, folded=False)

    def _sweep(self, w: Writer) -> None:
        w.gap("A row that saw no allowed key weighs ALL keys by their filled scores, as written: let its tile visit the skipped ones.")
        w.line(f"unseen = m_mask & (row_max <= {literal(self.masked_below)})")
        visited = f"tl.maximum(tl.cdiv({self.stop}, BLOCK_N) * BLOCK_N, full_stop)" if self.bounded else "full_stop"
        w.line(f"stop_tile = {visited}")
        if self.lowers:
            w.line("n_before = start // BLOCK_N")
        w.line(f"n_swept = {'n_before + ' if self.lowers else ''}tl.cdiv(tl.maximum(n_keys - stop_tile, 0), BLOCK_N)")
        w.line("n_swept = tl.where(tl.max(unseen.to(tl.int32), 0) > 0, n_swept, 0)")
        with w.block("for step in tl.range(0, n_swept, num_stages=1):"):
            if self.lowers:
                w.line("start_n = tl.where(step < n_before, step * BLOCK_N, stop_tile + (step - n_before) * BLOCK_N)")
            else:
                w.line("start_n = stop_tile + step * BLOCK_N")
            self._tile(w, self.score, masked=True)

    def _columns(self, w: Writer, masked: bool) -> None:
        wide = self.plan.index_bits == 64
        w.line(f"offs_n = {'(' if wide else ''}start_n + tl.arange(0, BLOCK_N){').to(tl.int64)' if wide else ''}")
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
        if any("dot" in depends(x) for x in (program,)):
            w.line(f"k = {self.readers['k'].tile(masked, self.d_padded)}{self._cast(self.spec.key, self.qk_dtype)}")
        w.extend(body.moving)
        if "dot" in depends(program):
            w.line(f"qk = tl.dot(q, tl.trans(k){self.precision if self.qk_dtype == 'float32' else ''})")
        w.extend(before)
        name = "qk" if score == "qk" else "score"
        if name == "score":
            w.line(f"score = {score}")
        if masked:
            w.line(f'score = tl.where(n_mask[None, :], {name}, float("-inf"))')
            name = "score"
        self._softmax(w, name, self.folded if folded is None else folded)
        w.extend(body.tiles)
        w.line(f"v = {self.readers['v'].tile(masked, self.e_padded)}{self._cast(self.spec.value, self.pv_dtype)}")
        if not plain:
            w.line(f"weights = {weights}")
            weights = "weights"
        cast = "" if self.pv_dtype == "float32" else f".to(tl.{self.pv_dtype})"
        w.line(f"acc = tl.dot({weights}{cast}, v, acc * alpha[:, None]{self.precision if self.pv_dtype == 'float32' else ''})")

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
        if spec.empty_rows == "zero":
            w.line("result = tl.where(row_sum[:, None] == 0.0, 0.0, acc / row_sum[:, None])")
        elif spec.empty_rows == "repaired":
            w.line("result = tl.where(row_sum[:, None] > 0.0, acc / row_sum[:, None], 0.0)        # the sum may be NaN")
        elif repaired:
            w.line("result = tl.where((empty & (kept == 0))[:, None], 0.0, acc / row_sum[:, None])")
        else:
            w.line("result = acc / row_sum[:, None]")
        terms = self._row_strides("out", "out")
        if terms:
            w.line(f"out_ptr += {' + '.join(terms)}")
        mask = "m_mask[:, None] & e_mask[None, :]" if self.e_padded else "m_mask[:, None]"
        place = "out_ptr + offs_m[:, None] * out_stride_m + offs_e[None, :] * out_stride_e"
        w.line(f"tl.store({place}, result.to(tl.{spec.out_dtype}), mask={mask})")
        self.arguments.pointer("out_ptr", "out")
        self.arguments.pointer("stats_ptr", "stats")
        w.line("stats_offset = (batch.to(tl.int64) * n_queries + offs_m) * 2")
        largest = f"row_max * {LN2}" if self.folded and self.written is None else "row_max"
        if spec.empty_rows == "repaired":
            largest = f'tl.where(row_sum > 0.0, {largest}, float("-inf"))'
        w.line(f"tl.store(stats_ptr + stats_offset, {largest}, mask=m_mask)")
        w.line("tl.store(stats_ptr + stats_offset + 1, tl.log(row_sum), mask=m_mask)")

    def _row_strides(self, name: str, tensor: str) -> list[str]:
        """Arguments for the steps of a tensor (batch…, i, e); the summands of its base."""
        terms: list[str] = []
        for dim, axis in enumerate(self.spec.batch):
            stride = self.names.of((tensor, dim), f"{name}_stride_{dim}")
            self.arguments.integer(Stride(stride, tensor, ((dim, const(1)),)))
            terms.append(f"{self.programs.axis(axis)}.to(tl.int64) * {stride}")
        for dim, label in enumerate(("m", "e"), len(self.spec.batch)):
            self.arguments.integer(Stride(f"{name}_stride_{label}", tensor, ((dim, const(1)),)))
        return terms

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
