"""Mixtures of experts, whose weights are stacks of matrices: results, FLOPs and memory."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hetero_strategy.errors import LayoutError, ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.adapter import block_linear_flops
from hetero_strategy.model.read_spec import spec_of_module, trained_share
from hetero_strategy.model.spec import KEPT
from hetero_strategy.parallelize.apply import check, check_all
from hetero_strategy.parallelize.experts import expert_faults
from hetero_strategy.parallelize.float8 import Float8
from hetero_strategy.profiling.activations import activations_of
from hetero_strategy.profiling.stage_memory import features
from hetero_strategy.testing.families import tiny_family
from hetero_strategy.zoo.hf import HFAdapter, make_norms_precise
from hetero_strategy.zoo.hf_causal_lm import HFCausalLM, hf_causal_lm
from hetero_strategy.zoo.hf_experts import expert_parts
from hetero_strategy.zoo.hf_mixers import EachSequence, TakesPacking
from hetero_strategy.zoo.hf_shared_experts import SharedMeanwhile
from hetero_strategy.zoo.hf_stand_ins import Joined
from tests.model.helpers import ready, tokens
from tests.zoo.families import TINY

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


def test_queries_have_the_width_of_their_heads() -> None:
    module = hf_causal_lm(model_type="qwen3_moe", **SIZES, **FAMILIES["qwen3_moe"] | {"head_dim": 24})
    assert spec_of_module(module).queries == HEADS * 24 != WIDTH


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
    (measured,) = activations_of(model, torch.float32, ways={"llm": {"": ()}})["llm"].blocks.values()
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
    predicted = float((measured.kept @ features(len(rows))).sum()) + measured.later * len(rows)
    assert out.requires_grad and predicted == pytest.approx(real, rel=0.02)


def test_rows_of_experts_are_apart_from_what_is_inside_their_columns() -> None:
    """Both kept for each visited expert: a row there and back with the choice's number; products of columns."""
    small, large = (
        activations_of(MultimodalModel({"llm": module}).train(), torch.float32, ways={"llm": {"": ()}})["llm"].blocks[
            ""
        ]
        for module in (
            hf_causal_lm(model_type="mixtral", **SIZES, **FAMILIES["mixtral"] | {"intermediate_size": n})
            for n in (48, 96)
        )
    )
    inside, _, _, rows = (large.kept - small.kept)[:, 0, 0]
    assert inside == pytest.approx(VISITS * 4 * 48 * 4) and rows == 0
    assert small.kept[3, 0, 0] == pytest.approx(VISITS * (2 * WIDTH * 4 + 8))
    for ep, share in ((1, 1), (4, 0.5)):
        assert (small.on(2, 1, ep).kept[3] == share * small.kept[3]).all()


def test_a_loop_over_experts_is_predicted_by_the_formula() -> None:
    module = hf_causal_lm(model_type="mixtral", **SIZES, **FAMILIES["mixtral"])
    module.model.config._experts_implementation = "eager"
    model = MultimodalModel({"llm": module}, seed=1)
    (predicted,) = activations_of(model, torch.float32, ways={"llm": {"": ()}})["llm"].blocks.values()
    assert predicted.kept[:, 0, 0] == pytest.approx(np.array(KEPT) * WIDTH * 4)


def experts_of(model_type: str) -> nn.Module:
    """The first experts of a tiny model, in fp64."""
    module = ready(hf_causal_lm(model_type=model_type, **TINY[model_type], check=False), dtype=torch.float64)
    return next(part for part in module.modules() if hasattr(part, "_is_expert_parallel"))


def theirs(module: HFCausalLM) -> Any:
    """The same model with transformers' loops over experts and sequences, in fp64."""
    config = type(module.config)(**module.config.to_dict())
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, **kinds, dtype=torch.float64)
    model.load_state_dict(module.model.state_dict())
    make_norms_precise(model)
    return model.train(module.training)


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-9)) for n in expected)


