"""Head dimensions in pieces, and the gradients of keys and values by a kernel each: in Triton's interpreter against float64, and what a plan makes of them.

As in test_codegen_numbers.py the file runs itself once in a process of its own.
"""
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnfuse.codegen import backward, forward, launch, launch_backward, launch_weights, plan_backward, plan_forward, predict
from attnfuse.codegen.devices import device
from attnfuse.codegen.jobs import Captured, Job, apart
from attnfuse.codegen.pieces import NAMES, pieces
from attnfuse.codegen.tiles import Tile, known
from attnfuse.planning import Shape as Lengths, plan_text, spec_of
from attnfuse.program import axis, load
from tests import test_codegen_backward, test_codegen_numbers, test_codegen_weights
from tests.interpreted import run_in_interpreter
from tests.specs import BY_NAME, Shape

INSIDE = launch.interpreting()
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter, in a process of its own")
NAMED = ("plain", "causal_padding_min", "bias_per_head", "rows_and_columns", "dropout", "grouped", "sinks", "gate", "gathered", "repaired_sinks",
         "scale_tensor", "alibi_causal", "wrapping_index")
KEYS_VALUES = Job("keys", key=True, value=True)
poisoned_gradients, poisoned_results, poisoned_weights = (m.poisoned for m in (test_codegen_backward, test_codegen_numbers, test_codegen_weights))


@pytest.mark.skipif(INSIDE, reason="this is the process of its own")
def test_in_the_interpreter(tmp_path: Path) -> None:
    run_in_interpreter(__file__, tmp_path)


@pytest.fixture(autouse=True)
def prepared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher that another test prepared is taken, none left behind."""
    for module, name in ((launch, "_runs"), (launch_backward, "_runs"), (launch_weights, "_ladders")):
        monkeypatch.setattr(module, name, {})


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product takes 16 columns at a time."""
    for module in (plan_forward, plan_backward):
        monkeypatch.setattr(module, "piece_of", lambda *_: 16)


