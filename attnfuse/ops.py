"""The operators that a rewritten graph calls, and the choice of who computes them.

    torch.ops.attnfuse.attention(operands, sizes, seed, spec) -> (out, stats)
    torch.ops.attnfuse.attention_backward(grad_out, operands, out, stats, sizes, seed, spec, needs) -> gradients
    torch.ops.attnfuse.weights(operands, stats, sizes, seed, spec) -> weights
    torch.ops.attnfuse.weights_backward(grad, operands, stats, sizes, seed, spec, needs) -> gradients
    torch.ops.attnfuse.tile_map(like, operands, sizes, mask) -> (rows, columns)
    torch.ops.attnfuse.distance_table(like, operands, sizes, table) -> table
    torch.ops.attnfuse.distance_table_backward(grad, operands, sizes, table, needs) -> gradients
    torch.ops.attnfuse.attention_in_graph(…)        and so on: the same without autograd

`spec` is `AttentionSpec.to_json()`, `sizes` the integers of `AttentionSpec.size_names`; out (batch…, i, e) has the strides that
`spec.out_order` says, stats (batch…, i, 2) are the row statistics of `walker.forward`. Of the gradients come back those that `needs` names, in order.

`weights` is for attention weights that are wanted beside the result: from the statistics of the same operands it gives the tensor
(batch…, i, j) that its own spec describes (weight program, dtype, memory order). Its gradients are added to the attention's by autograd.

`tile_map` makes the map of a mask's tiles (`tilemap.build`; `mask` is `Mask.to_json()`) on the device of `like`, once for all layers
that share the mask; the two tensors are the last operands of their attentions.

`distance_table` computes what scores take from the distance of key and query (`distances.build`; `table` is `Table.to_json()`) on the
device of `like`, which gets no gradient, once for all layers that share it; the result is an operand of their attentions.

On the CPU plain attention goes to PyTorch's fused kernel and everything else to the walker; on a GPU the generated
kernels run, and the walker what they do not support, which is said once a reason.
"""
from __future__ import annotations

import functools
import importlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import cpu, distances, tilemap, walker, weighing
from .distances import Table
from .reference import reference, weights
from .samples import sample_by_sample
from .settings import in_force
from .spec import AttentionSpec, dtype_of
from .tilemap import Mask
from .tiling import allocate_out, allocate_weights

Executor = Literal["auto", "reference", "walker", "triton"]
Result = tuple[torch.Tensor, torch.Tensor]

log = logging.getLogger("attnfuse")
_library = torch.library.Library("attnfuse", "DEF")  # noqa: TOR901  (lives as long as the module)
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define("attention(Tensor[] operands, SymInt[] sizes, Tensor? seed, str spec) -> (Tensor out, Tensor stats)", tags=_tags)
_library.define("attention_backward(Tensor grad_out, Tensor[] operands, Tensor out, Tensor stats, SymInt[] sizes, Tensor? seed, str spec, "
                "bool[] needs) -> Tensor[]", tags=_tags)
_library.define("weights(Tensor[] operands, Tensor stats, SymInt[] sizes, Tensor? seed, str spec) -> Tensor", tags=_tags)
_library.define("weights_backward(Tensor grad, Tensor[] operands, Tensor stats, SymInt[] sizes, Tensor? seed, str spec, bool[] needs) -> Tensor[]",
                tags=_tags)
_library.define("tile_map(Tensor like, Tensor[] operands, SymInt[] sizes, str mask) -> (Tensor rows, Tensor columns)", tags=_tags)
_library.define("distance_table(Tensor like, Tensor[] operands, SymInt[] sizes, str table) -> Tensor", tags=_tags)
_library.define("distance_table_backward(Tensor grad, Tensor[] operands, SymInt[] sizes, str table, bool[] needs) -> Tensor[]", tags=_tags)

