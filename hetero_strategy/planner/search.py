"""Search for the layouts with which a step takes least time, over all placements, by simulation. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf
from operator import attrgetter

import numpy as np

from hetero_strategy.errors import ConfigError, HeteroError, LayoutError, ScheduleError
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.planner.neighbours import Neighbours
from hetero_strategy.planner.propose import Proposal, Proposer, rigid_candidates
from hetero_strategy.planner.ranking import (
    BEHIND,
    Answer,
    Ranked,
    by_turns,
    fastest,
    hopeless,
    is_homogeneous,
    kinds,
    promising,
)
from hetero_strategy.profiling.memory import KINDS, Memory, MemoryModel
from hetero_strategy.simulator.cost_model import CostModel

ROUNDS = 4
"""Times that the formula of activations is corrected."""
FAILED = 32  # failing proposals, after which the rest is accepted untried
LEAN = 12
"""Simulations of candidates with less memory, at the end."""
NEIGHBOURS = 2
"""Simulations of neighbours, as a multiple of those of proposals."""
LEANER = 3
"""Proposals that are tried with less memory, each time that the best one needs too much."""
ON_SHARED_CORES = 0.05
""":attr:`Answer.tie` for ranks that share cores: the median error of predictions there."""
Progress = Callable[[int, int, float], None]
"""(candidates simulated, candidates to simulate by current knowledge, seconds of the best so far)."""


def _nobody(*_: float) -> None:
    """Ignore progress."""


class Planner:
    """A planner for one model, cluster and sample of data.

    Args:
        costs: seconds of the model's stages on the cluster.
        batches: global batches drawn from the data.
        microbatches: number of microbatches of a step; None: the plan chooses.
        simulations: most long steps that are simulated before neighbours of the best are tried; short ones count less.
        options: options of the run that the user set.
    """

    def __init__(
        self,
        costs: CostModel,
        batches: Sequence[StepMetadata],
        *,
        microbatches: int | None = None,
        balance: BalanceConfig | None = None,
        simulations: int = 24,
        options: RunOptions = RunOptions(),  # noqa: B008
    ) -> None:
        shape = costs.spec
        unfed = {m for m, s in shape.modules.items() if not s.samplewise and any(m not in b.items for b in batches)}
        if unfed:
            raise ConfigError(
                f"planner: the data has no items of {', '.join(sorted(unfed))}; take the module out of the model, or"
                " take data that feeds it"
            )
        if empty := sum(not len(b.samples) for b in batches):
            raise ConfigError(
                f"planner: {empty} of the {len(batches)} global batches drawn have no samples; take data that fill one"
            )
        if not shape.samplewise:
            raise ConfigError("planner: the model has no language model, whose samples make microbatches; give layouts")
        costs = replace(costs, spec=options.narrowed(shape), accumulated=options.accumulated)
        self.evaluator = Evaluator(
            costs, batches, balance=balance, asked=options.fixed_schedule, microbatch_rows=options.microbatch_rows,
            transforms=options.transforms,
        )  # fmt: skip
        self.estimates = Estimates(costs, batches, options)
        self.balance = balance
        self.neighbours = Neighbours(self.evaluator, options, self._fits, microbatches, self.estimates.worth)
        self._simulations = simulations
        self._tie = ON_SHARED_CORES if self.evaluator.cluster.shares_cores else Answer.tie
        self.proposer = Proposer(costs.spec, self.estimates, batches, microbatches, balance)
        self._done, self._tell = 0, _nobody
        self._why_none: HeteroError | None = None

    def plan(
        self,
        progress: Progress | None = None,
        memory: Callable[[], MemoryModel] | None = None,
        seconds: float = float("inf"),
    ) -> Answer:
        """Simulate the most promising proposals of every placement, then the neighbours of the fastest candidate, those
        of the next, and so on.

        Args:
            memory: builds the predictor of the best candidates' memory; None: use the formula's bound alone.
            seconds: time limit of simulations, most promising first; at least one runs. Memory checks are not counted.

        Raises:
            LayoutError: no candidate fits into memory, or none runs.
        """
        self._why_none = None
        proposals, lean, model = self._proposed(), list[tuple[Proposal, Candidate]](), None
        if proposals and memory is not None:
            model = memory()
            proposals, lean = self._that_fit(proposals, model)
        if not proposals and not lean:
            raise LayoutError(self._none_runs() if self._why_none else self.why_not())
        ranked: list[Ranked] = []
        self._done, self._tell = 0, _nobody if progress is None else partial(self._told, progress, ranked)
        end = time.monotonic() + seconds
        for candidate, estimate, left in self._next(proposals, lean, ranked):
            if ranked and time.monotonic() > end:
                break
            self._simulate(candidate, estimate, ranked)
            self._tell(left)
        if not ranked:
            raise LayoutError(self._none_runs())
        ranked.sort(key=attrgetter("turn"))
        if model is None:
            return Answer(tuple(ranked), self.proposer.considered, tie=self._tie)
        return self._fitting(ranked, self.proposer.considered, model, end)

    def _next(
        self, proposals: Sequence[Proposal], lean: Sequence[tuple[Proposal, Candidate]], ranked: Sequence[Ranked]
    ) -> Iterator[tuple[Candidate, float, float]]:
        """Yield candidates to simulate, their estimated seconds, and the simulations left by current knowledge.

        Neighbours come from the fastest candidate in ``ranked``, which grows. Candidates with the same places and
        degrees are delayed; a candidate that takes exactly as long as a previous one comes last. Neighbours that would
        compute for longer than the fastest takes are skipped.
        """
        chosen, least, before = promising(proposals, self._simulations), dict[object, float](), 0
        for proposal, other in lean:
            yield other, proposal.seconds, len(chosen)
        for i, proposal in enumerate(chosen):
            if not hopeless(proposal, least, ranked):
                before = len(ranked)
                yield proposal.candidate, proposal.seconds, len(chosen) - i - 1
                for kind in kinds(proposal) * (len(ranked) - before):
                    least[kind] = min(least.get(kind, inf), ranked[-1].seconds / proposal.seconds)
        known, opened, spent = {r.candidate for r in ranked}, set[object](), 0.0
        most = NEIGHBOURS * self._simulations
        while left := [r for r in by_turns(ranked, lambda r: r.seconds, lambda r: r.layout_key) if id(r) not in opened]:
            best = next((r for r in left if (r.seconds, r.layout_key) not in opened), left[0])
            opened |= {id(best), (best.seconds, best.layout_key)}
            for other in self.neighbours.of(best.candidate):
                if other not in known and self._least(other) < fastest(ranked):
                    if spent >= most:
                        return
                    spent += best.share
                    yield other, best.estimate, (most - spent) / best.share
                known.add(other)

    def rigid(self) -> Ranked | None:
        """Simulate the most promising of Megatron-LM's usual layouts that fit, and return the fastest, if any."""
        ranked: list[Ranked] = []
        for seconds, candidate in rigid_candidates(self.estimates, self.proposer.counts):
            for one in filter(self._runs, (candidate, *self.neighbours.schedules(candidate))):
                self._simulate(one, seconds, ranked)
        return min(ranked, key=attrgetter("seconds"), default=None)

    def _least(self, candidate: Candidate) -> float:
        """Return a lower bound of the ranks' compute: the mean over the ranks of any module, and over all ranks."""
        layouts, works = candidate.layouts, dict[str, float]()
        for name, layout in layouts.items():
            work = self.estimates.work(name, layout.tp, candidate.of(name), layout.cp, layout.ep)
            works[name] = work.total * layout.neighbours
        spans = [{*layout.ranks} for layout in layouts.values()]
        inside = (
            (span, (n for n, x in layouts.items() if span.issuperset(x.ranks)))
            for span in (*spans, set().union(*spans))
        )
        return max(sum(works[n] for n in names) / len(span) for span, names in inside)

    def _fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits into memory by the formula, keeps tensor parallelism inside nodes, and is one
        that a run accepts.
        """
        cluster, options = self.evaluator.cluster, self.estimates.options
        for name, layout in candidate.layouts.items():
            if layout.ranks[0] % cluster.ranks_per_node % layout.neighbours:
                return False
            if not options.allows(name, layout.tp, candidate.of(name)):
                return False
        return bool((self.estimates.needed(candidate) <= self.estimates.memory).all())

    def _that_fit(
        self, proposals: list[Proposal], memory: MemoryModel
    ) -> tuple[list[Proposal], list[tuple[Proposal, Candidate]]]:
        """Scale the formula's activations to those of the best proposal until that fits. Return the proposals, and
        variants of the best ones that fit with less memory, which the formula does not know.
        """
        activations, lean = KINDS.index("activations"), list[tuple[Proposal, Candidate]]()
        rounds = failed = 0
        while proposals and rounds < ROUNDS and failed < FAILED:
            best = proposals[0]
            try:
                step = self.evaluator.shown(self.evaluator.place(best.candidate))
                predicted = step.memory(memory)  # the formula ignores whole parameters
            except HeteroError as error:  # as in _simulate
                self._why_none, proposals, failed = error, proposals[1:], failed + 1
                continue
            rounds += 1
            rank = int(predicted.peak.argmax())
            here = [name for name, layout in best.candidate.layouts.items() if rank in layout.ranks]
            estimated = sum(self.estimates.activations(name, best.degrees[name], best.microbatches) for name in here)
            ratio = float(predicted.bytes[activations, rank]) / estimated if estimated else 1.0
            if predicted.peak[rank] <= self.estimates.memory or ratio <= 1.0:
                break
            placed = [p for p in proposals[:LEANER] if self._placed(p.candidate)]
            ways = ((p, other) for p in placed for other in self.neighbours.leaner(p.candidate))
            lean += [(p, other) for p, other in ways if self._has_room(other, memory)]
            self.estimates.kept *= ratio
            self._why_none, proposals = None, self._proposed()
        return proposals, lean

    def _proposed(self) -> list[Proposal]:
        """Return the proposals that run with the user's options."""
        return [proposal for proposal in self.proposer.proposals() if self._runs(proposal.candidate)]

    def _runs(self, candidate: Candidate) -> bool:
        """Return whether a candidate's layouts fit the user's schedule options, as far as they alone decide."""
        return not self.evaluator.asked.pieces or self._placed(candidate)

    def _placed(self, candidate: Candidate) -> bool:
        try:
            self.evaluator.place(candidate)
        except HeteroError as error:
            self._why_none = error
            return False
        return True

    def _has_room(self, candidate: Candidate, memory: MemoryModel) -> bool:
        """Return whether a candidate runs and fits into memory."""
        try:
            return bool((self._needs(candidate, memory).peak <= self.estimates.memory).all())
        except HeteroError as error:  # as in _simulate
            self._why_none = error
            return False

    def _none_runs(self) -> str:
        return f"planner: no candidate runs; the last one: {self._why_none}"

    def _needs(self, candidate: Candidate, memory: MemoryModel) -> Memory:
        """Return the memory of the batch that needs most: of the displayed step, or of the whole one if that holds more
        and the displayed one fits.
        """
        placed = self.evaluator.place(candidate)
        steps = [self.evaluator.shown(placed, batch) for batch in range(len(self.evaluator.batches))]
        every = [step.memory(memory) for step in steps]
        batch = int(np.argmax([one.peak.max() for one in every]))
        cut = steps[batch].plan.microbatches < candidate.microbatches
        fills = placed.graph.filling  # then a step's memory grows with its microbatches
        if cut and fills and (every[batch].peak <= self.estimates.memory).all():
            return self.evaluator.step(placed, batch).memory(memory)
        return every[batch]

    def _fitting(self, ranked: list[Ranked], considered: int, memory: MemoryModel, end: float) -> Answer:
        """Drop the best candidates that need too much memory, up to the first that fits, and try variants with less
        memory in their place. After the time limit, try them only if no candidate is left.
        """
        room, too_large, tried = self.estimates.memory, list[Ranked](), 0.0
        while ranked:
            best = Answer(tuple(ranked), considered, tie=self._tie).best
            try:
                known = replace(best, memory=self._needs(best.candidate, memory))
            except HeteroError as error:  # the whole of a long step, of which parts were simulated
                self._why_none = error
                ranked.remove(best)
                continue
            assert known.memory is not None
            if (known.memory.peak <= room).all():
                kept = (known if r is best else r for r in ranked)
                return Answer(tuple(kept), considered, tuple(too_large), self._tie)
            ranked.remove(best)
            too_large.append(known)
            for other in self.neighbours.leaner(best.candidate) if tried < LEAN else ():
                late = ranked and time.monotonic() > end
                if not late and all(r.candidate != other for r in (*ranked, *too_large)):
                    self._simulate(other, best.estimate, ranked)
                    tried += best.share
                    self._tell((LEAN - tried) / best.share)
            ranked.sort(key=attrgetter("turn"))
        if not too_large:
            raise LayoutError(self._none_runs())
        need = min(float(r.memory.peak.max()) for r in too_large if r.memory is not None)
        raise LayoutError(
            f"planner: each of the {len(too_large)} candidates that were simulated needs {need / 2**30:.1f} GiB or more"
            f" on some rank, of {room / 2**30:.1f}{self.estimates.options}; give more ranks or microbatches, or"
            " simulate more candidates"
        )

    def _told(self, progress: Callable[[int, int, float], None], ranked: Sequence[Ranked], left: float) -> None:
        progress(self._done, self._done + ceil(max(0.0, left)), fastest(ranked) if ranked else 0.0)

    def _simulate(self, candidate: Candidate, estimate: float, ranked: list[Ranked]) -> None:
        rivals = [r for r in ranked if r.is_homogeneous] if is_homogeneous(candidate) else ranked
        best = min(rivals, key=attrgetter("seconds"), default=None)
        self._done += 1
        enough = () if best is None else best.batches
        try:
            took = self.evaluator.of_batches(candidate, [BEHIND * one for one in enough])
        except (LayoutError, ScheduleError, ConfigError) as error:  # such as fewer samples than microbatches
            self._why_none = error
            return
        others = enough[len(took) :]  # skipped batches are as much slower as the first
        took += [one * sum(took) / sum(enough[: len(took)]) for one in others]
        ranked.append(Ranked(candidate, float(np.mean(took)), estimate, batches=tuple(took)))

    def why_not(self) -> str:
        """Return why no layout fits, and what to change."""
        estimates, cluster = self.estimates, self.evaluator.cluster
        if (refusal := self.proposer.refusal()) is not None:
            return refusal
        names = ", ".join(self.evaluator.shape.modules)
        needed = sum(estimates.least_ranks(name) for name in self.evaluator.shape.modules)
        return (
            f"planner: no layout of {names} fits on {cluster} with {estimates.memory / 2**30:.0f} GiB each: parameters"
            f" and optimizer states alone need {needed:.1f}, activations of a microbatch come on top{estimates.options}"
            "; give more ranks, more microbatches or devices with more memory"
        )
