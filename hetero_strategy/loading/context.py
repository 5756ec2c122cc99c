"""Facts that a strategy and its Trainer pass to the data module, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loops.loop import _Loop

from hetero_strategy.layout.spec import Placement
from hetero_strategy.plan.config import ModelContext
from hetero_strategy.schedule.compile import StepCompiler


@dataclass(frozen=True)
class TrainingContext:
    """A context of training: where modules live and how steps run; by default in one process."""

    placement: Placement | None = None
    """Placement of all modules; None: they are all on this device, or no layouts are known yet."""
    placed_later: bool = False
    """Whether the placement follows from the model, which does not exist yet."""
    microbatches: int | None = None
    """Microbatches of a step, as planned with the layouts."""
    row_multiple: Mapping[str, int] = field(default_factory=dict)
    """Multiple to which a module's rows per instance are padded, by module."""
    model: ModelContext = field(default_factory=ModelContext)
    """Facts of model and layouts for balancing."""
    rank: int = 0
    """Rank of this process."""
    compiler: StepCompiler | None = None
    """Maker of the program of each step; None: the strategy runs none."""
    group: dist.ProcessGroup | None = None
    """Group of all ranks on the host, for the one thread per rank that loads data."""
    compute_dtype: torch.dtype | None = None
    """Dtype in which modules compute, if narrower than fp32."""

    @staticmethod
    def of(trainer: L.Trainer | None) -> TrainingContext:
        """Return the context of a Trainer's strategy, whichever that is."""
        strategy = None if trainer is None else trainer.strategy
        context = getattr(strategy, "context", None)
        return context if isinstance(context, TrainingContext) else TrainingContext()


def finish_epoch(trainer: L.Trainer | None) -> None:
    """Correct Lightning's progress in a restored run that ended an epoch, began one, or was in the middle of one.

    With ``max_steps`` Lightning takes every restored run for one in the middle of an epoch: it repeats the end of the
    finished epoch, and so leaves out the next one. It does this too if an epoch has begun, for any length of the run. A
    run that is restored at the last batch of an epoch counts the epochs after it one short. A run that was ended in the
    middle of an epoch counts that epoch as done, though the loader knows better.
    """
    loop = getattr(trainer, "fit_loop", None)
    if loop is None or not (loop.restarting or loop._loaded_from_state_dict):
        return
    progress, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    total = progress.total
    if batches.current.processed and not batches.is_last_batch:
        states = loop._combined_loader_states_to_load
        here = next((state["epoch"] for state in states if "epoch" in state), progress.current.completed)
        ended = progress.current.processed - here  # 1 if max_steps or max_time has ended it in its middle
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
