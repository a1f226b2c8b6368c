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
from attnfuse.codegen import launcher
from attnfuse.codegen.launcher import Launch, Together
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
    monkeypatch.setattr(launcher, "_calls", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(type(triton.runtime.driver), "active", types.SimpleNamespace(allocate_default_profile_scratch=lambda *_: None))
    return found


def tensors(described: bool = True) -> list[torch.Tensor]:
    return [torch.empty(8), *(torch.empty(32, 8, dtype=torch.float16) for _ in range(2 * described))]


def run(made: Any, given: Sequence[torch.Tensor], stream: int = STREAM) -> None:
    """Launch by the call that was made for these tensors."""
    function, arguments = made([t.data_ptr() for t in given], given, stream)
    function(*arguments)


def describe(given: Sequence[Any]) -> list[Any]:
    return [given[0], *(descriptor(t, *BOX) for t in given[1:])]


@pytest.mark.parametrize("described", (False, True))
def test_the_same_arguments_as_triton_hands_over(described: bool, made: list[int]) -> None:
    compiled = Compiled(described)
    first, second = tensors(described), tensors(described)
    call = direct(compiled, GRID, first, (1, 2) if described else (), describe, (1000, 64))
    assert call is not None and not compiled.in_c.launched, "preparing launches nothing"
    for given in (first, second, second, first):
        run(call, given)
        compiled[GRID](given[0].data_ptr(), *describe(given)[1:], 1000, 64)
    launched = compiled.in_c.launched
    assert len(launched) == 8
    for ours, theirs in zip(launched[::2], launched[1::2], strict=True):
        assert ours == theirs and STREAM in ours
    assert launched[0] != launched[2], "another call's addresses"


def test_a_map_is_made_once_for_each_address(made: list[int]) -> None:
    compiled = Compiled()
    first, second = tensors(), tensors()
    call = direct(compiled, GRID, first, (1, 2), describe, (1000, 64))
    assert call is not None
    made.clear()
    for given in (first, second, first, second, [first[0], second[1], first[2]]):
        run(call, given)
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
    call = direct(compiled, GRID, keep[0], (1, 2), describe, (1000, 64))
    assert call is not None
    for given in (*keep, *keep):
        run(call, given)
        (maps,) = [[x.address for x in _flat(args) if isinstance(x, Map)] for args in compiled.in_c.launched[-1:]]
        assert maps == [t.data_ptr() for t in given[1:]]


def test_calls_do_not_share_their_arguments() -> None:
    """One that was made stays what it is, whatever is made after it: another thread may be launching it."""
    compiled, first, second = Compiled(False), tensors(False), tensors(False)
    call = direct(compiled, GRID, first, (), describe, (1000, 64))
    assert call is not None
    one, other = (call([t.data_ptr() for t in x], x, STREAM + n) for n, x in enumerate((first, second)))
    for given, stream, (function, arguments) in ((first, STREAM, one), (second, STREAM + 1, other)):
        function(*arguments)
        flat = _flat(compiled.in_c.launched[-1])
        assert given[0].data_ptr() in flat and stream in flat


def test_threads_keep_their_own_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two make maps at one time: both have been handed their arguments before either looks."""
    compiled, given = Compiled(), [tensors(), tensors()]
    call = direct(compiled, GRID, given[0], (1, 2), describe, (1000, 64))
    assert call is not None
    together, real = threading.Barrier(2, timeout=30), nvidia.CudaLauncher.__call__

    def wait(self: Any, *args: Any) -> None:
        real(self, *args)
        together.wait()

    with monkeypatch.context() as patch:
        patch.setattr(nvidia.CudaLauncher, "__call__", wait)
        threads = [threading.Thread(target=run, args=(call, x)) for x in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for own in given:                           # what was kept
        run(call, own)
        assert [x.address for x in _flat(compiled.in_c.launched[-1]) if isinstance(x, Map)] == [t.data_ptr() for t in own[1:]]


def test_what_is_not_as_expected_is_launched_by_triton() -> None:
    given = tensors()
    assert direct(Compiled(scratch=128), GRID, given, (1, 2), describe, (1000, 64)) is None
    assert direct(Compiled(), GRID, given, (1,), describe, (1000, 64)) is None, "as many maps as descriptors"
    assert direct(types.SimpleNamespace(name="of another kind"), GRID, given, (1, 2), describe, (1000, 64)) is None
    other = Compiled()
    other.run.__class__ = type("Other", (nvidia.CudaLauncher,), {})
    assert direct(other, GRID, given, (1, 2), describe, (1000, 64)) is None


class Function:
    """A `triton.jit` function; counts how often it was asked for its kernel."""

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.asked = compiled, 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def find(*args: Any, **options: Any) -> Any:
            self.asked += 1
            return self.compiled
        return find


GPU = torch.device("cuda", 0)


def together(*kernels: Compiled, device: torch.device = GPU) -> Together:
    """Kernels of (out, k, v), launched one after the other on (v, out, k, something else)."""
    launches = [Launch(Function(x), GRID, [None, BOX, BOX], [1000], {"BLOCK": 64}, {"num_warps": 4}) for x in kernels]
    return Together([(x, (1, 2, 0)) for x in launches], device)


def given_to(launched: tuple[Any, ...], given: Sequence[torch.Tensor]) -> bool:
    """Whether a kernel was launched on (out, k, v)."""
    flat = _flat(launched)
    return [x.address for x in flat if isinstance(x, Map)] == [t.data_ptr() for t in given[1:]] and given[0].data_ptr() in flat


def mixed(given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return [given[2], given[0], given[1], None]


@pytest.mark.parametrize("scratch", (0, 128))
def test_a_launcher_gives_both_the_same(scratch: int) -> None:
    """The whole of a launch, direct or not, first and later."""
    kernels = Compiled(scratch=scratch), Compiled()
    launch = together(*kernels)
    for compiled in kernels:                          # which would allocate on the device
        compiled.run.global_scratch_size = 0
    first, second = tensors(), tensors()
    for given in (first, second, first, second):
        launch(mixed(given))
    for compiled in kernels:
        assert len(compiled.in_c.launched) == 3, "the first call is Triton's, which is not there"
        assert all(map(given_to, compiled.in_c.launched, (second, first, second)))


def test_what_launches_is_kept_by_addresses_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that lies where it lay, on the same stream, asks for nothing but launches."""
    kernels, (first, second) = (Compiled(), Compiled()), (tensors() for _ in range(2))
    launch = together(*kernels)
    for given in (first, first, second):
        launch(mixed(given))
    made = []
    original = Launch.at_once
    monkeypatch.setattr(Launch, "at_once", lambda *args: made.append(args) or original(*args))
    for given in (first, second, first):
        launch(mixed(given))
    assert not made
    launch(mixed([first[0], second[1], first[2]]))
    assert len(made) == 2, "both kernels"
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM + 1)
    launch(mixed(first))
    assert len(made) == 4
    for compiled in kernels:
        *_, last = compiled.in_c.launched
        assert given_to(last, first) and STREAM + 1 in _flat(last) and STREAM not in _flat(last)


