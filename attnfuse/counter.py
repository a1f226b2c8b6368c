"""The dispatch mode behind `attnfuse.traffic`: it sees every operation below autograd and writes down what its kernels move.

An operation that PyTorch makes of others on every device runs under the mode again, so that what is counted is what runs:

    masked_fill(x, mask, -inf)   →   copy_ (reads and writes x), masked_fill_ (reads x and the mask, writes x)
"""
from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from . import ops  # noqa: F401  (defines the operations that are counted by prediction)
from .codegen import predict
from .codegen.devices import device as device_named, rates
from .codegen.tiles import Device, present
from .counting import distinct_bytes, moved
from .spec import AttentionSpec
from .traffic import Call

_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
_WHOLE = frozenset({"aten::_unsafe_view", "aten::empty_like", "aten::new_empty", "aten::lift_fresh_copy"})
"""Programs that would make a tensor behind the dispatcher's back, or that move nothing whatever they are made of."""
ASSUMED = "h100"
"""The GPU that predictions are for where none is named and none is there."""


@contextmanager
def counting(calls: list[Call], device: str | Device | None) -> Iterator[None]:
    """Append every kernel of the ``with`` block to `calls`; see `attnfuse.traffic`."""
    chosen = device_named(device) if isinstance(device, str) else device
    with ExitStack() as stack:
        if chosen is not None:
            stack.enter_context(_DropoutInOneKernel())
        stack.enter_context(_Counter(calls, chosen or default_device()))
        yield


def default_device() -> Device:
    """The GPU that is there, with its card's rates, or the assumed one."""
    return rates(present(torch.device("cuda"))) if torch.cuda.is_available() else device_named(ASSUMED)


class _DropoutInOneKernel(TorchFunctionMode):
    """`dropout` on a CPU is four kernels and a mask in the dtype of its input; on a GPU it is `native_dropout`. Both have a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.nn.functional.dropout or func is torch.dropout:
            return _dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None) -> torch.Tensor:
    """As `torch.nn.functional.dropout` and `torch.dropout`, by the kernel of a GPU wherever the tensor is."""
    if inplace or not (training if train is None else train) or p <= 0.0 or p >= 1.0:
        return torch._VF.dropout_(input, p, training) if inplace else torch._VF.dropout(input, p, training if train is None else train)  # type: ignore[attr-defined]
    return torch.native_dropout(input, p, True)[0]


class _Counter(TorchDispatchMode):
    """Notes every operation; those that PyTorch makes of others are taken apart, so that what runs is counted."""

    def __init__(self, calls: list[Call], device: Device) -> None:
        super().__init__()
        self.calls, self.device = calls, device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled models run under it as they are."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "aten" and _taken_apart(func, (args, kwargs)):
            before = len(self.calls)
            try:
                with self:
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            except (RuntimeError, NotImplementedError):      # it looks at values that a fake tensor has not, or the operation itself fails
                del self.calls[before:]
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name.rpartition("::")[2]
        if func.namespace == "attnfuse" and name in ("attention", "attention_backward"):
            self.calls += _predicted(name, args, self.device)
            return
        read, written = moved(func, args, kwargs, result)
        if read or written:
            self.calls.append(Call(name, read, written, _flops(func, args, kwargs, result)))


def _taken_apart(func: torch._ops.OpOverload, args: Any) -> bool:
    """Whether an operation is a program of others on every device (`masked_fill` is a copy and `masked_fill_`). Views and in-place
    operations are left whole: the former move nothing, the latter are what runs."""
    if not _composite(func):
        return False
    return all(t.layout == torch.strided and not t.is_nested for t in tree_leaves(args) if isinstance(t, torch.Tensor))


@functools.cache
def _composite(func: torch._ops.OpOverload) -> bool:
    schema, keys = func._schema, torch._C.DispatchKey
    if any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)) or func.overloadpacket._qualified_op_name in _WHOLE:
        return False
    return func.has_kernel_for_dispatch_key(_COMPOSITE) and not any(func.has_kernel_for_dispatch_key(k) for k in (keys.CPU, keys.CUDA))


def _flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _predicted(name: str, args: tuple[Any, ...], device: Device) -> list[Call]:
    """Our own operation as the kernels that would be generated for it."""
    operands, sizes, spec_json = (args[0], args[1], args[3]) if name == "attention" else (args[1], args[4], args[6])
    spec = AttentionSpec.from_json(spec_json)
    named = {n: int(s) for n, s in zip(spec.size_names, sizes, strict=True)}
    held = [distinct_bytes([t]) for t in operands]
    if name == "attention":
        kernels = (predict.forward(spec, named, held, device),)
    else:
        kernels = predict.backward(spec, named, held, list(args[7]), device)
    return [Call(f"attnfuse::{name} ({k.name})" if len(kernels) > 1 else f"attnfuse::{name}", k.moved - k.written, k.written, k.flops)
            for k in kernels]
