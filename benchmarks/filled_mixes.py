"""How near to a lower bound do steps of published mixes come whose encoder fills the bubbles of a pipeline?

A pipeline of p ranks, 2 p microbatches (8 at least) of the mixes that ``benchmarks.reordering`` draws, and encoders on
all of these ranks with 0.15, 0.3 or 0.6 of a rank's work for the language model. Stages of the language model are
equal, microbatches are not. Whole items are balanced over the instances by the product's policy: within each microbatch
where all act together, over the step where they fill. The schedule of every step is made for its own times, in 1F1B and
ZB-H1, and simulated with transfers free:

  none, coarse, fine  with the order of microbatches that ``Reorderer`` finds for it
  search              ``fill="search"`` with the order found for ``fine``
  both                the same with the order that is searched for together with it: what a run with the option does

Figures are step over bound, medians and worst. The bound is the longer one of the busiest rank's work and of what the
language model alone needs: of each stage the least time until its first microbatch can arrive, all its work, and the
least time from its last backward to the first stage's; and the longest microbatch. Seconds are of one core per step,
and as a share of a step whose mean forward of a stage takes 40 ms (4096 tokens through 2B parameters at 400 TFLOP/s).

The second table is DIP's setting as far as it is printed (arXiv:2504.14145: a 37B model, whose best static split idles
22.8% of the time; taken here: an encoder of 5B before a language model of 32B, cut into 8 stages, 16 microbatches, the
mixes above). ``static`` is the split of stages and the 1F1B schedule that are best in the mean of all steps, with
microbatches as they come; ``order`` and ``search`` order and search each step on that split; ``filled static`` has the
encoder on all ranks in one schedule for all steps, and ``filled both`` searches each step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks.common import arguments, report, write_json
from benchmarks.reordering import SAMPLES, WIDTHS, drawn
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.plan.balance import Cost, balance
from hetero_strategy.plan.orchestrator import Size
from hetero_strategy.schedule.action import Action, Schedule, Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import StageCost, stage_graph, usual
from hetero_strategy.simulator.reordering import Reorderer
from hetero_strategy.simulator.simulate import simulate
from recipes.workloads import WORKLOADS

EDGE = ("vision", "llm")
RATIOS = (0.15, 0.3, 0.6)
SCHEDULES = ("1f1b", "zb_h1")
CONTENDERS = ("none", "coarse", "fine", "search", "both")
FORWARD = 0.04
"""Seconds of a stage's mean forward."""
DIP = (8, 16, 5.0, 32.0)
"""Ranks, microbatches, and parameters of both modules."""
KINDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
Times = Mapping[str, np.ndarray]
"""Of a stage's forward, by module: float64 ``[microbatches, instances]``."""


@dataclass(frozen=True)
class Steps:
    """Layouts, and what a schedule of them takes."""

    graph: StageGraph
    schedule: str

    def ordered(self, times: Times, fill: str) -> np.ndarray:
        """The order of microbatches that the product finds."""
        sizes = {m: Size(t, 0.0 * t) for m, t in times.items()}
        costs = {n.all_instances: StageCost(1.0, 0.0) for n in self.graph.stages}
        return Reorderer(self.graph, self.schedule, costs, fill=fill)(sizes)

    def made(self, times: Times, order: np.ndarray, fill: str) -> Schedule:
        """The step's schedule; modules skip microbatches in which they have nothing."""
        there = {m: [k for k, o in enumerate(order.tolist()) if t[o].any()] for m, t in times.items()}
        feeds = {EDGE: tuple((k, k) for k in sorted({*there["vision"]} & {*there["llm"]}))}
        work = StepWork({m: tuple(Span(k, k, k) for k in own) for m, own in there.items()}, feeds)
        usually = {n: usual(n, self._own(n, times)).tolist() for n in self.graph.stages}

        def cost(action: Action) -> float:
            k = action.microbatch
            return 0.0 if k < 0 else KINDS[action.kind] * usually[action.node][order[k]]

        return make_schedule(self.schedule, self.graph, work, cost, fill=fill)

    def seconds(self, schedule: Schedule, times: Times, order: np.ndarray) -> float:
        """Of the step, whatever the schedule was made for."""
        own = {n: self._own(n, times) for n in self.graph.stages}

        def cost(action: Action) -> float | np.ndarray:
            k = action.microbatch
            return 0.0 if k < 0 else KINDS[action.kind] * own[action.node][order[k]]

        return simulate(schedule, cost).time

    def _own(self, node: StageId, times: Times) -> np.ndarray:
        return self.graph.stages[node].own(times[node.module])


