"""FLOPs and memory of mixtures of experts, whose weights are stacks of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.adapter import block_linear_flops
from hetero_strategy.model.read_spec import trained_share
from hetero_strategy.model.spec import KEPT
from hetero_strategy.profiling.activations import activations_of
from hetero_strategy.profiling.stage_memory import features
from hetero_strategy.zoo.hf import HFAdapter
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm

WIDTH, HEADS, EXPERTS, VISITS = 64, 4, 6, 2
SIZES = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_experts_per_tok": VISITS,
    "num_hidden_layers": 2, "vocab_size": 80,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": EXPERTS},
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": EXPERTS, "head_dim": 16},
    "gpt_oss": {"intermediate_size": 48, "num_local_experts": EXPERTS, "head_dim": 16},
}


class Whole(HFAdapter):
    """A transformers model that nothing else is known of."""

    block_list = "model.model.layers"

    def __init__(self, model_type: str) -> None:
        super().__init__()
        config = CONFIG_MAPPING[model_type](**SIZES, **FAMILIES[model_type])
        self.model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        self.config = self.model.config


@pytest.mark.parametrize("model_type", FAMILIES)
def test_flops_of_a_block_are_those_of_the_experts_that_a_row_visits(model_type: str) -> None:
    head = WIDTH // HEADS
    attention = WIDTH * head * (HEADS + 2 + 2 + HEADS)
    experts = VISITS * 3 * WIDTH * 48
    counted = 2 * (attention + EXPERTS * WIDTH + experts)
    assert block_linear_flops(Whole(model_type)).tolist() == [counted, counted]


def test_share_that_trains_counts_experts_as_often_as_a_row_visits_them() -> None:
    module = Whole("mixtral")
    block = module.blocks()["model.model.layers.0"]
    attention, experts = WIDTH * 16 * 12, VISITS * 3 * WIDTH * 48
    router = EXPERTS * WIDTH
    block.requires_grad_(False).get_submodule("mlp.experts").requires_grad_(True)
    assert trained_share(block, module.used_share) == pytest.approx(experts / (attention + experts + router))
    assert trained_share(block) > trained_share(block, module.used_share)


@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_predicted_activations_are_those_that_a_run_keeps(model_type: str) -> None:
    """Experts run on tensors without values, too; of an input that is kept nothing is counted."""
    module = hf_causal_lm(model_type=model_type, **SIZES, **FAMILIES[model_type])
    model = MultimodalModel({"llm": module}, seed=1).train()
    (measured,) = activations_of(model, torch.float32, buckets=True, ways={"llm": {"": ()}})["llm"].blocks.values()
    lengths, kept = np.array([64, 64, 64]), dict[int, torch.Tensor]()
    inputs = module.example(lengths)
    rows = torch.randn(int(lengths.sum()), WIDTH, requires_grad=True)
    stored = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers(), rows)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module.transform(rows, inputs)
    real = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in stored) + rows.nbytes
    predicted = float((measured.kept @ features(inputs.packing)).sum()) + measured.later * len(rows)
    assert out.requires_grad and predicted == pytest.approx(real, rel=0.02)


def test_a_loop_over_experts_is_predicted_by_the_formula() -> None:
    module = hf_causal_lm(model_type="mixtral", **SIZES, **FAMILIES["mixtral"])
    module.model.config._experts_implementation = "eager"
    model = MultimodalModel({"llm": module}, seed=1)
    (predicted,) = activations_of(model, torch.float32, ways={"llm": {"": ()}})["llm"].blocks.values()
    assert predicted.kept[:, 0, 0] == pytest.approx(np.array(KEPT) * WIDTH * 4)
