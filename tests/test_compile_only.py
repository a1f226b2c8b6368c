"""Generated kernels compiled for devices that are not here: shared memory within limits, predictions sane, no spills; and their text."""
from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from attnfuse.codegen import backward, backward_keys, backward_queries, emission, launch, launch_backward, offline, plan_backward, plan_forward
from attnfuse.codegen.jobs import ROWS, Job
from attnfuse.codegen.task import task
from attnfuse.codegen.tiles import known
from attnfuse.spec import AttentionSpec, dtype_of
from tests.emitted import emitted_again
from tests.sass import misread_descriptors
from tests.specs import BY_NAME, Case, Shape

pytestmark = pytest.mark.skipif(launch.interpreting(), reason="the interpreter compiles nothing")

TARGETS: tuple[offline.Target, ...] = (("cuda", 80), ("cuda", 90), ("cuda", 100), ("hip", "gfx942"))
NAMES = ("plain", "causal_inf", "causal_padding_min", "window", "alibi_causal", "bias", "softcap_causal", "dropout", "sinks", "gathered",
         "bias_per_head", "rows_and_columns")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNFUSE_CACHE_DIR", str(tmp_path))


def meta(case: Case, dtype: str, depth: int, queries: int = 1024) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    operands, sizes = case.inputs(Shape((4, 16), queries, 1024, depth, depth), getattr(torch, dtype), 0)
    return [t.to("meta") for t in operands], sizes


def check(name: str, dtype: str, depth: int, target: offline.Target, queries: int = 1024) -> None:
    case = BY_NAME[name]
    operands, sizes = meta(case, dtype, depth, queries)
    report = offline.compile_only(case.spec(dtype), sizes, operands, target)
    limit = known(*target).shared
    assert report.shared <= limit and report.plan.shared <= limit
    # Where a read's index was read the compiler may take fewer bytes for it, by rules that were not found.
    assert near(report, upwards=name == "gathered"), (report.shared, report.plan)
    assert report.columns <= offline.COLUMNS
    assert (report.spills or 0) <= tolerated(name, dtype, depth, target), report
    if target == ("cuda", 90):
        assert report.cubin and not misread_descriptors(offline.cuobjdump(report.cubin, "--dump-sass"))


def near(report: offline.Compiled, upwards: bool = False) -> bool:
    """Whether shared memory was predicted: within a tenth, or 2 KiB of what the compiler takes; `upwards`: or more."""
    distance = report.plan.shared - report.shared
    return distance >= -max(0.1 * report.shared, 2048) and (upwards or distance <= max(0.1 * report.shared, 2048))


def tolerated(name: str, dtype: str, depth: int, target: offline.Target) -> int:
    """Bytes a thread that may lie in local memory, by Triton 3.6: limits for what changes by accident. On Hopper half types spill nothing and float32 a
    few registers, for what spills less was measured to be slower; elsewhere nothing was measured, and AMD's kernels of float32 are not tuned."""
    if target[0] == "hip":
        return 16384 if dtype == "float32" else 1024 if depth > 128 or name == "gathered" else 384 if name == "dropout" or depth == 40 else 64
    if target == ("cuda", 90) and triton.__version__.startswith("3.6."):
        return 64 if dtype == "float32" else 0 if depth in (64, 128, 256) else 16
    if dtype == "float32":
        return 64
    return 256 if depth > 128 or name == "gathered" else 96 if name == "dropout" or depth == 40 else 16


def narrow(name: str, depth: int, value_depth: int) -> list[str]:
    """Products that read a wrong descriptor in a kernel whose values are narrow."""
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape((4, 16), 77, 512, depth, value_depth), torch.bfloat16, 0)
    report = offline.compile_only(case.spec("bfloat16"), sizes, [t.to("meta") for t in operands], ("cuda", 90))
    assert report.cubin is not None
    return misread_descriptors(offline.cuobjdump(report.cubin, "--dump-sass"))


@pytest.mark.parametrize("depth, value_depth", [(32, 16), (32, 32), (256, 16), (64, 40)])
def test_narrow_values_are_compiled_right(depth: int, value_depth: int) -> None:
    assert not narrow("causal_padding_min", depth, value_depth)


