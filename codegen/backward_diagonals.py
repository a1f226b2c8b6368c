"""The emitter of the kernel that owns block diagonals: gradients of what scores read by the distance of key and query.

All tiles on a block diagonal have the same j - i at the same place of the tile. So one program walks them, and all attentions that read the
same, sums one tile in registers and stores it: memory is linear in the length, no sum needs atomics, and PyTorch adds up the small
tiles' diagonals (`diagonals.gathered`).

    diagonal 2 of tiles 4 x 4, of seven, whose j - i is about -BLOCK:     . . . .
                                                                          x . . .
                                                                          . x . .
                                                                          . . x .
"""
from __future__ import annotations

from contextlib import ExitStack

from ..ranges import Bound, analyse
from .backward_tiles import Tiles
from .emission import Kernel
from .scores import Body
from .writer import Writer


class Diagonals(Tiles):
    """One emission."""

    mask = "in_tile"

    def kernel(self) -> Kernel:
        """As of `Tiles`; what belongs to rows is made anew in each tile. Raises ValueError for tiles that are no squares."""
        if self.plan.block_m != self.plan.block_n:
            raise ValueError(f"tiles of {self.plan.block_m}x{self.plan.block_n} have no block diagonals")
        self._inputs()
        which, bases, limits, tile, epilogue = Writer(), Writer(), Writer(), Writer(), Writer()
        self._which_tile(which)
        self._bases(bases)
        self._skip(limits)
        self._one(tile)
        self._store(epilogue)

        body = Writer()
        kept, walked = ", ".join(b for b in self.spec.batch if b not in self.job.walked), ", ".join(self.job.walked)
        whose, over = f" of one attention ({kept})" if kept else "", f", summed over {walked}" if walked else ""
        body.line(f'"""One block diagonal of scores{whose}{over}."""')
        body.extend(which.lines)
        with ExitStack() as stack:
            for name in self.job.walked:
                stack.enter_context(self._each(body, name))
            body.line(f"batch = {self._linear() or '0'}")
            for lines in (self.programs.scalars, bases.lines, limits.lines):
                body.extend(lines)
            with body.block(self.loop("step", f"0, {'n_left' if limits.lines else 'n_steps'}")):
                self._positions_of_tile(body)
                for lines in (self.programs.hoisted, tile.lines):
                    body.extend(lines)
        self._append(body, epilogue)
        return self._wrap(body)

    def _which_tile(self, w: Writer) -> None:
        for axis in ("i", "j"):
            self.programs.size(axis)
        kept = [(b, self.programs.size(b)) for b in self.spec.batch if b not in self.job.walked]
        w.line("# which diagonal of which attention: the longest ones, in the middle, start first")
        w.line("n_rows = tl.cdiv(n_queries, BLOCK_M)")
        w.line("n_columns = tl.cdiv(n_keys, BLOCK_N)")
        w.line("n_diagonals = n_rows + n_columns - 1")
        w.line("pid = tl.program_id(0)")
        if kept:
            count = " * ".join(size for _, size in kept)
            count = f"({count})" if len(kept) > 1 else count
            w.line(f"turn = pid // {count}")
            w.line(f"rest = pid % {count}")
            self._positions(w, "rest", kept)
        else:
            w.line("turn = pid")
        w.line("aside = (turn + 1) // 2")
        w.line("diagonal = (n_diagonals - 1) // 2 + tl.where(turn % 2 == 1, aside, -aside)")
        w.line("first_m = tl.maximum(n_rows - 1 - diagonal, 0)")
        w.line("first_n = tl.maximum(diagonal + 1 - n_rows, 0)")
        w.line("n_steps = tl.minimum(n_rows - first_m, n_columns - first_n)")
        self._depths(w)
        self._zero_sums(w, "[BLOCK_M, BLOCK_N]")

    def _still(self, body: Body) -> list[str]:
        """Nothing: the tile moves."""
        return []

    def _skip(self, w: Writer) -> None:
        """A diagonal that a bound leaves out has no tiles, but for attentions with rows that saw no allowed key: those count for all keys."""
        bounds = [b for b in analyse(self.spec).bounds if b.slope]
        if not bounds:
            return
        outside = " | ".join(f"({self._beyond(b)})" for b in bounds) if len(bounds) > 1 else self._beyond(bounds[0])
        if self.sweeps:
            self._unseen_queries(w)
            outside = f"({outside}) & (last == 0)"
        w.line("nearest = (diagonal + 1 - n_rows) * BLOCK_N         # j - i where the tiles' diagonals lie")
        w.line(f"n_left = tl.where({outside}, 0, n_steps)")

    def _beyond(self, bound: Bound) -> str:
        """Whether all j - i of the diagonal lie beyond a bound."""
        offset = self.programs.scalar(bound.offset).within(5)
        return f"nearest - BLOCK_M >= {offset}" if bound.side == "upper" else f"nearest + BLOCK_N <= {offset}"

    def _positions_of_tile(self, w: Writer) -> None:
        for label in ("m", "n"):
            w.line(f"start_{label} = (first_{label} + step) * BLOCK_{label.upper()}")
            self._offsets(w, label, f"start_{label}")
        w.line("m_mask = offs_m < n_queries")
        w.line("n_mask = offs_n < n_keys")
        w.line("in_tile = m_mask[:, None] & n_mask[None, :]")

    def _store(self, w: Writer) -> None:
        w.gap("epilogue: store")
        rest = "rest.to(tl.int64) * n_diagonals + " if len(self.job.walked) < len(self.spec.batch) else ""
        w.line(f"place = ({rest}diagonal{'' if rest else '.to(tl.int64)'}) * (BLOCK_M * BLOCK_N)")
        w.line("place += tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]")
        for one, name in self.sums.items():
            pointer = self.arguments.pointer(f"{one.label}_ptr", one.label)
            w.line(f"tl.store({pointer} + place, {name})")
