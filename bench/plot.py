"""Bars of a benchmark's TFLOP/s beside its peers: `python -m bench.plot` reads results/forward.csv and writes results/forward.png."""
from __future__ import annotations

import csv

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)

from bench.common import RESULTS, forward_flops  # noqa: E402

NAMES = {"attnfuse": "attnfuse", "inductor": "inductor, same code", "cudnn": "cuDNN", "fa2": "FlashAttention 2"}


def main() -> None:
    """One group of bars a row."""
    with open(RESULTS / "forward.csv") as f:
        title = f.readline().strip("# \n")
        rows = list(csv.DictReader(f))
    figure, axes = plt.subplots(figsize=(9, 4))
    for k, (name, label) in enumerate(NAMES.items()):
        rate = [forward_flops(int(r["B"]), int(r["H"]), int(r["T"]), int(r["D"]), r["mask"] == "causal") / float(r[f"{name}_ms"]) / 1e9 for r in rows]
        places = [n + (k - 1.5) * 0.2 for n in range(len(rows))]
        for x, y, bar in zip(places, rate, axes.bar(places, rate, 0.19, label=label), strict=True):
            axes.text(x, y + 6, f"{y:.0f}", ha="center", fontsize=7)
            bar.set_linewidth(0)
    axes.set_xticks(range(len(rows)), [f"D={r['D']}\n{r['mask']}" for r in rows])
    axes.set_ylabel("TFLOP/s, forward, bfloat16, T=4096")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, fontsize=8, loc="upper left")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    figure.tight_layout()
    figure.savefig(RESULTS / "forward.png", dpi=130)


if __name__ == "__main__":
    main()
