"""Plans of which two blocks share a processor, and loops over cut tiles that wait for one load less."""
from __future__ import annotations

import pytest
import torch
import triton

from attnfuse.codegen import launch, launch_backward, offline, plan_backward, plan_forward
from attnfuse.codegen.jobs import Job
from attnfuse.codegen.plan import KernelPlan, Request
from attnfuse.codegen.task import task
from attnfuse.codegen.tiles import KIB, known
from attnfuse.program import add, apply, const, load, mul, where
from attnfuse.spec import AttentionSpec
from tests.sass import misread_descriptors
from tests.specs import BY_NAME, CAUSAL, INF, PADDING, SCALED, Captured, Case, Shape, b1, both, i, j, padding, randn, variant, with_map

pytestmark = pytest.mark.skipif(launch.interpreting(), reason="the interpreter compiles nothing")
H200 = known("cuda", 90)
OF_THE_GPU = triton.__version__.startswith("3.6.")
"""The Triton with which the plans were measured; 3.9 spills a little more in as many registers."""
LONG = Shape((4, 16), 1024, 1024, 128, 128)
BIAS = Captured("bias", None, 3, randn("b1", "i", "j"))
FIRST, SECOND = (load(n, (b1, i, j), "float") for n in (3, 4))
BIASED = Case("biased", add(SCALED, FIRST), captured=(BIAS,))
CAPPED = mul(const(20.0), apply("tanh", mul(const(0.05), SCALED)))
DOCUMENTS = BY_NAME["segments"].score.args[0]

SHARED = {
    "a bias": BIASED,
    "and causal": Case("causal", where(CAUSAL, add(SCALED, FIRST), const(INF)), captured=(BIAS,)),
    "and padding": Case("padded", where(padding, add(SCALED, SECOND), const(INF)), captured=(PADDING, BIAS)),
}
ALONE = {
    "a bias in float32 leaves no room": variant("bias_per_head"),
    "two biases leave none": Case("two", add(add(SCALED, FIRST), SECOND), captured=(BIAS, BIAS)),
    "a softcap takes registers": Case("capped", add(CAPPED, FIRST), captured=(BIAS,)),
    "so does a mask of keys in cut tiles": Case("both", where(both(CAUSAL, padding), add(SCALED, SECOND), const(INF)), captured=(PADDING, BIAS)),
    "dropout draws": Case("dropped", add(SCALED, FIRST), BY_NAME["dropout"].weight, captured=(BIAS,)),
}
"""Of forward; what is alone for its room or its cut tiles in forward may not be in the kernel of tiles."""


def call(case: Case, shape: Shape = LONG) -> tuple[AttentionSpec, list[torch.Tensor], tuple[int, ...]]:
    operands, sizes = case.inputs(shape, torch.bfloat16, 0)
    return case.spec("bfloat16"), [t.to("meta") for t in operands], sizes


def forward(case: Case, shape: Shape = LONG, target: tuple[str, int] = ("cuda", 90)) -> KernelPlan:
    return launch.plans(*call(case, shape), known(*target))[0]


def wanted(case: Case, shape: Shape = LONG) -> tuple[Request, Job]:
    """Of the kernel of tiles, for the gradient of the bias: what the planner is asked, and what it does."""
    spec, operands, sizes = call(case, shape)
    named = dict(zip(spec.size_names, sizes, strict=True))
    job = next(x for x in task(spec, operands, named, [t.is_floating_point() for t in operands]).jobs if x.kind == "tiles")
    out = torch.empty([named[a] for a in spec.out_axes], dtype=torch.bfloat16, device="meta")
    return launch_backward.request_for(spec, (out, out), operands, named, H200), job


def backward(case: Case, shape: Shape = LONG) -> tuple[KernelPlan, Job]:
    """The first plan of the kernel of tiles."""
    request, job = wanted(case, shape)
    return plan_backward.candidates(case.spec("bfloat16"), request, H200, job)[0], job


def said(plan: KernelPlan) -> bool:
    return any("two programs share a processor" in x for x in plan.reasons)


def fits_twice(report: offline.Compiled, spills: int) -> bool:
    """By what the compiler says: shared memory and registers of two blocks, at most so many bytes spilled, products that read what they should."""
    registers = report.registers is not None and 2 * 32 * report.plan.warps * report.registers <= 65536
    return (2 * (report.shared + KIB) <= H200.capacity and registers and report.spills is not None and report.spills <= spills
            and report.cubin is not None and not misread_descriptors(offline.cuobjdump(report.cubin, "--dump-sass")))


@pytest.mark.parametrize("name", SHARED)
def test_two_blocks_of_forward_share_a_processor(name: str) -> None:
    spec, operands, sizes = call(SHARED[name])
    report = offline.compile_only(spec, sizes, operands, ("cuda", 90))
    plan = report.plan
    assert said(plan) and "maxnreg=128" in str(plan) and plan.options["maxnreg"] == 128 and plan.registers <= 128
    assert fits_twice(report, 0 if OF_THE_GPU else 72), report