@pytest.mark.parametrize("added, wrong", [("UMOV UR8, 0x80", False), ("R2UR UR8, R9", True), ("UIADD3 UR8, UR9, UR10, URZ", True)])
def test_an_address_and_a_constant_are_an_address(added: str, wrong: bool) -> None:
    code = ("USGXT.U32 UR4, UR3, 0xe", added, "UIADD3.64 UR6, UR4, UR8, URZ", "HGMMA.64x64x16.F32.BF16 R24, R104, gdesc[UR4].tnspB, R24")
    text = "\n".join(f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(code))
    assert bool(misread_descriptors(text)) == wrong


def test_the_fault_that_narrow_values_avoid_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the least width the fault of the compiler that Triton 3.6 brings is there and found; later ones are mended."""
    if not triton.__version__.startswith("3.6."):
        pytest.skip("another ptxas")
    monkeypatch.setattr(plan_forward, "LEAST_VALUE_WIDTH", 16)
    assert narrow("causal_padding_min", 256, 16)


@pytest.mark.parametrize("name, dtype, depth, target", [
    ("plain", "bfloat16", 128, ("cuda", 90)), ("causal_padding_min", "bfloat16", 64, ("cuda", 90)),
    ("causal_padding_min", "float16", 128, ("cuda", 80)), ("bias", "bfloat16", 64, ("cuda", 100)),
    ("causal_inf", "bfloat16", 128, ("hip", "gfx942")), ("plain", "float32", 64, ("cuda", 90)), ("dropout", "bfloat16", 40, ("cuda", 90)),
    ("causal_inf", "float32", 256, ("cuda", 90)), ("causal_inf", "float32", 128, ("cuda", 80)), ("causal_inf", "float32", 128, ("cuda", 100)),
])
def test_resources(name: str, dtype: str, depth: int, target: offline.Target) -> None:
    check(name, dtype, depth, target)


def test_one_query() -> None:
    check("bottom_right_min", "bfloat16", 128, ("cuda", 90), queries=1)


@pytest.mark.parametrize("target, depth", [(("cuda", 80), 128), (("cuda", 100), 64)], ids=str)
def test_a_shape_that_no_table_has(target: offline.Target, depth: int) -> None:
    """Few programs: the planner takes a shape that was only enumerated."""
    case = BY_NAME["causal_inf"]
    operands, sizes = case.inputs(Shape((1, 8), 100, 1024, depth, depth), torch.bfloat16, 0)
    report = offline.compile_only(case.spec("bfloat16"), sizes, [t.to("meta") for t in operands], target)
    assert any("predicted fastest" in r for r in report.plan.reasons)       # and by Triton 3.9 with all registers
    assert near(report) and (report.spills or 0) <= 16        # 8 by Triton 3.9, for Ampere


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t[1]))
def test_every_plan_that_may_follow(target: offline.Target, seed: int) -> None:
    """Not only the first: forty of all plans that candidates give, for random attentions, fit the device and are no worse than told."""
    rng = random.Random(seed)
    for _ in range(40):
        name, depth, queries = rng.choice(NAMES), rng.choice((16, 40, 64, 80, 128, 256)), rng.choice((1, 40, 1024))
        case = BY_NAME[name]
        operands, sizes = case.inputs(Shape((2, 4), queries, 1024, depth, depth), torch.bfloat16, 0)
        spec, tensors = case.spec("bfloat16"), [t.to("meta") for t in operands]
        plans = launch.plans(spec, tensors, sizes, known(*target))
        plan = rng.choice((*plans, *launch.roomier(spec, tensors, sizes, known(*target), plans[0])))
        report = offline.compile_only(spec, sizes, tensors, target, plan)
        assert report.shared <= known(*target).shared and report.shared <= 1.1 * plan.shared + 2048, (name, depth, plan)
        if target == ("cuda", 90):
            assert report.cubin and not misread_descriptors(offline.cuobjdump(report.cubin, "--dump-sass")), (name, depth, plan)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t[1]))
@pytest.mark.parametrize("depth", (16, 32, 40, 64, 80, 96, 128, 256))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("name", NAMES)
def test_every_resource(name: str, dtype: str, depth: int, target: offline.Target) -> None:
    if dtype == "float32" and depth == 256 and (target[0] == "hip" or name == "gathered"):
        pytest.skip("a kernel that nobody tuned: right, and slow")
    check(name, dtype, depth, target)


def test_every_candidate_fits_and_a_smaller_one_follows() -> None:
    case = BY_NAME["bias"]
    for dtype in ("bfloat16", "float32"):
        for depth in (16, 64, 128, 256):
            operands, sizes = meta(case, dtype, depth)
            for target in (*TARGETS, ("cuda", 89), ("cuda", 12345)):
                device = known(*target)
                plans = launch.plans(case.spec(dtype), operands, sizes, device)
                assert len(plans) >= 2
                assert all(p.shared <= device.shared or p.block_m == 16 for p in plans)
                first, last = ((p.shared, p.block_m, p.warps) for p in (plans[0], plans[-1]))
                assert last < first


# ---- backward

Shape4 = tuple[int, int, int, int] | None
QUERIES, KEYS_VALUES = Job("queries", query=True), Job("keys", key=True, value=True)


def tolerated_backward(name: str, dtype: str, depth: int, target: offline.Target) -> int:
    """As `tolerated`: on Hopper two registers of a soft cap; of exact products at 256 nearly all that the kernel of the queries has."""
    if target[0] == "hip":
        return 16384 if dtype == "float32" else 4608 if depth > 128 else 1280 if depth > 64 else 512 if depth == 40 else 256
    if target == ("cuda", 90) and triton.__version__.startswith("3.6."):
        return (64 if depth <= 128 else 1024) if dtype == "float32" else 8
    if dtype == "float32":
        return 192 if depth > 64 else 64
    return 1152 if depth > 128 else 320 if depth > 64 else 128 if depth == 40 else 64


def check_backward(name: str, dtype: str, depth: int, target: offline.Target, value_depth: int = 0) -> None:
    """Each backward kernel: within the device, no spills beyond what is told, no product that reads a wrong descriptor."""
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape((4, 16), 1024, 1024, depth, value_depth or depth), getattr(torch, dtype), 0)
    spec, tensors = case.spec(dtype), [t.to("meta") for t in operands]
    for what in kernels(spec, tensors, sizes, target):
        report = offline.compile_backward(spec, sizes, tensors, target, what)
        limit = known(*target).shared
        assert report.shared <= limit and report.plan.shared <= limit
        assert near(report), (what, report.shared, report.plan)
        assert report.columns <= offline.COLUMNS
        assert (report.spills or 0) <= tolerated_backward(name, dtype, depth, target), (what, report)
        if target == ("cuda", 90):
            assert report.cubin and not misread_descriptors(offline.cuobjdump(report.cubin, "--dump-sass")), what


@pytest.mark.parametrize("name, dtype, depth, value_depth, target", [
    ("causal_inf", "bfloat16", 128, 128, ("cuda", 90)), ("causal_padding_min", "bfloat16", 64, 64, ("cuda", 90)),
    ("plain", "bfloat16", 32, 16, ("cuda", 90)), ("grouped", "float16", 64, 64, ("cuda", 80)), ("bias", "bfloat16", 128, 128, ("cuda", 90)),
    ("causal_inf", "float32", 64, 64, ("cuda", 90)), ("causal_padding_min", "float16", 128, 128, ("cuda", 80)),
    ("causal_inf", "float32", 64, 64, ("cuda", 80)), ("causal_inf", "float32", 64, 64, ("cuda", 100)), ("bias", "float32", 128, 128, ("cuda", 80)),
])
def test_backward_resources(name: str, dtype: str, depth: int, value_depth: int, target: offline.Target) -> None:
    check_backward(name, dtype, depth, target, value_depth)


def spills_of(name: str, depth: int, what: Job | None, shape: Shape4 = None, dtype: str = "bfloat16", **changes: int) -> int:
    """Bytes a thread that a kernel's first plan spills on Hopper, with another `shape` or other `changes`."""
    operands, sizes = meta(BY_NAME[name], dtype, depth)
    spec, card, out = BY_NAME[name].spec(dtype), known("cuda", 90), operands[0]
    named = dict(zip(spec.size_names, sizes, strict=True))
    plan = launch_backward.plans(spec, (out, out), operands, named, card, what)[0] if what else launch.plans(spec, operands, sizes, card)[0]
    if shape:
        plan = replace(plan, **dict(zip(("block_m", "block_n", "warps", "stages"), shape, strict=True)))
    plan = replace(plan, **changes)
    report = offline.compile_backward(spec, sizes, operands, ("cuda", 90), what, plan) if what else \
        offline.compile_only(spec, sizes, operands, ("cuda", 90), plan)
    assert report.spills is not None
    return report.spills


