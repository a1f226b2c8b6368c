"""Who owns an element of a gradient: which batch positions share a key, and whether an index map names each element once.

A key that several heads read (grouped or multi-query attention) gets its gradient from one program, which loops over those
heads; so the sum needs no atomics and is the same at every run.

    key[b0, b1 // 4, j, d]   →   the axis b1 is walked in groups of 4: keys belong to (b0, b1_group)
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..algebra import affine, simplify
from ..program import Expr, axis, const, depends, rewrite, walk
from ..spec import Access, AttentionSpec
from .arguments import Unsupported, evaluate, on_host


@dataclass(frozen=True)
class Shared:
    """A batch axis along which keys and values are shared: by groups of `group` neighbours, or (None) by all."""

    name: str
    group: Expr | None

    @property
    def owner(self) -> str:
        """The axis that enumerates the groups."""
        return f"{self.name}_group"

    def count(self, sizes: Mapping[str, int]) -> int:
        """How many groups there are."""
        return 1 if self.group is None else -(-sizes[self.name] // max(evaluate(self.group, sizes), 1))


def shared_axes(spec: AttentionSpec) -> tuple[Shared, ...]:
    """The batch axes that keys and values share, in order.

    Raises:
        Unsupported: keys and values are shared by different heads.
    """
    key, value = _shared(spec, spec.key), _shared(spec, spec.value)
    if key != value:
        raise Unsupported("keys and values are shared by different heads")
    return key


def _shared(spec: AttentionSpec, access: Access) -> tuple[Shared, ...]:
    index = [simplify(x) for x in access.index]
    out: list[Shared] = []
    for name in spec.batch:
        own = axis(name)
        groups = {x.args[1] for e in index for x in walk(e) if x.op == "floordiv" and x.args[0] == own}
        if all(name not in depends(e) for e in index):
            out.append(Shared(name, None))
        elif len(groups) == 1 and on_host(group := next(iter(groups))):
            shared = Shared(name, group)
            if all(name not in depends(_grouped(e, shared)) for e in index):
                out.append(shared)
    return tuple(out)


def _grouped(expr: Expr, shared: Shared) -> Expr:
    whole = Expr("floordiv", (axis(shared.name), shared.group), None, "int") if shared.group is not None else None
    return rewrite(expr, lambda x: axis(shared.owner) if x == whole else None)


def owned(access: Access, shared: Sequence[Shared]) -> Access:
    """The access by what enumerates the owners."""
    index = tuple(simplify(x) for x in access.index)
    for one in shared:
        index = tuple(_grouped(x, one) for x in index)
    return Access(access.operand, index)


def covers(access: Access, lengths: Mapping[str, int], sizes: Mapping[str, int], shape: Sequence[int], name: str) -> bool:
    """Whether an index map reaches every element of a tensor, given that it reaches none twice.

    Args:
        access: the map; every dimension must be a multiple of each of some axes, plus a number.
        lengths: of the axes that it may use.
        sizes: of everything else.
        shape: of the tensor.
        name: what the message calls it.

    Raises:
        Unsupported: it is not proven that the map names each element at most once, counted from the front.
    """
    if 0 in lengths.values():
        return 0 in shape
    axes = tuple(n for n, length in lengths.items() if length > 1)
    used: set[str] = set()
    for dim, index in enumerate(access.index):
        parts = affine(index, axes)
        if parts is None or not on_host_of(parts[1], lengths) or any(not on_host(c) for c in parts[0].values()):
            raise Unsupported(f"the gradient of {name} at {index}: several positions may share an element")
        steps = sorted((evaluate(c, sizes), n) for n, c in parts[0].items() if c != const(0))
        reach = evaluate(_at_zero(parts[1], lengths), sizes)
        span = 0
        for step, n in steps:
            if step <= span or n in used or reach < 0:
                raise Unsupported(f"the gradient of {name} at {index}: several positions may share an element")
            used.add(n)
            span += step * (lengths[n] - 1)
        if not 0 <= reach <= reach + span < shape[dim]:
            raise Unsupported(f"the gradient of {name} at {index}, which counts from the end")
    if used != set(axes):
        raise Unsupported(f"the gradient of {name} is shared along {', '.join(sorted(set(axes) - used))}")
    return math.prod(lengths.values()) == math.prod(shape)


def on_host_of(expr: Expr, lengths: Mapping[str, int]) -> bool:
    """Whether an integer is known once the axes of length 1 stand at 0."""
    return on_host(_at_zero(expr, lengths))


def _at_zero(expr: Expr, lengths: Mapping[str, int]) -> Expr:
    return rewrite(expr, lambda x: const(0) if x.op == "axis" and x.attr in lengths else None)
