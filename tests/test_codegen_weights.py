"""The generated kernel of weights in Triton's interpreter against the plain meaning in float64; and its text.

As in test_codegen_numbers.py the file runs itself once in a process of its own; ``TRITON_INTERPRET=1 pytest
tests/test_codegen_weights.py`` runs the cases directly.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnfuse import walker, weighing
from attnfuse.codegen import backward, launch, launch_weights
from attnfuse.codegen.jobs import WEIGHTS
from attnfuse.codegen.plan import KernelPlan
from attnfuse.codegen.tiles import known
from attnfuse.program import WEIGHT, const, load, mul
from attnfuse.reference import weights as dense
from attnfuse.spec import AttentionSpec
from tests.interpreted import run_in_interpreter
from tests.specs import BY_NAME, CASES, Captured, Case, Shape, i, j, randn, variant

INSIDE = launch.interpreting()
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter, in a process of its own")
LENGTHS = (0, 1, 16, 33)


@pytest.mark.skipif(INSIDE, reason="this is the process of its own")
def test_in_the_interpreter(tmp_path: Path) -> None:
    run_in_interpreter(__file__, tmp_path)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are allocated full of a number that no attention gives: what the kernel fails to write is seen."""
    allocate = launch_weights._allocate
    monkeypatch.setattr(launch_weights, "_allocate", lambda *args: allocate(*args).fill_(12345.0))


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch):
    """Set the tiles, so that short sequences have full, cut and skipped ones."""
    monkeypatch.setattr(launch_weights, "_ladders", {})
    candidates = launch_weights.candidates

    def use(block_m: int, block_n: int) -> None:
        def small(*args: object) -> tuple[KernelPlan, ...]:
            return tuple(replace(p, block_m=block_m, block_n=block_n) for p in candidates(*args))
        monkeypatch.setattr(launch_weights, "candidates", small)
        launch_weights._ladders.clear()
    return use


def check(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: int, meaning: AttentionSpec | None = None,
          least: float = 2e-5) -> torch.Tensor:
    """The kernel's weights are as near to the oracle's as rounding explains, NaN where they are, from the statistics of either executor."""
    drop = torch.tensor([seed + (seed << 32)]) if spec.dropouts else None
    attention = replace(meaning or spec, out_order=())
    exact, plain = (dense(spec, operands, sizes, drop, dtype=t) for t in (torch.float64, torch.float32))
    norm = exact.nan_to_num().norm().clamp(min=1e-30)
    error = lambda x: ((x.double() - exact).nan_to_num().norm() / norm).item()
    half = spec.out_dtype != "float32"
    for executor in (launch, walker):
        stats = executor.forward(attention, operands, sizes, drop)[1]
        got = launch.weights(spec, operands, stats, sizes, drop)
        assert got.shape == exact.shape and str(got.dtype) == f"torch.{spec.out_dtype}" and got.permute(spec.out_order).is_contiguous()
        assert torch.equal(got.isnan(), exact.isnan())
        # Scores are computed again, in another order than when the statistics were taken: a few of their last places. A half
        # type rounds the weight, and not below its least number.
        assert error(got) <= max(4.0 * error(plain), 2e-3 if half else least), (error(got), error(plain))
        zero = exact == 0.0
        assert bool((got[zero] == 0.0).all()), "a weight that is masked or dropped is exactly 0"
    return got


def run(case: Case, shape: Shape, dtype: torch.dtype, seed: int) -> None:
    operands, sizes = case.inputs(shape, dtype, seed)
    least = 5e-4 if case.name == "powers" else 2e-5        # squares of scores reach the thousands, whose last place is 1e-4
    check(replace(case.spec(str(dtype).removeprefix("torch.")), out_order=()), operands, sizes, seed, least=least)


@interpreted
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_mechanism(case: Case, dtype: torch.dtype, seed: int, tiles) -> None:
    run(case, Shape(), dtype, seed)
    tiles(*((16, 32) if dtype == torch.float16 else (32, 16)))
    run(case, Shape((1, 2), 70, 53, 20, 16), dtype, seed + 1)