def test_what_does_not_change_in_a_loop_stays_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hoisted out of the loop over cut tiles, descriptors of tiles in shared memory would spill."""
    joint: Shape4 = (64, 64, 8, 2)
    assert spills_of("causal_inf", 256, KEYS_VALUES, joint) <= 16
    monkeypatch.setattr(emission.Emission, "loop", lambda self, variable, span, stages=0: (
        f"for {variable} in tl.range({span}{f', num_stages={stages}' if stages else ''}):"))
    with emitted_again(tmp_path / "again"):
        assert spills_of("causal_inf", 256, KEYS_VALUES, joint) >= 128


def test_gradients_of_keys_and_values_have_the_registers_they_need() -> None:
    """At 256 one kernel of both spills for what is computed beside them."""
    apart = [job for job in jobs_of("softcap_causal", 256) if job.kind == "keys"]
    assert [job.name for job in apart] == ["keys", "values"]
    assert all(spills_of("softcap_causal", 256, job) <= 8 for job in apart)
    assert spills_of("softcap_causal", 256, KEYS_VALUES, (64, 64, 8, 2)) >= 32


def test_in_pieces_float32_has_the_registers_it_needs() -> None:
    for depth, what, shape in ((128, None, None), (256, QUERIES, (64, 32, 8, 1))):
        pieces, whole = (spills_of("causal_inf", depth, what, shape, "float32", **changes) for changes in ({}, {"piece": 0}))
        assert whole >= 16 and 2 * pieces <= whole, (depth, pieces, whole)


def test_exact_sums_of_pieces_do_not_wait_in_registers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The assembler would add them up at the end of a block."""
    assert max(spills_of("causal_inf", 256, what, dtype="float32") for what in (None, VALUES)) <= 64        # 16 by Triton 3.6
    monkeypatch.setattr(emission.Emission, "_in_order", lambda *_: False)
    with emitted_again(tmp_path / "again"):
        assert min(spills_of("causal_inf", 256, what, dtype="float32") for what in (None, VALUES)) >= 128


