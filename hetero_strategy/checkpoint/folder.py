"""The files of a checkpoint's folder, and how a new checkpoint replaces an old one.

    checkpoint.json             index: every tensor's dtype, shape and pieces; every file's size and checksums; at the
                                end its own checksum. It is written last: a folder is complete if and only if it has an
                                index and all files have their sizes
    rank-00000.safetensors      the pieces that rank 0 wrote, and so on for every rank
    metadata.json, metadata.safetensors                  everything that is not a parameter, in the form of ``codec``
    rank-00000.state.json, rank-00000.state.safetensors  the state of one rank alone (random number states)

A save writes ``<path>.tmp-<token>``, moves a present ``<path>`` to ``<path>.old``, moves the new folder in and deletes
``<path>.old``. Killed at any moment it leaves ``<path>`` or ``<path>.old`` complete, and :func:`describe` finds which.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_strategy.checkpoint.codec import damage, decode
from hetero_strategy.checkpoint.tensorfile import (
    DTYPE_NAMES,
    Entry,
    StoredFile,
    TensorReader,
    damaged,
    write_tensors,
)
from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.hf_folder import DTYPES

INDEX = "checkpoint.json"
METADATA = "metadata"
FORMAT = "hetero_strategy"
VERSION = 2
_OURS = re.compile(r"(checkpoint\.json(\.part)?|(metadata|rank-\d{5,}(\.state)?)\.(json|safetensors))$")
_TEMPORARY = re.compile(r"(?P<path>.+)\.(tmp-[0-9a-f]+|old)$")


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, in the file of the rank that wrote it."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def name(self, key: str, shape: tuple[int, ...]) -> str:
        """Return the piece's name inside its file; a whole tensor keeps its own."""
        return key if self.sizes == shape else f"{key}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. Its pieces do not overlap and fill ``shape``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Description:
    """The contents of the index of a checkpoint, without its tensors."""

    path: Path
    world_size: int
    epoch: int | None
    step: int | None
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]

    @property
    def nbytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(file.nbytes for file in self.files.values())


