"""What follows from a model, its layouts and an order without any process: stages, their graph, their costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.islands import islands_of
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.apply import check_all
from hetero_strategy.parallelize.offload import Offload, check_offload
from hetero_strategy.parallelize.per_module import check_blocks
from hetero_strategy.parallelize.recompute import Recompute, decoupled
from hetero_strategy.parallelize.stages import cut
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.plan.ahead import ahead
from hetero_strategy.planner.shape import flops_by_length
from hetero_strategy.planner.stages import with_splits
from hetero_strategy.schedule.action import Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import StageCost, stage_graph


@dataclass(frozen=True)
class Blueprint:
    """What follows from a model and its layouts without any process."""

    layouts: dict[str, ModuleLayout]
    """With every ``split`` given."""
    graph: StageGraph
    costs: dict[StageId, StageCost]
    recompute: dict[str, Recompute]
    """Of modules that compute activations again in backward, those that ``fill="decoupled"`` does so with included."""


def blueprint(
    model: MultimodalModel,
    layouts: Mapping[str, ModuleLayout],
    scheduling: ScheduleConfig,
    recompute: Mapping[str, Recompute] = MappingProxyType({}),
    compile: Mapping[str, str] = MappingProxyType({}),
    storage: Storage = FP32,
    offload: Mapping[str, Offload] = MappingProxyType({}),
) -> Blueprint:
    """Cut the modules into stages and check that the order can run them. Pure; call it on the meta device.

    Args:
        layouts: resolved.
        recompute: of modules that compute activations again in backward.
        compile: backend of modules whose blocks are compiled.
        storage: dtypes of parameters.
        offload: of modules whose activations are in host memory between forward and backward.

    Raises:
        LayoutError: layouts that do not fit the modules.
        ScheduleError: an order that does not fit the layouts.
        ConfigError: ``recompute``, ``compile`` or ``offload`` cannot be applied to a module, or see
            :meth:`Storage.check`.
    """
    modules, scheduling = model.modules_by_name, scheduling.resolved(layouts)
    check_all(modules, dict(layouts))
    storage.check(modules)
    blocks = {name: bool(module.blocks()) for name, module in modules.items()}
    for option, named in (("recompute", recompute), ("compile", compile), ("offload", offload)):
        check_blocks(option, named, blocks)
    _check_compile(modules, layouts, recompute, compile)
    edges = [(e.source, e.target) for e in model.edges]
    others = {*modules} - {*model.language_models()}
    filling, apart = scheduling.filling(others, layouts, edges), scheduling.apart(others, layouts, edges)
    scheduling.check_bubbles(filling, layouts)
    recompute = decoupled(recompute, scheduling.fill, filling)
    _check_chunks(layouts, recompute, compile)
    check_offload(offload, recompute, compile, {name: layout.tp for name, layout in layouts.items()})
    again = {name: how.share(len(modules[name].blocks())) for name, how in recompute.items()}
    layouts = scheduling.in_pieces(filling, layouts)
    layouts = scheduling.most_ahead(layouts, {name: len(module.blocks()) for name, module in modules.items()})
    chosen = with_splits(modules, model.topological(), edges, layouts, again)
    trains: dict[StageId, bool] = {}
    gathered: set[StageId] = set()
    costs: dict[StageId, StageCost] = {}
    for name, module in modules.items():
        split = chosen[name].split
        assert split is not None
        for number, stage in cut(module, split, range(len(split))).items():
            node = StageId(name, number)
            trains[node] = any(p.requires_grad for p in stage.parameters())
            casts = storage.casts(stage.parameters())
            if scheduling.gathered_once(chosen[name], casts=casts, apart=name in {*apart, *scheduling.prefetch}):
                gathered.add(node)
            elif stage.last_stage and (chosen[name].shards > 1 or (casts and chosen[name].dp > 1)):
                _check_kept(name, module, storage)
        ranks, waits = chosen[name].neighbours, scheduling.tp_bubbles.get(name, 0.0)
        lines = _costs(module, split, again.get(name, 0.0), ranks, waits)
        costs |= {StageId(name, i): cost for i, cost in enumerate(lines)}
    islands = islands_of(chosen, next(iter(model.language_models())), scheduling.islands)
    shardings = {name: module.row_sharding(chosen[name]) for name, module in modules.items()}
    whole = {*recompute, *compile, *offload}
    _check_ahead(model, scheduling.prefetch, trains)
    graph = stage_graph(
        model.topological(), edges, chosen, trains, gathered, whole, shardings, apart, scheduling.prefetch, islands
    )
    costs |= {StageId(ahead(name), 0): costs[StageId(name, 0)] for name in scheduling.prefetch}
    once = StepWork({n: (Span(0, 0, 0),) for n in modules}, dict.fromkeys(edges, ((0, 0),)))
    make_schedule(scheduling.schedule, graph, once, max_in_flight=scheduling.max_in_flight, fill=scheduling.fill)
    return Blueprint(chosen, graph, costs, recompute)


def _check_ahead(model: MultimodalModel, prefetch: Collection[str], trains: Mapping[StageId, bool]) -> None:
    """Refuse to run modules ahead whose first stage trains, that read what others make, or whose rows nobody reads."""
    fed, feeding = {e.target for e in model.edges}, {e.source for e in model.edges}
    for name in prefetch:
        module = model.modules_by_name.get(name)
        if module is None:
            raise ConfigError(
                f"HeteroStrategy: prefetch names '{name}'; the modules are {', '.join(model.modules_by_name)}"
            )
        if name in fed or name not in feeding:
            raise ConfigError(
                f"HeteroStrategy: prefetch names '{name}', which {'reads rows' if name in fed else 'feeds no module'};"
                " only an encoder of items that feeds others runs a step ahead"
            )
        if module.kind.has_loss and StageId(name, 1) not in trains:
            raise ConfigError(
                f"HeteroStrategy: prefetch names '{name}', a {module.kind.name} in one stage, whose loss belongs to the"
                f" step itself; give it a pipeline, of which the first stage runs ahead, or leave '{name}' out"
            )
        if trains[StageId(name, 0)]:
            trained = [fqn for fqn, p in module.named_parameters() if p.requires_grad]
            alone = StageId(name, 1) not in trains
            fix = f"pieces={{'{name}': 2}}, where only its first part runs ahead" if alone else "a later first cut"
            raise ConfigError(
                f"HeteroStrategy: prefetch names '{name}', whose first stage has parameters that train (of"
                f" {len(trained)}, the first is {trained[0]}): rows for the next step would be those of old weights;"
                f" freeze them with MultimodalModel(freeze=...), take {fix}, or leave '{name}' out"
            )


def kept_by_chunk(name: str, module: Adapter, storage: Storage) -> list[str]:
    """Layers of a module that compute in fp32 by themselves and run once for each chunk of labelled rows, by FQN."""
    chunked = {id(layer) for part in module.recomputed_parts() for layer in part.modules()}
    kept = {id(layer) for layer in storage.kept(name, module)} if storage.mixed else set()
    return [fqn for fqn, part in module.named_modules() if id(part) in chunked & kept]


def beside_kept(asked: ScheduleConfig, model: MultimodalModel, storage: Storage) -> ScheduleConfig:
    """What is asked of a plan, so that :func:`blueprint` refuses none of its layouts for such layers."""
    kept = any(kept_by_chunk(name, module, storage) for name, module in model.modules_by_name.items())
    free = kept and asked.reshard_after_forward == "auto"
    return replace(asked, reshard_after_forward="never") if free else asked


def _check_kept(name: str, module: Adapter, storage: Storage) -> None:
    """Refuse such layers where they are gathered by themselves, as often as a rank likes."""
    for fqn in kept_by_chunk(name, module, storage):
        raise ConfigError(
            f"HeteroStrategy: keep_fp32 names parameters of {name}.{fqn}, which runs once for each chunk of labelled"
            " rows: ranks would gather it as often as each has chunks; use reshard_after_forward='never', or leave it"
            " out"
        )


def _check_compile(
    modules: Mapping[str, Adapter],
    layouts: Mapping[str, ModuleLayout],
    recompute: Mapping[str, Recompute],
    compile: Mapping[str, str],
) -> None:
    for name, backend in compile.items():
        tp, again = layouts[name].tp, recompute.get(name)
        refusal = f"HeteroStrategy: compile names '{name}', which has tp={tp}"
        if tp > 1 and not modules[name].tp_compiles:
            raise ConfigError(
                f"{refusal}: torch's compiler fails on its tensor-parallel layers; set tp=1 or leave '{name}' out"
            )
        if tp > 1 and again is not None and again.keeps_matmuls:
            raise ConfigError(
                f"{refusal}: torch's compiler fails on recompute='all but matmuls' there; set recompute of '{name}' to"
                " 'all' or 'every 2'"
            )
        if tp == 1 and backend == "eager" and again is not None and not again.whole:
            raise ConfigError(
                f"HeteroStrategy: compile of '{name}' is 'eager', with which torch would draw other random numbers when"
                f" blocks run again in backward; use 'aot_eager', or leave '{name}' out of recompute"
            )


def _check_chunks(
    layouts: Mapping[str, ModuleLayout], recompute: Mapping[str, Recompute], compile: Mapping[str, str]
) -> None:
    for name, layout in layouts.items():
        keeps = name in recompute and recompute[name].keeps_matmuls
        if layout.tp_chunks > 1 and (keeps or name in compile):
            option = "recompute='all but matmuls'" if keeps else "compile"
            why = "sums of chunks take the place of what matmuls make" if keeps else "compiled blocks start no chunks"
            raise ConfigError(
                f"layout of '{name}': tp_chunks={layout.tp_chunks} does not go with {option}: {why}; set"
                f" tp_chunks=1, or leave '{name}' out of {option.partition('=')[0]}"
            )


def _costs(module: Adapter, split: Sequence[int], recomputed: float, ranks: int, waits: float) -> list[StageCost]:
    """Linear and quadratic part of the FLOPs of every stage on each of an instance's ranks."""
    per_row, per_pair = (flops / ranks for flops in flops_by_length(module, split))
    return [StageCost(float(a), float(b), recomputed, waits) for a, b in zip(per_row, per_pair, strict=True)]
