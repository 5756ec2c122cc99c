"""Safetensors files: written one tensor at a time, read by slices.

The writer is our own because the library's takes all tensors as host copies at once, which would double the host memory
of a save; the format is eight bytes of header length, a JSON header and the raw bytes
(https://huggingface.co/docs/safetensors). Reading goes through the library, which checks the header against the file.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hetero_strategy.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor to write. `get` is called once, when its bytes are due, so that only one full tensor is alive."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], torch.Tensor]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Entry:
        """An entry of a tensor that exists already."""
        return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(path: Path, entries: Iterable[Entry]) -> int:
    """Writes and syncs a safetensors file and returns its size in bytes.

    Raises:
        OSError: it could not be written. CheckpointError: a dtype that safetensors does not have.
    """
    # wide dtypes first keep every tensor aligned to its item size, which readers that map the file need
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
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in ordered:
            tensor = entry.get()
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise RuntimeError(f"{entry.name}: {tensor.dtype} {tuple(tensor.shape)}, promised {entry}")
            if entry.nbytes:
                flat = tensor.detach().to("cpu").contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises CheckpointError where safetensors has no such dtype."""
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name}: {dtype} cannot be stored in safetensors; cast it to one of {sorted(DTYPES)}")


class TensorReader:
    """Slices of tensors in the safetensors files of a folder; every file is opened (mapped) once. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()
        self._stack.close()

    def names(self, file: str) -> list[str]:
        """Names of the tensors in a file."""
        return list(self._opened(file).keys())

    def read(self, file: str, name: str, offsets: Sequence[int] = (), sizes: Sequence[int] = ()) -> torch.Tensor:
        """`tensor[offsets : offsets + sizes]` on the host; a whole tensor where `sizes` is empty.

        Raises:
            CheckpointError: the file is missing, damaged or lacks the tensor.
        """
        opened = self._opened(file)
        try:
            if not sizes:
                return opened.get_tensor(name)
            window = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            return opened.get_slice(name)[window]
        except (SafetensorError, OSError) as fault:
            raise self._unreadable(file, f"cannot read {name!r}: {fault}") from fault

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            try:
                opened = safe_open(self._folder / file, framework="pt", device="cpu")
                self._open[file] = self._stack.enter_context(opened)
            except (SafetensorError, OSError) as fault:
                raise self._unreadable(file, f"cannot be opened: {fault}") from fault
        return self._open[file]

    def _unreadable(self, file: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder / file}: {what}. The file is damaged or not visible to this rank "
            "(is the folder on a file system that all ranks share?)"
        )