@pytest.mark.parametrize("way", ["drawn", "all to one", "one without"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "phimoe", "ernie4_5_moe"])
def test_experts_compute_what_those_of_transformers_do(model_type: str, way: str) -> None:
    """Two microbatches; stacks as they are or transposed, joined or interleaved gates, with and without biases."""
    experts: Any = experts_of(model_type)
    count, width = experts.num_experts, experts.config.get_text_config().hidden_size
    run, draw = type(experts), torch.Generator().manual_seed(3)
    results = []
    for implementation in ("eager", "hetero_routed"):
        experts.zero_grad()
        experts.config._experts_implementation_internal = implementation
        found: dict[str, torch.Tensor] = {}
        draw.manual_seed(3)
        for batch, rows in enumerate((17, 5)):
            x = torch.randn(rows, width, generator=draw, dtype=torch.float64, requires_grad=True)
            w = torch.rand(rows, 2, generator=draw, dtype=torch.float64, requires_grad=True)
            chosen = torch.rand(rows, count - 1, generator=draw).topk(2).indices
            chosen = {"drawn": (chosen + 1) % count, "all to one": torch.full_like(chosen, 1), "one without": chosen}[
                way
            ]
            out = run.forward(experts, x, chosen, w)
            out.square().sum().backward()
            found |= {f"out {batch}": out.detach(), f"rows {batch}": x.grad, f"weights {batch}": w.grad}
        results.append(found | {n: p.grad.clone() for n, p in experts.named_parameters()})
    assert worst(results[1], results[0]) < 1e-12
    damaged = results[1] | {"out 0": results[1]["out 0"].roll(1, 0)}
    assert worst(damaged, results[0]) > 1e-2


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_a_mixture_is_that_of_transformers(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients of two microbatches, in fp64: softmax, too, which transformers computes in fp32."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda x, dim=-1, dtype=None, **_: softmax(x, dim))
    module = ready(hf_causal_lm(model_type=model_type, **TINY[model_type], check=False), dtype=torch.float64)
    reference = theirs(module)
    for lengths in ([5, 9, 1], [4, 11]):
        inputs = tokens(lengths)
        loss = module(inputs).loss_sum
        loss.backward()
        alone = [reference(input_ids=ids[None], use_cache=False).logits[0] for ids in inputs.ids.split(lengths)]
        expected = F.cross_entropy(torch.cat(alone), inputs.labels, reduction="sum")
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    own = {n: p.grad for n, p in module.model.named_parameters()}
    assert worst(own, {n: p.grad for n, p in reference.named_parameters()}) < 1e-10


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize(
    ("model_type", "kinds"), [("qwen2_moe", {SharedMeanwhile}), ("jamba", {TakesPacking, EachSequence})]
)
def test_blocks_of_joined_classes_are_copied_and_pickled(
    model_type: str, kinds: set[type], again: Callable[[Any], Any]
) -> None:
    module = ready(hf_causal_lm(model_type=model_type, check=False, **tiny_family(model_type)))
    copied = again(module)
    parts = [[part for part in each.modules() if isinstance(part, Joined)] for each in (module, copied)]
    assert {type(part).__bases__[0] for part in parts[0]} == kinds
    assert [type(part) for part in parts[1]] == [type(part) for part in parts[0]]
    inputs = tokens([5, 9])
    assert torch.equal(copied(inputs).loss_sum, module(inputs).loss_sum)


@pytest.mark.parametrize("implementation", ["batched_mm", "eager"])
def test_another_implementation_of_experts_is_refused(implementation: str) -> None:
    config = CONFIG_MAPPING["mixtral"](**TINY["mixtral"], experts_implementation=implementation)
    with pytest.raises(ModelError, match=rf"layers.0.mlp.experts has .*='{implementation}' in .*leave it out"):
        HFCausalLM(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def test_the_implementation_that_transformers_sets_itself_is_accepted() -> None:
    """In a config that its own model had, with experts and without."""
    for model_type in ("mixtral", "qwen3"):
        config = CONFIG_MAPPING[model_type](**TINY[model_type])
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model_class(config)
        assert config._experts_implementation in ("grouped_mm", "eager")
        HFCausalLM(model_class, config)


@pytest.mark.parametrize(
    ("model_type", "layout", "parts"),
    [
        (
            "mixtral",
            {"ranks": 4, "ep": 4},
            ["ep=4 does not divide the 6 experts", "ep=1 or 2"],
        ),
        ("mixtral", {"ranks": 10, "ep": 2}, ["ep=2 leaves 3 experts", "to 5 ranks", "sizes 64, 96", "set ep=1"]),
        ("qwen3", {"ranks": 2, "ep": 2}, ["ep=2, but HFCausalLM has no experts", "set ep=1"]),
        ("llama4_text", {"ranks": 2, "ep": 2}, ["ep=2, but HFCausalLM has no experts", "set ep=1"]),
    ],
)
def test_layouts_that_do_not_divide_experts_are_refused(
    model_type: str, layout: dict[str, Any], parts: list[str]
) -> None:
    """With all other faults of a layout, before there are processes."""
    fields = SIZES | FAMILIES[model_type] if model_type in FAMILIES else TINY[model_type]
    module = hf_causal_lm(model_type=model_type, check=False, **fields)
    resolved = ModuleLayout.from_config("llm", layout).resolved()
    with pytest.raises(LayoutError) as raised:
        check_all({"llm": module}, {"llm": replace(resolved, split=(9,))})
    first, second = str(raised.value).splitlines()
    assert "split=[9]" in first and second.startswith("layout of 'llm': ")
    assert all(part in second for part in parts), second


def test_a_layout_that_divides_experts_by_expert_need_not_divide_their_columns() -> None:
    fields = TINY["qwen3_moe"] | {"moe_intermediate_size": 27}
    module = hf_causal_lm(model_type="qwen3_moe", check=False, **fields)
    assert any("27 numbers" in fault for fault in check("llm", module, ModuleLayout(2, tp=2).resolved()))
    assert not check("llm", module, ModuleLayout(2, tp=2, ep=2).resolved())


@pytest.mark.parametrize(
    ("model_type", "block", "degrees", "words"),
    [
        ("mixtral", "layers.1.mlp", {"ep": 2}, "ep=2 and tp=1"),
        ("mixtral", "layers.1.mlp", {"tp": 2}, "ep=1 and tp=2"),
        ("llama4_text", "layers.0.feed_forward", {"tp": 2}, "ep=1 and tp=2"),
    ],
)
def test_adapters_around_experts_are_refused_where_experts_are_divided(
    model_type: str, block: str, degrees: dict[str, int], words: str
) -> None:
    """As peft puts them there, in the place of the experts."""
    module = hf_causal_lm(model_type=model_type, check=False, **TINY[model_type])
    owner: Any = module.get_submodule(f"model.model.{block}")
    owner.experts = nn.ModuleDict({"lora_A": nn.Linear(4, 4), "base_layer": owner.experts})
    assert not check("llm", module, ModuleLayout(2).resolved())
    (fault,) = check("llm", module, ModuleLayout(2, **degrees).resolved())
    assert f"{words} divide model.model.{block}.experts.base_layer, but not the adapters of its" in fault
    assert "set ep=1 and tp=1, or leave experts out of target_parameters" in fault


def test_every_layer_of_experts_is_checked() -> None:
    """The first has matrices of another size, which five ranks cannot divide."""
    module = Whole("mixtral").double()
    experts: Any = module.get_submodule("model.model.layers.1.mlp.experts")
    experts.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 100, WIDTH))
    experts.down_proj = nn.Parameter(torch.empty(EXPERTS, 100, WIDTH))
    module.experts = lambda: expert_parts(module)  # type: ignore[method-assign]
    (fault,) = expert_faults(module, ModuleLayout(10, ep=2).resolved())
    assert "layers.0.mlp.experts to 5 ranks" in fault and "sizes 64, 96" in fault


