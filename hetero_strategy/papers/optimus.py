"""Optimus (Feng et al. 2024, arXiv:2408.03505): an encoder on all ranks of a pipeline, in its bubbles, as published.

Importing this module registers two fills. Algorithm 2 begins with ``coarse``; ``fine`` (``schedule.fill``) replaces its
hill climb over kernels: an idle rank runs what it may. ``adjusted`` is the better of ``fine`` and of ``fine`` around
pipelines with adjusted warm-ups (figure 12): forwards of interleaved 1F1B come as late as the pipeline alone allows, so
the encoder's rows are due later. Plain 1F1B has no forward to defer.

:func:`beside_collectives` predicts the gain of the paper's third kind of bubble: encoders also compute while the ranks
of a language model wait for tensor-parallel collectives inside their actions (sections 3.1 and 4.2). The runtime does
not do that: it would need a second CUDA stream, separate communicators for the encoder, and a third stream for rows
between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappush
from itertools import accumulate

from typing_extensions import override

from hetero_strategy.layout.spec import Pipeline
from hetero_strategy.schedule.action import StageGraph, StepWork
from hetero_strategy.schedule.action_index import ActionIndex, Costs
from hetero_strategy.schedule.build import step_programs
from hetero_strategy.schedule.fill import FillPolicy, StepPrograms, fill_policy, register_fill
from hetero_strategy.schedule.merge import Merge
from hetero_strategy.schedule.policies import schedule_policy
from hetero_strategy.schedule.programs import BACKWARD, FORWARD, WEIGHT, RankProgram, duration, paired

ROUNDED = 1e-12
"""Share of an action below which a rest is only rounding."""


@lru_cache(64)
def adjusted(pipeline: Pipeline, ranks: tuple[RankProgram, ...]) -> tuple[RankProgram, ...]:
    """Defer forwards past backwards, rank after rank from the last, as far as the pipeline alone takes no longer.

    Forwards count as 1 and backwards as 2. With 4 ranks of 2 stages each and 8 microbatches, the first rank begins with
    the forwards ``1 2 3 4`` of both stages and the backward of 1 in place of 11 forwards before that. These take 0.1 s,
    and hundreds of actions on each rank take seconds, once for each number of microbatches.

    Args:
        pipeline: pipeline of the module.
        ranks: program of each rank, without weight gradients.
    """
    least, programs = duration(pipeline, ranks), list(ranks)
    for rank, program in reversed(list(enumerate(ranks))):
        forwards, backwards = ([op[1:] for op in program if op[0] == kind] for kind in (FORWARD, BACKWARD))
        done = list(accumulate(int(kind == FORWARD) for kind, *_ in program))
        leads = [lead for lead, (kind, *_) in zip(done, program, strict=True) if kind == BACKWARD]
        needs = list(accumulate((forwards.index(unit) + 1 for unit in backwards), max))
        for k, need in enumerate(needs):
            for lead in range(leads[k] - 1, max(need, leads[k - 1] if k else 0) - 1, -1):
                tried = [*leads[:k], lead, *leads[k + 1 :]]
                later = paired(forwards, backwards, tried)
                if duration(pipeline, [*programs[:rank], later, *programs[rank + 1 :]]) != least:
                    break
                leads, programs[rank] = tried, later
    return tuple(programs)


def _adjusted(step: StepPrograms) -> list[Merge | None]:
    fine, merges = fill_policy("fine").merges, list(step.made)
    for module, pipeline in step.pipelines.items():
        own = [i for i, one in enumerate(merges) if one.at.module == module and not one.fills]
        if pipeline.pp == len(own) > 1 and all(op[0] != WEIGHT for i in own for op in merges[i].program):
            for i, program in zip(own, adjusted(pipeline, tuple(merges[i].program for i in own)), strict=True):
                merges[i] = merges[i]._replace(program=program)
    return [*fine(step)] if merges == [*step.made] else [*fine(step), *fine(replace(step, made=merges))]


register_fill(FillPolicy("coarse", lambda step: [step.around()]))
register_fill(FillPolicy("adjusted", _adjusted, ends=True))


def beside_collectives(
    schedule: str,
    graph: StageGraph,
    work: StepWork,
    costs: Costs,
    waits: Costs,
    max_in_flight: Mapping[str, int] | None = None,
) -> tuple[float, float]:
    """Predict a step whose encoders fill bubbles, without and with bubbles inside actions; transfers take no time.

    Args:
        schedule: name of a policy in ``schedule.policies``.
        graph: stages of all modules.
        work: microbatches of the step.
        costs: seconds of an action.
        waits: seconds of an action in which its ranks wait for collectives and leave room to compute.
        max_in_flight: by module, most microbatches that each of its stages may hold.

    Returns:
        Seconds with ``fill="fine"``, and with encoders during collectives as well.
    """
    policy = schedule_policy(schedule)
    numbers = ActionIndex(graph, work, train=True, splits=policy.splits_backward, costs=costs)
    step = step_programs(policy, graph, work, numbers, max_in_flight or {})
    fine = min(merge.now for merge in fill_policy("fine").merges(step) if merge is not None)
    overlapped = MergeBeside(step, [0.0 if action is None else waits(action) for action in numbers.actions])
    order = overlapped.run()
    assert order is not None, "programs that fit into one order can run beside each other"
    return fine, overlapped.now


def speed(spare: float, compute: float) -> float:
    """Return how fast an action runs beside others; 1: as fast as alone.

    Args:
        spare: share of the time in which the other actions leave room to compute, 1: always.
        compute: share of the action in which it computes. In the rest it waits for its own collectives, for which there
            is always room.
    """
    return 1.0 if not compute else 1.0 / (compute / spare + 1.0 - compute) if spare > 0 else 0.0


class MergeBeside(Merge):
    """A merge that runs filling programs on a separate stream, which takes no time of their lanes.

    Filling programs run at full speed while their lanes are idle. Otherwise they run in the share of the time in which
    the action on the lane waits for collectives.

    Args:
        step: programs of the step.
        waits: seconds of each action's wait for collectives, by action number.
    """

    def __init__(self, step: StepPrograms, waits: Sequence[float]) -> None:
        super().__init__(step.numbers, step.lists, step.lanes, step.caps, step.fills)
        self.inside = waits
        self.side = {lane: [p for p in hosted if self.late[p]] for lane, hosted in self.hosted.items()}
        self.hosted = {lane: [p for p in hosted if not self.late[p]] for lane, hosted in self.hosted.items()}
        wide = (on for on, late in zip(self.lanes, self.late, strict=True) if len(on) > 1 and not late)
        shared = {lane for on in wide for lane in on}
        self.aged = [not shared.isdisjoint(on) for on in self.lanes]
        self.spare = dict.fromkeys(self.hosted, 1.0)
        """Lane -> share of its time with room to compute, at the moment."""
        self.served: dict[int, int] = {}
        """Lane -> action that runs beside others on the lane."""
        self.rest: dict[int, tuple[float, float, float]] = {}
        """Action that runs beside others -> seconds left if alone, time of that count, speed since then."""
        self.ended = 0.0

    @override
    def run(self) -> list[int] | None:
        order = super().run()
        self.now = self.ended  # the last event may be void
        return order

    @override
    def start(self, touched: set[int]) -> None:
        super().start(touched)
        waiting = {p for lane in touched if lane not in self.served for p in self.side[lane]}
        ready = []
        for p in waiting:
            number = self.programs[p][self.head[p]] if self.since[p] >= 0 else -1
            if number >= 0 and not self.capped(p, number):
                ready.append((self.key(p), p, number))
            elif self.weights[p]:
                ready.append(((True, True, self.numbers.units, 0), p, self.weights[p][0]))
        kept = set[int]()  # lanes kept for a program that needs several, so that the lanes do not take turns without it
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
        self.rest[number] = self.numbers.durations[number], self.now, 0.0
        self.change_speed(number)

    def change_speed(self, number: int) -> None:
        """Set the speed of an action that runs beside others to what its lanes leave now."""
        left, since, fast = self.rest[number]
        length = self.numbers.durations[number]
        left -= (self.now - since) * fast
        left = left if left > ROUNDED * length else 0.0
        spare = min(self.spare[lane] for lane in self.lanes[self.owner[number]])
        fast = speed(spare, 1.0 - self.inside[number] / length) if left else 1.0
        self.rest[number] = left, self.now, fast
        if fast:
            heappush(self.events, (self.now + left / fast, number))

    @override
    def place(self, p: int, number: int, kept: dict[int, float], *, keep: bool = True) -> bool:
        opens = not self.opened[self.node[number]]
        if not super().place(p, number, kept, keep=keep):
            return False
        length, inside = self.numbers.durations[number], self.inside[number]
        if opens and self.opened[self.node[number]]:
            gather = 3 * self.numbers.units + self.node[number]
            length, inside = length + self.numbers.durations[gather], inside + self.inside[gather]
        self.make_room(self.lanes[p], inside / length if length else 1.0)
        return True

    def make_room(self, lanes: Sequence[int], spare: float) -> None:
        """Set the room to compute on some lanes from now on."""
        self.spare.update(dict.fromkeys(lanes, spare))
        for number in {self.served[lane] for lane in lanes if lane in self.served}:
            self.change_speed(number)

    @override
    def end(self, number: int, touched: set[int]) -> None:
        lanes = self.lanes[self.owner[number]]
        if not self.late[self.owner[number]]:
            super().end(number, touched)
            self.make_room(lanes, 1.0)
        elif number in self.rest and self.is_over(number):
            del self.rest[number]
            for lane in lanes:
                del self.served[lane]
            busy = {lane: self.busy[lane] for lane in lanes}  # keep the actions that run beside
            super().end(number, touched)
            self.busy.update(busy)
        else:
            return
        self.ended = self.now

    def is_over(self, number: int) -> bool:
        """Return whether an action that runs beside others ends now; its speed may have changed since this event was
        set.
        """
        left, since, fast = self.rest[number]
        return bool(fast) and self.now == since + left / fast
