"""The roofline of attention: how much it computes, how much it moves, and which of the two its time is.

    >>> standard_attention_traffic(1024, 64)                    # numbers, one head: 4·T² + 4·T·d
    4456448
    >>> round(ridge_point(312e12, 2.039e12))                    # an A100
    153

Traffic is counted in *numbers* where a function has no argument for their width, as the papers do; times are in seconds, rates in
FLOP/s and bytes/s. T is the number of tokens, d or d_k the head width, M what the fast memory holds, in numbers.

Sources: the roofline itself is Williams, Waterman, Patterson (2009), "Roofline: An Insightful Visual Performance Model for Multicore
Architectures"; standard attention is Algorithms 0 and 3, FlashAttention Algorithms 1 and 4, and their accesses Theorems 2 and 5 of Dao et al.
(2022), "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness".
"""
from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SOFTMAX_FLOPS = 5
"""Operations an element of a softmax: a comparison for the maximum, a subtraction, an exponential, an addition, a division."""


def _check(**values: float) -> None:
    """Raise ValueError for a quantity that is not a positive number."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, not {value}")


# ---- traffic

def standard_attention_traffic(T: int, d_k: int, k: int = 1) -> int:
    """Numbers that one head of standard attention moves forward: (2 + 2k)·T² + 4·T·d_k.

    Q·Kᵀ reads 2·T·d_k and writes T²; each of k elementwise kernels on the scores (the softmax is one) reads and writes T²; P·V reads
    T² + T·d_k and writes T·d_k. With k = 1 it is Algorithm 0 of Dao et al. (2022); scale, mask, softmax and dropout are k = 4.

    Raises:
        ValueError: a length that is not positive, or a negative k.
    """
    _check(T=T, d_k=d_k)
    if k < 0:
        raise ValueError(f"k must not be negative, got {k}")
    return (2 + 2 * k) * T * T + 4 * T * d_k


def standard_backward_traffic(T: int, d_k: int) -> int:
    """Numbers that one head of standard attention moves backward: 7·T² + 8·T·d_k (Algorithm 3 of Dao et al., 2022).

    dV = Pᵀ·dO reads P; dP = dO·Vᵀ is written; dS is made of P and dP: two read, one written; dQ = dS·K and dK = dSᵀ·Q each read
    dS: seven passes over T×T. Each of the four products moves two operands or results of T×d_k.
    """
    _check(T=T, d_k=d_k)
    return 7 * T * T + 8 * T * d_k


def square_share(T: int, d_k: int, k: int = 1) -> float:
    """The share of `standard_attention_traffic` that is T×T matrices: 0.94 at T = 1024, d_k = 64."""
    return (2 + 2 * k) * T * T / standard_attention_traffic(T, d_k, k)


def flash_blocks(d: int, M: int) -> tuple[int, int]:
    """(B_r, B_c), rows of queries and of keys of a tile in FlashAttention: B_c = ⌈M/4d⌉, B_r = min(B_c, d) (Algorithm 1, line 1).

    It is the largest tile of which K and V, Q and O, and the scores each fill no more than a quarter of the fast memory: B_c·d, B_r·d and
    B_r·B_c are all at most M/4. Our own planner counts what a kernel holds instead (`attnfuse.codegen.memory`): results and
    scores lie in registers, and K and V are buffered several times.
    """
    _check(d=d, M=M)
    columns = math.ceil(M / (4 * d))
    return min(columns, d), columns


def flash_attention_traffic(T: int, d: int, M: int) -> int:
    """Numbers that one head of FlashAttention moves forward, by Algorithm 1 of Dao et al. (2022), line by line; Θ(T²d²/M) (Theorem 2).

    The outer loop reads K and V once; each of its T_c = ⌈T/B_c⌉ turns reads Q, O and the two statistics of every row and writes
    O and the statistics back; line 2 writes O and the statistics once before.
    """
    _check(T=T, d=d, M=M)
    turns = math.ceil(T / flash_blocks(d, M)[1])
    return 2 * T * d + (T * d + 2 * T) + turns * (3 * T * d + 4 * T)


def flash_backward_traffic(T: int, d: int, M: int) -> int:
    """Numbers that one head of FlashAttention moves backward, by Algorithm 4 of Dao et al. (2022); Θ(T²d²/M) (Theorem 5).

    Line 5 writes dQ, dK and dV once; the outer loop reads K and V and writes dK and dV once; each of its turns reads Q, O, dO, dQ and
    two statistics of every row, and writes dQ back.
    """
    _check(T=T, d=d, M=M)
    turns = math.ceil(T / flash_blocks(d, M)[1])
    return 3 * T * d + 4 * T * d + turns * (5 * T * d + 2 * T)


# ---- arithmetic, intensity, time

def product_flops(T: int, d: int) -> int:
    """Operations of one of the two products of one head: 2·T²·d. Forward takes two of them, backward four, and one more where the
    scores are computed again."""
    _check(T=T, d=d)
    return 2 * T * T * d


def intensity(flops: float, moved: float) -> float:
    """FLOPs a byte; infinite where nothing is moved."""
    return flops / moved if moved else math.inf


def ridge_point(peak: float, bw: float) -> float:
    """The intensity (FLOPs a byte) from which on arithmetic decides: peak / bandwidth. A100 153, H100 295."""
    _check(peak=peak, bw=bw)
    return peak / bw


def seconds(flops: float, moved: float, peak: float, bw: float) -> float:
    """The least time of a kernel whose arithmetic and traffic overlap: max(flops / peak, bytes / bandwidth)."""
    _check(peak=peak, bw=bw)
    return max(flops / peak, moved / bw)


@dataclass(frozen=True)
class Kernel:
    """A point of the roofline: a name, its FLOPs, the bytes it moves, and the seconds it was measured to take, where it was."""

    name: str
    flops: float
    moved: float
    measured: float | None = None

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return intensity(self.flops, self.moved)

    def seconds(self, peak: float, bw: float) -> float:
        """The least time that the roofline allows."""
        return seconds(self.flops, self.moved, peak, bw)


def standard_kernels(T: int, d_k: int, heads: int = 1, b: int = 2, k: int = 1, softmax_flops: float = SOFTMAX_FLOPS) -> tuple[Kernel, ...]:
    """The kernels of standard attention: scores, the softmax, k - 1 other elementwise ones (one operation an element), values.

    Args:
        T, d_k: tokens and head width. heads: over the whole batch.
        b: bytes a number.
        k: elementwise kernels on the scores, the softmax among them.
        softmax_flops: operations of the softmax an element.
    """
    _check(T=T, d_k=d_k, heads=heads, b=b, k=k)
    product, edge, square = heads * product_flops(T, d_k), b * heads * T * d_k, b * heads * T * T
    others = [Kernel(f"elementwise {n + 1}" if k > 2 else "elementwise", heads * T * T, 2 * square) for n in range(k - 1)]
    return (Kernel("scores Q·Kᵀ", product, 2 * edge + square), *others, Kernel("softmax", heads * softmax_flops * T * T, 2 * square),
            Kernel("values P·V", product, square + 2 * edge))


def fused_kernel(T: int, d_k: int, heads: int = 1, b: int = 2) -> Kernel:
    """One kernel that reads Q, K and V and writes the result once: intensity T/b. The softmax runs beside the products."""
    _check(T=T, d_k=d_k, heads=heads, b=b)
    return Kernel("fused", 2 * heads * product_flops(T, d_k), 4 * b * heads * T * d_k)


def min_head_width(T: int, ridge: float, b: int = 2) -> float:
    """The head width at which the product Q·Kᵀ reaches a ridge point; infinite where none does.

    2·T²·d / (b·(2·T·d + T²)) = ridge gives d = ridge·b·T / (2·(T - b·ridge)): the intensity of a product of T tokens is below T/b
    whatever its width, so T must exceed b·ridge.
    """
    _check(T=T, ridge=ridge, b=b)
    return ridge * b * T / (2 * (T - b * ridge)) if T > b * ridge else math.inf


def attention_layer_times(T: int, d_k: int, heads: int, peak: float, bw: float, b: int = 2, k: int = 1,
                          softmax_flops: float = SOFTMAX_FLOPS) -> dict[str, float]:
    """Seconds of the forward pass of one attention layer: ``{"standard": s, "fused": s}``.

    Standard is the sum over `standard_kernels`, each at its own roofline; fused is `fused_kernel` at its. No mask is discounted.

    Args:
        T, d_k, heads, b, k, softmax_flops: as of `standard_kernels`.
        peak, bw: of the device, FLOP/s and bytes/s.

    >>> {n: f"{1e3 * s:.1f} ms" for n, s in attention_layer_times(8192, 128, 32, 312e12, 2.039e12).items()}     # Llama 3 8B, A100
    {'standard': '8.6 ms', 'fused': '3.5 ms'}
    """
    standard = sum(x.seconds(peak, bw) for x in standard_kernels(T, d_k, heads, b, k, softmax_flops))
    return {"standard": standard, "fused": fused_kernel(T, d_k, heads, b).seconds(peak, bw)}


def measure(call: Callable[[], object], times: int = 10) -> dict[str, float]:
    """Seconds on the GPU of the operations of one call, by name: what `plot` of a report takes as `measured`.

    The call runs once to warm up and then several times under PyTorch's profiler. The kernels of an operation are summed over its occurrences in
    one call, and the operations are those that `attnfuse.traffic` counts by, without their namespace: ``bmm``, ``_softmax``, ``copy_``. Our own
    forward kernels are ``fused``; what no operation launched (kernels of inductor) is ``other``.

    Args:
        call: what is measured. It is run ``times + 1`` times and may return anything.
        times: how many calls are averaged.

    Returns:
        Seconds of one call by name, the longest first.

    Raises:
        ValueError: there is no CUDA device; `times` is not positive.
        RuntimeError: the profiler saw no kernel.
    """
    from .measuring import measure as measured       # imports torch
    return measured(call, times)


# ---- the picture

def plot(kernels: Sequence[Kernel], peak: float, bw: float, path: str | os.PathLike[str] | None = None, *, title: str = "",
         axes: Any = None) -> Any:
    """Draw kernels under a device's roofline: FLOPs a byte against FLOP/s, both logarithmic.

    Predicted kernels stand on the roof, as open circles; measured ones where they were, filled, with a line down from what was possible.
    Kernels of one intensity share a label, with a line for each where they were measured. Points without arithmetic or traffic cannot be drawn and are left out.

    Args:
        kernels: the points.
        peak, bw: FLOP/s and bytes/s of the device.
        path: a file to write, of any kind that matplotlib knows.
        title: above the picture.
        axes: matplotlib's, to draw into; by default of a new figure.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not there (``pip install attnfuse[plot]``).
        ValueError: no kernel can be drawn.
    """
    drawn = [x for x in kernels if 0 < x.intensity < math.inf]
    if not drawn:
        raise ValueError("no kernel with both arithmetic and traffic to draw")
    axes = axes if axes is not None else _new_axes()
    ridge = ridge_point(peak, bw)
    left = min(0.5, *(x.intensity / 3 for x in drawn))
    right = max(20 * ridge, *(x.intensity * 20 for x in drawn))
    axes.plot([left, ridge, right], [left * bw, peak, peak], color="0.25", linewidth=1.6)
    axes.axvline(ridge, color="0.7", linewidth=0.8, linestyle=":")
    groups = _together(drawn)
    bottom = _bottom(axes, groups, left, peak, bw)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, peak * 5), xlabel="FLOPs per byte of memory traffic",
             ylabel="FLOP/s", title=title)
    axes.annotate(f"ridge {ridge:.0f}", (ridge, bottom), xytext=(4, 6), textcoords="offset points", fontsize=8, color="0.45")
    slope = math.sqrt(left * ridge)
    axes.annotate(f"{bw / 1e12:.3g} TB/s", (slope, slope * bw), xytext=(-8, 6), textcoords="offset points", fontsize=8, color="0.25", ha="right")
    axes.annotate(f"{peak / 1e12:.4g} TFLOP/s", (right, peak), xytext=(-4, 6), textcoords="offset points", fontsize=8, color="0.25", ha="right")
    for n, group in enumerate(groups):
        _point(axes, group, groups[n + 1:], peak, bw, f"C{n % 10}")
    axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        axes.figure.savefig(path, dpi=130)
    return axes


def _new_axes() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("the picture needs matplotlib: pip install attnfuse[plot]") from e
    return Figure(figsize=(8, 4.8), layout="constrained").subplots()       # not pyplot's: nothing to close, no backend to choose


def _bottom(axes: Any, groups: Sequence[Sequence[Kernel]], left: float, peak: float, bw: float) -> float:
    """Where the FLOP/s begin: below every point, and far enough below the roof for the label of each group."""
    points = 72 * 0.75 * axes.figure.get_size_inches()[1]               # the height of the axes
    lowest = left * bw / 2
    for group in groups:
        roof = min(peak, group[0].intensity * bw)
        lowest = min(lowest, *(x.flops / x.measured / 2 for x in group if x.measured), roof)
        label = min(12 + 11 * len(_label(group, peak, bw).splitlines()), 0.8 * points)
        lowest = min(lowest, 10 ** ((points * math.log10(roof) - label * math.log10(peak * 5)) / (points - label)))
    return lowest


def _together(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels whose points or labels would cover one another: the same intensity within a tenth."""
    groups: list[list[Kernel]] = []
    for x in sorted(kernels, key=lambda x: x.intensity):
        if groups and x.intensity < 1.1 * groups[-1][0].intensity:
            groups[-1].append(x)
        else:
            groups.append([x])
    return groups


