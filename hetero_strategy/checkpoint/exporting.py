"""Export a checkpoint as plain weights for other programs: safetensors and config.json in Hugging Face's form.

A save records in its metadata, under :data:`EXPORT_KEY`, the Hugging Face name of every parameter and the content of
config.json, so that an export needs no model. Without such a record parameters keep our names.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint.folder import METADATA, Description
from hetero_strategy.checkpoint.hf_export import (
    Record,
    Saved,
    as_in_origin,
    class_name,
    class_of,
    copy_beside_weights,
    of_module,
    recorded_class,
    saved_tensors,
    shares_origin,
)  # fmt: skip
from hetero_strategy.checkpoint.tensorfile import Entry, TensorReader, check_dtype, write_tensors
from hetero_strategy.errors import CheckpointError, ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.hf_folder import EXTRA, PROCESSOR, TensorFolder, read_config
from hetero_strategy.model.hf_sources import prefix_of, sources_of
from hetero_strategy.model.unread import Stored, Unread

EXPORT_KEY = "hetero_export"
FILE_BYTES = 5 * 10**9
CASTS = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
"""Dtypes that weights may be cast to, without float8, which needs a scale."""
README = """Weights of `{name}`, which transformers loads:

    from {module} import {architecture}

    model = {architecture}.from_pretrained(folder)
"""
NO_AUTO = """
No auto class has a {architecture}: `AutoModel.from_pretrained(folder)` would make a whole model with new weights.
"""


@dataclass(frozen=True)
class Exported:
    """A folder of an export."""

    folder: Path
    names: tuple[str, ...]
    """Names of its tensors in model.safetensors."""
    model_class: str | None
    """Where the transformers class is imported from whose ``from_pretrained`` loads the folder, such as
    ``transformers.LlamaForCausalLM``; None if there is none."""
    extra: tuple[str, ...]
    """Names of its tensors in :data:`EXTRA`."""


def export_record(modules: Mapping[str, Adapter]) -> dict[str, dict[str, Any]]:
    """Return the record of a save under :data:`EXPORT_KEY`, for modules by prefix of their names (``model.llm.``)."""
    record: dict[str, dict[str, Any]] = {start.removesuffix("."): {} for start in modules}
    for start, module in modules.items():
        weights, tied = module.hf_weights(), module.tied_weight()
        if weights is not None:
            names, heads = dict(weights.names), dict(weights.paired_heads)
            if tied is not None:
                names[tied[1]] = names[tied[0]]  # a tied parameter has two names here and one in Hugging Face's model
            record[start.removesuffix(".")] |= {
                "names": names, "paired_heads": heads, "config": weights.config, "processor": weights.processor,
                "model_class": class_name(weights.model_class),
                "origin": None if module.checkpoint is None else os.path.abspath(module.checkpoint),
            }  # fmt: skip
    return record


def export(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    module: str | None = None,
    whole: bool = False,
    origin: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> tuple[Exported, ...]:
    """Write a checkpoint's parameters to ``folder``, in one process, without a model and one full tensor at a time.

    Every module becomes a folder of its name, with model.safetensors (several files and an index if it is large),
    config.json and a README.md that names the class which loads them. Tensors of its origin that no run trains are
    copied. Tensors that the Hugging Face model does not have, such as a projector's, go to :data:`EXTRA` in the same
    folder. A module without such a model keeps its own names. A checkpoint without a record becomes one folder. Modules
    that are parts of one folder are written with their own tensors alone; ``whole`` puts them together.

    Args:
        checkpoint: path of the checkpoint, of any layout.
        folder: folder to write, which must be empty or not exist.
        module: export only this module (``vision`` or a dotted path), into ``folder`` itself.
        whole: write one folder like the one that all modules come from, with its names of tensors, its other tensors,
            configs, tokenizer and processor. Tensors outside the modules go to :data:`EXTRA` in it.
        origin: present place of the folder that modules come from; default: where it was in the run.
        dtype: dtype of :data:`CASTS` that floating tensors are cast to; by default they stay as stored.
        file_bytes: greatest size of a file of model weights, unless a single tensor is larger.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such module, ``dtype`` is not in :data:`CASTS`, the modules
            do not make up a whole folder, or ``folder`` cannot be written.
    """
    if dtype is not None and dtype not in CASTS.values():
        raise CheckpointError(f"export: weights cannot be cast to {dtype}; give one of {', '.join(CASTS)}")
    if whole and module is not None:
        raise CheckpointError(f"export: whole=True (--whole) is for all modules; leave module={module!r} out")
    index = folders.describe(checkpoint)
    metadata = folders.read_values(index, METADATA)
    record = metadata.get(EXPORT_KEY, {}) if isinstance(metadata, dict) else {}
    target = Path(os.path.abspath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not an empty folder; choose another one to export to")
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    with TensorReader(index.path, index.files) as reader, ExitStack() as opened:
        try:
            temporary.mkdir(parents=True)
            writer = _Writer(reader, index, record, origin, dtype, file_bytes, opened)
            inside = _keys_by_module(index, module, record)
            written = [writer.write_whole(temporary, inside)] if whole else writer.write_all(temporary, inside, module)
            os.rename(temporary, target)
        except ModelError as fault:
            raise CheckpointError(str(fault)) from None
        except (OSError, TypeError) as fault:  # TypeError: a config that JSON cannot hold
            raise CheckpointError(f"cannot export to {target}: {fault}") from fault
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return tuple(replace(one, folder=target / one.folder.relative_to(temporary)) for one in written)


def _keys_by_module(index: Description, module: str | None, record: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return keys of the checkpoint by path of their module in the LightningModule ("" for none) and name inside it."""
    keys = {key.removeprefix("model."): key for key in index.tensors if key.startswith("model.")}
    inside: dict[str, dict[str, str]] = {}
    for name, key in keys.items():
        path = next((path for path in record if name.startswith(f"{path}.")), "")
        if module is not None:  # the module may be below an attribute of the LightningModule
            start = f".{name}".find(f".{module}.")
            if start < 0:
                continue
            path = name[:start] + module
        inside.setdefault(path, {})[name.removeprefix(f"{path}.")] = key
    if module is not None and len(inside) != 1:
        known = sorted({name.split(".")[0] for name in keys}) if not inside else sorted(inside)
        problem = "no parameters" if not inside else "several places"
        raise CheckpointError(
            f"{index.path}: {problem} for module {module!r}: there is {', '.join(known)}; give its full path"
        )
    return inside


