"""Slice a candidate out of its graph: what lies between heavy operations (or inputs) and the value product.

The slice is a list of nodes in graph order that can be replayed on fake tensors, and the nodes it reads. It holds the
in-place operations that changed its tensors, and the autocast contexts around it. Two slices with the same `Region.text`
mean the same, so identical layers are analysed once.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..refusal import Reason, Refused
from . import nodes
from .find import Candidate
from .wanted import Wanted, wanted

_MOST = 600
"""Nodes of a slice; further ones become its inputs."""
_CONTEXT = frozenset({"_enter_autocast", "_exit_autocast"})
_DETACHES = frozenset({"detach", "detach_", "data", "_get_data_attr"})
"""What stops a gradient by its name, where the values do not tell."""
_SHAPED = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"})
"""They ask a tensor for its shape and dtype, not for its values."""
_RESHAPES = frozenset({"unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "swapdims_", "t_", "resize_", "resize_as_", "as_strided_", "set_"})
"""They change a tensor's shape in place: the value that its node has is then of another shape than where the slice reads it."""
_MAXIMA = frozenset({"amax", "max"})
_ENTER = frozenset({"_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting", "_func_increment_nesting"})
_LEAVE = frozenset({"_vmap_decrement_nesting", "_grad_decrement_nesting", "_jvp_decrement_nesting", "_func_decrement_nesting"})


class GraphFacts:
    """What slicing needs to know of a whole graph, gathered once."""

    def __init__(self, gm: GraphModule) -> None:
        self.position = {n: k for k, n in enumerate(gm.graph.nodes)}
        self.mutations: dict[int, list[Node]] = defaultdict(list)       # storage → the calls that change it
        self.contexts: list[Node] = []
        self.nested: set[Node] = set()                                   # nodes inside a vmap, grad or jvp
        self.origin: dict[int, Node] = {}                                # storage → the node that made it
        self.no_grad: set[Node] = set()                                  # nodes where gradients are not recorded
        self.inference: set[Node] = set()                                # nodes under inference mode
        depth, recording, inference = 0, torch.is_grad_enabled(), 0
        for n in gm.graph.nodes:
            made = nodes.storage(n)
            if made is not None:
                self.origin.setdefault(made, n)
            for target in nodes.mutated(n):
                at = nodes.storage(target)
                if at is not None:
                    self.mutations[at].append(n)
            if nodes.name(n) in _CONTEXT:
                self.contexts.append(n)
            depth += (nodes.name(n) in _ENTER) - (nodes.name(n) in _LEAVE)
            if depth > 0 or nodes.name(n) in _LEAVE:
                self.nested.add(n)
            if nodes.name(n) == "_set_grad_enabled":
                recording = bool(n.args[0])
            inference += (nodes.name(n) == "_enter_inference_mode" and n.args[0] is not False) - (nodes.name(n) == "_exit_inference_mode")
            if not recording or inference > 0:
                self.no_grad.add(n)
            if inference > 0:
                self.inference.add(n)


@dataclass(frozen=True)
class Region:
    """A slice: its nodes and the nodes it reads (both in graph order), the candidate, a text equal for equal slices, those
    of its nodes that are changed in place after the product (they can't be kept for a gradient), those where a gradient
    ends that a maximum of the scores would send, and the weights that are read elsewhere too."""

    candidate: Candidate
    body: tuple[Node, ...]
    inputs: tuple[Node, ...]
    text: str
    changed_later: frozenset[Node] = frozenset()
    stopped: frozenset[Node] = frozenset()
    wanted: Wanted | None = None

    @property
    def product(self) -> Node:
        """The value product (or fused call) that the kernel will stand for."""
        assert self.candidate.product is not None
        return self.candidate.product


