"""What a loader yields on one rank and what ``model(batch)`` takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hetero_strategy.data.plan import StepPlan, edge_blocks, expand
from hetero_strategy.model.inputs import EncoderInputs, SequenceInputs

ModuleInputs = EncoderInputs | SequenceInputs


class Batch:
    """One global batch as one rank sees it: the whole plan, and the payload of what this rank computes.

    Deliberately not a dataclass or a container: Lightning's precision plugins and device transfer would take those
    apart field by field. It moves as a whole, by :meth:`to`.
    """

    def __init__(self, plan: StepPlan, inputs: tuple[dict[str, ModuleInputs], ...]) -> None:
        self.plan = plan
        self.inputs = inputs
        """Per microbatch, by module; missing where this rank does not hold the module or the whole module is idle."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """This batch with its tensors on ``device``."""
        moved = tuple({name: x.to(device, non_blocking) for name, x in mb.items()} for mb in self.inputs)
        return Batch(self.plan, moved)

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory; torch's DataLoader calls it."""
        return Batch(self.plan, tuple({name: x.pin_memory() for name, x in mb.items()} for mb in self.inputs))

    def __len__(self) -> int:
        """Samples of the global batch."""
        return len(self.plan.samples)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Data set indices of the samples, int64 ``[S]``: lets Lightning infer the batch size for epoch means."""
        yield torch.from_numpy(self.plan.samples)

    def local_rows(self, microbatch: int, source: str, target: str) -> torch.Tensor | None:
        """Where every module has one instance: the source row of each slot of ``target``, int64; None for identity."""
        blocks = edge_blocks(self.plan, microbatch, source, target)
        rows = expand(blocks.source_start, blocks.rows)
        return None if np.array_equal(rows, np.arange(len(rows))) else torch.from_numpy(rows)
