"""Measuring plans: who is timed, what is kept, what is believed when it is read, and that nothing else notices. Time and launches are played."""
from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnfuse
from attnfuse import tuning
from attnfuse.codegen import autotune, cache, launch, launch_backward
from attnfuse.codegen.autotune import Key
from attnfuse.codegen.jobs import Job
from attnfuse.codegen.plan import KernelPlan
from attnfuse.codegen.tables import Shape
from attnfuse.walker import backward as walked_backward, forward as walked
from tests import specs
from tests.conftest import Stack
from tests.specs import BY_NAME
from tests.test_fallback import Instead, out_of_resources


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "kernels"))
    monkeypatch.setattr(tuning, "_asked", set())
    cache._warn.cache_clear()
    cache._fallback.cache_clear()
    autotune.forget()
    return tmp_path / "kernels"


class Machine:
    """Plays a GPU: runs of forward plans are walked, and take as long as `milliseconds` says for their shape.

    Attributes:
        timed: the shapes that were timed, in order. ran: those that ran.
        spoil: what a plan makes of the right result.
    """

    def __init__(self, milliseconds: Callable[[Shape], float]) -> None:
        self.milliseconds, self.timed, self.ran = milliseconds, [], []
        self.spoil: Callable[[Shape, torch.Tensor], torch.Tensor] = lambda shape, out: out

    def bind(self, function: object, kernel: object, plan: KernelPlan, spec: Any, sizes: Any, operands: Any) -> Any:
        def run(operands: Sequence[torch.Tensor], seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            self.ran.append(plan.shape)
            out, stats = walked(spec, operands, sizes, seed)
            return self.spoil(plan.shape, out), stats
        return run

    def time(self, run: Callable[[], object]) -> float:
        run()
        self.timed.append(self.ran[-1])
        return self.milliseconds(self.ran[-1])


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """A machine in the place of the GPU, as a new process would find it."""
    def start(milliseconds: Callable[[Shape], float] = lambda s: 1.0 / (s[0] * s[1])) -> Machine:
        machine = Machine(milliseconds)
        autotune.forget()
        for name, value in (("interpreting", lambda: True), ("function", lambda *_: None), ("bind", machine.bind), ("_runs", {})):
            monkeypatch.setattr(launch, name, value)
        monkeypatch.setattr(autotune, "timer", machine.time)
        return machine
    return start


def call(name: str = "causal_inf", queries: int = 40, keys: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One call of the launcher with the setting on, checked."""
    case = BY_NAME[name]
    operands, sizes = case.inputs(specs.Shape(queries=queries, keys=keys), dtype, 0)
    spec = case.spec(str(dtype).removeprefix("torch."))
    with attnfuse.settings(autotune=True):
        out, _ = launch.forward(spec, operands, sizes)
    torch.testing.assert_close(out, walked(spec, operands, sizes)[0])
    return out


def slowest_predicted(plans: Sequence[KernelPlan]) -> Shape:
    return plans[min(autotune.MOST, len(plans)) - 1].shape


def test_the_fastest_is_kept_and_used_by_the_next_process(play: Callable[..., Machine], own_folder: Path) -> None:
    machine = play(lambda s: float(s[0] * s[1]))            # the smallest is the fastest
    call()
    assert 2 <= len(machine.timed) <= autotune.MOST and len(set(machine.timed)) == len(machine.timed)
    best = min(machine.timed, key=machine.milliseconds)
    assert machine.ran[-1] == best and best != machine.timed[0]
    call()
    assert machine.ran[-1] == best and machine.ran[-2] == best, "later calls run the winner alone"
    (path,) = own_folder.glob("tuned_*.json")
    later = play()
    call()
    assert later.timed == [] and set(later.ran) == {best}
    found = json.loads(path.read_text().rpartition("# sha256")[0])
    assert found["winner"] == list(best) and len(found["milliseconds"]) == len(machine.timed)


def test_another_process_reads_it(own_folder: Path) -> None:
    from attnfuse.planning import Shape as Layer, spec_of

    script = ("from attnfuse.codegen import autotune\nfrom attnfuse.planning import Shape, spec_of\n"
              "key = autotune.Key.of(spec_of(Shape(64, 128), 'float16'), '', (1, 2), 'a device')\n"
              "autotune.remember(key, (64, 32, 4, 2), {(64, 32, 4, 2): 0.5})\n")
    key = Key.of(spec_of(Layer(64, 128), "float16"), "", (1, 2), "a device")
    assert autotune.recall(key) is None
    subprocess.run([sys.executable, "-c", script], check=True)
    assert autotune.recall(key) == (64, 32, 4, 2)


def test_without_the_setting_nothing_is_timed(play: Callable[..., Machine], own_folder: Path) -> None:
    machine = play()
    case = BY_NAME["plain"]
    operands, sizes = case.inputs(specs.Shape(), torch.float32, 0)
    launch.forward(case.spec(), operands, sizes)
    assert machine.timed == [] and not list(own_folder.glob("tuned_*"))


def test_lengths_of_a_class_are_timed_once(play: Callable[..., Machine]) -> None:
    machine = play()
    call(queries=40, keys=600)
    count = len(machine.timed)
    call(queries=41, keys=601)
    assert count and len(machine.timed) == count
    call(queries=200, keys=600)
    assert len(machine.timed) > count, "another class"


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut short": lambda t: t[:len(t) // 2],
    "edited": lambda t: t.replace('"winner"', '"winner" '),
    "empty": lambda t: "",
    "not a record": lambda t: cache._sealed("[1, 2]\n"),
    "not JSON": lambda t: cache._sealed("{\n"),
    "a winner that is none": lambda t: cache._sealed(json.dumps(record(t) | {"winner": [64, [64], 4, 2]}) + "\n"),
    "a shape that nobody offers": lambda t: cache._sealed(json.dumps(record(t) | {"winner": [48, 48, 4, 2]}) + "\n"),
    "of another device": lambda t: cache._sealed(json.dumps(record(t) | {"device": "another"}) + "\n"),
    "of another version": lambda t: cache._sealed(json.dumps(record(t) | {"triton": "0.0"}) + "\n"),
    "of another generator": lambda t: cache._sealed(json.dumps(record(t) | {"generator": "0"}) + "\n"),
}


def record(text: str) -> dict[str, Any]:
    return json.loads(text.rpartition("# sha256")[0])


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_believed_is_measured_again(play: Callable[..., Machine], own_folder: Path, damage: str) -> None:
    play()
    call()
    (path,) = own_folder.glob("tuned_*.json")
    whole = path.read_text()
    path.write_text(DAMAGE[damage](whole))
    machine = play()
    call()
    assert machine.timed, damage
    assert record(path.read_text())["winner"] == record(whole)["winner"], "and written again"


def test_a_whole_file_is_believed(play: Callable[..., Machine], own_folder: Path) -> None:
    """The near miss of the above: the same record sealed again."""
    play()
    call()
    (path,) = own_folder.glob("tuned_*.json")
    path.write_text(cache._sealed(json.dumps(record(path.read_text())) + "\n"))
    machine = play()
    call()
    assert machine.timed == []


def test_keys_tell_everything_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, other = BY_NAME["plain"].spec(), BY_NAME["causal_inf"].spec()
    keys = [Key.of(spec, "", (1, 2), "H200"), Key.of(other, "", (1, 2), "H200"), Key.of(spec, repr(Job("keys", key=True)), (1, 2), "H200"),
            Key.of(spec, "", (1, 3), "H200"), Key.of(spec, "", (1, 2), "H100")]
    monkeypatch.setattr(autotune.header, "versions", lambda: {"attnfuse": "0", "triton": "9.9", "torch": "2"})
    keys.append(Key.of(spec, "", (1, 2), "H200"))
    assert len({k.digest for k in keys}) == len(keys)
    autotune.remember(keys[0], (16, 16, 4, 1), {(16, 16, 4, 1): 1.0})
    assert [autotune.recall(k) for k in keys] == [(16, 16, 4, 1)] + [None] * (len(keys) - 1)
    path = cache.folder() / keys[0].name
    path.rename(cache.folder() / keys[4].name)
    assert autotune.recall(keys[4]) is None, "a file says itself what it is of"


def test_while_a_graph_is_captured_nothing_is_timed(play: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = play(lambda s: float(s[0] * s[1]))
    monkeypatch.setattr(autotune, "capturing", lambda: True)
    call()
    assert machine.timed == [] and len(machine.ran) == 1
    monkeypatch.setattr(autotune, "capturing", lambda: False)
    first = play(lambda s: float(s[0] * s[1]))
    call()
    assert first.timed
    later = play()
    monkeypatch.setattr(autotune, "capturing", lambda: True)
    call()
    assert later.timed == [] and set(later.ran) == {min(first.timed, key=first.milliseconds)}, "what is stored is used"


def test_nothing_is_captured_without_a_gpu() -> None:
    assert not autotune.capturing() or torch.cuda.is_available()


@pytest.mark.parametrize("failing", ["first", "all but the last", "all"])
def test_what_fails_in_a_trial_costs_that_plan_alone(play: Callable[..., Machine], failing: str) -> None:
    machine = play()
    seen: list[Shape] = []

    def refuse(shape: Shape, out: torch.Tensor) -> torch.Tensor:
        if shape not in seen:
            seen.append(shape)
        number = seen.index(shape) + 1
        if failing == "first" and number == 1 or failing == "all but the last" and number < 3 or failing == "all" and machine.counting:
            raise (out_of_resources() if number % 2 else RuntimeError("PassManager::run failed"))
        return out
    machine.counting = True  # type: ignore[attr-defined]
    machine.spoil = refuse
    if failing == "all":
        case = BY_NAME["causal_inf"]
        operands, sizes = case.inputs(specs.Shape(), torch.float32, 0)
        with attnfuse.settings(autotune=True), pytest.raises(launch.Unsupported, match="no plan of a kernel"):
            launch.forward(case.spec(), operands, sizes)
        return
    call()
    assert machine.timed and seen[0] not in machine.timed


@pytest.mark.parametrize("time", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_does_not_win(play: Callable[..., Machine], time: float) -> None:
    machine = play()
    machine.milliseconds = lambda s: time if s == machine.timed[0] else 1.0
    call()
    assert machine.ran[-1] != machine.timed[0]


def test_a_plan_that_computes_something_else_is_left_out(play: Callable[..., Machine], caplog: pytest.LogCaptureFixture, seed: int) -> None:
    machine = play(lambda s: float(s[0] * s[1]))
    machine.spoil = lambda shape, out: out if not machine.timed else out * (1 + 0.1 * torch.randn_like(out))
    with caplog.at_level(logging.WARNING, "attnfuse"):
        case = BY_NAME["causal_inf"]
        operands, sizes = case.inputs(specs.Shape(), torch.float32, 0)
        with attnfuse.settings(autotune=True):
            launch.forward(case.spec(), operands, sizes)
    assert len(machine.timed) == 1 and "computes something else" in caplog.text
    near = play(lambda s: float(s[0] * s[1]))
    near.spoil = lambda shape, out: out * (1 + 1e-6 * torch.randn_like(out))          # rounding
    for file in cache.folder().glob("tuned_*"):
        file.unlink()
    with attnfuse.settings(autotune=True):
        launch.forward(case.spec(), operands, sizes)
    assert len(near.timed) > 1


def test_nan_must_be_in_the_same_places() -> None:
    a = torch.tensor([1.0, math.nan, 3.0])
    assert autotune.close(a, a.clone(), 1e-3) and not autotune.close(a, torch.tensor([1.0, 0.0, 3.0]), 1e-3)
    assert not autotune.close(torch.tensor([1.0, 0.0, 3.0]), a, 1e-3)


def test_a_lost_context_is_not_passed_over(play: Callable[..., Machine]) -> None:
    machine = play()
    def lost(shape: Shape, out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    machine.spoil = lost
    with pytest.raises(RuntimeError, match="illegal"):
        call()
    assert len(machine.ran) == 1, "no other plan is tried on it"


def test_the_random_state_is_as_it_was(play: Callable[..., Machine]) -> None:
    play()
    before = torch.get_rng_state()
    case = BY_NAME["dropout"]
    operands, sizes = case.inputs(specs.Shape(), torch.float32, 0)
    with attnfuse.settings(autotune=True):
        launch.forward(case.spec(), operands, sizes, torch.tensor([5]))
    assert torch.equal(before, torch.get_rng_state())


def test_a_folder_that_cannot_be_written_is_said_once_and_no_more(play: Callable[..., Machine], tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "file" / "below"))
    machine = play()
    with pytest.warns(RuntimeWarning, match="temporary folder") as said:
        call()
        call("plain")
    assert len([w for w in said if issubclass(w.category, RuntimeWarning)]) == 1
    assert machine.timed
    later = play()
    call()
    assert later.timed == [], "the temporary folder serves this process"


# ---- backward

def test_backward_kernels_are_timed_on_memory_of_their_own(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    case = BY_NAME["bias"]
    operands, sizes = case.inputs(specs.Shape(), torch.float32, seed)
    spec = case.spec()
    out, stats = walked(spec, operands, sizes)
    grad_out = torch.randn_like(out)
    needs = [True] * 4
    expected = walked_backward(spec, grad_out, operands, out, stats, sizes, None, needs)
    by_name = dict(zip(("grad_q", "grad_k", "grad_v", "grad_bias"), expected, strict=True))
    ran: list[tuple[str, Shape]] = []
    real: dict[str, set[int]] = {}
    timed: list[tuple[str, Shape]] = []

    def bind(self: Any, job: Job, plan: KernelPlan, tensors: Any, operands: Any) -> Any:
        def run(now: Any) -> None:
            ran.append((job.kind, plan.shape))
            if job.kind == "rows":
                return
            for name in self._written(job):
                real.setdefault(name, set()).add(now[name].data_ptr())
                now[name].copy_(by_name[name])
        return Instead(run, ())

    def time(run: Callable[[], object]) -> float:
        run()
        timed.append(ran[-1])
        return float(ran[-1][1][0] * ran[-1][1][1])
    monkeypatch.setattr(launch_backward._Backward, "_bind", bind)
    monkeypatch.setattr(launch, "interpreting", lambda: True)
    monkeypatch.setattr(launch_backward, "_runs", {})
    monkeypatch.setattr(autotune, "timer", time)
    with attnfuse.settings(autotune=True):
        found = launch_backward.backward(spec, grad_out, operands, out, stats, sizes, None, needs)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right)
    assert {k for k, _ in timed} == {"keys", "queries"}, "the kernel of the rows only streams"
    for kind in ("keys", "queries"):
        mine = [s for k, s in timed if k == kind]
        assert len(mine) >= 2
        winner = min(mine, key=lambda s: s[0] * s[1])
        assert [s for k, s in ran if k == kind][-1] == winner
    assert all(len(places) == 2 for places in real.values()), "trials write elsewhere than the kernel that counts"
    count = len(timed)
    monkeypatch.setattr(launch_backward, "_runs", {})
    autotune.forget()
    with attnfuse.settings(autotune=True):
        launch_backward.backward(spec, grad_out, operands, out, stats, sizes, None, needs)
    assert len(timed) == count, "kept"


# ---- who asks

def test_a_models_own_setting_holds_for_its_attentions(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 8, 16)
    attnfuse.optimize(stack, inner="eager", settings={"autotune": False})(x)
    assert tuning._asked == set()
    tuned = Stack().eval()
    attnfuse.optimize(tuned, inner="eager", settings={"autotune": True})(x)
    specs_ = [s.spec for s in attnfuse.last_report(tuned).sites if s.spec is not None]
    assert specs_ and all(tuning.asked(s) for s in specs_)
    assert not tuning.asked(replace(specs_[0], out_dtype="float16"))
    monkeypatch.setenv("ATTNFUSE_AUTOTUNE", "1")
    assert tuning.asked(replace(specs_[0], out_dtype="float16"))


def test_only_devices_with_clocks_are_asked() -> None:
    assert autotune.possible(torch.device("cuda")) and not autotune.possible(torch.device("cpu"))
