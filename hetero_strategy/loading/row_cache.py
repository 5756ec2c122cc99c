"""Rows of a frozen encoder, read from disk instead of a media file that would have to be decoded and encoded."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hetero_strategy import ragged
from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.row_store import RowStore
from hetero_strategy.loading.payload import InstanceUnits, Items
from hetero_strategy.model.inputs import CachedRows, EncoderInputs, Packing


class RowCache:
    """Where a loader worker looks for the rows of one module's frozen backbone.

    An item's key is a hash of its file's path, length and time of change, and of its sizes; all else that its rows
    depend on is in the folder's name. Whoever is told of a step that is not after the last one looks for what was
    written since.

    Args:
        folder: of a :class:`RowStore`.
        inner: rows inside the module are kept, as its first pipeline stage gives them; else those of the backbone.
    """

    def __init__(self, folder: Path, *, inner: bool) -> None:
        self.folder, self.inner = folder, inner
        self._store = RowStore(folder)
        self._last: tuple[int, int] | None = None

    def turn(self, epoch: int, step: int) -> None:
        """A step is about to be made."""
        if self._last is None or (epoch, step) <= self._last or epoch != self._last[0]:
            self._store.refresh()
        self._last = epoch, step

    def inputs(self, units: InstanceUnits, items: Items) -> EncoderInputs:
        """What the module takes in one microbatch: rows that are there, and the payload of all other units."""
        content, processor = units.content, units.processor
        keys, known = _keys(content.index, units.module, items)
        lengths = np.asarray(units.inner_rows if self.inner else units.edge_rows)
        hit, rows = self._store.read(keys, lengths)
        missed = ~hit
        values = content.values(units.module, units.numbers[missed])
        made: EncoderInputs = processor.collate(values, items.sizes[missed], items.rows[missed])
        if not len(hit):
            return made
        sample = content.index.items[units.module].sample[items.numbers[missed]]
        keep = known[missed] & ~np.isin(sample, list(content.failed))
        cached = CachedRows(rows, int(hit.sum()), None, None, keys[missed], lengths[missed], keep)
        if not hit.any():
            return replace(made, cached=cached)
        order = None if hit.all() else torch.from_numpy(_order(lengths, hit))
        packing, empty = Packing.of(units.inner_rows), made.values[:0]
        return EncoderInputs(empty, items.sizes, items.rows, packing, replace(cached, missed=made, order=order))


def _keys(index: DatasetIndex, module: str, items: Items) -> tuple[np.ndarray, np.ndarray]:
    """Keys of items, uint64 ``[n, 2]``, and whether their files are there, bool ``[n]``."""
    keys, known = np.zeros((len(items.numbers), 2), np.uint64), np.ones(len(items.numbers), bool)
    for place, item in enumerate(items.numbers.tolist()):
        path = os.path.abspath(index.path(module, item))
        try:
            file = os.stat(path)
        except OSError:  # whoever reads it says so
            known[place] = False
            continue
        data = struct.pack("<qq", file.st_size, file.st_mtime_ns) + items.sizes[place].astype("<i8").tobytes()
        hashed = hashlib.blake2b(data + os.fsencode(path), digest_size=16)
        keys[place] = np.frombuffer(hashed.digest(), "<u8")
    return keys, known


def _order(lengths: np.ndarray, hit: np.ndarray) -> np.ndarray:
    """Where each row of all units lies in those of the units that were missed, followed by those that were found."""
    first = np.empty_like(lengths)
    first[~hit] = ragged.starts(lengths[~hit])
    first[hit] = lengths[~hit].sum() + ragged.starts(lengths[hit])
    return ragged.expand(first, lengths)
