"""The backend of torch.compile: run the passes over a captured graph, then hand it to the compiler that comes next.

    torch.compile(model, backend="attnfuse", mode="max-autotune-no-cudagraphs")
    torch.compile(model, backend="attnfuse", options={"strict": True, "epilogue_fusion": False})

Invariant: whatever happens in the passes, the user gets a program that computes what the model says. A pass that raises
leaves the graph as it was, with one warning and an entry in the report; only the setting `strict` lets it raise.
"""
from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, cast

import torch
from torch.fx import GraphModule

from . import tuning
from .report import Report, Site, dump, merge
from .settings import NAMES, Settings, resolve
from .traffic import Call

Compiled = Callable[..., Any]
Compiler = Callable[[GraphModule, Sequence[Any]], Compiled]
Inner = str | Compiler
"""The compiler that comes next: ``"inductor"``, ``"eager"``, or a function of a graph and its example inputs."""

NAME = "attnfuse"
log = logging.getLogger(NAME)

_last: Report | None = None
_backends: weakref.WeakValueDictionary[tuple[Any, ...], Backend] = weakref.WeakValueDictionary()


class PassWarning(UserWarning):
    """The passes failed on a graph, which runs as it was written."""


def analyse(gm: GraphModule, settings: Settings) -> tuple[GraphModule, Report]:
    """Run the passes over one graph whose nodes carry fake tensors, and write its dump where the settings ask for one.

    Returns the rewritten graph and its report. Where the passes raise: the graph itself, and a report that says so; with
    ``settings.strict`` the exception itself.
    """
    try:
        # Here, because it imports sympy, the decompositions and the kernels: only a compilation pays for them, and what is
        # missing on a machine costs the fusion, not the model.
        from attnfuse.passes import pipeline
        gm, report = pipeline.run(gm, settings)
        report.sites = [_predicted(site) for site in report.sites]
        if settings.autotune:
            tuning.ask(site.called[0] for site in report.sites if site.called)
    except Exception as e:
        if settings.strict:
            raise
        text = f"{type(e).__name__}: {e}"
        log.warning("the passes failed, the graph is kept", exc_info=True)
        warnings.warn(f"attnfuse left a graph as it was written, because its passes failed: {text}", PassWarning, stacklevel=2)
        report = Report(failures=[text])
    log.info("%s", report)
    if settings.dump is not None:
        log.info("wrote %s", dump(report, settings.dump))
        report.snapshots.clear()  # on disk now; a report may live as long as its model
    return gm, report


def _predicted(site: Site) -> Site:
    """The site with what its generated kernel would move; as it is where nothing was counted or there is no kernel for it."""
    if not site.written or site.called is None:
        return site
    from .predicting import default_device, forward, weights
    try:
        device = default_device()
        kernels = [forward(site.called[0], site.sizes, site.called[1], device), *(weights(w.spec, w.sizes, w.held, device) for w in site.given)]
        total = (sum(getattr(k, n) for k in kernels) for n in ("read", "written", "flops"))
        return replace(site, fused=Call(kernels[0].op, *total))
    except ValueError:
        return site
    except Exception:       # a remark of the report must not cost the fusion
        log.debug("a site's traffic could not be predicted", exc_info=True)
        return site


class Backend:
    """A backend for `torch.compile` with everything decided: the settings, what comes next, and with which mode and options.

    `reports` collects one report for each graph that it compiled. Make it with `make`, which returns the same object for
    equal arguments: Dynamo shares compiled code between equal modules only where the backend is the same.
    """

    def __init__(self, settings: Settings, inner: Inner = "inductor", mode: str | None = None,
                 options: Mapping[str, Any] | None = None, dynamic: bool | None = None) -> None:
        self.settings = settings
        self.inner = inner
        self.mode = mode
        self.options = dict(options or {})
        self.dynamic = dynamic
        self.reports: list[Report] = []
        self.__name__ = NAME  # Dynamo prints it

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        global _last
        gm, report = analyse(gm, self.settings)
        self.reports.append(report)
        _last = report
        compiled = self._compiler()(gm, example_inputs)
        return naming_the_way_out(compiled) if report.rewritten else compiled

    def report(self) -> Report:
        """What happened to all graphs compiled so far."""
        return merge(self.reports)

    def _compiler(self) -> Compiler:
        if not isinstance(self.inner, str):
            return self.inner
        if self.inner == "inductor":
            from .compiled import inductor
            return inductor(self.mode, self.options, self.dynamic)
        from torch._dynamo.backends.registry import lookup_backend
        # Plain "eager" gives wrong gradients for dropout under activation checkpointing.
        return cast(Compiler, lookup_backend("aot_eager"))


