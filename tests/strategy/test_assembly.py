"""What a LightningModule holds besides the model's modules, and what is said of those that a rank has in parts."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torchmetrics import MeanMetric

from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.strategy.assembly import _say_parts, move_rest
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


def test_a_state_dict_of_parts_warns_a_person_and_no_checkpoint() -> None:
    module = Lit()
    module.model.to("meta").register_state_dict_post_hook(_say_parts)
    state = TrainingState("model", module.model.modules_by_name, group=None)
    with pytest.warns(UserWarning, match="a part, or nothing, of audio, llm, vision; for all weights use"):
        module.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {*state.rest_of(module)} == {"scale"}
