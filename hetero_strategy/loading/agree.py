"""All ranks agree on which samples of a step count for nothing."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from hetero_strategy.loading.batch import Batch


class Agree:
    """A batch with the samples silenced that any rank could not read; one of a loader's ``finish`` functions.

    Every rank sees a part of the payload only, but a sample without its image has to lose its labels wherever they are
    and its share of N (law 1) everywhere. One all-reduce (max) of uint8 ``[S]`` in a group of all ranks on the host
    that the loading thread alone uses; None: this process is the only one. Batches come in their order: items of
    modules that run a step ahead were read with the batch before.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._before: set[int] = set()

    def __call__(self, batch: Batch) -> Batch:
        failed = {*batch.failed} | (self._before if batch.plan.held else set())
        self._before = {*batch.failed}
        bad = torch.from_numpy(np.isin(batch.plan.samples, list(failed)).astype(np.uint8))
        if self._group is not None:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._group)
        return batch.without(bad.numpy().astype(bool)) if bad.any() else batch
