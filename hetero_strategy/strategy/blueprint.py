"""Derive the stages of a run, their graph and their costs, without any process.

Three values go in: a :class:`ModelSpec`, a :class:`Placement` and :class:`Options`. The strategy, the dry run and the
planner all come through :func:`blueprint`, so what is planned is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError, LayoutError
from hetero_strategy.layout.spec import ModuleLayout, Placement
from hetero_strategy.layout.split_layers import split_into
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import LayerCost, ModelSpec, ModuleSpec, costs
from hetero_strategy.parallelize.apply import check_all
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.parallelize.transforms import Transforms, check_transforms, decoupled, recomputed, undivided
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import StepMetadata, StepPlan
from hetero_strategy.schedule.action import Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import StageCost, stage_graph
from hetero_strategy.simulator.balance_context import aligned_rows, attention_rules, model_context, row_dealing

TYPICAL_ROWS = 1024
"""Length of the sequence whose FLOPs weigh the blocks against the embedding and the head."""


@dataclass(frozen=True)
class Options:
    """How a model runs, whatever it is and wherever it lives."""

    scheduling: ScheduleConfig = field(default_factory=ScheduleConfig)
    transforms: Transforms = field(default_factory=dict)
    """Changes of modules' stages."""
    storage: Storage = FP32
    """Dtypes of parameters."""


@dataclass(frozen=True, eq=False)
class Blueprint:
    """The stages of a run: what they are, where they live, and what they cost."""

    spec: ModelSpec
    placement: Placement
    """Placement in which every layout has its ``split``."""
    options: Options
    """Options with a resolved schedule, and with the recompute of modules that ``fill="decoupled"`` runs again."""
    graph: StageGraph
    costs: Mapping[StageId, StageCost]

    @property
    def layouts(self) -> Mapping[str, ModuleLayout]:
        """Return the layouts with every ``split`` filled in."""
        return self.placement.layouts

    @property
    def scheduling(self) -> ScheduleConfig:
        """Return the options of the schedule, in which no schedule is ``auto``."""
        return self.options.scheduling

    @property
    def row_multiple(self) -> dict[str, int]:
        """Return language model -> number of which each instance's rows are a multiple, if above 1."""
        return aligned_rows(self.spec.samplewise, self.layouts)

    def context(self, ranks_per_node: int) -> ModelContext:
        """Return the facts about the model for balancing; rank ``r`` is on node ``r // ranks_per_node``."""
        context = model_context(
            self.graph, self.costs, self.spec.samplewise, self.scheduling, self.placement, ranks_per_node
        )
        rules = {name: rules for name in self.spec.modules if (rules := attention_rules(self.spec, name)) is not None}
        return replace(context, dealing=row_dealing(self.spec, self.layouts), rules=rules)

    def plan_step(
        self,
        metadata: StepMetadata,
        balance: BalanceConfig,
        ranks_per_node: int,
        *,
        microbatches: int | None,
        microbatch_rows: Mapping[str, int | Literal["equal"]] | None = None,
    ) -> StepPlan:
        """Plan the step of a global batch as a run does; see :func:`hetero_strategy.plan.plan_step.plan_step`."""
        instances = self.placement.instances()
        return plan_step(
            metadata,
            instances,
            self.spec.samplewise,
            microbatches=microbatches,
            row_multiple=self.row_multiple,
            microbatch_rows=microbatch_rows,
            balancing=balance.resolve(instances, self.context(ranks_per_node)),
        )


def blueprint(
    spec: ModelSpec, placement: Placement, options: Options, lengths: Mapping[str, float] | None = None
) -> Blueprint:
    """Cut the modules into stages, and find the graph of the stages and their costs.

    Args:
        placement: resolved layouts, whose degrees the modules support.
        lengths: mean rows of a sequence of each module, for whose work the modules are cut; None: typical ones.

    Raises:
        LayoutError: a module, or a rank's part of it, has fewer blocks than stages, or does not support its ``tp``.
        ConfigError: the schedule's options or the transforms do not fit the modules and their layouts.
    """
    layouts, edges = placement.layouts, spec.edges
    scheduling = options.scheduling.resolved(layouts)
    filling, apart = (find(spec.others, layouts, edges) for find in (scheduling.filling, scheduling.apart))
    transforms = decoupled(options.transforms, scheduling.fill, filling)
    check_transforms(transforms, spec.modules, layouts)
    pieces, fed = scheduling.in_pieces(filling, layouts), spec.fed_by_trainable()
    cut: dict[str, ModuleLayout] = {}
    trains: dict[StageId, bool] = {}
    gathered: set[StageId] = set()
    stage_costs: dict[StageId, StageCost] = {}
    for name, module in spec.modules.items():
        if pieces[name].tp not in module.row_shardings:
            raise LayoutError(
                f"layout of '{name}': tp={pieces[name].tp}; choose one of {', '.join(map(str, module.row_shardings))}"
            )
        again = recomputed(transforms.get(name, {}), module.blocks * module.has_blocks)[0]
        length = TYPICAL_ROWS if lengths is None else lengths[name]
        cut[name] = layout = _with_split(name, module, pieces[name], again, fed[name], length)
        first = ragged.starts(np.array(layout.split if module.has_blocks else (1,)))
        sums = (np.add.reduceat(n, first).tolist() for n in (module.per_row, module.per_pair, module.trained))
        for number, (per_row, per_pair, trained) in enumerate(zip(*sums, strict=True)):
            node = StageId(name, number)
            trains[node] = trained > 0
            casts, alone = options.storage.mixed and trains[node], name in apart or module.runs_vary
            if scheduling.gathered_once(layout, casts=casts, apart=alone):
                gathered.add(node)
            stage_costs[node] = StageCost(per_row / layout.neighbours, per_pair / layout.neighbours, again)
    cut = {name: cut[name] for name in layouts}
    shardings = {name: module.row_sharding(cut[name]) for name, module in spec.modules.items()}
    whole, balanced = undivided(transforms), {name: module.balanced for name, module in spec.modules.items()}
    graph = stage_graph(list(spec.modules), edges, cut, trains, gathered, whole, shardings, apart, balanced)
    options = replace(options, scheduling=scheduling, transforms=transforms)
    return Blueprint(spec, Placement(cut, placement.world_size), options, graph, stage_costs)


