"""Seconds of steps as the planner predicts them from a profile, beside those of real steps, over 30 layouts.

Blocks, the optimizer and links are measured first, in seconds; then every layout runs training steps with AdamW on gloo
processes of one thread each. The prediction knows the layouts, the step's plan and its schedule; it has seen no step.

  predicted, measured  milliseconds of a step; measured is the median of those third of the steps that lost least to
                       other programs on this machine
  ratio                predicted / measured
  lost                 share of the machine's processors that other programs had during these steps
  alone                predicted / measured with links that take no time, where the schedule that ran is replayed with
                       the processor seconds of its actions, the least of all steps: what others take is in neither

Where there are more processes than cores, a step takes at least the work of all of them over the cores
(``Cluster.cores_per_node``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import spearmanr

from benchmarks.common import Options, option, program, report
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.parallelize.optimizer import choose_kernels
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.profiling.blocks import SECONDS, Profiled, profile
from hetero_strategy.profiling.device import Communication, communication, with_optimizer
from hetero_strategy.schedule.action import Action
from hetero_strategy.simulator.cluster import NO_SHARDING, Cluster, Links
from hetero_strategy.simulator.cost_model import CostModel, Precision
from hetero_strategy.simulator.hardware import DEVICES
from hetero_strategy.simulator.simulate import simulate
from hetero_strategy.testing import Setting, planned

Layout = ModuleLayout
FP32 = Precision(4, 4)
DIGITS: dict[str, Any] = {"vision": (64, 2), "llm": (128, 2), "samples": 32, "microbatches": 4, "text": (8, 32)}
LARGER: dict[str, Any] = {"vision": (192, 4), "llm": (256, 4), "samples": 16, "microbatches": 4, "text": (40, 120)}


def _settings(name: str, sizes: Mapping[str, Any], *layouts: tuple[str, Layout, Layout, str]) -> list[Setting]:
    return [
        Setting(f"{name}: {what}", {"vision": vision, "llm": llm}, schedule, balance={"reorder": "none"}, **sizes)
        for what, vision, llm, schedule in layouts
    ]


def _on(*ranks: int, **degrees: Any) -> Layout:
    return Layout(ranks, **degrees)


TWO = (
    ("dp_shard 2", _on(0, 1), _on(0, 1), "1f1b"),
    ("dp_replicate 2", _on(0, 1, dp_replicate=2), _on(0, 1, dp_replicate=2), "1f1b"),
    ("disjoint", _on(0), _on(1), "1f1b"),
    ("llm pp 2, encoder on 0", _on(0), _on(0, 1, pp=2), "1f1b"),
    ("llm pp 2, encoder dp 2", _on(0, 1), _on(0, 1, pp=2), "1f1b"),
    ("llm pp 2, gpipe", _on(0, 1), _on(0, 1, pp=2), "gpipe"),
    ("llm pp 2, zb_h1", _on(0, 1), _on(0, 1, pp=2), "zb_h1"),
    ("both pp 2", _on(0, 1, pp=2), _on(0, 1, pp=2), "1f1b"),
    ("llm tp 2, encoder dp 2", _on(0, 1), _on(0, 1, tp=2), "1f1b"),
)
ROW, EIGHT = (0, 1, 2, 3), tuple(range(8))
MORE = (
    ("4 ranks, dp_shard 4", _on(*ROW), _on(*ROW), "1f1b"),
    ("4 ranks, dp_replicate 4", _on(*ROW, dp_replicate=4), _on(*ROW, dp_replicate=4), "1f1b"),
    ("4 ranks, disjoint", _on(0, 1), _on(2, 3), "1f1b"),
    ("4 ranks, llm pp 2 x dp 2", _on(*ROW), _on(*ROW, pp=2), "1f1b"),
    ("8 ranks, dp_shard 8", _on(*EIGHT), _on(*EIGHT), "1f1b"),
    ("8 ranks, llm pp 2 x dp 4", _on(*EIGHT), _on(*EIGHT, pp=2), "1f1b"),
)
SETTINGS = (
    *_settings("digits", DIGITS, *TWO, *MORE),
    *_settings("larger", LARGER, *TWO, *MORE),
)


class Timed(NamedTuple):
    """One step on one rank."""

    begin: float
    end: float
    machine: float
    """Processor seconds of the whole machine, to 0.01 s."""
    cpu: float
    """Of this process."""
    thread: float
    """Of its main thread."""
    actions: dict[Action, float]
    """Likewise, of every action."""


def steps_on_rank(rank: int, world: int, setting: Setting, seconds: float) -> list[Timed]:
    """Steps with AdamW for about so long, without the first two, which make what is made once."""
    made = setting.assembled(rank)
    made.executor.recorder.now = time.thread_time  # type: ignore[method-assign]
    batch = made.executor.ready(setting.batch(0, rank), train=True)
    parameters = [owned.parameter for owned in made.owned.values() if owned.parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    choose_kernels([optimizer], made.owned, lambda any_: any_)
    steps: list[Timed] = []
    until, going = time.perf_counter() + seconds, torch.ones(1)
    while going.item():
        dist.barrier()
        machine, begin, cpu, thread = _machine(), time.perf_counter(), time.process_time(), time.thread_time()
        optimizer.zero_grad(set_to_none=True)
        made.executor.run(batch, train=True)
        optimizer.step()
        end, cpu, thread = time.perf_counter(), time.process_time() - cpu, time.thread_time() - thread
        dist.barrier()
        actions = {action: b - a for action, a, b in made.executor.recorder.steps[-1].events()}
        steps.append(Timed(begin, end, _machine() - machine, cpu, thread, actions))
        going.fill_(float(end < until or len(steps) < 5))
        dist.broadcast(going, 0)
    return steps[2:]


def _machine() -> float:
    """Seconds in which any processor of this machine worked, or was taken from it."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


