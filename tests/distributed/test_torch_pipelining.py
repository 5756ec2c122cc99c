"""torch's own pipelining runtime runs schedules that are made here, and gives the gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.testing import Pool
from tests.schedule.cases import chain, work

WIDTH, MICROBATCHES, RANKS = 6, 4, 2


def parts(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()) for _ in range(stages)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, WIDTH, dtype=torch.float64), torch.randn(8, WIDTH, dtype=torch.float64)


def summed(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().sum()


def torch_runs(rank: int, world: int, path: str, stages: int) -> dict[int, list[torch.Tensor]]:
    """Gradients of this rank's stages."""
    modules, (x, target) = parts(stages), batch()
    own = range(rank, stages, world)
    made = [PipelineStage(modules[s], s, stages, torch.device("cpu")) for s in own]
    runtime = _PipelineScheduleRuntime(made, MICROBATCHES, loss_fn=summed, scale_grads=False)
    runtime._load_csv(path)
    runtime.step(*([x] if rank == 0 else []), **({"target": target} if stages - 1 in own else {}))
    return {s: [p.grad for p in modules[s].parameters()] for s in own}  # type: ignore[misc]


@pytest.mark.parametrize(("name", "vpp"), [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2)])
def test_torch_runs_our_schedules(pool: Pool, tmp_path: Path, name: str, vpp: int) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(make_schedule(name, chain(RANKS, vpp), work(MICROBATCHES)).to_csv())
    modules, (x, target) = parts(RANKS * vpp), batch()
    summed(nn.Sequential(*modules)(x), target).backward()
    gradients = {s: g for own in pool.run(RANKS, torch_runs, str(path), RANKS * vpp) for s, g in own.items()}
    for s, module in enumerate(modules):
        for found, p in zip(gradients[s], module.parameters(), strict=True):
            torch.testing.assert_close(found, p.grad, rtol=1e-12, atol=1e-12)
