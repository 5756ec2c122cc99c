"""The pieces of a run from its configuration, every field consumed or refused."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import hydra
import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from hetero_strategy.data.build_index import DatasetIndex
from hetero_strategy.data.conversation import MEDIA_FIELDS
from hetero_strategy.data.media import Media
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, DataError, HeteroError, hint, is_whole
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.placement import Placement, place
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.loading.steps import check_steps
from hetero_strategy.model import Adapter, Backbone, Encoder, Generator, MultimodalModel
from hetero_strategy.parallelize.apply import check_all
from hetero_strategy.profiling.device import cores_of_node
from hetero_strategy.schedule.policies import schedule_policy
from hetero_strategy.strategy import HeteroStrategy
from recipes.cli import external, rank, srun
from recipes.drawings import Judge
from recipes.lit import LitMultimodal, adamw_cosine, logged

log = logging.getLogger(__name__)
Made = TypeVar("Made")
FIELDS = (
    *("imports", "seed", "resume", "optimizer", "strategy", "checkpoint", "monitor", "report"),
    *("model", "data", "layout", "trainer", "logger"),
)
POLL, SAY = 0.2, 300.0
"""Seconds between two looks at what the first process writes, and between two words of it."""
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")


def _number(value: Any, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < math.inf


VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "seed": (f"a whole number from 0 to {2**32 - 1}", lambda v: is_whole(v, 0) and v < 2**32),
    "optimizer.lr": ("a number of at least 0, such as 2e-3", _number),
    "optimizer.betas": (
        "two numbers of at least 0 and below 1, such as [0.9, 0.95]",
        lambda v: isinstance(v, ListConfig) and len(v) == 2 and all(_number(beta) and beta < 1 for beta in v),
    ),
    "optimizer.weight_decay": ("a number of at least 0", _number),
    "optimizer.warmup_steps": ("a number of steps, at least 0", _number),
    "optimizer.final_lr": ("a share of lr, at least 0, such as 0.02", _number),
    "strategy.start_method": (
        "popen: processes of the others end with training, and the report is made in them",
        lambda v: v == "popen",
    ),
    "checkpoint.every_n_steps": ("a whole number of steps, at least 1", lambda v: is_whole(v, 1)),
    "checkpoint.mode": ("max (the more the better), min or auto", lambda v: v in ("max", "min", "auto")),
    "monitor.every_n_steps": ("a whole number of steps, at least 1", lambda v: is_whole(v, 1)),
    "monitor.peak_flops": (
        "operations per second of a device, above 0, or null",
        lambda v: v is None or (_number(v) and v > 0),
    ),
    "monitor.memory": ("true or false", lambda v: isinstance(v, bool)),
    "report.examples": ("a whole number of samples, at least 0", lambda v: is_whole(v, 0)),
    "report.plan_seconds": ("a number of seconds, at least 0", _number),
    "trainer.num_nodes": ("a whole number of nodes, at least 1", lambda v: is_whole(v, 1)),
    "trainer.precision": (
        f"one of {', '.join(PRECISIONS)}",
        lambda v: v is None or str(v) in (*PRECISIONS, "32", "16", "bf16", "64"),
    ),
    "trainer.max_steps": ("a whole number of steps, or -1: no limit", lambda v: is_whole(v, -1)),
    "trainer.max_epochs": ("a whole number of epochs, or -1: no limit", lambda v: v is None or is_whole(v, -1)),
    "trainer.accumulate_grad_batches": ("a whole number of batches, at least 1", lambda v: is_whole(v, 1)),
    "trainer.gradient_clip_val": ("a norm of at least 0, or null: none", lambda v: v is None or _number(v)),
    "trainer.val_check_interval": (
        "a whole number of batches, at least 1, or a share of an epoch, up to 1.0, with check_val_every_n_epoch",
        # a time in words is the strategy's to refuse
        lambda v: not isinstance(v, int | float) or is_whole(v, 1) or (isinstance(v, float) and 0 < v <= 1),
    ),
    **dict.fromkeys(
        ("microbatches", "data.microbatches"),
        ("a whole number of a step, at least 1, or null", lambda v: v is None or is_whole(v, 1)),
    ),
    **dict.fromkeys(
        ("batches", "simulations", "data.global_batch"), ("a whole number, at least 1", lambda v: is_whole(v, 1))
    ),
    "one_more_node": ("a number of seconds, at least 0", _number),
}
"""Field -> what it may be, in words and as a predicate."""


def check_configuration(cfg: DictConfig, *more: str) -> None:
    """Import what ``imports`` names; refuse fields that nothing reads, and values that cannot be.

    Raises:
        ScheduleError: no schedule has the name given.
        ConfigError: naming the field, and what was probably meant or what it may be.
    """
    _only("", cfg, (*FIELDS, *more))
    import_all(cfg)
    if (schedule := OmegaConf.select(cfg, "strategy.schedule")) not in (None, "auto"):
        schedule_policy(str(schedule))
    if "sample" in cfg.data and "cluster" not in more:
        raise ConfigError(
            "data.sample: these are statistics of a data set, for `python -m recipes.plan`, and no files to train on;"
            " name your manifests: data=manifest data.module.train=... data.module.val=... data.module.tokenizer=..."
        )
    _only("data", cfg.data, ("sample", "global_batch", "microbatches") if "sample" in cfg.data else ("write", "module"))
    _only("checkpoint", cfg.checkpoint, ("every_n_steps", "monitor", "mode"))
    _only("monitor", cfg.monitor, ("every_n_steps", "peak_flops", "memory", "profile", "progress_bar"))
    _only("report", cfg.report, ("examples", "judge", "plan_seconds"))
    for path, function in (("trainer", L.Trainer), ("optimizer", adamw_cosine), ("strategy", HeteroStrategy)):
        _fields(path, cfg[path], function)
    for path, (allowed, can_be) in VALUES.items():
        value = OmegaConf.select(cfg, path, default=VALUES)  # which stands for none
        if value is VALUES or (isinstance(value, DictConfig) and "_target_" in value):
            continue
        if not can_be(value):
            raise ConfigError(f"{path}={'null' if value is None else value}; give {allowed}")
    if isinstance(cfg.trainer.get("val_check_interval"), float) and cfg.trainer.get("check_val_every_n_epoch") is None:
        raise ConfigError(
            f"trainer.val_check_interval={cfg.trainer.val_check_interval} is a share of an epoch; give"
            " trainer.check_val_every_n_epoch=1 with it, or a whole number of batches"
        )
    for path, node in _targets(cfg):
        target = node["_target_"]
        try:
            function = hydra.utils.get_object(target)
        except Exception as error:  # whatever the import of a person's module raises
            raise ConfigError(f"{path}._target_: {target} cannot be imported: {error}") from None
        _fields(path, node, function)


def import_all(cfg: DictConfig) -> None:
    """Import what a person's configuration names: it registers schedules, policies, or whatever else by name.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    if not isinstance(cfg.imports, ListConfig):
        raise ConfigError(f"imports={cfg.imports}; give a list of modules, such as [my_schedules]")
    for name in cfg.imports:
        try:
            importlib.import_module(str(name))
        except Exception as error:  # whatever the import of a person's module raises
            raise ConfigError(
                f"imports: {name} cannot be imported: {error}; name a module of the working folder, without .py"
            ) from error


