from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import nn

from hetero_strategy.errors import ConfigError
from hetero_strategy.monitor import MemoryMonitor, ThroughputMonitor, wandb_logger
from hetero_strategy.monitor.measure import Spent
from hetero_strategy.monitor.throughput import _memory, _Window
from hetero_strategy.parallelize.recompute import recomputes
from hetero_strategy.plan.ahead import ahead
from tests.monitor.fakes import (
    STEP,
    VALIDATION,
    WAIT,
    Clock,
    Counted,
    CountedEncoder,
    Lit,
    Loader,
    Model,
    Remember,
    make_batch,
)


def fit(
    tmp_path: Path,
    *,
    batch: Any = None,
    steps: int = 4,
    model: nn.Module | None = None,
    recompute: Any = (),
    trainer_options: dict[str, Any] | None = None,
    clock: Clock | None = None,
    monitor: ThroughputMonitor | None = None,
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> tuple[list[tuple[int, dict[str, float]]], L.Trainer]:
    clock, logger = clock or Clock(), Remember()
    lit = Lit(clock, model or Model(llm=Counted(100.0), vision=CountedEncoder()))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=[logger],
        callbacks=[monitor or ThroughputMonitor(clock=clock, **options), *callbacks],
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
        **(trainer_options or {"limit_val_batches": 0}),
    )
    trainer.strategy.recompute = recomputes(recompute)  # type: ignore[attr-defined]
    batch = batch or make_batch()
    trainer.fit(lit, Loader(clock, batch), Loader(clock, batch))
    return logger.rows, trainer


def test_throughput_of_known_seconds(tmp_path: Path) -> None:
    rows, trainer = fit(tmp_path, every_n_steps=2)
    assert [step for step, _ in rows] == [1, 3]
    _, metrics = rows[1]
    seconds = STEP + WAIT  # the loader is asked for each batch between two steps
    assert metrics["throughput/step_seconds"] == pytest.approx(seconds)
    assert metrics["throughput/data_wait_seconds"] == pytest.approx(WAIT)
    for nothing in ("checkpoint", "between", "validation"):
        assert metrics[f"throughput/{nothing}_seconds"] == pytest.approx(0.0)
    assert metrics["throughput/tokens_per_second"] == pytest.approx(60 / seconds)
    assert metrics["throughput/samples_per_second"] == pytest.approx(3 / seconds)
    assert metrics["throughput/llm/rows_per_second"] == pytest.approx(60 / seconds)
    assert metrics["throughput/vision/rows_per_second"] == pytest.approx(4 / seconds)
    assert metrics["throughput/padding_share"] == pytest.approx(4 / (60 + 4 + 4))
    assert metrics["memory/max_rss_gib"] > 0.05
    assert not any(name.startswith(("mfu", "hfu")) for name in metrics)  # no peak is known for a CPU
    assert trainer.progress_bar_metrics["tokens/s"] == pytest.approx(60 / seconds)


class Saves(Checkpoint):
    """Takes its time after every step, of which the strategy says 4 s were spent on the checkpoint."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.clock.now += 4 + 3
        trainer.strategy.checkpoint_seconds = getattr(trainer.strategy, "checkpoint_seconds", 0.0) + 4  # type: ignore[attr-defined]


def test_nobody_elses_time_is_a_wait_for_data(tmp_path: Path) -> None:
    clock = Clock()
    monitor = ThroughputMonitor(2, clock=clock)
    options = {"limit_val_batches": 1, "val_check_interval": 2, "limit_train_batches": 4}
    rows, _ = fit(tmp_path, steps=4, monitor=monitor, clock=clock, callbacks=[Saves(clock)], trainer_options=options)
    assert [metrics["throughput/data_wait_seconds"] for _, metrics in rows] == [WAIT / 2, WAIT], "first is not known"
    assert [metrics["throughput/checkpoint_seconds"] for _, metrics in rows] == [2, 4]
    assert [metrics["throughput/between_seconds"] for _, metrics in rows] == [1.5, 3]
    assert [metrics["throughput/validation_seconds"] for _, metrics in rows] == [0, (VALIDATION + WAIT) / 2]
    assert rows[1][1]["throughput/step_seconds"] == STEP + WAIT + 4 + 3
    assert monitor.last is not None and (monitor.last.steps, monitor.last.tokens) == (4, 240)
    assert monitor.last.spent == Spent(4 * STEP, 3 * WAIT, 4 * 4, 4 * 3, 2 * (VALIDATION + WAIT))


LLM, VISION = 60 * 100.0, 16 * 1010.0
"""Forward FLOPs of one step: an encoder's are those of the rows inside, not of the merged ones."""


