"""``simulate``: what a schedule would cost. Pure: numpy over the schedule that the runtime runs.

All instances of a stage run the same actions, so an action is simulated for all of them at once. They are coupled only
where ranks are shared, rows cross between modules, or all of them meet. Times then follow from any sequence in which
the actions can run, as a longest path: one visit per action, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.schedule.action import Action, Schedule, StageId
from hetero_strategy.simulator.account import Account
from hetero_strategy.simulator.beside import Beside
from hetero_strategy.simulator.links import Between, Links, Network
from hetero_strategy.simulator.result import NO_HOST, Host, Simulation

ActionCosts = Callable[[Action], float | Float64[np.ndarray, "instances"]]
"""Gives the seconds of an action: one number, or one for each instance of its stage."""


class Sent(NamedTuple):
    """Rows between instances of two modules, pair by pair."""

    source: Int64[np.ndarray, "pairs"]
    """Instance that sends."""
    target: Int64[np.ndarray, "pairs"]
    """Instance that receives, and waits for it."""
    bytes: Float64[np.ndarray, "pairs"]
    """Into one of its ranks."""


RowsSent = Callable[[Action, Action], Float64[np.ndarray, "instances"] | Sent]
"""(source action, reading action) -> bytes that one rank of the reading action's stage receives.

