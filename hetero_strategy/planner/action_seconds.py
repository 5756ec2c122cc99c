"""Seconds of the actions of one planned step. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.schedule.action import Action
from hetero_strategy.schedule.graph import sizes_of, usual

if TYPE_CHECKING:
    from hetero_strategy.planner.evaluate import Placed

BESIDE = 0.8
"""Of a wait for collectives that is left for computing beside them: they take multiprocessors and memory's bandwidth.
Not measured."""


class ActionSeconds:
    """Seconds of the actions of one step."""

    def __init__(self, plan: StepPlan, placed: Placed) -> None:
        self._times, self._stages = placed.times, placed.graph.stages
        self._sizes = {
            (name, i): sizes_of(plan, name, i) for name, parts in plan.assignments.items() for i in range(len(parts))
        }
        self._known: dict[Action, np.ndarray] = {}

    def __call__(self, action: Action) -> np.ndarray:
        """Of every instance."""
        if action not in self._known:  # asked for by the schedule, and again by its simulation
            self._known[action] = self._seconds(action)
        return self._known[action]

    def _seconds(self, action: Action) -> np.ndarray:
        times = self._times[action.node]
        if action.microbatch < 0:
            count = np.zeros(len(self._stages[action.node].grid))
            return times.seconds(action.kind, count, count)
        sizes = self._sizes[action.node.module, action.microbatch]
        return times.seconds(action.kind, *map(self._stages[action.node].own, sizes))

    def usual(self, action: Action) -> float:
        """What orders take it for, as in a run: gathers and sums count for nothing."""
        return 0.0 if action.microbatch < 0 else float(usual(action.node, self(action)[None])[0])


class Bubbles:
    """Seconds of actions in which their ranks wait for collectives of tensor parallelism; of what does not fill, those
    in which others can compute.
    """

    def __init__(self, seconds: ActionSeconds, unlinked: ActionSeconds, fills: Collection[str]) -> None:
        self._seconds, self._unlinked, self._fills = seconds, unlinked, fills

    def __call__(self, action: Action) -> np.ndarray:
        """Of every instance."""
        return self._room(action) * np.maximum(0.0, self._seconds(action) - self._unlinked(action))

    def usual(self, action: Action) -> float:
        """As orders take it."""
        return self._room(action) * max(0.0, self._seconds.usual(action) - self._unlinked.usual(action))

    def _room(self, action: Action) -> float:
        return 1.0 if action.node.module in self._fills else BESIDE
