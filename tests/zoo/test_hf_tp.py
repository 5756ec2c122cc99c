"""Tensor parallelism by transformers' plans, of transformers' own models and forwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.materialize import materialize
from hetero_strategy.model.tensor_parallel import LocalWeights, by_part, divided_along, plan_faults, style_of
from hetero_strategy.parallelize.apply import check_all
from hetero_strategy.testing import Pool
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from hetero_strategy.zoo.hf_tp import tensor_parallel_faults, tensor_parallel_plan
from tests.parallelize.pieces import MAKE, Piece, run_all, worst
from tests.zoo.families import TINY

QUICK = ("qwen3", "phi3", "qwen3_moe", "deepseek_v2", "llama4_text", "mimo_v2_flash", "glm4_moe")
"""Norms of heads; joined columns that every rank gathers; joined experts; a key of all heads; an addition in place;
sinks of some layers; norms of heads that the plan forgets."""
SLOW = (
    "qwen2",
    "deepseek_v3",
    "gemma3_text",
    "mixtral",
    "olmo2",
    "qwen2_moe",
    "granite",
    "cohere2",
    "laguna",
    "exaone4",
)


NORMS = {"glm4_moe": {"use_qk_norm": True}}
"""Norms of heads that transformers' plan forgets."""


def model_of(model_type: str, **fields: Any) -> Any:
    config = CONFIG_MAPPING[model_type](**TINY[model_type] | NORMS.get(model_type, {}) | fields)
    torch.manual_seed(1)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def faults_of(model_type: str, tp: int, **fields: Any) -> list[str]:
    with torch.device("meta"):
        return faults(model_of(model_type, **fields), tp)


def faults(model: Any, tp: int) -> list[str]:
    blocks = [fqn for fqn, _ in model.named_modules() if fqn.startswith("model.layers.") and fqn.count(".") == 2]
    return tensor_parallel_faults(model, tp) or plan_faults(model, blocks, tensor_parallel_plan(model, "") or {}, tp)


def test_plans_of_families_divide_their_matrices() -> None:
    without = set()
    for model_type in TINY:
        with torch.device("meta"):
            model = model_of(model_type)
        if (plan := tensor_parallel_plan(model, "")) is None:
            without.add(model_type)
            continue
        parts, divided = dict(model.named_modules()), 0
        for fqn, weight in model.named_parameters():
            owner, _, key = fqn.rpartition(".")
            divided += weight.numel() * (divided_along(style_of(plan, owner), parts[owner], key) is not None)
        share = divided / sum(weight.numel() for weight in model.parameters())
        assert share > 0.5, (model_type, share)
        assert not faults(model, 2), (model_type, faults(model, 2))
    assert without >= {"gpt_oss", "stablelm", "hunyuan_v1_dense", "bitnet", "diffllama"}
    assert len(TINY) - len(without) >= 40


def test_heads_and_widths_that_do_not_divide_are_named() -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    assert faults_of("qwen3", 2, **heads) == ["kv heads 3 not divisible by tp 2; set tp=1 or 3"]
    assert faults_of("qwen3", 4, **heads) == [
        "heads 6 not divisible by tp 4; set tp=3",
        "kv heads 3 not divisible by tp 4; set tp=3",
    ]
    assert faults_of("olmo2", 3) and not any("heads" in fault for fault in faults_of("olmo2", 3)), "gathered columns"
    assert "heads 4 not divisible by tp 3; set tp=2 or 4" in faults_of("deepseek_v2", 3)
    (width,) = {f for f in faults_of("mixtral", 2, intermediate_size=49) if "gate_up" in f}
    assert width == "49 numbers in dimension 1 of mlp.experts.gate_up_proj not divisible by tp 2; set tp=1 or 7"
    assert faults_of("gpt_oss", 2) == ["transformers has no plan for GptOssForCausalLM: set tp=1"]


