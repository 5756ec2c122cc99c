"""Finish a module's gradients after its last backward of a step, and compute norms over modules on many meshes.

A weight that the first and the last stage of a module share has a copy in each, whose gradients are summed. Both owners
start from the same values and see the same sum, so the copies stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter

BUCKET_BYTES = 32 * 2**20
"""Bytes of the flat pieces in which gradients are all-reduced, about."""


Reached = dict[nn.Parameter, bool]
"""Parameter whose gradient is summed over ranks in a step -> whether this rank had a gradient for it."""


def note_reached(reached: Reached, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Note whether this rank has a gradient of a parameter; in a step with several sums, whether it had one in any."""
    reached[parameter] = reached.get(parameter, False) or gradient is not None


@torch.no_grad()
def settle(
    parameters: Iterable[nn.Parameter],
    replicas: dist.ProcessGroup | None,
    tensor_parallel: dist.ProcessGroup | None,
    reached: Reached,
) -> Callable[[], None]:
    """Bring gradients to their parameters' placements and strides and start to sum them over replicas.

    A missing gradient counts as zero, so that each rank of the group sends equally many bytes.

    Ranks of tensor parallelism compute the gradients of whole parameters (norms, biases, position tables) each by
    itself, by kernels that may add in another order every time. They use the gradients of the first of these ranks, or
    the parameters would drift apart. This holds for all such parameters, as nothing says which kernels a user's module
    runs.

    Args:
        parameters: trained parameters of one module.
        replicas: group of the ranks that hold equal copies and saw different data (``dp_replicate`` without FSDP); None
            if FSDP sums, or if there is one replica.
        tensor_parallel: group of the ranks that split this instance's layers; None: there is one rank.
        reached: record of which gradients were missing.

    Returns:
        A function that waits, on the device, for the sums.
    """
    grads, parameters = [], list(parameters)
    sum_parts(parameters)
    for p in parameters:
        if isinstance(p.grad, DTensor) and isinstance(p, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(p.device_mesh, p.placements)
        if replicas is not None:
            note_reached(reached, p, p.grad)
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads.append(local(p.grad))
    works = []
    for bucket in _take_tensors(grads, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        for grad, part in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            grad.set_(part)  # lives in the flat piece from now on: one bucket at a time is there twice
        works.append(dist.all_reduce(flat, group=replicas, async_op=True))

    @torch.no_grad()
    def finish() -> None:
        for work in works:
            work.wait()
        if tensor_parallel is not None:
            _take_those_of_the_first([p for p in parameters if not _cut_over_tp(p)], tensor_parallel)
        for p in parameters:  # a flat piece, or half a backward, may leave other strides, and fused kernels walk memory
            if p.grad is not None and (grad := local(p.grad)).stride() != (own := local(p)).stride():
                grad.data = torch.empty_like(own).copy_(grad)

    return finish


def sum_parts(parameters: Iterable[nn.Parameter]) -> None:
    """Give each parameter that tensor-parallel ranks hold whole, such as a norm's, the sum of their gradients."""
    partial = [p for p in parameters if isinstance(p, DTensor) and is_part(p.grad, p.placements)]
    for p, gradient in zip(partial, summed([p.grad for p in partial]), strict=True):
        p.grad = gradient


def is_part(gradient: torch.Tensor | None, placements: Sequence[Placement]) -> bool:
    """Return whether a gradient is a summand of a gradient with these placements, on a mesh of one axis."""
    if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim != 1:
        return False
    return gradient.placements[0].is_partial("sum") and placements[0].is_replicate()


@torch.no_grad()
def summed(gradients: Sequence[Any]) -> list[DTensor]:
    """Sum parts of gradients over their meshes in flat pieces, with one collective each; on the current stream.

    A sum for each norm of a model would be dozens of small collectives.
    """
    parts = {id(g): g.to_local() for g in gradients}
    whole: dict[int, torch.Tensor] = {}
    for mesh in dict.fromkeys(g.device_mesh for g in gradients):
        for bucket in _take_tensors([parts[id(g)] for g in gradients if g.device_mesh == mesh], BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat, group=mesh.get_group())
            whole.update(zip(map(id, bucket), _unflatten_dense_tensors(flat, bucket), strict=True))
    return [
        DTensor.from_local(
            whole[id(parts[id(g)])], g.device_mesh, (Replicate(),), run_check=False, shape=g.shape, stride=g.stride()
        )
        for g in gradients
    ]


def _take_those_of_the_first(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace this rank's parts of gradients by those of the group's first rank, bit by bit."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    for bucket in _take_tensors(grads, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.broadcast(flat, group=group, group_src=0)
        torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))


def _cut_over_tp(parameter: torch.Tensor) -> bool:
    """Return whether each rank of tensor parallelism has another part of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return any(name in ("tp", "ep") and not isinstance(placement, Replicate) for name, placement in axes)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Owned:
    """A parameter that this rank owns, with the number of ranks of its module that have the same part of it."""

    parameter: nn.Parameter
    copies: int


def owned_parameters(
    stages: Mapping[str, Mapping[int, Adapter]], layouts: Mapping[str, ModuleLayout]
) -> dict[int, Owned]:
    """Return the parameters in this rank's stages (by module and number, from ``parallelize``), by ``id``."""
    owned: dict[int, Owned] = {}
    for name, numbered in stages.items():
        layout = layouts[name]
        pipeline = layout.pipeline
        apart = pipeline.rank_of(0) != pipeline.rank_of(pipeline.stages - 1)
        for stage in numbered.values():
            tied = stage.tied_weight() if apart else None
            for fqn, parameter in stage.global_parameters().items():
                copies = len(layout.ranks) // layout.pp // _parts(parameter)
                both = tied is not None and fqn == tied[0]  # on the ranks of the first and of the last stage
                owned[id(parameter)] = Owned(parameter, copies * (2 if both else 1))
    return owned


def _parts(parameter: torch.Tensor) -> int:
    """Count the parts into which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return 1
    axes = enumerate(parameter.placements)
    return prod(parameter.device_mesh.size(axis) for axis, placement in axes if not isinstance(placement, Replicate))


@dataclass(frozen=True)
class Tied:
    """The shared weights that this rank owns."""

    owned: Sequence[tuple[str, nn.Parameter, dist.ProcessGroup]]
    """Module name, parameter and the group of its two owners."""

    @torch.no_grad()
    def settle(self, worked: Collection[str], reached: Reached) -> None:
        """Sum the gradients of both owners, each already summed over data-parallel ranks; a missing one counts as zero.

        A collective of the two owners. Modules that have not ``worked`` in this step have no gradients on either side.
        ``reached`` records which were missing, if no sum over data-parallel ranks has.
        """
        for module, parameter, group in self.owned:
            if module in worked:
                if parameter not in reached:
                    note_reached(reached, parameter, parameter.grad)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=group)


def find_tied(
    modules: Mapping[str, Adapter],
    layouts: Mapping[str, ModuleLayout],
    rank: int,
    group: Callable[[Iterable[int]], dist.ProcessGroup | None],
) -> Tied:
    """Find the shared weights that this rank owns, after ``parallelize``.

    ``group`` is ``GroupRegistry.group`` of a registry made with :func:`tied_rank_sets`.
    """
    owned = []
    for name, module in modules.items():
        weight = module.tied_weight()
        for pair in _owner_pairs(module, layouts[name]):
            if rank in pair and weight is not None:
                owners = group(pair)
                parameter = module.get_parameter(weight[0])
                assert owners is not None
                if parameter.requires_grad:
                    owned.append((name, parameter, owners))
    return Tied(owned)


def tied_rank_sets(modules: Mapping[str, Adapter], layouts: Mapping[str, ModuleLayout]) -> list[tuple[int, ...]]:
    """List the pairs of ranks that own the same part of a shared weight; each pair needs a group."""
    return [pair for name, module in modules.items() for pair in _owner_pairs(module, layouts[name])]


def _owner_pairs(module: Adapter, layout: ModuleLayout) -> list[tuple[int, ...]]:
    """Pair ranks of equal coordinate in the first and the last stage; return none if one rank has both."""
    last = layout.pipeline.stages - 1
    if module.tied_weight() is None or layout.pipeline.rank_of(0) == layout.pipeline.rank_of(last):
        return []
    both = zip(layout.stage_grid(0).flat, layout.stage_grid(last).flat, strict=True)
    return [tuple(sorted((int(a), int(b)))) for a, b in both]


@torch.no_grad()
def global_norm(owned: Sequence[Owned], device: torch.device) -> torch.Tensor:
    """Return the norm of all modules' gradients; a collective of the world. Copies of a gradient count once.

    The result is the same on every rank: shape ``[]``, fp32 (fp64 if gradients are fp64).
    """
    dtype = torch.float64 if any(o.parameter.dtype == torch.float64 for o in owned) else torch.float32
    total = torch.zeros((), device=device, dtype=torch.float64)
    by_copies: dict[int, list[torch.Tensor]] = {}
    for o in owned:
        if o.parameter.grad is not None:
            by_copies.setdefault(o.copies, []).append(local(o.parameter.grad))
    for copies, grads in by_copies.items():
        norms = torch.stack([n.double() for n in torch._foreach_norm(grads, 2.0, dtype=dtype)])
        total = total + norms.square().sum() / copies
    dist.all_reduce(total)
    return total.sqrt().to(dtype)


@torch.no_grad()
def clip_by_norm(owned: Sequence[Owned], max_norm: float, device: torch.device) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before. No host sync."""
    norm = global_norm(owned, device)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale([o.parameter.grad for o in owned if o.parameter.grad is not None], factor)
    return norm


@torch.no_grad()
def clip_by_value(owned: Sequence[Owned], limit: float) -> None:
    """Clamp every gradient entry to ``[-limit, limit]``."""
    grads = [local(o.parameter.grad) for o in owned if o.parameter.grad is not None]
    if grads:
        torch._foreach_clamp_min_(grads, -limit)
        torch._foreach_clamp_max_(grads, limit)


@torch.no_grad()
def scale(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a scalar tensor, in place."""
    if not grads or (factor.device.type == "cpu" and factor == 1):  # known without waiting for a device
        return
    for (device, dtype), ([same], _) in _group_tensors_by_device_and_dtype([[local(g) for g in grads]]).items():
        torch._foreach_mul_(cast(list[torch.Tensor], same), factor.to(device, dtype))


@torch.no_grad()
def accumulate(into: Sequence[torch.Tensor], more: Sequence[torch.Tensor]) -> None:
    """Add gradients to others in place, pair by pair."""
    if into:
        torch._foreach_add_([local(g) for g in into], [local(g) for g in more])
