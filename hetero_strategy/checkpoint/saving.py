"""Write one checkpoint from what every rank owns, now or in the background.

The files, the index and the atomic replacement are our own (``folder``), because the storage of torch's distributed
checkpoints pickles. The plan of who writes which piece is our own too: torch's planner gathers the names and pieces of
all ranks on one rank, and its cached plan does not notice a changed dtype. Ranks that own equal parts, such as the
instances of a stage, have equal inventories and differ only in their mesh coordinates. So one of these ranks sends the
inventory to all ranks, and every rank sends a digest and its coordinates. A plan is kept until the names, shapes,
dtypes or meshes of some rank's tensors change.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import os
import secrets
import shutil
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint.all_or_none import AllOrNone
from hetero_strategy.checkpoint.boxes import Box, boxes
from hetero_strategy.checkpoint.codec import encode
from hetero_strategy.checkpoint.folder import METADATA, Description, Piece, StoredTensor, rank_stem
from hetero_strategy.checkpoint.tensorfile import Entry, StoredFile, check_dtype, write_tensors
from hetero_strategy.errors import CheckpointError

ALIGNED = 64
"""Alignment in bytes of the copy of every piece: enough for all dtypes, and a line of a processor's cache."""


class Checkpointer:
    """A writer of one checkpoint after another: a save waits for the previous one. Use it from one thread.

    Args:
        process_group: group of the ranks that save; all ranks by default. Background saves need a gloo group that
            nothing else uses: its collectives run in another thread while training goes on.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self._writer = ThreadPoolExecutor(1, "checkpoint")  # a program that ends early still gets its checkpoint
        self._pending: Future[None] | None = None
        self._plan: _Plan | None = None
        self._staging = _Staging()

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, object],
        path: str | os.PathLike[str],
        *,
        rank_state: Mapping[str, object] | None = None,
        async_: bool = False,
    ) -> None:
        """Write the checkpoint ``path`` (a folder, replaced as a whole). Every rank of the group calls it.

        Args:
            tensors: tensors that this rank owns, by global name (``model.<fqn>``, ``optim.<i>.<fqn>.<state>``): plain
                ones or DTensors on any mesh. If several ranks pass one name, the lowest rank writes its copy.
            metadata: all other values of the checkpoint, as :func:`encode` takes them; rank 0's are written. ``epoch``
                and ``global_step`` are also written to the index.
            path: folder of the checkpoint; rank 0's counts.
            rank_state: values of this rank alone, such as its random number states.
            async_: return after copying the pieces to host memory and write them in the background.

        Raises:
            CheckpointError: this or the pending save cannot be written; all ranks raise the same. A previous checkpoint
                at ``path`` is untouched.
        """
        self.finalize()
        if async_ and self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                "a save in the background needs a process group of its own: pass a gloo group of all ranks"
            )
        team = AllOrNone.of(self._group)
        target, temporary = team.from_one(lambda: _begin(Path(path)))
        states = {METADATA: metadata} if team.rank == 0 else {}
        if rank_state is not None:
            states[f"{rank_stem(team.rank)}.state"] = rank_state
        with _or_discarded(temporary):
            owned = team.together(lambda: _checked_inventory(tensors))
            plan, self._plan = self._plan, None  # if this save fails on one rank, no rank keeps a plan
            if not team.everywhere(plan is not None and plan.owned == owned):
                plan = _make_plan(team, *owned)
            assert plan is not None
            local = {key: t.to_local() if isinstance(t, DTensor) else t for key, t in tensors.items()}
            pieces = [Entry.of(name, box.of(local[key])) for key, name, box in plan.items]
            self._plan = plan
            values = team.together(lambda: {stem: encode(dict(state)) for stem, state in states.items()})
            if async_:
                pieces = team.together(lambda: self._staging.copies(pieces))
        epoch, step = (n if isinstance(n := metadata.get(key), int) else None for key in ("epoch", "global_step"))
        to_write = (team, temporary, pieces, values, Description(target, team.size, epoch, step, plan.stored, {}))
        if async_:
            self._pending = self._writer.submit(_write, *to_write)
        else:
            _write(*to_write)

    def finalize(self) -> None:
        """Wait for the pending save, if any. Call it on every rank before removing a checkpoint and at the end.

        Raises:
            CheckpointError: the pending save could not be written; all ranks raise the same.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except Exception as fault:
                raise CheckpointError(str(fault)) from fault


