"""Collect the facts of a model in its layouts that balancing needs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from hetero_strategy.layout.spec import ModuleLayout, Placement
from hetero_strategy.mask import Causal
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.config import ModelContext
from hetero_strategy.plan.deal_rows import Dealing, RowCost
from hetero_strategy.plan.masks import CAUSAL, AttentionRules
from hetero_strategy.plan.plan_step import Near, Orderer, OtherWork
from hetero_strategy.schedule.action import StageGraph, StageId
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import StageCost, forwards
from hetero_strategy.simulator.reordering import Reorderer

ROW_ALIGNMENT = 32
"""Number of which a tensor-parallel language model's rows per rank are a multiple. Sequence parallelism needs only 1;
few distinct sizes let DTensor reuse its sharding decisions instead of making them for every ragged batch."""
FLOPS_PER_BYTE = 2500.0
"""FLOPs of a device while a byte of keys, of two a number, reaches it: half an H100's peak, and 200 GB/s."""


def aligned_rows(language_models: Iterable[str], layouts: Mapping[str, ModuleLayout]) -> dict[str, int]:
    """Return language model -> number of which each instance's rows are a multiple, if above 1.

    Samples are padded to it, items are not.
    """
    ranks = {name: (layouts[name].cp, layouts[name].tp) for name in language_models}
    return {n: cp * (tp * ROW_ALIGNMENT if tp > 1 else 2) for n, (cp, tp) in ranks.items() if cp * tp > 1}


def row_dealing(spec: ModelSpec, layouts: Mapping[str, ModuleLayout]) -> dict[str, Dealing]:
    """Return module with context parallelism by keys -> how its rows are dealt, by FLOPs and the travel of keys."""
    dealing = {}
    for name, layout in layouts.items():
        shape = spec.modules[name]
        if layout.cp > 1 and layout.cp_form != "heads" and shape.samplewise:
            row, pair = float(shape.per_row.sum()), 2 * float(shape.per_pair.sum())  # half of a square is seen
            key = FLOPS_PER_BYTE * 2.0 * shape.keys * shape.blocks
            attention = attention_rules(spec, name) or CAUSAL
            dealing[name] = Dealing(layout.cp, layout.cp_order, RowCost(row, pair, key), attention)
    return dealing


def attention_rules(spec: ModelSpec, module: str) -> AttentionRules | None:
    """Return the rules of a module's attentions; None if all of them see all earlier rows, or its units are items."""
    shape = spec.modules[module]
    per_pair = shape.per_pair / np.maximum(sum(count for _, count in shape.rules), 1)
    work = dict.fromkeys((rule for rule, _ in shape.rules), 0.0)
    for rule, count in shape.rules:  # summed in order on any CPU, which a dot product is not: plans are digested
        work[rule] += sum((count * per_pair).tolist())
    total = sum(work.values())
    if not total or all(rule == Causal() for rule, flops in work.items() if flops):
        return None
    return AttentionRules(tuple(work), tuple(flops / total for flops in work.values()), spec.item_sources(module))


def model_context(
    graph: StageGraph,
    stage_costs: Mapping[StageId, StageCost],
    language_models: Collection[str],
    scheduling: ScheduleConfig,
    placement: Placement,
    ranks_per_node: int,
) -> ModelContext:
    """Return the inputs of balancing: costs of modules, instances that share nodes or ranks, and the microbatch
    orderer.

    Args:
        stage_costs: forward cost of every stage, in FLOPs or seconds.
        language_models: modules whose units are whole samples.
        ranks_per_node: number of ranks on each node; rank ``r`` is on node ``r // ranks_per_node``.
    """
    costs = dict.fromkeys(graph.pipelines, Cost(0.0))
    for node, cost in stage_costs.items():
        known = costs[node.module]
        costs[node.module] = Cost(known.linear + cost.per_row, known.quadratic + cost.per_pair)
    between = {(s.module, t.module): (s, t) for s, t in graph.edges if s.module != t.module}
    near: dict[str, Near] = {}
    for (source, target), nodes in between.items():
        if not {source, target} & set(language_models):
            continue
        item, language_model = (source, target) if target in language_models else (target, source)
        grids = {node.module: placement.layouts[node.module].stage_grid(node.stage) for node in nodes}
        places = _near(grids[item], grids[language_model], ranks_per_node, placement.world_size)
        if places is not None:
            near.setdefault(item, Near(*places, language_model))

    def orderer(search: str) -> Orderer | None:
        chosen = Reorderer(graph, scheduling.schedule, stage_costs, scheduling.max_in_flight, search, scheduling.fill)
        return chosen if chosen.needed else None

    grids = {module: placement.layouts[module].grid() for module in graph.filling}
    other_work = {module: _other_work(module, graph, stage_costs, grid) for module, grid in grids.items()}
    return ModelContext({n: c for n, c in costs.items() if c.linear or c.quadratic}, near, orderer, other_work)


def _other_work(
    module: str, graph: StageGraph, stage_costs: Mapping[StageId, StageCost], grid: np.ndarray
) -> OtherWork:
    """Return the work of modules that do not fill bubbles on the busiest rank of each instance of a module that does.

    Args:
        grid: grid of the module, from :meth:`ModuleLayout.grid`.
    """

    def passes(node: StageId) -> float:
        """Count the actions of a microbatch, in forwards."""
        stage, cost = graph.stages[node], stage_costs[node.all_instances]
        return 1 + (forwards("B", stage, cost) if stage.backward else 0)

    whole: dict[str, float] = {}
    for node, cost in stage_costs.items():
        whole[node.module] = whole.get(node.module, 0.0) + (cost.per_row or cost.per_pair)
    on_ranks: dict[str, np.ndarray] = {}
    size = 1 + max(int(stage.grid.max(initial=0)) for stage in graph.stages.values())
    for node, stage in graph.stages.items():
        if node.module not in graph.filling and whole[node.module]:
            cost = stage_costs[node.all_instances]
            busy = on_ranks.setdefault(node.module, np.zeros(size))
            busy[stage.grid] += passes(node) * (cost.per_row or cost.per_pair) / whole[node.module]
    chain = graph.chains[module][0]
    instances = sum(len(graph.stages[nodes[0]].grid) for nodes in graph.chains[module])
    ranks = np.concatenate([part.reshape(instances, -1) for part in grid], axis=1)
    return {name: busy[ranks].max(axis=1) / passes(chain[0]) for name, busy in on_ranks.items()}


def _near(
    items: np.ndarray, language_model: np.ndarray, ranks_per_node: int, world: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the places of both sides' instances, from their ranks ``[instances, ranks]``; None if they share no place.

    Places are nodes if there are several; on one node they are the language model's instances with their ranks.
    """
    if world > ranks_per_node:
        slots, homes = items[:, 0] // ranks_per_node, language_model[:, 0] // ranks_per_node
    else:
        homes = np.arange(len(language_model))
        at = {int(rank): instance for instance, ranks in enumerate(language_model) for rank in ranks}
        slots = np.array(
            [at.get(int(ranks[0]), len(language_model) + i) for i, ranks in enumerate(items)], dtype=np.int64
        )
    return (slots, homes) if np.isin(slots, homes).any() else None
