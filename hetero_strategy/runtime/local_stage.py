"""What actions of one stage share on this rank, looked up once and not between two kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from hetero_strategy.layout.placement import Coordinate
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.random_numbers import RandomNumbers
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.copies import WeightCopies, copies_of
from hetero_strategy.parallelize.gradients import Reached, settle
from hetero_strategy.parallelize.offload import HostMemory, host_memory
from hetero_strategy.plan.ahead import computing
from hetero_strategy.runtime import backward
from hetero_strategy.schedule.action import Stage, StageId


class LocalStage(NamedTuple):
    """A stage of this rank as its actions need it; made once its parameters are where they stay."""

    adapter: Adapter
    node: Stage
    """What the schedule knows of it."""
    seat: Coordinate
    """Of this rank in its module."""
    early: bool
    """It computes for the next step."""
    rows_of: int
    """Which part of the instance's rows this rank has."""
    speaks: bool
    """It counts the loss and the metrics of its rows, which other tensor-parallel ranks have too."""
    wrapped: FSDPModule | None
    """The adapter, where FSDP2 holds its parameters."""
    copies: WeightCopies | None
    """That it computes with, where it has some."""
    random_numbers: RandomNumbers
    host: HostMemory | None
    """Where its blocks put what they keep for backward."""
    trained: list[nn.Parameter]
    """This rank's parts of its parameters that train, as they are while nothing is gathered."""
    recomputed: list[nn.Module]
    """Parts whose forward runs again in a backward."""
    stream: torch.cuda.Stream | None
    """Where it computes; None: on the current stream."""

    @staticmethod
    def of(
        stage_id: StageId, adapter: Adapter, node: Stage, seat: Coordinate, tp: int, stream: torch.cuda.Stream | None
    ) -> LocalStage:
        """Look everything up; ``tp``: the module's tensor-parallel ranks."""
        assert adapter.random_numbers is not None
        return LocalStage(
            adapter,
            node,
            seat,
            early=computing(stage_id.module) != stage_id.module,
            rows_of=node.row_sharding.part_of(seat.shard, node.grid.shape[1]),
            speaks=seat.shard % tp == 0,
            wrapped=adapter if isinstance(adapter, FSDPModule) else None,
            copies=copies_of(adapter),
            random_numbers=adapter.random_numbers,
            host=host_memory(adapter),
            trained=[p for p in adapter.parameters() if p.requires_grad],
            recomputed=adapter.recomputed_parts(),
            stream=stream,
        )

    def accumulate(self) -> None:
        """Add up gradients in the masters' dtype: of copies, and of half a backward, which FSDP's hooks do not see."""
        if self.copies is not None:
            self.copies.fold()
        elif self.wrapped is not None:
            fsdp.accumulate(self.adapter)

    def start_sums(
        self, replicas: dist.ProcessGroup | None, tensor_parallel: dist.ProcessGroup | None, reached: Reached
    ) -> Callable[[], None]:
        """Start to sum gradients over data-parallel ranks; return what waits for that. See :func:`settle`."""
        if self.copies is not None:
            self.copies.release()
        if not (self.wrapped is not None and self.node.sharded):
            return settle(self.trained, replicas, tensor_parallel, reached)
        fsdp.reduce(self.adapter, reached)

        def finish() -> None:
            fsdp.finish(self.adapter)
            settle(self.trained, replicas, tensor_parallel, reached)()

        return finish


class Output(NamedTuple):
    """An output whose memory may go: backward needs only its place in the graph."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Output:
        return Output(get_gradient_edge(tensor), tensor.shape, tensor.dtype)

    def filled(self, value: float, device: torch.device) -> torch.Tensor:
        return torch.full(self.shape, value, dtype=self.dtype, device=device)


@dataclass(slots=True)
class Live:
    """Activations of one microbatch of one stage, from its forward until its backward."""

    leaves: list[torch.Tensor]
    """Rows that came in, one tensor per transfer."""
    seed: int
    """Of its random numbers."""
    rows: Output | None = None
    loss: Output | None = None
    later: backward.WeightsLater | None = None
    come_back: Callable[[], None] | None = None
    """Starts to copy what is in host memory back."""
