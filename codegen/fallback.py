"""From the plan that is preferred to one that runs: what a device or a compiler refuses costs that plan, never the call.

    steps = Steps(plans)                            # the preferred one first
    result = steps.first_that_runs(attempt)         # the refused ones leave the list
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from .arguments import Unsupported
from .plan import KernelPlan

T = TypeVar("T")
log = logging.getLogger("attnfuse")

_REFUSALS = ("PassManager::run failed", "failed to translate module to LLVM IR", "out of resource", "too many resources requested")
"""What Triton's passes and CUDA's launcher say in a RuntimeError."""


@dataclass
class Steps:
    """The plans of a kernel that were not refused yet, the preferred one first, and why the last one was."""

    plans: list[KernelPlan]
    refusal: str = ""

    def first_that_runs(self, attempt: Callable[[KernelPlan], T]) -> T:
        """What the first plan gives that is not refused; those that are, are not tried again.

        Raises:
            Unsupported: all of them are, now or at an earlier call.
        """
        while self.plans:
            try:
                return attempt(self.plans[0])
            except Exception as problem:
                if not refused(problem):
                    raise
                self.refusal = f"{type(problem).__name__}: {str(problem)[:200]}"
                log.info("the plan %s was refused: %s", self.plans.pop(0), self.refusal)
        raise Unsupported(f"no plan of a kernel was accepted ({self.refusal})")

    def prefer(self, winner: KernelPlan | None) -> None:
        """Put a plan that was measured in front."""
        if winner is not None:
            self.plans = [winner, *(p for p in self.plans if p.shape != winner.shape)]


def refused(problem: Exception) -> bool:
    """Whether the device did not hold a kernel, or the compiler failed on it, so that another plan may do."""
    from triton.runtime.errors import OutOfResources, PTXASError

    return isinstance(problem, (OutOfResources, PTXASError)) or \
        isinstance(problem, RuntimeError) and any(text in str(problem) for text in _REFUSALS)
