"""A call like an earlier one: nothing is analysed, planned, parsed or compared again, whatever may change between calls still counts.

The kernels are not run here; everything around them is.
"""
from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attnfuse
from attnfuse import ops, tilemap
from attnfuse.codegen import launch, launch_backward, launch_weights, tile_map
from attnfuse.codegen.launcher import Launch, empty
from attnfuse.settings import NAMES, current, in_force
from tests.specs import BY_NAME, Case, Shape, with_map

MEANING = ("/sympy/", "/json/", "/dataclasses.py", "/attnfuse/program.py", "/attnfuse/algebra.py", "/attnfuse/intervals.py", "/attnfuse/ranges.py",
           "/attnfuse/adjoint.py", "/attnfuse/tuning.py", "/attnfuse/settings.py", "/codegen/")
"""Whose functions belong into the first call, but for `AT_EVERY_CALL`."""
AT_EVERY_CALL = {
    "launch.py": {"forward", "backward", "weights", "tile_map", "aligned", "where", "run", "_allocate", "<listcomp>", "<genexpr>"},
    "launch_backward.py": {"backward", "run", "_run", "_made", "_sums", "_gradient", "<listcomp>", "<genexpr>", "<dictcomp>"},
    "launch_weights.py": {"weights", "run", "_launch", "_allocate", "<lambda>", "<listcomp>"},
    "tile_map.py": {"launch", "run", "<listcomp>", "<genexpr>"},
    "launcher.py": {"__call__", "_describe", "_odd", "empty", "<listcomp>"},
    "reads.py": {"descriptor_like"},
    "sums.py": {"add"},
}


class Found:
    """A kernel as Triton keeps it; notes what it is launched on."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.launched.append(args)


class Function:
    """A `triton.jit` function that compiles nothing; counts how often it is asked for a kernel."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.kernel = Found()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Found]:
        def find(*args: Any, **constants: int) -> Found:
            self.asked.append(args)
            return self.kernel
        return find


