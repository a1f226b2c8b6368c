"""The plain meaning of a spec, evaluated densely in PyTorch: the oracle of every test. Writes the whole T×T matrix."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .philox import keep_factor
from .program import Env, evaluate
from .spec import Access, AttentionSpec, dtype_of


def positions(spec: AttentionSpec, sizes: dict[str, int], device: torch.device, order: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """For each axis of `order` its positions, shaped to broadcast along that dimension."""
    return {name: torch.arange(sizes[name], device=device).view([-1 if n == k else 1 for n in range(len(order))])
            for k, name in enumerate(order)}


def batch_index(spec: AttentionSpec, axes: dict[str, torch.Tensor], sizes: dict[str, int], like: torch.Tensor) -> torch.Tensor:
    """Row-major number of the position along the batch axes: what dropout counts by."""
    linear = torch.zeros_like(like)
    for name in spec.batch:
        linear = linear * sizes[name] + axes[name]
    return linear


def reference(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None = None, *,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    """The result of an attention, shape (batch…, i, e).

    Args:
        spec: the meaning.
        operands: the tensors it reads, in the order of `spec.operands`.
        sizes: integers in the order of `spec.size_names`.
        seed: int64 tensor of one element; needed where the spec drops weights.
        dtype: dtype of all arithmetic; by default that of the contract (float32, float64 for float64 attention).
            ``torch.float64`` makes this the oracle. The result has this dtype if it is given, else `spec.out_dtype`.

    Raises:
        ValueError: wrong number of operands or sizes, or a missing seed.
    """
    check_call(spec, operands, sizes, seed)
    weight = _weights(spec, operands, sizes, seed, dtype or spec.compute_dtype)
    named = dict(zip(spec.size_names, sizes, strict=True))
    value = _gather(spec, operands, named, spec.value, ("j", "e"), weight.dtype)
    return (weight @ value).to(dtype or dtype_of(spec.out_dtype))


def weights(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None = None, *,
            dtype: torch.dtype | None = None) -> torch.Tensor:
    """What the weight program makes of the softmax, shape (batch…, i, j): the factors of the values in the result.

    Args and Raises: as of `reference`.
    """
    check_call(spec, operands, sizes, seed)
    return _weights(spec, operands, sizes, seed, dtype or spec.compute_dtype).to(dtype or dtype_of(spec.out_dtype))


def _gather(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: dict[str, int], access: Access, own: tuple[str, str],
            work: torch.dtype) -> torch.Tensor:
    """All elements of query, key or value, (batch…, *own)."""
    tensor, order = operands[access.operand], (*spec.batch, *own)
    env = Env(positions(spec, sizes, tensor.device, order), sizes, _reader(operands), work, tensor.device)
    index = tuple(evaluate(x, env) for x in access.index)
    return tensor[index].to(work).expand([sizes[a] for a in order])


def _reader(operands: Sequence[torch.Tensor]) -> Callable[[int, tuple[torch.Tensor, ...]], torch.Tensor]:
    return lambda operand, index: operands[operand][index] if index else operands[operand]


def _weights(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None,
             work: torch.dtype) -> torch.Tensor:
    named = dict(zip(spec.size_names, sizes, strict=True))
    device = operands[spec.query.operand].device
    read = _reader(operands)
    full = (*spec.batch, "i", "j")
    axes = positions(spec, named, device, full)
    query, key = (_gather(spec, operands, named, a, own, work) for a, own in ((spec.query, ("i", "d")), (spec.key, ("j", "d"))))
    keep = None
    if seed is not None:
        batch = batch_index(spec, axes, named, axes["i"])
        keep = lambda stream, p: keep_factor(seed, stream, p, batch, axes["i"], axes["j"], work)
    shape = [named[a] for a in full]
    env = Env(axes, named, read, work, device, dot=query @ key.transpose(-1, -2), keep=keep)
    score = evaluate(spec.score, env).expand(shape)
    for term in spec.extra_terms:
        score = torch.cat([score, evaluate(term, env).expand([*shape[:-1], 1])], -1)
    dead = _dead_rows(spec, score)
    if dead is not None:
        # Twice: where it is only the weights that are set, the softmax's own derivative would still be NaN.
        score = score.masked_fill(dead, 0.0)
    weight = torch.softmax(score, -1)[..., :named["j"]]
    weight = evaluate(spec.weight, Env(axes, named, read, work, device, weight=weight, keep=keep)).expand(shape)
    return weight if dead is None else weight.masked_fill(dead, 0.0)


def _dead_rows(spec: AttentionSpec, score: torch.Tensor) -> torch.Tensor | None:
    """Where the weights of a whole row are zero, (batch…, i, 1); None where no row is treated so."""
    if spec.empty_rows == "zero":
        return (score == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(score.detach(), -1).isnan().any(-1, keepdim=True) if spec.empty_rows == "repaired" else None


def check_call(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], seed: torch.Tensor | None) -> None:
    """Raise ValueError where the arguments of a call do not fit the spec."""
    if len(operands) != len(spec.operands):
        raise ValueError(f"the spec reads {len(spec.operands)} operands, got {len(operands)}")
    if len(sizes) != len(spec.size_names):
        raise ValueError(f"the spec needs the integers {spec.size_names}, got {len(sizes)}")
    for tensor, operand in zip(operands, spec.operands, strict=True):
        if tensor.dim() != operand.rank:
            raise ValueError(f"operand {operand.name} has rank {tensor.dim()}, the spec says {operand.rank}")
    if spec.dropouts and seed is None:
        raise ValueError("the spec drops weights: a seed is needed")