SECOND_DERIVATIVE = ("attnfuse: a fused attention has no second derivative; run the model as it is written, inside "
                     "`with torch.compiler.set_stance(\"force_eager\"):` or by calling its forward directly")

FORWARD_MODE = ("attnfuse: a fused attention has no forward-mode derivative (jvp); take it through the original model, which attnfuse did "
                "not rewrite")


def _refuse_forward_mode() -> None:
    """An operator without a rule would drop the tangents in silence: refuse every call inside a level of forward-mode AD."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(FORWARD_MODE)


def _needed(each: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Those of the operands, or of what belongs to them, whose gradients are needed."""
    return [x for x, need in zip(each, needs, strict=True) if need]


def _in_place(grads: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """A gradient or None for every operand, as autograd wants them, from the needed ones."""
    given = iter(grads)
    return [next(given) if need else None for need in needs]


# ---- who computes

_forced: Executor = "auto"
_said: set[str] = set()
_AS_IT_IS = nullcontext()


@contextmanager
def force_executor(name: Executor) -> Iterator[None]:
    """Let one executor compute every attention in the process, and fail where it can't: for tests and comparisons.

    ``"reference"`` is dense and differentiates by the walker. Raises ValueError for an unknown name.
    """
    global _forced
    if name not in ("auto", "reference", "walker", "triton"):
        raise ValueError(f"no executor {name!r}: expected auto, reference, walker or triton")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def _say_once(reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        log.warning("computed by the tiled loop in PyTorch: %s", reason)
        warnings.warn(f"attnfuse computes an attention by the tiled loop in PyTorch: {reason}", stacklevel=3)


@functools.cache
def _launch() -> Any:
    """The module of the generated kernels, which needs Triton: looked up once, for it is asked for at every call. Raises ImportError."""
    return importlib.import_module("attnfuse.codegen.launch")


def _generated(which: Literal["forward", "backward", "weights", "tile_map"], *args: Any) -> Any:
    """What the generated kernels give for the arguments of that function of `launch`; None, said once, where there are none."""
    try:
        launch = _launch()
    except ImportError as e:
        _say_once(f"the generated kernels are not available ({e})")
        return None
    try:
        return getattr(launch, which)(*args)
    except launch.Unsupported as e:
        _say_once(str(e))
    except Exception as e:
        if not type(e).__module__.startswith("triton"):
            raise
        _say_once(f"a generated kernel did not compile ({type(e).__name__}: {str(e)[:200]})")
    return None


def _forward(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None) -> Result:
    if _forced == "reference":
        out = allocate_out(spec, sizes, operands[spec.query.operand])
        return out.copy_(reference(spec, operands, sizes, seed)), walker.forward(spec, operands, sizes, seed)[1]
    if _forced == "triton":
        return _launch().forward(spec, operands, sizes, seed)
    device = operands[spec.query.operand].device.type
    if _forced == "auto":
        fast = None
        if device == "cpu":
            fast = cpu.forward(spec, operands, sizes)
        elif device == "cuda" and in_force("executor") != "torch":
            fast = _generated("forward", spec, operands, sizes, seed)
        if fast is not None:
            return fast
    return walker.forward(spec, operands, sizes, seed)


def _undisturbed(device: torch.device) -> AbstractContextManager[object]:
    """Nothing is recorded for autograd, and a surrounding autocast does not reach the products, whose dtypes the spec fixes."""
    if not torch.is_grad_enabled() and not torch.is_autocast_enabled(device.type):
        return _AS_IT_IS                            # as in every compiled graph: entering both contexts costs as much as an allocation
    contexts = ExitStack()
    contexts.enter_context(torch.no_grad())
    contexts.enter_context(torch.autocast(device.type, enabled=False))
    return contexts


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _attention(operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None, spec: str) -> Result:
    _refuse_forward_mode()
    parsed = AttentionSpec.from_json(spec)
    with _undisturbed(operands[parsed.query.operand].device):
        return _forward(parsed, operands, sizes, seed)


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
                        sizes: Sequence[int], seed: torch.Tensor | None, spec: str, needs: Sequence[bool]) -> list[torch.Tensor]:
    parsed = AttentionSpec.from_json(spec)
    with _undisturbed(grad_out.device):
        grads = None
        if _forced == "auto" and grad_out.device.type == "cpu":
            grads = cpu.backward(parsed, grad_out, operands, out, stats, sizes, needs)
        elif _forced == "triton" or (_forced == "auto" and grad_out.device.type == "cuda" and in_force("executor") != "torch"):
            grads = _generated("backward", parsed, grad_out, operands, out, stats, sizes, seed, needs)
        if grads is None:
            grads = walker.backward(parsed, grad_out, operands, out, stats, sizes, seed, needs)
    return _needed(grads, needs)


def _weights(spec: AttentionSpec, operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int],
             seed: torch.Tensor | None) -> torch.Tensor:
    like = operands[spec.query.operand]
    if _forced == "reference":
        return allocate_weights(spec, sizes, like).copy_(weights(spec, operands, sizes, seed))
    if _forced == "triton":
        return _launch().weights(spec, operands, stats, sizes, seed)
    fast = None
    if _forced == "auto" and like.device.type == "cuda" and in_force("executor") != "torch":
        fast = _generated("weights", spec, operands, stats, sizes, seed)
    return weighing.forward(spec, operands, stats, sizes, seed) if fast is None else fast


