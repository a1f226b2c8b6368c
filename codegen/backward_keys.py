"""The emitter of the kernel of dK and dV: one program keeps a tile of keys and loops over the queries that can see them.

Tiles are transposed, [BLOCK_N, BLOCK_M], so that P and dS enter their products from registers. The bounds of `Ranges` are turned
round: where forward asks which keys a query sees, this asks which queries see a key.

    j <= i + off   →   queries from start_n - off; all of the tile's keys are seen from last_n - off

Keys that several heads share belong to one program, which walks those heads in a loop around everything else.
"""
from __future__ import annotations

import functools
from contextlib import ExitStack

from ..program import Expr, depends
from ..ranges import Bound
from ..spec import Access, AttentionSpec
from .backward import Recomputed
from .forward import Kernel, words
from .owners import owned, shared_axes
from .plan import KernelPlan
from .scores import Body, Programs
from .writer import Writer


class Keys(Recomputed):
    """One emission; `want_key` and `want_value` say which gradients."""

    fixed = "column"

    def __init__(self, spec: AttentionSpec, plan: KernelPlan, want_key: bool, want_value: bool) -> None:
        self.want_key, self.want_value = want_key, want_value
        self.shared = shared_axes(spec)
        super().__init__(spec, plan)
        # What the keys' own addresses need comes before the heads that share them.
        self.outer = Programs(spec, self.names, self.arguments, plan.index_bits == 64, self.programs.constants, "column")

    def name(self) -> str:
        what = {(True, True): "keys_values", (True, False): "keys", (False, True): "values"}[self.want_key, self.want_value]
        return "_".join(["attention_backward", what, *words(self.spec, self.plan)])

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
        spec = self.spec
        for name, operand in (("q_ptr", spec.query.operand), ("k_ptr", spec.key.operand)):
            self.arguments.pointer(name, operand)
        if self.want_key:
            self.arguments.pointer("v_ptr", spec.value.operand)
        self.arguments.pointer("grad_out_ptr", "grad_out")

    def _which_tile(self, w: Writer) -> None:
        for axis in ("i", "j"):
            self.programs.size(axis)
        w.line("# which keys of which attention")
        w.line("n_tiles = tl.cdiv(n_keys, BLOCK_N)")
        w.line("pid = tl.program_id(0)")
        rest = "owner" if self.shared else "batch"
        by_name = {x.name: x for x in self.shared}
        axes: list[tuple[str, str]] = []
        for name in self.spec.batch:
            length = self.programs.size(name)
            if name not in by_name:
                axes.append((name, length))
            elif (group := by_name[name].group) is not None:
                axes.append((by_name[name].owner, f"tl.cdiv({length}, {self.outer.scalar(group).text})"))
        if axes or not self.shared:
            w.line(f"{rest} = pid // n_tiles")
        self._positions(w, rest, axes)
        wide = ".to(tl.int64)" if self.plan.index_bits == 64 else ""
        w.line("start_n = pid % n_tiles * BLOCK_N")
        w.line(f"offs_n = {'(' if wide else ''}start_n + tl.arange(0, BLOCK_N){')' if wide else ''}{wide}")
        self._depths(w)
        w.line("n_mask = offs_n < n_keys")

    def _heads(self) -> list[tuple[str, str]]:
        """Loops over the batch positions that share these keys, and the line that makes a position of the loop's variable."""
        out: list[tuple[str, str]] = []
        for one in self.shared:
            name, length = self.programs.axis(one.name), self.programs.size(one.name)
            member = self.names.of(("member", one.name), f"member_{name}")
            if one.group is None:
                out.append((f"for {member} in range(0, {length}):", f"{name} = tl.cast({member}, tl.int32)"))
            else:
                first = f"{self.programs.axis(one.owner)} * {self.outer.scalar(one.group).within(6)}"
                most = f"tl.minimum({self.outer.scalar(one.group).text}, {length} - {first})"
                out.append((f"for {member} in range(0, {most}):", f"{name} = {first} + {member}"))
        return out

    def _linear(self) -> str:
        """The row-major number of the batch position."""
        text = ""
        for name in self.spec.batch:
            own = self.programs.axis(name)
            text = f"({text}) * {self.programs.size(name)} + {own}" if " " in text else f"{text} * {self.programs.size(name)} + {own}" if text else own
        return text

    def _load_keys(self, w: Writer) -> None:
        spec, types = self.spec, self.types
        w.gap("load K" + (" and V" if self.want_key else ""))
        wanted = [(spec.key, "k", ("j", "d"), ("n", "d"), self.d_padded, types.score)]
        if self.want_key:
            wanted.append((spec.value, "v", ("j", "e"), ("n", "e"), self.e_padded, types.arrived))
        for access, name, axes, labels, padded, dtype in wanted:
            base = self._strides(owned(access, self.shared), name, axes, labels, programs=self.outer)
            if base:
                w.line(f"{name}_ptr += {' + '.join(base)}")
            depth = labels[1]
            mask = f"n_mask[:, None] & {depth}_mask[None, :]" if padded else "n_mask[:, None]"
            load = (f"tl.load({name}_ptr + offs_n[:, None] * {name}_stride_n + offs_{depth}[None, :] * {name}_stride_{depth}, "
                    f"mask={mask}, other=0.0)")
            w.line(f"{name} = {self._cast_between(load, spec.operands[access.operand].dtype, dtype)}")
        if self.want_key:
            w.line("dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)")
        if self.want_value:
            w.line("dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)")

    def _bases(self, w: Writer) -> None:
        w.line(f"q_base = {' + '.join(['q_ptr', *self._strides(self.spec.query, 'q', ('i', 'd'), ('m', 'd'))])}")
        w.line(f"do_base = {' + '.join(['grad_out_ptr', *self._row_strides('grad_out', 'grad_out')])}")
        w.line(self._first_row())

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
        w.gap("full tiles: every bound holds for every key" if self.bounded else "full tiles")
        with w.block(f"for start_m in range({self.full_start}, full_stop, BLOCK_M):"):
            self._tile(w, self.chain.inside, masked=False)
        if self.uppers:
            w.gap("tiles that a bound or the end of the queries cuts, on both sides of the full ones")
            w.line("n_left = (full_start - start) // BLOCK_M")
            w.line("n_partial = n_left + (stop - full_stop) // BLOCK_M")
            with w.block("for step in tl.range(0, n_partial, num_stages=1):"):
                w.line("start_m = tl.where(step < n_left, start + step * BLOCK_M, full_stop + (step - n_left) * BLOCK_M)")
                self._tile(w, self.chain.score, masked=True)
        else:
            w.gap("tiles that a bound or the end of the queries cuts" if self.bounded else "the last tile, where queries may be missing")
            with w.block(f"for start_m in tl.range(full_stop, {'stop' if self.bounded else 'n_queries'}, BLOCK_M, num_stages=1):"):
                self._tile(w, self.chain.score, masked=True)
        if self.sweeps:
            self._sweep(w)

    def _sweep(self, w: Writer) -> None:
        w.gap("A row that saw no allowed key weighs ALL keys: visit the tiles that hold such rows and were skipped.")
        self.arguments.pointer("unseen_ptr", "unseen")
        w.line("first = (n_queries - tl.load(unseen_ptr + batch.to(tl.int64) * 2)) // BLOCK_M * BLOCK_M")
        w.line("last = tl.cdiv(tl.load(unseen_ptr + batch.to(tl.int64) * 2 + 1), BLOCK_M) * BLOCK_M")
        if self.uppers:
            w.line("n_before = tl.maximum(tl.minimum(start, last) - first, 0) // BLOCK_M")
        w.line("after = tl.maximum(stop, first)")
        w.line(f"n_swept = {'n_before + ' if self.uppers else ''}tl.maximum(last - after, 0) // BLOCK_M")
        with w.block("for step in tl.range(0, n_swept, num_stages=1):"):
            if self.uppers:
                w.line("start_m = tl.where(step < n_before, first + step * BLOCK_M, after + (step - n_before) * BLOCK_M)")
            else:
                w.line("start_m = after + step * BLOCK_M")
            self._tile(w, self.chain.score, masked=True)

    def _tile(self, w: Writer, program: Expr, masked: bool) -> None:
        """One tile: scores, weights, dV, the weights' gradient, dK."""
        spec, types, inside = self.spec, self.types, not masked
        body = Body(self.programs, masked)
        weights_lines = self._weights(body, inside)
        weights = body.tile(self.chain.weight) if self.want_value else "p"
        after = body.take()
        slope = self._slope(body, inside) if self.want_key else []
        wide = self.plan.index_bits == 64
        w.line(f"offs_m = {'(' if wide else ''}start_m + tl.arange(0, BLOCK_M){').to(tl.int64)' if wide else ''}")
        if masked:
            w.line("m_mask = offs_m < n_queries")
        self._load_rows(w, "q", "q_base", "q", "d", masked, self.d_padded)
        w.extend(body.moving)
        query = spec.operands[spec.query.operand].dtype
        if "dot" in depends(program):
            w.line(f"qk = tl.dot(k, tl.trans({self._cast_between('q', query, types.score)}){self._precise(types.score)})")
        w.extend(self._rows(masked, delta=self.want_key))
        w.extend(weights_lines)
        if masked:
            w.line("p = tl.where(m_mask[None, :], p, 0.0)")
        self._load_rows(w, "do", "do_base", "grad_out", "e", masked, self.e_padded)
        w.extend(after)
        if self.want_value:
            if weights != "p":
                w.line(f"weights = {weights}")
                weights = "weights"
            left, right = self._cast_between(weights, "float32", types.value), self._cast_between("do", spec.out_dtype, types.value)
            w.line(f"dv = tl.dot({left}, {right}, dv{self._precise(types.value)})")
        if self.want_key:
            w.line(f"dp = tl.dot(v, tl.trans({self._cast_between('do', spec.out_dtype, types.arrived)}){self._precise(types.arrived)})")
            w.extend(slope)
            if masked:
                w.line("ds = tl.where(m_mask[None, :], ds, 0.0)")
            left, right = self._cast_between("ds", "float32", types.slope), self._cast_between("q", query, types.slope)
            w.line(f"dk = tl.dot({left}, {right}, dk{self._precise(types.slope)})")

    def _load_rows(self, w: Writer, name: str, base: str, stride: str, depth: str, masked: bool, padded: bool) -> None:
        masks = [m for m, there in (("m_mask[:, None]", masked), (f"{depth}_mask[None, :]", padded)) if there]
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        w.line(f"{name} = tl.load({base} + offs_m[:, None] * {stride}_stride_m + offs_{depth}[None, :] * {stride}_stride_{depth}{mask})")

    # ---- epilogue

    def _epilogue(self, w: Writer) -> None:
        w.gap("epilogue: the scores' own factor, store" if self.want_key else "epilogue: store")
        if self.want_key:
            self._store(w, "k", self.spec.key, self._scaled("dk"), ("j", "d"), self.d_padded)
        if self.want_value:
            self._store(w, "v", self.spec.value, "dv", ("j", "e"), self.e_padded)

    def _store(self, w: Writer, name: str, access: Access, value: str, axes: tuple[str, str], padded: bool) -> None:
        depth, whole = axes[1], f"grad_{name}"
        self.arguments.pointer(f"{whole}_ptr", whole)
        base = self._strides(owned(access, self.shared), whole, axes, ("n", depth), tensor=whole, programs=self.outer)
        if base:
            w.line(f"{whole}_ptr += {' + '.join(base)}")
        mask = f"n_mask[:, None] & {depth}_mask[None, :]" if padded else "n_mask[:, None]"
        place = f"{whole}_ptr + offs_n[:, None] * {whole}_stride_n + offs_{depth}[None, :] * {whole}_stride_{depth}"
        text = f"({value})" if " " in value else value
        w.line(f"tl.store({place}, {text}.to({whole}_ptr.dtype.element_ty), mask={mask})")
