"""Backward kernels as an emitter that a test has changed writes them."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnfuse.codegen import backward, launch_backward


@contextmanager
def emitted_again(folder: Path) -> Iterator[None]:
    """None is taken from before, none left behind: files go to a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_backward, "_functions", {})
        patch.setattr(launch_backward, "_runs", {})
        patch.setenv("ATTNFUSE_CACHE_DIR", str(folder))
        backward.emit.cache_clear()
        try:
            yield
        finally:
            backward.emit.cache_clear()
