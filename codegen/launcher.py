"""One launch of a Triton function whose arguments are fixed but for the addresses of its tensors.

    launch = launcher(function, (n_tiles, 1, 1), [(), (64, 128)], [n_queries, n_keys], {"BLOCK_M": 64}, {"num_warps": 4})
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

from .reads import descriptor, descriptor_like

Launch = Callable[[Sequence["torch.Tensor | None"]], None]


def launcher(function: Any, grid: tuple[int, int, int], blocks: Sequence[tuple[int, ...]], integers: Sequence[int],
             constants: Mapping[str, int], options: Mapping[str, int]) -> Launch:
    """Launches a Triton function whose parameters are tensors, integers and constants, in this order.

    Args:
        function: the `triton.jit` function.
        grid: its programs.
        blocks: for each tensor the box of its descriptor; empty for an address.
        integers, constants: the values of the other parameters. options: Triton's own.
    """
    boxes = [(n, block) for n, block in enumerate(blocks) if block]
    templates: dict[int, object] = {}
    rest = (*integers, *constants.values())
    known: dict[object, Callable[..., object]] = {}     # by which tensors do not begin at a multiple of 16 bytes; 0 where all do

    def first(tensors: Sequence[torch.Tensor | None], odd: object) -> None:
        """Triton finds the kernel, or makes it; the interpreter has none to keep."""
        arguments: list[Any] = list(tensors)
        for place, block in boxes:
            made = arguments[place] = descriptor(arguments[place], block)
            templates[place] = descriptor_like(made, None)      # which keeps no tensor alive
        compiled = function[grid](*arguments, *integers, **constants, **options)
        if compiled is not None:
            known[odd] = compiled[grid]

    def call(tensors: Sequence[torch.Tensor | None]) -> None:
        # A kernel that was found takes addresses as they are; of a tensor Triton asks for it and looks it up in the driver.
        arguments: list[Any] = [t.data_ptr() for t in tensors]  # type: ignore[union-attr]  # dropout comes with a seed
        odd = functools.reduce(operator.or_, arguments) & 15 and tuple([address & 15 != 0 for address in arguments])
        run = known.get(odd)
        if run is None:
            return first(tensors, odd)
        for place, template in templates.items():
            arguments[place] = descriptor_like(template, tensors[place])
        run(*arguments, *rest)
        return None

    return call
