"""Candidates worth a simulation: proposals by a formula, and the usual layouts of Megatron-LM. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import lcm, prod
from typing import Any, NamedTuple

import numpy as np

from hetero_strategy.layout.spec import ModuleLayout, divisors
from hetero_strategy.layout.split_layers import split
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.packing import pack
from hetero_strategy.plan.plan_step import AS_SAMPLED
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.allocate import RankAllocator
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.space import (
    Degrees,
    Partition,
    degrees,
    divided,
    on_nodes,
    partitions,
    shards,
    ways,
)

FEW = 16
"""Ranks up to which every layout is estimated."""
FEW_MODULES = 3
"""Modules up to which all mixtures of replicas and shards, and all choices of transforms, are tried on few ranks."""
MOST = 2**21
"""Number of layouts of all modules up to which every layout is estimated on few ranks."""
FEW_COUNTS = 8
"""Numbers of microbatches up to which each is tried on few ranks."""
PER_INSTANCE = (1, 2, 4, 8, 16)
"""Samples of an instance in a microbatch that are tried, besides all of them."""
USUAL = 12
"""Most usual layouts that are simulated."""


class Proposal(NamedTuple):
    """A layout of all modules, and its estimated seconds."""

    seconds: float
    partition: Partition
    ranks: tuple[Sequence[int], ...]
    """Ranks of each group."""
    degrees: Mapping[str, Degrees]
    microbatches: int
    language_model: str
    options: RunOptions = RunOptions()
    """Options that the user gave."""

    @property
    def homogeneous(self) -> bool:
        """Return whether all modules have the same layout on the same ranks."""
        return len(self.partition) == 1 and _alike(self.degrees)

    @property
    def layout_key(self) -> Hashable:
        """Return how modules share ranks, and the degrees of the language model, which decide most of a step."""
        return self.partition, self.degrees[self.language_model].plain

    @property
    def candidate(self) -> Candidate:
        transforms = {name: self.options.of(name, d.transforms) for name, d in self.degrees.items()}
        reshard = "never" if any(d.whole for d in self.degrees.values()) else self.options.reshard_after_forward
        of = {name: ranks for group, ranks in zip(self.partition, self.ranks, strict=True) for name in group}
        layouts = {name: degrees.layout(of[name]) for name, degrees in self.degrees.items()}
        fill = "auto" if self.homogeneous or reshard == "always" else "fine"
        return Candidate(layouts, self.microbatches, "auto", transforms, reshard, fill)


def _alike(degrees: Mapping[str, Degrees]) -> bool:
    """Return whether all modules have the same degrees, besides ``ep``."""
    return len({d.plain._replace(ep=1) for d in degrees.values()}) == 1


class Proposer:
    """A source of proposals for one model, cluster and data.

    Args:
        batches: global batches drawn from the data.
        microbatches: number of microbatches of a step; None: the plan chooses.
        balance: how work is spread; None: the default.
    """

    def __init__(
        self,
        shape: ModelSpec,
        estimates: Estimates,
        batches: Sequence[StepMetadata],
        microbatches: int | None,
        balance: BalanceConfig | None = None,
    ) -> None:
        self._shape, self._estimates, self._asked = shape, estimates, microbatches
        self._cluster, self._ranks = estimates.cluster, estimates.cluster.ranks
        self._samples = samples = min(len(b.samples) for b in batches)
        self._units = {  # a batch with few items leaves instances idle; other batches may not
            name: samples if m.samplewise else max(1, *(len(b.items[name].sample) for b in batches))
            for name, m in shape.modules.items()
        }
        self._language_model = shape.samplewise[0]
        self._partitions = list(partitions(list(shape.modules)))
        self._batches, self._balance = batches, balance or BalanceConfig()
        self.fewest = cache(self._fewest)
        self.considered = 0
        """Number of layouts of groups of modules that fit."""
        options = (len(degrees(m, self._ranks, self._cluster.ranks_per_node, samples)) for m in shape.modules.values())
        self._every = self._ranks <= FEW and prod(options) <= MOST
        self._thorough = self._every and len(shape.modules) <= FEW_MODULES

    def proposals(self) -> list[Proposal]:
        """Return the most promising proposals that fit into memory, by estimated seconds."""
        allocator = RankAllocator(
            self._shape, self._estimates, self._ways, cache(self._tried_counts), self._thorough, self._every
        )
        proposals = list[Proposal]()
        for one in allocator.best(self._partitions):
            tp = [lcm(*(one.degrees[name].neighbours for name in group)) for group in one.partition]
            ranks = on_nodes(self._cluster.ranks_per_node, one.sizes, tp)
            assert ranks is not None, "the allocator leaves out what crosses nodes"
            options = one.microbatches, self._language_model, self._estimates.options
            proposals.append(Proposal(one.seconds, one.partition, ranks, one.degrees, *options))
        self.considered = allocator.fit
        return sorted(proposals, key=lambda p: p.seconds)

    def counts(self, instances: int) -> list[int]:
        """Return the numbers of microbatches to try with so many language model instances that keep its budget."""
        least = self.fewest(instances)
        if self._asked is not None:
            return [self._asked] if self._asked >= least else []
        each = max(1, self._samples // instances)
        return sorted({max(least, each // n) for n in PER_INSTANCE} | {least})

    def refusal(self) -> str | None:
        """Return why no number of instances of the language model keeps its budget in the microbatches that the user
        set; None: some do.
        """
        name, least = self._language_model, min(map(self.fewest, self._instances()))
        if self._asked is None or self._asked >= least:
            return None
        return (
            f"planner: {self._asked} microbatches are asked for, and balance.budget gives an instance of '{name}'"
            f" {self._balance.budget[name]} tokens in each; give {least} microbatches or more, or a larger budget"
        )

    def _instances(self) -> list[int]:
        """Return the numbers of language model instances that share out its samples or the ranks evenly."""
        most = max(1, min(self._samples, self._ranks))
        return sorted({n for n in (*divisors(self._samples), *divisors(self._ranks), most) if n <= most})

    def _fewest(self, instances: int) -> int:
        """Return the fewest microbatches in which so many equally fast instances keep the language model's budget."""
        name, policy = self._language_model, self._balance.policy_of(self._language_model)
        if (budget := self._balance.budget.get(name)) is None:
            return 1
        options: Any = {"module": name, "policy": None if policy == AS_SAMPLED else policy, "budget": budget}
        steps = ((batch.tokens, np.zeros(len(batch.tokens))) for batch in self._batches)
        return max(pack(rows, instances, None, Cost(), other_costs=nothing, **options).count for rows, nothing in steps)

    def _tried_counts(self, instances: int) -> set[int]:
        """Return :meth:`counts`, and on few ranks every small number."""
        least = self.fewest(instances)
        return {*self.counts(instances), *(count for count in self._few_counts() if count >= least)}

    def _few_counts(self) -> set[int]:
        """Return the small numbers of microbatches that are also tried on few ranks."""
        few = self._ranks <= FEW and self._asked is None
        return {*range(1, 1 + min(FEW_COUNTS, self._samples))} if few else set()

    def _ways(self, module: str, widths: Collection[int] | None) -> list[Degrees]:
        """Return a module's degrees on numbers of ranks; None: on any that it may have.

        On many ranks the language model has numbers of instances that share out samples or ranks evenly. Other modules
        are in a pipeline only on all ranks, where they may be laid out as the language model is.
        """
        per_node, shape = self._cluster.ranks_per_node, self._shape.modules[module]
        options = list[Degrees]()
        if self._every:
            most = max(self._samples, self._units[module])  # as many as the language model has; some may idle
            for ranks in range(1, self._ranks + 1):
                options += degrees(shape, ranks, per_node, most, self._thorough)
        elif widths is None:
            for cp, tp, dp in product(self._estimates.contexts(module), shape.tp, self._instances()):
                most = min(shape.most_stages, self._ranks // (tp * cp * dp)) if per_node % (tp * cp) == 0 else 0
                near = shards(dp, max(1, per_node // (tp * cp)))
                every = (Degrees(tp, pp, dp // n, n, cp=cp) for pp in range(1, most + 1) for n in near)
                options += [one for way in every for one in divided(shape, way)]
        else:
            for ranks in sorted(widths):
                options += [one for way in ways(shape.tp, 1, ranks, per_node, ranks) for one in divided(shape, way)]
            options += [way for way in degrees(shape, self._ranks, per_node, self._samples) if way.pp > 1]
        return [way for way in options if self._estimates.worth(module, way)]


class Rigid(NamedTuple):
    """A usual layout, and its estimated seconds."""

    seconds: float
    candidate: Candidate


def rigid_layouts(
    shape: ModelSpec, estimates: Estimates, llm: ModuleLayout, lighter: float = 1.0
) -> dict[str, ModuleLayout]:
    """Lay out encoders around a language model as Megatron-LM usually does, to compare with plans.

    Every encoder is in the language model's tensor parallelism, with one instance for each of the language model's, on
    the first pipeline stage, whose blocks are fewer by the encoder's work. Context-parallel ranks all encode the same
    pictures, which takes as long as if one of them did (NVIDIA-NeMo/Megatron-Bridge, pull request 5645: "Every
    context-parallel rank currently encodes the full image set").

    Args:
        llm: resolved layout, without ``split``.
        lighter: multiple of all encoders' work by which the first stage has less of the language model.
    """
    name = shape.samplewise[0]
    first, around, works = llm.stage_grid(0), dict[str, ModuleLayout](), 0.0
    for other, module in shape.modules.items():
        if other != name:
            tp = max(n for n in module.tp if n <= llm.tp and llm.tp % n == 0)
            ranks = tuple(map(int, first[:, :tp].flat))
            around[other] = ModuleLayout(ranks, tp=tp, dp_replicate=llm.dp_replicate, dp_shard=llm.dp_shard)
            works += estimates.work(other, tp).total
    cut = None
    if llm.pp > 1:
        seconds = estimates.work(name, llm.tp, cp=llm.cp, ep=llm.ep).seconds.copy()
        seconds[0] += lighter * works
        cut = split(seconds, llm.pipeline.stages, shape.modules[name].first_blocks)
    layouts = {**around, name: replace(llm, split=cut, dp_replicate=1, dp_shard=llm.dp)}
    return {module: layouts[module] for module in shape.modules}


def rigid_candidates(estimates: Estimates, counts: Callable[[int], Iterable[int]]) -> list[Rigid]:
    """Return the most promising usual layouts of all ranks that fit, each with its cheapest transforms.

    Args:
        counts: maps instances to numbers of microbatches to try.
    """
    shape, samples = estimates.shape, min(len(batch.samples) for batch in estimates.batches)
    name, cluster = shape.samplewise[0], estimates.cluster
    if any(target != name for _, target in shape.edges):
        return []  # generators have no usual place
    usual, ranks = [], tuple(range(cluster.ranks))
    for way in degrees(shape.modules[name], cluster.ranks, cluster.ranks_per_node, samples):
        if way.dp_replicate == 1:
            layouts = rigid_layouts(shape, estimates, way.layout(ranks).resolved())
            for count in counts(way.dp):
                every = _transformed(estimates, layouts, count)
                fitting = (one for one in every if (estimates.needed(one, in_step=True) <= estimates.memory).all())
                each = (Rigid(_seconds(shape, estimates, one, way), one) for one in fitting)
                if best := min(each, key=lambda one: one.seconds, default=None):
                    usual.append(best)
    return sorted(usual, key=lambda one: one.seconds)[:USUAL]


def _transformed(estimates: Estimates, layouts: Mapping[str, ModuleLayout], count: int) -> Iterator[Candidate]:
    """Yield candidates with each choice of transforms, and with parameters gathered as by default or once per step."""
    options, choices, name = estimates.options, estimates.choices, estimates.shape.samplewise[0]
    around = [{n: of[end] for n, of in choices.items()} for end in (0, -1)]  # nothing, and what saves most
    reshards = ("auto", "never") if layouts[name].pp == 1 else ("never",)
    for others, chosen, reshard in product(around, choices[name], reshards):
        transforms = {n: options.of(n, of) for n, of in {**others, name: chosen}.items()}
        yield Candidate(layouts, count, transforms=transforms, reshard_after_forward=reshard, fill="none")


def _seconds(shape: ModelSpec, estimates: Estimates, candidate: Candidate, way: Degrees) -> float:
    name, count = shape.samplewise[0], candidate.microbatches
    encoders = sum(estimates.work(n, x.tp, candidate.of(n)).total for n, x in candidate.layouts.items() if n != name)
    way = way._replace(transforms=candidate.of(name), whole=candidate.reshard_after_forward == "never")
    llm = estimates.work(name, way.tp, way.transforms, way.cp, way.ep)
    seconds = encoders + llm.total + estimates.exposed_keys(name, way, count)
    slowest = max(encoders, seconds / way.pp) / way.dp
    fixed = count * llm.fixed + estimates.synchronized(name, way, count)
    return float(np.interp(1 / count, (0, 1), (slowest, seconds / way.dp)) + fixed)
