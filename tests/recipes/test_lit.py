"""A run that goes on knows every validation that a run without a stop knows, whatever ended it."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities.exceptions import SIGTERMException

from hetero_strategy.loading.context import finish_epoch
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, StepPlan
from recipes.lit import LastCheckpoint, LitMultimodal, MovableCheckpoint, adamw_cosine
from recipes.terminal import ProgressBar


class Killed(Exception):
    """In place of SIGKILL: nothing is saved on the way out."""


class Lit(L.LightningModule):
    """Validation is best in its first run, then gets worse, up to ``worst``."""

    def __init__(self, killed_in: tuple[str, int] | None = None, worst: float = math.inf) -> None:
        super().__init__()
        self.worst = worst
        self.layer, self.killed_in, self.validated = torch.nn.Linear(2, 1), killed_in, []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._maybe_end("training")
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._maybe_end("validation")
        self.validated.append(self.global_step)
        self.log("val/loss", min(self.worst, float(self.global_step)))

    def _maybe_end(self, stage: str) -> None:
        if self.killed_in == (stage, self.global_step):
            raise Killed

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        finish_epoch(self.trainer)
        return torch.utils.data.DataLoader(torch.ones(7, 2), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stop(L.Callback):
    """Asks the run to end, as max_time does after a batch and early stopping after a validation."""

    def __init__(self, after: str, step: int, batch: int | None = None) -> None:
        self.asks, self.batch = (after, step), batch

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._ask(trainer, "training", args[-1])

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._ask(trainer, "validation", trainer.fit_loop.epoch_loop.batch_idx)

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._ask(trainer, "epoch", trainer.fit_loop.epoch_loop.batch_idx)

    def _ask(self, trainer: L.Trainer, after: str, batch: int) -> None:
        trainer.should_stop |= (after, trainer.global_step) == self.asks and self.batch in (None, batch)


def checkpoints(folder: Path, every: int = 2) -> tuple[MovableCheckpoint, LastCheckpoint]:
    shared: dict[str, Any] = {"dirpath": folder, "enable_version_counter": False, "save_on_train_epoch_end": False}
    best = MovableCheckpoint(filename="best", monitor="val/loss", **shared)
    return best, LastCheckpoint(filename="last", every_n_train_steps=every, **shared)


def fit(
    folder: Path, lit: Lit, checkpoint: Path | None = None, *, every: int = 2, val: int = 1, **options: Any
) -> tuple[list[int], float, dict[str, Any]]:
    """Steps before which validation ran, the best one's score, and the weights at the end."""
    best, last = checkpoints(folder, every)
    trainer = L.Trainer(
        accelerator="cpu",
        val_check_interval=None if "check_val_every_n_epoch" in options else 4,
        callbacks=[best, last, *options.pop("callbacks", [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_steps": 12, "check_val_every_n_epoch": None} | options,
    )
    validated = torch.utils.data.DataLoader(torch.ones(1, 2)) if val else []
    trainer.fit(lit, val_dataloaders=validated, ckpt_path=checkpoint)
    score = best.best_model_score
    return lit.validated, math.inf if score is None else float(score), lit.state_dict()


def saved_step(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=False)["global_step"])


@pytest.mark.parametrize(
    ("killed_in", "goes_on_at"),
    [(("validation", 4), 2), (("training", 5), 4), (("training", 7), 6), (("training", 9), 8)],
)
def test_no_validation_is_lost_or_repeated(tmp_path: Path, killed_in: tuple[str, int], goes_on_at: int) -> None:
    torch.manual_seed(1)
    expected = fit(tmp_path / "whole", Lit())
    assert expected[:2] == ([4, 8, 12], 4.0)
    torch.manual_seed(1)
    first = Lit(killed_in)
    with pytest.raises(Killed):
        fit(tmp_path / "run", first)
    last = tmp_path / "run" / "last.ckpt"
    assert saved_step(last) == goes_on_at
    again = fit(tmp_path / "run", Lit(), last)
    before = [step for step in first.validated if step <= goes_on_at]
    assert (before + again[0], again[1]) == expected[:2]
    assert all(torch.equal(value, again[2][name]) for name, value in expected[2].items())


@pytest.mark.parametrize(
    ("ended", "step"),
    [
        ({"max_steps": 5}, 5),
        ({"max_steps": 2}, 2),
        ({"max_steps": -1, "max_epochs": 1}, 7),
        ({"callbacks": [Stop("training", 5)]}, 5),
        ({"callbacks": [Stop("validation", 4)]}, 4),
        ({"callbacks": [Stop("training", 6)], "accumulate_grad_batches": 2}, 6),
        ({"callbacks": [Stop("training", 1, batch=2)], "accumulate_grad_batches": 2}, 2),
        ({"callbacks": [Stop("validation", 1, batch=3)], "accumulate_grad_batches": 3}, 2),
        ({"callbacks": [Stop("training", 0, batch=0)], "accumulate_grad_batches": 2, "min_epochs": 1}, 4),
        ({"callbacks": [Stop("epoch", 7)]}, 7),
    ],
    ids=[
        *("steps", "few steps", "epochs", "asked in training", "asked in validation", "accumulating"),
        *("asked within a window", "and in validation", "and in the first of an epoch"),
        "asked after an epoch",
    ],
)
def test_whatever_ends_a_run_leaves_its_last_step(tmp_path: Path, ended: dict[str, Any], step: int) -> None:
    torch.manual_seed(1)
    same = {name: value for name, value in ended.items() if name == "accumulate_grad_batches"}
    expected = fit(tmp_path / "whole", Lit(), **same)
    torch.manual_seed(1)
    first = Lit()
    fit(tmp_path / "run", first, every=3, **ended)
    last = tmp_path / "run" / "last.ckpt"
    assert saved_step(last) == step
    again = fit(tmp_path / "run", Lit(), last, every=3, **same)
    assert all(torch.equal(value, again[2][name]) for name, value in expected[2].items())
    if "callbacks" not in ended:  # one that is asked to stop validates once more
        assert (first.validated + again[0], again[1]) == expected[:2]


class SaveAtEnd(L.Callback):
    """The run is told to end in the last step of the first epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer._signal_connector.received_sigterm |= trainer.global_step == 7

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "between.ckpt")


class SaveAtStart(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "between.ckpt")


@pytest.mark.parametrize("limits", [{}, {"max_steps": -1, "max_epochs": 3}], ids=["steps", "epochs"])
@pytest.mark.parametrize("saves", [SaveAtEnd, SaveAtStart])
def test_a_run_that_was_saved_between_epochs_leaves_none_out(
    tmp_path: Path, saves: type[L.Callback], limits: dict[str, int]
) -> None:
    class Epochs(L.Callback):
        def __init__(self) -> None:
            self.seen = list[tuple[int, int]]()

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, number: int) -> None:
            self.seen.append((trainer.current_epoch, number))

    whole, again = Epochs(), Epochs()
    expected = fit(tmp_path / "whole", Lit(), callbacks=[whole], **limits)
    with contextlib.suppress(SIGTERMException):
        fit(tmp_path / "run", Lit(), callbacks=[saves()], default_root_dir=tmp_path, **limits)
    validated = fit(tmp_path / "again", Lit(), tmp_path / "between.ckpt", callbacks=[again], **limits)[0]
    assert again.seen == whole.seen[7:]
    assert validated == [step for step in expected[0] if step > 7]


@pytest.mark.parametrize(("worst", "step"), [(math.inf, 4), (4.0, 12)])
def test_of_equal_scores_the_last_one_is_the_best(tmp_path: Path, worst: float, step: int) -> None:
    fit(tmp_path, Lit(worst=worst))
    assert saved_step(tmp_path / "best.ckpt") == step


def test_nothing_is_saved_where_a_test_is_told_to_end(tmp_path: Path) -> None:
    """Weights that are tested may be those of the best checkpoint."""
    fit(tmp_path, Lit(), max_steps=4)
    _, last = checkpoints(tmp_path)
    last._save_on_exception = last.save_on_exception = True
    trainer, lit = L.Trainer(accelerator="cpu", logger=False, callbacks=[last], max_steps=4), Lit()
    data = torch.utils.data.DataLoader(torch.ones(7, 2), batch_size=1)
    trainer.fit(lit, data, ckpt_path=tmp_path / "last.ckpt")
    before = (tmp_path / "last.ckpt").stat().st_mtime_ns

    def told(batch: torch.Tensor, batch_idx: int) -> None:
        raise SIGTERMException

    lit.test_step = told
    with pytest.raises(SIGTERMException):
        trainer.test(lit, data)
    assert (tmp_path / "last.ckpt").stat().st_mtime_ns == before


def test_a_run_without_samples_for_validation_is_saved_too(tmp_path: Path) -> None:
    fit(tmp_path / "steps", Lit(), val=0, max_steps=4)
    assert saved_step(tmp_path / "steps" / "last.ckpt") == 4
    fit(tmp_path / "epochs", Lit(), val=0, every=14, check_val_every_n_epoch=2, max_steps=16, max_epochs=2)
    assert saved_step(tmp_path / "epochs" / "last.ckpt") == 14


@pytest.mark.parametrize("came_along", [True, False])
def test_a_run_that_was_moved_keeps_its_best_checkpoint(tmp_path: Path, came_along: bool) -> None:
    fit(tmp_path / "before", Lit(), max_steps=6)
    (tmp_path / "before").rename(tmp_path / "now")
    states = torch.load(tmp_path / "now" / "last.ckpt", weights_only=False)["callbacks"]
    if not came_along:
        (tmp_path / "now" / "best.ckpt").unlink()
    best, last = checkpoints(tmp_path / "now")
    for callback in (best, last):
        callback.load_state_dict(states[callback.state_key])
    path = str(tmp_path / "now" / "best.ckpt") if came_along else ""
    assert (best.best_model_path, list(best.best_k_models)) == (path, [path] if came_along else [])
    assert (best.best_model_score is not None) == came_along
    assert last.best_model_path == str(tmp_path / "now" / "last.ckpt")
    again = fit(tmp_path / "now", Lit(), tmp_path / "now" / "last.ckpt")
    assert again[1] == (4.0 if came_along else 8.0)


class Scored(torch.nn.Module):
    """Says of every batch what the batch says."""

    def forward(self, batch: SimpleNamespace) -> SimpleNamespace:
        return batch.out


@pytest.mark.parametrize("draws", [False, True])
def test_an_evaluation_is_per_token_and_per_sample_that_counts(draws: bool) -> None:
    batches = []
    for labels, targets, loss, drawn, exact in (
        ([9, 0, 0], 2, 1.0, 4.0, 1.0),
        ([1, 2], 6, 5.0, 8.0, 0.5),
        ([0], 0, 0, 0, 0),
    ):
        zeros = np.zeros(1, np.int64)
        items = {"draw": StepItems(zeros, zeros, zeros, zeros, np.array([targets]))} if draws else {}
        numbers = np.arange(len(labels))
        plan = StepPlan(StepMetadata(0, 0, numbers, numbers, np.array(labels), items), 1, {})
        losses = {"llm": torch.tensor(float(loss))} | ({"draw": torch.tensor(float(drawn))} if draws else {})
        counts = {"llm": plan.loss_tokens, "draw": targets}
        score = {"exact_match": torch.tensor(float(exact)), "labelled_samples": sum(n > 0 for n in labels)}
        out = SimpleNamespace(losses=losses, counts=counts, **score, balance_losses={}, predictions=None, drawn=None)
        batches.append(SimpleNamespace(plan=plan, out=out))
    lit = LitMultimodal(Scored, {})
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    for run, stage in ((trainer.validate, "val"), (trainer.test, "test")):
        (found,) = run(lit, torch.utils.data.DataLoader(batches, batch_size=None), verbose=False)
        of_llm, of_draw = (9 * 1 + 3 * 5) / 12, (2 * 4 + 6 * 8) / 8
        expected = {"loss": of_llm + of_draw * draws, "exact_match": (1 * 1 + 2 * 0.5) / 3}
        expected |= {"loss_llm": of_llm, "loss_draw": of_draw} if draws else {}
        assert found == pytest.approx({f"{stage}/{name}": value for name, value in expected.items()})


class Saved(L.Callback):
    """Steps at which checkpoints were saved, and whether gradients were adding up then."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append((trainer.global_step, trainer.fit_loop.epoch_loop._should_accumulate()))


def test_nothing_is_saved_while_gradients_add_up(tmp_path: Path) -> None:
    saved = Saved()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "callbacks": [saved], "val": 0}
    fit(tmp_path, Lit(), max_steps=2, **options)
    fit(tmp_path, Lit(), tmp_path / "last.ckpt", max_steps=6, **options)
    assert saved.steps == [(2, False), (4, False), (6, False)]


class Learns(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, batch: torch.Tensor) -> SimpleNamespace:
        loss = self.layer(batch).square().mean()
        return SimpleNamespace(loss=loss, accuracy=torch.zeros(()), losses={"llm": loss}, balance_losses={})


def test_the_bar_reads_what_it_shows_when_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``prog_bar=True`` Lightning reads values after every step, and a GPU has to be done with it by then."""
    monkeypatch.setattr(result, "convert_tensors_to_scalars", lambda value: pytest.fail("read after a step"))
    shown: list[dict[str, Any]] = []

    class Bar(ProgressBar):
        def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
            shown.append(super().get_metrics(trainer, pl_module))
            return shown[-1]

    optimizer = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "warmup_steps": 2, "final_lr": 0.1}
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False, max_steps=25,
        callbacks=[Bar()],
    )  # fmt: skip
    trainer.fit(LitMultimodal(Learns, optimizer), torch.utils.data.DataLoader(torch.ones(25, 2)))
    assert len(shown) <= 4 and all(isinstance(one["loss"], float) and one["accuracy"] == 0.0 for one in shown)


def tuned(folder: Path, steps: int, checkpoint: Path | None = None, **changed: Any) -> tuple[list[Any], list[Any]]:
    """Options of the groups of parameters after so many steps, and the rates of the schedule."""
    optimizer = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "warmup_steps": 2, "final_lr": 0.1}
    lit = LitMultimodal(Learns, optimizer | changed)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=8,
        callbacks=[LastCheckpoint(dirpath=folder, filename="last", every_n_train_steps=2), Stop("training", steps)],
    )  # fmt: skip
    trainer.fit(lit, torch.utils.data.DataLoader(torch.ones(8, 2)), ckpt_path=checkpoint)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizers[0].param_groups]
    return groups, trainer.lr_scheduler_configs[0].scheduler.get_last_lr()


def test_the_rate_rises_and_falls_with_every_step_and_matrices_alone_decay(tmp_path: Path) -> None:
    given: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "warmup_steps": 2, "final_lr": 0.1}
    optimizer, scheduler = adamw_cosine(Learns(), 8, **given)
    rates = []
    for _ in range(10):
        rates += [{float(lr) for lr in scheduler.get_last_lr()}]
        optimizer.step()
        scheduler.step()
    falls = [0.01 + 0.09 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(7)]
    assert [lr for (lr,) in rates] == pytest.approx([0.05, 0.1, *falls, 0.01])
    groups, last = tuned(tmp_path, 6)
    assert {*last} == rates[6]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


@pytest.mark.parametrize("changed", [{}, {"lr": 0.3, "betas": (0.8, 0.9), "weight_decay": 0.2}])
def test_what_a_command_line_changes_holds_where_a_run_goes_on(tmp_path: Path, changed: dict[str, Any]) -> None:
    tuned(tmp_path, 4)
    assert tuned(tmp_path, 6, tmp_path / "last.ckpt", **changed) == tuned(tmp_path / "whole", 6, **changed)
