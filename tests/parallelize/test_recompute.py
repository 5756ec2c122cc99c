"""Recompute keeps what goes into a block in place of what happens inside it."""

from __future__ import annotations

import torch

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.zoo import titan_llama
from tests.model.helpers import TITAN, tokens


def kept(recompute: bool) -> int:
    """Bytes that a forward keeps for its backward, weights left out."""
    module = titan_llama(**TITAN | {"n_layers": 4})
    layout = ModuleLayout.from_config("llm", {"ranks": [0]}).resolved()
    parallelize("llm", module, layout, None, torch.device("cpu"), seed=1, recompute=recompute)
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
    assert kept(True) < 0.5 * kept(False)
