"""A run that reads encoded rows is the run with the live frozen backbone: losses and gradients, in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_strategy.data.encoded_rows import backbone_tensors, encoded, read_items
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.testing import Pool, WorkerError
from recipes.encode import encode_rows
from tests.distributed import scenario
from tests.distributed.exact import EXACT, NOTICED, on
from tests.distributed.scenario import Job, Result, data, datamodule, model_of, train, worst_gradient, worst_loss
from tests.distributed.stepping import fp64

FROZEN = ("vision.backbone",)
PLACEMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "one process": {"vision": on(0), "audio": on(0), "llm": on(0)},
    "on a rank of its own": {"vision": on(1), "audio": on(0), "llm": on(0)},
    "sharded beside a pipeline": {"vision": on(0, 1, dp_shard=2), "audio": on(0, 1), "llm": on(0, 1, pp=2)},
}
OPTIONS: dict[str, dict[str, Any]] = {"sharded beside a pipeline": {"fill": "fine", "reshard_after_forward": "never"}}


def trained(rank: int, world: int, job: Job, folder: Path | None) -> Result:
    """A run whose vision module reads the rows of a folder, if there is one."""
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            live = scenario.siglip2_encoder
            patch.setattr(scenario, "siglip2_encoder", lambda **fields: encoded(live(**fields), folder))
        result = train(job)
    assert folder is None or not any("vision.backbone" in name for name in result.owned)
    return result


def written(job: Job, folder: Path, *, damage: float = 0.0) -> Path:
    """Rows of all pictures, of weights to which ``damage`` is added without a trace."""
    with fp64(), models_without_values():
        data, model = datamodule(job), model_of(job, vocabulary=512)
    data.setup()
    index = data.indices["train"]
    paths = [index.path("vision", item) for item in range(len(index.items["vision"].sample))]
    with fp64(), pytest.MonkeyPatch.context() as patch:
        if damage:
            patch.setattr("recipes.encode.backbone_tensors", lambda encoder: _damaged(encoder, damage))
        made = encode_rows(model, "vision", data.processors["vision"], paths, folder, dtype=torch.float64, rows=50)
    assert made == sum(len(items) for *_, items in read_items(folder))
    return folder


def _damaged(encoder: Any, damage: float) -> Iterator[tuple[str, torch.Tensor]]:
    yield from backbone_tensors(encoder)
    encoder.backbone.model.post_layernorm.bias.data[:4] += damage


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = data(tmp_path_factory.mktemp("data"))
    return Job(str(folder), PLACEMENTS["one process"], steps=4, precision="64-true", freeze=FROZEN)


@pytest.fixture(scope="module")
def live(pool: Pool, job: Job) -> Result:
    """The run whose backbone runs."""
    return pool.run(1, trained, job, None, timeout=240)[0]


@pytest.fixture(scope="module")
def rows(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(job, tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize(
    "placement", [pytest.param(p, marks=pytest.mark.full if p in OPTIONS else ()) for p in PLACEMENTS]
)
def test_a_run_that_reads_rows_is_the_run_whose_backbone_runs(
    pool: Pool, job: Job, live: Result, rows: Path, placement: str
) -> None:
    job = replace(job, layouts=PLACEMENTS[placement], strategy=OPTIONS.get(placement, {}))
    world = 1 + max(max(layout["ranks"]) for layout in PLACEMENTS[placement].values())
    results = pool.run(world, trained, job, rows, timeout=300)
    assert worst_loss(live, results) < EXACT
    assert any("vision.projector" in name for name in live.gradients)
    error, where = worst_gradient(live, results)
    assert error < EXACT, where


def test_rows_of_other_weights_would_be_noticed(pool: Pool, job: Job, live: Result, tmp_path: Path) -> None:
    results = pool.run(1, trained, job, written(job, tmp_path, damage=0.1), timeout=240)
    assert worst_gradient(live, results)[0] > NOTICED


@pytest.mark.full  # tests/data/test_encoded_rows.py and tests/recipes/test_encode.py have the same faults
def test_a_run_of_another_seed_or_dtype_does_not_start(pool: Pool, job: Job, rows: Path) -> None:
    with pytest.raises(WorkerError, match="encoded rows are float64, but the module computes in float32") as error:
        pool.run(1, trained, replace(job, precision="32-true", steps=1), rows, timeout=240)
    assert error.value.error == "DataError"
    with pytest.raises(WorkerError, match=r"holds rows of another encoder: weights is '.*' there and '.*' here"):
        pool.run(1, with_other_weights, job, rows, timeout=240)


def with_other_weights(rank: int, world: int, job: Job, folder: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        model = scenario.MultimodalModel
        patch.setattr(scenario, "MultimodalModel", lambda *given, **fields: model(*given, **{**fields, "seed": 12}))
        return trained(rank, world, job, folder)
