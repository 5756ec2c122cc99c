from __future__ import annotations

import sys
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
from hetero_strategy.model.read_spec import spec_of_module
from hetero_strategy.model.routing import Routing
from hetero_strategy.model.spec import ModelSpec, fed_by_trainable
from hetero_strategy.monitor import MemoryMonitor, ThroughputMonitor, throughput
from hetero_strategy.monitor.measure import Spent
from hetero_strategy.monitor.throughput import ModuleFlops, Part, _memory, device_peak_flops, utilization, work
from hetero_strategy.parallelize.transforms import read_transforms
from hetero_strategy.simulator.balance_context import attention_rules
from hetero_strategy.zoo import hf_qwen3
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
    recompute: dict[str, str] | None = None,
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
    trainer.strategy.transforms = read_transforms({name: {"recompute": how} for name, how in (recompute or {}).items()})  # type: ignore[attr-defined]
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


class Routes(L.Callback):
    """A stand-in for the executor of a mixture with two layers of three experts, after two dense ones."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        llm = pl_module.model.modules_by_name["llm"]  # type: ignore[union-attr,attr-defined]
        llm.routing = Routing(("blocks.2.router", "blocks.3.router"), 3)
        llm.blocks = lambda: {f"blocks.{n}": nn.Identity() for n in range(4)}
        rows = torch.tensor([[8, 1, 0], [3, 3, 3]])
        trainer.strategy.executor = SimpleNamespace(expert_rows={"llm": rows})  # type: ignore[attr-defined]


@pytest.mark.parametrize("bound", [3.0, 2.5])
def test_the_load_of_experts_is_logged_by_block(
    tmp_path: Path, bound: float, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(throughput, "UNEVEN", bound)
    monitor = ThroughputMonitor(2)
    rows, _ = fit(tmp_path, steps=4, monitor=monitor, callbacks=[Routes()])
    assert [rows[0][1][f"experts/llm/{block}"] for block in (2, 3)] == pytest.approx([8 / 3, 1])
    assert monitor.last is not None and monitor.last.expert_load == {"llm": {2: pytest.approx(8 / 3), 3: 1}}
    warned = [str(each.message) for each in recwarn if "busiest one of block 2 had 2.7 times" in str(each.message)]
    assert len(warned) == (bound < 8 / 3), "once, not in every window"


LLM, VISION = 60 * 100.0, 16 * 1010.0
"""Forward FLOPs of one step: an encoder's are those of the rows inside, not of the merged ones."""


def test_mfu_of_modules_and_whole(tmp_path: Path) -> None:
    (_, metrics), *_ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5)[0]
    for name, forward in (("llm", LLM), ("vision", VISION), ("total", LLM + VISION)):
        assert metrics[f"tflops/{name}"] == pytest.approx(3 * forward / STEP / 1e12)
        assert metrics[f"mfu/{name}"] == metrics[f"hfu/{name}"] == pytest.approx(3 * forward / (STEP * 1e5))


@pytest.mark.parametrize("rule", ["causal", "bidirectional_items"])
def test_mfu_of_a_windowed_model_counts_the_pairs_of_its_masks(tmp_path: Path, rule: str) -> None:
    """By hand: samples of 10, 30 and 20 tokens; the last has an image of 4 rows at its start; one layer of two sees 4
    rows back.
    """
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}
    llm = hf_qwen3(**sizes, **heads, **layers, max_window_layers=0)
    llm.attend_by(rule)
    batch = make_batch()
    spec = spec_of_module(llm)
    rules = attention_rules(ModelSpec({"vision": replace(spec, rules=()), "llm": spec}, (("vision", "llm"),)), "llm")
    assert rules is not None
    squares = rules.squares(batch.plan.metadata)
    of_llm = (replace(a, squares=squares[a.units]) for a in batch.plan.assignments["llm"])
    batch.plan = replace(batch.plan, assignments={**batch.plan.assignments, "llm": (*of_llm,)})
    rows, _ = fit(
        tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, model=Model(llm=llm, vision=CountedEncoder()), batch=batch
    )
    weights = 2 * (16 * 24 + 2 * 16 * 12 + 24 * 16 + 3 * 16 * 32)
    full, window = sum(n * (n + 1) // 2 for n in (10, 20, 30)), sum(4 * n - 6 for n in (10, 20, 30))
    later = 6 * (rule == "bidirectional_items")  # pairs of a row and a later one of the image, in each layer
    forward = 60 * 2 * weights + 2 * 4 * 12 * (full + window + 2 * later) + 3 * 2 * 16 * 40
    assert rows[0][1]["mfu/llm"] == pytest.approx(3 * forward / (STEP * 1e5))


def test_a_frozen_backbone_has_no_backward(tmp_path: Path) -> None:
    vision = CountedEncoder()
    vision.backbone.requires_grad_(False)
    llm = Counted(100.0).requires_grad_(False)  # still passes gradients on to the projector
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, model=Model(llm=llm, vision=vision))
    assert rows[0][1]["mfu/vision"] == pytest.approx(16 * (1000 + 3 * 10) / (STEP * 1e5))
    assert rows[0][1]["mfu/llm"] == pytest.approx(2 * LLM / (STEP * 1e5))


