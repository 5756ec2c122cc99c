"""Early checks: invalid options, and Lightning features that need the whole model on one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    Checkpoint,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler
from torchmetrics import Metric

from hetero_strategy.checkpoint.codec import encode
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.schedule.policies import schedule_policy

CALLBACKS: dict[type, str] = {
    WeightAveraging: "copies the whole model on every rank, and no rank has it; remove the callback",
    StochasticWeightAveraging: "copies the model before it is built in configure_model; remove the callback",
    ModelPruning: "ranks weights of whole parameters, of which a rank has a part; remove the callback",
    BaseFinetuning: "changes what trains during the run; use MultimodalModel(freeze=...) and a run per phase",
}
WATCHED = (
    "HeteroStrategy: W&B's watch() sees one rank's part of the parameters, and gradients of single microbatches, and"
    " for a histogram of what is sharded that rank would wait for others; leave it out, and log what you want of p.grad"
    " in on_before_optimizer_step(): trainer.strategy.grad_norm(), called on every rank, is the norm of all gradients"
)
PARTS = (
    "under HeteroStrategy parameters and gradients lie in parts on their ranks: as DTensors, whose to_local() is this"
    " rank's part, and on the meta device (gradient None) where another rank has them. trainer.strategy.grad_norm(),"
    " called on every rank, is the norm of all gradients; gradient_clip_val and self.clip_gradients(...) clip by it"
)
OF_PARTS = (
    "mixed torch.Tensor and DTensor",
    "not supported for tensor subclasses",
    "meta tensor",
    "its data is not allocated yet",
)
"""Phrases in torch's errors about code that takes a rank's parameters for whole tensors."""


def read_layouts(layouts: Mapping[str, Any] | str | None, schedule: str) -> dict[str, ModuleLayout] | None:
    """Read the layouts option; None: the layouts follow from the model."""
    if layouts == "auto":
        check_planned_schedule(schedule)
    if layouts is None or layouts == "auto":
        return None
    if not isinstance(layouts, Mapping):
        raise ConfigError(f"HeteroStrategy: layouts={layouts!r}; use 'auto', or a mapping of modules to their layouts")
    return {name: ModuleLayout.from_config(name, layout) for name, layout in layouts.items()}


def check_planned_schedule(schedule: str) -> None:
    """Refuse a schedule that plans cannot keep."""
    if schedule != "auto" and schedule_policy(schedule).virtual in ("loop", "v"):
        raise ConfigError(
            f"schedule={schedule!r}: plans choose virtual stages and the schedule that goes with them; leave it out, or"
            " give layouts"
        )


def _known_backends(name: str) -> bool:
    """Return whether torch knows all backends in ``gloo`` or ``cpu:gloo,cuda:nccl``; a dry run needs no more."""
    known = {*dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    return all(one.rpartition(":")[2].lower() in known for one in name.split(","))


Backend = Annotated[str, ("a backend that torch knows, such as gloo,", _known_backends)]


def check_trainer(trainer: Trainer) -> None:
    """Refuse unsupported features of a Trainer: callbacks that need the whole model, checkpoints by a plugin, at an
    address or linked before they are written, and validation by time.
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
    if (placement := cast(Any, trainer.strategy).placement) is not None:
        check_anomaly(trainer, placement.layouts)
    callbacks = cast(list[Any], trainer.callbacks)  # type: ignore[attr-defined]
    if cast(Any, trainer.strategy)._async_checkpoint and any(
        getattr(c, "save_last", None) == "link" for c in callbacks
    ):
        raise ConfigError(
            "HeteroStrategy: ModelCheckpoint(save_last='link') with async_checkpoint=True would link to a checkpoint"
            " that is still being written, and a run that ends meanwhile leaves no last one; set save_last=True or"
            " async_checkpoint=False"
        )
    fits = trainer.state.fn == TrainerFn.FITTING
    for saving in (c for c in callbacks if isinstance(c, Checkpoint)):
        near_logger = fits and trainer.loggers and isinstance(saving, ModelCheckpoint)
        log_folder = trainer.loggers[0].save_dir if near_logger else None
        check_folder(getattr(saving, "dirpath", None) or log_folder or trainer.default_root_dir)
        if type(saving).on_exception in (ModelCheckpoint.on_exception, OnExceptionCheckpoint.on_exception):
            saving.on_exception = partial(_where_all_stop, type(saving).on_exception, saving)  # type: ignore[method-assign]
    if fits and any(isinstance(c, Checkpoint) for c in callbacks):
        _check_hparams(trainer)
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


def check_anomaly(trainer: Trainer, layouts: Mapping[str, ModuleLayout]) -> None:
    """Refuse a search for NaNs in tensor-parallel gradients, which torch does not support."""
    for name, layout in layouts.items():
        if trainer._detect_anomaly and layout.tp > 1:
            raise ConfigError(
                f"HeteroStrategy: detect_anomaly=True with tp={layout.tp} of module {name!r}: torch's check does not"
                " know DTensors; search with tp=1, or look at p.grad.to_local() in on_after_backward()"
            )


