"""Which pools of a cluster groups of modules are allocated ranks of. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from hetero_strategy.planner.cluster import Cluster

Where = tuple[range, ...]
"""Numbers of the neighbouring pools of every group."""
Limits = tuple[tuple[tuple[int, ...], int], ...]
"""Groups, and ranks that they have together."""


def all_wheres(groups: int, pools: int) -> Iterator[Where]:
    """All ways for groups to lie in pools one after the other: at most one of them spans a border.

    >>> list(all_wheres(1, 2))
    [(range(0, 1),), (range(0, 2),), (range(1, 2),)]
    """
    spans = [range(first, last + 1) for first in range(pools) for last in range(first, pools)]
    for where in product(spans, repeat=groups):
        if all(_apart(*pair) for pair in combinations(where, 2)):
            yield where


def _apart(one: range, other: range) -> bool:
    """Whether two groups share one pool at most, at the end of both."""
    both = [pool for pool in one if pool in other]
    return not both or (len(both) == 1 and all(both[0] in (span[0], span[-1]) for span in (one, other)))


def limits(where: Where, cluster: Cluster) -> Limits:
    """What keeps groups within their pools: for neighbouring pools, the groups that have no ranks elsewhere."""
    found = []
    for first in range(len(cluster.pools)):
        for last in range(first, len(cluster.pools)):
            inside = [g for g, pools in enumerate(where) if first <= pools[0] and pools[-1] <= last]
            if inside and (first == last or any(len(where[g]) > 1 for g in inside)):
                found.append((tuple(inside), len(cluster.ranks_of((first, last)))))
    return tuple(found)


def together(where: Where) -> list[tuple[list[int], range]]:
    """Groups that share pools, directly or through others, and these pools, from the first on."""
    found: list[tuple[list[int], range]] = []
    for group in sequence(where):
        pools = where[group]
        if found and found[-1][1][-1] >= pools[0]:
            groups, before = found[-1]
            found[-1] = [*groups, group], range(before[0], max(before[-1], pools[-1]) + 1)
        else:
            found.append(([group], pools))
    return found


def sequence(where: Where, tp: Sequence[int] = ()) -> list[int]:
    """Groups in the order in which they lie on ranks; where it is given, of one place by tensor parallelism."""
    return sorted(range(len(where)), key=lambda g: (where[g][0], where[g][-1], -tp[g] if tp else 0))


def settle(where: Where, sizes: Sequence[int], cluster: Cluster, tp: Sequence[int]) -> tuple[range, ...] | None:
    """Ranks of groups of these sizes, each from its first pool on or after the one before; None if too few are left.

    Of several pools those of most tensor parallelism come first in theirs, so that they cross fewer nodes.
    """
    ranks, end = [range(0)] * len(sizes), 0
    for group in sequence(where, tp if len(cluster.pools) > 1 else ()):
        first = max(end, cluster.ranks_of(where[group])[0])
        end = first + sizes[group]
        ranks[group] = range(first, end)
    return tuple(ranks) if end <= cluster.ranks else None
