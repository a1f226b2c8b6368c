"""Calls that hide an attention in one operator: taken apart where they stand, and put back where nothing comes of it.

Before:  m = F.multi_head_attention_forward(x, x, x, 16, 4, w, b, …, need_weights=False);  o = m[0]
After:   y = F.linear(x, w, b);  …;  a = F.scaled_dot_product_attention(q, k, v, mask);  …;  o = F.linear(a, w_out, b_out)

A call is taken apart by running its definition on the graph's own fake tensors and writing down the PyTorch functions that
it calls. `F.multi_head_attention_forward` is defined by PyTorch's own Python source, whatever version is installed; the two
operators of the inference fast path are C++, and are defined below. The call itself stays in the graph, unused, until it is
known whether its attention was rewritten (`settle`).
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..refusal import Reason, Refused
from . import nodes, verify
from .replace import Lengths
from .trace import length


@dataclass
class Expansion:
    """A call that was taken apart: the nodes made, and for the output (and the weights, where they are read) the node that stands
    for it and the nodes that it was."""

    call: Node
    results: list[tuple[Node, list[Node]]]
    made: list[Node] = field(default_factory=list)


def opaque(gm: GraphModule) -> list[Node]:
    """The calls of a graph that hide an attention, in graph order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and nodes.name(n) in DEFINITIONS and n.users]


def expand(gm: GraphModule, call: Node) -> Expansion:
    """Take one call apart and give its users the result; raises Refused, leaving the graph as it was."""
    outputs = _outputs(call)
    steps, given = _run(call)
    before = set(gm.graph.nodes)
    try:
        made = _emit(gm.graph, call, steps)
        results = [(_standing(made, given, which, some[0]), some) for which, some in enumerate(outputs) if some]
        for stands, some in results:
            verify.same_metadata(some[0], stands, layout=True)
    except Exception:
        for n in reversed([n for n in gm.graph.nodes if n not in before]):
            gm.graph.erase_node(n)
        raise
    for stands, some in results:
        # The very tensor that the later nodes' values were computed from: views of it and changes to it are told by its memory.
        stands.meta.update({k: some[0].meta[k] for k in ("example_value", "val") if k in some[0].meta})
        for node in some:
            node.replace_all_uses_with(stands)
    return Expansion(call, results, [n for n in gm.graph.nodes if n not in before])


def _standing(made: dict[int, Node], given: Sequence[Tensor | None], which: int, output: Node) -> Node:
    """The node that holds what a definition returned."""
    value = given[which] if which < len(given) else None
    if value is None or id(value) not in made:
        reader = next(iter(output.users), output)
        raise Refused(Reason.WEIGHTS_USED, reader.name, "expand", f"by {nodes.name(reader)}, and the call gives none")
    return made[id(value)]


def settle(expansion: Expansion, *, rewritten: bool) -> set[Node]:
    """Give a call its users back, unless its attention was rewritten; returns the nodes that may go where nothing uses them."""
    call = expansion.call
    if rewritten:
        return {call, *expansion.made, *(n for user in call.users for n in nodes.dead_end(user))}
    for stands, outputs in expansion.results:
        stands.replace_all_uses_with(outputs[0])
    return set(expansion.made)


def _outputs(call: Node) -> tuple[list[Node], list[Node]]:
    """The nodes that are the attention's output, and those that are its weights where something comes of them."""
    if nodes.name(call) == "_transformer_encoder_layer_fwd":
        return [call], []
    outputs: list[Node] = []
    weights: list[Node] = []
    for user in call.users:
        if user.target is operator.getitem and user.args[1] in (0, -2):
            outputs.append(user)
        elif user.target is operator.getitem and user.args[1] in (1, -1):
            weights += [] if nodes.dead_end(user) else [user]
        else:
            raise Refused(Reason.WEIGHTS_USED, user.name, "expand", f"by {nodes.name(user)}")
    if not outputs:
        raise Refused(Reason.NO_VALUE_PRODUCT, call.name, "expand", "the output is not used")
    return outputs, weights