def _with_split(
    name: str, module: ModuleSpec, layout: ModuleLayout, again: float, fed: bool, length: float
) -> ModuleLayout:
    """Choose the number of blocks of each stage if the layout does not: stages of equal work, aware of frozen blocks.

    Args:
        again: share of its forward that the module runs again in backward.
        fed: whether gradients have to reach its input rows.
        length: rows of the sequence whose FLOPs count.
    """
    if layout.split is not None:
        return layout
    if layout.pipeline.stages == 1:
        return replace(layout, split=(module.blocks * module.has_blocks,))
    if not module.has_blocks:
        raise LayoutError(f"layout of '{name}': it has no blocks to cut it by; leave pieces out")
    blocks = zip(module.per_row + length * module.per_pair, module.trained, module.trained_share, strict=True)
    layers = [LayerCost(flops, trained > 0, again, weight=flops * share) for flops, trained, share in blocks]
    try:
        return replace(layout, split=split_into(layout.pipeline, costs(layers, fed).total, module.first_blocks))
    except LayoutError as fault:
        raise LayoutError(f"layout of '{name}': {fault}") from None


def checked_blueprint(model: MultimodalModel, placement: Placement, options: Options) -> Blueprint:
    """Make the blueprint of a run after all checks that need the modules; call it on the meta device.

    Args:
        model: model as built, before anything is parallelised.
        placement: resolved layouts.

    Raises:
        LayoutError: layouts do not fit the modules.
        ScheduleError: the schedule does not fit the layouts.
        ConfigError: see :func:`blueprint` and :meth:`Storage.check`.
    """
    modules = model.modules_by_name
    check_all(modules, dict(placement.layouts))
    options.storage.check(modules)
    plan = blueprint(spec_of(model), placement, options)
    for node, stage in plan.graph.stages.items():
        layout, casts = plan.layouts[node.module], options.storage.mixed and stage.trains
        last = node.stage == layout.pipeline.stages - 1
        if last and not stage.sharded and (layout.shards > 1 or (casts and layout.dp > 1)):
            _check_kept(node.module, modules[node.module], options.storage)
    scheduling, edges = plan.scheduling, plan.spec.edges
    once = StepWork({n: (Span(0, 0, 0),) for n in modules}, dict.fromkeys(edges, ((0, 0),)))
    make_schedule(scheduling.schedule, plan.graph, once, max_in_flight=scheduling.max_in_flight, fill=scheduling.fill)
    return plan


def kept_by_chunk(name: str, module: Adapter, storage: Storage) -> list[str]:
    """List the layers of a module that compute in fp32 and run once for each chunk of labelled rows, by FQN."""
    chunked = {id(layer) for part in module.recomputed_parts() for layer in part.modules()}
    kept = {id(layer) for layer in storage.kept(name, module)} if storage.mixed else set()
    return [fqn for fqn, part in module.named_modules() if id(part) in chunked & kept]


def beside_kept(asked: ScheduleConfig, model: MultimodalModel, storage: Storage) -> ScheduleConfig:
    """Restrict a plan's options so that a run accepts its layouts despite :func:`kept_by_chunk` layers."""
    kept = any(kept_by_chunk(name, module, storage) for name, module in model.modules_by_name.items())
    free = kept and asked.reshard_after_forward == "auto"
    return replace(asked, reshard_after_forward="never") if free else asked


def _check_kept(name: str, module: Adapter, storage: Storage) -> None:
    """Refuse :func:`kept_by_chunk` layers that would be gathered by themselves, once per chunk of their rank."""
    for fqn in kept_by_chunk(name, module, storage):
        raise ConfigError(
            f"HeteroStrategy: keep_fp32 names parameters of {name}.{fqn}, which runs once for each chunk of labelled"
            " rows: ranks would gather it as often as each has chunks; use reshard_after_forward='never', or leave it"
            " out"
        )