def slice_region(candidate: Candidate, facts: GraphFacts) -> Region:
    """Cut the slice out; raises Refused where what surrounds it forbids a rewrite."""
    product = candidate.product
    assert product is not None
    if product in facts.nested:
        raise Refused(Reason.VMAP, product.name, "region")
    want = wanted(candidate, facts)
    body = _collect(candidate, product, facts)
    inner = set(body)
    read = nodes.ordered({a for n in body for a in nodes.inputs(n)} - inner, facts.position)
    _check_mutations(body, read, product, facts)
    late: frozenset[Node] = frozenset()
    result = nodes.value(product)
    if product not in facts.no_grad and isinstance(result, torch.Tensor) and result.requires_grad:
        changes = lambda n: [m for m in facts.mutations.get(nodes.storage(n) or 0, []) if facts.position[m] > facts.position[product]]
        if changes(product):                             # the kernel's gradient needs its result, the product's does not
            raise Refused(Reason.INPLACE, changes(product)[0].name, "region", f"the result is changed by {nodes.name(changes(product)[0])}")
        late = frozenset(n for n in (*read, *body) if changes(n))
    odd = next((n for n in (*body, *read) if n in facts.inference), None) if product not in facts.inference else None
    if odd is not None:                                  # its tensors cannot be saved for a gradient
        raise Refused(Reason.NOT_EXPRESSIBLE, odd.name, "region", "made under inference mode")
    stopped = frozenset(n for n in body if product not in facts.no_grad and _stops_gradient(n, facts))
    text = "\n".join([_text(body, read, product, late, stopped), *_wanted_text(body, read, want)])
    return Region(candidate, tuple(body), tuple(read), text, late, stopped, want)


def _collect(candidate: Candidate, product: Node, facts: GraphFacts) -> list[Node]:
    """The nodes to replay. Behind a product only views, casts and factors are followed; elsewhere everything light is."""
    free: dict[Node, bool] = {product: True}              # node → everything light may be followed from it
    stack = [product]
    while stack and len(free) < _MOST:
        node = stack.pop()
        contraction = nodes.name(node) in nodes.CONTRACTION | nodes.SDPA
        for arg in nodes.inputs(node):
            follow = free[node] and (not contraction or (node in (product, candidate.values) and arg in candidate.carried) or _is_mask(node, arg))
            if not _replayable(arg) or arg in facts.nested or not _own_memory(arg, facts):
                continue
            if product not in facts.no_grad and _stops_gradient(arg, facts):
                if arg in candidate.carried:
                    raise Refused(Reason.NOT_EXPRESSIBLE, arg.name, "region", f"no gradient passes {nodes.name(arg)}")
                if not _for_a_maximum(arg):
                    continue                        # read through, it would let the gradient pass
            if not follow and (not _transparent(arg) or facts.mutations.get(nodes.storage(arg) or 0)):
                continue                            # an operand whose memory is changed is read as it is at the product
            changes = _changes(arg, product, facts, free)
            if product not in facts.no_grad and any(_stops_gradient(m, facts) for m in changes):
                raise Refused(Reason.INPLACE, arg.name, "region", "changed without a gradient")
            for found in [arg, *changes]:
                if found not in free or (follow and not free[found]):
                    free[found] = follow or found is not arg
                    stack.append(found)
    chosen = set(free)
    first = min(facts.position[n] for n in chosen)
    contexts = [c for c in facts.contexts if first < facts.position[c] < facts.position[product] or _open_at(c, first, facts)]
    return nodes.ordered(chosen | set(contexts), facts.position)


def _is_mask(node: Node, arg: Node) -> bool:
    """The mask of a fused call is followed like any mask; its queries, keys and values like operands."""
    return nodes.name(node) in nodes.SDPA and arg not in node.args[:3] and arg not in [node.kwargs.get(k) for k in ("query", "key", "value")]


def _open_at(context: Node, first: int, facts: GraphFacts) -> bool:
    """An autocast that was entered before the slice and not left before it (or the leaving of such a one: replayed in pairs)."""
    enter = context if nodes.name(context) == "_enter_autocast" else context.args[0]
    exits = [c for c in facts.contexts if nodes.name(c) == "_exit_autocast" and c.args[0] is enter]
    return facts.position[enter] < first and (not exits or facts.position[exits[0]] > first)  # type: ignore[index]