# ---- running a definition

@dataclass(frozen=True)
class _Step:
    """One call that a definition made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class _Record(TorchFunctionMode):
    """Writes down every PyTorch function that gives tensors; what it does inside is its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) for x in tree_leaves(out)):
            self.steps.append(_Step(func, tuple(args), dict(kwargs or {}), out))
        return out


def _run(call: Node) -> tuple[list[_Step], tuple[Tensor | None, ...]]:
    """What the definition of a call does on the fake values of its arguments, and what it returns."""
    mode = _fake_mode(call)
    args, kwargs = map_arg((call.args, dict(call.kwargs)), nodes.value)
    shapes = mode.shape_env
    before = (len(shapes.guards), len(shapes.replacements)) if shapes is not None else (0, 0)
    with ExitStack() as stack:
        for enter in _autocasts(call):
            stack.callback(torch.amp.autocast_mode._exit_autocast, enter.target(*enter.args))  # type: ignore[operator]
        # The Python dispatcher keeps lengths symbolic where compiled code reads numbers.
        for context in (torch.no_grad(), enable_python_dispatcher(), mode):
            stack.enter_context(context)
        record = stack.enter_context(_Record())
        out = DEFINITIONS[nodes.name(call)](*args, **kwargs)
    if shapes is not None and (len(shapes.guards), len(shapes.replacements)) != before:
        raise Refused(Reason.DYNAMIC, call.name, "expand")
    if any(getattr(s.function, "__name__", "") in DEFINITIONS for s in record.steps):
        raise Refused(Reason.UNKNOWN_OP, call.name, "expand", "this version of PyTorch does not let the call be taken apart")
    return record.steps, out if isinstance(out, tuple) else (out,)


def _fake_mode(call: Node) -> FakeTensorMode:
    """The mode of the call's own arguments, which must all be ordinary fake tensors."""
    values = [nodes.value(n) for n in nodes.inputs(call)]
    tensors = [x for x in values if isinstance(x, Tensor)]
    odd = next((x for x in tensors if type(x).__name__ != "FakeTensor"), None)
    if not tensors or odd is not None:
        what = "no example values" if odd is None else "a nested tensor" if odd.is_nested else f"a {type(odd).__name__}"
        raise Refused(Reason.NOT_EXPRESSIBLE, call.name, "expand", what)
    return tensors[0].fake_mode  # type: ignore[attr-defined]


def _autocasts(call: Node) -> list[Node]:
    """The autocasts that the graph has entered and not left where the call stands."""
    found: list[Node] = []
    for n in call.graph.nodes:
        if n is call:
            break
        if nodes.name(n) == "_enter_autocast":
            found.append(n)
        elif nodes.name(n) == "_exit_autocast":
            found.remove(n.args[0])  # type: ignore[arg-type]
    return found


# ---- writing it into the graph

def _emit(graph: Graph, call: Node, steps: Sequence[_Step]) -> dict[int, Node]:
    """A node for every step, in front of the call and with its module path and source line; returns them by the identity of
    their tensors, the arguments of the call included."""
    arguments = nodes.inputs(call)
    made = {id(nodes.value(n)): n for n in arguments if isinstance(nodes.value(n), Tensor)}
    lengths = Lengths(graph, [n for n in arguments if isinstance(nodes.value(n), Tensor)], call)
    key, about = nodes.value_key(call), nodes.bookkeeping(call)

    def argument(x: Any) -> Any:
        if isinstance(x, torch.SymFloat):              # a probability of dropout that Dynamo may have fixed since
            if not x.node.expr.is_number:
                raise Refused(Reason.DYNAMIC, call.name, "expand", f"no value at hand for {x}")
            return float(x.node.expr)
        return made[id(x)] if isinstance(x, Tensor) else lengths.node(length(x)) if isinstance(x, torch.SymInt) else x

    def note(node: Node, value: Any) -> None:
        node.meta.update(about)
        node.meta[key] = value
        if isinstance(value, Tensor):
            made[id(value)] = node

    with graph.inserting_before(call):
        for step in steps:
            args, kwargs = tree_map(argument, (step.args, step.kwargs))
            name = getattr(step.function, "__name__", "")
            method = getattr(Tensor, name, None) is step.function
            node = graph.call_method(name, args, kwargs) if method else graph.call_function(step.function, args, kwargs)
            note(node, step.out)
            if isinstance(step.out, (tuple, list)):
                for n, part in enumerate(step.out):
                    note(graph.call_function(operator.getitem, (node, n)), part)
    return made


