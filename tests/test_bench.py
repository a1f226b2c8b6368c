"""The benchmarks of training and of published variants run and write what they say, in small."""
from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


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


def test_train_gpt(tmp_path: Path) -> None:
    tables = run("bench.train_gpt", tmp_path, *"--steps 4 --layers 1 --width 32 --heads 2 --length 32 --batch 2".split())
    assert len(tables["train_gpt"]) == 5 * 4
    ends = {(r["program"], r["dropout"]): r for r in tables["train_gpt_summary"]}
    assert float(ends["attnfuse", "0.0"]["largest_distance"]) < 1e-3 < float(ends["eager, other masks", "0.1"]["largest_distance"])
    assert (tmp_path / "train_gpt.png").stat().st_size > 10_000


def test_training_memory(tmp_path: Path) -> None:
    rows = run("bench.training_memory", tmp_path, "--length", "512", "1024")["training_memory_cpu"]
    power = {(r["program"], r["dropout"]): float(r["exponent"]) for r in rows}
    assert len(rows) == 12 and power["eager", "0.0"] > 1.6 and power["attnfuse", "0.0"] < 1.3
    assert (tmp_path / "training_memory_cpu.png").stat().st_size > 10_000


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
