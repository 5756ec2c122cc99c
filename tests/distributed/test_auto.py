"""``layouts="auto"``: planned at start, the same on all ranks; the gradients are those of one process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_strategy.errors import ConfigError
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.strategy.auto import planned
from tests.distributed.harness import Pool
from tests.distributed.scenario import Job, data, train, train_on_rank, worst_gradient, worst_loss


def train_with_cache(rank: int, world: int, job: Job, cache: str) -> Any:
    """What is measured is kept apart from the person's own."""
    os.environ["XDG_CACHE_HOME"] = cache
    return train_on_rank(rank, world, job)


@pytest.mark.parametrize("given", [{}, {"schedule": "gpipe", "recompute": ["llm"]}], ids=["all", "schedule is given"])
def test_what_is_planned_trains_as_one_process(pool: Pool, tmp_path: Path, given: dict[str, Any]) -> None:
    job = Job(str(data(tmp_path)), steps=2, precision="64-true")
    reference = train(job)
    job = replace(job, layouts="auto", strategy=given)
    cache = tmp_path.parent / "cache"  # of both jobs, whose model is the same
    results = pool.run(2, train_with_cache, job, str(cache), timeout=180)
    assert len(list((cache / "hetero_strategy" / "profiles").glob("*.json"))) == 1
    assert worst_gradient(reference, results)[0] < 1e-9
    assert worst_loss(reference, results) < 1e-9


def test_without_batches_to_plan_for_it_says_what_to_do() -> None:
    anyone: Any = SimpleNamespace(datamodule=None)
    with pytest.raises(ConfigError, match="MultimodalDataModule; pass one to the Trainer"):
        planned(anyone, anyone, anyone, anyone)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="layouts='best'; use 'auto', or a mapping"):
        HeteroStrategy(layouts="best")  # type: ignore[arg-type]
