"""A step of torch's own pipelining runtimes on one rank, as a peer of the time between kernels."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

RUNTIMES = {"torch Schedule1F1B": Schedule1F1B, "torch _PipelineScheduleRuntime": _PipelineScheduleRuntime}
"""The one is written for 1F1B, the other runs any schedule; our executor does the latter."""


def prepared(
    name: str,
    module: nn.Module,
    width: int,
    rank: int,
    stages: int,
    microbatches: int,
    path: str,
) -> Callable[[], None]:
    """Return what runs one step.

    Args:
        name: one of :data:`RUNTIMES`.
        module: module of the stage, which takes and gives rows ``[8, width]``.
        width: width of a row.
        rank: whose stage, neither first nor last, since the process group is torch's fake one and carries no rows.
        stages: number of stages of the chain, one per rank.
        microbatches: number of a step.
        path: file of the schedule in torch's CSV, for the runtime that takes one.
    """
    came = torch.zeros(8, width, requires_grad=True)
    made = module(came).detach().requires_grad_()
    stage = PipelineStage(
        module, rank, stages, torch.device("cpu"),
        input_args=came, output_args=made, input_grads=came.detach(), output_grads=made.detach(),
    )  # fmt: skip
    runtime = RUNTIMES[name](
        [stage] if name.endswith("Runtime") else stage,  # type: ignore[arg-type]
        microbatches, loss_fn=lambda out, target: out.sum(), scale_grads=False,
    )  # fmt: skip
    if isinstance(runtime, _PipelineScheduleRuntime):
        runtime._load_csv(path)
    vote = torch.ones(1, dtype=torch.int32)
    with patch.object(PipelineStage, "_warmup_backward_result", lambda *_, **__: vote):  # fake ranks do not vote
        runtime.step()
    return runtime.step  # type: ignore[no-any-return]
