"""The tensors of a small checkpoint, a comparison of values and damage to files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    """Return whether values are equal in type and value, tensors and arrays included; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def flip(file: Path, at: int, bits: int = 1) -> None:
    """Flip bits of one byte of a file."""
    with open(file, "r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ bits]))


def owned(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and shapes under global names."""
    return {
        "model.vision.w": torch.arange(12.0).reshape(4, 3) * scale,
        "model.llm.b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16) * scale,
        "model.llm.count": torch.tensor(2**40 + 1),
        "model.llm.none": torch.zeros(0, 3),
        "optim.0.vision.w.exp_avg": torch.full((4, 3), 0.1) * scale,
        "optim.0.vision.w.step": torch.tensor(3.0) * scale,
    }


def blank() -> dict[str, torch.Tensor]:
    """Return zeros in the shapes of :func:`owned`."""
    return {key: torch.zeros_like(tensor) for key, tensor in owned().items()}
