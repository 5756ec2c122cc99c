"""Real training steps of several variants in turns, each beside its simulation: gloo processes of one thread each.

A comparison has cases, and a case has variants: the same model and the same global batches in other layouts, orders or
budgets. Steps have no optimizer. The ratio is the median over rounds and batches of a variant's step over that of the
first variant in the same round.

  balanced      2 ranks, every module data parallel on both, as in OrchMLLM; each sample is mostly image, recording or
                text. As sampled; with the language model alone balanced, which is what balancing before the step can
                do; with every module balanced on its own cost.
  modalities    Two encoders of equal, dominant cost and a small language model: both encoders on rank 0, as one stage
                before the language model on rank 1; or audio on rank 1, beside it. Goal: 0.65.
  microbatches  ``encoder_microbatch_rows`` as a multiple of the encoder's mean rows in an instance and microbatch. In
                ``large`` an action takes tens of ms; in ``small`` the fixed cost of a pass counts.
  filled        An encoder on all ranks of a pipeline of 4, trained or frozen, in turns with it and in its bubbles.
  repeated      A language model with cp 2 on 4 ranks; its encoder repeated on the ranks that share a sequence, or data
                parallel on all. The share e of the encoder in all work lengthens the step to 2 * e + 1 - e.

The last two are paced: an action ends no sooner than the seconds that its FLOPs are given, in which its process
sleeps. So four ranks need no four cores, and a step takes what its order costs. Their simulation knows these seconds;
that of the other comparisons knows lines in rows and squared lengths through the actions of the first variant, so its
ratio is what the schedules alone gain. Two ranks need two processors: rounds in which a rank was at an action but not
on a processor for more than 5% of a step are left out where at least three others remain.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Options, option, program, report
from benchmarks.pipeline_timing import fitted, ran, scaled, simulated
from benchmarks.pipelines import DISTURBED, Step, Turn, gather, run_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.runtime.recorder import Mark, Recorder
from hetero_strategy.schedule.action import Action
from hetero_strategy.schedule.graph import PlannedCosts
from hetero_strategy.simulator.simulate import simulate
from hetero_strategy.testing import Planned, Pool, Setting, planned
from hetero_strategy.testing.setting import MERGE

FORWARD = 0.04
"""Seconds of the mean forward of a stage of a paced language model."""
RATIOS = (0.15, 0.3, 0.6)
"""Work of a paced encoder on a rank over that of the language model."""
ALL = (0, 1, 2, 3)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


class Case(NamedTuple):
    """Variants of one step."""

    name: str
    variants: Mapping[str, Setting]
    """The others are measured against the first."""
    batches: int = 1
    paced: bool = False


def _on(*ranks: int, **degrees: Any) -> ModuleLayout:
    return ModuleLayout(ranks=ranks, **degrees)


class Incoherent(Setting):
    """Samples that are mostly image, mostly recording or mostly text, with lognormal sizes."""

    def metadata(self, seed: int) -> StepMetadata:
        rng = np.random.default_rng(seed)
        kind = rng.integers(0, 3, self.samples)
        text = np.maximum(4, rng.lognormal(np.where(kind == 2, 6.0, 3.0), 0.5)).astype(np.int64)
        side = np.clip(rng.lognormal(2.3, 0.35, self.samples), 2, 20).astype(np.int64)
        clip = np.clip(rng.lognormal(6.0, 0.5, self.samples), 16, 1400).astype(np.int64)
        items, before = {}, np.zeros(self.samples, dtype=np.int64)
        for name, mine, rows in (("vision", kind == 0, side**2), ("audio", kind == 1, clip)):
            sample = np.flatnonzero(mine)
            hidden = rows[sample] * (MERGE**2 if name == "vision" else 1)
            items[name] = StepItems(sample, rows[sample], before[sample], hidden)
            before[sample] += rows[sample]
        return StepMetadata(0, 0, np.arange(self.samples), before + text, text - 1, items)


def balanced() -> Iterator[Case]:
    """One placement, three ways to spread the work."""
    layouts = dict.fromkeys(("vision", "audio", "llm"), _on(0, 1, dp_replicate=2))
    sizes: dict[str, Any] = {"vision": (192, 3), "audio": (192, 4), "llm": (192, 4), "samples": 24, "microbatches": 1}
    policies = {"as sampled": "none", "llm only": {"llm": "auto", "vision": "none", "audio": "none"}, "all": "auto"}
    made = Incoherent("incoherent", layouts, **sizes)
    yield Case("", {name: replace(made, balance=_balance(policy)) for name, policy in policies.items()}, batches=4)


def _balance(policy: Any) -> dict[str, Any]:
    return {"policy": policy, **({"reorder": "none"} if policy == "none" else {})}


def modalities() -> Iterator[Case]:
    """Per sample an image of 64 rows inside the encoder and a recording of 64."""
    sizes: dict[str, Any] = {"vision": (256, 6), "audio": (256, 6), "llm": (128, 1), "samples": 16, "microbatches": 8}
    sizes |= {"items": (1, 1), "cells": (4, 4), "clip": (64, 64), "text": (8, 8)}
    places = {"chain": _on(0), "parallel": _on(1)}
    layouts = {name: {"vision": _on(0), "audio": audio, "llm": _on(1)} for name, audio in places.items()}
    yield Case("", {name: Setting(name, of, **sizes) for name, of in layouts.items()})


def microbatches() -> Iterator[Case]:
    """Budgets on other placements: an encoder on ranks of its own, beside the first stage, and colocated."""
    placements = {
        "disjoint": {"vision": _on(0), "llm": _on(1)},
        "beside": {"vision": _on(0), "llm": _on(0, 1, pp=2)},
        "colocated": {"vision": _on(0, 1, dp_replicate=2), "llm": _on(0, 1, dp_replicate=2)},
    }
    sizes: dict[str, dict[str, Any]] = {
        "large": {"samples": 32, "items": (1, 3), "cells": (2, 4), "text": (16, 48)},
        "small": {"samples": 16, "items": (0, 2), "cells": (1, 2), "text": (4, 12)},
    }
    for (size, options), (name, layouts) in product(sizes.items(), placements.items()):
        one = Setting(size, layouts, vision=(192, 4), llm=(192, 4), microbatches=8, **options)
        rows = float(one.metadata(0).items["vision"].inner_rows.sum())
        mean = rows / one.microbatches / one.placement.instances()["vision"]
        budgets = {f"x {f:g}": replace(one, tokens={"vision": max(1, round(f * mean))}) for f in FACTORS}
        yield Case(f"{size}, {name}", {"as the step's": one} | budgets)


def filled() -> Iterator[Case]:
    """An encoder with some of the work of its language model, in turns and in bubbles."""
    layouts = {"vision": ModuleLayout(ALL, dp_shard=4), "llm": ModuleLayout(ALL, pp=4)}
    for schedule, ratio, frozen in product(("1f1b", "zb_h1"), RATIOS, (False, True)):
        options = {"freeze": ("vision",) if frozen else (), "samples": 64, "microbatches": 16, "items": (1, 3)}
        turns = {fill: paced_setting(layouts, schedule, ratio, fill=fill, **options) for fill in ("none", "fine")}
        yield Case(f"{schedule}, {ratio}{', frozen' if frozen else ''}", turns, paced=True)


def repeated() -> Iterator[Case]:
    """The encoder on two ranks, one for each sequence, or on all four."""
    encoders = {"rigid": ModuleLayout((0, 2), dp_shard=2), "colocated": ModuleLayout(ALL, dp_shard=4)}
    for ratio in (0.3, 0.6):
        ways = {}
        for name, vision in encoders.items():
            layouts = {"vision": vision, "llm": ModuleLayout(ALL, cp=2, dp_shard=2)}
            # Context-parallel ranks share the seconds of a sequence.
            sizes = {"shared": 2, "samples": 32, "microbatches": 4, "items": (2, 3)}
            ways[name] = paced_setting(layouts, "1f1b", ratio, **sizes)
        yield Case(f"e {ratio / (1 + ratio):.0%}", ways, paced=True)


def paced_setting(
    layouts: Mapping[str, ModuleLayout], schedule: str, ratio: float, *, shared: int = 1, **options: Any
) -> Setting:
    """Return a small model on four ranks, whose rows take the seconds that make ``ratio``."""
    sizes: dict[str, Any] = {"vision": (64, 2), "llm": (64, 4), "reshard_after_forward": "never"}
    made = Setting("paced", layouts, schedule, **sizes, **options)
    batch, work = made.metadata(0), FORWARD * made.microbatches * len(ALL)
    costs = {
        "llm": {"linear": work / batch.tokens.sum()},
        "vision": {"linear": shared * ratio * work / batch.items["vision"].inner_rows.sum()},
    }
    return replace(made, balance={"costs": costs, "reorder": "none"})


COMPARISONS: Mapping[str, Callable[[], Iterator[Case]]] = {
    f.__name__: f for f in (balanced, modalities, microbatches, filled, repeated)
}


def pace(costs: PlannedCosts, action: Action) -> np.ndarray | float:
    """Seconds of every instance; gathers and sums of gradients take what they take."""
    return 0.0 if action.microbatch < 0 else costs.of_instances(action)


@contextmanager
def paced(rank: int) -> Iterator[None]:
    """Actions of this process end no sooner than their seconds are over."""
    original, known = Recorder.ran, dict[int, PlannedCosts]()

    def ran(self: Recorder, action: Action, begin: Mark, *stream: Any) -> None:
        assert self._current is not None and isinstance(begin, float)
        plan, compiler = self._current.plan, self._compiler
        costs = known.get(id(compiler))
        costs = costs or known.setdefault(id(compiler), PlannedCosts(plan, compiler.graph, compiler.costs))
        grid = compiler.graph.stages[action.node].grid
        own = int(np.nonzero((grid == rank).any(axis=1))[0][0])
        due = begin + float(np.broadcast_to(pace(costs, action), len(grid))[own])
        time.sleep(max(0.0, due - time.perf_counter()))
        original(self, action, begin, *stream)

    Recorder.ran = ran  # type: ignore[method-assign]
    try:
        yield
    finally:
        Recorder.ran = original  # type: ignore[method-assign]


def on_rank(rank: int, world: int, turns: Sequence[Turn], warmup: int, rounds: int, slow: bool) -> list[Step]:
    """Run all variants in turns."""
    with paced(rank) if slow else nullcontext():
        return run_turns(rank, world, turns, warmup, rounds)


def paced_seconds(known: Planned) -> float:
    """Simulate a step with the seconds that its actions are given."""
    return simulate(known.schedule, lambda action: pace(known.costs, action)).time


def compare(case: Case, pool: Pool, warmup: int, rounds: int) -> dict[str, dict[str, float]]:
    """Run a case; return the figures of every variant."""
    seeds = range(case.batches)
    turns = [Turn(one, seed, model=i) for i, one in enumerate(case.variants.values()) for seed in seeds]
    steps = gather(pool.run(turns[0].setting.world, on_rank, turns, warmup, rounds, case.paced, timeout=900))
    by_turn = [[s for s in steps if s.turn == number] for number in range(len(turns))]
    quiet = [case.paced or max(s.lost for s in of_round) <= DISTURBED for of_round in zip(*by_turn, strict=True)]
    if sum(quiet) >= 3:
        by_turn = [[s for s, q in zip(mine, quiet, strict=True) if q] for mine in by_turn]
    known = [planned(turn.setting, turn.seed) for turn in turns]
    if case.paced:
        expected = [paced_seconds(one) for one in known]
    else:
        basis = [ran(known[seed], step) for seed in seeds for step in by_turn[seed]]
        expected = [simulated(one, fitted(one, basis), 0.0).time for one in known]
    found = {}
    for i, name in enumerate(case.variants):
        own = [(i * case.batches + seed, seed) for seed in seeds]
        pairs = [(a, b) for mine, first in own for a, b in zip(by_turn[mine], by_turn[first], strict=True)]
        found[name] = {
            "step_ms": 1e3 * statistics.median(a.wall for a, _ in pairs),
            "ratio": statistics.median(a.wall / b.wall for a, b in pairs),
            "simulated": statistics.mean(expected[mine] / expected[first] for mine, first in own),
            "over_simulated": statistics.median(s.seconds / expected[mine] for mine, _ in own for s in by_turn[mine]),
            "rounds": len(by_turn[0]),
            "lost": 0.0 if case.paced else statistics.median(a.lost for a, _ in pairs),
        }
    return found


@program(
    option("comparison", nargs="*", metavar="COMPARISON", help=f"of {', '.join(COMPARISONS)} (default: all)"),
    option("--only", default="", help="cases whose name contains this"),
    option("--rounds", type=int, default=7, help="measured (default 7)"),
    option("--warmup", type=int, default=1, help="rounds before (default 1)"),
    option("--scale", type=float, default=1.0, help="of widths that are not paced (default 1)"),
)
def main(given: Options) -> dict[str, Any]:
    """Run the comparisons."""
    found: dict[str, Any] = {}
    for comparison in given.comparison or COMPARISONS:
        table = []
        for case in COMPARISONS[comparison]():
            if given.only not in case.name:
                continue
            if not case.paced:
                case = case._replace(variants={n: scaled(one, given.scale) for n, one in case.variants.items()})
            found[f"{comparison} {case.name}".strip()] = lines = compare(case, given.pool, given.warmup, given.rounds)
            table += [[case.name, name, f"{x['step_ms']:.0f}", x["ratio"], x["simulated"], x["over_simulated"],
                       x["rounds"], f"{x['lost']:.0%}"] for name, x in lines.items()]  # fmt: skip
        columns = (
            "case",
            "variant",
            "step ms",
            "over the first",
            "simulated",
            "measured / simulated",
            "rounds",
            "lost",
        )
        report(f"{comparison}: steps of real processes in turns", columns, table)
    return found


if __name__ == "__main__":
    main()
