"""Counts the bytes that this process hands to torch.distributed for other ranks, and those of tensors it makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero_strategy.parallelize.gradients import local


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


class Allocations(TorchDispatchMode):
    """Counts the memory of tensors that operators make while it is entered, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.now = 0
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Allocations:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            self._changed(storage._cdata, size)
            return self._resize(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return cast(Allocations, super().__enter__())

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = local(tensor).untyped_storage()
                if storage._cdata not in self._sizes and not self._given(storage, (args, kwargs)):
                    self._sizes[storage._cdata] = 0
                    self._changed(storage._cdata, storage.nbytes())
                    weakref.finalize(storage, self._freed, storage._cdata)
        return made

    @staticmethod
    def _given(storage: torch.UntypedStorage, arguments: Any) -> bool:
        """Whether an operator was given this memory: its result is a view, or the tensor itself."""
        tensors = (x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor) and x.device.type != "meta")
        return any(local(x).untyped_storage()._cdata == storage._cdata for x in tensors)

    def _changed(self, key: int, size: int) -> None:
        if key in self._sizes:
            self.now += size - self._sizes[key]
            self._sizes[key] = size
            self.most = max(self.most, self.now)

    def _freed(self, key: int) -> None:
        self._changed(key, 0)
        self._sizes.pop(key, None)