@pytest.mark.parametrize("name", ALONE)
def test_where_two_blocks_do_not_fit_there_is_one(name: str) -> None:
    assert not said(forward(ALONE[name])) and not forward(ALONE[name]).most_registers


def test_only_where_it_was_measured() -> None:
    """With descriptors on Hopper, for many queries, at the head dimensions of the table."""
    assert forward(BIASED).block_m == 128 and said(forward(BIASED, Shape((4, 16), 1024, 1024, 96, 96)))
    for shape in (Shape((4, 16), 1024, 1024, 64, 64), Shape((4, 16), 1024, 1024, 256, 256), Shape((1, 2), 64, 1024, 128, 128), Shape((1, 1), 128, 128, 128, 128)):
        assert not said(forward(BIASED, shape)), shape
    for target in (("cuda", 80), ("cuda", 100), ("cuda", 120)):
        assert not said(forward(BIASED, target=target)), target


def test_under_a_map_four_warps_take_tiles_of_64() -> None:
    """Eight warps on 64 rows took nearly twice as long."""
    case = Case("documents", where(DOCUMENTS, add(SCALED, SECOND), const(INF)), captured=(*BY_NAME["segments"].captured, BIAS))
    operands, sizes = case.inputs(Shape((4, 2), 1024, 1024, 128, 128), torch.bfloat16, 0)
    spec, operands = with_map(case.spec("bfloat16"), operands, sizes)
    assert spec.tiles is not None
    plan = launch.plans(spec, [t.to("meta") for t in operands], sizes, H200)[0]
    assert plan.shape == (64, 64, 4, 2) and "pair4" in plan.described and not plan.most_registers


@pytest.mark.parametrize("name", ["a bias", "and causal", "a bias in float32 leaves no room"])
def test_two_blocks_of_the_kernel_of_tiles_share_a_processor(name: str) -> None:
    case = (SHARED | ALONE)[name]
    plan, job = backward(case)
    spec, operands, sizes = call(case)
    report = offline.compile_backward(spec, sizes, operands, ("cuda", 90), job)
    assert said(plan) and report.plan == plan
    assert fits_twice(report, 48 if OF_THE_GPU else 112), report


@pytest.mark.parametrize("name", ["and padding", "a softcap takes registers", "two biases leave none", "dropout draws"])
def test_one_block_of_tiles_where_registers_are_missing(name: str) -> None:
    """Then without spills."""
    case = (SHARED | ALONE)[name]
    spec, operands, sizes = call(case)
    plan, job = backward(case)
    assert not said(plan) and not offline.compile_backward(spec, sizes, operands, ("cuda", 90), job).spills


def test_one_block_of_tiles_where_descriptors_are_missing() -> None:
    assert not said(backward(BIASED, Shape((2, 2), 128, 128, 128, 128))[0]), "too few for descriptors"
    assert not said(backward(BIASED, Shape((4, 16), 1024, 1024, 64, 64))[0])


def test_every_shape_is_offered_once() -> None:
    """What was measured is found again by its shape alone."""
    spec, operands, sizes = call(BIASED)
    request, (again, job) = launch.request_for(spec, operands, dict(zip(spec.size_names, sizes, strict=True)), H200), wanted(BIASED)
    for found in (plan_forward.choices(spec, request, H200, False), plan_backward.choices(spec, again, H200, job, False)):
        shapes = [c.plan.shape for c in found]
        assert len(shapes) == len(set(shapes)) and found[0].plan.most_registers == 128 and found[0].step.blocks == 2


# ---- cut tiles

@pytest.mark.parametrize("name", ("causal_inf", "window", "band"))
def test_cut_tiles_have_a_pipeline(name: str) -> None:
    """By descriptors; the head of the loop over full tiles says nothing, for it has the plan's own."""
    spec, operands, sizes = call(BY_NAME[name])
    text = launch.source(spec, sizes, operands, H200)
    assert text.count(", num_stages=2") == 1 and ", num_stages=1" not in text.split("# epilogue")[0].replace("n_swept, num_stages=1", "")


def test_cut_tiles_without_descriptors_or_stages_have_none() -> None:
    for case, shape, device in ((BY_NAME["causal_inf"], LONG, known("cuda", 80)), (BY_NAME["causal_inf"], Shape((1, 1), 128, 128, 64, 64), H200),
                                (BY_NAME["plain"], LONG, H200)):
        spec, operands, sizes = call(case, shape)
        text = launch.source(spec, sizes, operands, device)
        assert ", num_stages=2" not in text and ", num_stages=1" in text
