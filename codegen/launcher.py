"""Launches of Triton functions whose arguments are fixed but for the addresses of their tensors.

    launch = Launch(function, (n_tiles, 1, 1), [None, ((0, 1), (64, 128))], [n_queries, n_keys], {"BLOCK_M": 64}, {"num_warps": 4})
    launch([out, k])                                # k as a descriptor of boxes of 64 x 128
    launches = Together([(launch, (0, 1)), (another, (1, 2))])
    launches([out, k, v])                           # both, one after the other

Triton looks a kernel up by the type, the divisibility and the value of every argument, at each call. Here all of that is fixed but for
where the tensors begin, so a kernel that was found is kept, and called as Triton itself would call it.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .direct import Call, Direct, direct, hooked
from .reads import descriptor, descriptor_like

Tensors = Sequence["torch.Tensor | None"]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a descriptor: the order in which it takes the tensor's dimensions, and the shape of its boxes."""
_MOST_CALLS = 1024

_on_the_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # type: ignore[attr-defined]


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a kernel writes all of, on a CPU or the current GPU: as inductor allocates, in a third of the time that `torch.empty` takes."""
    if device.type == "cuda" and _on_the_current_gpu is not None:
        return _on_the_current_gpu(shape, strides, dtype)  # type: ignore[no-any-return]
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()


class Launch:
    """Launches a Triton function whose parameters are tensors, integers and constants, in this order.

    Args:
        function: the `triton.jit` function.
        grid: its programs.
        boxes: for each tensor how it is described; None for an address.
        integers, constants: the values of the other parameters. options: Triton's own.
    """

    def __init__(self, function: Any, grid: tuple[int, int, int], boxes: Sequence[Box | None], integers: Sequence[int],
                 constants: Mapping[str, int], options: Mapping[str, int]) -> None:
        self._function, self._grid, self._integers, self._constants, self._options = function, grid, integers, constants, options
        self._described = {n: box for n, box in enumerate(boxes) if box is not None}
        self._templates: dict[int, object] = {}
        self._rest = (*integers, *constants.values())
        self._kernels: dict[object, tuple[Callable[..., object], Direct | None]] = {}
        """By which tensors do not begin at a multiple of 16 bytes; 0 where all do."""

    def __call__(self, tensors: Tensors) -> None:
        """Launch it on the current stream of the current device."""
        # A kernel that was found takes addresses as they are; of a tensor Triton asks for it and looks it up in the driver.
        addresses = [t.data_ptr() for t in tensors]  # type: ignore[union-attr]  # dropout comes with a seed
        found = self._kernels.get(_odd(addresses))
        if found is None:
            self._first(tensors, _odd(addresses))
        else:
            given = self._describe(tensors, addresses)
            found[0](*given, *self._rest)

    def at_once(self, tensors: Tensors, stream: int) -> Call | None:
        """The call of a function in C that launches it on these tensors; None where Triton has to, or was not asked yet."""
        addresses = [t.data_ptr() for t in tensors]  # type: ignore[union-attr]
        found = self._kernels.get(_odd(addresses))
        return None if found is None or found[1] is None else found[1](addresses, tensors, stream)

    def _first(self, tensors: Tensors, odd: object) -> None:
        """Triton finds the kernel, or makes it; the interpreter has none to keep."""
        arguments: list[Any] = list(tensors)
        for place, (order, block) in self._described.items():
            made = arguments[place] = descriptor(arguments[place], order, block)
            self._templates[place] = descriptor_like(made, None)      # which keeps no tensor alive
        compiled = self._function[self._grid](*arguments, *self._integers, **self._constants, **self._options)
        if compiled is not None:
            at_once = direct(compiled, self._grid, tensors, tuple(self._described), self._describe, self._rest)
            self._kernels[odd] = compiled[self._grid], at_once

    def _describe(self, tensors: Tensors, others: Sequence[object] | None = None) -> list[Any]:
        """The tensors, those that are described by descriptors; in the places of the rest `others` if given."""
        arguments: list[Any] = list(tensors if others is None else others)
        for place, template in self._templates.items():
            arguments[place] = descriptor_like(template, tensors[place])
        return arguments


def _odd(addresses: Sequence[int]) -> object:
    """Which addresses are no multiples of 16, 0 where all are: what Triton compiles for."""
    return functools.reduce(operator.or_, addresses) & 15 and tuple([address & 15 != 0 for address in addresses])


class Together:
    """Kernels that run one after the other, each on some of the same tensors, given by their places among these.

    What launches all of them is kept by the addresses of the tensors and the stream: where memory is allocated as it was the last time, as it is
    from one training step to the next, nothing remains to be done but to launch.
    """

    def __init__(self, launches: Sequence[tuple[Launch, Sequence[int]]]) -> None:
        self._launches = launches
        self._used = sorted({place for _, places in launches for place in places})
        self._calls: dict[tuple[int, ...], list[Call]] = {}
        self._device: int | None = None

    def __call__(self, tensors: Tensors) -> None:
        """Launch them on the current stream of the current device, which is the same at every call."""
        key: tuple[int, ...] = ()
        if self._device is not None:
            key = (torch._C._cuda_getCurrentRawStream(self._device), *[tensors[place].data_ptr() for place in self._used])  # type: ignore[union-attr]
            calls = self._calls.get(key) or self._ready(tensors, key)
            if calls and not hooked():
                for run, arguments in calls:
                    run(*arguments)
                return
        for launch, places in self._launches:
            launch([tensors[place] for place in places])
        if not key and torch.cuda.is_available():
            self._device = torch.cuda.current_device()

    def _ready(self, tensors: Tensors, key: tuple[int, ...]) -> list[Call]:
        """The calls for these tensors, kept; none where Triton has to launch one of the kernels."""
        found = [launch.at_once([tensors[place] for place in places], key[0]) for launch, places in self._launches]
        calls = [call for call in found if call is not None]
        if len(calls) < len(found):
            return []
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[key] = calls
        return calls
