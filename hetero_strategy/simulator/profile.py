"""Costs of actions from what was measured: the simulator's input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from hetero_strategy.schedule.action import Action, Kind, Schedule, StageId
from hetero_strategy.schedule.graph import PlannedCosts


class TimedForward(NamedTuple):
    """One action that ran."""

    node: StageId
    kind: Kind
    flops: float
    """Planned for the instance that was measured; 0 for UNSHARD and REDUCE."""
    seconds: float


Scatter = Mapping[tuple[StageId, Kind], np.ndarray]
"""Measured over fitted seconds, float64 ``[samples]``."""


class Profile:
    """Seconds of every kind of action of every stage, as ``a + b * FLOPs``, both at least 0.

    Fitted to the samples by least squares, after those beyond twice the median time per predicted time are left out:
    a process that lost the processor for a moment says nothing of the action.

    Args:
        samples: of any number of steps and ranks.
    """

    def __init__(self, samples: Iterable[TimedForward]) -> None:
        by_kind: dict[tuple[StageId, Kind], list[tuple[float, float]]] = defaultdict(list)
        for sample in samples:
            by_kind[sample.node, sample.kind].append((sample.flops, sample.seconds))
        self._lines = {key: _fit(np.array(found)) for key, found in by_kind.items()}

    def costs(self, planned: PlannedCosts, action: Action) -> np.ndarray | float:
        """Seconds of an action on every instance, float64 ``[instances]``; what was never measured costs nothing."""
        constant, slope = self._lines.get((action.node, action.kind), (0.0, 0.0))
        if action.microbatch < 0:
            return constant
        return constant + slope * planned.of_instances(action)

    def scatter(self, samples: Iterable[TimedForward]) -> Scatter:
        """How far samples are from their lines."""
        found: dict[tuple[StageId, Kind], list[float]] = defaultdict(list)
        for sample in samples:
            constant, slope = self._lines[sample.node, sample.kind]
            line = constant + slope * sample.flops
            found[sample.node, sample.kind].append(sample.seconds / line if line > 0 else 1.0)
        return {key: np.array(ratios) for key, ratios in found.items()}

    def drawn(
        self,
        planned: PlannedCosts,
        schedule: Schedule,
        scatter: Scatter,
        random: np.random.Generator,
        synchronous: Collection[StageId] = (),
    ) -> dict[Action, np.ndarray]:
        """Costs of all actions of a schedule, float64 ``[instances]``, each as far from its line as one of the scatter.

        Instances are drawn by themselves, but for what all of them do together: UNSHARD, REDUCE, ``synchronous`` nodes.
        """
        found = {}
        for action in dict.fromkeys(action for lane in schedule.lanes for action in lane.actions):
            instances = len(schedule.graph.stages[action.node].grid)
            as_one = action.microbatch < 0 or action.node in synchronous
            ratios = scatter.get((action.node, action.kind), np.ones(1))
            count = 1 if as_one else instances
            factor = random.choice(ratios, count, replace=count > len(ratios))
            found[action] = np.broadcast_to(self.costs(planned, action) * factor, instances)
        return found


def _fit(points: np.ndarray) -> tuple[float, float]:
    """Constant and slope of a line through ``[n, 2]`` points of (FLOPs, seconds)."""
    constant, slope = _line(points)
    predicted = constant + slope * points[:, 0]
    ratio = points[:, 1] / np.maximum(predicted, 1e-12)
    kept = points[ratio <= 2 * np.median(ratio)]
    return _line(kept if len(kept) else points)


def _line(points: np.ndarray) -> tuple[float, float]:
    unit = points[:, 0].max(initial=0.0) or 1.0
    matrix = np.stack([np.ones(len(points)), points[:, 0] / unit], axis=1)
    (constant, slope), _ = nnls(matrix, points[:, 1])
    return float(constant), float(slope / unit)
