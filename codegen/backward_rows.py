"""The emitter of the kernel that prepares the rows: delta, what scores are normalised by, and which rows saw no allowed key."""
from __future__ import annotations

from .backward import MARKED, SHIFTS, Recomputed
from .chain import row_buffers
from .reads import Reader
from .text import literal
from .writer import Writer


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
        self._offsets(w, "m", "pid % n_tiles * BLOCK_M")
        w.line("m_mask = offs_m < n_queries")
        self._depths(w, "e")

    def _load_query(self, query: Writer, bases: Writer) -> None:
        (piece,) = self.pieces["e"]
        query.gap("delta: what the gradients of a row's scores have to lose to add up to nothing")
        for name, tensor in (("o", "out"), ("do", "grad_out")):
            terms = self._row_strides(tensor, tensor)
            if terms:
                query.line(f"{tensor}_ptr += {' + '.join(terms)}")
            reader = Reader(f"{tensor}_ptr", tensor, ("m", "e"))
            query.line(f"{name} = {reader.tile(True, piece)}.to(tl.float32)")
        query.line("delta = tl.sum(do * o, 1)")

    def _range(self, w: Writer) -> None:
        """Nothing: there are no keys."""

    def _state(self, w: Writer) -> None:
        """Nothing: there is no loop."""

    def _loops(self, w: Writer) -> None:
        w.gap("what the scores of a row are shifted by before exp2")
        w.extend(self._first_row(dense=True))
        w.extend(self._statistics())
        values = SHIFTS | {"delta": "delta"}
        for name in row_buffers(self.chain):
            value = values[name]
            self.arguments.pointer(f"{name}_ptr", name)
            w.line(f"tl.store({name}_ptr + scratch_row + offs_m, {value}, mask=m_mask)")
        if self.sweeps:
            self._mark(w)

    def _mark(self, w: Writer) -> None:
        """Which queries saw no allowed key, a mark for so many of them: every program writes its own, so nothing has to be cleared before."""
        w.gap(f"of {MARKED} queries each, whether some saw no allowed key: those count for keys beyond their bounds")
        self.arguments.pointer("unseen_ptr", "unseen")
        w.line(f"unseen = m_mask & ((largest > {literal(self.chain.seen_above)}) ^ True)        # NaN is not seen either")
        w.line(f"n_marks = tl.cdiv(n_queries, {MARKED})")
        w.line(f"mark = pid % n_tiles * (BLOCK_M // {MARKED}) + tl.arange(0, BLOCK_M // {MARKED})")
        w.line(f"some_unseen = tl.max(unseen.to(tl.int8).reshape([BLOCK_M // {MARKED}, {MARKED}]), 1)")
        w.line("tl.store(unseen_ptr + batch.to(tl.int64) * n_marks + mark, some_unseen, mask=mark < n_marks)")

    def _epilogue(self, w: Writer) -> None:
        """Nothing: everything is stored."""