@pytest.mark.parametrize("visits", [5, 0, -1])
@pytest.mark.parametrize("model_type", ["mixtral", "llama4_text", "jetmoe", "aria_text", "deepseek_v3"])
def test_a_row_visits_one_expert_or_more_and_no_more_than_there_are(model_type: str, visits: int) -> None:
    """Also experts that are no stacks, and fields of other names."""
    name = "moe_topk" if model_type == "aria_text" else "num_experts_per_tok"
    match = rf"{name}={visits}, but its routers choose from 4; use a number from 1 to 4|must be less than or equal"
    with pytest.raises(ModelError, match=match):
        hf_causal_lm(model_type=model_type, check=False, **{**tiny_family(model_type), name: visits})


def test_groups_of_experts_are_as_many_as_there_are() -> None:
    with pytest.raises(ModelError, match=r"topk_group=3, but its routers choose from 2; use a number from 1 to 2"):
        hf_causal_lm(model_type="deepseek_v3", check=False, **tiny_family("deepseek_v3") | {"topk_group": 3})


def test_a_number_of_experts_that_a_router_ignores_is_refused() -> None:
    with pytest.raises(ModelError, match=r"num_experts_per_tok=3, but model.layers.0.mlp.router chooses 2; set that"):
        hf_causal_lm(model_type="phimoe", check=False, **TINY["phimoe"] | {"num_experts_per_tok": 3})