def _replayable(node: Node) -> bool:
    called = nodes.name(node)
    return (node.op in ("call_function", "call_method", "call_module") and nodes.is_builtin(node)
            and called not in nodes.HEAVY | nodes.RANDOM | _CONTEXT and "is_contiguous" not in called)


def _own_memory(node: Node, facts: GraphFacts) -> bool:
    """Whether a call changes nothing, or only memory that replayable operations made: a cache or a projection that is
    updated in place is read as it is after the update, so the update itself ends the slice."""
    makers = [facts.origin.get(nodes.storage(t) or 0) for t in nodes.mutated(node)]
    return all(m is not None and _replayable(m) for m in makers)


def _stops_gradient(node: Node, facts: GraphFacts) -> bool:
    """Whether a gradient that arrives here is dropped (detach, or anything under no_grad) although what is read wants one."""
    wants = lambda n: any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(nodes.value(n)))
    if "example_value" not in node.meta and "val" in node.meta:      # the values of an exported graph don't say what wants a gradient
        value = nodes.value(node)
        return isinstance(value, torch.Tensor) and value.is_floating_point() and (nodes.name(node) in _DETACHES or node in facts.no_grad)
    if not any(wants(a) for a in nodes.inputs(node)) or nodes.name(node) in _SHAPED:
        return False
    if node in facts.no_grad and nodes.mutated(node):
        raise Refused(Reason.INPLACE, node.name, "region", f"{nodes.name(node)} without a gradient")
    floats = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in tree_leaves(nodes.value(node)))
    return floats and not wants(node)


def _for_a_maximum(node: Node) -> bool:
    """Whether a node that stops gradients takes a maximum, or is a view of one or of what maxima alone read: subtracted from its
    own row it changes nothing, so its gradient does not matter."""
    def largest(n: Node) -> bool:
        return nodes.name(n) in _MAXIMA or nodes.name(n) in ("getitem", "detach") and largest(nodes.inputs(n)[0])

    return largest(node) or nodes.name(node) == "detach" and bool(node.users) and all(nodes.name(u) in _MAXIMA for u in node.users)


def _transparent(node: Node) -> bool:
    return nodes.name(node) in nodes.TRANSPARENT


def _changes(node: Node, product: Node, facts: GraphFacts, known: dict[Node, bool]) -> list[Node]:
    """In-place operations on memory that the slice itself makes: they belong to it."""
    at = nodes.storage(node)
    made_here = at is not None and node.op not in ("placeholder", "get_attr")
    if not made_here or not facts.mutations.get(at or 0):
        return []
    here = facts.position
    return [m for m in facts.mutations[at or 0]
            if here[m] < here[product] and _replayable(m) and _own_memory(m, facts) and m not in known]


def _check_mutations(body: list[Node], read: list[Node], product: Node, facts: GraphFacts) -> None:
    """What the kernel reads must be, at the place of the value product, what the chain read where it stood.

    In-place operations inside the slice are replayed, and operands are then looked up in their final state; any other change
    between the first use of some memory and the product would be missed.
    """
    inner, here = set(body), facts.position
    changed = next((m for n in (*body, *read) for m in facts.mutations.get(nodes.storage(n) or 0, []) if nodes.name(m) in _RESHAPES), None)
    if changed is not None:
        raise Refused(Reason.INPLACE, changed.name, "region", f"{nodes.name(changed)} changes a shape")
    touched: dict[int, int] = {}                       # memory → where the slice first touches it
    for node in body:
        for at in {nodes.storage(node), *(nodes.storage(a) for a in nodes.inputs(node))} - {None}:
            touched.setdefault(at, here[node])  # type: ignore[arg-type]
    for at, first in touched.items():
        late = [m for m in facts.mutations.get(at, []) if m not in inner and first < here[m] < here[product]]
        if late:
            reason = Reason.MUTATED_OPERAND if any(nodes.storage(n) == at for n in read) else Reason.INPLACE
            raise Refused(reason, late[0].name, "region", f"by {nodes.name(late[0])}")


