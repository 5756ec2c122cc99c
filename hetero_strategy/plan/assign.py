"""From what was chosen for each unit of a module to what its instances compute in each microbatch. Pure."""

from __future__ import annotations

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.plan.step_plan import Assignment


def members_of(group: np.ndarray, groups: int) -> list[np.ndarray]:
    """Units of each group, ascending."""
    if groups == 1:
        return [np.arange(len(group))]
    order, offsets = ragged.group_by(group, groups)
    return np.split(order, offsets[1:-1])


def assignments_of(
    group: np.ndarray,
    groups: int,
    instance_of: np.ndarray,
    of_step: np.ndarray,
    rows: np.ndarray,
    inner_rows: np.ndarray,
    instances: int,
    multiple: int,
) -> tuple[Assignment, ...]:
    """Put together what every instance computes in each microbatch, from what was chosen for each unit."""
    assignments = []
    for members in members_of(group, groups):
        order, offsets = ragged.group_by(instance_of[members], instances)
        units = members[order].astype(np.int64)
        inside = inner_rows[units].astype(np.int64)
        padding = np.zeros(instances, np.int64)
        if multiple > 1:  # at least one alignment row per rank, so that no rank works on nothing
            totals = np.diff(ragged.offsets(inside)[offsets])
            padding = np.maximum(-(-totals // multiple), 1) * multiple - totals
        steps = of_step[units]
        first, last = (int(steps.min()), int(steps.max())) if len(units) else (0, 0)
        assignments.append(Assignment(units, rows[units].astype(np.int64), inside, offsets, padding, first, last))
    return tuple(assignments)