@torch.library.impl(_library, "weights", "CompositeExplicitAutograd")
def _weights_op(operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int], seed: torch.Tensor | None, spec: str) -> torch.Tensor:
    _refuse_forward_mode()
    with _undisturbed(stats.device):
        return _weights(AttentionSpec.from_json(spec), operands, stats, sizes, seed)


@torch.library.impl(_library, "weights_backward", "CompositeExplicitAutograd")
def _weights_backward(grad: torch.Tensor, operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int], seed: torch.Tensor | None,
                      spec: str, needs: Sequence[bool]) -> list[torch.Tensor]:
    """By the tiled loop on every device: a tensor of the gradient's size is alive anyway."""
    with _undisturbed(stats.device):
        grads = weighing.backward(AttentionSpec.from_json(spec), grad, operands, stats, sizes, seed, needs)
    return _needed(grads, needs)


@torch.library.impl(_library, "tile_map", "CompositeExplicitAutograd")
def _tile_map(like: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], mask: str) -> Result:
    """The tiles of a mask (`tilemap.build`), made on the device of `like`."""
    parsed = Mask.from_json(mask)
    with _undisturbed(like.device):
        generated = like.device.type == "cuda" and _forced in ("auto", "triton") and in_force("executor") != "torch"
        found = _generated("tile_map", parsed, operands, sizes, like.device) if generated else None
        return tilemap.build(parsed, operands, sizes, like.device) if found is None else found


@torch.library.impl(_library, "distance_table", "CompositeExplicitAutograd")
def _distance_table(like: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], table: str) -> torch.Tensor:
    """What scores take from distances (`distances.build`), made on the device of `like`."""
    _refuse_forward_mode()
    with _undisturbed(like.device):
        return distances.build(Table.from_json(table), operands, sizes, like.device)


@torch.library.impl(_library, "distance_table_backward", "CompositeExplicitAutograd")
def _distance_table_backward(grad: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], table: str,
                             needs: Sequence[bool]) -> list[torch.Tensor]:
    with _undisturbed(grad.device):
        grads = distances.gradients(Table.from_json(table), grad, operands, sizes, needs)
    return _needed(grads, needs)


# ---- shapes without values

@torch.library.register_fake("attnfuse::distance_table", lib=_library)
def _fake_distance_table(like: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], table: str) -> torch.Tensor:
    _refuse_forward_mode()
    parsed = Table.from_json(table)
    return like.new_empty(distances.shape(parsed, sizes), dtype=dtype_of(parsed.dtype))


