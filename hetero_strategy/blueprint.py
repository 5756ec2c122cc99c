"""What follows from a model, its layouts and an order without any process: stages, their graph, their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.apply import check_all
from hetero_strategy.parallelize.stages import cut
from hetero_strategy.planner.stages import with_splits
from hetero_strategy.schedule.action import Node, Span, StageGraph, Work
from hetero_strategy.schedule.build import SPLIT, make_schedule
from hetero_strategy.schedule.graph import StageCost, stage_graph

GATHER = ("auto", "step", "microbatch")


@dataclass(frozen=True)
class Scheduling:
    """How steps are scheduled, as a person says it; see :class:`HeteroStrategy`."""

    order: str = "auto"
    max_in_flight: Mapping[str, int] = field(default_factory=dict)
    gather: str = "auto"

    def __post_init__(self) -> None:
        if self.gather not in GATHER:
            raise ConfigError(f"HeteroStrategy: gather={self.gather!r}; use one of {', '.join(GATHER)}")
        if self.gather == "microbatch" and self.order in SPLIT:
            raise ConfigError(
                f"HeteroStrategy: gather='microbatch' with order={self.order!r}: a backward in two halves needs its"
                " parameters whole all step; use gather='step' or another order"
            )

    def resolved(self, layouts: Mapping[str, ModuleLayout]) -> Scheduling:
        """With the order that ``auto`` stands for: what the virtual stages are made for, else 1F1B."""
        if self.order != "auto":
            return self
        styles = {layout.pp_style for layout in layouts.values() if layout.vpp > 1}
        return replace(self, order="zbv" if "v" in styles else "interleaved_1f1b" if styles else "1f1b")

    def check(self, layouts: Mapping[str, ModuleLayout]) -> None:
        """Refuse an order that cannot run these layouts, whatever the model is. Pure.

        Raises:
            ScheduleError: naming module, field and fix.
        """
        trains = {Node(n, s): True for n, layout in layouts.items() for s in range(layout.pipeline.stages)}
        alone = stage_graph(list(layouts), [], layouts, trains)
        once = Work({n: (Span(0, 0, 0),) for n in layouts}, {})
        make_schedule(self.resolved(layouts).order, alone, once, max_in_flight=self.max_in_flight)

    def gathered(self, layout: ModuleLayout) -> bool:
        """Whether a module's parameters stay whole over a step."""
        if layout.dp_shard == 1:
            return False
        return self.gather == "step" or (self.gather == "auto" and (layout.pp > 1 or self.order in SPLIT))


@dataclass(frozen=True)
class Blueprint:
    """What follows from a model and its layouts without any process."""

    layouts: dict[str, ModuleLayout]
    """With every ``split`` given."""
    graph: StageGraph
    costs: dict[Node, StageCost]


def blueprint(
    model: MultimodalModel, layouts: Mapping[str, ModuleLayout], scheduling: Scheduling, recompute: Sequence[str] = ()
) -> Blueprint:
    """Cut the modules into stages and check that the order can run them. Pure; call it on the meta device.

    Args:
        model: as built.
        layouts: resolved.
        scheduling: of steps.
        recompute: modules that recompute their blocks in backward.

    Raises:
        LayoutError: layouts that do not fit the modules.
        ScheduleError: an order that does not fit the layouts.
        ConfigError: ``recompute`` names a module that does not exist.
    """
    modules, scheduling = model.modules_by_name, scheduling.resolved(layouts)
    check_all(modules, dict(layouts))
    unknown = sorted(set(recompute) - set(modules))
    if unknown:
        raise ConfigError(f"HeteroStrategy: recompute names {unknown}; the modules are {', '.join(modules)}")
    edges = [(e.source, e.target) for e in model.edges]
    chosen = with_splits(modules, model.topological(), edges, layouts, recompute)
    trains: dict[Node, bool] = {}
    costs: dict[Node, StageCost] = {}
    for name, module in modules.items():
        split = chosen[name].split
        assert split is not None
        for number, stage in cut(module, split, range(len(split))).items():
            trains[Node(name, number)] = any(p.requires_grad for p in stage.parameters())
        for number, cost in enumerate(_costs(module, split, name in recompute)):
            costs[Node(name, number)] = cost
    gathered = {name for name, layout in chosen.items() if scheduling.gathered(layout)}
    graph = stage_graph(model.topological(), edges, chosen, trains, gathered, recompute)
    once = Work({n: (Span(0, 0, 0),) for n in modules}, dict.fromkeys(edges, ((0, 0),)))
    make_schedule(scheduling.order, graph, once, max_in_flight=scheduling.max_in_flight)
    return Blueprint(chosen, graph, costs)


def _costs(module: Adapter, split: Sequence[int], recomputed: bool) -> list[StageCost]:
    """Linear and quadratic part of every stage's FLOPs, from two lengths."""
    short, long = (module.stage_flops(np.array([length]), split) for length in (64, 128))
    per_pair = np.maximum((long - 2 * short) / (128**2 - 2 * 64**2), 0.0)
    per_row = (short - per_pair * 64**2) / 64
    return [StageCost(float(a), float(b), recomputed) for a, b in zip(per_row, per_pair, strict=True)]
