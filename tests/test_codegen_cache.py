"""The folder of generated files: whole or not at all, read with suspicion, shared by processes, and never in the way."""
from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import attnfuse
from attnfuse.codegen import cache


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "kernels"))
    cache._warn.cache_clear()
    cache._fallback.cache_clear()
    return tmp_path / "kernels"


def test_the_fingerprint_covers_every_module_of_meaning_that_the_emitters_read() -> None:
    """Whatever the emitters import, directly or through one another, to decide what a kernel says."""
    folder = Path(cache.__file__).parent
    core = Path(attnfuse.__file__).parent
    around = {"origin", "reference", "elements", "tiling", "tuning", "walker"}       # of the header and the host: no line of a kernel
    wanted: set[str] = set()
    queue = list(folder.glob("*.py"))
    while queue:
        file = queue.pop()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == (2 if file.parent == folder else 1):
                names = {node.module} if node.module else {alias.name for alias in node.names}
                queue += [core / f"{n}.py" for n in names - wanted - around]
                wanted |= names - around
    assert wanted == set(cache.MEANING)


def test_written_once_and_whole(own_folder: Path) -> None:
    calls = []
    make = lambda: calls.append(1) or "x = 1\n"  # type: ignore[func-returns-value]
    first, second = cache.store("a", make), cache.store("a", make)
    assert first == second == own_folder / "a.py" and len(calls) == 1
    assert cache.load(first).x == 1
    assert [p.name for p in own_folder.iterdir() if p.suffix != ".pyc" and p.is_file()] == ["a.py"]      # no temporary file is left


@pytest.mark.parametrize("damage", (lambda t: t[:10], lambda t: t.replace("1", "2", 1), lambda t: "", lambda t: t + "\n"))
def test_damage_is_repaired(damage: object) -> None:
    path = cache.store("a", lambda: "x = 1\n")
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    assert cache.load(cache.store("a", lambda: "x = 1\n")).x == 1
    path.write_bytes(b"\xff\xfe\x00")
    assert cache.load(cache.store("a", lambda: "x = 1\n")).x == 1


def test_a_write_that_fails_leaves_nothing(own_folder: Path) -> None:
    cache.store("a", lambda: "x = 1\n")
    with pytest.raises(ZeroDivisionError):
        cache.store("b", lambda: str(1 / 0))
    assert sorted(p.name for p in own_folder.glob("*.*")) == ["a.py"]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="temporary folder") as seen:
        first = cache.store("a", lambda: "x = 1\n")
        second = cache.store("b", lambda: "x = 2\n")
    assert len([w for w in seen if issubclass(w.category, RuntimeWarning)]) == 1
    assert first.parent == second.parent and cache.load(second).x == 2


def test_processes_do_not_disturb_each_other(own_folder: Path) -> None:
    script = ("from attnfuse.codegen import cache\n"
              "text = ''.join(f'x{n} = {n}\\n' for n in range(2000))\n"
              "for turn in range(40):\n"
              "    path = cache.store('shared', lambda: text)\n"
              "    assert cache.load(path).x1999 == 1999\n"
              "    cache._write(path, text)\n")
    running = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert not list(own_folder.glob("*.tmp"))


def test_importing_creates_nothing(tmp_path: Path, own_folder: Path) -> None:
    subprocess.run([sys.executable, "-c", "import attnfuse.codegen.launch"], check=True, cwd=tmp_path)
    assert not own_folder.exists()


def test_the_key_covers_what_matters() -> None:
    from dataclasses import replace

    from attnfuse.codegen.plan import Request
    from attnfuse.codegen.plan_forward import candidates
    from attnfuse.codegen.tiles import known
    from tests.specs import BY_NAME

    spec, other = BY_NAME["plain"].spec("bfloat16"), BY_NAME["causal_inf"].spec("bfloat16")
    plan, smaller = candidates(spec, Request(8, 1024, 1024, 64, 64), known("cuda", 90))[:2]
    keys = {cache.key(spec, plan, {"triton": "1"}), cache.key(other, plan, {"triton": "1"}), cache.key(spec, smaller, {"triton": "1"}),
            cache.key(spec, plan, {"triton": "2"}), cache.key(spec, replace(plan, precision="tf32"), {"triton": "1"})}
    assert len(keys) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(len(k) == 8 for k in keys)
