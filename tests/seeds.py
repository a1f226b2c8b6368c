"""Where random inputs come from.

The suite draws its inputs from the source: every change of the code or of a test draws new ones, and the same source draws
the same ones everywhere, so that what fails in CI fails here too. In the environment, ``ATTNFUSE_TEST_SEED`` is

* a number: the seed of every test, to repeat a failure (each test prints its own);
* ``fresh``: new inputs in every run, to look for what the suite has not met yet.
"""
from __future__ import annotations

import functools
import hashlib
import os
import secrets
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("attnfuse", "passes", "codegen", "tests")
LIMIT = 2 ** 30


@functools.cache
def source() -> bytes:
    """The digest of the code under test and of the tests."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


def draw(name: str) -> int:
    """The seed below 2³⁰ of what bears this name (a test's id), printed so that a failure can be repeated."""
    given = os.environ.get("ATTNFUSE_TEST_SEED", "")
    if given == "fresh":
        value = secrets.randbelow(LIMIT)
    elif given:
        value = int(given)
    else:
        value = int.from_bytes(hashlib.sha256(source() + name.encode()).digest()[:8], "big") % LIMIT
    print(f"ATTNFUSE_TEST_SEED={value}")
    return value
