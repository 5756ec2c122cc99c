"""Make the parts of a run from its configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import hydra
import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf, open_dict

from hetero_strategy.data.build_index import DatasetIndex
from hetero_strategy.data.conversation import MEDIA_FIELDS
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, Count, DataError, check_types, hint
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.spec import Placement, place
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model import Adapter, Backbone, Encoder, Generator, MultimodalModel
from hetero_strategy.model.kind import Media
from hetero_strategy.model.materialize import check_folders
from hetero_strategy.parallelize.apply import check_all
from hetero_strategy.profiling.device import cores_of_node
from hetero_strategy.schedule.policies import schedule_policy
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.zoo.hf_composite import hf_folder
from recipes.cli import external, rank
from recipes.drawings import Judge
from recipes.lit import LitMultimodal, adamw_cosine

FIELDS = (
    *("imports", "folder", "folder_options", "seed", "resume", "encoded"),
    *("optimizer", "strategy", "checkpoint", "monitor", "report", "model", "data", "layout", "trainer", "logger"),
)


class FolderOptions(TypedDict):
    """Fields of ``folder_options``."""

    balance_loss: float | None
    router_bias_step: float


class Saving(TypedDict):
    """Fields of ``checkpoint``."""

    every_n_steps: Count
    monitor: str | None
    mode: Literal["auto", "min", "max"]


class Monitors(TypedDict):
    """Fields of ``monitor``; monitors check their own."""

    every_n_steps: int
    peak_flops: float | None
    memory: bool
    profile: bool | dict[str, Any] | None
    progress_bar: bool


class Report(TypedDict):
    """Fields of ``report``."""

    examples: int
    judge: dict[str, Any] | None


OF_FOLDER = "recipes.build.of_folder"
ENCODED = "hetero_strategy.data.encoded_rows.encoded"


def check_configuration(cfg: DictConfig, *more: str) -> None:
    """Import what ``imports`` names; refuse fields that nothing would read, and data that cannot be trained on.

    Args:
        more: names of further parts of the configuration, besides :data:`FIELDS`.

    Raises:
        ScheduleError: no schedule has the name given.
        ConfigError: the message names the field.
    """
    _only("", cfg, (*FIELDS, *more))
    import_all(cfg)
    _read_folder(cfg)
    if (schedule := OmegaConf.select(cfg, "strategy.schedule")) not in (None, "auto"):
        schedule_policy(str(schedule))
    if "sample" in cfg.data and "cluster" not in more:
        raise ConfigError(
            "data.sample: these are statistics of a data set, for `python -m recipes.plan`, and no files to train on;"
            " name your manifests: data=manifest data.module.train=... data.module.val=..."
            " data.module.tokenizer.path=..."
        )
    _only("data", cfg.data, ("sample", "global_batch", "microbatches") if "sample" in cfg.data else ("write", "module"))
    for path, typed in (("checkpoint", Saving), ("monitor", Monitors), ("report", Report)):
        _only(path, cfg[path], list(typed.__annotations__))
        check_types(path, typed, **fields(cfg[path]))
    check_types("optimizer", adamw_cosine, **fields(cfg.optimizer))


def _read_folder(cfg: DictConfig) -> None:
    """Fill ``model.modules`` with the modules of ``folder``, but those that are null."""
    given = cfg.get("folder_options") or OmegaConf.create({})  # a run of an earlier version has none
    _only("folder_options", given, list(FolderOptions.__annotations__))
    options = fields(given)
    check_types("folder_options", FolderOptions, **options)
    if not (folder := cfg.get("folder")):
        if asked := [name for name, value in options.items() if value]:
            raise ConfigError(
                f"folder_options.{asked[0]} is for folder=..., which is missing; for another model set"
                f" its language model's field, +model.modules.llm.{asked[0]}={options[asked[0]]}"
            )
        return
    if not Path(folder, "config.json").is_file():
        raise ConfigError(
            f"folder={folder}: it has no config.json; give a local folder, such as transformers' save_pretrained writes"
        )
    if other := [name for name, module in cfg.model.modules.items() if module and module._target_ != OF_FOLDER]:
        raise ConfigError(
            f"folder={folder}: it is the model, and model=... has one, too, with a module '{other[0]}'; leave out one,"
            " or the experiment that chooses it"
        )
    _made[folder] = hf_folder(folder, **options)
    names = list(_made[folder])
    _only("model.modules", cfg.model.modules, names)
    modules = {n: {"_target_": OF_FOLDER, "folder": folder, "name": n, "options": options} for n in names}
    cfg.model.modules = {n: cfg.model.modules.get(n, module) and module for n, module in modules.items()}


_made: dict[str, dict[str, Adapter]] = {}
"""Folder -> modules that were made together with another one and are not yet in use."""


def of_folder(folder: str, name: str, options: Mapping[str, Any] | None = None) -> Adapter:
    """Build a module of a Hugging Face folder; all are made at once, and each is given away once."""
    if name not in _made.get(folder, {}):
        _made[folder] = hf_folder(folder, **(options or {}))
    return _made[folder].pop(name)


def _only(path: str, node: Any, names: Sequence[str]) -> None:
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{path}: {node} has no fields; it needs {', '.join(names)}")
    if unknown := [str(key) for key in node if key not in names and not str(key).startswith("_")]:
        raise ConfigError(f"{path or 'configuration'}: no field '{unknown[0]}'; {hint(unknown[0], names)}")


def import_all(cfg: DictConfig) -> None:
    """Import the modules of ``imports``, which register schedules, balance policies and the like.

    Raises:
        ConfigError: a module cannot be imported.
    """
    for name in cfg.imports:
        try:
            importlib.import_module(str(name))
        except Exception as error:  # a user's module may raise anything
            raise ConfigError(
                f"imports: {name} cannot be imported: {error}; name a module of the working folder, without .py"
            ) from error


def fields(node: DictConfig) -> dict[str, Any]:
    """Return the fields of a node as plain keyword arguments."""
    found: Any = OmegaConf.to_container(node, resolve=True)
    return found


def strategy(cfg: DictConfig, layouts: Any) -> HeteroStrategy:
    """Make the strategy of the configuration. Its ranks outlive training, as the report is made on all of them.

    Raises:
        ConfigError: an option does not exist, or is refused.
    """
    try:
        return HeteroStrategy(layouts=layouts, **fields(cfg.strategy))
    except TypeError as error:
        raise ConfigError(f"strategy: {error}") from error


def taken_out(cfg: DictConfig) -> list[str]:
    """Return the modules that ``model.modules.<name>=null`` takes out, with their layouts and processors."""
    return [str(name) for name, module in cfg.model.modules.items() if module is None]


def placement(cfg: DictConfig) -> Placement:
    """Place all modules on the processes of the run, by default as many as the layouts need.

    With ``layout=auto`` the planner chooses later. Until then every module is on all processes, by default as many as
    this machine has devices.

    Raises:
        ConfigError: ``trainer.devices`` is no number of processes.
        LayoutError: a layout does not fit on its ranks.
    """
    nodes, devices, chosen = int(cfg.trainer.num_nodes), cfg.trainer.devices, cfg.layout
    if chosen == "auto" and devices is None:
        devices = (cfg.trainer.accelerator != "cpu" and torch.cuda.device_count()) or cores_of_node()
    if devices is not None and not (isinstance(devices, int) and devices > 0):
        raise ConfigError(f"trainer.devices={devices}; give a number of processes, or null for the layout's")
    if chosen == "auto":
        chosen = {name: {"ranks": devices * nodes} for name in cfg.model.modules}
    layouts = {
        str(n): ModuleLayout.from_config(str(n), OmegaConf.to_container(v) if isinstance(v, DictConfig) else v)
        for n, v in chosen.items()
        if v is not None and n not in taken_out(cfg)
    }
    if devices is None:
        needed = max((r + 1 for layout in layouts.values() for r in layout.ranks), default=1)
        devices = -(-needed // nodes)
    return place(layouts, devices * nodes)


def write_data(cfg: DictConfig) -> None:
    """Write the data set, if the configuration makes it; of several processes that do so, the first one counts."""
    if cfg.data.write is not None:
        hydra.utils.instantiate(cfg.data.write, progress=not rank())


def datamodule(cfg: DictConfig, make_model: Callable[[], MultimodalModel]) -> MultimodalDataModule:
    """Make the data module of the model. The first process indexes the data set before it starts the other ranks; under
    torchrun or SLURM, Lightning calls for the index when all ranks have met.

    Raises:
        ConfigError, DataError: see `MultimodalDataModule`.
    """
    node = cfg.data.module.copy()
    node._set_parent(cfg.data)  # for interpolations
    out = taken_out(cfg)
    processors = {name: processor for name, processor in node.processors.items() if processor is not None}
    node.processors = {name: processor for name, processor in processors.items() if name not in out}
    data: MultimodalDataModule = hydra.utils.instantiate(node, model=make_model, _convert_="all")
    data.imports = tuple(cfg.imports)
    if out:
        read = {processor.field for processor in data.processors.values()}
        own = [_field(processor) for name, processor in processors.items() if name in out]
        unread = [name for name in dict.fromkeys((*MEDIA_FIELDS, *own)) if name and name not in read]
        options = data.index_options
        data.index_options = replace(options, leave_out=(*options.leave_out, *unread))
    if rank() == 0 and not external():
        data.prepare_data()
    return data


def _field(processor: DictConfig) -> str | None:
    """Return the field of manifests that a processor reads, if its configuration names one."""
    made = hydra.utils.instantiate(processor, _convert_="all")
    return made.get("field") if isinstance(made, Mapping) else getattr(made, "field", None)


class Indexed(Callback):
    """A callback that compares data and model once the data set is indexed. Under torchrun and SLURM Lightning lets the
    first rank index it after all ranks have met, so that they wait for it without a timeout.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise the errors of :func:`check_model` that concern the data."""
        assert isinstance(pl_module, LitMultimodal)
        data: MultimodalDataModule = trainer.datamodule  # type: ignore[attr-defined]
        with torch.device("meta"):
            _check_indices(data, pl_module.make_model().modules_by_name)


def judge(cfg: DictConfig) -> Judge | None:
    """Make the judge of drawings, if the configuration names one."""
    return hydra.utils.instantiate(cfg.report.judge) if cfg.report.judge else None


def model_maker(cfg: DictConfig) -> Callable[[], MultimodalModel]:
    """Return a function that makes the model; a language model without a ``vocab_size`` gets the tokenizer's."""
    node = cfg.model.copy()
    with open_dict(node):
        node.modules = {name: module for name, module in node.modules.items() if module is not None}
        if node.get("loss_weights"):
            node.loss_weights = {n: weight for n, weight in node.loss_weights.items() if n not in taken_out(cfg)}
        for name, folder in (cfg.get("encoded") or {}).items():
            if name not in node.modules:
                raise ConfigError(f"encoded names '{name}'; the modules are {', '.join(map(str, node.modules))}")
            node.modules[name] = {"_target_": ENCODED, "encoder": node.modules[name], "folder": folder}
        for module in node.modules.values():
            if "vocab_size" in module and module.vocab_size is None:
                words = cfg.data.module.tokenizer  # its path, or options
                words = {"path": words} if isinstance(words, str) else words
                special = {name: words[name] for name in ("bos", "eos") if name in words}
                module.vocab_size = ChatTokenizer(words["path"], **special).vocab_size
    node._set_parent(cfg)  # for interpolations
    # Libraries do not know OmegaConf's lists and mappings.
    return lambda: hydra.utils.instantiate(node, _convert_="all")