def test_mfu_of_modules_and_whole(tmp_path: Path) -> None:
    (_, metrics), *_ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5)[0]
    for name, forward in (("llm", LLM), ("vision", VISION), ("total", LLM + VISION)):
        assert metrics[f"tflops/{name}"] == pytest.approx(3 * forward / STEP / 1e12)
        assert metrics[f"mfu/{name}"] == metrics[f"hfu/{name}"] == pytest.approx(3 * forward / (STEP * 1e5))


def test_a_frozen_backbone_has_no_backward(tmp_path: Path) -> None:
    vision = CountedEncoder()
    vision.backbone.requires_grad_(False)
    llm = Counted(100.0).requires_grad_(False)  # still passes gradients on to the projector
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, model=Model(llm=llm, vision=vision))
    assert rows[0][1]["mfu/vision"] == pytest.approx(16 * (1000 + 3 * 10) / (STEP * 1e5))
    assert rows[0][1]["mfu/llm"] == pytest.approx(2 * LLM / (STEP * 1e5))


@pytest.mark.parametrize(("recompute", "body", "head"), [((), 3, 4), (("llm",), 4, 4), ({"llm": "whole"}, 4, 5)])
def test_a_head_works_for_labelled_rows_alone_and_always_again(
    tmp_path: Path, recompute: Any, body: int, head: int
) -> None:
    """3 of 60 tokens have a label."""
    model = Model(llm=Counted(100.0, head=40.0), vision=CountedEncoder())
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, model=model, recompute=recompute)
    assert rows[0][1]["mfu/llm"] == pytest.approx(3 * (60 * 60 + 3 * 40) / (STEP * 1e5))
    assert rows[0][1]["hfu/llm"] == pytest.approx((body * 60 * 60 + head * 3 * 40) / (STEP * 1e5))


def test_recompute_counts_for_hardware_only(tmp_path: Path) -> None:
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, recompute=("llm",))
    assert rows[0][1]["mfu/llm"] == pytest.approx(3 * LLM / (STEP * 1e5))
    assert rows[0][1]["hfu/llm"] == pytest.approx(4 * LLM / (STEP * 1e5))
    assert rows[0][1]["hfu/vision"] == rows[0][1]["mfu/vision"]
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, recompute=("vision",))
    assert rows[0][1]["hfu/vision"] == rows[0][1]["mfu/vision"], "it has no blocks, which alone run again"


def test_what_runs_ahead_counts_in_the_step_that_it_is_for() -> None:
    batch, window = make_batch(), _Window()
    plan = batch.plan
    batch.plan = replace(plan, assignments={**plan.assignments, ahead("vision"): plan.assignments["llm"]})
    window.add(batch)
    assert (set(window.rows), set(window.sequences), window.padding) == ({"llm", "vision"}, {"llm", "vision"}, 4)


def test_a_module_recomputed_as_a_whole_counts_its_parts_without_blocks(tmp_path: Path) -> None:
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, recompute={"vision": "whole"})
    assert rows[0][1]["hfu/vision"] == pytest.approx(4 / 3 * rows[0][1]["mfu/vision"])


def test_validation_is_left_out_and_the_last_window_is_logged(tmp_path: Path) -> None:
    options = {"limit_val_batches": 1, "val_check_interval": 1, "limit_train_batches": 3}
    rows, _ = fit(tmp_path, steps=3, every_n_steps=2, trainer_options=options)
    assert [step for step, _ in rows] == [1, 2]
    for _, metrics in rows:
        assert metrics["throughput/step_seconds"] < VALIDATION
        assert metrics["throughput/tokens_per_second"] == pytest.approx(60 / STEP, rel=0.5)


@pytest.mark.parametrize(
    "options", [{"every_n_steps": 0}, {"every_n_steps": 1.5}, {"peak_flops": -1.0}, {"peak_flops": "9"}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ThroughputMonitor(**options)


def test_what_it_cannot_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="list without a step plan"):
        fit(tmp_path, batch=[1], steps=1)
    with pytest.raises(ConfigError, match="Lit holds no MultimodalModel"):
        fit(tmp_path, model=nn.Linear(1, 1), steps=1)


def test_loggers(tmp_path: Path) -> None:
    logger = wandb_logger(tmp_path / "new", name="run")
    assert logger.save_dir == str(tmp_path / "new") and (tmp_path / "new").is_dir()
    assert logger._offline


def test_a_peak_that_another_monitor_begins_anew_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stand-in: there is no CUDA device here."""
    device, peak = torch.device("cuda:7"), [5 * 2**30]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 2**30))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=device), accumulate_grad_batches=1)
    module: Any = None
    monitor = MemoryMonitor(batch=1)
    for number in range(2):
        monitor.on_train_batch_start(trainer, module, None, number)
    assert peak == [2**30] and _memory(device) == ("memory/max_allocated_gib", 5.0)
    peak[0] = 6 * 2**30
    assert _memory(device)[1] == 6.0
