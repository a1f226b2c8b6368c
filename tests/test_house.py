"""The rules of the house: what may import what, and what a wheel holds."""
from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"attnfuse": "attnfuse", "passes": "attnfuse.passes", "codegen": "attnfuse.codegen"}
MEANING = ("spec", "program", "algebra", "reference", "refusal", "settings", "philox", "ranges", "intervals")
"""Modules between the finder and the generator: they know neither."""


def tracked(*folders: str) -> list[str]:
    """The files that git knows in these folders; the test is skipped outside a checkout."""
    try:
        done = subprocess.run(["git", "ls-files", "-z", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def imports(file: Path) -> Iterator[str]:
    """The absolute names of everything that a file of the package imports, inside functions too."""
    folder, *_ = file.relative_to(ROOT).parts
    package = FOLDERS[folder]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[:len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def sources() -> list[Path]:
    """All Python files of the package."""
    return [ROOT / name for name in tracked(*FOLDERS) if name.endswith(".py")]


def test_passes_and_codegen_do_not_know_each_other() -> None:
    for file in sources():
        folder = file.relative_to(ROOT).parts[0]
        other = {"passes": "attnfuse.codegen", "codegen": "attnfuse.passes"}.get(folder)
        if other:
            assert not [name for name in imports(file) if name == other or name.startswith(other + ".")], file


def test_the_meaning_knows_neither_finder_nor_generator() -> None:
    for file in sources():
        if file.parent.name == "attnfuse" and file.stem in MEANING:
            found = [n for n in imports(file) if n.startswith(("attnfuse.passes", "attnfuse.codegen", "attnfuse.api", "attnfuse.dynamo"))]
            assert not found, f"{file.name} imports {found}"


def test_the_folders_are_imported_through_the_package() -> None:
    files = [*sources(), *(ROOT / n for n in tracked("tests", "bench") if n.endswith(".py"))]
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [n for n in names if n.split(".")[0] in ("passes", "codegen")], f"{file}: a second copy under another name"
            assert not (isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)), f"{file}: import *"


def test_settings_and_version_need_no_torch() -> None:
    code = "import sys, attnfuse; attnfuse.Settings(); attnfuse.__version__; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    installed = subprocess.run([sys.executable, "-c", "from importlib.metadata import distribution as d; d('attnfuse')"],
                               capture_output=True, cwd=ROOT.parent, check=False)
    if installed.returncode:
        pytest.skip("a source tree that is not installed registers the backend at import")
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tracked files alone."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "tree" / name)
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                           "--wheel-dir", str(folder), str(folder / "tree")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_tracked_files(wheel: Path) -> None:
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert packed == {n if n.startswith("attnfuse/") else f"attnfuse/{n}" for n in tracked(*FOLDERS)}
    assert any(n.endswith("licenses/LICENSE") for n in zipfile.ZipFile(wheel).namelist())


def test_the_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = ("import attnfuse, attnfuse.passes.pipeline, attnfuse.codegen, torch\n"
            "assert attnfuse.__file__.startswith('SITE') and attnfuse.passes.__file__.startswith('SITE'), attnfuse.passes.__file__\n"
            "assert len(attnfuse.explain(lambda a: a.softmax(-1) @ a, torch.randn(3, 3)).sites) == 1").replace("SITE", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert done.returncode == 0, done.stderr
