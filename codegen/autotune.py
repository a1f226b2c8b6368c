"""Measuring the few plans that are predicted fastest, once, and keeping the winner for later processes.

    key = Key.of(spec, "", class_, device)
    winner = choose(key, plans, attempt)          # a plan, or None: take the predicted one

A winner is kept for a device by name, the versions of what compiles, the generator's fingerprint, the attention, the kernel and the class of
shapes. A file is believed only if it is whole and names a shape that is offered now. Nothing is timed while a CUDA graph is
captured. What a plan computes is compared with what the first one computed: one that differs is left out.

Invariant: trials write into memory of their own and draw no random numbers; what fails in a trial costs that plan, not the call.
"""
from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..spec import AttentionSpec
from . import cache, header
from .plan import KernelPlan
from .tables import Shape

MOST = 5
"""Plans that are timed."""
_LIMIT_MS = 25.0
"""About how long one plan is repeated."""
_FLUSH = 256 * 2 ** 20
"""Bytes written between two runs, more than the caches of any GPU hold."""

Attempt = Callable[[KernelPlan], tuple[Callable[[], object], Sequence[torch.Tensor]]]
"""Binds a plan: what runs it once more, and the results of a first run."""
Timer = Callable[[Callable[[], object]], float]

log = logging.getLogger("attnfuse")
_winners: dict[str, Shape | None] = {}


@dataclass(frozen=True)
class Key:
    """What a measurement holds for; `digest` names its file."""

    device: str
    facts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, spec: AttentionSpec, job: str, sizes: object, device: str) -> Key:
        """Of an attention's kernel `job` (empty: forward) for a class of shapes on a device with this name."""
        facts = {"spec": spec.to_json(), "kernel": job or "forward", "class": repr(sizes), "generator": cache.fingerprint(), **header.versions()}
        return cls(device, tuple(sorted(facts.items())))

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits."""
        return hashlib.sha256(repr((self.device, self.facts)).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Of the file."""
        return f"tuned_{self.digest}.json"


def choose(key: Key, plans: Sequence[KernelPlan], attempt: Attempt, tolerance: float, time: Timer | None = None) -> KernelPlan | None:
    """The fastest of the first few plans: from an earlier measurement, else by timing them now.

    Args:
        key: what the measurement holds for. plans: best first.
        attempt: see `Attempt`; what it raises leaves the plan out.
        tolerance: the relative error to the first plan's results beyond which a plan is left out.
        time: milliseconds of a run.

    Returns:
        None where nothing is known and nothing may be timed, or no plan ran: the caller goes through the plans in their own order.
    """
    offered = {p.shape: p for p in plans[:MOST]}
    if key.digest not in _winners:
        found = recall(key)
        if found not in offered:
            if capturing():
                return None
            found = _measure(key, list(offered.values()), attempt, tolerance, time or timer)
        _winners[key.digest] = found
    winner = _winners[key.digest]
    return None if winner is None else offered.get(winner)


def _measure(key: Key, plans: Sequence[KernelPlan], attempt: Attempt, tolerance: float, time: Timer) -> Shape | None:
    times = timings(plans, attempt, tolerance, time)
    if not times:
        return None
    winner = min(times, key=lambda s: times[s])
    log.info("autotune: %s on %s: %s", dict(key.facts)["kernel"], key.device, ", ".join(f"{s}: {t:.4g} ms" for s, t in times.items()))
    remember(key, winner, times)
    return winner


def timings(plans: Sequence[KernelPlan], attempt: Attempt, tolerance: float, time: Timer) -> dict[Shape, float]:
    """Milliseconds of the plans that run and compute what the first one does, in the order given; arguments as of `choose`."""
    times: dict[Shape, float] = {}
    truth: Sequence[torch.Tensor] | None = None
    for plan in plans:
        try:
            run, results = attempt(plan)
            if truth is None:
                truth = [t.clone() for t in results]
            elif not all(close(a, b, tolerance) for a, b in zip(results, truth, strict=True)):
                log.warning("autotune: the plan %s computes something else than the first one and is left out", plan)
                continue
            times[plan.shape] = time(run)
        except Exception as problem:
            if "illegal memory access" in str(problem):
                raise                   # the context is lost: no later kernel can run
            log.info("autotune: the plan %s is left out: %s: %s", plan, type(problem).__name__, str(problem)[:200])
    return {s: t for s, t in times.items() if math.isfinite(t) and t > 0}


def close(found: torch.Tensor, truth: torch.Tensor, tolerance: float) -> bool:
    """Whether two results are one but for rounding, NaN and infinities in the same places."""
    if not bool((found.isnan() == truth.isnan()).all()):
        return False
    a, b = (t.float().nan_to_num(0.0, 0.0, 0.0) for t in (found, truth))
    return bool((a - b).norm() <= tolerance * b.norm() + 1e-30)


# ---- on disk

def remember(key: Key, winner: Shape, times: dict[Shape, float]) -> None:
    """Write a measurement; what cannot be written holds for this process only, said once by `cache`."""
    facts = dict(key.facts)
    del facts["spec"]
    text = json.dumps({"device": key.device, **facts, "winner": list(winner), "milliseconds": [[*s, t] for s, t in times.items()]}, indent=1)
    try:
        cache.keep(key.name, text + "\n")
    except OSError as problem:
        warnings.warn(f"attnfuse cannot keep what it measured ({problem})", RuntimeWarning, stacklevel=2)


def recall(key: Key) -> Shape | None:
    """The winner of an earlier measurement for exactly this key; None for a file that is not there, damaged, or of something else."""
    text = cache.kept(key.name)
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("device") != key.device:
        return None
    if any(found.get(n) != v for n, v in key.facts if n != "spec"):
        return None
    winner = found.get("winner")
    if not isinstance(winner, list) or len(winner) != 4 or any(type(x) is not int for x in winner):
        return None
    return winner[0], winner[1], winner[2], winner[3]


def forget() -> None:
    """Forget what this process knows; files stay."""
    _winners.clear()


# ---- on a GPU

def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream, where nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def on_gpu(run: Callable[[], object]) -> float:
    """Milliseconds of a run, the median of several, each with cold caches."""
    flush = torch.empty(_FLUSH, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    once = _between(run)
    times = []
    for _ in range(max(5, min(100, int(_LIMIT_MS / max(once, 1e-3))))):
        flush.zero_()
        times.append(_between(run))
    return sorted(times)[len(times) // 2]


def _between(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


timer: Timer = on_gpu
"""How runs are timed: tests put another in its place."""


def on(device: torch.device) -> AbstractContextManager[object]:
    """The context in which a device is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def tolerance(spec: AttentionSpec) -> float:
    """The relative error that the dtypes of an attention explain between two plans."""
    names = [spec.out_dtype, *(spec.operands[a.operand].dtype for a in (spec.query, spec.key, spec.value))]
    return 2e-2 if any(n != "float32" for n in names) else 2e-3


def possible(device: torch.device) -> bool:
    """Whether runs on this device can be timed."""
    return device.type == "cuda" or timer is not on_gpu
