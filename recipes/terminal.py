"""The terminal: console and progress bar; and `examples.png`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from rich.console import Console

from hetero_strategy.loading.batch import Batch

SOUNDS = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff", ".aif")

WIDE = 140
"""Columns of output that is no terminal."""


def console(**options: Any) -> Console:
    """Make a console that prints text literally, as paths, commands and messages hold brackets and colons. A file,
    which has no width of its own, is wide enough for tables unless ``COLUMNS`` gives a width.
    """
    console = Console(**options, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
        console.width = WIDE
    return console


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with loss, accuracy and speed, without the version of the logger."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return loss, accuracy, tokens per second and exact match."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        shown = ("train/loss", "train/accuracy")
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items() if name in shown}
        if "tokens/s" in metrics:
            metrics["tokens/s"] = f"{float(metrics['tokens/s']):.0f}"
        return {str(name).removeprefix("train/"): value for name, value in metrics.items()}


class GoesOn(L.Callback):
    """A callback that prints where a stopped run continues: its first step and the samples of it."""

    def __init__(self) -> None:
        self.first: dict[str, Any] | None = None
        """``step`` (optimizer steps done before), ``epoch``, ``samples`` (ids of the manifest)."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Note and print the first batch."""
        if self.first is None:
            names = trainer.datamodule.indices["train"].names  # type: ignore[attr-defined]
            samples = [names[int(sample)] for sample in batch.plan.samples]
            self.first = {"step": trainer.global_step, "epoch": batch.plan.metadata.epoch, "samples": samples}
            self._say(**self.first)

    @rank_zero_only
    def _say(self, step: int, epoch: int, samples: list[str]) -> None:
        shown = ", ".join([*samples[:3], *(["..."] if len(samples) > 3 else [])])
        where = f"at step {step} (epoch {epoch}), with samples {shown}"
        console().print(f"goes on     {where}", soft_wrap=True)


UNREADABLE = (OSError, RuntimeError, ValueError, SyntaxError, Image.DecompressionBombError)
"""Errors of Pillow and soundfile for files that are missing, damaged or of another kind."""


def draw_examples(examples: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG with one row per example: picture, spectrogram or drawings, and question, answer and prediction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 * len(examples)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, example in enumerate(examples):
        axes = [figure.add_subplot(len(examples), 3, 3 * row + column + 1) for column in range(3)]
        for axis in axes:
            axis.set_axis_off()
        for file in example["files"]:
            try:
                _draw_file(axes, Path(file))
            except UNREADABLE:
                axes[0].text(0.5, 0.5, Path(file).name, ha="center", va="center", fontsize=8, parse_math=False)
        if example["drawn"]:
            axes[1].imshow(_side_by_side(example["drawn"]))
        text = f"{example['question']}\nanswer      {example['answer']}\nprediction  {example['prediction']}"
        color = "black" if example["exact"] else "firebrick"
        axes[2].text(0, 0.5, text, va="center", family="monospace", fontsize=8, color=color, parse_math=False)
    figure.savefig(path, dpi=110)


def _side_by_side(drawings: list[Any]) -> np.ndarray:
    """Join grey and coloured pictures of any sizes into one, uint8 ``[height, width, 3]``."""
    pictures = [np.array(drawn, np.uint8) for drawn in drawings]
    pictures = [np.stack([one] * 3, axis=2) if one.ndim == 2 else one for one in pictures]
    height = max(map(len, pictures))
    framed = [np.pad(one, ((1, 1 + height - len(one)), (1, 1), (0, 0)), constant_values=255) for one in pictures]
    return np.concatenate(framed, axis=1)


def _draw_file(axes: list[Any], path: Path) -> None:
    if path.suffix.lower() in SOUNDS:
        import soundfile

        samples, rate = soundfile.read(path, always_2d=True)
        axes[1].specgram(samples.mean(axis=1) + 1e-9, NFFT=256, Fs=rate, noverlap=192)
    else:
        with Image.open(path) as image:
            axes[0].imshow(np.asarray(image.convert("RGB")))


def seconds(value: float) -> str:
    """Return a duration in s or ms."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
