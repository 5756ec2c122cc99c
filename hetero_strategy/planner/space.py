"""The ways in which modules can share ranks, and in which one module can lie on its ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, combinations, pairwise, permutations
from math import ceil
from typing import NamedTuple

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.shape import ModuleShape

IDLE = 1 / 4
"""Share of the ranks of one pool that more than two groups may leave idle where everything is tried."""
Partition = tuple[tuple[str, ...], ...]
"""Groups of modules. Modules of a group share all ranks of the group; groups have none in common."""


class Degrees(NamedTuple):
    """How one module lies on its ranks."""

    tp: int
    pp: int
    dp_replicate: int
    dp_shard: int
    recomputed: int = 0
    """Of so many of its blocks one runs again in backward; 0: none does."""
    whole: bool = False
    """Whether parameters are gathered once per step also where by default they are with every microbatch."""
    cp: int = 1

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.neighbours * self.pp * self.dp

    @property
    def neighbours(self) -> int:
        """Ranks that lie on one node: those of an instance on a stage."""
        return self.tp * self.cp

    @property
    def shards(self) -> int:
        """See :attr:`ModuleLayout.shards`."""
        return self.dp_shard * self.cp

    @property
    def once(self) -> bool:
        """Whether parameters are gathered once per step: where pipelined, where nothing shards them, or as asked."""
        return self.whole or self.pp > 1 or self.shards == 1

    @property
    def plain(self) -> Degrees:
        """Without what saves memory or needs more."""
        return self._replace(recomputed=0, whole=False)

    def layout(self, ranks: Sequence[int]) -> ModuleLayout:
        """On so many ranks."""
        return ModuleLayout(
            tuple(ranks),
            tp=self.tp,
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
        )

    @classmethod
    def of(cls, layout: ModuleLayout, recomputed: int = 0, whole: bool = False) -> Degrees:
        """Those of a layout."""
        x = layout
        return cls(x.tp, x.pp, x.dp_replicate, x.dp_shard, recomputed, whole, x.cp)


def partitions(modules: Sequence[str]) -> Iterator[Partition]:
    """All ways to put modules into groups; groups and their modules keep the order given.

    >>> list(partitions(["vision", "llm"]))
    [(('vision', 'llm'),), (('vision',), ('llm',))]
    """
    if not modules:
        yield ()
        return
    first, rest = modules[0], modules[1:]
    for others in partitions(rest):
        for i in range(len(others)):
            joined = ((first, *others[i]), *others[:i], *others[i + 1 :])
            yield tuple(sorted(joined, key=lambda group: modules.index(group[0])))
        yield ((first,), *others)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many positive numbers, in order.

    >>> list(compositions(3, 2))
    [(1, 2), (2, 1)]
    """
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def degrees(
    module: ModuleShape, ranks: int, ranks_per_node: int, most_instances: float, mixed: bool = False
) -> list[Degrees]:
    """All ways in which a module can lie on so many ranks.

    Tensor and context parallelism stay within nodes. Instances are all replicas, all shards, or shards within a node
    that are replicated over nodes.

    Args:
        most_instances: of which it may have.
        mixed: all other mixtures of replicas and shards, too.
    """
    given = module.most_stages, ranks, ranks_per_node, most_instances, mixed
    return [
        way._replace(tp=way.tp // cp, cp=cp)
        for cp in (contexts(ranks_per_node) if module.keys else [1])
        for way in ways([tp * cp for tp in module.tp], *given)
    ]


def contexts(ranks_per_node: int) -> list[int]:
    """Degrees of context parallelism that may be tried."""
    return [2**n for n in range(ranks_per_node.bit_length())]


def ways(
    tp: Iterable[int], most_stages: int, ranks: int, ranks_per_node: int, most_instances: float, mixed: bool = False
) -> Iterator[Degrees]:
    """All ways to lie on so many ranks with some degrees of tensor parallelism, see :func:`degrees`."""
    for degree in tp:
        if ranks % degree or ranks_per_node % degree:
            continue
        for pp in divisors(ranks // degree):
            dp = ranks // degree // pp
            if pp <= most_stages and dp <= most_instances:
                of = divisors(dp) if mixed else shards(dp, max(1, ranks_per_node // degree))
                yield from (Degrees(degree, pp, dp // n, n) for n in of)


def shards(instances: int, on_node: int) -> list[int]:
    """Numbers of instances that may share parameters: one, those of a node, all."""
    return sorted({1, instances, *([on_node] if instances % on_node == 0 else [])})


def one_after_another(ranks: Sequence[int], sizes: Sequence[int], order: Iterable[int]) -> tuple[Sequence[int], ...]:
    """Ranks of groups of these sizes that follow each other in some order."""
    given: list[Sequence[int]] = [()] * len(sizes)
    first = 0
    for group in order:
        given[group] = ranks[first : first + sizes[group]]
        first += sizes[group]
    return tuple(given)


def on_nodes(cluster: Cluster, ranks: tuple[Sequence[int], ...], tp: Sequence[int]) -> tuple[Sequence[int], ...] | None:
    """The same ranks where no tensor parallelism of groups crosses a node; of one pool otherwise as many, with the
    groups of most tensor parallelism first; None where one would still.

    Args:
        tp: of each group; of modules with several degrees, a multiple of all.
    """
    if len(cluster.pools) > 1:
        return ranks if all(map(cluster.within_nodes, ranks, tp)) else None
    for order in (range(len(ranks)), sorted(range(len(ranks)), key=lambda g: -tp[g])):
        placed = one_after_another(range(sum(map(len, ranks))), [*map(len, ranks)], order)
        if all(given[0] % cluster.ranks_per_node % n == 0 for given, n in zip(placed, tp, strict=True)):
            return placed
    return None


def places(cluster: Cluster, groups: int) -> Iterator[tuple[Sequence[int], ...]]:
    """All ways to deal out ranks to groups, each of which has neighbours; of an odd number one may stay idle.

    Those of one pool in the order of the groups; those of several pools in any order, so that any group may have any
    of them, and where it is better no group has the ranks of a slow one.
    """
    numbers = range(len(cluster.pools))
    for used in chain(*(combinations(numbers, n) for n in reversed(range(1, len(numbers) + 1)))):
        ranks: Sequence[int] = cluster.ranks_of(used)
        if len(ranks) > sum(cluster.pools[i].ranks for i in used):
            ranks = tuple(rank for i in used for rank in cluster.ranks_of([i]))
        for count in {len(ranks), max(1, len(ranks) // 2 * 2)}:
            for sizes in compositions(count, groups):
                for order in permutations(range(groups)) if len(used) > 1 else [range(groups)]:
                    yield one_after_another(ranks, sizes, order)


def idle_places(cluster: Cluster, groups: int) -> Iterator[tuple[Sequence[int], ...]]:
    """The ways to deal out the ranks of one pool that leave some of them idle, without those of :func:`places`; of more
    than two groups up to a quarter.
    """
    least = groups if groups <= 2 else ceil(cluster.ranks * (1 - IDLE))
    for count in range(least, cluster.ranks // 2 * 2):
        for sizes in compositions(count, groups):
            yield one_after_another(range(cluster.ranks), sizes, range(groups))