VALUES = Job("keys", value=True)


@pytest.mark.parametrize("target, depth, what, shape", [
    (("cuda", 90), 128, VALUES, (64, 64, 4, 1)), (("cuda", 90), 256, VALUES, (64, 64, 8, 1)), (("cuda", 90), 256, VALUES, (64, 128, 8, 1)),
    (("cuda", 80), 128, VALUES, (32, 64, 8, 1)), (("cuda", 80), 64, VALUES, (32, 64, 4, 1)), (("cuda", 80), 256, VALUES, (32, 32, 8, 1)),
    (("cuda", 100), 128, VALUES, (64, 64, 4, 1)), (("cuda", 90), 128, QUERIES, (64, 64, 8, 1)), (("cuda", 90), 256, QUERIES, (64, 64, 8, 1)),
], ids=str)
def test_what_one_product_takes_leaves_its_place(target: offline.Target, depth: int, what: Job, shape: tuple[int, int, int, int]) -> None:
    """Shared memory of kernels in one stage, where nothing waits in a pipeline."""
    operands, sizes = meta(BY_NAME["plain"], "bfloat16", depth)
    spec, card = BY_NAME["plain"].spec("bfloat16"), known(*target)
    named = dict(zip(spec.size_names, sizes, strict=True))
    request = launch_backward.request_for(spec, (operands[0], operands[0]), operands, named, card)
    plan = plan_backward._plan(spec, request, card, plan_backward.work_for(spec, request, card, what), shape, what, ())
    assert near(offline.compile_backward(spec, sizes, operands, target, what, plan))


