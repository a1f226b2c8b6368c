"""From the plan that is preferred to one that runs, and without spilled registers: what a device or a compiler refuses costs that plan, never the call.

    steps = Steps(plans, roomier)                   # the preferred one first
    result = steps.first_that_runs(attempt)         # the refused ones leave the list

How many registers a kernel takes is known when it is compiled: `estimate` is good to about thirty, and the assembler changes from one version of
Triton to the next. So a kernel that spills gives way when that is seen.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .arguments import Unsupported
from .autotune import capturing
from .launcher import Usage, usages
from .plan import KernelPlan
from .space import TOLERATED

T = TypeVar("T")
log = logging.getLogger("attnfuse")

_REFUSALS = ("PassManager::run failed", "failed to translate module to LLVM IR", "out of resource", "too many resources requested")
"""What Triton's passes and CUDA's launcher say in a RuntimeError."""


@dataclass
class Steps:
    """The plans of a kernel that were not refused yet, the preferred one first, and why the last one was.

    `roomier` gives those that may follow one whose kernel spills, as of `space.roomier`; none follow the one that was `measured`, for it was the fastest.
    """

    plans: list[KernelPlan]
    roomier: Callable[[KernelPlan], Sequence[KernelPlan]] = lambda _: ()
    refusal: str = ""
    measured: KernelPlan | None = None

    def first_that_runs(self, attempt: Callable[[KernelPlan], T]) -> T:
        """What the first plan gives that is not refused, or where its kernel spills a roomier one's. Those that are refused are not tried again. While
        a CUDA graph is captured, where everything that runs is recorded, the first one stays.

        Raises:
            Unsupported: all of them are, now or at an earlier call.
        """
        while self.plans:
            preferred = self.plans[0]
            try:
                result, usage = _watched(attempt, preferred)
            except Exception as problem:
                if not refused(problem):
                    raise
                self.refusal = f"{type(problem).__name__}: {str(problem)[:200]}"
                log.info("the plan %s was refused: %s", self.plans.pop(0), self.refusal)
                continue
            if usage.spills and preferred is not self.measured and not capturing():
                return self._without_spills(attempt, result, usage)
            return result
        raise Unsupported(f"no plan of a kernel was accepted ({self.refusal})")

    def _without_spills(self, attempt: Callable[[KernelPlan], T], result: T, usage: Usage) -> T:
        """What the plan gives that spills least, of those tried until one is good enough; the preferred one gave `result`. Whatever a trial fails of, out
        of memory say, costs that plan alone."""
        preferred = best = last = self.plans[0]
        least = usage.spills
        for plan in self.roomier(preferred):
            if not worth(plan, preferred, usage, least):
                continue
            last = plan
            try:
                result, found = _watched(attempt, plan)
            except Exception as problem:
                if "illegal memory access" in str(problem):
                    raise               # the context is lost: no later kernel can run
                log.info("the plan %s is left out: %s: %s", plan, type(problem).__name__, str(problem)[:200])
                continue
            if found.spills < least:
                best, least = plan, found.spills
        if best is not preferred:
            log.info("the plan %s spills %d bytes a thread: %s, which spills %d, is taken", preferred, usage.spills, best, least)
            self.plans.insert(0, best)
        return result if last is best else attempt(best)        # so that what was written last is its

    def prefer(self, winner: KernelPlan | None) -> None:
        """Put a plan that was measured in front."""
        if winner is not None:
            self.plans, self.measured = [winner, *(p for p in self.plans if p.shape != winner.shape)], winner


def _watched(attempt: Callable[[KernelPlan], T], plan: KernelPlan) -> tuple[T, Usage]:
    """What a plan gives, and what its kernel takes."""
    with usages() as found:
        return attempt(plan), max(found, key=lambda u: u.spills, default=Usage(0, 0))


def worth(plan: KernelPlan, preferred: KernelPlan, usage: Usage, least: int) -> bool:
    """Whether a roomier plan is to be tried where the preferred one's kernel takes what `usage` says and the best so far spills `least` bytes: smaller
    tiles if that is more than is tolerated; the same with registers that it did not have at once, unless it was kept from them."""
    if plan.shape != preferred.shape:
        return least > TOLERATED
    return usage.registers < plan.most_registers and (not preferred.most_registers or least > TOLERATED)


def refused(problem: Exception) -> bool:
    """Whether the device did not hold a kernel, or the compiler failed on it, so that another plan may do."""
    from triton.runtime.errors import OutOfResources, PTXASError

    return isinstance(problem, (OutOfResources, PTXASError)) or \
        isinstance(problem, RuntimeError) and any(text in str(problem) for text in _REFUSALS)
