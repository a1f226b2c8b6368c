"""Generated kernels in Triton's interpreter against the reference in float64: every mechanism, awkward lengths and strides.

The interpreter has to be chosen before Triton is imported, so under a plain pytest this file runs itself once in a process
of its own; ``TRITON_INTERPRET=1 pytest tests/test_codegen_numbers.py`` runs the cases directly.
"""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from attnfuse.codegen import launch
from attnfuse.reference import reference
from attnfuse.spec import AttentionSpec
from tests.interpreted import run_in_interpreter
from tests.specs import BY_NAME, CASES, Case, Shape

INSIDE = launch.interpreting()
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter, in a process of its own")
LENGTHS = (0, 1, 15, 16, 17, 33, 129)


@pytest.mark.skipif(INSIDE, reason="this is the process of its own")
def test_in_the_interpreter(tmp_path: Path) -> None:
    run_in_interpreter(__file__, tmp_path)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are allocated full of a number that no attention gives: what a kernel fails to write is seen."""
    allocate = launch._allocate
    monkeypatch.setattr(launch, "_allocate", lambda *args: tuple(t.fill_(12345.0) for t in allocate(*args)))


def check(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: int) -> None:
    """The kernel's result is as near to the oracle as rounding explains, NaN where it is, and the statistics give its weights."""
    drop = torch.tensor([seed + (seed << 32)]) if spec.dropouts else None
    out, stats = launch.forward(spec, operands, sizes, drop)
    truth = reference(spec, operands, sizes, drop, dtype=torch.float64)
    plain = reference(spec, operands, sizes, drop)
    assert out.shape == truth.shape and out.dtype == plain.dtype
    assert torch.equal(out.isnan(), truth.isnan())
    assert stats.shape == (*truth.shape[:-1], 2) and stats.is_contiguous()
    norm = truth.nan_to_num().norm().clamp(min=1e-30)
    error = lambda x: ((x.double() - truth).nan_to_num().norm() / norm).item()
    half = out.dtype != torch.float32
    # In half precision eager also rounds scores and weights, which this reference does not: about three roundings more.
    assert error(out) <= (1e-3 if half else max(2.0 * error(plain), 5e-7)), (error(out), error(plain))


def run(case: Case, shape: Shape, dtype: torch.dtype, seed: int) -> None:
    operands, sizes = case.inputs(shape, dtype, seed)
    check(case.spec(str(dtype).removeprefix("torch.")), operands, sizes, seed)


@interpreted
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_mechanism(case: Case, dtype: torch.dtype, seed: int) -> None:
    run(case, Shape(), dtype, seed)
    run(case, Shape((1, 2), 129, 65, 20, 16), dtype, seed + 1)


@interpreted
@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("name", ("plain", "causal_padding_min", "window_padding_min", "bottom_right_min", "sinks"))
def test_every_length(name: str, queries: int, keys: int, seed: int) -> None:
    if name == "causal_padding_min" and keys == 0:
        pytest.skip("there is no key to pad")
    run(BY_NAME[name], Shape((2, 2), queries, keys, 8, 8), torch.float32, seed)


@interpreted
@pytest.mark.parametrize("depth, value_depth", [(1, 1), (16, 40), (40, 16), (72, 72), (64, 128), (256, 8), (0, 16)])
def test_every_head_dimension(depth: int, value_depth: int, seed: int) -> None:
    for name in ("plain", "causal_padding_min"):
        run(BY_NAME[name], Shape((2, 1), 18, 21, depth, value_depth), torch.float32, seed)


def _restride(t: torch.Tensor, how: str) -> torch.Tensor:
    if how == "transposed":                     # as (…, depth, tokens)
        return t.mT.contiguous().mT
    if how == "gaps":                           # every other element of a wider tensor
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 7.0)
        wide[..., ::2] = t
        return wide[..., ::2]
    if how == "heads_last":                     # (batch, tokens, heads, depth) seen as (batch, heads, tokens, depth)
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t[:, :1].expand(t.shape) if t.dim() == 4 else t       # the same for every head, stride 0


