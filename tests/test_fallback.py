"""From the preferred plan to one that runs: plans that are refused, and kernels that spill registers, give way to others. Kernels are played on the CPU."""
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnfuse import ops
from attnfuse.codegen import fallback, launch, launch_backward, launch_weights, launcher, plan_forward, predict, space
from attnfuse.codegen.devices import device
from attnfuse.codegen.fallback import Steps
from attnfuse.codegen.jobs import Job
from attnfuse.codegen.launcher import Usage
from attnfuse.codegen.plan import KernelPlan, Request
from attnfuse.codegen.tiles import SMALLEST
from attnfuse.planning import Shape, spec_of
from attnfuse.reference import reference
from attnfuse.spec import AttentionSpec
from attnfuse.walker import backward as walked_backward, forward as walked
from tests import specs
from tests.specs import BY_NAME


class Instead(launch_backward.Bound):
    """What runs in place of a kernel, with the tensors by name."""

    def __call__(self, tensors: launch_backward.Named) -> None:
        self.launch(tensors)  # type: ignore[arg-type]

    def among(self, order: Sequence[object]) -> Any:
        return lambda tensors: self.launch(dict(zip(order, tensors, strict=True))), range(len(order))  # type: ignore[arg-type]


class Refusing:
    """Stands in for binding a plan: refuses the first so many plans, computes the others by the reference."""

    def __init__(self, refuse: Callable[[int], Exception | None]) -> None:
        self.refuse, self.tried = refuse, 0

    def check(self) -> None:
        self.tried += 1
        problem = self.refuse(self.tried)
        if problem is not None:
            raise problem


def out_of_resources() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300_000, 232_448, "shared memory")


REFUSALS: tuple[Callable[[], Exception], ...] = (out_of_resources, lambda: RuntimeError("PassManager::run failed"),
                                                 lambda: RuntimeError("Triton Error [CUDA]: out of resource"))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Causal attention on the CPU that the launcher takes for a GPU, its operands, sizes and result."""
    monkeypatch.setattr(launch, "interpreting", lambda: True)
    monkeypatch.setattr(launch, "function", lambda *_: None)
    monkeypatch.setattr(launch, "_runs", {})
    monkeypatch.setattr(launch_backward, "_runs", {})
    monkeypatch.setattr(ops, "_said", set())
    case = BY_NAME["causal_inf"]
    operands, sizes = case.inputs(specs.Shape(), torch.float32, 0)
    spec = case.spec()
    return spec, operands, sizes, reference(spec, operands, sizes)


def binding(monkeypatch: pytest.MonkeyPatch, refusing: Refusing) -> None:
    """Let forward plans be bound by `refusing`."""
    def bind(function: object, kernel: object, plan: KernelPlan, spec: Any, sizes: Any, operands: Any) -> Any:
        def run(operands: Sequence[torch.Tensor], seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            refusing.check()
            return walked(spec, operands, sizes, seed)
        return run
    monkeypatch.setattr(launch, "bind", bind)


@pytest.mark.parametrize("problem", REFUSALS)
def test_a_refused_plan_gives_way_to_the_next(prepared: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, problem: Callable[[], Exception]) -> None:
    spec, operands, sizes, truth = prepared
    refusing = Refusing(lambda n: problem() if n == 1 else None)
    binding(monkeypatch, refusing)
    for _ in range(2):
        torch.testing.assert_close(launch.forward(spec, operands, sizes)[0], truth)
    assert refusing.tried == 3, "the refused plan is not tried again"


def test_where_every_plan_is_refused_the_walker_computes_and_it_is_said_once(prepared: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, operands, sizes, truth = prepared
    refusing = Refusing(lambda n: out_of_resources())
    binding(monkeypatch, refusing)
    plans = launch.plans(spec, operands, sizes, SMALLEST)
    with pytest.warns(UserWarning, match="tiled loop.*no plan of a kernel was accepted") as said:
        assert ops._generated("forward", spec, operands, sizes, None) is None
        assert ops._generated("forward", spec, operands, sizes, None) is None
    assert len(said) == 1 and refusing.tried == len(plans), "once each, and not again at the next call"


def test_other_failures_are_not_swallowed(prepared: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, operands, sizes, _ = prepared
    binding(monkeypatch, Refusing(lambda n: RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal"):
        launch.forward(spec, operands, sizes)
    assert not fallback.refused(RuntimeError("something else")) and not fallback.refused(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize("refused", [1, 10 ** 6])
def test_backward_climbs_down_too(prepared: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    spec, operands, sizes, truth = prepared
    out, stats = walked(spec, operands, sizes)
    grad_out = torch.randn_like(out)
    expected = walked_backward(spec, grad_out, operands, out, stats, sizes, None, [True] * 3)
    refusing = Refusing(lambda n: out_of_resources() if n <= refused else None)

    def bind(self: Any, job: Job, plan: KernelPlan, tensors: Any, operands: Any) -> Any:
        def run(now: Any) -> None:
            refusing.check()
            for name, gradient in zip(("grad_q", "grad_k", "grad_v"), expected, strict=True):
                if name in self._written(job):
                    now[name].copy_(gradient)
        return Instead(run, ())
    monkeypatch.setattr(launch_backward._Backward, "_bind", bind)
    arguments = (spec, grad_out, operands, out, stats, sizes, None, [True] * 3)
    if refused == 1:
        for found, right in zip(launch_backward.backward(*arguments), expected, strict=True):
            torch.testing.assert_close(found, right)
        assert refusing.tried == 4, "one of the first kernel's plans, and three kernels"
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert ops._generated("backward", *arguments) is None and ops._generated("backward", *arguments) is None
    assert len([w for w in said if "no plan of a kernel" in str(w.message)]) == 1


def test_kernels_that_ran_are_not_bound_again(prepared: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a later one is refused for good, every call comes to the first again."""
    spec, operands, sizes, _ = prepared
    out, stats = walked(spec, operands, sizes)
    bound: list[str] = []

    def bind(self: Any, job: Job, plan: KernelPlan, tensors: Any, operands: Any) -> Any:
        bound.append(job.kind)
        return Instead(lambda now: None if job.kind == "rows" else (_ for _ in ()).throw(out_of_resources()), ())
    monkeypatch.setattr(launch_backward._Backward, "_bind", bind)
    for _ in range(3):
        with pytest.raises(launch.Unsupported, match="no plan of a kernel was accepted"):
            launch_backward.backward(spec, out, operands, out, stats, sizes, None, [True] * 3)
    assert bound.count("rows") == 1


