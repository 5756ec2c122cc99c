"""What a worker makes, as one block of memory: arrays and tensors are neither copied twice nor pickled."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes; what any number type and vector unit is content with."""


def pack(value: Any) -> tuple[bytes, list[memoryview]]:
    """(small pickle, the bytes of every contiguous array and tensor on the host), by pickle protocol 5."""
    buffers: list[pickle.PickleBuffer] = []
    stream = BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def unpack(head: bytes, block: Any, sizes: Iterable[int]) -> Any:
    """The inverse of `pack` from all buffers in one writable block, each at a multiple of `ALIGNMENT`.

    Arrays and tensors are views of the block and keep it alive.
    """
    view, start, parts = memoryview(block), 0, []
    for size in sizes:
        parts.append(view[start : start + size])
        start += padded(size)
    return pickle.loads(head, buffers=parts)


def padded(size: int) -> int:
    """Bytes that a buffer takes in a block."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Tensors on the host go out of band, as arrays do."""
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided:
            # Strides of dimensions of one element may be anything.
            flat = value.detach().contiguous().as_strided((value.numel(),), (1,))
            raw = flat.view(torch.uint8).numpy()
            return _tensor, (raw, value.dtype, value.shape)
        return NotImplemented


def _tensor(raw: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).reshape(shape)