def call(path: str, node: DictConfig, function: Callable[..., Made], **more: Any) -> Made:
    """``function`` with the fields of a node as keyword arguments.

    Raises:
        ConfigError: it takes no such field, or it is not one to give.
    """
    _fields(path, node, function)
    fields: Any = OmegaConf.to_container(node, resolve=True)
    if twice := sorted({*fields} & {*more}):
        raise ConfigError(f"{path}.{twice[0]}: the recipe makes its own; for others start from the README's script")
    return function(**fields, **more)


def taken_out(cfg: DictConfig) -> list[str]:
    """Modules that ``model.modules.<name>=null`` takes out; their layouts and processors go with them."""
    return [str(name) for name, module in cfg.model.modules.items() if module is None]


def placement(cfg: DictConfig) -> Placement:
    """Layouts of all modules over the processes of the run, which are as many as the layouts need by default.

    With ``layout=auto`` the planner chooses later: until then every module is on all processes, by default as many as
    this machine has devices.
    """
    nodes, devices, given = int(cfg.trainer.num_nodes), cfg.trainer.devices, cfg.layout
    if given == "auto" and devices is None:
        devices = (cfg.trainer.accelerator != "cpu" and torch.cuda.device_count()) or cores_of_node()
    if devices is not None and not (isinstance(devices, int) and devices > 0):
        raise ConfigError(f"trainer.devices={devices}; give a number of processes, or null for the layout's")
    if given == "auto":
        given = {name: {"ranks": devices * nodes} for name in cfg.model.modules}
    layouts = {
        str(n): ModuleLayout.from_config(str(n), OmegaConf.to_container(v) if isinstance(v, DictConfig) else v)
        for n, v in given.items()
        if v is not None and n not in taken_out(cfg)
    }
    if devices is None:
        needed = max((r + 1 for layout in layouts.values() for r in layout.ranks), default=1)
        devices = -(-needed // nodes)
    return place(layouts, devices * nodes)


def write_data(cfg: DictConfig) -> None:
    """Let the first process write the data set, if it is made here."""
    if cfg.data.write is None:
        return
    folder = Path(cfg.data.write.folder)
    if rank():
        _wait_for(folder)
        return
    try:
        hydra.utils.instantiate(cfg.data.write)
    except BaseException:
        if srun():  # which ends the others only where it is told to
            with suppress(OSError):
                folder.parent.mkdir(parents=True, exist_ok=True)
                _failed(folder).touch()
        raise


def _failed(folder: Path) -> Path:
    """What the first process of this step of a SLURM job leaves beside a folder that it could not write."""
    step = [os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    return folder.with_name(f".{folder.name}.failed-{'.'.join(step)}")


def datamodule(cfg: DictConfig, make_model: Callable[[], MultimodalModel]) -> MultimodalDataModule:
    """The data module of the model; the first process indexes the data set, before it starts the others. Processes that
    torchrun or SLURM started would not wait longer for it than :class:`Indexed` lets them.

    Raises:
        ConfigError, DataError: see `MultimodalDataModule`.
    """
    node = cfg.data.module.copy()
    node._set_parent(cfg.data)  # for interpolations
    out = taken_out(cfg)
    given = {name: one for name, one in node.processors.items() if one is not None}
    node.processors = {name: one for name, one in given.items() if name not in out}
    data: MultimodalDataModule = hydra.utils.instantiate(node, model=make_model, _convert_="all")
    data.imports = tuple(cfg.imports)
    if out:
        read = {processor.field for processor in data.processors.values()}
        own = [_field(one) for name, one in given.items() if name in out]
        data.leave_out += tuple(one for one in dict.fromkeys((*MEDIA_FIELDS, *own)) if one and one not in read)
    if rank() == 0 and not external():
        data.prepare_data()
    return data


def check_epoch(data: MultimodalDataModule) -> None:
    """Refuse a training set without a whole batch, where it is indexed already.

    Raises:
        ConfigError: with both numbers.
    """
    if "train" in data.indices:
        check_steps(len(data.indices["train"]), data.global_batch_size, data.drop_last)


def _field(processor: DictConfig) -> str | None:
    """The field of manifests that a processor reads, where its configuration says so."""
    made = hydra.utils.instantiate(processor, _convert_="all")
    return made.get("field") if isinstance(made, Mapping) else getattr(made, "field", None)


class Indexed(Callback):
    """Where torchrun or SLURM started the processes, these have met when Lightning lets the first one index the data
    set, and wait for it however long that takes. What is known of the data only then is looked at here.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise as :func:`check_model`."""
        assert isinstance(pl_module, LitMultimodal)
        data: MultimodalDataModule = trainer.datamodule  # type: ignore[attr-defined]
        with torch.device("meta"):
            _check_indices(data, pl_module.make_model().modules_by_name)


def judge(cfg: DictConfig) -> Judge | None:
    """What says which drawings are right, if anything does."""
    return hydra.utils.instantiate(cfg.report.judge) if cfg.report.judge else None


def model_maker(cfg: DictConfig) -> Callable[[], MultimodalModel]:
    """What makes the model; language models without a ``vocab_size`` get the tokenizer's."""
    node = cfg.model.copy()
    with open_dict(node):
        node.modules = {name: module for name, module in node.modules.items() if module is not None}
        if node.get("loss_weights"):
            node.loss_weights = {n: weight for n, weight in node.loss_weights.items() if n not in taken_out(cfg)}
        for module in node.modules.values():
            if "vocab_size" in module and module.vocab_size is None:
                data = cfg.data.module
                module.vocab_size = ChatTokenizer(data.tokenizer, bos=data.bos, eos=data.eos).vocab_size
    node._set_parent(cfg)  # for interpolations
    # Lists and mappings become plain ones: libraries do not know OmegaConf's.
    return lambda: hydra.utils.instantiate(node, _convert_="all")


def check_model(make: Callable[[], MultimodalModel], data: MultimodalDataModule, placed: Placement) -> None:
    """Build the model without memory and refuse what would fail on the ranks.

    Raises:
        ConfigError, DataError, LayoutError, ModelError: model, data and layouts do not fit together.
    """
    with torch.device("meta"):
        modules = make().modules_by_name
    check_all(modules, dict(placed.layouts))
    _check_indices(data, modules)


def _check_indices(data: MultimodalDataModule, modules: Mapping[str, Adapter]) -> None:
    for index in data.indices.values():
        for name, table in index.items.items():
            if len(table.rows) and index.measured:  # otherwise sizes are known in their step
                _check_items(index, name, modules[name], data.processors[name])


def check_monitor(cfg: DictConfig, data: MultimodalDataModule) -> None:
    """Refuse to choose the best checkpoint by what is not logged, or says nothing of weights, as ``tokens/s`` does.

    Raises:
        ConfigError: with the names that are.
    """
    names = logged([name for name, kind in data.kinds.items() if kind.has_loss])
    if cfg.checkpoint.monitor not in (None, *names):
        raise ConfigError(f"checkpoint.monitor={cfg.checkpoint.monitor}; give one of {', '.join(names)}")


def mode(cfg: DictConfig) -> str:
    """Whether the checkpoint with most or least of what is monitored is the best: of a loss the least."""
    if cfg.checkpoint.mode != "auto":
        return str(cfg.checkpoint.mode)
    return "min" if "loss" in str(cfg.checkpoint.monitor) else "max"


def _check_items(index: DatasetIndex, name: str, module: Adapter, processor: Media) -> None:
    """Refuse items that the data and the model see as other rows.

    Raises:
        ConfigError: a generator draws other rows than the data holds.
        DataError: an encoder makes other rows of an item than the data says.
    """
    table = index.items[name]
    if isinstance(module, Generator):
        if module.feature != processor.feature:
            raise ConfigError(
                f"data.module.processors.{name} gives target rows of {processor.feature} numbers but"
                f" model.modules.{name} draws rows of {module.feature}; use the same patch_size and channels in both"
            )
        return
    if not isinstance(module, Encoder) or not isinstance(module.backbone, Backbone):
        return  # its first step compares the rows
    sizes = np.asarray(table.sizes)
    for what, expected, found in (
        ("makes", module.backbone.output_rows(sizes), table.rows),
        ("computes on", module.backbone.packing_rows(sizes), table.inner_rows),
    ):
        wrong = np.flatnonzero(expected != found)
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"{index.path(name, first)}: data.module.processors.{name} {what} {found[first]} rows of it but"
                f" model.modules.{name} {what} {expected[first]}; use the same merge or stack in both"
            )


def trainer(cfg: DictConfig, placed: Placement, **more: Any) -> L.Trainer:
    """A Trainer; ``devices`` follow from the placement.

    Raises:
        ConfigError: what Lightning refuses.
    """
    nodes = int(cfg.trainer.num_nodes)
    options = OmegaConf.merge(cfg.trainer, {"devices": placed.world_size // nodes})
    assert isinstance(options, DictConfig)
    if external():
        more["callbacks"] = [*more.get("callbacks", ()), Indexed()]
    try:
        return call("trainer", options, L.Trainer, **more)
    except HeteroError:
        raise
    except (MisconfigurationException, ValueError) as error:
        raise ConfigError(f"trainer: {error}") from error


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Every node with a ``_target_``, and its path."""
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield path, node
        for key in node:
            if (
                not OmegaConf.is_interpolation(node, key)
                and not OmegaConf.is_missing(node, key)
                and node[key] is not None
            ):
                yield from _targets(node[key], f"{path}.{key}".lstrip("."))
    elif isinstance(node, ListConfig):
        for number, entry in enumerate(node):
            yield from _targets(entry, f"{path}[{number}]")


def _fields(path: str, node: DictConfig, function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _only(path, node, [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL])


def _only(path: str, node: Any, names: tuple[str, ...] | list[str]) -> None:
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{path}={'null' if node is None else node}; give its fields, which --help lists")
    unknown = [str(k) for k in node if k not in names and not str(k).startswith("_")]
    if unknown:
        raise ConfigError(f"{path or 'configuration'}: no field '{unknown[0]}'; {hint(unknown[0], names)}")


def _wait_for(folder: Path) -> None:
    """Until the first process has written the data; it appears all at once. Where that one is killed, whoever started
    the processes ends them: torchrun, or srun with ``--kill-on-bad-exit=1``.

    Raises:
        DataError: the first process could not write them.
    """
    began = said = time.monotonic()
    while not folder.is_dir():
        if srun() and _failed(folder).exists():
            raise DataError(f"{folder}: rank 0 could not write the data; its own message tells why")
        time.sleep(POLL)
        if (now := time.monotonic()) - said > SAY:
            said = now
            log.warning("rank %d has waited %.0f min for rank 0 to write %s", rank(), (now - began) / 60, folder)
