"""Generated backward kernels in Triton's interpreter against autograd through the reference in float64.

As in test_codegen_numbers.py the file runs itself once in a process of its own; ``TRITON_INTERPRET=1 pytest
tests/test_codegen_backward.py`` runs the cases directly.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnfuse import walker
from attnfuse.codegen import backward as emitter
from attnfuse.codegen import diagonals, launch, launch_backward, plan, reads
from attnfuse.codegen.emission import sharing
from attnfuse.codegen.plan import KernelPlan
from attnfuse.codegen.task import task
from attnfuse.codegen.tiles import known
from attnfuse.program import DOT, add, apply, axis, const, load, loads, mul, size, substitute, where
from attnfuse.reference import reference
from attnfuse.spec import Access, AttentionSpec, Operand
from tests.emitted import emitted_again
from tests.interpreted import run_in_interpreter
from tests.oracle import rounding, truth
from tests.specs import BY_NAME, CASES, CAUSAL, Case, Shape, padding, variant

INSIDE = launch.interpreting()
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter, in a process of its own")
LENGTHS = (0, 1, 16, 33)


@pytest.mark.skipif(INSIDE, reason="this is the process of its own")
@pytest.mark.parametrize("which", ("every_mechanism", "not every_mechanism"))
def test_in_the_interpreter(which: str, tmp_path: Path) -> None:
    """In two halves, for two cores."""
    run_in_interpreter(__file__, tmp_path, "-k", which)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and scratch are allocated full of a number that no attention gives: what a kernel fails to write is seen."""
    allocate = launch_backward.empty
    monkeypatch.setattr(launch_backward, "empty", lambda *args: allocate(*args).fill_(77))


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch):
    """Set the tiles of all kernels, so that short sequences have full, cut and skipped ones."""
    monkeypatch.setattr(launch_backward, "_runs", {})
    candidates = launch_backward.candidates

    def use(block_m: int, block_n: int) -> None:
        def small(*args: object) -> tuple[KernelPlan, ...]:
            square = args[-1].kind == "diagonals"  # type: ignore[attr-defined]  # the job
            return tuple(replace(p, block_m=block_m, block_n=block_m if square else block_n) for p in candidates(*args))
        monkeypatch.setattr(launch_backward, "candidates", small)
        launch_backward._runs.clear()
    return use


def check(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: int, needs: Sequence[bool] | None = None,
          layout=lambda g: g, statistics: str = "generated", limits: tuple[float, float] = (2e-3, 2e-6)) -> list[torch.Tensor | None]:
    """Gradients are as near to the oracle's as rounding explains, NaN where they are, and of the operand's shape and dtype."""
    drop = torch.tensor([seed + (seed << 32)]) if spec.dropouts else None
    needs = [t.is_floating_point() for t in operands] if needs is None else needs
    out, stats = (launch if statistics == "generated" else walker).forward(spec, operands, sizes, drop)
    grad_out = layout(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype))
    grads = launch.backward(spec, grad_out, operands, out, stats, sizes, drop, needs)
    exact = truth(spec, operands, sizes, drop, grad_out, needs)
    half = any(t.dtype != torch.float32 for t in (out, *(operands[a.operand] for a in (spec.query, spec.key, spec.value))))
    plain = exact if half else truth(spec, operands, sizes, drop, grad_out, needs, torch.float32)
    limit = limits[0 if half else 1]
    scale = max([x.nan_to_num().norm().item() for x in (*exact, grad_out) if x is not None])
    explained = rounding(spec, operands, sizes, drop, grad_out, needs)
    for got, want, eager, operand, rounded in zip(grads, exact, plain, operands, explained, strict=True):
        if want is None or eager is None:
            assert got is None
            continue
        assert got is not None and got.shape == operand.shape and got.dtype == operand.dtype and got.is_contiguous()
        assert torch.equal(got.isnan(), want.isnan())
        # A gradient that cancels to nothing beside the others is as wrong as their size makes it.
        norm = max(want.nan_to_num().norm().item(), 1e-1 * scale, 1e-30)
        error = lambda x: (x.double() - want).nan_to_num().norm().item() / norm  # noqa: B023
        assert error(got) <= max(limit, rounded / norm, 0.0 if half else 3.0 * error(eager)), (error(got), error(eager), rounded / norm)
    return grads


