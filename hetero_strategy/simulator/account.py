"""What ranks do with their time while a schedule is simulated. Pure."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from hetero_strategy.schedule.action import Action, Schedule
from hetero_strategy.simulator.beside import Beside
from hetero_strategy.simulator.result import CAUSES, Cause, Host, Simulation

_FILLED: tuple[Cause, ...] = ("warm-up", "dependency", "boundary", "straggler", "cool-down")
_WAITS: tuple[Cause, ...] = ("host", "dependency", "boundary", "straggler")


class Account:
    """For each rank when it is free and what it waited for. Arrays have one entry per rank."""

    def __init__(self, schedule: Schedule, host: Host) -> None:
        self._schedule = schedule
        self._host = host
        stages = schedule.graph.stages
        self.ranks = np.unique(np.concatenate([s.grid.ravel() for s in stages.values()]))
        """Global ranks of all stages, ascending."""
        self.grids = {stage_id: np.searchsorted(self.ranks, stage.grid) for stage_id, stage in stages.items()}
        """Stage -> indices of its ranks in the arrays here, int64 ``[instances, ranks per instance]``."""
        count = len(self.ranks)
        self.free = np.zeros(count)
        """When each rank can begin what comes next."""
        for rank, begin in host.begins.items():
            self.free[self.ranks == rank] = begin
        self._ended = self.free.copy()
        self._busy = np.zeros(count)
        self._idle = {cause: np.zeros(count) for cause in CAUSES}
        self._idle["host"] += self.free
        self._warm = np.zeros(count, dtype=bool)
        self._cold_stages = set(stages)
        self._reads: dict[Action, tuple[np.ndarray, np.ndarray]] = {}

    def run(
        self,
        action: Action,
        start: Float64[np.ndarray, "instances"],
        end: Float64[np.ndarray, "instances"],
        computed: Float64[np.ndarray, "instances"] | None,
        arrived: Float64[np.ndarray, "instances"] | None,
    ) -> None:
        """Book an action. What it reads of other stages was ``computed`` and ``arrived`` then; None: nothing."""
        grid = self.grids[action.node]
        free = self.free[grid]
        if computed is not None and arrived is not None:
            self._reads[action] = computed, arrived
            here = np.maximum(free, computed[:, None])
            self._idle["dependency"][grid] += here - free
            free = np.maximum(free, arrived[:, None])
            self._idle["boundary"][grid] += free - here
        self._idle["straggler"][grid] += start[:, None] - free
        if action.microbatch >= 0 and action.node in self._cold_stages:
            self._warm_up(grid)
            self._cold_stages.discard(action.node)
        self._busy[grid] += (end - start)[:, None]
        after = self._host.after(action)
        self._idle["host"][grid] += after
        self._ended[grid] = end[:, None]
        self.free[grid] = end[:, None] + after

    def _warm_up(self, grid: np.ndarray) -> None:
        """Book as warm-up what ranks waited that compute for the first time."""
        cold = grid[~self._warm[grid]]
        self._warm[cold] = True
        for cause in _WAITS:
            self._idle["warm-up"][cold] += self._idle[cause][cold]
            self._idle[cause][cold] = 0.0

    def close(
        self,
        start: dict[Action, Float64[np.ndarray, "_instances"]],
        end: dict[Action, Float64[np.ndarray, "_instances"]],
        beside: Beside | None = None,
    ) -> Simulation:
        """Make the result once all actions are booked, and those are over that ran beside them.

        Of what a rank waited, that is taken in which it ran these: from all causes alike.
        """
        last = max(self._ended.max(initial=0.0), 0.0 if beside is None else beside.free.max(initial=0.0))
        time = float(last) + self._host.closing
        self._idle["host"] -= self.free - self._ended
        rest = time - self._ended
        self._idle["cool-down"] += np.where(self._warm, rest, 0.0)
        self._idle["warm-up"] += np.where(self._warm, 0.0, rest)
        ran, used = {}, np.zeros(len(self.ranks))
        if beside is not None:
            ran, used = beside.seconds, beside.used
            idle = sum(self._idle[cause] for cause in _FILLED)
            filled = np.divide(beside.filled, idle, out=np.zeros_like(used), where=idle > 0)
            for cause in _FILLED:
                self._idle[cause] *= 1.0 - filled
            self._busy += filled * idle
        return Simulation(
            self._schedule, start, end, time, self.ranks, self._busy, self._idle, self._reads, self._host, ran, used
        )
