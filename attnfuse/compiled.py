"""Inductor, with operators for its graphs that cost less to call.

A graph that reaches inductor has been differentiated, so what its operators have for autograd only takes time there: as much as launching
a kernel, at every call. `attention_in_graph` and the others are those of `ops` without it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .ops import IN_GRAPH, OPERATORS

IN_GRAPHS = {getattr(torch.ops.attnfuse, n).default: getattr(torch.ops.attnfuse, n + IN_GRAPH).default for n in OPERATORS}
"""For each of our operators the one without autograd."""


def inductor(mode: str | None, options: Mapping[str, Any], dynamic: bool | None) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Inductor with a mode and options, as ``torch.compile(backend="inductor")`` builds it."""
    from torch._inductor.compile_fx import compile_fx
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), dynamic)
    return lambda gm, inputs: compile_fx(gm, inputs, inner_compile=_without_autograd, config_patches=wrapper.config)  # type: ignore[return-value,arg-type]


def _without_autograd(gm: GraphModule, inputs: Sequence[Any], **rest: Any) -> Any:
    """Inductor's own, on a forward or backward graph."""
    from torch._inductor.compile_fx import compile_fx_inner
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.target = IN_GRAPHS.get(node.target, node.target)
    return compile_fx_inner(gm, inputs, **rest)
