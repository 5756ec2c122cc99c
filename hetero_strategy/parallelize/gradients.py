"""What happens to a module's gradients after its last backward of a step, and norms over modules on many meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.stages import owned_tensors

BUCKET_BYTES = 32 * 2**20
"""Gradients are all-reduced in flat pieces of about this size."""


Reached = dict[torch.nn.Parameter, bool]
"""Parameter whose gradient is summed over ranks in a step -> whether this rank had a gradient of it to bring."""


def note_reached(reached: Reached, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Note whether this rank has a gradient of a parameter; in a step with several sums it had one if it had in any."""
    reached[parameter] = reached.get(parameter, False) or gradient is not None


@torch.no_grad()
def settle(
    parameters: Iterable[torch.nn.Parameter],
    replicas: dist.ProcessGroup | None,
    tensor_parallel: dist.ProcessGroup | None,
    reached: Reached,
) -> Callable[[], None]:
    """Bring gradients to their parameters' placements and strides and start to sum them over replicas.

    A missing gradient counts as zero, so that each rank of the group brings as many bytes.

    Ranks of tensor parallelism compute the gradients of what they hold whole (norms, biases, position tables) each by
    itself, by kernels that may add in another order every time. They take those of the first of them, or they would
    drift apart. All such parameters do, as nothing says which kernels a module of one's own runs.

    Args:
        parameters: the trained parameters of one module.
        replicas: group of the ranks that hold equal copies and saw different data (``dp_replicate`` without FSDP);
            None where FSDP sums, or there is one replica.
        tensor_parallel: group of the ranks that split this instance's layers; None: there is one.
        reached: takes note of which gradients were missing.

    Returns:
        What waits, on the device, for the sums.
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


def sum_parts(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let each parameter that tensor-parallel ranks hold whole, such as a norm's, have the sum of their gradients."""
    partial = [p for p in parameters if isinstance(p, DTensor) and is_part(p.grad, p.placements)]
    for p, gradient in zip(partial, summed([p.grad for p in partial]), strict=True):
        p.grad = gradient


def is_part(gradient: torch.Tensor | None, placements: Sequence[Placement]) -> bool:
    """Whether a gradient is a summand of the one that belongs to these placements, on a mesh of one axis."""
    if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim != 1:
        return False
    return gradient.placements[0].is_partial("sum") and placements[0].is_replicate()


@torch.no_grad()
def summed(gradients: Sequence[Any]) -> list[DTensor]:
    """Sum parts of gradients over their meshes: flat pieces, of which each takes one collective; on the current stream.

    One sum for each norm of a model would be dozens of small collectives.
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


def _take_those_of_the_first(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace gradients, each this rank's part, by those of the group's first rank, bit by bit."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    for bucket in _take_tensors(grads, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.broadcast(flat, group=group, group_src=0)
        torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))


def _cut_over_tp(parameter: torch.Tensor) -> bool:
    """Whether each rank of tensor parallelism has another part of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return any(name == "tp" and not isinstance(placement, Replicate) for name, placement in axes)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Owned:
    """A parameter that this rank owns, and on how many ranks of its module the same part of it lives."""

    parameter: torch.nn.Parameter
    copies: int


def owned_parameters(
    stages: Mapping[str, Mapping[int, Adapter]], layouts: Mapping[str, ModuleLayout]
) -> dict[int, Owned]:
    """Return the parameters in this rank's stages (as ``parallelize`` gives them, by module and number), by ``id``."""
    owned: dict[int, Owned] = {}
    for name, numbered in stages.items():
        layout = layouts[name]
        pipeline = layout.pipeline
        apart = pipeline.rank_of(0) != pipeline.rank_of(pipeline.stages - 1)
        for stage in numbered.values():
            tied = stage.tied_weight() if apart else None
            for fqn, parameter in owned_tensors(stage).items():
                copies = len(layout.ranks) // layout.pp // _parts(parameter)
                both = tied is not None and fqn == tied[0]  # on the ranks of the first and of the last stage
                owned[id(parameter)] = Owned(parameter, copies * (2 if both else 1))
    return owned


def _parts(parameter: torch.Tensor) -> int:
    """Count the parts that a parameter is sharded into."""
    if not isinstance(parameter, DTensor):
        return 1
    axes = enumerate(parameter.placements)
    return prod(parameter.device_mesh.size(axis) for axis, placement in axes if not isinstance(placement, Replicate))


@torch.no_grad()
def global_norm(owned: Sequence[Owned], device: torch.device) -> torch.Tensor:
    """Return the norm of all modules' gradients, each counted once wherever its copies live; a collective of the world.

    The result is the same on every rank: shape ``[]``, fp32 (fp64 where gradients are).
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
