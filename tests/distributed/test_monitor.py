from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest

from hetero_strategy.monitor import ThroughputMonitor
from hetero_strategy.testing import Pool
from tests.monitor.fakes import STEP, Clock, Counted, CountedEncoder, Lit, Loader, Model, Remember, make_batch


def fit(rank: int, world: int, directory: str, encoder_ranks: tuple[int, ...]) -> tuple[dict[str, float], float]:
    """The LLM on both ranks as one instance, an encoder instance on each of its ranks, of which the last one computes
    the only image. Rank 1 is slower by one second a step."""
    batch = make_batch()
    image = batch.plan.assignments["vision"][1]
    offsets = np.repeat([0, 1], [len(encoder_ranks), 1])
    batch.plan.assignments["vision"] = (
        batch.plan.assignments["vision"][0],
        replace(image, offsets=offsets, padding=np.zeros(len(encoder_ranks), int)),
    )
    clock, logger = Clock(), Remember()

    class Slow(Lit):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            clock.now += rank

    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        max_steps=2,
        limit_val_batches=0,
        logger=[logger],
        callbacks=[ThroughputMonitor(every_n_steps=2, peak_flops=1e5, clock=clock)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    layouts = {"llm": SimpleNamespace(ranks=(0, 1)), "vision": SimpleNamespace(ranks=encoder_ranks)}
    trainer.strategy.placement = SimpleNamespace(layouts=layouts)  # type: ignore[attr-defined]
    trainer.fit(Slow(clock, Model(llm=Counted(100.0), vision=CountedEncoder())), Loader(clock, batch))
    return logger.rows[0][1], float(trainer.progress_bar_metrics["tokens/s"])


@pytest.mark.parametrize("encoder_ranks", [(1,), (0, 1)])
def test_ranks_agree_and_nothing_is_counted_twice(pool: Pool, tmp_path: Path, encoder_ranks: tuple[int, ...]) -> None:
    (first, first_bar), (second, second_bar) = pool.run(2, fit, str(tmp_path), encoder_ranks, group=False)
    assert first == second
    assert first_bar == pytest.approx(second_bar)
    seconds = 2 * (STEP + 1) + 0.5  # of rank 1, with one wait for data in between
    assert first["throughput/step_seconds"] == pytest.approx(seconds / 2)
    llm, vision = 2 * 3 * 60 * 100.0, 2 * 3 * 16 * 1010.0
    assert first["mfu/llm"] == pytest.approx(llm / (seconds * 2 * 1e5))
    assert first["mfu/vision"] == pytest.approx(vision / (seconds * len(encoder_ranks) * 1e5))
    assert first["mfu/total"] == pytest.approx((llm + vision) / (seconds * 2 * 1e5))
