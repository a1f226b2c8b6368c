"""A GPT of 10 million parameters learns bytes of Python's own standard library: eager and fused, from one seed.

    python -m bench.train_gpt [--device cpu|cuda] [--steps 300] [--layers 6] [--folder bench/results]

Four runs of the same model on the same batches: as written and fused, without dropout and with 0.1 (of the weights, and behind
every layer); and a fifth, eager with other dropout masks, whose distance from the first eager run is what chance makes. AdamW, bfloat16
autocast on a GPU, float32 on a CPU. Writes every loss to train_gpt.csv, the ends to train_gpt_summary.csv, and train_gpt.png.
"""
from __future__ import annotations

import argparse
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnfuse
from bench.common import RESULTS, header, save

BYTES = 4 * 2 ** 20


class Attention(nn.Module):
    """Causal attention as it circulates: a buffer of ones for the mask, dropout of the weights and of the result."""

    mask: Tensor

    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop_weights, self.drop_result = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.size()
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (y.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for y in (q, k, v))
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, float("-inf"))
        weights = self.drop_weights(F.softmax(weights, dim=-1))
        y = (weights @ v).transpose(1, 2).contiguous().view(batch, tokens, width)
        return self.drop_result(self.out(y))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a normalisation and beside a residual."""

    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, length, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    """ids [batch, tokens + 1] → the mean loss of each next byte."""

    def __init__(self, width: int, heads: int, layers: int, length: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, length, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.size(1) - 1
        x = self.drop(self.tokens(ids[:, :-1]) + self.places(torch.arange(tokens, device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids[:, 1:].flatten())


def text() -> Tensor:
    """The first bytes of the standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(f.read_bytes() for f in files)[:BYTES]
    if len(data) < 2 ** 20:
        raise SystemExit("this Python has no sources of its standard library")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def draw(data: Tensor, batch: int, length: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Random windows."""
    starts = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
    return torch.stack([data[s:s + length + 1] for s in starts.tolist()]).long().to(device)


@dataclass(frozen=True)
class Setup:
    """What all runs share."""

    device: torch.device
    steps: int
    layers: int
    width: int
    heads: int
    length: int
    batch: int
    seed: int


def train(program: str, dropout: float, masks: int, setup: Setup, data: Tensor) -> tuple[list[float], dict[str, Any]]:
    """One run: the losses of all steps, and its end. `masks` seeds the dropout alone; weights and batches have the seed of the setup."""
    torch._dynamo.reset()
    torch.manual_seed(setup.seed)
    model = Gpt(setup.width, setup.heads, setup.layers, setup.length, dropout).to(setup.device)
    if program == "attnfuse":
        attnfuse.optimize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=min(50, setup.steps))
    generator = torch.Generator().manual_seed(setup.seed)
    cut = len(data) * 9 // 10
    autocast = lambda: torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.device.type == "cuda")
    losses, began = [], time.perf_counter()
    torch.manual_seed(masks)
    for step in range(setup.steps):
        if step == setup.steps // 10:                  # compiled and warm
            settle(setup.device)
            began = time.perf_counter()
        with autocast():
            loss = model(draw(data[:cut], setup.batch, setup.length, generator, setup.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        losses.append(loss.detach().float())
    settle(setup.device)
    seconds = (time.perf_counter() - began) / (setup.steps - setup.steps // 10)
    report = attnfuse.last_report(model) if program == "attnfuse" else None
    if program == "attnfuse" and (report is None or report.rewritten < setup.layers):
        raise SystemExit(f"not every attention was rewritten:\n{report}")
    model.eval()
    generator.manual_seed(setup.seed + 1)
    with torch.no_grad(), autocast():
        # Eager for all: one yardstick for the weights that came of it.
        held = torch.stack([model.forward(draw(data[cut:], setup.batch, setup.length, generator, setup.device)).float() for _ in range(20)]).cpu()
    last = torch.stack(losses[-max(1, setup.steps // 10):]).cpu()
    end = {"parameters": sum(p.numel() for p in model.parameters()), "steps": setup.steps, "last_tenth": round(float(last.mean()), 4),
           "held_out": round(float(held.mean()), 4), "held_out_error": round(float(held.std()) / len(held) ** 0.5, 4),
           "ms_a_step": round(1e3 * seconds, 2)}
    return torch.stack(losses).cpu().tolist(), end


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def plot(curves: dict[tuple[str, float], list[float]], file: Path) -> None:
    """Left without dropout, right with it; below, how far a run is from eager."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {"eager": ("C1", 3.5, 0.45), "attnfuse": ("C0", 1.0, 1.0), "eager, other masks": ("C2", 1.0, 0.8)}
    figure, axes = plt.subplots(2, 2, figsize=(10, 5), sharex=True, sharey="row", height_ratios=(3, 1))
    for column, dropout in enumerate(dict.fromkeys(p for _, p in curves)):
        for name in (n for n, p in curves if p == dropout):
            colour, thickness, alpha = styles[name]
            axes[0, column].plot(curves[name, dropout], color=colour, linewidth=thickness, alpha=alpha, label=name)
            if name != "eager":
                apart = [a - b for a, b in zip(curves[name, dropout], curves["eager", dropout], strict=True)]
                axes[1, column].plot(apart, color=colour, linewidth=1.0, alpha=alpha)
        axes[0, column].set_title(f"dropout {dropout:g}", fontsize=10)
        axes[0, column].legend(frameon=False)
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("less eager")
    for part in axes.flat:
        part.spines[["top", "right"]].set_visible(False)
    figure.suptitle(header(), fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    """Do the runs, write the tables and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("steps", 300), ("layers", 6), ("width", 384), ("heads", 6), ("length", 256), ("batch", 32), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    setup = Setup(torch.device(given.device), given.steps, given.layers, given.width, given.heads, given.length, given.batch, given.seed)
    data = text()
    curves: dict[tuple[str, float], list[float]] = {}
    ends: list[dict[str, Any]] = []
    runs = [("eager", 0.0, 1), ("attnfuse", 0.0, 1), ("eager", 0.1, 1), ("attnfuse", 0.1, 1), ("eager, other masks", 0.1, 2)]
    for name, dropout, masks in runs:
        curves[name, dropout], end = train(name, dropout, setup.seed + masks, setup, data)
        apart = [abs(a - b) for a, b in zip(curves[name, dropout], curves["eager", dropout], strict=True)]
        ends.append({"program": name, "dropout": dropout, **end, "mean_distance_from_eager": round(sum(apart) / len(apart), 5),
                     "largest_distance": round(max(apart), 5)})
        print(ends[-1], flush=True)
    rows = [{"program": n, "dropout": p, "step": s, "loss": round(x, 5)} for (n, p), losses in curves.items() for s, x in enumerate(losses)]
    save("train_gpt", rows, given.folder)
    save("train_gpt_summary", ends, given.folder)
    plot(curves, given.folder / "train_gpt.png")


if __name__ == "__main__":
    main()
