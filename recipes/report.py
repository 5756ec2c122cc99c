"""What a run leaves behind: `report.json`, pictures of examples and drawings."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
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
from hetero_strategy.layout.placement import Placement
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.monitor import BalanceMonitor, MemoryMonitor, ThroughputMonitor, TimelineMonitor
from hetero_strategy.monitor.measure import Spent
from hetero_strategy.monitor.throughput import Totals
from hetero_strategy.parallelize.tied import tied_rank_sets
from hetero_strategy.planner.memory import KINDS
from hetero_strategy.runtime.connect import connections, most_groups, process_groups
from recipes import cli, finished
from recipes.better import better_layouts, last_of
from recipes.drawings import Drawing, Judge, draw_grid, drawings_of
from recipes.lit import LitMultimodal
from recipes.terminal import GoesOn, draw_examples


class Readback(L.Callback):
    """What the model answered to the samples of the last validation or test; the same on every rank.

    Args:
        count: samples to show.
        judge: says which drawings are what was asked for; None: nobody does.
    """

    def __init__(self, count: int, judge: Judge | None = None) -> None:
        self.count = count
        self.judge = judge
        self.drawings: list[Drawing] = []
        self.answers: dict[int, list[int]] = {}
        """Data set index of a sample -> the likeliest token at each of its label positions, given the right ones
        before it: what the model would write alone may be another answer.
        """
        self.index: DatasetIndex | None = None

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the one before."""
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
        """Sample -> whether every token is right; samples without an answer are left out."""
        return {s: a == wanted(self.index, s) for s, a in self.answers.items() if self.index and len(a)}

    def by_kind(self) -> dict[str, float]:
        """What a sample holds besides text -> share of exactly answered samples."""
        found: dict[str, list[bool]] = defaultdict(list)
        for sample, right in self.exact().items():
            found[kind_of(self.index, sample)].append(right)
        return {kind: float(np.mean(rights)) for kind, rights in sorted(found.items())}

    def judged(self) -> np.ndarray | None:
        """bool ``[drawings]``: which the judge finds right; None without a judge or drawings."""
        return self.judge(self.drawings) if self.judge is not None and self.drawings else None

    def drawn_right(self) -> dict[str, float]:
        """What a sample holds besides text -> share of its drawings that the judge finds right."""
        found: dict[str, list[bool]] = defaultdict(list)
        judged = self.judged()
        for drawing, right in zip(self.drawings, [] if judged is None else judged.tolist(), strict=False):
            found[kind_of(self.index, drawing.sample)].append(right)
            found["all"].append(right)
        return {kind: float(np.mean(rights)) for kind, rights in sorted(found.items())}

    def examples(self, data: MultimodalDataModule) -> list[dict[str, Any]]:
        """Some samples of every kind with their files, question, answer and prediction."""
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
    """``[height][width]`` where it is grey, else ``[height][width][channels]``."""
    grey = drawing.pixels.shape[-1] == 1
    return (drawing.pixels[..., 0] if grey else drawing.pixels).tolist()


def wanted(index: DatasetIndex, sample: int) -> list[int]:
    """Tokens that a sample's answer consists of."""
    first, last = index.offsets[sample], index.offsets[sample + 1]
    return [int(token) for token in index.ids[first:last][index.loss[first:last]]]


def _question(data: MultimodalDataModule, index: DatasetIndex, sample: int) -> str:
    """Text that is not to be predicted; the rows of a picture or recording as its placeholder."""
    first, last = index.offsets[sample], index.offsets[sample + 1]
    item, names = np.zeros(last - first, np.int64), [""]
    for module, table in index.items.items():
        for number in index.item_numbers(module, np.array([sample])):
            item[table.start[number] : table.start[number] + table.rows[number]] = len(names)
            names.append(placeholder(data.processors[module].field))
    asked = ~index.loss[first:last]
    runs = itertools.groupby(zip(item[asked], index.ids[first:last][asked], strict=True), key=lambda pair: pair[0])
    return "".join(names[number] or data.tokenizer.decode([id for _, id in run]) for number, run in runs).strip()


def files_of(index: DatasetIndex, sample: int) -> list[Path]:
    """A sample's pictures and recordings, without those that are to be drawn."""
    one, read = np.array([sample]), [name for name, table in index.items.items() if table.targets is None]
    return [index.path(name, int(number)) for name in read for number in index.item_numbers(name, one)]


def kind_of(index: DatasetIndex, sample: int) -> str:
    """Names of the encoders and generators that a sample uses, or "text"."""
    used = [name for name, table in index.items.items() if table.offsets[sample + 1] > table.offsets[sample]]
    return "+".join(used) or "text"


def evaluate_checkpoint(
    trainer: L.Trainer,
    module: LitMultimodal,
    data: MultimodalDataModule,
    checkpoint: str | Path | None,
    split: str | None = None,
) -> str:
    """Run a checkpoint (None: what the model is now) on the samples that the report is of; returns their split.

    Args:
        split: ``test`` or ``val``; None: test, whose samples choose nothing, where the data has one.

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
    """What the samples of a split say of a checkpoint."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert module.model is not None
    counts = {
        name: sum(p.numel() for p in adapter.meta_copy().parameters())
        for name, adapter in module.model.modules_by_name.items()
    }
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
        "checkpoint": checkpoint,
        "examples": readback.examples(trainer.datamodule),  # type: ignore[attr-defined]
    }


BALANCE = (
    "plan_seconds", "payload_seconds", "plan_hidden_share", "skipped_samples", "worker_restarts", "bytes_within_nodes",
    "bytes_between_nodes",
)  # fmt: skip
"""What a report says as :class:`BalanceMonitor` does."""


