"""The demonstration: a GPT-2 small with random weights, as written, through inductor, and with its attention fused.

`attnfuse demo` prints what was found, the error against float64, and time and peak extra memory of one forward that
returns the logits of the last position. It needs no GPU; with one it runs there, in bfloat16.

Invariant: every number printed was measured in this run; what could not be measured is named and left out.
"""
from __future__ import annotations

import contextlib
import copy
import ctypes
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .api import explain, last_report, optimize

Program = Callable[..., Tensor]
"""input_ids [batch, tokens] → logits of the last position [batch, vocabulary]."""

PROGRAMS = ("eager", "inductor", "fused")
HEADER = f"  {'tokens':>6}  {'program':<9} {'time':>12} {'/ eager':>9} {'peak extra':>13} {'/ eager':>9}   {'first call':>8}"
FOOTER = "Time: the fastest forward after the first. Peak extra: memory in use at its highest, less what was in use before."


@dataclass(frozen=True)
class Measured:
    """One program at one length; `seconds` is the fastest forward, `first` the first call with its compilation, `extra`
    the peak of memory above what was in use before the forward (None where it can't be read), `passes` the seconds in our passes."""

    program: str
    tokens: int
    seconds: float
    first: float
    extra: int | None
    passes: float | None = None


# ---- models

class PlainGPT(nn.Module):
    """GPT-2 small in plain PyTorch, for machines without transformers; attention as three products and a masked softmax."""

    def __init__(self, tokens: int, layers: int = 12, heads: int = 12, width: int = 768, vocabulary: int = 50257) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.h = nn.ModuleList(PlainBlock(heads, width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [batch, tokens] → logits [batch, vocabulary]"""
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x[:, -1]) @ self.wte.weight.t()


class PlainBlock(nn.Module):
    """One layer: attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, width] → the same shape"""
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(c // self.heads)
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class LastLogits(nn.Module):
    """A Hugging Face language model as a function of the tokens, giving the logits of the last position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [batch, tokens] → logits [batch, vocabulary]"""
        return self.model(input_ids, use_cache=False, logits_to_keep=1).logits[:, -1]


def build(tokens: int, layers: int = 12) -> tuple[nn.Module, str]:
    """A GPT-2 small for up to `tokens` positions, random weights from seed 0, and a sentence that says what it is."""
    torch.manual_seed(0)
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        model: nn.Module = PlainGPT(tokens, layers)
        return model.eval(), f"GPT-2 small written in plain PyTorch ({layers} layers, random weights)"
    config = GPT2Config(n_positions=tokens, n_layer=layers)
    config._attn_implementation = "eager"
    return LastLogits(GPT2LMHeadModel(config)).eval(), f"GPT-2 small of transformers, eager attention ({layers} layers, random weights)"


def twin(model: nn.Module) -> nn.Module:
    """A copy of a module that shares its parameters and buffers, so that three programs need one set of weights."""
    shared = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(t): t for t in shared})


def program(model: nn.Module, name: str, inner: str = "inductor") -> Program:
    """The model as one of `PROGRAMS`; shapes are static, so that each length gets its own code."""
    if name == "eager":
        return model
    if name == "inductor":
        return torch.compile(twin(model), dynamic=False)
    return optimize(twin(model), inner=inner, dynamic=False)


# ---- measuring

def _status(field: str) -> int | None:
    """A line of /proc/self/status in bytes; None where there is no such file."""
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def peak_extra(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes by which memory in use peaked above its level before `run`.

    CUDA: the allocator's own count. CPU: the resident set's high-water mark, which Linux lets a process reset; this sees
    scratch memory of every library too. Memory that malloc holds back is returned first. None elsewhere.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        run()
        return None
    before_cpu = _status("VmRSS")
    run()
    after = _status("VmHWM")
    return None if before_cpu is None or after is None else max(0, after - before_cpu)


def clock(run: Callable[[], object], device: torch.device) -> float:
    """Seconds for one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, call: Program, ids: Tensor, repeats: int = 2) -> tuple[Measured, Tensor]:
    """A first call, then `repeats` more: the fastest of those counts, and memory is read during one. Also the logits."""
    times: list[float] = []
    logits: list[Tensor] = []

    def once() -> None:
        times.append(clock(lambda: logits.append(call(ids)), ids.device))

    before = pass_seconds(call)
    with torch.no_grad():
        first = clock(lambda: call(ids), ids.device)
        extra = peak_extra(once, ids.device)
        for _ in range(repeats - 1):
            once()
    passes = pass_seconds(call) - before if name == "fused" else None
    return Measured(name, ids.shape[1], min(times), first, extra, passes), logits[0]


