"""Search space: how modules can share ranks, layouts of a module on its ranks, and tables of such layouts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.layout.spec import ModuleLayout, divisors
from hetero_strategy.model.spec import ModuleSpec
from hetero_strategy.parallelize.transform import Transform

Partition = tuple[tuple[str, ...], ...]
"""Groups of modules. Modules of a group share all its ranks; groups have no ranks in common."""


class Degrees(NamedTuple):
    """The parallel degrees of one module, and its transforms."""

    tp: int
    pp: int
    dp_replicate: int
    dp_shard: int
    transforms: tuple[Transform, ...] = ()
    """Transforms of the module: those that a plan adds, or all of a candidate's. Estimates add those of the user that
    are missing."""
    whole: bool = False
    """Whether parameters are gathered once per step even if the default is every microbatch."""
    cp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.neighbours * self.pp * self.dp

    @property
    def neighbours(self) -> int:
        """Return the ranks that must be on one node: those of an instance on a stage."""
        return self.tp * self.cp

    @property
    def shards(self) -> int:
        """Return the ranks that share parameters, see :attr:`ModuleLayout.shards`."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Return the ranks that share a parameter of one rank's experts, see :attr:`ModuleLayout.expert_shards`."""
        return self.shards * self.tp // self.ep

    @property
    def once(self) -> bool:
        """Return whether parameters are gathered once per step: if pipelined, not sharded, or asked for."""
        return self.whole | (self.pp > 1) | (self.shards == 1)

    @property
    def plain(self) -> Degrees:
        """Return the degrees without transforms and ``whole``."""
        return self._replace(transforms=(), whole=False)

    def layout(self, ranks: Sequence[int]) -> ModuleLayout:
        """Return the layout with these degrees on some ranks."""
        return ModuleLayout(
            tuple(ranks),
            tp=self.tp,
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            ep=self.ep,
        )

    @classmethod
    def of(cls, layout: ModuleLayout, transforms: tuple[Transform, ...] = (), whole: bool = False) -> Degrees:
        """Read the degrees of a layout."""
        x = layout
        return cls(x.tp, x.pp, x.dp_replicate, x.dp_shard, transforms, whole, x.cp, x.ep)


def partitions(modules: Sequence[str]) -> Iterator[Partition]:
    """Yield all ways to put modules into groups; groups and their modules keep the given order.

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


def degrees(
    module: ModuleSpec, ranks: int, ranks_per_node: int, most_instances: float, mixed: bool = False
) -> list[Degrees]:
    """Return all degrees of a module on so many ranks.

    Tensor and context parallelism stay within nodes. Instances are all replicas, all shards, or shards within a node
    that are replicated over nodes.

    Args:
        most_instances: most instances that the module may have.
        mixed: include all other mixtures of replicas and shards.
    """
    limits = module.most_stages, ranks, ranks_per_node, most_instances, mixed
    every = (
        way._replace(tp=way.tp // cp, cp=cp)
        for cp in (contexts(ranks_per_node) if module.keys else [1])
        for way in ways([tp * cp for tp in module.tp], *limits)
    )
    return [with_experts for way in every for with_experts in divided(module, way)]


def divided(module: ModuleSpec, way: Degrees) -> list[Degrees]:
    """Return the degrees with every number of ranks over which the module's experts may be divided, fewest first."""
    if module.experts is None:
        return [way]
    every = (way._replace(ep=ep) for ep in divisors(way.shards * way.tp))
    return [one for one in every if one.ep == 1 or module.experts.can_be_divided(one.ep, one.expert_shards)]


def contexts(ranks_per_node: int) -> list[int]:
    """Return the degrees of context parallelism to try."""
    return [2**n for n in range(ranks_per_node.bit_length())]