@torch.library.register_fake("attnfuse::distance_table_backward", lib=_library)
def _fake_distance_table_backward(grad: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], table: str,
                                  needs: Sequence[bool]) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in _needed(operands, needs)]


@torch.library.register_fake("attnfuse::tile_map", lib=_library)
def _fake_tile_map(like: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], mask: str) -> Result:
    rows, columns = (like.new_empty(s, dtype=torch.int32) for s in tilemap.shapes(Mask.from_json(mask), sizes))
    return rows, columns


@torch.library.register_fake("attnfuse::attention", lib=_library)
def _fake(operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None, spec: str) -> Result:
    _refuse_forward_mode()
    parsed = AttentionSpec.from_json(spec)
    out = allocate_out(parsed, sizes, operands[parsed.query.operand])
    return out, out.new_empty([*out.shape[:-1], 2], dtype=parsed.compute_dtype)


@torch.library.register_fake("attnfuse::attention_backward", lib=_library)
def _fake_backward(grad_out: torch.Tensor, operands: Sequence[torch.Tensor], out: torch.Tensor, stats: torch.Tensor,
                   sizes: Sequence[int], seed: torch.Tensor | None, spec: str, needs: Sequence[bool]) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in _needed(operands, needs)]


@torch.library.register_fake("attnfuse::weights", lib=_library)
def _fake_weights(operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int], seed: torch.Tensor | None, spec: str) -> torch.Tensor:
    _refuse_forward_mode()
    parsed = AttentionSpec.from_json(spec)
    return allocate_weights(parsed, sizes, operands[parsed.query.operand])


@torch.library.register_fake("attnfuse::weights_backward", lib=_library)
def _fake_weights_backward(grad: torch.Tensor, operands: Sequence[torch.Tensor], stats: torch.Tensor, sizes: Sequence[int],
                           seed: torch.Tensor | None, spec: str, needs: Sequence[bool]) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in _needed(operands, needs)]


# ---- autograd

def _save(ctx: Any, inputs: tuple[Any, ...], output: Result) -> None:
    operands, sizes, seed, spec = inputs
    out, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, out, stats, *([] if seed is None else [seed]))
    ctx.count, ctx.sizes, ctx.spec = len(operands), sizes, spec


def _differentiate(ctx: Any, grad_out: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return [None] * ctx.count, None, None, None
    saved = ctx.saved_tensors                          # once: checkpointing refuses a second look
    operands, (out, stats, *rest) = saved[:ctx.count], saved[ctx.count:]
    seed = rest[0] if rest else None
    needs = list(ctx.needs_input_grad[0])
    grads = torch.ops.attnfuse.attention_backward(grad_out, operands, out, stats, ctx.sizes, seed, ctx.spec, needs)
    return _in_place(grads, needs), None, None, None


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    operands, stats, sizes, seed, spec = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, stats, *([] if seed is None else [seed]))
    ctx.count, ctx.sizes, ctx.spec = len(operands), sizes, spec


