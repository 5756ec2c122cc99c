"""Lightning's calls on a strategy whose ranks hold different modules: collectives over the world, and checkpoints of
which every rank writes and reads its own part, in folders that any layout reads.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import ConfigError
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.runtime.agreement import Stop
from hetero_strategy.strategy.assembly import PARTS, Assembled, move_rest
from hetero_strategy.strategy.refusals import WATCHED, check_folder, is_watched, metrics_of, without_inference_mode


class ManyRanks(ParallelStrategy):
    """The collectives and the checkpoints of Lightning's protocol, for ranks that hold different modules."""

    restore_checkpoint_after_setup = True
    _fills_in_place = True
    _assembled: Assembled | None
    _multimodal: MultimodalModel | None
    _stop: Stop
    _verify: bool

    # ---- collectives over the world; after an exception on this rank none waits for another rank --------------------

    def _together(self) -> bool:
        """Return whether the other ranks join a collective too: after an exception on this rank they may not."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return _distributed_is_initialized() and (trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED)

    def barrier(self, name: str | None = None) -> None:
        if self._together():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast one rank's picklable object to all of them."""
        if not self._together():
            return obj
        boxed = [obj]
        dist.broadcast_object_list(boxed, src)
        return boxed[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks in its dtype, as Lightning's other strategies do; the argument is not changed."""
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
        """Make ``self.log(..., sync_dist=True)`` use :meth:`reduce_logged`, and silence Lightning's advice to set it;
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
        """Check metrics and hooks that the user's own hooks have made meanwhile."""
        self._keep_metrics_apart()
        assert self.lightning_module is not None
        if self.reduce_boolean_decision(is_watched(self.lightning_module), all=False):
            raise ConfigError(WATCHED)

    def on_validation_start(self) -> None:
        self._keep_metrics_apart()

    def on_test_start(self) -> None:
        self._keep_metrics_apart()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether ``decision`` is true on all ranks, or on any."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if self._together():
            dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainingState:
        assert self._assembled is not None
        return self._assembled.state

    @property
    def checkpoint_seconds(self) -> float:
        """Return the seconds that this rank has spent on writing and removing checkpoints."""
        return self.state.seconds

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the LightningModule's ``state_dict()``; tensors that other ranks own are on the meta device."""
        assert self.lightning_module is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", re.escape(PARTS))  # a checkpoint joins the parts
            return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.state.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise ConfigError("HeteroStrategy: storage_options is not supported; a checkpoint is a local directory")
        check_folder(filepath)
        assert self.lightning_module is not None
        if self.ends_alone():
            # Other ranks may not join: a collective save would hang and hide the error.
            rank_zero_warn(f"no checkpoint is saved after an exception: {filepath}")
            return
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING and trainer.fit_loop.epoch_loop._should_accumulate():
            rank_zero_warn(
                f"{filepath} is saved between batches whose gradients add up, and holds none: a run that resumes from"
                f" it makes that step from fewer of them; save every multiple of accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches} batches"
            )
        path = Path(self.broadcast(os.fspath(filepath)))
        self.state.save(checkpoint, path, self.state.rest_of(self.lightning_module))
        over = self._multimodal is None or not self._multimodal.attached
        if self._stop.requeue_agreed or over:  # SLURM or the script may end this job next
            self.state.finalize()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill owned parameters in place, from any layout; return the rest of Lightning's checkpoint.

        If the LightningModule inspects or loads the state itself, parameters are filled later, in
        :meth:`load_model_state_dict`. States of optimizers are read for training only, not by an evaluation, which may
        follow a ``fit`` that made the optimizers.
        """
        module = self.lightning_module
        assert module is not None
        check_folder(checkpoint_path)
        torch.cuda.empty_cache()
        hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
        own = is_overridden("on_load_checkpoint", module) or is_overridden("load_state_dict", module)
        self._fills_in_place = not (own or hooks)
        return self.state.load(
            Path(self.broadcast(os.fspath(checkpoint_path))),
            self.optimizers if module.trainer.state.fn == TrainerFn.FITTING else [],
            self.state.rest_of(module),
            in_place=self._fills_in_place,
            strict=module.strict_loading,
            verify=self._verify,
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what :meth:`load_checkpoint` has not filled; that method has compared the names."""
        module = self.lightning_module
        assert module is not None
        if self._fills_in_place:
            nn.Module.load_state_dict(module, checkpoint["state_dict"], strict=False)
        else:
            module.load_state_dict(checkpoint["state_dict"], strict=strict)
        move_rest(module, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        path = str(self.lightning_module.trainer.ckpt_path)
        self.state.load_optimizers(self.optimizers, checkpoint["optimizer_states"], path)

    def ends_alone(self) -> bool:
        """Return whether an exception ends this rank, and not a stop that all ranks agreed upon."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED and not self._stop.agreed

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.ends_alone():
            return
        self.state.remove(Path(filepath), self.is_global_zero)


class _OneBatch(_ResultCollection):
    """A collection of values that are logged on every rank for the one global batch."""

    def __init__(self, training: bool, reduce: Callable[..., Any]) -> None:
        super().__init__(training)
        self._reduce = reduce

    @override
    def log(self, *args: Any, **options: Any) -> None:
        super().log(*args, **{**options, "sync_dist_fn": self._reduce})


def about_to_zero_gradients(module: LightningModule | None) -> bool:
    """Return whether Lightning zeroes the gradients before the backward of the running step, with nobody reading them
    before.

    False when the model runs once more in a hook: a window of accumulation may still add to them.
    """
    if module is None or not module.automatic_optimization or is_overridden("optimizer_zero_grad", module):
        return False
    trainer = module.trainer
    if not trainer.training or module._current_fx_name != "training_step":
        return False
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(is_overridden("on_before_zero_grad", one) for one in (module, *callbacks)):
        return False
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
