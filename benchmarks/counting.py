"""Counts what this process hands to torch.distributed for other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """While it lasts, sends and broadcasts are counted: ``with counted() as total: ...; total()``.

    A broadcast counts ``nbytes`` for every other member, on its source: no algorithm moves fewer.
    """
    total = 0
    batch, broadcast = dist.batch_isend_irecv, dist.broadcast

    def sending(ops: list[dist.P2POp]) -> Any:
        nonlocal total
        total += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return batch(ops)

    def broadcasting(tensor: torch.Tensor, src: int, group: Any = None, **kwargs: Any) -> Any:
        nonlocal total
        if dist.get_rank() == src:
            total += tensor.nbytes * (dist.get_world_size(group) - 1)
        return broadcast(tensor, src, group, **kwargs)

    dist.batch_isend_irecv, dist.broadcast = sending, broadcasting
    try:
        yield lambda: total
    finally:
        dist.batch_isend_irecv, dist.broadcast = batch, broadcast


class Operations(TorchDispatchMode):
    """Matmuls and collectives of this process in the order that they start, those of DTensor and of c10d alike."""

    COLLECTIVES: ClassVar[Mapping[str, str]] = {
        "all_reduce": "all-reduce", "allreduce_": "all-reduce",
        "reduce_scatter_tensor": "reduce-scatter", "_reduce_scatter_base_": "reduce-scatter",
        "all_gather_into_tensor": "all-gather", "_allgather_base_": "all-gather",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """``matmul``, ``all-reduce``, ``reduce-scatter`` or ``all-gather``."""
        self.bytes: Counter[str] = Counter()
        """By collective: of what all ranks' rows are, before a reduce-scatter and after an all-gather."""

    @property
    def collectives(self) -> dict[str, int]:
        """How often each was started."""
        return dict(Counter(name for name in self.names if name != "matmul"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it runs on local tensors comes by later
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if any(issubclass(kind, FakeTensor) for kind in types):
            return made
        if name in ("mm", "addmm"):
            self.names.append("matmul")
        elif collective := self.COLLECTIVES.get(name):
            self.names.append(collective)
            self.bytes[collective] += max(t.nbytes for t in tree_leaves([args, made]) if isinstance(t, torch.Tensor))
        return made
