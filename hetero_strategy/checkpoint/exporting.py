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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint.folder import METADATA, Description
from hetero_strategy.checkpoint.loading import fill
from hetero_strategy.checkpoint.tensorfile import Entry, TensorReader, check_dtype, write_tensors
from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.hf_folder import EXTRA, PROCESSOR, pairs_to_halves

EXPORT_KEY = "hetero_export"
FILE_BYTES = 5 * 10**9
CASTS = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
"""Dtypes that weights may be cast to, without float8, which needs a scale."""
INNER = {"WhisperEncoder": "transformers.models.whisper.modeling_whisper"}
"""Architectures that neither ``from transformers import`` nor an auto class finds -> their modules."""
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
    architecture: str | None
    """The transformers class whose ``from_pretrained`` loads the folder; None if the names are our own."""
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
            configs = {"config": weights.config, "processor": weights.processor}
            record[start.removesuffix(".")] |= {"names": names, "paired_heads": heads, **configs}
    return record


def export(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    module: str | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> tuple[Exported, ...]:
    """Write a checkpoint's parameters to ``folder``, in one process, without a model and one full tensor at a time.

    Every module becomes a folder of its name, with model.safetensors (several files and an index if it is large),
    config.json and a README.md that names the class which loads them. Tensors that the Hugging Face model does not
    have, such as a projector's, go to :data:`EXTRA` in the same folder. A module without such a model keeps its own
    names. A checkpoint without a record becomes one folder.

    Args:
        checkpoint: path of the checkpoint, of any layout.
        folder: folder to write, which must be empty or not exist.
        module: export only this module (``vision`` or a dotted path), into ``folder`` itself.
        dtype: dtype of :data:`CASTS` that floating tensors are cast to; by default they stay as stored.
        file_bytes: greatest size of a file of model weights, unless a single tensor is larger.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such module, ``dtype`` is not in :data:`CASTS`, or
            ``folder`` cannot be written.
    """
    if dtype is not None and dtype not in CASTS.values():
        raise CheckpointError(f"export: weights cannot be cast to {dtype}; give one of {', '.join(CASTS)}")
    index = folders.describe(checkpoint)
    metadata = folders.read_values(index, METADATA)
    record = metadata.get(EXPORT_KEY, {}) if isinstance(metadata, dict) else {}
    target = Path(os.path.abspath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not an empty folder; choose another one to export to")
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    written = []
    with TensorReader(index.path, index.files) as reader:
        try:
            temporary.mkdir(parents=True)
            writer = _Writer(reader, index, dtype, file_bytes)
            for path, keys in _keys_by_module(index, module, record).items():
                inside = path.rpartition(".")[2] if module is None and record else ""
                if module is None and record and not path:
                    exported = Exported(temporary, (), None, writer.write_extra(temporary, keys))
                else:
                    name = path.rpartition(".")[2]
                    exported = writer.write(temporary / inside, name, keys, record.get(path, {}))
                written.append(replace(exported, folder=target / inside))
            os.rename(temporary, target)
        except (OSError, TypeError) as fault:  # TypeError: a config that JSON cannot hold
            raise CheckpointError(f"cannot export to {target}: {fault}") from fault
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return tuple(written)


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
    dtype: torch.dtype | None
    file_bytes: int

    def write(self, folder: Path, name: str, keys: Mapping[str, str], record: Mapping[str, Any]) -> Exported:
        """Write a module."""
        names, heads, config = (record.get(field) or {} for field in ("names", "paired_heads", "config"))
        if lacking := sorted(set(names) - set(keys)):
            raise CheckpointError(f"the checkpoint lacks {len(lacking)} parameters of a module, such as {lacking[0]!r}")
        weights = {theirs: fqn for fqn, theirs in names.items()} or {fqn: fqn for fqn in keys}
        extra = {fqn: key for fqn, key in keys.items() if fqn not in names} if names else {}
        entries = [self._entry(theirs, keys[fqn], heads.get(fqn)) for theirs, fqn in sorted(weights.items())]
        folder.mkdir(exist_ok=True)
        _write(folder, entries, self.file_bytes)
        if config:
            # transformers loads all weights in one dtype: the widest one loses nothing
            widest = max((e.dtype for e in entries if e.dtype.is_floating_point), key=lambda dtype: dtype.itemsize)
            content = {**config, "dtype": str(widest).removeprefix("torch.")}
            (folder / "config.json").write_text(json.dumps(content, indent=2))
        if processor := record.get("processor"):
            (folder / PROCESSOR).write_text(json.dumps(processor, indent=2))
        architecture = next(iter(config.get("architectures") or ()), None)
        if architecture is not None:
            text = README + (NO_AUTO if architecture in INNER else "")
            module = INNER.get(architecture, "transformers")
            (folder / "README.md").write_text(text.format(name=name, module=module, architecture=architecture))
        return Exported(folder, tuple(sorted(weights)), architecture, self.write_extra(folder, extra) if extra else ())

    def write_extra(self, folder: Path, keys: Mapping[str, str]) -> tuple[str, ...]:
        """Write tensors to :data:`EXTRA` and return their names."""
        write_tensors(folder / EXTRA, [self._entry(fqn, key) for fqn, key in keys.items()])
        return tuple(sorted(keys))

    def _entry(self, name: str, key: str, heads: int | None = None) -> Entry:
        stored = self.index.tensors[key]
        out = self.dtype if self.dtype is not None and stored.dtype.is_floating_point else stored.dtype
        check_dtype(name, out)

        def get() -> torch.Tensor:
            full = torch.empty(stored.shape, dtype=stored.dtype)
            fill({key: full}, self.index, self.reader)
            return full.to(out) if heads is None else pairs_to_halves(full.to(out), heads)

        return Entry(name, out, stored.shape, get)


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
