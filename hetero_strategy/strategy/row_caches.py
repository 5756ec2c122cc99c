"""``HeteroStrategy(cache=...)``: rows of frozen encoders, written once and read afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities import rank_zero_info
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hetero_strategy.data.row_store import RowStore
from hetero_strategy.errors import ConfigError
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.read_where_sampled import SampledDataset
from hetero_strategy.loading.row_cache import RowCache
from hetero_strategy.loading.steps import StepDataset
from hetero_strategy.model.encoder import Backbone, Encoder
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.stages import cut
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.runtime.row_keeper import RowKeeper
from hetero_strategy.schedule.action import StageId

FORMAT = 4
"""Part of each folder's name; another number leaves all older folders alone."""
OTHER = {"checkpoint", "name", *vars(nn.Module())}
"""Attributes of modules on which rows do not depend, or that are looked at by themselves: parts and tensors."""


class RowCaches:
    """The caches of a strategy.

    Args:
        folders: module -> folder.

    Raises:
        ConfigError: a folder that cannot be made or written.
    """

    def __init__(self, folders: Mapping[str, str | Path] | None) -> None:
        given = folders.values() if isinstance(folders, Mapping) else ()
        if not isinstance(folders, Mapping | None) or not all(isinstance(one, str | os.PathLike) for one in given):
            raise ConfigError(
                f"HeteroStrategy: cache={folders!r}; give a folder for each module, {{'vision': '/rows'}}"
            )
        self.folders = {name: Path(folder).absolute() for name, folder in (folders or {}).items()}
        self.keepers: dict[str, RowKeeper] = {}
        """Of this rank, by module."""
        self._digests: dict[str, str] = {}
        for name, folder in self.folders.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                why = "" if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else "it may not be written"
            except OSError as error:
                why = str(error.strerror)
            if why:
                raise ConfigError(f"HeteroStrategy: cache of '{name}' in {folder}: {why}; give another folder")

    def close(self) -> None:
        """Write what waits. Weights may change then: the next :meth:`attach` looks at them again."""
        for keeper in self.keepers.values():
            keeper.close()
        self.keepers, self._digests = {}, {}

    def counts(self) -> dict[str, tuple[int, int]]:
        """By module, items that this rank found and missed since the fit began, evaluations included."""
        known = {name: (keeper.found, keeper.missed) for name, keeper in self.keepers.items()}
        return dict.fromkeys(self.folders, (0, 0)) | known

    def attach(self, dataloader: object, executor: Executor, broadcast: Callable[[Any, int], Any]) -> None:
        """Let a loader read rows, and this rank's stages write them. A collective over the world.

        Args:
            dataloader: of any split, before its workers start and after weights were restored.
            executor: of this rank.
            broadcast: an object of a rank to all ranks.

        Raises:
            ConfigError: a module whose rows cannot be kept, or data that does not look for them.
        """
        for name in self.folders:
            _check(name, executor)
            if not isinstance(dataloader, StepLoader) or isinstance(dataloader.steps, SampledDataset):
                raise ConfigError(
                    f"HeteroStrategy: cache names '{name}', whose items are not looked for before they are read; use a"
                    f" MultimodalDataModule with payload='fetch', or leave '{name}' out"
                )
            self._attach(name, dataloader.steps, executor, broadcast)

    def _attach(self, name: str, steps: StepDataset, executor: Executor, broadcast: Callable[[Any, int], Any]) -> None:
        layout, graph = executor.placement.layouts[name], executor.compiler.graph
        inner, first = layout.pipeline.stages > 1, layout.ranks[0]
        seat, stage, always = executor.placement.coordinate(name, executor.rank), None, False
        if seat is not None and not seat.pp:
            node = graph.node_of(StageId(name, 0), executor.rank)
            stage = cast(Encoder, executor.stages[node])
            always = isinstance(stage, FSDPModule) and not graph.stages[node].sharded
        if name not in self._digests:
            digest = None if stage is None else _digest(stage, hashes=executor.rank == first)
            self._digests[name] = broadcast(digest, first)
        settings = [FORMAT, self._digests[name], inner, steps.processors[name].settings()]
        identity = json.dumps(settings, sort_keys=True, default=str).encode()
        folder = self.folders[name] / hashlib.blake2b(identity, digest_size=16).hexdigest()
        items = len(steps.index.items[name].sample)
        if executor.rank == 0:
            _tell(
                name, folder, items, _bytes(cast(Encoder, executor.modules[name]), name, steps, executor.exact, inner)
            )
        if stage is None:
            return
        steps.caches[name] = RowCache(folder, inner=inner)
        if name not in self.keepers:
            weights = [local(tensor) for tensor in _tensors(stage.backbone).values()]
            draws = _watched(stage)
            self.keepers[name] = stage.keeper = RowKeeper(name, folder, weights, items, draws, always=always)


