"""Gather a stage's parameters and reduce its gradients with FSDP2, once per step (:func:`gather`, :func:`reduce`) or
with every microbatch.

Once per step follows torch.distributed.pipelining's UNSHARD and REDUCE_GRAD (``stage.py``, ``perform_reduce_grad``),
except that weights without a gradient count as zero, so that ranks whose instance had no rows take part.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.copies import copies_of, release_copies
from hetero_strategy.parallelize.experts import shard_experts
from hetero_strategy.parallelize.gradients import Reached, is_part, local, note_reached, summed
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.parallelize.take_part import take_part


def apply_fsdp(
    module: Adapter,
    mesh: DeviceMesh,
    storage: Storage = FP32,
    kept: Sequence[nn.Module] = (),
    experts: DeviceMesh | None = None,
) -> None:
    """Apply FSDP2 over a 1-D (shard) or 2-D (replicate, shard) mesh; a block is a unit, the rest is the root unit.

    Gradients are summed, not averaged: the loss is already divided by the global number of loss tokens. The forced sum
    also avoids the pre-multiplied reduction, which gloo lacks and which loses bf16 sums on some NCCL versions.

    Args:
        mesh: mesh whose shard axis may be of one rank: then FSDP only casts, and frozen parameters stay outside of it.
        storage: dtypes; inputs are not cast, since rows are in the right dtype and targets of a loss stay precise.
        kept: layers that compute in the masters' dtype; their inputs and outputs are cast.
        experts: mesh of experts that are divided over ranks.
    """
    # Rows lose a leading dimension of 1 on their way out, and nobody writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    alone = mesh["dp_shard"].size() == 1
    ignored = {p for p in module.parameters() if alone and not p.requires_grad}
    policy = precise = MixedPrecisionPolicy()
    if storage.mixed:
        policy = MixedPrecisionPolicy(storage.compute, storage.master, cast_forward_inputs=False)
        precise = MixedPrecisionPolicy(storage.master, storage.master, storage.compute)
    if experts is not None:
        ignored |= shard_experts(module, experts, lambda part: precise if part in kept else policy)
    depth = {id(part): fqn.count(".") for fqn, part in module.named_modules()}
    inside = sorted(dict.fromkeys([*kept, *module.blocks().values()]), key=lambda part: -depth[id(part)])  # inner first
    inside = [part for part in inside if not isinstance(part, FSDPModule)]  # experts are units already
    for part in (*(part for part in inside if any(p not in ignored for p in part.parameters())), module):
        fully_shard(part, mesh=mesh, mp_policy=precise if part in kept else policy, ignored_params=ignored)
    for part in _parts(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    compute_in(storage, [layer for layer in kept if not isinstance(layer, FSDPModule)])
    if mesh.size() > 1:
        units: dict[str, Any] = {n: p for n, p in module.named_modules() if isinstance(p, FSDPModule) and n}
        groups = [group for part in _parts(module) for group in _groups(part._get_fsdp_state())]

        def applies() -> bool:
            meets = torch.is_grad_enabled() or not alone  # replicas meet in backward alone
            return meets and all(group.reduce_grads for group in groups)

        take_part(module, units, applies, mesh)


def compute_in(storage: Storage, layers: Iterable[nn.Module]) -> None:
    """Cast rows of frozen layers, which are in the masters' dtype, to it and back where FSDP does not."""

    def cast(dtype: torch.dtype, values: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)

    for layer in layers if storage.mixed else ():
        layer.register_forward_pre_hook(lambda _, args, more: cast(storage.master, (args, more)), with_kwargs=True)
        layer.register_forward_hook(lambda _, given, made: cast(storage.compute, made))


def per_microbatch(stage: nn.Module, is_last: bool, reached: Reached) -> None:
    """Prepare one microbatch's backward: it gathers and frees weights and reduces gradients as it goes.

    It does not work for a backward in two halves: FSDP's hooks take the end of the first half for the end of the
    backward, and gradients of the second half would be lost. Such a stage is gathered once per step.

    ``is_last`` says that no backward of this stage, an FSDP root, follows in this step; until then FSDP remembers the
    order in which to gather ahead. ``reached`` records which gradients are missing; it is the same in every step.
    """
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(is_last)
    stage.set_requires_all_reduce(is_last)  # until then each group of shards adds up its own sums
    for state in _root_state(stage)._state_ctx.all_states:
        for group in _groups(state):
            if "post_backward" not in vars(group):
                group.post_backward = partial(_reduce_all, group, reached)


