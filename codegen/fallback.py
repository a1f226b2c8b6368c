"""From the plan that is preferred to one that runs: what a device or a compiler refuses costs that plan, never the call.

    result = first_that_runs(plans, attempt)        # plans: the preferred one first; the refused ones leave the list
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from . import autotune
from .arguments import Unsupported
from .plan import KernelPlan

T = TypeVar("T")
log = logging.getLogger("attnfuse")

_REFUSALS = ("PassManager::run failed", "failed to translate module to LLVM IR", "out of resource", "too many resources requested")
"""What Triton's passes and CUDA's launcher say in a RuntimeError."""


def first_that_runs(plans: list[KernelPlan], attempt: Callable[[KernelPlan], T]) -> T:
    """What the first plan gives that is not refused.

    Raises:
        Unsupported: all of them are.
    """
    while True:
        try:
            return attempt(plans[0])
        except Exception as problem:
            if not refused(problem):
                raise
            log.info("the plan %s was refused: %s", plans[0], str(problem)[:200])
            if len(plans) == 1:
                raise Unsupported(f"no plan of a kernel was accepted ({type(problem).__name__}: {str(problem)[:200]})") from problem
            plans.pop(0)


def refused(problem: Exception) -> bool:
    """Whether the device did not hold a kernel, or the compiler failed on it, so that another plan may do."""
    from triton.runtime.errors import OutOfResources, PTXASError

    return isinstance(problem, (OutOfResources, PTXASError)) or \
        isinstance(problem, RuntimeError) and any(text in str(problem) for text in _REFUSALS)


def preferring(winner: KernelPlan | None, plans: list[KernelPlan]) -> list[KernelPlan]:
    """The plans with a measured winner in front."""
    return plans if winner is None else [winner, *(p for p in plans if autotune.shape_of(p) != autotune.shape_of(winner))]
