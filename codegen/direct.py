"""A launch of a compiled Triton kernel without what Triton does again at every launch.

Before its launching function in C, Triton asks for the device, makes metadata and calls hooks that nobody set, and encodes the map of every
tensor that is read by boxes: tens of microseconds of Python for each of the five kernels of a forward and backward pass. Here Triton is asked
once what it hands to that function, with marks in place of what changes from call to call: the stream, the addresses, the maps. A map depends
on nothing but the address, so those that were made are kept. Nothing here knows the order of those arguments, which differs between Triton's
versions; where anything is not as expected, Triton goes on launching. So it has to while a profiler hooks into launches (`hooked`).
"""
from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

log = logging.getLogger("attnfuse")

Describe = Callable[[Sequence["torch.Tensor | None"]], list[Any]]
Call = tuple[Callable[..., object], tuple[object, ...]]
"""A launching function in C, and what launches a kernel on certain tensors on a certain stream; may be called again and by many threads."""
Direct = Callable[[Sequence[int], Sequence["torch.Tensor | None"], int], Call]
"""The call for tensors, given with their addresses, on a stream."""
_MOST_MAPS = 4096


class _Mark:
    """Stands where a stream or an address will."""


def hooked() -> bool:
    """Whether somebody, such as a profiler, hooks into Triton's launches, which must be Triton's then."""
    runtime = _runtime()
    return not (_idle(runtime.launch_enter_hook) and _idle(runtime.launch_exit_hook))


@functools.cache
def _runtime() -> Any:
    from triton import knobs
    return knobs.runtime


def _idle(hook: Any) -> bool:
    """Whether nobody hooks into launches: None, or a chain without calls."""
    return hook is None or not getattr(hook, "calls", True)


def direct(compiled: Any, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor | None], described: Sequence[int], describe: Describe,
           rest: Sequence[object]) -> Direct | None:
    """Makes direct launches of a kernel that Triton has launched on these tensors; None where Triton has to launch it.

    Args:
        compiled: what a `triton.jit` function returned. grid: its programs.
        tensors: the first arguments of the kernel. rest: the others, which do not change.
        described: which tensors are described. describe: the first arguments with the descriptors of these.
    """
    try:
        return _direct(compiled, grid, tensors, described, describe, rest)
    except Exception:                   # another version, device or launcher: nothing is lost but the time
        log.debug("no direct launch of %s", getattr(compiled, "name", compiled), exc_info=True)
        return None


def _direct(compiled: Any, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor | None], described: Sequence[int], describe: Describe,
            rest: Sequence[object]) -> Direct:
    from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

    launcher, metadata = compiled.run, compiled.metadata
    more = metadata.global_scratch_size or metadata.profile_scratch_size or getattr(launcher, "gsan_enabled", False)
    if type(launcher) is not CudaLauncher or more:
        raise ValueError("a launcher that does more than launch")

    def handed(arguments: Sequence[object]) -> tuple[list[Any], list[Any]]:
        """What the function in C gets: everything, and the kernel's own arguments, which newer versions pass as one, the last."""
        seen: list[tuple[Any, ...]] = []         # of this call alone: others may be at it in other threads
        recorder = copy.copy(launcher)
        recorder.launch = wrap_handle_tensordesc(lambda *args: seen.append(args), compiled.src.signature, getattr(metadata, "tensordesc_meta", None))
        recorder(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *rest)
        everything = list(seen.pop())
        return everything, list(everything[-1]) if isinstance(everything[-1], (tuple, list)) else everything

    stream, marks = _Mark(), {n: _Mark() for n in range(len(tensors)) if n not in described}
    everything, own = handed([marks.get(n, x) for n, x in enumerate(describe(tensors))])
    apart = own is not everything
    at_stream = _place(everything, stream)
    at_address = [(n, _place(own, mark)) for n, mark in marks.items()]
    at_map = [n for n, x in enumerate(own) if _is_map(x)]
    if len(at_map) != len(described):
        raise ValueError(f"{len(at_map)} maps of {len(described)} tensors")
    run = _in_c(launcher.launch)
    maps: dict[tuple[int, ...], list[object]] = {}

    def call(addresses: Sequence[int], tensors: Sequence[torch.Tensor | None], on: int) -> Call:
        now = own.copy()                # another thread may be at it too
        if at_map:
            key = tuple([addresses[n] for n in described])
            found = maps.get(key)
            if found is None:
                if len(maps) >= _MOST_MAPS:
                    maps.clear()
                made = handed(describe(tensors))[1]
                found = maps[key] = [made[place] for place in at_map]
            for n, place in enumerate(at_map):
                now[place] = found[n]
        for n, place in at_address:
            now[place] = addresses[n]
        if apart:
            whole = everything.copy()
            whole[-1] = type(everything[-1])(now)
            now = whole
        now[at_stream] = on
        return run, tuple(now)

    return call


def _place(values: Sequence[object], mark: object) -> int:
    """Where a mark is; once and no more."""
    (place,) = [n for n, x in enumerate(values) if x is mark]
    return place


def _is_map(value: object) -> bool:
    """Whether an argument is a tensor's map, which is of a type of Triton's own: the rest are marks, numbers and metadata."""
    if isinstance(value, torch.Tensor):
        raise ValueError("a descriptor without a map")
    return not (value is None or isinstance(value, (_Mark, int, float, str, bytes, tuple, list)))


def _in_c(launch: Any) -> Callable[..., object]:
    """The function in C behind the one that encodes maps, or that function itself."""
    if not isinstance(launch, FunctionType):
        return launch  # type: ignore[no-any-return]
    held = [cell.cell_contents for cell in launch.__closure__ or ()]
    (found,) = [x for x in held if callable(x) and not isinstance(x, (FunctionType, type))]
    return found  # type: ignore[no-any-return]
