"""``TimelineMonitor``: write a picture and a trace of a late training step, simulated and measured."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from hetero_strategy.errors import require
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.monitor.measure import check_strategy, gather_on_first
from hetero_strategy.monitor.throughput import expert_loads
from hetero_strategy.monitor.timeline import Timeline, from_measured, from_simulation, write_trace
from hetero_strategy.plan.deal_rows import Dealing
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.compile import StepCompiler
from hetero_strategy.simulator.from_run import Measured
from hetero_strategy.simulator.recorded_steps import Fitted, Ran, predicted, stages_of, together
from hetero_strategy.simulator.result import Filling, Simulation, work_on_rank

MOST_RANKS = 64
"""Most ranks in the picture and the trace."""


class _Report(NamedTuple):
    """The records of one rank's last steps."""

    host: str
    clock: float
    """The rank's clock at the moment when all ranks leave a barrier."""
    steps: list[tuple[list[tuple[Action, float, float]], tuple[float, float]]]
    """Events of each step, and its begin and end on this rank."""


class MeasuredAndSimulated(NamedTuple):
    """A comparison of the last steps as measured and as simulated with the fit of the other steps."""

    simulation: Simulation
    """Simulation of the step with the median time."""
    simulated: Timeline
    measured: Timeline
    """Timelines of that step."""
    place: tuple[int, int]
    """The step's epoch, and its number in the epoch."""
    times: np.ndarray
    """Seconds of every step, float64 ``[2, steps]``: measured, simulated."""
    bubbles: np.ndarray
    """Idle share of all ranks' time, float64 ``[2, steps]``: measured, simulated."""
    stages: Measured
    """Measured seconds of the stages, for plans of other layouts."""

    @property
    def ratio(self) -> float:
        """Return the median measured step time divided by the median simulated one."""
        measured, simulated = np.median(self.times, axis=1)
        return float(measured / simulated)


def compare(
    executor: Executor, group: dist.ProcessGroup | None, dealing: Mapping[str, Dealing] = MappingProxyType({})
) -> MeasuredAndSimulated | None:
    """Simulate each of the last recorded steps with the fit of the other steps, and gather the measurements.

    This is a collective over ``group``, all ranks on the host, after training, and waits for the device.

    Args:
        dealing: how rows of modules were dealt to context-parallel ranks.

    Returns:
        The comparison on rank 0; None on other ranks, and if no step was recorded.
    """
    steps = executor.recorder.last
    if not steps:
        return None
    dist.barrier(group=group)
    own = _Report(socket.gethostname(), time.perf_counter(), [(step.events(), step.whole()) for step in steps])
    reports = gather_on_first(own, group)
    if reports is None:
        return None
    # Ranks of one node share a clock; clocks of other nodes are aligned at the moment when all ranks left a barrier.
    shifts = [0.0 if report.host == reports[0].host else reports[0].clock - report.clock for report in reports]
    ran = []
    for i, step in enumerate(steps):
        events, spans = {}, {}
        for rank, (report, shift) in enumerate(zip(reports, shifts, strict=True)):
            timed, (begin, end) = report.steps[i]
            events[rank] = [(action, start + shift, stop + shift) for action, start, stop in timed]
            spans[rank] = begin + shift, end + shift
        ran.append(Ran(step.plan, step.schedule, events, spans))
    return _pair(executor, ran, dealing)


