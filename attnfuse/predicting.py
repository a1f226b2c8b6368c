"""What `attnfuse.traffic` adds to `attnfuse.counting`: a GPU to count for. Our own operations count as the kernels that would be generated
for it, and dropout as the one kernel that it is there."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .codegen import predict
from .codegen.devices import device as device_named, rates
from .codegen.tiles import Device, present
from .counting import Counter
from .extents import distinct_bytes
from .ops import IN_GRAPH
from .spec import AttentionSpec
from .traffic import Call

ASSUMED = "h100"
"""The GPU that predictions are for where none is named and none is there."""


@contextmanager
def counting(calls: list[Call], device: str | Device | None) -> Iterator[None]:
    """Append every kernel of the ``with`` block to `calls`; see `attnfuse.traffic`."""
    with ExitStack() as stack:
        if device is not None:
            stack.enter_context(_DropoutInOneKernel())
        stack.enter_context(Predicting(calls, named(device), as_gpu=device is not None))
        yield


def named(device: str | Device | None) -> Device:
    """The device that a user means; None is the default one. Raises ValueError for an unknown name."""
    return device_named(device) if isinstance(device, str) else device or default_device()


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
    """As `torch.nn.functional.dropout` and `torch.dropout` (which calls the third argument `train`), by the kernel of a GPU."""
    active = training if train is None else train
    if inplace:
        return torch._VF.dropout_(input, p, active)  # type: ignore[attr-defined]
    if not active or p <= 0.0 or p >= 1.0:
        return torch._VF.dropout(input, p, active)  # type: ignore[attr-defined]
    return torch.native_dropout(input, p, True)[0]


class Predicting(Counter):
    """A counter for which our own operations are the kernels that `device` would run; `as_gpu`: all others too."""

    def __init__(self, calls: list[Call], device: Device, as_gpu: bool = True) -> None:
        super().__init__(calls, device.cache, as_gpu)
        self.device = device

    def _note(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name.rpartition("::")[2].removesuffix(IN_GRAPH)
        if func.namespace == "attnfuse" and name in ("attention", "attention_backward", "weights"):
            try:
                self.calls += _predicted(name, args, self.device)
                return
            except ValueError:      # no kernel would be generated: count its operands and results, once
                pass
        super()._note(func, args, kwargs, result)


def _predicted(name: str, args: tuple[Any, ...], device: Device) -> list[Call]:
    """One of our own operations as the kernels that would be generated for it."""
    operands, sizes, spec = (args[n] for n in {"attention": (0, 1, 3), "weights": (0, 2, 4), "attention_backward": (1, 4, 6)}[name])
    parsed = AttentionSpec.from_json(spec)
    held = [distinct_bytes([t]) for t in operands]
    if name != "attention_backward":
        return [(forward if name == "attention" else weights)(parsed, sizes, held, device)]
    kernels = predict.backward(parsed, _named(parsed, sizes), held, list(args[7]), device)
    return [_call(f"attnfuse::{name} ({k.name})", k) for k in kernels]


def forward(spec: AttentionSpec, sizes: Sequence[int], held: Sequence[int], device: Device) -> Call:
    """The forward kernel of a call: its sizes in the order of the spec, and the bytes of the distinct elements of its operands.

    Raises:
        ValueError: no kernel is generated for it (a head dimension above 256).
    """
    return _call("attnfuse::attention", predict.forward(spec, _named(spec, sizes), held, device))


def weights(spec: AttentionSpec, sizes: Sequence[int], held: Sequence[int], device: Device) -> Call:
    """As `forward`, for the kernel that writes the weights of a spec."""
    return _call("attnfuse::weights", predict.weights(spec, _named(spec, sizes), held, device))


def _named(spec: AttentionSpec, sizes: Sequence[int]) -> dict[str, int]:
    return {n: int(s) for n, s in zip(spec.size_names, sizes, strict=True)}


def _call(name: str, kernel: predict.Prediction) -> Call:
    return Call(name, kernel.moved - kernel.written, kernel.written, kernel.flops)
