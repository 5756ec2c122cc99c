"""What the report says of balance, and what it shows of samples."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.loading.options import Workers
from hetero_strategy.monitor import BalanceMonitor
from hetero_strategy.monitor.balance import BalanceSummary, Spread
from hetero_strategy.monitor.measure import Spent
from hetero_strategy.monitor.throughput import Totals
from hetero_strategy.schedule.compile import Traffic
from recipes.drawings import Drawing
from recipes.printed import _balance_lines, _spent_line, _training_line, print_report
from recipes.report import _pixels, _question, balance, throughput
from recipes.terminal import _side_by_side, console, draw_examples
from tests import stock
from tests.small_models import READING, reader

SPREAD = Spread(np.array([3.0, 1.0]), np.array([2.2, 1.8]))


def reported(summary: BalanceSummary | None, seconds: float = 10.0) -> Any:
    monitor = BalanceMonitor()
    monitor.last = summary
    trainer: Any = SimpleNamespace(callbacks=[monitor], datamodule=SimpleNamespace(workers=Workers()))
    spent = Spent(step=seconds - 0.5, data=0.5) if seconds else Spent()
    return balance(trainer, Totals(5, 100, spent, 2))


def test_where_the_time_went() -> None:
    found = throughput(Totals(4, 1000, Spent(step=6.0, data=1.0, checkpoint=0.5, between=2.5, validation=7.0), 3))
    assert found["train_seconds"] == 10.0 and found["tokens_per_second"] == 100.0 and found["data_wait_seconds"] == 1.0
    assert found["seconds"]["rank"] == 3 and sum(found["seconds"].values()) == 3 + 10.0 + 7.0
    assert _spent_line(found["seconds"], found["train_seconds"]) == (
        "6.0 s in steps (60.0%), 1.0 s waiting for data (10.0%), 0.5 s on checkpoints (5.0%), 2.5 s between steps"
        " (callbacks, loggers, Lightning's loop) (25.0%); validation 7.0 s more"
    )


def test_balance_of_a_run() -> None:
    found = reported(BalanceSummary(5, {"llm": SPREAD}, Traffic(2**20, 2**21), 0.1, 0.0123, 0.2, 0.75, 2.0, 0))
    assert found["imbalance"] == {"llm": [1.5, 1.1]} and found["data_wait_share"] == 0.05
    assert found["bytes_between_nodes"] == 2**21 and found["plan_hidden_share"] == 0.75
    (name, ratios), (other, data) = _balance_lines(found)
    assert (name, other) == ("balance", "data") and "llm 1.50 -> 1.10" in ratios
    assert data == (
        "5.0% of the time waiting, plan 12.3 ms a step (75% hidden), reading and decoding 200.0 ms, made between steps:"
        " no workers, 2.00 MiB a step between nodes, 1.00 within"
    )


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_says_only_what_is_known(seconds: float) -> None:
    found = reported(BalanceSummary(5, {}, None, 0.0, None, None, None, 1.0, 0), seconds)
    lines = _balance_lines(found)
    assert lines == ([("data", "5.0% of the time waiting")] if seconds else [])
    assert reported(None) is None


def test_what_was_skipped_is_said() -> None:
    found = reported(BalanceSummary(5, {}, None, 0.0, None, None, None, 1.0, 3))
    assert _balance_lines(found) == [("data", "5.0% of the time waiting, 3 samples skipped")]


def test_commands_are_printed_as_they_are_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {
        "examples": [], "layouts": [], "processes": 1, "parameters": {}, "drawings": 0, "exact_match": None,
        "checkpoint": "", "resume": "train resume=[/mnt/run]", "read_whole": {"vision": 12},
    }  # fmt: skip
    print_report(report, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "resume train resume=[/mnt/run]" in said
    assert "start tensors that transformers converts, read whole by each rank of a module: 12 of vision" in said


def test_files_that_are_no_pictures_are_shown_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "rows.npy", np.zeros(3))
    (tmp_path / "speech.opus").write_bytes(b"no sound")
    soundfile.write(tmp_path / "speech.aiff", np.random.default_rng(0).choice([-0.5, 0.5], 8000), 8000)
    files = [str(tmp_path / name) for name in ("rows.npy", "speech.opus", "gone.png", "speech.aiff")]
    example = {"files": files, "drawn": [], "exact": True, "question": "q", "answer": "a", "prediction": "p"}
    report = {
        "examples": [example], "layouts": [], "processes": 1, "parameters": {}, "drawings": 0, "exact_match": None,
        "checkpoint": "",
    }  # fmt: skip
    print_report(report, tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert "each token predicted from the right ones before it" in said[0]
    assert said[1:5] == ["rows.npy", "speech.opus", "gone.png", "speech.aiff"]
    draw_examples([example], tmp_path / "examples.png")
    assert (tmp_path / "examples.png").stat().st_size > 1000


@pytest.mark.parametrize(("columns", "width"), [(None, 140), ("60", 60)])
def test_words_of_tables_in_files_are_whole(
    columns: str | None, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    with (tmp_path / "output").open("w") as file:
        assert console(file=file).width == width and console(file=file, width=100).width == 100
        assert console(file=file, force_terminal=True).width != 140


def test_drawings_are_shown_in_any_size_and_colour(tmp_path: Path) -> None:
    sides = ((3, 4, 1), (2, 2, 3), (1, 1, 1))
    drawings = [Drawing(0, tmp_path, np.full(shape, 200, np.uint8)) for shape in sides]
    for drawing in drawings:
        drawing.pixels[0, 0] = 0
    example = {"files": [], "drawn": [_pixels(d) for d in drawings], "exact": True} | dict.fromkeys(
        ("question", "answer", "prediction"), "x"
    )
    assert _side_by_side(example["drawn"]).shape == (5, 13, 3)
    draw_examples([example], tmp_path / "examples.png")


def test_questions_are_shown_as_they_were_asked(small: Path, tmp_path: Path) -> None:
    """Whatever tokens the tokenizer has for pictures and recordings."""
    data = MultimodalDataModule(
        val=small / "val.json",
        tokenizer=stock.tokenizer(tmp_path, stock.LLAMA_3),
        model=reader,
        processors=READING,
        global_batch_size=4,
        index={"cache_folder": tmp_path},
    )
    data.prepare_data()
    asked = [sample["conversations"][0]["value"] for sample in json.loads((small / "val.json").read_text())]
    assert [_question(data, data.indices["val"], sample) for sample in range(len(asked))] == asked
    assert any("<image> <audio>" in question for question in asked)


def test_speed_is_of_what_was_trained_here() -> None:
    report: dict[str, Any] = {"steps": 70, "steps_here": 20, "train_seconds": 8.0, "tokens_per_second": 521.4}
    assert _training_line(report) == "70 steps, 20 of them here, 8.0 s, 2.5 steps/s, 521 tokens/s"
    assert _training_line(report | {"steps_here": 70}) == "70 steps, 8.0 s, 8.75 steps/s, 521 tokens/s"
    nothing = {"steps_here": 0, "train_seconds": 0.0, "tokens_per_second": None}
    assert _training_line(report | nothing) == "70 steps, 0 of them here, 0.0 s"