def _check(name: str, executor: Executor) -> None:
    """Refuse modules whose rows are not the same in every step, or on which ranks could not agree."""
    module = executor.modules.get(name)
    if module is None:
        raise ConfigError(f"HeteroStrategy: cache names '{name}'; the modules are {', '.join(executor.modules)}")
    refusal, layout = f"HeteroStrategy: cache names '{name}'", executor.placement.layouts[name]
    if not isinstance(module, Encoder):
        raise ConfigError(f"{refusal}, a {type(module).__name__}; only rows of an Encoder's backbone can be kept")
    if layout.neighbours > 1:
        raise ConfigError(
            f"{refusal}, which has tp={layout.tp} cp={layout.cp}: ranks of an instance would have to agree on what each"
            f" of them finds; use tp=1 and dp_shard, or leave '{name}' out"
        )
    if module.before is not None:
        raise ConfigError(
            f"{refusal}, whose before= changes its inputs in a way that the cache cannot see: rows could be those of"
            " another function; let its processor do that, whose settings are part of the key"
        )
    original: Any = cut(module.meta_copy(), layout.split or (), (0,))[0]
    kept: nn.Module = original.backbone
    trained = [fqn for fqn, _ in kept.named_parameters() if module.backbone.get_parameter(fqn).requires_grad]
    if trained:
        raise ConfigError(
            f"{refusal}, whose backbone has parameters that train (of {len(trained)} in its first stage, the first is"
            f" {trained[0]}): rows would be those of old weights; freeze them with"
            f" MultimodalModel(freeze=['{name}.backbone']), or leave '{name}' out"
        )
    for fqn, _ in kept.named_modules():
        part = module.backbone.get_submodule(fqn)
        if part.training and (random := _random(part)):
            raise ConfigError(
                f"{refusal}, but backbone{fqn and '.'}{fqn} has {random} in training mode: rows would be those of one"
                f" step; set it to 0, or call eval() of '{name}'.backbone in configure_model()"
            )


def _random(part: nn.Module) -> str:
    """What of a layer is drawn anew in every step, by its usual names."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return f"dropout={part.p}" if part.p else ""
    values = {key: value for key, value in vars(part).items() if "drop" in key and isinstance(value, float) and value}
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _watched(stage: Encoder) -> Callable[[], bool]:
    """Whether the backbone drew random numbers, whatever the names of the layers that do, and whoever put them into
    training mode since.
    """
    numbers = stage.random_numbers
    assert numbers is not None
    numbers.watch()
    return lambda: numbers.drew() and any(part.training for part in stage.backbone.modules())


def _tensors(backbone: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}


@torch.no_grad()
def _digest(stage: Encoder, *, hashes: bool) -> str | None:
    """A hash of what a stage's backbone computes: its structure, weights and dtypes, whatever its layout.

    A collective over the stage's ranks: each sharded tensor is gathered, one after the other.
    """
    dtypes = stage.compute_dtype, stage.float8
    hashed = hashlib.blake2b(repr((*dtypes, list(_structure(stage)))).encode(), digest_size=16)
    for name, tensor in sorted(_tensors(stage.backbone).items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if hashes:
            hashed.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
            hashed.update(whole.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest() if hashes else None


def _structure(stage: Encoder) -> Iterator[tuple[str, str, list[str]]]:
    """(name, class, settings) of every part of a stage's backbone, as it was before anything was parallelised."""
    original: Any = stage.meta_copy()
    names = {fqn for fqn, _ in stage.backbone.named_modules()}
    for fqn, part in original.backbone.named_modules():
        if fqn in names:
            known = sorted(f"{key}={_said(value)}" for key, value in vars(part).items() if key not in OTHER)
            yield fqn, f"{type(part).__module__}.{type(part).__qualname__}", known


def _said(value: Any) -> str:
    """A setting, or the name of a function; of what is neither, the class and what it holds."""
    match value:
        case None | bool() | int() | float() | str() | bytes() | Enum() | torch.dtype():
            return repr(value)
        case FunctionType() | BuiltinFunctionType() | type():
            return f"{value.__module__}.{value.__qualname__}"
        case partial():
            return _said([value.func, value.args, value.keywords])
        case list() | tuple():
            return repr([_said(entry) for entry in value])
        case set() | frozenset():
            return repr(sorted(map(_said, value)))
        case Mapping():
            return repr(sorted((_said(key), _said(entry)) for key, entry in value.items()))
        case torch.Tensor() if value.is_meta:
            return f"{value.dtype} {tuple(value.shape)}"
        case torch.Tensor() | np.ndarray():
            return f"{value.dtype} {value.tolist()}"
    holds: dict[str, Any] = value.to_dict() if hasattr(value, "to_dict") else {}
    if is_dataclass(value):
        holds = {one.name: getattr(value, one.name) for one in fields(value)}
    return f"{type(value).__qualname__}({_said({key: held for key, held in holds.items() if key[:1] != '_'})})"


def _bytes(module: Encoder, name: str, steps: StepDataset, exact: bool, inner: bool) -> float | None:
    """Of rows of all items; None for a backbone that does not say how wide they are."""
    backbone, table = module.backbone, steps.index.items[name]
    if not isinstance(backbone, Backbone):
        return None
    dtype = torch.float64 if exact else steps.compute_dtype or torch.float32
    rows = (table.inner_rows if inner else table.rows).sum()
    return float(rows) * (backbone.hidden_width if inner else backbone.width) * dtype.itemsize


def _tell(name: str, folder: Path, items: int, size: float | None) -> None:
    store = RowStore(folder)
    store.refresh()
    left, free = max(items - len(store), 0), shutil.disk_usage(folder.parent).free / 1e9
    need = "" if size is None else f" take {size / 1e9 * left / max(items, 1):.2f} GB"
    rank_zero_info(
        f"cache of '{name}' in {folder}: {len(store)} of {items} items; {left} others{need}, {free:.2f} GB are free"
    )