@pytest.fixture
def by_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values have a kernel each, of different tiles."""
    monkeypatch.setattr(plan_backward, "_apart", lambda *_: (((16, 32, 4, 1), (16, 16, 4, 1)), ((32, 16, 4, 1), (16, 16, 4, 1))))


# ---- numbers

@interpreted
@pytest.mark.parametrize("shape", (Shape((2, 2), 37, 52, 40, 24), Shape((1, 2), 40, 33, 64, 16), Shape((2, 2), 33, 40, 16, 80)), ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_pieces_change_no_number(name: str, shape: Shape, seed: int, in_pieces: None) -> None:
    """Depths that are whole pieces, and not, and no more than one."""
    case = BY_NAME[name]
    operands, sizes = case.inputs(shape, torch.float32, seed)
    assert launch.plans(case.spec(), operands, sizes, known("cuda", 80))[0].piece == 16
    test_codegen_numbers.check(case.spec(), operands, sizes, seed)
    test_codegen_backward.check(case.spec(), operands, sizes, seed)


@interpreted
@pytest.mark.parametrize("name", ("causal_padding_min", "dropout"))
def test_pieces_of_half_operands(name: str, seed: int, in_pieces: None) -> None:
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape((1, 2), 40, 33, 40, 56), torch.float16, seed)
    test_codegen_numbers.check(case.spec("float16"), operands, sizes, seed)
    test_codegen_backward.check(case.spec("float16"), operands, sizes, seed)


@interpreted
@pytest.mark.parametrize("name", ("plain", "causal_padding_min", "gate"))
def test_pieces_of_wanted_weights(name: str, seed: int, in_pieces: None) -> None:
    test_codegen_weights.run(BY_NAME[name], Shape((1, 2), 37, 52, 40, 40), torch.float32, seed)


@interpreted
@pytest.mark.parametrize("needs", [(False, True, True), (True, True, True), (True, True, False), (True, False, True)], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_a_kernel_each_gives_the_same_gradients(name: str, needs: tuple[bool, ...], seed: int, by_two_kernels: None) -> None:
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape((2, 2), 45, 52, 20, 16), torch.float32, seed)
    others = [t.is_floating_point() for t in operands[3:]]
    test_codegen_backward.check(case.spec(), operands, sizes, seed, needs=(*needs, *others))


@interpreted
def test_pieces_by_two_kernels(seed: int, by_two_kernels: None, in_pieces: None) -> None:
    for name in ("rows_and_columns", "dropout"):
        operands, sizes = BY_NAME[name].inputs(Shape((1, 2), 37, 52, 40, 24), torch.float32, seed)
        test_codegen_backward.check(BY_NAME[name].spec(), operands, sizes, seed)


# ---- what a plan says

def test_pieces_are_as_many_as_the_depth_needs() -> None:
    assert [p.suffix for p in pieces("d", 256, 256, 64)] == ["_0", "_1", "_2", "_3"] and not any(p.padded for p in pieces("d", 256, 256, 64))
    assert [(p.offsets, p.mask, p.padded) for p in pieces("e", 100, 128, 64)] == [("offs_e_0", "e_mask_0", False), ("offs_e_1", "e_mask_1", True)]
    for piece in (0, 64, 128):
        (whole,) = pieces("d", 40, 64, piece)
        assert whole.suffix == "" and whole.width == "BLOCK_D" and whole.padded
    assert {p.suffix for p in pieces("d", 256, 256, 16)} <= {n.removeprefix("k") for n in NAMES if n.startswith("k_")}, "all names are reserved"


@pytest.mark.skipif(INSIDE, reason="the interpreter takes float32 products whole")
def test_a_piece_is_read_when_it_is_needed_and_once() -> None:
    operands, sizes = BY_NAME["causal_inf"].inputs(Shape((4, 16), 1024, 1024, 200, 256), torch.float32, 0)
    spec, tensors = BY_NAME["causal_inf"].spec(), [t.to("meta") for t in operands]
    plan = launch.plans(spec, tensors, sizes, known("cuda", 90))[0]
    assert plan.piece == 64
    text = forward.emit(spec, plan).source
    full = text[text.index("# full tiles"):text.index("# tiles that a bound")]
    assert [full.count(f"k_{n} = tl.load") for n in range(4)] == [full.count(f"v_{n} = tl.load") for n in range(4)] == [1] * 4
    assert full.index("qk = tl.dot(q_0") < full.index("k_1 = tl.load") < full.index("part = tl.dot(q_1, tl.trans(k_1)") < full.index("qk = qk + part")
    assert "k_3" in text and "mask=d_mask_3[None, :]" in full and "d_mask_2" not in text and "e_mask" not in text
    queries = Job("queries", query=True)
    named = dict(zip(spec.size_names, sizes, strict=True))
    out = torch.empty(4, 16, 1024, 256, device="meta")
    text = backward.emit(spec, launch_backward.plans(spec, (out, out), tensors, named, known("cuda", 90), queries)[0], queries).source
    full = text[text.index("# full tiles"):text.index("# tiles that a bound")]
    assert full.count(" k_1 = tl.load") == 1 and full.count("k_1") == 3, "read for the scores, and kept for the gradient"


def text_of(depth: int, what: Job | None, precision: str = "bf16x6") -> str:
    """The loop over full tiles of a causal attention in float32, for Hopper."""
    operands, sizes = BY_NAME["causal_inf"].inputs(Shape((4, 16), 1024, 1024, depth, depth), torch.float32, 0)
    spec, tensors = BY_NAME["causal_inf"].spec(), [t.to("meta") for t in operands]
    named, out = dict(zip(spec.size_names, sizes, strict=True)), torch.empty(4, 16, 1024, depth, device="meta")
    card = known("cuda", 90)
    plan = launch_backward.plans(spec, (out, out), tensors, named, card, what)[0] if what else launch.plans(spec, tensors, sizes, card)[0]
    plan = replace(plan, precision=precision)
    text = (backward.emit(spec, plan, what) if what else forward.emit(spec, plan)).source
    return text[text.index("# full tiles"):text.index("# tiles that a bound")]


@pytest.mark.skipif(INSIDE, reason="the interpreter takes float32 products whole")
def test_exact_pieces_are_added_up_one_after_the_other() -> None:
    """Where there are more than two. Each condition is another, lest the blocks become one."""
    full = text_of(256, None)
    blocks = re.findall(r"if n_keys != -(\d+):        # always\n +(\w+) = ", full)
    assert [name for _, name in blocks] == ["qk"] * 3 + [f"acc_{n}" for n in range(4)] and len({number for number, _ in blocks}) == 7
    assert full.count("else:\n") == 3 == full.count("qk = part"), "what only one block takes would be computed there"
    values = text_of(256, Job("keys", value=True))
    assert re.findall(r"always\n +(\w+) = ", values) == ["qk"] * 3 + [f"dv_{n}" for n in range(4)]
    for plain in (text_of(128, None), text_of(256, Job("queries", query=True)), text_of(256, Job("keys", key=True)), text_of(256, None, "tf32")):
        assert "_1 = tl.dot(" in plain and "always" not in plain and "part" not in plain


def test_which_kernels_are_apart() -> None:
    wanted = (Job("rows"), KEYS_VALUES, Job("queries", query=True))
    for card, dtype, width, precision, split in (
            ("h200", "bfloat16", 256, "bf16x6", True), ("h200", "bfloat16", 128, "bf16x6", False), ("b200", "bfloat16", 256, "bf16x6", False),
            ("a100", "bfloat16", 256, "bf16x6", False), ("h200", "float32", 128, "bf16x6", True), ("h200", "float32", 64, "bf16x6", False),
            ("h200", "float32", 128, "tf32", False), ("h200", "float32", 256, "tf32", True), ("mi300x", "float32", 256, "ieee", False)):
        shape = Lengths(width, 4096, heads=16)
        spec = spec_of(shape, dtype)
        request = replace(predict.assumed(spec, shape.sizes, device(card)), precision=precision)
        found = plan_backward.arranged(spec, request, device(card), wanted)
        assert found == ((wanted[0], *apart(KEYS_VALUES), wanted[2]) if split else wanted), (card, dtype, width, precision)


def test_what_is_read_for_each_key_stays_with_the_keys() -> None:
    read = Captured("score", load(3, (axis("j"),), "float"), "grad_bias")
    assert apart(Job("keys", key=True, value=True, captured=(read,))) == (Job("keys", key=True, captured=(read,)), Job("keys", value=True))
    for whole in (Job("keys", key=True), Job("keys", value=True), Job("queries", query=True)):
        assert apart(whole) == (whole,)


def test_predictions_follow() -> None:
    """Two kernels have five products where one has four, and the values' reads no values."""
    shape, card = Lengths(256, 4096, heads=8, batch=4), device("h200")
    spec = spec_of(shape, "bfloat16")
    held = [2 * 4 * 8 * 4096 * 256] * 3
    _, keys, values, queries = predict.backward(spec, shape.sizes, held, [True] * 3, card)
    assert [p.name for p in (keys, values, queries)] == ["keys", "values", "queries"]
    forward_flops = predict.forward(spec, shape.sizes, held, card).flops
    assert (keys.flops / forward_flops, values.flops / forward_flops, queries.flops / forward_flops) == (1.5, 1.0, 1.5)
    reads = lambda p: p.moved - p.written
    assert reads(keys) - reads(values) == held[2] and keys.written == values.written == held[1]
    text = plan_text(shape, "bf16", "h200", backward=True)
    assert "kernel of the keys\n" in text and "kernel of the values\n" in text
    text = plan_text(Lengths(128, 4096, heads=8), "bf16", "h200", backward=True)
    assert "kernel of the keys\n" in text and "kernel of the values\n" not in text


def test_a_tile_says_how_many_columns_are_on_their_way() -> None:
    tile = Tile(64, 64, 256, 256, 4, 1)
    assert tile.columns(256) == 256 and Tile(64, 64, 256, 256, 4, 1, piece=64).columns(256) == 64 and Tile(64, 64, 32, 32, 4, 1, piece=64).columns(32) == 32
