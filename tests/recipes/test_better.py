"""What a run's report says of other layouts, from what its stages took."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hetero_strategy.planner.answer import Ranked
from hetero_strategy.planner.evaluate import Candidate
from recipes.better import Compared, better_layouts, lines
from tests.distributed.harness import Pool
from tests.recipes.commands import SMALL, run_on_ranks

SLOW = ("layout=colocated", "layout.llm.pp=2", "layout.llm.dp_shard=1", "strategy.schedule=sequential",
        "data.module.microbatches=8", "model.modules.llm.dim=256", "model.modules.llm.n_layers=4")  # fmt: skip
"""Every microbatch waits for the one before it, and the second half of the model for the first."""


def reported(pool: Pool, folder: Path, world: int, *overrides: str) -> tuple[dict[str, Any], str]:
    small = [o for o in SMALL if "llm.dim" not in o and "max_steps" not in o and "val_check" not in o]
    steps = ("trainer.max_steps=10", "trainer.val_check_interval=10", "report.plan_seconds=5")
    output = run_on_ranks(pool, world, folder, *small, *steps, *overrides).output
    return json.loads((folder / "report.json").read_text())["better"], " ".join(output.split())


@pytest.mark.perf
def test_a_bad_layout_is_told_a_better_one(pool: Pool, tmp_path: Path, given: tuple[str, ...]) -> None:
    for attempt in range(3):  # a busy machine makes steps longer than they are predicted, and then little is named
        folder = tmp_path / f"run{attempt}"
        found, output = reported(pool, folder, 2, *given, *SLOW)
        file, predicted = folder / "layout" / "better.yaml", found["predicted_seconds"]
        gain, off = predicted / found["best_seconds"], found["measured_seconds"] / predicted
        assert file.exists() == (found["layout"] is not None) == (gain > max(1.1, off)), found
        if file.exists():
            break
    assert found["layout"] == str(file), found
    assert yaml.safe_load(file.read_text())["strategy"]["schedule"] != "sequential"
    assert "times as fast: vision: ranks" in output and "strategy.schedule" not in found["command"]
    assert re.search(rf" layout={re.escape(str(file))}( data\.module\.microbatches=\d+)?$", found["command"])
    assert found["command"].count("data.module.microbatches") <= 1  # the plan's, not the run's beside it


@pytest.mark.full
def test_the_only_layout_is_told_no_other(pool: Pool, tmp_path: Path, given: tuple[str, ...]) -> None:
    ranks = [f"layout.{name}.ranks=[0]" for name in ("vision", "audio", "llm")]
    one = ("layout=colocated", *ranks, "layout.vision.dp_replicate=1")
    found, output = reported(pool, tmp_path / "run", 1, *given, *one)
    assert found["layout"] is None and "no better plan" in output
    assert not (tmp_path / "run" / "layout").exists()


@pytest.mark.parametrize(("measured", "best", "named"), [(1.0, 0.8, True), (1.5, 0.8, False), (1.5, 0.6, True),
                                                        (1.0, 0.95, False)])  # fmt: skip
def test_gains_within_what_predictions_are_off_are_not_named(measured: float, best: float, named: bool) -> None:
    assert Compared(1.0, measured, Ranked(Candidate({}), best, best), 9, 1.0).worth == named


def test_what_was_not_compared_says_why() -> None:
    strategy = SimpleNamespace(root_device=SimpleNamespace(type="cpu"))
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=32, is_global_zero=True, callbacks=[])
    module: Any = None
    found = better_layouts(trainer, module, Path(), 5.0)
    assert found is not None
    assert lines(found) == [("layouts", "not compared with others: no step was measured")]
    assert better_layouts(trainer, module, Path(), 0.0) is None
    said = {"predicted_seconds": 2.0, "measured_seconds": 2.1, "best_seconds": 1.9, "simulated": 9, "took": 1.2,
            "layout": None, "layouts": []}  # fmt: skip
    ((_, line),) = lines(said)
    assert re.fullmatch(r"a step of these takes 2 s predicted .*\(2.1 s measured\); the best of 9 .* no better.*", line)
