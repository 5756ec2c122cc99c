"""Puts a LightningModule's model on its ranks: finds it, checks it, builds groups, shards, order and executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn

from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.placement import Placement
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.apply import check_all, parallelize
from hetero_strategy.parallelize.gradients import Owned, copies_of
from hetero_strategy.schedule.executor import Executor
from hetero_strategy.schedule.order import graph


@dataclass(frozen=True)
class Assembled:
    """A model in place on this rank."""

    executor: Executor
    owned: dict[int, Owned]
    """By ``id`` of the parameter."""
    state: TrainingState


def find_model(module: nn.Module, agree: Callable[[bool], bool]) -> tuple[str, MultimodalModel]:
    """The one model of a LightningModule and its name there.

    Args:
        module: after ``configure_model``.
        agree: whether any rank says yes; a collective.

    Raises:
        ConfigError: none or several models, parameters outside it, or a model that has been trained elsewhere.
    """
    found = [(n, m) for n, m in module.named_modules() if isinstance(m, MultimodalModel)]
    kind = type(module).__name__
    if len(found) != 1:
        raise ConfigError(
            f"HeteroStrategy: {kind} holds {len(found)} MultimodalModels after configure_model(); it needs exactly one,"
            " built in configure_model()"
        )
    prefix, model = found[0]
    inside = {f"{prefix}.{n}" if prefix else n for n, _ in model.named_parameters()}
    outside = {n for n, _ in module.named_parameters()} - inside
    if outside:
        raise ConfigError(
            f"HeteroStrategy: parameter '{min(outside)}' of {kind} lies outside its MultimodalModel, so no layout says"
            " where it lives; make it part of one of the model's modules"
        )
    filled = any(
        not p.is_meta and fqn not in adapter.given()
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
    wire_dtype: torch.dtype,
    recompute: Sequence[str] = (),
    timeout: timedelta | None = None,
    async_checkpoint: bool = False,
) -> Assembled:
    """Put every module this rank owns on its mesh. A collective over the world.

    Args:
        prefix: of the model in the LightningModule.
        model: on the meta device; modules that this rank does not own stay there.
        placement: of all modules.
        rank: this rank.
        device: of this rank.
        wire_dtype: of rows on the edges.
        recompute: modules that recompute their blocks in backward.
        timeout: of collectives.
        async_checkpoint: write checkpoints in the background.

    Raises:
        LayoutError: layouts that do not fit the modules.
        ConfigError: ``recompute`` names a module that does not exist.
    """
    modules = model.modules_by_name
    layouts = dict(placement.layouts)
    check_all(modules, layouts)
    unknown = sorted(set(recompute) - set(modules))
    if unknown:
        raise ConfigError(f"HeteroStrategy: recompute names {unknown}; the modules are {', '.join(modules)}")
    edges = tuple((e.source, e.target) for e in model.edges)
    registry = GroupRegistry(placement, edges, device.type, timeout)
    owned = placement.modules_on(rank)
    for name, module in modules.items():
        if name in owned:
            parallelize(
                name, module, layouts[name], registry.mesh(name), device, seed=model.seed, recompute=name in recompute
            )
        else:
            module.to("meta")
    for module in modules.values():
        module.forget_given()
    trains = {n: any(p.requires_grad for p in m.parameters()) for n, m in modules.items()}
    order = graph(model.topological(), edges, trains)
    return Assembled(
        Executor(modules, order, placement, registry, device, wire_dtype),
        {id(p): Owned(p, copies_of(p, len(layouts[n].ranks))) for n in owned for p in modules[n].parameters()},
        TrainingState(prefix, modules, owned, group=registry.background, asynchronous=async_checkpoint),
    )
