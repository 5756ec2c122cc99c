from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import Siglip2VisionConfig, Siglip2VisionModel

from hetero_strategy.errors import ModelError
from hetero_strategy.model import Encoder, MultimodalModel, Projector
from hetero_strategy.model.encoder import Backbone
from hetero_strategy.model.materialize import initial_units, materialize, unit_tensors
from hetero_strategy.model.without_values import models_without_values, nothing_lost
from hetero_strategy.strategy.assembly import find_model
from hetero_strategy.zoo import hf_llama, hf_qwen3, siglip2_encoder, titan_llama, whisper_encoder
from hetero_strategy.zoo.titan import _titan
from tests.model.helpers import LLAMA, TITAN, VIT, WHISPER, clips, images

MAKERS = {
    "siglip2": lambda: siglip2_encoder(out_width=8, **VIT),
    "whisper": lambda: whisper_encoder(out_width=8, **WHISPER),
    "titan": lambda: titan_llama(**TITAN),
    "llama": lambda: hf_llama(**LLAMA),
    "qwen3": lambda: hf_qwen3(**LLAMA, head_dim=4),
}


def values(make, seed=0, name="m"):
    return dict(initial_units(name, make(), seed))


@pytest.mark.parametrize("kind", MAKERS)
def test_only_what_is_wanted_is_made(kind):
    adapter = MAKERS[kind]()
    everything, units = values(MAKERS[kind]), unit_tensors(adapter)
    prefix, fqns = list(units.items())[-1]
    found = dict(initial_units("m", adapter, 0, {fqns[0]: {}}))
    assert prefix and found.keys() == {fqns[0]}
    assert torch.equal(found[fqns[0]], everything[fqns[0]])
    assert dict(initial_units("m", adapter, 0, {})) == {}


@pytest.mark.parametrize("kind", MAKERS)
def test_same_seed_same_values_and_every_tensor_once(kind):
    adapter = MAKERS[kind]()
    assert all(p.is_meta for p in adapter.parameters())
    first = list(initial_units("m", adapter, 0))
    names = [fqn for fqn, _ in first]
    expected = [fqn for fqn, _ in [*adapter.named_parameters(), *adapter.named_buffers()]]
    assert sorted(names) == sorted(expected) and len(set(names)) == len(names)
    torch.manual_seed(123)  # the process's random state is neither read nor moved
    state = torch.get_rng_state()
    second = values(MAKERS[kind])
    assert torch.equal(torch.get_rng_state(), state)
    for fqn, value in first:
        assert torch.equal(value, second[fqn]), fqn
        assert value.isfinite().all()
    for other in (values(MAKERS[kind], seed=1), values(MAKERS[kind], name="other")):
        weights = [
            fqn for fqn, value in first if value.ndim == 2 and not fqn.endswith(("embed_positions.weight", "freqs_cis"))
        ]
        assert weights and all(not torch.equal(other[fqn], second[fqn]) for fqn in weights)


@pytest.mark.parametrize("kind", MAKERS)
def test_does_not_depend_on_what_became_of_the_module(kind):
    """A rank that was sharded, cut into stages or cast still makes the same full values."""
    expected = values(MAKERS[kind])
    with torch.device("meta"):
        adapter = MAKERS[kind]()
        adapter.meta_copy()
        for _, block in list(adapter.blocks().items())[:1]:
            block.to_empty(device="cpu")
            del block._modules[next(iter(block._modules))]
        made = dict(initial_units("m", adapter, 0))
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[fqn], value) and value.device.type == "cpu" for fqn, value in expected.items())


def test_dtype_only_rounds():
    expected = values(MAKERS["titan"])
    torch.set_default_dtype(torch.bfloat16)
    try:
        adapter = MAKERS["titan"]()
    finally:
        torch.set_default_dtype(torch.float32)
    made = dict(initial_units("m", adapter, 0))
    assert made["model.norm.weight"].dtype == torch.bfloat16 and made["model.freqs_cis"].dtype == torch.complex64
    assert all(torch.equal(made[fqn], value.to(made[fqn].dtype)) for fqn, value in expected.items())


def test_blocks_differ_and_units_partition():
    adapter = hf_llama(**LLAMA | {"num_hidden_layers": 12})
    units = unit_tensors(adapter)
    assert len(units) == 13
    assert all(fqn.startswith("model.model.layers.1.") for fqn in units["model.model.layers.1"])
    assert not any("layers" in fqn for fqn in units[""])
    made = values(lambda: adapter)
    a, b = (made[f"model.model.layers.{i}.mlp.up_proj.weight"] for i in (1, 10))
    assert not torch.equal(a, b)


