"""Which rank holds which pieces of which tensors, from the little that ranks have to tell each other. Pure.

Ranks that own alike, such as the instances of a stage, say the same of their tensors, so one of them says it for all.
They differ in their coordinates on the meshes alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from hetero_strategy.checkpoint.folder import Piece, StoredTensor
from hetero_strategy.errors import CheckpointError

Coordinates = tuple[tuple[int, ...], ...]
"""Of a rank on each mesh of its inventory."""


@dataclass(frozen=True)
class OwnedTensor:
    """A whole tensor, and how it is cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    mesh: int | None = None
    """Number in the inventory of the mesh that a DTensor lies on."""

    @property
    def cut(self) -> tuple[object, object]:
        """How it is cut, on whatever mesh."""
        return self.placements, self.mesh_shape


@dataclass(frozen=True)
class Inventory:
    """What a rank owns, by global name: equal on ranks that own alike."""

    tensors: Mapping[str, OwnedTensor]

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for it."""
        return hashlib.sha256(repr(self.tensors).encode()).digest()[:16]


def take_inventory(tensors: Mapping[str, torch.Tensor]) -> tuple[Inventory, Coordinates]:
    """Return what a rank owns and where on its meshes it is; it must be part of them."""
    meshes: dict[DeviceMesh, int] = {}
    owned = {}
    for key, tensor in tensors.items():
        owned[key] = OwnedTensor(tuple(tensor.shape), tensor.dtype)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            cut = tuple(tensor.placements), tuple(mesh.shape), meshes.setdefault(mesh, len(meshes))
            owned[key] = OwnedTensor(tuple(tensor.shape), tensor.dtype, *cut)
    return Inventory(owned), tuple(tuple(mesh.get_coordinate() or ()) for mesh in meshes)


def stored_tensors(
    owners: Sequence[tuple[Inventory, Mapping[int, Coordinates]]], keys: Collection[str] | None = None
) -> dict[str, StoredTensor]:
    """Work out the pieces of all tensors, or of ``keys``, and who writes each: of equal ones the lowest rank.

    Args:
        owners: inventories with the coordinates of the ranks that have them, both by ascending rank.

    Raises:
        CheckpointError: a name does not mean one tensor on all ranks, or its pieces do not make up a whole.
    """
    seen: dict[str, tuple[int, OwnedTensor]] = {}
    pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
    mixed = set()
    for inventory, ranks in owners:
        made: dict[OwnedTensor, dict[tuple[int, ...], Piece]] = {}
        for key, owned in inventory.tensors.items():
            if keys is not None and key not in keys:
                continue
            rank, known = seen.setdefault(key, (min(ranks), owned))
            if (known.shape, known.dtype) != (owned.shape, owned.dtype):
                there, here = f"{known.dtype} {known.shape}", f"{owned.dtype} {owned.shape}"
                raise CheckpointError(f"{key} is {there} on rank {rank} but {here} on rank {min(ranks)}")
            if known.cut != owned.cut:
                mixed.add(key)
            if owned not in made:
                made[owned] = _pieces(owned, ranks)
            pieces[key] = _lowest(pieces[key], made[owned]) if key in pieces else made[owned]
    stored = {}
    for key in sorted(seen):
        ordered = tuple(sorted(pieces[key].values(), key=lambda piece: (piece.rank, piece.offsets)))
        stored[key] = StoredTensor(seen[key][1].dtype, seen[key][1].shape, ordered)
        _check_whole(key, stored[key], cut_differently=key in mixed)
    return stored


def pieces_of(rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
    """Return what a rank would bring to a checkpoint, without any other rank: name -> the piece of it that it holds.

    A name is left out where the rank's piece is empty. Tensors may be on the meta device.
    """
    inventory, coordinates = take_inventory(tensors)
    made = {owned: _pieces(owned, {rank: coordinates}) for owned in {*inventory.tensors.values()}}
    return {key: piece for key, owned in inventory.tensors.items() for piece in made[owned].values()}


def _pieces(owned: OwnedTensor, ranks: Mapping[int, Coordinates]) -> dict[tuple[int, ...], Piece]:
    """Offsets -> piece, of the lowest rank that holds it."""
    lowest: dict[tuple[int, ...], int] = {}
    for rank in sorted(ranks):
        lowest.setdefault(() if owned.mesh is None else ranks[rank][owned.mesh], rank)
    found: dict[tuple[int, ...], Piece] = {}
    for place, rank in lowest.items():
        cut = _compute_local_shape_and_global_offset(owned.shape, owned.mesh_shape, list(place), owned.placements)
        sizes, offsets = map(tuple, cut)
        if 0 not in sizes or 0 in owned.shape:  # of an uneven shard some ranks hold nothing
            found.setdefault(offsets, Piece(rank, offsets, sizes))
    return found


def _lowest(
    one: Mapping[tuple[int, ...], Piece], other: Mapping[tuple[int, ...], Piece]
) -> dict[tuple[int, ...], Piece]:
    return {**one, **{at: piece for at, piece in other.items() if at not in one or piece.rank < one[at].rank}}


def _check_whole(key: str, stored: StoredTensor, *, cut_differently: bool) -> None:
    """Pieces of one cut do not overlap, so that their sizes say whether all are there."""
    total, there = math.prod(stored.shape), sum(math.prod(piece.sizes) for piece in stored.pieces)
    if there != total:
        raise CheckpointError(
            f"{key} has {total} elements but the ranks hold {there} of them in {len(stored.pieces)} "
            "pieces; every rank that owns a part must pass it"
        )
    for one, other in itertools.combinations(stored.pieces if cut_differently else (), 2):
        sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        if all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides):
            raise CheckpointError(f"{key}: the pieces of ranks {one.rank} and {other.rank} overlap without being equal")
