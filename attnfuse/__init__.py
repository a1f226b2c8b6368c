"""attnfuse: attention written in plain PyTorch, run as one generated, tiled, online-softmax kernel."""
from pathlib import Path as _Path

# In a source tree `passes/` and `codegen/` lie beside this folder, in a wheel inside it: let both import as attnfuse.passes.
if (_Path(__file__).parent.parent / "pyproject.toml").exists():
    __path__.append(str(_Path(__file__).parent.parent))
