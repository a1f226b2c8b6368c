"""What every emitter does: names and arguments, tensors read at affine places, the frame of a generated function."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from ..algebra import affine, simplify
from ..program import Expr, const, depends, loads
from ..ranges import Ranges, analyse
from ..spec import Access, AttentionSpec
from ..tilemap import ranges_of
from .arguments import Arguments, Integer, Names, Pointer, Size, Stride, Unsupported, on_host
from .helpers import HELPERS
from .pieces import NAMES, Piece, pieces
from .plan import KernelPlan
from .reads import ROLES, Reader, block_of, boxed, described_pairs, index_of, place_of
from .scores import Body, Programs
from .text import level, prepare
from .writer import Writer

RESERVED = (
    "tl triton float range q k v q_ptr k_ptr v_ptr out_ptr stats_ptr seed_ptr seed out p qk score row_max row_sum acc new_max "
    "safe_max alpha pid tile batch n_tiles start_m start_n offs_m offs_n offs_d offs_e m_mask n_mask d_mask e_mask last_m start stop "
    "full_start full_stop stop_tile place unseen n_partial n_left n_swept n_before n_run n_earlier n_beside step empty kept n_checked result n_queries n_keys "
    "stats_offset BLOCK_M BLOCK_N BLOCK_D BLOCK_E PIECE HEAD_DIM VALUE_DIM weights out_stride_m out_stride_e q_stride_m q_stride_d "
    "k_stride_n k_stride_d v_stride_n v_stride_e q_desc k_desc v_desc list_ptr n_full n_alive n_listed next_n next_m following part "
    "i j d e").split() + [*HELPERS, *NAMES]


BESIDE = 8
"""How many attentions that read the same at (i, j) take turns. Of P programs at a time, P / BESIDE tiles of queries fetch their rows of what
is shared, and BESIDE attentions their own keys and values: with tiles of queries twice as high as wide the sum is least near √(P / 2)."""


def sharing(spec: AttentionSpec) -> tuple[str, ...]:
    """The batch axes along which attentions read the same at every (i, j); empty where nothing is read there.

    A tensor that is read at every (i, j) is as large as the scores.
    """
    reads = [x for e in spec.programs for x in loads(e) if _by_pair(x)]
    own = frozenset().union(*map(depends, reads))
    return tuple(b for b in spec.batch if b not in own) if reads else ()


def start_order(spec: AttentionSpec) -> tuple[str, ...]:
    """The batch axes in the order in which attentions start, the last one fastest: those last along which attentions read the same at (i, j)."""
    return tuple(sorted(spec.batch, key=sharing(spec).__contains__))


def _by_pair(load: Expr) -> bool:
    """Whether a load has a value of its own for every pair of a query and a key."""
    axes = [depends(x) & {"i", "j"} for x in load.args]
    return {"i"} in axes and {"j"} in axes


@dataclass(frozen=True)
class Kernel:
    """A generated function: its name, its source (helpers first), and how it is called: pointers, integers, then constants."""

    name: str
    source: str
    pointers: tuple[Pointer, ...]
    integers: tuple[Integer, ...]
    constants: tuple[tuple[str, int], ...]


def words(spec: AttentionSpec, plan: KernelPlan) -> list[str]:
    """What the name of a kernel says of its attention."""
    bounds, found = analyse(spec).bounds, []
    if any(b.slope and b.side == "upper" for b in bounds):
        found.append("window" if any(b.slope and b.side == "lower" for b in bounds) else "causal")
    biased = any(level(x) == "tile" for x in loads(spec.score))
    parts = (("mapped", spec.tiles), ("sinks", spec.extra_terms), ("bias", biased), ("dropout", spec.dropouts))
    found += [word for word, there in parts if there]
    found.append(f"d{plan.depth}" + (f"x{plan.value_depth}" if plan.value_depth != plan.depth else ""))
    return [*found, spec.operands[spec.query.operand].dtype]


def wrapped(name: str, programs: Programs, body: Writer, constants: Mapping[str, int]) -> Kernel:
    """A function around the lines of its body: the helpers that it calls, then its head with all that it turned out to need. Of the
    `constants` it has those that the body names."""
    pointers, integers = programs.arguments.ordered()
    out = Writer()
    for helper in sorted(programs.helpers):
        out.extend(HELPERS[helper].strip("\n").split("\n"))
        out.line()
        out.line()
    # A length of 1 or a multiple of 16 must not make another kernel.
    out.call("@triton.jit(do_not_specialize=[", [f'"{a.name}"' for a in integers if isinstance(a, Size)], "])")
    text = "\n".join(body.lines)
    used = tuple((n, v) for n, v in constants.items() if n in text)
    out.call(f"def {name}(", [*(p.name for p in pointers), *(a.name for a in integers), *(f"{n}: tl.constexpr" for n, _ in used)], "):")
    out.extend(f"    {line}" if line else "" for line in body.lines)
    return Kernel(name, out.text(), pointers, integers, used)


@functools.cache
def _keeps_operands_inside() -> bool:
    """Whether Triton leaves in a loop that is not to hoist also what its products take of tiles that are kept: 3.8 and before do not, 3.9 does."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 9)


