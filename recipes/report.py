"""The report of a run: `report.json`, pictures of examples and drawings."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from hetero_strategy.data.build_index import DatasetIndex
from hetero_strategy.data.conversation import placeholder
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import Placement
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model.read_spec import active_parameters
from hetero_strategy.monitor import BalanceMonitor, MemoryMonitor, ThroughputMonitor, TimelineMonitor
from hetero_strategy.monitor.measure import Spent
from hetero_strategy.monitor.throughput import Totals
from hetero_strategy.profiling.memory import KINDS
from recipes import cli
from recipes.drawings import Drawing, Judge, draw_grid, drawings_of
from recipes.lit import LitMultimodal
from recipes.terminal import GoesOn, draw_examples


class Readback(L.Callback):
    """A callback that keeps the model's answers to the samples of the last validation or test; equal on all ranks.

    Args:
        count: number of samples to show.
        judge: function that says which drawings are right; None: drawings are not judged.
    """

    def __init__(self, count: int, judge: Judge | None = None) -> None:
        self.count = count
        self.judge = judge
        self.drawings: list[Drawing] = []
        self.answers: dict[int, list[int]] = {}
        """Data set index of a sample -> the likeliest token at each of its label positions, after the right tokens
        before it. An answer that the model generates freely may differ.
        """
        self.index: DatasetIndex | None = None

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the answers of the last validation."""
        self.answers, self.drawings = {}, []
        self.index = trainer.datamodule.indices.get("test" if trainer.testing else "val")  # type: ignore[attr-defined]

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the predicted tokens and the drawings of every sample."""
        runs = outputs["predictions"]
        values = runs.values.cpu().numpy()
        for number, sample in enumerate(batch.plan.samples):
            self.answers[int(sample)] = values[runs.offsets[number] : runs.offsets[number + 1]].tolist()
        if outputs["drawn"] and self.index is not None:
            processors = trainer.datamodule.processors  # type: ignore[attr-defined]
            self.drawings += drawings_of(batch, outputs["drawn"], self.index, processors)

    on_test_batch_end = on_validation_batch_end

    def exact(self) -> dict[int, bool]:
        """Return sample -> whether every token is right, without samples that have no answer."""
        return {s: a == wanted(self.index, s) for s, a in self.answers.items() if self.index and len(a)}

    def by_kind(self) -> dict[str, float]:
        """Return kind of sample -> share of exactly answered samples; see :func:`kind_of`."""
        by_kind: dict[str, list[bool]] = defaultdict(list)
        for sample, right in self.exact().items():
            by_kind[kind_of(self.index, sample)].append(right)
        return {kind: float(np.mean(rights)) for kind, rights in sorted(by_kind.items())}

    def judged(self) -> np.ndarray | None:
        """Return which drawings the judge finds right, bool ``[drawings]``; None without a judge or drawings."""
        return self.judge(self.drawings) if self.judge is not None and self.drawings else None

    def drawn_right(self) -> dict[str, float]:
        """Return kind of sample, or "all" -> share of the drawings that the judge finds right."""
        by_kind: dict[str, list[bool]] = defaultdict(list)
        judged = self.judged()
        for drawing, right in zip(self.drawings, [] if judged is None else judged.tolist(), strict=False):
            by_kind[kind_of(self.index, drawing.sample)].append(right)
            by_kind["all"].append(right)
        return {kind: float(np.mean(rights)) for kind, rights in sorted(by_kind.items())}

    def examples(self, data: MultimodalDataModule) -> list[dict[str, Any]]:
        """Return some samples of every kind with their files, question, answer and prediction."""
        tokenizer = data.tokenizer
        exact, kinds = self.exact(), defaultdict(list)
        for sample in exact:
            kinds[kind_of(self.index, sample)].append(sample)
        turns = [group[place] for place in range(self.count) for group in kinds.values() if place < len(group)]
        shown = []
        for sample in turns[: self.count]:
            assert self.index is not None
            shown.append(
                {
                    "id": self.index.names[sample],
                    "kind": kind_of(self.index, sample),
                    "files": [str(f) for f in files_of(self.index, sample)],
                    "drawn": [_pixels(d) for d in self.drawings if d.sample == sample],
                    "question": _question(data, self.index, sample),
                    "answer": tokenizer.decode(wanted(self.index, sample)),
                    "prediction": tokenizer.decode(self.answers[sample]),
                    "exact": exact[sample],
                }
            )
        return shown


def _pixels(drawing: Drawing) -> list[Any]:
    """Return ``[height][width]`` of a grey drawing, else ``[height][width][channels]``."""
    grey = drawing.pixels.shape[-1] == 1
    return (drawing.pixels[..., 0] if grey else drawing.pixels).tolist()


def wanted(index: DatasetIndex, sample: int) -> list[int]:
    """Return the tokens of a sample's answer."""
    first, last = index.offsets[sample], index.offsets[sample + 1]
    return [int(token) for token in index.ids[first:last][index.loss[first:last]]]


