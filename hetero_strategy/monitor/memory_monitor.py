"""``MemoryMonitor``: the peak memory of one training step on every rank, beside what plans predict for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from jaxtyping import Float64
from lightning.fabric.utilities import rank_zero_warn
from typing_extensions import override

from hetero_strategy.errors import check_options
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.monitor.measure import OPTIONS, begin_peak, check_strategy, gather_on_first
from hetero_strategy.planner.action_seconds import ActionSeconds
from hetero_strategy.planner.evaluate import Candidate, Evaluator, Step
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.hardware import cluster
from hetero_strategy.planner.memory import Memory
from hetero_strategy.planner.overlap import After
from hetero_strategy.planner.shape import shape_of
from hetero_strategy.planner.times import Precision
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.profiling.cache import memory_model
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.runtime.recorder import Recording
from hetero_strategy.simulator.simulate import simulate


@dataclass(frozen=True)
class PeakMemory:
    """Of one step."""

    batch: int
    """Number of the step's batch in its epoch."""
    measured: Float64[np.ndarray, "ranks"]
    """Bytes of all tensors of each rank, when they were most."""
    predicted: Memory

    @property
    def expected(self) -> Float64[np.ndarray, "ranks"]:
        """Bytes that were predicted: of tensors, so without the last kind, what is reserved around them."""
        return self.predicted.bytes[:-1].sum(axis=0)


class _Measured(NamedTuple):
    """Of this rank."""

    batch: int
    peak: int
    recording: Recording
    summed: int
    """Batches of an optimizer step."""


class MemoryMonitor(L.Callback):
    """Measures the peak memory of one training step on every rank, optimizer included, and predicts it as plans do.

    On CUDA devices it is what the allocator gave out at most, which torch counts anew when the step begins; on
    processors tensors are counted as operators make and free them, which that one step takes longer for, and compiled
    blocks are not counted. The prediction is made by the first rank when training is over: it measures what blocks keep
    on tensors without values, unless it has done so before.

    Args:
        batch: of this process, counted from 0, that is measured, or the next one that ends an optimizer step; the first
            make optimizer states.

    Raises:
        ConfigError: ``batch`` is too small; at the start of training, under another strategy than HeteroStrategy.
    """

    def __init__(self, batch: int = 3) -> None:
        check_options("MemoryMonitor", OPTIONS, batch=batch)
        self.batch = batch
        self.last: PeakMemory | None = None
        """Of the last run, on rank 0; None where no step was measured."""
        self._reset()

    def _reset(self) -> None:
        self._seen, self._measures = 0, False
        self._counted: Allocations | None = None
        self._measured: _Measured | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a strategy that has no step plans; forget the previous run."""
        check_strategy(trainer, "MemoryMonitor", "step plans")
        self.last = None
        self._reset()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to count, if this is the batch."""
        strategy: Any = trainer.strategy
        self._stop()  # of a batch that was left out
        self._seen += 1
        if self._seen <= self.batch or self._measured or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if strategy.root_device.type == "cuda":
            begin_peak(strategy.root_device)
        elif strategy.compile or not isinstance(batch, Batch):
            return
        else:
            self._counted = Allocations([*batch.tensors(), *_tensors(trainer)])
            self._counted.__enter__()
        self._measures = True

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read what it was."""
        if self._measures:
            strategy: Any = trainer.strategy
            counted = self._stop()
            peak = torch.cuda.max_memory_allocated(strategy.root_device) if counted is None else counted.most
            recording, summed = strategy.executor.recorder.steps[-1], trainer.accumulate_grad_batches
            self._measured = _Measured(batch_idx, peak, recording, summed)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Count no longer."""
        self._stop()

    def _stop(self) -> Allocations | None:
        counted, self._counted, self._measures = self._counted, None, False
        if counted is not None:
            counted.__exit__(None, None, None)
        return counted

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather what ranks measured, predict it on the first, and give both to the loggers."""
        if self._measured is None:
            return
        strategy: Any = trainer.strategy
        peaks = gather_on_first(self._measured.peak, strategy.background)
        if peaks is None:
            return
        try:
            predicted = _predicted(strategy, pl_module, self._measured)
        except Exception as error:  # training is over, and its results are worth more
            rank_zero_warn(f"MemoryMonitor: no prediction of the measured step: {error!r}")
            return
        self.last = PeakMemory(self._measured.batch, np.array(peaks, np.float64), predicted)
        most = {"measured": self.last.measured.max(), "predicted": self.last.expected.max()}
        for logger in trainer.loggers:
            logger.log_metrics({f"memory/{name}_gib": value / 2**30 for name, value in most.items()})


def _predicted(strategy: Any, pl_module: L.LightningModule, measured: _Measured) -> Memory:
    """Of a step that ran, whose plan and schedule are known."""
    executor: Executor = strategy.executor
    plan, storage = measured.recording.plan, executor.storage
    model = next(m for m in pl_module.modules() if isinstance(m, MultimodalModel)).meta_copy().train()
    precision = Precision(storage.compute.itemsize, storage.master.itemsize)
    # Of the device memory depends on its kind alone.
    on = cluster("cpu" if executor.device.type == "cpu" else "h100", 1, executor.placement.world_size)
    shape, given = shape_of(model), Given(strategy.recompute, accumulated=measured.summed)
    evaluator = Evaluator(shape, on, [plan.metadata], precision=precision, compiled=strategy.compile)
    config, layouts = executor.compiler.config, executor.placement.layouts
    placed = evaluator.place(Candidate.of_run(config, layouts, plan.microbatches, strategy.recompute, strategy.offload))
    schedule, seconds = measured.recording.schedule, ActionSeconds(plan, placed)
    step = Step(placed, plan, schedule, simulate(schedule, seconds, on.network), After())
    return memory_model(model, shape, on, precision, given).of(step)


def _tensors(trainer: L.Trainer) -> Iterator[torch.Tensor]:
    """What this rank holds before a step."""
    strategy: Any = trainer.strategy
    executor: Executor = strategy.executor
    for stage in executor.stages.values():
        yield from stage.buffers()
        for parameter in stage.parameters():
            yield from (parameter, *([] if parameter.grad is None else [parameter.grad]))
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, torch.Tensor))
    yield from (rows for _, rows in executor.held.all_rows())