def _write(
    team: AllOrNone,
    temporary: Path,
    pieces: list[Entry],
    values: Mapping[str, tuple[object, list[torch.Tensor]]],
    index: Description,
) -> None:
    """Write the files of this rank, agree with all ranks and publish the folder. A background save reads no live
    tensor.

    Args:
        values: encoded values and their tensors, by file name without ending.
        index: description of the checkpoint, still without files.
    """

    def files() -> dict[str, StoredFile]:
        try:
            temporary.mkdir(exist_ok=True)
            written: dict[str, StoredFile] = {}
            if pieces:
                name = f"{rank_stem(team.rank)}.safetensors"
                written[name] = write_tensors(temporary / name, pieces)
            for stem, (encoded, tensors) in values.items():
                written |= folders.write_values(temporary, stem, encoded, tensors)
            return written
        except OSError as fault:
            gone = " (no other run may save there)" if isinstance(fault, FileNotFoundError) else ""
            raise CheckpointError(
                f"cannot write checkpoint {index.path}: {fault.strerror or fault}{gone}; "
                "a previous checkpoint there is untouched"
            ) from fault

    def publish() -> None:
        every_file = {name: file for part in written for name, file in part.items()}
        try:
            folders.check_files(temporary, every_file)
        except CheckpointError as fault:
            raise CheckpointError(
                f"cannot write checkpoint {index.path}: rank 0 does not see what was written ({fault}); the folder must"
                " lie on a file system that all ranks share, and no other run may save there; a previous checkpoint"
                " there is untouched"
            ) from fault
        folders.write_index(temporary, dataclasses.replace(index, files=every_file))
        folders.publish(temporary, index.path)

    with _or_discarded(temporary):
        written = team.gathered(team.together(files))
        team.from_one(publish)
    folders.unlock(temporary)