@pytest.mark.parametrize(("recompute", "body", "head"), [({}, 3, 4), ({"llm": "all"}, 4, 4), ({"llm": "whole"}, 4, 5)])
def test_a_head_works_for_labelled_rows_alone_and_always_again(
    tmp_path: Path, recompute: dict[str, str], body: int, head: int
) -> None:
    """3 of 60 tokens have a label."""
    model = Model(llm=Counted(100.0, head=40.0), vision=CountedEncoder())
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, model=model, recompute=recompute)
    assert rows[0][1]["mfu/llm"] == pytest.approx(3 * (60 * 60 + 3 * 40) / (STEP * 1e5))
    assert rows[0][1]["hfu/llm"] == pytest.approx((body * 60 * 60 + head * 3 * 40) / (STEP * 1e5))


def test_recompute_counts_for_hardware_only(tmp_path: Path) -> None:
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, recompute={"llm": "all"})
    assert rows[0][1]["mfu/llm"] == pytest.approx(3 * LLM / (STEP * 1e5))
    assert rows[0][1]["hfu/llm"] == pytest.approx(4 * LLM / (STEP * 1e5))
    assert rows[0][1]["hfu/vision"] == rows[0][1]["mfu/vision"]
    rows, _ = fit(tmp_path, steps=1, every_n_steps=1, peak_flops=1e5, recompute={"vision": "all"})
    assert rows[0][1]["hfu/vision"] == rows[0][1]["mfu/vision"], "it has no blocks, which alone run again"


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


@pytest.mark.parametrize(
    ("trainable", "upstream", "recomputed", "model", "hardware"),
    [
        (True, False, False, 300, 300),
        (True, True, False, 300, 300),
        (False, True, False, 200, 200),  # only the gradient of the rows
        (False, False, False, 100, 100),  # no backward at all
        (True, False, True, 300, 400),
        (False, True, True, 200, 300),
        (False, False, True, 100, 100),  # no backward, so nothing is recomputed
    ],
)
def test_backward_and_recompute(
    trainable: bool, upstream: bool, recomputed: bool, model: float, hardware: float
) -> None:
    assert work([Part(100, trainable, recomputed)], upstream) == ModuleFlops(model, hardware)


def test_parts_feed_each_other() -> None:
    frozen, trained = Part(1000, False), Part(10, True)
    assert work([frozen, trained], upstream=False).model == 1000 + 30
    assert work([trained, frozen], upstream=False).model == 30 + 2000
    assert work([frozen, trained], upstream=True).model == 2000 + 30


def test_trainability_travels_along_paths() -> None:
    trainable = {"llm": False, "generator": False, "vision": True, "audio": False}
    edges = [("llm", "generator"), ("vision", "llm"), ("audio", "llm")]  # in no useful order
    assert fed_by_trainable(trainable, edges) == {"llm": True, "generator": True, "vision": False, "audio": False}
    assert not any(fed_by_trainable({**trainable, "vision": False}, edges).values())


def test_utilization_on_hand_numbers() -> None:
    # 8 devices of 100 TFLOP/s in 2 s could do 1.6e15 FLOPs
    assert utilization(4e14, 2.0, 8, 100e12) == pytest.approx(0.25)


def test_peak_is_known_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_peak_flops(torch.device("cpu")) is None
    table = SimpleNamespace(get_peak_flops=lambda name: 989e12 if "H100" in name else 312e12)
    monkeypatch.setitem(sys.modules, "torchtitan.tools.utils", table)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torchtitan.tools", SimpleNamespace(utils=table))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torchtitan", SimpleNamespace(tools=None))  # type: ignore[arg-type]
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert device_peak_flops(torch.device("cuda", 0)) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.warns(UserWarning, match="Some GPU is not known"):
        assert device_peak_flops(torch.device("cuda", 0)) is None
