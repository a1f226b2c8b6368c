"""Running a file of tests in Triton's interpreter, in a process of its own: Triton decides at import whether it interprets."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_in_interpreter(file: str, cache: Path, *options: str, **environment: str) -> None:
    """All tests of `file` (its `__file__`) that `options` leave, with generated files in `cache`; fails with what they print."""
    env = os.environ | {"TRITON_INTERPRET": "1", "ATTNFUSE_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, file]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
