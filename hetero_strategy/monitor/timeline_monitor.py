"""``TimelineMonitor``: leaves a picture and a trace of a late training step, simulated above measured."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch.distributed as dist
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from hetero_strategy.errors import require
from hetero_strategy.monitor.fitted import fitted_stages
from hetero_strategy.monitor.measure import check_strategy, gather_on_first
from hetero_strategy.monitor.prediction import Fitted, Ran, predicted, together
from hetero_strategy.monitor.timeline import Timeline, from_measured, from_simulation, write_trace
from hetero_strategy.plan.ahead import computing
from hetero_strategy.planner.from_run import Measured
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.compile import StepCompiler
from hetero_strategy.schedule.graph import PlannedCosts
from hetero_strategy.simulator.bubbles import Filling, work_on_rank
from hetero_strategy.simulator.result import Simulation

MOST_RANKS = 64
"""Ranks in the picture and the trace."""


class _Report(NamedTuple):
    """Records of one rank's last steps."""

    host: str
    clock: float
    """The rank's clock when all ranks leave a barrier."""
    steps: list[tuple[list[tuple[Action, float, float]], tuple[float, float]]]
    """Events of each step, and its begin and end on this rank."""


class MeasuredAndSimulated(NamedTuple):
    """The last steps as they ran, and as simulated with what is fitted to the other ones."""

    simulation: Simulation
    """Simulation of the step that took the median time."""
    simulated: Timeline
    measured: Timeline
    """Both are of that step."""
    place: tuple[int, int]
    """The step's epoch, and its number in the epoch."""
    times: np.ndarray
    """Seconds of every step, float64 ``[2, steps]``: measured, simulated."""
    bubbles: np.ndarray
    """Idle share of all ranks' time, likewise."""
    fitted: Fitted
    """What is fitted to all of these steps."""
    stages: Measured
    """What their stages took, for plans of other layouts."""

    @property
    def ratio(self) -> float:
        """Median of the measured step times divided by that of the simulated ones."""
        measured, simulated = np.median(self.times, axis=1)
        return float(measured / simulated)


def compare(executor: Executor, group: dist.ProcessGroup | None) -> MeasuredAndSimulated | None:
    """Simulate each of the last recorded steps with what is fitted to the others, and gather what was measured.

    This is a collective over ``group``, all ranks on the host, after training, and waits for the device.

    Returns:
        The comparison on rank 0; None on the others, and where no step was recorded.
    """
    steps = executor.recorder.last
    if not steps:
        return None
    dist.barrier(group=group)
    own = _Report(socket.gethostname(), time.perf_counter(), [(step.events(), step.whole()) for step in steps])
    reports = gather_on_first(own, group)
    if reports is None:
        return None
    # Ranks of one node share a clock; clocks of others are set by the moment at which all ranks left a barrier.
    shifts = [0.0 if report.host == reports[0].host else reports[0].clock - report.clock for report in reports]
    ran = []
    for i, step in enumerate(steps):
        events, spans = {}, {}
        for rank, (report, shift) in enumerate(zip(reports, shifts, strict=True)):
            timed, (begin, end) = report.steps[i]
            events[rank] = [(action, start + shift, stop + shift) for action, start, stop in timed]
            spans[rank] = begin + shift, end + shift
        planned = PlannedCosts(step.plan, executor.compiler.graph, executor.compiler.costs)
        ran.append(Ran(step.plan, step.schedule, planned, events, spans))
    return _pair(executor, ran)


