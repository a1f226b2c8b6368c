"""The emitter of the kernel of dQ, with forward's loops; and of the gradients of what the programs read once for a query."""
from __future__ import annotations

from ..program import Expr, depends
from .backward import Recomputed
from .exponent import LOG2E
from .jobs import Captured
from .scores import Body
from .text import level, literal
from .writer import Writer


class Queries(Recomputed):
    """One emission of a kernel that owns tiles of queries, with forward's loops: of dQ and of captured reads by row."""

    ordered = False         # it spills all the same, and takes 5 to 50 % more time (bench/NOTES.md)

    def _load_query(self, query: Writer, bases: Writer) -> None:
        super()._load_query(query, bases)
        query.gap("load the gradient of the result, and what the rows are normalised by")
        reader, terms = self._grad_out_reader()
        if terms:
            query.line(f"grad_out_ptr += {' + '.join(terms)}")
        self._keep(query, "do", reader, self._cast(self.spec.out_dtype, self.types.arrived))
        query.extend(self._first_row(dense=bool(self.job.captured)))
        names: list[str] = [*self.chain.rows(True), *(n for n in self.chain.rows(False) if n not in self.chain.rows(True))]
        query.extend(self._rows([*names, *(["delta"] if self.job.slopes else [])], mask=True))

    @property
    def _corrected(self) -> tuple[Captured, ...]:
        return tuple(c for c in self.job.captured if c.program == "score" and level(c.node) != "tile")

    def _state(self, w: Writer) -> None:
        if self.sweeps:
            w.gap("a tile with a row that saw no allowed key, whose weights are those of ALL keys, takes every key through the whole program")
            row = "shift" if self.chain.folded else "largest"
            below = literal(self.chain.seen_above * (LOG2E if self.chain.folded else 1.0))
            w.line(f"some_unseen = tl.max((m_mask & (({row} > {below}) ^ True)).to(tl.int32), 0) > 0        # NaN is not seen either")
            self._widen(w)
        w.gap()
        if self.job.query:
            self._zeros(w, "dq", "BLOCK_M", "d")
        self._zero_sums(w, "[BLOCK_M]")
        for name in (*(f"{self.sums[c]}_slope" for c in self._corrected), *(("total", "mass") if self._corrected else ())):
            w.line(f"{name} = tl.zeros([BLOCK_M], tl.float32)")

    def _sweep(self, w: Writer) -> None:
        """Nothing: `_state` has widened the range already."""

    def _tile(self, w: Writer, program: Expr, masked: bool, folded: bool | None = None) -> None:
        """One tile: scores, weights, their gradient, the product with K."""
        body, types, inside = Body(self.programs, masked), self.types, not masked
        weights = self._weights(body, inside)
        if masked and self._corrected:
            weights.append("p = tl.where(n_mask[None, :], p, 0.0)")
        gradients = self._gradients(body, inside, "n_mask[None, :]" if masked else "")
        key, value = self._dtype(self.spec.key), self._dtype(self.spec.value)
        has_dot = "dot" in depends(self.chain.inside if inside else self.chain.score)
        self._columns(w, masked)
        if has_dot or self.job.query:
            self._fetch(w, "k", self.readers["k"], masked)
        w.extend(body.moving)
        if has_dot:
            self._along(w, "qk", "q", "k", self._cast(key, types.score), self._precise(types.score))
        w.extend(weights)
        self._fetch(w, "v", self.readers["v"], masked)
        self._along(w, "dp", "do", "v", self._cast(value, types.arrived), self._precise(types.arrived))
        w.extend(gradients)
        if not self.job.query:
            return
        if masked:
            w.line("ds = tl.where(n_mask[None, :], ds, 0.0)")
        self._onto(w, "dq", f"ds{self._cast('float32', types.slope)}", "k", self._cast(key, types.slope), self._precise(types.slope))

    def _add_captured(self, one: Captured, tile: str) -> list[str]:
        """Row sums stay in registers; a gradient for every score is stored at once."""
        if level(one.node) != "tile":
            return super()._add_captured(one, tile)
        self.arguments.pointer(f"{one.label}_ptr", one.label)
        place = f"{one.label}_ptr + first_row * n_keys + (offs_m[:, None] * n_keys + offs_n[None, :])"
        return [f"tl.store({place}, {tile}, mask=m_mask[:, None] & (offs_n < n_keys)[None, :])"]

    def _epilogue(self, w: Writer) -> None:
        if self._corrected:
            w.gap("what delta should have been: the weights add up to one but for rounding, unless there are terms without values or no weights")
            w.line(f"delta -= {'total' if self.spec.extra_terms else 'tl.where(mass > 0.5, total / mass, total)'}")
            for one in self._corrected:
                slope = f"{self.sums[one]}_slope"        # 0 for rows of NaN whose scores are all filled: they send nothing
                w.line(f"{self.sums[one]} += tl.where({slope} == 0.0, 0.0, delta * {slope})")
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
        for piece in self.pieces["d"]:
            self._store_columns(w, "grad_q", "m", f"{self._scaled(f'dq{piece.suffix}')}.to(grad_q_ptr.dtype.element_ty)", piece)
