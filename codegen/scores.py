"""From scalar programs to Triton expressions, hoisted by what they depend on.

A sub-expression that depends on neither i nor j is a scalar, computed before everything; on i only, a row vector, before
the loop; on j only, a column vector, once a tile; on both, on the dot product or on the weight, part of the tile. In a kernel
that keeps its keys and loops over queries (`Programs.fixed` is "column") rows and columns change places.
A value that is used twice, or that crosses from one of these levels to the next, gets a name; the rest is written in place.

    score = 0.125 * s + slopes[b1] * float(j - i)   becomes
        slopes = tl.load(slopes_base)                                                   # scalar, before the loop
        score = 0.125 * qk + slopes * (offs_n[None, :] - offs_m[:, None]).to(tl.float32)    # tile
"""
from __future__ import annotations

from collections import Counter
from typing import Literal

from .. import philox
from ..algebra import Algebra
from ..program import Expr, axis, const, walk
from ..spec import AttentionSpec
from ..tilemap import Mask
from .arguments import Arguments, Length, Names, Size, Stride, on_host
from .helpers import HELPERS
from .reads import block_of, boxed, row_of
from .text import ATOM, Level, Text, level, literal, prepare

_INFIX = {"add": ("+", 5), "sub": ("-", 5), "mul": ("*", 6), "div": ("/", 6), "and": ("&", 4), "xor": ("^", 3), "or": ("|", 2),
          "eq": ("==", 1), "ne": ("!=", 1), "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1)}
_CALLS = {"exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt", "rsqrt": "tl.rsqrt", "sigmoid": "tl.sigmoid", "erf": "tl.erf",
          "sin": "tl.sin", "cos": "tl.cos", "floor": "tl.floor", "ceil": "tl.ceil", "abs": "tl.abs", "where": "tl.where"}
_VARIABLES = {"i": "offs_m", "j": "offs_n", "arrived": "dp", "upstream": "ds"}
_LONG = 56


class Programs:
    """The programs of one kernel: what they share, and the code that runs before the loop.

    Attributes:
        scalars, hoisted: lines to put before everything, and before the loop.
        helpers: the small functions that the code calls.
        fixed: which vectors stay the same through the loop: ``"row"`` where it runs over keys, ``"column"`` over queries.
        shape, along: a tile's shape, and how a vector is laid along it. A tile has the fixed vectors along its first dimension.
        boxes: the operands that are read at (i, j) by descriptors. box: queries and keys of such a tile.
    """

    def __init__(self, spec: AttentionSpec | Mask, names: Names, arguments: Arguments, wide: bool, constants: dict[str, int],
                 fixed: Literal["row", "column"] = "row", boxes: frozenset[int] = frozenset(), box: tuple[int, int] = (0, 0)) -> None:
        self.spec, self.names, self.arguments, self.constants = spec, names, arguments, constants
        self.int_type = "tl.int64" if wide else "tl.int32"
        self.wide = wide
        self.fixed = fixed
        self.boxes, self.box = boxes, box
        self.shape = "[BLOCK_M, BLOCK_N]" if fixed == "row" else "[BLOCK_N, BLOCK_M]"
        self.along = {x: "[:, None]" if x == fixed else "[None, :]" for x in ("row", "column")}
        self.scalars: list[str] = []
        self.hoisted: list[str] = []
        self.helpers: set[str] = set()
        self.shared: dict[Expr, Text] = {}
        self.algebra = Algebra()

    def scalar(self, expr: Expr) -> Text:
        """The text of an expression over batch axes and sizes; what it needs is in `scalars`."""
        return Body(self, masked=False).text(prepare(expr, self.constants))

    def row(self, expr: Expr) -> str:
        """The name of a value over (batch, i), broadcast to a row vector where it is a scalar."""
        return Body(self, masked=False).text(prepare(expr, self.constants)).text

    def size(self, axis: str) -> str:
        """The argument that holds a length."""
        hint = f"n_{axis}" if axis in self.spec.batch else axis
        name = {"i": "n_queries", "j": "n_keys"}.get(axis) or self.names.of(("size", axis), hint)
        return self.arguments.integer(Size(name, axis))

    def axis(self, name: str) -> str:
        """The variable that holds a position."""
        return _VARIABLES.get(name) or self.names.of(("axis", name), name)

    def pointer(self, operand: int) -> str:
        """The argument of a captured operand."""
        hint = self.spec.operands[operand].name
        name = self.names.of(("pointer", operand), f"{hint}_ptr")
        return self.arguments.pointer(name, operand)


class Body:
    """Code of one place: a loop body (`masked` where what it runs over may lie beyond the end), or before the loop.

    Attributes:
        moving, tiles: lines that compute the vectors that change from tile to tile, and tiles; hoisted lines go to `Programs`.
    """

    def __init__(self, programs: Programs, masked: bool) -> None:
        self.programs, self.masked = programs, masked
        self.moving: list[str] = []
        self.tiles: list[str] = []
        self._memo: dict[Expr, Text] = {}
        self._uses: Counter[Expr] = Counter()

    def text(self, root: Expr) -> Text:
        """The expression of a prepared program."""
        for node in walk(root):
            self._uses.update(node.args)
        return self._text(root)

    def tile(self, root: Expr) -> str:
        """The expression of a prepared program, of the shape of a tile."""
        text = self.text(root).text
        return text if level(root) == "tile" else f"tl.zeros({self.programs.shape}, tl.float32) + {self._at(root, 'tile', 5)}"

    # ---- naming and placing

    def _lines(self, where: Level) -> list[str]:
        if where in ("scalar", "tile"):
            return self.programs.scalars if where == "scalar" else self.tiles
        return self.programs.hoisted if where == self.programs.fixed else self.moving

    def _memory(self, where: Level) -> dict[Expr, Text]:
        return self.programs.shared if where in ("scalar", self.programs.fixed) else self._memo

    def take(self) -> list[str]:
        """The lines that compute tiles, as far as they have come; they are the caller's from now on."""
        lines, self.tiles[:] = list(self.tiles), []
        return lines

    def _text(self, node: Expr) -> Text:
        where = level(node)
        memo = self._memory(where)
        if node not in memo:
            text = self._write(node)
            # Hoisted code is shared by several bodies: there a name is given to whatever a second body could want.
            if text.strength < ATOM and (self._uses[node] > 1 or len(text.text) > _LONG):
                text = self._name(node, text)
            memo[node] = text
        return memo[node]

    def _named(self, node: Expr) -> Text:
        """The value under a name."""
        text = self._text(node)
        if text.strength < ATOM or "(" in text.text:
            text = self._name(node, text)
            self._memory(level(node))[node] = text
        return text

    def _name(self, node: Expr, text: Text) -> Text:
        where = level(node)
        prefix = {"scalar": "", "row": "row_", "column": "col_", "tile": ""}[where]
        hint = {"bool": "mask", "int": "index", "float": "value" if where == "tile" else "term"}[node.kind]
        name = self.programs.names.of(node, prefix + hint)
        self._lines(where).append(f"{name} = {text.text}")
        return Text(name)

    def _at(self, node: Expr, where: Level, strength: int) -> str:
        """The text of `node` inside an expression of level `where`."""
        own = level(node)
        if own == where or node.op in ("const", "size") or (own == "scalar" and node.op == "axis"):
            return self._text(node).within(strength)
        if own == "scalar":
            return self._named(node).text
        if where == "tile":
            return self._named(node).text + self.programs.along[own]
        raise AssertionError(f"a {own} value inside a {where} value")

    # ---- one node

    def _write(self, node: Expr) -> Text:
        programs = self.programs
        where = level(node)
        if node.op == "const":
            text = literal(node.value)
            return Text(text, 7 if text.startswith("-") else ATOM)
        if node.op == "axis":
            return Text(programs.axis(str(node.attr)))
        if node.op == "size":
            return Text(programs.size(str(node.attr)))
        if node.op in ("dot", "weight"):
            return Text("qk" if node.op == "dot" else "p")
        if node.op == "keep":
            return self._keep(node)
        if node.op == "load":
            return self._load(node)
        at = lambda k, strength=0: self._at(node.args[k], where, strength)
        if node.op in _INFIX and not (node.op == "div" and any(a.kind != "float" for a in node.args)):
            sign, own = _INFIX[node.op]
            # Comparisons do not chain, and arithmetic does not associate: the right side needs more.
            left = at(0, own if own == 1 else own - 1)
            return self._kind(node, Text(f"{left} {sign} {at(1, own - 1 if node.op in ('and', 'or') else own)}", own))
        if node.op == "div":
            return Text(f"{self._float(node.args[0], where, 5)} / {self._float(node.args[1], where, 6)}", 6)
        if node.op in _CALLS:
            whole = node.op in ("where", "abs")         # the others are functions of floats
            args = [at(k) if whole else self._float(a, where) for k, a in enumerate(node.args)]
            return Text(f"{_CALLS[node.op]}({', '.join(args)})")
        if node.op in ("min", "max"):
            nan = ", propagate_nan=tl.PropagateNan.ALL" if node.kind == "float" else ""
            return Text(f"tl.{node.op}imum({at(0)}, {at(1)}{nan})")
        if node.op == "neg":
            return Text(f"-{at(0, 6)}", 7)
        if node.op == "not":
            return Text(f"{at(0, 3)} ^ True", 3)
        if node.op == "isnan":
            x = self._inner(node.args[0], where)
            return Text(f"{x} != {x}", 1)
        if node.op in ("float", "int", "bool"):
            return self._cast(node, where)
        return self._helper(node, where)

    def _inner(self, node: Expr, where: Level) -> str:
        """A value under a name, as it stands inside an expression of level `where`."""
        if node.op not in ("const", "size"):
            self._named(node)
        return self._at(node, where, 8)

    def _kind(self, node: Expr, text: Text) -> Text:
        """Convert where the arguments' kinds would give another one than the program's."""
        if node.kind in ("int", "float") and node.op in ("add", "sub", "mul") and any(a.kind != node.kind for a in node.args):
            return self._to(text, "tl.float32" if node.kind == "float" else self.programs.int_type)
        return text

    @staticmethod
    def _to(text: Text, dtype: str) -> Text:
        return Text(f"{text.within(8)}.to({dtype})")

    def _float(self, node: Expr, where: Level, strength: int = 0) -> str:
        if node.kind == "float":
            return self._at(node, where, strength)
        return literal(float(node.value)) if node.op == "const" else f"{self._at(node, where, 8)}.to(tl.float32)"

    def _cast(self, node: Expr, where: Level) -> Text:
        (source,) = node.args
        if source.op == "const":
            value = source.value
            return Text(literal(float(value) if node.op == "float" else int(value) if node.op == "int" else bool(value)))
        if source.kind == node.kind:
            return Text(self._at(source, where, 0), 0)
        if node.op == "bool":
            return Text(f"{self._at(source, where, 1)} != 0", 1)
        return Text(f"{self._at(source, where, 8)}.to({'tl.float32' if node.op == 'float' else self.programs.int_type})")

    def _helper(self, node: Expr, where: Level) -> Text:
        """Operations that Triton lacks or defines otherwise than PyTorch."""
        integer = node.kind == "int"
        if node.op in ("floordiv", "mod") and integer:
            low = self.programs.algebra.bounds(self.programs.algebra.poly(node.args[0]))[0]
            divisor = node.args[1]
            positive = (divisor.op == "const" and divisor.value > 0) or divisor.op == "size"
            if positive and low is not None and self.programs.algebra.nonnegative(low):
                left, right = self._at(node.args[0], where, 5), self._at(divisor, where, 6)
                return Text(f"{left} {'//' if node.op == 'floordiv' else '%'} {right}", 6)
        if node.op == "pow" and node.args[1].op == "const" and node.args[1].value in (2, 3, 0.5, -1):
            x = self._inner(node.args[0], where)
            power = node.args[1].value
            return {2: Text(f"{x} * {x}", 6), 3: Text(f"{x} * {x} * {x}", 6), 0.5: Text(f"tl.sqrt({x})"), -1: Text(f"1.0 / {x}", 6)}[power]
        name = {"floordiv": "floor_divide", "mod": "remainder"}.get(node.op, node.op) + ("_int" if integer else "")
        args = [self._at(a, where, 0) if integer else self._float(a, where) for a in node.args]
        if name not in HELPERS:
            raise AssertionError(f"no code for the operation {node.op}")
        self.programs.helpers.add(name)
        return Text(f"{name}({', '.join(args)})")

    # ---- leaves that need lines of their own

    def _keep(self, node: Expr) -> Text:
        stream, p = node.attr[0], float(node.attr[1])  # type: ignore[index]
        programs = self.programs
        programs.arguments.pointer("seed_ptr", "seed")
        if "seed = tl.load(seed_ptr)" not in programs.scalars:
            programs.scalars.append("seed = tl.load(seed_ptr)")
        random = programs.names.of(("random", stream), "random")
        programs.helpers.add("random_numbers")
        i, j = (f"start_{x}, tl.arange(0, BLOCK_{x.upper()}){programs.along[along]}" for x, along in (("m", "row"), ("n", "column")))
        self.tiles.append(f"{random} = random_numbers(seed, {i}, {j}, batch, {stream})")
        name = programs.names.of(node, "keep")
        self.tiles.append(f"{name} = tl.where({random} >= {philox.threshold(p) << 16}, {literal(philox.scale(p))}, 0.0)")
        return Text(name)

    def _load(self, node: Expr) -> Text:
        """A captured operand at its index, under the operand's name, widened to the kind of the program."""
        programs = self.programs
        where = level(node)
        operand = int(node.attr)  # type: ignore[arg-type]
        fact = programs.spec.operands[operand]
        if operand in programs.boxes and row_of(node.args) is not None:
            text = self._box(node)
        else:
            address = self._address(node, where)
            mask = self._mask(where)
            other = f", other={'0.0' if 'float' in fact.dtype else '0'}" if mask else ""
            text = Text(f"tl.load({address}{f', mask={mask}' if mask else ''}{other})")
        text = self._widen(text, fact.dtype, node.kind)
        name = programs.names.of(node, fact.name)
        self._lines(where).append(f"{name} = {text.text}")
        return Text(name)

    def _box(self, node: Expr) -> Text:
        """A tile of an operand that is read at (i, j), by its descriptor: zeros beyond the edges, as a masked load has them."""
        programs, operand = self.programs, int(node.attr)  # type: ignore[arg-type]
        own = ("i", "j")
        order, _ = boxed(node.args, own)
        name = programs.names.of(("descriptor", operand), f"{programs.spec.operands[operand].name}_desc")
        argument = programs.arguments.descriptor(name, operand, block_of(node.args, own, *programs.box), order)
        starts = {axis("i"): "start_m", axis("j"): "start_n"}
        place = [starts.get(node.args[n]) or self._index(operand, n, node.args[n], "scalar") for n in order]
        text = f"{argument}.load([{', '.join(place)}])" + (".reshape([BLOCK_M, BLOCK_N])" if len(place) > 2 else "")
        return Text(text if programs.fixed == "row" else f"tl.trans({text})")

    def _widen(self, text: Text, dtype: str, kind: str) -> Text:
        if kind == "float":
            return text if dtype == "float32" else self._to(text, "tl.float32")
        if kind == "bool":
            return text if dtype == "bool" else Text(f"{text.text} != 0", 1)
        wide_enough = dtype == "int64" or (dtype == "int32" and not self.programs.wide)
        return text if wide_enough else self._to(text, self.programs.int_type)

    def _mask(self, where: Level) -> str:
        """What keeps a load within the operand: always along the fixed vectors, along the others where the body is masked."""
        masks = {"row": "m_mask", "column": "n_mask"}
        fixed = self.programs.fixed
        used = [x for x in (fixed, "column" if fixed == "row" else "row") if where in (x, "tile") and (x == fixed or self.masked)]
        return " & ".join(masks[x] + (self.programs.along[x] if where == "tile" else "") for x in used)

    def _address(self, node: Expr, where: Level) -> str:
        """Base (a scalar, 64 bits) plus the offset that varies within the tile."""
        operand = int(node.attr)  # type: ignore[arg-type]
        outer = tuple((dim, x) for dim, x in enumerate(node.args) if level(x) == "scalar")
        base = self._base(operand, outer)
        inner = [(dim, x) for dim, x in enumerate(node.args) if level(x) != "scalar"]
        terms = [f"{self._index(operand, dim, x, where)} * {self._stride(operand, dim)}" for dim, x in inner]
        return " + ".join([base, *terms])

    def _stride(self, operand: int, dim: int) -> str:
        hint = f"{self.programs.spec.operands[operand].name}_stride_{dim}"
        name = self.programs.names.of(("stride", operand, dim), hint)
        return self.programs.arguments.integer(Stride(name, operand, ((dim, const(1)),)))

    def _index(self, operand: int, dim: int, index: Expr, where: Level) -> str:
        """An index inside an address; where it may be negative it counts from the end, as in PyTorch."""
        low = self.programs.algebra.bounds(self.programs.algebra.poly(index))[0]
        if low is not None and self.programs.algebra.nonnegative(low):
            return self._at(index, where, 5)
        fact = self.programs.spec.operands[operand]
        length = self.programs.arguments.integer(
            Length(self.programs.names.of(("length", operand, dim), f"{fact.name}_size_{dim}"), operand, dim))
        name = self.programs.names.of(("wrapped", operand, dim, index), f"{fact.name}_index")
        raw = self._inner(index, level(index))
        line = f"{name} = tl.where({raw} < 0, {raw} + {length}, {raw})"
        lines = self._lines(level(index))
        if line not in lines:
            lines.append(line)
        own = level(index)
        return name if own == where or own == "scalar" else name + self.programs.along[own]

    def _base(self, operand: int, outer: tuple[tuple[int, Expr], ...]) -> str:
        """The pointer to what a program reads of an operand, with every scalar index applied."""
        pointer = self.programs.pointer(operand)
        hint = self.programs.spec.operands[operand].name
        terms = self.base_terms(operand, outer, hint)
        if not terms:
            return pointer
        name = self.programs.names.of(("base", operand, outer), f"{hint}_base")
        line = f"{name} = {pointer} + {' + '.join(terms)}"
        if line not in self.programs.scalars:
            self.programs.scalars.append(line)
        return name

    def base_terms(self, operand: int, outer: tuple[tuple[int, Expr], ...], hint: str, tensor: str = "") -> list[str]:
        """The summands, in elements, that scalar indices contribute to an address; those the host knows come as one number.

        `tensor` names what is addressed if it is not the operand but has its shape: its gradient.
        """
        known = tuple((dim, x) for dim, x in outer if on_host(x) and x != const(0))
        terms: list[str] = []
        for dim, x in outer:
            if not on_host(x):
                index = Text(self._index(operand, dim, x, "scalar"), 5) if x.op != "axis" else self._text(x)
                stride = self.programs.names.of(("stride", hint, dim), f"{hint}_stride_{dim}")
                self.programs.arguments.integer(Stride(stride, tensor or operand, ((dim, const(1)),)))
                terms.append(f"{self._to(index, 'tl.int64').text} * {stride}")
        if known:
            name = self.programs.names.of(("offset", hint, known), f"{hint}_offset")
            terms.append(self.programs.arguments.integer(Stride(name, tensor or operand, known)))
        return terms
