"""What a loader yields on one rank and what ``model(batch)`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hetero_strategy.data.plan import StepPlan, edge_blocks, expand
from hetero_strategy.model.inputs import EncoderInputs, GeneratorInputs, SequenceInputs

ModuleInputs = EncoderInputs | SequenceInputs | GeneratorInputs


@dataclass(frozen=True)
class LoadTimes:
    """Seconds that making a batch took where it was made, ahead of need or not."""

    plan: float
    """Balancing, packing, ordering, composing: the step plan."""
    payload: float
    """Reading and decoding what this rank computes."""


class Batch:
    """One global batch as one rank sees it: the whole plan, and the payload of what this rank computes.

    Deliberately not a dataclass or a container: Lightning's precision plugins and device transfer would take those
    apart field by field. It moves as a whole, by :meth:`to`.
    """

    def __init__(
        self, plan: StepPlan, inputs: Mapping[str, tuple[ModuleInputs | None, ...]], times: LoadTimes | None = None
    ) -> None:
        self.plan = plan
        self.times = times
        self.inputs = inputs
        """By module, then by its microbatch; None where the whole module is idle. Without modules this rank lacks."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """This batch with its tensors on ``device``."""
        return self._each(lambda x: x.to(device, non_blocking))

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory; torch's DataLoader calls it."""
        return self._each(lambda x: x.pin_memory())

    def _each(self, change: Callable[[ModuleInputs], ModuleInputs]) -> Batch:
        made = {n: tuple(None if x is None else change(x) for x in inputs) for n, inputs in self.inputs.items()}
        return Batch(self.plan, made, self.times)

    def __len__(self) -> int:
        """Samples of the global batch."""
        return len(self.plan.samples)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Data set indices of the samples, int64 ``[S]``: lets Lightning infer the batch size for epoch means."""
        yield torch.from_numpy(self.plan.samples)

    def local_rows(
        self, source: str, source_microbatch: int, target: str, target_microbatch: int
    ) -> torch.Tensor | None:
        """Where every module has one instance: the source row of each slot that this pair fills, int64.

        None where that is all of the source's rows in their order.
        """
        blocks = edge_blocks(self.plan, source, source_microbatch, target, target_microbatch)
        rows = expand(blocks.source_start, blocks.rows)
        total = int(self.plan.assignments[source][source_microbatch].totals().sum())
        return None if np.array_equal(rows, np.arange(total)) else torch.from_numpy(rows)
