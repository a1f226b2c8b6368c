"""Kernels as an emitter that a test has changed writes them."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnfuse.codegen import backward, forward, launch, launch_backward


@contextmanager
def emitted_again(folder: Path) -> Iterator[None]:
    """None is taken from before, none left behind: files go to a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, launch_backward):
            patch.setattr(module, "_functions", {})
            patch.setattr(module, "_runs", {})
        patch.setenv("ATTNFUSE_CACHE_DIR", str(folder))
        backward.emit.cache_clear()
        forward.emit.cache_clear()
        try:
            yield
        finally:
            backward.emit.cache_clear()
            forward.emit.cache_clear()
