"""What the planner chooses, what it leaves out, and that there is always a next plan. The compiler's word is in test_compile_only.py."""
from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnfuse.codegen import plan_backward, plan_forward, predict, space
from attnfuse.codegen.devices import device
from attnfuse.codegen.emission import start_order
from attnfuse.codegen.jobs import Captured, Job
from attnfuse.codegen.memory import Contents, forward
from attnfuse.codegen.plan import KernelPlan, Request
from attnfuse.codegen.space import Choice
from attnfuse.codegen.tiles import DEVICES, KIB, SMALLEST, Device, Tile
from attnfuse.planning import Shape, spec_of
from attnfuse.program import Expr, add, apply, const, load
from attnfuse.roofline import flash_blocks
from attnfuse.spec import AttentionSpec, Operand
from attnfuse.tilemap import TILE
from tests import specs
from tests.specs import BY_NAME, CASES, SCALED, b0, b1, i, j

KEYS, QUERIES = Job("keys", key=True, value=True), Job("queries", query=True)
KINDS = ("forward", "keys", "values", "queries")

# (kernel, head dimension, causal) → the planner's choice, the fastest or within a twentieth of it, and its milliseconds on an H200: "causal" and
# "full" of bench/results/ranking.csv (bfloat16, 4096 tokens, 2048 columns, batch 4), for keys and values at 256 of bench/NOTES.md.
MEASURED: dict[tuple[str, int, bool], tuple[tuple[int, int, int, int], float]] = {
    ("forward", 64, True): ((64, 128, 4, 2), 0.658), ("forward", 64, False): ((64, 128, 4, 2), 1.153),
    ("forward", 128, True): ((64, 64, 4, 3), 0.579), ("forward", 128, False): ((128, 64, 4, 2), 1.198),
    ("forward", 256, True): ((128, 64, 8, 2), 0.671), ("forward", 256, False): ((128, 64, 8, 2), 1.044),
    ("keys", 64, True): ((64, 64, 4, 3), 1.236), ("keys", 64, False): ((64, 64, 4, 3), 2.336),
    ("keys", 128, True): ((64, 64, 4, 2), 1.003), ("keys", 128, False): ((64, 64, 4, 2), 1.795),
    ("keys", 256, True): ((64, 64, 4, 2), 0.807), ("values", 256, True): ((64, 128, 8, 2), 0.497),
    ("queries", 64, True): ((64, 64, 4, 3), 0.757), ("queries", 64, False): ((64, 64, 4, 2), 1.302),
    ("queries", 128, True): ((64, 64, 4, 2), 0.770), ("queries", 128, False): ((64, 64, 4, 2), 1.375),
}


