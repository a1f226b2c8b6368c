"""The functions that users call: optimize, explain, rewrite, last_report.

    model = attnfuse.optimize(model)          compiles in place, and returns the model
    print(attnfuse.explain(model, inputs))    what would be rewritten, and why the rest would not

Invariant: the model that comes back is the one that went in: same class, same parameters, same keys in its state_dict.
"""
from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.fx import GraphModule

from . import dynamo
from .dynamo import Backend, Inner
from .report import Report, merge
from .settings import Settings, resolve

Model = TypeVar("Model", bound=Callable[..., Any])
Given = Settings | Mapping[str, Any] | None
"""What a `settings=` argument may be: see `attnfuse.settings.resolve`."""

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
MARK = "_attnfuse"
COMPILED = "_compiled_call_impl"
"""Where `nn.Module.compile` puts the compiled call; not copied, not pickled."""


class Mark:
    """Kept in an optimised module's ``__dict__``: how it was compiled, so that a deep copy is compiled likewise.

    `nn.Module.__getstate__` drops the compiled call, so a copy would silently run as written. This object is copied along
    with the module's state, and compiles the copy as it is.
    """

    def __init__(self, model: nn.Module, backend: Backend, fullgraph: bool) -> None:
        self.model = model
        self.backend = backend
        self.fullgraph = fullgraph

    def arm(self) -> None:
        """Compile the module's call in place, as `nn.Module.compile` does."""
        # Not by setattr: a class may define it, and the module of a deep copy is not filled yet.
        state = self.model.__dict__
        compiled = torch.compile(entry(self.model), backend=self.backend, dynamic=self.backend.dynamic, fullgraph=self.fullgraph)
        state[COMPILED] = unless_nested(self.model, compiled) if isinstance(self.model, LAYERS) else compiled
        state[MARK] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark | None:
        model = memo.get(id(self.model))  # the copy that is being filled: deepcopy notes it before it copies the state
        if not isinstance(model, nn.Module):
            return None
        mark = Mark(model, self.backend, self.fullgraph)
        mark.arm()
        return mark

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickle carries None: it loads without attnfuse, and is not optimised


def entry(model: nn.Module) -> Callable[..., Any]:
    """What to compile of a module: its call, with hooks.

    Dynamo passes over the frames of torch.nn itself, so `nn.Module.compile` of an `nn.TransformerEncoder` or `nn.Sequential`
    captures nothing. For those the call gets a frame of ours around it. (``type(model)``: a deep copy is not filled yet.)
    """
    from torch._dynamo import trace_rules
    if not trace_rules.check(type(model).forward):
        return model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)
    return call


