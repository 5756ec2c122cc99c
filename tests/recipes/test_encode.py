"""`python -m recipes.encode`, and a training run with the same options that reads what it wrote."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from hetero_strategy.testing import Pool
from tests.recipes.commands import SMALL, run_forked, run_on_ranks

JOB = (*SMALL, "layout=single", "model.freeze=[vision.backbone]")


def logged(folder: Path, metric: str) -> list[float]:
    lines = csv.DictReader((folder / "metrics" / "version_0" / "metrics.csv").open())
    return [float(line[metric]) for line in lines if line.get(metric)]


def test_a_run_reads_what_processes_wrote_each_for_its_share(
    pool: Pool, tmp_path: Path, given: tuple[str, ...]
) -> None:
    encoded = f"encoded={{vision:{tmp_path / 'rows'}}}"
    ended = run_on_ranks(pool, 2, tmp_path / "encode", *JOB, *given, encoded, module="recipes.encode")
    made, every = map(int, re.findall(r"vision: (\d+) of (\d+) files by process 0 of 2", ended.output)[0])
    assert made == -(-every // 2)
    again = run_forked(tmp_path / "again", *JOB, *given, encoded, module="recipes.encode")
    assert f"vision: 0 of {every} files by process 0 of 1 in {tmp_path / 'rows'}" in again.output
    assert again.code == 0
    live, read = (run_forked(tmp_path / name, *JOB, *given, *more) for name, more in (("l", ()), ("r", (encoded,))))
    assert live.code == read.code == 0, read.output
    for metric in ("train/loss", "val/loss"):
        assert logged(tmp_path / "r", metric) == pytest.approx(logged(tmp_path / "l", metric), rel=1e-4), metric
    other = run_forked(tmp_path / "other", *JOB, *given, encoded, "seed=1")
    assert other.code and "holds rows of another encoder: weights is" in other.output
    assert "run python -m recipes.encode with the options of this run, in another folder" in other.output


@pytest.mark.parametrize(
    ("module", "override", "message"),
    [
        ("recipes.encode", "encoded=null", "encoded is missing: give the folder of an encoder's rows"),
        ("recipes.encode", "encoded={llm:rows}", "encoded names 'llm', which is no encoder"),
        ("recipes.train", "encoded={picture:rows}", "encoded names 'picture'; the modules are vision, audio, llm"),
        ("recipes.train", "encoded={vision:/nowhere}", "/nowhere has no encoded rows; run python -m recipes.encode"),
    ],
)
def test_mistakes(tmp_path: Path, given: tuple[str, ...], module: str, override: str, message: str) -> None:
    ended = run_forked(tmp_path / "run", *JOB, *given, override, module=module)
    assert ended.code == 1 and f"error: {message}" in ended.output, ended.output