@interpreted
@pytest.mark.parametrize("how", ("transposed", "gaps", "heads_last", "expanded"))
@pytest.mark.parametrize("name", ("plain", "bias", "grouped", "causal_padding_min"))
def test_every_layout(name: str, how: str, seed: int) -> None:
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape(queries=19, keys=35), torch.float32, seed)
    check(case.spec(), [_restride(t, how) if t.is_floating_point() else t for t in operands], sizes, seed)


@interpreted
@pytest.mark.parametrize("name", ("causal_padding_min", "window", "gathered", "dropout", "grouped", "bias", "wrapping_index"))
def test_wide_offsets(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_wide", lambda *_: True)
    monkeypatch.setattr(launch, "_runs", {})
    run(BY_NAME[name], Shape(), torch.float16, seed)


@interpreted
def test_two_fills_of_different_size_keep_their_order(seed: int) -> None:
    from attnfuse.program import DOT, const, where
    from tests.specs import CAUSAL, padding, variant

    for inner, outer in ((-1e9, -3e38), (-3e38, -1e9)):
        score = where(CAUSAL, where(padding, DOT, const(inner)), const(outer))
        for dtype in (torch.float16, torch.float32):
            run(variant("causal_padding_min", score=score), Shape(), dtype, seed)


@interpreted
def test_packed_operand(seed: int) -> None:
    """Queries, keys and values in one tensor [batch, tokens, 3 · heads · depth], read through index maps and copied nowhere."""
    from attnfuse.program import add, axis, const, mul, size
    from attnfuse.spec import Access, Operand

    b0, b1, i, j, d, e = (axis(n) for n in ("b0", "b1", "i", "j", "d", "e"))
    packed = torch.randn(2, 23, 3 * 4 * 16)
    place = lambda part, depth: add(mul(add(const(4 * part), b1), size("d")), depth)
    spec = AttentionSpec(("b0", "b1"), (Operand("qkv", "float32", 3),), Access(0, (b0, i, place(0, d))), Access(0, (b0, j, place(1, d))),
                         Access(0, (b0, j, place(2, e))))
    check(spec, [packed], (2, 4, 23, 23, 16, 16), seed)


@interpreted
@pytest.mark.parametrize("dtype, qk, pv, out", [("float16", "float32", "float32", "float16"), ("float16", "float16", "float32", "float32"),
                                                ("float32", "float16", "float16", "float16")])
def test_precision_of_the_products(dtype: str, qk: str, pv: str, out: str, seed: int) -> None:
    case = BY_NAME["causal_inf"]
    spec = case.spec(dtype)
    spec = AttentionSpec(spec.batch, spec.operands, spec.query, spec.key, spec.value, spec.score, qk_dtype=qk, pv_dtype=pv, out_dtype=out)
    operands, sizes = case.inputs(Shape(), getattr(torch, dtype), seed)
    result, _ = launch.forward(spec, operands, sizes)
    truth = reference(spec, operands, sizes, dtype=torch.float64)
    error = ((result.double() - truth).norm() / truth.norm()).item()
    assert error <= (5e-7 if pv == out == "float32" else 1e-3)


@interpreted
@pytest.mark.parametrize("name", ("causal_min", "causal_padding_min", "causal_inf", "sinks", "alibi_causal"))
def test_statistics_give_the_weights(name: str, seed: int) -> None:
    from attnfuse.program import Env, evaluate

    case = BY_NAME[name]
    for dtype in (torch.float32, torch.float16):
        operands, sizes = case.inputs(Shape((1, 2), 20, 20), dtype, seed)
        spec = case.spec(str(dtype).removeprefix("torch."))
        _, stats = launch.forward(spec, operands, sizes)
        dot = operands[0].double() @ operands[1].double().mT
        axes = {n: torch.arange(s).view([-1 if k == p else 1 for k in range(4)]) for p, (n, s) in
                enumerate(zip(("b0", "b1", "i", "j"), dot.shape, strict=True))}
        read = lambda n, at: operands[n][at]
        env = Env(axes, dict(zip(spec.size_names, sizes, strict=True)),
                  read, torch.float64, torch.device("cpu"), dot=dot)
        score = evaluate(spec.score, env)
        terms = [evaluate(t, env).expand(*dot.shape[:-1], 1) for t in spec.extra_terms]
        truth = torch.softmax(torch.cat([score, *terms], -1), -1)[..., :dot.shape[-1]]
        weights = torch.exp(score - stats[..., :1].double() - stats[..., 1:].double())
        torch.testing.assert_close(weights, truth, atol=2e-6, rtol=2e-5)


@interpreted
@pytest.mark.parametrize("name", ("repaired_rows", "repaired_min", "repaired_sinks", "causal_padding_zero"))
def test_rows_that_are_zero_are_told_by_their_maximum(name: str, seed: int) -> None:
    """By which any backward knows them."""
    from attnfuse import walker

    for dtype in (torch.float32, torch.float16):
        operands, sizes = BY_NAME[name].inputs(Shape((1, 2), 20, 20), dtype, seed)
        spec = BY_NAME[name].spec(str(dtype).removeprefix("torch."))
        drop = torch.tensor([seed]) if spec.dropouts else None
        (_, generated), (_, walked) = (one.forward(spec, operands, sizes, drop) for one in (launch, walker))
        assert torch.equal(generated[..., 0] == float("-inf"), walked[..., 0] == float("-inf")) and bool((walked[..., 0] == float("-inf")).any())


@interpreted
def test_a_second_call_reuses_everything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["plain"]
    operands, sizes = case.inputs(Shape(), torch.float32, seed)
    first = launch.forward(case.spec(), operands, sizes)[0]
    monkeypatch.setattr(launch, "_prepare", None)
    fresh = [t.clone() for t in operands]
    assert torch.equal(launch.forward(case.spec(), fresh, sizes)[0], first)


@interpreted
def test_out_of_resources_never_reaches_the_user(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    tried = []
    bind = launch.bind

    def refuse_the_first(function: object, kernel: object, plan: object, *rest: object) -> launch.Run:
        tried.append(plan)
        if len(tried) == 1:
            def fail(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
                raise OutOfResources(300000, 232448, "shared memory")
            return fail
        return bind(function, kernel, plan, *rest)

    monkeypatch.setattr(launch, "bind", refuse_the_first)
    monkeypatch.setattr(launch, "_runs", {})
    run(BY_NAME["causal_inf"], Shape(), torch.float32, seed)
    assert len(tried) == 2 and tried[0] != tried[1]


@interpreted
def test_a_generated_file_checks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setenv("ATTNFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(launch, "_runs", {})
    run(BY_NAME["causal_padding_min"], Shape(), torch.float32, seed)
    (path,) = tmp_path.glob("*.py")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0 and "relative error" in done.stdout, done.stderr


def test_integers_of_a_program_are_as_wide_as_they_grow() -> None:
    """A squared distance, computed in 64 bits in eager, passes 31 bits at 46341 tokens."""
    from attnfuse.program import add, apply, axis, const, mul
    from attnfuse.spec import Access, Operand

    i, j, d, e = map(axis, "ijde")
    gap = apply("sub", i, j)
    score = add(apply("float", mul(gap, gap)), mul(const(0.125), BY_NAME["plain"].score))
    spec = AttentionSpec((), tuple(Operand(n, "float16", 2) for n in "qkv"), Access(0, (i, d)), Access(1, (j, d)), Access(2, (j, e)), score,
                         qk_dtype="float16", pv_dtype="float16", out_dtype="float16")
    short, long = (torch.empty(n, 64, dtype=torch.float16, device="meta") for n in (1000, 50000))
    wide = lambda t: launch.is_wide(spec, [t] * 3, {"i": len(t), "j": len(t), "d": 64, "e": 64})
    assert (wide(short), wide(long)) == (False, True)
