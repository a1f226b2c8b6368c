"""The rule by which our operators are mapped over samples (`torch.func.vmap`): one call a sample."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def sample_by_sample(op: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The rule of an operator, for `torch.library.register_vmap`."""
    def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        results = _over_samples(op, info, dims, args)
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        columns = [torch.stack(column) for column in zip(*results, strict=True)]
        return (columns, [0] * len(columns)) if isinstance(results[0], list) else (tuple(columns), (0,) * len(columns))

    return rule


def _over_samples(op: Callable[..., Any], info: Any, dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    pick = lambda value, dim, n: value if dim is None else value.select(dim, n)

    def sample(n: int) -> list[Any]:
        return [[pick(v, d, n) for v, d in zip(value, dim, strict=True)] if isinstance(dim, (list, tuple)) else pick(value, dim, n)
                for value, dim in zip(args, dims, strict=True)]
    return [op(*sample(n)) for n in range(info.batch_size)]
