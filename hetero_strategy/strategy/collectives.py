"""Collectives over the world that Lightning asks a strategy for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import override

from hetero_strategy.errors import ConfigError
from hetero_strategy.strategy.refusals import WATCHED, is_watched, metrics_of, without_inference_mode


class WorldCollectives(ParallelStrategy):
    """Every rank comes to each of them, whatever modules it holds; after an exception nobody is waited for."""

    def _together(self) -> bool:
        """Whether the other ranks come to a collective too: after an exception on this one they may not."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return _distributed_is_initialized() and (trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED)

    def barrier(self, name: str | None = None) -> None:
        if self._together():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's picklable object on all of them."""
        if not self._together():
            return obj
        boxed = [obj]
        dist.broadcast_object_list(boxed, src)
        return boxed[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce what ranks have, in its dtype, as Lightning's other strategies do; the given tensor stays as it is."""
        if not isinstance(tensor, torch.Tensor) or not self._together():
            return tensor
        op = str(reduce_op).lower().rsplit(".", 1)[-1]
        mean = op in ("mean", "avg")
        value = tensor.detach().to(self.root_device, copy=True)
        dist.all_reduce(value, op=dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, op.upper()), group=group)
        return (value / dist.get_world_size(group)).to(value.dtype) if mean else value

    def reduce_logged(self, value: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a logged value. All ranks log the value of the one global batch, so its sum is the value itself."""
        return self.reduce(value, group, "mean" if reduce_op == "sum" else reduce_op)

    def prepare_loops(self, trainer: Trainer) -> None:
        """Let ``self.log(..., sync_dist=True)`` use :meth:`reduce_logged`, which Lightning need not recommend here;
        metrics count the one global batch once.
        """
        without_inference_mode(trainer)
        warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True", PossibleUserWarning)
        fit = trainer.fit_loop.epoch_loop
        for loop in (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop):
            if not isinstance(loop._results, _OneBatch):
                loop._results = _OneBatch(loop._results.training, self.reduce_logged)
        self._keep_metrics_apart()

    def _keep_metrics_apart(self) -> None:
        assert self.lightning_module is not None
        for metric in metrics_of(self.lightning_module.trainer):
            metric.distributed_available_fn = bool  # never: every rank has the global value already

    def on_train_start(self) -> None:
        """Look at metrics and hooks that a person's hooks have made meanwhile.

        Raises:
            ConfigError: W&B watches gradients or parameters.
        """
        self._keep_metrics_apart()
        assert self.lightning_module is not None
        if self.reduce_boolean_decision(is_watched(self.lightning_module), all=False):
            raise ConfigError(WATCHED)

    def on_validation_start(self) -> None:
        self._keep_metrics_apart()

    def on_test_start(self) -> None:
        self._keep_metrics_apart()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, say yes."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if self._together():
            dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)


class _OneBatch(_ResultCollection):
    """Values that are logged on every rank of the one global batch."""

    def __init__(self, training: bool, reduce: Callable[..., Any]) -> None:
        super().__init__(training)
        self._reduce = reduce

    @override
    def log(self, *args: Any, **options: Any) -> None:
        super().log(*args, **{**options, "sync_dist_fn": self._reduce})