def _question(data: MultimodalDataModule, index: DatasetIndex, sample: int) -> str:
    """Return the text of a sample before its answer, with a placeholder for each picture or recording."""
    first, last = index.offsets[sample], index.offsets[sample + 1]
    item, names = np.zeros(last - first, np.int64), [""]
    for module, table in index.items.items():
        numbers = index.item_numbers(module, np.array([sample]))
        run, start, rows = table.runs(numbers)
        for place in range(len(numbers)):  # what lies between an item's runs is the item's, too
            first_run, last_run = np.flatnonzero(run == place)[[0, -1]]
            item[start[first_run] : start[last_run] + rows[last_run]] = len(names)
            names.append(placeholder(data.processors[module].field))
    asked = ~index.loss[first:last]
    runs = itertools.groupby(zip(item[asked], index.ids[first:last][asked], strict=True), key=lambda pair: pair[0])
    return "".join(names[number] or data.tokenizer.decode([id for _, id in run]) for number, run in runs).strip()


def files_of(index: DatasetIndex, sample: int) -> list[Path]:
    """Return a sample's pictures and recordings, without the pictures that are to be drawn."""
    one, read = np.array([sample]), [name for name, table in index.items.items() if table.targets is None]
    return [index.path(name, int(number)) for name in read for number in index.item_numbers(name, one)]


def kind_of(index: DatasetIndex, sample: int) -> str:
    """Return the names of the encoders and generators that a sample uses, or "text"."""
    used = [name for name, table in index.items.items() if table.offsets[sample + 1] > table.offsets[sample]]
    return "+".join(used) or "text"


def evaluate_checkpoint(
    trainer: L.Trainer,
    module: LitMultimodal,
    data: MultimodalDataModule,
    checkpoint: str | Path | None,
    split: str | None = None,
) -> str:
    """Evaluate a checkpoint (None: the model as it is) for the report, and return the name of the split.

    Args:
        split: ``test`` or ``val``; None: ``test`` if the data has it, as its samples have chosen no checkpoint.

    Raises:
        ConfigError: there is no such split.
    """
    split = split or ("test" if data.manifests["test"] else "val")
    if split not in ("test", "val"):
        raise ConfigError(f"split={split}; use test or val, or null: test where the data has one")
    run = trainer.test if split == "test" else trainer.validate
    run(module, datamodule=data, ckpt_path=checkpoint, verbose=False)
    return split


def summarize(
    trainer: L.Trainer, module: LitMultimodal, placed: Placement, readback: Readback, checkpoint: str, split: str
) -> dict[str, Any]:
    """Return the part of the report that an evaluation gives."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert module.model is not None
    counts = {
        name: sum(p.numel() for p in adapter.meta_copy().parameters())
        for name, adapter in module.model.modules_by_name.items()
    }
    active = {name: active_parameters(adapter.meta_copy()) for name, adapter in module.model.modules_by_name.items()}
    return {
        "split": split,
        "exact_match": metrics.get(f"{split}/exact_match"),
        "exact_match_by_kind": readback.by_kind(),
        "loss": metrics.get(f"{split}/loss"),
        "samples": len(readback.answers),
        "drawings": len(readback.drawings),
        "drawn_right": readback.drawn_right(),
        "layouts": [{"module": m, "ranks": ranks, "degrees": degrees} for m, ranks, degrees in placed.table()],
        "processes": placed.world_size,
        "parameters": counts,
        "active_parameters": active,
        "checkpoint": checkpoint,
        "examples": readback.examples(trainer.datamodule),  # type: ignore[attr-defined]
    }


BALANCE = (
    "plan_seconds", "payload_seconds", "plan_hidden_share", "skipped_samples", "bytes_within_nodes",
    "bytes_between_nodes",
)  # fmt: skip
"""Fields that a report takes over from :class:`BalanceMonitor`."""
TRAINED = (
    "steps_here", "train_seconds", "tokens_per_second", "data_wait_seconds", "expert_load", "seconds", "timeline",
    "memory", "balance",
)  # fmt: skip
"""Fields of a report that say something of training: a run that trains nothing keeps those of the earlier report."""


def write_report(
    folder: Path,
    trainer: L.Trainer,
    module: LitMultimodal,
    placed: Placement,
    readback: Readback,
    *,
    checkpoint: str,
    split: str,
    read_whole: Mapping[str, int],
) -> dict[str, Any]:
    """Write ``report.json`` and ``examples.png`` (the first rank does), and return the report."""
    totals = last_of(trainer, ThroughputMonitor) or Totals(0, 0, Spent(), 0)
    steps, goes_on = trainer.global_step, _goes_on(trainer)
    here = steps if goes_on is None else steps - goes_on.first["step"] if goes_on.first else 0
    limits = (("max_steps", steps, trainer.max_steps), ("max_epochs", trainer.current_epoch, trainer.max_epochs))
    more = {f"trainer.{name}": 2 * done for name, done, most in limits if 0 < done == most}  # to train on
    report = summarize(trainer, module, placed, readback, checkpoint, split) | {
        "read_whole": read_whole,
        "chosen_by": chosen_by(trainer),
        "steps": steps,
        "steps_here": here,
        "epochs": trainer.current_epoch,
        **throughput(totals),
        "timeline": last_steps(trainer),
        "memory": peak_memory(trainer),
        "balance": balance(trainer, totals),
        "resumed": goes_on and goes_on.first,
        "resume": cli.command("recipes.train", resume=folder, **more),
    }
    path = folder / "report.json"
    if not here and path.exists():
        before = json.loads(path.read_text())
        report |= {name: before.get(name) for name in TRAINED if before["steps"] == steps}
    save(report, path, readback)
    return report


def last_of(trainer: L.Trainer, kind: type[Any]) -> Any:
    """Return what a callback of this kind has seen last; None if there is none, or if it has seen nothing."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c.last for c in callbacks if isinstance(c, kind) and c.last is not None), None)


