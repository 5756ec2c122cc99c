"""When actions end that run beside others on a stream of their own. Pure.

They go on as in :class:`~hetero_strategy.schedule.beside.MergeBeside`: at full speed while their ranks have nothing
else to do, else in the share of the time in which these wait for collectives. What the others do is known up to the
moment at which the first of them needs the rows, so that is when an end is worked out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.schedule.action import Action, Schedule, StageId


class _Others(NamedTuple):
    """An action that takes time of a lane, on each of its ranks."""

    begin: Float64[np.ndarray, "ranks"]
    end: Float64[np.ndarray, "ranks"]
    spare: Float64[np.ndarray, "ranks"]
    """Share of the time between them in which it leaves room to compute."""


class _Part(NamedTuple):
    """What of a stage lies on one lane."""

    lane: int
    where: Int64[np.ndarray, "ranks"]
    """In the stage's flat grid."""
    place: Int64[np.ndarray, "ranks"]
    """Among the lane's ranks."""


class Beside:
    """Actions of a step that run beside others: all that fills.

    Args:
        ranks: all global ranks, ascending; arrays by rank have their order.
        grids: stage -> indices of its ranks there, int64 ``[instances, ranks]``.
        free: when each rank can begin its first action.
        bubbles: see :func:`~hetero_strategy.simulator.simulate.simulate`.
    """

    def __init__(
        self,
        schedule: Schedule,
        ranks: Int64[np.ndarray, "ranks"],
        grids: dict[StageId, np.ndarray],
        free: Float64[np.ndarray, "ranks"],
        bubbles: Callable[[Action], float | np.ndarray],
    ) -> None:
        self.modules = {*schedule.graph.filling}
        self._grids, self._bubbles, self._dependencies = grids, bubbles, schedule.dependencies
        lane, place = np.full(len(ranks), -1), np.zeros(len(ranks), np.int64)
        for number, one in enumerate(schedule.lanes):
            own = np.searchsorted(ranks, one.ranks)
            lane[own], place[own] = number, np.arange(len(own))
        self._sizes = [len(one.ranks) for one in schedule.lanes]
        self._parts: dict[StageId, list[_Part]] = {}
        for stage, grid in grids.items():
            of = lane[grid.ravel()]
            wheres = [(int(n), np.flatnonzero(of == n)) for n in np.unique(of[of >= 0])]
            self._parts[stage] = [_Part(n, where, place[grid.ravel()[where]]) for n, where in wheres]
        self._others: list[list[_Others]] = [[] for _ in schedule.lanes]
        self._over = [0] * len(schedule.lanes)
        """How many of them were over before all that will still run beside others."""
        self._waiting: dict[Action, np.ndarray] = {}
        """Seconds of actions that are not worked out yet, in the order in which they start."""
        self.free = free.copy()
        """When what runs beside others on each rank is over."""
        self.seconds: dict[Action, Float64[np.ndarray, "_instances"]] = {}
        """Of each action that ran beside others, as if alone."""
        self.used, self.filled = np.zeros((2, len(ranks)))
        """Seconds in which they computed while others waited for collectives, less those in which they waited for their
        own and there were no others; and in which they went on while there were none."""

    def note(
        self, action: Action, begin: Float64[np.ndarray, "instances"], end: Float64[np.ndarray, "instances"]
    ) -> None:
        """An action takes the time of its ranks from then to then."""
        bubbles, length = np.broadcast_to(self._bubbles(action), begin.shape), end - begin
        spare = np.divide(bubbles, length, out=np.ones_like(length), where=length > 0)
        columns = [np.repeat(x, self._grids[action.node].shape[1]) for x in (begin, end, spare)]
        for lane, where, place in self._parts[action.node]:
            whole = _Others(*np.zeros((3, self._sizes[lane])))
            for to, column in zip(whole, columns, strict=True):
                to[place] = column[where]
            self._others[lane].append(whole)

    def wait(self, action: Action, seconds: np.ndarray) -> None:
        """An action of so many seconds starts beside others once what it reads has arrived and its ranks come to it."""
        self._waiting[action] = np.broadcast_to(seconds, (len(self._grids[action.node]),))

    def needed(self, actions: Collection[Action]) -> list[Action]:
        """What has to be worked out for some actions: those that are not yet, what they read, and what comes before
        each on its ranks.
        """
        wanted, lanes, found = {*actions} & self._waiting.keys(), set[int](), list[Action]()
        for one in reversed(list(self._waiting) if wanted else []):
            own = {part.lane for part in self._parts[one.node]}
            if one in wanted or own & lanes:
                found.append(one)
                lanes |= own
                wanted.update(self._dependencies.crossing(one))
        return found[::-1]

    def run(
        self, action: Action, arrived: Float64[np.ndarray, "instances"] | None
    ) -> tuple[Float64[np.ndarray, "instances"], Float64[np.ndarray, "instances"]]:
        """When an action begins and ends; of those on its ranks the first, and the ranks of an instance go on together.

        Args:
            arrived: when what it reads has.
        """
        seconds, begin = self._waiting.pop(action), self.free[self._grids[action.node]].max(axis=1)
        begin = begin if arrived is None else np.maximum(begin, arrived)
        if action.microbatch < 0 and seconds.any():
            begin = np.full_like(begin, begin.max())
        grid, waits = self._grids[action.node], np.broadcast_to(self._bubbles(action), begin.shape)
        compute = 1.0 - np.divide(waits, seconds, out=np.ones_like(begin), where=seconds > 0)
        lines = _TimeLines(
            grid, [(part, self._others[part.lane][self._over[part.lane] :]) for part in self._parts[action.node]]
        )
        now, left = begin.copy(), seconds.copy()
        while left.any():
            idle, spare, until = lines.at(now)
            fast = speeds(spare.min(axis=1), compute)
            done = np.minimum(left, (until - now) * fast)
            took = np.where(done < left, until - now, np.divide(done, fast, out=np.zeros_like(now), where=fast > 0))
            self.filled[grid] += np.where(idle, took[:, None], 0.0)
            self.used[grid] += np.where(idle, (done * (compute - 1.0))[:, None], (done * compute)[:, None])
            now, left = now + took, left - done
        for part in self._parts[action.node]:
            others = self._others[part.lane]
            while self._over[part.lane] < len(others) and (others[self._over[part.lane]].end <= now.min()).all():
                self._over[part.lane] += 1
        self.seconds[action], self.free[grid] = seconds, now[:, None]
        return begin, now


