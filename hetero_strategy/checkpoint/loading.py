"""Fill owned tensors from a checkpoint of any layout.

torch's distributed checkpoints work out which pieces overlap this rank's tensors. They are read as slices of
safetensors files. Nothing in a checkpoint is ever unpickled or imported.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint.all_or_none import AllOrNone
from hetero_strategy.checkpoint.boxes import Box, boxes_of
from hetero_strategy.checkpoint.folder import METADATA, Description, Piece, StoredTensor, rank_stem
from hetero_strategy.checkpoint.tensorfile import TensorReader
from hetero_strategy.errors import CheckpointError

SHOWN = 5
"""Most names in a message."""


@dataclass(frozen=True)
class Loaded:
    """The values of a checkpoint besides the tensors that were filled."""

    metadata: dict[str, Any]
    """The metadata as saved."""
    rank_state: dict[str, Any] | None
    """The state that this rank saved; None if there is none, or another number of ranks saved the checkpoint."""
    missing: tuple[str, ...]
    """Names of this rank's tensors that the checkpoint lacks, which are untouched. With ``strict`` these are only
    states of parameters that had no gradient before the save: leave these states empty."""
    unexpected: tuple[str, ...]
    """Names under ``model.`` in the checkpoint that no rank has; empty with ``strict``."""


def load(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Fill ``tensors`` in place, bit by bit as saved, whatever layout and number of ranks saved them. Collective.

    Args:
        tensors: tensors that this rank owns, by global name: plain ones or DTensors on any mesh, none of them on meta.
        path: path of the checkpoint; rank 0's path counts. After a killed save its predecessor is loaded.
        strict: refuse ``model.`` names that only the checkpoint or only the model has, and a dtype that would lose
            digits; otherwise report the names and cast.
        verify: compare the checksum of every block of a tensor that is read. The checksums of the index, the headers
            and the metadata of all ranks are small and always compared.
        process_group: group of the ranks that load; all ranks by default.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or does not fit; raised on all ranks alike. If a file is
            damaged, some tensors may have been filled before.
    """
    team = AllOrNone.of(process_group)
    index = team.from_one(lambda: folders.describe(os.path.abspath(path)))
    folder = index.path
    names = sorted(key for key in index.tensors if key.startswith("model."))

    team.together(lambda: _check_fit(tensors, index, strict))
    known = team.anywhere([key in tensors for key in names])
    extra = tuple(key for key, somewhere in zip(names, known, strict=True) if not somewhere)
    if extra and strict:
        raise CheckpointError(
            f"{folder} holds {len(extra)} tensors that the model does not have: {_some(extra)}; "
            "build the model it was saved from, or load with strict=False (in Lightning: strict_loading=False)"
        )
    missing = tuple(key for key in tensors if key not in index.tensors)

    def read() -> tuple[dict[str, Any], dict[str, Any] | None]:
        present = {key: tensor for key, tensor in tensors.items() if key in index.tensors}
        with TensorReader(folder, index.files, verify=verify) as reader:
            fill(present, index, reader)
        metadata = folders.read_values(index, METADATA)
        # a different number of ranks needs no states, but reads all of them: damage may mean a faulty file system
        ranks = range(team.rank, index.world_size, team.size)
        states = [folders.read_values(index, f"{rank_stem(rank)}.state") for rank in ranks]
        state = states[0] if index.world_size == team.size else None
        if not isinstance(metadata, dict) or not isinstance(state, dict | None):
            raise CheckpointError(f"{folder}: metadata is not a dict; the checkpoint is damaged")
        return metadata, state

    metadata, state = team.together(read)
    return Loaded(metadata, state, missing, extra)


def _check_fit(tensors: Mapping[str, torch.Tensor], index: Description, strict: bool) -> None:
    folder = index.path
    missing = [key for key in tensors if key not in index.tensors]
    lacking = [key for key in missing if not key.startswith("optim.")]
    if lacking and strict:
        raise CheckpointError(
            f"{folder} lacks {len(lacking)} tensors of the model: {_some(lacking)}; "
            "build the model it was saved from, or load with strict=False (in Lightning: strict_loading=False)"
        )
    states: dict[str, set[str]] = defaultdict(set)
    for key in index.tensors:
        if key.startswith("optim."):
            owner, _, state = key.rpartition(".")
            states[owner].add(state)
    for key in missing:
        owner, _, state = key.rpartition(".")
        if owner in states:
            raise CheckpointError(
                f"{folder} was saved with another optimizer: for {owner!r} it has {sorted(states[owner])}, "
                f"not {state!r}; resume with the optimizer it was saved with, or load the model alone"
            )
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"{key} is on the meta device: materialise it before loading")
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            raise CheckpointError(f"{key} lies on mesh {tensor.device_mesh}, which this rank is not part of")
        stored = index.tensors.get(key)
        if stored is None:
            continue
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{key} has shape {stored.shape} in {folder} but {tuple(tensor.shape)} in the model; "
                "build the model it was saved from"
            )
        if strict and not _fits(stored.dtype, tensor.dtype):
            raise CheckpointError(
                f"{key} is {stored.dtype} in {folder} but {tensor.dtype} in the model; "
                "use the precision it was saved with, or load with strict=False (strict_loading=False) to cast"
            )


def _fits(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a strict load may cast: to a wider dtype, or to half precision, whose parameters are frozen."""
    if stored == wanted or not (stored.is_floating_point and wanted.is_floating_point):
        return stored == wanted
    return wanted.itemsize == 2 or torch.promote_types(stored, wanted) == wanted


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def fill(tensors: Mapping[str, torch.Tensor], index: Description, reader: TensorReader) -> None:
    """Fill tensors in place from the pieces that overlap this rank's parts. The checkpoint must have all of them."""
    parts = {key: t.to_local() if isinstance(t, DTensor) else t for key, t in tensors.items()}
    pieces = {(key, piece.offsets): piece for key in tensors for piece in index.tensors[key].pieces}
    reads: list[tuple[Piece, ReadItem, torch.Tensor]] = []
    for key, tensor in tensors.items():
        metadata = _dcp_metadata(index.tensors[key])
        for box in boxes_of(tensor):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for item in create_read_items_for_chunk_list(key, metadata, [chunk]):
                piece = pieces[key, tuple(item.storage_index.offset or ())]
                target = Box((), tuple(item.lengths), tuple(item.dest_offsets)).of(box.of(parts[key].detach()))
                reads.append((piece, item, target))
    filled: dict[str, int] = defaultdict(int)
    for piece, item, target in sorted(reads, key=lambda one: one[0].rank):
        key = item.storage_index.fqn
        if target.numel():
            file, name = f"{rank_stem(piece.rank)}.safetensors", piece.name(key, index.tensors[key].shape)
            value = reader.read(file, name, tuple(item.storage_offsets), tuple(item.lengths))
            if value.shape != target.shape:
                raise CheckpointError(f"{index.path / file}: {name!r} has the wrong shape; the checkpoint is damaged")
            target.copy_(value)
        filled[key] += target.numel()
    for key in tensors:
        if filled[key] != parts[key].numel():
            raise CheckpointError(
                f"{index.path}: only {filled[key]} of {parts[key].numel()} elements of {key} are there; it is damaged"
            )


def _dcp_metadata(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in stored.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
