"""Costs of actions, fitted to what was measured, for the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy.optimize import nnls

from hetero_strategy.schedule.action import Action, Kind, Schedule, StageId
from hetero_strategy.schedule.graph import PlannedCosts


class TimedAction(NamedTuple):
    """One action that ran."""

    node: StageId
    kind: Kind
    flops: float
    """Planned for the instance that was measured; 0 for UNSHARD and REDUCE."""
    seconds: float


Scatter = Mapping[tuple[StageId, Kind], Float64[np.ndarray, "_actions"]]
"""(stage, kind) -> measured over fitted seconds of its actions."""


class Profile:
    """Seconds of every kind of action of every stage, as ``a + b * FLOPs`` with both at least 0.

    They are fitted to samples of any number of steps and ranks by least squares. Samples that take more than twice the
    median of measured over predicted time are left out: a process that lost the processor for a moment says nothing
    about the action.
    """

    def __init__(self, samples: Iterable[TimedAction]) -> None:
        self._lines = {key: _fit(points) for key, points in _points(samples).items()}

    def costs(self, planned: PlannedCosts, action: Action) -> Float64[np.ndarray, "instances"] | float:
        """Seconds of an action on every instance; what was never measured costs nothing."""
        constant, slope = self._lines.get((action.node.all_instances, action.kind), (0.0, 0.0))
        if action.microbatch < 0:
            return constant
        return constant + slope * planned.of_instances(action)

    def scatter(self, samples: Iterable[TimedAction]) -> Scatter:
        """Divide samples by what their lines predict."""
        found = {}
        for key, points in _points(samples).items():
            constant, slope = self._lines[key]
            line = constant + slope * points[:, 0]
            found[key] = np.divide(points[:, 1], line, out=np.ones(len(line)), where=line > 0)
        return found

    def drawn(
        self,
        planned: PlannedCosts,
        schedule: Schedule,
        scatter: Scatter,
        random: np.random.Generator,
        synchronous: Collection[StageId] = (),
    ) -> dict[Action, Float64[np.ndarray, "_instances"]]:
        """Draw costs of all actions of a schedule, on every instance, that scatter around their lines.

        Each instance is drawn by itself, except where all do an action together: UNSHARD, REDUCE, ``synchronous``
        stages.
        """
        costs = {}
        for action in dict.fromkeys(action for lane in schedule.lanes for action in lane.actions):
            instances = len(schedule.graph.stages[action.node].grid)
            as_one = action.microbatch < 0 or action.node in synchronous
            ratios = scatter.get((action.node.all_instances, action.kind), np.ones(1))
            count = 1 if as_one else instances
            factor = random.choice(ratios, count, replace=count > len(ratios))
            costs[action] = np.broadcast_to(self.costs(planned, action) * factor, instances)
        return costs


def _points(samples: Iterable[TimedAction]) -> dict[tuple[StageId, Kind], np.ndarray]:
    """(stage, kind) -> (FLOPs, seconds) of its samples, float64 ``[n, 2]``."""
    found: dict[tuple[StageId, Kind], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        found[sample.node, sample.kind].append((sample.flops, sample.seconds))
    return {key: np.array(points) for key, points in found.items()}


def _fit(points: np.ndarray) -> tuple[float, float]:
    """Fit a line to points (FLOPs, seconds), ``[n, 2]``, without outliers."""
    constant, slope = fit_line(points)
    predicted = constant + slope * points[:, 0]
    ratio = points[:, 1] / np.maximum(predicted, 1e-12)
    usual = points[ratio <= 2 * np.median(ratio)]
    return fit_line(usual if len(usual) else points)


def fit_line(points: Float64[np.ndarray, "points 2"]) -> tuple[float, float]:
    """Constant and slope, both at least 0, of the least-squares line through points."""
    unit = points[:, 0].max(initial=0.0) or 1.0
    matrix = np.stack([np.ones(len(points)), points[:, 0] / unit], axis=1)
    (constant, slope), _ = nnls(matrix, points[:, 1])
    return float(constant), float(slope / unit)
