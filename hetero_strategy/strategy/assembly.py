"""Put a LightningModule's model on its ranks: find it, check it, build groups, shards, schedule and executor.

Modules that were made ready have values before they are placed. Ranks compare digests of these values (:func:`digest`),
so that a module whose ranks have different ones is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hetero_strategy.boundary.transport import Channel
from hetero_strategy.checkpoint.optimizer_state import part_of
from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import CheckpointError, ConfigError, ModelError
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.layout.spec import ModuleLayout, Placement
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.materialize import CHANGED, changed_since_made
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.gradients import Owned, find_tied, owned_parameters, tied_rank_sets
from hetero_strategy.runtime.actions import LocalStage
from hetero_strategy.runtime.connect import channel_sets, connect
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import StageGraph, StageId
from hetero_strategy.schedule.compile import StepCompiler
from hetero_strategy.strategy.blueprint import Blueprint, Options

PARTS = "state_dict() of a model on its ranks has on this one a part, or nothing, of"
"""Begin of the warning that a ``state_dict()`` does not hold all weights."""
Row = tuple[int, torch.dtype]
"""Width and dtype of a row."""
WORD = 8
"""Bytes that :func:`bit_sum` adds as one integer."""


@dataclass(frozen=True)
class Assembled:
    """A model in place on this rank."""

    executor: Executor
    owned: dict[int, Owned]
    """Owned parameters, by ``id`` of the parameter."""
    state: TrainingState
    registry: GroupRegistry
    plan: Blueprint


def find_model(module: nn.Module, agree: Callable[[bool], bool]) -> tuple[str, MultimodalModel]:
    """Find the one model of a LightningModule, after ``configure_model``; return its name there and the model.

    Args:
        agree: returns whether it is true on any rank; a collective.
    """
    models = [(n, m) for n, m in module.named_modules() if isinstance(m, MultimodalModel)]
    kind = type(module).__name__
    if len(models) != 1:
        raise ConfigError(
            f"HeteroStrategy: {kind} holds {len(models)} MultimodalModels after configure_model(); it needs exactly"
            " one, built in configure_model()"
        )
    prefix, model = models[0]
    if "_orig_mod" in prefix.split(".") or model._compiled_call_impl is not None:
        raise ConfigError(
            f"HeteroStrategy: torch.compile around the MultimodalModel of {kind} would trace whole steps, which all"
            " differ; compile the blocks of modules: HeteroStrategy(transforms={'llm': {'compile': 'inductor'}})"
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
    plan: Blueprint,
    rank: int,
    device: torch.device,
    *,
    timeout: timedelta | None = None,
    async_checkpoint: bool = False,
) -> Assembled:
    """Put every module this rank owns on its mesh. A collective over the world.

    In a dry run, on the meta device and fake process groups, nothing has values.

    Args:
        prefix: name of the model in the LightningModule.
        model: model on the meta device, on which modules that this rank does not own stay.
        plan: result of :func:`checked_blueprint` for the model.
    """
    options, placement = plan.options, plan.placement
    connected = torch.device("cpu") if device.type == "meta" else device  # no backend sends meta tensors
    modules, layouts, graph = model.modules_by_name, plan.layouts, plan.graph
    for name, of in options.transforms.items():
        for each in of.values():
            each.check(name, modules[name], layouts[name], options.storage.compute, device)
    if device.type != "meta":
        check_first_values(modules, layouts, device)
    tied = tied_rank_sets(modules, layouts)
    registry = GroupRegistry(placement, tied, connected.type, timeout, graph.balanced)
    rows = [(plan.spec.width(s.module, t.module), options.storage.compute) for s, t in graph.edges]
    channels = _channels(registry, graph, rows, rank, connected)
    connect(graph, channels, rank)
    stages = _own_stages(model, placement, registry, rank, device, options)
    if device.type != "meta":
        model.register_state_dict_post_hook(_say_parts)
        model.register_load_state_dict_pre_hook(_take_parts)
    own_stages = {
        graph.node_of(StageId(name, number), rank): stage
        for name, numbered in stages.items()
        for number, stage in numbered.items()
    }
    executor = Executor(
        local={node: _local(registry, placement, graph, node, stage, rank) for node, stage in own_stages.items()},
        compiler=StepCompiler(graph, plan.costs, plan.scheduling),
        channels=channels,
        row_bytes=[width * dtype.itemsize for width, dtype in rows],
        modules=modules,
        placement=placement,
        weights=model.loss_weights,
        tied=find_tied(modules, layouts, rank, registry.group),
        device=device,
        storage=options.storage,
        warms_up=device.type == "cuda"
        or any(each.warms_up for of in options.transforms.values() for each in of.values()),
    )
    state = TrainingState(prefix, modules, group=registry.background, asynchronous=async_checkpoint)
    return Assembled(executor, owned_parameters(stages, layouts), state, registry, plan)


def check_first_values(
    modules: Mapping[str, Adapter], layouts: Mapping[str, ModuleLayout], device: torch.device
) -> None:
    """Refuse values that differ between ranks of a module: its replicas would diverge. A collective over the world."""
    own = torch.tensor([digest(module) for module in modules.values()], device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    refuse_different(torch.stack(everyone).tolist(), modules, layouts)


def refuse_different(
    digests: Sequence[Sequence[int]], modules: Mapping[str, Adapter], layouts: Mapping[str, ModuleLayout]
) -> None:
    """Refuse digests (by rank, then by module in order) that differ between ranks of a module."""
    for number, name in enumerate(modules):
        first, *rest = layouts[name].ranks
        other = next((rank for rank in rest if digests[rank][number] != digests[first][number]), None)
        if other is not None:
            raise ConfigError(
                f"HeteroStrategy: '{name}' was given with values that are not the same on ranks {first} and {other}:"
                " each process drew its own before the model was made. Make the ready module in configure_model(),"
                " where all ranks have the same random state, call seed_everything() before it is made, or load the"
                " same weights into it on all ranks"
            )


def digest(module: Adapter) -> int:
    """Return a 63-bit digest of a module's initial values (:meth:`Adapter.initial_values`).

    Tables outside the state dict, which are computed and not drawn, do not count.
    """
    lasting = module.meta_copy().state_dict().keys()
    values = {fqn: value for fqn, value in module.initial_values().items() if fqn in lasting}
    sums = [(fqn, tuple(value.shape), str(value.dtype), bit_sum(value)) for fqn, value in sorted(values.items())]
    return int.from_bytes(hashlib.blake2b(repr(sums).encode(), digest_size=8).digest(), "little") >> 1


def bit_sum(value: Tensor) -> int:
    """Sum a tensor's bytes, eight at a time as an integer: at the speed of memory, and the same for any threads."""
    flat = value.detach().reshape(-1)
    aligned = flat.storage_offset() * flat.itemsize % WORD == 0
    data = (flat if aligned else flat.clone()).view(torch.uint8)
    words, rest = data.split([len(data) // WORD * WORD, len(data) % WORD])
    return int(words.view(torch.int64).sum()) + int(rest.sum())


def _say_parts(model: nn.Module, found: Mapping[str, Any], prefix: str, metadata: Any) -> None:
    """Warn that ``state_dict()`` holds this rank's part only: in a file it would look like the whole model and load as
    such, with new values in places. Checkpoints, which also take what lies beside the model, cause no warning.
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
    """Cut whole tensors to this rank's parts before the model loads them."""
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
    """Move metrics and buffers outside the model's modules to this rank's device, and set it as the LightningModule's
    ``device``.
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
    """Build the channels of this rank's rows: (edge, whether backward) -> channel.

    Each direction of an edge has a group of its own, and so has what replicas pass on among themselves, so that no
    message waits for another. Edges between cohorts of the same two stages share them.
    """
    sets_of = {alike: channel_sets(graph, alike) for alike in dict.fromkeys(graph.firsts)}
    sets = [
        ((alike, back, hop), ranks)
        for alike, ways in sets_of.items()
        for back, hops in ways.items()
        for hop, rank_sets in enumerate(hops)
        for ranks in rank_sets
    ]
    grouped = zip(sets, registry.channels([ranks for _, ranks in sets]), strict=True)
    groups = {key: group for (key, _), group in grouped if group is not None}  # this rank is in one of a hop's sets
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
    placement: Placement,
    registry: GroupRegistry,
    rank: int,
    device: torch.device,
    options: Options,
) -> dict[str, dict[int, Adapter]]:
    """Return module -> this rank's stages of it, parallelised; modules of other ranks go to the meta device."""
    stages = {}
    for name, module in model.modules_by_name.items():
        where, layout = placement.coordinate(name, rank), placement.layouts[name]
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
            experts=registry.experts(name),
            transforms=options.transforms.get(name, {}),
            split=layout.split or (),
            pp_rank=where.pp,
            storage=options.storage,
            copies=options.scheduling.gathered_once(layout, casts=True),
        )
        if (context := registry.context(name)) is not None:
            for stage in stages[name].values():
                stage.context_group = context.group_name
    for module in model.modules_by_name.values():
        module.release_initial_values()
    return stages


def _local(
    registry: GroupRegistry, placement: Placement, graph: StageGraph, node: StageId, stage: Adapter, rank: int
) -> LocalStage:
    """Return a stage of this rank with its groups."""
    name, layout = node.module, placement.layouts[node.module]
    seat = placement.coordinate(name, rank)
    assert seat is not None
    replicas = None if isinstance(stage, FSDPModule) else _axis(registry, layout.dp_replicate, name, "dp_replicate")
    tensor_parallel = _axis(registry, layout.tp, name, "tp")
    balanced = registry.balance(name) if graph.stages[node].balanced else None
    return LocalStage(stage, graph.stages[node], seat, replicas, tensor_parallel, balanced)


def _axis(registry: GroupRegistry, degree: int, name: str, axis: str) -> dist.ProcessGroup | None:
    """Return this rank's group along an axis of a module's mesh; None where the degree is 1."""
    if degree == 1:
        return None
    mesh = registry.mesh(name)
    assert mesh is not None
    return mesh.get_group(axis)
