"""The benchmarks run and write what they say, in small."""
from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
slow = pytest.mark.slow


def run(module: str, folder: Path, *arguments: str) -> dict[str, list[dict[str, str]]]:
    """The tables that a benchmark wrote to the folder."""
    pytest.importorskip("matplotlib")
    done = subprocess.run([sys.executable, "-m", module, "--device", "cpu", "--folder", str(folder), *arguments], cwd=ROOT, capture_output=True,
                          text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    tables = {}
    for file in folder.glob("*.csv"):
        first, *rest = file.read_text().splitlines()
        assert first.startswith("# ") and "torch" in first
        tables[file.stem] = list(csv.DictReader(rest))
    return tables


@slow
def test_train_gpt(tmp_path: Path) -> None:
    tables = run("bench.train_gpt", tmp_path, *"--steps 4 --layers 1 --width 32 --heads 2 --length 32 --batch 2".split())
    assert len(tables["train_gpt"]) == 5 * 4
    ends = {(r["program"], r["dropout"]): r for r in tables["train_gpt_summary"]}
    assert float(ends["attnfuse", "0.0"]["largest_distance"]) < 1e-3 < float(ends["eager, other masks", "0.1"]["largest_distance"])
    assert (tmp_path / "train_gpt.png").stat().st_size > 10_000


@slow
def test_training_memory(tmp_path: Path) -> None:
    rows = run("bench.training_memory", tmp_path, "--length", "512", "1024")["training_memory_cpu"]
    power = {(r["program"], r["dropout"]): float(r["exponent"]) for r in rows}
    assert len(rows) == 12 and power["eager", "0.0"] > 1.6 and power["attnfuse", "0.0"] < 1.3
    assert (tmp_path / "training_memory_cpu.png").stat().st_size > 10_000


@slow
def test_variants(tmp_path: Path) -> None:
    """FlexAttention has no backward on a CPU: a peer that fails is a reason in the row."""
    sizes = "--batch 2 --heads 2 --length 256 --width 16 --only causal sink documents".split()
    rows = {(r["variant"], r["pass"]): r for r in run("bench.variants", tmp_path, *sizes)["variants"]}
    assert len(rows) == 6
    for (_, step), row in rows.items():
        assert float(row["error"]) < 1e-5 and float(row["attnfuse_ms"]) > 0 and float(row["inductor/attnfuse"]) > 0
        if step == "forward":
            assert float(row["error_flex"]) < 1e-5 and float(row["flex/attnfuse"]) > 0 and float(row["flex_mask_ms"]) > 0 and not row["why"]
        else:
            assert row["why"].startswith("flex: NotImplementedError") and not row["flex_ms"]
    assert (tmp_path / "variants.png").stat().st_size > 10_000


RANKING = """
import sys, time
import torch
from bench import ranking
from attnfuse.codegen import autotune
from attnfuse.ops import force_executor

def clock(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

autotune.timer, ranking.DEVICE = clock, "cpu"
ranking.CASES = {"small": ranking.Case(lambda: ranking.causal, 1, 2, 40, 16, torch.float32)}
torch.cuda.synchronize = lambda: None
with force_executor("triton"):
    if sys.argv[1] == "try":
        ranking.attempt_all(["small"], 3, 0, 1, set(sys.argv[2:]))
    else:
        rows = ranking.timed(["small"], 3, dict(x.split("=") for x in sys.argv[2:]))
        ranking.save("ranking", rows, ranking.Path(sys.argv[1]))
"""


@slow
def test_ranking(tmp_path: Path) -> None:
    """Every plan is tried, known ones are not, and those that ran are timed: in Triton's interpreter."""
    def go(*given: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", RANKING, *given], cwd=ROOT, capture_output=True, text=True, check=False,
                              env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    said = dict(reversed(x.split("|", 1)) for x in go("try") if x.count("|") == 3)
    assert {k.split("|")[1] for k in said} == {"forward", "keys", "queries"} and set(said.values()) == {"ran"} and len(said) >= 6
    one, *others = said
    assert {x.split("|", 1)[1] for x in go("try", one) if x.count("|") == 3} == set(others)
    failed = others[-1]
    go(str(tmp_path), *(f"{k}={'ended its process' if k == failed else v}" for k, v in said.items()))
    rows = {r["kernel"]: r for r in csv.DictReader((tmp_path / "ranking.csv").read_text().splitlines()[1:])}
    assert set(rows) == {"forward", "keys", "queries"}
    for kernel, row in rows.items():
        assert int(row["timed"]) == sum(k.split("|")[1] == kernel for k in said) - (failed.split("|")[1] == kernel)
        assert row["first_ms"] and 0 < float(row["best/first"]) <= 1 and ("ended its process" in row["left_out"]) == (failed.split("|")[1] == kernel)


def test_a_plan_that_ends_its_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is started again without the plan; one that ends before it tries anything is an error."""
    from bench import ranking

    runs = [(1, "begun|a|forward|(1, 1, 4, 1)\nran|a|forward|(1, 1, 4, 1)\nbegun|a|forward|(2, 2, 4, 1)\n"),
            (0, "begun|a|keys|(1, 1, 4, 1)\ndiffers|a|keys|(1, 1, 4, 1)\n")]
    seen: list[list[str]] = []

    def play(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(json.loads(Path(command[-1]).read_text()))
        code, out = runs[len(seen) - 1] if len(seen) <= len(runs) else (1, "")
        return subprocess.CompletedProcess(command, code, out, "the reason")

    monkeypatch.setattr(ranking.subprocess, "run", play)
    assert ranking.tried(["a"], 3, 1) == {"a|forward|(1, 1, 4, 1)": "ran", "a|forward|(2, 2, 4, 1)": "ended its process", "a|keys|(1, 1, 4, 1)": "differs"}
    assert seen == [[], ["a|forward|(1, 1, 4, 1)", "a|forward|(2, 2, 4, 1)"]]
    with pytest.raises(RuntimeError, match="the reason"):
        ranking.tried(["a"], 3, 1)


COUNTERS = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","byte","byte"
"0","7","void gemm<float>(int, int)","(8, 1, 1)","1,000,000,000","500000000"
"1","7","spin_kernel(long)","(1, 1, 1)","32","0"
"2","7","attention_forward_causal_d64","(8, 1, 1)","300","100"
"3","7","attention_backward_rows_d64","(8, 1, 1)","20","10"
"4","7","attention_backward_keys_values_d64","(8, 1, 1)","3000","50"
"5","7","void fill(int)","(8, 1, 1)","0","7"
"6","7","spin_kernel(long)","(1, 1, 1)","32","0"
==PROF== Disconnected
"""


def test_counters_beside_predictions() -> None:
    """The profiler's table by way and kernel, in bytes and no other unit."""
    from attnfuse.traffic import Call, Traffic
    from bench import traffic

    eager, ours = traffic.parsed(COUNTERS)
    assert [(c.op[:9], c.read, c.written) for c in eager] == [("void gemm", 10 ** 9, 5 * 10 ** 8)] and len(ours) == 4
    predicted = Traffic([Call("attnfuse::attention", 10 ** 9, 10 ** 9), Call("attnfuse::attention_backward (rows)", 1, 1),
                         Call("attnfuse::attention_backward (keys)", 10 ** 9, 0), Call("fill_", 0, 10 ** 9)])
    seen = [Call(c.op, c.read * 10 ** 6, c.written * 10 ** 6) for c in ours]
    rows = {r["part"]: r for r in traffic.rows_of("long", "attnfuse", traffic.CASES["long"], predicted, seen)}
    assert list(rows) == ["all", "attention", "attention_backward (rows)", "attention_backward (keys)"]
    assert rows["all"]["counted_GB"] == 3.487 and rows["all"]["counted/predicted"] == round(3.487 / 4, 3) and rows["all"]["kernels"] == 4
    assert rows["attention"]["counted/predicted"] == 0.2 and rows["attention_backward (keys)"]["counted/predicted"] == 3.05
    copied = traffic.rows_of("long", "eager", traffic.CASES["long"], Traffic([*predicted.calls, Call("copy_", 5, 5, kernel=False)]), seen)
    assert copied[0]["predicted_GB"] == 4.0, "the profiler does not list a copy in one piece"
    with pytest.raises(RuntimeError, match="in Kbyte and byte"):
        traffic.parsed(COUNTERS.replace('"","","","","byte"', '"","","","","Kbyte"'))


def test_every_counted_kernel_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the profiler listed, by case, way and order, in a table beside the main one."""
    from attnfuse.traffic import Traffic
    from bench import traffic

    text = COUNTERS.replace("void gemm<float>(int, int)", "void at::native::(anonymous namespace)::gemm<(int)4, c10::Half, (bool)1>(float, T<(int)2>)")
    groups = traffic.parsed(text) + [[]]
    monkeypatch.setattr(traffic, "predictions", lambda case: {way: Traffic([]) for way in traffic.WAYS})
    monkeypatch.setattr(traffic, "counted", lambda names: dict(zip([(n, w) for n in names for w in traffic.WAYS], groups, strict=True)))
    monkeypatch.setattr(sys, "argv", ["traffic", "--only", "long", "--folder", str(tmp_path)])
    traffic.main()
    first, *rest = (tmp_path / "traffic_kernels.csv").read_text().splitlines()
    rows = list(csv.DictReader(rest))
    assert first.startswith("# ") and list(rows[0]) == ["case", "way", "number", "kernel", "read_MB", "written_MB"]
    assert [tuple(r.values()) for r in rows[:2]] == [("long", "eager", "0", "gemm<4, Half, 1>", "1000.0", "500.0"),
                                                     ("long", "sdpa", "0", "attention_forward_causal_d64", "0.0", "0.0")]
    assert [r["number"] for r in rows] == ["0", "0", "1", "2", "3"] and (tmp_path / "traffic.csv").exists()
    assert len(traffic.short("k<" + "x, " * 99 + ">(int)")) == 100


def test_the_measured_roofline_is_drawn_from_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on one machine, drawn on another."""
    pytest.importorskip("matplotlib")
    from attnfuse.codegen.devices import CARDS
    from attnfuse.roofline import Kernel
    from bench import roofline_plot

    kernels = [Kernel("mul", 1e9, 4e9, 1.1e-3), Kernel("bmm", 2.7e11, 4.8e9, 1.3e-3), Kernel("copy_", 1e9, 4e9), Kernel("fused", 1.5e11, 5e8, 4e-4)]
    monkeypatch.setattr(roofline_plot, "measured", lambda: roofline_plot.rows_of(kernels, CARDS["h200"]))
    for given, spec in ((["--folder", str(tmp_path)], None), (["--draw", str(tmp_path)], object())):
        monkeypatch.setattr(roofline_plot.importlib.util, "find_spec", lambda _, spec=spec: spec)
        monkeypatch.setattr(sys, "argv", ["roofline_plot", *given])
        roofline_plot.main()
        assert (tmp_path / "roofline_measured.png").exists() == (spec is not None)
    rows = list(csv.DictReader((tmp_path / "roofline_measured.csv").read_text().splitlines()[1:]))
    assert [(r["kernel"], r["measured_ms"]) for r in rows] == [("mul", "1.1"), ("bmm", "1.3"), ("copy_", ""), ("fused", "0.4")]
    assert rows[0]["predicted_ms"] == "0.8333" and rows[0]["device"] == "H200"


def test_traffic_is_predicted_without_a_gpu() -> None:
    """A tenth of eager's or less, where a bias's gradient has a kernel of its own a ninth; without ncu the error says what to do."""
    from bench import traffic

    for name, case in traffic.CASES.items():
        found = traffic.predictions(case, "h200")
        assert list(found) == ["eager", "attnfuse"] and found["attnfuse"].total < found["eager"].total / (9 if case.bias else 10), name
        kernels = {c.op for c in found["attnfuse"].calls if c.op.startswith("attnfuse::")}
        assert kernels <= set(traffic.KERNELS) and ("attnfuse::attention_backward (tiles)" in kernels) == case.bias
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="ncu .*is not on the PATH; --predict"):
        patch.setattr(traffic.shutil, "which", lambda _: None)
        traffic.counted(["long"])
