"""Drawings come back to the samples they belong to, and the judge reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hetero_strategy.errors import DataError
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.testing import Pool
from recipes.drawings import DigitJudge, Drawing, draw_grid, drawings_of
from tests.recipes.commands import SMALL, run_on_ranks
from tests.recipes.conftest import data_at
from tests.small_models import DRAWING, drawer


def perfect(folder: Path, skipped: tuple[int, ...] = (), **options: object) -> list[Drawing]:
    """What a generator that draws its targets exactly would leave, in batches of 5 test samples without ``skipped``."""
    data = MultimodalDataModule(
        test=folder / "test.json",
        tokenizer=folder,
        model=drawer,
        processors=DRAWING,
        global_batch_size=5,
        **options,  # type: ignore[arg-type]
    )
    found = []
    for batch in data.test_dataloader():
        batch = batch.without(np.isin(batch.plan.samples, skipped))
        items = batch.plan.metadata.items["draw"]
        rows: list[torch.Tensor] = [torch.zeros(0, 4)] * len(items.edge_rows)
        for assignment, given in zip(batch.plan.assignments["draw"], batch.inputs["draw"], strict=True):
            for unit, values in zip(
                assignment.units, given.values.split(given.target_rows.tolist()) if given else (), strict=True
            ):
                rows[int(unit)] = values
        if rows:
            found += drawings_of(batch, {"draw": torch.cat(rows)}, data.indices["test"], data.processors)
    return found


@pytest.mark.parametrize("microbatches", [1, 3])
def test_drawings_are_those_of_their_files(small_drawings: Path, microbatches: int) -> None:
    found = perfect(small_drawings, microbatches=microbatches)
    assert len(found) > 5
    for drawing in found:
        with Image.open(drawing.target) as image:
            assert np.array_equal(drawing.pixels[:, :, 0], np.asarray(image))


def test_what_a_skipped_sample_draws_is_left_out(small_drawings: Path) -> None:
    """Its target may be what could not be read."""
    samples = [drawing.sample for drawing in perfect(small_drawings)]
    found = [drawing.sample for drawing in perfect(small_drawings, (samples[0],))]
    assert found == [sample for sample in samples if sample != samples[0]]


def test_the_judge_reads_digits(small_drawings: Path, tmp_path: Path) -> None:
    judge, found = DigitJudge(), perfect(small_drawings)
    assert judge.accuracy > 0.97
    right = judge(found)
    assert right.mean() > 0.85
    others = [d._replace(target=found[(n + 1) % len(found)].target) for n, d in enumerate(found)]
    assert judge(others).mean() < 0.5  # the negative control: drawings of other samples
    assert not judge([found[0]._replace(pixels=np.zeros((8, 8, 1), np.uint8))])[0] or found[0].target.stem[-1] == "1"
    assert len(judge([])) == 0
    with pytest.raises(DataError, match="reads 8x8 grey drawings"):
        judge([found[0]._replace(pixels=np.zeros((16, 8, 1), np.uint8))])
    draw_grid(found, right, tmp_path / "grid.png")
    assert Image.open(tmp_path / "grid.png").size[0] > 300


@pytest.mark.full
def test_a_run_that_draws_leaves_its_drawings(pool: Pool, tmp_path: Path, small_drawings: Path) -> None:
    small = [s for s in SMALL if "audio" not in s]
    job = (
        "experiment=digits_draw",
        *data_at(small_drawings),
        "report.judge.seed=0",
        *small,
        "model.modules.draw.dim=16",
    )
    result = run_on_ranks(pool, 4, tmp_path / "run", *job)
    assert result.code == 0, result.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    expected = perfect(small_drawings)
    assert report["steps"] == 3 and report["processes"] == 4 and report["drawings"] == len(expected)
    assert 0 <= report["drawn_right"]["all"] <= 1 and set(report["drawn_right"]) <= {"all", "draw", "vision+draw"}
    assert (tmp_path / "run" / "drawings.png").stat().st_size > 500 and "drawn right" in result.output
    metrics = (tmp_path / "run" / "metrics" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert "train/loss_draw" in metrics and "val/loss_llm" in metrics
