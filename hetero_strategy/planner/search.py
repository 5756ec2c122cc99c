"""``plan``: the layouts with which a step takes least time, of all placements, by simulation. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from hetero_strategy.errors import ConfigError, HeteroError, LayoutError, ScheduleError
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.answer import Answer, Ranked, fastest, is_homogeneous
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.evaluate import Candidate, Evaluator
from hetero_strategy.planner.every import FEW
from hetero_strategy.planner.memory import KINDS, Memory, MemoryModel
from hetero_strategy.planner.propose import Proposal, Proposer
from hetero_strategy.planner.rigid import rigid_candidates
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.times import MIXED, ModuleSeconds, Precision
from hetero_strategy.planner.turns import BEHIND, by_turns, hopeless, in_turn, kinds, near, promising, usual
from hetero_strategy.planner.variants import Allowed, Variants

ROUNDS = 4
"""Times that the formula of activations is corrected."""
FAILED = 32  # proposals that may turn out not to run, before those behind them are taken as they are
VARIED = 12
"""Simulations of other schedules for the best, of encoders a step ahead, and of what takes less memory, each."""
CLIMBED = 2
"""Simulations of neighbours of the best, on few ranks, over those of proposals."""
LEANER = 3
"""Proposals that are tried with less memory, each time that the best one needs too much."""
WORTH_ROWS = 0.99
"""Seconds with an encoder a step ahead, over those without, up to which it is worth the rows that are held."""
CUTS = 2
"""Blocks that may move between stages of what is simulated, one after the other."""
ON_SHARED_CORES = 0.05
"""As :attr:`Answer.tie`, where ranks share cores: predictions are off by as much in the median."""
Progress = Callable[[int, int, float], None]
"""(candidates simulated, candidates to simulate by what is known yet, seconds of the best so far)."""


def _nobody(*_: float) -> None:
    """Is told."""


class Planner:
    """Plans for one model, cluster and sample of data.

    Args:
        batches: global batches drawn from the data.
        microbatches: of a step; None: to be chosen.
        simulations: long steps that are simulated, at most, before others like the best are tried; of short ones more.
        measured: seconds of modules' blocks; others follow from FLOPs.
        allowed: what else may be asked of the strategy.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        batches: Sequence[StepMetadata],
        *,
        microbatches: int | None = None,
        balance: BalanceConfig | None = None,
        precision: Precision = MIXED,
        simulations: int = 24,
        measured: Mapping[str, ModuleSeconds] = MappingProxyType({}),
        allowed: Allowed = Allowed(),  # noqa: B008
    ) -> None:
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
        if measured and len(cluster.pools) > 1:
            raise ConfigError(f"planner: blocks were measured on one kind of device, and the cluster is {cluster}")
        allowed.given.check(shape)
        allowed.check(shape)
        shape = allowed.given.narrowed(shape)
        given: Any = {"precision": precision, "measured": measured}
        self._with = partial(
            Planner, shape, batches=batches, microbatches=microbatches, balance=balance, allowed=allowed, **given
        )
        self.evaluator = Evaluator(
            shape, cluster, batches, balance=balance, accumulated=allowed.given.accumulated, asked=allowed.asked,
            microbatch_rows=allowed.given.microbatch_rows, compiled=allowed.given.compile, **given,
        )  # fmt: skip
        self.estimates = Estimates(shape, cluster, batches, given=allowed.given, **given)
        self.balance = balance
        self.variants = Variants(self.evaluator, allowed, self._fits, microbatches, self.estimates.worth)
        self._simulations = simulations
        self._tie = ON_SHARED_CORES if self.evaluator.cluster.shares_cores else Answer.tie
        self.proposer = Proposer(shape, self.estimates, batches, microbatches, balance)
        self._done, self._tell = 0, _nobody
        self._why_none: HeteroError | None = None

    def with_node(self, pool: int, simulations: int) -> Planner:
        """Plans for the same model and data on a cluster with one more node in a pool."""
        made = self._with(cluster=self.evaluator.cluster.with_node(pool), simulations=simulations)
        made.estimates.kept = self.estimates.kept
        return made

    def plan(
        self,
        progress: Progress | None = None,
        memory: Callable[[], MemoryModel] | None = None,
        seconds: float = float("inf"),
    ) -> Answer:
        """Simulate the most promising proposals of every placement, then the best of these with other schedules, cuts
        and ways to fill bubbles, with parameters gathered once per step, with fewer blocks that run again, and the best
        of all with frozen encoders a step ahead; on few ranks with all that is one change away, again and again.

        Args:
            memory: makes what predicts how much the best need; None: the formula's bound is all that is known.
            seconds: how long to simulate, the most promising first; at least one is. Memory is looked at besides.

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
        chosen = promising(proposals, self._simulations)
        ranked: list[Ranked] = []
        self._done, self._tell = 0, _nobody if progress is None else partial(self._told, progress, ranked)
        least: dict[object, float] = {}
        end = time.monotonic() + seconds
        for proposal, other in lean:
            if ranked and time.monotonic() > end:
                break
            self._simulate(other, proposal.seconds, ranked)
            self._tell(len(chosen))
        for i, proposal in enumerate(chosen):
            if ranked and time.monotonic() > end:
                break
            if not hopeless(proposal, least, ranked):
                before = len(ranked)
                self._simulate(proposal.candidate, proposal.seconds, ranked)
                for kind in kinds(proposal) * (len(ranked) - before):
                    least[kind] = min(least.get(kind, inf), ranked[-1].seconds / proposal.seconds)
            self._tell(len(chosen) - i - 1)
        if self.evaluator.cluster.ranks <= FEW:
            self._climb(ranked, end)
        else:
            self._vary_all(ranked, end)
        self._vary(self.variants.ahead, ranked, end, WORTH_ROWS)
        if not ranked:
            raise LayoutError(self._none_runs())
        ranked.sort(key=lambda r: r.seconds)
        if model is None:
            return Answer(tuple(ranked), self.proposer.considered, tie=self._tie)
        return self._fitting(ranked, self.proposer.considered, model, end)

    def rigid(self) -> Ranked | None:
        """Simulate the most promising of Megatron-LM's usual layouts that fit, and return the fastest, if any."""
        ranked: list[Ranked] = []
        for seconds, candidate in rigid_candidates(self.estimates, self.proposer.counts, self.estimates.room):
            for one in filter(self._runs, (candidate, *self.variants.schedules(candidate))):
                self._simulate(one, seconds, ranked)
        return min(ranked, key=attrgetter("seconds"), default=None)

    def _climb(self, ranked: list[Ranked], end: float) -> None:
        """Simulate the neighbours of the fastest, then those of the fastest that there is then, and so on; the next of
        those that lie alike later, and what takes exactly as long as one of them last. Neighbours of those with an
        encoder a step ahead have one, too, where they may. Left out are those that would compute for longer than the
        fastest takes.
        """
        v, tried, opened, known = self.variants, 0.0, set[object](), set[object](r.candidate for r in ranked)
        ways = v.schedules, v.fills, v.whole, v.mixtures, v.laid_out, v.borders, v.partly, v.cuts, v.counts, v.ahead
        least, most = fastest(ranked), CLIMBED * self._simulations
        while tried < most and time.monotonic() <= end:
            left = [r for r in by_turns(ranked, lambda r: r.seconds, lambda r: r.lies) if id(r) not in opened]
            if not left:
                break
            best = next((r for r in left if (r.seconds, r.lies) not in opened), left[0])
            opened |= {id(best), (best.seconds, best.lies)}
            plain, ahead = replace(best.candidate, prefetch={}, pieces={}), bool(best.candidate.prefetch)
            for way in ways:
                below = WORTH_ROWS * best.seconds if way == v.ahead else inf
                for made in way(plain):
                    if time.monotonic() > end:
                        return
                    if (made, ahead) in known:
                        continue
                    other = next(iter(v.ahead(made) if ahead and self._runs(made) else ()), made)
                    if other not in known and self._least(other) < least:
                        self._simulate(other, best.estimate, ranked, below)
                        tried, least = tried + best.share, min(least, ranked[-1].seconds)
                        self._tell((most - tried) / best.share)
                    known |= {other, (made, ahead)}

    def _least(self, candidate: Candidate) -> float:
        """Seconds for which ranks compute at least: on average those of any module, and all of them."""
        layouts, works = candidate.layouts, dict[str, float]()
        for name, layout in layouts.items():
            again = candidate.recompute.get(name)
            every, ranks = 0 if again is None else again.every, layout.neighbours
            work = self.estimates.on(layout.ranks).work(name, layout.tp, every, layout.cp)
            works[name] = work.total * ranks
        spans = [{*layout.ranks} for layout in layouts.values()]
        inside = (
            (span, (n for n, x in layouts.items() if span.issuperset(x.ranks)))
            for span in (*spans, set().union(*spans))
        )
        return max(sum(works[n] for n in names) / len(span) for span, names in inside)

    def _vary_all(self, ranked: list[Ranked], end: float) -> None:
        """Simulate the best with other schedules, cuts and ways to fill bubbles, with parameters gathered once per step
        and with fewer blocks that run again.
        """
        few = VARIED / 4
        self._vary(self.variants.schedules, ranked, end, most=VARIED + self._left(ranked))
        before = len(ranked)
        for _ in range(CUTS):
            most = few + self._left(ranked)
            self._vary(
                self.variants.cuts, ranked, end, most=most, behind=lambda one: self.variants.most_cut(one.candidate)
            )
        if len(ranked) > before:
            self._vary(self.variants.schedules, ranked, end, most=few)
        self._vary(self.variants.fills, ranked, end, most=few + self._left(ranked), behind=near)
        self._vary(self.variants.whole, ranked, end, most=few + self._left(ranked), behind=near)
        self._vary(self.variants.mixtures, ranked, end, most=few, behind=near)
        for _ in self.evaluator.shape.modules:
            self._vary(self.variants.partly, ranked, end, most=few, behind=near)

    def _left(self, ranked: Sequence[Ranked]) -> float:
        """Simulations that may be made besides, where there were few proposals."""
        return max(0.0, self._simulations - sum(one.share for one in ranked))

    def _fits(self, candidate: Candidate) -> bool:
        """Whether there is memory for a candidate by the formula, no tensor parallelism crosses a node, and a run takes
        it.
        """
        cluster, given = self.evaluator.cluster, self.estimates.given
        for name, layout in candidate.layouts.items():
            if not cluster.within_nodes(layout.ranks, layout.neighbours):
                return False
            again = candidate.recompute.get(name)
            if not given.allows(name, layout.tp, int(again is not None and not given.recompute)):
                return False
        return bool((self.estimates.needed(candidate) <= self.estimates.room).all())

    def _that_fit(
        self, proposals: list[Proposal], memory: MemoryModel
    ) -> tuple[list[Proposal], list[tuple[Proposal, Candidate]]]:
        """Let the formula's activations be as large as those of the best proposal are, until that fits; also what fits
        of the best that do not in ways that need less memory, which the formula does not know.
        """
        activations, lean = KINDS.index("activations"), list[tuple[Proposal, Candidate]]()
        rounds = failed = 0
        while proposals and rounds < ROUNDS and failed < FAILED:
            best = proposals[0]
            try:
                found = memory.shown(self.evaluator, best.candidate)  # the formula does not know what whole ones hold
            except HeteroError as error:  # as in _simulate
                self._why_none, proposals, failed = error, proposals[1:], failed + 1
                continue
            rounds += 1
            rank = int((found.peak / self.estimates.room).argmax())
            here = [name for name, layout in best.candidate.layouts.items() if rank in layout.ranks]
            estimated = sum(self.estimates.activations(name, best.degrees[name], best.microbatches) for name in here)
            ratio = float(found.bytes[activations, rank]) / estimated if estimated else 1.0
            if found.peak[rank] <= self.estimates.room[rank] or ratio <= 1.0:
                break
            placed = [p for p in proposals[:LEANER] if self._placed(p.candidate)]
            ways = ((p, other) for p in placed for other in self.variants.leaner(p.candidate))
            lean += [(p, other) for p, other in ways if self._has_room(other, memory)]
            self.estimates.kept *= ratio
            self._why_none, proposals = None, self._proposed()
        return proposals, lean

    def _proposed(self) -> list[Proposal]:
        """Proposals that can be run as a person asks."""
        return [proposal for proposal in self.proposer.proposals() if self._runs(proposal.candidate)]

    def _runs(self, candidate: Candidate) -> bool:
        """Whether its layouts go with what a person asks of the schedule, as far as that depends on them alone."""
        asked = self.evaluator.asked
        return not (asked.pieces or asked.prefetch or asked.islands > 1) or self._placed(candidate)

    def _placed(self, candidate: Candidate) -> bool:
        try:
            self.evaluator.place(candidate)
        except HeteroError as error:
            self._why_none = error
            return False
        return True

    def _has_room(self, candidate: Candidate, memory: MemoryModel) -> bool:
        """Whether a candidate runs and fits into memory."""
        try:
            return bool((self._needs(candidate, memory).peak <= self.estimates.room).all())
        except HeteroError as error:  # as in _simulate
            self._why_none = error
            return False

    def _none_runs(self) -> str:
        return f"planner: no candidate runs; the last one: {self._why_none}"

    def _needs(self, candidate: Candidate, memory: MemoryModel) -> Memory:
        """Of the batch that needs most: of the step that is shown, or the whole where that holds more and this fits."""
        every = [memory.shown(self.evaluator, candidate, batch) for batch in range(len(self.evaluator.batches))]
        batch = int(np.argmax([(one.peak / self.estimates.room).max() for one in every]))
        found = every[batch]
        cut = found.step.plan.microbatches < candidate.microbatches
        if cut and found.step.placed.holds_more and (found.peak <= self.estimates.room).all():
            return memory.of(self.evaluator.step(found.step.placed, batch))
        return found

    def _fitting(self, ranked: list[Ranked], considered: int, memory: MemoryModel, end: float) -> Answer:
        """Leave out what needs too much memory, up to the first that does not, and try what needs less in its place:
        when time is over only where nothing else is left.
        """
        room, too_large, tried = self.estimates.room, list[Ranked](), 0.0
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
            for other in self.variants.leaner(best.candidate) if tried < VARIED else ():
                late = ranked and time.monotonic() > end
                if not late and all(r.candidate != other for r in (*ranked, *too_large)):
                    self._simulate(other, best.estimate, ranked)
                    tried += best.share
                    self._tell((VARIED - tried) / best.share)
            ranked.sort(key=lambda r: r.seconds)
        if not too_large:
            raise LayoutError(self._none_runs())
        need = min(float(r.memory.peak.max()) for r in too_large if r.memory is not None)
        raise LayoutError(
            f"planner: each of the {len(too_large)} candidates that were simulated needs {need / 2**30:.1f} GiB or more"
            f" on some rank, of {room.min() / 2**30:.1f}{self.estimates.given}; give more ranks or microbatches, or"
            " simulate more candidates"
        )

    def _vary(
        self,
        ways: Callable[[Candidate], list[Candidate]],
        ranked: list[Ranked],
        end: float,
        worth: float = inf,
        most: float = VARIED,
        behind: Callable[[Ranked], float] = usual,
    ) -> None:
        """Simulate the best in other ways, those of each way to share ranks in turn.

        Args:
            worth: share of their seconds that others may take to be kept.
            most: long steps that are simulated, at most.
            behind: seconds over the best so far up to which other ways of a candidate are tried.
        """
        tried, known, least = 0.0, {r.candidate for r in ranked}, fastest(ranked)
        for best in in_turn(ranked):
            if tried >= most or time.monotonic() > end:
                break
            if best.seconds > behind(best) * least:
                continue
            for other in ways(best.candidate):
                if time.monotonic() > end:
                    return
                if other not in known:
                    self._simulate(other, best.estimate, ranked, worth * best.seconds)
                    tried, least = tried + best.share, fastest(ranked)
                    known.add(other)
                    self._tell((most - tried) / best.share)

    def _told(self, progress: Callable[[int, int, float], None], ranked: Sequence[Ranked], left: float) -> None:
        progress(self._done, self._done + ceil(max(0.0, left)), fastest(ranked) if ranked else 0.0)

    def _simulate(self, candidate: Candidate, estimate: float, ranked: list[Ranked], below: float = inf) -> None:
        alike = [r for r in ranked if r.is_homogeneous] if is_homogeneous(candidate) else ranked
        best = min(alike, key=attrgetter("seconds"), default=None)
        self._done += 1
        enough = () if best is None else best.batches
        try:
            took = self.evaluator.of_batches(candidate, [BEHIND * one for one in enough])
        except (LayoutError, ScheduleError, ConfigError) as error:  # such as fewer samples than microbatches
            self._why_none = error
            return
        others = enough[len(took) :]  # left out: as much slower as the first
        took += [one * sum(took) / sum(enough[: len(took)]) for one in others]
        if (seconds := float(np.mean(took))) <= below:
            ranked.append(Ranked(candidate, seconds, estimate, batches=tuple(took)))

    def why_not(self) -> str:
        """Say why nothing fits, and what would."""
        estimates, cluster = self.estimates, self.evaluator.cluster
        if (refusal := self.proposer.refusal()) is not None:
            return refusal
        names = ", ".join(self.evaluator.shape.modules)
        needed = sum(estimates.least_ranks(name) for name in self.evaluator.shape.modules)
        each = " or ".join(f"{estimates.of([i]).memory / 2**30:.0f}" for i in range(len(cluster.pools)))
        return (
            f"planner: no layout of {names} fits on {cluster} with {each} GiB each: parameters and optimizer states"
            f" alone need {needed:.1f}, activations of a microbatch come on top{estimates.given}; give more"
            " ranks, more microbatches or devices with more memory"
        )
