"""``shortened``: a local search for a shorter step, from a schedule that there is. Pure.

A step takes as long as its longest path. Where that path passes several actions of one lane after another, only a lane
that runs the first of them later or the last of them earlier can shorten it (Nowicki and Smutnicki 1996, for job
shops). So each round moves one action of such a run to its front or to its back, or past one neighbour: an encoder's
forward or backward past those of the pipeline, a weight gradient past what it held up, a forward past a backward. What
the move may gain is estimated from the times around it (Balas and Vazacopoulos 1998); the best estimate is made, even
where it is a loss, and its reverse is then forbidden for some rounds. The shortest order that was seen is returned.

What a node does keeps its sequence, forwards, backwards and weight gradients each, and holds no more microbatches than
it may. Nothing is drawn at random and no clock is read, so every rank finds the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from hetero_strategy.schedule.action_index import ActionIndex

ROUNDS = 300
"""Most schedules that are timed."""
TIMED = 400_000
"""Most actions that are timed, in all of them: large steps get fewer schedules, so that none takes many seconds."""
STALE = 60
"""Rounds without a gain after which none is expected."""
REACH = 3
"""Actions at each end of a run that may move to that end."""
TABU = 15
"""Rounds for which a move is not reversed, and up to 6 more."""
ROUNDING = 1e-9
"""Share of the step's time below which a difference is no gain."""


class Move(NamedTuple):
    """An action of a lane's list takes another place in it."""

    estimate: float
    """Of the longest path through what moves or is passed."""
    lane: int
    place: int
    to: int


