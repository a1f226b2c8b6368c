"""How many bytes one operation moves: what each kernel reads and writes of the main memory, as if it read everything once.

    operands [2, 8, 64, 64] float16 → softmax → the same shape     reads 131072 bytes, writes 131072

The rules, which `attnfuse.traffic` applies to whatever an eager run calls:

* a tensor counts its *distinct elements*: an expanded dimension (stride 0) counts once, and so do two views of the same elements;
* views, questions about shapes and allocations move nothing; operations that only take the shape of an argument do not read it;
* what an operation changes in place is read and written, except where it is overwritten whole (``copy_``, ``fill_``, random numbers);
* a lookup (``index_select``, ``gather``, ``index``) reads of its table no more than it returns.

`Counter` is the dispatch mode that applies them; it knows nothing of generated kernels, `attnfuse.predicting` adds those.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .traffic import Call

Elements = tuple[int, tuple[tuple[int, int], ...], int]
"""Which elements of a storage a tensor names: its offset, the (stride, length) of its dimensions in order, the bytes of an element."""

_OVERWRITTEN = frozenset({"copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "cauchy_", "geometric_",
                          "log_normal_", "set_", "resize_", "resize_as_", "arange", "linspace", "full_out"})
_SHAPED = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros",
                     "new_ones", "new_full", "new_empty_strided", "fill_", "zero_"})
"""They ask their first argument for shape, dtype and device only."""
_SILENT = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "resize_as_", "record_stream",
                     "is_same_size", "_has_compatible_shallow_copy_type", "_assert_tensor_metadata", "_assert_async", "_local_scalar_dense"})
"""Nothing is moved, or a single number."""
_LOOKUPS = frozenset({"index_select", "gather", "index", "embedding", "take", "take_along_dim", "masked_select"})
_SCATTERS = frozenset({"index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "masked_scatter_"})


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
        if t.layout != torch.strided or t.is_nested:
            loose += t.element_size() * int(t.numel())
            continue
        parts.setdefault(_storage(t), set()).add(elements(t))
    return loose + sum(_spanned(found) for found in parts.values())


def _storage(tensor: torch.Tensor) -> object:
    """What two tensors with common memory have in common: the identity of the storage, which fake and meta tensors have too."""
    return tensor.untyped_storage()._cdata


def _spanned(found: set[Elements]) -> int:
    total, low, high = 0, None, 0
    for offset, dims, size in found:
        count, reach = 1, 1
        for stride, length in dims:
            count, reach = count * length, reach + (length - 1) * stride
        first, last = offset * size, (offset + reach) * size
        low, high = first if low is None else min(low, first), max(high, last)
        total += min(count, reach) * size         # windows that slide over one another name an element several times
    return min(total, high - (low or 0))


def is_view(func: torch._ops.OpOverload, args: Any, result: Any) -> bool:
    """Whether an operation only gives another look at the memory of an argument: it mutates nothing and returns no new storage."""
    if func._schema.is_mutable:
        return False
    made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    given = {_storage(t) for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.layout == torch.strided and not t.is_nested}
    return bool(made) and all(t.layout == torch.strided and not t.is_nested and _storage(t) in given for t in made)


def moved(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """(bytes read, bytes written) by one call of an operation that has run."""
    name = func._schema.name.rpartition("::")[2]
    if name in _SILENT or is_view(func, (args, kwargs), result):
        return 0, 0
    changed, read = _arguments(func, args, kwargs, name)
    given = {_storage(t) for t in changed if t.layout == torch.strided and not t.is_nested}
    made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    made = [t for t in made if t.layout != torch.strided or t.is_nested or _storage(t) not in given]
    if name in _SCATTERS:                        # what is written is as much as the values given
        touched = min(distinct_bytes(read), distinct_bytes(changed))
        return distinct_bytes(read) + touched, touched
    if name in _LOOKUPS and read:
        table, rest = read[0], read[1:]
        return min(distinct_bytes([table]), distinct_bytes(made)) + distinct_bytes(rest), distinct_bytes(made)
    overwritten = name in _OVERWRITTEN or func._schema.overload_name.endswith("out")
    return distinct_bytes(read if overwritten else [*read, *changed]), distinct_bytes([*changed, *made])


def _arguments(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors that the call changes, tensors that it only reads)."""
    changed: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for n, argument in enumerate(func._schema.arguments):
        value = args[n] if n < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            changed += tensors
        elif not (n == 0 and name in _SHAPED):
            read += tensors
    return changed, read


# ---- the mode

_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
_WHOLE = frozenset({"aten::_unsafe_view", "aten::empty_like", "aten::new_empty", "aten::lift_fresh_copy"})
"""Programs that would make a tensor behind the dispatcher's back, or that move nothing whatever they are made of."""


class Counter(TorchDispatchMode):
    """Appends every kernel to `calls`; operations that PyTorch makes of others are taken apart, so that what runs is counted:

        masked_fill(x, mask, -inf)   →   copy_ (reads and writes x), masked_fill_ (reads x and the mask, writes x)
    """

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled models run under it as they are."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "aten" and _taken_apart(func, (args, kwargs)):
            before = len(self.calls)
            try:
                with self:
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            except (RuntimeError, NotImplementedError):      # it looks at values that a fake tensor has not, or the operation itself fails
                del self.calls[before:]
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        read, written = moved(func, args, kwargs, result)
        if read or written:
            name = func._schema.name.rpartition("::")[2]
            self.calls.append(Call(name, read, written, _flops(func, args, kwargs, result)))


def _taken_apart(func: torch._ops.OpOverload, args: Any) -> bool:
    """Whether an operation is a program of others on every device (`masked_fill` is a copy and `masked_fill_`). Views and in-place
    operations are left whole: the former move nothing, the latter are what runs."""
    if not _composite(func):
        return False
    return all(t.layout == torch.strided and not t.is_nested for t in tree_leaves(args) if isinstance(t, torch.Tensor))


@functools.cache
def _composite(func: torch._ops.OpOverload) -> bool:
    schema, keys = func._schema, torch._C.DispatchKey
    if any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)) or func.overloadpacket._qualified_op_name in _WHOLE:
        return False
    return func.has_kernel_for_dispatch_key(_COMPOSITE) and not any(func.has_kernel_for_dispatch_key(k) for k in (keys.CPU, keys.CUDA))


def _flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
