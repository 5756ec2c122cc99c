"""What filling bubbles leaves of them, and what ranks wait for inside actions (Optimus, table 1 and 5.3.2). Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64

from hetero_strategy.schedule.action import Action
from hetero_strategy.simulator.result import Simulation

Collective = Literal["all-gather", "reduce-scatter", "tensor parallel", "context parallel"]
"""What a rank waits for inside an action: parameters, sums of gradients, rows of the ranks that share its matmuls, keys
and values of those that share its sequences.
"""
InActions = Callable[[Action], Mapping[Collective, Float64[np.ndarray, "instances"]]]
"""Gives the seconds of an action, on every instance, in which its ranks wait for collectives."""


@dataclass(frozen=True)
class Filling:
    """A step in which modules fill bubbles, beside the same step without these modules; in seconds."""

    modules: tuple[str, ...]
    """Those that fill."""
    alone: float
    """Of the step without them."""
    step: float
    """Of the step with them."""
    work: float
    """Of a rank's actions for them, see :func:`work_on_rank`."""

    @property
    def efficiency(self) -> float:
        """Share of their work that lies in bubbles: by which the step is not longer. Negative where filling costs more
        than their work; 1 where there is none.

        Optimus' scheduling efficiency.
        """
        return 1.0 - (self.step - self.alone) / self.work if self.work > 0 else 1.0

    def __str__(self) -> str:
        return f"{self.efficiency:.0%} of the work of {' and '.join(self.modules)} in bubbles"


def work_on_rank(simulation: Simulation, modules: Collection[str]) -> float:
    """Seconds of all actions of some modules on one rank, on average over the ranks that have any of them."""
    stages = {n: stage for n, stage in simulation.schedule.graph.stages.items() if n.module in modules}
    total = sum(
        float(simulation.seconds(action).sum()) * stages[action.node].grid.shape[1]
        for action in simulation.start
        if action.node in stages
    )
    return total / max(1, len(frozenset().union(*(stage.ranks for stage in stages.values()))))


def inside_actions(simulation: Simulation, waits: InActions) -> dict[Collective, float]:
    """Seconds that a rank waits inside actions, by what it waits for, on average over all ranks.

    They are part of what a simulation counts as ``busy``. What runs beside others on a stream of its own waits for
    nothing here, and uses some of what these wait for tensor parallelism.
    """
    stages = simulation.schedule.graph.stages
    found: dict[Collective, float] = {"all-gather": 0.0, "reduce-scatter": 0.0, "tensor parallel": 0.0}
    for action in simulation.start.keys() - simulation.beside:
        for collective, seconds in waits(action).items():
            found.setdefault(collective, 0.0)
            found[collective] += float(seconds.sum()) * stages[action.node].grid.shape[1] / len(simulation.ranks)
    found["tensor parallel"] -= float(simulation.used.mean())
    return found