def _pair(executor: Executor, steps: Sequence[Ran]) -> MeasuredAndSimulated:
    """Compare steps that ran with their simulations."""

    def width(source: StageId, target: StageId) -> float:
        return float(executor.row_bytes[graph.edges.index((source, target))])

    graph, layouts = executor.compiler.graph, executor.placement.layouts
    stages = graph.stages
    synchronous = {n for n, stage in stages.items() if layouts[computing(n.module)].shards > 1 and not stage.sharded}
    apart = graph.filling if executor.side is not None else ()
    simulations = predicted(steps, width, synchronous, apart)
    measured = []
    for step in steps:
        events = together(step.schedule, step.events, synchronous)
        shown = {rank: own for rank, own in events.items() if own or rank in simulations[0].ranks}
        measured.append(from_measured(shown, (step.begin, step.begin + step.seconds), MOST_RANKS, apart))
    middle = int(np.argsort([timeline.time for timeline in measured], kind="stable")[len(steps) // 2])
    simulation, metadata = simulations[middle], steps[middle].plan.metadata
    fitted = Fitted(steps, width, synchronous, apart)
    # What ran beside others took longer than it is work.
    filling = None if apart else _filling(executor.compiler, steps[middle], fitted)
    return MeasuredAndSimulated(
        simulation,
        from_simulation(simulation, MOST_RANKS, filling),
        measured[middle],
        (metadata.epoch, metadata.step),
        np.array([[x.time for x in measured], [x.time for x in simulations]]),
        np.array([[x.bubble for x in measured], [x.bubble for x in simulations]]),
        fitted,
        Measured(
            layouts,
            {name: executor.compiler.costs[StageId(name, 0)].recomputed for name in layouts},
            fitted_stages(steps, synchronous),
            steps[-1].plan.microbatches,
        ),
    )


def _filling(compiler: StepCompiler, step: Ran, fitted: Fitted) -> Filling | None:
    """Simulate a step without what fills its bubbles and with it; None where nothing does."""
    modules = compiler.graph.filling
    if not modules:
        return None
    alone = replace(compiler, graph=compiler.graph.without(modules))
    schedule, planned = alone.schedule(step.plan, train=True), PlannedCosts(step.plan, alone.graph, alone.costs)
    pipeline = fitted.simulate(step.plan, schedule, planned)
    whole = fitted.simulate(step.plan, step.schedule, step.planned)
    return Filling(modules, pipeline.time, whole.time, work_on_rank(whole, modules))


class TimelineMonitor(L.Callback):
    """Writes ``timeline.png`` and ``timeline.json`` (for ui.perfetto.dev) of a training step, at the end of fit, and
    ``measured.json``: what its stages took, from which ``python -m recipes.plan run=<folder>`` plans.

    The step is the one of the last steps that took the median time. Picture and trace show it twice: as simulated, with
    what is fitted to the other steps (see :mod:`hetero_strategy.monitor.prediction`), and as measured. The trace names
    the causes of the simulated bubble. Where modules fill bubbles, both say which share of their work lies there, from
    the step simulated with and without them. The picture also goes to Weights & Biases where that is a logger.

    Args:
        folder: folder of both files; default: the Trainer's ``default_root_dir``.

    Raises:
        ConfigError: at the start of training, under another strategy than HeteroStrategy.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        require("matplotlib", "plots", "TimelineMonitor")
        self.folder = None if folder is None else Path(folder)
        self.last: MeasuredAndSimulated | None = None
        """Comparison of the last run, on rank 0."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a strategy that has no schedule."""
        check_strategy(trainer, "TimelineMonitor", "schedule")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather the last steps of all ranks, draw and write."""
        strategy: Any = trainer.strategy
        self.last = compare(strategy.executor, strategy.background)
        if self.last is None:
            return
        from hetero_strategy.monitor.timeline_draw import draw  # matplotlib takes a second to import

        folder = self.folder or Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        pair = (self.last.simulated, self.last.measured)
        write_trace(folder / "timeline.json", *pair)
        self.last.stages.write(folder / "measured.json")
        name = strategy.executor.compiler.config.schedule
        epoch, step = self.last.place
        draw(folder / "timeline.png", *pair, title=f"step {step} of epoch {epoch}, {name}")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("timeline", [str(folder / "timeline.png")])
