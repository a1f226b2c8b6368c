"""Run a slice's nodes on other values, as `torch.fx.Interpreter` would, with two operations spelled out.

Dropout becomes `aten.native_dropout` whatever device and mode PyTorch would pick an implementation for, and
`scaled_dot_product_attention` becomes the composition that its documentation defines, so that it is one spelling more.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from . import nodes
from .region import Region


def replay(region: Region, inputs: Sequence[Any]) -> list[Any]:
    """The values of all body nodes, in order, for the given values of `region.inputs`."""
    env: dict[Node, Any] = dict(zip(region.inputs, inputs, strict=True))
    out: list[Any] = []
    for node in region.body:
        env[node] = run_node(node, env)
        out.append(env[node])
    return out


def run_node(node: Node, env: Mapping[Node, Any], fused: bool = False) -> Any:
    """The value of a node from those of its inputs; with `fused` a fused call is not spelled out."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), env.__getitem__)
    return _run(node, args, kwargs, fused)


def _run(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], fused: bool) -> Any:
    called = nodes.name(node)
    if called in nodes.SDPA and not fused:
        return attention(*args, **kwargs)
    if called in ("dropout", "dropout_"):
        return _dropout(node, args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        owner = node.graph.owning_module
        assert owner is not None
        return owner.get_submodule(str(node.target))(*args, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _dropout(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if node.op == "call_module":
        owner = node.graph.owning_module
        assert owner is not None
        module: Any = owner.get_submodule(str(node.target))
        x, p, training = args[0], module.p, module.training
    else:
        x = args[0] if args else kwargs["input"]
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    if not (training and p > 0):
        return x
    out = torch.ops.aten.native_dropout.default(x, p, True)[0]
    return x.copy_(out) if nodes.mutated(node) else out


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` as its documentation writes it; rows without a key give 0."""
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = (query @ key.transpose(-2, -1)) * factor
    if is_causal:
        keep = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(keep.logical_not(), -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    if dropout_p > 0.0:
        weights = torch.ops.aten.native_dropout.default(weights, dropout_p, True)[0]
    return weights @ value
