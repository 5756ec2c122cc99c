"""Recompute of all but matmuls gives the gradients of no recompute, and no matmul runs twice."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.transforms import read_transforms
from hetero_strategy.zoo import titan_llama
from tests.cuda.devices import EVERYWHERE
from tests.model.helpers import TITAN, tokens


def gradients(recompute: str | None, device: str) -> tuple[dict[str, torch.Tensor], int]:
    """Of a language model in bf16, and the FLOPs of forward and backward."""
    module = titan_llama(**TITAN | {"n_heads": 2, "n_kv_heads": 2})
    how = read_transforms({"llm": {"recompute": recompute}}).get("llm", {})
    layout = ModuleLayout.from_config("llm", {"ranks": [0]}).resolved()
    parallelize("llm", module, layout, None, torch.device(device), seed=1, transforms=how)
    module.to(torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        module(tokens([40, 24]).to(device)).loss_sum.backward()
    found = {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}
    return found, counter.get_total_flops()


@EVERYWHERE
def test_recompute_of_all_but_matmuls(device: str) -> None:
    (plain, once), (again, flops), (_, twice) = (gradients(way, device) for way in (None, "all but matmuls", "all"))
    assert again.keys() == plain.keys() and len(plain) > 10
    for name, gradient in plain.items():
        assert float((again[name] - gradient).norm()) <= 0.01 * float(gradient.norm()), name
    assert flops == once < twice
