"""A run that is over: how it is trained on, and that going on with it would train nothing; limits that are soon met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hetero_strategy.checkpoint import describe
from recipes import cli

TRAINED = (
    *("steps_here", "train_seconds", "tokens_per_second", "data_wait_seconds", "seconds"),
    *("timeline", "memory", "balance", "better"),
)
"""What a report says of training, and a run that trains nothing does not know."""


def before(folder: Path, steps: int | None) -> dict[str, Any]:
    """The report that a run folder holds of so many steps; empty: there is none."""
    try:
        report = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError):  # none yet, or a killed run's
        return {}
    return report if report.get("steps") == steps else {}


def longer(steps: int, max_steps: int | None, epochs: int, max_epochs: int | None) -> dict[str, object]:
    """The limits that have ended a run, twice as far: what to give to train on."""
    given = ("trainer.max_steps", steps, max_steps), ("trainer.max_epochs", epochs, max_epochs)
    return {name: 2 * max(1, done) for name, done, most in given if most is not None and 0 <= most <= done}


def over(cfg: DictConfig, folder: Path, checkpoint: Path | None) -> str | None:
    """What to say where a run has met its limits and has left its report; None: there is something to do."""
    step = describe(checkpoint).step if checkpoint is not None else None
    report = before(folder, step)
    if step is None or not report:
        return None
    most, most_epochs = cfg.trainer.get("max_steps"), cfg.trainer.get("max_epochs")
    epochs_done = report.get("epochs", -1)
    more = longer(step, most, epochs_done, most_epochs)
    if not more:
        return None
    of = f" of {most}" if "trainer.max_steps" in more else ""
    epochs = f", after {epochs_done} of {most_epochs} epochs" if "trainer.max_epochs" in more else ""
    command = cli.command("recipes.train", resume=folder, **more)
    named = " and ".join(f"{name}=..." for name in more)
    where = cli.near(folder / "report.json")
    return f"complete at step {step}{of}{epochs}; its report is {where}; give {named} to train on: {command}"


def short(cfg: DictConfig) -> list[str]:
    """What a run of so few steps does not come to."""
    trainer, warmup = cfg.trainer, cfg.optimizer.get("warmup_steps") or 0
    steps, every = trainer.get("max_steps") or -1, trainer.get("val_check_interval")
    batches = steps * (trainer.get("accumulate_grad_batches") or 1)
    said = []
    if 0 < steps <= warmup:
        said.append(
            f"trainer.max_steps={steps} is not above optimizer.warmup_steps={warmup}: the learning rate only rises;"
            " give fewer steps of warm-up"
        )
    counted = isinstance(every, int) and trainer.get("check_val_every_n_epoch") is None
    validates = cfg.data.module.get("val") and trainer.get("limit_val_batches") != 0
    if counted and validates and 0 < batches < every:
        said.append(
            f"no validation before the end after {batches} batches, and so no checkpoints/best: the last one is"
            f" reported; give trainer.val_check_interval={max(1, batches // 2)} in place of {every}"
        )
    return said
