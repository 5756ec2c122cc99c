"""Steps of real multimodal models on real processes, without a Trainer: what the benchmarks of pipelines run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from hetero_strategy.loading.batch import Batch
from hetero_strategy.schedule.action import Action
from hetero_strategy.strategy.assembly import Assembled
from hetero_strategy.testing import Setting


class Step(NamedTuple):
    """One step on one rank, in seconds of this machine's clock."""

    turn: int
    """Which of the things that take turns it was."""
    begin: float
    """Before the batch was given to the executor, after all ranks had met."""
    end: float
    span: tuple[float, float]
    """Of the schedule alone, without what builds it."""
    events: list[tuple[Action, float, float]]
    cpu: float
    """Processor seconds of this process from begin to end."""


class Turn(NamedTuple):
    """One of the things that take turns."""

    setting: Setting
    seed: int = 0
    """Of its batch."""
    model: int = 0
    """Turns of one number share a model, and so must agree in all but the batch."""


def run_turns(rank: int, world: int, turns: Sequence[Turn], warmup: int, rounds: int) -> list[Step]:
    """On every rank: training steps without optimizer, every turn once a round, in a new random order each round.

    The steps after the warm-up rounds; a collective.
    """
    models: dict[int, Assembled] = {}
    for turn in turns:
        if turn.model not in models:
            models[turn.model] = turn.setting.assembled(rank)
    batches = [turn.setting.batch(turn.seed, rank) for turn in turns]
    random = np.random.default_rng(0)
    steps = []
    for number in range(warmup + rounds):
        for i in random.permutation(len(turns)):
            step = _step(models[turns[i].model], batches[i], int(i))
            if number >= warmup:
                steps.append(step)
    dist.barrier()
    return steps


def _step(made: Assembled, batch: Batch, turn: int) -> Step:
    executor = made.executor
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    executor.run(batch, train=True)
    end, cpu = time.perf_counter(), time.process_time() - cpu
    for stage in executor.stages.values():
        for parameter in stage.parameters():
            parameter.grad = None
    last = executor.recorder.steps[-1]
    return Step(turn, begin, end, last.span(), last.events(), cpu)


DISTURBED = 0.05
"""A step that lost more than this part of its time to other processes says little of its layout."""


class Gathered(NamedTuple):
    """One step on all ranks."""

    turn: int
    wall: float
    """Seconds from the first rank's begin to the last rank's end, schedule building included."""
    span: tuple[float, float]
    """Of the schedule, over all ranks."""
    events: dict[int, list[tuple[Action, float, float]]]
    lost: float
    """Part of the wall time in which the most disturbed rank was at an action but not on a processor."""

    @property
    def seconds(self) -> float:
        """Return the seconds of the schedule."""
        return self.span[1] - self.span[0]


def gather(ranks: Sequence[Sequence[Step]]) -> list[Gathered]:
    """Steps of all ranks, each a list of the same turns; ranks of one machine have one clock."""
    found = []
    for steps in zip(*ranks, strict=True):
        span = min(s.span[0] for s in steps), max(s.span[1] for s in steps)
        wall = max(s.end for s in steps) - min(s.begin for s in steps)
        busy = [sum(end - start for _, start, end in s.events) for s in steps]
        lost = max(0.0, *((b - s.cpu) / wall for b, s in zip(busy, steps, strict=True)))
        found.append(Gathered(steps[0].turn, wall, span, {rank: s.events for rank, s in enumerate(steps)}, lost))
    return found
