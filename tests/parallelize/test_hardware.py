"""Options for some GPUs: what is switched on where they are, and why not elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize import hardware
from hetero_strategy.parallelize.hardware import use_async_tp, use_flash

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LAYOUTS = {"vision": ModuleLayout((0, 1), dp_shard=2), "llm": ModuleLayout((0, 1), tp=2)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that is there in name, and the kernels that are activated on it."""
    activated: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    return activated


def test_flash_kernels_are_those_that_torch_knows() -> None:
    assert set(hardware.FLASH) == set(torch.nn.attention.list_flash_attention_impls())


def test_flash_kernels_are_activated_where_they_run(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash(None, GPU)
    assert not gpu
    for name in ("FA3", "FA4"):
        with pytest.raises(ConfigError, match=f"attention='{name}' needs the package flash_attn"):
            use_flash(name, GPU)
    monkeypatch.setattr(hardware, "_installed", lambda package: True)
    use_flash("FA3", GPU)
    assert gpu == ["FA3"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"'FA4' needs GPUs of compute capability 9\.0 or 10\.0, and here is H100"):
        use_flash("FA4", GPU)
    with pytest.raises(ConfigError, match=r"needs GPUs of compute capability 9\.0, and here is cpu; leave it out"):
        use_flash("FA3", CPU)
    with pytest.raises(ConfigError, match="attention='FA5'; use FA3 or FA4, or leave it out"):
        use_flash("FA5", GPU)
    assert gpu == ["FA3"]


def test_async_tensor_parallelism(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "_micro_pipeline_tp", False)
    compiled = {"llm": "inductor"}
    use_async_tp(False, LAYOUTS, {}, CPU)
    refused: tuple[tuple[Any, ...], ...] = (
        ({}, GPU, r"add compile=\['llm'\]"), ({"vision": "inductor"}, GPU, r"add compile=\['llm'\]"),
        ({"llm": "eager"}, GPU, r"add compile=\['llm'\]"), (compiled, CPU, "is cpu; leave it out, or .* tp_chunks"),
    )  # fmt: skip
    for given, device, message in refused:
        with pytest.raises(ConfigError, match=message):
            use_async_tp(True, LAYOUTS, given, device)
    with pytest.raises(ConfigError, match="no module has tp above 1: leave it out"):
        use_async_tp(True, {"vision": LAYOUTS["vision"]}, {"vision": "inductor"}, GPU)
    assert not torch._inductor.config._micro_pipeline_tp
    use_async_tp(True, LAYOUTS, compiled, GPU)
    assert torch._inductor.config._micro_pipeline_tp
