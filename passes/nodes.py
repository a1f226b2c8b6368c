"""What the passes ask about single nodes of a torch-level graph: names, kinds of operation, mutation, storage, source line."""
from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils._pytree import tree_leaves

SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"})
SDPA = frozenset({"scaled_dot_product_attention"})
CONTRACTION = frozenset({"matmul", "bmm", "einsum", "baddbmm", "mm", "__matmul__", "rmatmul", "__rmatmul__", "tensordot", "inner"})
DROPOUT = frozenset({"dropout", "dropout_", "feature_alpha_dropout", "native_dropout"})
# The ends of a slice: what is worth a kernel of its own and never part of a chain between two products.
HEAVY = frozenset({
    "linear", "addmm", "addmv", "addbmm", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "local_response_norm", "normalize",
    "gelu", "silu", "relu", "hardswish", "leaky_relu", "interpolate", "grid_sample", "avg_pool1d", "avg_pool2d", "max_pool2d", "adaptive_avg_pool2d",
    "topk", "sort", "argsort", "multinomial", "lstm", "gru", "fft_fft", "unfold", "multi_head_attention_forward", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd", "nonzero", "unique", "bincount", "cdist"})
RANDOM = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "normal",
                    "normal_", "uniform_", "random_", "exponential_", "multinomial", "gumbel_softmax", "alpha_dropout"})
# Operations through which a product's operand is followed: views, copies, casts, repeats, factors.
TRANSPARENT = frozenset({
    "transpose", "permute", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as",
    "broadcast_to", "flatten", "unflatten", "getitem", "__getitem__", "select", "narrow", "slice", "chunk", "split", "split_with_sizes", "tensor_split",
    "unbind", "contiguous", "clone", "to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy", "repeat_interleave", "repeat",
    "swapaxes", "swapdims", "movedim", "moveaxis", "t", "mT", "T", "view_as", "reshape_as", "detach", "alias", "rearrange",
    "mul", "multiply", "div", "truediv", "true_divide", "divide", "neg", "negative", "rmul", "__mul__", "__rmul__", "__truediv__"})
_OUT_OF_PLACE = frozenset({"__getitem__", "__matmul__", "__mul__", "__rmul__", "__rmatmul__", "__truediv__", "__add__", "__radd__", "__and__",
                           "__or__", "__sub__", "__rsub__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__invert__"})
_INPLACE_OPERATORS = frozenset({
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift", "setitem",
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__",
    "__ilshift__", "__irshift__", "__idiv__", "__setitem__"})

_SIDE_EFFECTS = {F.embedding: ("max_norm", ("weight",)), F.embedding_bag: ("max_norm", ("weight",)),
                 F.batch_norm: ("training", ("running_mean", "running_var")), F.instance_norm: ("use_input_stats", ("running_mean", "running_var"))}
"""Functions whose names do not tell that they change something: by which flag, and which of their arguments."""
_STATISTICS = frozenset({torch.batch_norm, torch.instance_norm})
"""The same without a signature to ask: their fourth and fifth arguments may change."""
_MOST_DEAD = 16
"""Dead code longer than this is taken for live."""


def name(node: Node) -> str:
    """The operation's bare name: ``softmax`` for F.softmax, Tensor.softmax and aten.softmax.int alike; a leaf module's class in lower case."""
    if node.op == "call_module":
        owner = node.graph.owning_module
        return type(owner.get_submodule(str(node.target))).__name__.lower() if owner is not None else ""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return node.op
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    if target is getattr:
        return str(node.args[1])
    return getattr(target, "__name__", str(target))


def value(node: Node) -> Any:
    """The fake value a node has (Dynamo keeps it under ``example_value``, export under ``val``), or None."""
    found = node.meta.get("example_value")
    return node.meta.get("val") if found is None else found


def value_key(node: Node) -> str:
    """Under which key the nodes around this one keep their fake values; Dynamo's where it has none of its own."""
    return "val" if "val" in node.meta and "example_value" not in node.meta else "example_value"


def bookkeeping(node: Node) -> dict[str, Any]:
    """What a node that takes this one's place must keep of its ``meta``: module path and source line."""
    return {k: node.meta[k] for k in ("nn_module_stack", "stack_trace", "source_fn_stack") if k in node.meta}


def is_builtin(node: Node) -> bool:
    """Whether a call can be replayed on fake tensors alone: a PyTorch function or method, or a leaf module without state."""
    if node.op == "call_method":
        return True
    if node.op == "call_module":
        module = node.graph.owning_module.get_submodule(str(node.target)) if node.graph.owning_module else None
        return isinstance(module, (torch.nn.Softmax, torch.nn.Dropout, torch.nn.Identity))
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    if target in (getattr, operator.getitem):
        return True
    module = getattr(target, "__module__", "") or getattr(getattr(target, "__objclass__", None), "__module__", "") or ""
    owner = str(getattr(target, "__self__", ""))
    return module.split(".")[0] in ("torch", "_operator", "operator", "math") or "torch" in owner or "built-in" in str(target)