class _TimeLines:
    """What takes the time of an action's ranks."""

    def __init__(self, grid: Int64[np.ndarray, "instances ranks"], parts: list[tuple[_Part, list[_Others]]]) -> None:
        most = max(len(others) for _, others in parts)
        nothing = np.full((most + 1, grid.size), np.inf)
        self._begin, self._end, self._spare = nothing, nothing.copy(), np.ones_like(nothing)
        for part, others in parts:
            for number, one in enumerate(others):
                for to, column in zip((self._begin, self._end, self._spare), one, strict=True):
                    to[number, part.where] = column[part.place]
        self._now, self._shape = np.zeros(grid.size, np.int64), grid.shape

    def at(
        self, now: Float64[np.ndarray, "instances"]
    ) -> tuple[np.ndarray, Float64[np.ndarray, "instances ranks"], Float64[np.ndarray, "instances"]]:
        """Whether each rank has nothing else to do then, its room to compute, and until when all of that holds."""
        ranks, every = np.repeat(now, self._shape[1]), np.arange(self._now.size)
        while (past := self._end[self._now, every] <= ranks).any():
            self._now += past
        begin, end = self._begin[self._now, every], self._end[self._now, every]
        idle = ranks < begin
        until = np.where(idle, begin, end).reshape(self._shape).min(axis=1)
        spare = np.where(idle, 1.0, self._spare[self._now, every])
        return idle.reshape(self._shape), spare.reshape(self._shape), until


def speeds(spare: Float64[np.ndarray, "ranks"], compute: Float64[np.ndarray, "ranks"]) -> Float64[np.ndarray, "ranks"]:
    """See :func:`hetero_strategy.schedule.beside.speed`."""
    times = np.divide(compute, spare, out=np.full_like(compute, np.inf), where=spare > 0) + 1.0 - compute
    return np.where(compute > 0, 1.0 / times, 1.0)
