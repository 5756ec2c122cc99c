"""Rows of a frozen encoder on their way to disk, beside training."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hetero_strategy.data.row_store import RowSegment, RowStore
from hetero_strategy.errors import DataError
from hetero_strategy.model.inputs import CachedRows

MOST = 2**28
"""Bytes of rows that wait for the disk, or one microbatch; what comes while there are more is not written."""
WAIT = 60.0
"""Seconds in which what waits at the end is written, at most."""
log = logging.getLogger(__name__)


class _Piece(NamedTuple):
    """Rows of some items on the host."""

    rows: torch.Tensor
    lengths: np.ndarray
    keys: np.ndarray
    keep: np.ndarray
    copied: torch.cuda.Event | None
    """When the rows are there; None: they are."""


class RowKeeper:
    """Writes what a module's frozen backbone computes on this rank, in one thread. A step never waits for the disk.

    Args:
        module: its name.
        folder: of a :class:`RowStore`.
        weights: parameters and buffers that the rows depend on, which may not change.
        items: of the data set.
        draws: says whether layers of the backbone in training mode have drawn random numbers for the microbatch.
        always: see :class:`hetero_strategy.model.encoder.Keeper`.
    """

    def __init__(
        self,
        module: str,
        folder: Path,
        weights: Sequence[torch.Tensor],
        items: int,
        draws: Callable[[], bool],
        *,
        always: bool,
    ) -> None:
        self.module, self.folder, self.items, self.always = module, folder, items, always
        self._draws = draws
        self.found = 0
        """Items whose rows were read."""
        self.missed = 0
        """Items whose rows were computed."""
        self.written = 0
        """Items that this process wrote."""
        self.dropped = 0
        """Items that were computed and not written, as the disk was slower or full."""
        self._weights, self._versions = weights, [tensor._version for tensor in weights]
        self._given = self._done = 0
        self._waiting: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._names: set[bytes] = set()
        self._over = False
        self._segment = RowSegment(folder)
        self._thread = threading.Thread(target=self._write, name=f"rows of {module}", daemon=True)
        self._thread.start()

    def __call__(self, computed: torch.Tensor | None, cached: CachedRows) -> None:
        """Take note of one microbatch.

        Raises:
            DataError: the weights are not those that the cache was opened for, or rows are not those of their items
                alone.
        """
        if [tensor._version for tensor in self._weights] != self._versions:
            raise DataError(
                f"HeteroStrategy: weights of '{self.module}' have changed since this fit began, so rows in its cache"
                f" {self.folder} are those of others; change them before trainer.fit, or leave '{self.module}' out of"
                " cache"
            )
        if torch._C._current_graph_task_id() != -1:
            return  # the forward runs again in a backward: its rows are noted already
        self.missed += len(cached.keys)
        self.found += cached.found
        keep = int(cached.keep.sum())
        if computed is None or not keep:
            return
        if self._draws():
            raise DataError(
                f"HeteroStrategy: the backbone of '{self.module}' drew random numbers (dropout, dropped layers or"
                f" patches, noise): rows in its cache would be those of one step; call eval() of its backbone in"
                f" configure_model() and leave it so, or leave '{self.module}' out of cache"
            )
        if len(computed) != (rows := cached.lengths.sum()):
            raise DataError(
                f"HeteroStrategy: the backbone of '{self.module}' made {len(computed)} rows of {len(cached.lengths)}"
                f" items, its processor says {rows}, so nobody knows which row is whose; join rows inside the backbone,"
                f" or leave '{self.module}' out of cache"
            )
        waiting = self._given - self._done
        if self._over or (waiting and waiting + computed.nbytes > MOST):
            self.dropped += keep
            return
        self._given += computed.nbytes
        copied = None
        if computed.device.type == "cuda":
            rows = torch.empty(computed.shape, dtype=computed.dtype, pin_memory=True)
            rows.copy_(computed.detach(), non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        else:
            rows = computed.detach().clone(memory_format=torch.contiguous_format)
        self._waiting.put(_Piece(rows, cached.lengths, cached.keys, cached.keep, copied))

    def close(self) -> None:
        """Write what waits, and end."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(WAIT)
            if self.dropped and not self._over:
                log.warning(
                    "cache of '%s' in %s: %d items were not written, as rows came faster than the disk takes them; they"
                    " are computed again", self.module, self.folder, self.dropped,
                )  # fmt: skip

    def _write(self) -> None:
        while (piece := self._waiting.get()) is not None:
            if not self._over:
                self._append(piece)
            self._done += piece.rows.nbytes
        self._segment.close()

    def _append(self, piece: _Piece) -> None:
        if piece.copied is not None:
            piece.copied.synchronize()
        new = []
        for number in np.flatnonzero(piece.keep).tolist():
            name = piece.keys[number].tobytes()
            if name not in self._names:
                self._names.add(name)
                new.append(number)
        if not new:
            return
        rows = torch.split(piece.rows, piece.lengths.tolist())
        try:
            self._segment.append(piece.keys[new], [rows[number] for number in new])
            self.written += len(new)
        except OSError as error:
            self._over = True
            self.dropped += len(new)
            store = RowStore(self.folder)
            store.refresh()
            log.warning(
                "cache of '%s' in %s: %s; %d of %d items are there and will be read, the other ones are computed from"
                " here on; %.2f GB are free: free some room and start again",
                self.module, self.folder, os.strerror(error.errno or 0), len(store), self.items,
                shutil.disk_usage(self.folder).free / 1e9,
            )  # fmt: skip
