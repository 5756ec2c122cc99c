"""Collectives over the world that Lightning asks a strategy for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus


class WorldCollectives(ParallelStrategy):
    """Every rank comes to each of them, whatever modules it holds; after an exception nobody is waited for."""

    def _together(self) -> bool:
        """Whether the other ranks come to a collective too: after an exception on this one they may not."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return _distributed_is_initialized() and (trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED)

    def barrier(self, name: str | None = None) -> None:
        if self._together():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's picklable object on all of them."""
        if not self._together():
            return obj
        boxed = [obj]
        dist.broadcast_object_list(boxed, src)
        return boxed[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a logged value. All ranks log the value of the one global batch, so its sum is the value itself."""
        if not isinstance(tensor, torch.Tensor) or not self._together():
            return tensor
        op = str(reduce_op).lower().rsplit(".", 1)[-1]
        value = tensor.detach().to(self.root_device, copy=True)
        if op in ("mean", "avg", "sum"):
            value = value if value.is_floating_point() else value.double()
            dist.all_reduce(value, group=group)
            return value / dist.get_world_size(group)
        dist.all_reduce(value, op=getattr(dist.ReduceOp, op.upper()), group=group)
        return value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, say yes."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if self._together():
            dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)