def _begin(path: Path) -> tuple[Path, Path]:
    """Check that a checkpoint may be written to ``path``; return the absolute path and a new temporary folder."""
    path = Path(os.path.abspath(path))
    folders.refuse_foreign(path)
    folders.refuse_other_runs(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.delete_leftovers(path)
        temporary = folders.temporary_of(path, secrets.token_hex(4))
        temporary.mkdir()
        folders.lock(temporary)
    except OSError as fault:
        raise CheckpointError(f"cannot write checkpoint {path}: {fault.strerror or fault}") from fault
    return path, temporary


@contextmanager
def _or_discarded(temporary: Path) -> Iterator[None]:
    """Delete the temporary folder if the work inside fails, on whichever rank's file system it is."""
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        folders.unlock(temporary)
        raise


@dataclass(frozen=True)
class _Plan:
    """The pieces that this rank writes, valid while every rank owns the same tensors."""

    owned: tuple[Inventory, Coordinates]
    """Inventory and mesh coordinates of this rank when the plan was made."""
    items: Sequence[tuple[str, str, Box]]
    """Names of tensors, each with the name of a piece of it that this rank writes and its place in the rank's part."""
    stored: Mapping[str, StoredTensor]
    """All tensors of the checkpoint on rank 0; on every other rank its own tensors."""


def _make_plan(team: AllOrNone, inventory: Inventory, coordinates: Coordinates) -> _Plan:
    """Agree on the pieces that every rank writes. Of ranks with equal inventories, one sends its own to all ranks."""
    ranks_of: dict[bytes, dict[int, Coordinates]] = defaultdict(dict)
    for rank, (digest, places) in enumerate(team.shared((inventory.digest, coordinates))):
        ranks_of[digest][rank] = places
    owners = [(team.from_one(lambda: inventory, min(ranks)), ranks) for ranks in ranks_of.values()]
    stored = team.together(lambda: stored_tensors(owners, None if team.rank == 0 else inventory.tensors))
    own = {owned: {box.offsets: box for box in _boxes(owned, coordinates)} for owned in {*inventory.tensors.values()}}
    items = [
        (key, piece.name(key, stored[key].shape), own[owned][piece.offsets])
        for key, owned in inventory.tensors.items()
        for piece in stored[key].pieces
        if piece.rank == team.rank
    ]
    return _Plan((inventory, coordinates), items, stored)


def _checked_inventory(tensors: Mapping[str, torch.Tensor]) -> tuple[Inventory, Coordinates]:
    """Refuse tensors that cannot be saved, and return the inventory and mesh coordinates of this rank."""
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{key} is a {type(tensor).__name__}, not a tensor; put it into the metadata")
        if tensor.is_meta:
            raise CheckpointError(f"{key} is on the meta device: a rank saves only what it owns")
        if tensor.layout is not torch.strided:
            raise CheckpointError(f"{key} has layout {tensor.layout}; a checkpoint holds dense tensors")
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                raise CheckpointError(f"{key} lies on mesh {tensor.device_mesh}, which this rank is not part of")
            if any(placement.is_partial() for placement in tensor.placements):
                raise CheckpointError(f"{key} has placements {tensor.placements}: reduce it before saving")
        check_dtype(key, tensor.dtype)
    return take_inventory(tensors)


class _Staging:
    """A buffer of host memory that every background save copies its pieces to and writes them from.

    Its size is that of the largest save so far. It is page-locked here, because torch would round it up to a power of
    two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copies(self, entries: Sequence[Entry]) -> list[Entry]:
        """Copy the entries to the host, over the copies of the previous save, so that training may change the
        originals.
        """
        values = [entry.get().detach() for entry in entries]
        ends = [*accumulate((-(-entry.nbytes // ALIGNED) * ALIGNED for entry in entries), initial=0)]
        if len(self._bytes) < ends[-1]:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old memory before taking more
            self._bytes = torch.empty(ends[-1], dtype=torch.uint8)
            if any(value.is_cuda for value in values):
                pin_memory(self._bytes.data_ptr(), ends[-1])
                weakref.finalize(self._bytes, unpin_memory, self._bytes.data_ptr()).atexit = False
        staged = []
        for entry, value, start in zip(entries, values, ends[:-1], strict=True):
            host = self._bytes[start : start + entry.nbytes].view(value.dtype).view(value.shape)
            staged.append(Entry.of(entry.name, host.copy_(value, non_blocking=True)))
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return staged


# ---- who writes which piece; pure --------------------------------------------------------------------------------

Coordinates = tuple[tuple[int, ...], ...]
"""Coordinates of a rank on each mesh of its inventory."""


@dataclass(frozen=True)
class OwnedTensor:
    """A whole tensor, and how a mesh cuts it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    mesh: int | None = None
    """Number of the DTensor's mesh in the inventory; None: a plain tensor."""


@dataclass(frozen=True)
class Inventory:
    """The tensors that a rank owns, by global name."""

    tensors: Mapping[str, OwnedTensor]

    @functools.cached_property
    def digest(self) -> bytes:
        """Return 16 bytes that identify the inventory."""
        return hashlib.sha256(repr(self.tensors).encode()).digest()[:16]


def take_inventory(tensors: Mapping[str, torch.Tensor]) -> tuple[Inventory, Coordinates]:
    """Return a rank's inventory and its coordinates on the meshes, all of which it must be part of."""
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
    """Work out the pieces of tensors and which rank writes each: the lowest one that owns it.

    Args:
        owners: each inventory with the coordinates of its ranks, in ascending order of ranks.
        keys: names of the tensors to return; None: all.
    """
    seen: dict[str, tuple[int, OwnedTensor]] = {}
    pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
    mixed = set()
    for inventory, ranks in owners:
        pieces_by_cut: dict[OwnedTensor, dict[tuple[int, ...], Piece]] = {}
        for key, owned in inventory.tensors.items():
            if keys is not None and key not in keys:
                continue
            rank, known = seen.setdefault(key, (min(ranks), owned))
            if (known.shape, known.dtype) != (owned.shape, owned.dtype):
                there, here = f"{known.dtype} {known.shape}", f"{owned.dtype} {owned.shape}"
                raise CheckpointError(f"{key} is {there} on rank {rank} but {here} on rank {min(ranks)}")
            if (known.placements, known.mesh_shape) != (owned.placements, owned.mesh_shape):
                mixed.add(key)
            if owned not in pieces_by_cut:
                pieces_by_cut[owned] = _pieces(owned, ranks)
            own = pieces_by_cut[owned]
            pieces[key] = _of_lowest_ranks(pieces[key], own) if key in pieces else own
    stored = {}
    for key in sorted(seen):
        ordered = tuple(sorted(pieces[key].values(), key=lambda piece: (piece.rank, piece.offsets)))
        stored[key] = StoredTensor(seen[key][1].dtype, seen[key][1].shape, ordered)
        _check_whole(key, stored[key], cut_differently=key in mixed)
    return stored


def pieces_of(rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each tensor that a rank holds, by name, without asking any other rank.

    Names whose pieces are empty are left out. Tensors may be on the meta device.
    """
    inventory, coordinates = take_inventory(tensors)
    pieces = {owned: _pieces(owned, {rank: coordinates}) for owned in {*inventory.tensors.values()}}
    return {key: tuple(pieces[owned].values()) for key, owned in inventory.tensors.items() if pieces[owned]}


def _boxes(owned: OwnedTensor, coordinates: Coordinates) -> list[Box]:
    """Return the boxes of a tensor that the rank with these coordinates holds; none are empty."""
    coordinate = () if owned.mesh is None else coordinates[owned.mesh]
    parts = boxes(owned.shape, owned.mesh_shape, coordinate, owned.placements)
    return [box for box in parts if 0 not in box.sizes or 0 in owned.shape]  # an uneven shard leaves ranks without one


def _pieces(owned: OwnedTensor, ranks: Mapping[int, Coordinates]) -> dict[tuple[int, ...], Piece]:
    """Return the pieces of a tensor by their offsets, each with the lowest rank that holds it."""
    lowest: dict[tuple[int, ...], int] = {}
    for rank in sorted(ranks):
        lowest.setdefault(() if owned.mesh is None else ranks[rank][owned.mesh], rank)
    pieces: dict[tuple[int, ...], Piece] = {}
    for rank in lowest.values():
        for box in _boxes(owned, ranks[rank]):
            pieces.setdefault(box.offsets, Piece(rank, box.offsets, box.sizes))
    return pieces


def _of_lowest_ranks(
    left: Mapping[tuple[int, ...], Piece], right: Mapping[tuple[int, ...], Piece]
) -> dict[tuple[int, ...], Piece]:
    return {**left, **{at: piece for at, piece in right.items() if at not in left or piece.rank < left[at].rank}}


def _check_whole(key: str, stored: StoredTensor, *, cut_differently: bool) -> None:
    """Refuse pieces that do not fill their tensor. Pieces of one cut never overlap, so counting elements suffices. Only
    pieces of a tensor that ranks cut differently are compared pair by pair.
    """
    total, covered = math.prod(stored.shape), sum(math.prod(piece.sizes) for piece in stored.pieces)
    if covered != total:
        raise CheckpointError(
            f"{key} has {total} elements but the ranks hold {covered} of them in {len(stored.pieces)} "
            "pieces; every rank that owns a part must pass it"
        )
    for a, b in itertools.combinations(stored.pieces if cut_differently else (), 2):
        sides = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
        if all(max(start, begin) < min(start + m, begin + n) for start, m, begin, n in sides):
            raise CheckpointError(f"{key}: the pieces of ranks {a.rank} and {b.rank} overlap without being equal")