@interpreted
@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("name", ("plain", "causal_padding_min", "window_padding_min", "bottom_right", "sinks"))
def test_every_length(name: str, queries: int, keys: int, seed: int, tiles) -> None:
    if "padding" in name and keys == 0:
        pytest.skip("there is no key to pad")
    tiles(16, 16)
    run(BY_NAME[name], Shape((2, 2), queries, keys, 8, 8), torch.float32, seed)


@interpreted
@pytest.mark.parametrize("order", [(0, 1, 3, 2), (2, 1, 0, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("name", ("causal_inf", "window_min", "dropout"))
def test_every_order_in_memory(name: str, order: tuple[int, ...], seed: int) -> None:
    operands, sizes = BY_NAME[name].inputs(Shape((2, 3), 20, 35, 8, 8), torch.float32, seed)
    check(replace(BY_NAME[name].spec(), out_order=order), operands, sizes, seed)


@interpreted
@pytest.mark.parametrize("depth", (0, 1, 40, 256))
def test_every_head_dimension(depth: int, seed: int) -> None:
    run(BY_NAME["causal_padding_min"], Shape((2, 1), 18, 21, depth, 8), torch.float32, seed)


@interpreted
@pytest.mark.parametrize("out", ("float32", "float16"))
def test_weights_in_another_dtype_than_the_queries(out: str, seed: int) -> None:
    for dtype in (torch.float32, torch.float16):
        operands, sizes = BY_NAME["causal_inf"].inputs(Shape(), dtype, seed)
        check(replace(BY_NAME["causal_inf"].spec(str(dtype).removeprefix("torch.")), out_dtype=out), operands, sizes, seed)


@interpreted
@pytest.mark.parametrize("name", ("repaired", "repaired_rows", "repaired_min"))
def test_rows_are_nan_before_they_are_repaired(name: str, seed: int, tiles) -> None:
    """The statistics are those of an attention that repairs them."""
    tiles(16, 16)
    operands, sizes = BY_NAME[name].inputs(Shape((2, 2), 40, 40), torch.float32, seed)
    spec = BY_NAME[name].spec()
    got = check(replace(spec, empty_rows="nan"), operands, sizes, seed, meaning=spec)
    assert bool(got.isnan().any())


@interpreted
@pytest.mark.parametrize("name", ("causal_inf", "causal_padding_zero", "causal_min", "window"))
def test_a_row_of_nan_is_nan_at_every_key(name: str, seed: int, tiles) -> None:
    """Also at those that its bounds leave out."""
    tiles(16, 16)
    for dtype in (torch.float32, torch.float16):
        operands, sizes = BY_NAME[name].inputs(Shape((2, 2), 40, 40), dtype, seed)
        operands[0][1, 1, 5] = float("nan")
        spec = BY_NAME[name].spec(str(dtype).removeprefix("torch."))
        got = check(spec, operands, sizes, seed)
        assert bool(got[1, 1, 5].isnan().all()) and not bool(got[0].isnan().any())
        tiled = weighing.forward(spec, operands, launch.forward(spec, operands, sizes)[1], sizes)
        assert torch.equal(tiled.isnan(), got.isnan())


@interpreted
def test_a_gate_of_nan_is_nan_where_the_weight_is_zero(seed: int, tiles) -> None:
    tiles(16, 16)
    gate = load(3, (i, j), "float")
    case = variant("causal_inf", weight=mul(WEIGHT, gate), captured=(Captured("gate", "float32", 2, randn("i", "j")),))
    operands, sizes = case.inputs(Shape((2, 2), 40, 40), torch.float32, seed)
    operands[3][3, 38] = float("nan")
    assert bool(check(case.spec(), operands, sizes, seed)[:, :, 3, 38].isnan().all())


@interpreted
@pytest.mark.parametrize("name", ("causal_padding_min", "gathered", "dropout", "wrapping_index"))
def test_wide_offsets(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_wide", lambda *_: True)
    monkeypatch.setattr(launch_weights, "_ladders", {})
    run(BY_NAME[name], Shape(), torch.float16, seed)


@interpreted
def test_a_second_call_reuses_everything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operands, sizes = BY_NAME["plain"].inputs(Shape(), torch.float32, seed)
    spec = BY_NAME["plain"].spec()
    stats = walker.forward(spec, operands, sizes)[1]
    first = launch.weights(spec, operands, stats, sizes)
    monkeypatch.setattr(launch_weights, "_prepare", None)
    assert torch.equal(launch.weights(spec, [t.clone() for t in operands], stats.clone(), sizes), first)


@interpreted
def test_out_of_resources_never_reaches_the_user(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    tried = []
    bind = launch_weights._Ladder._bind

    def refuse_the_first(self, plan: KernelPlan, *rest: object):
        tried.append(plan)
        if len(tried) == 1:
            def fail(*_: object) -> None:
                raise OutOfResources(300000, 232448, "shared memory")
            return fail
        return bind(self, plan, *rest)

    monkeypatch.setattr(launch_weights._Ladder, "_bind", refuse_the_first)
    monkeypatch.setattr(launch_weights, "_ladders", {})
    operands, sizes = BY_NAME["causal_inf"].inputs(Shape(), torch.float32, seed)
    check(BY_NAME["causal_inf"].spec(), operands, sizes, seed)
    assert tried[0] != tried[1]


# ---- without the interpreter

def text(name: str, dtype: str = "bfloat16") -> str:
    """The source of the kernel for Hopper."""
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape((4, 16), 1024, 1024, 64, 64), getattr(torch, dtype), 0)
    spec = replace(case.spec(dtype), out_order=())
    plan = launch_weights.plans(spec, [t.to("meta") for t in operands], sizes, known("cuda", 90))[0]
    return backward.emit(spec, plan, WEIGHTS).source


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_file_is_python_and_reads_no_values(name: str) -> None:
    source = text(name)
    compile(source, name, "exec")
    assert "v_ptr" not in source and "offs_e" not in source and "acc" not in source
    assert max(map(len, source.splitlines())) <= 190


def test_only_what_may_be_skipped_is_stored_as_zeros() -> None:
    assert "tl.zeros" not in text("plain") and text("causal_inf").count("tl.zeros") == 1 and text("window").count("tl.zeros") == 2


def test_offsets_of_the_weights_themselves_may_be_wide() -> None:
    case = BY_NAME["plain"]
    wide = lambda n: launch_weights.plans(case.spec("float16"), [torch.empty(1, 1, n, 64, dtype=torch.float16, device="meta")] * 3,
                                          (1, 1, n, n, 64, 64), known("cuda", 90))[0].index_bits
    assert (wide(40000), wide(50000)) == (32, 64)


def test_what_has_no_kernel_says_why() -> None:
    plain = BY_NAME["plain"]
    operands, sizes = plain.inputs(Shape(), torch.float64, 0)
    stats = torch.zeros(2, 4, 33, 2, dtype=torch.float64)
    with pytest.raises(launch.Unsupported, match="float64"):
        launch.weights(plain.spec("float64"), operands, stats, sizes)
    operands, sizes = plain.inputs(Shape(), torch.float32, 0)
    with pytest.raises(launch.Unsupported, match="statistics in"):
        launch.weights(plain.spec(), operands, stats, sizes)
    with pytest.raises(ValueError, match="statistics of shape"):
        launch.weights(plain.spec(), operands, stats[:1].float(), sizes)
    if not INSIDE:
        with pytest.raises(launch.Unsupported, match="needs a GPU"):
            launch.weights(plain.spec(), operands, stats.float(), sizes)


def test_values_without_columns_are_left_to_the_tiled_loop() -> None:
    """Their result is empty, the weights are not."""
    operands, sizes = variant("plain", weight=mul(const(1.0), WEIGHT)).inputs(Shape(value_depth=0), torch.float32, 0)
    with pytest.raises(launch.Unsupported, match="without columns"):
        launch.forward(BY_NAME["plain"].spec(), operands, sizes)