def ways(
    tp: Iterable[int], most_stages: int, ranks: int, ranks_per_node: int, most_instances: float, mixed: bool = False
) -> Iterator[Degrees]:
    """Yield all degrees on so many ranks with some degrees of tensor parallelism, see :func:`degrees`."""
    for degree in tp:
        if ranks % degree or ranks_per_node % degree:
            continue
        for pp in divisors(ranks // degree):
            dp = ranks // degree // pp
            if pp <= most_stages and dp <= most_instances:
                of = divisors(dp) if mixed else shards(dp, max(1, ranks_per_node // degree))
                yield from (Degrees(degree, pp, dp // n, n) for n in of)


def shards(instances: int, on_node: int) -> list[int]:
    """Return the numbers of instances that may share parameters: one, those of a node, all."""
    return sorted({1, instances, *([on_node] if instances % on_node == 0 else [])})


def on_nodes(ranks_per_node: int, sizes: Sequence[int], tp: Sequence[int]) -> tuple[range, ...] | None:
    """Return the ranks of consecutive groups of these sizes so that no tensor parallelism crosses a node.

    The groups keep their order, or those with most tensor parallelism come first. None: it crosses nodes in both
    orders.

    Args:
        tp: degree of each group; for modules of several degrees, a common multiple.
    """
    for order in (range(len(sizes)), sorted(range(len(sizes)), key=lambda g: -tp[g])):
        placed = one_after_another(sizes, order)
        if all(ranks[0] % ranks_per_node % n == 0 for ranks, n in zip(placed, tp, strict=True)):
            return placed
    return None


def one_after_another(sizes: Sequence[int], order: Iterable[int]) -> tuple[range, ...]:
    """Return the ranks of consecutive groups of these sizes in some order."""
    ranks, first = [range(0)] * len(sizes), 0
    for group in order:
        ranks[group] = range(first, first + sizes[group])
        first += sizes[group]
    return tuple(ranks)


class ModuleTable(NamedTuple):
    """A table of one module's degrees, each with every number of microbatches to try; one entry for each pair."""

    ways: list[Degrees]
    """Degrees without transforms; :attr:`way` indexes this list."""
    way: Int64[np.ndarray, "entries"]
    microbatches: Int64[np.ndarray, "entries"]
    ranks: Int64[np.ndarray, "entries"]
    tp: Int64[np.ndarray, "entries"]
    """Ranks of an instance on a stage: tensor ranks times context ranks."""
    cp: Int64[np.ndarray, "entries"]
    ep: Int64[np.ndarray, "entries"]
    pp: Int64[np.ndarray, "entries"]
    replicate: Int64[np.ndarray, "entries"]
    dp: Int64[np.ndarray, "entries"]
    once: Int64[np.ndarray, "entries"]
    """Whether parameters are gathered once per step by default."""
    number: Int64[np.ndarray, "entries"]
    """Number of the degrees besides ``ep``, shared with the tables of other modules."""

    @classmethod
    def of(
        cls, ways: list[Degrees], counts: Callable[[Degrees], Collection[int]], numbers: dict[Degrees, int]
    ) -> ModuleTable:
        """Make the table of one module.

        Args:
            counts: maps degrees to the numbers of microbatches to try.
            numbers: numbers of degrees in other tables; those of this table are added.
        """
        tried = [counts(w) for w in ways]
        way = np.repeat(np.arange(len(ways)), np.array([len(n) for n in tried], np.int64))
        rows = [
            (
                w.ranks,
                w.neighbours,
                w.cp,
                w.ep,
                w.pp,
                w.dp_replicate,
                w.dp,
                w.once,
                numbers.setdefault(w._replace(ep=1), len(numbers)),
            )
            for w in ways
        ]
        columns = np.array(rows, np.int64).reshape(-1, 9).T[:, way]
        return cls(ways, way, np.array([n for each in tried for n in each], np.int64), *columns)


class EntryTimes(NamedTuple):
    """A table of a module's times and bytes by entry, with a row for each choice of transforms; row 0 has none."""

    later: Float64[np.ndarray, "*choices entries"]
    through: Float64[np.ndarray, "*choices entries"]
    bytes: Float64[np.ndarray, "*choices entries"]
    """Bytes of an entry; infinite if a run would refuse it."""
    more: Float64[np.ndarray, "*choices entries"]
    """Bytes of each further microbatch that is held."""

    def at(self, row: int, entries: np.ndarray) -> EntryTimes:
        """Return the values of some entries, of one row."""
        return EntryTimes(*(numbers[row, entries] for numbers in self))


class GroupLayouts(NamedTuple):
    """A table of layouts of one or several groups that fit into memory, an entry each."""

    ranks: Int64[np.ndarray, "layouts"]
    microbatches: Int64[np.ndarray, "layouts"]
    later: Float64[np.ndarray, "layouts"]
    through: Float64[np.ndarray, "layouts"]
    sizes: Int64[np.ndarray, "layouts groups"]
    tp: Int64[np.ndarray, "layouts groups"]
    """A multiple of the tensor parallelism of all modules of a group."""
    entries: Int64[np.ndarray, "layouts modules"]
    """Indices into the modules' tables."""
    choices: Int64[np.ndarray, "layouts modules"]
    """Choices of transforms: rows of the modules' times."""

    @property
    def seconds(self) -> Float64[np.ndarray, "layouts"]:
        return self.later + self.through

    @classmethod
    def joined(cls, parts: Sequence[GroupLayouts], groups: int, modules: int) -> GroupLayouts:
        """Concatenate layouts of so many groups and modules."""
        none = np.empty(0, np.int64), np.empty((0, groups), np.int64), np.empty((0, modules), np.int64)
        empty = cls(none[0], none[0], np.empty(0), np.empty(0), none[1], none[1], none[2], none[2])
        return cls(*(np.concatenate(columns) for columns in zip(empty, *parts, strict=True)))

    def at(self, entries: Any) -> GroupLayouts:
        """Return some of the layouts."""
        return GroupLayouts(*(column[entries] for column in self))

    def fastest(self, most: int) -> GroupLayouts:
        """Return at most so many of the fastest layouts."""
        return self.at(np.argsort(self.seconds, kind="stable")[:most])

    def limit(self, most: int) -> float:
        """Return the seconds below which another layout is among so many of the fastest."""
        return float(np.partition(self.seconds, most - 1)[most - 1]) if len(self.ranks) >= most else np.inf

    def kept(self, layers: int, apart: int) -> GroupLayouts:
        """Keep the first ``layers`` fronts of as many ranks and microbatches: layouts that no other dominates, then
        those that no other of the rest dominates, and so on.

        Layouts whose groups may cross nodes elsewhere do not dominate each other.

        Args:
            apart: largest degree of tensor parallelism; 0: layouts dominate each other wherever groups cross nodes.
        """
        columns = [self.ranks, self.microbatches]
        if apart:
            columns += [*self.tp.T, *(self.sizes.T % apart)]
        segment = reduce(lambda a, b: np.unique(a * (int(b.max(initial=0)) + 1) + b, return_inverse=True)[1], columns)
        order, left = np.lexsort((self.through, self.later, segment)), np.empty(0, np.int64)
        # Within a segment, a place among all by `through`; each segment lies below all before it.
        place = np.empty(len(order), np.int64)
        place[np.argsort(self.through, kind="stable")] = np.arange(len(order))
        place -= segment * len(order)
        for _ in range(layers):
            if not len(order):
                break
            own = place[order]
            before = np.minimum.accumulate(np.concatenate([[np.iinfo(np.int64).max], own]))[:-1]
            left, order = np.concatenate([left, order[own < before]]), order[own >= before]
        return self.at(left)