def _point(axes: Any, group: Sequence[Kernel], right: Sequence[Sequence[Kernel]], peak: float, bw: float, color: str) -> None:
    """The points of a group and their label: to the right of them and below the roof, or to the left and above it where points of the groups
    on the right are in the way."""
    x = group[0]
    roof = min(peak, x.intensity * bw)
    axes.plot(x.intensity, roof, "o", color=color, markersize=8, markerfacecolor="white", markeredgewidth=1.8, zorder=3)
    for one in group:
        if one.measured is not None:
            rate = one.flops / one.measured
            axes.plot([x.intensity, x.intensity], [rate, roof], color=color, linewidth=0.8)
            axes.plot(x.intensity, rate, "o", color=color, markersize=8 if len(group) == 1 else 6, markeredgecolor="white", markeredgewidth=0.6, zorder=3)
    label = _label(group, peak, bw)
    free = not any(_covers(axes, (x.intensity, roof), label, other, min(peak, other[0].intensity * bw)) for other in right)
    axes.annotate(label, (x.intensity, roof), xytext=(9, -5) if free else (-9, 5), textcoords="offset points", fontsize=8, color=color,
                  ha="left" if free else "right", va="top" if free else "bottom",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})


def _covers(axes: Any, at: tuple[float, float], label: str, group: Sequence[Kernel], roof: float) -> bool:
    """Whether a label on the right of a point, below it, would cover the points of a group or the line between them. Its size is an estimate."""
    points = lambda x, y: axes.transData.transform((x, y)) * 72 / axes.figure.dpi
    rates = [x.flops / x.measured for x in group if x.measured is not None]
    (left, top), (across, high), low = points(*at), points(group[0].intensity, roof), points(group[0].intensity, min([roof, *rates]))[1]
    lines = label.splitlines()
    return across - 6 < left + 9 + 4.7 * max(map(len, lines)) and low - 6 < top - 5 and high + 6 > top - 5 - 11 * len(lines)


def _label(group: Sequence[Kernel], peak: float, bw: float) -> str:
    """The names and what they take: together where that is predicted, a line for each where one of several was measured, the longest first."""
    times = {one: one.measured if one.measured is not None else one.seconds(peak, bw) for one in group}
    was_measured = [one.measured is not None for one in group]
    if len(group) == 1 or not any(was_measured):
        names = textwrap.wrap(", ".join(dict.fromkeys(one.name for one in group)), 34)
        return "\n".join([*names, f"{_milliseconds(sum(times.values()))}{' measured' if any(was_measured) else ''}"])
    lines = [f"{one.name}  {_milliseconds(times[one])}{'' if one.measured is not None else ' predicted'}" for one in sorted(group, key=lambda one: -times[one])]
    return "\n".join(["measured:", *lines])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"
