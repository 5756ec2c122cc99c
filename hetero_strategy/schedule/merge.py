"""Put the programs of all modules on their ranks, in one order of starts. Pure.

A ready-only simulation: a program's next action starts when all actions that it waits for are done and all its lanes
are free. It cannot get stuck unless the programs themselves wait for each other in a circle, and every lane follows its
one order of starts.

Of several ready programs a lane takes a backward before a forward, then the one nearest to the sink. Filling programs
come after all others, their forwards first, in the order of the microbatches that need them. If a lane hosts an action
that needs several lanes, the longest waiting action comes first instead: otherwise such an action would never find all
its lanes free. While it waits for them, a lane runs only work that ends in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from hetero_strategy.schedule.action_index import ActionIndex

Key = tuple[bool, float, int, int]
"""Sort key, smallest first: (fills). If it does not fill: time since when it waits (if that counts), forward, distance
from the sink. If it fills: backward, the microbatch that needs it, distance from the source."""


class Merge:
    """A simulation of a step that yields one order of starts.

    Args:
        numbers: numbering of the step's actions.
        programs: action numbers of each program; its nodes share their lanes. Weight gradients in no program fill
            waits.
        lanes: lanes of each node, by its index.
        caps: most microbatches that each node may hold: between F and the end of W if W fills waits, or of B if the
            program does.
        late: whether each program fills.
        patience: share of a filling action's duration within which another program must become ready for its lane to
            wait.
    """

    def __init__(
        self,
        numbers: ActionIndex,
        programs: Sequence[Sequence[int]],
        lanes: Sequence[tuple[int, ...]],
        caps: Sequence[int],
        late: Sequence[bool],
        patience: float = 0.0,
    ) -> None:
        self.numbers = numbers
        self.programs = programs
        self.caps = caps
        self.late = late
        self.patience = patience
        self.waits = numbers.waits.copy()
        self.node = numbers.node_of
        self.head = [0] * len(programs)
        self.since = [-1.0] * len(programs)  # time since when the head is ready; -1: it is not
        self.owner = [-1] * len(self.node)
        self.lanes = []
        for p, program in enumerate(programs):
            self.lanes.append(lanes[self.node[program[0]]])
            for number in program:
                self.owner[number] = p
        self.fills = [  # programs whose W are in no program and fill waits
            any(numbers.split[self.node[a]] for a in p) and not any(a >= 2 * numbers.units for a in p) for p in programs
        ]
        self.weights: list[deque[int]] = [deque() for _ in programs]
        self.held = [0] * len(numbers.nodes)  # microbatches, by node; read if there are caps
        self.left = [  # actions not yet started, by node
            count * (1 + back + split)
            for count, back, split in zip(numbers.counts, numbers.backward, numbers.split, strict=True)
        ]
        self.opened = [False] * len(numbers.nodes)
        self.hosted: dict[int, list[int]] = {}
        for p, on in enumerate(self.lanes):
            for lane in on:
                self.hosted.setdefault(lane, []).append(p)
        shared = {lane for on in self.lanes if len(on) > 1 for lane in on}
        self.aged = [any(lane in shared for lane in on) for on in self.lanes]
        self.until = dict.fromkeys(self.hosted, 0.0)
        self.busy = dict.fromkeys(self.hosted, False)
        self.events: list[tuple[float, int]] = []
        self.order: list[int] = []
        self.looks = any(self.fills) or patience > 0
        self.expected = [0.0] * (2 * numbers.units)  # end of the last started action that an action waits for
        self.now = 0.0

    def run(self) -> list[int] | None:
        """Return the order in which actions start, which end at ``now``; None if programs wait for each other in a
        circle.
        """
        for p in range(len(self.programs)):
            self.arm(p)
        touched = set(self.hosted)
        events = self.events
        while True:
            self.start(touched)
            if not events:
                break
            self.now = events[0][0]
            touched = set()
            while events and events[0][0] <= self.now:
                self.end(heappop(events)[1], touched)
        done = all(h == len(p) for h, p in zip(self.head, self.programs, strict=True))
        return self.order if done and not any(self.weights) else None

    def arm(self, p: int) -> None:
        """Note whether the head of a program is ready."""
        program = self.programs[p]
        head = self.head[p]
        self.since[p] = self.now if head < len(program) and not self.waits[program[head]] else -1.0

    def end(self, number: int, touched: set[int]) -> None:
        """End an action, and add the lanes on which another may start now to ``touched``."""
        numbers = self.numbers
        units = numbers.units
        p = self.owner[number]
        for lane in self.lanes[p]:
            self.busy[lane] = False
        if number < 2 * units:
            for later in numbers.after[number]:
                self.waits[later] -= 1
                if not self.waits[later]:
                    q = self.owner[later]
                    program = self.programs[q]
                    if self.head[q] < len(program) and program[self.head[q]] == later:
                        self.since[q] = self.now
                        touched.update(self.lanes[q])
            if number >= units and self.fills[p] and numbers.split[self.node[number]]:
                self.weights[p].append(number + units)
                self.owner[number + units] = p
        touched.update(self.lanes[p])
        if self.since[p] < 0:
            self.arm(p)

    def start(self, touched: set[int]) -> None:
        """Start every action that may start on some lanes now."""
        hosted, free = self.hosted, [lane for lane in touched if not self.busy[lane]]
        ready = {p for lane in free for p in hosted[lane] if self.since[p] >= 0}
        kept: dict[int, float] = {}
        for _, p in sorted((self.key(p), p) for p in ready) if len(ready) > 1 else [(None, p) for p in ready]:
            number = self.programs[p][self.head[p]]
            if self.capped(p, number):
                if self.weights[p] and self.place(p, self.weights[p][0], kept):
                    self.weights[p].popleft()
            elif self.late[p] and self.patience and any(self.soon(number, x, self.patience) for x in self.lanes[p]):
                continue
            elif self.place(p, number, kept, keep=not self.late[p]):
                self.head[p] += 1
                self.since[p] = -1.0
        for lane in touched:
            if not self.busy[lane]:
                for p in self.hosted[lane]:
                    if (
                        self.weights[p]
                        and not self.soon(self.weights[p][0], lane, 0.5)
                        and self.place(p, self.weights[p][0], kept, keep=False)
                    ):
                        self.weights[p].popleft()
                        break

    def capped(self, p: int, number: int) -> bool:
        """Return whether a forward has to wait until its node holds fewer microbatches."""
        bounded = number < self.numbers.units and (self.fills[p] or self.late[p])
        return bounded and self.held[self.node[number]] >= self.caps[self.node[number]]

    def soon(self, number: int, lane: int, share: float) -> bool:
        """Return whether a lane should wait for a head that becomes ready soon, instead of starting a filling action.

        Soon is within ``share`` of the action's duration; with half of it, waiting costs less.
        """
        until = self.now + self.numbers.durations[number] * share
        for q in self.hosted[lane]:
            program = self.programs[q]
            if self.head[q] < len(program) and not self.late[q]:
                head = program[self.head[q]]
                if self.waits[head] == 1 and self.now < self.expected[head] <= until:
                    return True
        return False

    def key(self, p: int) -> Key:
        number = self.programs[p][self.head[p]]
        node, units = self.node[number], self.numbers.units
        if self.late[p]:
            return (True, number >= units, self.numbers.needed[number % units], node)
        return (False, self.since[p] if self.aged[p] else 0.0, number < units, -node)

    def place(self, p: int, number: int, kept: dict[int, float], *, keep: bool = True) -> bool:
        """Start an action if its lanes are free; otherwise, if ``keep``, reserve them for it."""
        numbers, lanes = self.numbers, self.lanes[p]
        node = self.node[number]
        length = numbers.durations[number]
        opens = numbers.gathers[node] and not self.opened[node]
        if opens:
            length += numbers.durations[3 * numbers.units + node]
        closes = numbers.reduces[node] and self.left[node] == 1
        if closes:
            length += numbers.durations[3 * numbers.units + len(numbers.nodes) + node]
        end = self.now + length
        waiting = [lane for lane in lanes if self.busy[lane]]
        if waiting or (kept and any(lane in kept and end > kept[lane] for lane in lanes)):
            if keep and waiting and len(lanes) > 1:
                limit = max(self.until[lane] for lane in waiting)
                for lane in lanes:
                    kept[lane] = min(limit, kept.get(lane, limit))
            return False
        for lane in lanes:
            self.busy[lane] = True
            self.until[lane] = end
        if opens:
            self.order.append(3 * numbers.units + node)
            self.opened[node] = True
        self.started(number)
        if closes:
            self.order.append(3 * numbers.units + len(numbers.nodes) + node)
        heappush(self.events, (end, number))
        if self.looks and number < 2 * numbers.units:
            for later in numbers.after[number]:
                self.expected[later] = max(end, self.expected[later])
        return True

    def started(self, number: int) -> None:
        """Note that an action has started."""
        node, units = self.node[number], self.numbers.units
        self.order.append(number)
        self.left[node] -= 1
        if number < units:
            self.held[node] += 1
        elif (number >= 2 * units) == self.numbers.split[node]:
            self.held[node] -= 1