def unless_nested(layer: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled call of a layer, but not for the nested tensors that its stack makes of padded ones in eager mode: those end
    the process inside Dynamo."""
    from torch._dynamo.eval_frame import skip_code

    def choose(*args: Any, **kwargs: Any) -> Any:
        nested = any(isinstance(x, torch.Tensor) and x.is_nested for x in (*args, *kwargs.values()))
        return (layer._call_impl if nested else compiled)(*args, **kwargs)

    skip_code(choose.__code__)                         # a frame that Dynamo may inline, but not start from
    return choose


def layers_behind_a_break(model: nn.Module) -> list[nn.Module]:
    """The layers of torch.nn's stacks, which need a compiled call of their own.

    Given a mask and no word on whether it is causal, `nn.TransformerEncoder` and `nn.TransformerDecoder` look at its values. That
    ends the graph inside a frame of torch.nn, which Dynamo does not resume: the layers then run by themselves, each knowing what
    was found out. Where the stack is captured as a whole, a layer's own compiled call is inlined and changes nothing.
    """
    stacks = [m for m in model.modules() if isinstance(m, (nn.TransformerEncoder, nn.TransformerDecoder))]
    return [layer for stack in stacks for layer in stack.layers if isinstance(layer, LAYERS) and layer is not model]


def optimize(model: Model, *, inner: Inner = "inductor", mode: str | None = None, dynamic: bool | None = None,
             fullgraph: bool = False, settings: Given = None) -> Model:
    """Compile a model in place with its attention fused, and return it.

    Args:
        model: an `nn.Module`; its class, hooks, parameters and state_dict keys stay. A plain function can't be compiled in
            place: for one, a compiled function is returned, as `torch.compile` does.
        inner: the compiler that comes after the passes: ``"inductor"``; ``"eager"``, which is Dynamo's ``aot_eager``; or a
            function that receives the rewritten GraphModule and its example inputs and returns a callable.
        mode, dynamic, fullgraph: as in `torch.compile`.
        settings: a `Settings`, or a mapping on top of the settings in force, which are read now and not at the first call.

    Optimising twice with equal arguments changes nothing; with others it compiles anew. A direct ``model.forward(x)`` is not
    optimised, nor is a module loaded from a pickle; a deep copy is. Raises ValueError for an argument that can't be.
    """
    backend = dynamo.make(resolve(settings), inner, mode, None, dynamic)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ValueError(f"optimize takes an nn.Module or a function, not {type(model).__name__}")
        return torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)  # type: ignore[return-value]
    mark = _mark(model)
    if mark is None or mark.backend is not backend or mark.fullgraph != fullgraph:
        Mark(model, backend, fullgraph).arm()
        for layer in layers_behind_a_break(model):
            Mark(layer, backend, fullgraph=False).arm()
    return cast(Model, model)


def _mark(model: Any) -> Mark | None:
    """The mark of a module that is optimised now; a shallow copy holds the mark of another module, which does not count."""
    mark = vars(model).get(MARK) if isinstance(model, nn.Module) else None
    return mark if isinstance(mark, Mark) and mark.model is model and model._compiled_call_impl is not None else None


def last_report(model: nn.Module | None = None) -> Report | None:
    """What was done to the graphs of an optimised model, or, without an argument, to the graph that was compiled last.

    Models that were optimised with equal arguments share compiled code, and so their report. None where nothing has been
    compiled. Raises ValueError for a model that is not optimised.
    """
    if model is None:
        return dynamo.last_report()
    mark = _mark(model)
    if mark is None:
        raise ValueError("this model is not optimised; attnfuse.explain(model, …) reports on any model")
    return mark.backend.report() if mark.backend.reports else None


# ---- explain

class Stopped(BaseException):
    """Ends a forward at its first graph; a BaseException, so that no handler in the model takes it for an error."""


def explain(model: Callable[..., Any], *args: Any, run: bool = True, settings: Given = None, **kwargs: Any) -> Report:
    """What the passes make of a model on these inputs.

    One real forward runs, since what follows a graph break may depend on the values before it. Buffers, training flags
    and the random state (Python, CPU, CUDA) are as before when it returns, and the inputs are copied where they can be.
    Compiled code that the user has is left alone. With ``run=False`` the forward ends where its first graph would run:
    the report is of that graph. Exceptions of the model itself are raised as they are. Raises ValueError for what is no model, and
    for settings that can't be.
    """
    if not callable(model):
        raise ValueError(f"explain takes an nn.Module or a function, not {type(model).__name__}")
    decided = resolve(settings)
    reports: list[Report] = []

    def record(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm, report = dynamo.analyse(gm, decided)
        reports.append(report)
        return gm.forward if run else _stop

    with preserved(model), torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16):
        args, kwargs = _copied(model, args), _copied(model, kwargs)
        if isinstance(model, nn.Module):
            model.__dict__[COMPILED] = _compile(entry(model), record)  # a class may wrap __call__: go through it
            for layer in layers_behind_a_break(model):
                layer.__dict__[COMPILED] = unless_nested(layer, _compile(entry(layer), record))
        call = model if isinstance(model, nn.Module) else _compile(model, record)
        try:
            call(*args, **kwargs)
        except Stopped:
            pass
    whole = merge(reports)
    if not reports:
        whole.failures.append("no graph was captured: the model has no operations on tensors, or torch.compile is disabled")
    return whole


def _stop(*args: Any) -> Any:
    raise Stopped


def _compile(call: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile whose entries don't count towards the recompilations of the user's own compiled code."""
    options: dict[str, Any] = {"backend": backend}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.13 has it, 2.11 does not
        options["isolate_recompiles"] = True
    return torch.compile(call, **options)


@contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Put the random state, the buffers, the training flags and the compiled calls of a model back at the end.

    Inside, no module is compiled: behind a graph break a compiled submodule would run by itself, unseen.
    Buffers that the forward creates stay; attributes that are neither tensors nor modules are not looked at.
    """
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    training = [m.training for m in modules]
    compiled = [(m, m.__dict__.pop(COMPILED)) for m in modules if COMPILED in m.__dict__]
    buffers = [(m, name, b, b.detach().clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    python_state = random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python_state)
        for m in modules:
            m.__dict__.pop(COMPILED, None)
        for m, call in compiled:
            m.__dict__[COMPILED] = call
        for m, flag in zip(modules, training):
            m.__dict__["training"] = flag
        for m, name, buffer, value in buffers:
            m._buffers[name] = buffer
            with torch.no_grad():
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _copied(model: Any, inputs: Any) -> Any:
    """Deep copies of the inputs (a model may write into a cache it is given), or the inputs where that is impossible."""
    kept: Iterable[Any] = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    try:
        return copy.deepcopy(inputs, {id(t): t for t in kept})
    except Exception:  # tensors with a history, handles, locks: whatever cannot be copied is used as it is
        return inputs


# ---- graphs by hand

def rewrite(gm: GraphModule, example_inputs: Sequence[Any], settings: Given = None) -> tuple[GraphModule, Report]:
    """Rewrite a graph that the caller has: of `torch.export` (``exported.module()``), Dynamo or `symbolic_trace`.

    Returns the rewritten graph as a new GraphModule (the graph given, where there is nothing to rewrite) and its report.
    `gm` stays as it is. `example_inputs` are the values of the placeholders, in
    their order, and are needed only where the nodes carry no fake tensors. Raises ValueError for what is no GraphModule, and for
    settings that can't be.
    """
    if not isinstance(gm, GraphModule):
        raise ValueError(f"rewrite takes a GraphModule, such as `torch.export.export(model, inputs).module()`, not {type(gm).__name__}")
    return dynamo.analyse(gm if _has_values(gm) else _with_values(gm, example_inputs), resolve(settings))


def _has_values(gm: GraphModule) -> bool:
    return all("example_value" in n.meta or "val" in n.meta for n in gm.graph.nodes if n.op in ("placeholder", "call_function", "call_method"))


def _with_values(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """A copy whose nodes carry fake tensors as ``meta["example_value"]``; parameters are shared with `gm`."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    new = GraphModule(gm, copy.deepcopy(gm.graph))
    FakeTensorProp(new, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*example_inputs)
    for node in new.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta.pop("val")
    return new
