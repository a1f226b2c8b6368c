"""The operations that real models' chains come down to: each has a lifting rule, or is named here with the refusal it gives.

The list was taken from 108 architectures (Hugging Face and timm), every graph decomposed to core ATen, on the way from the
softmax back to the products; with each op the number of architectures in whose chains it occurs.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnfuse.refusal import Reason
from tests.test_passes import rewrite
from tests.test_rules import RULES

CORE = {
    "bmm": 105, "view": 104, "add": 89, "unsqueeze": 87, "mul": 84, "where": 80, "expand": 80, "scalar_tensor": 77, "arange": 77, "_to_copy": 77,
    "full": 76, "index": 76, "bitwise_and": 72, "le": 56, "sub": 28, "ge": 24, "permute": 23, "div": 21, "gt": 16, "slice": 14, "clone": 12,
    "mm": 12, "eq": 10, "getitem": 8, "lift_fresh_copy": 8, "full_like": 7, "log": 7, "abs": 7, "lt": 7, "ne": 7, "alias": 7, "neg": 6, "cat": 6,
    "select": 6, "minimum": 5, "cumsum": 5, "slice_scatter": 5, "constant_pad_nd": 5, "embedding": 4, "addmm": 4, "clamp": 4, "flip": 4,
    "squeeze": 3, "max": 3, "topk": 3, "copy": 3, "split_with_sizes": 3, "sum": 3, "pow": 2, "tanh": 2, "sqrt": 2, "gather": 2, "sign": 2,
    "ceil": 2, "bitwise_not": 2, "as_strided": 2, "index_select": 2, "repeat": 2, "bitwise_or": 2, "index_put": 2, "reciprocal": 1, "sigmoid": 1,
    "maximum": 1, "scatter": 1, "exp": 1, "log1p": 1, "max_pool2d_with_indices": 1}

NO_OPERATION = {"getitem"}
"""Picks one of several results; the record numbers those."""

Scores = Callable[[Tensor, Tensor], Tensor]
dot: Scores = lambda q, k: q @ k.mT
REFUSED: dict[str, tuple[Scores, Reason]] = {
    # Heavy: the ends of a chain.
    "addmm": (lambda q, k: torch.addmm(torch.zeros(9), q[0], k[0].t())[None], Reason.NO_SCORE_PRODUCT),
    "max_pool2d_with_indices": (lambda q, k: F.max_pool2d(dot(q, k), 3, 1, 1), Reason.NO_SCORE_PRODUCT),
    # Where an element comes from depends on other elements, or on memory.
    "topk": (lambda q, k: dot(q, k).topk(9, -1)[0], Reason.NO_SCORE_PRODUCT),
    "scatter": (lambda q, k: dot(q, k).scatter(-1, torch.zeros(1, 9, 1, dtype=torch.long), -1e9), Reason.UNKNOWN_OP),
    "as_strided": (lambda q, k: dot(q, k).as_strided((1, 9, 9), (81, 1, 9)), Reason.UNKNOWN_OP),
}


def test_every_operation_has_a_rule_or_a_refusal() -> None:
    assert len(CORE) == 67
    known = {target._schema.name.split("::")[1] for target in RULES}
    assert set(CORE) - known == NO_OPERATION | set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_without_a_rule_it_is_refused(name: str) -> None:
    scores, reason = REFUSED[name]
    q, k, v = torch.randn(1, 9, 16), torch.randn(1, 9, 16), torch.randn(1, 9, 8)
    fn = lambda q, k, v: scores(q, k).softmax(-1) @ v
    compiled, reports = rewrite(fn)
    torch.testing.assert_close(compiled(q, k, v), fn(q, k, v))
    (site,) = [s for r in reports for s in r.sites]
    assert site.reason is not None and site.reason.reason is reason, site.reason


@pytest.mark.parametrize("name", REFUSED)
def test_on_what_is_no_score_it_is_computed_before(name: str) -> None:
    """A mask that such an operation makes is a tensor like any other."""
    scores, _ = REFUSED[name]
    inputs = [torch.randn(1, 9, d) for d in (16, 16, 8, 4, 4)]
    fn = lambda q, k, v, a, b: (dot(q, k) + scores(a, b)).softmax(-1) @ v
    compiled, reports = rewrite(fn)
    torch.testing.assert_close(compiled(*inputs), fn(*inputs), atol=2e-5, rtol=2e-5)
    assert [s.rewritten for r in reports for s in r.sites] == [True]
