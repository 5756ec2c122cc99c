"""``Replay``: how long one schedule takes with many sets of durations at once. Pure.

It is the longest path that :func:`simulate` walks action by action, with the candidates as a numpy axis: actions that
do not wait for each other run in one operation. Transfers take no time here, and the instances of a stage run an action
together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.schedule.action import Action, Kind, Schedule, StageId

BLOCK = 128
"""Candidates handled at once: their times stay in the processor's cache."""


class Replay:
    """A schedule compiled to arrays, to be made once and asked often.

    Its times equal ``simulate(schedule, costs, synchronous=<all stages>).time`` with each action's slowest instance as
    its cost. That is ``simulate(schedule, costs).time`` itself where every stage has one instance, and where the
    instances of a stage take equal time and lie in the same lanes. Elsewhere it is never less: what waits here for all
    instances waits there for some of them.

    Raises:
        ScheduleError: the lists cannot run.
    """

    def __init__(self, schedule: Schedule) -> None:
        before = {action: list(schedule.dependencies.crossing(action)) for action in schedule.starts}
        for lane in schedule.lanes:  # F before B, and I before W, of one stage: lanes have them in this sequence
            for first, second in zip(lane.actions, lane.actions[1:], strict=False):
                if first not in before[second]:
                    before[second].append(first)
        level: dict[Action, int] = {}
        for action in schedule.starts:
            level[action] = max((level[b] + 1 for b in before[action]), default=0)
        self.actions: tuple[Action, ...] = tuple(sorted(schedule.starts, key=level.__getitem__))
        """Every action once, in a sequence in which they can run."""
        index = {action: i for i, action in enumerate(self.actions)}
        self._levels = _levels([level[a] for a in self.actions], [[index[b] for b in before[a]] for a in self.actions])
        self._last = np.array(sorted({index[lane.actions[-1]] for lane in schedule.lanes if lane.actions}), np.int64)
        self.lines: tuple[tuple[Kind, StageId], ...] = tuple(dict.fromkeys((a.kind, a.node) for a in self.actions))
        """Kinds of work, which are the rows of a table of costs."""
        line = {name: i for i, name in enumerate(self.lines)}
        self._line = np.array([line[a.kind, a.node] for a in self.actions], np.int64)
        self._position = np.array([max(0, a.microbatch) for a in self.actions], np.int64)

    def table(
        self, costs: Mapping[tuple[Kind, StageId], Float64[np.ndarray, "microbatches"] | float], microbatches: int
    ) -> Float64[np.ndarray, "lines microbatches"]:
        """Costs as ``of_orders`` takes them.

        Args:
            costs: seconds of every kind of work per microbatch of the step; UNSHARD and REDUCE (one number for all)
                take no time where they are left out.
        """
        table = np.zeros((len(self.lines), microbatches))
        for i, name in enumerate(self.lines):
            if name in costs or name[0] not in ("UNSHARD", "REDUCE"):
                table[i] = costs[name]
        return table

    def of_orders(
        self, table: Float64[np.ndarray, "lines microbatches"], orders: Int64[np.ndarray, "candidates microbatches"]
    ) -> Float64[np.ndarray, "candidates"]:
        """Seconds of the step, with costs from ``table``, when position ``k`` runs microbatch ``orders[:, k]``."""
        times = np.empty(len(orders))
        cells = self._line * table.shape[1] + self._position
        for a in range(0, len(orders), BLOCK):
            block = np.ascontiguousarray(orders[a : a + BLOCK].T)
            by_cell = table.take(block, axis=1).reshape(-1, block.shape[1])
            ends = self._run(by_cell.take(cells, axis=0))
            times[a : a + BLOCK] = ends[self._last].max(axis=0, initial=0.0)
        return times

    def _run(self, durations: np.ndarray) -> np.ndarray:
        """Turn durations ``[actions, candidates]`` into ends, in place."""
        for start, stop, before in self._levels:
            ready = durations.take(before[0], axis=0)
            for more in before[1:]:
                np.maximum(ready, durations.take(more, axis=0), out=ready)
            durations[start:stop] += ready
        return durations


def _levels(level: list[int], before: list[list[int]]) -> list[tuple[int, int, np.ndarray]]:
    """Levels that wait for something: first action, last + 1, and what they wait for, int64 ``[most, actions]``."""
    levels = []
    start = 0
    for stop in range(1, len(level) + 1):
        if stop < len(level) and level[stop] == level[start]:
            continue
        most = max(map(len, before[start:stop]))
        if most:  # a shorter list repeats its first
            padded = [b + [b[0]] * (most - len(b)) for b in before[start:stop]]
            levels.append((start, stop, np.ascontiguousarray(np.array(padded, np.int64).T)))
        start = stop
    return levels
