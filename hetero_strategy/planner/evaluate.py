"""Seconds of a step in given layouts: its real step plan and schedule, simulated with predicted times. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float64

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import place
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.parallelize.transforms import Transforms, merged
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.deal_rows import Dealing, RankWork
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import Assignment, StepMetadata, StepPlan
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.estimate import lengths_and_squares
from hetero_strategy.planner.step_seconds import (
    ActionSeconds,
    After,
    Took,
    during,
    few,
    first_samples,
    seconds_after,
    thinned,
    work_of_ranks,
)
from hetero_strategy.profiling.memory import Memory, MemoryModel
from hetero_strategy.schedule.action import Schedule, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import work_of
from hetero_strategy.simulator.balance_context import row_dealing
from hetero_strategy.simulator.cluster import Cluster, Links
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.simulator.result import Simulation
from hetero_strategy.simulator.simulate import rows_between, simulate
from hetero_strategy.simulator.stage_times import StageTimes
from hetero_strategy.strategy.blueprint import Blueprint, Options, blueprint


@dataclass(frozen=True, eq=False)
class Placed(Blueprint):
    """A candidate's blueprint and the seconds of its stages, before any data is seen."""

    candidate: Candidate
    times: Mapping[StageId, StageTimes]

    def without(self, modules: Collection[str]) -> Placed:
        """Return a copy without the stages and times of some modules."""
        times = {node: t for node, t in self.times.items() if node.module not in modules}
        return replace(self, graph=self.graph.without(modules), times=times)

    @cached_property
    def alike(self) -> Hashable:
        """Return a key that is equal for candidates whose steps are planned, scheduled and simulated alike."""
        options, layouts = self.scheduling, self.layouts.items()
        cuts = ((n, x.ranks, x.tp, x.pp, x.vpp, x.pp_style, x.dp, x.cp_order, x.ep > x.neighbours) for n, x in layouts)
        stages = tuple((n, s.trains, s.backward, s.sharded, s.whole) for n, s in self.graph.stages.items())
        times = tuple(map(during, self.times.values()))
        return tuple(cuts), options.schedule, options.fill, frozenset(options.max_in_flight.items()), stages, times

    @property
    def together(self) -> set[StageId]:
        """Return the stages whose instances do all actions together, because each gathers parameters or they exchange
        rows of experts.
        """
        exchange = {name for name, layout in self.layouts.items() if layout.ep > layout.neighbours}
        return {s for s, t in self.times.items() if (not t.once and t.gather > 0) or s.module in exchange}


@dataclass(frozen=True, eq=False)
class Step:
    """A step of a candidate, as the trainer would run it, and its simulation."""

    placed: Placed
    plan: StepPlan
    schedule: Schedule
    simulation: Simulation
    after: After
    """Seconds outside all actions, on the slowest rank."""

    @property
    def seconds(self) -> float:
        return self.simulation.time + self.after.total

    def memory(self, model: MemoryModel) -> Memory:
        """Predict its memory on every rank."""
        return model.of(self.plan, self.schedule, self.placed.placement, self.placed.options.transforms)