def shortened(
    numbers: ActionIndex, orders: Sequence[Sequence[int]], lanes: Sequence[tuple[int, ...]], bounds: Mapping[str, int]
) -> list[int]:
    """An order of starts that takes no longer than any of these.

    Args:
        numbers: of the step.
        orders: of all actions, each without those that cohorts do together before and after all else.
        lanes: of each node.
        bounds: by module, most microbatches that a stage may hold; of others what the shortest of ``orders`` holds.
    """
    search = min((_Search(numbers, order, lanes, bounds) for order in orders), key=lambda one: one.time)
    shortest, best, least = search.order, search.time, search.bound()
    forbidden: dict[tuple[int, int], int] = {}  # (what would come first, what after it) -> until which round
    gained = 0
    for number in range(min(ROUNDS, TIMED // max(1, len(search.order)))):
        moves = search.moves()
        if best <= least * (1 + ROUNDING) or not moves or number - gained > STALE:
            break
        move = next(
            (
                move
                for move in moves
                if move.estimate < best * (1 - ROUNDING)
                or all(forbidden.get(pair, -1) < number for pair in search.turned(move))
            ),
            moves[number % len(moves)],
        )
        for first, then in search.turned(move):
            forbidden[then, first] = number + TABU + number % 7
        search.run(search.changed(move))
        if search.time < best * (1 - ROUNDING):
            best, shortest, gained = search.time, search.order, number
    return shortest


class _Search:
    """Times of an order, and moves that may shorten it."""

    def __init__(
        self, numbers: ActionIndex, order: Sequence[int], lanes: Sequence[tuple[int, ...]], bounds: Mapping[str, int]
    ) -> None:
        self.durations = numbers.durations
        self.lanes = [lanes[i] for i in numbers.node_of]
        self.fixed = 3 * numbers.units  # UNSHARD and REDUCE stay where they are
        total = len(numbers.node_of)
        self.before: list[list[int]] = [[] for _ in range(total)]
        self.after: list[list[int]] = [[] for _ in range(total)]
        held = zip(numbers.nodes, numbers.in_flight(order), strict=True)
        caps = [bounds.get(node.module, most) for node, most in held]
        for first, then in sorted({*_needs(numbers, order, caps)}):
            self.before[then].append(first)
            self.after[first].append(then)
        self.start, self.end, self.tail = [0.0] * total, [0.0] * total, [0.0] * total
        """Of every action; its tail is the longest path from its end to that of the step."""
        self.cause = [-1] * total  # what each action waited for last
        self.via = [-1] * total  # on which lane, -1 where it waited for rows
        self.run(order)

    def run(self, order: Sequence[int]) -> None:
        """Time an order, and sort it by starts."""
        before, durations, start, end, cause, via = (
            self.before, self.durations, self.start, self.end, self.cause, self.via
        )  # fmt: skip
        count = 1 + max(lane for on in self.lanes for lane in on)
        lists: list[list[int]] = [[] for _ in range(count)]
        free, previous = [0.0] * count, [-1] * count
        for a in order:
            time, waited, lane_waited = 0.0, -1, -1
            for b in before[a]:
                if end[b] > time:
                    time, waited = end[b], b
            for lane in self.lanes[a]:
                if free[lane] >= time and previous[lane] >= 0:
                    time, waited, lane_waited = free[lane], previous[lane], lane
            start[a], cause[a], via[a] = time, waited, lane_waited
            end[a] = time = time + durations[a]
            for lane in self.lanes[a]:
                free[lane], previous[lane] = time, a
                lists[lane].append(a)
        self.order, self.lists, self.time = sorted(order, key=start.__getitem__), lists, max(free)

    def bound(self) -> float:
        """No order takes less: of each lane its work, and the shortest ways to its first and from its last action."""
        head, tail = dict[int, float](), dict[int, float]()
        for a in self.order:
            head[a] = max((head[b] + self.durations[b] for b in self.before[a]), default=0.0)
        for a in reversed(self.order):
            tail[a] = max((tail[b] + self.durations[b] for b in self.after[a]), default=0.0)
        return max(
            min(head[a] for a in own) + sum(self.durations[a] for a in own) + min(tail[a] for a in own)
            for own in self.lists
            if own
        )

    def moves(self) -> list[Move]:
        """All that may shorten the longest path, best estimate first."""
        self._find_tails()
        found = set[tuple[int, int, int]]()
        for lane, first, last in self._runs():
            own = self.lists[lane]
            a, b = own.index(first), own.index(last)
            for k in (k for k in range(a + 1, min(b, a + REACH) + 1) if own[k] < self.fixed):
                to = self._earliest(own, k, a)
                found |= {(lane, k, to), (lane, k, max(to, k - 1))}
            for k in (k for k in range(max(a, b - REACH), b) if own[k] < self.fixed):
                to = self._latest(own, k, b)
                found |= {(lane, k, to), (lane, k, min(to, k + 1))}
        return sorted(Move(self._estimate(*move), *move) for move in found if move[1] != move[2])

    def turned(self, move: Move) -> list[tuple[int, int]]:
        """(what comes first after a move, what comes after it and came first before)."""
        own, x = self.lists[move.lane], self.lists[move.lane][move.place]
        if move.to < move.place:
            return [(x, z) for z in own[move.to : move.place]]
        return [(z, x) for z in own[move.place + 1 : move.to + 1]]

    def changed(self, move: Move) -> list[int]:
        """The order after a move: what the action needs, or what needs it, goes along with it."""
        own, order = self.lists[move.lane], self.order
        sooner, x = move.to < move.place, own[move.place]
        a, b = sorted((order.index(x), order.index(own[move.to])))
        between = order[a:b] if sooner else order[a + 1 : b + 1]
        near = self.before if sooner else self.after
        along, rest, tied, taken = list[int](), list[int](), {*near[x]}, set[int]()
        for z in reversed(between) if sooner else between:
            if z in tied or not taken.isdisjoint(self.lanes[z]):
                along.append(z)
                tied.update(near[z])
                taken.update(self.lanes[z])
            else:
                rest.append(z)
        middle = [*reversed(along), x, *reversed(rest)] if sooner else [*rest, x, *along]
        return [*order[:a], *middle, *order[b + 1 :]]

    def _find_tails(self) -> None:
        durations, tail, free = self.durations, self.tail, [0.0] * len(self.lists)
        for a in reversed(self.order):
            time = max((tail[b] + durations[b] for b in self.after[a]), default=0.0)
            for lane in self.lanes[a]:
                time = max(time, free[lane])
            tail[a] = time
            for lane in self.lanes[a]:
                free[lane] = time + durations[a]

    def _runs(self) -> list[tuple[int, int, int]]:
        """(lane, first action, last action) of what the longest path passes one after another on one lane."""
        path = [max(self.order, key=self.end.__getitem__)]
        while self.cause[path[-1]] >= 0:
            path.append(self.cause[path[-1]])
        found = list[tuple[int, int, int]]()
        for then, first in pairwise(path):
            lane = self.via[then]
            if found and found[-1][0] == lane and found[-1][1] == then:
                found[-1] = lane, first, found[-1][2]
            elif lane >= 0:
                found.append((lane, first, then))
        return found

    def _earliest(self, own: Sequence[int], k: int, first: int) -> int:
        """The place nearest to ``first`` that an action may take: all that it passes ends after what it needs starts,
        so it cannot be needed for that.
        """
        needs = self.before[own[k]]
        ready = max((self.start[b] for b in needs), default=-1.0)
        to = k
        while to > first and own[to - 1] not in needs and self.end[own[to - 1]] > ready and own[to - 1] < self.fixed:
            to -= 1
        return to

    def _latest(self, own: Sequence[int], k: int, last: int) -> int:
        """The same towards ``last``."""
        needed = self.after[own[k]]
        due = min((self.end[b] for b in needed), default=inf)
        to = k
        while to < last and own[to + 1] not in needed and self.start[own[to + 1]] < due and own[to + 1] < self.fixed:
            to += 1
        return to

    def _estimate(self, lane: int, place: int, to: int) -> float:
        """The longest path through the actions between two places once they have moved, as if all else stood still."""
        own, durations = self.lists[lane], self.durations
        a, b = min(place, to), max(place, to) + 1
        passed = own[a:place] + own[place + 1 : b]
        moved = [own[place], *passed] if to < place else [*passed, own[place]]
        time = self.end[own[a - 1]] if a else 0.0
        ends, heads = dict[int, float](), list[float]()
        for x in moved:
            time = max([time, *(ends.get(z, self.end[z]) for z in self.before[x])])
            heads.append(time)
            ends[x] = time = time + durations[x]
        rest = self.tail[own[b]] + durations[own[b]] if b < len(own) else 0.0
        ways, longest = dict[int, float](), 0.0
        for x, head in zip(reversed(moved), reversed(heads), strict=True):
            rest = max([rest, *(ways[z] if z in ways else self.tail[z] + durations[z] for z in self.after[x])])
            ways[x] = rest = rest + durations[x]
            longest = max(longest, head + rest)
        return longest


def _needs(numbers: ActionIndex, order: Sequence[int], caps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(what comes first, what comes after it) wherever the order may not change."""
    units, nodes = numbers.units, len(numbers.nodes)
    for a, later in enumerate(numbers.after):
        yield from ((a, b) for b in later)
    kinds: list[list[list[int]]] = [[[] for _ in range(nodes)] for _ in range(5)]  # kind, node -> its actions in order
    for a in order:
        kinds[a // units if a < 3 * units else 3 + (a - 3 * units) // nodes][numbers.node_of[a]].append(a)
    for i, (forwards, backwards, weights, gathers, reduces) in enumerate(zip(*kinds, strict=True)):
        for run in ([*gathers, *forwards], [*backwards, *reduces], [*weights, *reduces]):
            yield from pairwise(run)
        yield from ((a - units, a) for a in (*backwards, *weights))
        if backwards:
            yield from zip(weights if numbers.split[i] else backwards, forwards[caps[i] :], strict=False)