def test_what_computes_much_takes_smaller_tiles() -> None:
    for name, what, larger in (("mask_after", None, (128, 64, 4, 2)), ("dropout_twice", KEYS_VALUES, (64, 64, 4, 2))):
        assert spills_of(name, 128, what) <= 32 and spills_of(name, 128, what, larger) >= 64, name
    operands, sizes = meta(BY_NAME["softcap"], "bfloat16", 128)
    assert launch.plans(BY_NAME["softcap"].spec("bfloat16"), operands, sizes, known("cuda", 90))[0].shape == (64, 64, 4, 3)
    for simple in ("plain", "alibi", "prefix", "scale_by_depth"):
        operands, sizes = meta(BY_NAME[simple], "bfloat16", 128)
        assert launch.plans(BY_NAME[simple].spec("bfloat16"), operands, sizes, known("cuda", 90))[0].shape == (128, 64, 4, 2)


@pytest.mark.parametrize("inside", (False, True))
def test_loops_over_tiles_by_pointers_hoist_where_operands_would_stay_inside(inside: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As by Triton 3.9; those over tiles by descriptors and over few tiles never do."""
    monkeypatch.setattr(emission, "_keeps_operands_inside", lambda: inside)
    with emitted_again(tmp_path / "again"):
        for dtype, hoists in (("float32", inside), ("bfloat16", False)):            # which come by pointers, and by descriptors
            heads = [line for line in backward_text("causal_inf", QUERIES, dtype).splitlines() if "in tl.range(" in line]
            assert ["disable_licm=True" not in line for line in heads] == [hoists, False], dtype


def test_delta_is_read_late_where_registers_are_scarce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, late in (("causal_inf", False), ("alibi_causal", False), ("dropout", True), ("softcap_causal", True), ("grouped", True)):
        full = loops(backward_text(name, KEYS_VALUES, depth=128))[-2]
        assert (full.index("delta = ") > full.index("dp = tl.dot")) == late, name
    assert "delta = " in backward_text("dropout", QUERIES)
    assert spills_of("dropout", 128, KEYS_VALUES) <= 32        # nothing by Triton 3.6
    monkeypatch.setattr(backward_keys.Keys, "_is_crowded", lambda self: False)
    with emitted_again(tmp_path / "again"):
        assert spills_of("dropout", 128, KEYS_VALUES) >= 48


def test_where_a_gradient_is_stored_for_every_score_the_rows_offset_is_one_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Added to every row's own offset it would make 64 bits of each."""
    storing = {depth: next(j for j in jobs_of("bias", depth) if j.kind == "queries") for depth in (64, 128, 256)}
    assert all(j.captured and spills_of("bias", depth, j) <= 16 for depth, j in storing.items())
    text = backward_text("bias", storing[128], depth=128)
    assert text.count("bias_ptr + first_row * n_keys + (offs_m[:, None] * n_keys + offs_n[None, :])") == 2
    original = backward_queries.Queries._add_captured
    monkeypatch.setattr(backward_queries.Queries, "_add_captured", lambda self, one, tile: [line.replace(
        "first_row * n_keys + (offs_m[:, None] * n_keys + offs_n[None, :])", "(first_row + offs_m)[:, None] * n_keys + offs_n[None, :]")
        for line in original(self, one, tile)])
    with emitted_again(tmp_path / "again"):
        assert spills_of("bias", 128, storing[128]) >= (40 if triton.__version__.startswith("3.6.") else 8)


def jobs_of(name: str, depth: int = 64) -> tuple[Job, ...]:
    """The backward kernels of an attention all of whose floats need a gradient."""
    operands, sizes = meta(BY_NAME[name], "bfloat16", depth)
    spec = BY_NAME[name].spec("bfloat16")
    return kernels(spec, operands, sizes)


def kernels(spec: AttentionSpec, operands: list[torch.Tensor], sizes: tuple[int, ...], target: offline.Target = ("cuda", 90)) -> tuple[Job, ...]:
    """The same for a spec, as a device runs them."""
    named = dict(zip(spec.size_names, sizes, strict=True))
    out = torch.empty([named[a] for a in spec.out_axes], dtype=dtype_of(spec.out_dtype), device="meta")
    request = launch_backward.request_for(spec, (out, out), operands, named, known(*target))
    wanted = task(spec, operands, named, [t.is_floating_point() for t in operands])
    return plan_backward.arranged(spec, request, known(*target), wanted.jobs)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t[1]))
