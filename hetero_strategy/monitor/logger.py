"""Loggers with settings for runs on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from hetero_strategy.errors import require


def wandb_logger(
    save_dir: str | Path = "outputs",
    *,
    project: str = "hetero_strategy",
    name: str | None = None,
    offline: bool = True,
    **options: Any,
) -> WandbLogger:
    """Make a logger of a Weights & Biases run, offline by default: ``wandb sync`` uploads it later.

    Args:
        save_dir: folder of run files, made if it is missing (wandb writes to a temporary folder otherwise).
        name: name of the run; wandb invents one by default.
        options: further options of :class:`lightning.pytorch.loggers.WandbLogger`.
    """
    require("wandb", "recipes", "wandb_logger")
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    return WandbLogger(name=name, save_dir=save_dir, project=project, offline=offline, **options)


class LogConfiguration(L.Callback):
    """Gives every logger the run's configuration once, when training or an evaluation starts.

    Args:
        configuration: nested and ready for JSON. Weights & Biases ignores names that its sweep has set: these need
            another name.
    """

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self.configuration = dict(configuration)
        self._logged = False

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Log the configuration, unless it was."""
        for logger in () if self._logged else trainer.loggers:
            logger.log_hyperparams(self.configuration)
        self._logged = True
