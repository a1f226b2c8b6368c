"""The emitter of the kernel that owns tiles of scores: gradients of biases that several sequences or heads share.

One program a tile of queries, a tile of keys and what the bias has of its own among the batch axes; it walks the others in a
loop around everything else and sums in registers, so the sum needs no atomics and the T×T gradient is written once.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..program import depends, loads
from .backward import Recomputed
from .emission import Kernel
from .jobs import Captured
from .reads import row_of
from .scores import Body
from .writer import Writer


class Tiles(Recomputed):
    """One emission.

    Attributes:
        mask: where gradients are added up; empty for everywhere, where what lies beyond the ends is not stored.
    """

    mask = ""

    def kernel(self) -> Kernel:
        """Write the tile first, then what it turned out to need, and put everything in order."""
        self._inputs()
        which, bases, tile, epilogue = Writer(), Writer(), Writer(), Writer()
        self._which_tile(which)
        self._bases(bases)
        self._one(tile)
        self._store(epilogue)

        kept = ", ".join(b for b in self.spec.batch if b not in self.job.walked)
        body = Writer()
        body.line(f'"""One tile of scores of one attention ({kept}), summed over {", ".join(self.job.walked)}."""')
        body.extend([*which.lines, *self.still])
        with ExitStack() as stack:
            for name in self.job.walked:
                stack.enter_context(self._each(body, name))
            body.line(f"batch = {self._linear()}")
            for lines in (self.programs.scalars, bases.lines, self.programs.hoisted, tile.lines):
                body.extend(lines)
        self._append(body, epilogue)
        return self._wrap(body)

    @contextmanager
    def _each(self, w: Writer, name: str) -> Iterator[None]:
        """The loop over a batch axis that is walked."""
        axis, length = self.programs.axis(name), self.programs.size(name)
        member = self.names.of(("member", name), f"member_{name}")
        with w.block(self.loop(member, f"0, {length}")):
            w.line(f"{axis} = tl.cast({member}, tl.int32)")
            yield

    def _inputs(self) -> None:
        super()._inputs()
        self._input("do", "grad_out")

    def _which_tile(self, w: Writer) -> None:
        for axis in ("i", "j"):
            self.programs.size(axis)
        kept = [b for b in self.spec.batch if b not in self.job.walked]
        w.line("# which queries and keys of which attention")
        w.line("n_tiles = tl.cdiv(n_keys, BLOCK_N)")
        w.line("pid = tl.program_id(0)")
        w.line("tile = pid // n_tiles")
        w.line("n_rows = tl.cdiv(n_queries, BLOCK_M)")
        if kept:
            w.line("rest = tile // n_rows")
            self._positions(w, "rest", [(n, self.programs.size(n)) for n in kept])
        for label, start in (("m", "tile % n_rows * BLOCK_M"), ("n", "pid % n_tiles * BLOCK_N")):
            w.line(f"start_{label} = {start}")
            self._offsets(w, label, f"start_{label}")
        self._depths(w)
        w.line("m_mask = offs_m < n_queries")
        w.line("n_mask = offs_n < n_keys")
        self._zero_sums(w, "[BLOCK_M, BLOCK_N]")

    def _bases(self, w: Writer) -> None:
        self.readers = {}
        for role, access, labels in (("q", self.spec.query, ("m", "d")), ("k", self.spec.key, ("n", "d")), ("v", self.spec.value, ("n", "e"))):
            self._open(w, role, access, labels)
        self._open(w, "do", None, ("m", "e"))
        w.extend(self._first_row(dense=False))

    def _one(self, w: Writer) -> None:
        """The tile of one attention: as in the kernel of the queries, without the products that follow."""
        body, types, spec = Body(self.programs, masked=True), self.types, self.spec
        self.still = self._still(body)
        weights = self._weights(body, inside=False)
        gradients = self._gradients(body, inside=False, mask=self.mask)
        query, key, value = (self._dtype(a) for a in (spec.query, spec.key, spec.value))
        w.extend(body.moving)
        w.extend(self._rows([*self.chain.rows(False), *(["delta"] if self.job.slopes else [])], mask=True))
        for role, dtype in (("q", query), ("k", key)):
            self._fetch(w, role, self.readers[role], True, self._cast(dtype, types.score))
        self._along(w, "qk", "q", "k", "", self._precise(types.score))
        w.extend(weights)
        for role, dtype in (("do", spec.out_dtype), ("v", value)):
            self._fetch(w, role, self.readers[role], True, self._cast(dtype, types.arrived))
        self._along(w, "dp", "do", "v", "", self._precise(types.arrived))
        w.extend(gradients)

    def _still(self, body: Body) -> list[str]:
        """Lines that fetch what all attentions of the walk read alike, once for all of them: by descriptors, at places that need no lines."""
        boxes = {x for x in loads(self.chain.score) if int(x.attr) in self.programs.boxes and row_of(x.args) is not None}  # type: ignore[arg-type]
        for node in sorted(boxes, key=str):
            if not depends(node) & set(self.job.walked) and all(x.op in ("axis", "const") for x in node.args):
                body.text(node)
        return body.take()

    def _add_captured(self, one: Captured, tile: str) -> list[str]:
        return [f"{self.sums[one]} += {tile}"]

    def _store(self, w: Writer) -> None:
        w.gap("epilogue: store")
        rest = "rest.to(tl.int64) * n_queries + " if len(self.job.walked) < len(self.spec.batch) else ""
        w.line(f"rows = {rest}offs_m{'' if rest else '.to(tl.int64)'}")
        for one, name in self.sums.items():
            pointer = self.arguments.pointer(f"{one.label}_ptr", one.label)
            place = f"{pointer} + rows[:, None] * n_keys + offs_n[None, :]"
            w.line(f"tl.store({place}, {name}, mask=m_mask[:, None] & n_mask[None, :])")
