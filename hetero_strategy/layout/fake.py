"""A world of ranks in which nobody else is: what one process builds and runs alone as any of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """This process is one of ``size`` ranks, whose collectives return at once, with nothing of the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds meshes of this rank, which equal those of the next one
        gc.collect()  # meshes and modules of one rank refer to each other
