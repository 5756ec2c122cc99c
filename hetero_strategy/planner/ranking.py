"""The order of candidates: which to simulate next, and the planner's result. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf
from typing import TypeVar

import numpy as np

from hetero_strategy.planner.allocate import delayed
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.propose import Proposal
from hetero_strategy.planner.step_seconds import share
from hetero_strategy.profiling.memory import Memory

T = TypeVar("T")
BEHIND = 1.1
"""Multiple of the best seconds so far from which a long step is dropped."""
LONG = 1 / 2
"""Share from which a step is long: it is simulated only if it may become the best."""


@dataclass(frozen=True)
class Ranked:
    """A candidate and the seconds of its step by simulation, on average over the batches."""

    candidate: Candidate
    seconds: float
    estimate: float
    """Seconds by the formula."""
    memory: Memory | None = None
    """Predicted memory of a step; None: not predicted."""
    batches: tuple[float, ...] = ()
    """Seconds of each batch; batches skipped because the first fell far behind are filled in proportion."""

    @property
    def share(self) -> float:
        """Return the fraction of a simulation that it counts as."""
        stages = sum(layout.pp * layout.vpp for layout in self.candidate.layouts.values())
        return share(self.candidate.microbatches, stages)

    @property
    def turn(self) -> tuple[float, int]:
        """Return a sort key: seconds to nine digits, then context-parallel ranks. Whole samples take as long on these
        as on instances.
        """
        return float(f"{self.seconds:.9g}"), max(layout.cp for layout in self.candidate.layouts.values())

    @cached_property
    def is_homogeneous(self) -> bool:
        """Return whether all modules have the same layout on the same ranks."""
        return is_homogeneous(self.candidate)

    @cached_property
    def layout_key(self) -> Hashable:
        """Return ranks, tensor and pipeline parallelism of all modules."""
        return tuple((x.ranks[0], x.ranks[-1], x.tp, x.cp, x.pp) for x in self.candidate.layouts.values())


@dataclass(frozen=True)
class Answer:
    """A plan's result: the simulated candidates in order."""

    ranked: tuple[Ranked, ...]
    """All simulated candidates, the fastest first."""
    considered: int
    """Number of layouts that fit by the formula (on many ranks, of those proposed); the most promising were simulated.
    """
    too_large: tuple[Ranked, ...] = ()
    """Faster candidates that need more memory than there is."""
    tie: float = 0.01
    """Fraction of the fastest's seconds by which one layout for all modules may be slower and still be chosen."""

    @property
    def best(self) -> Ranked:
        """Return the fastest candidate, or one layout for all modules if that ties."""
        homogeneous, most = self.homogeneous(), (1 + self.tie) * self.ranked[0].seconds
        return homogeneous if homogeneous is not None and homogeneous.seconds <= most else self.ranked[0]

    def homogeneous(self) -> Ranked | None:
        """Return the fastest candidate with one layout for all modules on the same ranks, or None."""
        return next((r for r in self.ranked if r.is_homogeneous), None)


def is_homogeneous(candidate: Candidate) -> bool:
    """Return whether all modules have the same layout on the same ranks."""
    first, *others = candidate.layouts.values()
    names = [field.name for field in fields(first) if field.name != "split"]
    return all(getattr(first, name) == getattr(other, name) for other in others for name in names)


def fastest(ranked: Sequence[Ranked]) -> float:
    """Return the seconds of the fastest candidate; infinite if there is none."""
    return min((r.seconds for r in ranked), default=inf)


def by_turns(items: Iterable[T], seconds: Callable[[T], float], kind: Callable[[T], Hashable]) -> list[T]:
    """Sort by seconds, where each item of a kind counts as slower than the one before it, see :func:`delayed`.

    >>> by_turns([("apart", 1.0), ("apart", 1.01), ("shared", 1.02)], lambda x: x[1], lambda x: x[0])
    [('apart', 1.0), ('shared', 1.02), ('apart', 1.01)]
    """
    ordered, numbers = sorted(items, key=seconds), dict[Hashable, int]()
    kinds = np.array([numbers.setdefault(kind(one), len(numbers)) for one in ordered], np.int64)
    turn = delayed(np.array([seconds(one) for one in ordered], np.float64), kinds)
    return [ordered[i] for i in np.argsort(turn, kind="stable")]


def kinds(proposal: Proposal) -> list[object]:
    """Return the kinds of a proposal; several of each kind are simulated, however promising other kinds are."""
    return [proposal.partition, *["homogeneous"] * proposal.homogeneous]


def share_of(proposal: Proposal) -> float:
    """Return the share of a simulation that a proposal counts as."""
    stages = sum(degrees.pp for degrees in proposal.degrees.values())
    return share(proposal.microbatches, stages)


def hopeless(proposal: Proposal, least: Mapping[object, float], ranked: Sequence[Ranked]) -> bool:
    """Return whether a proposal with a long step would be far behind the best so far, even if its estimate were as much
    too high as that of any of its kinds.

    Args:
        least: kind -> least ratio of simulated to estimated seconds.
    """
    homogeneous = [r for r in ranked if r.is_homogeneous]
    return share_of(proposal) > LONG and all(
        proposal.seconds * least.get(kind, 0.0) > BEHIND * fastest(homogeneous if kind == "homogeneous" else ranked)
        for kind in kinds(proposal)
    )


def promising(proposals: Sequence[Proposal], simulations: int) -> list[Proposal]:
    """Choose the best of all proposals, of every partition, and of those with one layout for all modules; proposals
    with the same partition and the same degrees of the language model follow in turns.
    """
    each = max(2, simulations // 6)
    chosen: list[Proposal] = []
    seen: Counter[object] = Counter()
    spent = 0.0
    for p in by_turns(proposals, lambda p: p.seconds, lambda p: p.layout_key):
        if spent < simulations or any(seen[kind] < each for kind in kinds(p)):
            chosen.append(p)
            seen.update(kinds(p))
            spent += share_of(p)
    return chosen