def _reduce_all(group: Any, reached: Reached) -> None:
    """Reduce a unit's gradients; missing ones count as zero, so that all ranks sum the same parameters."""
    for parameter in group.fsdp_params:
        if hasattr(parameter, "_unsharded_param"):
            _add_missing(parameter, reached)
    _sum_parts(group)
    type(group).post_backward(group)


def _sum_parts(group: Any) -> None:
    """Sum, on the current stream, a unit's gradients of which tensor-parallel ranks have parts.

    FSDP sums them one by one where it reduces: a collective of tensor parallelism that is queued on the stream of the
    reductions would keep the next collectives of a running backward behind the reduction before it.
    """
    partial_params = []
    for parameter in group.fsdp_params:
        if parameter.is_dtensor and hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            if is_part(_gradient(parameter), parameter.unsharded_param.placements):
                partial_params.append(parameter)
    for parameter, gradient in zip(
        partial_params, summed([_gradient(parameter) for parameter in partial_params]), strict=True
    ):
        if parameter.unsharded_accumulated_grad is None:
            parameter.unsharded_param.grad = gradient
        else:
            parameter.unsharded_accumulated_grad = gradient


def _gradient(parameter: Any) -> torch.Tensor | None:
    """Return the gradient of a gathered parameter, whichever way FSDP keeps it."""
    added: torch.Tensor | None = parameter.unsharded_accumulated_grad
    return parameter.unsharded_param.grad if added is None else added


def _add_missing(parameter: Any, reached: Reached) -> None:
    """Replace a missing gradient of an FSDP parameter by zeros, and record that it was missing."""
    whole = parameter.unsharded_param
    if whole.requires_grad:
        gradient = parameter.unsharded_accumulated_grad if whole.grad is None else whole.grad
        note_reached(reached, parameter.sharded_param, gradient)
        if gradient is None:
            whole.grad = torch.zeros_like(whole)


def accumulate(stage: nn.Module) -> None:
    """Add the gradients of a gathered root's weights to their sum in the masters' dtype."""
    for state in _root_state(stage)._state_ctx.all_states:
        for group in _groups(state):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def gather(stage: nn.Module) -> None:
    """Start to gather all weights of an FSDP root, or make a stage's copies, and keep them over all microbatches;
    gradients add up meanwhile.

    A collective over the stage's data-parallel ranks. Each unit's first forward waits for its own weights only, so that
    gathering the other units overlaps it. :func:`reduce` ends it, or :func:`release` without a backward.
    """
    if (copies := copies_of(stage)) is not None:
        copies.gather()
        return
    _root_state(stage)._lazy_init()
    _let_hooks_communicate(stage, False)
    for part in _parts(stage):
        part.unshard(async_op=True)


@contextmanager
def reducing(stage: nn.Module, reached: Reached) -> Iterator[None]:
    """Start the sums of a unit's gradients once they are whole, while the last backward of a gathered FSDP root runs.

    A collective over the stage's data-parallel ranks, all of which run this backward. Units are summed in one order, in
    whatever order the backwards of ranks with other rows end them; :func:`reduce` sums the remaining units, in that
    order. ``reached`` records which gradients are missing.
    """
    groups = _gathered(stage)
    left, whole = deque(groups), set()
    runs = {id(group): len(group._post_forward_indices) for group in groups}
    """Number of backwards still to come by unit: one per item for a block that runs once per item."""

    def ended(group: Any) -> None:
        type(group).post_backward(group)  # adds up
        runs[id(group)] -= 1
        if runs[id(group)] <= 0:
            whole.add(id(group))
        while left and id(left[0]) in whole:
            _reduce(stage, left.popleft(), reached)

    for group in groups:
        group.post_backward = partial(ended, group)
        group._post_forward_indices.clear()  # gather nothing ahead, least of all freed weights
    try:
        yield
    finally:
        for group in groups:
            del group.post_backward


def reduce(stage: nn.Module, reached: Reached) -> None:
    """Start to sum the gradients of a gathered FSDP root over data-parallel ranks, and free the weights.

    A collective over the stage's data-parallel ranks; all of them call it, whether or not they had work. It overlaps
    the following work on a stream of its own until :func:`finish`, after which each rank has its shard of the sums.
    ``reached`` records which gradients are missing.
    """
    for group in _gathered(stage):
        _reduce(stage, group, reached)
    _let_hooks_communicate(stage, True)


