"""The emitter of the kernels of dK and dV, of both or of one of them: one program keeps a tile of keys and loops over the queries that can see them.

Tiles are transposed, [BLOCK_N, BLOCK_M], so that P and dS enter their products from registers. The bounds of `Ranges` are turned
round: where forward asks which keys a query sees, this asks which queries see a key.

    j <= i + off   →   queries from start_n - off; all of the tile's keys are seen from last_n - off

Keys that several heads share belong to one program, which walks those heads in a loop around everything else.
"""
from __future__ import annotations

import functools
from contextlib import ExitStack

from ..program import Expr, depends, walk
from ..ranges import Bound
from ..spec import Access, AttentionSpec
from ..tilemap import TILE
from . import listed
from .backward import Recomputed
from .emission import Kernel, sharing, start_order
from .jobs import Job
from .owners import owned, shared_axes
from .plan import KernelPlan
from .scores import Body, Programs
from .text import level
from .writer import Writer

_FUNCTIONS = frozenset("pow exp log log1p tanh sigmoid erf sin cos".split())
"""Operations that take many instructions and registers."""


class Keys(Recomputed):
    """One emission of a kernel that owns tiles of keys."""

    fixed = "column"

    def __init__(self, spec: AttentionSpec, plan: KernelPlan, job: Job) -> None:
        self.shared = shared_axes(spec)
        self.ordered = not job.arrivals         # dK takes 10 % more time by it (bench/NOTES.md)
        super().__init__(spec, plan, job)
        # What the keys' own addresses need comes before the heads that share them.
        self.outer = Programs(spec, self.names, self.arguments, plan.index_bits == 64, self.programs.constants, "column")

    def kernel(self) -> Kernel:
        """Write the loops first, then what they turned out to need, and put everything in order."""
        self._inputs()
        which, keys, bases, loops, epilogue = Writer(), Writer(), Writer(), Writer(), Writer()
        self._which_tile(which)
        self._load_keys(keys)
        self._bases(bases)
        self._range(loops)
        self._loops(loops)
        self._epilogue(epilogue)

        body = Writer()
        batch = ", ".join(self.spec.batch)
        body.line(f'"""One tile of keys of one attention ({batch}): its gradients."""' if batch else '"""One tile of keys: its gradients."""')
        body.extend(which.lines)
        if self.outer.scalars:
            body.gap("where the keys are")
            body.extend(self.outer.scalars)
        self._append(body, keys)
        body.gap()
        with ExitStack() as stack:
            if self.shared:
                body.line("# every head that shares these keys")
            for head, position in self._heads():
                stack.enter_context(body.block(head))
                body.line(position)
            if self.shared:
                body.line(f"batch = {self._linear()}")
            if self.programs.scalars:
                if not self.shared:
                    body.gap("what depends on neither the query nor the key")
                body.extend(self.programs.scalars)
            body.extend(bases.lines)
            if self.programs.hoisted:
                body.gap("what depends on the key alone")
                body.extend(self.programs.hoisted)
            self._append(body, loops)
        self._append(body, epilogue)
        return self._wrap(body)

    # ---- sections

    def _inputs(self) -> None:
        self._input("q", self.spec.query.operand)
        self._input("k", self.spec.key.operand)
        if self.job.arrivals:
            self._input("v", self.spec.value.operand)
        self._input("do", "grad_out")

    def _which_tile(self, w: Writer) -> None:
        for axis in ("i", "j"):
            self.programs.size(axis)
        w.line("# which keys of which attention")
        w.line("n_tiles = tl.cdiv(n_keys, BLOCK_N)")
        w.line("pid = tl.program_id(0)")
        if self.shared:
            self._owners(w)
        else:
            self._attention(w)
        w.line("start_n = tile * BLOCK_N")
        self._offsets(w, "n", "start_n")
        self._depths(w)
        w.line("n_mask = offs_n < n_keys")

    def _owners(self, w: Writer) -> None:
        """Positions along the axes, or parts of axes, that have keys of their own."""
        by_name = {x.name: x for x in self.shared}
        axes: dict[str, tuple[str, str]] = {}
        for name in start_order(self.spec):
            length = self.programs.size(name)
            if name not in by_name:
                axes[name] = (name, length)
            elif (group := by_name[name].group) is not None:
                axes[name] = (by_name[name].owner, f"tl.cdiv({length}, {self.outer.scalar(group).text})")
        self._places(w, "owner", list(axes.values()), len(axes.keys() & set(sharing(self.spec))))

    def _heads(self) -> list[tuple[str, str]]:
        """Loops over the batch positions that share these keys, and the line that makes a position of the loop's variable."""
        out: list[tuple[str, str]] = []
        for one in self.shared:
            name, length = self.programs.axis(one.name), self.programs.size(one.name)
            member = self.names.of(("member", one.name), f"member_{name}")
            if one.group is None:
                out.append((self.loop(member, f"0, {length}"), f"{name} = tl.cast({member}, tl.int32)"))
            else:
                first = f"{self.programs.axis(one.owner)} * {self.outer.scalar(one.group).within(6)}"
                most = f"tl.minimum({self.outer.scalar(one.group).text}, {length} - {first})"
                out.append((self.loop(member, f"0, {most}"), f"{name} = {first} + {member}"))
        return out

    def _load_keys(self, w: Writer) -> None:
        spec, types = self.spec, self.types
        w.gap("load K" + (" and V" if self.job.arrivals else ""))
        wanted = [("k", spec.key, ("n", "d"), types.score)]
        if self.job.arrivals:
            wanted.append(("v", spec.value, ("n", "e"), types.arrived))
        for role, access, labels, dtype in wanted:
            reader, base = self._reader(role, owned(access, self.shared), labels, programs=self.outer)
            if base:
                w.line(f"{role}_ptr += {' + '.join(base)}")
            self._keep(w, role, reader, self._cast(self._dtype(access), dtype))
        if self.job.key:
            self._zeros(w, "dk", "BLOCK_N", "d")
        if self.job.value:
            self._zeros(w, "dv", "BLOCK_N", "e")

    def _bases(self, w: Writer) -> None:
        self.readers = {}
        self._open(w, "q", self.spec.query, ("m", "d"))
        self._open(w, "do", None, ("m", "e"))
        if "rows" not in self.plan.described:
            w.extend(self._first_row(dense=False))

    # ---- query range

    def _seen(self, bound: Bound, key: str) -> str:
        """Where a bound puts the first (upper) or the last (lower) query that sees the key `key`."""
        offset = self.programs.scalar(bound.offset)
        if bound.slope:
            if offset.text == "0":
                return key
            return f"{key} + {offset.text[1:]}" if offset.text.startswith("-") and offset.strength == 7 else f"{key} - {offset.within(5)}"
        if bound.side == "upper":
            return f"tl.where({key} > {offset.text}, n_queries, 0)"
        return f"tl.where({key} < {offset.text}, -1, n_queries - 1)"

    def _range(self, w: Writer) -> None:
        """Variables: queries [start, stop) may see these keys; in [full_start, full_stop) every bound holds. All lie on tile borders."""
        if self.spec.tiles is not None:
            w.gap("the map's tiles of queries for these keys: full ones, then those that the mask cuts, then empty ones")
            w.extend(listed.locate(self, "columns"))
            return
        uppers = [b for b in self.ranges.bounds if b.side == "upper"]
        lowers = [b for b in self.ranges.bounds if b.side == "lower"]
        self.uppers, self.bounded = bool(uppers), bool(self.ranges.bounds)
        self.start, self.full_start, self.stop = ("start", "full_start", "stop") if uppers else ("0", "0", "stop")
        w.gap("which queries can see these keys; in full tiles they see all of them" if self.bounded else "all tiles but the last are full")
        if not self.bounded:
            w.line("full_stop = n_queries // BLOCK_M * BLOCK_M")
            return
        fold = lambda f, items: functools.reduce(lambda a, b: f"{f}({a}, {b})", items)
        narrow = lambda text: text if self.plan.index_bits == 32 else f"({text}).to(tl.int32)"
        w.line("last_n = tl.minimum(start_n + BLOCK_N, n_keys) - 1")
        if uppers:
            first = fold("tl.maximum", ["0", *(self._seen(b, "start_n") for b in uppers)])
            w.line(f"start = tl.minimum({narrow(first)}, n_queries) // BLOCK_M * BLOCK_M")
        if lowers:
            end = fold("tl.minimum", ["n_queries", *(f"{self._seen(b, 'last_n')} + 1" for b in lowers)])
            w.line(f"stop = tl.maximum(tl.cdiv(tl.maximum({narrow(end)}, 0), BLOCK_M) * BLOCK_M, {self.start})")
        else:
            w.line("stop = tl.maximum(tl.cdiv(n_queries, BLOCK_M) * BLOCK_M, start)")
        if uppers:
            first = fold("tl.maximum", ["start", *(self._seen(b, "last_n") for b in uppers)])
            w.line(f"full_start = tl.minimum(tl.cdiv(tl.minimum({narrow(first)}, n_queries), BLOCK_M) * BLOCK_M, stop)")
        end = fold("tl.minimum", ["n_queries", *(f"{self._seen(b, 'start_n')} + 1" for b in lowers)])
        end = f"tl.maximum({narrow(end)}, 0)" if lowers else end
        w.line(f"full_stop = tl.maximum(tl.minimum({end} // BLOCK_M * BLOCK_M, stop), {self.full_start})")

    # ---- the loops

    def _loops(self, w: Writer) -> None:
        if self.sweeps and self.spec.tiles is not None:
            self._unseen_tiles(w)
        elif self.sweeps:
            self._unseen_rows(w)
        if self.job.captured:
            w.gap()
            self._zero_sums(w, "[BLOCK_N]")
        if self.spec.tiles is not None:
            self._listed_loops(w)
        else:
            self._ranged_loops(w)
        for one, name in self.sums.items():
            self.arguments.pointer(f"{one.label}_ptr", one.label)
            w.line(f"tl.store({one.label}_ptr + batch.to(tl.int64) * n_keys + offs_n, {name}, mask=n_mask)")

    def _ranged_loops(self, w: Writer) -> None:
        w.gap("full tiles: every bound holds for every key" if self.bounded else "full tiles")
        with w.block(self.loop("start_m", f"{self.full_start}, full_stop, BLOCK_M")):
            self._tile(w, self.chain.inside, masked=False)
        if self.uppers or self.sweeps:
            w.gap("tiles that a bound or the end of the queries cuts, on both sides of the full ones")
            left = "(full_start - start) // BLOCK_M" if self.uppers else "full_start // BLOCK_M"
            w.line(f"n_left = {'n_before + ' if self.sweeps and self.uppers else ''}{left}")
            w.line("n_partial = n_left + (stop - full_stop) // BLOCK_M")
            with w.block(self.loop("step", "0, n_partial", 1)):
                w.line("start_m = tl.where(step < n_left, full_start, full_stop) + (step - n_left) * BLOCK_M")
                if self.sweeps and self.uppers:
                    w.line("start_m = tl.where(step < n_before, first + step * BLOCK_M, start_m)")
                self._tile(w, self.chain.score, masked=True)
        else:
            w.gap("tiles that a bound or the end of the queries cuts" if self.bounded else "the last tile, where queries may be missing")
            with w.block(self.loop("start_m", f"full_stop, {'stop' if self.bounded else 'n_queries'}, BLOCK_M", 1)):
                self._tile(w, self.chain.score, masked=True)

    def _listed_loops(self, w: Writer) -> None:
        """The same loops over a map's list. Full tiles with rows that saw no allowed key come first in it, for the list ascends; they count
        as cut, as do the empty ones with such rows."""
        block = self.plan.block_m
        w.gap("full tiles")
        with listed.walk(self, w, "m", block, "n_unseen" if self.sweeps else "0"):
            self._tile(w, self.chain.inside, masked=False)
        w.gap("tiles that the mask or the end of the queries cuts" + (", and those with rows that saw no allowed key" if self.sweeps else ""))
        with w.block(listed.cut(self, *(("0", "n_cut") if self.sweeps else ("n_full", "n_alive")))):
            if self.sweeps:
                w.line("entry = step + tl.where(step < n_unseen, 0, n_full - n_unseen)")
                w.line("entry += tl.where(entry < n_alive, 0, n_before)")
            w.line(f"start_m = {listed.place(block, 'entry' if self.sweeps else 'step')}")
            self._tile(w, self.chain.score, masked=True)

    def _unseen_tiles(self, w: Writer) -> None:
        """How many full tiles may hold rows that saw no allowed key, and which empty ones: the scan runs only where there are such rows."""
        w.gap("a row that saw no allowed key weighs ALL keys: the tiles that hold such rows count though they are empty, and as cut ones")
        times = listed.parts(self.plan.block_m)
        scaled = f" * {times}" if times > 1 else ""
        self._unseen_queries(w)
        for name, limit, start, stop in (("n_unseen", "last", "0", "n_full"), ("n_before", f"first // {TILE} * {TILE}", "n_alive", "n_listed"),
                                         ("n_behind", "last", "n_alive", "n_listed")):
            w.line(f"{name} = 0")
            divided = (lambda x: f"{x} // {times}") if times > 1 else (lambda x: x)
            with w.block(f"for step in range({divided(start) if start != '0' else '0'}, tl.where(last > 0, {divided(stop)}, 0)):"):
                w.line(f"{name} += (tl.load(list_ptr + step) * {TILE} < {limit}).to(tl.int32)")
            if scaled:
                w.line(f"{name} *= {times}")
        w.line("n_cut = n_unseen + n_alive - n_full + n_behind - n_before")

    def _unseen_rows(self, w: Writer) -> None:
        """Widen the range to the tiles of rows that saw no allowed key, and let no full tile hold any."""
        w.gap("a row that saw no allowed key weighs ALL keys: the tiles that hold such rows count beyond the bounds, and as cut ones")
        self._unseen_queries(w)
        w.line("last = tl.cdiv(last, BLOCK_M) * BLOCK_M")
        if self.uppers:
            w.line("first = first // BLOCK_M * BLOCK_M")
            w.line("n_before = tl.maximum(tl.minimum(start, last) - first, 0) // BLOCK_M")
        w.line("stop = tl.maximum(stop, last)" if self.bounded else "stop = tl.cdiv(n_queries, BLOCK_M) * BLOCK_M")
        w.line(f"full_start = tl.maximum({self.full_start}, tl.minimum(last, full_stop))")
        self.full_start = "full_start"

    def _tile(self, w: Writer, program: Expr, masked: bool, folded: bool | None = None) -> None:
        """One tile: scores, weights, dV, the weights' gradient, dK."""
        spec, types, inside, job = self.spec, self.types, not masked, self.job
        body = Body(self.programs, masked)
        weights_lines = self._weights(body, inside)
        weights = body.tile(self.chain.weight) if job.value else "p"
        after = body.take()
        gradients = self._gradients(body, inside, "m_mask[None, :]" if masked else "")
        self._offsets(w, "m", "start_m")
        if masked:
            w.line("m_mask = offs_m < n_queries")
        self._fetch(w, "q", self.readers["q"], masked)
        w.extend(body.moving)
        query = self._dtype(spec.query)
        if "dot" in depends(program):
            self._along(w, "qk", "k", "q", self._cast(query, types.score), self._precise(types.score))
        late = ["delta"] if job.slopes and self._is_crowded() else []
        w.extend(self._rows([*self.chain.rows(inside), *(["delta"] if job.slopes and not late else [])], masked))
        w.extend(weights_lines)
        if masked:
            w.line("p = tl.where(m_mask[None, :], p, 0.0)")
        self._fetch(w, "do", self.readers["do"], masked)
        w.extend(after)
        if job.value:
            if weights != "p":
                w.line(f"weights = {weights}")
                weights = "weights"
            weights += self._cast("float32", types.value)
            self._onto(w, "dv", weights, "do", self._cast(spec.out_dtype, types.value), self._precise(types.value))
        if job.arrivals:
            self._along(w, "dp", "v", "do", self._cast(spec.out_dtype, types.arrived), self._precise(types.arrived))
            w.extend(self._rows(late, masked))
            w.extend(gradients)
        if job.key:
            if masked:
                w.line("ds = tl.where(m_mask[None, :], ds, 0.0)")
            slopes = f"ds{self._cast('float32', types.slope)}"
            self._onto(w, "dk", slopes, "q", self._cast(query, types.slope), self._precise(types.slope))

    def _is_crowded(self) -> bool:
        """Whether delta is read after the product from which it is subtracted. Before it nothing waits for delta, but it takes registers all the
        while: what draws, computes functions or loops over heads would spill them."""
        functions = any(x.op in _FUNCTIONS and level(x) == "tile" for x in walk(self.chain.inside))
        return "rows" in self.plan.described and bool(self.spec.dropouts or self.shared or functions)

    # ---- epilogue

    def _epilogue(self, w: Writer) -> None:
        w.gap("epilogue: the scores' own factor, store" if self.job.key else "epilogue: store")
        if self.job.key:
            self._store(w, "k", self.spec.key, ("j", "d"))
        if self.job.value:
            self._store(w, "v", self.spec.value, ("j", "e"))

    def _store(self, w: Writer, name: str, access: Access, axes: tuple[str, str]) -> None:
        depth, whole = axes[1], f"grad_{name}"
        self.arguments.pointer(f"{whole}_ptr", whole)
        base = self._strides(owned(access, self.shared), whole, axes, ("n", depth), tensor=whole, programs=self.outer)
        if base:
            w.line(f"{whole}_ptr += {' + '.join(base)}")
        for piece in self.pieces[depth]:
            sums = f"d{name}{piece.suffix}"
            self._store_columns(w, whole, "n", f"{self._scaled(sums) if name == 'k' else sums}.to({whole}_ptr.dtype.element_ty)", piece)
