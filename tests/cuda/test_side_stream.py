"""Encoders on a stream of lower priority: steps are those of one stream, and its kernels run beside others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hetero_strategy.runtime import executor as running
from hetero_strategy.runtime.side_stream import SideStream, prefer_others
from tests.distributed.harness import Pool
from tests.distributed.scenario import Job, Result, data, train_on_rank, worst_gradient, worst_loss


def apart(rank: int, world: int, job: Job) -> Result:
    """Train with both encoders on a stream of their own, which one process would not give them."""
    device = torch.device("cuda", 0)
    prefer_others(device)
    try:
        return _apart(rank, world, job, device)
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream(device))


def _apart(rank: int, world: int, job: Job, device: torch.device) -> Result:
    with patch.object(running, "side_stream", lambda *_: SideStream(device, {"vision", "audio"})):
        return train_on_rank(rank, world, job)


@pytest.mark.cuda
def test_steps_are_those_of_one_stream(pool: Pool, tmp_path: Path) -> None:
    alone = {"ranks": [0]}
    job = Job(str(data(tmp_path / "digits")), steps=4, batch=16, microbatches=4).on(
        vision=alone, audio=alone, llm=alone
    )
    job = replace(job, precision="32-true", trainer={**job.trainer, "accelerator": "cuda"})
    one, two = (pool.run(1, run, job, group=False, timeout=150)[0] for run in (train_on_rank, apart))
    assert worst_loss(one, [two]) < 1e-5 and worst_gradient(one, [two])[0] < 1e-4


@pytest.mark.cuda
def test_kernels_run_beside_a_stream_that_waits() -> None:
    """A matmul on the side stream is over while the other one still sleeps, as it does in a collective."""
    device = torch.device("cuda", 0)
    main, side = torch.cuda.Stream(device, priority=-1), SideStream(device, {"vision"})
    rows = torch.randn(256, 256, device=device)
    rows @ rows  # the first one loads what it needs, which may wait
    torch.cuda.synchronize()
    begun, slept, computed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    with torch.cuda.stream(main):
        begun.record()
        torch.cuda._sleep(200_000_000)
        slept.record()
    with side.using("vision"):
        rows @ rows
        computed.record()
    torch.cuda.synchronize()
    assert begun.elapsed_time(computed) < 0.5 * begun.elapsed_time(slept)