def test_flops_are_of_the_experts_that_a_row_visits_in_each_layer() -> None:
    """Numbers of experts by layer, as in Hunyuan-A13B, and a field of another name."""
    fields = tiny_family("hunyuan_v1_moe") | {"num_experts": 4, "moe_topk": [1, 2, 3, 4]}
    module = hf_causal_lm(model_type="hunyuan_v1_moe", check=False, **fields)
    assert np.diff(block_linear_flops(module)).tolist() == [2 * 3 * 64 * 96] * 3
    one, two = (
        block_linear_flops(hf_causal_lm(model_type="aria_text", check=False, **tiny_family("aria_text"), moe_topk=n))
        for n in (1, 2)
    )
    assert (two > one).all()


def test_heads_may_have_a_width_that_the_config_has_no_field_for() -> None:
    """Qwen3-30B-A3B's have twice the usual one. A family that would not read it refuses it."""
    module = hf_causal_lm(model_type="qwen3_moe", check=False, **TINY["qwen3_moe"] | {"head_dim": 24})
    attention: Any = module.model.model.layers[0].self_attn
    assert attention.q_proj.out_features == 24 * module.config.num_attention_heads
    with pytest.raises(ModelError, match=r"unknown field \['head_dim'\]: StableLmConfig"):
        hf_causal_lm(model_type="stablelm", check=False, **TINY["stablelm"] | {"head_dim": 24})


def test_float8_is_refused_with_experts_on_several_ranks() -> None:
    fault, *_ = Float8().faults(Whole("mixtral"), ModuleLayout(2, ep=2), {})
    assert "ep=2" in fault and "leave it out" in fault


@pytest.mark.parametrize(
    ("left_out", "fields", "parts"),
    [
        (
            "experts.3.w2",
            {},
            ["experts.down_proj", "(5, 64, 48)", "(6, 64, 48), as there is no", ".3.w2.weight"],
        ),
        ("", {"num_local_experts": 8}, ["layers.0.mlp.gate.weight", "(6, 64)", "(8, 64)", "do not belong together"]),
    ],
)
def test_a_folder_with_other_experts_is_refused(
    tmp_path: Path, left_out: str, fields: dict[str, Any], parts: list[str]
) -> None:
    config = CONFIG_MAPPING["mixtral"](**SIZES, **FAMILIES["mixtral"])
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(tmp_path)
    weights, stored = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {n: t for n, t in load_file(weights).items() if not left_out or left_out not in n or "layers.1" in n}
    save_file(tensors, weights, {"format": "pt"})
    stored.write_text(json.dumps(json.loads(stored.read_text()) | fields))
    with pytest.raises(ModelError) as raised:
        ready(hf_causal_lm(checkpoint=tmp_path, check=False))
    assert all(part in str(raised.value) for part in parts), raised.value
