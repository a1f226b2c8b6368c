"""Launches of Triton functions whose arguments are fixed but for the addresses of their tensors.

    launch = Launch(function, (n_tiles, 1, 1), [None, ((0, 1), (64, 128))], [n_queries, n_keys], {"BLOCK_M": 64}, {"num_warps": 4})
    launch([out, k])                                # k as a descriptor of boxes of 64 x 128
    launches = Together([(launch, (0, 1)), (another, (1, 2))])
    launches([out, k, v])                           # both, one after the other

Triton looks a kernel up by the type, the divisibility and the value of every argument, at each call. Here all of that is fixed but for
where the tensors begin, so a kernel that was found is kept, and called as Triton itself would call it, or at once (`direct`).
"""
from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from .direct import Call, Direct, direct, hooked
from .reads import descriptor, descriptor_like

Tensors = Sequence["torch.Tensor | None"]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a descriptor: the order in which it takes the tensor's dimensions, and the shape of its boxes."""
_MOST_CALLS = 8192
"""About 2 KB each and kernel."""

_on_the_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # type: ignore[attr-defined]


class Usage(NamedTuple):
    """What a compiled kernel takes of each thread: registers, and bytes of those that it spills."""

    registers: int
    spills: int


_watching: ContextVar[list[Usage] | None] = ContextVar("watching", default=None)


@contextmanager
def usages() -> Iterator[list[Usage]]:
    """What each kernel that is found in this context takes, in the order in which they are found."""
    found: list[Usage] = []
    token = _watching.set(found)
    try:
        yield found
    finally:
        _watching.reset(token)


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

    def is_known(self, tensors: Tensors) -> bool:
        """Whether Triton has found the kernel for tensors that begin as these do."""
        return _odd([t.data_ptr() for t in tensors]) in self._kernels  # type: ignore[union-attr]

    def at_once(self, tensors: Tensors, stream: int) -> Call | None:
        """The call of a function in C that launches a kernel that is known; None where Triton has to."""
        addresses = [t.data_ptr() for t in tensors]  # type: ignore[union-attr]
        making = self._kernels[_odd(addresses)][1]
        return None if making is None else making(addresses, tensors, stream)

    def _first(self, tensors: Tensors, odd: object) -> None:
        """Triton finds the kernel, or makes it; the interpreter has none to keep."""
        arguments: list[Any] = list(tensors)
        for place, (order, block) in self._described.items():
            made = arguments[place] = descriptor(arguments[place], order, block)
            self._templates[place] = descriptor_like(made, None)      # which keeps no tensor alive
        compiled = self._function[self._grid](*arguments, *self._integers, **self._constants, **self._options)
        if compiled is not None:
            watching = _watching.get()
            if watching is not None:
                taken, spilled = (getattr(compiled, name, None) or 0 for name in ("n_regs", "n_spills"))        # both in registers
                watching.append(Usage(taken, 4 * spilled))
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


_calls: dict[tuple[int, ...], list[Call]] = {}
"""What launches the kernels of a `Together`, by its number, the stream and the addresses: one store for all, so that it has one bound."""
_numbers = itertools.count()


class Together:
    """Kernels that run one after the other, each on some of the same tensors, given by their places among these.

    What launches all of them is kept by the addresses of the tensors and the stream: where memory is allocated as it was the last time, as it is
    from one training step to the next, nothing remains to be done but to launch.

    Args:
        launches: the kernels and the places of their tensors. device: where the tensors are, the current device at every call.
    """

    def __init__(self, launches: Sequence[tuple[Launch, Sequence[int]]], device: torch.device) -> None:
        self._launches, self._number = launches, next(_numbers)
        self._used = sorted({place for _, places in launches for place in places})
        self._index = device.index or 0
        self._direct = device.type == "cuda"
        """Whether direct launches may be had: Triton's are looked for on a GPU only, and no more where one kernel has none."""

    def __call__(self, tensors: Tensors) -> None:
        """Launch them on the current stream."""
        if self._direct:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            key = (self._number, stream, *[tensors[place].data_ptr() for place in self._used])  # type: ignore[union-attr]  # dropout comes with a seed
            calls = _calls.get(key) or self._ready(tensors, stream, key)
            if calls and not hooked():
                for run, arguments in calls:
                    run(*arguments)
                return
        for launch, places in self._launches:
            launch([tensors[place] for place in places])

    def _ready(self, tensors: Tensors, stream: int, key: tuple[int, ...]) -> list[Call]:
        """The calls for these tensors, kept; none where Triton has to launch one of the kernels, now or always."""
        calls: list[Call] = []
        for launch, places in self._launches:
            given = [tensors[place] for place in places]
            if not launch.is_known(given):
                return []
            call = launch.at_once(given, stream)
            if call is None:
                self._direct = False
                return []
            calls.append(call)
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = calls
        return calls