@pytest.mark.parametrize("depth", (16, 32, 40, 64, 80, 96, 128, 256))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("name", ("plain", "causal_inf", "causal_padding_min", "window", "bias", "dropout", "softcap_causal", "grouped"))
def test_every_backward_resource(name: str, dtype: str, depth: int, target: offline.Target) -> None:
    check_backward(name, dtype, depth, target)


def test_dropout_leaves_three_blocks_of_the_queries_kernel_to_a_processor() -> None:
    case = BY_NAME["dropout"]
    operands, sizes = case.inputs(Shape((4, 16), 1024, 1024, 64, 64), torch.float16, 0)
    report = offline.compile_backward(case.spec("float16"), sizes, [t.to("meta") for t in operands], ("cuda", 90), QUERIES)
    assert report.registers is not None and report.registers <= 168 and not report.spills
    assert 3 * report.shared <= 228 * 1024


def backward_text(name: str, what: Job, dtype: str = "bfloat16", depth: int = 64) -> str:
    """The source of a backward kernel."""
    case = BY_NAME[name]
    operands, sizes = meta(case, dtype, depth)
    spec = case.spec(dtype)
    named = dict(zip(spec.size_names, sizes, strict=True))
    out = operands[0]
    return backward.emit(spec, launch_backward.plans(spec, (out, out), operands, named, known("cuda", 90), what)[0], what).source


def test_full_tiles_of_backward_have_no_mask_code() -> None:
    for what in (KEYS_VALUES, QUERIES):
        full, cut, *_ = loops(backward_text("causal_inf", what))
        assert "mask" not in full and "where" not in full
        assert "<= offs_m" in cut and "_mask" in cut


def test_backward_sweeps_only_where_something_was_skipped_that_counts() -> None:
    for what in (KEYS_VALUES, QUERIES):
        assert "unseen" in backward_text("causal_padding_min", what) and len(loops(backward_text("causal_padding_min", what))) == 2
        assert "unseen" not in backward_text("plain", what) and "unseen" not in backward_text("causal_padding_zero", what)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_backward_files_are_python(name: str) -> None:
    for what in (ROWS, KEYS_VALUES, QUERIES, Job("keys", key=True), Job("keys", value=True)):
        source = backward_text(name, what)
        compile(source, name, "exec")
        assert max(map(len, source.splitlines())) <= 190


# ---- weights

def check_weights(name: str, dtype: str, depth: int, target: offline.Target) -> None:
    """The kernel of weights: within the device, no spills beyond forward's, no product that reads a wrong descriptor."""
    operands, sizes = meta(BY_NAME[name], dtype, depth)
    report = offline.compile_weights(BY_NAME[name].spec(dtype), sizes, operands, target)
    limit = known(*target).shared
    assert report.shared <= limit and report.plan.shared <= limit
    assert report.shared <= 1.05 * report.plan.shared + 1024, (report.shared, report.plan)
    assert report.columns <= offline.COLUMNS
    assert (report.spills or 0) <= tolerated(name, dtype, depth, target), report
    if target == ("cuda", 90):
        assert report.cubin and not misread_descriptors(offline.cuobjdump(report.cubin, "--dump-sass"))


@pytest.mark.parametrize("name, dtype, depth, target", [
    ("causal_inf", "bfloat16", 128, ("cuda", 90)), ("causal_padding_min", "float16", 64, ("cuda", 80)), ("dropout", "bfloat16", 64, ("cuda", 100)),
    ("gate", "bfloat16", 64, ("cuda", 90)), ("window", "bfloat16", 16, ("cuda", 90)), ("sinks", "bfloat16", 64, ("hip", "gfx942")),
])
def test_resources_of_weights(name: str, dtype: str, depth: int, target: offline.Target) -> None:
    check_weights(name, dtype, depth, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t[1]))
@pytest.mark.parametrize("depth", (16, 40, 64, 128, 256))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("name", (*NAMES, "gate", "grouped"))
def test_every_resource_of_weights(name: str, dtype: str, depth: int, target: offline.Target) -> None:
    check_weights(name, dtype, depth, target)


# ---- the text

def text(name: str, dtype: str = "bfloat16", depth: int = 64) -> str:
    case = BY_NAME[name]
    operands, sizes = meta(case, dtype, depth)
    return launch.source(case.spec(dtype), sizes, operands, known("cuda", 90))