def mutated(node: Node) -> list[Node]:
    """The nodes whose tensors a call changes in place."""
    if node.op == "call_module":                    # of symbolic_trace: nn.ReLU(inplace=True)
        owner = node.graph.owning_module
        inplace = owner is not None and getattr(owner.get_submodule(str(node.target)), "inplace", False) is True
        return inputs(node) if inplace else []
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _changed_inputs(node)
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = next((o for o in (getattr(target, n) for n in target.overloads()) if o._schema.is_mutable), target)
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        written = [s for s in schema.arguments if s.alias_info is not None and s.alias_info.is_write]
        found = [a for a, s in zip(node.args, schema.arguments, strict=False) if s in written]
        return _nodes([*found, *(node.kwargs[s.name] for s in written if s.name in node.kwargs)])
    called = name(node)
    out = _nodes([node.kwargs.get("out")])
    marked = called.endswith("_") and not called.endswith("__") and called not in _OUT_OF_PLACE
    plain = getattr(target, "__module__", "") == "_operator"           # and_, or_, not_: named so because the words are taken
    inplace = called in _INPLACE_OPERATORS or (marked and not plain)
    if inplace or _flagged_inplace(node):
        out += _nodes([node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))])
    if node.op == "call_function" and target in _STATISTICS:
        out += _nodes([*node.args[3:5], node.kwargs.get("running_mean"), node.kwargs.get("running_var")])
    return out + _on_the_side(node) if node.op == "call_function" and target in _SIDE_EFFECTS else out


def _on_the_side(node: Node) -> list[Node]:
    """Running statistics that a normalisation updates, a table that a lookup scales down."""
    flag, changed = _SIDE_EFFECTS[node.target]  # type: ignore[index]  # asked only of those
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]  # a function
    given.apply_defaults()
    return [] if given.arguments[flag] in (None, False) else _nodes([given.arguments[c] for c in changed])


def _nodes(args: Any) -> list[Node]:
    """The nodes among arguments, lists included."""
    return [a for a in tree_leaves(args, is_leaf=lambda x: isinstance(x, Node)) if isinstance(a, Node)]


def _flagged_inplace(node: Node) -> bool:
    """Whether a call has an argument ``inplace=True``, by name or by place."""
    if "inplace" in node.kwargs or not any(a is True for a in node.args):
        return node.kwargs.get("inplace") is True
    try:
        places = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):                 # a method or builtin: none of these has such a flag
        return False
    return "inplace" in places and len(node.args) > places.index("inplace") and node.args[places.index("inplace")] is True


def _changed_inputs(node: Node) -> list[Node]:
    """What a body that a higher-order operation calls changes of what it is given: told by its memory, all of it where that does not tell."""
    given = inputs(node)
    if "mutation" in getattr(node.target, "_name", str(node.target)):
        return given
    owner = node.graph.owning_module
    changed: set[int | None] = set()
    for arg in _nodes([node.args, dict(node.kwargs)]):
        body = getattr(owner, str(arg.target), None) if arg.op == "get_attr" and owner is not None and "." not in str(arg.target) else None
        if isinstance(body, torch.fx.GraphModule):
            theirs = {storage(n) for n in body.graph.nodes if n.op in ("placeholder", "get_attr")} - {None}
            changed |= theirs & {storage(t) for n in body.graph.nodes for t in mutated(n)}
    return [n for n in given if storage(n) in changed] if changed <= {storage(n) for n in given} else given


def storage(node: Node) -> int | None:
    """Identity of the memory behind a node's tensor: equal for a tensor and its views."""
    tensor = value(node)
    if not isinstance(tensor, torch.Tensor):
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):     # sparse and wrapped tensors have none
        return None


def inputs(node: Node) -> list[Node]:
    """All nodes among the arguments."""
    return list(node.all_input_nodes)


def dead_end(node: Node) -> list[Node]:
    """A node and everything made from it, where nothing comes of it: calls without effects whose results nobody uses. Else nothing."""
    found = [node]
    for n in found:
        if n.is_impure() or mutated(n) or not is_builtin(n) or len(found) > _MOST_DEAD:
            return []
        found += [u for u in n.users if u not in found]
    return found


def source_line(node: Node) -> str:
    """``file.py:123`` of the user's code that made a node; empty where the graph does not know."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""


def module_path(node: Node) -> str:
    """Where in the model a node comes from: ``layers.0.self_attn``."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(p[0]) for p in stack.values()] if stack else []
    path = paths[-1] if paths else ""
    # Dynamo writes Python expressions ("L['self'].layers[0]"); users know attribute paths.
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\.__getattr__\('?([^')]+)'?\)", r".\1", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", re.sub(r"^L\[['\"][^'\"]+['\"]\]\.?|^L__self___?\.?", "", path))
    return re.sub(r"^(self|_orig_mod|fn)\.", "", path.replace("_modules.", "").strip("."))


def ordered(nodes: Iterable[Node], position: dict[Node, int]) -> list[Node]:
    """In the order of the graph."""
    return sorted(nodes, key=position.__getitem__)
