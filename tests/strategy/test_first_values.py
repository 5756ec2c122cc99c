"""Ready modules whose values differ between ranks are refused before they are trained apart."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model import Encoder, Projector
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.strategy.first_values import bit_sum, digest, refuse_different


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
