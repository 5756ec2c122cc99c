"""What a cache of rows is keyed by besides weights: settings of any form."""

from __future__ import annotations

import subprocess
import sys
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


def test_another_process_has_the_same_key() -> None:
    code = "from tests.strategy.test_row_caches import *; print([key(one) for one, _ in OTHERS.values()])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str([key(one) for one, _ in OTHERS.values()])
