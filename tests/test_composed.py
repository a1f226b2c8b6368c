"""Operations that are several kernels on a GPU, and what its cache cannot hold: bytes read and written, with near misses."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnfuse
from attnfuse.traffic import Call

GRAD, WHOLE = 2 * 2 * 4 * 256 * 64, 4 * 2 * 4 * 256 * 64        # a float16 [2, 4, 256, 64] and its sums in float32
ROW = 4 * 2 * 4 * 256


def counted(call: Callable[[], object], device: str | None = None) -> attnfuse.Traffic:
    with attnfuse.traffic(device) as t:
        call()
    return t


def fused_backward(kind: str, heads: int = 4, grad: Tensor | None = None, bias: bool = False) -> list[Call]:
    """The kernels of the backward pass of PyTorch's own attention, queries (2, 4, 256, 64), on an H200."""
    q, (k, v) = torch.empty(2, 4, 256, 64, dtype=torch.float16, device="meta"), torch.empty(2, 2, heads, 256, 64, dtype=torch.float16, device="meta")
    forward, backward = (getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{s}") for s in ("", "_backward"))
    added = torch.empty(4, 256, 256, dtype=torch.float16, device="meta").expand(2, 4, 256, 256) if bias else None
    if kind == "efficient":
        out, lse, seed, offset = forward(q, k, v, added, True)
        last = (added, out, lse, seed, offset, 0.0, [True, True, True, bias])
    else:
        out, lse, _, _, _, _, seed, offset, _ = forward(q, k, v, *[None, True][kind == "flash":], 0.0, True)
        none = [added] * (kind == "cudnn") + [None, None]
        last = (out, lse, *[None, None, 256, 256, 0.0, True, seed, offset] * (kind == "flash"),
                *[seed, offset, *none, 256, 256, 0.0, True] * (kind == "cudnn"))
    grad = torch.empty_like(out) if grad is None else grad
    return counted(lambda: backward(grad, q, k, v, *last), "h200").calls


def test_attention_of_cudnn_sums_the_queries_gradient_in_float32() -> None:
    first, second, third = fused_backward("cudnn")
    assert (first.read, first.written) == (2 * GRAD, ROW + WHOLE)
    assert (second.read, second.written) == (4 * GRAD + 2 * ROW + WHOLE, 2 * GRAD + WHOLE)
    assert (third.read, third.written) == (WHOLE, GRAD) and second.flops > first.flops == third.flops == 0
    *_, keys, values = fused_backward("cudnn", heads=2)
    assert (keys.read, keys.written) == (values.read, values.written) == (GRAD, GRAD // 2), "written for every query head, then summed"
    assert fused_backward("cudnn", bias=True)[1].read == second.read + 2 * 4 * 256 ** 2, "a bias, which the cache holds"


def test_flash_attention_copies_what_lies_head_by_head() -> None:
    calls = fused_backward("flash")
    name = "_scaled_dot_product_flash_attention_backward"
    assert [c.op for c in calls] == ["copy_", "copy_", name, name, name] and all(c.read == c.written == GRAD for c in calls[:2])
    assert [(c.read, c.written) for c in calls[2:]] == [(c.read, c.written) for c in fused_backward("cudnn")]
    beside = torch.empty(2, 256, 4, 64, dtype=torch.float16, device="meta").transpose(1, 2)
    assert [c.op for c in fused_backward("flash", grad=beside)] == ["copy_", name, name, name], "the result lies as the queries do"
    alone = torch.empty((), dtype=torch.float16, device="meta").expand(2, 4, 256, 64)
    assert [(c.read, c.written) for c in fused_backward("flash", grad=alone)][0] == (2, GRAD), "of a sum"
    assert [c.op for c in fused_backward("flash", heads=1)][-2:] == ["sum", "sum"]


def test_efficient_attention_splits_the_keys() -> None:
    filled, main = fused_backward("efficient")
    assert (filled.op, filled.read, filled.written) == ("fill_", 0, WHOLE)
    assert (main.read, main.written) == (5 * GRAD + ROW + WHOLE, 3 * GRAD + WHOLE)
    with_bias = fused_backward("efficient", bias=True)[-1]
    scores = 2 * 4 * 256 * 256
    assert with_bias.read - main.read == scores and with_bias.written - main.written == 2 * scores, "its gradient is that of each sequence"


def test_what_is_broadcast_is_fetched_again_where_the_cache_cannot_hold_it() -> None:
    """A step along the batch passes over a bias, scores and results of one sequence: 3 x 12 MB fit 50 MB, 3 x 24 MB do not."""
    for length, on, times in ((1024, "h200", 1), (1024, "rtx3090", 4), (1448, "h200", 4), (1448, "b200", 1), (1448, None, 1), (1448, "sm_90", 1)):
        scores, bias = (torch.empty(*batch, 6, length, length, device="meta", dtype=torch.float16) for batch in ((4,), ()))
        t = counted(lambda scores=scores, bias=bias: scores + bias, on)
        assert t.read == 2 * scores.numel() + times * 2 * bias.numel(), (length, on)
    mask = torch.empty(8192, 8192, device="meta", dtype=torch.bool)
    scores = torch.empty(2, 3, 8192, 8192, device="meta", dtype=torch.float16)
    small = lambda n: counted(lambda: scores[..., :n, :n].contiguous().masked_fill_(mask[:n, :n].contiguous(), 0.0), "h200").calls[-1]
    assert small(8192).read == 2 * scores.numel() + 6 * mask.numel() and small(1024).read == 2 * 6 * 1024 ** 2 + 1024 ** 2
    column = torch.empty(2, 3, 8192, 1, device="meta", dtype=torch.float16)
    row = torch.empty(8192, device="meta", dtype=torch.float16)
    assert counted(lambda: torch.add(scores, column).add_(row), "h200").read == 2 * (2 * scores.numel() + column.numel() + row.numel())
    lookup = torch.empty(4, 1, 2048, 2048, device="meta", dtype=torch.float16).expand(4, 6, 2048, 2048)
    assert counted(lambda: lookup.clone(), "h200").read == 2 * 4 * 2048 ** 2, "8 MB are still there a head later"


def test_the_backward_pass_of_a_softmax_is_two_kernels_on_a_gpu() -> None:
    with FakeTensorMode():
        grad, weights = torch.empty(8, 16, dtype=torch.float16), torch.empty(8, 16, dtype=torch.float16)
        call = lambda: torch.ops.aten._softmax_backward_data(grad, weights, -1, torch.float16)
        one, two = counted(call), counted(call, "h200")
    assert [(c.op, c.read, c.written) for c in one.calls] == [("_softmax_backward_data", 512, 256)]
    assert [(c.op, c.read, c.written) for c in two.calls] == [("mul", 512, 256), ("_softmax_backward_data", 512, 256)]


def test_a_copy_in_one_piece_is_no_kernel() -> None:
    x = torch.empty(4, 8)
    copies = {"dense": x.clone, "in its own order": x.t().clone, "cast": x.half, "turned": x.t().contiguous,
              "expanded": x[:1].expand(3, 8).contiguous, "a part": x[:, :4].contiguous, "rows": x[1:].clone}
    assert {n for n, call in copies.items() if not counted(call).calls[0].kernel} == {"dense", "in its own order", "rows"}