def describe(path: str | os.PathLike[str]) -> Description:
    """Find the complete checkpoint of a path: the folder itself, or ``<path>.old`` after a killed save.

    The path of a killed save's temporary folder stands for the checkpoint that it was to replace. Only the index is
    read, in this process alone.

    Raises:
        CheckpointError: no checkpoint is complete; the message says what is wrong with ``path``.
    """
    path = Path(path)
    candidates = [path, old_of(path)]
    if (base := _replaced_by(path)) is not None:
        candidates += [base, old_of(base)]
    for candidate in candidates:
        with suppress(_Incomplete):
            return read_index(candidate)
    return read_index(path)  # raises what is wrong with it


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, if there is one, and the temporary folders of killed saves to it. Call it in one process.

    Raises:
        CheckpointError: ``path`` is not a checkpoint of this library, or cannot be deleted.
    """
    path = Path(path)
    refuse_foreign(path)
    try:
        delete_leftovers(path)
        _delete(old_of(path))  # before ``path``, or it would take its place
        _delete(path)
    except OSError as fault:
        raise CheckpointError(f"{path}: cannot delete the checkpoint: {fault.strerror}") from fault


def old_of(path: Path) -> Path:
    """Return the path of the checkpoint at ``path`` while its successor moves in."""
    return path.with_name(path.name + ".old")


def temporary_of(path: Path, token: str) -> Path:
    """Return the folder in which a save to ``path`` is written.

    Its name does not contain ``ckpt_``, because Lightning resumes from the folder with the greatest number after that.
    """
    return path.with_name(f"{path.name.replace('ckpt_', 'ckpt~')}.tmp-{token}")


def _replaced_by(temporary: Path) -> Path | None:
    """Return the path whose checkpoint a temporary or old folder belongs to; None for any other folder."""
    name = _TEMPORARY.match(temporary.name)
    return None if name is None else temporary.with_name(name["path"].replace("ckpt~", "ckpt_"))


def rank_stem(rank: int) -> str:
    """Return the name, without ending, of the files that a rank writes."""
    return f"rank-{rank:05d}"


def refuse_foreign(path: Path) -> None:
    """Raise CheckpointError if a save or a removal would destroy files that are not ours.

    Files whose names begin with a dot do not count inside a checkpoint: file systems and desktops leave them anywhere.
    """
    if path.is_dir():
        names = os.listdir(path)
        if foreign := [n for n in names if not _OURS.match(n) and not (INDEX in names and n.startswith("."))]:
            raise CheckpointError(
                f"{path} is not a checkpoint of hetero_strategy: it holds {min(foreign)!r}; choose another path"
            )
    elif path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} is a file; a checkpoint of hetero_strategy is a folder: choose another path")


def refuse_other_runs(path: Path) -> None:
    """Raise CheckpointError if another run has replaced the checkpoint that this process saved at ``path``.

    Two runs that share a folder would go on replacing each other's checkpoints. A damaged or missing checkpoint is
    replaced.
    """
    if path not in _seals or _seal(path) == _seals[path]:
        return
    try:
        step = read_index(path).step
    except CheckpointError:
        return
    raise CheckpointError(f"{path}: another run has saved step {step} there since this one saved; {OWN_FOLDER}")


class _Incomplete(CheckpointError):
    """An error for the folder that a killed save or removal leaves, as opposed to a damaged checkpoint."""


def read_index(folder: Path) -> Description:
    """Read the index of a folder and check that every file has its full length."""
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; a checkpoint of hetero_strategy is a folder (never a pickle)")
    if not folder.is_dir():
        raise _Incomplete(f"no checkpoint at {folder}")
    try:
        data = (folder / INDEX).read_bytes()
    except FileNotFoundError:
        inside = sorted(str(index.parent) for depth in ("*", "*/*") for index in folder.glob(f"{depth}/{INDEX}"))
        hint = (
            f"give one of those in it: {', '.join(inside)}" if inside else "or one whose save or removal was cut short"
        )
        raise _Incomplete(f"{folder} has no {INDEX}: not a checkpoint of hetero_strategy, {hint}") from None
    except OSError as fault:
        raise CheckpointError(f"{folder / INDEX}: cannot be read: {fault}") from fault
    index = _parse_index(data, folder / INDEX)
    check_files(folder, index.files)
    return index


def check_files(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Raise CheckpointError unless every file exists and has its full length."""
    for name, file in files.items():
        try:
            nbytes = os.path.getsize(folder / name)
        except OSError as fault:
            raise _Incomplete(f"{folder / name}: {fault.strerror}; the checkpoint is not complete") from fault
        if nbytes != file.nbytes:
            raise CheckpointError(
                f"{folder / name} has {nbytes} bytes instead of {file.nbytes}; the checkpoint is damaged"
            )


def write_index(folder: Path, index: Description) -> None:
    """Write the index, which declares the folder complete."""
    tensors = {
        key: {
            "dtype": DTYPE_NAMES[stored.dtype],
            "shape": stored.shape,
            "pieces": [[piece.rank, piece.offsets, piece.sizes] for piece in stored.pieces],
        }
        for key, stored in index.tensors.items()
    }
    content = {
        "format": FORMAT,
        "version": VERSION,
        "world_size": index.world_size,
        "epoch": index.epoch,
        "step": index.step,
        "files": {name: [file.nbytes, file.checksums] for name, file in index.files.items()},
        "tensors": tensors,
    }
    body = _json(content)[:-1]
    _write(folder / f"{INDEX}.part", body + _own_checksum(body))
    os.rename(folder / f"{INDEX}.part", folder / INDEX)
    _sync(folder)


def _own_checksum(body: bytes) -> bytes:
    """Return the last field and closing brace of an index whose other bytes are ``body``."""
    return b',"crc32":"%08x"}' % zlib.crc32(body)


def _parse_index(data: bytes, file: Path) -> Description:
    with damage(file):
        content = json.loads(data)
        version = content["version"]
        if content["format"] != FORMAT or version != VERSION:
            older = "; load it with version 0.1 and save it again" if version == 1 else ""
            raise CheckpointError(
                f"{file} is of format {content['format']!r} version {version!r}, "
                f"this library reads {FORMAT!r} version {VERSION}{older}"
            )
        body = data[: -len(_own_checksum(b""))]
        if not data.endswith(_own_checksum(body)):
            raise CheckpointError(damaged(file, "it"))
        tensors = {
            key: StoredTensor(
                DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                tuple(Piece(int(rank), tuple(offsets), tuple(sizes)) for rank, offsets, sizes in entry["pieces"]),
            )
            for key, entry in content["tensors"].items()
        }
        files = {name: StoredFile(nbytes, tuple(checksums)) for name, (nbytes, checksums) in content["files"].items()}
        # the index may come from anyone: no file name may lead out of the folder
        if not all(_OURS.match(name) for name in files):
            raise ValueError(f"files {sorted(files)}")
        return Description(file.parent, int(content["world_size"]), content["epoch"], content["step"], tensors, files)


