"""Which elements of the memory tensors name, and how often a kernel fetches them.

    distinct_bytes([x, x.t(), x.expand(100, *x.shape)])     what x holds, once
    fetches(mask, scores, [mask, scores], 50_000_000)       1 where a head's scores and the mask fit the cache, else one for each head
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Elements = tuple[int, tuple[tuple[int, int], ...], int]
"""Which elements of a storage a tensor names: its offset, the (stride, length) of its dimensions in order, the bytes of an element."""


def elements(tensor: torch.Tensor) -> Elements:
    """The elements that a tensor names, equal for a view and its transpose; expanded and single dimensions are left out."""
    dims = sorted((int(s), int(n)) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0 and n != 1)
    return int(tensor.storage_offset()), tuple(dims), tensor.element_size()


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct elements that some tensors name, over all their storages.

    Views of one storage that overlap in part are added up, but never beyond the storage's own span of elements.

    >>> x = torch.zeros(4, 1, 8)
    >>> distinct_bytes([x.expand(4, 100, 8), x, x.transpose(0, 2)])
    128
    """
    parts: dict[object, set[Elements]] = {}
    loose = 0
    for t in tensors:
        if t.numel() == 0:
            continue
        if not strided(t):
            loose += t.element_size() * int(t.numel())
            continue
        parts.setdefault(storage(t), set()).add(elements(t))
    return loose + sum(_spanned(found) for found in parts.values())


def storage(tensor: torch.Tensor) -> object:
    """What two tensors with common memory have in common: the identity of the storage, which fake and meta tensors have too."""
    return tensor.untyped_storage()._cdata


def _spanned(found: set[Elements]) -> int:
    """Bytes of what views of one storage name."""
    total, low, high = 0, None, 0
    for offset, dims, size in found:
        count, reach = 1, 1
        for stride, length in dims:
            count, reach = count * length, reach + (length - 1) * stride
        first, last = offset * size, (offset + reach) * size
        low, high = first if low is None else min(low, first), max(high, last)
        total += min(count, reach) * size         # windows that slide over one another name an element several times
    return min(total, high - (low or 0))


def strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a stretch of memory with strides: neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def fetches(tensor: torch.Tensor, like: torch.Tensor, beside: Sequence[torch.Tensor], cache: int, order: Sequence[int] | None = None) -> int:
    """How often a kernel that walks over all elements of `like` once reads a tensor which is broadcast to its shape from the main memory.

    An element is wanted again after what lies inside of the dimension along which the tensor is repeated: that block of every tensor of the
    kernel. Where the blocks fit the cache together the tensor is still there; where they do not, it is fetched for every step along that
    dimension. Neighbouring dimensions along which it is repeated are one.

    Args:
        tensor: what is read, of a shape that is broadcast to that of `like`, or expanded (stride 0).
        like: what is walked over, in the order of its strides.
        beside: every tensor that the kernel reads or writes, `tensor` among them.
        cache: bytes that the cache holds which all processors share; 0 where that is not known, and everything then counts once.
        order: the dimensions of `like` from the outermost to the innermost, where they are not walked in the order of its strides.
    """
    if not cache or tensor.dim() > like.dim():
        return 1
    order = order if order is not None else sorted(range(like.dim()), key=lambda d: -int(like.stride(d)))
    others = [t for t in beside if t.dim() <= like.dim()]
    inside = [t.element_size() for t in others]
    times, between, running = 1, 0, False
    for d in reversed([d for d in order if like.shape[d] != 1]):
        length = int(like.shape[d])
        if _repeated(tensor, like, d):
            between = between if running else sum(inside)
            times *= length if between > cache else 1
        running = _repeated(tensor, like, d)
        inside = [n if _repeated(t, like, d) else n * length for n, t in zip(inside, others, strict=True)]
    return times


def _repeated(tensor: torch.Tensor, like: torch.Tensor, dim: int) -> bool:
    """Whether a tensor has the same elements all along a dimension of what it is broadcast to."""
    own = dim - (like.dim() - tensor.dim())
    return own < 0 or tensor.shape[own] == 1 or tensor.stride(own) == 0


def dense_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are each a stretch of memory without holes, with their elements in the same order."""
    if not strided(one) or not strided(other) or one.shape != other.shape:
        return False
    layouts = [[(int(s), int(n)) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1] for t in (one, other)]
    expected = 1
    for stride, length in sorted(layouts[0]):
        if stride != expected:
            return False
        expected *= length
    return layouts[0] == layouts[1]
