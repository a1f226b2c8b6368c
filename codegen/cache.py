"""Generated source, and what was measured, on disk: in the user's cache folder, ``<readable name>_<key8>.py`` and ``tuned_<key16>.json``, safe
for many processes at once.

The key covers the spec, the plan, the versions and the generator's own source, so a file never outlives what made it.
The last line of a file is a digest of the rest: what was cut short or edited is written again.

    ATTNFUSE_CACHE_DIR=/tmp/kernels python model.py
"""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from ..spec import AttentionSpec
from .plan import KernelPlan

ENVIRONMENT = "ATTNFUSE_CACHE_DIR"
MEANING = ("adjoint", "algebra", "distances", "identities", "intervals", "philox", "program", "ranges", "spec", "tilemap")
"""The modules outside of this folder that decide what a kernel says."""
_MARK = "# sha256 of the above: "


def folder() -> Path:
    """Where generated files go; it need not exist yet."""
    if os.environ.get(ENVIRONMENT):
        return Path(os.environ[ENVIRONMENT]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "attnfuse"


@functools.lru_cache(maxsize=1)
def fingerprint() -> str:
    """Digest of every source file that decides what a kernel says."""
    here = Path(__file__).parent
    core = Path(importlib.util.find_spec("attnfuse").origin or "").parent  # type: ignore[union-attr]  # attnfuse is imported
    files = sorted(here.glob("*.py")) + [core / f"{n}.py" for n in MEANING]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def key(spec: AttentionSpec, plan: KernelPlan, versions: dict[str, str], job: str = "") -> str:
    """Eight hexadecimal digits that name a generated file; `job` is what a backward kernel has to do."""
    parts = (spec.to_json(), repr(sorted(asdict(plan).items())), repr(sorted(versions.items())), fingerprint(), job)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def store(name: str, make: Callable[[], str]) -> Path:
    """The path of the file `name`, written from `make()` unless an intact one is there."""
    return _somewhere(f"{name}.py", make, again=False)


def keep(name: str, text: str) -> Path:
    """The path of a file with its own ending that now holds `text`; readers see the old text or the new one."""
    return _somewhere(name, lambda: text, again=True)


def kept(name: str) -> str | None:
    """What `keep` wrote, by this process or another; None where there is nothing, or not what was once written completely."""
    for base in (folder(), *([_fallback()] if _fallback.cache_info().currsize else [])):
        path = base / name
        try:
            if _intact(path):
                return path.read_text(encoding="utf-8").rpartition(_MARK)[0]
        except OSError:
            continue
    return None


def _somewhere(name: str, make: Callable[[], str], again: bool) -> Path:
    """Write a file, over an intact one only with `again`; in a temporary folder where the user's can't be written."""
    for place in (folder(), _fallback):
        base = place if isinstance(place, Path) else place()
        try:
            base.mkdir(parents=True, exist_ok=True)
            path = base / name
            if again or not _intact(path):
                _write(path, make())
            return path
        except OSError as problem:
            if place is _fallback:
                raise
            _warn(str(base), str(problem))
    raise AssertionError("unreachable")


@functools.lru_cache(maxsize=None)
def _warn(place: str, problem: str) -> None:
    """Once a process for each folder and problem."""
    warnings.warn(f"attnfuse cannot keep generated kernels in {place} ({problem}); using a temporary folder. "
                  f"Set {ENVIRONMENT} to a folder that can be written.", RuntimeWarning, stacklevel=2)


@functools.lru_cache(maxsize=1)
def _fallback() -> Path:
    return Path(tempfile.mkdtemp(prefix="attnfuse_"))


def _sealed(text: str) -> str:
    return f"{text}{_MARK}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _intact(path: Path) -> bool:
    """Whether the file is there and is what somebody once wrote completely."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    body, mark, _ = text.rpartition(_MARK)
    return bool(mark) and text == _sealed(body)


def _write(path: Path, text: str) -> None:
    """All or nothing: readers see the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}_", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_sealed(text))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path) -> ModuleType:
    """Import a generated file under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"attnfuse_generated_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
