"""Fills owned tensors from a checkpoint that any other layout wrote.

DCP's planner (``DefaultLoadPlanner``) works out what overlaps what; the pieces are read as slices of safetensors files.
Nothing in a checkpoint is ever unpickled or imported.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint.all_or_none import AllOrNone
from hetero_strategy.checkpoint.folder import METADATA, Description, StoredTensor, rank_stem
from hetero_strategy.checkpoint.tensorfile import TensorReader
from hetero_strategy.errors import CheckpointError

SHOWN = 5


@dataclass(frozen=True)
class Loaded:
    """What a load returns besides the tensors it filled."""

    metadata: dict[str, Any]
    """The metadata as saved."""
    rank_state: dict[str, Any] | None
    """What this rank saved; None where the checkpoint has none or was saved by another number of ranks."""
    missing: tuple[str, ...]
    """Names this rank asked for that the checkpoint lacks; their tensors are untouched. With ``strict`` only optimizer
    states of parameters that had none when saving (no gradient yet): leave these states empty."""
    unexpected: tuple[str, ...]
    """``model.`` names in the checkpoint that no rank asked for; empty with ``strict``."""


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
        tensors: what this rank owns under global names; plain tensors or DTensors on any mesh, not on meta.
        path: the checkpoint (rank 0's is used); after a killed save its predecessor stands in.
        strict: refuse ``model.`` names on one side only, and a dtype that would lose digits; otherwise report the names
            and cast.
        verify: compare the checksum of every block of a tensor that is read. Those of index, headers and metadata, of
            all ranks, are always compared: they are small.
        process_group: the ranks that take part; all by default.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one that does not fit; on all ranks alike. Some tensors may
            have been filled when a file turned out to be damaged.
    """
    team = AllOrNone.of(process_group)
    index = team.from_one(lambda: folders.describe(os.path.abspath(path)))
    folder = index.path
    names = sorted(key for key in index.tensors if key.startswith("model."))

    def check() -> None:
        if verify and team.rank == 0 and not index.has_checksums:
            warnings.warn(f"{folder} was saved without checksums: damage of its tensors is not noticed", stacklevel=2)
        _check_fit(tensors, index, strict)

    team.together(check)
    asked = team.anywhere([key in tensors for key in names])
    extra = tuple(key for key, known in zip(names, asked, strict=True) if not known)
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
        # with other ranks nobody needs the states, but a damaged one is reported: the file system may be at fault
        saved = range(team.rank, index.world_size, team.size)
        states = [folders.read_values(index, f"{rank_stem(rank)}.state") for rank in saved]
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
    """Whether values may be cast unasked: a wider dtype loses nothing, and what is kept in half precision is frozen."""
    if stored == wanted or not (stored.is_floating_point and wanted.is_floating_point):
        return stored == wanted
    return wanted.itemsize == 2 or torch.promote_types(stored, wanted) == wanted


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def fill(tensors: Mapping[str, torch.Tensor], index: Description, reader: TensorReader) -> None:
    """Fill tensors that the checkpoint has, in place, from the pieces that overlap this rank's parts of them.

    Raises:
        CheckpointError: a piece is missing or damaged, or a tensor has another shape.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), Metadata({key: _dcp_metadata(index.tensors[key]) for key in tensors}))
    try:
        items = planner.create_local_plan().items
    except (ValueError, RuntimeError, AssertionError) as fault:
        raise CheckpointError(f"{index.path} cannot be matched with the model: {fault}") from fault
    pieces = {(key, piece.offsets): piece for key in tensors for piece in index.tensors[key].pieces}
    filled: dict[str, int] = defaultdict(int)
    for item in sorted(items, key=lambda item: pieces[_source(item)].rank):
        key, offsets = _source(item)
        piece = pieces[key, offsets]
        target = planner.resolve_tensor(item).detach()
        if target.numel():
            file, name = f"{rank_stem(piece.rank)}.safetensors", piece.name(key, index.tensors[key].shape)
            value = reader.read(file, name, tuple(item.storage_offsets), tuple(item.lengths))
            if value.shape != target.shape:
                raise CheckpointError(f"{index.path / file}: {name!r} has the wrong shape; the checkpoint is damaged")
            target.copy_(value)
        planner.commit_tensor(item, target)
        filled[key] += target.numel()
    for key, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if filled[key] != local.numel():
            raise CheckpointError(
                f"{index.path}: only {filled[key]} of {local.numel()} elements of {key} are there; it is damaged"
            )


def _source(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _dcp_metadata(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in stored.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
