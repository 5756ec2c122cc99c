"""``MemoryMonitor`` in real runs: what is measured on every rank, beside what plans predict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero_strategy.errors import ConfigError
from hetero_strategy.monitor import MemoryMonitor
from hetero_strategy.testing import Pool
from tests.distributed.exact import on
from tests.distributed.scenario import Job, build


def watched(rank: int, world: int, job: Job) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Measured and predicted bytes by rank, and the number of the batch."""
    monitor = MemoryMonitor()
    job.trainer["callbacks"] = [monitor]
    trainer, module, dm = build(job)
    trainer.fit(module, datamodule=dm)
    found = monitor.last
    return None if found is None else (found.measured, found.expected, found.batch)


ALL = {name: on(0, 1) for name in ("vision", "audio", "llm")}
PIPELINE = {"vision": on(0, 1), "audio": on(0, 1), "llm": on(0, 1, pp=2)}
IDLE = {"vision": on(0), "audio": on(0), "llm": on(0)}
FILLED: dict[str, Any] = {"fill": "fine"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layouts", "precision", "summed", "options"),
    [
        (ALL, "bf16-mixed", 2, {}),
        (PIPELINE, "32-true", 3, {}),
        (PIPELINE, "bf16-mixed", 1, FILLED),
        (IDLE, "32-true", 1, {}),
    ],
    ids=["shards, bf16, of 2 batches", "pipeline, of 3 batches", "pipeline, bf16, filled", "an idle rank"],
)
def test_what_is_measured_is_near_what_is_predicted(
    pool: Pool,
    scenario_data: Path,
    tmp_path: Path,
    layouts: dict[str, Any],
    precision: str,
    summed: int,
    options: dict[str, Any],
) -> None:
    trainer = {"accumulate_grad_batches": summed, "default_root_dir": str(tmp_path), "max_epochs": 1}
    freeze = ("vision",) if options else ()
    job = Job(
        str(scenario_data), layouts, 6 // summed, precision=precision, trainer=trainer, capture=False, strategy=options
    )
    first, *others = pool.run(2, watched, replace(job, freeze=freeze), timeout=360)
    assert first is not None and others == [None]
    measured, expected, batch = first
    assert batch == {1: 3, 2: 3, 3: 5}[summed]
    busy = expected > 0
    np.testing.assert_allclose(expected[busy], measured[busy], rtol=0.05)
    assert busy.all() or (layouts is IDLE and measured[1] < 0.01 * measured[0])


def test_what_cannot_be_measured_is_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace())
    module: Any = None
    with pytest.raises(ConfigError, match="SimpleNamespace has no step plans; use HeteroStrategy"):
        MemoryMonitor().on_train_start(trainer, module)
    with pytest.raises(ConfigError, match="batch=0; give 1 or more"):
        MemoryMonitor(0)
