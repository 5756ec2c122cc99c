"""What a cache of rows is keyed by besides weights: settings of any form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetero_strategy.model.encoder import Encoder
from hetero_strategy.strategy.row_caches import _structure


class Layer(Enum):
    LAST = -1
    SECOND_TO_LAST = -2


@dataclass(slots=True)
class Config:
    layer: Layer = Layer.LAST
    scale: float = 1.0
    more: dict[str, Any] = field(default_factory=lambda: {"means": (0.5, 0.5), "norm": nn.functional.layer_norm})


class Own(nn.Module):
    """A backbone of one's own, whose setting is no part of it."""

    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.setting = setting

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.layer(inputs.payload)


def key(setting: Any) -> list[Any]:
    return list(_structure(Encoder(Own(setting), nn.Linear(2, 2), width=2)))


CONFIG = Config()
OTHERS = {
    "enum": (CONFIG, replace(CONFIG, layer=Layer.SECOND_TO_LAST)),
    "dict": (CONFIG, replace(CONFIG, more={**CONFIG.more, "means": (0.5, 0.4)})),
    "function": (CONFIG, replace(CONFIG, more={**CONFIG.more, "norm": nn.functional.rms_norm})),
    "number": (1, -1),
    "none": (None, 0),
    "set": ({"a", "b", "c"}, {"a", "b"}),
    "dtype": (torch.float32, torch.bfloat16),
    "tensor": (torch.zeros(2), torch.ones(2)),
    "array": (np.zeros(2), np.ones(2)),
    "partial": (partial(torch.mean, dim=0), partial(torch.mean, dim=1)),
    "class": (nn.GELU, nn.SiLU),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_setting_is_another_key(case: str) -> None:
    one, other = map(key, OTHERS[case])
    assert one != other and one == key(OTHERS[case][0])


SAID_OF_CONFIG = (
    r"""Config([("'layer'", '<Layer.LAST: -1>'), ("'more'", '[("\'b\'", \'torch.nn.modules.dropout.Dropout\')]')"""
)
SAID_OF_CONFIG += """, ("'scale'", '1.0')])"""
SAID = {
    "config": (Config(more={"b": nn.Dropout}), SAID_OF_CONFIG),
    "set": ({"c", "a", "b"}, """["'a'", "'b'", "'c'"]"""),
    "function": (nn.functional.layer_norm, "torch.nn.functional.layer_norm"),
    "dtype": (torch.float32, "torch.float32"),
    "array": (np.zeros(2), "float64 [0.0, 0.0]"),
    "class": (nn.GELU, "torch.nn.modules.activation.GELU"),
}


@pytest.mark.parametrize("case", SAID)
def test_another_process_has_the_same_key(case: str) -> None:
    """Word by word, so without hashes, which every process salts anew, and without addresses."""
    setting, said = SAID[case]
    own, linear = key(setting)
    assert own == ("", f"{__name__}.Own", [f"setting={said}"])
    assert linear == ("layer", "torch.nn.modules.linear.Linear", ["in_features=2", "out_features=2"])


def test_no_key_has_an_address_or_the_order_of_a_set() -> None:
    assert not any("0x" in str(key(setting)) for settings in OTHERS.values() for setting in settings)
    assert list({0, 8}) != list({8, 0}) and key({0, 8}) == key({8, 0})