def _gathered(stage: nn.Module) -> list[Any]:
    """Return the units whose weights are whole, in the order in which a backward ends them."""
    groups = [group for state in _root_state(stage)._state_ctx.all_states for group in _groups(state)]
    for group in groups:
        group.wait_for_unshard()  # units that no forward needed
    return [group for group in reversed(groups) if group.is_unsharded]


@torch.no_grad()
def _reduce(stage: nn.Module, group: Any, reached: Reached) -> None:
    """Start to sum a unit's gradients, and free its weights."""
    context = _root_state(stage)._comm_ctx
    device, reduce_stream = context.device_handle, context.reduce_scatter_stream
    for parameter in group.fsdp_params:
        _add_missing(parameter, reached)
        if parameter.unsharded_accumulated_grad is None:
            parameter.to_accumulated_grad_if_needed()  # in the dtype of the gradients added before
    _sum_parts(group)
    for parameter in group.fsdp_params:
        gradients = [g for g in (parameter.unsharded_param.grad, parameter.unsharded_accumulated_grad) if g is not None]
        if parameter.unsharded_param.device.type != "cpu":
            for gradient in gradients:
                local(gradient).record_stream(reduce_stream)
    group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = True
    reduce_stream.wait_stream(device.current_stream())
    with device.stream(reduce_stream):
        type(group).post_backward(group)


def begin_backward(module: nn.Module) -> None:
    """Let all units of a module gather their weights, as if gradients of their outputs had come."""
    for part in _parts(module):
        part._get_fsdp_state()._pre_backward(None)


def finish(stage: nn.Module) -> None:
    """Wait, on the device, for the sums that :func:`reduce` started, or end a backward in which no FSDP hook ran."""
    _root_state(stage)._root_post_backward_final_callback()


def forget(stage: nn.Module) -> None:
    """Drop sums over shards that wait for their replicas, after a step that ended before its last backward."""
    for part in _parts(stage):
        for group in _groups(part._get_fsdp_state()):
            group._partial_reduce_output = None


def release(stage: nn.Module) -> None:
    """Free gathered weights, if any, without a reduction; the parameters are shards or masters again.

    Call it after forwards without backward too: FSDP leaves the root's whole weights as its parameters then, and an
    optimizer made after a validation would train those.
    """
    release_copies(stage)
    if not isinstance(stage, FSDPModule) or _root_state(stage)._is_root is None:  # never ran
        return
    _let_hooks_communicate(stage, True)
    _root_state(stage)._comm_ctx.post_forward_order.clear()  # no backward clears it if there is none
    for part in _parts(stage):
        for group in _groups(part._get_fsdp_state()):
            group.wait_for_unshard()  # what no forward needed
            group._post_forward_indices.clear()
        part.reshard()


def whole_bytes(stage: nn.Module, *, once: bool) -> int:
    """Count the bytes of whole weights and their gradients that a rank has at a time, besides its shards or masters.

    Args:
        stage: FSDP root, or a module without FSDP, which has at most copies of its own.
        once: whether all units are gathered for the whole step; else two at a time, one that runs and one gathered
            ahead.
    """
    if (copies := copies_of(stage)) is not None:
        return copies.nbytes
    units = []
    for part in _parts(stage):
        size = 0
        for group in _groups(part._get_fsdp_state()):
            policy = group.mp_policy
            for parameter in group.fsdp_params:
                kept = parameter.sharded_param.dtype
                gradient = policy.reduce_dtype or kept if parameter.sharded_param.requires_grad else None
                width = (policy.param_dtype or kept).itemsize + (gradient.itemsize if gradient else 0)
                size += parameter._orig_size.numel() * width
        units.append(size)
    return sum(units) if once else sum(sorted(units)[-2:])


def _let_hooks_communicate(stage: nn.Module, allowed: bool) -> None:
    """Set whether FSDP's own hooks reshard and reduce, and so whether the coming backward is the last."""
    _root_state(stage)._state_ctx.is_last_backward = allowed
    for part in _parts(stage):
        part.set_requires_gradient_sync(allowed, recurse=False)
        part.set_reshard_after_backward(allowed, recurse=False)
        # Backward would gather the root again at once, so FSDP never frees it after forward.
        part.set_reshard_after_forward(allowed and part is not stage, recurse=False)


def _parts(stage: nn.Module) -> Iterator[Any]:
    return (part for part in stage.modules() if isinstance(part, FSDPModule))


def _root_state(stage: nn.Module) -> Any:
    assert isinstance(stage, FSDPModule)
    return stage._get_fsdp_state()


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of one unit; newer torch may have several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
