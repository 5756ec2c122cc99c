"""What a LightningModule holds besides the model's modules, what is said of those that a rank has in parts, and ready
modules whose values differ between ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model import Encoder, Projector
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.strategy.assembly import _say_parts, bit_sum, digest, move_rest, refuse_different
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


def modules(seed: int) -> Mapping[str, Adapter]:
    """A ready module, one that is filled later, and one that is both."""
    torch.manual_seed(seed)
    ready, fixed = nn.Linear(8, 8), nn.Linear(8, 8)
    nn.init.constant_(fixed.weight, 0.5)
    nn.init.zeros_(fixed.bias)
    return {
        "ready": Encoder(ready, Projector(8, 4)),
        "late": Encoder(lambda: nn.Linear(8, 8), Projector(8, 4)),
        "fixed": Encoder(fixed, Projector(8, 4)),
    }


def digests(seed: int) -> list[int]:
    return [digest(module) for module in modules(seed).values()]


def refused(seeds: list[int], ranks: list[int]) -> None:
    layouts = {name: ModuleLayout(ranks=ranks, dp_replicate=len(ranks)) for name in modules(0)}
    refuse_different([digests(seed) for seed in seeds], modules(0), layouts)


def test_values_that_differ_between_ranks_of_a_module_are_refused() -> None:
    refused([5, 5, 5], [0, 1, 2])
    with pytest.raises(ConfigError, match=r"'ready' was given with .* ranks 0 and 2: .*configure_model"):
        refused([5, 5, 6], [0, 1, 2])
    refused([5, 5, 6], [0, 1])  # rank 2 has no part of the module
    assert digests(5)[1:] == digests(6)[1:]  # values that come later, and tables that are computed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_a_sum_sees_every_element_wherever_a_tensor_lies(dtype: torch.dtype) -> None:
    values = torch.arange(13).remainder(2).to(dtype)
    expected = bit_sum(values)
    assert bit_sum(torch.cat([values[:1], values])[1:]) == expected
    assert bit_sum(values[None].t()) == expected
    assert bit_sum(values[:0]) == 0
    for place in range(13):
        other = values.clone()
        other[place] = values[1 - place % 2]
        assert bit_sum(other) != expected, place
