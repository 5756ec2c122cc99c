"""`ProfileMonitor` traces the steps that it is asked for, and says where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from hetero_strategy.errors import ConfigError
from hetero_strategy.monitor import ProfileMonitor
from tests.monitor.fakes import Clock, Counted, CountedEncoder, Lit, Loader, Model, make_batch


def fit(folder: Path, monitor: ProfileMonitor, steps: int) -> None:
    clock = Clock()
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[monitor],
        enable_model_summary=False,
        default_root_dir=folder,
        limit_val_batches=0,
        **options,
    )
    trainer.fit(Lit(clock, Model(llm=Counted(1.0), vision=CountedEncoder())), Loader(clock, make_batch()))


def optimizer_steps(folder: Path) -> int:
    trace = json.loads((folder / "profile" / "rank0.json").read_text())["traceEvents"]
    return sum(event["name"] == "Optimizer.step#SGD.step" for event in trace if event.get("cat") == "user_annotation")


@pytest.mark.parametrize(("run", "traced"), [(9, 3), (5, 3), (4, 2)])
def test_the_steps_that_are_asked_for(tmp_path: Path, run: int, traced: int) -> None:
    fit(tmp_path, ProfileMonitor(steps=(2, 5)), run)
    assert optimizer_steps(tmp_path) == traced


def test_a_run_that_ends_before_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the run had 3 batches; give steps below that, not \[3, 5\]"):
        fit(tmp_path, ProfileMonitor(steps=(3, 5)), 3)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for steps in ((0, 2), (4, 4), (1, 2, 3), 10, ("1", "2")):
        with pytest.raises(ConfigError, match="1 <= first < last"):
            ProfileMonitor(steps=steps)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ranks=0; give a list of ranks, such as \[0\]"):
        ProfileMonitor(ranks=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="memory_history='no'; give True or False"):
        ProfileMonitor(memory_history="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ranks=\[1\] do not exist"):
        fit(tmp_path, ProfileMonitor(ranks=(0, 1)), 1)
    with pytest.raises(ConfigError, match="memory_history=True needs CUDA devices"):
        fit(tmp_path, ProfileMonitor(memory_history=True), 1)


def test_the_history_is_bounded_and_written_where_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that CUDA is asked for it: there is none here."""
    called: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", called.append)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: called.append(options))
    device = SimpleNamespace(root_device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(default_root_dir=tmp_path, global_rank=3, world_size=4, strategy=device)
    module: Any = None
    for history in (False, True):
        for error in (torch.OutOfMemoryError("out of memory"), ValueError("another")):
            monitor = ProfileMonitor(memory_history=history)
            monitor.on_train_start(trainer, module)
            monitor.on_exception(trainer, module, error)
    begin, end = {"max_entries": 100_000}, {"enabled": None}
    assert called == [begin, str(tmp_path / "profile" / "memory3.pickle"), end, begin, end]
