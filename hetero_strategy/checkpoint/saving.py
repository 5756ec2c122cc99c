"""Writes one checkpoint from what every rank owns, now or in the background.

Files, index and atomic replacement are ours (``folder``), because the storage of torch's DCP pickles, and so is the
plan of who writes which piece (``inventory``), because DCP sends every rank's names and pieces to one rank. A plan
holds until some rank's tensors are others than they were.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.tensor import DTensor

from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint.all_or_none import AllOrNone
from hetero_strategy.checkpoint.codec import encode
from hetero_strategy.checkpoint.folder import METADATA, Description, StoredTensor, rank_stem
from hetero_strategy.checkpoint.inventory import Coordinates, Inventory, stored_tensors, take_inventory
from hetero_strategy.checkpoint.tensorfile import Entry, StoredFile, check_dtype, write_tensors
from hetero_strategy.errors import CheckpointError

ALIGNED = 64
"""Bytes that the copy of every piece begins at a multiple of: all dtypes, and a line of a processor's cache."""


class Checkpointer:
    """Saves one checkpoint after another: a save waits for the one before. Not for several threads.

    Args:
        process_group: the ranks that save; all by default. Saves in the background need a gloo group that nothing else
            uses: its collectives run in another thread while training goes on.
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
            tensors: what this rank owns under global names (``model.<fqn>``, ``optim.<i>.<fqn>.<state>``): plain
                tensors or DTensors on any mesh. Of equal copies of a plain tensor the lowest rank's is written.
            metadata: everything else that :func:`encode` takes; rank 0's is written. ``epoch`` and ``global_step`` also
                go to the index.
            path: rank 0's is used.
            rank_state: what this rank alone knows, such as its random number states.
            async_: return after copying the pieces to host memory and write them in the background.

        Raises:
            CheckpointError: this or the pending save cannot be written, on all ranks alike; a previous checkpoint at
                ``path`` is untouched.
        """
        self.finalize()
        if async_ and self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                "a save in the background needs a process group of its own: pass a gloo group of all ranks"
            )
        team = AllOrNone.of(self._group)
        target, temporary = team.from_one(lambda: _begin(Path(path)))
        told = {METADATA: metadata} if team.rank == 0 else {}
        if rank_state is not None:
            told[f"{rank_stem(team.rank)}.state"] = rank_state
        with _or_discarded(temporary):
            owned = team.together(lambda: _taken(tensors))
            plan, self._plan = self._plan, None  # none on any rank if this save fails on one
            if not team.everywhere(plan is not None and plan.owned == owned):
                plan = _planned(team, *owned)
            assert plan is not None
            pieces = _entries(plan, tensors)
            self._plan = plan
            values = team.together(lambda: {stem: encode(dict(value)) for stem, value in told.items()})
            if async_:
                pieces = team.together(lambda: self._staging.copies(pieces))
        epoch, step = (n if isinstance(n := metadata.get(key), int) else None for key in ("epoch", "global_step"))
        left = (team, temporary, pieces, values, Description(target, team.size, epoch, step, plan.stored, {}))
        if async_:
            self._pending = self._writer.submit(_write, *left)
        else:
            _write(*left)

    def finalize(self) -> None:
        """Wait for the pending save, if any. Call it on every rank before removing a checkpoint and at the end.

        Raises:
            CheckpointError: it could not be written, on all ranks alike.
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
    """What is left to do once nothing depends on the live tensors any more: write, agree, publish.

    Args:
        values: file name without ending -> encoded values and their tensors.
        index: the checkpoint to be, as yet without files.
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

    def publish(written: list[dict[str, StoredFile]]) -> list[None]:
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
        return [None] * team.size

    with _or_discarded(temporary):
        team.centrally(files, publish)
    folders.let_go(temporary)


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
        folders.hold(temporary)
    except OSError as fault:
        raise CheckpointError(f"cannot write checkpoint {path}: {fault.strerror or fault}") from fault
    return path, temporary


@contextmanager
def _or_discarded(temporary: Path) -> Iterator[None]:
    """Delete the temporary folder if something goes wrong, wherever a rank has made it."""
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        folders.let_go(temporary)
        raise


@dataclass(frozen=True)
class _Plan:
    """Who writes what, as long as every rank's tensors are what they were."""

    owned: tuple[Inventory, Coordinates]
    """What this rank owned, and where."""
    items: Sequence[tuple[str, str]]
    """What this rank writes: names of tensors and of this rank's pieces of them."""
    stored: Mapping[str, StoredTensor]
    """What all ranks write, on rank 0; on others what they own."""


def _planned(team: AllOrNone, inventory: Inventory, coordinates: Coordinates) -> _Plan:
    """Agree on the pieces that every rank writes. Of ranks that own alike one sends its inventory."""
    owners: dict[bytes, dict[int, Coordinates]] = defaultdict(dict)
    for rank, (digest, places) in enumerate(team.shared((inventory.digest, coordinates))):
        owners[digest][rank] = places
    said = [(team.from_one(lambda: inventory, min(ranks)), ranks) for ranks in owners.values()]
    stored = team.together(lambda: stored_tensors(said, None if team.rank == 0 else inventory.tensors))
    items = [
        (key, piece.name(key, stored[key].shape))
        for key in inventory.tensors
        for piece in stored[key].pieces
        if piece.rank == team.rank
    ]
    return _Plan((inventory, coordinates), items, stored)


def _entries(plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """Return the pieces that this rank writes, with their values of now."""
    owned = {key: t.to_local() if isinstance(t, DTensor) else t for key, t in tensors.items()}
    return [Entry.of(name, owned[key]) for key, name in plan.items]


def _taken(tensors: Mapping[str, torch.Tensor]) -> tuple[Inventory, Coordinates]:
    """Refuse tensors that cannot be saved, and return what this rank owns and where."""
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
    """Memory of the host that one save in the background after another copies to, and then writes from.

    It is of exactly the bytes of the largest one: what torch page-locks by itself it rounds up to a power of two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copies(self, entries: Sequence[Entry]) -> list[Entry]:
        """Copy the entries to the host, so that training may go on changing the originals. Of a save before nothing
        may be needed any more.
        """
        values = [entry.get().detach() for entry in entries]
        ends = [*accumulate((-(-entry.nbytes // ALIGNED) * ALIGNED for entry in entries), initial=0)]
        if len(self._bytes) < ends[-1]:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # which lets go of it before more is taken
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