def test_numbers_of_heads_keep_no_model_alive() -> None:
    model = model_of("qwen3")
    alive = weakref.ref(model)
    assert tensor_parallel_faults(model, 2) == []
    del model
    gc.collect()
    assert alive() is None


def test_a_layout_of_a_class_without_a_plan_is_refused() -> None:
    module = hf_causal_lm(model_type="gpt_oss", **TINY["gpt_oss"])
    with pytest.raises(LayoutError, match="layout of 'llm': transformers has no plan for GptOssForCausalLM: set tp=1"):
        check_all({"llm": module}, {"llm": ModuleLayout(ranks=2, tp=2).resolved()})


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Add up the gradients of two microbatches."""
    for seed in (1, 2):
        ids = torch.randint(3, 100, (1, 24), generator=torch.Generator().manual_seed(seed))
        logits = model(input_ids=ids, use_cache=False).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
    grads = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
    return {fqn: g.full_tensor() if isinstance(g, DTensor) else g for fqn, g in grads.items()}


def errors_on_rank(rank: int, world: int, model_types: tuple[str, ...], own: bool) -> dict[str, dict[str, float]]:
    """Gradients of a model over two ranks against one process; ``own``: norms in transformers' own style."""
    mesh, found = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), {}
    for model_type in model_types:
        expected, model = (model_of(model_type, tie_word_embeddings=False) for _ in range(2))
        plan = tensor_parallel_plan(model, "")
        assert plan is not None and not tensor_parallel_faults(model, world)
        styles = by_part(plan, model)
        norms = [n for n, style in styles.items() if own and isinstance(style, LocalWeights) and n.endswith("_norm")]
        for fqn in norms:
            del styles[fqn]
            ALL_PARALLEL_STYLES["replicated_with_grad_allreduce"].install_forward(model.get_submodule(fqn), mesh)
        parallelize_module(model, mesh, styles)
        grads, made = gradients(expected), gradients(model)
        assert made.keys() == grads.keys()
        found[model_type] = {n: float((made[n] - g).abs().max() / g.abs().max()) for n, g in grads.items()}
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("model_types", [QUICK, pytest.param(SLOW, marks=pytest.mark.full)], ids=["quick", "slow"])
def test_gradients_of_two_microbatches_equal_one_process(pool: Pool, model_types: tuple[str, ...]) -> None:
    for found in pool.run(2, errors_on_rank, model_types, False, timeout=300):
        worst = {model_type: max(errors.items(), key=lambda item: item[1]) for model_type, errors in found.items()}
        assert all(error < 1e-5 for _, error in worst.values()), worst


@pytest.mark.distributed
def test_transformers_own_style_of_head_norms_would_be_wrong(pool: Pool) -> None:
    (found, _) = pool.run(2, errors_on_rank, ("qwen3",), True)
    assert {n for n, error in found["qwen3"].items() if error > 1e-3} == {
        n for n in found["qwen3"] if "_norm." in n and "self_attn" in n
    }
    assert found["qwen3"]["model.layers.0.self_attn.q_norm.weight"] == pytest.approx(0.5, abs=0.2)


@pytest.mark.distributed
@pytest.mark.parametrize("other", ["dp_shard", pytest.param("pp", marks=pytest.mark.full)])
def test_experts_are_divided_with_shards_or_stages_and_recompute(pool: Pool, other: str) -> None:
    """Norms of heads and routers compute in fp32, or gradients would be as exact as those of dense models."""
    piece = Piece("hf_moe", {"ranks": 4, other: 2, "tp": 2}, transforms={"recompute": "all"})
    module = MAKE["hf_moe"]()
    materialize(module, 3, name="m")
    values = {n: p.detach().double().numpy() for n, p in module.named_parameters()}
    for results in zip(*pool.run(4, run_all, [piece], timeout=300), strict=True):
        assert worst(results) < 1e-5
        for result in results:
            assert all(np.array_equal(value, values[name]) for name, value in result["values"].items())
        assert set().union(*(result["owned"] for result in results)) == set(values)
