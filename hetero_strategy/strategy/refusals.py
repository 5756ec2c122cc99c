"""What of Lightning cannot work when no rank has the whole model, refused before anything is computed."""

from __future__ import annotations

import os
from typing import Any, cast

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, RandomSampler

from hetero_strategy.errors import ConfigError

CALLBACKS: dict[type, str] = {
    WeightAveraging: "copies the whole model on every rank, and no rank has it; remove the callback",
    StochasticWeightAveraging: "copies the model before it is built in configure_model; remove the callback",
    ModelPruning: "ranks weights of whole parameters, of which a rank has a part; remove the callback",
    BaseFinetuning: "changes what trains during the run; use MultimodalModel(freeze=...) and a run per phase",
}


def check_trainer(trainer: Trainer) -> None:
    """Refuse callbacks that need the whole model, checkpoints by a plugin, at an address or linked to before they are
    written, and validation by time.

    Raises:
        ConfigError: naming the callback, plugin or option, why, and what to do.
    """
    plugin = trainer.strategy._checkpoint_io
    if plugin is not None and type(plugin) is not TorchCheckpointIO:  # which Lightning makes by itself
        raise ConfigError(
            f"HeteroStrategy: the plugin {type(plugin).__name__} would write nothing, as every rank writes its part of"
            " a checkpoint itself; leave it out (HeteroStrategy(async_checkpoint=True) saves in the background)"
        )
    time = cast(Any, trainer)._val_check_time_interval
    if time is not None and trainer.world_size > 1:
        raise ConfigError(
            f"HeteroStrategy: val_check_interval is a time of {time:g} s, and every rank would look at its own clock,"
            " so that some validate while others train; give a number of batches"
        )
    callbacks = cast(list[Any], trainer.callbacks)  # type: ignore[attr-defined]
    if cast(Any, trainer.strategy)._async_checkpoint and any(
        getattr(c, "save_last", None) == "link" for c in callbacks
    ):
        raise ConfigError(
            "HeteroStrategy: ModelCheckpoint(save_last='link') with async_checkpoint=True would link to a checkpoint"
            " that is still being written, and a run that ends meanwhile leaves no last one; set save_last=True or"
            " async_checkpoint=False"
        )
    for saving in (c for c in callbacks if isinstance(c, Checkpoint)):
        check_folder(getattr(saving, "dirpath", None) or trainer.default_root_dir)
    for callback in callbacks:
        for kind, why in CALLBACKS.items():
            if isinstance(callback, kind):
                raise ConfigError(f"HeteroStrategy: Lightning's {type(callback).__name__} {why}")
    if any(isinstance(c, ThroughputMonitor) for c in callbacks):
        rank_zero_warn(
            "Lightning's ThroughputMonitor multiplies by the number of processes, but one batch here spans all of"
            " them; use hetero_strategy.monitor.ThroughputMonitor"
        )
    for name in (type(logger).__name__ for logger in trainer.loggers if getattr(logger, "_log_model", False)):
        rank_zero_warn(
            f"{name}(log_model=...) uploads files, but checkpoints here are folders of files of all ranks: none is"
            " uploaded; leave it out, and upload the folder or an export of it yourself"
        )


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuse an address, such as ``s3://bucket/run``: as a path it would be a folder ``s3:`` of the working folder.

    Raises:
        ConfigError: with what to do.
    """
    if "://" in os.fspath(path):
        raise ConfigError(
            f"HeteroStrategy: checkpoints cannot lie at {os.fspath(path)}: all ranks write files of one folder;"
            " give one on a file system that they share, such as a mounted bucket"
        )


def check_dataloader(dataloader: object) -> None:
    """Refuse a shuffled DataLoader: ranks would draw different samples.

    Raises:
        ConfigError: with what to do.
    """
    sampler = dataloader.sampler if isinstance(dataloader, DataLoader) else None
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        raise ConfigError(
            "HeteroStrategy: DataLoader(shuffle=True) draws from each process's own random numbers, but all ranks"
            " walk the same batches; use MultimodalDataModule, or give the DataLoader a seeded generator"
        )


def without_inference_mode(trainer: Trainer) -> None:
    """Let evaluations run without ``inference_mode``: FSDP2 cannot train after a forward under it."""
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in (trainer.fit_loop.epoch_loop.val_loop, *loops):
        loop.inference_mode = False
