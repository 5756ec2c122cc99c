"""Choose layouts with the planner for ``layouts="auto"``, before the model is placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Trainer

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import place
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.search import Planner
from hetero_strategy.profiling.cache import memory_model, profile_on
from hetero_strategy.profiling.device import Communication, communication
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.cost_model import CostModel, Precision
from hetero_strategy.simulator.hardware import this_cluster
from hetero_strategy.simulator.stage_times import ModuleSeconds
from hetero_strategy.strategy.blueprint import beside_kept
from hetero_strategy.strategy.refusals import check_anomaly
from hetero_strategy.strategy.strategy import HeteroStrategy

BATCHES = 2
"""Global batches of the data on which candidates are simulated."""
SECONDS = 0.6
"""Seconds to measure one kind of block; a model has at most three kinds for each module."""


def choose(
    strategy: HeteroStrategy, model: MultimodalModel, trainer: Trainer, storage: Storage, asked: ScheduleConfig
) -> Candidate:
    """Plan on the first rank. A collective.

    Args: see :func:`planned`.
    """
    together = None
    if strategy.root_device.type == "cpu" and strategy.world_size > 1:
        together = communication(strategy.root_device)
    chosen: Candidate = strategy.broadcast(
        planned(strategy, model, trainer, storage, asked, together) if strategy.is_global_zero else None
    )
    check_anomaly(trainer, chosen.layouts)
    return chosen


def planned(
    strategy: HeteroStrategy,
    model: MultimodalModel,
    trainer: Trainer,
    storage: Storage,
    asked: ScheduleConfig,
    together: Communication | None = None,
) -> Candidate:
    """Plan for the data and the devices of this run, and log the choice.

    The speed of a CPU is not known beforehand: blocks are measured on the first rank's.

    Args:
        asked: schedule options of the user; the planner chooses the rest.
        together: measurements of all ranks, if they were made.

    Raises:
        ConfigError: the trainer has no :class:`MultimodalDataModule`, or the device is not known.
        LayoutError: nothing fits into memory.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, MultimodalDataModule):
        raise ConfigError(
            "HeteroStrategy: layouts='auto' plans for the batches of a MultimodalDataModule; pass one to the Trainer as"
            " datamodule=..., or give layouts"
        )
    asked = beside_kept(asked, model, storage)
    shape, precision = spec_of(model), Precision(storage.compute.itemsize, storage.master.itemsize)
    device, batches = strategy.root_device, data.sampled_batches(BATCHES)
    cluster = this_cluster(device, strategy.num_nodes, strategy.num_processes)
    options = RunOptions(strategy.transforms, trainer.accumulate_grad_batches, data.encoder_microbatch_rows, asked)
    measured: Mapping[str, ModuleSeconds] = {}
    if device.type == "cpu":
        profiled, cluster = profile_on(cluster, model, batches, storage.compute, seconds=SECONDS)
        measured = profiled.modules
    if together is not None:
        cluster = together.on(cluster)
    planner = Planner(
        CostModel(shape, cluster, precision=precision, measured=measured),
        batches,
        microbatches=data.microbatches,
        balance=data.balance,
        options=options,
    )
    known = strategy.root_device.type == "cuda"  # ranks on a CPU share its memory
    memory = partial(
        memory_model, model, shape, device.type, precision, options.transforms, accumulates=options.accumulated > 1
    )
    answer = planner.plan(memory=memory if known else None)
    candidate = answer.best.candidate
    placed = planner.evaluator.place(candidate)
    scheduling = placed.scheduling
    layouts = scheduling.uncut(placed.placement.layouts)  # with its cuts: a run would choose them by other costs
    chosen = place(layouts, cluster.ranks)
    lines = [f"{name}: ranks {ranks}, {degrees}" for name, ranks, degrees in chosen.table()]
    if scheduling.fills:
        lines.append(f"encoders fill bubbles: {scheduling.fill}")
    if (needed := answer.best.memory) is not None:
        of = f"{needed.peak.max() / 2**30:.3g} of {cluster.device.memory / 2**30:.3g} GiB"
        lines.append(f"memory: {of} predicted{options}")
    rank_zero_info(
        f"layouts='auto': {answer.considered} candidates, {len(answer.ranked)} simulated; schedule"
        f" {scheduling.schedule}, {candidate.microbatches} microbatches,"
        f" {1e3 * answer.best.seconds:.3g} ms a step predicted\n  " + "\n  ".join(lines)
    )
    names = ("schedule", "reshard_after_forward", "fill", "pieces")
    return replace(candidate, layouts=layouts, **{name: getattr(scheduling, name) for name in names})
