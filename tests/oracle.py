"""The oracle of gradients: autograd through the plain meaning of a spec."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from attnfuse.reference import reference
from attnfuse.spec import AttentionSpec


def truth(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], drop: torch.Tensor | None, grad_out: torch.Tensor,
          needs: Sequence[bool], dtype: torch.dtype = torch.float64) -> list[torch.Tensor | None]:
    """Gradients by autograd through the plain meaning."""
    if not any(needs):
        return [None] * len(needs)
    leaves = [t.to(dtype).requires_grad_(True) if need else t for t, need in zip(operands, needs, strict=True)]
    out = reference(spec, leaves, sizes, drop, dtype=dtype)
    wanted = [t for t, need in zip(leaves, needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad_out.to(dtype), allow_unused=True))
    grads = [next(found) if need else None for need in needs]
    return [torch.zeros_like(t) if need and g is None else g for g, t, need in zip(grads, leaves, needs, strict=True)]
