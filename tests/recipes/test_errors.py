"""What a person gets for wrong input: one message, a non-zero exit, soon, and nothing left running."""

from __future__ import annotations

import json
import shutil
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.recipes.commands import Ended, run, wait_until_gone
from tests.recipes.conftest import data_at

pytestmark = pytest.mark.slow


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


def no_placeholder(folder: Path) -> None:
    samples = json.loads((folder / "train.json").read_text())
    sample = next(s for s in samples if "image" in s)
    sample["conversations"][0]["value"] = "Read"
    (folder / "train.json").write_text(json.dumps(samples))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing image": (missing_image, "file is missing"),
    "truncated image": (truncated_image, "truncated or damaged"),
    "empty recording": (empty_recording, "audio"),
    "no placeholder": (no_placeholder, "<image>"),
}
OVERRIDES: dict[str, tuple[tuple[str, ...], str]] = {
    "misspelt field": (("trainer.max_stepz=3",), "trainer: no field 'max_stepz'; did you mean max_steps?"),
    "rows": (("data.module.processors.audio.stack=2",), "use the same merge or stack in both"),
}


@pytest.fixture(scope="module")
def ended(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Path]]:
    """All bad inputs through the real command line, two at a time."""
    commands: dict[str, tuple[str, ...]] = {}
    for name, (damage, _) in DAMAGE.items():
        folder = tmp_path_factory.mktemp("bad") / "digits"
        shutil.copytree(small, folder, ignore=shutil.ignore_patterns(".hetero_index"))
        damage(folder)
        commands[name] = data_at(folder)
    for name, (overrides, _) in OVERRIDES.items():
        commands[name] = (*data_at(small), *overrides)
    folders = {name: tmp_path_factory.mktemp("run") for name in commands}
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda name: run(folders[name], *commands[name]), commands))
    return {name: (result, folders[name]) for name, result in zip(commands, results, strict=True)}


@pytest.mark.parametrize("name", [*DAMAGE, *OVERRIDES])
def test_one_message(ended: dict[str, tuple[Ended, Path]], name: str) -> None:
    result, folder = ended[name]
    message = DAMAGE[name][1] if name in DAMAGE else OVERRIDES[name][1]
    assert result.code not in (0, None), result.output
    assert result.seconds < 30
    assert message in result.output and result.output.count("error: ") == 1, result.output
    assert "Traceback" not in result.output
    assert len(result.output[result.output.index("error: ") :].strip().splitlines()) <= 4, result.output
    assert not wait_until_gone(folder)


def test_torchrun_with_another_number_of_processes(tmp_path: Path, given: tuple[str, ...]) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    result = run(tmp_path, *given, launcher=launcher)
    assert result.code != 0 and result.seconds < 60
    ours = result.output[: result.output.find("torch/distributed/elastic")]  # then torchrun tells it in its own words
    assert ours.count("the launcher started 2 processes, but Trainer(devices x num_nodes) says 4") == 1, result.output
    assert "Traceback" not in ours and not wait_until_gone(tmp_path)
