"""Every unit of a sharded stage takes part in every microbatch, in one order, whatever rows a rank has.

Where weights are gathered and gradients summed with each microbatch, FSDP's hooks follow the autograd graph: a rank
whose graph leaves a unit out, or reaches it by another way, would meet others in the wrong collective. Backbones have
such graphs where there are no rows: ``torch.cat([x.new_zeros(0, n), *per_item])`` follows from nothing without items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.kind import LossOutput


def take_part(stage: Adapter, units: Mapping[str, nn.Module], applies: Callable[[], bool]) -> None:
    """Let what a stage makes follow from all of its units, and what units take of no rows from what lies before them.

    A unit that did not run is refused: the ranks that gather its weights would wait for ever.

    Args:
        stage: an FSDP root.
        units: below it, by FQN.
        applies: tells whether the stage's coming forward gathers weights and its backward sums gradients.
    """
    ran: dict[str, list[Tensor]] = {}
    """Unit -> what it made, also where nothing reads that: a backward comes to the same units on all ranks."""
    trained = {fqn: any(p.requires_grad for p in unit.parameters()) for fqn, unit in units.items()}
    begun = not stage.first_stage or _trains_before(stage, units)

    def follow(unit: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Rows of items require a gradient where something before the unit trains, so no rows do, too."""
        rows = given[0] if given else None
        if not isinstance(rows, Tensor) or rows.numel() or rows.requires_grad or not rows.is_floating_point():
            return None
        if not torch.is_grad_enabled() or not applies() or not (begun or any(trained[fqn] for fqn in ran)):
            return None
        return (rows.detach().requires_grad_(), *given[1:])

    def begin(stage: nn.Module, given: tuple[Any, ...]) -> None:
        ran.clear()  # also of what ran again in a backward

    def note(fqn: str, unit: nn.Module, given: Any, made: Any) -> None:
        ran[fqn] = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.requires_grad]

    def join(stage: Adapter, given: Any, made: Any) -> Any:
        if not applies():
            return None
        if missing := [fqn for fqn in units if fqn not in ran]:
            raise ModelError(
                f"module '{stage.name}': {missing[0]} did not run in a microbatch ({len(missing)} of {len(units)} parts"
                " that are gathered apart), so the ranks that share its weights would wait for this one; run all blocks"
                " in every forward, with no rows where there are no items, or set reshard_after_forward='never'"
            )
        rows = made.loss_sum if isinstance(made, LossOutput) else made
        if not isinstance(rows, Tensor) or not torch.is_grad_enabled():
            return None
        others = [x for found in ran.values() for x in found]
        # FSDP sees the end of a forward by its output, so that follows from something that trains.
        more = [] if rows.requires_grad else [p for p in stage.parameters() if p.requires_grad][:1]
        # On all ranks a tensor of its own, whose hooks come first in backward, also where a block makes the output.
        joined = _Joined.apply(rows, *others, *more)
        return replace(made, loss_sum=joined) if isinstance(made, LossOutput) else joined

    for fqn, unit in units.items():
        unit.register_forward_pre_hook(follow, prepend=True)
        unit.register_forward_hook(partial(note, fqn))
    stage.register_forward_pre_hook(begin)
    stage.register_forward_hook(join, prepend=True)  # before FSDP's own


def _trains_before(stage: Adapter, units: Mapping[str, nn.Module]) -> bool:
    """Whether anything trains in a stage that is in no unit, and not after all blocks."""
    inside = {id(p) for unit in units.values() for p in unit.parameters()}
    after = tuple(f"{fqn}." for fqn in stage.around_blocks()[1])
    own = ((fqn, p) for fqn, p in stage.named_parameters() if id(p) not in inside and not f"{fqn}.".startswith(after))
    return any(p.requires_grad for _, p in own)


class _Joined(torch.autograd.Function):
    """Rows as they are, which follow from others too. These get no gradient, but a backward runs their hooks."""

    @staticmethod
    def forward(ctx, rows: Tensor, *others: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.others = len(others)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        return gradient, *[None] * ctx.others
