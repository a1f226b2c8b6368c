"""Run a slice of a graph on fake tensors and write down which core ATen operations happened.

The record is functional (in-place operations became out-of-place ones) and small: every spelling of a mask, a scale or a
head split falls together into views, pointwise operations, `arange`, `index`, `bmm` and a softmax. Lengths stay symbolic:
an argument that is a `SymInt` is kept as such, which is why this is a dispatch mode of a few lines and not `make_fx`.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from ..program import OPS, Expr, apply, const, size
from ..refusal import Reason, Refused

aten = torch.ops.aten


@dataclass(eq=False)
class Call:
    """One recorded operation; tensors among the arguments are `Value`s, lengths are ints or SymInts."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(call: Call, count: int, *defaults: Any) -> tuple[Any, ...]:
    """The first `count` positional arguments, the last of them by default where they were not given."""
    missing = max(count - len(call.args), 0)
    return (*call.args[:count], *defaults[len(defaults) - missing:])


@dataclass(eq=False)
class Value:
    """A tensor of the record: its shape as integer programs, and the call (and which of its results) that made it.

    `nodes` are the nodes of the original graph that hold this very tensor, so that it can be handed to a kernel. With
    `stopped` it sends no gradient to what it was made from.
    """

    number: int
    shape: tuple[Expr, ...]
    dtype: torch.dtype
    device: torch.device
    call: Call | None = None
    output: int = 0
    constant: torch.Tensor | None = None
    nodes: list[torch.fx.Node] = field(default_factory=list)
    stopped: bool = False

    @property
    def kind(self) -> str:
        """Kind of its elements in a program."""
        return "bool" if self.dtype == torch.bool else "float" if self.dtype.is_floating_point else "int"