class Measured(NamedTuple):
    """Figures of the least disturbed steps."""

    seconds: float
    lost: float


def measured(ranks: Sequence[Sequence[Timed]]) -> Measured:
    """Median of the third of the steps that lost least."""
    steps, cores = [], os.cpu_count() or 1
    for each in zip(*ranks, strict=True):
        wall = max(s.end for s in each) - min(s.begin for s in each)
        steps.append(Measured(wall, max(0.0, each[0].machine - sum(s.cpu for s in each)) / (cores * wall)))
    steps.sort(key=lambda s: s.lost)
    return Measured(*np.median(np.array(steps[: max(3, len(steps) // 3)]), axis=0).tolist())


def replayed(setting: Setting, ranks: Sequence[Sequence[Timed]]) -> float:
    """Seconds of the schedule that ran, by the processor seconds of its actions and of what lies between them."""
    schedule = planned(setting, 0).schedule
    least = [{a: min(s.actions[a] for s in steps) for a in steps[0].actions} for steps in ranks]
    between = [min(s.thread - sum(s.actions.values()) for s in steps) / len(steps[0].actions) for steps in ranks]

    def seconds(action: Action) -> np.ndarray:
        grid = schedule.graph.stages[action.node].grid
        return np.array([max(least[rank][action] + between[rank] for rank in row) for row in grid])

    simulation = simulate(schedule, seconds)
    return max(simulation.time, float(simulation.busy.sum()) / (os.cpu_count() or 1))


def profiled(setting: Setting, seconds: float) -> Profiled:
    """Blocks of a setting's model."""
    return profile(setting.model(), [setting.metadata(0)], torch.device("cpu"), tp=(1, 2), seconds=seconds)


def together_on_rank(rank: int, world: int) -> Communication:
    """Measure gloo's links on this machine."""
    return communication(torch.device("cpu"))


def evaluator(setting: Setting, found: Profiled, together: Communication) -> Evaluator:
    """Return the evaluator that predicts steps of a setting's model."""
    return Evaluator(
        CostModel(spec_of(setting.model()), _cluster(setting.world, together), precision=FP32, measured=found.modules),
        [setting.metadata(0)],
        balance=BalanceConfig(reorder="none"),
    )


def _cluster(ranks: int, together: Communication) -> Cluster:
    device = with_optimizer(DEVICES["cpu"], torch.device("cpu"))
    return together.on(Cluster(device, 1, ranks, together.links, together.links, os.cpu_count()))


def predicted(setting: Setting, known: Evaluator) -> float:
    """Seconds of the step that :func:`steps_on_rank` runs."""
    candidate = Candidate(setting.blueprint.layouts, setting.microbatches, setting.schedule)
    return known.step(known.place(candidate)).seconds


@program(
    option("--only", default="", help="layouts whose name contains this"),
    option("--seconds", type=float, default=6.0, help="of steps of each layout (default 6)"),
    option("--profile", type=float, default=SECONDS, help=f"of each kind of block (default {SECONDS:g})"),
)
def main(chosen: Options) -> Any:
    """Print the table; returns the figures by layout, and what follows from all of them."""
    settings = [one for one in SETTINGS if chosen.only in one.name]
    profiles = {one.llm: profiled(one, chosen.profile) for one in {s.llm: s for s in settings}.values()}
    together = {world: chosen.pool.run(world, together_on_rank)[0] for world in sorted({s.world for s in settings})}
    rows, figures = [], {}
    for setting in settings:
        both = together[setting.world], Communication(Links(), {}, {}, together[setting.world].working or NO_SHARDING)
        known = [evaluator(setting, profiles[setting.llm], one) for one in both]
        seconds, alone = (predicted(setting, one) for one in known)
        steps = chosen.pool.run(setting.world, steps_on_rank, setting, chosen.seconds, timeout=300)
        ran, own = measured(steps), replayed(setting, steps)
        figures[setting.name] = {
            "predicted": seconds, "measured": ran.seconds, "lost": ran.lost, "predicted_alone": alone, "alone": own,
        }  # fmt: skip
        milliseconds = (f"{1e3 * x:.1f}" for x in (seconds, ran.seconds))
        ratios = (f"{x:.2f}" for x in (seconds / ran.seconds, ran.lost, alone / own))
        rows.append([setting.name, setting.world, *milliseconds, *ratios])
    found = summary(figures)
    notes = [f"{name}: {value:.3f}" for name, value in found.items()]
    columns = ("layout", "ranks", "predicted", "measured", "ratio", "lost", "alone")
    report("milliseconds of a step, predicted beside measured", columns, rows, notes)
    return {"layouts": figures, **found}


def summary(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How near the predictions are."""
    names = ("predicted", "measured", "predicted_alone", "alone", "lost")
    predicted, seconds, alone, own, lost = (np.array([one[name] for one in figures.values()]) for name in names)
    off, off_alone = (np.abs(a / b - 1) for a, b in ((predicted, seconds), (alone, own)))
    return {
        "rank correlation": float(spearmanr(predicted, seconds).statistic),
        "median error": float(np.median(off)),
        "worst error": float(off.max()),
        "alone: rank correlation": float(spearmanr(alone, own).statistic),
        "alone: median error": float(np.median(off_alone)),
        "alone: worst error": float(off_alone.max()),
        "lost to other programs": float(np.median(lost)),
    }


if __name__ == "__main__":
    main()