def check_model(make: Callable[[], MultimodalModel], data: MultimodalDataModule, placed: Placement) -> dict[str, int]:
    """Build the model on the meta device and raise the errors that would otherwise come on the ranks.

    Returns:
        Module -> number of tensors that ranks read whole, see :func:`check_folders`.

    Raises:
        ConfigError, DataError, LayoutError, ModelError: model, data and layouts do not fit together.
    """
    with torch.device("meta"):
        modules = make().modules_by_name
    check_all(modules, dict(placed.layouts))
    whole = check_folders(modules)
    _check_indices(data, modules)
    return whole


def _check_indices(data: MultimodalDataModule, modules: Mapping[str, Adapter]) -> None:
    for index in data.indices.values():
        for name, table in index.items.items():
            if len(table.rows) and index.measured:  # otherwise each step learns the sizes of its items
                _check_items(index, name, modules[name], data.processors[name])


def mode(cfg: DictConfig) -> str:
    """Return whether the best checkpoint has the highest or the lowest value of its metric; of a loss the lowest."""
    if cfg.checkpoint.mode != "auto":
        return str(cfg.checkpoint.mode)
    return "min" if "loss" in str(cfg.checkpoint.monitor) else "max"


def _check_items(index: DatasetIndex, name: str, module: Adapter, processor: Media) -> None:
    """Compare the rows that data and model count for each item.

    Raises:
        ConfigError: a generator draws rows of another width than the data's targets.
        DataError: an encoder makes another number of rows of an item than the data plans.
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
        return  # the first step compares the rows
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
    """Make the Trainer; its number of devices follows from the placement.

    Raises:
        ConfigError: Lightning refuses an argument.
    """
    nodes = int(cfg.trainer.num_nodes)
    if external():
        more["callbacks"] = [*more.get("callbacks", ()), Indexed()]
    try:
        return L.Trainer(**fields(cfg.trainer) | {"devices": placed.world_size // nodes}, **more)
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise ConfigError(f"trainer: {error}") from error
