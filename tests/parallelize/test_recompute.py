"""Recompute keeps what goes into a block in place of what happens inside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import fake_world
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.recompute import Recompute, apply_recompute
from hetero_strategy.parallelize.transforms import decoupled, read_transforms
from hetero_strategy.zoo import hf_llama, titan_llama
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from tests.model.helpers import LLAMA, TITAN, ready, tokens
from tests.parallelize.pieces import EXPERTS


def made(recompute: str | None) -> Adapter:
    module = titan_llama(**TITAN | {"n_layers": 4})
    layout, how = ModuleLayout((0,)).resolved(), read_transforms({"llm": {"recompute": recompute}})
    parallelize("llm", module, layout, None, torch.device("cpu"), seed=1, transforms=how.get("llm", {}))
    return module


def kept(recompute: str | None) -> int:
    """Bytes that a forward keeps for its backward, weights left out."""
    module = made(recompute)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = tokens([40, 24])
    assert isinstance(inputs, SequenceInputs)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(inputs).loss_sum.backward()
    return sum(seen.values())


def test_a_recomputed_block_keeps_its_input_alone() -> None:
    whole, none = kept(None), kept("all")
    assert none < 0.5 * whole
    for way, share in (("every 2", 0.5), ("every 4", 0.75)):
        assert kept(way) == pytest.approx(none + share * (whole - none), rel=0.02)


def flops(recompute: str | None) -> int:
    """Of the matrix products of forward and backward."""
    module = made(recompute)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(tokens([40, 24])).loss_sum.backward()
    return counter.get_total_flops()


def test_what_is_kept_does_not_run_again() -> None:
    plain, again = flops(None), flops("all")
    assert again > plain == flops("all but matmuls")
    assert flops("every 2") == pytest.approx((plain + again) / 2, rel=0.01)


class Calls(TorchDispatchMode):
    """Counts the calls of operators whose names begin so."""

    def __init__(self, *begins: str) -> None:
        super().__init__()
        self.begins, self.count = begins, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith(self.begins)
        return func(*args, **(kwargs or {}))


def products_of_experts(recompute: str | None, dtype: torch.dtype) -> int:
    """Grouped products of a mixture's backward."""
    module = ready(hf_causal_lm(model_type="qwen3_moe", check=False, **LLAMA | EXPERTS), dtype=dtype)
    if how := Recompute.of(recompute):
        apply_recompute(module.blocks().values(), how)
    loss = module(tokens([40, 24])).loss_sum
    with Calls("aten::_grouped_mm", "transformers::grouped_mm_fallback") as products:
        loss.backward()
    return products.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_experts_do_not_run_again(dtype: torch.dtype) -> None:
    """torch's kernel, and transformers' operator for the dtypes that it lacks."""
    plain, again = (products_of_experts(way, dtype) for way in (None, "all"))
    assert again > plain == products_of_experts("all but matmuls", dtype)


def sums_of_backward(make: Callable[[], Adapter], recompute: str | None) -> int:
    module, how = make(), read_transforms({"llm": {"recompute": recompute}}).get("llm", {})
    layout = ModuleLayout.from_config("llm", {"ranks": [0, 1], "tp": 2}).resolved()
    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
        parallelize("llm", module, layout, mesh, torch.device("cpu"), seed=1, transforms=how)
        loss = module(tokens([40, 24])).loss_sum
        with Calls("_c10d_functional::reduce_scatter", "_c10d_functional::all_reduce") as sums:
            loss.backward()
    return sums.count


MAKES = (lambda: titan_llama(**TITAN | {"n_layers": 1}), lambda: hf_llama(**LLAMA | {"num_hidden_layers": 1}))


@pytest.mark.parametrize("make", MAKES, ids=["titan", "hf"])
def test_what_tensor_parallelism_sums_is_kept_with_the_matmuls(make: Callable[[], Adapter]) -> None:
    plain, again = (sums_of_backward(make, way) for way in (None, "all"))
    assert again > plain == sums_of_backward(make, "all but matmuls")


def test_decoupled_modules_run_again_as_a_whole_and_nothing_else_of_them_is_asked_for() -> None:
    llm, whole = {"llm": {"recompute": Recompute()}}, {"recompute": Recompute(whole=True)}
    assert decoupled(llm, "decoupled", ["vision"]) == {**llm, "vision": whole}
    assert decoupled(llm, "fine", ["vision"]) == llm
    assert decoupled({"vision": whole}, "decoupled", ["vision"]) == {"vision": whole}
    with pytest.raises(ConfigError, match="recompute of 'vision' is 'every 2', but with fill='decoupled' its whole"):
        decoupled({"vision": {"recompute": Recompute(2)}}, "decoupled", ["vision"])


def test_the_kernel_for_packed_rows_is_kept_too() -> None:
    """It is unknown to torch until its file is imported, which nothing else here does."""
    code = "from hetero_strategy.parallelize.recompute import MATMULS; print(*MATMULS)"
    known = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "_varlen_attn" in known and "aten.mm" in known
