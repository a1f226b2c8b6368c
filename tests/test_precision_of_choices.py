"""Integers that come of a float: which one it is hangs on the precision that the model computed the float in."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnfuse  # noqa: F401  # registers the backend


@pytest.mark.parametrize("length", (64, 320))
def test_an_index_in_float32_of_attention_in_float64(length: int) -> None:
    """10 * 2.3 is 23 in float32 and a little less in float64; with 320 tokens the bias is a table by distance."""
    def written(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        at = torch.arange(length)
        place = ((at - at[:, None]).abs().float() * 2.3).long()
        return (q @ k.transpose(-1, -2) + table[place]).softmax(-1) @ v

    inputs = [*torch.randn(3, 1, 2, length, 8, dtype=torch.float64), torch.randn(3 * length, dtype=torch.float64)]
    got = torch.compile(written, backend="attnfuse", options={"strict": True})(*inputs)
    torch.testing.assert_close(got, written(*inputs))
