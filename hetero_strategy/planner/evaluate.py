"""What a step costs in given layouts: its real step plan and schedule, simulated with predicted times. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.islands import islands_of
from hetero_strategy.layout.placement import Placement, place
from hetero_strategy.layout.row_sharding import sharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute, decoupled
from hetero_strategy.plan.ahead import ahead, with_next
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.orchestrator import plan_step
from hetero_strategy.plan.step_plan import StepMetadata, StepPlan
from hetero_strategy.planner.action_seconds import ActionSeconds, Bubbles
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.context import aligned_rows, model_context
from hetero_strategy.planner.known import Took, content, during
from hetero_strategy.planner.layers import LayerCost, costs
from hetero_strategy.planner.overlap import After, seconds_after, thinned, work_of_ranks
from hetero_strategy.planner.partition import split_into
from hetero_strategy.planner.shape import ModelShape, ModuleShape
from hetero_strategy.planner.short import few, first_samples
from hetero_strategy.planner.times import (
    MIXED,
    NOTHING,
    OURS,
    ModuleSeconds,
    Overlap,
    Precision,
    StageTimes,
    module_times,
)
from hetero_strategy.schedule.action import Schedule, StageGraph, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import StageCost, stage_graph, work_of
from hetero_strategy.simulator.links import Links
from hetero_strategy.simulator.result import Simulation
from hetero_strategy.simulator.rows import rows_between
from hetero_strategy.simulator.simulate import simulate


@dataclass(frozen=True)
class Candidate:
    """One way to train a model on a cluster."""

    layouts: Mapping[str, ModuleLayout]
    microbatches: int = 1
    schedule: str = "auto"
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    reshard_after_forward: str = "auto"
    fill: str = "auto"
    pieces: Mapping[str, int] = field(default_factory=dict)
    prefetch: Mapping[str, int] = field(default_factory=dict)
    offload: Mapping[str, Offload] = field(default_factory=dict)
    tp_bubbles: bool = False
    """What fills also runs in bubbles of tensor parallelism."""

    @classmethod
    def of_run(
        cls,
        config: ScheduleConfig,
        layouts: Mapping[str, ModuleLayout],
        microbatches: int,
        recompute: Mapping[str, Recompute],
        offload: Mapping[str, Offload],
    ) -> Candidate:
        """What a run does, whose layouts are as it resolved them."""
        return cls(
            config.uncut(layouts), microbatches, config.schedule, recompute, config.reshard_after_forward, config.fill,
            config.pieces, config.prefetch, offload, bool(config.tp_bubbles),
        )  # fmt: skip

    def __hash__(self) -> int:
        layouts, ahead = frozenset(self.layouts.items()), frozenset(self.prefetch)
        return hash((layouts, self.microbatches, self.schedule, self.fill, ahead, self.tp_bubbles))

    @property
    def scheduling(self) -> ScheduleConfig:
        """How its steps are scheduled."""
        return ScheduleConfig(self.schedule, {}, self.reshard_after_forward, self.fill, self.pieces, self.prefetch)


@dataclass(frozen=True, eq=False)
class Placed:
    """What follows from a candidate before any data is seen."""

    candidate: Candidate
    recompute: Mapping[str, Recompute]
    """The candidate's, and what ``fill="decoupled"`` adds."""
    placement: Placement
    """With every ``split`` given."""
    scheduling: ScheduleConfig
    graph: StageGraph
    times: Mapping[StageId, StageTimes]
    costs: Mapping[StageId, StageCost]
    """Seconds of a forward, for balancing."""
    unlinked: Mapping[StageId, StageTimes] | None = None
    """Its times on links that take none, where bubbles of tensor parallelism are used."""

    def without(self, modules: Collection[str]) -> Placed:
        """The same without stages and times of some modules."""
        times = {node: t for node, t in self.times.items() if node.module not in modules}
        return replace(self, graph=self.graph.without(modules), times=times)

    @property
    def holds_more(self) -> bool:
        """Whether a step holds more the more microbatches it has: of what fills bubbles or runs a step ahead."""
        return bool(self.graph.filling or self.scheduling.prefetch)

    @cached_property
    def alike(self) -> Hashable:
        """Equal for those whose steps are planned, scheduled and simulated alike."""
        asked, layouts = self.scheduling, self.placement.layouts.items()
        lies = tuple((name, x.ranks, x.tp, x.pp, x.vpp, x.pp_style, x.dp) for name, x in layouts)
        bounds = frozenset(asked.max_in_flight.items()), frozenset(asked.prefetch), asked.islands
        stages = tuple((n, s.trains, s.backward, s.sharded, s.whole) for n, s in self.graph.stages.items())
        times = tuple(tuple(map(during, each.values())) for each in (self.times, self.unlinked or {}))
        return lies, asked.schedule, asked.fill, bounds, stages, times

    @property
    def together(self) -> set[StageId]:
        """Stages whose instances do all actions together, because each gathers parameters."""
        return {s for s, t in self.times.items() if not t.once and t.gather > 0}


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a candidate, as the trainer would run it, and its simulation."""

    placed: Placed
    plan: StepPlan
    schedule: Schedule
    simulation: Simulation
    after: After
    """Seconds that are in no action, on the slowest rank."""

    @property
    def seconds(self) -> float:
        return self.simulation.time + self.after.total


class Evaluator:
    """Simulates steps of candidates.

    Args:
        batches: global batches drawn from the data, on which candidates are compared.
        balance: how their work is spread.
        overlap: which collectives run beside compute.
        measured: seconds of modules' blocks; others follow from FLOPs.
        accumulated: global batches of an optimizer step.
        asked: how steps are scheduled, as far as a person says it; candidates say the rest.
        microbatch_rows: see :func:`plan_step`.
        compiled: modules whose blocks are compiled, and whose backward no schedule divides.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        batches: Sequence[StepMetadata],
        *,
        balance: BalanceConfig | None = None,
        precision: Precision = MIXED,
        overlap: Overlap = OURS,
        measured: Mapping[str, ModuleSeconds] = MappingProxyType({}),
        accumulated: int = 1,
        asked: ScheduleConfig = ScheduleConfig(),  # noqa: B008
        microbatch_rows: Mapping[str, int | Literal["equal"]] = MappingProxyType({}),
        compiled: Collection[str] = (),
    ) -> None:
        self.shape, self.cluster, self.batches = shape, cluster, tuple(batches)
        self.precision, self._measured = precision, measured
        self._balance = balance or BalanceConfig()
        self.asked, self._microbatch_rows, self._compiled = asked, microbatch_rows, compiled
        given: Any = {"precision": precision, "overlap": overlap, "accumulated": accumulated}
        self._times: Callable[..., list[StageTimes]] = partial(module_times, **given)
        given |= {"asked": asked, "microbatch_rows": microbatch_rows, "compiled": compiled}
        self.on = partial(Evaluator, shape, batches=batches, balance=balance, measured=measured, **given)
        """The same on another ``cluster``."""
        self._fed = shape.fed_by_trainable()
        self._stages: dict[Hashable, tuple[ModuleLayout, list[StageTimes]]] = {}
        self._firsts: dict[tuple[int, int], StepMetadata] = {}
        self._plans: dict[Hashable, tuple[StepMetadata, StepPlan]] = {}
        self._simulated: dict[Hashable, tuple[StepPlan, Simulation]] = {}
        self.lengths = {name: self._length(name) for name in shape.modules}
        """Module -> rows of a unit inside it, weighted by rows: those of the unit that a row is in, on average."""

    def place(self, candidate: Candidate) -> Placed:
        """Choose stages and count their times.

        Raises:
            LayoutError: layouts that do not fit the cluster or the modules.
            ScheduleError: a schedule that does not fit the layouts.
            ConfigError: what a person asks of schedules does not.
        """
        given = place(candidate.layouts, self.cluster.ranks).layouts
        scheduling = self.asked.instead_of_auto(candidate.scheduling).resolved(given)
        others, edges = self.shape.others, self.shape.edges
        filling, apart = scheduling.filling(others, given, edges), scheduling.apart(others, given, edges)
        blocks = {name: module.blocks * module.has_blocks for name, module in self.shape.modules.items()}
        given = scheduling.most_ahead(scheduling.in_pieces(filling, given), blocks)
        again = decoupled(candidate.recompute, scheduling.fill, filling)
        casts = self.precision.compute != self.precision.master
        layouts: dict[str, ModuleLayout] = {}
        times: dict[StageId, StageTimes] = {}
        trains: dict[StageId, bool] = {}
        for name, module in self.shape.modules.items():
            share = again[name].share(module.blocks) if name in again else 0.0
            casting = casts and bool(module.trained.any())
            once = scheduling.gathered_once(given[name], casts=casting, apart=name in {*apart, *scheduling.prefetch})
            layout, stages = self._staged(name, given[name], share, once)
            layouts[name] = layout
            times |= {StageId(name, i): stage for i, stage in enumerate(stages)}
            assert layout.split is not None
            ends = np.cumsum(layout.split) if module.has_blocks else [1]
            counts = np.split(module.trained, ends[:-1])
            trains |= {StageId(name, i): bool(part.any()) for i, part in enumerate(counts)}
        shardings = {n: sharding(layouts[n].cp, m.row_parts[layouts[n].tp]) for n, m in self.shape.modules.items()}
        once_gathered = {s for s, t in times.items() if t.once}
        graph = stage_graph(
            list(self.shape.modules),
            self.shape.edges,
            layouts,
            trains,
            once_gathered,
            {*again, *self._compiled, *candidate.offload},
            shardings,
            apart,
            scheduling.prefetch,
            islands_of(layouts, self.shape.samplewise[0], scheduling.islands),
        )
        if late := [name for name in scheduling.prefetch if trains[StageId(name, 0)]]:
            raise ConfigError(f"planner: prefetch of '{late[0]}', whose first stage has parameters that train")
        balanced = {s: StageCost(t.forward.per_row, t.forward.per_pair) for s, t in times.items()}
        for name in scheduling.prefetch:  # in every step but an epoch's first and last one
            times[StageId(ahead(name), 0)] = whole = times[StageId(name, 0)]
            times[StageId(name, 0)] = replace(whole, forward=NOTHING, gather=0.0)
        times = {node: times[node.all_instances] for node in graph.stages}
        unlinked = None
        if candidate.tp_bubbles and not self.cluster.shares_cores:  # processors have no streams
            unlinked = self.unlinked(candidate)
        return Placed(
            candidate, again, Placement(layouts, self.cluster.ranks), scheduling, graph, MappingProxyType(times),
            MappingProxyType(balanced), unlinked,
        )  # fmt: skip

    def _staged(
        self, name: str, layout: ModuleLayout, share: float, once: bool
    ) -> tuple[ModuleLayout, list[StageTimes]]:
        """A module's layout with its split, and the times of its stages."""
        if (key := (name, layout, share, once)) not in self._stages:
            module, fed, measured = self.shape.modules[name], self._fed[name], self._measured.get(name)
            made, on = self._with_split(module, layout, share, fed, self.lengths[name]), self.cluster.on(layout.ranks)
            given: Any = {"fed": fed, "recomputed": share, "once": once, "measured": measured}
            times = self._times(module, made, on, members=self.cluster.members(made), **given)
            self._stages[key] = made, times
        return self._stages[key]

    def unlinked(self, candidate: Candidate) -> Mapping[StageId, StageTimes]:
        """Times of its stages on links without latency and of any bandwidth."""
        return self.on(cluster=self.cluster.linked(Links())).place(replace(candidate, tp_bubbles=False)).times

    def step(self, placed: Placed, batch: int = 0) -> Step:
        """Plan one of the batches, schedule it and simulate it."""
        return self.step_of(placed, self.batches[batch], placed.candidate.microbatches)

    def seconds(self, candidate: Candidate) -> float:
        """Mean seconds of a step over all batches."""
        return float(np.mean(self.of_batches(candidate)))

    def of_batches(self, candidate: Candidate, enough: Sequence[float] = ()) -> list[float]:
        """Seconds of a step of each batch.

        Steps of many actions are extrapolated from two shorter ones of the same microbatches: once a pipeline is full,
        each microbatch adds the same, and not less than what the busiest rank does for it.

        Args:
            enough: seconds of each batch; once those so far are more, the others are left out. Empty: none are.
        """
        placed, took = self.place(candidate), list[float]()
        for batch in range(len(self.batches)):
            took.append(self._seconds(placed, batch))
            if enough and sum(took) > sum(enough[: len(took)]):
                break
        return took

    def shown(self, placed: Placed, batch: int = 0) -> Step:
        """A step of one of the batches, or of its first samples where that has too many actions to look at."""
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
        """By so many microbatches of one of the batches; where one like it was simulated, by that."""
        first = self._first(batch, placed.candidate.microbatches, most)
        if (key := (batch, most, len(first[0].samples), placed.alike)) not in self._simulated:
            step = self.step_of(placed, *first)
            self._simulated[key] = step.plan, thinned(step.simulation)
        plan, simulation = self._simulated[key]
        seconds = simulation.time + self._after(placed, plan, simulation).total
        return Took(seconds, float(simulation.busy.max()))

    def _first(self, batch: int, count: int, most: int) -> tuple[StepMetadata, int, bool]:
        """The first microbatches of a batch that has ``count``, how many they are, and whether they are not all."""
        whole = self.batches[batch]
        if count <= most:
            return whole, count, False
        samples = len(whole.samples) * most // count
        if (batch, samples) not in self._firsts:
            self._firsts[batch, samples] = first_samples(whole, samples)
        return self._firsts[batch, samples], most, True

    def step_of(self, placed: Placed, metadata: StepMetadata, microbatches: int, part: bool = False) -> Step:
        """Plan any batch, schedule it and simulate it: between two like it, where modules run ahead. A part of a batch
        keeps no budgets, since its samples may be longer than those of the whole.
        """
        plan, ahead_of_it = self._plan(placed, metadata, microbatches, part), placed.scheduling.prefetch
        return self.simulated(placed, with_next(plan, plan, ahead_of_it, held=True) if ahead_of_it else plan)

    def simulated(self, placed: Placed, plan: StepPlan) -> Step:
        """Schedule a plan and simulate it; of its modules those that are placed."""
        seconds = ActionSeconds(plan, placed)
        graph, scheduling = placed.graph, placed.scheduling
        work = work_of(plan, graph)
        fill = "fine" if scheduling.fill == "search" else scheduling.fill  # from which each step of a run is searched
        bound = {name: most for name, most in scheduling.max_in_flight.items() if name in graph.pipelines}
        bubbles = None if placed.unlinked is None else self.bubbles(placed, plan)
        usual = None if bubbles is None else bubbles.usual
        schedule = make_schedule(
            scheduling.schedule, graph, work, seconds.usual, max_in_flight=bound, fill=fill, bubbles=usual
        )
        rows = rows_between(plan, placed.graph, self.row_bytes)
        together = placed.together
        simulation = simulate(schedule, seconds, self.cluster.network, rows, synchronous=together, bubbles=bubbles)
        return Step(placed, plan, schedule, simulation, self._after(placed, plan, simulation))

    def _after(self, placed: Placed, plan: StepPlan, simulation: Simulation) -> After:
        after = seconds_after(simulation, placed.times)
        if self.cluster.shares_cores:
            least = self.cluster.on_cores(self._work(placed, plan, simulation.schedule))
            after = max(after, After(rest=least - simulation.time), key=lambda one: one.total)
        return after

    def bubbles(self, placed: Placed, plan: StepPlan) -> Bubbles:
        """What of a plan's actions, in layouts whose bubbles of tensor parallelism are used, leaves room to compute."""
        assert placed.unlinked is not None
        fills = placed.graph.filling
        return Bubbles(ActionSeconds(plan, placed), ActionSeconds(plan, replace(placed, times=placed.unlinked)), fills)

    def _work(self, placed: Placed, plan: StepPlan, schedule: Schedule) -> Float64[np.ndarray, "ranks"]:
        """Seconds in which each rank needs a processor: its actions, collectives as far as it works for them, and what
        follows the last of them.
        """
        times = self._working.place(placed.candidate).times
        return work_of_ranks(schedule, ActionSeconds(plan, replace(placed, times=times)), times, self.cluster.ranks)

    @cached_property
    def _working(self) -> Evaluator:
        """With the work for collectives in place of what they take."""
        return self.on(cluster=self.cluster.worked_for())

    def _plan(self, placed: Placed, metadata: StepMetadata, microbatches: int, part: bool) -> StepPlan:
        instances, balance = placed.placement.instances(), replace(self._balance, budget={}) if part else self._balance
        shape, cluster = self.shape, self.cluster
        around = model_context(
            placed.graph, placed.costs, shape.samplewise, placed.scheduling, placed.placement, cluster.ranks_per_node
        )
        aligned = aligned_rows(shape.samplewise, placed.placement.layouts)
        balancing = balance.resolve(instances, around)
        of_order = placed.alike if balancing.order else None
        key = id(metadata), microbatches, part, content((instances, aligned, replace(balancing, order=None))), of_order
        if key not in self._plans:
            made = plan_step(
                metadata,
                instances,
                shape.samplewise,
                microbatches=microbatches,
                row_multiple=aligned,
                microbatch_rows=self._microbatch_rows,
                balancing=balancing,
            )
            self._plans[key] = metadata, made  # which keeps the metadata alive, so that its id is its own
        plan = self._plans[key][1]
        if plan.microbatches > microbatches:  # a run takes more, too; what is planned for is another candidate
            raise ConfigError(
                f"planner: with {microbatches} microbatches a step does not keep the budget of every instance; plan for"
                " more"
            )
        return plan

    def row_bytes(self, source: StageId, target: StageId) -> float:
        """Bytes of a row between two stages."""
        return float(self.precision.compute * self.shape.width(source, target))

    def _with_split(
        self, module: ModuleShape, layout: ModuleLayout, again: float, fed: bool, length: float
    ) -> ModuleLayout:
        if layout.split is not None:
            return layout
        if not module.has_blocks and layout.pipeline.stages == 1:
            return replace(layout, split=(0,))
        blocks = zip(module.per_row, module.per_pair, module.trained, module.trained_share, strict=True)
        layers = [LayerCost(a + b * length, n > 0, again, weight=a * share) for a, b, n, share in blocks]
        return replace(layout, split=split_into(layout.pipeline, costs(layers, fed).total))

    def _length(self, name: str) -> float:
        lengths = np.concatenate(
            [b.tokens if self.shape.modules[name].samplewise else b.items[name].inner_rows for b in self.batches]
        ).astype(np.float64)
        total = float(lengths.sum())
        return float((lengths * lengths).sum()) / total if total else 0.0