def test_transformers_rules_are_followed():
    wide = VIT | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    made = values(lambda: siglip2_encoder(out_width=8, **wide))
    start = "backbone.model."
    weight = made[start + "encoder.layers.0.self_attn.q_proj.weight"]  # xavier uniform
    bound = math.sqrt(6 / 512)
    assert weight.abs().max() <= bound and weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert (made[start + "encoder.layers.0.self_attn.q_proj.bias"] == 0).all()
    assert made[start + "encoder.layers.1.mlp.fc1.bias"].std().item() == pytest.approx(1e-6, rel=0.2)
    assert made[start + "embeddings.position_embedding.weight"].std().item() == pytest.approx(1 / 16, rel=0.1)
    assert (made[start + "post_layernorm.weight"] == 1).all()
    made = values(lambda: hf_llama(**LLAMA | {"hidden_size": 128, "initializer_range": 0.05}))
    assert made["model.model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.05, rel=0.03)
    assert made["model.model.embed_tokens.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    assert (made["model.model.norm.weight"] == 1).all()


def test_whisper_positions_are_sinusoids_and_frozen():
    from transformers.models.whisper.modeling_whisper import sinusoids

    adapter = MAKERS["whisper"]()
    made = values(lambda: adapter)
    assert torch.equal(made["backbone.model.embed_positions.weight"], sinusoids(12, 16))
    materialize(adapter, 0)
    assert not adapter.backbone.model.embed_positions.weight.requires_grad
    assert adapter.backbone.model.conv1.weight.requires_grad


def test_titan_rules_are_followed():
    made = values(lambda: titan_llama(**TITAN | {"dim": 256, "n_layers": 3}))
    assert made["model.layers.0.attention.wq.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    for layer in (0, 2):  # deeper blocks start smaller
        std = 0.02 / (2 * (layer + 1)) ** 0.5
        assert made[f"model.layers.{layer}.attention.wo.weight"].std().item() == pytest.approx(std, rel=0.03)
    assert made["model.tok_embeddings.weight"].std().item() == pytest.approx(1.0, rel=0.03)
    assert made["model.output.weight"].abs().max() <= 3 / 16
    assert made["model.output.weight"].std().item() == pytest.approx(1 / 16, rel=0.05)
    reference = _titan().Transformer(titan_llama(**TITAN).args)
    assert torch.equal(values(MAKERS["titan"])["model.freqs_cis"], reference.freqs_cis)


def test_rotary_frequencies_are_right():
    from transformers import LlamaConfig, LlamaForCausalLM

    expected = dict(LlamaForCausalLM(LlamaConfig(**LLAMA)).named_buffers())
    made = values(MAKERS["llama"])
    assert expected and all(torch.equal(made["model." + name], value) for name, value in expected.items())


class Plain(nn.Module):
    def __init__(self, forgotten=False):
        super().__init__()
        self.linear = nn.Linear(12, 16)
        if forgotten:
            self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs):
        return self.linear(inputs.values.to(self.linear.weight.dtype))


def test_plain_modules_and_a_parameter_nothing_initialises():
    encoder = Encoder(Plain, lambda: Projector(16, 8))
    materialize(encoder, 0, name="vision")
    assert encoder.backbone.linear.weight.abs().max() <= 1 / math.sqrt(12)
    assert (encoder.projector.norm.weight == 1).all()
    assert encoder(images([(2, 2)])).shape == (4, 8)
    with pytest.raises(ModelError, match=r"vision: nothing initialises backbone.scale \(16,\)"):
        materialize(Encoder(lambda: Plain(forgotten=True), lambda: Projector(16, 8)), 0, name="vision")


class Checkpointing(Plain):
    def checkpoint(self):
        """As some models call what recomputes their activations."""


def test_a_method_of_a_backbone_is_no_folder():
    encoder = Encoder(Checkpointing, lambda: Projector(16, 8))
    materialize(encoder, 0, name="vision")
    assert encoder.checkpoint is None and encoder(images([(2, 2)])).shape == (4, 8)


def test_a_ready_backbone_keeps_its_values():
    backbone = Plain(forgotten=True)
    weight = backbone.linear.weight.detach().clone()
    model = MultimodalModel({"vision": Encoder(backbone, Projector(16, 16)), "llm": hf_llama(**LLAMA)})
    assert torch.equal(model.vision.backbone.linear.weight, weight)
    assert not any(p.is_meta for p in model.parameters())
    assert torch.equal(dict(initial_units("vision", model.vision, 0))["backbone.linear.weight"], weight)


def test_under_a_meta_device_nothing_is_materialised():
    modules = lambda: {"audio": whisper_encoder(out_width=16, **WHISPER), "llm": hf_llama(**LLAMA)}  # noqa: E731
    with torch.device("meta"):
        model = MultimodalModel(modules(), seed=3)
    assert all(p.is_meta for p in model.parameters())
    materialize(model, 3)
    real = MultimodalModel(modules(), seed=3)
    for (name, a), (_, b) in zip(model.state_dict().items(), real.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert model.audio(clips([5])).shape == (3, 16)


def test_twins_are_no_submodules_and_cost_nothing():
    model = MultimodalModel({"llm": hf_llama(**LLAMA)})
    assert all(p.is_meta for p in model.llm.meta_copy().parameters())
    assert not any("meta_copy" in name for name, _ in model.named_modules())
    assert set(model.state_dict()) == {"llm." + name for name, _ in model.llm.named_parameters()}


class Own(Backbone):
    """A person's adapter that does not think of the meta device."""

    hidden_width = width = 16

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 16)


def test_models_without_values_leave_values_to_all_else():
    with models_without_values():
        beside, ready = torch.full((2,), 3.0), Plain()
        encoders = {"own": Own(), "made": Plain, "ready": ready}
        modules = {name: Encoder(backbone, Projector(16, 16)) for name, backbone in encoders.items()}
        model = MultimodalModel({**modules, "llm": hf_llama(**LLAMA)})
    given = {f"ready.backbone.linear.{name}" for name in ("weight", "bias")}
    assert {name for name, p in model.named_parameters() if not p.is_meta} == given
    assert model.ready.backbone is ready and beside.tolist() == [3.0, 3.0]


def test_values_of_a_persons_adapter_follow_from_the_seed_alone():
    def model(process_seed):
        torch.manual_seed(process_seed)
        return MultimodalModel({"own": Encoder(Own(), Projector(16, 16)), "llm": hf_llama(**LLAMA)}, seed=5)

    one, other = model(1).state_dict(), model(2).state_dict()
    assert one["own.backbone.linear.weight"].std() > 0
    assert all(torch.equal(value, other[name]) for name, value in one.items())


class Loading(Backbone):
    """Loads what it was trained to before, as a person's module may in its constructor."""

    hidden_width = width = 16
    loaded: ClassVar = {"weight": torch.ones(16, 12), "bias": torch.ones(16)}

    def __init__(self, **options):
        super().__init__()
        self.linear = nn.Linear(12, 16)
        self.linear.load_state_dict(self.loaded, **options)


class FromPretrained(Backbone):
    hidden_width = width = 16

    def __init__(self, folder):
        super().__init__()
        self.vision = Siglip2VisionModel.from_pretrained(folder)


def test_weights_that_are_loaded_into_the_meta_device_are_missed(tmp_path):
    with pytest.raises(ModelError, match=r"^weight: weights are loaded .*assign=True"):
        Encoder(Loading, Projector(16, 16))
    ready = Encoder(Loading(assign=True), Projector(16, 16))
    model = MultimodalModel({"own": ready, "llm": hf_llama(**LLAMA)})
    assert bool((model.own.backbone.linear.weight == 1).all())
    with pytest.raises(ModelError, match="would be lost"), models_without_values(), nothing_lost():
        MultimodalModel({"llm": hf_llama(**LLAMA)}).llm.model.lm_head.load_state_dict({"weight": torch.ones(40, 16)})
    Siglip2VisionModel(Siglip2VisionConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match=r"from_pretrained\(\) is called in a constructor"):
        FromPretrained(tmp_path)


class Masked(nn.Module):
    """Buffers of which every value means something; without ``fills`` nothing fills them."""

    width = hidden_width = 16

    def __init__(self, *names):
        super().__init__()
        self.fills = names
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("table", torch.arange(4, dtype=torch.uint8))

    def reset_parameters(self):
        if "mask" in self.fills:
            self.mask = torch.ones(3, 3, dtype=torch.bool).tril()
        if "table" in self.fills:
            self.table.copy_(torch.arange(4))


def test_masks_and_tables_of_small_numbers_are_filled_or_missed():
    def model(*names):
        return MultimodalModel(
            {"own": Encoder(lambda: Masked(*names), Projector(16, 16)), "llm": hf_llama(**LLAMA)}
        ).own.backbone

    filled = model("mask", "table")
    assert filled.mask.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert filled.table.tolist() == [0, 1, 2, 3]
    for names, missed in ((("mask",), "table"), (("table",), "mask")):
        with pytest.raises(ModelError, match=f"nothing initialises backbone.{missed}"):
            model(*names)


@pytest.mark.parametrize("change", ["buffer", "parameter", "wrapped", "resized"])
def test_what_is_changed_after_the_model_was_made_is_missed(change):
    """Nothing would fill it: it is not in the copy that says which values there are."""
    with models_without_values():
        model = MultimodalModel({"own": Encoder(Own(), Projector(16, 16)), "llm": hf_llama(**LLAMA)})
        backbone = model.own.backbone
        find_model(model, bool)
        if change == "buffer":
            backbone.register_buffer("scale", torch.ones(3))
        elif change == "parameter":
            backbone.more = nn.Parameter(torch.empty(3, device="meta"))
        elif change == "wrapped":
            backbone.linear = nn.Sequential(backbone.linear)
        else:
            backbone.linear = nn.Linear(12, 17, device="meta")
    says = "module 'own': backbone.* was added or given another shape after its model was made"
    with pytest.raises(ModelError, match=says):
        find_model(model, bool)
    with pytest.raises(ModelError, match=says):
        materialize(model, 0)
