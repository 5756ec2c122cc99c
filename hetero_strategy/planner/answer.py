"""What the planner found: candidates by what their steps take. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf

from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.memory import Memory
from hetero_strategy.planner.short import share


@dataclass(frozen=True)
class Ranked:
    """A candidate and what its step takes by simulation, on average over the batches."""

    candidate: Candidate
    seconds: float
    estimate: float
    """What the formula says."""
    memory: Memory | None = None
    """Of a step, where it was predicted."""
    batches: tuple[float, ...] = ()
    """Seconds of each batch; where the first fell far behind, of the others in proportion."""

    @property
    def share(self) -> float:
        """As what share of a simulation it counts."""
        stages = sum(layout.pp * layout.vpp for layout in self.candidate.layouts.values())
        return share(self.candidate.microbatches, stages)

    @cached_property
    def is_homogeneous(self) -> bool:
        """Whether all modules have the same layout on the same ranks."""
        return is_homogeneous(self.candidate)

    @cached_property
    def lies(self) -> Hashable:
        """Ranks, tensor and pipeline parallelism of all modules."""
        return tuple((x.ranks[0], x.ranks[-1], x.tp, x.cp, x.pp) for x in self.candidate.layouts.values())


@dataclass(frozen=True)
class Answer:
    """What the planner found."""

    ranked: tuple[Ranked, ...]
    """All that were simulated, the fastest first."""
    considered: int
    """Layouts that fit by the formula, on many ranks those proposed, of which the simulated were the most promising."""
    too_large: tuple[Ranked, ...] = ()
    """Faster ones that need more memory than there is."""
    tie: float = 0.01
    """Share of the fastest's seconds by which one layout for all modules may be slower and still be taken."""

    @property
    def best(self) -> Ranked:
        """The fastest; one layout for all modules where that is as good."""
        alike, most = self.homogeneous(), (1 + self.tie) * self.ranked[0].seconds
        return alike if alike is not None and alike.seconds <= most else self.ranked[0]

    def homogeneous(self) -> Ranked | None:
        """The fastest with one layout for all modules on the same ranks; None if none was simulated."""
        return next((r for r in self.ranked if r.is_homogeneous), None)


def is_homogeneous(candidate: Candidate) -> bool:
    """Whether all modules have the same layout on the same ranks."""
    first, *others = candidate.layouts.values()
    names = [field.name for field in fields(first) if field.name != "split"]
    return all(getattr(first, name) == getattr(other, name) for other in others for name in names)


def fastest(ranked: Sequence[Ranked]) -> float:
    """Seconds of the fastest; infinite where there is none."""
    return min((r.seconds for r in ranked), default=inf)