def write_values(folder: Path, stem: str, encoded: object, tensors: list[torch.Tensor]) -> dict[str, StoredFile]:
    """Write a value and its tensors, as ``codec.encode`` returns them; return the files by name."""
    files = {f"{stem}.json": _write(folder / f"{stem}.json", _json(encoded))}
    if tensors:
        entries = [Entry.of(str(number), tensor) for number, tensor in enumerate(tensors)]
        files[f"{stem}.safetensors"] = write_tensors(folder / f"{stem}.safetensors", entries)
    return files


def read_values(index: Description, stem: str) -> Any:
    """Read a value that :func:`write_values` wrote, with all checks; return None if the checkpoint has no such file."""
    if f"{stem}.json" not in index.files:
        return None
    file = index.path / f"{stem}.json"
    with damage(file):
        data = file.read_bytes()
        if zlib.crc32(data) != index.files[file.name].checksums[0]:
            raise CheckpointError(damaged(file, "it"))
        encoded = json.loads(data)
    tensors: list[torch.Tensor] = []
    if f"{stem}.safetensors" in index.files:
        with TensorReader(index.path, index.files) as reader:
            names = reader.names(f"{stem}.safetensors")
            tensors = [reader.read(f"{stem}.safetensors", str(number)).clone() for number in range(len(names))]
    return decode(encoded, tensors)


def publish(written: Path, path: Path) -> None:
    """Move a complete folder to ``path``; at any moment :func:`describe` finds the new checkpoint or the one before."""
    old = old_of(path)
    if path.exists():
        try:
            read_index(path)
        except CheckpointError:
            _delete(path)  # the complete checkpoint, if any, is ``old``: keep it until the new one is in place
        else:
            _delete(old)
            os.rename(path, old)
    os.rename(written, path)
    _seals[path] = _seal(path)
    _sync(path.parent)
    try:
        _delete(old)
    except OSError as fault:
        warnings.warn(f"{old}, which {path} replaced, cannot be deleted yet: {fault.strerror}", stacklevel=2)


def delete_leftovers(path: Path) -> None:
    """Delete the temporary folders of killed saves to ``path``; refuse while another process saves there."""
    for folder in path.parent.glob("*.tmp-*"):
        if _replaced_by(folder) != path:
            continue
        with suppress(FileNotFoundError):
            os.close(_locked(folder))
            _delete(folder)


_seals: dict[Path, bytes] = {}
"""Checksums of the indexes that this process has saved, by path."""


def _seal(path: Path) -> bytes:
    """Return the checksum at the end of an index; empty if there is no index."""
    with suppress(OSError):
        return (path / INDEX).read_bytes()[-len(_own_checksum(b"")) :]
    return b""


OWN_FOLDER = "two runs would take each other's checkpoints: give each a folder of its own"
_handles: dict[Path, int] = {}
"""Handles of the temporary folders that this process has locked."""


def lock(temporary: Path) -> None:
    """Keep other processes from deleting a temporary folder, until :func:`unlock` or the end of this process."""
    _handles[temporary] = _locked(temporary)


def unlock(temporary: Path) -> None:
    """Undo :func:`lock`, if this process has locked the folder."""
    if temporary in _handles:
        handle = _handles.pop(temporary)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a worker that was forked meanwhile has the handle too
        os.close(handle)


def _locked(folder: Path) -> int:
    """Return the handle that locks a folder, if the file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CheckpointError(f"{folder}: another process is saving there now; {OWN_FOLDER}") from None
    except OSError:  # the file system has no such locks
        pass
    return handle


def _delete(folder: Path) -> None:
    # If this process is killed on the way, the folder lacks a file of its index, and read_index refuses it.
    if folder.is_symlink():  # from ModelCheckpoint(save_last="link"): the target is another checkpoint
        folder.unlink()
    elif folder.is_dir():
        shutil.rmtree(folder)


def _json(content: object) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _write(file: Path, data: bytes) -> StoredFile:
    with open(file, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return StoredFile(len(data), (zlib.crc32(data),))


def _sync(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
