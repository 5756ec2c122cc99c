"""What a strategy and its Trainer tell the data module, and what it tells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loops.loop import _Loop

from hetero_strategy.layout.placement import Placement
from hetero_strategy.plan.config import ModelContext
from hetero_strategy.schedule.compile import StepCompiler


@dataclass(frozen=True)
class TrainingContext:
    """Where modules live and how steps are run; by default everything is one process."""

    placement: Placement | None = None
    """Of all modules; None: all of them are on this device, or no layouts are known yet."""
    placed_later: bool = False
    """The placement follows from the model, which does not exist yet."""
    microbatches: int | None = None
    """Of a step, as they were planned with the layouts."""
    row_multiple: Mapping[str, int] = field(default_factory=dict)
    """Modules whose rows per instance are padded to a multiple of this."""
    model: ModelContext = field(default_factory=ModelContext)
    """What model and layouts say about balancing."""
    rank: int = 0
    """Of this process."""
    compiler: StepCompiler | None = None
    """Makes the program of each step; None: the strategy runs none."""
    group: dist.ProcessGroup | None = None
    """All ranks, on the host, for the one thread per rank that loads data."""
    compute_dtype: torch.dtype | None = None
    """What modules compute in, where that is less than fp32."""

    @staticmethod
    def of(trainer: L.Trainer | None) -> TrainingContext:
        """The context of a Trainer's strategy, whichever that is."""
        strategy = None if trainer is None else trainer.strategy
        context = getattr(strategy, "context", None)
        return context if isinstance(context, TrainingContext) else TrainingContext()


def finish_epoch(trainer: L.Trainer | None) -> None:
    """Let Lightning see that a restored run ended an epoch, or began one without a batch, or is in the middle of one.

    With ``max_steps`` it takes every restored run for one in the middle of an epoch, goes once more through the end of
    the one that was done, and so leaves out the next one. So it does where an epoch has begun, however long the run is.
    A run that it restored at the last batch of an epoch counts the epochs after it one short, and one that was ended in
    the middle of an epoch counts that one as done, though the loader knows better.
    """
    loop = getattr(trainer, "fit_loop", None)
    if loop is None or not (loop.restarting or loop._loaded_from_state_dict):
        return
    progress, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    total = progress.total
    if batches.current.processed and not batches.is_last_batch:
        states = loop._combined_loader_states_to_load
        here = next((state["epoch"] for state in states if "epoch" in state), progress.current.completed)
        ended = progress.current.processed - here  # 1 where max_steps or max_time has ended it in its middle
        for counted in (total, progress.current):
            counted.processed -= ended
            counted.completed = counted.processed
            counted.ready = counted.started = counted.processed + 1
        _Loop.restarting.fset(loop, True)  # type: ignore[attr-defined]
        return
    began = total.ready - 1 == total.started == total.processed == total.completed
    if began or total.ready == total.started == total.processed <= total.completed + 1:
        for counted in (total, progress.current):
            counted.ready = counted.started
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
