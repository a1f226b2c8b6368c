"""From the gradients that a call wants to the kernels that give them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..adjoint import ZERO, adjoint
from ..program import loads
from ..spec import Access, AttentionSpec
from .chain import flat
from .jobs import Captured, Job, captured, jobs
from .owners import covers, owned, shared_axes


@dataclass(frozen=True)
class Role:
    """Query, key or value: the name of its gradient in the kernels, where it is read, and what enumerates its elements."""

    name: str
    access: Access
    axes: tuple[str, str]


@dataclass(frozen=True)
class Task:
    """What one call layout needs: the roles with a gradient and whether they reach all of their operand; the captured reads; the
    operands that extra terms read; the kernels, in order."""

    roles: tuple[Role, ...] = ()
    covered: Mapping[str, bool] = field(default_factory=dict)
    reads: tuple[Captured, ...] = ()
    terms: frozenset[int] = frozenset()
    jobs: tuple[Job, ...] = ()


def task(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Mapping[str, int], needs: Sequence[bool]) -> Task:
    """The kernels that these gradients take.

    Raises:
        Unsupported: elements of a gradient of queries, keys or values have no single owner.
        ValueError: an operation without a derivative.
    """
    shared = shared_axes(spec)
    roles, covered = [], {}
    dead = () if not flat(spec) else ("grad_q", "grad_k")
    for role in (Role("grad_q", spec.query, ("i", "d")), Role("grad_k", spec.key, ("j", "d")), Role("grad_v", spec.value, ("j", "e"))):
        if not needs[role.access.operand] or role.name in dead:
            continue
        lengths = {a: sizes[a] for a in role.axes}
        groups = {x.name: x for x in shared} if role.name != "grad_q" else {}
        for name in spec.batch:
            if name not in groups:
                lengths[name] = sizes[name]
            elif groups[name].group is not None:
                lengths[groups[name].owner] = groups[name].count(sizes)
        access = role.access if role.name == "grad_q" else owned(role.access, shared)
        shape = tuple(operands[access.operand].shape)
        covered[role.name] = covers(access, lengths, sizes, shape, spec.operands[access.operand].name)
        roles.append(role)
    reads = captured(spec, needs)
    terms = frozenset(int(x.attr) for t in spec.extra_terms for x in loads(t)  # type: ignore[arg-type]  # a load names its operand
                      if x.kind == "float" and needs[int(x.attr)] and adjoint(t, x) != ZERO)  # type: ignore[arg-type]
    names = frozenset({"grad_q": "query", "grad_k": "key", "grad_v": "value"}[r.name] for r in roles)
    return Task(tuple(roles), covered, reads, terms, jobs(spec, sizes, names, reads, bool(terms)))
