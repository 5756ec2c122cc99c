"""When a stage's FSDP2 communicates: once per step (:func:`gather`, :func:`reduce`) or with every microbatch.

Once per step follows torch.distributed.pipelining's UNSHARD and REDUCE_GRAD (``stage.py``, ``perform_reduce_grad``);
it differs in that weights without a gradient count as zero, so that ranks whose instance had no rows take part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hetero_strategy.model.adapter import Adapter


def apply_fsdp(module: Adapter, mesh: DeviceMesh) -> None:
    """FSDP2 over a 1-D (shard) or 2-D (replicate, shard) mesh; a block is a unit, the rest is the root unit.

    Gradients are summed, not averaged: the loss is already divided by the global number of loss tokens. The forced sum
    also avoids the pre-multiplied reduction, which gloo lacks and which loses bf16 sums on some NCCL versions.
    """
    # Rows lose a leading dimension of 1 on their way out, and nobody writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in module.blocks().values():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in _parts(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def per_microbatch(stage: nn.Module, is_last: bool) -> None:
    """Before one microbatch's backward: weights are gathered and freed as it goes, gradients reduced in the last one.

    Not for a backward in two halves: FSDP's hooks take the end of the first for the end of the backward, and gradients
    of the second would be lost. Such a stage is gathered once per step.

    Args:
        stage: an FSDP root.
        is_last: no backward of this stage follows in this step.
    """
    for part in _parts(stage):
        part.set_requires_gradient_sync(is_last, recurse=False)


def gather(stage: nn.Module) -> None:
    """UNSHARD: all weights of an FSDP root, kept over all microbatches; gradients add up locally until :func:`reduce`.

    A collective over the stage's data-parallel ranks. Ends with :func:`reduce`, or :func:`release` where there is no
    backward.
    """
    root = _root_state(stage)
    root._lazy_init()
    root._state_ctx.is_last_backward = False
    parts = list(_parts(stage))
    for part in parts:
        _communicate(part, by_itself=False, is_root=part is stage)
    # All are issued before the first is waited for, so that they follow each other without gaps.
    for handle in [part.unshard(async_op=True) for part in parts]:
        if handle is not None:
            handle.wait()


@torch.no_grad()
def reduce(stage: nn.Module) -> None:
    """REDUCE: sum the gradients of a gathered FSDP root over data-parallel ranks, each keeping its shard; free weights.

    A collective over the stage's data-parallel ranks; all of them call it, whoever had work.
    """
    root = _root_state(stage)
    root._state_ctx.is_last_backward = True
    for part in _parts(stage):
        _communicate(part, by_itself=True, is_root=part is stage)
    groups = [group for state in root._state_ctx.all_states for group in _groups(state)]
    for group in groups:
        for parameter in group.fsdp_params:
            whole = parameter.unsharded_param
            missing = whole.grad is None and parameter.unsharded_accumulated_grad is None
            if missing and whole.requires_grad:
                whole.grad = torch.zeros_like(whole)
    for group in reversed(groups):  # as a backward would
        group.post_backward()
    root._root_post_backward_final_callback()


def release(stage: nn.Module) -> None:
    """Free gathered weights without a reduction; the parameters are shards again.

    To be called after forwards without backward too: FSDP leaves the root's whole weights as its parameters then, and
    an optimizer made after a validation would train those.
    """
    if _root_state(stage)._is_root is None:  # never ran
        return
    _root_state(stage)._state_ctx.is_last_backward = True
    for part in _parts(stage):
        _communicate(part, by_itself=True, is_root=part is stage)
        part.reshard()


def _communicate(part: FSDPModule, *, by_itself: bool, is_root: bool) -> None:
    """Whether FSDP's own hooks reshard and reduce."""
    part.set_requires_gradient_sync(by_itself, recurse=False)
    part.set_reshard_after_backward(by_itself, recurse=False)
    # The root is gathered again at once by backward, so FSDP never frees it after forward.
    part.set_reshard_after_forward(by_itself and not is_root, recurse=False)


def _parts(stage: nn.Module) -> Iterator[Any]:
    return (part for part in stage.modules() if isinstance(part, FSDPModule))


def _root_state(stage: nn.Module) -> Any:
    assert isinstance(stage, FSDPModule)
    return stage._get_fsdp_state()


def _groups(state: Any) -> list[Any]:
    """Groups of parameters of one unit: newer torch may have several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
