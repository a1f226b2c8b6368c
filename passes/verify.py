"""What must hold after a rewrite; a rewrite that breaks it is undone."""
from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..refusal import Reason, Refused
from . import nodes


def same_metadata(old: Node, new: Node, *, layout: bool) -> None:
    """Raise Refused where the node that stands for a product differs from it in shape, dtype, device or (if `layout`) strides."""
    a, b = nodes.value(old), nodes.value(new)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return
    for what in ("shape", "dtype", "device"):
        if getattr(a, what) != getattr(b, what):
            raise Refused(Reason.METADATA, old.name, "verify", f"{what} {getattr(b, what)} instead of {getattr(a, what)}")
    if layout and a.stride() != b.stride():
        raise Refused(Reason.METADATA, old.name, "verify", f"strides {b.stride()} instead of {a.stride()}")


def sound(gm: GraphModule) -> None:
    """Raise RuntimeError where the graph is not well formed (an argument used before it is made, a name twice)."""
    gm.graph.lint()
