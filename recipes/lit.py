"""The LightningModule of all recipes, its optimizer and its checkpoints."""

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
"""Options of a parameter group that a checkpoint stores, too."""


class LitMultimodal(L.LightningModule):
    """A LightningModule that trains a multimodal language model to answer.

    Args:
        make_model: function that builds the model; `configure_model` calls it once per process.
        optimizer: arguments of :func:`adamw_cosine`.
    """

    def __init__(self, make_model: Callable[[], MultimodalModel], optimizer: Mapping[str, Any]) -> None:
        super().__init__()
        self.make_model = make_model
        self.optimizer = dict(optimizer)
        self.model: MultimodalModel | None = None
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        """Name of a logged mean -> weighted sum over the evaluation so far, and sum of the weights."""

    def configure_model(self) -> None:
        """Build the model, when and on the device that the strategy chooses."""
        if self.model is None:
            self.model = self.make_model()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the loss of a global batch."""
        out = self.model(batch)
        self.log("train/loss", out.loss)  # with prog_bar=True every step would wait for the device
        self.log("train/accuracy", out.accuracy)
        for balance in out.balance_losses.values():  # of a language model with experts
            self.log("train/balance_loss", balance)
        if len(out.losses) > 1:  # one loss per module
            self.log_dict({f"train/loss_{name}": share.detach() for name, share in out.losses.items()})
        return out.loss

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Count loss and exact match; return predicted tokens and drawings to callbacks."""
        return self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Evaluate samples of the test split, which choose no checkpoint."""
        return self._evaluate(batch)

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self._sums = {}

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log means over the whole split: the loss per loss token, and per target element of a generator."""
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Log the means of the test split."""
        self._log_evaluation("test")

    def _evaluate(self, batch: Batch) -> dict[str, Any]:
        out = self.model(batch)
        means = {f"loss_{name}": (loss, out.counts[name]) for name, loss in out.losses.items()}
        means["exact_match"] = out.exact_match, out.labelled_samples
        for name, (mean, count) in means.items():
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
        """Set the configured options of the optimizer, which may differ from those of the loaded checkpoint."""
        (optimizer,), (config,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        scheduler = config.scheduler
        assert isinstance(scheduler, LambdaLR)
        scheduler.base_lrs = [options["initial_lr"] for options in self._options]
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        scheduler._last_lr = [base * rate(scheduler.last_epoch) for base, rate in rates]
        for group, options, lr in zip(optimizer.param_groups, self._options, scheduler._last_lr, strict=True):
            group.update(options, lr=lr)

    def configure_optimizers(self) -> Any:
        """Return AdamW, with warm-up and cosine decay over all steps of the run."""
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ConfigError("trainer: the learning rate decays over the run, so give max_steps or max_epochs")
        optimizer, scheduler = adamw_cosine(self, int(steps), **self.optimizer)
        self._options = [{name: group[name] for name in CONFIGURED} for group in optimizer.param_groups]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MovableCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose files are found again after the run folder was moved, and that prefers the later of two
    equal scores.
    """

    def check_monitor_top_k(self, trainer: L.Trainer, current: torch.Tensor | None = None) -> bool:
        """Replace the best checkpoint by one of equal score: an exact match may stay 0 for many validations."""
        best = self.best_k_models.get(self.kth_best_model_path)
        equal = best is not None and trainer.strategy.reduce_boolean_decision(bool(current == best))
        return equal or super().check_monitor_top_k(trainer, current)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load paths as they are in the folder's present place. If the best checkpoint is gone, forget its score."""
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
    """A checkpoint to resume from, saved every ``every_n_train_steps`` and after the last step of the run, for whatever
    reason it ends. If a validation follows the step, the checkpoint is saved after the validation.

    A checkpoint saved before it would lose the validation: a resumed run starts with the next step, so neither the
    callback that keeps the best checkpoint nor a scheduler would see its result. Callbacks that choose by validation
    come before this one.
    """

    _asked = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget a request to stop from an earlier run."""
        self._asked = False
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Save, or leave it to `on_validation_end`."""
        self._to_end_of_window(trainer)
        loop = trainer.fit_loop
        if loop.epoch_loop._should_accumulate():
            return  # a checkpoint holds no gradients
        ends, val_loop = run_ends(trainer), loop.epoch_loop.val_loop
        if not ends and trainer.global_step % self._every_n_train_steps:
            return
        validated = not (val_loop._combined_loader is not None and val_loop.skip)  # without validation data
        if validated and loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._defer_save_until_validation = True  # ModelCheckpoint has it for metrics that only validation logs
        elif not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save if a save is due, or if the validation ended the run."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._to_end_of_window(trainer)
            self._defer_save_until_validation |= run_ends(trainer)
        super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save if the run ends with this epoch, unforeseen by its last batch, or if no validation came."""
        ends = trainer.should_stop and trainer.fit_loop._can_stop_early
        if (ends or self._defer_save_until_validation) and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        self._defer_save_until_validation = False

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save if SIGTERM ended all ranks, such as from a scheduler that needs the nodes."""
        if isinstance(exception, SIGTERMException) and trainer.state.fn == TrainerFn.FITTING:
            super().on_exception(trainer, pl_module, exception)

    def _to_end_of_window(self, trainer: L.Trainer) -> None:
        """Delay a request to stop until the accumulated gradients are applied, as no checkpoint holds gradients."""
        self._asked |= trainer.should_stop
        trainer.should_stop = self._asked and not trainer.fit_loop.epoch_loop._should_accumulate()


def run_ends(trainer: L.Trainer) -> bool:
    """Return whether Lightning will end the run after the present batch: by steps, epochs or a request to stop."""
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
    betas: Sequence[float],
    weight_decay: float,
    warmup_steps: int,
    final_lr: float,
) -> tuple[AdamW, LambdaLR]:
    """Return an AdamW that decays matrices only, and a rate that rises linearly, then falls by a cosine to
    ``final_lr * lr``.
    """
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


class LogConfiguration(L.Callback):
    """A callback that logs the run's configuration once, when training or an evaluation starts.

    Args:
        configuration: nested values ready for JSON. Weights & Biases ignores names that its sweep has set; give such
            values another name.
    """

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self.configuration = dict(configuration)
        self._logged = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for logger in () if self._logged else trainer.loggers:
            logger.log_hyperparams(self.configuration)
        self._logged = True
