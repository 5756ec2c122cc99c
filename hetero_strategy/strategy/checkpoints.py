"""How a strategy saves and loads: every rank what it owns, in folders that any layout reads."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import ConfigError
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.runtime.agreement import Stop
from hetero_strategy.strategy.assembly import PARTS, Assembled, move_rest
from hetero_strategy.strategy.collectives import WorldCollectives
from hetero_strategy.strategy.refusals import check_folder


class OwnCheckpoints(WorldCollectives):
    """What Lightning asks a strategy for checkpoints."""

    restore_checkpoint_after_setup = True
    _loads_apart = False
    _assembled: Assembled | None
    _multimodal: MultimodalModel | None
    _stop: Stop
    _verify: bool

    @property
    def state(self) -> TrainingState:
        assert self._assembled is not None
        return self._assembled.state

    @property
    def checkpoint_seconds(self) -> float:
        """That this rank has spent on writing and removing checkpoints."""
        return self.state.seconds

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what ``state_dict()`` of the LightningModule does: what other ranks own is on the meta device."""
        assert self.lightning_module is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", re.escape(PARTS))  # of what a checkpoint puts together
            return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.state.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise ConfigError("HeteroStrategy: storage_options is not supported; a checkpoint is a local directory")
        check_folder(filepath)
        assert self.lightning_module is not None
        if self.ends_alone():
            # Other ranks may not come: a collective save would hang and hide the error.
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
        if self._stop.requeue_agreed or over:  # SLURM, or the script, may end this job next: nobody would wait for it
            self.state.finalize()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill owned parameters in place, from any layout; return the rest of Lightning's checkpoint.

        Where the LightningModule looks at what is loaded, or loads it itself, parameters are filled afterwards, in
        :meth:`load_model_state_dict`. States of optimizers are read to train on, and not by an evaluation, which may
        come after a ``fit`` that made them.
        """
        module = self.lightning_module
        assert module is not None
        check_folder(checkpoint_path)
        torch.cuda.empty_cache()
        hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
        own = is_overridden("on_load_checkpoint", module) or is_overridden("load_state_dict", module)
        self._loads_apart = bool(own or hooks)
        return self.state.load(
            Path(self.broadcast(os.fspath(checkpoint_path))),
            self.optimizers if module.trainer.state.fn == TrainerFn.FITTING else [],
            self.state.rest_of(module),
            apart=self._loads_apart,
            strict=module.strict_loading,
            verify=self._verify,
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what :meth:`load_checkpoint` has not filled, where names were compared."""
        module = self.lightning_module
        assert module is not None
        if self._loads_apart:
            module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            nn.Module.load_state_dict(module, checkpoint["state_dict"], strict=False)
        move_rest(module, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        path = str(self.lightning_module.trainer.ckpt_path)
        self.state.load_optimizers(self.optimizers, checkpoint["optimizer_states"], path)

    def ends_alone(self) -> bool:
        """Whether an exception ends this rank, and not a stop that all ranks agreed upon."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED and not self._stop.agreed

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.ends_alone():
            return
        self.state.remove(Path(filepath), self.is_global_zero)
