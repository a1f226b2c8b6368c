"""Operations of PyTorch that launch several kernels on a GPU: which, and what each moves, by the source that launches them.

    _softmax_backward_data(grad, output)   →   mul (reads both, writes their product), _softmax_backward_data (reads the product and output)

`attnfuse.counting` sees what passes through the dispatcher; this is what does not, as read in PyTorch's sources (around 2.11 to 2.13), built for CUDA:

* the backward pass of a softmax: ``softmax_backward_cuda_out`` of ``aten/src/ATen/native/cuda/SoftMax.cu``;
* that of FlashAttention 2: ``mha_bwd`` of ``transformers/cuda/flash_attn/flash_api.cpp`` and ``run_flash_bwd_seqk_parallel`` of
  ``flash_bwd_launch_template.h``;
* that of cuDNN, whose kernels are not published: the graph that is built for them, ``CompositeSDPABackwardNode`` of cudnn-frontend's
  ``scaled_dot_product_flash_attention.h``. It has the tensors of FlashAttention 2; one kernel for each that is not virtual is assumed;
* memory-efficient attention: ``_efficient_attention_backward`` of ``transformers/cuda/attention_backward.cu`` and
  ``mem_eff_attention/kernel_backward.h``.

The forward passes of all three are one kernel, which reads and writes its arguments and results.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .extents import distinct_bytes, fetches
from .traffic import Call

PARTS = {"_softmax_backward_data": ("mul",), "_scaled_dot_product_flash_attention_backward": ("copy_", "sum"),
         "_scaled_dot_product_efficient_attention_backward": ("copy_", "fill_")}
"""The operations that others call inside, which count by their own names."""
_FLOAT = 4
"""Bytes of the sums that attention keeps in memory."""


def kernels(name: str, args: Sequence[Any], result: Any, on_gpu: bool, cache: int) -> list[Call] | None:
    """The kernels of one call of an ATen operation; None where it is one kernel, or where what is inside is not known.

    Args:
        name: of the operation, without ``aten::``.
        args, result: of the call.
        on_gpu: whether it counts as on a GPU. Attention does by its name: these operations are nowhere else.
        cache: as of `extents.fetches`.
    """
    if name == "_softmax_backward_data":
        return _softmax_backward(name, args, result) if on_gpu else None
    if torch.version.hip or not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in args[:3]):
        return None
    if name in ("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"):
        lengths = args[6] if "flash" in name else args[9]
        return None if lengths is not None else _flash_backward(name, args, result, cache, flash="flash" in name)
    if name == "_scaled_dot_product_efficient_attention":
        return None if args[3] is None else _efficient(name, args, result, cache)
    if name == "_scaled_dot_product_efficient_attention_backward":
        return _efficient_backward(name, args, result, cache)
    return None


def _softmax_backward(name: str, args: Sequence[Any], result: torch.Tensor) -> list[Call]:
    """``Tensor tmp = grad * output``, and the kernel proper, which reads the product where it could have read the gradient."""
    grad, output = args[:2]
    product = int(output.numel()) * torch.result_type(grad, output).itemsize
    return [Call("mul", distinct_bytes([grad, output]), product),
            Call(name, product + distinct_bytes([output]), distinct_bytes([result]))] if product else []


# ---- FlashAttention 2 and cuDNN

def _flash_backward(name: str, args: Sequence[Any], result: Sequence[torch.Tensor], cache: int, flash: bool) -> list[Call]:
    """Three kernels around sums of the queries' gradient in float32, to which every tile of keys adds.

    The first reads the result and its gradient, writes a number a row and fills the sums with zeros; the second reads all operands and that
    number, adds to the sums (through the cache: they are read and written once) and writes the gradients of keys and values; the third reads
    the sums and writes the gradient of the queries. Where query heads share keys, the gradients of those are written for every query head, and
    summed by one more kernel each. FlashAttention 2 wants the result and its gradient with the heads beside the width, and copies them where
    they are not: a result has the layout of the queries.
    """
    grad, query, key, value, out, logsumexp = args[:6]
    batch, heads, queries, width = (int(n) for n in query.shape)
    if not query.numel() or not key.numel():
        return []
    copied = [_beside(x) if flash else ([], distinct_bytes([x])) for x in (grad, out)]
    calls, sizes = [call for some, _ in copied for call in some], [size for _, size in copied]
    row, arrived = _FLOAT * batch * heads * queries, sum(sizes)
    biased = 0 if flash else _bias(args[8], cache)
    sums = row * (_rounded(width) if flash else width)
    written = [distinct_bytes([x]) for x in result[1:3]]
    spread = [n * heads // int(x.shape[1]) for n, x in zip(written, (key, value), strict=True)]
    calls += [Call(name, arrived, row + sums),
              Call(name, distinct_bytes([query, key, value, logsumexp]) + sizes[0] + row + sums + biased, sum(spread) + sums),
              Call(name, sums, distinct_bytes([result[0]]))]
    return calls + [Call("sum" if flash else name, wide, narrow) for wide, narrow in zip(spread, written, strict=True) if wide != narrow]


def _beside(x: torch.Tensor) -> tuple[list[Call], int]:
    """What a kernel that wants heads beside the width reads of a tensor, in bytes; before it the copy, where heads lie elsewhere."""
    size, whole = distinct_bytes([x]), int(x.numel()) * x.element_size()
    return ([], size) if x.transpose(1, 2).is_contiguous() else ([Call("copy_", size, whole)], whole)


def _rounded(width: int) -> int:
    """The head width for which FlashAttention 2 has a kernel."""
    return next((n for n in (32, 64, 96, 128, 192) if width <= n), 256)


# ---- memory-efficient attention

def _bias(bias: torch.Tensor | None, cache: int) -> int:
    """Bytes of a bias that every program reads for its own attention: blocks of queries start first, then heads, then the batch."""
    return 0 if bias is None else distinct_bytes([bias]) * fetches(bias, bias, [bias], cache, order=range(bias.dim()))


def _efficient(name: str, args: Sequence[Any], result: Sequence[Any], cache: int) -> list[Call]:
    """One kernel, which may fetch its bias several times."""
    made = [x for x in result if isinstance(x, torch.Tensor)]
    return [Call(name, distinct_bytes(args[:3]) + _bias(args[3], cache), distinct_bytes(made))] if args[0].numel() else []


def _efficient_backward(name: str, args: Sequence[Any], result: Sequence[Any], cache: int) -> list[Call]:
    """One kernel. Where the keys of a head are split over several programs, these add to float32 sums of the queries' gradient in a
    workspace, which is filled with zeros before, read and written; the last program that adds writes the gradient itself.

    That is so for half types, heads up to 128 wide and keys enough. For wider heads and for float32 there are sums of the gradients of keys
    and values too, of a size that depends on the GPU's shared memory: not counted. The gradient of a bias is written for every attention,
    expanded or not: it is one of the results here, and autograd sums it.
    """
    grad, query, key, value, bias, out, logsumexp = args[:7]
    if not query.numel() or not key.numel():
        return []
    batch, heads, queries, width = (int(n) for n in query.shape)
    calls, arrived = _beside(grad)
    widest = max(width, int(value.shape[3]))
    block = 64 if widest <= 64 else 128
    split = int(key.shape[2]) > block and (batch * heads < 256 or int(key.shape[2]) > 2 * block)
    sums = _FLOAT * batch * heads * queries * width if split and widest <= 128 and query.element_size() == 2 else 0
    if sums:
        calls.append(Call("fill_", 0, sums))
    read = distinct_bytes([query, key, value, out, logsumexp]) + arrived + _bias(bias, cache)
    return [*calls, Call(name, read + sums, distinct_bytes([x for x in result if isinstance(x, torch.Tensor)]) + sums)]