def _goes_on(trainer: L.Trainer) -> GoesOn | None:
    """Return the callback of a run that began at a checkpoint."""
    return next((c for c in trainer.callbacks if isinstance(c, GoesOn)), None)  # type: ignore[attr-defined]


def chosen_by(trainer: L.Trainer) -> dict[str, Any] | None:
    """Return the metric of validation that chose the best checkpoint, and its value; None without validation."""
    best = trainer.checkpoint_callbacks[0]
    assert isinstance(best, ModelCheckpoint)
    if best.best_model_score is None:
        return None
    return {"metric": best.monitor, "value": float(best.best_model_score)}


def throughput(totals: Totals) -> dict[str, Any]:
    """Return the speed of training and where its time went, on the rank that waited longest for data."""
    spent = totals.spent
    return {
        "train_seconds": round(spent.training, 2),
        "tokens_per_second": round(totals.tokens / spent.training, 1) if spent.training else None,
        "data_wait_seconds": round(spent.data, 2),
        "expert_load": {
            name: {block: round(load, 2) for block, load in loads.items()} for name, loads in totals.expert_load.items()
        },
        "seconds": {"rank": totals.rank} | {part: round(value, 2) for part, value in asdict(spent).items()},
    }


def last_steps(trainer: L.Trainer) -> dict[str, Any] | None:
    """Return medians of the last training steps, measured and simulated, on the first rank; None on other ranks."""
    pair = last_of(trainer, TimelineMonitor)
    if pair is None:
        return None
    medians = {
        f"{name}_{what}": float(np.median(values[row]))
        for row, name in enumerate(("measured", "simulated"))
        for what, values in (("seconds", pair.times), ("bubble", pair.bubbles))
    }
    filling = None if pair.simulated.filling is None else str(pair.simulated.filling)
    return medians | {"steps": pair.times.shape[1], "ratio": pair.ratio, "filling": filling}


def peak_memory(trainer: L.Trainer) -> dict[str, Any] | None:
    """Return measured and predicted memory of a step on the fullest rank; None on all ranks but the first."""
    peak = last_of(trainer, MemoryMonitor)
    if peak is None:
        return None
    rank, busy = int(peak.measured.argmax()), (peak.expected > 0) & (peak.measured > 0)  # has modules
    ratios = peak.expected[busy] / peak.measured[busy]
    kinds = dict(zip(KINDS, peak.predicted.bytes[:, rank].tolist(), strict=True))
    return {
        "batch": peak.batch,
        "rank": rank,
        "measured_bytes": float(peak.measured[rank]),
        "predicted_bytes": float(peak.expected[rank]),
        "predicted_by_kind": {kind: bytes_ for kind, bytes_ in kinds.items() if bytes_},
        "ratios": [float(ratios.min()), float(ratios.max())],
    }


def balance(trainer: L.Trainer, totals: Totals) -> dict[str, Any] | None:
    """Return how evenly work was spread over instances and how long training waited for data; None if not measured."""
    seen = last_of(trainer, BalanceMonitor)
    if seen is None:
        return None
    known = seen.to_json()
    share = totals.spent.data / totals.spent.training if totals.spent.training else None
    return {
        "imbalance": {m: [round(s.imbalance_before, 4), round(s.imbalance_after, 4)] for m, s in seen.spreads.items()},
        "data_wait_share": None if share is None else round(share, 4),
        "workers": trainer.datamodule.workers.count,  # type: ignore[attr-defined]
        **{name: known[name] for name in BALANCE},
    }


@rank_zero_only
def save(report: dict[str, Any], path: Path, readback: Readback) -> None:
    """Write the report as JSON, and its examples and drawings as pictures beside it."""
    path.write_text(json.dumps(report, indent=1))
    if readback.drawings:
        judged = readback.judged()
        draw_grid(readback.drawings[:64], None if judged is None else judged[:64], path.with_name("drawings.png"))
    if report["examples"]:
        draw_examples(report["examples"], path.with_name("examples.png"))
