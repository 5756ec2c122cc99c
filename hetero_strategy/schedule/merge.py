"""Programs of all modules put on their ranks, in one order of starts. Pure.

A ready-only simulation: a program's next action starts when all it waits for is done and all its lanes are free.
Whatever it starts, it cannot get stuck unless the programs themselves wait for each other in a circle, and the order
of starts is one order that every lane follows.

Of several ready programs a lane takes a backward before a forward, and the one nearer to the sink first. Programs that
fill come after all others, their forwards first where others wait for these, in the order of the microbatches that
need them. Where a lane hosts an action that needs several lanes, what has waited longest comes first instead: such an
action would never find all its lanes free otherwise. While it waits for them, a lane runs what ends in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from hetero_strategy.schedule.action_index import ActionIndex

Key = tuple[bool, float, int, int]
"""What is less comes first: does it fill? If not: waiting since (where that counts), is it a forward, how far from the
sink. If so: is it a backward or for the next step, the microbatch that needs it, how far from the source."""


class Merge:
    """The simulation.

    Args:
        numbers: of the step.
        programs: action numbers of each, all of nodes on the same lanes. Weight gradients that are in no program fill
            waits.
        lanes: of each node (by its index).
        caps: per node, microbatches that it may hold between F and the end of W, where W fills waits, or of B where the
            program does.
        late: programs that fill.
        patience: share of an action that fills within which another program must be about to be ready for its lane to
            wait for that one.
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
        # Programs that take no time of lanes, see ``schedule.beside``.
        self.apart = [False] * len(programs) if numbers.bubbles is None else late
        self.patience = patience
        self.waits = numbers.waits.copy()
        self.node = numbers.node_of
        self.head = [0] * len(programs)
        self.since = [-1.0] * len(programs)  # since when the head is ready; -1: it is not
        self.owner = [-1] * len(self.node)
        self.lanes = []
        for p, program in enumerate(programs):
            self.lanes.append(lanes[self.node[program[0]]])
            for number in program:
                self.owner[number] = p
        self.fills = [  # programs whose W are not in them and fill waits
            any(numbers.split[self.node[a]] for a in p) and not any(a >= 2 * numbers.units for a in p) for p in programs
        ]
        self.weights: list[deque[int]] = [deque() for _ in programs]
        self.held = [0] * len(numbers.nodes)  # microbatches, by node; read where there are caps
        self.left = [  # actions not yet started, by node
            count * (1 + back + split)
            for count, back, split in zip(numbers.counts, numbers.backward, numbers.split, strict=True)
        ]
        self.opened = [False] * len(numbers.nodes)
        self.hosted: dict[int, list[int]] = {}
        for p, on in enumerate(self.lanes):
            for lane in on:
                self.hosted.setdefault(lane, []).append(p)
        wide = (on for on, apart in zip(self.lanes, self.apart, strict=True) if len(on) > 1 and not apart)
        shared = {lane for on in wide for lane in on}
        self.aged = [any(lane in shared for lane in on) for on in self.lanes]
        self.until = dict.fromkeys(self.hosted, 0.0)
        self.busy = dict.fromkeys(self.hosted, False)
        self.events: list[tuple[float, int]] = []
        self.order: list[int] = []
        self.looks = any(self.fills) or patience > 0
        self.expected = [0.0] * (2 * numbers.units)  # when the last started of what an action waits for ends
        self.now = 0.0

    def run(self) -> list[int] | None:
        """Order in which actions start, which end at ``now``; None if the programs wait for each other in a circle."""
        for p in range(len(self.programs)):
            self.arm(p)
        touched = set(self.hosted)
        events = self.events
        while True:
            self.start(touched)
            while events and not self.over(*events[0]):
                heappop(events)
            if not events:
                break
            self.now = events[0][0]
            touched = set()
            while events and events[0][0] <= self.now:
                time, number = heappop(events)
                if self.over(time, number):
                    self.end(number, touched)
        done = all(h == len(p) for h, p in zip(self.head, self.programs, strict=True))
        return self.order if done and not any(self.weights) else None

    def arm(self, p: int) -> None:
        """Note whether the head of a program is ready."""
        program = self.programs[p]
        head = self.head[p]
        self.since[p] = self.now if head < len(program) and not self.waits[program[head]] else -1.0

    def over(self, time: float, number: int) -> bool:
        """Whether an action that was expected to end then does."""
        return True

    def end(self, number: int, touched: set[int]) -> None:
        """End an action, and add to ``touched`` the lanes on which something may start now."""
        for lane in self.lanes[self.owner[number]]:
            self.busy[lane] = False
        self.ended(number, touched)

    def ended(self, number: int, touched: set[int]) -> None:
        """Let start what waits for an action."""
        numbers = self.numbers
        units = numbers.units
        p = self.owner[number]
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
        """Start all that may start on some lanes now."""
        hosted, free = self.hosted, [lane for lane in touched if not self.busy[lane]]
        ready = {p for lane in free for p in hosted[lane] if self.since[p] >= 0 and not self.apart[p]}
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
                        and not self.apart[p]
                        and not self.soon(self.weights[p][0], lane, 0.5)
                        and self.place(p, self.weights[p][0], kept, keep=False)
                    ):
                        self.weights[p].popleft()
                        break

    def capped(self, p: int, number: int) -> bool:
        """Whether a forward has to wait until its node holds fewer microbatches."""
        bounded = number < self.numbers.units and (self.fills[p] or self.late[p])
        return bounded and self.held[self.node[number]] >= self.caps[self.node[number]]

    def soon(self, number: int, lane: int, share: float) -> bool:
        """Whether a lane should wait for a head that is ready within this share of an action that would fill the wait;
        half of it: whether it loses less by that.
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
            later = number >= units or not self.numbers.after[number]
            return (True, later, self.numbers.needed[number % units], node)
        return (False, self.since[p] if self.aged[p] else 0.0, number < units, -node)

    def place(self, p: int, number: int, kept: dict[int, float], *, keep: bool = True) -> bool:
        """Start an action if its lanes are free; else, if asked, keep them for it."""
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