def pass_seconds(call: Program) -> float:
    """Seconds spent so far in our passes for a program; 0 for one that is not fused."""
    try:
        report = last_report(call) if isinstance(call, nn.Module) else None
    except ValueError:
        return 0.0
    return report.seconds if report else 0.0


def why_not(error: BaseException) -> str:
    """One line on why a program is left out of the comparison."""
    text = f"{type(error).__name__}: {error}"
    if "cxx" in text.lower() or "c++ compiler" in text.lower():
        return "inductor found no C++ compiler"
    return text.splitlines()[0][:100]


# ---- the demonstration

def tokens_of(length: int, device: torch.device) -> Tensor:
    """[1, length] random token ids, the same for every program."""
    return torch.randint(0, 50257, (1, length), generator=torch.Generator().manual_seed(length)).to(device)


def relative_errors(model: nn.Module, ids: Tensor, logits: dict[str, Tensor]) -> dict[str, float]:
    """Relative Frobenius error of each program's logits to the same weights in float64."""
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids)
    return {name: ((found.double() - exact).norm() / exact.norm()).item() for name, found in logits.items()}


def _row(m: Measured, eager: Measured | None) -> str:
    ratio = f"{m.seconds / eager.seconds:.2f}" if eager else "-"
    extra = "not measured" if m.extra is None else f"{m.extra / 2**20:.0f} MiB"
    part = f"{m.extra / eager.extra:.2f}" if eager and eager.extra and m.extra is not None else "-"
    return f"  {m.tokens:>6}  {m.program:<9} {m.seconds * 1e3:>9.1f} ms {ratio:>9} {extra:>13} {part:>9}   {m.first:>6.1f} s"


def main(lengths: Sequence[int] = (1024, 4096), quick: bool = False, say: Callable[[str], None] = print) -> int:
    """Run the demonstration and print it; returns a process's exit status. `quick`: two layers, and inductor left out."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    model, what = build(max(lengths), 2 if quick else 12)
    model = model.to(device, dtype)
    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    say(f"{what}\non {where}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}\n")
    short = tokens_of(min(lengths), device)
    with torch.no_grad(), quiet():
        say(f"{explain(model, short)}\n")
    inner = "eager" if quick else usable_inner(say)
    names = [p for p in PROGRAMS if p != "inductor" or inner == "inductor"]
    say(HEADER)
    error: dict[str, float] = {}
    with quiet():
        for length in lengths:
            ids = tokens_of(length, device)
            found = compare(model, ids, inner, names, say)
            if length == min(lengths):
                error = relative_errors(model, ids, found)
    say(f"{FOOTER}\n\nError of the logits against float64, {min(lengths)} tokens (relative, Frobenius norm):")
    for name, value in error.items():
        say(f"  {name:<9} {value:.2e}")
    return 0


def compare(model: nn.Module, ids: Tensor, inner: str, names: Sequence[str], say: Callable[[str], None]) -> dict[str, Tensor]:
    """Measure the programs at one length and print a row for each; returns their logits."""
    eager: Measured | None = None
    repeats = 10 if ids.is_cuda else 2 if ids.shape[1] <= 2048 else 1
    logits: dict[str, Tensor] = {}
    for name in names:
        try:
            found, logits[name] = measure(name, program(model, name, inner), ids, repeats)
        except Exception as e:  # one program that fails must not hide the others
            say(f"  {ids.shape[1]:>6}  {name:<9} left out: {why_not(e)}")
            continue
        eager = found if name == "eager" else eager
        say(_row(found, eager))
    return logits


def usable_inner(say: Callable[[str], None]) -> str:
    """``"inductor"`` where it can compile here, else ``"eager"`` with a line that says why."""
    try:
        with torch.no_grad(), quiet():
            device = "cuda" if torch.cuda.is_available() else "cpu"
            torch.compile(lambda x: x.sin() + 1, dynamic=False)(torch.ones(8, device=device))
    except Exception as e:
        say(f"Without inductor, because it can't compile here ({why_not(e)}): the rest of the graph runs as written.\n")
        return "eager"
    return "inductor"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of other libraries between the lines of the table."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
        yield
