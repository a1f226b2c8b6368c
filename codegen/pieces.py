"""Head dimensions in pieces: products that take some columns of their operands at a time.

Operands of float32 pass through registers on their way into a product, and the exact ones become three bfloat16 parts there. With whole
tiles of 128 or 256 columns that leaves no room for the sums. In pieces only some columns are on their way:

    k_0 = tl.load(… offs_d_0 …)                     k_1 = tl.load(… offs_d_1 …)
    qk = tl.dot(q_0, tl.trans(k_0))                 qk = tl.dot(q_1, tl.trans(k_1), qk)
    v_0 = tl.load(… offs_e_0 …)                     v_1 = tl.load(… offs_e_1 …)
    acc_0 = tl.dot(p, v_0, acc_0)                   acc_1 = tl.dot(p, v_1, acc_1)

The products are the same; those along the head dimension are added up piece by piece. Pieces beyond the head dimension are left out.

An exact product has sums of its own, six products of parts, which are added to `acc_0` at its end. The assembler puts those additions off to the end
of the block of instructions, since nothing waits for them there, and keeps the sums of all pieces meanwhile: as many registers again as `acc` has.
So each is a block:

    if n_keys != -1:                                # always, but who compiles it does not know
        acc_0 = tl.dot(p, v_0, acc_0)
"""
from __future__ import annotations

import math
from dataclasses import dataclass

_MOST = 16
NAMES = tuple(f"{name}_{n}" for name in "q k v do acc result dk dv dq offs_d offs_e d_mask e_mask".split() for n in range(_MOST))
"""Variables of the text."""


@dataclass(frozen=True)
class Piece:
    """Some columns of a head dimension, or all.

    Attributes:
        axis: ``d`` of queries and keys or ``e`` of values.
        number: which piece; None for all columns.
        padded: whether some of its columns lie beyond the head dimension.
    """

    axis: str
    number: int | None
    padded: bool

    @property
    def suffix(self) -> str:
        """What its variables' names end with."""
        return "" if self.number is None else f"_{self.number}"

    @property
    def width(self) -> str:
        """The constant that says how many columns it has."""
        return f"BLOCK_{self.axis.upper()}" if self.number is None else "PIECE"

    @property
    def offsets(self) -> str:
        """The variable with the numbers of its columns."""
        return f"offs_{self.axis}{self.suffix}"

    @property
    def mask(self) -> str:
        """The variable that says which of them there are; for padded ones."""
        return f"{self.axis}_mask{self.suffix}"


def pieces(axis: str, depth: int, block: int, piece: int) -> tuple[Piece, ...]:
    """The pieces of a head dimension `depth`, padded to `block`: as many of `piece` columns as it needs, or all of it (`piece` 0, or no less).

    >>> [p.suffix for p in pieces("d", 160, 256, 64)], pieces("d", 160, 256, 64)[-1].padded
    (['_0', '_1', '_2'], True)
    """
    if not 0 < piece < block:
        return (Piece(axis, None, depth < block),)
    return tuple(Piece(axis, n, (n + 1) * piece > depth) for n in range(math.ceil(depth / piece)))
