"""Pictures of results: `python -m bench.plot` reads results/forward.csv and writes results/forward.png, bars of TFLOP/s beside the peers;
`python -m bench.plot variants [folder]` reads variants.csv and writes variants.png, how much longer the peers take."""
from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)

from bench.common import RESULTS, forward_flops  # noqa: E402

PEERS = {"inductor": "inductor, same code", "flex": "FlexAttention", "flex_max": "FlexAttention, max-autotune"}
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


def variants(folder: Path = RESULTS) -> None:
    """A panel for each pass, a group of bars for each variant: the peers' times over attnfuse's, so that above 1 attnfuse is faster."""
    with open(folder / "variants.csv") as f:
        title = f.readline().strip("# \n")
        rows = list(csv.DictReader(f))
    passes = list(dict.fromkeys(r["pass"] for r in rows))
    peers = {n: label for n, label in PEERS.items() if any(r.get(f"{n}/attnfuse") for r in rows)}
    figure, panels = plt.subplots(len(passes), 1, figsize=(10, 3.2 * len(passes)), squeeze=False)
    for axes, step in zip(panels[:, 0], passes, strict=True):
        own = [r for r in rows if r["pass"] == step]
        for k, (name, label) in enumerate(peers.items()):
            found = [(n + (k - (len(peers) - 1) / 2) * 0.8 / len(peers), float(r[f"{name}/attnfuse"])) for n, r in enumerate(own) if r.get(f"{name}/attnfuse")]
            axes.bar([p for p, _ in found], [r - 1.0 for _, r in found], 0.76 / len(peers), bottom=1.0, label=label, linewidth=0)
            for x, y in found:
                axes.text(x, y * (1.05 if y > 1 else 0.95), f"{y:.2f}" if y < 2 else f"{y:.2g}" if y < 100 else f"{y:.0f}", ha="center", va="bottom" if y > 1 else "top", fontsize=6)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.3, high * 2.0)           # room for the numbers and the legend
        axes.set_xlim(-0.6, len(own) - 0.4)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xticks(range(len(own)), [r["variant"].replace(", ", ",\n") for r in own], fontsize=7)
        axes.set_ylabel(f"time / attnfuse's\n{step}", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_title(title, fontsize=9)
    panels[0, 0].legend(frameon=False, ncols=3, fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(folder / "variants.png", dpi=130)


if __name__ == "__main__":
    if sys.argv[1:2] == ["variants"]:
        variants(*map(Path, sys.argv[2:3]))
    else:
        main()
