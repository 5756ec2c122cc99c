"""Counter of the memory of tensors as operators make them, real or fake."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero_strategy.parallelize.gradients import local


class Allocations(TorchDispatchMode):
    """A counter of the memory of tensors that operators make while it is entered, until the memory is freed.

    Fake tensors count with the memory that they represent.

    Args:
        before: tensors that exist already.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.most = self.now = 0
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_
        for tensor in _tensors(list(before)):
            self._count(local(tensor).untyped_storage())

    def __enter__(self) -> Self:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata)
            self._changed(storage._cdata, size)
            return self._resize(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        inputs: set[int] | None = None
        for tensor in _tensors(results):
            storage = local(tensor).untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            if inputs is None:
                inputs = {local(x).untyped_storage()._cdata for x in _tensors((args, kwargs))}
            if key not in inputs:  # otherwise the result is a view, or the tensor itself
                self._count(storage)
                self._made(key, inputs)
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            self._changed(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._freed, storage._cdata)

    def _made(self, key: int, given: Iterable[int]) -> None:
        """Note the origin of new memory."""

    def _changed(self, key: int, size: int) -> None:
        if key in self._sizes:
            self.now += size - self._sizes[key]
            self._sizes[key] = size
            self.most = max(self.most, self.now)

    def _freed(self, key: int) -> None:
        self._changed(key, 0)
        self._sizes.pop(key, None)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.device.type != "meta")
