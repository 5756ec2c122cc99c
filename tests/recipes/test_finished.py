"""A run that is over says how to train on, and going on with it as it is changes nothing."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipes import finished
from recipes.printed import _training_line
from tests.distributed.harness import Pool
from tests.recipes.commands import SMALL, run_forked


def test_a_finished_run_is_trained_on_by_the_line_that_it_prints(
    pool: Pool, tmp_path: Path, given: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    first = run_forked(folder, "layout=single", *SMALL, *given, "optimizer.warmup_steps=3")
    assert first.code == 0, first.output
    assert "warning     trainer.max_steps=3 is not above optimizer.warmup_steps=3" in first.output
    said = re.findall(r"^resume +(.+)$", first.output, re.M)[-1]
    assert shlex.split(said)[-2:] == [f"resume={folder}", "trainer.max_steps=6"]
    kept = (folder / "report.json").read_text()

    over = run_forked(folder, f"resume={folder}")
    assert over.code == 0 and (folder / "report.json").read_text() == kept
    assert f"complete at step 3 of 3; its report is {folder}/report.json; give trainer.max_steps=..." in over.output
    assert said in over.output and "run folder" not in over.output

    more = run_forked(folder, f"resume={folder}", "trainer.max_steps=5")
    assert more.code == 0, more.output
    report = json.loads((folder / "report.json").read_text())
    assert (report["steps"], report["steps_here"], report["resumed"]["step"]) == (5, 2, 3)
    assert re.search(r"training +5 steps, 2 of them here, [\d.]+ s, [\d.]+ steps/s, \d+ tokens/s", more.output)
    assert report["resume"].endswith("trainer.max_steps=10")

    (folder / "report.json").write_text(kept)  # as if the evaluation had been killed
    assert run_forked(folder, f"resume={folder}").code == 0
    assert json.loads((folder / "report.json").read_text())["steps"] == 5


def test_a_run_is_over_by_the_limit_that_it_has_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, "describe", lambda checkpoint: SimpleNamespace(step=12))
    report = {"steps": 12, "epochs": 2}

    def said(max_steps: int, max_epochs: int | None) -> str | None:
        trainer = OmegaConf.create({"trainer": {"max_steps": max_steps, "max_epochs": max_epochs}})
        (tmp_path / "report.json").write_text(json.dumps(report))
        return finished.over(trainer, tmp_path, tmp_path)

    assert said(-1, -1) is said(20, -1) is said(-1, 3) is said(20, None) is None
    assert "complete at step 12, after 2 of 2 epochs; " in str(by_epochs := said(20, 2))
    assert "trainer.max_epochs=4" in str(by_epochs) and "trainer.max_steps" not in str(by_epochs)
    assert "complete at step 12 of 10; " in str(said(10, -1)) and "trainer.max_steps=24" in str(said(10, -1))
    report["steps"] = 6  # the report is of an earlier end
    assert said(10, -1) is None
    (tmp_path / "report.json").write_text("{")
    assert finished.before(tmp_path, 12) == {} and finished.before(tmp_path / "none", 12) == {}


def test_speed_is_of_what_was_trained_here() -> None:
    report: dict[str, Any] = {"steps": 70, "steps_here": 20, "train_seconds": 8.0, "tokens_per_second": 521.4}
    assert _training_line(report) == "70 steps, 20 of them here, 8.0 s, 2.5 steps/s, 521 tokens/s"
    assert _training_line(report | {"steps_here": 70}) == "70 steps, 8.0 s, 8.75 steps/s, 521 tokens/s"
    nothing = {"steps_here": 0, "train_seconds": 0.0, "tokens_per_second": None}
    assert _training_line(report | nothing) == "70 steps, 0 of them here, 0.0 s"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"max_steps": 50}, ["optimizer.warmup_steps=50", "give trainer.val_check_interval=25 in place of 200"]),
        ({"max_steps": 50, "check_val_every_n_epoch": 1}, ["optimizer.warmup_steps=50"]),
        ({"max_steps": 60, "accumulate_grad_batches": 4}, []),
        ({"max_steps": 60, "limit_val_batches": 0}, []),
        ({"max_steps": -1, "max_epochs": 3}, []),
    ],
)
def test_what_a_short_run_does_not_come_to_is_said(changed: dict[str, Any], words: list[str]) -> None:
    trainer = {
        "max_steps": 800, "val_check_interval": 200, "check_val_every_n_epoch": None, "limit_val_batches": None,
        "accumulate_grad_batches": 1,
    }  # fmt: skip
    data = {"module": {"val": "val.json"}}
    cfg = OmegaConf.create({"trainer": trainer | changed, "optimizer": {"warmup_steps": 50}, "data": data})
    said = finished.short(cfg)
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True))
