"""Policies that place programs of cohorts among those of the pipeline on their ranks; :func:`register_fill` adds more.
Pure.

``fine`` lets an idle rank take whatever it may run next (``schedule.merge``), or keeps to the bubbles before and after
the pipeline's work if that is shorter. ``decoupled`` always keeps to these bubbles, since its encoders hold no
activations meanwhile (``parallelize.recompute``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

from hetero_strategy.errors import ScheduleError, register
from hetero_strategy.layout.spec import Pipeline
from hetero_strategy.schedule.action_index import ActionIndex
from hetero_strategy.schedule.merge import Merge
from hetero_strategy.schedule.module_programs import LaneProgram, listed

PATIENCE = (0.0, 0.5, 1.0)
"""Values of ``patience`` to try: long filling actions delay a pipeline whose next action is almost ready; short ones
lose by waiting for it."""


@dataclass(frozen=True)
class StepPrograms:
    """The programs of one step, which a fill puts into one order.

    Args:
        fill: name of the fill, for errors.
        numbers: numbering of the step's actions.
        pipelines: pipeline of each module.
        made: programs of every pipeline rank of every module.
        lanes: lanes of each node, by its index.
        caps: microbatches that each node may hold; see :class:`Merge`.
        bounds: most microbatches in flight, by module.
    """

    fill: str
    numbers: ActionIndex
    pipelines: Mapping[str, Pipeline]
    made: Sequence[LaneProgram]
    lanes: Sequence[tuple[int, ...]]
    caps: Sequence[int]
    bounds: Mapping[str, int]

    @cached_property
    def lists(self) -> list[list[int]]:
        """Return the action numbers of each program."""
        return [listed(self.numbers, one) for one in self.made]

    @cached_property
    def fills(self) -> list[bool]:
        """Return whether each program fills bubbles."""
        return [one.fills for one in self.made]

    def on(self, program: Sequence[int]) -> tuple[int, ...]:
        """Return the lanes of a program."""
        return self.lanes[self.numbers.node_of[program[0]]]

    def merged(self, *, lead: int = 0, last: bool = False, patience: float = 0.0) -> Merge | None:
        """Put all programs into one order of starts; None if they wait for each other in a circle.

        Args:
            lead: number of forwards of each filling program before its ranks do anything else.
            last: whether filling backwards come after all other work of their ranks.
            patience: see :class:`Merge`.
        """
        numbers = self.numbers.fork() if lead or last else self.numbers
        for own, other in self._pairs():
            if own[0] >= numbers.units:
                if last:
                    numbers.precede(next(a for a in reversed(other) if a < 2 * numbers.units), own[0])
            elif lead:
                numbers.precede(own[min(lead, len(own)) - 1], other[0])
        merge = Merge(numbers, self.lists, self.lanes, self.caps, self.fills, patience)
        return None if merge.run() is None else merge

    def around(self) -> Merge | None:
        """Run filling work before the first action of the pipeline on a rank and after its last one."""
        if module := self.held_back:
            raise ScheduleError(
                f"fill={self.fill!r} holds all microbatches of {module}, max_in_flight allows {self.bounds[module]}:"
                " raise it, or take fill='fine'"
            )
        return self.merged(lead=self.numbers.units, last=True)

    @property
    def held_back(self) -> str | None:
        """Return a filling module that may not hold all its microbatches; None if there is none."""
        numbers = self.numbers
        for program in compress(self.lists, self.fills):
            node = numbers.node_of[program[0]]
            module, count = numbers.nodes[node].module, numbers.counts[node]
            if numbers.backward[node] and self.bounds.get(module, count) < count:
                return module
        return None

    def _pairs(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield each filling program with each other program that does not fill and shares lanes with it."""
        others = [other for other, fills in zip(self.lists, self.fills, strict=True) if not fills]
        for own in compress(self.lists, self.fills):
            yield from ((own, other) for other in others if not {*self.on(own)}.isdisjoint(self.on(other)))


@dataclass(frozen=True)
class FillPolicy:
    """A fill by name.

    Args:
        name: name in ``HeteroStrategy(fill=...)``.
        merges: function that returns, for one step, the orders to choose from; the shortest is taken.
        ends: whether instances of a module that ends a pipeline, such as a generator, act on their own too.
    """

    name: str
    merges: Callable[[StepPrograms], Sequence[Merge | None]]
    ends: bool = False


_policies: dict[str, FillPolicy] = {}


def register_fill(policy: FillPolicy) -> None:
    """Register a fill by its name, in every process that uses it.

    Raises:
        ScheduleError: another fill has the name.
    """
    if policy.name in ("auto", "none"):
        raise ScheduleError(f"fill {policy.name!r} is built in; choose another name")
    register(_policies, policy.name, policy, "fill", ScheduleError)


def fills() -> tuple[str, ...]:
    """Return the names of all fills."""
    return tuple(_policies)


def fill_policy(name: str) -> FillPolicy:
    """Return the fill of a name."""
    if name not in _policies:
        raise ScheduleError(
            f"fill {name!r} is not known; choose one of auto, none, {', '.join(_policies)}, or let a module that is"
            " imported before this give yours to register_fill (imports=[...] in the recipes; see docs/schedules.md)"
        )
    return _policies[name]


def _fine(step: StepPrograms) -> list[Merge | None]:
    # An instance of several ranks hardly ever finds all of them idle once the pipeline runs.
    wide = any(len(step.on(program)) > 1 for program in compress(step.lists, step.fills))
    leads = [1 << k for k in range(max(step.numbers.counts).bit_length())] if wide else []
    merges = [step.merged(patience=share) for share in PATIENCE] + [step.merged(lead=lead) for lead in leads]
    return merges if step.held_back else [*merges, step.around()]


for _policy in (
    FillPolicy("fine", _fine, ends=True),
    FillPolicy("decoupled", lambda step: [step.around()]),
):
    register_fill(_policy)
