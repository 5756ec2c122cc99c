"""Batches in which something is missing or very uneven: ordinary cases, same parity, no hang."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_strategy.testing import Pool
from tests.distributed.scenario import Job, Result, data, train, train_on_rank, worst_gradient, worst_loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Manifests over the digits data: text only, a sample with 40 images, one image in all, and a module that idles."""
    folder = data(tmp_path_factory.mktemp("ragged") / "digits")
    samples = json.loads((folder / "train.json").read_text())
    text = [s for s in samples if not s.get("image") and not s.get("audio")]
    image = [s for s in samples if s.get("image") and not s.get("audio")]
    audio = [s for s in samples if s.get("audio") and not s.get("image")]
    forty = {
        "id": "forty",
        "image": [s["image"] for s in image[:4]] * 10,
        "conversations": [{"from": "human", "value": "<image>" * 40}, {"from": "gpt", "value": "4 0"}],
    }
    manifests = {
        "text.json": text[:8] * 3,
        "forty.json": [forty, *text[:3], *audio[:2], *image[4:6]],
        "lonely.json": [image[0], *text[:7]],
        # Batches of 4 in order: images and sound, then text only, then sound only, then all again.
        "idle.json": [*image[:2], *audio[:2], *text[:4], *audio[2:6], *image[2:4], *text[4:6]],
    }
    for name, entries in manifests.items():
        (folder / name).write_text(json.dumps(entries))
    return folder


MIXED: dict[str, Any] = {
    "vision": {"ranks": [0, 1, 2]},
    "audio": {"ranks": [2]},
    "llm": {"ranks": [0, 1], "tp": 2},
}
SPREAD: dict[str, Any] = {"vision": {"ranks": [0, 1]}, "audio": {"ranks": [2]}, "llm": {"ranks": [0, 1, 2]}}
JOBS = {
    "text only": {"manifest": "text.json", "steps": 3, "batch": 8},
    "forty images": {"manifest": "forty.json", "steps": 2, "batch": 8},
    "one image in the whole batch": {"manifest": "lonely.json", "steps": 2, "batch": 8},
    "modules idle for whole steps": {"manifest": "idle.json", "steps": 4, "batch": 4, "shuffle": False},
    "fewer samples than instances": {"manifest": "idle.json", "steps": 4, "batch": 2, "shuffle": False},
}


def all_jobs(rank: int, world: int, jobs: list[Job]) -> list[Result]:
    return [train_on_rank(rank, world, job) for job in jobs]


@pytest.mark.full
@pytest.mark.parametrize(
    "layouts",
    [pytest.param(MIXED, id="tensor parallel llm"), pytest.param(SPREAD, id="sharded llm")],
)
def test_same_as_one_process(pool: Pool, folder: Path, layouts: dict[str, Any]) -> None:
    jobs = [Job(str(folder), **options) for options in JOBS.values()]
    results = pool.run(3, all_jobs, [replace(j, layouts=layouts) for j in jobs], timeout=120)
    for name, job, by_rank in zip(JOBS, jobs, zip(*results, strict=True), strict=True):
        expected = train(job)
        assert worst_loss(expected, by_rank) <= 1e-5, name
        error, where = worst_gradient(expected, by_rank)
        assert error <= 1e-5, f"{name}: {where}"
    text = train(jobs[0])
    assert not [n for n in text.gradients if "vision" in n or "audio" in n], "an idle module has no gradient"