def run(case: Case, shape: Shape, dtype: torch.dtype, seed: int) -> None:
    operands, sizes = case.inputs(shape, dtype, seed)
    # Scores are computed again, in another order than when the statistics were taken. Where they are in the hundreds (a square of
    # the product) their last place is 3e-5, and eager, which computes them once, does not feel it.
    # Squared scores: what the rounded result adds to delta is multiplied by their slopes (5e-3 in 1 of 200 gradients).
    limits = (1.5e-2, 1e-4) if case.name == "powers" else (2e-3, 2e-6)
    check(case.spec(str(dtype).removeprefix("torch.")), operands, sizes, seed, limits=limits)


@interpreted
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_mechanism(case: Case, dtype: torch.dtype, seed: int, tiles) -> None:
    run(case, Shape((2, 2), 40), dtype, seed)
    tiles(*((16, 32) if dtype == torch.float16 else (32, 16)))
    run(case, Shape((1, 2), 70, 53, 20, 16), dtype, seed + 1)
    tiles(16, 16)
    run(case, Shape((1, 1), 37, 52, 8, 24), dtype, seed + 2)


@interpreted
@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("name", ("plain", "causal_padding_min", "window_padding_min", "bottom_right_min", "bottom_right", "sinks"))
def test_every_length(name: str, queries: int, keys: int, seed: int, tiles) -> None:
    if "padding" in name and keys == 0:
        pytest.skip("there is no key to pad")
    tiles(16, 16)
    run(BY_NAME[name], Shape((2, 2), queries, keys, 8, 8), torch.float32, seed)


@interpreted
@pytest.mark.parametrize("depth, value_depth", [(1, 1), (16, 40), (72, 24), (64, 128), (256, 8), (0, 16)])
def test_every_head_dimension(depth: int, value_depth: int, seed: int) -> None:
    for name in ("plain", "causal_padding_min"):
        run(BY_NAME[name], Shape((2, 1), 18, 21, depth, value_depth), torch.float32, seed)


LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "gaps": lambda t: torch.stack([t, torch.full_like(t, 7.0)], -1)[..., 0],
    "heads_last": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t,
    "expanded": lambda t: t[:, :1].expand(t.shape) if t.dim() == 4 else t,
    "same_everywhere": lambda t: t.flatten()[0].expand(t.shape),
}


@interpreted
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("name", ("plain", "bias", "grouped", "causal_padding_min", "other_order"))
def test_every_layout(name: str, how: str, seed: int) -> None:
    case, move = BY_NAME[name], LAYOUTS[how]
    operands, sizes = case.inputs(Shape(queries=19, keys=35), torch.float32, seed)
    check(case.spec(), operands, sizes, seed, layout=move)
    if how != "same_everywhere":
        check(case.spec(), [move(t) if t.is_floating_point() else t for t in operands], sizes, seed, layout=move)


@interpreted
@pytest.mark.parametrize("name", ("causal_padding_min", "window", "gathered", "dropout", "grouped", "bias", "wrapping_index"))
def test_wide_offsets(name: str, seed: int, monkeypatch: pytest.MonkeyPatch, tiles) -> None:
    monkeypatch.setattr(launch, "is_wide", lambda *_: True)
    tiles(16, 16)
    run(BY_NAME[name], Shape(queries=50), torch.float16, seed)


def test_offsets_of_a_gradient_for_every_score_may_be_wide() -> None:
    """Though what the scores read is a short table, and nothing else is long."""
    def wide(name: str, length: int) -> bool:
        spec = BY_NAME[name].spec("float16")
        rows = torch.empty(1, 1, length, 64, dtype=torch.float16, device="meta")
        operands = [rows] * 3 + [torch.empty(2 * length, dtype=torch.float16, device="meta")] * (len(spec.operands) - 3)
        named = dict(zip(spec.size_names, (1, 1, length, length, 64, 64), strict=True))
        return launch_backward.request_for(spec, (rows, rows), operands, named, known("cuda", 90)).wide

    assert [wide("wrapping_index", n) for n in (40000, 50000)] == [False, True] and not wide("plain", 50000)


