"""Generated kernels on a GPU in real dtypes: every mechanism, odd lengths, layouts, and whole models. `pytest -m gpu`."""
from __future__ import annotations

import os

import pytest
import torch

from attnfuse.codegen import launch
from attnfuse.reference import reference
from tests.specs import BY_NAME, CASES, Case, Shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}
"""Largest relative Frobenius error: a few roundings of the dtype (the fp32 bound allows for sums of 1000 terms)."""
SHAPES = (Shape((2, 3), 200, 200, 64, 64), Shape((1, 2), 129, 65, 40, 72), Shape((2, 2), 1, 300, 128, 128), Shape((1, 2), 77, 1, 256, 16))


@pytest.fixture
def seed() -> int:
    value = int(os.environ.get("ATTNFUSE_TEST_SEED") or torch.seed() % 2 ** 31)
    print(f"ATTNFUSE_TEST_SEED={value}")
    return value


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = launch._allocate
    monkeypatch.setattr(launch, "_allocate", lambda *args: tuple(t.fill_(12345.0) for t in allocate(*args)))


def check(case: Case, shape: Shape, dtype: str, seed: int, move=lambda t: t) -> None:
    operands, sizes = case.inputs(shape, getattr(torch, dtype), seed)
    operands = [move(t.cuda()) for t in operands]
    spec = case.spec(dtype)
    drop = torch.tensor([seed + (seed << 32)], device="cuda") if spec.dropouts else None
    out, _ = launch.forward(spec, operands, sizes, drop)
    exact = reference(spec, operands, sizes, drop, dtype=torch.float64)
    assert torch.equal(out.isnan(), exact.isnan())
    error = ((out.double() - exact).nan_to_num().norm() / exact.nan_to_num().norm().clamp(min=1e-30)).item()
    assert error <= DTYPES[dtype], error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.queries}x{s.keys}x{s.depth}")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_mechanism(case: Case, shape: Shape, dtype: str, seed: int) -> None:
    check(case, shape, dtype, seed)


@pytest.mark.parametrize("length", (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000))
@pytest.mark.parametrize("name", ("plain", "causal_padding_min"))
def test_every_length(name: str, length: int, seed: int) -> None:
    if name == "causal_padding_min" and length == 0:
        pytest.skip("there is no key to pad")
    check(BY_NAME[name], Shape((2, 2), length, length, 64, 64), "bfloat16", seed)


@pytest.mark.parametrize("move", (lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
                                  lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t,
                                  lambda t: t[:, :1].expand(t.shape) if t.dim() == 4 else t), ids=("transposed", "heads_last", "expanded"))
def test_every_layout(move, seed: int) -> None:
    check(BY_NAME["causal_inf"], Shape((2, 4), 150, 150, 64, 64), "bfloat16", seed, move)


def test_grid_beyond_65535(seed: int) -> None:
    check(BY_NAME["plain"], Shape((2, 32769), 4, 4, 16, 16), "float32", seed)


def test_offsets_beyond_32_bits(seed: int) -> None:
    """Rows so far apart that row · stride passes 2³¹."""
    step = 2 ** 31 // 16 + 64
    base = torch.empty(16 * step + 4096, dtype=torch.float16, device="cuda")

    def far(t: torch.Tensor) -> torch.Tensor:
        if t.shape[-2] != 17:
            return t
        out = base.as_strided(t.shape, (0, 0, step, 1), far.offset)
        far.offset += 1024
        return out.copy_(t)

    far.offset = 0
    check(BY_NAME["plain"], Shape((1, 1), 5, 17, 16, 16), "float16", seed, far)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_half_products_from_a_model(dtype: str, seed: int) -> None:
    """A compiled chain keeps the accuracy of eager: 1.2 times its error in norm, twice in the worst element."""
    import attnfuse  # noqa: F401

    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 4, 513, 64, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))

    def written(q, k, v):
        n = q.size(-2)
        keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        return (q @ k.mT * 0.125).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v

    torch._dynamo.reset()
    with torch.no_grad():
        fused, eager, exact = torch.compile(written, backend="attnfuse")(q, k, v), written(q, k, v), written(q.double(), k.double(), v.double())
    error = lambda x: ((x.double() - exact).norm() / exact.norm()).item()
    worst = lambda x: (x.double() - exact).abs().max().item()
    assert error(fused) <= max(1.2 * error(eager), 1e-6) and worst(fused) <= max(2 * worst(eager), 1e-5)
