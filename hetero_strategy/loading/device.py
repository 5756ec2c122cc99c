"""Batches on their way to a GPU while the one before is trained on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hetero_strategy.loading.batch import Batch


class Moving(NamedTuple):
    """A batch whose copy may still be under way."""

    batch: Batch
    copied: torch.cuda.Event


class Mover:
    """Copies batches to a CUDA device on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, batch: Batch) -> Moving:
        """Begin the copy; from page-locked memory it waits for nothing."""
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Moving(moved, copied)

    def take(self, moving: Moving) -> Batch:
        """The batch, for the current stream of this thread: what it computes from now on waits for the copy."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(moving.copied)
        for tensor in moving.batch.tensors():
            tensor.record_stream(stream)  # or its memory is reused when Python lets go of it
        return moving.batch
