"""The documentation is held to the program: blocks run, printed reports are the ones printed, tables are complete."""
from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest

import attnfuse
from attnfuse.refusal import Reason
from attnfuse.settings import CHOICES, PREFIX, Settings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "NOTES.md", *DOCS.glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(page: Path, folder: Path, name: str) -> str:
    """Run a page's Python blocks in order, in one namespace, from files (Dynamo reads sources); returns what they print."""
    out, module = io.StringIO(), types.ModuleType(name)
    sys.modules[name] = module  # Dynamo imports the module that a function names
    try:
        with contextlib.redirect_stdout(out):
            for number, text in enumerate(blocks(page, "python")):
                file = folder / (f"{name}{number or ''}.py")
                file.write_text(text, encoding="utf-8")
                exec(compile(text, str(file), "exec"), vars(module))
    finally:
        del sys.modules[name]
    return out.getvalue()


def timeless(text: str) -> str:
    """Without seconds, which differ from run to run."""
    return re.sub(r"\d+\.\d+ s ", "0.00 s ", text).strip()


def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    assert timeless(run(ROOT / "README.md", tmp_path, "model")) == timeless(blocks(ROOT / "README.md", "text")[0])


def test_the_tutorial_runs(tmp_path: Path) -> None:
    assert "rewritten" in run(DOCS / "tutorial.md", tmp_path, "tutorial")


def test_the_page_on_training_runs(tmp_path: Path) -> None:
    assert len(blocks(DOCS / "training.md", "python")) >= 6
    assert "no second derivative" in run(DOCS / "training.md", tmp_path, "training_page")
    report = attnfuse.last_report()
    assert report is not None and report.rewritten == len(report.sites) == 1


def test_the_page_on_the_roofline_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)                     # the page draws into the folder where it runs
    out = run(DOCS / "roofline.md", tmp_path, "roofline_page")
    assert "38.1 GB against 4.6" in out and "→" in out


def test_the_page_on_the_roofline_prints_what_the_commands_do(capsys: pytest.CaptureFixture[str]) -> None:
    from attnfuse import cli
    commands = [c for block in blocks(DOCS / "roofline.md", "sh") for c in block.splitlines()]
    printed = blocks(DOCS / "roofline.md", "text")
    assert len(commands) == len(printed) == 2
    for command, text in zip(commands, printed, strict=True):
        assert cli.main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out.strip() == text.strip()


def devices() -> str:
    """The generated part of roofline.md."""
    from attnfuse.codegen.devices import CARDS
    lines = [f"| `{n}` | {c.name} | {c.peak / 1e12:.4g} | {c.bandwidth / 1e12:.4g} | {c.peak / c.bandwidth:.0f} | {c.shared // 1024} | {c.cache >> 20} |"
             for n, c in CARDS.items()]
    return "\n".join(["| `--device` | card | TFLOP/s | TB/s | ridge | KB of shared memory a block | MB of shared cache |", "|---|---|---|---|---|---|---|",
                      *lines])


def test_the_table_of_devices_is_complete(update: bool) -> None:
    generated(DOCS / "roofline.md", devices(), update)


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in DOCS.glob("*.md") if p.name != "README.md" and f"({p.name})" not in index] == []


def test_the_table_of_settings_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+?) \| `(.+?)` \|", (DOCS / "settings.md").read_text(encoding="utf-8"), re.MULTILINE)
    expected = [(f.name, PREFIX + f.name.upper(), ", ".join(f"`{v!r}`" for v in CHOICES[f.name]) if f.name in CHOICES else "a path",
                 repr(f.default)) for f in fields(Settings)]
    assert rows == expected


def refusals() -> str:
    """The generated part of refusals.md."""
    lines = [f"| `{r.name.lower()}` | {r.value} |" for r in Reason]
    return "\n".join(["| code | meaning |", "|---|---|", *lines])


def generated(page: Path, expected: str, update: bool) -> None:
    """The one generated part of a page is `expected`, or becomes it with --update."""
    text = page.read_text(encoding="utf-8")
    parts = re.split(r"(<!-- generated[^\n]*-->\n).*?(\n?<!-- end -->)", text, flags=re.DOTALL)
    assert len(parts) == 4, f"{page.name} has one generated part"
    whole = parts[0] + parts[1] + expected + "\n" + parts[2].lstrip("\n") + parts[3]
    if update:
        page.write_text(whole, encoding="utf-8")
    else:
        assert text == whole, "run pytest tests/test_readme.py --update"


def test_the_catalogue_of_refusals_is_complete(update: bool) -> None:
    generated(DOCS / "refusals.md", refusals(), update)


def test_the_changelog_names_the_version_or_what_comes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text or f"## [{attnfuse.__version__}]" in text


def test_public_functions_are_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("optimize", "explain", "rewrite", "last_report", "settings", "traffic", "draw_tiles"):
        assert f"attnfuse.{name}(" in text, name


