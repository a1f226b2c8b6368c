"""The emitter of the kernel that writes attention weights which are wanted beside the result: scores again, exp2 from the row
statistics, the weight program, store. One program a tile of queries, with forward's loops; what the bounds leave out is stored as 0.
"""
from __future__ import annotations

from ..program import WEIGHT, Expr, depends, loads
from .backward import SHIFTS, Recomputed
from .emission import words
from .scores import Body
from .text import literal
from .writer import Writer


class Weights(Recomputed):
    """One emission of the kernel of weights."""

    ordered = False         # it has no sums beside the scores

    def name(self) -> str:
        return "_".join(["attention_weights", *words(self.spec, self.plan)])

    def _choose_exponent(self) -> None:
        super()._choose_exponent()
        # Rows of NaN are NaN at every key, also where nothing repairs those without one; and so are filled rows.
        bounded = bool(self.ranges.bounds)
        self.sweeps = self.chain.mixed or bounded and (self.ranges.speculative or self.spec.empty_rows != "repaired")

    # ---- sections

    def _inputs(self) -> None:
        for role, access in (("q", self.spec.query), ("k", self.spec.key)):
            self._input(role, access.operand)

    def _depths(self, w: Writer, names: str = "d") -> None:
        super()._depths(w, names)

    def _key_bases(self, bases: Writer) -> None:
        reader, base = self._reader("k", self.spec.key, ("n", "d"))
        self.readers = {"k": reader}
        if base:
            bases.line(f"k_ptr += {' + '.join(base)}")

    def _load_query(self, query: Writer, bases: Writer) -> None:
        super()._load_query(query, bases)
        query.gap("what the rows are normalised by")
        self.arguments.pointer("stats_ptr", "stats")
        query.line("first_row = batch.to(tl.int64) * n_queries")
        # A maximum passes over NaN: a row that has nothing else is told by its sum.
        query.extend(self._statistics('(largest == float("-inf")) & (total == total)') if self.spec.empty_rows == "zero" else self._statistics())
        if self.spec.empty_rows == "nan":
            query.line('total = tl.where(largest == float("-inf"), float("nan"), total)        # every weight of such a row is NaN')
        for name in dict.fromkeys([*self.chain.rows(True), *self.chain.rows(False)]):
            if SHIFTS[name] != name:
                query.line(f"{name} = {SHIFTS[name]}")

    def _state(self, w: Writer) -> None:
        w.gap("where to")
        self.arguments.pointer("weights_ptr", "weights")
        terms = self._row_strides("weights", "weights", ("m", "n"))
        if terms:
            w.line(f"weights_ptr += {' + '.join(terms)}")
        if not self.sweeps:
            return
        w.gap("a tile with a row that saw no allowed key, or is NaN, takes every key through the whole program")
        seen = f"(largest > {literal(self.chain.seen_above)}) & (total == total)"
        w.line(f"some_unseen = tl.max((m_mask & ({seen} ^ True)).to(tl.int32), 0) > 0")
        self._widen(w)

    def _sweep(self, w: Writer) -> None:
        """Nothing: `_state` has widened the range already."""

    def _tile(self, w: Writer, program: Expr, masked: bool, folded: bool | None = None) -> None:
        """One tile: scores, weights, store."""
        body, inside = Body(self.programs, masked), not masked
        lines = self._weights(body, inside)
        lines += self._stored(body, "p", masked)
        self._columns(w, masked)
        dtype = self.types.score
        if "dot" in depends(self.chain.inside if inside else self.chain.score):
            self._fetch(w, "k", self.readers["k"], masked, self._cast(self._dtype(self.spec.key), dtype))
            w.extend(body.moving)
            self._along(w, "qk", "q", "k", "", self._precise(dtype))
        else:
            w.extend(body.moving)
        w.extend(lines)

    def _stored(self, body: Body, weights: str, masked: bool) -> list[str]:
        """Lines from the softmax weight ``p`` to memory."""
        lines: list[str] = []
        if self.chain.weight != WEIGHT:
            text = body.tile(self.chain.weight)
            lines += [*body.take(), f"weights = {text}"]
            weights = "weights"
        mask = "m_mask[:, None] & n_mask[None, :]" if masked else "m_mask[:, None]"
        place = "weights_ptr + offs_m[:, None] * weights_stride_m + offs_n[None, :] * weights_stride_n"
        cast = "" if self.spec.out_dtype == "float32" else f".to(tl.{self.spec.out_dtype})"
        return [*lines, f"tl.store({place}, {weights}{cast}, mask={mask})"]

    # ---- epilogue

    def _epilogue(self, w: Writer) -> None:
        """Where no key can be seen the weights are 0, unless the weight program multiplies them by what may be NaN."""
        if not self.bounded:
            return
        w.gap("what the bounds leave out weighs nothing")
        spans = [f"tl.maximum(tl.cdiv({self.stop}, BLOCK_N) * BLOCK_N, full_stop), n_keys"]
        if self.lowers:
            spans.insert(0, "0, start")
        for span in spans:
            with w.block(self.loop("start_n", f"{span}, BLOCK_N", 1)):
                self._nothing(w)

    def _nothing(self, w: Writer) -> None:
        body = Body(self.programs, masked=True)
        reads = any(x.kind == "float" for x in loads(self.chain.weight))
        lines = self._stored(body, "p", masked=True) if reads else self._zero()
        self._columns(w, masked=True)
        w.extend(body.moving)
        w.line(f"p = tl.zeros({self.programs.shape}, tl.float32)")
        w.extend(lines)

    def _zero(self) -> list[str]:
        """The store of a tile of zeros, whatever the weight program."""
        place = "weights_ptr + offs_m[:, None] * weights_stride_m + offs_n[None, :] * weights_stride_n"
        return [f"tl.store({place}, p.to(tl.{self.spec.out_dtype}), mask=m_mask[:, None] & n_mask[None, :])"]