def write_report(
    folder: Path,
    trainer: L.Trainer,
    module: LitMultimodal,
    placed: Placement,
    readback: Readback,
    *,
    checkpoint: str,
    split: str,
    plan_seconds: float = 0.0,
) -> dict[str, Any]:
    """Write ``report.json`` and ``examples.png`` (the first rank does), and return the report."""
    totals = last_of(trainer, ThroughputMonitor) or Totals(0, 0, Spent(), 0)
    steps, epochs, goes_on = trainer.global_step, trainer.current_epoch, _goes_on(trainer)
    more = finished.longer(steps, trainer.max_steps, epochs, trainer.max_epochs)
    here = steps if goes_on is None else steps - goes_on.first["step"] if goes_on.first else 0
    report = summarize(trainer, module, placed, readback, checkpoint, split) | {
        "chosen_by": chosen_by(trainer),
        "steps": steps,
        "steps_here": here,
        "epochs": epochs,
        **network(trainer),
        **throughput(totals),
        "timeline": last_steps(trainer),
        "memory": peak_memory(trainer),
        "balance": balance(trainer, totals),
        "better": better_layouts(trainer, module, folder, plan_seconds),
        "resumed": goes_on and goes_on.first,
        "resume": cli.command("recipes.train", resume=folder, **more),
    }
    if not here:  # what the report of before says of training stays
        report |= {name: value for name, value in finished.before(folder, steps).items() if name in finished.TRAINED}
    save(report, folder / "report.json", readback)
    return report


def _goes_on(trainer: L.Trainer) -> GoesOn | None:
    """The callback of a run that began at a checkpoint."""
    return next((c for c in trainer.callbacks if isinstance(c, GoesOn)), None)  # type: ignore[attr-defined]


def chosen_by(trainer: L.Trainer) -> dict[str, Any] | None:
    """The metric of validation that chose the best checkpoint, and what it was there; None without validation."""
    best = trainer.checkpoint_callbacks[0]
    assert isinstance(best, ModelCheckpoint)
    if best.best_model_score is None:
        return None
    return {"metric": best.monitor, "value": float(best.best_model_score)}


def throughput(totals: Totals) -> dict[str, Any]:
    """How fast training was and where its time went, on the rank that waited longest for data."""
    spent = totals.spent
    return {
        "train_seconds": round(spent.training, 2),
        "tokens_per_second": round(totals.tokens / spent.training, 1) if spent.training else None,
        "data_wait_seconds": round(spent.data, 2),
        "seconds": {"rank": totals.rank} | {part: round(value, 2) for part, value in asdict(spent).items()},
    }


def last_steps(trainer: L.Trainer) -> dict[str, Any] | None:
    """The last training steps as measured and as simulated, medians; on the first rank, None on the others."""
    pair = last_of(trainer, TimelineMonitor)
    if pair is None:
        return None
    fitted = pair.fitted
    medians = {
        f"{name}_{what}": float(np.median(values[row]))
        for row, name in enumerate(("measured", "simulated"))
        for what, values in (("seconds", pair.times), ("bubble", pair.bubbles))
    }
    return medians | {
        "steps": pair.times.shape[1],
        "ratio": pair.ratio,
        "filling": None if pair.simulated.filling is None else str(pair.simulated.filling),
        "transfer_latency": fitted.links.latency,
        "transfer_bandwidth": fitted.links.bandwidth if np.isfinite(fitted.links.bandwidth) else None,
        "host_before": fitted.begin,
        "host_between": float(np.mean(list(fitted.after.values()))) if fitted.after else 0.0,
        "host_after": fitted.closing,
    }


def peak_memory(trainer: L.Trainer) -> dict[str, Any] | None:
    """The most that a training step needed on the fullest rank, and as plans predict it; on the first rank."""
    peak = last_of(trainer, MemoryMonitor)
    if peak is None:
        return None
    rank, busy = int(peak.measured.argmax()), (peak.expected > 0) & (peak.measured > 0)  # others have no module
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
    """How evenly the work was spread over instances, and whether training waited for it; None if nobody watched."""
    seen = last_of(trainer, BalanceMonitor)
    if seen is None:
        return None
    known = seen.to_json()
    share = totals.spent.data / totals.spent.training if totals.spent.training else None
    return {
        "imbalance": {m: [round(s.imbalance_before, 4), round(s.imbalance_after, 4)] for m, s in seen.spreads.items()},
        "data_wait_share": None if share is None else round(share, 4),
        "workers": getattr(trainer.datamodule, "num_workers", None),  # type: ignore[attr-defined]
        **{name: known[name] for name in BALANCE},
    }


def network(trainer: L.Trainer) -> dict[str, Any]:
    """Pairs of ranks that meet before the first step, and process groups of the rank that is in most."""
    executor = trainer.strategy.executor  # type: ignore[attr-defined]
    owners, graph = tied_rank_sets(executor.modules, executor.placement.layouts), executor.compiler.graph
    made = process_groups(executor.placement, graph, owners, executor.device.type)
    return {"groups": most_groups(made), "connections": connections(graph)}


@rank_zero_only
def save(report: dict[str, Any], path: Path, readback: Readback) -> None:
    """The report as JSON, and its examples and drawings as pictures beside it."""
    path.write_text(json.dumps(report, indent=1))
    if readback.drawings:
        judged = readback.judged()
        draw_grid(readback.drawings[:64], None if judged is None else judged[:64], path.with_name("drawings.png"))
    if report["examples"]:
        draw_examples(report["examples"], path.with_name("examples.png"))
