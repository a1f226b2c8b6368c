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
import math
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
        if not _strided(t):
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
    given = {_storage(t) for t in tree_leaves(args) if isinstance(t, torch.Tensor) and _strided(t)}
    return bool(made) and all(_strided(t) and _storage(t) in given for t in made)


def moved(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """(bytes read, bytes written) by one call of an operation that has run."""
    name = func._schema.name.rpartition("::")[2]
    if name in _SILENT or torch.Tag.inplace_view in func.tags or is_view(func, (args, kwargs), result):
        return 0, 0
    changed, read = _arguments(func, args, kwargs, name)
    given = {_storage(t) for t in changed if _strided(t)}
    made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    made = [t for t in made if not _strided(t) or _storage(t) not in given]
    if name in _SCATTERS:                        # of what is changed only the places that are named
        touched = min(_places(name, args), changed[0].numel()) * changed[0].element_size()
        adds = "add" in name or (name.lstrip("_").startswith("index_put") and len(args) > 3 and bool(args[3]))
        return distinct_bytes(read) + touched * adds, touched
    if name in _LOOKUPS and read:
        table, rest = read[0], read[1:]
        return min(distinct_bytes([table]), distinct_bytes(made)) + distinct_bytes(rest), distinct_bytes(made)
    overwritten = name in _OVERWRITTEN or func._schema.overload_name.endswith("out")
    return distinct_bytes(read if overwritten else [*read, *changed]), distinct_bytes([*changed, *made])


def _places(name: str, args: Sequence[Any]) -> int:
    """How many elements a scatter names: those of its index, times the dimensions beside; a mask counts as if it were true everywhere."""
    if name in ("scatter_", "scatter_add_", "masked_scatter_"):
        return int(args[1 if name == "masked_scatter_" else 2].numel())
    target = args[0]
    if name in ("index_add_", "index_copy_"):
        return int(args[2].numel()) * (int(target.numel()) // max(int(target.shape[args[1]]), 1) if target.dim() else 1)
    picked, dim = 1, 0
    beside = [int(n) for n in target.shape]
    for index in args[1]:
        for _ in range(index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1):
            if index is not None:
                beside[dim] = 1
            dim += 1
        picked = max(picked, int(index.numel()) if index is not None else 1)
    return picked * math.prod(beside)


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

_KEYS = torch._C.DispatchKey
_EXPLICIT = (_KEYS.CompositeExplicitAutograd, _KEYS.CompositeExplicitAutogradNonFunctional)
_WHOLE = frozenset({"aten::_unsafe_view", "aten::empty_like", "aten::new_empty", "aten::lift_fresh_copy", "aten::scalar_tensor"})
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
        key = _program(func)
        if key is not None and all(_strided(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
            before = len(self.calls)
            try:
                with self:
                    return func._op_dk(key, *args, **kwargs)
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


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


@functools.cache
def _program(func: torch._ops.OpOverload) -> torch._C.DispatchKey | None:
    """The key of the program by which an operation is others on every device; None for a kernel. Views and in-place operations are left
    whole: the former move nothing, the latter are what runs. So are products (whatever PyTorch knows the FLOPs of): a convolution is one
    kernel of a library, though PyTorch finds it by way of several operations."""
    if func.namespace != "aten" or func.overloadpacket in flop_registry:
        return None
    if func.has_kernel_for_dispatch_key(_KEYS.CompositeImplicitAutograd):        # below autograd these arrive from inside of other programs
        return _KEYS.CompositeImplicitAutograd
    schema = func._schema
    if any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)) or func.overloadpacket._qualified_op_name in _WHOLE:
        return None
    if any(func.has_kernel_for_dispatch_key(k) for k in (_KEYS.CPU, _KEYS.CUDA)):
        return None
    return next((k for k in _EXPLICIT if func.has_kernel_for_dispatch_key(k)), None)


def _flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except TypeError:       # an overload with other arguments than the formula's: its traffic counts all the same
        return 0
    except AssertionError:  # PyTorch 2.11 knows no attention whose heads share keys: with a key for every head it takes the same FLOPs
        return int(formula(*_ungrouped(args), **kwargs, out_val=result))


def _ungrouped(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a fused attention, tensors (batch, heads, tokens, width), with as many heads of keys and values as of queries."""
    batched = [x for x in args if isinstance(x, torch.Tensor) and x.dim() == 4]
    heads = max((x.shape[1] for x in batched), default=0)
    shaped = lambda x: torch.empty((x.shape[0], heads, *x.shape[2:]), device="meta")
    return tuple(shaped(x) if isinstance(x, torch.Tensor) and x.dim() == 4 else x for x in args)