def loops(source: str) -> list[str]:
    """The bodies of the loops over tiles, in order."""
    kernel = source.split('if __name__ == "__main__"')[0]
    return [body for _, body in re.findall(r"^((?:    )+)for (?!start_mark)[^\n]*:\n((?:\1    [^\n]*\n)+)", kernel, re.M)]


def test_full_tiles_have_no_mask_code() -> None:
    full, cut = loops(text("causal_inf"))
    assert "mask" not in full and "where" not in full.replace('tl.where(new_max == float("-inf")', "")
    assert "n_mask" in cut and "offs_n[None, :] <= offs_m[:, None]" in cut


def test_what_depends_on_the_row_is_computed_before_the_loop() -> None:
    source = text("rows_and_columns")
    before = source[:source.index("    for start_n")]
    assert "rows = tl.load(" in before
    assert all("rows = tl.load(" not in body and "columns = tl.load(" in body for body in loops(source))
    assert all("slopes = tl.load" not in body for body in loops(text("alibi")))


def test_only_speculative_specs_sweep() -> None:
    assert len(loops(text("causal_inf"))) == 2 and "unseen" not in text("causal_inf")
    assert len(loops(text("causal_padding_min"))) == 3 and "unseen" in text("causal_padding_min")
    assert "unseen" not in text("integer_mask")         # nothing is skipped


def test_the_scale_and_log2e_are_one_factor_where_no_fill_is_large() -> None:
    assert f"qk * {0.125 * 1.4426950408889634!r}" in text("plain")
    assert "row_max - safe_max) * 1.44" in text("bias")             # a loaded mask may hold finfo.min


def test_a_large_fill_is_computed_with_only_in_rows_that_see_nothing_else() -> None:
    for name in ("causal_min", "causal_added", "causal_padding_1e9"):
        full, cut, again = loops(text(name))
        assert "e+" not in full + cut and "1000000000.0" not in full + cut and ("e+" in again or "1000000000.0" in again)
        assert "(row_max - safe_max) *" in again and "row_max - safe_max)\n" in full
        for job in (KEYS_VALUES, QUERIES):
            full, cut = loops(backward_text(name, job))
            assert "- shift" in full and "e+" not in full and "- largest" in cut and "- shift" not in cut
    assert len(loops(text("causal_inf"))) == 2 and "- largest" not in backward_text("causal_inf", KEYS_VALUES)


def test_a_head_dimension_that_is_a_power_of_two_needs_no_mask() -> None:
    assert "d_mask" not in text("plain") and "d_mask" in text("plain", depth=72)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_file_is_python_and_explains_itself(name: str) -> None:
    source = text(name)
    compile(source, name, "exec")
    assert source.startswith('"""attention_forward') and "Plan: BLOCK_M=" in source and "self_check(" in source
    assert max(len(line) for line in source.split('if __name__ ==')[0].splitlines()) <= 180


def test_the_source_does_not_depend_on_lengths() -> None:
    case = BY_NAME["causal_padding_min"]
    kernels = set()
    for queries in (700, 1024, 1500):
        operands, sizes = meta(case, "bfloat16", 64, queries)
        kernels.add(launch.plans(case.spec("bfloat16"), operands, sizes, known("cuda", 90))[0])
    assert len(kernels) == 1


def test_what_has_no_kernel_says_why() -> None:
    plain = BY_NAME["plain"]
    operands, sizes = plain.inputs(Shape(), torch.float64, 0)
    with pytest.raises(launch.Unsupported, match="float64"):
        launch.forward(plain.spec("float64"), operands, sizes)
    operands, sizes = plain.inputs(Shape(), torch.float32, 0)
    with pytest.raises(launch.Unsupported, match="needs a GPU"):
        launch.forward(plain.spec(), operands, sizes)
    operands, sizes = plain.inputs(Shape(depth=300), torch.float32, 0)
    with pytest.raises(launch.Unsupported, match="up to 256"):
        launch.source(plain.spec(), sizes, operands, known("cuda", 90))
    with pytest.raises(ValueError, match="the spec says"):
        launch.source(replace(plain).spec("float16"), sizes, operands, known("cuda", 90))
