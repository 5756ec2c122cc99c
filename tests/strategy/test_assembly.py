"""What a LightningModule holds besides the model's modules, on its rank's device."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torchmetrics import MeanMetric

from hetero_strategy.strategy.assembly import move_rest
from tests.small_models import reader


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.seen = reader(), MeanMetric()
        self.register_buffer("scale", torch.ones(2))


def test_all_but_the_modules_moves_and_the_lightning_module_names_the_device() -> None:
    module, meta = Lit(), torch.device("meta")
    before = {name: parameter.device for name, parameter in module.model.named_parameters()}
    move_rest(module, meta)
    assert module.device == meta and module.scale.device == meta and module.seen.device == meta
    assert {name: parameter.device for name, parameter in module.model.named_parameters()} == before