def choices(kind: str, width: int, causal: bool) -> tuple[Choice, ...]:
    shape = Shape(width, 4096, heads=2048 // width, batch=4, causal=causal)
    spec, card = spec_of(shape, "bfloat16"), device("h200")
    return offered(kind, spec, predict.assumed(spec, shape.sizes, card), card)


def offered(kind: str, spec: AttentionSpec, request: Request, card: Device) -> tuple[Choice, ...]:
    """What the planner of a kernel offers; that of the values is a kernel of its own or that of the keys."""
    if kind == "forward":
        return plan_forward.choices(spec, request, card)
    queries, *keys = sorted(plan_backward.arranged(spec, request, card, (KEYS, QUERIES)), key=lambda j: (j.kind == "keys", not j.key))
    return plan_backward.choices(spec, request, card, {"queries": queries, "keys": keys[0], "values": keys[-1]}[kind])


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_what_was_measured_is_chosen_and_predicted(case: tuple[str, int, bool]) -> None:
    best, measured = MEASURED[case]
    found = choices(*case)
    assert found[0].plan.shape == best and found[0].measured
    assert min(found, key=lambda c: (c.cycles, c.listed)).plan.shape == best, "the model would have taken the same"
    kind, width, causal = case
    shape, card = Shape(width, 4096, heads=2048 // width, batch=4, causal=causal), device("h200")
    spec, held = spec_of(shape, "bfloat16"), [2 * 4 * 2048 * 4096] * 3
    if kind == "forward":
        seconds = predict.forward(spec, shape.sizes, held, card).expected
    else:
        seconds = {p.name: p for p in predict.backward(spec, shape.sizes, held, [True] * 3, card)}[kind].expected
    assert seconds is not None
    ratio = seconds * 1e3 / measured
    assert 0.8 < ratio < 1.3, f"predicted {seconds * 1e3:.3f} ms, measured {measured:.3f}"


def test_reasons_say_where_the_order_comes_from() -> None:
    shape = Shape(64, 4096, heads=8, causal=True)
    spec = spec_of(shape, "float16")
    said = {}
    for name in ("h200", "a100", "b200"):
        card = device(name)
        said[name] = plan_forward.candidates(spec, predict.assumed(spec, shape.sizes, card), card)[0].reasons[0]
    assert "measured fastest of several on an H200" in said["h200"]
    assert all("measured" not in said[n] and "shapes that fit" in said[n] for n in ("a100", "b200"))


def test_only_what_was_measured_says_so() -> None:
    card = device("h200")
    for spec, lengths, said in ((BY_NAME["causal_inf"], 4096, True), (BY_NAME["causal_inf"], 100, False), (BY_NAME["bias"], 4096, False),
                                (BY_NAME["dropout"], 4096, False), (BY_NAME["gathered"], 4096, False)):
        request = replace(predict.assumed(*half(), card), queries=lengths)
        for found in (plan_forward.choices(spec.spec("bfloat16"), request, card), plan_backward.choices(spec.spec("bfloat16"), request, card, KEYS)):
            assert found[0].measured == said, (spec.name, lengths)


# ---- the space

def half(**changes: Any) -> Any:
    shape = Shape(**{"head_dim": 64, "tokens": 4096, "heads": 32, **changes})
    return spec_of(shape, "bfloat16"), shape.sizes


def test_every_shape_that_is_left_out_has_its_reason() -> None:
    near = {      # (device, tile) of a reason, and the nearest tile without it; head dimension 32
        "warps for": (("a100", (16, 64, 8, 2)), ("a100", (64, 64, 8, 2))),
        "too small a tile": (("a100", (64, 16, 8, 2)), ("a100", (64, 16, 4, 2))),
        "registers a thread of 255": (("a100", (128, 128, 4, 2)), ("a100", (128, 128, 8, 2))),
        "bytes of shared memory": (("sm_80 with 32 KB", (64, 128, 4, 3)), ("a100", (64, 128, 4, 3))),
        "misreads descriptors": (("h200", (64, 64, 4, 2)), ("b200", (64, 64, 4, 2))),
    }
    spec, sizes = half(head_dim=32)
    for text, ((bad, left_out), (good, kept)) in near.items():
        def why(name: str, shape: Sequence[int]) -> str | None:
            card = device(name)
            work = plan_forward.work_for(spec, predict.assumed(spec, sizes, card), card)
            m, n, warps, stages = shape
            return space.unfit(work, Tile(m, n, work.block_d, work.block_e, warps, stages), card)
        assert text in (why(bad, left_out) or ""), text
        assert why(good, kept) is None, (text, why(good, kept))
    amd = device("mi300x")
    for name, rows, fails in (("bias", 32, True), ("plain", 32, False), ("bias", 64, False)):
        case = BY_NAME[name].spec("bfloat16")
        work = plan_forward.work_for(case, predict.assumed(spec, sizes, amd), amd)
        assert ("Triton 3.6 fails" in (space.unfit(work, Tile(rows, 32, 32, 32, 4, 2), amd) or "")) == fails
    card = device("a100")
    exact = spec_of(Shape(64, 4096, heads=32), "float32")
    work = plan_forward.work_for(exact, predict.assumed(exact, sizes, card), card)
    assert "only shapes that were compiled" in (space.unfit(work, Tile(32, 32, 64, 64, 4, 1), card) or "")


def test_on_hopper_only_inspected_shapes_are_offered(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        case, width = rng.choice(CASES), rng.choice((16, 40, 64, 96, 128, 256))
        for limit in (227, 99, 48):
            card = replace(DEVICES["cuda", 90], shared=limit * KIB)
            spec = case.spec("bfloat16")
            request = replace(predict.assumed(*half(), card), depth=width, value_depth=width)
            found = [*plan_forward.choices(spec, request, card), *plan_backward.choices(spec, request, card, QUERIES)]
            assert all(c.listed is not None for c in found)
            assert all(c.plan.block_e >= 64 for c in found), "narrow value tiles are miscompiled, whatever the limit"
            assert not any(c.plan.block_m >= 64 and c.plan.block_n < 64 for c in plan_forward.choices(spec, request, card))


def test_lengths_of_a_class_share_a_plan(seed: int) -> None:
    rng = random.Random(seed)
    for name in ("a100", "b200", "h200", "mi300x"):
        card = device(name)
        for low, high in ((513, 2047), (2048, 9000)):
            plans = set()
            for _ in range(4):
                spec, sizes = half(tokens=rng.randint(low, high), batch=8)
                plans.add(plan_forward.candidates(spec, predict.assumed(spec, sizes, card), card))
            assert len(plans) == 1


def test_few_programs_get_smaller_tiles() -> None:
    card = device("a100")
    spec, sizes = half(tokens=512, heads=4, head_dim=128)
    few = plan_forward.candidates(spec, predict.assumed(spec, sizes, card), card)[0]
    spec, sizes = half(tokens=512, heads=512, head_dim=128)
    many = plan_forward.candidates(spec, predict.assumed(spec, sizes, card), card)[0]
    assert few.block_m * few.block_n <= many.block_m * many.block_n


# (kernel, head dimension, how products are taken) → the shape that was the fastest on an H200, or spills nothing and is near it: bench/NOTES.md
EXACT: dict[tuple[str, int, str], tuple[int, int, int, int]] = {
    ("forward", 64, "bf16x6"): (64, 32, 4, 1), ("keys", 64, "bf16x6"): (32, 128, 8, 1), ("queries", 64, "bf16x6"): (128, 64, 8, 1),
    ("forward", 128, "bf16x6"): (128, 64, 8, 1), ("keys", 128, "bf16x6"): (32, 128, 8, 1), ("queries", 128, "bf16x6"): (64, 32, 4, 1),
    ("values", 128, "bf16x6"): (32, 64, 4, 1), ("values", 256, "bf16x6"): (32, 128, 8, 1), ("values", 256, "tf32"): (64, 128, 8, 1),
    ("forward", 256, "bf16x6"): (128, 32, 8, 1), ("keys", 256, "bf16x6"): (32, 64, 8, 1), ("queries", 256, "bf16x6"): (64, 64, 8, 1),
    ("forward", 64, "tf32"): (128, 64, 4, 1), ("keys", 64, "tf32"): (64, 128, 8, 1), ("queries", 64, "tf32"): (128, 32, 4, 2),
    ("forward", 128, "tf32"): (128, 64, 8, 1), ("keys", 128, "tf32"): (32, 128, 8, 1), ("queries", 128, "tf32"): (128, 64, 8, 1),
    ("forward", 256, "tf32"): (128, 64, 8, 1), ("keys", 256, "tf32"): (32, 64, 4, 1), ("queries", 256, "tf32"): (64, 64, 8, 1),
}


def exact(kind: str, width: int, precision: str, name: str = "h200", tokens: int = 4096, heads: int = 64, case: str = "causal_inf") -> KernelPlan:
    """The first plan of a kernel of float32 operands."""
    card = device(name)
    request = replace(predict.assumed(*half(tokens=tokens, heads=heads, head_dim=width), card), precision=precision)
    return offered(kind, BY_NAME[case].spec("float32"), request, card)[0].plan


@pytest.mark.parametrize("kind, width, precision", EXACT, ids=str)
def test_float32_on_hopper_has_shapes_of_its_own(kind: str, width: int, precision: str) -> None:
    plan = exact(kind, width, precision)
    assert plan.shape == EXACT[kind, width, precision]
    whole = width == 64 or (width, precision) == (128, "bf16x6") and kind in ("keys", "values")
    assert plan.piece == (0 if whole else 64)
    assert exact(kind, width, precision, "a100").shape != plan.shape


@pytest.mark.parametrize("precision", ("bf16x6", "tf32"))
@pytest.mark.parametrize("kind", ("keys", "queries"))
def test_large_tiles_of_float32_want_enough_work(kind: str, precision: str) -> None:
    """Fewer programs than processors, or lengths of which most of a tile would be empty, take tiles of 64."""
    def own(**call: Any) -> int:
        plan = exact(kind, 64, precision, **call)
        return plan.block_n if kind == "keys" else plan.block_m

    assert own() == own(tokens=128, heads=132) == 128
    assert own(tokens=128, heads=131) <= 64 and own(tokens=64, heads=4096) <= 64
    assert own(case="gathered") == 128                          # halves leave out their first shape there, these do not spill


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("kind", KINDS)
def test_under_a_map_no_tile_is_larger_than_the_maps(kind: str, dtype: str) -> None:
    """Nor is one cut to it: half of a tile for eight warps is not what was measured for four."""
    for width, card in itertools.product((64, 128, 256), map(device, ("a100", "h200", "b200"))):
        case = BY_NAME["causal_padding_inf"]
        spec, mapped = case.spec(dtype), specs.with_map(case.spec(dtype), *case.inputs(specs.Shape(), getattr(torch, dtype), 0))[0]
        assert mapped.tiles is not None
        request = predict.assumed(*half(tokens=4096, head_dim=width), card)
        known, found = ([c.plan for c in offered(kind, s, request, card)] for s in (spec, mapped))
        assert all(max(p.block_m, p.block_n) <= TILE for p in found)
        assert found[0].shape in {p.shape for p in known}, (width, card.name, found[0].shape)


def test_flash_attentions_tile_is_a_special_case() -> None:
    """B_c = ⌈M/4d⌉, B_r = min(B_c, d): with one buffer of K and V and nothing of P it is what fills no more than M."""
    for width, memory in itertools.product((32, 64, 128), (48, 99, 163)):
        rows, columns = flash_blocks(width, memory * KIB // 2)
        tile = Tile(rows, columns, width, width, warps=4, stages=2)
        assert 0.25 * memory * KIB <= forward(tile, Contents(2, 2, 2), "mma") <= memory * KIB


# ---- there is always a next plan; what is done with it is in test_fallback.py

@pytest.mark.parametrize("unit", [("cuda", 80), ("cuda", 90), ("cuda", 100), ("hip", 94)], ids=str)
def test_a_shrinking_limit_never_leaves_fewer_than_two_plans(unit: tuple[str, int], seed: int) -> None:
    rng = random.Random(seed)
    for limit in (227, 163, 99, 64, 48, 32, 16):
        card = replace(DEVICES[unit], shared=limit * KIB)
        for case in rng.sample(CASES, 6):
            dtype, width = rng.choice(("bfloat16", "float16", "float32")), rng.choice((16, 40, 64, 80, 128, 192, 256))
            spec = case.spec(dtype)
            lengths = {"queries": rng.choice((1, 50, 3000)), "keys": rng.choice((1, 50, 3000)), "batch": rng.choice((1, 64))}
            request = replace(predict.assumed(*half(), card), depth=width, value_depth=rng.choice((16, width)), **lengths)
            for job in (None, KEYS, QUERIES):
                plans = plan_backward.candidates(spec, request, card, job) if job else plan_forward.candidates(spec, request, card)
                assert len(plans) >= 2 and len({p.shape for p in plans}) == len(plans)
                fitting = [p for p in plans if p.shared <= card.shared]
                assert plans[:len(fitting)] == tuple(fitting), "what fits comes first"
                assert fitting or all(p.block_m * p.block_n <= 32 * 32 for p in plans), "only the smallest may exceed"
                shared = [p.shared for p in fitting]
                assert shared == sorted(shared, reverse=True), "ever smaller"


def test_planning_is_quick() -> None:
    import time

    spec, sizes = half()
    for name in ("h200", "a100", "b200"):
        card = device(name)
        request, taken = predict.assumed(spec, sizes, card), []
        for n in range(15):
            start = time.perf_counter()
            plan_forward.candidates(spec, replace(request, queries=1000 + n), card)
            plan_backward.candidates(spec, replace(request, queries=1000 + n), card, KEYS)
            taken.append(time.perf_counter() - start)
        assert sorted(taken)[5] < 0.05, f"{name}: {sorted(taken)[5] * 1e3:.1f} ms, and nothing is compiled"


def test_devices_have_what_the_model_needs() -> None:
    for entry in (*DEVICES.values(), SMALLEST, *(device(n) for n in ("a100", "rtx4090", "h100", "b200", "mi300x"))):
        assert isinstance(entry, Device) and entry.width > 0 and entry.capacity >= entry.shared
        if entry.peak:
            clock = entry.peak / (entry.processors * entry.width)
            assert 1e9 < clock < 3e9, f"{entry.name}: peak, processors and width give a clock of {clock / 1e9:.2f} GHz"


# ---- the order in which attentions start

def test_attentions_that_read_one_bias_follow_one_another() -> None:
    """Only what is read at every (i, j) counts; and what reads nothing of the kind keeps its order."""
    def order(*reads: tuple[Expr, ...]) -> tuple[str, ...]:
        score = SCALED
        for n, index in enumerate(reads):
            score = add(score, load(3 + n, index, "float"))
        operands = tuple(Operand(n, "float16", r) for n, r in [("q", 4), ("k", 4), ("v", 4), *((f"x{n}", len(x)) for n, x in enumerate(reads))])
        return start_order(replace(BY_NAME["plain"].spec("float16"), operands=operands, score=score))

    assert order((b1, i, j)) == order((const(0), b1, j, i)) == ("b1", "b0")
    assert order((b0, i, j)) == order((i, j)) == order((b1, j)) == order((b1, i)) == order() == ("b0", "b1")
    assert order((b1, i, j), (b0, i, j)) == order((b0, b1, i, j)) == ("b0", "b1")
    assert order((b1, apply("sub", i, j))) == ("b0", "b1")             # a table by distance
    assert order((b0, j), (b1, i, j)) == ("b1", "b0")                  # padding is small


@pytest.mark.parametrize("name, first", [("powers", (32, 64, 4, 2)), ("dropout_twice", (32, 64, 4, 2)), ("softcap_causal", (64, 64, 4, 2)),
                                         ("dropout", (64, 64, 4, 2)), ("quotients", (64, 64, 4, 2))])
def test_keys_of_long_programs_take_smaller_tiles(name: str, first: tuple[int, int, int, int]) -> None:
    """Eight operations a score, or two random numbers; not six operations, a function, one number."""
    card, spec = device("h200"), BY_NAME[name].spec("bfloat16")
    request = predict.assumed(*half(head_dim=128), card)
    assert offered("keys", spec, request, card)[0].plan.shape == first


@pytest.mark.parametrize("name, larger", [("plain", True), ("alibi", True), ("prefix", True), ("scale_by_depth", True), ("softcap", False),
                                          ("mask_after", False), ("modular", False), ("rows_and_columns", False)])
def test_the_largest_forward_tile_is_for_simple_programs(name: str, larger: bool) -> None:
    card = device("h200")
    request = predict.assumed(*half(head_dim=128), card)
    assert (offered("forward", BY_NAME[name].spec("bfloat16"), request, card)[0].plan.shape == (128, 64, 4, 2)) == larger


def test_queries_at_256_that_sum_for_rows_too_keep_the_smaller_tile() -> None:
    card, spec = device("h200"), BY_NAME["rows_and_columns"].spec("bfloat16")
    request = predict.assumed(*half(head_dim=256), card)
    alone, both = (plan_backward.candidates(spec, request, card, Job("queries", query=True, captured=some))[0]
                   for some in ((), (Captured("score", load(3, (i,), "float"), "grad_rows"),)))
    assert (alone.block_m, alone.block_n) == (128, 64) and (both.block_m, both.block_n) == (128, 32)
