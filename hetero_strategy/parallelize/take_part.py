"""Every unit of a sharded stage takes part in every microbatch, whatever rows a rank has.

Where weights are gathered and gradients summed with each microbatch, a rank whose graph leaves a unit out would leave
its collectives to the others. Backbones do so where there are no rows: ``torch.cat([x.new_zeros(0, n), *per_item])``
has no gradient without items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.kind import LossOutput


def take_part(stage: Adapter, units: Mapping[str, nn.Module], applies: Callable[[nn.Module], bool]) -> None:
    """Let what a stage makes of no rows follow from all of its units, which get a gradient of no rows.

    A unit that did not run is refused: the ranks that gather its weights would wait for ever.

    Args:
        stage: an FSDP root.
        units: below it, by FQN.
        applies: tells whether the stage's coming forward gathers weights and its backward sums gradients.
    """
    ran: dict[str, Tensor | None] = {}

    def note(fqn: str, unit: nn.Module, given: Any, made: Any) -> None:
        rows = made[0] if isinstance(made, tuple) else made
        ran[fqn] = rows if isinstance(rows, Tensor) and rows.requires_grad and not rows.numel() else None

    def join(stage: Adapter, given: Any, made: Any) -> Any:
        without_rows = [rows for rows in ran.values() if rows is not None]
        missing = [fqn for fqn in units if fqn not in ran]
        if not torch.is_grad_enabled() or not applies(stage):
            return None
        if missing:
            raise ModelError(
                f"module '{stage.name}': {missing[0]} did not run in a microbatch ({len(missing)} of {len(units)} parts"
                " that are gathered apart), so the ranks that share its weights would wait for this one; run all blocks"
                " in every forward, with no rows where there are no items, or set reshard_after_forward='never'"
            )
        rows = made.loss_sum if isinstance(made, LossOutput) else made
        if not isinstance(rows, Tensor):
            return None
        if not rows.requires_grad:  # FSDP sees the end of a forward by its output
            without_rows += [p for p in stage.parameters() if p.requires_grad][:1]
        if not without_rows:
            return None
        joined = _Joined.apply(rows, *without_rows)
        return replace(made, loss_sum=joined) if isinstance(made, LossOutput) else joined

    for fqn, unit in units.items():
        unit.register_forward_hook(partial(note, fqn))
    stage.register_forward_pre_hook(lambda *_: ran.clear())  # also of what ran again in a backward
    stage.register_forward_hook(join, prepend=True)  # before FSDP's own


class _Joined(torch.autograd.Function):
    """Rows as they are, which follow from others too: these get zeros where they are none, and nothing otherwise."""

    @staticmethod
    def forward(ctx, rows: Tensor, *others: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*(other for other in others if not other.numel()))
        ctx.others = len(others)
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        zeros = [torch.zeros_like(other) for other in ctx.saved_tensors]
        return gradient, *zeros, *[None] * (ctx.others - len(zeros))