@interpreted
@pytest.mark.parametrize("needs", [(n & 1 > 0, n & 2 > 0, n & 4 > 0) for n in range(8)], ids=str)
@pytest.mark.parametrize("name", ("causal_padding_min", "grouped", "dropout"))
def test_only_what_is_needed(name: str, needs: tuple[bool, bool, bool], seed: int) -> None:
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape(), torch.float32, seed)
    check(case.spec(), operands, sizes, seed, needs=(*needs, *[False] * (len(operands) - 3)))


@interpreted
def test_a_gradient_that_is_not_needed_costs_no_kernel(seed: int) -> None:
    case = BY_NAME["plain"]
    operands, sizes = case.inputs(Shape(), torch.float32, seed)
    named = dict(zip(case.spec().size_names, sizes, strict=True))
    kernels = lambda *needs: tuple(job.name for job in task(case.spec(), operands, named, needs).jobs)
    assert kernels(False, False, False) == ()
    assert kernels(True, False, False) == ("rows", "queries") and kernels(False, False, True) == ("rows", "values")
    assert kernels(True, True, True) == ("rows", "keys_values", "queries")


@interpreted
@pytest.mark.parametrize("name, kernels", [
    ("bias", ("rows", "bias")), ("alibi", ("rows", "slopes")), ("sinks", ("rows",)), ("gate", ("rows", "gate")),
])
def test_only_a_captured_tensor_needs_a_gradient(name: str, kernels: tuple[str, ...], seed: int, tiles) -> None:
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape((2, 3), 37, 45), torch.float32, seed)
    needs = [n > 2 and t.is_floating_point() for n, t in enumerate(operands)]
    named = dict(zip(case.spec().size_names, sizes, strict=True))
    assert tuple(job.name for job in task(case.spec(), operands, named, needs).jobs) == kernels
    tiles(16, 16)
    check(case.spec(), operands, sizes, seed, needs=needs)