def _differentiate_weights(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return [None] * ctx.count, None, None, None, None
    saved = ctx.saved_tensors
    operands, (stats, *rest) = saved[:ctx.count], saved[ctx.count:]
    read = weighing.reads(AttentionSpec.from_json(ctx.spec))
    needs = [need and n in read for n, need in enumerate(ctx.needs_input_grad[0])]
    grads = torch.ops.attnfuse.weights_backward(grad, operands, stats, ctx.sizes, rest[0] if rest else None, ctx.spec, needs)
    return _in_place(grads, needs), None, None, None, None


def _save_table(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, operands, sizes, table = inputs
    ctx.save_for_backward(*operands)
    ctx.sizes, ctx.table = sizes, table


def _differentiate_table(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[1])
    grads = torch.ops.attnfuse.distance_table_backward(grad, ctx.saved_tensors, ctx.sizes, ctx.table, needs)
    return None, _in_place(grads, needs), None, None


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(SECOND_DERIVATIVE)


torch.library.register_autograd("attnfuse::attention", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("attnfuse::attention_backward", _no_second_derivative, lib=_library)
torch.library.register_autograd("attnfuse::weights", _differentiate_weights, setup_context=_save_weights, lib=_library)
torch.library.register_autograd("attnfuse::weights_backward", _no_second_derivative, lib=_library)
torch.library.register_autograd("attnfuse::distance_table", _differentiate_table, setup_context=_save_table, lib=_library)
torch.library.register_autograd("attnfuse::distance_table_backward", _no_second_derivative, lib=_library)


# ---- all of them

OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (_attention, _fake), "attention_backward": (_attention_backward, _fake_backward),
    "weights": (_weights_op, _fake_weights), "weights_backward": (_weights_backward, _fake_weights_backward),
    "tile_map": (_tile_map, _fake_tile_map),
    "distance_table": (_distance_table, _fake_distance_table), "distance_table_backward": (_distance_table_backward, _fake_distance_table_backward)}
"""By name, what computes and what gives the shapes."""
IN_GRAPH = "_in_graph"
"""How the names of the same operators without autograd end, for graphs that were differentiated: `attnfuse.compiled`. Inductor's stored artefacts
call them by name, so they keep it."""

for _name, (_computes, _shapes) in OPERATORS.items():
    _known = getattr(torch.ops.attnfuse, _name)
    torch.library.register_vmap(f"attnfuse::{_name}", sample_by_sample(_known), lib=_library)
    _library.define(str(_known.default._schema).removeprefix("attnfuse::").replace(_name, _name + IN_GRAPH, 1), tags=_tags)
    torch.library.impl(_library, _name + IN_GRAPH, "CompositeExplicitAutograd")(_computes)
    torch.library.register_fake(f"attnfuse::{_name}{IN_GRAPH}", _shapes, lib=_library)


# ---- arithmetic

def _flops(spec: str, sizes: Sequence[int], products_d: int, products_e: int) -> int:
    """Two for each multiply-add of the products of two matrices, over all pairs: masks are not discounted, as PyTorch doesn't."""
    parsed = AttentionSpec.from_json(spec)
    named = dict(zip(parsed.size_names, sizes, strict=True))
    pairs = math.prod(named[a] for a in (*parsed.batch, "i", "j"))
    return 2 * pairs * (products_d * named["d"] + products_e * named["e"])


@register_flop_formula([torch.ops.attnfuse.attention, torch.ops.attnfuse.attention_in_graph])
def _attention_flops(operands: Any, sizes: Sequence[int], seed: Any, spec: str, *_: Any, **__: Any) -> int:
    return _flops(spec, sizes, 1, 1)


@register_flop_formula([torch.ops.attnfuse.attention_backward, torch.ops.attnfuse.attention_backward_in_graph])
def _backward_flops(grad_out: Any, operands: Any, out: Any, stats: Any, sizes: Sequence[int], seed: Any, spec: str, *_: Any,
                    **__: Any) -> int:
    return _flops(spec, sizes, 3, 2)


@register_flop_formula([torch.ops.attnfuse.weights, torch.ops.attnfuse.weights_in_graph])
def _weights_flops(operands: Any, stats: Any, sizes: Sequence[int], seed: Any, spec: str, *_: Any, **__: Any) -> int:
    return _flops(spec, sizes, 1, 0)


@register_flop_formula([torch.ops.attnfuse.weights_backward, torch.ops.attnfuse.weights_backward_in_graph])
def _weights_backward_flops(grad: Any, operands: Any, stats: Any, sizes: Sequence[int], seed: Any, spec: str, *_: Any, **__: Any) -> int:
    return _flops(spec, sizes, 4, 0)                   # the scores twice: what a row's gradients lose is summed first
