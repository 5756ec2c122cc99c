"""Plain weights for other programs: safetensors with an index and a config.json, as Hugging Face writes them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint.folder import METADATA, Index, StoredTensor, rank_stem
from hetero_strategy.checkpoint.saving import save
from hetero_strategy.checkpoint.team import Team
from hetero_strategy.checkpoint.tensorfile import Entry, TensorReader, check_dtype, write_tensors
from hetero_strategy.errors import CheckpointError

# Metadata key under which a save may leave, per module, what other programs call its parameters:
# {module: {"names": {fqn inside the module: exported name}, "config": {...}}}
EXPORT_KEY = "hetero_export"
FILE_BYTES = 5 * 10**9


def export(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    module: str | None = None,
    names: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> tuple[str, ...]:
    """Writes a checkpoint's parameters to `folder`, in one process and without a model; one full tensor at a time.

    Args:
        checkpoint: a checkpoint of any layout.
        folder: where to; must not exist or be empty.
        module: only this module's parameters, under their names inside it (`vision`; a dotted path is possible).
        names: exported name of every parameter; default: what the checkpoint says under `EXPORT_KEY`, else unchanged.
        config: written to config.json; default as for `names`, else no such file.
        dtype: cast floating tensors to it; default: as stored.
        file_bytes: greatest size of a file, unless a single tensor is larger.

    Returns:
        The exported names.

    Raises:
        CheckpointError: the checkpoint is damaged, has no such module, or `folder` cannot be written.
    """
    source, index = folders.locate(Path(checkpoint))
    metadata = folders.read_values(source, METADATA, index)
    recorded = metadata.get(EXPORT_KEY, {}).get(module, {}) if isinstance(metadata, dict) and module else {}
    names = recorded.get("names") if names is None else names
    config = recorded.get("config") if config is None else config
    target = Path(os.path.abspath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not an empty folder; choose another one to export to")

    chosen = _renamed(_of_module(index, module, source), names)
    with TensorReader(source, index.files) as reader:
        entries = [_entry(reader, index, key, name, dtype) for name, key in sorted(chosen.items())]
        temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
        try:
            temporary.mkdir(parents=True)
            _write(temporary, entries, config, file_bytes)
            os.rename(temporary, target)
        except (OSError, TypeError) as fault:  # TypeError: a config that JSON cannot hold
            raise CheckpointError(f"cannot export to {target}: {fault}") from fault
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return tuple(entry.name for entry in entries)


def export_module(
    name: str,
    parameters: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    *,
    names: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes one live module as `export` does. Every rank of the group calls it, with what it owns (perhaps nothing).

    The module goes through a temporary checkpoint beside `folder`, so no rank ever holds more than its shards and one
    full tensor of host memory, and pipeline stages, whose parameters no single mesh has, need nothing special.

    Args:
        name: the module, for messages.
        parameters: FQN inside the module -> owned tensor or DTensor.
        folder, names, config, dtype, file_bytes: see `export`; rank 0's are used.
        process_group: ranks that include the module's.

    Raises:
        CheckpointError: on all ranks alike; the message names the module.
    """
    team = Team.of(process_group)
    target = team.from_first(lambda: Path(os.path.abspath(folder)))
    scratch = target.with_name(f"{target.name}.gathered")
    try:
        save({f"model.{fqn}": tensor for fqn, tensor in parameters.items()}, {}, scratch, process_group=process_group)
        team.from_first(lambda: export(scratch, target, names=names, config=config, dtype=dtype, file_bytes=file_bytes))
    except CheckpointError as fault:
        raise CheckpointError(f"export of module {name!r}: {fault}") from fault
    finally:
        if team.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)


def _of_module(index: Index, module: str | None, source: Path) -> dict[str, str]:
    """Name inside the module -> key in the checkpoint."""
    keys = {key.removeprefix("model."): key for key in index.tensors if key.startswith("model.")}
    if module is None:
        return keys
    # the module may lie deeper than the root, below the LightningModule's own attribute
    inside: dict[str, dict[str, str]] = {}
    for name, key in keys.items():
        at = f".{name}".find(f".{module}.")
        if at >= 0:
            inside.setdefault(name[:at], {})[name[at + len(module) + 1 :]] = key
    if len(inside) != 1:
        known = sorted({name.split(".")[0] for name in keys}) if not inside else sorted(inside)
        problem = "no parameters" if not inside else "several places"
        raise CheckpointError(
            f"{source}: {problem} for module {module!r}: there is {', '.join(known)}; give its full path"
        )
    return next(iter(inside.values()))


def _renamed(keys: Mapping[str, str], names: Mapping[str, str] | None) -> dict[str, str]:
    """Exported name -> key in the checkpoint."""
    if names is None:
        return dict(keys)
    lacking = sorted(set(keys) - set(names))
    if lacking:
        raise CheckpointError(
            f"no exported name for {len(lacking)} parameters, the first is {lacking[0]!r}: add it to `names`"
        )
    renamed = {names[name]: key for name, key in keys.items()}
    if len(renamed) != len(keys):
        raise CheckpointError("`names` gives two parameters the same exported name")
    return renamed


def _entry(reader: TensorReader, index: Index, key: str, name: str, dtype: torch.dtype | None) -> Entry:
    stored = index.tensors[key]
    out = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
    check_dtype(name, out)
    return Entry(name, out, stored.shape, lambda: _whole(reader, key, stored).to(out))


def _whole(reader: TensorReader, key: str, stored: StoredTensor) -> torch.Tensor:
    full = torch.empty(stored.shape, dtype=stored.dtype)
    filled = 0
    for piece in stored.pieces:
        box = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True))
        value = reader.read(f"{rank_stem(piece.rank)}.safetensors", piece.name(key, stored.shape))
        full[box] = value
        filled += value.numel()
    if filled != full.numel():
        raise CheckpointError(f"only {filled} of {full.numel()} elements of {key} are there; the checkpoint is damaged")
    return full


def _write(folder: Path, entries: list[Entry], config: Mapping[str, object] | None, file_bytes: int) -> None:
    files: list[list[Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(other.nbytes for other in files[-1]) + entry.nbytes > file_bytes:
            files.append([])
        files[-1].append(entry)
    if len(files) == 1:
        write_tensors(folder / "model.safetensors", files[0])
    else:
        weight_map: dict[str, str] = {}
        for number, group in enumerate(files, start=1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write_tensors(folder / name, group)
            weight_map |= {entry.name: name for entry in group}
        content = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