def check_optimizers(optimizers: Sequence[Optimizer], world_size: int) -> list[Optimizer]:
    """Refuse an optimizer that needs all parameters on one rank; return the real optimizers."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS) and world_size > 1:
            raise ConfigError(
                f"HeteroStrategy: {type(optimizer).__name__} joins all parameters to one vector, and no rank has all of"
                " them; take an optimizer that treats each parameter alone, such as AdamW"
            )
    return [optimizer for optimizer in optimizers if not isinstance(optimizer, _MockOptimizer)]


def is_watched(module: nn.Module) -> bool:
    """Return whether W&B reads gradients or parameters in hooks."""
    hooks = [hook for part in module.modules() for hook in part._forward_hooks.values()]
    reading = [hook for hook in hooks if "add_log_parameters_hook" in getattr(hook, "__qualname__", "")]
    reading += [hook for p in module.parameters() for hook in (p._backward_hooks or {}).values()]
    return any((getattr(hook, "__module__", None) or "").startswith("wandb") for hook in reading)


def note_parts(exception: BaseException) -> None:
    """Add an explanation to torch's error when code takes this rank's part of a model for the whole."""
    message = str(exception)
    if isinstance(exception, (RuntimeError, TypeError, AssertionError)) and any(words in message for words in OF_PARTS):
        exception.add_note(PARTS)


def _where_all_stop(save: Callable[..., None], callback: Checkpoint, trainer: Trainer, *given: Any) -> None:
    """Let a callback save on an exception only if all ranks do: otherwise it would note a checkpoint that is never
    written as its last, and delete the one before.
    """
    alone = getattr(trainer.strategy, "ends_alone", bool)  # the callback may be reused with another strategy
    if not alone():
        save(callback, trainer, *given)
    elif getattr(callback, "save_on_exception", True):
        rank_zero_warn("no checkpoint is saved after an exception: other ranks may not come")


def _check_hparams(trainer: Trainer) -> None:
    """Check that checkpoints can hold the hyperparameters: otherwise the first save would end the run. Hooks may
    convert them.
    """
    hooks = {LightningModule.on_save_checkpoint, Callback.on_save_checkpoint}
    modules = [m for m in (trainer.lightning_module, getattr(trainer, "datamodule", None)) if m is not None]
    who_saves = [cast(Any, trainer).lightning_module, *cast(Any, trainer).callbacks]
    if cast(Any, trainer).fast_dev_run or any(type(one).on_save_checkpoint not in hooks for one in who_saves):
        return
    for who in modules:
        encode({"hyper_parameters": dict(getattr(who, "hparams", {}))})


def metrics_of(trainer: Trainer) -> Iterator[Metric]:
    """Yield the torchmetrics of the LightningModule and of callbacks, also in their lists and dicts."""
    for holder in (trainer.lightning_module, *cast(Any, trainer).callbacks):
        yield from _metrics_in([holder, *vars(holder).values()], 3)


def _metrics_in(held: object, depth: int) -> Iterator[Metric]:
    if isinstance(held, nn.Module):
        yield from (part for part in held.modules() if isinstance(part, Metric))
    elif depth and isinstance(held, (list, tuple, dict)):
        for one in held.values() if isinstance(held, dict) else held:
            yield from _metrics_in(one, depth - 1)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuse an address, such as ``s3://bucket/run``: as a path it would be a folder ``s3:`` of the working folder."""
    if "://" in os.fspath(path):
        raise ConfigError(
            f"HeteroStrategy: checkpoints cannot lie at {os.fspath(path)}: all ranks write files of one folder;"
            " give one on a file system that they share, such as a mounted bucket (ModelCheckpoint(dirpath=...), which"
            " else writes beside its logger)"
        )


def trains(model: MultimodalModel, module: LightningModule | None) -> bool:
    """Return whether a call of the model is a training step."""
    in_step = module is not None and module._current_fx_name == "training_step"
    if in_step and not model.training and torch.is_grad_enabled():
        raise ConfigError(
            "HeteroStrategy: the model is in evaluation mode in training_step, so it would not train; Lightning leaves"
            " modes as it finds them: call train() before fit, and eval() of no more than parts of its modules"
        )
    return model.training


def check_dataloader(dataloader: object, *, placed: bool, alone: bool) -> None:
    """Refuse a DataLoader that does not work with many ranks.

    Refused are a shuffled one, as ranks would draw different samples; the loader of a data module that knows no
    layouts, unless this rank is ``alone``; and any loader before the model is ``placed``.
    """
    if not placed:
        raise ConfigError(
            "HeteroStrategy: loaders are made once the model is on its ranks, and something asked for them before, such"
            " as trainer.estimated_stepping_batches in setup() or configure_model(); ask in configure_optimizers()"
        )
    if isinstance(dataloader, StepLoader) and dataloader.steps.compiler is None and not alone:
        raise ConfigError(
            "HeteroStrategy: this loader is of a MultimodalDataModule that the Trainer does not know, so its steps are"
            " those of one process; give datamodule=... to the Trainer in place of its loaders"
        )
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
