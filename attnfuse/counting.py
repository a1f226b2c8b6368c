"""How many bytes one operation moves: what each kernel reads and writes of the main memory, as if it read everything once.

    operands [2, 8, 64, 64] float16 → softmax → the same shape     reads 131072 bytes, writes 131072

The rules, which `attnfuse.traffic` applies to whatever an eager run calls:

* a tensor counts its *distinct elements*: two views of the same elements count once, and so does an expanded dimension (stride 0), or one
  that an operation broadcasts, as long as what lies between two uses fits the cache of the GPU that is counted for; where it does not, an
  elementwise operation fetches it again for every step along that dimension (`extents.fetches`). Where no GPU is counted for, on a CPU that
  nobody names a GPU for or where the cache is not known, it counts once;
* views, questions about shapes and allocations move nothing; operations that only take the shape of an argument do not read it;
* what an operation changes in place is read and written, except where it is overwritten whole (``copy_``, ``fill_``, random numbers);
* a lookup (``index_select``, ``gather``, ``index``) reads of its table no more than it returns;
* an operation that is several kernels inside is taken apart, where their source is known (`attnfuse.composed`).

`Counter` is the dispatch mode that applies them; it knows nothing of generated kernels, `attnfuse.predicting` adds those.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from . import composed
from .extents import dense_alike, distinct_bytes, elements, fetches, storage, strided
from .traffic import Call

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
_BROADCASTING = frozenset({"copy_", "masked_fill_"})
"""They broadcast their arguments as elementwise operations do, without PyTorch's tag for these."""


def is_view(func: torch._ops.OpOverload, args: Any, result: Any) -> bool:
    """Whether an operation only gives another look at the memory of an argument: it mutates nothing and returns no new storage."""
    if func._schema.is_mutable:
        return False
    made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    given = {storage(t) for t in tree_leaves(args) if isinstance(t, torch.Tensor) and strided(t)}
    return bool(made) and all(strided(t) and storage(t) in given for t in made)


def moved(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any, cache: int = 0) -> tuple[int, int]:
    """(bytes read, bytes written) by one call of an operation that has run, on a GPU whose processors share a cache of so many bytes."""
    name = func._schema.name.rpartition("::")[2]
    if name in _SILENT or torch.Tag.inplace_view in func.tags or is_view(func, (args, kwargs), result):
        return 0, 0
    changed, read = _arguments(func, args, kwargs, name)
    given = {storage(t) for t in changed if strided(t)}
    made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    made = [t for t in made if not strided(t) or storage(t) not in given]
    if name in _SCATTERS:                        # of what is changed only the places that are named
        touched = min(_places(name, args), changed[0].numel()) * changed[0].element_size()
        adds = "add" in name or (name.lstrip("_").startswith("index_put") and len(args) > 3 and bool(args[3]))
        return distinct_bytes(read) + touched * adds, touched
    if name in _LOOKUPS and read:
        table, rest = read[0], read[1:]
        return min(distinct_bytes([table]), distinct_bytes(made)) + distinct_bytes(rest), distinct_bytes(made)
    overwritten = name in _OVERWRITTEN or func._schema.overload_name.endswith("out")
    again = _again(read, [*changed, *made], cache) if torch.Tag.pointwise in func.tags or name in _BROADCASTING else 0
    return distinct_bytes(read if overwritten else [*read, *changed]) + again, distinct_bytes([*changed, *made])


def _again(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], cache: int) -> int:
    """Bytes of arguments that an elementwise kernel broadcasts and fetches more than once."""
    if not written or not all(strided(t) for t in (*read, *written)):
        return 0
    different = {(storage(t), elements(t), t.shape): t for t in read}.values()
    return sum((fetches(t, written[0], [*different, *written], cache) - 1) * distinct_bytes([t]) for t in different)


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

    Args:
        calls: where the kernels go.
        cache: bytes of the cache that the processors of the GPU share; 0 where it is not known.
        as_gpu: whether kernels are those of a GPU wherever the tensors are; otherwise they are where a tensor is on one.
    """

    def __init__(self, calls: list[Call], cache: int = 0, as_gpu: bool = False) -> None:
        super().__init__()
        self.calls, self.cache, self.as_gpu = calls, cache, as_gpu

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled models run under it as they are."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)
        key = _program(func)
        if key is not None and all(strided(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
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
        name = func._schema.name.rpartition("::")[2]
        on_gpu = self.as_gpu or any(isinstance(t, torch.Tensor) and t.is_cuda for t in tree_leaves((args, kwargs, result)))
        cache = self.cache if on_gpu else 0
        inside = composed.kernels(name, args, result, on_gpu, cache) if func.namespace == "aten" else None
        if inside is None:
            read, written = moved(func, args, kwargs, result, cache)
            inside = [Call(name, read, written, kernel=not _in_one_piece(name, args))] if read or written else []
        flops = _flops(func, args, kwargs, result) if inside else 0
        busiest = max(range(len(inside)), key=lambda n: (inside[n].op == name, inside[n].moved), default=0)
        self.calls += [replace(c, flops=flops if n == busiest else 0) for n, c in enumerate(inside)]


def _in_one_piece(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation is a copy that a GPU makes without a kernel (``copy_device_to_device`` of PyTorch's ``Copy.cu``)."""
    if name != "copy_" or not all(isinstance(t, torch.Tensor) for t in args[:2]):
        return False
    target, source = args[:2]
    return target.dtype == source.dtype and target.device == source.device and dense_alike(target, source)


def taken_apart(func: torch._ops.OpOverload) -> bool:
    """Whether the operations count that an operation is made of, and not itself."""
    return func.namespace != "prim" and _program(func) is not None


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
