"""``layouts="auto"``: the planner chooses them, before the model is placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Trainer

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.placement import place
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.hardware import this_cluster
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.shape import shape_of
from hetero_strategy.planner.times import ModuleSeconds, Precision
from hetero_strategy.planner.variants import Allowed
from hetero_strategy.profiling.cache import memory_model, profile_on
from hetero_strategy.profiling.device import Communication, communication
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.strategy.blueprint import beside_kept
from hetero_strategy.strategy.refusals import check_anomaly

if TYPE_CHECKING:
    from hetero_strategy.strategy.strategy import HeteroStrategy

BATCHES = 2
"""Global batches of the data on which candidates are simulated."""
SECONDS = 0.6
"""Of measuring a kind of block, of which a model has three for each module or fewer."""


def given(layouts: Mapping[str, Any] | str | None) -> dict[str, ModuleLayout] | None:
    """Layouts as a person gives them; None: they follow from the model.

    Raises:
        ConfigError: another word than ``auto``.
        LayoutError: see :meth:`ModuleLayout.from_config`.
    """
    if layouts is None or layouts == "auto":
        return None
    if not isinstance(layouts, Mapping):
        raise ConfigError(f"HeteroStrategy: layouts={layouts!r}; use 'auto', or a mapping of modules to their layouts")
    return {name: ModuleLayout.from_config(name, layout) for name, layout in layouts.items()}


def choose(
    strategy: HeteroStrategy,
    model: MultimodalModel,
    trainer: Trainer,
    storage: Storage,
    scheduling: ScheduleConfig,
    *,
    plan: bool,
) -> Candidate:
    """Layouts that a person leaves to the strategy: those that the first rank plans, or all modules over all ranks.

    A collective.

    Args:
        scheduling: what a person asked for.
        plan: whether the first rank plans.
    """
    if not plan:
        return Candidate(dict.fromkeys(model.modules_by_name, ModuleLayout(tuple(range(strategy.world_size)))))
    together = None
    if strategy.root_device.type == "cpu" and strategy.world_size > 1:
        together = communication(strategy.root_device)
    chosen: Candidate = strategy.broadcast(
        planned(strategy, model, trainer, storage, scheduling, together) if strategy.is_global_zero else None
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
    """Plan for the data and the devices of this run, and say what was chosen.

    Processors have no figures that are known beforehand: blocks are measured on the first rank's.

    Args:
        asked: how steps are scheduled, as far as a person said it.
        together: what ranks measured, where they did.

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
    shape, precision = shape_of(model), Precision(storage.compute.itemsize, storage.master.itemsize)
    device, batches = strategy.root_device, data.sampled_batches(BATCHES)
    cluster = this_cluster(device, strategy.num_nodes, strategy.num_processes)
    options = Given(
        strategy.recompute, strategy.offload, strategy.compile, trainer.accumulate_grad_batches,
        asked.reshard_after_forward, [*strategy.row_caches.folders], data.encoder_microbatch_rows,
    )  # fmt: skip
    measured: Mapping[str, ModuleSeconds] = {}
    if device.type == "cpu":
        profiled, cluster = profile_on(cluster, model, batches, storage.compute, seconds=SECONDS)
        measured = profiled.modules
    if together is not None:
        cluster = together.on(cluster)
    planner = Planner(
        shape,
        cluster,
        batches,
        microbatches=data.microbatches,
        balance=data.balance,
        precision=precision,
        measured=measured,
        allowed=Allowed.beside(asked, options, data.payload),
    )
    known = strategy.root_device.type == "cuda"  # ranks on a CPU share what memory there is
    memory = partial(memory_model, model, shape, cluster, precision, options)
    answer = planner.plan(memory=memory if known else None)
    candidate = answer.best.candidate
    placed = planner.evaluator.place(candidate)
    scheduling = placed.scheduling
    layouts = scheduling.uncut(placed.placement.layouts)  # with its cuts: a run would choose them by other costs
    chosen = place(layouts, cluster.ranks)
    lines = [f"{name}: ranks {ranks}, {degrees}" for name, ranks, degrees in chosen.table()]
    if scheduling.fills:
        lines.append(f"encoders fill bubbles: {scheduling.fill}")
    if scheduling.prefetch:
        lines.append(f"a step ahead: {', '.join(scheduling.prefetch)}")
    if (needed := answer.best.memory) is not None:
        of = f"{needed.peak.max() / 2**30:.3g} of {cluster.device.memory / 2**30:.3g} GiB"
        lines.append(f"memory: {of} predicted{options}")
    rank_zero_info(
        f"layouts='auto': {answer.considered} candidates, {len(answer.ranked)} simulated; schedule"
        f" {scheduling.schedule}, {candidate.microbatches} microbatches,"
        f" {1e3 * answer.best.seconds:.3g} ms a step predicted\n  " + "\n  ".join(lines)
    )
    names = ("schedule", "reshard_after_forward", "fill", "pieces", "prefetch")
    return replace(candidate, layouts=layouts, **{name: getattr(scheduling, name) for name in names})
