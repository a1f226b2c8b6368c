"""The oracle of gradients: autograd through the plain meaning of a spec."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnfuse.program import Env, Expr, axis, evaluate, load, loads, substitute
from attnfuse.reference import positions, reference
from attnfuse.spec import AttentionSpec, Operand


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


def rounding(spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], drop: torch.Tensor | None, grad_out: torch.Tensor,
             needs: Sequence[bool]) -> list[float]:
    """For each operand the norm that float32 rounding alone may give the error of its gradient, 0 for queries, keys and values.

    A captured tensor gets the sum of what all scores that read it send back. The sum may cancel to far less than its terms, and its
    error goes by them: four last places of their absolute sum. No figure relative to the sum itself holds for every random draw.
    """
    named = dict(zip(spec.size_names, sizes, strict=True))
    full = (*spec.batch, "i", "j")
    device = operands[0].device
    leaves = [t.double().requires_grad_(True) if need and n in spec.captured else t for n, (t, need) in enumerate(zip(operands, needs, strict=True))]
    env = Env(positions(spec, named, device, full), named, lambda n, index: leaves[n][index] if index else leaves[n], torch.float64, device)
    apart: list[tuple[Expr, torch.Tensor, torch.Tensor]] = []

    def per_score(program: Expr, order: tuple[str, ...]) -> Expr:
        """The program with a tensor of its own, one number a score, in the place of each load that gets a gradient."""
        table = {}
        for one in loads(program):
            if leaves[int(one.attr)].requires_grad:  # type: ignore[arg-type]
                value = evaluate(one, env).expand([named[a] if a in order else 1 for a in full]).squeeze(-1 if order != full else ())
                table[one] = load(len(operands) + len(apart), tuple(axis(a) for a in order), "float")
                apart.append((one, value, value.detach().requires_grad_(True)))
        return substitute(program, table)

    score, weight = per_score(spec.score, full), per_score(spec.weight, full)
    terms = tuple(per_score(t, full[:-1]) for t in spec.extra_terms)
    own = tuple(Operand(f"apart{n}", "float64", x.dim()) for n, (_, _, x) in enumerate(apart))
    out = [0.0] * len(operands)
    if not apart:
        return out
    spread = replace(spec, score=score, weight=weight, extra_terms=terms, operands=(*spec.operands, *own))
    result = reference(spread, [*(t.detach() for t in leaves), *(x for _, _, x in apart)], sizes, drop, dtype=torch.float64)
    grads = torch.autograd.grad(result, [x for _, _, x in apart], grad_out.double(), allow_unused=True)
    for (one, value, _), grad in zip(apart, grads, strict=True):
        if grad is not None:
            number = int(one.attr)  # type: ignore[arg-type]
            (summed,) = torch.autograd.grad(value, leaves[number], grad.abs(), retain_graph=True)
            out[number] += 4 * 2.0 ** -24 * summed.nan_to_num().norm().item()
    return out
