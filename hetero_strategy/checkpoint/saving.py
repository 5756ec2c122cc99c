"""Writes one checkpoint from what every rank owns, now or in the background.

DCP plans who writes which piece (``torch.distributed.checkpoint.DefaultSavePlanner`` knows DTensors of any layout and
drops replicas); files, index and atomic replacement are ours (``folder``), because DCP's own storage pickles. A plan
holds until some rank's tensors are others than they were: DCP's own ``enable_plan_caching`` would still send every
rank's plan at every save, and keeps it in the class.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint.all_or_none import AllOrNone
from hetero_strategy.checkpoint.codec import encode
from hetero_strategy.checkpoint.folder import METADATA, Description, Piece, StoredTensor, rank_stem
from hetero_strategy.checkpoint.tensorfile import Entry, StoredFile, check_dtype, write_tensors
from hetero_strategy.errors import CheckpointError


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
        target, temporary = team.from_first(lambda: _begin(Path(path)))
        told = {METADATA: metadata} if team.rank == 0 else {}
        if rank_state is not None:
            told[f"{rank_stem(team.rank)}.state"] = rank_state
        with _or_discarded(team, temporary):
            described = {key: _described(tensor) for key, tensor in tensors.items()}
            plan, self._plan = self._plan, None  # none on any rank if this save fails on one
            if not team.everywhere(plan is not None and plan.tensors == described):
                plan = _planned(team, tensors, described)
            assert plan is not None
            pieces = _entries(team.rank, plan, tensors)
            self._plan = plan
            values = team.together(lambda: {stem: encode(dict(value)) for stem, value in told.items()})
            if async_:
                pieces = team.together(lambda: _staged(pieces))
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
            raise CheckpointError(
                f"cannot write checkpoint {index.path}: {fault.strerror or fault}; "
                "a previous checkpoint there is untouched"
            ) from fault

    def publish(written: list[dict[str, StoredFile]]) -> list[None]:
        every_file = {name: file for part in written for name, file in part.items()}
        folders.write_index(temporary, dataclasses.replace(index, files=every_file))
        folders.publish(temporary, index.path)
        return [None] * team.size

    with _or_discarded(team, temporary):
        team.centrally(files, publish)


def _begin(path: Path) -> tuple[Path, Path]:
    """Check that a checkpoint may be written to ``path``; return the absolute path and a new temporary folder."""
    path = Path(os.path.abspath(path))
    folders.refuse_foreign(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.delete_leftovers(path)
        temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        temporary.mkdir()
    except OSError as fault:
        raise CheckpointError(f"cannot write checkpoint {path}: {fault.strerror or fault}") from fault
    return path, temporary


@contextmanager
def _or_discarded(team: AllOrNone, temporary: Path) -> Iterator[None]:
    """Delete the temporary folder if something goes wrong."""
    try:
        yield
    except Exception:
        if team.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


class _Planner(DefaultSavePlanner):
    """DCP's plan without empty pieces: of an uneven shard some ranks hold nothing."""

    @override
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if not _is_empty_piece(item)])
        return self.plan


def _is_empty_piece(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.chunk.sizes.numel() == 0 and data.size.numel() > 0


@dataclass(frozen=True)
class _Plan:
    """Who writes what, as long as every rank's tensors are what they were."""

    tensors: Mapping[str, object]
    """What this rank owned: name -> :func:`_described`."""
    items: Sequence[WriteItem]
    """What this rank writes."""
    stored: Mapping[str, StoredTensor]
    """What all ranks write, on rank 0."""


def _described(tensor: object) -> object:
    """Return whatever of a tensor a plan depends on; None for what is no tensor, which no plan holds."""
    if not isinstance(tensor, torch.Tensor):
        return None
    where = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, tensor.layout, tensor.device, *where


def _planned(team: AllOrNone, tensors: Mapping[str, torch.Tensor], described: Mapping[str, object]) -> _Plan:
    """Agree on the pieces that every rank writes."""
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
    stored: dict[str, StoredTensor] = {}

    def local() -> SavePlan:
        for key, tensor in tensors.items():
            _check_owned(key, tensor)
        planner.set_up_planner(dict(tensors), is_coordinator=team.rank == 0)
        return planner.create_local_plan()

    def combine(plans: list[SavePlan]) -> list[SavePlan]:
        stored.update(_stored(plans))
        try:
            return planner.create_global_plan(plans)[0]
        except ValueError as fault:
            raise CheckpointError(f"the ranks' pieces do not make up whole tensors: {fault}") from fault

    return _Plan(described, planner.finish_plan(team.centrally(local, combine)).items, stored)


def _entries(rank: int, plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """Return the pieces that this rank writes, with their values of now."""
    entries = []
    for item in plan.items:
        piece, shape, _ = _piece(rank, item)
        value = find_tensor_shard(tensors[item.index.fqn], item.index)
        entries.append(Entry.of(piece.name(item.index.fqn, shape), value))
    return entries


def _check_owned(key: str, tensor: torch.Tensor) -> None:
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


def _stored(plans: list[SavePlan]) -> dict[str, StoredTensor]:
    """Return what all ranks hold; of equal pieces the lowest rank's.

    Raises:
        CheckpointError: a name does not mean one tensor on all ranks, or its pieces are not all there.
    """
    seen: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    pieces: dict[str, dict[tuple[int, ...], Piece]] = defaultdict(dict)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            piece, shape, dtype = _piece(rank, item)
            key = item.index.fqn
            first, *known = seen.setdefault(key, (rank, shape, dtype))
            if [shape, dtype] != known:
                raise CheckpointError(
                    f"{key} is {known[1]} {known[0]} on rank {first} but {dtype} {shape} on rank {rank}"
                )
            pieces[key].setdefault(piece.offsets, piece)
    stored = {key: StoredTensor(seen[key][2], seen[key][1], tuple(pieces[key].values())) for key in sorted(seen)}
    for key, tensor in stored.items():
        total, there = math.prod(tensor.shape), sum(math.prod(piece.sizes) for piece in tensor.pieces)
        if there != total:
            raise CheckpointError(
                f"{key} has {total} elements but the ranks hold {there} of them in {len(tensor.pieces)} "
                "pieces; every rank that owns a part must pass it"
            )
    return stored


def pieces_of(rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
    """Return what a rank would bring to a checkpoint, without any other rank: name -> the piece of it that it holds.

    A name is left out where the rank's piece is empty. Tensors may be on the meta device.
    """
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    return {item.index.fqn: _piece(rank, item)[0] for item in planner.create_local_plan().items}


def _piece(rank: int, item: WriteItem) -> tuple[Piece, tuple[int, ...], torch.dtype]:
    """Return a planned piece with the shape and dtype of its whole tensor."""
    data = item.tensor_data
    assert data is not None
    return Piece(rank, tuple(data.chunk.offsets), tuple(data.chunk.sizes)), tuple(data.size), data.properties.dtype


def _staged(entries: list[Entry]) -> list[Entry]:
    """Copy the entries to the host, so that training may go on changing the originals."""
    staged = []
    for entry in entries:
        value = entry.get().detach()
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        staged.append(Entry.of(entry.name, host.copy_(value, non_blocking=True)))
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return staged