@dataclass(frozen=True)
class _Writer:
    """A writer of the folders of one export; fields as the arguments of :func:`export`."""

    reader: TensorReader
    index: Description
    record: Mapping[str, Record]
    """Record of each module by its path."""
    origin: str | os.PathLike[str] | None
    dtype: torch.dtype | None
    file_bytes: int
    opened: ExitStack
    """Closes the folders that modules come from."""

    def write_all(self, folder: Path, inside: Mapping[str, Mapping[str, str]], only: str | None) -> list[Exported]:
        """Write every module to a folder of its name, or the ``only`` one to the folder itself."""
        places = {place for path in inside if (place := self.record.get(path, {}).get("origin"))}
        if self.origin is not None and len(places) != 1:
            advice = "export module by module" if places else "leave it out"
            raise CheckpointError(
                f"{self.index.path}: --origin (origin=) is the new place of one folder, but the modules come from"
                f" {', '.join(sorted(places)) or 'none'}; {advice}"
            )
        written = []
        for path, keys in inside.items():
            name = path.rpartition(".")[2]
            if only is not None or not self.record:
                written.append(self._write_module(folder, name, path, keys))
            elif path:
                written.append(self._write_module(folder / name, name, path, keys))
            else:
                written.append(Exported(folder, (), None, self._write_extra(folder, keys)))
        return written

    def _write_module(self, folder: Path, name: str, path: str, keys: Mapping[str, str]) -> Exported:
        record, extra = self.record.get(path, {}), self._extra(path, keys)
        own = {fqn: key for fqn, key in keys.items() if fqn not in extra}
        tensors = saved_tensors(record, own, self.reader, self.index)
        tensors, config = of_module(record, tensors, self._opened(record), shared=shares_origin(path, self.record))
        folder.mkdir(exist_ok=True)
        self._write_weights(folder, tensors, config)
        if processor := record.get("processor"):
            (folder / PROCESSOR).write_text(json.dumps(processor, indent=2))
        if model_class := recorded_class(record, config):
            module, _, architecture = model_class.rpartition(".")
            text = README + (NO_AUTO if module != "transformers" else "")
            (folder / "README.md").write_text(text.format(name=name, module=module, architecture=architecture))
        return Exported(folder, tuple(sorted(tensors)), model_class, self._write_extra(folder, extra) if extra else ())

    def write_whole(self, folder: Path, inside: Mapping[str, Mapping[str, str]]) -> Exported:
        """Write the folder that all modules come from, with their tensors in the places of its own."""
        places = {path: self.record.get(path, {}).get("origin") for path in inside if path}
        if len(set(places.values())) != 1 or None in places.values():
            known = ", ".join(f"{path} of {place or 'no folder'}" for path, place in places.items())
            raise CheckpointError(
                f"{self.index.path}: --whole writes the one folder that all modules come from, but there are"
                f" {known or 'no modules'}; leave --whole out to export module by module"
            )
        origin = self._opened(first := self.record[next(iter(places))])
        if origin is None:
            raise CheckpointError(f"{first['origin']} is gone: give the folder's new place, --origin (origin=)")
        sources = sources_of(origin, class_of(first))
        if sources.conversions is None:
            raise CheckpointError(f"transformers has no class for {origin.folder}/config.json; leave --whole out")
        tensors: dict[str, Unread] = {}
        for path in places:
            if extra := self._extra(path, inside[path]):
                raise CheckpointError(
                    f"{path}: {origin.folder} has no place for {len(extra)} of its tensors, such as {min(extra)};"
                    " leave --whole out to export module by module"
                )
            own = saved_tensors(self.record[path], inside[path], self.reader, self.index)
            prefix = prefix_of({name: name for name in own}, sources)
            tensors |= {prefix + name: tensor for name, tensor in own.items()}
        written = as_in_origin(sources, origin, tensors)
        copy_beside_weights(origin.folder, folder)
        self._write_weights(folder, written, read_config(origin.folder))
        outside = self._write_extra(folder, inside[""]) if "" in inside else ()
        return Exported(folder, tuple(sorted(written)), class_name(type(sources.conversions.model)), outside)

    def _opened(self, record: Record) -> TensorFolder | None:
        """Open the folder that a module comes from; None if there is none or it is gone."""
        recorded = record.get("origin")
        if recorded is None or (self.origin is None and not os.path.isdir(recorded)):
            return None
        return self.opened.enter_context(TensorFolder(Path(self.origin or recorded)))

    def _extra(self, path: str, keys: Mapping[str, str]) -> dict[str, str]:
        """Return the tensors of a module that its Hugging Face model does not have."""
        names = self.record.get(path, {}).get("names")
        return {fqn: key for fqn, key in keys.items() if fqn not in names} if names else {}

    def _write_weights(self, folder: Path, tensors: Mapping[str, Unread], config: Mapping[str, Any]) -> None:
        entries = [self._entry(name, tensor) for name, tensor in sorted(tensors.items())]
        _write(folder, entries, self.file_bytes)
        if config:
            # transformers loads all weights in one dtype: the widest one of those trained loses nothing
            trained = [
                e.dtype for e in entries if not isinstance(tensors[e.name], Stored) and e.dtype.is_floating_point
            ]
            widest = str(max(trained, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
            content = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": widest}
            (folder / "config.json").write_text(json.dumps(content, indent=2))

    def _write_extra(self, folder: Path, keys: Mapping[str, str]) -> tuple[str, ...]:
        """Write tensors to :data:`EXTRA` and return their names."""
        saved = {fqn: Saved(self.reader, self.index, key) for fqn, key in keys.items()}
        write_tensors(folder / EXTRA, [self._entry(fqn, tensor) for fqn, tensor in saved.items()])
        return tuple(sorted(keys))

    def _entry(self, name: str, tensor: Unread) -> Entry:
        """Return the entry of a tensor; tensors of the origin, which no run trains, keep their dtype."""
        cast = self.dtype is not None and tensor.dtype.is_floating_point and not isinstance(tensor, Stored)
        out = self.dtype if cast and self.dtype is not None else tensor.dtype
        check_dtype(name, out)
        return Entry(name, out, tuple(tensor.shape), lambda: tensor.read({}).to(out))


def _write(folder: Path, entries: list[Entry], file_bytes: int) -> None:
    """Write weights to model.safetensors, or to several files and an index if they are larger than ``file_bytes``."""
    files: list[list[Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(other.nbytes for other in files[-1]) + entry.nbytes > file_bytes:
            files.append([])
        files[-1].append(entry)
    if len(files) == 1:
        write_tensors(folder / "model.safetensors", files[0])
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(folder / name, group)
        weight_map |= {entry.name: name for entry in group}
    content = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
