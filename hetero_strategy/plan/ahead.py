"""Modules whose first stage has nothing trainable, which runs one step ahead of the rest. Pure.

What such a stage computes in a step for the next one is work of its own, without rows that anybody waits for: in plans
and in graphs of stages it is a module of its own, whose name ends with ``+1``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hetero_strategy.plan.step_plan import StepPlan

NEXT = "+1"


def ahead(module: str) -> str:
    """The name of what a module computes for the next step."""
    return module + NEXT


def computing(name: str) -> str:
    """The module that computes what has this name."""
    return name.removesuffix(NEXT)


def with_next(plan: StepPlan, following: StepPlan | None, modules: Collection[str], *, held: bool) -> StepPlan:
    """The plan of a step in which some modules' first stages also do their work of the step that follows.

    Args:
        following: of the next step; None: there is none.
        held: they did that of this step in the one before.
    """
    plan = replace(plan, held=frozenset(modules if held else ()))
    if following is None:
        return plan
    later = plan.microbatches
    assignments = {
        ahead(module): tuple(
            replace(one, first=one.first + later, last=one.last + later) for one in following.assignments[module]
        )
        for module in modules
    }
    loads = {ahead(module): following.loads[module] for module in modules if module in following.loads}
    return replace(
        plan,
        assignments={**plan.assignments, **assignments},
        loads={**plan.loads, **loads},
        following=following.batch,
    )