class Evaluator:
    """A simulator of candidates' steps.

    Args:
        costs: seconds of the model's stages on the cluster.
        batches: global batches drawn from the data, on which candidates are compared.
        balance: how the batches' work is spread.
        asked: schedule options of the user; candidates choose the rest.
        microbatch_rows: rows of encoders' microbatches, see :func:`plan_step`.
        transforms: transforms that the user gave; candidates of a plan carry them already, others may lack them.
    """

    def __init__(
        self,
        costs: CostModel,
        batches: Sequence[StepMetadata],
        *,
        balance: BalanceConfig | None = None,
        asked: ScheduleConfig = ScheduleConfig(),  # noqa: B008
        microbatch_rows: Mapping[str, int | Literal["equal"]] = MappingProxyType({}),
        transforms: Transforms = MappingProxyType({}),
    ) -> None:
        self.costs, self.shape, self.cluster, self.precision = costs, costs.spec, costs.cluster, costs.precision
        self.batches, self._balance = tuple(batches), balance or BalanceConfig()
        self.asked, self._microbatch_rows, self._transforms = asked, microbatch_rows, transforms
        # Bytes of numbers decide where weights are cast; which dtypes have so many makes no difference.
        self._storage = FP32 if self.precision.compute == self.precision.master else Storage(torch.bfloat16)
        self._stages: dict[Hashable, list[StageTimes]] = {}
        self._firsts: dict[tuple[int, int], StepMetadata] = {}
        self._plans: dict[Hashable, tuple[StepMetadata, StepPlan]] = {}
        self._orders: dict[Hashable, tuple[Assignment, ...]] = {}
        self._work: dict[int, tuple[tuple[Assignment, ...], RankWork]] = {}
        self._simulated: dict[Hashable, tuple[StepPlan, Simulation]] = {}
        self.lengths = {name: self._length(name) for name in self.shape.modules}
        """Module -> mean rows of the unit that a row is in, that is, rows of a unit weighted by rows."""

    def on(self, cluster: Cluster | None = None, asked: ScheduleConfig | None = None) -> Evaluator:
        """Make an evaluator on another cluster or with other schedule options of the user."""
        return Evaluator(
            replace(self.costs, cluster=cluster or self.cluster), self.batches, balance=self._balance,
            asked=asked or self.asked, microbatch_rows=self._microbatch_rows, transforms=self._transforms,
        )  # fmt: skip

    def place(self, candidate: Candidate) -> Placed:
        """Choose stages and predict their times.

        Raises:
            LayoutError: the layouts do not fit the cluster or the modules.
            ScheduleError: the schedule does not fit the layouts.
            ConfigError: the user's schedule options do not fit the layouts.
        """
        scheduling = self.asked.instead_of_auto(candidate.scheduling)
        options = Options(scheduling, merged(candidate.transforms, self._transforms), self._storage)
        plan = blueprint(self.shape, place(candidate.layouts, self.cluster.ranks), options, self.lengths)
        times = {node: self._staged(plan, node) for node in plan.graph.stages}
        return Placed(**vars(plan), candidate=candidate, times=MappingProxyType(times))

    def _staged(self, plan: Blueprint, node: StageId) -> StageTimes:
        """Return the times of a stage; those of equal modules in equal layouts are computed once."""
        name, layout = node.module, plan.layouts[node.module]
        share, once = plan.costs[node.all_instances].recomputed, plan.graph.stages[node].sharded
        if (key := (name, layout, share, once)) not in self._stages:
            self._stages[key] = self.costs.stages(name, layout, share, once)
        return self._stages[key][node.stage]

    def unlinked(self, candidate: Candidate) -> Mapping[StageId, StageTimes]:
        """Return the times of the candidate's stages on links without latency and of infinite bandwidth."""
        return self.on(cluster=self.cluster.linked(Links())).place(candidate).times

    def step(self, placed: Placed, batch: int = 0) -> Step:
        """Plan one of the batches, schedule it and simulate it."""
        return self.step_of(placed, self.batches[batch], placed.candidate.microbatches)

    def seconds(self, candidate: Candidate) -> float:
        """Return the mean seconds of a step over all batches."""
        return float(np.mean(self.of_batches(candidate)))

    def of_batches(self, candidate: Candidate, enough: Sequence[float] = ()) -> list[float]:
        """Return the seconds of a step of each batch.

        Steps of many actions are extrapolated from two shorter ones with equal microbatches: once a pipeline is full,
        each microbatch adds the same time, and at least the busiest rank's compute for it.

        Args:
            enough: seconds of each batch; once the sum so far exceeds theirs, the remaining batches are skipped. Empty:
                none are.
        """
        placed, took = self.place(candidate), list[float]()
        for batch in range(len(self.batches)):
            took.append(self._seconds(placed, batch))
            if enough and sum(took) > sum(enough[: len(took)]):
                break
        return took

    def shown(self, placed: Placed, batch: int = 0) -> Step:
        """Simulate one of the batches, or its first samples if it has too many actions to display."""
        most = few(len(placed.times))
        return self.step_of(placed, *self._first(batch, placed.candidate.microbatches, most))

    def _seconds(self, placed: Placed, batch: int) -> float:
        count, most = placed.candidate.microbatches, few(len(placed.times))
        if count <= most:
            return self._took(placed, batch, count).seconds
        short, long = (self._took(placed, batch, n) for n in (most // 2, most))
        busy = long.busiest - short.busiest
        return long.seconds + (count - most) * max(long.seconds - short.seconds, busy) / (most - most // 2)

    def _took(self, placed: Placed, batch: int, most: int) -> Took:
        """Simulate so many microbatches of one of the batches; reuse an equal step's simulation."""
        first = self._first(batch, placed.candidate.microbatches, most)
        if (key := (batch, most, len(first[0].samples), placed.alike)) not in self._simulated:
            step = self.step_of(placed, *first)
            self._simulated[key] = step.plan, thinned(step.simulation)
        plan, simulation = self._simulated[key]
        seconds = simulation.time + self._after(placed, plan, simulation).total
        return Took(seconds, float(simulation.busy.max()))

    def _first(self, batch: int, count: int, most: int) -> tuple[StepMetadata, int, bool]:
        """Return the first microbatches of a batch that has ``count``, their number, and whether some are left out."""
        whole = self.batches[batch]
        if count <= most:
            return whole, count, False
        samples = len(whole.samples) * most // count
        if (batch, samples) not in self._firsts:
            self._firsts[batch, samples] = first_samples(whole, samples)
        return self._firsts[batch, samples], most, True

    def step_of(self, placed: Placed, metadata: StepMetadata, microbatches: int, part: bool = False) -> Step:
        """Plan any batch, schedule it and simulate it. A part of a batch keeps no budgets, since its samples may be
        longer than the mean.
        """
        return self.simulated(placed, self._plan(placed, metadata, microbatches, part))

    def simulated(self, placed: Placed, plan: StepPlan) -> Step:
        """Schedule a plan and simulate its modules that are placed."""
        seconds = ActionSeconds(plan, placed.graph, placed.times, self.rank_work(placed, plan))
        graph, scheduling = placed.graph, placed.scheduling
        work = work_of(plan, graph)
        bound = {name: most for name, most in scheduling.max_in_flight.items() if name in graph.pipelines}
        schedule = make_schedule(
            scheduling.schedule,
            graph,
            work,
            seconds.usual,
            max_in_flight=bound,
            fill=scheduling.fill,
        )
        rows = rows_between(plan, placed.graph, self.row_bytes)
        together = placed.together
        simulation = simulate(schedule, seconds, self.cluster.network, rows, synchronous=together)
        return Step(placed, plan, schedule, simulation, self._after(placed, plan, simulation))

    def _after(self, placed: Placed, plan: StepPlan, simulation: Simulation) -> After:
        after = seconds_after(simulation, placed.times)
        if self.cluster.shares_cores:
            least = self.cluster.on_cores(self._busy(placed, plan, simulation.schedule))
            after = max(after, After(rest=least - simulation.time), key=lambda one: one.total)
        return after

    def _busy(self, placed: Placed, plan: StepPlan, schedule: Schedule) -> Float64[np.ndarray, "ranks"]:
        """Return the seconds in which each rank needs a processor: its actions, its processor time for collectives, and
        the work after the last action.
        """
        times = self._working.place(placed.candidate).times
        seconds = ActionSeconds(plan, placed.graph, times, self.rank_work(placed, plan))
        return work_of_ranks(schedule, seconds, times, self.cluster.ranks)

    @cached_property
    def _working(self) -> Evaluator:
        """Return an evaluator whose collectives take the processor time for them."""
        return self.on(cluster=self.cluster.worked_for())

    def _plan(self, placed: Placed, metadata: StepMetadata, microbatches: int, part: bool) -> StepPlan:
        balance = replace(self._balance, budget={}) if part else self._balance
        instances = placed.placement.instances()
        balancing = balance.resolve(instances, placed.context(self.cluster.ranks_per_node))
        dealing, balancing = balancing.dealing, replace(balancing, dealing={})  # it changes no shape
        of_order = placed.alike if balancing.order else None
        aligned = placed.row_multiple
        key = id(metadata), microbatches, part, content((instances, aligned, replace(balancing, order=None))), of_order
        if key not in self._plans:
            new_plan = plan_step(
                metadata,
                instances,
                self.shape.samplewise,
                microbatches=microbatches,
                row_multiple=aligned,
                microbatch_rows=self._microbatch_rows,
                balancing=balancing,
            )
            self._plans[key] = metadata, new_plan  # keeps the metadata alive, so that its id is its own
        plan = self._plans[key][1]
        if dealing:
            dealt_key = key, tuple((name, of.ranks, of.order, of.cost) for name, of in dealing.items())
            if dealt_key not in self._plans:
                dealt = {name: self._dealt(plan, name, of) for name, of in dealing.items()}
                self._plans[dealt_key] = metadata, replace(plan, assignments={**plan.assignments, **dealt})
            plan = self._plans[dealt_key][1]
        if plan.microbatches > microbatches:  # a run takes more, too; this plan belongs to another candidate
            raise ConfigError(
                f"planner: with {microbatches} microbatches a step does not keep the budget of every instance; plan for"
                " more"
            )
        return plan

    def rank_work(self, placed: Placed, plan: StepPlan) -> dict[str, RankWork]:
        """Return module whose rows are dealt to context-parallel ranks -> their work in a plan."""
        work = {}
        for name, dealing in row_dealing(self.shape, placed.layouts).items():
            assignments = plan.assignments[name]
            if id(assignments) not in self._work:  # kept alive, so that its id is its own
                self._work[id(assignments)] = assignments, dealing.work(plan.metadata, assignments)
            work[name] = self._work[id(assignments)][1]
        return work

    def _dealt(self, plan: StepPlan, module: str, dealing: Dealing) -> tuple[Assignment, ...]:
        """Return a module's assignments with the order of rows; equal ones of other plans are dealt once."""
        assignments = plan.assignments[module]
        columns = [(a.units, a.offsets, a.padding) for a in assignments]
        digest = sha256(b"".join(column.tobytes() for each in columns for column in each)).digest()
        sizes = tuple([len(a.padding) for a in assignments])
        key = id(plan.metadata), module, dealing.ranks, dealing.order, dealing.cost, sizes, digest
        if key not in self._orders:
            orders = dealing.orders(plan.metadata, assignments)
            ordered = zip(assignments, orders, strict=True)
            self._orders[key] = tuple(replace(assignment, order=order) for assignment, order in ordered)
        return self._orders[key]

    def row_bytes(self, source: StageId, target: StageId) -> float:
        """Return the bytes of a row between two stages."""
        return float(self.precision.compute * self.shape.width(source.module, target.module))

    def _length(self, name: str) -> float:
        rows, squares = np.sum([np.sum(lengths_and_squares(self.shape, name, b), 1) for b in self.batches], 0)
        return float(squares / rows) if rows else 0.0


def content(value: Any) -> Hashable:
    """Return a key of plain data and arrays that is equal for equal contents.

    >>> content({"a": np.arange(3)}) == content({"a": np.arange(3)})
    True
    """
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return tuple([(key, content(each)) for key, each in value.items()])
    if isinstance(value, (tuple, list)):
        return tuple(map(content, value))
    if is_dataclass(value):
        return type(value), tuple([content(getattr(value, field.name)) for field in fields(value)])
    return value
