"""Rows of modules that run a step ahead, from the step that computes them to the one that needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hetero_strategy.errors import DataError
from hetero_strategy.plan.ahead import computing
from hetero_strategy.plan.step_plan import StepPlan

Place = tuple[int, int, int]
"""Epoch, step and :attr:`StepPlan.batch`."""


@dataclass
class _Rows:
    """Of one step, and of the next one."""

    place: Place | None = None
    following: int = 0
    """:attr:`StepPlan.following` of the step."""
    versions: list[int] = field(default_factory=list)
    """Of weights, when the step began."""
    now: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    next: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def leads_to(self, place: Place) -> bool:
        """Whether that step is the one for which this one computed."""
        if self.place is None:
            return False
        epoch, step, _ = self.place
        return place == (epoch, step + 1, self.following)


class Held:
    """What this rank computed for the step that runs, and for the next one.

    Args:
        weights: module -> this rank's parts of the parameters that its rows ahead are computed with.
    """

    def __init__(self, weights: Mapping[str, Sequence[torch.Tensor]] | None = None) -> None:
        self._weights = weights or {}
        self._trained, self._evaluated = _Rows(), _Rows()
        self._here = self._trained

    def turn(self, plan: StepPlan, *, train: bool) -> None:
        """A step begins. What the one before computed is for this one; a step that runs again has it still. Steps that
        are only evaluated, in an order of their own, leave those of training as they are.

        Raises:
            DataError: its rows are those of another step, of other weights, or none.
        """
        if not (plan.held or any(computing(name) != name for name in plan.assignments)):
            return
        place = _place(plan)
        if train:
            self._evaluated = _Rows()
        versions = [tensor._version for tensors in self._weights.values() for tensor in tensors]
        known = self._trained, self._evaluated
        if same := [rows for rows in known if rows.place == place]:
            self._here = same[0]
            if train:  # what it computes for the next one is of the weights that there are now
                self._here.versions = versions
            return
        before = next((rows for rows in known if rows.leads_to(place)), self._trained)
        if plan.held and not before.leads_to(place):
            raise DataError(_unread(plan, before))
        if plan.held and versions != before.versions:
            raise DataError(
                f"weights of {', '.join(sorted(self._weights))} have changed since step {plan.metadata.step - 1}"
                f" computed rows for step {plan.metadata.step} with them: leave these modules out of"
                " HeteroStrategy(prefetch=...), or change their weights outside trainer.fit"
            )
        self._here = _Rows(place, plan.following, versions, before.next if plan.held else {})
        if train:
            self._trained = self._here
        else:
            self._evaluated = self._here

    def keep(self, plan: StepPlan, module: str, microbatch: int, rows: torch.Tensor, *, train: bool) -> None:
        """Rows for a microbatch of the next step, those of training rather than of an evaluation."""
        if train or (module, microbatch) not in self._here.next:
            self._here.next[module, microbatch] = rows

    def rows(self, plan: StepPlan, module: str, microbatch: int) -> torch.Tensor:
        """Rows of a microbatch of this step."""
        assert self._here.place == _place(plan)
        return self._here.now[module, microbatch]

    def all_rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(module, its rows of a microbatch) of this step and of the next one."""
        for held in (self._trained, self._evaluated):
            for rows_of in (held.now, held.next):
                yield from ((module, rows) for (module, _), rows in rows_of.items())


def _place(plan: StepPlan) -> Place:
    return plan.metadata.epoch, plan.metadata.step, plan.batch


def _unread(plan: StepPlan, before: _Rows) -> str:
    step, epoch, last = plan.metadata.step, plan.metadata.epoch, before.place
    seen = "no step" if last is None else f"step {last[1]} of epoch {last[0]}"
    if last is not None and last[:2] == (epoch, step - 1):
        seen += ", which other samples follow,"
    return (
        f"step {step} of epoch {epoch} needs rows of {', '.join(sorted(plan.held))} that step {step - 1} makes, but"
        f" {seen} was run before it: run every batch of one loader in its turn, or leave these modules out of"
        " HeteroStrategy(prefetch=...); where a plan chose them, fill='none' does that"
    )
