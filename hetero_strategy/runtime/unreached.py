"""Parameters that no loss reached in a step have no gradient, as in one process, though ranks summed zeros for them.

Ranks that sum gradients bring zeros where they have none, as no rank knows what others have. How many ranks lacked the
gradient of each parameter rides on the sum over all ranks at the step's end. Where all that hold a parameter lacked it,
no loss reached it, and its gradient becomes None: weight decay and moments of optimizers leave it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from hetero_strategy.layout.placement import Placement
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.gradients import Reached


@dataclass(frozen=True)
class Unreached:
    """Counts, of every parameter that trains, the ranks that lacked its gradient in a step."""

    holders: tuple[int, ...]
    """Of each parameter, in one order on all ranks, the number of ranks that sum its gradient."""
    places: Mapping[nn.Parameter, int]
    """This rank's parameters, and those it has as names alone."""
    noted: Reached = field(default_factory=dict)
    """Of the step in progress."""

    @staticmethod
    def of(modules: Mapping[str, Adapter], placement: Placement) -> Unreached:
        """Number the parameters of all modules, once they are in place; every rank has them all as names."""
        holders: list[int] = []
        places: dict[nn.Parameter, int] = {}
        for name, module in modules.items():
            layout = placement.layouts[name]
            pipeline, tied = layout.pipeline, module.tied_weight()
            apart = tied is not None and pipeline.rank_of(0) != pipeline.rank_of(pipeline.stages - 1)
            for fqn, parameter in module.named_parameters():
                if parameter.requires_grad:
                    places[parameter] = len(holders)
                    owners = 2 if apart and tied is not None and fqn in tied else 1  # of the first and the last stage
                    holders.append(len(layout.ranks) // layout.pp * owners)
        return Unreached(tuple(holders), places)

    def __len__(self) -> int:
        """Return how many numbers are summed."""
        return len(self.holders)

    def write(self, into: torch.Tensor) -> None:
        """Count this rank where it lacked gradients, into zeros, fp64 ``[len(self)]``; else nothing is done."""
        if lacking := self._lacking():
            flags = torch.zeros(len(self), dtype=into.dtype)
            flags[list(lacking.values())] = 1
            into.copy_(flags)

    def drop(self, counts: torch.Tensor) -> None:
        """Let parameters that no rank reached have no gradient.

        A rank that lacked none knows that all of its own were reached. Another one reads the sums, which waits for the
        device.
        """
        if lacking := self._lacking():
            found = counts.tolist()
            for parameter, place in lacking.items():
                if found[place] == self.holders[place]:
                    parameter.grad = None

    def _lacking(self) -> dict[nn.Parameter, int]:
        return {parameter: self.places[parameter] for parameter, had in self.noted.items() if not had}
