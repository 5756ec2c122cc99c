"""Options for some GPUs: what is switched on where they are, and why not elsewhere."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as memory
from torch.torch_version import TorchVersion

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize import kernels
from hetero_strategy.parallelize.kernels import async_tp, use_async_tp, use_flash
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.zoo import hf_llama, titan_llama
from tests.distributed.harness import Pool

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that is there in name, and the kernels that are activated on it."""
    activated: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    return activated


def test_flash_kernels_are_those_that_torch_knows() -> None:
    assert set(kernels.FLASH) == set(torch.nn.attention.list_flash_attention_impls())


def test_flash_kernels_are_activated_where_they_run(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash(None, GPU)
    assert not gpu
    for name in ("FA3", "FA4"):
        with pytest.raises(ConfigError, match=f"attention='{name}' needs the package flash_attn"):
            use_flash(name, GPU)
    monkeypatch.setattr(kernels, "_installed", lambda package: True)
    use_flash("FA3", GPU)
    assert gpu == ["FA3"]
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(ConfigError, match=r"'FA4' trains with torch 2\.13 or newer, and here is 2\.11\.0\+cu130"):
        use_flash("FA4", GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"'FA4' needs GPUs of compute capability 9\.0 or 10\.0, and here is H100"):
        use_flash("FA4", GPU)
    with pytest.raises(ConfigError, match=r"needs GPUs of compute capability 9\.0, and here is cpu; leave it out"):
        use_flash("FA3", CPU)
    with pytest.raises(ConfigError, match="attention='FA5'; use FA3 or FA4, or leave it out"):
        HeteroStrategy(attention="FA5")  # before processes start
    assert gpu == ["FA3"]


def test_async_tensor_parallelism_is_for_compiled_modules_with_parts_of_rows() -> None:
    small = {"vocab_size": 64, "dim": 32, "n_layers": 1, "n_heads": 4, "multiple_of": 16, "max_seq_len": 64}
    llm, vision = titan_llama(**small), hf_llama(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )  # fmt: skip
    modules: dict[str, Any] = {"vision": vision, "llm": llm}
    layouts = {name: ModuleLayout((0, 1), tp=2) for name in modules}
    assert async_tp(False, modules, layouts, {}, CPU) == []
    both = {"llm": "inductor", "vision": "inductor"}
    assert async_tp(True, modules, layouts, both, GPU) == ["llm"]
    for given in ({}, {"vision": "inductor"}, {"llm": "eager"}):
        with pytest.raises(ConfigError, match=r"parts of the rows; add compile=\['llm'\]"):
            async_tp(True, modules, layouts, given, GPU)
    for other in ({"dp_shard": 2}, {"dp_shard": 1, "cp": 2}):
        with pytest.raises(ConfigError, match=r"here are none, such as titan_llama with tp above 1: leave it out"):
            async_tp(True, modules, layouts | {"llm": ModuleLayout((0, 1), **other)}, both, GPU)
    with pytest.raises(ConfigError, match=r"here is cpu; leave it out, or cut .* tp_chunks"):
        async_tp(True, modules, layouts, both, CPU)


def shared(rank: int, world: int) -> tuple[bool, bool]:
    """Whether the compiler is told, and whether it fuses in a group: what torch's own pass asks."""
    torch._inductor.config._micro_pipeline_tp = False
    use_async_tp([])
    before = torch._inductor.config._micro_pipeline_tp
    group = dist.new_group([0, 1])
    with patch.object(memory._SymmetricMemory, "set_group_info"):  # memory is shared by GPUs alone
        use_async_tp([group])
    after = torch._inductor.config._micro_pipeline_tp and memory.is_symm_mem_enabled_for_group(group.group_name)
    torch._inductor.config._micro_pipeline_tp = False
    return before, after


def test_the_compiler_fuses_in_these_groups(pool: Pool) -> None:
    assert pool.run(2, shared, timeout=60) == [(False, True)] * 2
