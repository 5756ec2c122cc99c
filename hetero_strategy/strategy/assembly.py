"""Puts a LightningModule's model on its ranks: finds it, checks it, builds groups, shards, order and executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hetero_strategy.boundary.transport import Channel
from hetero_strategy.checkpoint.training import TrainingState, part_of
from hetero_strategy.errors import CheckpointError, ConfigError, ModelError
from hetero_strategy.layout.placement import Placement
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.materialize import CHANGED, changed_since_made
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.gradients import Owned, owned_parameters
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.parallelize.tied import find_tied, tied_rank_sets
from hetero_strategy.plan.ahead import ahead, computing
from hetero_strategy.plan.config import ModelContext
from hetero_strategy.planner.context import model_context
from hetero_strategy.runtime.connect import channel_sets, connect
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import StageGraph, StageId
from hetero_strategy.schedule.compile import StepCompiler
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.strategy.blueprint import Blueprint, blueprint
from hetero_strategy.strategy.first_values import check_first_values

PARTS = "state_dict() of a model on its ranks has on this one a part, or nothing, of"
"""Begins the warning that a ``state_dict()`` is not all weights."""
Row = tuple[int, torch.dtype]
"""Width and dtype of a row."""


@dataclass(frozen=True)
class Assembled:
    """A model in place on this rank."""

    executor: Executor
    owned: dict[int, Owned]
    """By ``id`` of the parameter."""
    state: TrainingState
    registry: GroupRegistry
    context: ModelContext
    """For balancing."""
    recompute: Mapping[str, Recompute]
    """Of modules that compute activations again in backward."""


def find_model(module: nn.Module, agree: Callable[[bool], bool]) -> tuple[str, MultimodalModel]:
    """The one model of a LightningModule, after ``configure_model``, and its name there.

    Args:
        agree: whether any rank says yes; a collective.

    Raises:
        ConfigError: none or several models, parameters outside it, or a model that has been trained elsewhere.
        ModelError: a module has been given other parameters or buffers since the model was made.
    """
    found = [(n, m) for n, m in module.named_modules() if isinstance(m, MultimodalModel)]
    kind = type(module).__name__
    if len(found) != 1:
        raise ConfigError(
            f"HeteroStrategy: {kind} holds {len(found)} MultimodalModels after configure_model(); it needs exactly one,"
            " built in configure_model()"
        )
    prefix, model = found[0]
    if "_orig_mod" in prefix.split(".") or model._compiled_call_impl is not None:
        raise ConfigError(
            f"HeteroStrategy: torch.compile around the MultimodalModel of {kind} would trace whole steps, of which none"
            " is like another; compile the blocks of modules: HeteroStrategy(compile=['vision', 'llm'])"
        )
    start = f"{prefix}." if prefix else ""
    inside = {f"{start}{name}.{n}" for name, m in model.modules_by_name.items() for n, _ in m.named_parameters()}
    outside = {n for n, _ in module.named_parameters()} - inside
    if outside:
        raise ConfigError(
            f"HeteroStrategy: parameter '{min(outside)}' of {kind} lies outside the modules of its MultimodalModel,"
            " so no layout says where it lives; make it part of one of them"
        )
    for name, adapter in model.modules_by_name.items():
        if changed := changed_since_made(adapter):
            raise ModelError(CHANGED.format(name=name, fqn=changed[0]))
    filled = any(
        not p.is_meta and fqn not in adapter.initial_values()
        for adapter in model.modules_by_name.values()
        for fqn, p in adapter.named_parameters()
    )
    if agree(filled):
        raise ConfigError(
            "HeteroStrategy: the model has values already, which would be lost; build it in configure_model() and"
            " not in __init__(), and go on with a trained one in the Trainer that trained it, or in a new"
            " LightningModule with ckpt_path"
        )
    return prefix, model


def assemble(
    prefix: str,
    model: MultimodalModel,
    placement: Placement,
    rank: int,
    device: torch.device,
    *,
    ranks_per_node: int = 1 << 30,
    storage: Storage,
    scheduling: ScheduleConfig,
    recompute: Mapping[str, Recompute] = MappingProxyType({}),
    compile: Mapping[str, str] = MappingProxyType({}),
    offload: Mapping[str, Offload] = MappingProxyType({}),
    timeout: timedelta | None = None,
    async_checkpoint: bool = False,
    plan: Blueprint | None = None,
) -> Assembled:
    """Put every module this rank owns on its mesh. A collective over the world.

    On the meta device, for a dry run on fake process groups, nothing has values.

    Args:
        prefix: of the model in the LightningModule.
        model: on the meta device; modules that this rank does not own stay there.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``; default: all on one.
        storage: dtypes of parameters, and of rows between stages.
        recompute: of modules that compute activations again in backward.
        compile: backend of modules whose blocks are compiled.
        offload: of modules whose activations are in host memory between forward and backward.
        plan: what :func:`blueprint` makes of the same; None: it is made here.

    Raises:
        ConfigError: a module came with other values on other ranks.
        others: see :func:`blueprint`.
    """
    scheduling = scheduling.resolved(placement.layouts)
    plan = plan or blueprint(model, placement.layouts, scheduling, recompute, compile, storage, offload)
    connected = torch.device("cpu") if device.type == "meta" else device  # no backend sends what is on meta
    modules, layouts, graph = model.modules_by_name, plan.layouts, plan.graph
    if device.type != "meta":
        check_first_values(modules, layouts, device)
    apart = {computing(name) for name in graph.filling} if scheduling.tp_bubbles else set[str]()
    registry = GroupRegistry(placement, tied_rank_sets(modules, layouts), connected.type, timeout, apart)
    rows = [
        (modules[s.module].hidden_width if s.module == t.module else modules[s.module].width, storage.compute)
        for s, t in graph.edges
    ]
    channels = _channels(registry, graph, rows, rank, connected)
    connect(graph, channels, rank)
    copies = scheduling.reshard_after_forward != "always"
    stages = _own_stages(
        model, layouts, registry, placement, rank, device, plan.recompute, compile, offload, storage, copies=copies
    )
    if device.type != "meta":
        model.register_state_dict_post_hook(_say_parts)
        model.register_load_state_dict_pre_hook(_take_parts)
    mine = {
        graph.node_of(StageId(name, number), rank): stage
        for name, made in stages.items()
        for number, stage in made.items()
    }
    early = {
        graph.node_of(StageId(ahead(name), 0), rank): stages[name][0]
        for name in scheduling.prefetch
        if 0 in stages.get(name, {})
    }
    executor = Executor(
        stages=mine | early,
        compiler=StepCompiler(graph, plan.costs, scheduling),
        channels=channels,
        row_bytes=[width * dtype.itemsize for width, dtype in rows],
        modules=modules,
        placement=Placement(layouts, placement.world_size),
        weights=model.loss_weights,
        replicas={n: _replicas(registry, layouts[n.module], n.module, stage) for n, stage in mine.items()},
        tensor_parallel={n: _axis(registry, layouts[n.module].tp, n.module, "tp") for n in mine},
        tied=find_tied(modules, layouts, rank, registry.group),
        device=device,
        storage=storage,
        warms_up=bool(compile) or device.type == "cuda",
    )
    state = TrainingState(prefix, modules, group=registry.background, asynchronous=async_checkpoint)
    around = model_context(plan.graph, plan.costs, model.language_models(), scheduling, placement, ranks_per_node)
    owned = owned_parameters(stages, layouts)
    return Assembled(executor, owned, state, registry, around, plan.recompute)


def _say_parts(model: nn.Module, found: Mapping[str, Any], prefix: str, metadata: Any) -> None:
    """A file of what one rank has would look like the whole model's, and load as such with new values in places. Of a
    checkpoint, which takes what lies beside the model, nothing is said.
    """
    parts = {
        name.removeprefix(prefix).partition(".")[0]
        for name, value in found.items()
        if name.startswith(prefix) and (value.is_meta or isinstance(value, DTensor))
    }
    if parts and hasattr(found, "_metadata"):
        rank_zero_warn(
            f"{PARTS} {', '.join(sorted(parts))};"
            " for all weights use trainer.save_checkpoint(...) and python -m hetero_strategy.checkpoint export"
        )


def _take_parts(model: nn.Module, found: dict[str, Any], prefix: str, *_: object) -> None:
    """Take of whole tensors what this rank owns, before the model loads them.

    Raises:
        CheckpointError: a tensor has no values here, for a parameter that this rank owns.
    """
    owned: dict[str, torch.Tensor] = model.state_dict(destination={}, prefix=prefix, keep_vars=True)
    for name, own in owned.items():
        value = found.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        if own.is_meta:
            found[name] = value.to("meta")
        elif value.is_meta:
            raise CheckpointError(
                f"load_state_dict() has for {name!r} a tensor of which this rank has no values, as another parameter's;"
                " each rank gets those of the parameters that it owns: load them under their own names"
            )
        else:
            found[name] = part_of(own, value)


def move_rest(module: nn.Module, device: torch.device) -> None:
    """What a LightningModule holds besides the model's modules (metrics, buffers) goes to this rank's device, which it
    names as its ``device``.
    """
    if not any(isinstance(m, Adapter) for m in module.modules()):
        module.to(device)
    elif not isinstance(module, Adapter):
        if isinstance(module, LightningModule):
            module._device = device
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        for child in module.children():
            move_rest(child, device)


def _channels(
    registry: GroupRegistry, graph: StageGraph, rows: Sequence[Row], rank: int, device: torch.device
) -> dict[tuple[int, bool], Channel]:
    """(edge, whether backward) -> where this rank's rows travel.

    Each direction of an edge, and what replicas pass on among themselves, has a group of its own, so that neither waits
    for the other; edges between cohorts of the same two stages share them.
    """
    sets_of = {alike: channel_sets(graph, alike) for alike in dict.fromkeys(graph.firsts)}
    sets = [
        ((alike, back, hop), ranks)
        for alike, ways in sets_of.items()
        for back, hops in ways.items()
        for hop, found in enumerate(hops)
        for ranks in found
    ]
    made = zip(sets, registry.channels([ranks for _, ranks in sets]), strict=True)
    groups = {key: group for (key, _), group in made if group is not None}  # this rank is in one of a hop's sets
    channels = {}
    for number, (edge, alike) in enumerate(zip(graph.edges, graph.firsts, strict=True)):
        if any(rank in graph.stages[node].ranks for node in edge):
            for back in sets_of[alike]:
                first, second = (groups.get((alike, back, hop)) for hop in (0, 1))
                source, target = (f"module {node.module!r}" for node in (edge[::-1] if back else edge))
                tag = 2 * number + back
                channels[number, back] = Channel(first, second, tag, *rows[number], device, source, target)
    return channels


def _own_stages(
    model: MultimodalModel,
    layouts: Mapping[str, ModuleLayout],
    registry: GroupRegistry,
    placement: Placement,
    rank: int,
    device: torch.device,
    recompute: Mapping[str, Recompute],
    compile: Mapping[str, str],
    offload: Mapping[str, Offload],
    storage: Storage,
    *,
    copies: bool,
) -> dict[str, dict[int, Adapter]]:
    """Module -> this rank's stages of it, parallelised; modules of other ranks go to the meta device."""
    stages = {}
    for name, module in model.modules_by_name.items():
        where, layout = placement.coordinate(name, rank), layouts[name]
        if where is None:
            module.to("meta")
            continue
        stages[name] = parallelize(
            name,
            module,
            layout,
            registry.mesh(name),
            device,
            seed=model.seed,
            recompute=recompute.get(name),
            compile=compile.get(name),
            offload=offload.get(name),
            split=layout.split or (),
            pp_rank=where.pp,
            storage=storage,
            copies=copies,
        )
        if (context := registry.context(name)) is not None:
            for stage in stages[name].values():
                stage.context_group = context.group_name
    for module in model.modules_by_name.values():
        module.release_initial_values()
    return stages


def _replicas(registry: GroupRegistry, layout: ModuleLayout, name: str, stage: Adapter) -> dist.ProcessGroup | None:
    return None if isinstance(stage, FSDPModule) else _axis(registry, layout.dp_replicate, name, "dp_replicate")


def _axis(registry: GroupRegistry, degree: int, name: str, axis: str) -> dist.ProcessGroup | None:
    """Return this rank's group along an axis of a module's mesh; None where the degree is 1."""
    if degree == 1:
        return None
    mesh = registry.mesh(name)
    assert mesh is not None
    return mesh.get_group(axis)
