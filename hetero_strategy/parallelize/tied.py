"""A weight that the first and the last stage of a module share: each owns a copy, and their gradients are summed.

Both owners start from the same values and see the same summed gradient, so the copies stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.gradients import Reached, local, note_reached


@dataclass(frozen=True)
class Tied:
    """The shared weights that this rank owns."""

    owned: Sequence[tuple[str, nn.Parameter, dist.ProcessGroup]]
    """Module name, parameter and the group of its two owners."""

    @torch.no_grad()
    def settle(self, worked: Collection[str], reached: Reached) -> None:
        """Sum the gradients of both owners, each already summed over data-parallel ranks; a missing one counts as zero.

        A collective of the two owners. Modules that have not ``worked`` in this step have no gradients on either side.
        ``reached`` takes note of which were missing, where no sum over data-parallel ranks has.
        """
        for module, parameter, group in self.owned:
            if module in worked:
                if parameter not in reached:
                    note_reached(reached, parameter, parameter.grad)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=group)


def find_tied(
    modules: Mapping[str, Adapter],
    layouts: Mapping[str, ModuleLayout],
    rank: int,
    group: Callable[[Iterable[int]], dist.ProcessGroup | None],
) -> Tied:
    """Find the shared weights that this rank owns, after ``parallelize``.

    ``group`` is ``GroupRegistry.group`` of a registry that was given :func:`tied_rank_sets`.
    """
    owned = []
    for name, module in modules.items():
        weight = module.tied_weight()
        for pair in _pairs(module, layouts[name]):
            if rank in pair and weight is not None:
                owners = group(pair)
                parameter = module.get_parameter(weight[0])
                assert owners is not None
                if parameter.requires_grad:
                    owned.append((name, parameter, owners))
    return Tied(owned)


def tied_rank_sets(modules: Mapping[str, Adapter], layouts: Mapping[str, ModuleLayout]) -> list[tuple[int, ...]]:
    """List the pairs of ranks that own the same part of a shared weight; each pair needs a group."""
    return [pair for name, module in modules.items() for pair in _pairs(module, layouts[name])]


def _pairs(module: Adapter, layout: ModuleLayout) -> list[tuple[int, ...]]:
    """Pair ranks of equal coordinate in the first and the last stage; there are none where one rank has both."""
    last = layout.pipeline.stages - 1
    if module.tied_weight() is None or layout.pipeline.rank_of(0) == layout.pipeline.rank_of(last):
        return []
    both = zip(layout.stage_grid(0).flat, layout.stage_grid(last).flat, strict=True)
    return [tuple(sorted((int(a), int(b)))) for a, b in both]
