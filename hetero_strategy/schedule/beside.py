"""What fills bubbles on a stream of its own, beside the actions of its ranks. Pure.

It takes no time of a lane. It goes on at full speed while its lanes have nothing else to do, and while these wait for
collectives inside actions in the share of the time in which they do: Optimus' tensor-parallel bubbles (section 4.3.2),
which its kernels fill as ours do, on a stream of lower priority.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush

from typing_extensions import override

from hetero_strategy.schedule.merge import Merge

ROUNDED = 1e-12
"""Share of an action that is nothing but rounding."""


def speed(spare: float, compute: float) -> float:
    """How fast an action goes on beside others, 1: as alone.

    Args:
        spare: share of the time in which the others leave room to compute, 1: always.
        compute: share of the action in which it computes; in the rest it waits for collectives of its own, for which
            there always is room.
    """
    return 1.0 if not compute else 1.0 / (compute / spare + 1.0 - compute) if spare > 0 else 0.0


class MergeBeside(Merge):
    """The simulation with bubbles inside actions, known to ``numbers``: what comes late runs beside the others."""

    @override
    def run(self) -> list[int] | None:
        assert self.numbers.bubbles is not None
        self.bubbles = self.numbers.bubbles
        self.spare = dict.fromkeys(self.hosted, 1.0)
        """Share of a lane's time now in which there is room to compute."""
        self.served: dict[int, int] = {}
        """Lane -> action that runs beside others on it."""
        self.left_of: dict[int, tuple[float, float, float]] = {}
        """Of such actions: seconds left, as alone; as of when; their speed since then."""
        return super().run()

    @override
    def start(self, touched: set[int]) -> None:
        super().start(touched)
        waiting = {p for lane in touched if lane not in self.served for p in self.hosted[lane] if self.apart[p]}
        ready = []
        for p in waiting:
            number = self.programs[p][self.head[p]] if self.since[p] >= 0 else -1
            if number >= 0 and not self.capped(p, number):
                ready.append((self.key(p), p, number))
            elif self.weights[p]:
                ready.append(((True, True, self.numbers.units, 0), p, self.weights[p][0]))
        kept = set[int]()  # for one that needs several lanes, so that they do not take turns without it
        for _, p, number in sorted(ready):
            if any(lane in self.served or lane in kept for lane in self.lanes[p]):
                kept.update(self.lanes[p])
            else:
                self.serve(p, number)

    def serve(self, p: int, number: int) -> None:
        """Start an action beside others."""
        if self.weights[p] and number == self.weights[p][0]:
            self.weights[p].popleft()
        else:
            self.head[p] += 1
            self.since[p] = -1.0
        self.started(number)
        self.served.update(dict.fromkeys(self.lanes[p], number))
        self.left_of[number] = self.numbers.durations[number], self.now, 0.0
        self.go_on(number)

    def go_on(self, number: int) -> None:
        """Set the speed of an action that runs beside others to what its lanes leave it now."""
        left, since, fast = self.left_of[number]
        left -= (self.now - since) * fast
        length = self.numbers.durations[number]
        left = left if left > ROUNDED * length else 0.0
        spare = min(self.spare[lane] for lane in self.lanes[self.owner[number]])
        fast = speed(spare, 1.0 - self.bubbles[number] / length if length else 0.0)
        fast = fast if left else 1.0
        self.left_of[number] = left, self.now, fast
        if fast:
            heappush(self.events, (self.now + left / fast, number))

    @override
    def place(self, p: int, number: int, kept: dict[int, float], *, keep: bool = True) -> bool:
        opens = not self.opened[self.node[number]]
        if not super().place(p, number, kept, keep=keep):
            return False
        length, part = self.numbers.durations[number], self.bubbles[number]
        if opens and self.opened[self.node[number]]:
            gather = 3 * self.numbers.units + self.node[number]
            length, part = length + self.numbers.durations[gather], part + self.bubbles[gather]
        self.room(self.lanes[p], part / length if length else 1.0)
        return True

    def room(self, lanes: Sequence[int], spare: float) -> None:
        """From now on lanes leave so much room."""
        self.spare.update(dict.fromkeys(lanes, spare))
        for number in {self.served[lane] for lane in lanes if lane in self.served}:
            self.go_on(number)

    @override
    def over(self, time: float, number: int) -> bool:
        if not self.apart[self.owner[number]]:
            return True
        left, since, fast = self.left_of.get(number, (0.0, 0.0, 0.0))
        return bool(fast) and time == since + left / fast

    @override
    def end(self, number: int, touched: set[int]) -> None:
        lanes = self.lanes[self.owner[number]]
        if self.apart[self.owner[number]]:
            del self.left_of[number]
            for lane in lanes:
                del self.served[lane]
            self.ended(number, touched)
            return
        super().end(number, touched)
        self.room(lanes, 1.0)