class Record(TorchDispatchMode):
    """Collects the calls made under it, after decomposition to core ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Value] = []
        self._of: dict[int, Value] = {}
        self._alive: list[torch.Tensor] = []      # ids are only unique among the living

    def value(self, tensor: torch.Tensor) -> Value:
        """The `Value` of a tensor; one that no recorded call made is an input or a constant."""
        found = self._of.get(id(tensor))
        if found is None:
            constant = getattr(tensor, "constant", None) if hasattr(tensor, "fake_mode") else tensor
            found = self._new(tensor, None, 0, constant)
        return found

    def _new(self, tensor: torch.Tensor, call: Call | None, output: int, constant: torch.Tensor | None = None) -> Value:
        made = Value(len(self.values), tuple(length(s) for s in tensor.shape), tensor.dtype, tensor.device, call, output, constant)
        self.values.append(made)
        self._of[id(tensor)] = made
        self._alive.append(tensor)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        decomposition = _decompositions().get(func)
        if decomposition is not None:
            with self:
                out = decomposition(*args, **kwargs)
            if out is not NotImplemented:
                return out
        elif func not in _WHOLE and _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if func in _NOT_RECORDED:
            return out
        # A mutation that functionalisation let through would leave the record stale.
        if func._schema.is_mutable:
            raise Refused(Reason.INPLACE, stage="region", detail=str(func))
        call = Call(func, *tree_map_only(torch.Tensor, self.value, (tuple(args), kwargs)))
        for n, tensor in enumerate(out if isinstance(out, (tuple, list)) else [out]):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._of:
                self._new(tensor, call, n)
        return out


_NOT_RECORDED = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default, aten.is_pinned.default}
# Kept whole although PyTorch could take them apart: the lifting rules know them by their meaning.
_WHOLE = (aten.native_dropout.default, aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default, aten.baddbmm.default,
          aten.logsumexp.default)


@functools.lru_cache(maxsize=None)
def _composite(func: Any) -> bool:
    """Whether an operation is defined by others; under the Python dispatcher such a one may arrive whole."""
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


_table: dict[Any, Callable[..., Any]] = {}


def _decompositions() -> dict[Any, Callable[..., Any]]:
    if not _table:
        _table.update(core_aten_decompositions())
        for op in _WHOLE:
            _table.pop(op, None)
        _table[aten.baddbmm.default] = _baddbmm
        _table[aten._log_softmax.default] = lambda x, dim, half: aten.log.default(aten._softmax.default(x, dim, half))
    return _table


def _baddbmm(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    """With beta = 0 the addend is ignored, NaNs and uninitialised memory included (as its documentation says)."""
    known = lambda factor, value: isinstance(factor, (int, float)) and factor == value     # a symbolic one is not asked: that would fix it
    product = torch.bmm(a, b) if known(alpha, 1) else torch.bmm(a, b) * alpha
    return product if known(beta, 0) else product + (x if known(beta, 1) else x * beta)


def first_name(value: Value) -> str:
    """Of the node that holds a tensor; empty where none does."""
    return value.nodes[0].name if value.nodes else ""


def length(x: int | torch.SymInt) -> Expr:
    """A length as an integer program; symbols of the shape environment become ``size("s77")``."""
    return const(int(x)) if isinstance(x, int) else from_sympy(x.node.expr)


def number(x: Any) -> Expr:
    """A Python number or a symbolic one as a program."""
    if isinstance(x, (bool, int, float)):
        return const(x)
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return from_sympy(x.node.expr)
    raise Refused(Reason.UNKNOWN_OP, stage="lift", detail=f"a scalar of type {type(x).__name__}")


_SYMPY = {"FloorDiv": "floordiv", "CleanDiv": "floordiv", "Mod": "mod", "PythonMod": "mod", "Max": "max", "Min": "min",
          "FloatTrueDiv": "div", "IntTrueDiv": "div", "FloatPow": "pow", "PowByNatural": "pow", "ToFloat": "float",
          "OpaqueUnaryFn_sqrt": "sqrt", "OpaqueUnaryFn_exp": "exp", "OpaqueUnaryFn_log": "log"}


def from_sympy(expr: Any) -> Expr:
    """The shape environment's expression as a program."""
    if isinstance(expr, (sympy.Integer, int)):
        return const(int(expr))
    if isinstance(expr, (sympy.Float, sympy.Rational)):
        return const(float(expr))
    if isinstance(expr, sympy.Symbol):
        # Unbacked and scalar symbols of floats are named z…; everything else is an integer.
        return size(expr.name) if not expr.name.startswith("z") else Expr("size", attr=expr.name, kind="float")
    name = type(expr).__name__
    args = [from_sympy(a) for a in expr.args]
    if name in ("Add", "Mul"):
        out = args[0]
        for a in args[1:]:
            out = apply("add" if name == "Add" else "mul", *_same_kind(out, a))
        return out
    if name == "Pow" and isinstance(expr.args[1], sympy.Integer) and expr.args[1] > 0:
        out = args[0]
        for _ in range(int(expr.args[1]) - 1):
            out = apply("mul", out, args[0])
        return out
    if name in _SYMPY and len(args) == OPS[_SYMPY[name]].arity:
        op = _SYMPY[name]
        return apply(op, *(args if op in ("floordiv", "mod", "max", "min", "float") else [_as_float(a) for a in args]))
    raise Refused(Reason.DYNAMIC, stage="lift", detail=f"no program for the length {expr}")


def _as_float(x: Expr) -> Expr:
    return x if x.kind == "float" else apply("float", x)


def _same_kind(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    return (a, b) if a.kind == b.kind else (_as_float(a), _as_float(b))


def record(fn: Callable[..., Sequence[Any]], inputs: Sequence[Any], fake_mode: Any) -> tuple[Record, list[Value | None], list[Any]]:
    """Run `fn` on fake inputs; returns the record, the values of the tensors among the inputs, and what `fn` returned
    with every tensor replaced by its `Value`."""
    rec = Record()
    given: list[Value | None] = [rec.value(x) if isinstance(x, torch.Tensor) else None for x in inputs]
    # The Python dispatcher picks decompositions that keep lengths symbolic where the compiled ones (matmul's) read numbers.
    with torch.no_grad(), enable_python_dispatcher(), fake_mode, rec:
        try:
            out = torch.func.functionalize(fn, remove="mutations")(*inputs)
        except RuntimeError as e:
            if "functionaliz" not in str(e):
                raise
            raise Refused(Reason.INPLACE, stage="region", detail=str(e)[:160]) from e       # fill_diagonal_ has no such form
    return rec, given, list(tree_map(lambda x: rec.value(x) if isinstance(x, torch.Tensor) else x, out))