def _pair(executor: Executor, steps: Sequence[Ran], dealing: Mapping[str, Dealing]) -> MeasuredAndSimulated:
    """Compare steps that ran with their simulations."""

    def width(source: StageId, target: StageId) -> float:
        return float(executor.row_bytes[graph.edges.index((source, target))])

    graph, layouts = executor.compiler.graph, executor.placement.layouts
    stages = graph.stages
    synchronous = {n for n, stage in stages.items() if meet_in_layers(layouts[n.module], gathered_once=stage.sharded)}
    simulations = predicted(steps, width, synchronous)
    measured = []
    for step in steps:
        events = together(step.schedule, step.events, synchronous)
        shown = {rank: own for rank, own in events.items() if own or rank in simulations[0].ranks}
        measured.append(from_measured(shown, (step.begin, step.begin + step.seconds), MOST_RANKS))
    middle = int(np.argsort([timeline.time for timeline in measured], kind="stable")[len(steps) // 2])
    simulation, metadata = simulations[middle], steps[middle].plan.metadata
    fitted = Fitted(steps, width, synchronous)
    filling = _filling(executor.compiler, steps[middle], fitted)
    uneven = {name: keys_and_pairs([step.plan for step in steps], name, of) for name, of in dealing.items()}
    return MeasuredAndSimulated(
        simulation,
        from_simulation(simulation, MOST_RANKS, filling),
        measured[middle],
        (metadata.epoch, metadata.step),
        np.array([[x.time for x in measured], [x.time for x in simulations]]),
        np.array([[x.bubble for x in measured], [x.bubble for x in simulations]]),
        Measured(
            layouts,
            {name: executor.compiler.costs[StageId(name, 0)].recomputed for name in layouts},
            stages_of(fitted.lines),
            steps[-1].plan.microbatches,
            rank_load(executor.expert_rows, layouts),
            {name: keys for name, (keys, _) in uneven.items()},
            {name: pairs for name, (_, pairs) in uneven.items()},
        ),
    )


def keys_and_pairs(plans: Sequence[StepPlan], module: str, dealing: Dealing) -> tuple[float, float]:
    """Return the keys that the busiest context-parallel rank receives for each row of its instance, and the pairs of
    the busiest rank over the mean of ranks, both in the mean of several steps.
    """
    works = [dealing.work(plan.metadata, plan.assignments[module]) for plan in plans]
    rows = sum(int(a.totals(inner=True).sum()) for plan in plans for a in plan.assignments[module])
    keys, most, mean = np.sum(
        [(w.keys.max(axis=2).sum(), w.squares.max(axis=2).sum(), w.squares.mean(axis=2).sum()) for w in works], axis=0
    )
    return float(keys) / max(1, rows), float(most / mean) if mean else 1.0


def rank_load(rows: Mapping[str, torch.Tensor], layouts: Mapping[str, ModuleLayout]) -> float:
    """Return the rows of the rank whose experts are chosen most, over the mean of ranks: the mean of layers.

    It is that of the module with the largest one, and 1 if no module's experts are divided.

    Args:
        rows: rows that chose each expert, as in :attr:`Executor.expert_rows`.

    >>> rank_load({"llm": torch.tensor([[5, 1, 1, 1], [2, 2, 3, 1]])}, {"llm": ModuleLayout([0, 1], ep=2)})
    1.25
    """
    of_ranks = [chosen.unflatten(1, (layouts[name].ep, -1)).sum(2) for name, chosen in rows.items()]
    return max((float(np.mean(expert_loads(each))) for each in of_ranks), default=1.0)


def meet_in_layers(layout: ModuleLayout, *, gathered_once: bool) -> bool:
    """Return whether a module's instances wait for each other in its layers: for weights, or for rows of experts."""
    return layout.ep > layout.neighbours or (layout.shards > 1 and not gathered_once)


def _filling(compiler: StepCompiler, step: Ran, fitted: Fitted) -> Filling | None:
    """Simulate a step with and without modules that fill its bubbles; return None if no module does."""
    modules = compiler.graph.filling
    if not modules:
        return None
    alone = replace(compiler, graph=compiler.graph.without(modules))
    pipeline = fitted.simulate(step.plan, alone.schedule(step.plan, train=True))
    whole = fitted.simulate(step.plan, step.schedule)
    return Filling(modules, pipeline.time, whole.time, work_on_rank(whole, modules))


class TimelineMonitor(L.Callback):
    """A callback that writes a training step's ``timeline.png`` and ``timeline.json`` (for ui.perfetto.dev) after fit.

    It also writes ``measured.json``: the seconds of the stages, from which ``python -m recipes.plan run=<folder>``
    plans.

    The step is the one of the last steps with the median time. Picture and trace show it twice: simulated with the fit
    of the other steps (see :mod:`hetero_strategy.simulator.recorded_steps`), and measured. The trace names the causes
    of the simulated bubble. If modules fill bubbles, both name the share of their work that does, from simulations with
    and without them. A Weights & Biases logger also receives the picture.

    Args:
        folder: folder of all files; default: the Trainer's ``default_root_dir``.

    Raises:
        ConfigError: at the start of training, the strategy is not HeteroStrategy.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        require("matplotlib", "plots", "TimelineMonitor")
        self.folder = None if folder is None else Path(folder)
        self.last: MeasuredAndSimulated | None = None
        """Comparison of the last run, on rank 0."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_strategy(trainer, "TimelineMonitor", "schedule")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.last = compare(strategy.executor, strategy.background, strategy.context.model.dealing)
        if self.last is None:
            return
        from hetero_strategy.monitor.draw import draw_timelines  # matplotlib takes a second to import

        folder = self.folder or Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        pair = (self.last.simulated, self.last.measured)
        write_trace(folder / "timeline.json", *pair)
        self.last.stages.write(folder / "measured.json")
        name = strategy.executor.compiler.config.schedule
        epoch, step = self.last.place
        draw_timelines(folder / "timeline.png", *pair, title=f"step {step} of epoch {epoch}, {name}")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("timeline", [str(folder / "timeline.png")])
