"""Direct launches hand the function in C what Triton would: Triton's own launcher, with a function in C that notes its arguments."""
from __future__ import annotations

import gc
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia

from attnfuse.codegen import direct as module
from attnfuse.codegen.direct import direct
from attnfuse.codegen.launcher import launcher
from attnfuse.codegen.reads import descriptor

GRID = (3, 1, 1)
STREAM, FUNCTION, PACKED = 77, 88, ("packed", 1)
BOX = ((0, 1), (16, 8))


class InC:
    """The function in C; notes what it is launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.launched.append(args)


class Map:
    """A tensor's map as Triton has it: of a type of its own."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Map) and other.address == self.address

    __hash__ = None  # type: ignore[assignment]


class Compiled:
    """A kernel as Triton keeps it, with Triton's own launcher: (out_ptr, k_desc, v_desc, n, BLOCK), or without descriptors."""

    def __init__(self, described: bool = True, scratch: int = 0) -> None:
        self.in_c = InC()
        signature = {"out_ptr": "*fp32"} | ({"k_desc": "tensordesc<fp16[16, 8]>", "v_desc": "tensordesc<fp16[16, 8]>"} if described else {})
        signature |= {"n": "i32", "BLOCK": "constexpr"}
        meta = [{}, {}] if described else None
        self.src = types.SimpleNamespace(signature=signature)
        self.metadata = types.SimpleNamespace(global_scratch_size=scratch, profile_scratch_size=0, tensordesc_meta=meta)
        self.function, self.packed_metadata, self.name = FUNCTION, PACKED, "kernel"
        self.run = object.__new__(nvidia.CudaLauncher)
        vars(self.run).update(num_ctas=1, global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
                              launch_cooperative_grid=False, launch_pdl=False, gsan_enabled=False, arg_annotations=["a"], kernel_signature=b"s",
                              launch=nvidia.wrap_handle_tensordesc(self.in_c, signature, meta))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.run(*grid, STREAM, FUNCTION, PACKED, None, None, None, *args)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that is not there; the addresses of which maps were made."""
    found: list[int] = []

    def fill(described: Any, *_: Any) -> list[Any]:
        found.append(described.base.data_ptr())
        return [Map(found[-1]), *described.shape, *described.strides]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", fill)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(type(triton.runtime.driver), "active", types.SimpleNamespace(allocate_default_profile_scratch=lambda *_: None))
    return found


def tensors(described: bool = True) -> list[torch.Tensor]:
    return [torch.empty(8), *(torch.empty(32, 8, dtype=torch.float16) for _ in range(2 * described))]


def describe(given: Sequence[Any]) -> list[Any]:
    return [given[0], *(descriptor(t, *BOX) for t in given[1:])]


@pytest.mark.parametrize("described", (False, True))
def test_the_same_arguments_as_triton_hands_over(described: bool, made: list[int]) -> None:
    compiled = Compiled(described)
    first, second = tensors(described), tensors(described)
    launch = direct(compiled, GRID, first, (1, 2) if described else (), describe, (1000, 64))
    assert launch is not None and not compiled.in_c.launched, "preparing launches nothing"
    for given in (first, second, second, first):
        assert launch([t.data_ptr() for t in given], given)
        compiled[GRID](given[0].data_ptr(), *describe(given)[1:], 1000, 64)
    launched = compiled.in_c.launched
    assert len(launched) == 8
    for ours, theirs in zip(launched[::2], launched[1::2], strict=True):
        assert ours == theirs and STREAM in ours
    assert launched[0] != launched[2], "another call's addresses"


def test_a_map_is_made_once_for_each_address(made: list[int]) -> None:
    compiled = Compiled()
    first, second = tensors(), tensors()
    launch = direct(compiled, GRID, first, (1, 2), describe, (1000, 64))
    assert launch is not None
    made.clear()
    for given in (first, second, first, second, [first[0], second[1], first[2]]):
        launch([t.data_ptr() for t in given], given)
    assert len(made) == 6, "three pairs"
    maps = [[x.address for x in _flat(args) if isinstance(x, Map)] for args in compiled.in_c.launched]
    assert maps[0] == maps[2] == [t.data_ptr() for t in first[1:]] and maps[4] == [second[1].data_ptr(), first[2].data_ptr()]
    alive = [weakref.ref(t) for t in (*first, *second)]
    del first, second, given
    compiled.in_c.launched.clear()
    gc.collect()
    assert not any(x() for x in alive), "maps keep no tensor"


def _flat(values: Sequence[Any]) -> list[Any]:
    return [y for x in values for y in (_flat(x) if isinstance(x, (tuple, list)) else [x])]


def test_maps_do_not_pile_up(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_MAPS", 2)
    compiled, keep = Compiled(), [tensors() for _ in range(3)]
    launch = direct(compiled, GRID, keep[0], (1, 2), describe, (1000, 64))
    assert launch is not None
    for given in (*keep, *keep):
        launch([t.data_ptr() for t in given], given)
        (maps,) = [[x.address for x in _flat(args) if isinstance(x, Map)] for args in compiled.in_c.launched[-1:]]
        assert maps == [t.data_ptr() for t in given[1:]]


def test_launches_do_not_share_their_arguments() -> None:
    """As if another thread launched the same kernel while the function in C reads."""
    compiled, first, second = Compiled(False), tensors(False), tensors(False)
    launch = direct(compiled, GRID, first, (), describe, (1000, 64))
    assert launch is not None
    inside = InC()

    def interrupted(*args: Any) -> None:
        if not inside.launched:
            inside.launched.append(())
            launch([t.data_ptr() for t in second], second)
        inside.launched.append(tuple(_flat(args)))

    compiled.in_c.__class__ = type("Interrupted", (InC,), {"__call__": lambda self, *args: interrupted(*args)})
    launch([t.data_ptr() for t in first], first)
    assert second[0].data_ptr() in inside.launched[1] and first[0].data_ptr() in inside.launched[2]


def test_threads_keep_their_own_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two make maps at one time: both have been handed their arguments before either looks."""
    compiled, given = Compiled(), [tensors(), tensors()]
    launch = direct(compiled, GRID, given[0], (1, 2), describe, (1000, 64))
    assert launch is not None
    together, real = threading.Barrier(2, timeout=30), nvidia.CudaLauncher.__call__

    def wait(self: Any, *args: Any) -> None:
        real(self, *args)
        together.wait()

    with monkeypatch.context() as patch:
        patch.setattr(nvidia.CudaLauncher, "__call__", wait)
        threads = [threading.Thread(target=launch, args=([t.data_ptr() for t in x], x)) for x in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for own in given:                           # what was kept
        launch([t.data_ptr() for t in own], own)
        assert [x.address for x in _flat(compiled.in_c.launched[-1]) if isinstance(x, Map)] == [t.data_ptr() for t in own[1:]]


def test_while_somebody_hooks_into_launches_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, given = Compiled(), tensors()
    launch = direct(compiled, GRID, given, (1, 2), describe, (1000, 64))
    assert launch is not None
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, name, lambda metadata: None)
            assert not launch([t.data_ptr() for t in given], given)
    assert not compiled.in_c.launched and launch([t.data_ptr() for t in given], given)


