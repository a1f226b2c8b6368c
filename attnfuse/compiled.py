"""Inductor, with operators for its graphs that cost less to call.

A graph that reaches inductor has been differentiated, so what its operators have for autograd only takes time there: as much as launching
a kernel, at every call. `attention_in_graph` and the others are those of `ops` without it. Nor has PyTorch's dispatcher anything to decide
for ordinary tensors, while it turns every argument from Python to C++ and back: there they are computed at once.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.fx import GraphModule

from .ops import IN_GRAPH, OPERATORS

IN_GRAPHS = {getattr(torch.ops.attnfuse, n).default: getattr(torch.ops.attnfuse, n + IN_GRAPH).default for n in OPERATORS}
"""For each of our operators the one without autograd."""


def _keys(*names: str) -> int:
    """The number of a set of the dispatcher's keys."""
    found = DispatchKeySet(getattr(DispatchKey, names[0]))
    for name in names[1:]:
        found = found | DispatchKeySet(getattr(DispatchKey, name))
    return int(found.raw_repr())


_ORDINARY = frozenset(_keys(x, "ADInplaceOrView", f"Autograd{x}", f"Autocast{x}") for x in ("CPU", "CUDA"))
"""The keys of tensors that are nothing but memory on a device: not fake, wrapped by a transformation, negated on reading."""
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_NOTHING_ON = _keys("BackendSelect", "ADInplaceOrView")
"""What the dispatcher looks at beside them where no mode, transformation or tracer is on."""


def at_once(operator: Any, computes: Callable[..., Any]) -> None:
    """Have calls of an operator without autograd go to `computes`, which the dispatcher would choose, where that is certain.

    It is where every tensor is `_ORDINARY` and nothing is on that sees operators; a profiler sees them by the dispatcher. Where a version of
    PyTorch has these parts elsewhere, the dispatcher goes on being called.
    """
    try:
        dispatched = operator._op
        keys_of, included = torch._C._dispatch_keys, torch._C._dispatch_tls_local_include_set
        function_modes, profiled = torch._C._len_torch_function_stack, torch.autograd._profiler_enabled
    except AttributeError:
        return

    def ordinary(args: Sequence[Any]) -> bool:
        for x in args:
            if isinstance(x, torch.Tensor):
                if type(x) not in _TYPES or keys_of(x).raw_repr() not in _ORDINARY:
                    return False
            elif isinstance(x, (list, tuple)) and not ordinary(x):
                return False
        return True

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (kwargs or function_modes() or profiled()) and included().raw_repr() == _NOTHING_ON and ordinary(args):
            return computes(*args)
        return dispatched(*args, **kwargs)

    operator._op = call


for _name, (_computes, _) in OPERATORS.items():
    at_once(getattr(torch.ops.attnfuse, _name + IN_GRAPH).default, _computes)


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
