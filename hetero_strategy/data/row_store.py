"""Rows of items on disk: written once, only appended to, and read by any number of processes.

A folder holds segments. A segment is two files that one process writes: ``<name>.rows`` has rows of items end to end,
``<name>.index`` a record of fixed size for each item, which follows its rows. Nothing is locked, changed or removed, so
several runs may share a folder on any file system, and a person may delete any of it. A record that is not whole is not
there, and rows whose checksum does not hold are not there either: a process may be killed at any time.
"""

from __future__ import annotations

import os
import time
import uuid
import zlib
from collections.abc import Sequence
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

RECORD = np.dtype({
    "names": ["key", "offset", "rows", "width", "dtype", "sum", "check"],
    "formats": [("<u8", 2), "<u8", "<u4", "<u4", "<u4", "<u4", "<u8"],
})  # fmt: skip
"""Of one item: its key, the place of its rows in bytes, how many they are and how wide, the number of their dtype in
:data:`DTYPES`, the CRC32 of their bytes, and what makes all words of the record :data:`WHOLE` by exclusive or."""
WHOLE = np.uint64(0x726F7773_6F6E6365)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Found(NamedTuple):
    """What is known of some items."""

    hit: np.ndarray
    """bool ``[n]``: whose rows were read."""
    rows: torch.Tensor
    """Rows of these, end to end, ``[R, width]``."""


class RowStore:
    """Reads rows of items from all segments of a folder, as far as :meth:`refresh` has seen them.

    It takes 64 bytes of memory for each item. When it is pickled, only the folder goes along.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, int] = {}
        self._names: list[str] = []
        self._known = np.zeros(0, RECORD)
        self._segment = np.zeros(0, np.int64)
        self._first = np.zeros(0, np.uint64)
        self._open = lru_cache(maxsize=64)(lambda name: FileIO(folder / f"{name}.rows"))

    def __reduce__(self) -> tuple[type[RowStore], tuple[Path]]:
        return RowStore, (self.folder,)

    def __len__(self) -> int:
        """Items that are there."""
        return len(self._known)

    def refresh(self) -> None:
        """Look for records that were written since the last time."""
        new, segments = [self._known], [self._segment]
        for path in sorted(self.folder.glob("*.index")):
            read = self._seen.get(path.stem, 0)
            records = _records(path, read)
            if not len(records):
                continue
            if not read:
                self._names.append(path.stem)
            self._seen[path.stem] = read + len(records)
            records = records[np.bitwise_xor.reduce(_words(records), axis=1) == WHOLE]
            new.append(records)
            segments.append(np.full(len(records), self._names.index(path.stem)))
        if len(new) == 1:
            return
        known, segment = np.concatenate(new), np.concatenate(segments)
        order = np.lexsort((known["key"][:, 1], known["key"][:, 0]))
        keys = known["key"][order]
        once = order[np.append((keys[1:] != keys[:-1]).any(axis=1), True)] if len(order) else order  # the latest one
        self._known, self._segment = known[once], segment[once]
        self._first = self._known["key"][:, 0].copy()

    def read(self, keys: np.ndarray, rows: np.ndarray) -> Found:
        """Rows of items, of those that are there with as many rows as are expected.

        Args:
            keys: uint64 ``[n, 2]``, hashes: of those that share their first word only one is looked for.
            rows: expected of each, int64 ``[n]``.
        """
        at = np.searchsorted(self._first, keys[:, 0])
        hit = at < len(self._known)
        records = self._known[at[hit]]
        hit[hit] = (records["key"] == keys[hit]).all(axis=1) & (records["rows"] == rows[hit])
        records = self._known[at[hit]]
        alike = (records["dtype"] == records["dtype"][:1]) & (records["width"] == records["width"][:1])
        hit[hit], records = alike, records[alike]
        if not len(records):
            return Found(hit, torch.zeros(0, 0, dtype=torch.float32))
        dtype, width = DTYPES[int(records["dtype"][0])], int(records["width"][0])
        counts = records["rows"].astype(np.int64)
        values = torch.empty((int(counts.sum()), width), dtype=dtype)
        data, ends = values.reshape(-1).view(torch.uint8).numpy(), np.cumsum(counts * width * dtype.itemsize).tolist()
        whole = np.array(
            [
                self._reads(self._names[segment], data[begin:end], int(record["offset"]), int(record["sum"]))
                for segment, record, begin, end in zip(self._segment[at[hit]], records, [0, *ends], ends, strict=False)
            ]
        )
        if not whole.all():
            values = values[torch.from_numpy(np.repeat(whole, counts))]
            hit[hit] = whole
        return Found(hit, values)

    def _reads(self, segment: str, into: np.ndarray, offset: int, checksum: int) -> bool:
        """Whether bytes of an item's rows can be read, and are those that were written."""
        try:
            count = os.preadv(self._open(segment).fileno(), [into.data], offset)
        except OSError:
            return False
        return count == len(into) and zlib.crc32(into.data) == checksum


class RowSegment:
    """Appends rows of items to a segment of its own, which exists from the first ones on."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._offset = folder, 0
        self._name = f"{time.time_ns():020}-{uuid.uuid4().hex}"
        self._rows: FileIO | None = None
        self._index: FileIO | None = None

    def append(self, keys: np.ndarray, rows: Sequence[torch.Tensor]) -> int:
        """Write items; the bytes that were written.

        Args:
            keys: uint64 ``[n, 2]``.
            rows: of each item, ``[R, width]``, contiguous and on the host.

        Raises:
            OSError: the disk is full, or the folder is gone. Nothing can be appended after that.
        """
        if self._rows is None or self._index is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._rows = FileIO(self._folder / f"{self._name}.rows", "x")
            self._index = FileIO(self._folder / f"{self._name}.index", "x")
        records, began = np.zeros(len(keys), RECORD), self._offset
        for record, values in zip(records, rows, strict=True):
            data = values.reshape(-1).view(torch.uint8).numpy()
            _write(self._rows, data.data)
            record["offset"], record["sum"] = self._offset, zlib.crc32(data.data)
            record["rows"], record["width"] = values.shape
            record["dtype"] = DTYPES.index(values.dtype)
            self._offset += len(data)
        records["key"] = keys
        records["check"] = np.bitwise_xor.reduce(_words(records), axis=1) ^ WHOLE
        _write(self._index, records.view(np.uint8).data)
        return self._offset - began

    def close(self) -> None:
        """Close the files."""
        for file in (self._rows, self._index):
            if file is not None:
                file.close()


def _words(records: np.ndarray) -> np.ndarray:
    return records.view("<u8").reshape(-1, RECORD.itemsize // 8)


def _records(path: Path, first: int) -> np.ndarray:
    """Whole records from one on; what follows the last of them is not there yet, or never will be."""
    try:
        with FileIO(path) as file:
            file.seek(first * RECORD.itemsize)
            data = file.readall()
    except OSError:  # somebody has removed it
        data = b""
    return np.frombuffer(data, RECORD, len(data) // RECORD.itemsize)


def _write(file: FileIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]