def scores_observer(region: Region, chain: set[Node]) -> Node | None:
    """A live user outside the slice of one of `chain`: nodes that would have to be computed all the same, unless they are weights
    that are given."""
    inner = set(region.body)
    for node in chain - (region.wanted.kept if region.wanted else frozenset()):
        for user in node.users:
            if user not in inner and not nodes.dead_end(user):
                return user
    return None


def _text(body: list[Node], read: list[Node], product: Node, late: frozenset[Node], stopped: frozenset[Node]) -> str:
    """Canonical text: operations with their arguments numbered from the slice's own start, and what the inputs look like."""
    local = {n: f"%{k}" for k, n in enumerate([*read, *body])}
    lines = [f"{local[n]} = input {describe(nodes.value(n))}" for n in read]
    named: Any = lambda a: _Name(local[a])
    for n in body:
        args = map_arg((n.args, dict(n.kwargs)), named)
        lines.append(f"{local[n]} = {n.op} {n.target if n.op != 'call_function' else _qualified(n.target)} {args!r} {describe(nodes.value(n))}")
    shape = nodes.value(product)
    layout = merge_order(product, shape.dim()) if isinstance(shape, torch.Tensor) else None
    return "\n".join([*lines, f"return {local[product]} to {layout}, changed later {[local[n] for n in local if n in late]}",
                      f"no gradient from {[local[n] for n in local if n in stopped]}"])


def _wanted_text(body: list[Node], read: list[Node], want: Wanted | None) -> list[str]:
    """Which weights are read elsewhere, numbered as in `_text`."""
    local = {n: k for k, n in enumerate([*read, *body])}
    return [] if want is None else [f"weights too {[local.get(n) for n in want.nodes]}"]


def memory_order(x: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor from the outermost in memory to the innermost, or None where it is not dense.

    Lengths are compared as formulas: asking which of two is larger would add a guard.
    """
    size, stride = ([s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in sizes] for sizes in (x.shape, x.stride()))
    left, step, order = list(range(x.dim())), sympy.Integer(1), []
    while left:
        # Of two with the same stride the one of length 1 comes first: it does not move the next.
        fits = sorted((d for d in left if sympy.expand(stride[d] - step) == 0), key=lambda d: (size[d] != 1, -d))
        if not fits:
            return None
        order.append(fits[0])
        left.remove(fits[0])
        step = step * size[fits[0]]
    return tuple(reversed(order))


def merge_order(product: Node, rank: int) -> tuple[int, ...] | None:
    """The permutation that the only consumer of a product applies before it copies the result to be contiguous, or None.

    A kernel that writes in this order saves the copy, and what was a copy becomes a view. Nobody may be able to tell: nothing
    else reads the product, the copy is not changed in place, and it really was one.
    """
    if len(product.users) != 1:
        return None
    user = next(iter(product.users))
    dims = [a for a in user.args[1:] if not isinstance(a, Node)]
    order = list(range(rank))
    if nodes.name(user) in ("transpose", "swapaxes", "swapdims") and len(dims) == 2 and all(isinstance(d, int) for d in dims):
        a, b = (int(d) % rank for d in dims)  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    elif nodes.name(user) == "permute":
        flat = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
        order = [int(d) % rank for d in flat]  # type: ignore[arg-type]
    else:
        return None
    copy = next(iter(user.users)) if len(user.users) == 1 else None
    if copy is None or nodes.name(copy) not in ("contiguous", "reshape", "flatten") or nodes.storage(copy) in (None, nodes.storage(product)):
        return None
    changed = any(nodes.storage(t) == nodes.storage(copy) for n in product.graph.nodes for t in nodes.mutated(n))
    return None if changed else tuple(order)


class _Name:
    """Stands for a node in an argument list and prints as its number."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _qualified(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def describe(x: Any) -> str:
    """Shape, strides, dtype and device of a fake tensor; repr of anything else."""
    if isinstance(x, torch.Tensor):
        return f"{x.dtype}{list(map(str, x.shape))}{list(map(str, x.stride())) if x.layout == torch.strided else x.layout} {x.device}"
    return repr(x)
