"""Name a checkpoint's tensors as a Hugging Face folder does, and add the tensors of their origin that no run trains."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hetero_strategy.checkpoint.folder import Description, rank_stem
from hetero_strategy.checkpoint.tensorfile import TensorReader
from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.hf_folder import Selection, TensorFolder, pairs_to_halves, read_config, select
from hetero_strategy.model.hf_sources import Conversions, Sources, made_on_meta, prefix_of, sources_of
from hetero_strategy.model.unread import Picked, Stored, Unread

PACKAGE = "transformers"
WEIGHTS = ("*.safetensors", "*.index.json", "*.bin", "*.h5", "*.msgpack", "*.gguf", "*.pth", "*.onnx", "config.json")
"""Files of a folder that an export writes itself, and the same weights for other programs."""
TEMPLATES = "additional_chat_templates"
"""Folder in a folder, of the templates for tools and the like."""


class Saved(Unread):
    """A tensor of a checkpoint, read box by box from the files of the ranks that wrote it."""

    def __init__(self, reader: TensorReader, index: Description, key: str) -> None:
        self.reader, self.index, self.key = reader, index, key
        self.stored = index.tensors[key]
        self.shape, self.dtype = torch.Size(self.stored.shape), self.stored.dtype

    @override
    def read(self, selection: Selection) -> Tensor:
        starts = [int(selection[d].min()) if d in selection else 0 for d in range(self.ndim)]
        ends = [int(selection[d].max()) + 1 if d in selection else size for d, size in enumerate(self.shape)]
        box = torch.empty([end - start for start, end in zip(starts, ends, strict=True)], dtype=self.dtype)
        filled = 0
        for piece in self.stored.pieces:
            first = [max(start, at) for start, at in zip(starts, piece.offsets, strict=True)]
            last = [min(end, a + n) for end, a, n in zip(ends, piece.offsets, piece.sizes, strict=True)]
            sizes = [b - a for a, b in zip(first, last, strict=True)]
            if min(sizes, default=1) > 0:
                name = piece.name(self.key, self.stored.shape)
                inside = [a - at for a, at in zip(first, piece.offsets, strict=True)]
                value = self.reader.read(f"{rank_stem(piece.rank)}.safetensors", name, inside, sizes)
                box[tuple(slice(a - s, b - s) for a, b, s in zip(first, last, starts, strict=True))] = value
                filled += value.numel()
        if filled != box.numel():
            raise CheckpointError(
                f"{self.index.path}: only {filled} of {box.numel()} elements of {self.key} are there; it is damaged"
            )
        return select(box, {dim: index - starts[dim] for dim, index in selection.items()})


Record = Mapping[str, Any]
"""What a save records of a module: the fields of its :class:`HFWeights`, its class and its ``origin``."""


def class_name(model_class: type | None) -> str | None:
    """Return where a transformers class is imported from, such as ``transformers.LlamaForCausalLM``."""
    if model_class is None:
        return None
    public = getattr(importlib.import_module(PACKAGE), model_class.__name__, None) is model_class
    return f"{PACKAGE if public else model_class.__module__}.{model_class.__name__}"


def class_of(record: Record) -> Any:
    """Return the transformers class that a save recorded; None if it recorded none."""
    module, _, name = (record.get("model_class") or "").rpartition(".")
    if module.split(".")[0] != PACKAGE:
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise CheckpointError(
            f"this transformers has no {module}.{name}; export with the version that trained it"
        ) from None


def recorded_class(record: Record, config: Mapping[str, Any]) -> str | None:
    """Return where the class is imported from that loads a module's folder; None if no class does.

    Args:
        record: record of the module; saves of version 0.1 have no class in it.
        config: content of the folder's config.json.
    """
    if (architecture := next(iter(config.get("architectures") or ()), None)) is None:
        return None
    if model_class := record.get("model_class"):
        return str(model_class)
    family = config.get("model_type")
    if family is None or hasattr(importlib.import_module(PACKAGE), architecture):
        return f"{PACKAGE}.{architecture}"
    return f"{PACKAGE}.models.{family}.modeling_{family}.{architecture}"


def shares_origin(path: str, record: Mapping[str, Record]) -> bool:
    """Return whether another module of a save has other tensors of the same folder."""
    if (origin := record.get(path, {}).get("origin")) is None:
        return False
    return len({frozenset(one["names"].values()) for one in record.values() if one.get("origin") == origin}) > 1


def saved_tensors(
    record: Record, keys: Mapping[str, str], reader: TensorReader, index: Description
) -> dict[str, Unread]:
    """Return a module's tensors by their names in its transformers model; ``keys``: FQN -> key in the checkpoint."""
    names, heads = record.get("names") or {fqn: fqn for fqn in keys}, record.get("paired_heads") or {}
    if lacking := sorted(set(names) - set(keys)):
        raise CheckpointError(f"the checkpoint lacks {len(lacking)} parameters of a module, such as {lacking[0]!r}")
    tensors: dict[str, Unread] = {name: Saved(reader, index, keys[fqn]) for fqn, name in names.items()}
    for fqn, count in heads.items():
        rows = pairs_to_halves(torch.arange(tensors[names[fqn]].shape[0]), count)
        tensors[names[fqn]] = Picked(tensors[names[fqn]], 0, rows)
    return tensors


