"""``MemoryMonitor``: the measured and predicted peak memory of one training step on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import lightning as L
import numpy as np
import torch
from jaxtyping import Float64
from lightning.fabric.utilities import rank_zero_warn
from typing_extensions import override

from hetero_strategy.errors import check_types
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.monitor.measure import begin_peak, check_strategy, gather_on_first
from hetero_strategy.parallelize.compile import Compile
from hetero_strategy.parallelize.transforms import of_kind
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.profiling.cache import memory_model
from hetero_strategy.profiling.memory import Memory
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.runtime.recorder import Recording
from hetero_strategy.simulator.cost_model import Precision

BatchNumber = Annotated[int, ("1 or more, as the first makes optimizer states", lambda batch: batch >= 1)]


@dataclass(frozen=True)
class PeakMemory:
    """A measured and a predicted peak of one step."""

    batch: int
    """Number of the step's batch in its epoch."""
    measured: Float64[np.ndarray, "ranks"]
    """Peak bytes of all tensors of each rank."""
    predicted: Memory

    @property
    def expected(self) -> Float64[np.ndarray, "ranks"]:
        """Return the predicted bytes of tensors: all but the last kind, which the allocator reserves around tensors."""
        return self.predicted.bytes[:-1].sum(axis=0)


class _Measured(NamedTuple):
    """A measurement on this rank."""

    batch: int
    peak: int
    recording: Recording
    summed: int
    """Number of batches per optimizer step."""


class MemoryMonitor(L.Callback):
    """A callback that measures one training step's peak memory on every rank, optimizer included, and predicts it.

    On CUDA devices it is the allocator's peak, which is reset when the step begins. On CPUs tensors are counted as
    operators make and free them, which slows that step; compiled blocks are not counted. The first rank makes the
    prediction after training, by the planner's memory model: it measures the blocks' activations on tensors without
    values, unless it has done so before.

    Args:
        batch: number of the measured batch of this process, from 0; the next batch that ends an optimizer step is
            taken. The first batches make optimizer states.

    Raises:
        ConfigError: ``batch`` is too small; at the start of training, under another strategy than HeteroStrategy.
    """

    def __init__(self, batch: BatchNumber = 3) -> None:
        check_types("MemoryMonitor", MemoryMonitor.__init__, batch=batch)
        self.batch = batch
        self.last: PeakMemory | None = None
        """Result of the last run, on rank 0; None if no step was measured."""
        self._reset()

    def _reset(self) -> None:
        self._seen, self._measures = 0, False
        self._counted: Allocations | None = None
        self._measured: _Measured | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_strategy(trainer, "MemoryMonitor", "step plans")
        self.last = None
        self._reset()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        self._stop()  # an earlier batch may have been skipped
        self._seen += 1
        if self._seen <= self.batch or self._measured or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if strategy.root_device.type == "cuda":
            begin_peak(strategy.root_device)
        elif of_kind(strategy.transforms, Compile) or not isinstance(batch, Batch):
            return
        else:
            self._counted = Allocations([*batch.tensors(), *_tensors(trainer)])
            self._counted.__enter__()
        self._measures = True

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._measures:
            strategy: Any = trainer.strategy
            counted = self._stop()
            peak = torch.cuda.max_memory_allocated(strategy.root_device) if counted is None else counted.most
            recording, summed = strategy.executor.recorder.steps[-1], trainer.accumulate_grad_batches
            self._measured = _Measured(batch_idx, peak, recording, summed)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> Allocations | None:
        counted, self._counted, self._measures = self._counted, None, False
        if counted is not None:
            counted.__exit__(None, None, None)
        return counted

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._measured is None:
            return
        strategy: Any = trainer.strategy
        peaks = gather_on_first(self._measured.peak, strategy.background)
        if peaks is None:
            return
        try:
            predicted = _predicted(strategy, pl_module, self._measured)
        except Exception as error:  # training is over, and its results matter more
            rank_zero_warn(f"MemoryMonitor: no prediction of the measured step: {error!r}")
            return
        self.last = PeakMemory(self._measured.batch, np.array(peaks, np.float64), predicted)
        most = {"measured": self.last.measured.max(), "predicted": self.last.expected.max()}
        for logger in trainer.loggers:
            logger.log_metrics({f"memory/{name}_gib": value / 2**30 for name, value in most.items()})


def _predicted(strategy: Any, pl_module: L.LightningModule, measured: _Measured) -> Memory:
    executor: Executor = strategy.executor
    recording, storage, device = measured.recording, executor.storage, executor.device.type
    model = next(m for m in pl_module.modules() if isinstance(m, MultimodalModel)).meta_copy().train()
    precision, accumulates = Precision(storage.compute.itemsize, storage.master.itemsize), measured.summed > 1
    predictor = memory_model(model, spec_of(model), device, precision, strategy.transforms, accumulates=accumulates)
    return predictor.of(recording.plan, recording.schedule, executor.placement, strategy.transforms)


def _tensors(trainer: L.Trainer) -> Iterator[torch.Tensor]:
    """Yield the tensors that this rank keeps between steps."""
    strategy: Any = trainer.strategy
    executor: Executor = strategy.executor
    for stage in executor.stages.values():
        yield from stage.buffers()
        for parameter in stage.parameters():
            yield from (parameter, *([] if parameter.grad is None else [parameter.grad]))
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, torch.Tensor))