def steps_of(vision: ModuleLayout, llm: ModuleLayout, schedule: str, fills: bool) -> Steps:
    """Of an encoder and a language model, all trained, whole on their ranks."""
    layouts = {"vision": vision.resolved("vision"), "llm": llm.resolved("llm")}
    trains = {StageId(m, s): True for m, layout in layouts.items() for s in range(layout.pipeline.stages)}
    return Steps(stage_graph(list(layouts), [EDGE], layouts, trains, apart=("vision",) if fills else ()), schedule)


def items_of(workload: str, microbatches: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Microbatch and rows of every item of the step that ``reordering.drawn`` sums up; none of ``lognormal``."""
    if workload == "lognormal":
        return np.empty(0, np.int64), np.empty(0, np.int64)
    samples = microbatches * SAMPLES[workload]
    items = WORKLOADS[workload](samples, seed).items.values()
    sample = np.concatenate([one.sample for one in items])
    return sample * microbatches // samples, np.concatenate([one.inner_rows for one in items])


def dealt(encoder: np.ndarray, microbatch: np.ndarray, rows: np.ndarray, ranks: int, whole: bool) -> np.ndarray:
    """Encoder time of every instance, float64 ``[microbatches, ranks]``, balanced over the step or in each microbatch.

    Args:
        encoder: time of every microbatch, in proportion to the work of its items.
        whole: over the step.
    """
    if not len(rows):
        return np.repeat(encoder[:, None], ranks, axis=1) / ranks
    cost = Cost(1.0, 1 / (6 * WIDTHS["encoder"]))
    where = balance(rows, ranks, cost) if whole else np.empty(len(rows), np.int64)
    for k in [] if whole else np.unique(microbatch):
        where[microbatch == k] = balance(rows[microbatch == k], ranks, cost)
    work = np.zeros((len(encoder), ranks))
    np.add.at(work, (microbatch, where), cost.alone(rows))
    return work * (encoder.sum() / work.sum())


def bound(schedule: str, ranks: int, times: Times) -> float:
    """No schedule takes less time."""
    llm = times["llm"][:, 0]
    back = 2.0 if schedule == "1f1b" else 1.0  # a gradient needs no weight gradient behind it
    alone = 3 * llm.sum() + (ranks - 1) * (1 + back) * llm.min()
    return max(alone, ranks * (1 + back) * llm.max(), 3 * (llm.sum() + times["vision"].sum(axis=0).max()))


def measure(workload: str, schedule: str, ranks: int, ratio: float, seed: int) -> dict[str, float]:
    """Steps of all contenders over the bound; seconds of one core, and of the step."""
    count, everywhere = max(8, 2 * ranks), tuple(range(ranks))
    mix = drawn(workload, count, seed)
    encoder, llm = (mix[m] / mix[m].mean() for m in ("encoder", "llm"))
    items = items_of(workload, count, seed)
    found, layouts = dict[str, float](), (ModuleLayout(everywhere, dp_shard=ranks), ModuleLayout(everywhere, pp=ranks))
    least, order = 0.0, np.arange(count)
    for name in CONTENDERS:
        fills = name != "none"
        steps = steps_of(*layouts, schedule, fills)
        times = {"vision": dealt(ratio * ranks * encoder, *items, ranks, fills), "llm": llm[:, None]}
        begin = time.thread_time()
        if name != "search":
            order = steps.ordered(times, "search" if name == "both" else name)
        made = steps.made(times, order, name if name in ("none", "coarse", "fine") else "search")
        found[f"{name} s"] = time.thread_time() - begin
        found[name], least = steps.seconds(made, times, order), bound(schedule, ranks, times)
    return {**found, **{name: found[name] / least for name in CONTENDERS}, "step s": found["both"] * FORWARD}


def table(runs: Sequence[tuple[tuple[str, int], dict[str, float]]]) -> list[dict[str, Any]]:
    """One line per schedule and number of ranks."""
    lines = []
    for key in dict.fromkeys(key for key, _ in runs):
        own = [run for k, run in runs if k == key]
        line: dict[str, Any] = {"schedule": key[0], "pp": key[1], "steps": len(own)}
        for name in CONTENDERS:
            line[name] = statistics.median(r[name] for r in own)
            line[f"worst {name}"] = max(r[name] for r in own)
        line["both / fine"] = statistics.median(r["both"] / r["fine"] for r in own)
        line["best"] = min(r["both"] / r["fine"] for r in own)
        line |= {f"{name} s": statistics.median(r[f"{name} s"] for r in own) for name in ("fine", "search", "both")}
        line["share of a step"] = statistics.median(r["both s"] / r["step s"] for r in own)
        lines.append(line)
    return lines


def dip(workload: str, seeds: int) -> dict[str, Any]:
    """Mean bubbles of DIP's setting with static and searched schedules."""
    ranks, count, *parameters = DIP
    mixes = [drawn(workload, count, seed) for seed in range(seeds)]
    scale = sum(p * np.mean([mix[m].sum() for mix in mixes]) for p, m in zip(parameters, WIDTHS, strict=True)) / ranks
    works = [[p * mix[m] / scale for p, m in zip(parameters, WIDTHS, strict=True)] for mix in mixes]
    planned, total = np.arange(count), [3 * sum(one.sum() for one in work) / ranks for work in works]

    def static(steps: Steps, batches: Sequence[Times]) -> list[float]:
        mean = {m: np.ones_like(batches[0][m]) * np.mean([b[m] for b in batches]) for m in EDGE}
        made = steps.made(mean, planned, "fine")
        return [steps.seconds(made, times, planned) for times in batches]

    def searched(steps: Steps, batches: Sequence[Times], fill: str) -> list[float]:
        orders = [steps.ordered(times, fill) for times in batches]
        return [steps.seconds(steps.made(t, o, fill), t, o) for t, o in zip(batches, orders, strict=True)]

    splits = []
    for first in range(1, ranks):
        layouts = (
            ModuleLayout(tuple(range(first)), pp=first),
            ModuleLayout(tuple(range(first, ranks)), pp=ranks - first),
        )
        batches = [{"vision": w[0][:, None] / first, "llm": w[1][:, None] / (ranks - first)} for w in works]
        steps = steps_of(*layouts, "1f1b", fills=False)
        splits.append((static(steps, batches), steps, batches))
    plain, steps, batches = min(splits, key=lambda split: sum(split[0]))
    everywhere = tuple(range(ranks))
    filled = steps_of(ModuleLayout(everywhere, dp_shard=ranks), ModuleLayout(everywhere, pp=ranks), "1f1b", True)
    spread = [
        {"vision": dealt(w[0], *items_of(workload, count, seed), ranks, True), "llm": w[1][:, None] / ranks}
        for seed, w in enumerate(works)
    ]
    found = {
        "static": plain, "order": searched(steps, batches, "fine"), "search": searched(steps, batches, "search"),
        "filled static": static(filled, spread), "filled both": searched(filled, spread, "search"),
    }  # fmt: skip
    bubbles = {name: 1 - sum(total) / sum(times) for name, times in found.items()}
    return {"workload": workload, **bubbles, "speed": sum(plain) / sum(found["filled both"]),
            "over filled static": sum(found["filled static"]) / sum(found["filled both"])}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print both tables."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="draws of every step (default 5)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4, 8], help="default 2 4 8; 16 takes some 15 minutes"
    )
    parser.add_argument("--workloads", nargs="+", choices=SAMPLES, default=list(SAMPLES), help="default all")
    args = parser.parse_args(argv)
    given = product(SCHEDULES, args.ranks, args.workloads, RATIOS, range(args.seeds))
    lines = table([((s, pp), measure(name, s, pp, ratio, seed)) for s, pp, name, ratio, seed in given])
    report("filled_mixes", "Step over bound", list(lines[0]), [list(line.values()) for line in lines])
    others = [dip(name, args.seeds) for name in args.workloads]
    report("filled_mixes", "37B: bubbles", list(others[0]), [list(line.values()) for line in others])
    results = {"mixes": lines, "37B": others}
    write_json(args.json, "filled_mixes", "cpu", {n: v for n, v in vars(args).items() if n != "json"}, results)
    return results


if __name__ == "__main__":
    main()
