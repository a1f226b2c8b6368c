"""One launch of a Triton function whose arguments are fixed but for the addresses of its tensors.

    launch = launcher(function, (n_tiles, 1, 1), [None, ((0, 1), (64, 128))], [n_queries, n_keys], {"BLOCK_M": 64}, {"num_warps": 4})
    launch([out, k])                                # k as a descriptor of boxes of 64 x 128

Triton looks a kernel up by the type, the divisibility and the value of every argument, at each call. Here all of that is fixed but for
where the tensors begin, so a kernel that was found is kept, and called as Triton itself would call it.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .direct import Direct, direct
from .reads import descriptor, descriptor_like

Launch = Callable[[Sequence["torch.Tensor | None"]], None]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a descriptor: the order in which it takes the tensor's dimensions, and the shape of its boxes."""


_on_the_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # type: ignore[attr-defined]


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a kernel writes all of, on a CPU or the current GPU: as inductor allocates, in a third of the time that `torch.empty` takes."""
    if device.type == "cuda" and _on_the_current_gpu is not None:
        return _on_the_current_gpu(shape, strides, dtype)  # type: ignore[no-any-return]
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def launcher(function: Any, grid: tuple[int, int, int], boxes: Sequence[Box | None], integers: Sequence[int],
             constants: Mapping[str, int], options: Mapping[str, int]) -> Launch:
    """Launches a Triton function whose parameters are tensors, integers and constants, in this order.

    Args:
        function: the `triton.jit` function.
        grid: its programs.
        boxes: for each tensor how it is described; None for an address.
        integers, constants: the values of the other parameters. options: Triton's own.
    """
    described = {n: box for n, box in enumerate(boxes) if box is not None}
    templates: dict[int, object] = {}
    rest = (*integers, *constants.values())
    known: dict[object, tuple[Callable[..., object], Direct | None]] = {}     # by which tensors do not begin at a multiple of 16 bytes; 0 where all do

    def first(tensors: Sequence[torch.Tensor | None], odd: object) -> None:
        """Triton finds the kernel, or makes it; the interpreter has none to keep."""
        arguments: list[Any] = list(tensors)
        for place, (order, block) in described.items():
            made = arguments[place] = descriptor(arguments[place], order, block)
            templates[place] = descriptor_like(made, None)      # which keeps no tensor alive
        compiled = function[grid](*arguments, *integers, **constants, **options)
        if compiled is not None:
            known[odd] = compiled[grid], direct(compiled, grid, tensors, tuple(described), describe, rest)

    def describe(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
        """The tensors, those that are described by descriptors."""
        arguments: list[Any] = list(tensors)
        for place, template in templates.items():
            arguments[place] = descriptor_like(template, tensors[place])
        return arguments

    def call(tensors: Sequence[torch.Tensor | None]) -> None:
        # A kernel that was found takes addresses as they are; of a tensor Triton asks for it and looks it up in the driver.
        addresses = [t.data_ptr() for t in tensors]  # type: ignore[union-attr]  # dropout comes with a seed
        odd = functools.reduce(operator.or_, addresses) & 15 and tuple([address & 15 != 0 for address in addresses])
        found = known.get(odd)
        if found is None:
            return first(tensors, odd)
        run, at_once = found
        if at_once is None or not at_once(addresses, tensors):
            run(*[x if n in described else address for n, (x, address) in enumerate(zip(describe(tensors), addresses, strict=True))], *rest)
        return None

    return call