# ---- definitions

def _python(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that runs its own lines under a mode instead of handing itself to it."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def native_multi_head_attention(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
                                proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
                                average_attn_weights: bool = True, mask_type: int | None = None) -> tuple[Tensor, Tensor | None]:
    """`torch._native_multi_head_attention`. Every row of a softmax with no allowed key is NaN."""
    if not query.shape == key.shape == value.shape:
        raise Refused(Reason.UNKNOWN_OP, stage="expand", detail="queries, keys and values of different shapes")
    if query is key and key is value:
        q, k, v = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        sides = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        q, k, v = (F.linear(x, w, b) for x, w, b in sides)
    depth = embed_dim // num_head
    q, k, v = (x.unflatten(-1, (num_head, depth)).transpose(1, 2) for x in (q, k, v))
    scores = (q * (1 / math.sqrt(depth))) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(_blocked(mask, mask_type, scores), -math.inf)
    weights = F.softmax(scores, -1)
    out = F.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    return out, None if not need_weights else weights.sum(1) / num_head if average_attn_weights else weights


def _blocked(mask: Tensor, mask_type: int | None, scores: Tensor) -> Tensor:
    """A mask of the fast path, true where a key is masked, in a shape that broadcasts with the scores [B, H, T, T].

    Type 0 is [query, key], type 1 is [batch, key], type 2 and everything that is not two-dimensional has the scores' shape.
    The operator casts other dtypes to bool: in a float mask whatever is not zero masks its key, also a finite bias.
    """
    batch, _, queries, keys = scores.shape
    known = {0: (queries, keys), 1: (batch, keys)} if mask.dim() == 2 else {}
    if tuple(mask.shape) != known.get(-1 if mask_type is None else mask_type, tuple(scores.shape) if mask.dim() == 4 else None):
        raise Refused(Reason.UNKNOWN_OP, stage="expand", detail=f"a mask of type {mask_type} and shape {list(mask.shape)}")
    blocked = mask if mask.dtype == torch.bool else mask.to(torch.bool)
    return blocked[:, None, None, :] if mask.dim() == 2 and mask_type == 1 else blocked


def transformer_encoder_layer(src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
                              proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
                              norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
                              ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None) -> Tensor:
    """`torch._transformer_encoder_layer_fwd`."""
    def first(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    x = first(src) if norm_first else src
    x = native_multi_head_attention(x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)[0] + src
    x = x if norm_first else first(x)
    y = second(x) if norm_first else x
    # The operator's own step: which GELU it is depends on the device (on a GPU, the one with tanh).
    hidden = torch._addmm_activation(ffn_bias_1, y.flatten(0, 1), ffn_weight_1.t(), use_gelu=use_gelu)  # pyright: ignore[reportPrivateImportUsage]
    x = F.linear(hidden, ffn_weight_2, ffn_bias_2).view_as(x) + x
    return x if norm_first else second(x)


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "multi_head_attention_forward": _python(F.multi_head_attention_forward),
    "_native_multi_head_attention": native_multi_head_attention,
    "_transformer_encoder_layer_fwd": transformer_encoder_layer,
}
