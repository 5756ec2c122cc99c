"""What is written on a parameter survives its replacement, and what cannot survive is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetero_strategy.errors import ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import Encoder, Projector
from hetero_strategy.model.materialize import materialize
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.traits import Traits, check_traits


def marked() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.weight.lr_scale = 0.1  # type: ignore[assignment]
    linear.bias.requires_grad_(False)
    return linear


def encoder() -> Encoder:
    with torch.device("meta"):
        return Encoder(marked, Projector(4, 4))


def one_rank(module: Encoder) -> None:
    layout = ModuleLayout.from_config("vision", {"ranks": [0]}).resolved()
    parallelize("vision", module, layout, None, torch.device("cpu"), seed=1)


@pytest.mark.parametrize("under", ["strategy", "auto"])
def test_attributes_and_frozen_parameters_survive(under: str) -> None:
    module = encoder()
    one_rank(module) if under == "strategy" else materialize(module, 1, device=torch.device("cpu"))
    weight, bias = module.get_parameter("backbone.weight"), module.get_parameter("backbone.bias")
    assert not weight.is_meta and weight.lr_scale == 0.1 and weight.requires_grad and not bias.requires_grad


def test_a_hook_that_would_be_lost_is_an_error() -> None:
    module = encoder()
    module.get_parameter("backbone.weight").register_hook(lambda grad: grad * 2)
    with pytest.raises(ModelError, match=r"module 'vision': hooks of parameter 'backbone\.weight' was True and is Fal"):
        one_rank(module)


@pytest.mark.parametrize("trait", ["requires_grad", "dtype", "shape"])
def test_any_other_difference_is_an_error(trait: str) -> None:
    before = {"w": Traits.of(nn.Parameter(torch.zeros(2, 3)))}
    other = {
        "requires_grad": nn.Parameter(torch.zeros(2, 3), False),
        "dtype": nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)),
        "shape": nn.Parameter(torch.zeros(3, 2)),
    }
    with pytest.raises(ModelError, match=f"{trait} of parameter 'w'"):
        check_traits("llm", before, {"w": other[trait]})
