"""Rows of modules that run a step ahead, from the step that computes them to the one that needs them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetero_strategy.errors import DataError
from hetero_strategy.plan.ahead import computing
from hetero_strategy.plan.step_plan import StepPlan


class Held:
    """What this rank computed for the step that runs, and for the next one."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None  # epoch and step
        self._now: dict[tuple[str, int], torch.Tensor] = {}
        self._next: dict[tuple[str, int], torch.Tensor] = {}

    def turn(self, plan: StepPlan, *, train: bool) -> None:
        """A step begins. What the one before computed is for this one; a step that runs again has it still, and one
        that is only evaluated and needs nothing of another leaves all as it is.

        Raises:
            DataError: its rows are those of another step, or none.
        """
        epoch, step = place = _place(plan)
        ahead = any(computing(name) != name for name in plan.assignments)
        if not (plan.held or (train and ahead)) or place == self._place:
            return
        if plan.held and self._place != (epoch, step - 1):
            before = "no step" if self._place is None else f"step {self._place[1]} of epoch {self._place[0]}"
            raise DataError(
                f"step {step} of epoch {epoch} needs rows of {', '.join(sorted(plan.held))} that step {step - 1} makes,"
                f" but {before} was trained before it: train every batch in its turn, or leave these modules out of"
                " HeteroStrategy(prefetch=...)"
            )
        self._place, self._now, self._next = place, self._next if plan.held else {}, {}

    def keep(self, plan: StepPlan, module: str, microbatch: int, rows: torch.Tensor, *, train: bool) -> None:
        """Rows for a microbatch of the next step, those of training rather than of an evaluation."""
        if _place(plan) == self._place and (train or (module, microbatch) not in self._next):
            self._next[module, microbatch] = rows

    def rows(self, plan: StepPlan, module: str, microbatch: int) -> torch.Tensor:
        """Rows of a microbatch of this step."""
        assert self._place == _place(plan)
        return self._now[module, microbatch]

    def all_rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(module, its rows of a microbatch) of this step and of the next one."""
        return ((module, rows) for held in (self._now, self._next) for (module, _), rows in held.items())


def _place(plan: StepPlan) -> tuple[int, int]:
    return plan.metadata.epoch, plan.metadata.step
