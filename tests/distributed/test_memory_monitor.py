"""``MemoryMonitor`` in real runs: what is measured on every rank, beside what plans predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_strategy.monitor import MemoryMonitor
from tests.distributed.exact import on
from tests.distributed.harness import Pool
from tests.distributed.scenario import Job, build, data


def watched(rank: int, world: int, job: Job) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Measured and predicted bytes by rank, and the number of the batch."""
    monitor = MemoryMonitor()
    job.trainer["callbacks"] = [monitor]
    trainer, module, dm = build(job)
    trainer.fit(module, datamodule=dm)
    found = monitor.last
    return None if found is None else (found.measured, found.expected, found.batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(data(tmp_path_factory.mktemp("memory")))


ALL = {name: on(0, 1) for name in ("vision", "audio", "llm")}
PIPELINE = {"vision": on(0, 1), "audio": on(0, 1), "llm": on(0, 1, pp=2)}


@pytest.mark.parametrize(
    ("layouts", "precision", "summed"),
    [(ALL, "32-true", 1), (ALL, "bf16-mixed", 2), (PIPELINE, "32-true", 3), (PIPELINE, "bf16-mixed", 1)],
    ids=["shards", "shards, bf16, of 2 batches", "pipeline, of 3 batches", "pipeline, bf16"],
)
def test_what_is_measured_is_near_what_is_predicted(
    pool: Pool, folder: str, tmp_path: Path, layouts: dict[str, Any], precision: str, summed: int
) -> None:
    trainer = {"accumulate_grad_batches": summed, "default_root_dir": str(tmp_path), "max_epochs": 1}
    job = Job(folder, layouts, 10 // summed, precision=precision, trainer=trainer, capture=False)
    first, *others = pool.run(2, watched, job, timeout=180)
    assert first is not None and others == [None]
    measured, expected, batch = first
    print(measured, expected, expected / measured)
    assert batch == {1: 3, 2: 3, 3: 5}[summed]
    np.testing.assert_allclose(expected, measured, rtol=0.1)