def test_refused_plans_of_weights_are_not_tried_again(prepared: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, operands, sizes, _ = prepared
    stats = walked(spec, operands, sizes)[1]
    refusing = Refusing(lambda n: out_of_resources())
    monkeypatch.setattr(launch_weights, "_ladders", {})
    monkeypatch.setattr(launch_weights._Ladder, "_bind", lambda *_: lambda now: refusing.check())
    for _ in range(2):
        with pytest.raises(launch.Unsupported, match="no plan of a kernel was accepted"):
            launch.weights(spec, operands, stats, sizes)
    assert refusing.tried == len(launch_weights.plans(spec, operands, sizes, SMALLEST))


# ---- spilled registers

class Spilling:
    """Kernels that spill what `bytes_of` says of their plan, beside `registers`; `tried` are the plans that ran."""

    def __init__(self, bytes_of: Callable[[KernelPlan], int], registers: int = 168) -> None:
        self.bytes_of, self.registers, self.tried = bytes_of, registers, list[KernelPlan]()

    def __call__(self, plan: KernelPlan) -> KernelPlan:
        found(self.bytes_of(plan), self.registers)
        self.tried.append(plan)
        return plan


def found(spilled: int, registers: int = 168) -> None:
    """What a launch does when it has found its kernel."""
    watching = launcher._watching.get()
    if watching is not None:
        watching.append(Usage(registers, spilled))


def asked(width: int, dtype: str, card: str) -> tuple[AttentionSpec, Request]:
    """A causal layer of 4096 tokens, and what a planner knows of its call."""
    shape = Shape(width, 4096, heads=16, batch=4, causal=True)
    spec = spec_of(shape, dtype)
    return spec, predict.assumed(spec, shape.sizes, device(card))


def steps_of(card: str = "a100", dtype: str = "bfloat16", width: int = 128) -> Steps:
    """A causal attention's forward plans."""
    spec, request = asked(width, dtype, card)
    return Steps(list(plan_forward.candidates(spec, request, device(card))), lambda plan: plan_forward.roomier(spec, request, device(card), plan))


def test_a_plan_that_spills_gives_way_to_the_first_that_does_not() -> None:
    steps = steps_of()
    first, roomier = steps.plans[0], steps.roomier(steps.plans[0])
    spilling = Spilling(lambda p: 4000 if p == first else 1600 if p == roomier[0] else 0)
    assert steps.first_that_runs(spilling) == roomier[1]
    assert spilling.tried == [first, *roomier[:2]] and steps.plans[0] == roomier[1]
    spilling.tried.clear()
    assert steps.first_that_runs(spilling) == roomier[1] and spilling.tried == [roomier[1]], "the one that spills is not tried again"


def test_a_few_registers_are_no_reason_for_smaller_tiles() -> None:
    """But for the same tile with all registers, where it did not have them."""
    for spilled, registers, tries in ((space.TOLERATED, 168, 2), (space.TOLERATED, 255, 1), (space.TOLERATED + 8, 255, 2)):
        steps = steps_of()
        spilling = Spilling(lambda p: spilled if p.shape == steps.plans[0].shape else 0, registers)
        steps.first_that_runs(spilling)
        assert len(set(spilling.tried)) == tries, (spilled, registers)
    steps = steps_of()
    roomier, spilling = steps.roomier(steps.plans[0]), Spilling(lambda p: 8 if not p.most_registers else 0)
    assert steps.first_that_runs(spilling) == roomier[0] and len(spilling.tried) == 2
    for spilled, tries in ((space.TOLERATED, 1), (space.TOLERATED + 8, 2)):         # so that two blocks share a processor
        steps = steps_of()
        steps.plans[0] = replace(steps.plans[0], most_registers=128)
        spilling = Spilling(lambda p: spilled if p.most_registers == 128 else 0, registers=128)
        steps.first_that_runs(spilling)
        assert len(spilling.tried) == tries, spilled


def test_where_all_spill_the_one_that_spills_least_runs_last() -> None:
    """So that what it wrote, and how, is what remains."""
    steps = steps_of()
    roomier = steps.roomier(steps.plans[0])
    spilling = Spilling(lambda p: 2000 if p == roomier[1] else 4000)
    assert steps.first_that_runs(spilling) == roomier[1]
    assert spilling.tried[-1] == roomier[1] and len(spilling.tried) == 2 + len(roomier)
    steps = steps_of()
    spilling = Spilling(lambda p: 4000)
    assert steps.first_that_runs(spilling) == spilling.tried[0] == spilling.tried[-1] and len(spilling.tried) == 2 + len(roomier)


@pytest.mark.parametrize("problem", [out_of_resources(), torch.OutOfMemoryError("CUDA out of memory"), ValueError("a text that the compiler had not said before")])
def test_a_roomier_plan_may_fail_of_anything(problem: Exception) -> None:
    """There is a result without it."""
    for succeeds in (True, False):
        steps = steps_of()
        first, roomier = steps.plans[0], steps.roomier(steps.plans[0])
        spilling = Spilling(lambda p: 0 if p == roomier[1] else 2000)

        def attempt(plan: KernelPlan) -> KernelPlan:
            if plan == roomier[0] or not succeeds and plan != first:
                raise problem
            return spilling(plan)
        assert steps.first_that_runs(attempt) == (roomier[1] if succeeds else first) == spilling.tried[-1]


def test_a_lost_context_is_told() -> None:
    steps = steps_of()
    first, spilling = steps.plans[0], Spilling(lambda p: 2000)

    def attempt(plan: KernelPlan) -> KernelPlan:
        if plan != first:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return spilling(plan)
    with pytest.raises(RuntimeError, match="illegal"):
        steps.first_that_runs(attempt)


def test_what_was_refused_is_not_tried_in_the_place_of_what_spills() -> None:
    """Nor what is as large: the plan that followed has roomier ones of its own."""
    steps = steps_of(width=256)
    refused, following = steps.plans[:2]
    spilling, tried = Spilling(lambda p: 2000), list[KernelPlan]()

    def attempt(plan: KernelPlan) -> KernelPlan:
        tried.append(plan)
        if plan.shared > following.shared:
            raise out_of_resources()
        return spilling(plan)
    steps.first_that_runs(attempt)
    assert tried[:2] == [refused, following] and len(tried) > 3
    assert tried[2].shape == following.shape and tried[2].most_registers == 255
    assert all(p.shared <= following.shared for p in tried[1:])


def test_what_was_measured_may_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    """By autotune; and nothing is looked for while a graph is captured."""
    for change in (lambda steps: steps.prefer(steps.plans[0]), lambda _: monkeypatch.setattr(fallback, "capturing", lambda: True)):
        steps, spilling = steps_of(), Spilling(lambda p: 4000)
        change(steps)
        assert steps.first_that_runs(spilling) == spilling.tried[0] and len(spilling.tried) == 1


@pytest.mark.parametrize("card", ("a100", "b200", "mi300x", "h200"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_roomier_plans_take_ever_fewer_registers(card: str, dtype: str) -> None:
    steps = steps_of(card, dtype)
    first, roomier = steps.plans[0], steps.roomier(steps.plans[0])
    assert 1 <= len(roomier) <= space.MOST_TRIED
    if device(card).backend == "cuda":
        assert all(p.most_registers == 255 for p in roomier) and roomier[0].shape == first.shape, "the same with all registers comes first"
        roomier = roomier[1:]
    registers = [p.registers for p in (first, *roomier)]
    assert registers == sorted(registers, reverse=True) and len(set(registers)) == len(registers)


def test_a_launch_says_what_its_kernel_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bytes for each register that the driver counts; once, where the kernel is found."""
    class Found:
        n_regs, n_spills = 255, 5

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_: None

    class Function:
        def __getitem__(self, grid: object) -> Callable[..., Found]:
            return lambda *_, **__: Found()

    monkeypatch.setattr(launcher, "direct", lambda *_: None)
    launch_it, tensor = launcher.Launch(Function(), (1, 1, 1), [None], [], {}, {}), torch.zeros(4)
    with launcher.usages() as outer:
        with launcher.usages() as seen:
            launch_it([tensor])
            launch_it([tensor])
        assert seen == [Usage(255, 20)]
    assert outer == [] and launcher._watching.get() is None


@pytest.mark.parametrize("refused", (False, True))
def test_block_diagonals_are_read_by_the_block_that_wrote_them(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a roomier plan of another block was tried, with success or not; the buffer holds what either writes."""
    monkeypatch.setattr(launch, "interpreting", lambda: True)
    monkeypatch.setattr(launch_backward, "_runs", {})
    case = BY_NAME["wrapping_index"]
    operands, sizes = case.inputs(specs.Shape(), torch.float32, 0)
    spec = case.spec()
    out, stats = walked(spec, operands, sizes)
    larger = lambda plan: replace(plan, block_m=128, block_n=128, most_registers=255)
    monkeypatch.setattr(launch_backward, "roomier_plans", lambda *args: (larger(args[-1]),) if args[3].kind == "diagonals" else ())
    ran: dict[str, int] = {}

    def bind(self: Any, job: Job, plan: KernelPlan, tensors: Any, operands: Any) -> Any:
        def run(now: Any) -> None:
            if job.kind == "diagonals":
                assert now[job.captured[0].label].numel() >= math.prod(self._diagonal_tiles(job, plan.block_m))
                if refused and plan.block_m == 128:
                    raise out_of_resources()
            for name in self._written(job):
                now[name].zero_()
            found(0 if plan.block_m == 128 or job.kind != "diagonals" else 4000)
            ran[job.kind] = plan.block_m
        return Instead(run, (), plan.block_m)

    read: list[int] = []
    original = launch_backward._Backward._diagonal_tiles
    monkeypatch.setattr(launch_backward._Backward, "_bind", bind)
    by_distance = launch_backward._Backward._by_distance
    monkeypatch.setattr(launch_backward._Backward, "_diagonal_tiles", lambda self, job, block: read.append(block) or original(self, job, block))
    monkeypatch.setattr(launch_backward._Backward, "_by_distance", lambda self, *args: read.clear() or by_distance(self, *args))
    launch_backward.backward(spec, out, operands, out, stats, sizes, None, [t.is_floating_point() for t in operands])
    assert read == [ran["diagonals"]] and (ran["diagonals"] == 128) != refused


def test_backward_and_weights_look_for_roomier_plans(prepared: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels, each by itself, and what the last one wrote is right."""
    spec, operands, sizes, _ = prepared
    out, stats = walked(spec, operands, sizes)
    expected = walked_backward(spec, out, operands, out, stats, sizes, None, [True] * 3)
    ran: list[tuple[str, KernelPlan]] = []

    def played(kind: str, plan: KernelPlan) -> None:
        found(0 if plan.most_registers or kind == "rows" else 32)
        ran.append((kind, plan))

    def bind(self: Any, job: Job, plan: KernelPlan, tensors: Any, operands: Any) -> Any:
        def run(now: Any) -> None:
            played(job.kind, plan)
            for name, gradient in zip(("grad_q", "grad_k", "grad_v"), expected, strict=True):
                if name in self._written(job):
                    now[name].copy_(gradient)
        return Instead(run, ())
    monkeypatch.setattr(launch_backward._Backward, "_bind", bind)
    for _ in range(2):
        for gradient, right in zip(launch_backward.backward(spec, out, operands, out, stats, sizes, None, [True] * 3), expected, strict=True):
            torch.testing.assert_close(gradient, right)
    assert [kind for kind, _ in ran] == ["rows", "keys", "keys", "queries", "queries", "rows", "keys", "queries"]
    assert all(plan.most_registers == 255 for kind, plan in ran[5:] if kind != "rows")
    ran.clear()
    monkeypatch.setattr(launch_weights, "_ladders", {})
    monkeypatch.setattr(launch_weights._Ladder, "_bind", lambda self, plan, *_: lambda now: played("weights", plan))
    for _ in range(2):
        launch.weights(spec, operands, stats, sizes)
    assert [p.most_registers for _, p in ran] == [0, 255, 255]