def test_what_is_not_as_expected_is_launched_by_triton() -> None:
    given = tensors()
    assert direct(Compiled(scratch=128), GRID, given, (1, 2), describe, (1000, 64)) is None
    assert direct(Compiled(), GRID, given, (1,), describe, (1000, 64)) is None, "as many maps as descriptors"
    assert direct(types.SimpleNamespace(name="of another kind"), GRID, given, (1, 2), describe, (1000, 64)) is None
    other = Compiled()
    other.run.__class__ = type("Other", (nvidia.CudaLauncher,), {})
    assert direct(other, GRID, given, (1, 2), describe, (1000, 64)) is None


@pytest.mark.parametrize("scratch", (0, 128))
def test_a_launcher_gives_both_the_same(scratch: int) -> None:
    """The whole of a launch, direct or not, first and later."""
    compiled = Compiled(scratch=scratch)
    function = {GRID: lambda *args, **options: compiled}
    call = launcher(function, GRID, [None, BOX, BOX], [1000], {"BLOCK": 64}, {"num_warps": 4})
    if scratch:                          # it would allocate on the device
        compiled.run.global_scratch_size = 0
    first, second = tensors(), tensors()
    for given in (first, second, first):
        call(given)
    assert len(compiled.in_c.launched) == 2
    for args, given in zip(compiled.in_c.launched, (second, first), strict=True):
        flat = _flat(args)
        assert [x.address for x in flat if isinstance(x, Map)] == [t.data_ptr() for t in given[1:]] and given[0].data_ptr() in flat
