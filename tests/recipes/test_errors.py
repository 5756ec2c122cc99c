"""What a person gets for wrong input: one message, a non-zero exit, and nothing left running."""

from __future__ import annotations

import json
import shutil
import wave
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_strategy.testing import Pool
from tests.recipes.commands import Ended, run, run_forked, wait_until_gone
from tests.recipes.conftest import data_at


def first(folder: Path, field: str) -> Path:
    samples = json.loads((folder / "train.json").read_text())
    return folder / next(sample[field] for sample in samples if field in sample)


def missing_image(folder: Path) -> None:
    first(folder, "image").unlink()


def truncated_image(folder: Path) -> None:
    path = first(folder, "image")
    path.write_bytes(path.read_bytes()[:60])


def empty_recording(folder: Path) -> None:
    with wave.open(str(first(folder, "audio")), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)


def more_placeholders(folder: Path) -> None:
    samples = json.loads((folder / "train.json").read_text())
    sample = next(s for s in samples if "image" in s)
    sample["conversations"][0]["value"] = "Read <image><image>"
    (folder / "train.json").write_text(json.dumps(samples))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing image": (missing_image, "file is missing"),
    "truncated image": (truncated_image, "truncated or damaged"),
    "empty recording": (empty_recording, "audio"),
    "more placeholders": (more_placeholders, "<image>"),
}
OVERRIDES: dict[str, tuple[tuple[str, ...], str]] = {
    "misspelt field": (("trainer.max_stepz=3",), "Could not override 'trainer.max_stepz'"),
    "schedule": (
        ("strategy.schedule=own_schedule", "data.module.train=missing.json"),  # refused before the data are read
        "schedule 'own_schedule' is not known; choose one of gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, sequential,",
    ),
    "import": (("imports=[no_such_file]",), "imports: no_such_file cannot be imported: No module named 'no_such_file'"),
    "microbatches": (("data.module.microbatches=auto",), "microbatches=auto follows from a budget, but balance.budget"),
    "option": (("+strategy.fooo=1",), "strategy: HeteroStrategy.__init__() got an unexpected keyword argument 'fooo'"),
    "rows": (("+data.module.processors.audio.stack=2",), "processors.audio: stack is 2, but the module has 4"),
}


def check_message(result: Ended, message: str) -> None:
    assert result.code not in (0, None), result.output
    assert message in result.output and result.output.count("error: ") == 1, result.output
    assert "Traceback" not in result.output
    assert len(result.output[result.output.index("error: ") :].strip().splitlines()) <= 4, result.output


@pytest.mark.full
@pytest.mark.parametrize("name", DAMAGE)
def test_one_message_for_damaged_data(pool: Pool, small: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    folder = tmp_path / "digits"
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns(".hetero_index"))
    damage(folder)
    check_message(run_forked(tmp_path / "run", *data_at(folder)), message)


@pytest.mark.parametrize("name", OVERRIDES)
def test_one_message_for_wrong_settings(pool: Pool, small: Path, tmp_path: Path, name: str) -> None:
    overrides, message = OVERRIDES[name]
    check_message(run_forked(tmp_path / "run", *data_at(small), *overrides), message)


@pytest.mark.full
def test_torchrun_with_another_number_of_processes(tmp_path: Path, given: tuple[str, ...]) -> None:
    """Real command lines; tests/recipes/test_sweep.py has a job of one process that fails."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    result = run(tmp_path, *given, launcher=launcher)
    assert result.code != 0
    ours = result.output[: result.output.find("torch/distributed/elastic")]  # then torchrun tells it in its own words
    assert ours.count("the launcher started 2 processes, but Trainer(devices x num_nodes) says 4") == 1, result.output
    assert "Traceback" not in ours and not wait_until_gone(tmp_path)
