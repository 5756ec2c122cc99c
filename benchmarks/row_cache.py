"""What is a step worth whose frozen encoder's rows are read from disk (``cache``)?

One process trains a projector and a language model on JPEGs of 512x512, with a loader worker beside it; the encoder's
backbone is frozen. Three epochs of the same run, one after another: without a cache; with one that is empty, so that
rows are computed and written; and with all rows there. Runs take turns. ``made`` is what the worker needs for a step:
to decode its pictures, or to read rows. Processor time is that of the training process, its writing thread included.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.common import arguments, report, write_json
from benchmarks.loader import FOLDER, MERGE, PATCH, WIDTH, photographs, processor
from hetero_strategy.data.row_store import RowStore
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model import MultimodalModel
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.zoo import siglip2_encoder, titan_llama
from recipes.digits import write_digits

WAYS = ("without", "written", "read")
HIDDEN, LAYERS = 256, 6
"""Of the frozen backbone."""
IMAGES = 10
"""Of a step."""


def model_of() -> MultimodalModel:
    """A frozen encoder that takes longer than the rest, as where only a projector is aligned."""
    vision = siglip2_encoder(
        out_width=WIDTH, merge=MERGE, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_channels=3, patch_size=PATCH, num_patches=256,
    )  # fmt: skip
    llm = titan_llama(vocab_size=128, dim=WIDTH, n_layers=2, n_heads=4, n_kv_heads=4, max_seq_len=1024)
    return MultimodalModel({"vision": vision, "llm": llm}, freeze=["vision.backbone"], seed=1)


class _Lit(L.LightningModule):
    def configure_model(self) -> None:
        self.model = model_of()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Clock(L.Callback):
    """Seconds of steps, on the wall and of the processor, and of the worker; the first three are left out."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []
        self.found = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        spent = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        if batch_idx > 2:
            self.steps.append((*spent, batch.times.payload))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        for found, missed in trainer.strategy.row_caches.counts().values():  # type: ignore[attr-defined]
            self.found = found / (found + missed)


def epoch(folder: Path, cache: Path | None) -> _Clock:
    """One epoch."""
    manifest = folder / "512" / "manifest.json"
    data = MultimodalDataModule(
        manifest, model=model_of, tokenizer=folder / "tokenizer", processors={"vision": processor()},
        global_batch_size=IMAGES, num_workers=1, verify="header",
    )  # fmt: skip
    clock, quiet = _Clock(), dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    strategy = HeteroStrategy(cache=None if cache is None else {"vision": cache})
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[clock], enable_checkpointing=False,
        **quiet,
    )  # fmt: skip
    trainer.fit(_Lit(), datamodule=data)
    return clock


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each kind")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the data are kept")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    photographs(args.folder, [512])
    write_digits(args.folder / "tokenizer", train=4, val=1, progress=False)
    clocks: dict[str, list[_Clock]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as place:
        for number in range(args.rounds):
            cache = Path(place) / str(number)
            for way in WAYS:
                clocks[way].append(epoch(args.folder, None if way == "without" else cache))
        (rows,) = cache.iterdir()
        store, size = RowStore(rows), sum(file.stat().st_size for file in rows.iterdir())
        store.refresh()
        items = len(store)
    found: dict[str, Any] = {}
    for way in WAYS:
        columns = zip(*(step for clock in clocks[way] for step in clock.steps), strict=True)
        found[way] = [statistics.median(column) for column in columns]
    table = [
        (way, *(1e3 * x for x in found[way]), *(x / y for x, y in zip(found[way], found["without"], strict=True)),
         f"{clocks[way][-1].found:.0%}")
        for way in WAYS
    ]  # fmt: skip
    head = ["rows of the backbone", "step ms", "processor ms", "made in ms", "step", "processor", "made", "found"]
    report(
        "row_cache",
        f"{IMAGES} images of 512x512 a step, frozen backbone of width {HIDDEN} with {LAYERS} blocks",
        head,
        table,
        [f"step, processor, made: over those without; {items} items take {size / 1e6:.1f} MB on disk"],
    )
    write_json(args.json, "row_cache", "cpu", {"rounds": args.rounds}, found)
    return found


if __name__ == "__main__":
    main()
