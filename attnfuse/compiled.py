"""Inductor, with operators for its graphs that cost less to call.

A graph that reaches inductor has been differentiated, so what its operators have for autograd only takes time there: as much as launching
a kernel, at every call. `attention_in_graph` and the others are those of `ops` without it. And the graph's tensors are ordinary ones, for which
PyTorch's dispatcher only finds the one function that there is and turns every argument over twice: those operators call it themselves, unless
somebody looks on (`shorten`).
"""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import profiler
from torch.fx import GraphModule

from .ops import IN_GRAPH, OPERATORS

IN_GRAPHS = {getattr(torch.ops.attnfuse, n).default: getattr(torch.ops.attnfuse, n + IN_GRAPH).default for n in OPERATORS}
"""For each of our operators the one without autograd."""

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
log = logging.getLogger("attnfuse")


@functools.cache
def shorten() -> None:
    """Let the operators of graphs call what computes them without the dispatcher; with it where the first tensor is of a type of its own
    (fake ones are) or wrapped by a transform, inside a dispatch mode, and while a profiler records, which sees the operator by its name."""
    for op, (computes, _) in zip(IN_GRAPHS.values(), OPERATORS.values(), strict=True):
        if callable(getattr(op, "_op", None)):
            op._op = _shorter(op._op, computes)
        else:                               # another PyTorch: nothing is lost but the time
            log.debug("%s is called by the dispatcher", op)


def _shorter(dispatched: Callable[..., Any], computes: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that is dispatched only where that makes a difference."""
    def call(*args: Any, **named: Any) -> Any:
        first: Any = args[0] if args else None
        if isinstance(first, list):
            first = first[0] if first else None
        if (type(first) not in _ORDINARY or named or profiler._is_profiler_enabled or _len_torch_dispatch_stack()
                or is_functorch_wrapped_tensor(first) or first.is_meta):
            return dispatched(*args, **named)
        return computes(*args)
    return call


def inductor(mode: str | None, options: Mapping[str, Any], dynamic: bool | None) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Inductor with a mode and options, as ``torch.compile(backend="inductor")`` builds it."""
    from torch._inductor.compile_fx import compile_fx
    shorten()
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), dynamic)
    return lambda gm, inputs: compile_fx(gm, inputs, inner_compile=_without_autograd, config_patches=wrapper.config)  # type: ignore[return-value,arg-type]


def _without_autograd(gm: GraphModule, inputs: Sequence[Any], **rest: Any) -> Any:
    """Inductor's own, on a forward or backward graph."""
    from torch._inductor.compile_fx import compile_fx_inner
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.target = IN_GRAPHS.get(node.target, node.target)
    return compile_fx_inner(gm, inputs, **rest)