@interpreted
@pytest.mark.parametrize("name", ("plain", "causal_padding_min", "grouped", "bias", "dropout", "window_min", "other_order", "gate"))
def test_tiles_read_by_descriptors(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of a device that fetches boxes by itself; lengths and depths that no box divides."""
    for module in (launch, launch_backward):
        monkeypatch.setattr(module, "present", lambda _: known("cuda", 90))
        monkeypatch.setattr(module, "_runs", {})
    monkeypatch.setattr(plan, "LEAST_WORK", 0)
    described: list[tuple[str, ...]] = []
    caller = launch.caller
    monkeypatch.setattr(launch, "caller", lambda f, kernel, plan, *rest: described.append(plan.described) or caller(f, kernel, plan, *rest))
    for shape in (Shape((2, 2), 75, 90, 40, 24), Shape((1, 2), 130, 70, 16, 64)):
        operands, sizes = BY_NAME[name].inputs(shape, torch.float16, seed)
        check(BY_NAME[name].spec("float16"), operands, sizes, seed)
        check(BY_NAME[name].spec("float16"), [LAYOUTS["heads_last"](t) for t in operands[:3]] + operands[3:], sizes, seed)
    assert sum(d[:4] == ("q", "k", "v", "do") for d in described) >= 8 and described.count(("q", "k", "v")) == 4
    assert described.count(("q", "k", "v", "do", "rows")) == 4
    monkeypatch.setattr(plan, "LEAST_WORK", 2 ** 30)
    monkeypatch.setattr(launch, "_runs", {})
    described.clear()
    launch.forward(BY_NAME[name].spec("float16"), operands, sizes, torch.tensor([1]))
    assert described == [()]
    monkeypatch.setattr(plan, "LEAST_WORK", 0)
    # Rows of which a box does not begin at a multiple of 16 bytes are read by pointers.
    described.clear()
    operands, sizes = BY_NAME[name].inputs(Shape((2, 2), 40, 40, 20, 24), torch.float16, seed)
    check(BY_NAME[name].spec("float16"), operands, sizes, seed)
    assert described[0][:1] == ("v",)


BOXES = ("bias", "bias_per_head", "bias_transposed_keys", "bias_twice")
"""What is read at (i, j): of the queries' dtype for every sequence, of float32 for all of them, beside keys that lie as (…, d, j), at two places."""


def boxes(name: str, seed: int) -> tuple[AttentionSpec, list[torch.Tensor], tuple[int, ...]]:
    """A call whose bias lies so that a descriptor can read it."""
    case = BY_NAME["bias" if name == "bias" else "bias_per_head"]
    operands, sizes = case.inputs(Shape((2, 2), 75, 88, 40, 24), torch.float16, seed)
    spec = case.spec("float16")
    if name == "bias_transposed_keys":
        b0, b1, d, j = map(axis, ("b0", "b1", "d", "j"))
        spec, operands[1] = replace(spec, key=Access(1, (b0, b1, d, j))), operands[1].mT
    if name == "bias_twice":
        other = load(3, (const(0), axis("i"), axis("j")), "float")
        spec = replace(spec, score=add(spec.score, mul(const(0.5), other)))
    return spec, operands, sizes


@interpreted
@pytest.mark.parametrize("name", BOXES)
def test_floats_for_every_score_are_read_by_descriptors(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launch, launch_backward):
        monkeypatch.setattr(module, "present", lambda _: known("cuda", 90))
        monkeypatch.setattr(module, "_runs", {})
    monkeypatch.setattr(plan, "LEAST_WORK", 0)
    seen: list[str] = []
    caller = launch.caller
    monkeypatch.setattr(launch, "caller", lambda f, kernel, *rest: seen.extend(p.name for p in kernel.pointers if p.block) or caller(f, kernel, *rest))
    spec, operands, sizes = boxes(name, seed)
    check(spec, operands, sizes, seed)
    assert seen.count("bias_desc") >= 3 and seen.count("k_desc") >= 3       # forward, keys, queries


def test_what_a_descriptor_cannot_read() -> None:
    """A float for every score, and the layouts that a box does not have; keys in either order."""
    spec, operands, sizes = boxes("bias_per_head", 0)
    named = dict(zip(spec.size_names, sizes, strict=True))
    assert reads.pairs(spec) == {"pair3": 3}
    bias = torch.empty(2, 75, 88)
    asked = lambda t: reads.described(spec, named, {"pair3": t})
    assert asked(bias) == ("pair3",) and asked(bias.half()) == ("pair3",) and asked(torch.empty(2, 80, 96)[:, :75, :88]) == ("pair3",)
    for wrong in (torch.empty(2, 75, 90)[..., :88], torch.empty(2, 88, 75).mT, torch.empty(2, 75, 1).expand(-1, -1, 88), bias.double(), bias[:, :1].expand(-1, 75, -1),
                  torch.empty(2 * 75 * 88 + 1)[1:].view(2, 75, 88), torch.empty(2, 75, 96), torch.empty(2, 80, 88)):
        assert asked(wrong) == (), (wrong.shape, wrong.stride())
    i, j, b1 = axis("i"), axis("j"), axis("b1")
    other = lambda index: replace(spec, score=add(spec.score, load(3, index, "float")))
    assert reads.pairs(other((b1, j, i))) == {}, "two orders in one tensor"
    for index in ((b1, i, apply("sub", j, i)), (i, i, j), (b1, i, i), (apply("min", b1, i), i, j)):
        assert reads.pairs(replace(spec, score=load(3, index, "float"))) == {}, index
    spec, operands, sizes = boxes("bias_transposed_keys", 0)
    assert reads.described(spec, named, {"k": operands[1]}) == ("k",) and reads.described(spec, named, {"k": operands[1].contiguous()}) == ()


@pytest.mark.parametrize("block", (1, 3, 16))
@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 5), (5, 1), (4, 7), (7, 4), (6, 6)])
def test_sums_along_diagonals(rows: int, columns: int, block: int) -> None:
    """Tiles summed along block diagonals, then along their own, are a matrix summed along diagonals."""
    values = torch.randn(2, 3, rows, columns)
    apart = torch.arange(columns) - torch.arange(rows)[:, None]
    exact = torch.stack([(values * (apart == d)).sum((-1, -2)) for d in range(1 - rows, columns)], -1)
    down, across = -(-rows // block), -(-columns // block)
    tiles = torch.zeros(2, 3, diagonals.count(rows, columns, block), block, block)
    for m in range(down):
        for n in range(across):
            tile = values[..., m * block:(m + 1) * block, n * block:(n + 1) * block]
            tiles[..., n - m + down - 1, :tile.shape[-2], :tile.shape[-1]] += tile
    torch.testing.assert_close(diagonals.gathered(tiles, rows, columns), exact)


def test_what_goes_by_distance() -> None:
    b1, i, j = (axis(n) for n in ("b1", "i", "j"))
    apart = apply("sub", j, i)
    assert diagonals.by_distance((apart,)) and diagonals.by_distance((apply("min", apply("abs", apart), const(8)), b1))
    for index in ((i, j), (add(i, j),), (apply("mod", i, const(3)),), (apply("sub", j, mul(const(2), i)),), (load(3, (i, j), "int"), b1)):
        assert not diagonals.by_distance(index)


# ---- attentions that read the same bias

@interpreted
@pytest.mark.parametrize("batch, heads, groups", [(9, 2, 1), (3, 3, 1), (10, 4, 2)])
@pytest.mark.parametrize("shared", ("batch", "everything"))
def test_attentions_that_start_side_by_side(shared: str, batch: int, heads: int, groups: int, seed: int, tiles) -> None:
    """More of them than take turns, one fewer, and numbers that the turns do not divide: every tile of each is computed."""
    tiles(16, 16)
    case = variant("bias_per_head", groups=groups) if groups > 1 else BY_NAME["bias_per_head"]
    spec = case.spec()
    operands, sizes = case.inputs(Shape((batch, heads), 37, 33, 8, 8), torch.float32, seed)
    if shared == "everything":
        whole = load(3, (axis("i"), axis("j")), "float")
        spec = replace(spec, score=substitute(spec.score, {x: whole for x in loads(spec.score)}),
                       operands=(*spec.operands[:3], replace(spec.operands[3], rank=2)))
        operands[3] = operands[3][0].contiguous()
    assert sharing(spec) == (("b0", "b1") if shared == "everything" else ("b0",))
    check(spec, operands, sizes, seed)


# ---- shared keys

@interpreted
@pytest.mark.parametrize("heads", (4, 5))
@pytest.mark.parametrize("name", ("causal_padding_min", "window_min", "dropout", "alibi_causal", "bias", "rows_and_columns", "sinks", "causal_padding_inf"))
def test_groups_of_heads_share_keys(name: str, heads: int, seed: int, tiles) -> None:
    tiles(16, 16)
    run(variant(name, groups=2), Shape((2, heads), 37, 53), torch.float32, seed)
    run(variant(name, groups=2), Shape((2, heads), 53, 37), torch.float16, seed)


@interpreted
@pytest.mark.parametrize("name", ("causal_padding_min", "dropout"))
def test_all_heads_share_keys(name: str, seed: int, tiles) -> None:
    """Multi-query attention, and keys that the batch shares too."""
    tiles(16, 16)
    b0, b1, j, d, e = (axis(n) for n in ("b0", "b1", "j", "d", "e"))
    for lead, pick in (((b0,), lambda t: t[:, 0]), ((b1,), lambda t: t[0]), ((), lambda t: t[0, 0])):
        spec = BY_NAME[name].spec()
        operands, sizes = BY_NAME[name].inputs(Shape((2, 3), 37, 33), torch.float32, seed)
        operands[1:3] = [pick(t).contiguous() for t in operands[1:3]]
        facts = tuple(replace(o, rank=len(lead) + 2) if n in (1, 2) else o for n, o in enumerate(spec.operands))
        spec = replace(spec, operands=facts, key=Access(1, (*lead, j, d)), value=Access(2, (*lead, j, e)))
        check(spec, operands, sizes, seed)


@interpreted
def test_one_tensor_in_several_roles(seed: int) -> None:
    """Queries that are the keys, and all three: the gradients of the roles add up."""
    base = BY_NAME["causal_inf"].spec()
    x, y = torch.randn(2, 4, 21, 16), torch.randn(2, 4, 21, 16)
    sizes = (2, 4, 21, 21, 16, 16)
    shared = lambda n: replace(base, operands=base.operands[:n], key=Access(0, base.key.index), value=Access(n - 1, base.value.index))
    check(shared(2), [x, y], sizes, seed)
    check(shared(1), [x], sizes, seed)
    half = replace(shared(1), operands=(Operand("q", "float16", 4),), qk_dtype="float16", pv_dtype="float16", out_dtype="float16")
    check(half, [x.half()], sizes, seed)


@interpreted
def test_packed_operand(seed: int) -> None:
    """Queries, keys and values in one tensor [batch, tokens, 4 · heads · depth], of which a quarter is not read: its gradient is 0."""
    b0, b1, i, j, d, e = (axis(n) for n in ("b0", "b1", "i", "j", "d", "e"))
    place = lambda part, depth: add(mul(add(const(4 * part), b1), size("d")), depth)
    spec = AttentionSpec(("b0", "b1"), (Operand("qkv", "float32", 3),), Access(0, (b0, i, place(0, d))), Access(0, (b0, j, place(1, d))),
                         Access(0, (b0, j, place(2, e))))
    (grad,) = check(spec, [torch.randn(2, 23, 4 * 4 * 16)], (2, 4, 23, 23, 16, 16), seed)
    assert grad is not None and bool((grad[..., 3 * 64:] == 0).all()) and bool((grad[..., :3 * 64] != 0).any())


# ---- rows without keys, fills, precision

@interpreted
@pytest.mark.parametrize("name", ("causal_padding_min", "window_padding_min", "bottom_right_min", "bottom_right", "causal_padding_inf"))
def test_rows_without_keys_need_the_sweep(name: str, seed: int, tiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the visit to the skipped tiles the gradients are wrong: the other tests would see it missing."""
    tiles(16, 16)
    shape = Shape((2, 2), 75, 40) if "bottom" in name else Shape((2, 2), 75, 75)
    run(BY_NAME[name], shape, torch.float32, seed)
    for module in (emitter, launch_backward):
        monkeypatch.setattr(module, "sweeps", lambda *_: False)
    with emitted_again(tmp_path), pytest.raises(AssertionError):
        run(BY_NAME[name], shape, torch.float32, seed)


@interpreted
@pytest.mark.parametrize("name", ["causal_padding_min", "window_padding_min"])
def test_marks_of_queries_are_read_in_parts(name: str, seed: int, tiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there are more than are read at once, as in sequences of more than 16384."""
    tiles(16, 16)
    monkeypatch.setattr(emitter, "_MARKS_AT_ONCE", 2)
    with emitted_again(tmp_path):
        run(BY_NAME[name], Shape((2, 2), 75, 75), torch.float32, seed)


@interpreted
@pytest.mark.parametrize("inner, outer", [(-1e9, -3e38), (-3e38, -1e9)])
def test_two_fills_of_different_size_keep_their_order(inner: float, outer: float, seed: int, tiles) -> None:
    tiles(16, 16)
    score = where(CAUSAL, where(padding, DOT, const(inner)), const(outer))
    for dtype in (torch.float16, torch.float32):
        run(variant("causal_padding_min", score=score), Shape((2, 2)), dtype, seed)


@interpreted
def test_scores_below_the_fills_lose_to_them(seed: int, tiles) -> None:
    """Rows whose allowed scores lie around float16's least number, with others of ordinary size beside them."""
    tiles(16, 16)
    case = BY_NAME["causal_half_min"]
    operands, sizes = case.inputs(Shape((2, 2), 40, 40), torch.float16, seed)
    operands[0][:, :, 5:30] = 180.0 + 1e-1 * operands[0][:, :, 5:30]
    operands[1][:, 0] = -180.0 + 1e-1 * operands[1][:, 0]
    out, _ = launch.forward(case.spec("float16"), operands, sizes)
    exact = reference(case.spec("float16"), operands, sizes, dtype=torch.float64)
    # The last place of a float32 score of 65504 is 0.004, and the weights follow it.
    assert ((out.double() - exact).norm() / exact.norm()).item() < 1e-2
    check(case.spec("float16"), operands, sizes, seed, needs=(False, False, True, False), limits=(1e-2, 1e-2))


@interpreted
@pytest.mark.parametrize("name", ("causal_padding_min", "sinks", "dropout", "causal_padding_zero"))
def test_statistics_of_the_walker_will_do(name: str, seed: int) -> None:
    operands, sizes = BY_NAME[name].inputs(Shape((1, 2)), torch.float16, seed)
    check(BY_NAME[name].spec("float16"), operands, sizes, seed, statistics="walker")


@interpreted
@pytest.mark.parametrize("dtype, qk, pv, out", [("float16", "float32", "float32", "float16"), ("float16", "float16", "float32", "float32"),
                                                ("float32", "float16", "float16", "float16"), ("float16", "float32", "float32", "float32")])
def test_precision_of_the_products(dtype: str, qk: str, pv: str, out: str, seed: int) -> None:
    """What the spec keeps in float32 is not rounded on the way: then only the gradients themselves are, to the operand's dtype."""
    case = BY_NAME["causal_inf"]
    spec = replace(case.spec(dtype), qk_dtype=qk, pv_dtype=pv, out_dtype=out)
    operands, sizes = case.inputs(Shape((1, 2)), getattr(torch, dtype), seed)
    grads = check(spec, operands, sizes, seed)
    if (qk, pv, out) == ("float32", "float32", "float32"):
        grad_out = torch.randn((1, 2, 33, 16), generator=torch.Generator().manual_seed(seed))
        for got, want in zip(grads, truth(spec, operands, sizes, None, grad_out, (True,) * 3), strict=True):
            assert got is not None and want is not None
            assert (got.double() - want).norm() <= 3e-4 * want.norm()           # half a unit in float16's last place is 4.9e-4 at most


# ---- the machinery

@interpreted
def test_every_run_gives_the_same_bits(seed: int) -> None:
    case = variant("dropout", groups=2)
    operands, sizes = case.inputs(Shape(), torch.float16, seed)
    first, second = (check(case.spec("float16"), operands, sizes, seed) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None)


@interpreted
def test_a_second_call_reuses_everything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["causal_padding_min"]
    for n in range(2):
        operands, sizes = case.inputs(Shape(), torch.float32, seed + n)
        check(case.spec(), operands, sizes, seed + n)
        monkeypatch.setattr(launch_backward, "_prepare", None)


@interpreted
def test_out_of_resources_never_reaches_the_user(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    tried: list[KernelPlan] = []
    caller = launch.caller

    def refuse_every_first(function: object, kernel: object, plan: KernelPlan, *rest: object):
        tried.append(plan)
        if len(tried) % 2:
            def fail(_: object) -> None:
                raise OutOfResources(300000, 232448, "shared memory")
            return fail
        return caller(function, kernel, plan, *rest)

    operands, sizes = BY_NAME["causal_inf"].inputs(Shape(), torch.float32, seed)
    launch.forward(BY_NAME["causal_inf"].spec(), operands, sizes)           # bound before it is refused
    monkeypatch.setattr(launch, "caller", refuse_every_first)
    monkeypatch.setattr(launch_backward, "_runs", {})
    check(BY_NAME["causal_inf"].spec(), operands, sizes, seed)
    assert len(tried) == 6 and all(a != b for a, b in zip(tried[::2], tried[1::2], strict=True))


def refused(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], needs: Sequence[bool]) -> str:
    out, stats = walker.forward(spec, operands, sizes, torch.tensor([1]) if spec.dropouts else None)
    with pytest.raises(launch.Unsupported) as problem:
        launch.backward(spec, torch.ones_like(out), operands, out, stats, sizes, None, needs)
    return str(problem.value)


@interpreted
def test_what_has_no_kernel_says_why(seed: int) -> None:
    b0, b1, j, d, e = (axis(n) for n in ("b0", "b1", "j", "d", "e"))
    base = BY_NAME["plain"].spec()
    operands, sizes = BY_NAME["plain"].inputs(Shape(), torch.float32, seed)
    half = apply("floordiv", b1, const(2))
    assert "different heads" in refused(replace(base, key=Access(1, (b0, half, j, d))), operands, sizes, [True] * 3)
    twisted = apply("mod", b1, const(2))
    both = replace(base, key=Access(1, (b0, twisted, j, d)), value=Access(2, (b0, twisted, j, e)))
    assert "gradient of k" in refused(both, operands, sizes, [True] * 3)
    chosen = replace(base, operands=(*base.operands, Operand("pages", "int64", 1)), key=Access(1, (b0, b1, load(3, (j,), "int"), d)))
    assert refused(chosen, [*operands, torch.zeros(33, dtype=torch.int64)], sizes, [True] * 3 + [False])
