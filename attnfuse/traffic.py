"""Count what an eager run reads and writes, kernel by kernel, on any machine: no GPU, no memory, on fake tensors no arithmetic.

    with attnfuse.traffic() as t:
        model(x).sum().backward()
    print(t)                    # a table by operation, and the total

It is a dispatch mode: it sees every operation below autograd, so forward and backward passes alike, on real, meta and fake tensors.
What counts is in `attnfuse.counting`. The count is what the kernels ask of the memory if each finds the cache empty and leaves it so; what a
cache holds of a result until the next kernel reads it makes the measured traffic smaller.

Our own operations count as the generated kernels are predicted to move (`attnfuse.codegen.predict`). What inductor compiles runs outside
of the dispatcher and is not seen: to count an optimised model, optimise it with ``inner="eager"``.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .roofline import Kernel

if TYPE_CHECKING:
    from .codegen.tiles import Device


@dataclass(frozen=True)
class Call:
    """One kernel: the operation's name, bytes read and written, floating-point operations of its products (0 for everything else).

    `kernel` is False for a copy of one dense stretch of memory to another of the same dtype. A GPU's copy function makes it
    (``cudaMemcpyAsync``): it moves memory like a kernel, and a profiler of kernels does not list it.
    """

    op: str
    read: int
    written: int
    flops: int = 0
    kernel: bool = field(default=True, kw_only=True)

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class Row:
    """All kernels of one operation."""

    op: str
    calls: int
    read: int
    written: int
    flops: int

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


@dataclass
class Traffic:
    """What a run moved.

    Attributes:
        calls: the kernels that moved something, in order.
    """

    calls: list[Call] = field(default_factory=list)

    @property
    def read(self) -> int:
        """Bytes read."""
        return sum(c.read for c in self.calls)

    @property
    def written(self) -> int:
        """Bytes written."""
        return sum(c.written for c in self.calls)

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def flops(self) -> int:
        """Floating-point operations of products, by PyTorch's own formulas (masks are not discounted)."""
        return sum(c.flops for c in self.calls)

    def by_op(self) -> list[Row]:
        """A row for each operation, the one that moves most first."""
        names = dict.fromkeys(c.op for c in self.calls)
        rows = [Row(n, len(some), sum(c.read for c in some), sum(c.written for c in some), sum(c.flops for c in some))
                for n in names for some in [[c for c in self.calls if c.op == n]]]
        return sorted(rows, key=lambda r: -r.moved)

    def kernels(self) -> list[Kernel]:
        """A point of the roofline for each operation that computes a product or moves at least a hundredth of the total; what has no
        products counts one operation for each four bytes moved, which places it where elementwise kernels are."""
        return [Kernel(r.op, r.flops or r.moved / 4, r.moved) for r in self.by_op() if r.flops or r.moved * 100 >= self.total]

    def __str__(self) -> str:
        rows = [("operation", "kernels", "read", "written", "moved", "share")]
        for r in self.by_op():
            rows.append((r.op, str(r.calls), size(r.read), size(r.written), size(r.moved), f"{r.moved / max(self.total, 1):.1%}"))
        rows.append(("total", str(len(self.calls)), size(self.read), size(self.written), size(self.total), ""))
        widths = [max(len(r[c]) for r in rows) for c in range(6)]
        return "\n".join(f"{r[0]:<{widths[0]}}" + "".join(f"  {x:>{w}}" for x, w in zip(r[1:], widths[1:], strict=True)).rstrip() for r in rows)


def size(count: float) -> str:
    """Bytes for people, in powers of 1000 as bandwidths are.

    >>> size(58.6e9), size(950)
    ('58.6 GB', '950 B')
    """
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


@contextmanager
def traffic(device: str | Device | None = None) -> Iterator[Traffic]:
    """Count the bytes that everything inside the ``with`` block reads and writes.

    Args:
        device: count as on this GPU (``"h100"``, see `attnfuse.codegen.devices`), wherever the tensors are. Dropout is then the one kernel that
            it is there, which writes a mask of bytes (the one inside of `nn.functional.multi_head_attention_forward` stays as it runs); the
            backward pass of a softmax is two kernels; what an elementwise kernel broadcasts is fetched again where its cache cannot hold it
            from one use to the next; and our own operations are predicted for it. By default kernels are counted as they run where the
            tensors are, on a GPU with its cache, and predictions are for the GPU that is there, or else for an H100.

    Yields:
        The `Traffic`, which grows as the block runs.

    Raises:
        ValueError: an unknown device; the message lists the known ones.
    """
    from .predicting import counting       # imports torch

    found = Traffic()
    with counting(found.calls, device):
        yield found
