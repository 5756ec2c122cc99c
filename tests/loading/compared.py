"""Bit for bit comparison of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hetero_strategy.loading.batch import Batch


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, type, shape and bytes) of everything in a value."""
    if isinstance(value, Batch):
        yield from leaves({"plan": value.plan, "inputs": value.inputs, "mine": value.mine}, path)
    elif isinstance(value, torch.Tensor):
        yield path, (str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes())
    elif isinstance(value, np.ndarray):
        yield path, (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, Mapping):
        yield path, sorted(map(str, value))
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        yield path, len(value)
        for number, one in enumerate(value):
            yield from leaves(one, f"{path}[{number}]")
    elif hasattr(value, "__dataclass_fields__"):
        yield path, type(value).__name__
        yield from leaves(vars(value), path)
    else:
        yield path, value


def differences(left: Any, right: Any) -> list[str]:
    """Paths at which two values differ."""
    ours, theirs = dict(leaves(left)), dict(leaves(right))
    return sorted(path for path in ours.keys() | theirs.keys() if ours.get(path, leaves) != theirs.get(path, leaves))
