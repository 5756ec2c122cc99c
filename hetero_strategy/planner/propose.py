"""Candidates worth a simulation, by a formula: of all on few ranks, those of the best allocations on many. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product
from math import ceil, floor, inf, lcm, prod
from typing import Any, NamedTuple

import numpy as np

from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.orchestrator import AS_SAMPLED
from hetero_strategy.plan.packing import pack
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.allocate import Allocation, allocate
from hetero_strategy.planner.areas import Where, all_wheres, settle, together
from hetero_strategy.planner.chain import Chain, chain_degrees, propose_chain
from hetero_strategy.planner.estimate import EVERY, Estimates
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.every import FEW, Layouts
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import (
    Degrees,
    Partition,
    degrees,
    divisors,
    idle_places,
    on_nodes,
    partitions,
    places,
    shards,
)

FEW_MODULES = 3
"""Modules up to which all mixtures of replicas and shards, and recompute in part, are tried on few ranks."""
MOST = 2**21
"""Ways to lay out modules on all ranks, up to which every layout is estimated on few ranks."""
FEW_COUNTS = 8
"""Numbers of microbatches up to which each is tried on few ranks."""
PER_INSTANCE = (1, 2, 4, 8, 16)
"""Samples of an instance in a microbatch that are tried, besides all of them."""
WORTH = 1.25
"""Estimated seconds over the best of other proposals up to which one pipeline through all modules, on all ranks, is
proposed."""
KEPT = 12
"""Allocations of each partition that are turned into layouts, times the square of pools, at whose borders fewer of them
can be rounded well."""


class Proposal(NamedTuple):
    """A way to lay out all modules, and what it is estimated to take."""

    seconds: float
    partition: Partition
    ranks: tuple[Sequence[int], ...]
    """Of each group."""
    degrees: Mapping[str, Degrees]
    microbatches: int
    chain: Chain | None = None
    """One pipeline through all modules; ``degrees`` are those of the whole then."""
    given: Given = Given()
    """Options that a person gave."""

    @property
    def homogeneous(self) -> bool:
        """Whether all modules have the same layout on the same ranks."""
        return len(self.partition) == 1 and self.chain is None and _alike(self.degrees)

    @property
    def lies(self) -> Hashable:
        """Ranks, tensor and pipeline parallelism of all modules."""
        spans = tuple((ranks[0], ranks[-1]) for ranks in self.ranks)
        return self.partition, spans, tuple((d.tp, d.cp, d.pp) for d in self.degrees.values()), self.chain is not None

    @property
    def candidate(self) -> Candidate:
        again = {name: self.given.recomputed(name, d.recomputed) for name, d in self.degrees.items()}
        recompute = {name: how for name, how in again.items() if how is not None}
        reshard = "never" if any(d.whole for d in self.degrees.values()) else self.given.reshard_after_forward
        made = Candidate({}, self.microbatches, "auto", recompute, reshard, offload=self.given.offload)
        if self.chain is not None:
            return replace(made, layouts=self.chain.layouts(*self.ranks), reshard_after_forward="never")
        of = {name: ranks for group, ranks in zip(self.partition, self.ranks, strict=True) for name in group}
        layouts = {name: degrees.layout(of[name]) for name, degrees in self.degrees.items()}
        return replace(made, layouts=layouts, fill="auto" if self.homogeneous or reshard == "always" else "fine")


def _alike(degrees: Mapping[str, Degrees]) -> bool:
    """Whether all modules have the same degrees."""
    return len({d.plain for d in degrees.values()}) == 1


class Proposer:
    """Finds proposals for one model, cluster and data.

    Args:
        batches: global batches drawn from the data.
        microbatches: of a step; None: to be chosen.
        balance: how work is spread; None: as by default.
    """

    def __init__(
        self,
        shape: ModelShape,
        estimates: Estimates,
        batches: Sequence[StepMetadata],
        microbatches: int | None,
        balance: BalanceConfig | None = None,
    ) -> None:
        self._shape, self._estimates, self._asked = shape, estimates, microbatches
        self._cluster, self._ranks = estimates.cluster, estimates.cluster.ranks
        self._samples = samples = min(len(b.samples) for b in batches)
        self._units = {  # a batch with few items leaves instances idle, and says nothing of the others
            name: samples if m.samplewise else max(1, *(len(b.items[name].sample) for b in batches))
            for name, m in shape.modules.items()
        }
        self._language_model = shape.samplewise[0]
        self._partitions = list(partitions(list(shape.modules)))
        self._batches, self._balance = batches, balance or BalanceConfig()
        self.fewest = cache(self._fewest)
        self.considered = 0
        """How many layouts fit."""

    @property
    def _thorough(self) -> bool:
        return self._ranks <= FEW and len(self._shape.modules) <= FEW_MODULES

    @property
    def _again(self) -> tuple[int, ...]:
        """Of so many blocks one runs again, where memory asks for it."""
        return EVERY if self._thorough else EVERY[:1]

    def _each(self) -> bool:
        """Whether there are few enough layouts to estimate every one."""
        ranks_per_node = self._cluster.ranks_per_node
        ways = (len(self._degrees(name, self._ranks, ranks_per_node)) for name in self._shape.modules)
        return self._ranks <= FEW and prod(ways) <= MOST

    def proposals(self) -> list[Proposal]:
        """Those that fit into memory, by estimated seconds: the most promising on few ranks."""
        self.considered = 0
        made = [*(self._all() if self._each() else chain(self._allocated(), self._alike()))]
        most = WORTH * min((p.seconds for p in made), default=inf)
        made += self._chained(most)
        self.considered += len(made)
        return sorted(made, key=lambda p: p.seconds)

    def counts(self, instances: int) -> list[int]:
        """Numbers of microbatches to try with so many instances of the language model, which keep its budget."""
        least = self.fewest(instances)
        if self._asked is not None:
            return [self._asked] if self._asked >= least else []
        each = max(1, self._samples // instances)
        return sorted({max(least, each // n) for n in PER_INSTANCE} | {least})

    def refusal(self) -> str | None:
        """Why no number of instances of the language model keeps its budget in as many microbatches as are asked for;
        None: some do.
        """
        name, least = self._language_model, min(map(self.fewest, self._instances()))
        if self._asked is None or self._asked >= least:
            return None
        return (
            f"planner: {self._asked} microbatches are asked for, and balance.budget gives an instance of '{name}'"
            f" {self._balance.budget[name]} tokens in each; give {least} microbatches or more, or a larger budget"
        )

    def _instances(self) -> list[int]:
        """Numbers of instances of the language model that share out its samples or the ranks evenly."""
        most = max(1, min(self._samples, self._ranks))
        return sorted({n for n in (*divisors(self._samples), *divisors(self._ranks), most) if n <= most})

    def _fewest(self, instances: int) -> int:
        """Fewest microbatches of a step in which so many equally fast instances keep the language model's budget."""
        name, policy = self._language_model, self._balance.policy_of(self._language_model)
        if (budget := self._balance.budget.get(name)) is None:
            return 1
        given: Any = {"module": name, "policy": None if policy == AS_SAMPLED else policy, "budget": budget}
        every = (batch.tokens for batch in self._batches)
        return max(pack(rows, instances, None, Cost(), beside=np.zeros(len(rows)), **given).count for rows in every)

    def _tried_counts(self, instances: int) -> set[int]:
        """These, and on few ranks every small number."""
        least = self.fewest(instances)
        return {*self.counts(instances), *(count for count in self._few_counts() if count >= least)}

    def _few_counts(self) -> set[int]:
        """Numbers of microbatches that are tried besides, on few ranks."""
        few = self._ranks <= FEW and self._asked is None
        return {*range(1, 1 + min(FEW_COUNTS, self._samples))} if few else set()

    def propose(
        self, partition: Partition, ranks: tuple[Sequence[int], ...], chosen: Mapping[str, Degrees], microbatches: int
    ) -> list[Proposal]:
        """Estimate one, and where that makes a difference with all parameters gathered once per step; none that does
        not fit into memory even with all blocks recomputed.
        """
        asked, ways = self._estimates.given.reshard_after_forward, [chosen]
        if asked != "always" and not all(way.once for way in chosen.values()):
            whole = {name: way._replace(whole=True) for name, way in chosen.items()}
            ways = [whole] if asked == "never" else [chosen, whole]
        made = (self._proposed(partition, ranks, way, microbatches) for way in ways)
        return [one for one in made if one is not None]

    def _proposed(
        self, partition: Partition, ranks: tuple[Sequence[int], ...], chosen: Mapping[str, Degrees], microbatches: int
    ) -> Proposal | None:
        placed = on_nodes(
            self._cluster, ranks, [lcm(*(chosen[name].neighbours for name in group)) for group in partition]
        )
        if placed is None:
            return None
        fitting: dict[str, Degrees] = {}
        busy, through = [], []
        for group, given in zip(partition, placed, strict=True):
            e = self._estimates.on(given)
            own = {name: chosen[name] for name in group}
            held = {name: e.ahead_of(name, own, microbatches, not e.feeds(name) <= own.keys()) for name in group}
            fits = self._recomputed(e, own, microbatches, held)
            if fits is None:
                return None
            fitting |= fits
            each = {name: e.later(name, way, microbatches) for name, way in fits.items()}
            busy.append(sum(each.values()) - self._filled(e, fits, each, microbatches, len(partition)))
            through += [e.through(name, way, microbatches) for name, way in fits.items()]
        ways = {name: fitting[name] for name in self._shape.modules}
        seconds = max(busy) + sum(through)
        return Proposal(seconds, partition, placed, ways, microbatches, given=self._estimates.given)

    def _filled(
        self, e: Estimates, group: Mapping[str, Degrees], busy: Mapping[str, float], microbatches: int, groups: int
    ) -> float:
        """Seconds of others of a group that fit into the bubbles of the language model's pipeline: of modules whose
        instances lie on ranks of one stage, which idle at once.
        """
        pipeline = group.get(self._language_model)
        if pipeline is None or pipeline.pp == 1 or (groups == 1 and _alike(group)):
            return 0.0
        bubbles = e.through(self._language_model, pipeline, microbatches) * (1 - 1 / pipeline.pp)
        others = (name for name in group if name not in self._shape.samplewise)
        return min(bubbles, sum(busy[name] for name in others if group[name].tp <= pipeline.neighbours * pipeline.dp))

    def _recomputed(
        self, e: Estimates, group: dict[str, Degrees], microbatches: int, held: Mapping[str, int]
    ) -> dict[str, Degrees] | None:
        """Recompute those modules that share ranks until they fit for which it takes least; None: not even all do, or a
        run would refuse it.

        Args:
            held: microbatches whose activations each holds.
        """

        modules = self._shape.modules

        def ways(name: str, recomputed: Sequence[int]) -> list[tuple[str, Degrees, float]]:
            """That a run takes, and the bytes of each."""
            each = (group[name]._replace(recomputed=n) for n in recomputed)
            allowed = (way for way in each if e.given.allows(name, way.tp, way.recomputed))
            return [(name, way, e.bytes(name, way, microbatches, held[name])) for way in allowed]

        least = {name: ways(name, (0,)) for name in group}
        if all(least.values()) and sum(size for ((_, _, size),) in least.values()) <= e.memory:
            return group
        for name in group:
            blocks = modules[name].blocks * modules[name].has_blocks
            least[name] += ways(name, [n for n in self._again if n <= blocks])
        fitting = (way for way in product(*least.values()) if sum(size for _, _, size in way) <= e.memory)
        through = cache(partial(e.through, microbatches=microbatches))
        best = min(fitting, key=lambda way: sum(through(name, given) for name, given, _ in way), default=None)
        return None if best is None else {name: given for name, given, _ in best}

    def _all(self) -> list[Proposal]:
        """The most promising of every layout on all ranks, and of those that leave some idle."""
        layouts = Layouts(self._shape, self._estimates, self._degrees, self._tried_counts, self._again)
        cluster = self._cluster
        idle = idle_places if len(cluster.pools) == 1 else lambda *_: iter(())
        every = ((p, n) for p in self._partitions for n in chain(places(cluster, len(p)), idle(cluster, len(p))))
        found = (self._proposed(f.partition, f.ranks, f.degrees, f.microbatches) for f in layouts.best(every))
        made = [one for one in found if one is not None]
        self.considered = layouts.fit - len(made)
        return made

    def _degrees(self, name: str, ranks: int, ranks_per_node: int) -> list[Degrees]:
        most = max(self._samples, self._units[name])  # as many as the language model may have, of which some may idle
        found = degrees(self._shape.modules[name], ranks, ranks_per_node, most, self._thorough)
        return [way for way in found if self._estimates.worth(name, way)]

    def _allocated(self) -> Iterator[Proposal]:
        allows = self._estimates.given.allows
        tp = {name: [t for t in m.tp if allows(name, t, False)] for name, m in self._shape.modules.items()}
        counts = {d: self.counts(d) for d in self._instances()}
        dp = [d for d, tried in counts.items() if tried]
        if not dp:
            return
        allocations = allocate(
            self._estimates, self._partitions, self._language_model, tp, dp, counts,
            most_instances=self._units, most=KEPT if len(self._cluster.pools) == 1 else None,
        )  # fmt: skip
        taken: Counter[tuple[Partition, Where]] = Counter()
        seen = set()
        for allocation in allocations:
            choice = allocation.choice
            taken[choice.partition, choice.where] += 1
            if taken[choice.partition, choice.where] > KEPT * len(self._cluster.pools) ** 2:
                continue
            for ranks, chosen in self._rounded(allocation):
                for count in counts[choice.dp]:  # with more of them less may have to run again
                    key = ranks, tuple(chosen.items()), count
                    if key not in seen:
                        yield from self.propose(choice.partition, ranks, chosen, count)
                    seen.add(key)

    def _alike(self) -> Iterator[Proposal]:
        """One layout for all modules, on all ranks of neighbouring pools."""
        names = list(self._shape.modules)
        for (pools,) in all_wheres(1, len(self._cluster.pools)):
            ranks, ranks_per_node = self._cluster.ranks_of(pools), self._cluster.of(pools).ranks_per_node
            ways = [set(self._degrees(name, len(ranks), ranks_per_node)) for name in names]
            for way in sorted(set.intersection(*ways)):
                for count in self.counts(way.dp):
                    yield from self.propose((tuple(names),), (ranks,), dict.fromkeys(names, way), count)

    def _chained(self, below: float) -> Iterator[Proposal]:
        """One pipeline through all modules, on all ranks of neighbouring pools, if it may take less than so many
        seconds, or on some of few ranks: messages, which estimates do not count, may take most of a step there.
        """
        modules = self._shape.modules
        if self._estimates.given.reshard_after_forward == "always":  # stages on the same ranks act on their own
            return
        wheres = [(self._cluster.ranks_of(p), p, below) for (p,) in all_wheres(1, len(self._cluster.pools))]
        if len(self._cluster.pools) == 1 and self._ranks <= FEW:
            wheres += [(range(n), range(1), inf) for n in range(2, self._ranks)]
        for ranks, pools, worth in wheres:
            e = self._estimates.of(pools)
            for way in chain_degrees(self._shape, len(ranks), e.cluster.ranks_per_node, self._samples):
                for count in self._tried_counts(way.dp):
                    if (made := propose_chain(e, self._shape, way, count, worth)) is not None:
                        seconds, pipeline = made
                        again = pipeline.degrees.recomputed
                        chosen = {name: pipeline.degrees._replace(recomputed=again and m.has_blocks)
                                  for name, m in modules.items()}  # fmt: skip
                        yield Proposal(seconds, (tuple(modules),), (ranks,), chosen, count, pipeline, e.given)

    def _rounded(self, allocation: Allocation) -> Iterator[tuple[tuple[range, ...], dict[str, Degrees]]]:
        """Layouts next to an allocation: the language model's pipeline ranks rounded down and up, the ranks of others
        also to whole nodes, as collectives are as slow as the links of the node with fewest of their ranks.
        """
        choice, name = allocation.choice, self._language_model
        home = next(g for g, group in enumerate(choice.partition) if name in group)
        of = {m: tp * (choice.cp if m == name else 1) for m, tp in choice.tp.items()}
        one = of[name] * choice.dp
        most = self._estimates.blocks(name)
        wanted = allocation.ranks[home] / one
        tp = [max(of[m] for m in group) for group in choice.partition]
        parts = [lcm(*(of[m] for m in group)) for group in choice.partition]
        nodes = [lcm(n, self._cluster.of(w).ranks_per_node) for n, w in zip(parts, choice.where, strict=True)]
        for pp, grain in product(sorted({floor(wanted), ceil(wanted)}), (parts, nodes)):
            if not 1 <= pp <= most or pp * one > self._ranks:
                continue
            sizes = self._shared(allocation, home, pp * one, grain)
            ranks = None if sizes is None else settle(choice.where, sizes, self._cluster, tp)
            if ranks is None:
                continue
            ways: dict[str, tuple[Degrees, Degrees]] = {}
            for group, given in zip(choice.partition, ranks, strict=True):
                for module in group:
                    pipeline, cp = (pp, choice.cp) if module == name else (1, 1)
                    asked = Degrees(choice.tp[module], pipeline, 1, 1, cp=cp)
                    found = self._soonest(module, asked, given, choice.microbatches)
                    if found is not None:
                        ways[module] = found
            if len(ways) == len(choice.tp):
                yield ranks, {module: soonest for module, (soonest, _) in ways.items()}
                yield ranks, {module: leanest for module, (_, leanest) in ways.items()}

    def _soonest(self, module: str, one: Degrees, ranks: range, microbatches: int) -> tuple[Degrees, Degrees] | None:
        """Return the mixture of replicas and shards that communicates least, of those that fit into memory, and the one
        that leaves most of it to activations: as many of one instance as there are ranks.
        """
        dp, e = len(ranks) // one.ranks, self._estimates.on(ranks)
        if len(ranks) % one.ranks or e.cluster.ranks_per_node % one.neighbours:
            return None
        near = shards(dp, max(1, e.cluster.ranks_per_node // one.neighbours))
        ways = [one._replace(dp_replicate=dp // n, dp_shard=n) for n in near]
        fits = [d for d in ways if e.held(module, d) < e.memory]
        if not fits:
            return None
        soonest = min(fits, key=lambda d: e.synchronized(module, d, microbatches))
        return soonest, min(fits, key=lambda d: e.held(module, d))

    def _shared(self, allocation: Allocation, home: int, ranks: int, grain: Sequence[int]) -> tuple[int, ...] | None:
        """Ranks of all groups, of others than the language model's in multiples of ``grain``; None: they have too few.

        Args:
            home: the language model's group.
            ranks: that it has.
        """
        choice = allocation.choice
        sizes = [ranks] * len(grain)
        for groups, pools in together(choice.where):
            others, rest = sorted(g for g in groups if g != home), len(self._cluster.ranks_of(pools))
            wanted = sum(allocation.ranks[g] for g in others)
            rest = rest - ranks if home in groups else min(rest, round(wanted))
            for g in others:
                sizes[g] = max(grain[g], floor(allocation.ranks[g] / wanted * rest / grain[g]) * grain[g])
            left = rest - sum(sizes[g] for g in others)
            while fitting := [g for g in others if grain[g] <= left]:
                slowest = max(fitting, key=lambda g: allocation.ranks[g] / sizes[g])
                sizes[slowest] += grain[slowest]
                left -= grain[slowest]
            if left < 0:
                return None
        return tuple(sizes)
