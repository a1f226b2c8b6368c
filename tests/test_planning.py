"""The commands that need no model: `attnfuse plan` and `attnfuse roofline`, and what they say to nonsense."""
from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from attnfuse import cli
from attnfuse.codegen import launch
from attnfuse.codegen.devices import CARDS
from attnfuse.planning import DTYPES, Shape, held, plan_text, roofline_text, spec_of
from attnfuse.reference import reference


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "--head-dim", "128", "--seq", "8192", "--dtype", "bf16", "--device", "h100", "--causal", "--backward")
    assert status == 0
    for word in ("H100 SXM: 227 KB", "chosen  64x64", "or 2", "registers", "why: ", "predicted", "GFLOP", "bound by arithmetic", "waves of 132", "the last one wastes",
                 "kernel of the rows", "kernel of the keys", "kernel of the queries"):
        assert word in out, word
    assert all(len(line) <= 150 for line in out.splitlines())


def test_the_docs_show_what_is_printed() -> None:
    page = (Path(__file__).parent.parent / "docs" / "roofline.md").read_text(encoding="utf-8")
    assert plan_text(Shape(128, 8192, heads=32, causal=True), "bf16", "h100") in page


def test_the_plan_is_the_one_that_is_launched() -> None:
    import torch
    shape = Shape(64, 1024, heads=4, batch=2, causal=True)
    spec = spec_of(shape, "float16")
    operands = [torch.empty(2, 4, 1024, 64, dtype=torch.float16, device="meta")] * 3
    chosen = launch.plans(spec, operands, list(shape.sizes.values()), CARDS["a100"])[0]
    assert f"chosen  {chosen.block_m}x{chosen.block_n}" in plan_text(shape, "fp16", "a100")


def test_the_spec_of_a_shape_is_attention(seed: int) -> None:
    import torch
    import torch.nn.functional as F
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 8)
    shape = Shape(16, 6, heads=4, keys=9, kv_heads=2, value_dim=8, causal=True)
    keep = torch.ones(6, 9, dtype=torch.bool).tril(3)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)
    torch.testing.assert_close(reference(spec_of(shape, "float32"), (q, k, v), list(shape.sizes.values())), expected)
    assert held(shape, "float32") == [4 * t.numel() for t in (q, k, v)]
    assert spec_of(Shape(16, 6, dropout=0.25), "float16").dropouts == ((0, 0.25),)


def test_every_shape_has_a_plan_on_every_device(seed: int) -> None:
    rng = random.Random(seed)
    for device in (*CARDS, "sm_86", "sm_100", "gfx942", "sm_80 with 48 KB"):
        for _ in range(3):
            shape = Shape(rng.choice((16, 40, 64, 96, 128, 256)), rng.choice((1, 77, 2048, 100_000)), heads=8, kv_heads=rng.choice((1, 2, 8)),
                          batch=rng.randrange(1, 9), causal=rng.random() < 0.5, dropout=rng.choice((0.0, 0.1)))
            text = plan_text(shape, rng.choice(list(DTYPES)), device, backward=True)
            assert "nan" not in text and "inf" not in text and ("at least" in text), text


def test_roofline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "roofline", "--head-dim", "128", "--seq", "8192", "--device", "a100")
    assert status == 0
    assert re.search(r"softmax .*4\.21 ms +memory traffic", out) and re.search(r"fused .*4096 +3\.52 ms +arithmetic", out)
    assert "standard 8.56 ms, fused 3.52 ms: 2.4 times" in out and "from a head dimension of 159 on" in out and "B_r = 128 and B_c = 163" in out
    assert "too few tokens" in run(capsys, "roofline", "--head-dim", "64", "--seq", "256", "--elementwise", "4")[1]
    pytest.importorskip("matplotlib")
    assert "wrote" in run(capsys, "roofline", "--head-dim", "64", "--seq", "1024", "--plot", str(tmp_path / "a.svg"))[1]
    assert (tmp_path / "a.svg").exists()


def test_explain_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "drawn.py").write_text("import torch\ndef build():\n    return (lambda q, k, v: (q @ k.mT).softmax(-1) @ v), tuple(torch.randn(3, 1, 2, 32, 8))\n"
                                       "def other():\n    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n")
    assert run(capsys, "explain", f"{tmp_path}/drawn.py:build", "--plot", str(tmp_path / "r.png"), "--device", "b200")[0] == 0
    assert (tmp_path / "r.png").exists()
    for name, device, message in (("build", "gtx", "known ones are"), ("other", "b200", "no rewritten site")):
        status, _, err = run(capsys, "explain", f"{tmp_path}/drawn.py:{name}", "--plot", str(tmp_path / "x.png"), "--device", device)
        assert status == 2 and message in err


@pytest.mark.parametrize("command, arguments, message", [
    ("plan", "--device gtx", "unknown device 'gtx': the known ones are a100"),
    ("plan", "--device sm_12", "unknown architecture"),
    ("plan", "--dtype int8", "unknown dtype 'int8': expected one of bf16"),
    ("plan", "--head-dim 512", "hold up to 256"),
    ("plan", "--kv-heads 5", "must be a multiple"),
    ("plan", "--dropout 1.0", "less than 1"),
    ("plan", "--dropout nan", "less than 1"),
    ("roofline", "--device sm_90", "rates of sm_90 are not known; known are a100"),
    ("roofline", "--dtype fp32", "expected bf16 or fp16"),
    ("roofline", "--plot nowhere/at/all.png", "nowhere"),
])
def test_nonsense_is_named(capsys: pytest.CaptureFixture[str], command: str, arguments: str, message: str) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    status, _, err = run(capsys, command, "--head-dim", "64", "--seq", "128", *arguments.split())
    assert status == 2 and message in err and "Traceback" not in err


@pytest.mark.parametrize("arguments", ["--seq 0", "--seq x", "--seq -3", "--heads 1.5", ""])
def test_numbers_that_are_none(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--head-dim", "64", *arguments.split()])
    assert stopped.value.code == 2
    assert re.search("at least 1|not a whole number|required: --seq", capsys.readouterr().err)


def test_shapes_for_which_the_formulas_do_not_hold() -> None:
    for shape in (Shape(64, 128, causal=True), Shape(64, 128, keys=64), Shape(64, 128, heads=4, kv_heads=2), Shape(64, 128, value_dim=32)):
        with pytest.raises(ValueError, match="plain self-attention"):
            roofline_text(shape, "h100")
    with pytest.raises(ValueError, match="head dim must be at least 1"):
        Shape(0, 8)
