"""Counts the bytes that this process hands to torch.distributed for other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """While it lasts, sends and broadcasts are counted: ``with counted() as total: ...; total()``.

    A broadcast counts ``nbytes`` for every other member, on its source: no algorithm moves fewer.
    """
    total = 0
    p2p, broadcast = dist.P2POp, dist.broadcast

    def sending(op: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> dist.P2POp:
        nonlocal total
        total += tensor.nbytes if op is dist.isend else 0
        return p2p(op, tensor, *args, **kwargs)

    def broadcasting(tensor: torch.Tensor, src: int, group: Any = None, **kwargs: Any) -> Any:
        nonlocal total
        if dist.get_rank() == src:
            total += tensor.nbytes * (dist.get_world_size(group) - 1)
        return broadcast(tensor, src, group, **kwargs)

    dist.P2POp, dist.broadcast = sending, broadcasting  # type: ignore[misc,assignment]
    try:
        yield lambda: total
    finally:
        dist.P2POp, dist.broadcast = p2p, broadcast  # type: ignore[misc]
