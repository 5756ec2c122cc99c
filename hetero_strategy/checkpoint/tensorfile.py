"""Safetensors files: written one tensor at a time, read by slices, with a checksum for every byte.

The writer is our own, because the library's takes all tensors as host copies at once, which would double the host
memory of a save. The format is eight bytes of header length, a JSON header and the raw bytes
(https://huggingface.co/docs/safetensors). The library reads, and checks the header against the file.

Checksums are zlib's CRC-32, computed while the bytes are written: one for the header and one for every block of every
tensor. So the reader of a slice checks only the blocks that it touches.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.hf_folder import DTYPES, SafetensorFiles

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

BLOCK = 4 * 2**20
"""Size in bytes of a block of a tensor, which has one checksum; the last block may be shorter. Part of the format."""
HEADER_LIMIT = 100_000_000
"""Greatest size in bytes of a header that the library reads; a damaged length must not ask for all memory."""


@dataclass(frozen=True)
class StoredFile:
    """The size and checksums of a file, as listed in the index."""

    nbytes: int
    checksums: tuple[int, ...]
    """The checksum of the head (a safetensors header with its length, or a whole JSON file), then those of the tensors'
    blocks in file order."""


@dataclass(frozen=True)
class Entry:
    """A tensor to write. ``get`` is called once, when its bytes are due, so that only one full tensor is alive."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], torch.Tensor]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Entry:
        """Return the entry of a tensor that exists already."""
        return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(path: Path, entries: Iterable[Entry]) -> StoredFile:
    """Write and sync a safetensors file.

    Raises:
        OSError: the file could not be written.
        CheckpointError: safetensors does not have a dtype.
    """
    # readers that map the file need every tensor aligned to its item size: wide dtypes come first
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        check_dtype(entry.name, entry.dtype)
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    checksums = [zlib.crc32(head)]
    with open(path, "wb") as file:
        file.write(head)
        for entry in ordered:
            tensor = entry.get()
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise RuntimeError(f"{entry.name}: {tensor.dtype} {tuple(tensor.shape)}, promised {entry}")
            data = bytes_of(tensor.detach().to("cpu").contiguous())
            for start in range(0, entry.nbytes, BLOCK):
                block = data[start : start + BLOCK]
                checksums.append(zlib.crc32(block))
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return StoredFile(file.tell(), tuple(checksums))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise CheckpointError if safetensors has no such dtype."""
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name}: {dtype} cannot be stored in safetensors; cast it to one of {sorted(DTYPES)}")


class TensorReader(SafetensorFiles):
    """A reader of slices from the files that an index lists. Headers are always checked, blocks with ``verify``."""

    def __init__(self, folder: Path, files: Mapping[str, StoredFile], *, verify: bool = True) -> None:
        super().__init__(folder)
        self._files = files
        self._verify = verify
        self._first_blocks: dict[str, dict[str, int]] = {}

    def names(self, file: str) -> list[str]:
        """Return the names of the tensors in a file."""
        return list(self._checked(file).keys())

    def read(self, file: str, name: str, offsets: Sequence[int] = (), sizes: Sequence[int] = ()) -> torch.Tensor:
        """Read ``tensor[offsets : offsets + sizes]`` to the host, or the whole tensor if ``sizes`` is empty."""
        opened = self._checked(file)
        try:
            whole: torch.Tensor = opened.get_tensor(name)  # a view of the mapped file: nothing is read yet
        except (SafetensorError, OSError) as fault:
            raise self._unreadable(file, f"cannot read {name!r}: {fault}") from fault
        first, end = 0, whole.numel()  # the elements from the slice's first to its last
        window = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if window:
            first = sum(part.start * step for part, step in zip(window, whole.stride(), strict=True))
            end = 1 + sum((part.stop - 1) * step for part, step in zip(window, whole.stride(), strict=True))
        if self._verify and end > first:
            self._check(file, name, whole, first * whole.itemsize, end * whole.itemsize)
        return whole[window] if window else whole

    def _check(self, file: str, name: str, whole: torch.Tensor, start: int, end: int) -> None:
        """Compare the checksums of the blocks that hold a tensor's bytes from ``start`` to ``end``."""
        data, checksums = bytes_of(whole), self._files[file].checksums
        for number in range(start // BLOCK, -(-end // BLOCK)):
            block = data[number * BLOCK : (number + 1) * BLOCK]
            if zlib.crc32(block) != checksums[self._first_blocks[file][name] + number]:
                span = f"bytes {number * BLOCK} to {number * BLOCK + len(block)}"
                raise CheckpointError(damaged(self.folder / file, f"{span} of {name!r}"))

    def _checked(self, file: str) -> Any:
        if file not in self._files:
            raise self._unreadable(file, "is no file of the checkpoint")
        try:
            if file not in self._first_blocks:
                self._first_blocks[file] = self._read_header(file)
            return self.opened(file)
        except (SafetensorError, OSError) as fault:
            raise self._unreadable(file, f"cannot be opened: {fault}") from fault

    def _read_header(self, file: str) -> dict[str, int]:
        """Check the header of a file; return the index of each tensor's first checksum, by name."""
        with open(self.folder / file, "rb") as stream:
            head = stream.read(8)
            head += stream.read(min(int.from_bytes(head, "little"), HEADER_LIMIT))
        if zlib.crc32(head) != self._files[file].checksums[0]:
            raise CheckpointError(damaged(self.folder / file, "its header"))
        spans = {name: entry["data_offsets"] for name, entry in json.loads(head[8:]).items() if name != "__metadata__"}
        numbers, number = {}, 1
        for name, (start, end) in sorted(spans.items(), key=lambda span: span[1]):
            numbers[name] = number
            number += -(-(end - start) // BLOCK)
        return numbers

    def _unreadable(self, file: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / file}: {what}. The file is damaged or not visible to this rank "
            "(is the folder on a file system that all ranks share?)"
        )


def damaged(path: Path, what: str) -> str:
    """Return the message for bytes that differ from those written."""
    return (
        f"{path} is damaged: {what} changed since it was written (the checksum differs); restore the file from a copy, "
        "or load another checkpoint"
    )
