"""Random inputs: the same for the same source, others for another test or another source, and repeatable."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests import seeds


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNFUSE_TEST_SEED", raising=False)


def test_seeds_follow_the_name_and_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = seeds.draw("a")
    assert here == seeds.draw("a") != seeds.draw("b")
    for folder in seeds.FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "passes" / "find.py").write_text("1")
    monkeypatch.setattr(seeds, "ROOT", tmp_path)
    first = seeds.source.__wrapped__()
    (tmp_path / "passes" / "find.py").write_text("2")
    assert seeds.source.__wrapped__() != first
    (tmp_path / "passes" / "find.py").rename(tmp_path / "passes" / "found.py")
    assert len({first, seeds.source.__wrapped__(), seeds.source()}) == 3


def test_a_failure_is_repeated_by_its_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ATTNFUSE_TEST_SEED", "fresh")
    drawn = [seeds.draw("a") for _ in range(4)]
    assert len(set(drawn)) > 1 and all(0 <= d < seeds.LIMIT for d in drawn)
    printed = capsys.readouterr().out.split()
    monkeypatch.setenv(*printed[0].split("="))
    assert seeds.draw("b") == drawn[0]
