from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from hetero_strategy.monitor.flops import ModuleFlops, Part, device_peak_flops, utilization, work
from hetero_strategy.planner.layers import fed_by_trainable


@pytest.mark.parametrize(
    ("trainable", "upstream", "recomputed", "model", "hardware"),
    [
        (True, False, False, 300, 300),
        (True, True, False, 300, 300),
        (False, True, False, 200, 200),  # only the gradient of the rows
        (False, False, False, 100, 100),  # no backward at all
        (True, False, True, 300, 400),
        (False, True, True, 200, 300),
        (False, False, True, 100, 100),  # no backward, so nothing is recomputed
    ],
)
def test_backward_and_recompute(
    trainable: bool, upstream: bool, recomputed: bool, model: float, hardware: float
) -> None:
    assert work([Part(100, trainable, recomputed)], upstream) == ModuleFlops(model, hardware)


def test_parts_feed_each_other() -> None:
    frozen, trained = Part(1000, False), Part(10, True)
    assert work([frozen, trained], upstream=False).model == 1000 + 30
    assert work([trained, frozen], upstream=False).model == 30 + 2000
    assert work([frozen, trained], upstream=True).model == 2000 + 30


def test_trainability_travels_along_paths() -> None:
    trainable = {"llm": False, "generator": False, "vision": True, "audio": False}
    edges = [("llm", "generator"), ("vision", "llm"), ("audio", "llm")]  # in no useful order
    assert fed_by_trainable(trainable, edges) == {"llm": True, "generator": True, "vision": False, "audio": False}
    assert not any(fed_by_trainable({**trainable, "vision": False}, edges).values())


def test_utilization_on_hand_numbers() -> None:
    # 8 devices of 100 TFLOP/s in 2 s could do 1.6e15 FLOPs
    assert utilization(4e14, 2.0, 8, 100e12) == pytest.approx(0.25)


def test_peak_is_known_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_peak_flops(torch.device("cpu")) is None
    table = SimpleNamespace(get_peak_flops=lambda name: 989e12 if "H100" in name else 312e12)
    monkeypatch.setitem(sys.modules, "torchtitan.tools.utils", table)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torchtitan.tools", SimpleNamespace(utils=table))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torchtitan", SimpleNamespace(tools=None))  # type: ignore[arg-type]
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert device_peak_flops(torch.device("cuda", 0)) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.warns(UserWarning, match="Some GPU is not known"):
        assert device_peak_flops(torch.device("cuda", 0)) is None
