"""`TimelineMonitor`: leaves a picture and a trace of the last training step, simulated above measured."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch.distributed as dist
from lightning.pytorch.loggers import WandbLogger

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.placement import Coordinate
from hetero_strategy.monitor.profile import Profile, Sample
from hetero_strategy.monitor.timeline import Timeline, from_measured, from_simulation, write_trace
from hetero_strategy.schedule.action import Action
from hetero_strategy.schedule.executor import Executor
from hetero_strategy.schedule.graph import PlannedCosts
from hetero_strategy.simulator import Simulation, simulate

MOST_RANKS = 64
"""Ranks in the picture and the trace."""


class _Report(NamedTuple):
    """What one rank tells of its last steps."""

    host: str
    clock: float
    """Its clock at a moment common to all ranks."""
    samples: list[Sample]
    events: list[tuple[Action, float, float]]
    """Of the last step."""
    span: tuple[float, float]


class Pair(NamedTuple):
    """A step twice: what the simulator makes of its schedule, with costs from the steps before, and what ran."""

    simulation: Simulation
    simulated: Timeline
    measured: Timeline

    @property
    def ratio(self) -> float:
        """Measured over simulated step time."""
        return self.measured.time / self.simulated.time


def compare(executor: Executor, group: dist.ProcessGroup | None) -> Pair | None:
    """Simulate the last recorded step with costs profiled on the steps before it, and gather what was measured.

    A collective over all ranks, after training; waits for the device.

    Args:
        executor: of this rank.
        group: of all ranks, on the host.

    Returns:
        On rank 0; None on the others, and where no step was recorded.
    """
    steps = executor.recorder.steps
    if not steps:
        return None
    samples = []
    for step in list(steps)[:-1] or list(steps):
        planned = PlannedCosts(step.plan, executor.graph, executor.program.costs)
        for action, start, end in step.events():
            flops = 0.0
            if action.microbatch >= 0:
                where = executor.wiring.placement.coordinate(action.node.module, executor.rank)
                assert isinstance(where, Coordinate)
                flops = float(planned.of_instances(action)[where.instance])
            samples.append(Sample(action.node, action.kind, flops, end - start))
    last = steps[-1]
    dist.barrier(group=group)
    mine = _Report(socket.gethostname(), time.perf_counter(), samples, last.events(), last.span())
    reports: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, reports if executor.rank == 0 else None, group=group)
    if executor.rank:
        return None
    return _pair(executor, last.plan, last.schedule, reports)


def _pair(executor: Executor, plan: Any, schedule: Any, reports: list[_Report]) -> Pair:
    profile = Profile(sample for report in reports for sample in report.samples)
    planned = PlannedCosts(plan, executor.graph, executor.program.costs)
    simulation = simulate(schedule, lambda action: profile.costs(planned, action))
    # One machine has one clock; others are set by the moment at which all ranks left a barrier.
    shifts = [0.0 if report.host == reports[0].host else reports[0].clock - report.clock for report in reports]
    events = {
        rank: [(action, start + shift, end + shift) for action, start, end in report.events]
        for rank, (report, shift) in enumerate(zip(reports, shifts, strict=True))
        if report.events or rank in simulation.ranks
    }
    begin = min(report.span[0] + shift for report, shift in zip(reports, shifts, strict=True))
    end = max(report.span[1] + shift for report, shift in zip(reports, shifts, strict=True))
    measured = from_measured(events, (begin, end), MOST_RANKS)
    return Pair(simulation, from_simulation(simulation, MOST_RANKS), measured)


class TimelineMonitor(L.Callback):
    """Writes ``timeline.png`` and ``timeline.json`` (for ui.perfetto.dev) of the last training step, at the end of fit.

    Both show the step twice: as simulated, with the costs of actions profiled on the steps before, and as measured. The
    picture also goes to Weights & Biases where that is a logger.

    Args:
        folder: where they go; default: the Trainer's ``default_root_dir``.

    Raises:
        ConfigError: at the start of training, under another strategy than HeteroStrategy.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.last: Pair | None = None
        """Of the last run; on rank 0."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse what has no schedule."""
        if not hasattr(trainer.strategy, "executor"):
            raise ConfigError(
                f"TimelineMonitor: {type(trainer.strategy).__name__} has no schedule; use HeteroStrategy or remove the"
                " callback"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather, draw and write."""
        strategy: Any = trainer.strategy
        self.last = compare(strategy.executor, strategy.background)
        if self.last is None:
            return
        from hetero_strategy.monitor.timeline_draw import draw  # matplotlib takes a second to import

        folder = self.folder or Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        pair = (self.last.simulated, self.last.measured)
        write_trace(folder / "timeline.json", *pair)
        order = strategy.executor.program.order
        draw(folder / "timeline.png", *pair, title=f"step {trainer.global_step}, order {order}")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("timeline", [str(folder / "timeline.png")])