def as_in_origin(sources: Sources, origin: TensorFolder, tensors: Mapping[str, Unread]) -> dict[str, Unread]:
    """Return all tensors of an origin's folder by their names there, with these in the places of its own.

    Args:
        tensors: tensors by their names in the origin's transformers model.
    """
    conversions = sources.conversions
    assert conversions is not None
    placed = {fqn for fqns in sources.groups.values() for fqn in fqns}
    placed |= conversions.ties.keys() | {*conversions.ties.values()}
    for name, tensor in tensors.items():
        shape = conversions.known[name].shape if name in conversions.known else None
        if tensor.shape != shape or name not in placed:
            raise CheckpointError(
                f"{name} {tuple(tensor.shape)} of the checkpoint has no place in {origin.folder}, whose config.json"
                f" makes it {shape and tuple(shape)}: give the folder that the run began with, --origin (origin=)"
            )
    tensors = _with_ties(tensors, conversions.ties)
    out: dict[str, Unread] = {name: Stored(origin, name) for name in origin.names()}
    for names, fqns in sources.groups.items():
        if not any(fqn in tensors for fqn in fqns):
            continue
        group = {fqn: tensors.get(fqn, sources.tensors[fqn]) for fqn in fqns}
        one = len(names) == len(fqns) == 1
        plain = one and isinstance(sources.tensors[fqns[0]], Stored)
        converted = group if plain else conversions.revert(group, as_found=True)
        if one:  # whatever prefix the folder has
            (name,), (weight,) = names, tuple[Any, ...](converted.values())
            if weight.shape != origin.shape(name) == (*weight.shape[:-2], *weight.shape[:-3:-1]):
                weight = torch.transpose(weight, -1, -2)  # as the folder has it: transformers does not turn it back
            converted = {name: weight}
        if converted.keys() != set(names):
            raise CheckpointError(
                f"{origin.folder}: transformers does not turn {fqns[0]} back into {names[0]} and {len(names) - 1} more"
            )
        out |= converted
    return out


def of_module(
    record: Record, tensors: Mapping[str, Unread], origin: TensorFolder | None, *, shared: bool = False
) -> tuple[dict[str, Unread], Mapping[str, Any]]:
    """Return the tensors of a module's own folder by their names there, and the content of its config.json.

    Args:
        tensors: result of :func:`saved_tensors`.
        origin: folder that the module came from; its tensors that no run trains are added.
        shared: whether other modules come from there. A part of the folder's own model is then written alone, without
            a config.json.
    """
    config, model_class = record.get("config") or {}, class_of(record)
    if model_class is None:
        return dict(tensors), config
    sources = None if origin is None else sources_of(origin, model_class)
    whole: Any = None if sources is None or sources.conversions is None else type(sources.conversions.model)
    if whole is model_class and shared:
        return dict(tensors), {}
    if origin is not None and sources is not None and whole is model_class:
        names = {"architectures": [model_class.__name__]}
        return as_in_origin(sources, origin, tensors), {**read_config(origin.folder), **names}
    own = Conversions(made_on_meta(model_class, model_class.config_class.from_dict(dict(config))))
    lacking = own.known.keys() - _with_ties(tensors, own.ties).keys()
    more: dict[str, Unread] = {}
    if sources is not None and origin is not None:
        prefix = prefix_of({name: name for name in tensors}, sources)
        more = {name: sources.tensors[prefix + name] for name in lacking if prefix + name in sources.tensors}
        if absent := lacking - more.keys():
            raise CheckpointError(
                f"{origin.folder} lacks {len(absent)} tensors of {model_class.__name__} that no run trains, such as"
                f" {min(absent)}: give a folder that has them, --origin (origin=)"
            )
    elif lacking and record.get("origin"):
        raise CheckpointError(
            f"{record['origin']} has {len(lacking)} tensors of {model_class.__name__} that no run trains, such as"
            f" {min(lacking)}, but it is gone: give the folder's new place, --origin (origin=)"
        )
    return own.revert({**tensors, **more}), config


def _with_ties(tensors: Mapping[str, Unread], ties: Mapping[str, str]) -> dict[str, Unread]:
    both = {name: tensors[other] for name, other in ties.items() if other in tensors}
    return both | {other: tensors[name] for name, other in ties.items() if name in tensors} | dict(tensors)


def copy_beside_weights(origin: Path, folder: Path) -> None:
    """Copy generation config, tokenizer, processor, templates and whatever else lies beside weights and config.json."""
    for path in sorted(origin.iterdir()):
        if path.is_file() and not any(fnmatchcase(path.name, glob) for glob in WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    if (origin / TEMPLATES).is_dir():
        shutil.copytree(origin / TEMPLATES, folder / TEMPLATES)
