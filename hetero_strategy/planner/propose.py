"""Candidates worth a simulation, by a formula: all that there are on few ranks, the best allocations' on many. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from math import ceil, floor, inf, lcm
from typing import NamedTuple

from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.allocate import Allocation, allocate
from hetero_strategy.planner.chain import Chain, chain_degrees, propose_chain
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import (
    Degrees,
    Partition,
    compositions,
    degrees,
    divisors,
    partitions,
    place_groups,
    shards,
)

FEW = 16
"""Ranks up to which everything is tried."""
PER_INSTANCE = (1, 2, 4, 8, 16)
"""Samples of an instance in a microbatch that are tried, besides all of them."""
WORTH = 1.25
"""Estimated seconds over the best of other proposals up to which one pipeline through all modules is proposed."""
KEPT = 12
"""Allocations of each partition that are turned into layouts."""


class Proposal(NamedTuple):
    """A way to lay out all modules, and what it is estimated to take."""

    seconds: float
    partition: Partition
    sizes: tuple[int, ...]
    """Ranks of each group."""
    degrees: Mapping[str, Degrees]
    microbatches: int
    chain: Chain | None = None
    """One pipeline through all modules; ``degrees`` are those of the whole then."""

    @property
    def homogeneous(self) -> bool:
        """Whether all modules have the same layout on the same ranks."""
        return (
            len(self.partition) == 1
            and self.chain is None
            and len({d._replace(recomputed=False) for d in self.degrees.values()}) == 1
        )

    @property
    def candidate(self) -> Candidate:
        recompute = {name: Recompute() for name, d in self.degrees.items() if d.recomputed}
        if self.chain is not None:
            layouts = self.chain.layouts(range(*self.sizes))
            return Candidate(layouts, self.microbatches, recompute=recompute, reshard_after_forward="never")
        layouts = place_groups(self.partition, self.sizes, self.degrees)
        return Candidate(layouts, self.microbatches, recompute=recompute)


class Proposer:
    """Finds proposals for one model, cluster and data.

    Args:
        batches: global batches drawn from the data.
        microbatches: of a step; None: to be chosen.
    """

    def __init__(
        self,
        shape: ModelShape,
        estimates: Estimates,
        cluster: Cluster,
        batches: Sequence[StepMetadata],
        microbatches: int | None,
    ) -> None:
        self._shape, self._estimates, self._asked = shape, estimates, microbatches
        self._ranks, self._ranks_per_node = cluster.ranks, cluster.ranks_per_node
        self._samples = samples = min(len(b.samples) for b in batches)
        self._units = {
            name: max(1, min(samples if m.samplewise else len(b.items[name].sample) for b in batches))
            for name, m in shape.modules.items()
        }
        self._language_model = shape.samplewise[0]
        self._partitions = list(partitions(list(shape.modules)))

    def proposals(self) -> list[Proposal]:
        """All that fit into memory, by estimated seconds."""
        made = [*(self._all() if self._ranks <= FEW else chain(self._allocated(), self._alike()))]
        most = WORTH * min((p.seconds for p in made), default=inf)
        return sorted([*made, *self._chained(most)], key=lambda p: p.seconds)

    def counts(self, instances: int) -> list[int]:
        """Numbers of microbatches to try with so many instances of the language model."""
        if self._asked is not None:
            return [self._asked]
        each = max(1, self._samples // instances)
        return sorted({max(1, each // n) for n in PER_INSTANCE} | {1})

    def propose(
        self, partition: Partition, sizes: Sequence[int], chosen: Mapping[str, Degrees], microbatches: int
    ) -> Proposal | None:
        """Estimate one; None if it does not fit into memory even with all blocks recomputed."""
        fitting: dict[str, Degrees] = {}
        busy = []
        for group in partition:
            fits = self._recomputed({name: chosen[name] for name in group}, microbatches)
            if fits is None:
                return None
            fitting |= fits
            busy.append(sum(self._busy(name, given, microbatches) for name, given in fits.items()))
        through = sum(self._estimates.through(name, given, microbatches) for name, given in fitting.items())
        return Proposal(max(busy) + through, partition, tuple(sizes), fitting, microbatches)

    def _recomputed(self, group: dict[str, Degrees], microbatches: int) -> dict[str, Degrees] | None:
        """Recompute modules that share ranks until they fit, those that keep most first; None: not even all do."""
        e = self._estimates
        waiting = sorted(group, key=lambda name: e.activations(name, group[name], microbatches))
        while sum(e.bytes(name, given, microbatches) for name, given in group.items()) > e.memory:
            if not waiting:
                return None
            name = waiting.pop()
            group[name] = group[name]._replace(recomputed=self._shape.modules[name].has_blocks)
        return group

    def _busy(self, name: str, given: Degrees, microbatches: int) -> float:
        """Seconds in which a rank of the slowest stage computes or synchronizes, after the first microbatch."""
        later = (microbatches - 1) / microbatches
        e = self._estimates
        return e.busy(name, given, microbatches) * later + e.synchronized(name, given, microbatches)

    def _all(self) -> Iterator[Proposal]:
        of = {
            (name, n): degrees(module, n, self._ranks_per_node, self._units[name])
            for name, module in self._shape.modules.items()
            for n in range(1, self._ranks + 1)
        }
        for partition in self._partitions:
            for sizes in compositions(self._ranks, len(partition)):
                ways = [of[name, n] for group, n in zip(partition, sizes, strict=True) for name in group]
                names = [name for group in partition for name in group]
                for way in product(*ways):
                    chosen = dict(zip(names, way, strict=True))
                    for count in self.counts(chosen[self._language_model].dp):
                        if (made := self.propose(partition, sizes, chosen, count)) is not None:
                            yield made

    def _allocated(self) -> Iterator[Proposal]:
        tp = {n: [t for t in m.tp if self._ranks_per_node % t == 0] for n, m in self._shape.modules.items()}
        dp = [d for d in divisors(self._samples) if d <= self._ranks]
        counts = {d: self.counts(d) for d in dp}
        allocations = allocate(
            self._estimates, self._partitions, self._language_model, tp, dp, counts, self._ranks,
            most_instances=self._units,
        )  # fmt: skip
        taken: Counter[Partition] = Counter()
        seen = set()
        for allocation in allocations:
            choice = allocation.choice
            taken[choice.partition] += 1
            if taken[choice.partition] > KEPT:
                continue
            for sizes, chosen in self._rounded(allocation):
                key = sizes, tuple(chosen.items()), choice.microbatches
                if key not in seen and (made := self.propose(choice.partition, sizes, chosen, choice.microbatches)):
                    yield made
                seen.add(key)

    def _alike(self) -> Iterator[Proposal]:
        """One layout for all modules, on all ranks."""
        names, ranks = list(self._shape.modules), self._ranks
        ways = [set(degrees(m, ranks, self._ranks_per_node, self._units[n])) for n, m in self._shape.modules.items()]
        for way in sorted(set.intersection(*ways)):
            for count in self.counts(way.dp):
                if (made := self.propose((tuple(names),), (ranks,), dict.fromkeys(names, way), count)) is not None:
                    yield made

    def _chained(self, below: float) -> Iterator[Proposal]:
        """One pipeline through all modules, on all ranks, if it may take less than so many seconds."""
        modules, ranks = self._shape.modules, self._ranks
        for way in chain_degrees(self._shape, ranks, self._ranks_per_node, min(self._units.values())):
            for count in self.counts(way.dp):
                if (made := propose_chain(self._estimates, self._shape, way, count, below)) is not None:
                    seconds, pipeline = made
                    chosen = {name: pipeline.degrees._replace(recomputed=pipeline.degrees.recomputed and m.has_blocks)
                              for name, m in modules.items()}  # fmt: skip
                    yield Proposal(seconds, (tuple(modules),), (ranks,), chosen, count, pipeline)

    def _rounded(self, allocation: Allocation) -> Iterator[tuple[tuple[int, ...], dict[str, Degrees]]]:
        """Layouts next to an allocation: the language model's pipeline ranks rounded down and up."""
        choice, name = allocation.choice, self._language_model
        home = next(g for g, group in enumerate(choice.partition) if name in group)
        one = choice.tp[name] * choice.dp
        most = self._estimates.blocks(name)
        wanted = allocation.ranks[home] / one
        for pp in sorted({floor(wanted), ceil(wanted)}):
            if not 1 <= pp <= most or pp * one > self._ranks:
                continue
            sizes = self._shared(allocation, home, pp * one)
            if sizes is None:
                continue
            chosen = {}
            for group, size in zip(choice.partition, sizes, strict=True):
                for module in group:
                    ways = self._ways(module, choice.tp[module], size, pp if module == name else 1)
                    if ways:
                        chosen[module] = self._soonest(module, ways, choice.microbatches)
            if len(chosen) == len(choice.tp):
                yield sizes, chosen

    def _soonest(self, module: str, ways: Sequence[Degrees], microbatches: int) -> Degrees:
        """That which communicates least."""
        return min(ways, key=lambda d: self._estimates.synchronized(module, d, microbatches))

    def _ways(self, module: str, tp: int, size: int, pp: int) -> list[Degrees]:
        if size % (tp * pp):
            return []
        dp = size // (tp * pp)
        if dp > self._units[module]:
            return []
        ways = [Degrees(tp, pp, dp // n, n) for n in shards(dp, max(1, self._ranks_per_node // tp))]
        return [d for d in ways if self._estimates.held(module, d) < self._estimates.memory]

    def _shared(self, allocation: Allocation, home: int, ranks: int) -> tuple[int, ...] | None:
        """Ranks of all groups, if that of the language model has so many; None where others would have too few."""
        partition, tp = allocation.choice.partition, allocation.choice.tp
        grain = [lcm(*(tp[m] for m in group)) for group in partition]
        others = [g for g in range(len(partition)) if g != home]
        sizes = [ranks] * len(partition)
        rest, wanted = self._ranks - ranks, sum(allocation.ranks[g] for g in others)
        for g in others:
            sizes[g] = max(grain[g], floor(allocation.ranks[g] / wanted * rest / grain[g]) * grain[g])
        left = self._ranks - sum(sizes)
        while growing := [g for g in others if grain[g] <= left]:
            slowest = max(growing, key=lambda g: allocation.ranks[g] / sizes[g])
            sizes[slowest] += grain[slowest]
            left -= grain[slowest]
        return tuple(sizes) if left >= 0 else None
