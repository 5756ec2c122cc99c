"""Whether other layouts would be faster, by what the stages of a run took: worked out at its end, for its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from hetero_strategy.errors import HeteroError
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.monitor.timeline_monitor import MeasuredAndSimulated, TimelineMonitor
from hetero_strategy.planner.answer import Ranked
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.every import FEW
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.hardware import this_cluster
from hetero_strategy.planner.memory import MemoryModel
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.shape import shape_of
from hetero_strategy.planner.times import Precision
from hetero_strategy.planner.variants import Allowed
from hetero_strategy.profiling.cache import memory_model
from hetero_strategy.profiling.device import Communication, communication, cores_of_node
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.strategy.blueprint import beside_kept
from hetero_strategy.strategy.precision import storage_of
from recipes.layout_file import train_with, write_layout
from recipes.lit import LitMultimodal
from recipes.terminal import seconds

WORTH = 1.1
"""Predicted seconds over those of a better plan from which on it is named, or more: as far as the run's own step took
longer than predicted, as another one may too."""


@dataclass(frozen=True)
class Compared:
    """What a run's own layouts and the best others take, in predicted seconds of a step."""

    current: float
    measured: float
    """Seconds that a step took, without optimizer and hooks."""
    best: Ranked
    simulated: int
    """Candidates."""
    took: float
    """Seconds of comparing."""

    @property
    def worth(self) -> bool:
        """Whether the best is faster by more than predictions are off."""
        return self.current / self.best.seconds > max(WORTH, self.measured / self.current)


def better_layouts(trainer: L.Trainer, module: LitMultimodal, folder: Path, budget: float) -> dict[str, Any] | None:
    """Compare on the first rank, after training; None on others, and where nobody asked.

    A collective: on processors, of whose links nothing is known beforehand, all ranks measure them.

    Args:
        folder: of the run, where the file of a better layout is written to.
        budget: seconds to simulate; 0: nothing is compared.
    """
    if not budget:
        return None
    device, together = trainer.strategy.root_device, None
    if device.type == "cpu" and 1 < trainer.world_size <= FEW:
        together = communication(device, shards=False)
    if not trainer.is_global_zero:
        return None
    ran = last_of(trainer, TimelineMonitor)
    if ran is None:
        return {"why_not": "no step was measured"}
    if trainer.world_size > FEW:
        return {"why_not": f"there are more than {FEW} ranks, for which planning takes longer"}
    try:
        return _compared(trainer, module, ran, together, folder / "layout" / "better.yaml", budget)
    except HeteroError as error:
        return {"why_not": str(error)}


def last_of(trainer: L.Trainer, kind: type[Any]) -> Any:
    """What a callback of a kind has seen last; None where there is none, or it saw nothing."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c.last for c in callbacks if isinstance(c, kind) and c.last is not None), None)


def _compared(
    trainer: L.Trainer,
    module: LitMultimodal,
    ran: MeasuredAndSimulated,
    together: Communication | None,
    file: Path,
    budget: float,
) -> dict[str, Any]:
    begin = time.monotonic()
    planner, memory = _planner(trainer, module, ran, together)
    current = planner.evaluator.seconds(as_it_ran(trainer.strategy, ran))  # type: ignore[arg-type]
    answer = planner.plan(seconds=budget)
    if current > WORTH * answer.best.seconds and memory is not None:  # a winner has to fit, which takes longer to know
        answer = planner.plan(memory=memory, seconds=budget)
    measured = float(np.median(ran.times[0]))
    found = Compared(current, measured, answer.best, len(answer.ranked), time.monotonic() - begin)
    return said(found, planner, file)


def said(found: Compared, planner: Planner, file: Path) -> dict[str, Any]:
    """For the report; writes the file of a plan that is worth it."""
    best = found.best
    placed = planner.evaluator.place(best.candidate)
    said = {
        "predicted_seconds": found.current, "measured_seconds": found.measured, "best_seconds": best.seconds,
        "simulated": found.simulated, "took": found.took, "layout": None,
        "layouts": [f"{name}: ranks {ranks}, {degrees}" for name, ranks, degrees in placed.placement.table()],
    }  # fmt: skip
    if found.worth:
        what = f"from what a run's stages took: {best.seconds:.3g} s a step predicted"
        said["command"] = train_with(file, best.candidate.microbatches, run=file.parent.parent)
        said["layout"] = str(write_layout(file, placed, what, said["command"]))
    return said


def as_it_ran(strategy: HeteroStrategy, ran: MeasuredAndSimulated) -> Candidate:
    """The run's own plan."""
    config, executor = strategy.executor.compiler.config, strategy.executor
    count = executor.recorder.last[-1].plan.microbatches
    return Candidate.of_run(config, ran.stages.layouts, count, strategy.recompute, strategy.offload)


def _planner(
    trainer: L.Trainer, module: LitMultimodal, ran: MeasuredAndSimulated, together: Communication | None
) -> tuple[Planner, Callable[[], MemoryModel] | None]:
    """For the run's model, data and devices, with what its stages took; and what predicts a device's memory."""
    strategy, data = trainer.strategy, trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(strategy, HeteroStrategy) and isinstance(data, MultimodalDataModule)
    with torch.device("meta"):
        model = module.make_model()
    storage, shape = storage_of(strategy.precision_plugin), shape_of(model)
    precision = Precision(storage.compute.itemsize, storage.master.itemsize)
    cluster = this_cluster(strategy.root_device, strategy.num_nodes, strategy.num_processes)
    on_processors = strategy.root_device.type == "cpu"
    if on_processors:
        cluster = cluster.changed(cores_per_node=cores_of_node())
    if together is not None:
        cluster = together.on(cluster)
    config, batches = strategy.executor.compiler.config, trainer.accumulate_grad_batches
    bounds = ScheduleConfig(max_in_flight=config.max_in_flight, islands=config.islands)
    bounds = beside_kept(bounds, model, strategy.executor.storage)
    given = Given(
        offload=strategy.offload, compile=strategy.compile, accumulated=batches, cached=[*strategy.row_caches.folders],
        reshard_after_forward=bounds.reshard_after_forward, microbatch_rows=data.encoder_microbatch_rows,
    )  # fmt: skip
    planner = Planner(
        shape,
        cluster,
        data.sampled_batches(1),
        microbatches=data.microbatches,
        balance=data.balance,
        precision=precision,
        measured=ran.stages.modules(shape, cluster, precision),
        allowed=Allowed.beside(bounds, given, data.payload),
    )
    return planner, None if on_processors else lambda: memory_model(model.train(), shape, cluster, precision, given)


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """For a person."""
    if why := found.get("why_not"):
        return [("layouts", f"not compared with others: {why}")]
    step, best = (seconds(found[f"{name}_seconds"]) for name in ("predicted", "best"))
    measured = f"{seconds(found['measured_seconds'])} measured"
    now = f"a step of these takes {step} predicted from what its stages took ({measured})"
    among = f"of {found['simulated']} others simulated in {found['took']:.0f} s"
    if found["layout"] is None:
        return [("layouts", f"{now}; the best {among} takes {best}: no better plan named")]
    gain = found["predicted_seconds"] / found["best_seconds"]
    return [
        ("layouts", f"{now}; the best {among} takes {best}, {gain:.2f} times as fast: {'; '.join(found['layouts'])}"),
        ("try them", found["command"]),
    ]
