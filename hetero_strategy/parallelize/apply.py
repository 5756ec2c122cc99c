"""How one module is put on its mesh: tensor parallel, recompute, FSDP2, then its values. In that order, from outside.

The module is built on the meta device and stays there on ranks that do not own it. On its own ranks only this rank's
shards are ever allocated: initial values are made one block at a time and each rank keeps its part, so the weights are
the same for every layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.init import initial_units


def parallelize(
    name: str,
    module: Adapter,
    layout: ModuleLayout,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    seed: int,
    recompute: bool = False,
) -> None:
    """Put ``module`` on its mesh, in place. Call on the module's ranks only.

    Args:
        name: of the module in the model.
        module: on the meta device.
        layout: resolved.
        mesh: axes above 1 among ``dp_replicate, dp_shard, tp``; None for one rank.
        device: where this rank's shards live.
        seed: of the initial values.
        recompute: do not keep a block's activations; run its forward again in backward.
    """
    module.twin()  # the module as it was, for initialisation and counting
    module.to("meta")  # a part that came with values gets them back in shards
    if layout.tp > 1:
        assert mesh is not None
        module.apply_tp(mesh["tp"] if mesh.ndim > 1 else mesh)
    if recompute:
        apply_recompute(module.blocks().values())
    if layout.dp_shard > 1:
        assert mesh is not None
        axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        apply_fsdp(module, mesh if mesh.ndim == 1 else mesh[axes])
    module.to_empty(device=device)
    fill(module, initial_units(name, module, seed))


def check(name: str, module: Adapter, layout: ModuleLayout) -> list[str]:
    """Faults of a layout for this very module; empty when it fits. Pure."""
    if layout.tp == 1:
        return []
    if module.tp_plan() is None:
        kind = type(module).__name__
        return [f"layout of '{name}': tp={layout.tp}, but {kind} has no tensor-parallel plan; set tp=1"]
    return [f"layout of '{name}': {fault}" for fault in module.check_tp(layout.tp)]


def check_all(modules: dict[str, Adapter], layouts: dict[str, ModuleLayout]) -> None:
    """Raise one error with every fault of the layouts for these modules.

    Raises:
        LayoutError: a module without a layout, a layout without a module, or degrees that do not divide a module.
    """
    faults = [f"the model has a module '{n}' without a layout; add layouts['{n}']" for n in modules if n not in layouts]
    faults += [
        f"layouts names '{n}', but the model's modules are {', '.join(modules)}; remove or rename it"
        for n in layouts
        if n not in modules
    ]
    faults += [f for n, m in modules.items() if n in layouts for f in check(n, m, layouts[n])]
    if faults:
        raise LayoutError("\n".join(faults))


def apply_recompute(blocks: Iterable[nn.Module]) -> None:
    """Activation checkpointing of every block, without a wrapper module: parameter names stay as they are."""
    for block in blocks:
        block.forward = _recomputed(block.forward)


def _recomputed(forward):  # type: ignore[no-untyped-def]
    def run(*args, **kwargs):  # type: ignore[no-untyped-def]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def apply_fsdp(module: Adapter, mesh: DeviceMesh) -> None:
    """FSDP2 over a 1-D (shard) or 2-D (replicate, shard) mesh; a block is a unit, the rest is the root unit.

    Gradients are summed, not averaged: the loss is already divided by the global number of loss tokens. The forced sum
    also avoids the pre-multiplied reduction, which gloo lacks and which loses bf16 sums on some NCCL versions.
    """
    for block in module.blocks().values():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill(module: nn.Module, values: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write full tensors into a module's parameters and buffers, each rank keeping its shard.

    Complex and integer buffers keep the dtype they are given, whatever the precision plugin made of the module.
    """
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    for fqn, full in values:
        if fqn in parameters:
            write_shard(parameters[fqn], full)
        elif fqn in buffers:
            _set_buffer(module, fqn, full, buffers[fqn])


def write_shard(destination: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of ``full`` into ``destination`` (a plain tensor or a DTensor); no communication."""
    if not isinstance(destination, DTensor):
        destination.copy_(full)
        return
    full = full.to(destination.device, destination.dtype)
    local = distribute_tensor(full, destination.device_mesh, destination.placements, src_data_rank=None)
    destination.to_local().copy_(local.to_local())


def _set_buffer(module: nn.Module, fqn: str, full: torch.Tensor, old: torch.Tensor) -> None:
    *path, leaf = fqn.split(".")
    owner = module.get_submodule(".".join(path))
    dtype = old.dtype if full.is_floating_point() else full.dtype
    owner._buffers[leaf] = full.to(old.device, dtype)
