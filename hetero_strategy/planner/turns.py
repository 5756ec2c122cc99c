"""Which candidates are looked at next: the most promising of all, and some of every kind. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from math import inf
from typing import TypeVar

import numpy as np

from hetero_strategy.planner.answer import Ranked, fastest
from hetero_strategy.planner.every import delayed
from hetero_strategy.planner.propose import Proposal
from hetero_strategy.planner.short import share

T = TypeVar("T")
BEHIND = 1.1
"""Seconds over the best so far from which a long step is not looked at any longer."""
LONG = 1 / 2
"""Share from which a step is long: it is only simulated where it may become the best."""
RETRIED = 1.15
"""Seconds over the best up to which other ways to fill bubbles are tried, and other schedules of a long step, which
then has small bubbles."""


def near(_: Ranked) -> float:
    """Seconds over the best up to which other ways of a candidate are tried that change little."""
    return RETRIED


def usual(one: Ranked) -> float:
    """The same, where nothing else is said."""
    return RETRIED if one.share > LONG else inf


def by_turns(items: Iterable[T], seconds: Callable[[T], float], kind: Callable[[T], Hashable]) -> list[T]:
    """By seconds, where each of a kind counts as slower than the one before it, see :func:`delayed`.

    >>> by_turns([("apart", 1.0), ("apart", 1.01), ("shared", 1.02)], lambda x: x[1], lambda x: x[0])
    [('apart', 1.0), ('shared', 1.02), ('apart', 1.01)]
    """
    ordered, numbers = sorted(items, key=seconds), dict[Hashable, int]()
    kinds = np.array([numbers.setdefault(kind(one), len(numbers)) for one in ordered], np.int64)
    turn = delayed(np.array([seconds(one) for one in ordered], np.float64), kinds)
    return [ordered[i] for i in np.argsort(turn, kind="stable")]


def in_turn(ranked: Sequence[Ranked]) -> list[Ranked]:
    """The fastest first of each way in which modules share ranks, then the second of each, and so on."""
    seen, placed = Counter[object](), list[tuple[int, float, Ranked]]()
    for one in sorted(ranked, key=lambda r: r.seconds):
        spans = [(layout.ranks[0], layout.ranks[-1]) for layout in one.candidate.layouts.values()]
        kind = tuple(a[0] <= b[1] and b[0] <= a[1] for a, b in combinations(spans, 2))
        placed.append((seen[kind], one.seconds, one))
        seen[kind] += 1
    return [one for *_, one in sorted(placed, key=lambda entry: entry[:2])]


def kinds(proposal: Proposal) -> list[object]:
    """What several are simulated of, however promising others are."""
    if proposal.chain:
        return [("chain", len(proposal.ranks[0]))]
    return [proposal.partition, *["homogeneous"] * proposal.homogeneous]


def share_of(proposal: Proposal) -> float:
    """As what share of a simulation it counts."""
    stages = sum(degrees.pp for degrees in proposal.degrees.values())
    return share(proposal.microbatches, stages)


def hopeless(proposal: Proposal, least: Mapping[object, float], ranked: Sequence[Ranked]) -> bool:
    """Whether a proposal with a long step would be far behind the best so far, even if its estimate were as much too
    high as any of its kinds has been.

    Args:
        least: kind -> least of simulated over estimated seconds.
    """
    alike = [r for r in ranked if r.is_homogeneous]
    return share_of(proposal) > LONG and all(
        proposal.seconds * least.get(kind, 0.0) > BEHIND * fastest(alike if kind == "homogeneous" else ranked)
        for kind in kinds(proposal)
    )


def promising(proposals: Sequence[Proposal], simulations: int) -> list[Proposal]:
    """The best of all, of every partition, and of those with one layout for all modules; of those that lie alike first
    the best.
    """
    each = max(2, simulations // 6)
    chosen: list[Proposal] = []
    seen: Counter[object] = Counter()
    spent = 0.0
    for p in by_turns(proposals, lambda p: p.seconds, lambda p: p.lies):
        if spent < simulations or any(seen[kind] < each for kind in kinds(p)):
            chosen.append(p)
            seen.update(kinds(p))
            spent += share_of(p)
    return chosen
