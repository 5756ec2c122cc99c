"""Time that a step saves if a frozen encoder's rows are read from disk (`python -m recipes.encode`).

One process trains a projector and a language model on JPEGs of 512x512, with a loader worker beside it; the encoder's
backbone is frozen. Epochs of two runs take turns: ``live``, in which pictures are decoded and encoded, and ``encoded``,
which reads the rows. ``made`` is what the worker needs for a step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.common import Options, option, program, report
from benchmarks.loader import FOLDER, MERGE, PATCH, WIDTH, photographs, processor
from hetero_strategy.data.encoded_rows import encoded
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.loading.options import IndexOptions, Workers
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.zoo import siglip2_encoder, titan_llama
from recipes.digits import write_digits
from recipes.encode import encode_rows

HIDDEN, LAYERS = 256, 6
"""Width and blocks of the frozen backbone."""
IMAGES = 10
"""Images of a step."""


def model_of(rows: Path | None) -> MultimodalModel:
    """A frozen encoder that takes longer than the rest, as where only a projector is aligned; or rows in its place."""
    vision = siglip2_encoder(
        out_width=WIDTH, merge=MERGE, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_channels=3, patch_size=PATCH, num_patches=256,
    )  # fmt: skip
    vision = vision if rows is None else encoded(vision, rows)
    llm = titan_llama(vocab_size=128, dim=WIDTH, n_layers=2, n_heads=4, n_kv_heads=4, max_seq_len=1024)
    return MultimodalModel({"vision": vision, "llm": llm}, freeze=["vision.backbone"], seed=1)


class _Lit(L.LightningModule):
    def __init__(self, rows: Path | None) -> None:
        super().__init__()
        self.rows = rows

    def configure_model(self) -> None:
        self.model = model_of(self.rows)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Clock(L.Callback):
    """Seconds of steps, on the wall and of the processor, and of the worker; the first three are left out."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        spent = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        if batch_idx > 2:
            self.steps.append((*spent, batch.times.payload))


def data_of(folder: Path, rows: Path | None) -> MultimodalDataModule:
    """Batches of pictures, or of their rows."""
    return MultimodalDataModule(
        folder / "512" / "manifest.json", model=partial(model_of, rows), tokenizer=folder / "tokenizer",
        processors={"vision": processor()}, global_batch_size=IMAGES, workers=Workers(1),
        index=IndexOptions(verify="header"),
    )  # fmt: skip


def epoch(folder: Path, rows: Path | None) -> list[tuple[float, float, float]]:
    """Steps of one epoch."""
    clock, quiet = _Clock(), dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=HeteroStrategy(), max_epochs=1, callbacks=[clock],
        enable_checkpointing=False, **quiet,
    )  # fmt: skip
    trainer.fit(_Lit(rows), datamodule=data_of(folder, rows))
    return clock.steps


@program(
    option("--rounds", type=int, default=3, help="epochs of each kind"),
    option("--folder", type=Path, default=FOLDER, help="where the data are kept"),
)
def main(args: Options) -> Any:
    """Print the table."""
    photographs(args.folder, [512])
    write_digits(args.folder / "tokenizer", train=4, val=1, progress=False)
    pictures = sorted((args.folder / "512").glob("*.jpg"))
    steps: dict[str, list[tuple[float, float, float]]] = {"live": [], "encoded": []}
    with tempfile.TemporaryDirectory() as place:
        rows, began = Path(place), time.perf_counter()
        with models_without_values():
            model = model_of(None)
        encode_rows(model, "vision", processor(), pictures, rows)
        seconds, size = time.perf_counter() - began, sum(file.stat().st_size for file in rows.iterdir())
        for _ in range(args.rounds):
            for way, times in steps.items():
                times += epoch(args.folder, None if way == "live" else rows)
    found = {way: [statistics.median(column) for column in zip(*times, strict=True)] for way, times in steps.items()}
    report(
        f"{IMAGES} images of 512x512 a step, frozen backbone of width {HIDDEN} with {LAYERS} blocks",
        ["rows of the backbone", "step ms", "processor ms", "made in ms", "step", "processor", "made"],
        [(way, *(1e3 * x for x in times), *(x / y for x, y in zip(times, found["live"], strict=True)))
         for way, times in found.items()],
        [f"step, processor, made: over those of live; {len(pictures)} items take {size / 1e6:.1f} MB on disk and"
         f" {seconds:.0f} s to encode"],
    )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
