"""What is filling bubbles worth in real steps, and does the simulator say so?

Four gloo processes have an encoder on all ranks of a language model's pipeline, in turns with it and in its bubbles,
and a frozen one that works for the next step (``prefetch``): real step programs, messages and gradients of small
modules. What stands in for a device is time: an action ends no sooner than the seconds that its FLOPs are given, in
which its process sleeps. So four ranks need no four cores, and a step takes what its order costs, as long as the
modules themselves compute in less. Simulated is the very schedule with those seconds and nothing else. The bound is all
work over the four ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.common import arguments, report, write_json
from benchmarks.pipelines import Setting, Step, Turn, gather, planned, run_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.runtime.recorder import Mark, Recorder
from hetero_strategy.schedule.action import Action
from hetero_strategy.schedule.graph import PlannedCosts
from hetero_strategy.simulator.simulate import simulate
from tests.distributed.harness import Pool

RANKS = (0, 1, 2, 3)
FORWARD = 0.04
"""Seconds of the mean forward of a stage of the language model."""
RATIOS = (0.15, 0.3, 0.6)
"""Work of the encoder on a rank over that of the language model."""
SCHEDULES = ("1f1b", "zb_h1")
GOAL = 0.1
"""How far measured over simulated may be from 1."""


WAYS = {"none": {"fill": "none"}, "fine": {"fill": "fine"}, "ahead": {"fill": "fine", "prefetch": {"vision": 1}}}
"""How the encoder runs; ``ahead`` only where it is frozen."""


def setting(schedule: str, way: str, ratio: float, *, frozen: bool = False) -> Setting:
    """Return a model on four ranks, whose rows take the seconds that make ``ratio``."""
    layouts = {"vision": ModuleLayout(RANKS, dp_shard=4), "llm": ModuleLayout(RANKS, pp=4)}
    options: dict[str, Any] = {"vision": (64, 2), "llm": (64, 4), "samples": 64, "microbatches": 16, "items": (1, 3)}
    options |= {"freeze": ("vision",) if frozen else (), **WAYS[way]}
    made = Setting(way, layouts, schedule, reshard_after_forward="never", **options)
    batch, work = made.metadata(0), FORWARD * made.microbatches * len(RANKS)
    costs = {
        "llm": {"linear": work / batch.tokens.sum()},
        "vision": {"linear": ratio * work / batch.items["vision"].inner_rows.sum()},
    }
    return replace(made, balance={"costs": costs, "reorder": "none"})


def seconds(costs: PlannedCosts, action: Action) -> np.ndarray | float:
    """Of every instance; gathers and sums of gradients take what they take."""
    return 0.0 if action.microbatch < 0 else costs.of_instances(action)


@contextmanager
def paced(rank: int) -> Iterator[None]:
    """Actions of this process end no sooner than their seconds are over."""
    original, known = Recorder.ran, dict[tuple[int, bool], PlannedCosts]()

    def ran(self: Recorder, action: Action, begin: Mark) -> None:
        assert self._current is not None and isinstance(begin, float)
        plan, compiler = self._current.plan, self._compiler
        which = id(compiler), bool(plan.held)
        costs = known.get(which) or known.setdefault(which, PlannedCosts(plan, compiler.graph, compiler.costs))
        grid = compiler.graph.stages[action.node].grid
        own = int(np.nonzero((grid == rank).any(axis=1))[0][0])
        due = begin + float(np.broadcast_to(seconds(costs, action), len(grid))[own])
        time.sleep(max(0.0, due - time.perf_counter()))
        original(self, action, begin)

    Recorder.ran = ran  # type: ignore[method-assign]
    try:
        yield
    finally:
        Recorder.ran = original  # type: ignore[method-assign]


def on_rank(rank: int, world: int, schedule: str, ratio: float, frozen: bool, rounds: int) -> list[Step]:
    """Run steps in turns and in bubbles, one after the other in random order."""
    turns = [Turn(setting(schedule, way, ratio, frozen=frozen), model=i) for i, way in enumerate(ways(frozen))]
    with paced(rank):
        return run_turns(rank, world, turns, 1, rounds)


def ways(frozen: bool) -> list[str]:
    """Ways in which an encoder may run."""
    return list(WAYS)[: 3 if frozen else 2]


def simulated(schedule: str, way: str, ratio: float, *, frozen: bool = False) -> float:
    """Seconds of the very schedule; of the pipeline alone where the encoder takes no time."""
    known = planned(setting(schedule, way, ratio, frozen=frozen), 0)
    return simulate(known.schedule, lambda action: seconds(known.costs, action)).time


def least(ratio: float, *, frozen: bool = False) -> float:
    """Seconds of all work over the ranks; a backward takes twice as long as its forward."""
    forwards = 3 + ratio * (1 if frozen else 3)
    return forwards * FORWARD * setting(SCHEDULES[0], "none", ratio).microbatches


def main(argv: Sequence[str] | None = None, pool: Pool | None = None) -> dict[str, Any]:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each kind")
    args = parser.parse_args(argv)
    rows, found, processes = [], dict[str, Any](), pool or Pool()
    for schedule, ratio, frozen in product(SCHEDULES, RATIOS, (False, True)):
        steps = gather(processes.run(4, on_rank, schedule, ratio, frozen, args.rounds, timeout=600))
        said = [simulated(schedule, way, ratio, frozen=frozen) for way in ways(frozen)]
        took = [statistics.median(s.seconds for s in steps if s.turn == i) for i in range(len(said))]
        alone, bound = simulated(schedule, "none", 0.0), least(ratio, frozen=frozen)
        name = f"{schedule}, {ratio}{', frozen' if frozen else ''}"
        found[name] = {"measured": took, "simulated": said, "over pipeline": took[-1] / alone,
                       "bound over pipeline": bound / alone}  # fmt: skip
        for way, measured, expected in zip(ways(frozen), took, said, strict=True):
            shares = [measured / took[0], expected / said[0], measured / expected, measured / alone, bound / alone]
            rows.append([schedule, ratio, "frozen" if frozen else "trained", way, measured, *shares])
    head = ("schedule", "encoder / llm", "encoder", "way", "seconds", "over turns", "simulated", "measured / simulated",
            "over pipeline alone", "bound / alone")  # fmt: skip
    report("filled_steps", "An encoder in turns with a pipeline and in its bubbles", head, rows, [])
    write_json(args.json, "filled_steps", "cpu", {"rounds": args.rounds}, found)
    return found


if __name__ == "__main__":
    main()
