"""Random attentions (`random_specs`) through interpreted kernels, forward and gradients, against float64. More: `-m slow`."""
from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnfuse import tilemap, walker
from attnfuse.codegen import launch, launch_backward, plan
from attnfuse.codegen.plan import KernelPlan
from attnfuse.codegen.tiles import SMALLEST, known
from attnfuse.reference import reference
from attnfuse.spec import AttentionSpec
from tests.interpreted import run_in_interpreter
from tests.oracle import rounding, truth
from tests.random_specs import random_case
from tests.seeds import draw
from tests.specs import with_map

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
FIRST = draw("random attentions") if INSIDE else 0


@pytest.mark.skipif(INSIDE, reason="this is the process of its own")
def test_some_in_the_interpreter(tmp_path: Path) -> None:
    run_in_interpreter(__file__, tmp_path, ATTNFUSE_TEST_COUNT="30")


@pytest.mark.slow
@pytest.mark.skipif(INSIDE, reason="this is the process of its own")
def test_many_in_the_interpreter(tmp_path: Path) -> None:
    run_in_interpreter(__file__, tmp_path, ATTNFUSE_TEST_COUNT="600")


def arrange(seed: int, patch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that short sequences have full, cut and skipped ones; or the plans of a device that fetches boxes by itself."""
    rng = random.Random(seed)
    hopper, m, n = rng.random() < 0.3, rng.choice((16, 32)), rng.choice((16, 32))
    patch.setattr(plan, "LEAST_WORK", 0)
    for module in (launch, launch_backward):
        patch.setattr(module, "present", lambda _: known("cuda", 90) if hopper else SMALLEST)
        patch.setattr(module, "_runs", {})
        candidates = module.candidates

        def small(*args: object, candidates=candidates) -> tuple[KernelPlan, ...]:
            return candidates(*args) if hopper else tuple(
                replace(p, block_m=m, block_n=m if getattr(args[-1], "kind", "") == "diagonals" else n) for p in candidates(*args))

        patch.setattr(module, "candidates", small)
    scratch, allocate = launch_backward.empty, launch._allocate
    patch.setattr(launch_backward, "empty", lambda *args: scratch(*args).fill_(77))
    patch.setattr(launch, "_allocate", lambda *args: tuple(t.fill_(12345.0) for t in allocate(*args)))


@contextmanager
def delta_of_the_result() -> Iterator[None]:
    """The walker takes delta from the rounded result, as kernels do, also where it could sum it from the weights: there gradients that cancel are exact
    in the walker alone."""
    tile = walker._backward_tile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walker, "_backward_tile", lambda *args: tile(*args[:-1], False))
        patch.setattr(walker, "_needs_exact_delta", lambda *_: False)
        yield


def norm(x: torch.Tensor) -> float:
    """Of the finite part."""
    return x.double().nan_to_num(posinf=0.0, neginf=0.0).norm().item()


@pytest.mark.skipif(not INSIDE, reason="runs in the interpreter")
@pytest.mark.parametrize("number", range(int(os.environ.get("ATTNFUSE_TEST_COUNT", "0"))))
def test_random(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = FIRST + number
    print(f"ATTNFUSE_TEST_SEED={seed} ATTNFUSE_TEST_COUNT=1")
    arrange(seed, monkeypatch)
    case, shape, dtype = random_case(seed)
    spec, half = case.spec(dtype), dtype == "float16"
    print(spec.equation())
    operands, sizes = case.inputs(shape, getattr(torch, dtype), seed)
    mask = tilemap.mapped(spec)
    if seed % 4 and mask is not None and not mask.floats:       # full tiles do not read a float mask: it has no gradient under a map
        spec, operands = with_map(spec, operands, sizes)
    drop = torch.tensor([seed + (seed << 32)]) if spec.dropouts else None
    out, stats = launch.forward(spec, operands, sizes, drop)
    exact, plain = (reference(spec, operands, sizes, drop, dtype=t) for t in (torch.float64, torch.float32))
    if not torch.equal(exact.isnan(), plain.isnan()):
        return                                      # the scores leave float32 where float64 holds them
    assert torch.equal(out.isnan(), exact.isnan())
    error = lambda x: norm(x.double() - exact) / max(norm(exact), 1e-9)
    assert error(out) <= max(2e-3 if half else 2e-6, 4 * error(plain)), (error(out), error(plain))
    check_gradients(spec, case.spec("float32"), operands, sizes, drop, out, stats, seed)


def check_gradients(spec: AttentionSpec, own: AttentionSpec, operands, sizes, drop, out: torch.Tensor, stats: torch.Tensor, seed: int) -> None:
    """All gradients (`own` is the same attention in float32) against autograd through the meaning; where they cancel, within what the method makes of the same rounded result."""
    needs = [t.is_floating_point() for t in operands]
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    grads = launch.backward(spec, grad_out, operands, out, stats, sizes, drop, needs)

    exact, plain = (truth(spec, operands, sizes, drop, grad_out, needs, t) for t in (torch.float64, torch.float32))
    scale = max(norm(x) for x in (grad_out, *(g for g in exact if g is not None)))

    @functools.cache
    def walked(captured: bool) -> list[torch.Tensor | None]:
        wide = [t.float() if t.is_floating_point() else t for t in operands[:len(own.operands)]]
        statistics = walker.forward(own, wide, sizes, drop)[1]
        some = [need and (captured or n < 3) for n, need in enumerate(needs[:len(own.operands)])]
        with delta_of_the_result():
            return [*walker.backward(own, grad_out.float(), wide, out.float(), statistics, sizes, drop, some), None, None]

    explained = rounding(spec, operands, sizes, drop, grad_out, needs)
    for number, (got, want) in enumerate(zip(grads, exact, strict=True)):
        if want is None:
            assert got is None
            continue
        method = walked(number > 2)[number]
        if method is not None and not bool(method.isfinite().all()) and bool(want.isfinite().all()):
            continue                                # a learned factor of finfo.min: its gradient leaves float32
        assert got is not None and method is not None and torch.equal(got.isnan(), want.isnan() | method.isnan()), spec.operands[number].name
        size = max(norm(want), 0.1 * scale, 1e-30)
        error = lambda x: norm(x.double() - want) / size  # noqa: B023
        limit = max(3e-3 if spec.out_dtype == "float16" else 3e-6, explained[number] / size, 4 * error(method), 2 * error(plain[number]))
        assert error(got) <= limit, (spec.operands[number].name, error(got), error(method))
