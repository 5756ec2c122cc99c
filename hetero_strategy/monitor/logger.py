"""Loggers with the settings that a run on a cluster wants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, WandbLogger


def wandb_logger(
    save_dir: str | Path = "outputs",
    *,
    project: str = "hetero_strategy",
    name: str | None = None,
    offline: bool = True,
    **options: Any,
) -> WandbLogger:
    """A Weights & Biases run, offline by default: ``wandb sync`` uploads it later.

    Args:
        save_dir: where run files go; made if it is missing (wandb writes to a temporary folder otherwise).
        project: of the run.
        name: of the run; wandb invents one by default.
        offline: no network at all.
        options: of :class:`lightning.pytorch.loggers.WandbLogger`.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    return WandbLogger(name=name, save_dir=save_dir, project=project, offline=offline, **options)


def csv_logger(save_dir: str | Path = "outputs", *, name: str = "", **options: Any) -> CSVLogger:
    """``<save_dir>/<name>/version_<n>/metrics.csv``; ``options`` as in :class:`lightning.pytorch.loggers.CSVLogger`."""
    return CSVLogger(save_dir, name=name, **options)


class LogConfiguration(L.Callback):
    """Gives every logger what a run is made of, when training starts.

    Args:
        configuration: nested, ready for JSON. Weights & Biases ignores names that its sweep has set: give these below
            another name.
    """

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self.configuration = dict(configuration)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log it once."""
        for logger in trainer.loggers:
            logger.log_hyperparams(self.configuration)