def naming_the_way_out(compiled: Compiled) -> Compiled:
    """The compiled graph, whose second derivative is the error of `ops`, which says what to do instead.

    PyTorch has none for compiled graphs and says only that. What it raises cannot be caught where it happens, in the engine: so gradients
    that could be differentiated again get a hook that comes first. It is put there by the backward function of the graph's own autograd
    class, which is found behind the first result that has one and wrapped once, for a hook at every call would cost as much as launching a
    kernel. What is more than a function, such as an artefact that can be stored, stays what it is.
    """
    if not isinstance(compiled, FunctionType) or not torch.is_grad_enabled():
        return compiled
    found = False

    def call(*args: Any) -> Any:
        nonlocal found
        results = compiled(*args)
        if not found:
            every = results if isinstance(results, (tuple, list)) else (results,)
            found = any(_refuses_from_now_on(x.grad_fn) for x in every if isinstance(x, torch.Tensor))
        return results

    # With what compilers leave on their functions, but for Dynamo's own marks, by which it would look through this one.
    vars(call).update({name: value for name, value in vars(compiled).items() if not name.startswith("_torchdynamo")})
    return call


def _refuses_from_now_on(node: Any) -> bool:
    """Have the class of a compiled graph, found at the node behind a result, refuse second derivatives; False where the node is none of such a class."""
    if node is None or node.name() != "CompiledFunctionBackward":
        return False
    function = type(node)._forward_cls
    backward = function.backward

    def first(*args: Any) -> Any:
        gradients = backward(*args)
        for g in gradients if torch.is_grad_enabled() else ():          # recorded: create_graph=True
            if isinstance(g, torch.Tensor) and g.grad_fn is not None:
                g.grad_fn.register_prehook(_refuse)
        return gradients

    function.backward = staticmethod(first)
    return True


def _refuse(_: Any) -> None:
    from .ops import SECOND_DERIVATIVE
    raise NotImplementedError(SECOND_DERIVATIVE)


def make(settings: Settings, inner: Inner = "inductor", mode: str | None = None, options: Mapping[str, Any] | None = None,
         dynamic: bool | None = None) -> Backend:
    """The backend with these arguments, a new one only where none is alive; raises ValueError for what can't be.

    `mode` and `options` are inductor's: with another `inner` there is nothing that they could mean.
    """
    if isinstance(inner, str) and inner not in ("inductor", "eager"):
        raise ValueError(f"inner={inner!r}: expected 'inductor', 'eager', or a function of a GraphModule and its example inputs")
    if not isinstance(inner, str) and not callable(inner):
        raise ValueError(f"inner must be 'inductor', 'eager' or callable, not {type(inner).__name__}")
    if inner != "inductor" and (mode is not None or options):
        raise ValueError("mode and options are inductor's; they mean nothing to another inner compiler")
    if inner == "inductor":
        check_inductor(mode, options or {})
    key = (settings, inner, mode, repr(sorted((options or {}).items())), dynamic)
    try:
        found = _backends.get(key)
    except TypeError:  # an inner compiler that cannot be hashed is nobody else's
        return Backend(settings, inner, mode, options, dynamic)
    if found is None:
        found = _backends[key] = Backend(settings, inner, mode, options, dynamic)
    return found


def check_inductor(mode: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a mode or an option that neither inductor nor attnfuse has."""
    if mode is not None and mode != "default":
        from torch._inductor import list_mode_options
        modes = list_mode_options()
        if mode not in modes:
            raise ValueError(f"unknown mode {mode!r}; the modes are {', '.join(modes)}")
    if options:
        from torch._inductor import list_options
        known = set(list_options())
        unknown = sorted(name for name in options if name.replace("-", "_") not in known)
        if unknown:
            raise ValueError(f"unknown option {', '.join(map(repr, unknown))}; attnfuse has {', '.join(NAMES)}, "
                             "and inductor those of torch._inductor.list_options()")


def backend(gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
            options: Mapping[str, Any] | None = None) -> Compiled:
    """What ``torch.compile(…, backend="attnfuse")`` calls for each graph.

    `options` may name settings of attnfuse; the others, and `mode`, go to inductor. Raises ValueError for an option that
    neither has.
    """
    own = {name: value for name, value in (options or {}).items() if name in NAMES}
    rest = {name: value for name, value in (options or {}).items() if name not in NAMES}
    return make(resolve(own), "inductor", mode, rest)(gm, example_inputs)


def last_report() -> Report | None:
    """The report of the graph that was compiled last in this process, by any of the ways; None before the first."""
    return _last


@functools.cache
def register() -> None:
    """Make the name known to torch.compile where no entry point does: in a source tree that is not installed."""
    from torch._dynamo import register_backend
    register_backend(compiler_fn=backend, name=NAME)
