"""A run that goes on knows every validation that a run without a stop knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from recipes.lit import LastCheckpoint


class Killed(Exception):
    """In place of SIGKILL: nothing is saved on the way out."""


class Lit(L.LightningModule):
    """Validation is best in its first run, then gets worse."""

    def __init__(self, killed_in: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.layer, self.killed_in, self.validated = torch.nn.Linear(2, 1), killed_in, []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._maybe_end("training")
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._maybe_end("validation")
        self.validated.append(self.global_step)
        self.log("val/loss", float(self.global_step))

    def _maybe_end(self, stage: str) -> None:
        if self.killed_in == (stage, self.global_step):
            raise Killed

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, lit: Lit, checkpoint: Path | None = None) -> tuple[list[int], float, dict[str, Any]]:
    """Steps before which validation ran, the best one's score, and the weights at the end."""
    shared: dict[str, Any] = {"dirpath": folder, "enable_version_counter": False, "save_on_train_epoch_end": False}
    best = ModelCheckpoint(filename="best", monitor="val/loss", **shared)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=12,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        callbacks=[best, LastCheckpoint(filename="last", every_n_train_steps=2, **shared)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = torch.utils.data.DataLoader(torch.ones(7, 2), batch_size=1)
    trainer.fit(lit, data, torch.utils.data.DataLoader(torch.ones(1, 2)), ckpt_path=checkpoint)
    assert best.best_model_score is not None
    return lit.validated, float(best.best_model_score), lit.state_dict()


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
    assert torch.load(last, weights_only=False)["global_step"] == goes_on_at
    again = fit(tmp_path / "run", Lit(), last)
    before = [step for step in first.validated if step <= goes_on_at]
    assert (before + again[0], again[1]) == expected[:2]
    assert all(torch.equal(value, again[2][name]) for name, value in expected[2].items())
