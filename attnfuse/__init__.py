"""attnfuse: attention written in plain PyTorch, run as one generated, tiled, online-softmax kernel."""
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

# In a source tree `passes/` and `codegen/` lie beside this folder, in a wheel inside it: let both import as attnfuse.passes.
if (_Path(__file__).parent.parent / "pyproject.toml").exists():
    __path__.append(str(_Path(__file__).parent.parent))

from . import roofline
from .settings import Settings, settings
from .traffic import Traffic, traffic

if _TYPE_CHECKING:
    from .api import explain as explain, last_report as last_report, optimize as optimize, rewrite as rewrite
    from .picture import draw_tiles as draw_tiles
    from .refusal import Reason as Reason, Refusal as Refusal
    from .report import Report as Report, Site as Site
    from .spec import AttentionSpec as AttentionSpec

__version__ = "0.1.0"

_LAZY = {"draw_tiles": "picture", "explain": "api", "last_report": "api", "optimize": "api", "rewrite": "api", "Reason": "refusal",
         "Refusal": "refusal", "Report": "report", "Site": "report", "AttentionSpec": "spec"}
"""Public names and their modules; torch is imported with the first of them that is used."""

__all__ = ["AttentionSpec", "Reason", "Refusal", "Report", "Settings", "Site", "Traffic", "__version__", "draw_tiles", "explain", "last_report",
           "optimize", "rewrite", "roofline", "settings", "traffic"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnfuse' has no attribute {name!r}")
    from importlib import import_module
    value = globals()[name] = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _known_to_torch() -> bool:
    """Whether torch.compile finds the backend by the entry point of an installed package."""
    from importlib.metadata import entry_points
    return any(e.name == "attnfuse" for e in entry_points(group="torch_dynamo_backends"))


if not _known_to_torch():  # a source tree that is not installed; doing both would raise "duplicate name"
    from .dynamo import register as _register
    _register()