def as_on_a_gpu(shape: object, strides: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Where memory is allocated by a function that takes tuples of integers and nothing else."""
    for given in (shape, strides):
        assert type(given) is tuple and all(type(n) is int for n in given), given
    return empty(shape, strides, dtype, device)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers believe that there is a device; kernels are neither written nor run."""
    monkeypatch.setattr(launch, "interpreting", lambda: True)
    for module in (launch, launch_backward, launch_weights):
        monkeypatch.setattr(module, "function", lambda *_: Function())
    monkeypatch.setattr(tile_map, "_module", lambda *_: types.SimpleNamespace(tiles_of_mask=Function(), list_tiles=Function()))
    for module in (launch, launch_backward, tile_map):
        monkeypatch.setattr(module, "empty", as_on_a_gpu)
    for module, name in ((launch, "_runs"), (launch_backward, "_runs"), (tile_map, "_runs"), (launch_weights, "_ladders")):
        monkeypatch.setattr(module, name, {})


def strangers(call: Callable[[], object]) -> set[str]:
    """Which functions that belong into a first call run in this one."""
    found: set[str] = set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        path, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if event == "call" and any(part in path for part in MEANING) and name not in AT_EVERY_CALL.get(path.rsplit("/", 1)[-1], ()):
            found.add(f"{path.rsplit('/', 1)[-1]}:{name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found - {"spec.py:__hash__"}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Backward on the thread that is watched."""
    before = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    yield
    torch.autograd.set_multithreading_enabled(before)


CASES = [BY_NAME[n] for n in ("causal_inf", "window_min", "causal_padding_min", "bias_per_head", "alibi_causal", "rows_and_columns", "grouped",
                              "dropout", "segments", "prefix")]
"""With buffers for rows without keys; reads that are gradients as they stand, and that are summed as views."""


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("maps", (False, True))
def test_forward_and_backward(case: Case, maps: bool, seed: int, one_thread: None) -> None:
    operands, sizes = case.inputs(Shape((2, 2), 70, 70), torch.float32, seed)
    spec = case.spec()
    if maps and tilemap.mapped(spec) is None:
        pytest.skip("nothing to map")
    if maps:
        spec, operands = with_map(spec, operands, sizes)
    learned = [t.requires_grad_() for t in operands if t.is_floating_point()]
    text, drop = spec.to_json(), torch.tensor([seed]) if spec.dropouts else None

    def step() -> None:
        out, _ = torch.ops.attnfuse.attention(operands, sizes, drop, text)
        torch.autograd.grad(out, learned, torch.ones_like(out))

    with ops.force_executor("triton"):
        step()
        assert not strangers(step)


def test_a_map(seed: int) -> None:
    case = BY_NAME["segments"]
    operands, sizes = case.inputs(Shape((2, 2), 300, 300), torch.float32, seed)
    found = tilemap.mapped(case.spec())
    assert found is not None
    named, text = dict(zip(case.spec().size_names, sizes, strict=True)), found.mask.to_json()

    def step() -> None:
        mask = tilemap.Mask.from_json(text)
        launch.tile_map(mask, [operands[n] for n in found.sources], [named[n] for n in mask.size_names], torch.device("cpu"))

    step()
    assert not strangers(step)


def test_weights(seed: int) -> None:
    case = BY_NAME["causal_padding_min"]
    operands, sizes = case.inputs(Shape((2, 2), 70, 70), torch.float32, seed)
    stats = torch.zeros(2, 2, 70, 2)
    spec = case.spec()
    step = lambda: launch.weights(spec, operands, stats, sizes)
    step()
    assert not strangers(step)


def test_a_first_call_is_seen(seed: int) -> None:
    """What the other tests would miss if nothing were watched."""
    case = BY_NAME["causal_padding_min"]
    operands, sizes = case.inputs(Shape(), torch.float32, seed)
    seen = strangers(lambda: launch.forward(case.spec(), operands, sizes))
    assert {"program.py:walk", "launch.py:_prepare", "dataclasses.py:replace"} <= seen


# ---- what may change from call to call

def shifted(count: int) -> torch.Tensor:
    """`count` numbers that begin 4 bytes beyond a multiple of 16."""
    return torch.empty(count + 5)[1:count + 1]


def test_a_kernel_is_kept_for_each_alignment() -> None:
    """Triton compiles for tensors that begin at a multiple of 16 bytes: such a kernel must not meet others."""
    function = Function()
    call = Launch(function, (3, 1, 1), [None, None], [7, 1], {"BLOCK": 64}, {"num_warps": 4})
    even, odd = torch.empty(8), shifted(8)
    assert even.data_ptr() % 16 == 0 != odd.data_ptr() % 16
    for tensors in ((even, even), (even, even), (even, odd), (odd, even), (even, odd), (odd, even)):
        call(tensors)
    assert [[t.data_ptr() for t in asked[:2]] for asked in function.asked] == [[t.data_ptr() for t in x] for x in ((even, even), (even, odd), (odd, even))]
    assert function.kernel.launched[0] == (even.data_ptr(), even.data_ptr(), 7, 1, 64), "addresses, integers, constants"
    assert len(function.kernel.launched) == 3


def test_every_call_describes_its_own_tensors() -> None:
    function = Function()
    call = Launch(function, (3, 1, 1), [None, ((0, 1), (16, 8))], [], {}, {})
    first, second, out = torch.zeros(32, 8, dtype=torch.float16), torch.zeros(32, 8, dtype=torch.float16), torch.zeros(8)
    call((out, first))
    call((out, second))
    (launched,) = function.kernel.launched
    assert launched[1].base is second and list(launched[1].shape) == [32, 8] and list(launched[1].block_shape) == [16, 8]
    alive = weakref.ref(first), weakref.ref(second)
    function.asked.clear()
    function.kernel.launched.clear()
    del first, second, launched
    gc.collect()
    assert [x() for x in alive] == [None, None], "no launcher keeps a tensor"


def test_other_layouts_are_prepared_anew(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape, strides, alignment, sizes, and what the user allows of TF32."""
    case = BY_NAME["plain"]
    prepared: list[object] = []
    prepare = launch._prepare
    monkeypatch.setattr(launch, "_prepare", lambda *args: prepared.append(args) or prepare(*args))
    spec = case.spec()
    (q, k, v), sizes = case.inputs(Shape((1, 2), 16, 16), torch.float32, seed)
    run = lambda *tensors: launch.forward(spec, tensors, sizes)
    for _ in range(2):
        run(q, k, v)
    assert len(prepared) == 1
    run(q, k.mT.contiguous().mT, v)
    run(q, k, shifted(v.numel()).view(v.shape))
    assert len(prepared) == 3
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = not before
        run(q, k, v)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(prepared) == 4


def test_a_seed_or_a_mask_on_another_device_does_not_meet_a_known_kernel(seed: int) -> None:
    """It would read whatever lies at that address on its own device."""
    case, sizes = BY_NAME["dropout"], BY_NAME["dropout"].inputs(Shape((1, 2), 16, 16), torch.float32, seed)[1]
    operands, spec = case.inputs(Shape((1, 2), 16, 16), torch.float32, seed)[0], case.spec()
    out, stats = launch.forward(spec, operands, sizes, torch.tensor([1]))
    runs = {launch: lambda drop: launch.forward(spec, operands, sizes, drop),
            launch_backward: lambda drop: launch.backward(spec, out, operands, out, stats, sizes, drop, [True] * 3)}
    for module, run in runs.items():
        run(torch.tensor([1]))
        run(torch.tensor([2]))
        assert len(module._runs) == 1
        run(torch.tensor([2], device="meta"))
        assert len(module._runs) == 2
        with pytest.raises(ValueError, match="seed"):
            run(None)
    found = tilemap.mapped(BY_NAME["padding"].spec())
    assert found is not None
    mask = torch.ones(2, 300, dtype=torch.bool)
    launch.tile_map(found.mask, [mask], [2, 300, 300], mask.device)
    with pytest.raises(ValueError, match="on meta"):
        launch.tile_map(found.mask, [mask.to("meta")], [2, 300, 300], mask.device)


def test_a_setting_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks within the environment within the defaults, each at once."""
    agree = lambda: all(in_force(name) == getattr(current(), name) for name in NAMES)
    assert in_force("executor") == "auto" and agree()
    monkeypatch.setenv("ATTNFUSE_EXECUTOR", "torch")
    assert in_force("executor") == "torch" and agree()
    with attnfuse.settings(executor="triton"), attnfuse.settings(strict=True):
        assert in_force("executor") == "triton" and in_force("strict") is True and agree()
        with attnfuse.settings(executor="auto"):
            assert in_force("executor") == "auto" and agree()
        assert in_force("executor") == "triton"
    monkeypatch.setenv("ATTNFUSE_EXECUTOR", "fastest")
    for _ in range(2):
        with pytest.raises(ValueError, match="ATTNFUSE_EXECUTOR='fastest' in the environment"):
            in_force("executor")
    monkeypatch.delenv("ATTNFUSE_EXECUTOR")
    assert in_force("executor") == "auto" and not strangers(lambda: in_force("executor")) - {"settings.py:in_force"}