class Emission:
    """One emission of one kernel. `programs` collects arguments and hoisted lines while the loop bodies are written, so those come first.

    Attributes:
        reserved: names that the text uses itself.
        fixed: which vectors stay the same through the kernel's loop, as of `Programs`.
        pieces: of the head dimensions ``d`` and ``e``.
        ordered: whether exact products with pieces are added up one after the other, by blocks of their own: see `pieces`.
    """

    reserved = RESERVED
    fixed: Literal["row", "column"] = "row"
    ordered = True

    def __init__(self, spec: AttentionSpec, plan: KernelPlan) -> None:
        self.spec, self.plan = spec, plan
        self.arguments = Arguments()
        self.names = Names(self.reserved)
        constants = {"d": plan.depth, "e": plan.value_depth}
        boxes = frozenset(described_pairs(spec, plan.described))
        self.programs = Programs(spec, self.names, self.arguments, plan.index_bits == 64, constants, self.fixed, boxes, (plan.block_m, plan.block_n))
        self.ranges: Ranges = ranges_of(spec)
        self.pieces = {"d": pieces("d", plan.depth, plan.block_d, plan.piece), "e": pieces("e", plan.value_depth, plan.block_e, plan.piece)}
        self._late: dict[str, Callable[[Piece], str]] = {}
        """By role, of a tile that comes in pieces and was not read yet, the line that reads one."""
        self._block_numbers = itertools.count(1)

    def name(self) -> str:
        """Of the generated function."""
        raise NotImplementedError

    # ---- frame

    @staticmethod
    def _append(body: Writer, part: Writer) -> None:
        """A section after the others, with a blank line between."""
        if part.lines:
            body.gap()
            body.extend(part.lines)

    def _wrap(self, body: Writer) -> Kernel:
        plan = self.plan
        constants = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_D": plan.block_d, "BLOCK_E": plan.block_e,
                     "PIECE": plan.piece, "HEAD_DIM": plan.depth, "VALUE_DIM": plan.value_depth}
        return wrapped(self.name(), self.programs, body, constants)

    def loop(self, variable: str, span: str, stages: int = 0) -> str:
        """The head of a loop over tiles; with `stages` one over few of them, with a pipeline of its own.

        Nothing is computed before the loop because it does not change in it: the products' own descriptors of tiles in shared memory do not change,
        nor do addresses, dozens of numbers of 64 bits that would lie in registers all the time, and in local memory where those are full. Computed
        again they cost nothing that could be measured. From Triton 3.9 on that holds for what products take of the tiles that are kept, too: parts of float32,
        or registers filled from shared memory, which is to happen once where tiles come by pointers and are many.
        """
        stays = bool(stages or self.plan.described) or not _keeps_operands_inside()
        options = [*([f"num_stages={stages}"] if stages else []), *(["disable_licm=True"] if stays else [])]
        return f"for {variable} in tl.range({', '.join([span, *options])}):"

    # ---- places

    def _offsets(self, w: Writer, label: str, start: str) -> None:
        """The positions of a tile along queries (`label` m) or keys (n), from the text of the first one."""
        text = f"{start} + tl.arange(0, BLOCK_{label.upper()})"
        w.line(f"offs_{label} = " + (f"({text}).to(tl.int64)" if self.plan.index_bits == 64 else text))

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

    def _linear(self) -> str:
        """The row-major number of the batch position."""
        text = ""
        for name in self.spec.batch:
            own = self.programs.axis(name)
            text = f"({text})" if " " in text else text
            text = f"{text} * {self.programs.size(name)} + {own}" if text else own
        return text

    def _attention(self, w: Writer, last_first: str = "") -> None:
        """`tile` and `batch`, the row-major number of the program's attention, and its positions, from `pid` and `n_tiles`.

        With `last_first`, the reason for it, the last tile comes first.
        """
        order = start_order(self.spec)
        number = "batch" if order == self.spec.batch else "place"
        self._places(w, number, [(n, self.programs.size(n)) for n in order], len(sharing(self.spec)), last_first)
        if number != "batch":
            w.line(f"batch = {self._linear()}")

    def _places(self, w: Writer, number: str, axes: Sequence[tuple[str, str]], n_sharing: int, last_first: str = "") -> None:
        """`tile` and a number of the attention from `pid`, and the attention's positions along `axes`, given with the texts of their lengths.

        Along the last `n_sharing` axes attentions read the same at (i, j). They start side by side, `BESIDE` of them tile by tile: so the
        cache that the processors share fetches that part once. If they started one after another, most of it would be fetched twice: the
        programs that run at a time end somewhere within a tile's attentions, and what the first read is gone when the others start.
        """
        if n_sharing:
            run = " * ".join(length for _, length in axes[-n_sharing:])
            whole = f"({run})" if n_sharing > 1 else run
            w.line(f"n_run = n_tiles * {whole}        # attentions that read the same at (i, j): side by side")
            w.line(f"n_earlier = pid % n_run // (n_tiles * {BESIDE}) * {BESIDE}")
            w.line(f"n_beside = tl.minimum({run} - n_earlier, {BESIDE})")
            w.line("place = pid % n_run - n_earlier * n_tiles")
            tile = "place // n_beside"
            attention = f"pid // n_run * {whole} + n_earlier + place % n_beside"
        else:
            tile, attention = "pid % n_tiles", "pid // n_tiles"
        w.line(f"tile = n_tiles - 1 - {tile}        # {last_first}" if last_first else f"tile = {tile}")
        w.line(f"{number} = {attention}")
        self._positions(w, number, axes)

    def _depths(self, w: Writer, names: str = "de") -> None:
        """Positions along the head dimensions, with masks where the kernel pads them."""
        wide = ".to(tl.int64)" if self.plan.index_bits == 64 else ""
        all_pieces = [piece for name in names for piece in self.pieces[name]]
        for piece in all_pieces:
            first = f"{piece.number} * PIECE + " if piece.number else ""
            w.line(f"{piece.offsets} = {first}tl.arange(0, {piece.width}){wide}")
        for piece in all_pieces:
            if piece.padded:
                w.line(f"{piece.mask} = {piece.offsets} < {'HEAD_DIM' if piece.axis == 'd' else 'VALUE_DIM'}")

    # ---- products

    def _keep(self, w: Writer, role: str, reader: Reader, cast: str) -> None:
        """Load all of a tile that stays."""
        for piece in self.pieces[ROLES[role][1]]:
            w.line(f"{role}{piece.suffix} = {reader.tile(True, piece)}{cast}")

    def _fetch(self, w: Writer, role: str, reader: Reader, masked: bool, cast: str = "") -> None:
        """Load a tile that moves: at once where it comes whole, else each piece just before the first product that takes it."""
        line = lambda piece: f"{role}{piece.suffix} = {reader.tile(masked, piece)}{cast}"
        first = self.pieces[ROLES[role][1]][0]
        if first.number is None:
            w.line(line(first))
        else:
            self._late[role] = line

    def _arrive(self, w: Writer, piece: Piece, *roles: str) -> None:
        """Read a piece of the tiles that a product is about to take, unless an earlier product did."""
        w.extend(self._late[role](piece) for role in roles if role in self._late)
        if piece == self.pieces[piece.axis][-1]:
            for role in roles:
                self._late.pop(role, None)

    def _along(self, w: Writer, product: str, left: str, right: str, cast: str, options: str) -> None:
        """The product of two tiles along their head dimension, ``product = left · rightᵀ``; `cast` goes with `right`."""
        for piece in self.pieces[ROLES[left][1]]:
            self._arrive(w, piece, left, right)
            text = f"{left}{piece.suffix}, tl.trans({right}{piece.suffix}{cast})"
            if piece.number and self._in_order(piece, options):
                w.line(f"part = tl.dot({text}{options})")
                with self._block(w):
                    w.line(f"{product} = {product} + part")
                with w.block("else:"):          # which takes it too: what one block alone takes is computed there, and tiles that are kept with it
                    w.line(f"{product} = part")
            else:
                w.line(f"{product} = tl.dot({text}{f', {product}' if piece.number else ''}{options})")

    def _onto(self, w: Writer, sums: str, weights: str, right: str, cast: str, options: str, scale: str = "") -> None:
        """The product with a tile along its rows, onto sums as wide as it: ``sums = sums · scale + weights · right``."""
        for piece in self.pieces[ROLES[right][1]]:
            self._arrive(w, piece, right)
            own = f"{sums}{piece.suffix}"
            with self._block(w) if self._in_order(piece, options) else nullcontext():
                w.line(f"{own} = tl.dot({weights}, {right}{piece.suffix}{cast}, {own}{scale}{options})")

    def _in_order(self, piece: Piece, options: str) -> bool:
        """Whether the product with a piece is to be added up before the next one begins: where two wait for it registers suffice."""
        return self.ordered and len(self.pieces[piece.axis]) > 2 and "bf16x6" in options

    def _block(self, w: Writer) -> AbstractContextManager[None]:
        """A block of its own, by a condition that always holds and of which the compiler does not know it: see `pieces`."""
        return w.block(f"if n_keys != -{next(self._block_numbers)}:        # always")

    def _store_columns(self, w: Writer, name: str, row: str, value: str, piece: Piece) -> None:
        """Store a tile, or some columns of it, where rows and columns exist."""
        mask = f"{row}_mask[:, None]" + (f" & {piece.mask}[None, :]" if piece.padded else "")
        place = f"{name}_ptr + offs_{row}[:, None] * {name}_stride_{row} + {piece.offsets}[None, :] * {name}_stride_{piece.axis}"
        w.line(f"tl.store({place}, {value}, mask={mask})")

    def _zeros(self, w: Writer, sums: str, rows: str, axis: str) -> None:
        for piece in self.pieces[axis]:
            w.line(f"{sums}{piece.suffix} = tl.zeros([{rows}, {piece.width}], tl.float32)")

    @staticmethod
    def _cast(have: str, want: str) -> str:
        """What makes one dtype of another."""
        return "" if have == want else f".to(tl.{want})"

    def _dtype(self, access: Access) -> str:
        return self.spec.operands[access.operand].dtype

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

    def _row_strides(self, name: str, tensor: str, labels: tuple[str, str] = ("m", "e")) -> list[str]:
        """Arguments for the steps of a tensor (batch…, i, e), or with the labels m and n (batch…, i, j); the summands of its base."""
        terms: list[str] = []
        for dim, axis in enumerate(self.spec.batch):
            stride = self.names.of((tensor, dim), f"{name}_stride_{dim}")
            self.arguments.integer(Stride(stride, tensor, ((dim, const(1)),)))
            terms.append(f"{self.programs.axis(axis)}.to(tl.int64) * {stride}")
        for dim, label in enumerate(labels, len(self.spec.batch)):
            self.arguments.integer(Stride(f"{name}_stride_{label}", tensor, ((dim, const(1)),)))
        return terms

    def _input(self, role: str, operand: int | str) -> str:
        """The argument for a tensor that is read in tiles: an address or a descriptor, as the plan has it."""
        name = operand if isinstance(operand, str) else role
        if role not in self.plan.described:
            return self.arguments.pointer(f"{name}_ptr", operand)
        rows = self.plan.block_m if ROLES[role][0] == "i" else self.plan.block_n
        depth = self.plan.block_d if ROLES[role][1] == "d" else self.plan.block_e
        index = index_of(self.spec, role)
        return self.arguments.descriptor(f"{name}_desc", operand, block_of(index, ROLES[role], rows, depth), boxed(index, ROLES[role])[0])

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
