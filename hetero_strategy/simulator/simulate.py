"""``simulate``: what a schedule would cost. Pure: numpy over the schedule that the runtime runs.

All instances of a stage run the same actions, so an action is simulated for all of them at once. They are coupled only
where ranks are shared, rows cross between modules, or all of them meet. Times then follow from any sequence in which
the actions can run, as a longest path: one visit per action, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from hetero_strategy.schedule.action import Action, Schedule, StageId
from hetero_strategy.simulator.account import NO_HOST, Account, Host, Memory
from hetero_strategy.simulator.links import Links
from hetero_strategy.simulator.order import running_order
from hetero_strategy.simulator.result import Simulation

ActionCosts = Callable[[Action], "float | np.ndarray"]
"""Gives the seconds of an action: one number, or float64 ``[instances of its stage]``."""
RowsSent = Callable[[Action, Action], "float | np.ndarray"]
"""(source action, reading action) -> bytes that one rank of the reading action's stage receives.

With one number, or float64 ``[target instances]``, every source instance of another module sends an equal part. With
``[source instances, target instances]`` a target instance waits only for those that send it more than 0. Within a
module rows go from instance i to instance i.
"""


def simulate(
    schedule: Schedule,
    costs: ActionCosts,
    links: Links | None = None,
    rows: RowsSent | None = None,
    memory: Memory | None = None,
    synchronous: Collection[StageId] = (),
    host: Host = NO_HOST,
) -> Simulation:
    """Compute start and end of every action on every instance, and what its ranks waited for.

    An action of an instance starts when all its ranks have finished what their lists name before it and what it reads
    has arrived. Transfers occupy no rank; those between the same two stages (or others on exactly the same ranks) reach
    an instance one after the other. UNSHARD and REDUCE start together on all instances of their stage.

    Args:
        costs: seconds of an action.
        links: speed of transfers; None: they take no time.
        rows: bytes of a transfer; None: 0, so that only latencies count.
        memory: bytes of a stage; None: peak memory is not computed.
        synchronous: stages whose actions all start together on all instances (FSDP that gathers per microbatch).
        host: what main threads do besides actions; default: nothing.

    Raises:
        ScheduleError: the lists cannot run; the message names the first rank, its action and what it waits for.
    """
    order, readers = running_order(schedule)
    account = Account(schedule, memory, host)
    transfers = _Transfers(schedule, links or Links(), rows)
    start: dict[Action, np.ndarray] = {}
    end: dict[Action, np.ndarray] = {}
    for action in order:
        grid = account.grids[action.node]
        computed, arrived = transfers.inbox.pop(action, (None, None))
        begin = account.free[grid].max(axis=1)
        if arrived is not None:
            begin = np.maximum(begin, arrived)
        if action.microbatch < 0 or action.node in synchronous:
            begin = np.full_like(begin, begin.max())
        cost = np.asarray(costs(action), dtype=np.float64)
        if cost.shape not in ((), begin.shape) or not (cost >= 0).all():
            raise ValueError(f"cost of {action} must be >= 0, a number or [{len(begin)}] (instances), got {cost}")
        start[action], end[action] = begin, begin + cost
        account.run(action, begin, end[action], computed, arrived)
        for reader in readers.get(action, ()):
            transfers.send(action, reader, end[action])
    return account.close(start, end)


@dataclass(frozen=True)
class _Way:
    """Links from the instances of one stage to those of another."""

    latency: np.ndarray
    """Seconds, float64 ``[source instances, target instances]``, or ``[instances]`` if ``direct``."""
    per_byte: np.ndarray
    """Seconds per byte, likewise."""
    direct: bool
    """Whether rows go from instance i to instance i."""
    last: np.ndarray
    """When the last transfer arrived, float64 ``[target instances]``; shared by stages on the same two grids."""


class _Transfers:
    """Rows on their way to actions that have not run yet."""

    def __init__(self, schedule: Schedule, links: Links, rows: RowsSent | None) -> None:
        self.inbox: dict[Action, tuple[np.ndarray, np.ndarray]] = {}
        """Action -> when what it reads was computed and when it has arrived, each float64 ``[instances]``."""
        self._stages = schedule.graph.stages
        self._links = links
        self._rows = rows
        self._ways: dict[tuple[StageId, StageId], _Way] = {}
        self._last: dict[tuple[object, ...], np.ndarray] = {}

    def _way(self, source: StageId, target: StageId) -> _Way:
        way = self._ways.get((source, target))
        if way is None:
            a, b = self._stages[source].grid, self._stages[target].grid
            latency, per_byte = self._links.between(a, b)
            direct = source.module == target.module
            if direct:
                latency, per_byte = latency.diagonal(), per_byte.diagonal()
            key = (direct, a.shape, a.tobytes(), b.shape, b.tobytes())
            last = self._last.setdefault(key, np.zeros(len(b)))
            way = self._ways[source, target] = _Way(latency, per_byte, direct, last)
        return way

    def send(self, source: Action, target: Action, end: np.ndarray) -> None:
        way = self._way(source.node, target.node)
        size = np.asarray(0.0 if self._rows is None else self._rows(source, target), dtype=np.float64)
        shapes = [(), (len(way.last),)] + ([] if way.direct else [(len(end), len(way.last))])
        if size.shape not in shapes:
            raise ValueError(f"bytes from {source} to {target} must have one of the shapes {shapes}, got {size.shape}")
        if way.direct:
            computed, ready, wire = end, end + way.latency, size * way.per_byte
        elif size.ndim < 2:
            computed = np.full(len(way.last), end.max())
            ready, wire = (end[:, None] + way.latency).max(axis=0), size * way.per_byte.mean(axis=0)
        else:
            sends = size > 0
            computed = np.where(sends, end[:, None], 0.0).max(axis=0)
            ready = np.where(sends, end[:, None] + way.latency, 0.0).max(axis=0)
            wire = (size * way.per_byte).sum(axis=0)
        arrived = np.maximum(way.last, ready) + wire
        if size.ndim == 2:
            arrived = np.where(sends.any(axis=0), arrived, 0.0)
        np.maximum(way.last, arrived, out=way.last)
        before = self.inbox.get(target)
        if before is not None:
            computed, arrived = np.maximum(before[0], computed), np.maximum(before[1], arrived)
        self.inbox[target] = computed, arrived