def test_calls_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all layouts together; and what one keeps no other takes."""
    monkeypatch.setattr(launcher, "_MOST_CALLS", 2)
    kernels, every = (Compiled(), Compiled()), [tensors() for _ in range(3)]
    launches = [together(x) for x in kernels]
    for given in (*every, *every):
        for compiled, launch in zip(kernels, launches, strict=True):
            launch(mixed(given))
            assert not compiled.in_c.launched or given_to(compiled.in_c.launched[-1], given)
            assert len(launcher._calls) <= 2
    assert [len(x.in_c.launched) for x in kernels] == [5, 5]


def test_a_tensor_that_begins_elsewhere_is_another_kernel() -> None:
    """What was kept for tensors that begin at multiples of 16 bytes must not meet another."""
    compiled, given = Compiled(), tensors()
    launch = together(compiled)
    (one, _), = launch._launches
    odd = [torch.empty(13)[1:9], *given[1:]]
    assert odd[0].data_ptr() % 16 and not given[0].data_ptr() % 16
    for x in (given, given, odd, odd, given):
        launch(mixed(x))
    assert one._function.asked == 2 and len(compiled.in_c.launched) == 3
    assert all(map(given_to, compiled.in_c.launched, (given, odd, given)))


def test_while_somebody_hooks_into_launches_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, given = Compiled(), tensors()
    launch = together(compiled)
    (one, _), = launch._launches
    by_triton: list[Any] = []
    for _ in range(2):
        launch(mixed(given))
    (kernel, at_once), = one._kernels.values()
    one._kernels[0] = (lambda *args: by_triton.append(args)), at_once
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, name, lambda metadata: None)
            launch(mixed(given))
    assert len(by_triton) == 2 and len(compiled.in_c.launched) == 1
    launch(mixed(given))
    assert len(by_triton) == 2 and len(compiled.in_c.launched) == 2


def test_without_a_gpu_nothing_is_kept() -> None:
    """As in the interpreter: there is no stream to ask for."""
    compiled, given = Compiled(), tensors()
    launch = together(compiled, device=torch.device("cpu"))
    for _ in range(3):
        launch(mixed(given))
    assert not launcher._calls and len(compiled.in_c.launched) == 2


def test_where_triton_has_to_launch_one_it_launches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not looked past again."""
    kernels, given = (Compiled(), Compiled(scratch=128)), tensors()
    launch = together(*kernels)
    launch(mixed(given))
    kernels[1].run.global_scratch_size = 0            # it would allocate on the device
    made: list[Any] = []
    original = Launch.at_once
    monkeypatch.setattr(Launch, "at_once", lambda *args: made.append(args) or original(*args))
    for _ in range(3):
        launch(mixed(given))
    assert len(made) == 2 and not launcher._calls
    for compiled in kernels:
        assert len(compiled.in_c.launched) == 3 and all(given_to(x, given) for x in compiled.in_c.launched)
