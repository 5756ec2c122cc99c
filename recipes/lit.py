"""The LightningModule of all recipes, an ordinary one, and its optimizer and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from hetero_strategy.checkpoint.folder import old_of
from hetero_strategy.errors import ConfigError
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model import MultimodalModel

CONFIGURED = ("initial_lr", "betas", "weight_decay")
"""Options of a group of parameters that a checkpoint has, too."""


class LitMultimodal(L.LightningModule):
    """A multimodal language model that learns to answer.

    Args:
        make_model: called once per process, in `configure_model`.
        optimizer: arguments of :func:`adamw_cosine`.
    """

    def __init__(self, make_model: Callable[[], MultimodalModel], optimizer: Mapping[str, Any]) -> None:
        super().__init__()
        self.make_model = make_model
        self.optimizer = dict(optimizer)
        self.model: MultimodalModel | None = None
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        """Of an evaluation: what is logged of it -> its sum over what it counts, and how much that is."""

    def configure_model(self) -> None:
        """Build the model where the strategy wants it."""
        if self.model is None:
            self.model = self.make_model()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Loss of a global batch."""
        out = self.model(batch)
        self.log("train/loss", out.loss)  # with prog_bar=True every step would wait for the device
        self.log("train/accuracy", out.accuracy)
        if len(out.losses) > 1:  # the share of every module
            self.log_dict({f"train/loss_{name}": share.detach() for name, share in out.losses.items()})
        return out.loss

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Loss and exact match; predicted tokens and drawings are for callbacks."""
        return self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """The same of samples that choose no checkpoint."""
        return self._evaluate(batch)

    def on_validation_epoch_start(self) -> None:
        """Nothing is counted yet."""
        self._sums = {}

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log the loss per loss token, and per target element of a generator, whatever batches these came in."""
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """The same of the test."""
        self._log_evaluation("test")

    def _evaluate(self, batch: Batch) -> dict[str, Any]:
        out = self.model(batch)
        found = {f"loss_{name}": (share, out.counts[name]) for name, share in out.losses.items()}
        found["exact_match"] = out.exact_match, out.labelled_samples
        for name, (mean, count) in found.items():
            total, counted = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + mean.detach().double() * count, counted + count
        return {"predictions": out.predictions, "drawn": out.drawn}

    def _log_evaluation(self, stage: str) -> None:
        means = {name: (total / max(1, counted)).float() for name, (total, counted) in self._sums.items()}
        exact_match = means.pop("exact_match")
        self.log(f"{stage}/loss", torch.stack([*means.values()]).sum(), sync_dist=True)
        self.log(f"{stage}/exact_match", exact_match, prog_bar=True, sync_dist=True)
        if len(means) > 1:
            self.log_dict({f"{stage}/{name}": mean for name, mean in means.items()}, sync_dist=True)

    def on_train_start(self) -> None:
        """What is configured holds, also where the checkpoint that a run goes on from has it otherwise."""
        (optimizer,), (config,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        scheduler = config.scheduler
        assert isinstance(scheduler, LambdaLR)
        scheduler.base_lrs = [options["initial_lr"] for options in self._options]
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        scheduler._last_lr = [base * rate(scheduler.last_epoch) for base, rate in rates]
        for group, options, lr in zip(optimizer.param_groups, self._options, scheduler._last_lr, strict=True):
            group.update(options, lr=lr)

    def configure_optimizers(self) -> Any:
        """AdamW, with warm-up and cosine decay over all steps of the run."""
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ConfigError("trainer: the learning rate decays over the run, so give max_steps or max_epochs")
        optimizer, scheduler = adamw_cosine(self, int(steps), **self.optimizer)
        self._options = [{name: group[name] for name in CONFIGURED} for group in optimizer.param_groups]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def logged(losses: Sequence[str]) -> list[str]:
    """What :class:`LitMultimodal` logs of a model whose modules have these losses: what may choose a checkpoint."""
    shares = [f"loss_{name}" for name in losses if len(losses) > 1]
    names = [f"val/{name}" for name in ("loss", "exact_match", *shares)]
    return [*names, *(f"train/{name}" for name in ("loss", "accuracy", *shares))]


class MovableCheckpoint(ModelCheckpoint):
    """A checkpoint that a run finds again after its folder was moved. Of equal scores the last one is the best."""

    def check_monitor_top_k(self, trainer: L.Trainer, current: torch.Tensor | None = None) -> bool:
        """Otherwise a metric that is 0 for long, such as an exact match, would keep the weights of the beginning."""
        best = self.best_k_models.get(self.kth_best_model_path)
        equal = best is not None and trainer.strategy.reduce_boolean_decision(bool(current == best))
        return equal or super().check_monitor_top_k(trainer, current)

    @property
    def state_key(self) -> str:
        """Lightning's, by which runs have saved it before."""
        return super().state_key.replace(f"{MovableCheckpoint.__qualname__}{{", f"{ModelCheckpoint.__qualname__}{{")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Paths lead to where the folder is now; where the best one did not come along, another one is chosen."""
        before, now = Path(state_dict["dirpath"]), Path(str(self.dirpath))

        def here(path: str) -> str:
            return str(now / Path(path).relative_to(before)) if Path(path).is_relative_to(before) else path

        names = ("best_model_path", "kth_best_model_path", "last_model_path")
        found = state_dict | {name: here(state_dict[name]) for name in names} | {"dirpath": self.dirpath}
        found["best_k_models"] = {here(path): score for path, score in state_dict["best_k_models"].items()}
        best = found["best_model_path"]
        if not best or Path(best).exists() or old_of(Path(best)).exists():
            super().load_state_dict(found)


class LastCheckpoint(MovableCheckpoint):
    """A checkpoint to go on from, every so many steps and after the last one of the run, whatever ends it; where
    validation comes after the step, it is saved after that.

    Saved before, it would lose a validation: Lightning goes on with the next step, and neither the callback that keeps
    the best checkpoint nor a scheduler would hear of what it said. Callbacks that choose by validation come before this
    one.
    """

    _asked = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nobody has asked this run to end."""
        self._asked = False
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Save, or let `on_validation_end` do it."""
        self._to_end_of_window(trainer)
        loop = trainer.fit_loop
        if loop.epoch_loop._should_accumulate():
            return  # a checkpoint holds no gradients
        ends, val_loop = run_ends(trainer), loop.epoch_loop.val_loop
        if not ends and trainer.global_step % self._every_n_train_steps:
            return
        validated = not (val_loop._combined_loader is not None and val_loop.skip)  # otherwise there is no such data
        if validated and loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._defer_save_until_validation = True  # ModelCheckpoint's own, for metrics that only validation has
        elif not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save if it is due, or if validation has ended the run."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._to_end_of_window(trainer)
            self._defer_save_until_validation |= run_ends(trainer)
        super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save where the run ends with this epoch and none of its batches knew, or where no validation came."""
        ends = trainer.should_stop and trainer.fit_loop._can_stop_early
        if (ends or self._defer_save_until_validation) and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        self._defer_save_until_validation = False

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save where all ranks were told to end, such as by a scheduler that needs the nodes."""
        if isinstance(exception, SIGTERMException) and trainer.state.fn == TrainerFn.FITTING:
            super().on_exception(trainer, pl_module, exception)

    def _to_end_of_window(self, trainer: L.Trainer) -> None:
        """Who asks the run to end between batches whose gradients add up waits for the last of them, as no checkpoint
        holds gradients.
        """
        self._asked |= trainer.should_stop
        trainer.should_stop = self._asked and not trainer.fit_loop.epoch_loop._should_accumulate()


def run_ends(trainer: L.Trainer) -> bool:
    """Whether the batch that was trained last is the last one of the run, as Lightning will find: by its steps or
    epochs, or because somebody asked it to stop.
    """
    loop = trainer.fit_loop
    steps = _is_max_limit_reached(trainer.global_step, loop.max_steps)
    epochs = _is_max_limit_reached(loop.epoch_progress.current.processed + 1, loop.max_epochs)
    epochs &= loop.epoch_loop._num_ready_batches_reached()
    return steps or epochs or (trainer.should_stop and loop._can_stop_early)


def adamw_cosine(
    module: torch.nn.Module,
    steps: int,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    warmup_steps: int,
    final_lr: float,
) -> tuple[AdamW, LambdaLR]:
    """AdamW that decays matrices only; the rate rises linearly, then falls as a cosine to ``final_lr * lr``."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]

    def rate(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        return final_lr + (1 - final_lr) * 0.5 * (1 + math.cos(math.pi * done))

    optimizer = AdamW(groups, lr=lr, betas=(betas[0], betas[1]))
    return optimizer, LambdaLR(optimizer, rate)
