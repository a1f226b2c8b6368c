"""Rows that are repaired behind the softmax, on PyTorch's fused CPU kernel: it gives NaN, its log-sum-exp says where."""
from __future__ import annotations

import math

import pytest
import torch

from attnfuse import cpu, walker
from attnfuse.reference import reference
from tests.specs import Shape, variant


@pytest.mark.parametrize("name", ("plain", "causal_inf"))
@pytest.mark.parametrize("broken", (True, False))
def test_the_fused_kernel_repairs_too(name: str, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FEW", 0)
    seed = int(torch.randint(0, 2 ** 31, (1,)))
    print("seed", seed)
    case = variant(name, empty_rows="repaired")
    operands, sizes = case.inputs(Shape(), torch.float32, seed)
    if broken:
        operands[0][:, :, 3], operands[0][:, :, 5], operands[0][:, :, 8, 2] = math.nan, math.inf, -math.inf
    found = cpu.forward(case.spec(), operands, sizes)
    assert found is not None
    out, stats = found
    want = reference(case.spec(), operands, sizes, dtype=torch.float64)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=2e-6)
    dead = (want == 0).all(-1)
    assert torch.equal(stats[..., 0] == -math.inf, dead) and bool(dead.any()) is broken

    grad, needs = torch.randn_like(out), [True] * 3
    fused = cpu.backward(case.spec(), grad, operands, out, stats, sizes, needs)
    assert (fused is None) is broken                   # what is left of such a row would reach the others' gradients
    walked = walker.backward(case.spec(), grad, operands, out, stats, sizes, None, needs)
    if broken:
        assert walked[2] is not None and bool(walked[2].isfinite().all())
        probability = torch.ones_like(stats[..., 0]).masked_fill(dead, 0.0)
        alone = walker.backward(case.spec(), grad * probability[..., None], operands, out, stats, sizes, None, [False, False, True])
        torch.testing.assert_close(walked[2], alone[2])
    else:
        torch.testing.assert_close(fused, walked, atol=1e-5, rtol=1e-5)