Within a module rows go from instance i to instance i, in all of them. Between modules an instance waits only for those
that send it anything.
"""


def pairs(rows: Float64[np.ndarray, "instances"] | Sent) -> Sent:
    """The same pair by pair, within a module too."""
    return rows if isinstance(rows, Sent) else Sent(np.arange(len(rows)), np.arange(len(rows)), rows)


def simulate(
    schedule: Schedule,
    costs: ActionCosts,
    links: Links | Network | None = None,
    rows: RowsSent | None = None,
    synchronous: Collection[StageId] = (),
    host: Host = NO_HOST,
    bubbles: ActionCosts | None = None,
) -> Simulation:
    """Compute start and end of every action on every instance, and what its ranks waited for.

    An action of an instance starts when all its ranks have finished what their lists name before it and what it reads
    has arrived. Transfers occupy no rank; those between the same two stages (or others on exactly the same ranks) reach
    an instance one after the other, and those of one action share the links that they leave and enter. UNSHARD and
    REDUCE that take time start together on all instances of their stage.

    Args:
        costs: seconds of an action.
        links: speed of transfers; None: they take no time.
        rows: bytes of a transfer; None: only latencies count, and between modules all instances wait for all.
        synchronous: stages whose actions all start together on all instances (FSDP that gathers per microbatch).
        host: what main threads do besides actions; default: nothing.
        bubbles: part of an action's seconds in which its ranks wait for collectives. What fills runs on a stream of its
            own, while its ranks have nothing else to do and in this part. ``None``: nothing runs beside an action.

    Raises:
        ScheduleError: the lists cannot run; ``schedule.check`` says why.
        ValueError: costs or bytes are negative or of another shape.
    """
    readers: dict[Action, list[Action]] = {}
    for action in schedule.starts:
        for source in schedule.dependencies.crossing(action):
            readers.setdefault(source, []).append(action)
    account = Account(schedule, host)
    beside = None if bubbles is None else Beside(schedule, account.ranks, account.grids, account.free, bubbles)
    transfers = _Transfers(schedule, links or Links(), rows)
    start: dict[Action, np.ndarray] = {}
    end: dict[Action, np.ndarray] = {}

    def settle(ended: Iterable[Action]) -> None:
        """Work out when some actions end that run beside others, and let their rows go."""
        for one in ended:
            assert beside is not None
            start[one], end[one] = beside.run(one, transfers.inbox.pop(one, (None, None))[1])
            for reader in readers.get(one, ()):
                transfers.send(one, reader, end[one])

    for action in schedule.starts:
        grid = account.grids[action.node]
        cost = np.asarray(costs(action), dtype=np.float64)
        if cost.shape not in ((), (len(grid),)) or not (cost >= 0).all():
            raise ValueError(f"cost of {action} must be >= 0, a number or [{len(grid)}] (instances), got {cost}")
        if beside is not None:
            if action.node.module in beside.modules:
                beside.wait(action, cost)
                continue
            settle(beside.needed(schedule.dependencies.crossing(action)))
        computed, arrived = transfers.inbox.pop(action, (None, None))
        begin = account.free[grid].max(axis=1)
        if arrived is not None:
            begin = np.maximum(begin, arrived)
        if action.node in synchronous or (action.microbatch < 0 and cost.any()):
            begin = np.full_like(begin, begin.max())
        start[action], end[action] = begin, begin + cost
        account.run(action, begin, end[action], computed, arrived)
        if beside is not None:
            beside.note(action, begin, end[action])
        for reader in readers.get(action, ()):
            transfers.send(action, reader, end[action])
    if beside is None:
        return account.close(start, end)
    settle(beside.needed(schedule.starts))
    return account.close(start, end, beside)


@dataclass(frozen=True)
class _Way:
    """Links from the instances of one stage to those of another."""

    links: Between
    latency: np.ndarray
    """Within a module, from instance to instance: seconds, float64 ``[instances]``."""
    per_byte: np.ndarray
    """Seconds per byte, likewise."""
    nothing: np.ndarray | Sent
    """Where nobody says what is sent: 0 bytes, between modules from every instance to every other one."""
    leaves: float
    """Bytes that leave a rank of the source for each that enters one of the target, between modules: rows enter an
    instance once, and the ranks of the one that sends share them out.
    """
    last: np.ndarray
    """When the last transfer arrived, float64 ``[target instances]``; shared by stages on the same two grids."""


class _Transfers:
    """Rows on their way to actions that have not run yet."""

    def __init__(self, schedule: Schedule, links: Links | Network, rows: RowsSent | None) -> None:
        self.inbox: dict[Action, tuple[np.ndarray, np.ndarray]] = {}
        """Action -> when what it reads was computed and when it has arrived, each float64 ``[instances]``."""
        self._stages = schedule.graph.stages
        self._links = links
        self._rows = rows
        self._ways: dict[tuple[StageId, StageId], _Way] = {}
        self._last: dict[tuple[object, ...], np.ndarray] = {}

    def _way(self, source: StageId, target: StageId) -> _Way:
        if (source, target) not in self._ways:
            a, b = self._stages[source].grid, self._stages[target].grid
            direct = source.module == target.module
            links = self._links.between(a, b)
            own = np.arange(len(b) if direct else 0)
            nothing: np.ndarray | Sent = np.zeros(len(own))
            if self._rows is None and not direct:
                nothing = Sent(*np.divmod(np.arange(len(a) * len(b)), len(b)), np.zeros(len(a) * len(b)))
            leaves = self._stages[target].row_sharding.parts / a.shape[1]
            last = self._last.setdefault((direct, a.shape, a.tobytes(), b.shape, b.tobytes()), np.zeros(len(b)))
            self._ways[source, target] = _Way(links, *links(own, own), nothing, leaves, last)
        return self._ways[source, target]

    def send(self, source: Action, target: Action, end: np.ndarray) -> None:
        """Book the rows that ``target`` reads of ``source``, which ends at ``end``, float64 ``[instances]``."""
        way = self._way(source.node, target.node)
        size = way.nothing if self._rows is None else self._rows(source, target)
        if isinstance(size, Sent):
            computed, arrived = _across(way, size, end)
        elif np.shape(size) == way.latency.shape:
            computed, arrived = end, np.maximum(way.last, end + way.latency) + size * way.per_byte
        else:
            raise ValueError(f"bytes from {source} to {target} must be {way.latency.shape}, got {np.shape(size)}")
        np.maximum(way.last, arrived, out=way.last)
        before = self.inbox.get(target)
        if before is not None:
            computed, arrived = np.maximum(before[0], computed), np.maximum(before[1], arrived)
        self.inbox[target] = computed, arrived


def _across(way: _Way, sent: Sent, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When what instances receive of another module was computed and has arrived; 0 for those that receive nothing."""
    latency, per_byte = way.links(sent.source, sent.target)
    left = end[sent.source]
    computed, ready = np.zeros((2, len(way.last)))
    np.maximum.at(computed, sent.target, left)
    np.maximum.at(ready, sent.target, left + latency)
    seconds = sent.bytes * per_byte
    wire = np.bincount(sent.target, seconds, len(way.last))
    leaving = np.bincount(sent.source, seconds * way.leaves)
    np.maximum.at(wire, sent.target, leaving[sent.source])
    receives = np.bincount(sent.target, minlength=len(way.last)) > 0
    return computed, np.where(receives, np.maximum(way.last, ready) + wire, 0.0)
