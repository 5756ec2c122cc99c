"""Towers of transformers as encoders: the rows of its own eager forward, in stages, with zero items, from folders."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.encoder import Encoder
from hetero_strategy.model.inputs import EncoderInputs, Packing
from hetero_strategy.model.materialize import materialize
from hetero_strategy.model.read_spec import in_no_stage
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.profiling.activations import activations_of
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from hetero_strategy.zoo.hf_encoder import hf_encoder
from hetero_strategy.zoo.hf_grid_tower import GridTower
from hetero_strategy.zoo.hf_prepare import TowerInputs
from hetero_strategy.zoo.hf_tile_tower import TileTower
from tests.zoo.encoder_stages import assert_two_stages_are_the_whole, gradients

PATCH, WIDTH = 7, 8
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28}
CELLS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 3,
    "num_heads": 4,
    "patch_size": PATCH,
    "out_hidden_size": 24,
}
QWEN2_5 = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig
QWEN3 = transformers.models.qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig


class Case(NamedTuple):
    """A tower, tiny."""

    config: Callable[[], Any]
    any_size: bool = True
    """Whether it takes pictures of any size."""
    class_rows: int = 0
    frozen: str = ""
    """A parameter that the last hidden state does not reach."""


CASES = {
    "clip": Case(lambda: transformers.CLIPVisionConfig(**SIZES, patch_size=PATCH), True, 1, "post_layernorm.weight"),
    "siglip": Case(lambda: transformers.SiglipVisionConfig(**SIZES, patch_size=PATCH), True, 0, "head.probe"),
    "dinov2": Case(
        lambda: transformers.Dinov2Config(**SIZES, patch_size=PATCH, mlp_ratio=2), True, 1, "embeddings.mask_token"
    ),
    "dinov3": Case(
        lambda: transformers.DINOv3ViTConfig(**SIZES, patch_size=PATCH, num_register_tokens=2),
        True, 3, "embeddings.mask_token",
    ),
    "internvl": Case(
        lambda: transformers.InternVLVisionConfig(**{**SIZES, "image_size": [28, 28], "patch_size": [PATCH, PATCH]}),
        False, 1,
    ),
    "qwen2_5_vl": Case(lambda: QWEN2_5(**CELLS, window_size=28, fullatt_block_indexes=[1])),
    "qwen3_vl": Case(
        lambda: QWEN3(**CELLS, deepstack_visual_indexes=[0, 1], num_position_embeddings=16),
        frozen="deepstack_merger_list.0.norm.weight",
    ),
}  # fmt: skip
LAYERS = [(name, layer) for name in CASES for layer in ((-1,) if "qwen" in name else (-1, -2))]


def reference(name: str) -> Any:
    """Make a tower with random values, biases and norms included, and transformers' eager attention."""
    torch.manual_seed(0)
    model = _class(name)(CASES[name].config()).eval()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "eager"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def _class(name: str) -> Any:
    config = CASES[name].config()
    if "qwen" in name:
        modeling = getattr(transformers.models, name)
        return getattr(
            modeling, {"qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel"}.get(name, "Qwen3VLVisionModel")
        )
    return transformers.AutoModel._model_mapping[type(config)]


def encoder(name: str, layer: int = -1, dtype: torch.dtype = torch.float32, **options: Any) -> Encoder:
    """Make an encoder around a tower with the values of its reference."""
    with torch.device("meta"):
        tower = _class(name)(CASES[name].config())
    backbone = (GridTower if "qwen" in name else TileTower)(tower, layer=layer, **options)
    made = Encoder(backbone, nn.Linear(backbone.width, WIDTH, device="meta"))
    materialize(made, 0, name="vision")
    backbone.model.load_state_dict(reference(name).state_dict())
    return made.to(dtype)


def pictures(name: str, made: Encoder) -> EncoderInputs:
    """Draw pictures of several sizes, or of the tower's own."""
    backbone: Any = made.backbone
    sizes = [(4, 4), (8, 6), (4, 4), (2, 6)] if CASES[name].any_size else [(4, 4)] * 3
    numbers = 3 * PATCH**2 * (2 if "qwen" in name else 1)
    return inputs_of(backbone, np.array(sizes), numbers)


def inputs_of(backbone: Any, sizes: np.ndarray, numbers: int) -> EncoderInputs:
    values = torch.randn(int(sizes.prod(1).sum()), numbers, generator=torch.Generator().manual_seed(1))
    return EncoderInputs(values, sizes, backbone.output_rows(sizes), Packing.of(backbone.packing_rows(sizes)))


def alone(name: str, layer: int, inputs: EncoderInputs, model: Any) -> Tensor:
    """Run transformers' own forward picture by picture."""
    rows = []
    for patches, (h, w) in zip(inputs.values.split(inputs.sizes.prod(1).tolist()), inputs.sizes.tolist(), strict=True):
        if "qwen" in name:
            rows.append(model(patches, grid_thw=torch.tensor([[1, h, w]])).pooler_output)
            continue
        pixels = patches.view(h, w, PATCH, PATCH, 3).permute(4, 0, 2, 1, 3).reshape(1, 3, h * PATCH, w * PATCH)
        other = {"interpolate_pos_encoding": True} if name in ("clip", "siglip") and (h, w) != (4, 4) else {}
        out = model(pixel_values=pixels, output_hidden_states=True, **other)
        state = out.last_hidden_state if layer == -1 else out.hidden_states[layer]
        rows.append(state[0, CASES[name].class_rows :])
    return torch.cat(rows)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_rows_are_those_of_transformers(name: str, layer: int) -> None:
    made = encoder(name, layer).eval()
    inputs = pictures(name, made)
    with torch.no_grad():
        rows, expected = made.backbone(inputs), alone(name, layer, inputs, reference(name))
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_stages_are_the_whole_bit_for_bit(name: str, layer: int) -> None:
    made = encoder(name, layer)
    if loose := in_no_stage(made):  # features of inner blocks: pp=1, and refused with this name
        assert name == "qwen3_vl"
        assert "deepstack_merger_list" in loose[0]
        return
    assert_two_stages_are_the_whole(made, pictures(name, made))


@pytest.mark.parametrize("name", CASES)
def test_an_instance_without_pictures_has_zero_gradients(name: str) -> None:
    made = encoder(name)
    inputs = inputs_of(made.backbone, np.zeros((0, 2), np.int64), pictures(name, made).values.shape[1])
    rows = made(inputs)
    assert rows.shape == (0, WIDTH)
    found = gradients(made, lambda: rows.sum().backward())
    assert found.keys() == {fqn for fqn, p in made.named_parameters() if p.requires_grad}
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.frozen])
def test_parameters_that_no_row_needs_are_kept_and_do_not_train(name: str) -> None:
    made = encoder(name)
    frozen = {fqn: p.clone() for fqn, p in made.named_parameters() if not p.requires_grad}
    assert f"backbone.model.{CASES[name].frozen}" in frozen
    assert f"backbone.model.{CASES[name].frozen}" in made.hf_weights().names  # what an export writes
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, weight_decay=0.5)
    made(pictures(name, made)).sum().backward()
    optimizer.step()
    assert all(torch.equal(p, frozen[fqn]) for fqn, p in made.named_parameters() if fqn in frozen)
    behind = encoder("clip", -2)
    assert {fqn.split(".")[4] for fqn, p in behind.named_parameters() if ".layers." in fqn and not p.requires_grad} == {
        "2"
    }


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_loader_makes_what_follows_from_sizes(name: str) -> None:
    made = encoder(name).eval()
    inputs = pictures(name, made)
    prepared = pickle.loads(pickle.dumps(made.kind._prepare))(inputs)  # type: ignore[attr-defined]
    assert isinstance(prepared, TowerInputs)
    bounds = [column for column in prepared.columns.values() if isinstance(column, Packing)]
    assert len(bounds) == (2 if name == "qwen2_5_vl" else 1)  # of windows and of pictures
    with torch.no_grad():
        rows = made(prepared)
        torch.testing.assert_close(rows, made(inputs), rtol=0, atol=0)
        some = made(prepared.only(np.array([1])))
    torch.testing.assert_close(some, rows.split(inputs.rows.tolist())[1])


def test_own_patches_are_taken_in_the_order_of_the_tower() -> None:
    made = encoder("qwen2_5_vl").eval()
    sizes = np.array([(4, 6), (2, 2)])
    inputs = inputs_of(made.backbone, sizes, 3 * PATCH**2)
    taken = []
    for patches, (h, w) in zip(inputs.values.split(sizes.prod(1).tolist()), sizes.tolist(), strict=True):
        cells = patches.view(h // 2, 2, w // 2, 2, -1).transpose(1, 2).reshape(h * w, PATCH, PATCH, 3)
        taken.append(cells.permute(0, 3, 1, 2)[:, :, None].repeat(1, 1, 2, 1, 1).flatten(1))
    with torch.no_grad():
        expected = alone(
            "qwen2_5_vl",
            -1,
            EncoderInputs(torch.cat(taken), sizes, inputs.rows, inputs.packing),
            reference("qwen2_5_vl"),
        )
        torch.testing.assert_close(made.backbone(inputs), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match="patches have 5 numbers, expected 147"):
        made(inputs_of(made.backbone, sizes, 5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a whole CLIP, whose folder has more than its vision tower."""
    path = tmp_path_factory.mktemp("clip")
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 60,
    }
    torch.manual_seed(0)
    vision = {**SIZES, "patch_size": PATCH}
    transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    ).save_pretrained(path)
    return path


@pytest.mark.parametrize("projector", ["mlp", "linear", "merge", "shuffle", nn.Linear(32, WIDTH)])
def test_a_folder_becomes_an_encoder(folder: Path, projector: Any) -> None:
    made = hf_encoder(folder, WIDTH, projector=copy.deepcopy(projector))
    materialize(made, 0, name="vision")
    sizes = np.array([(4, 4)] * 2)
    inputs = inputs_of(made.backbone, sizes, 3 * PATCH**2)
    rows = made.eval().backbone(inputs)
    whole = transformers.CLIPModel.from_pretrained(folder).vision_model.eval()
    expected = alone("clip", -2, inputs, whole)
    if projector in ("merge", "shuffle"):  # 2 x 2 patches, line by line
        expected = expected.view(2, 2, 2, 2, 2, 32).transpose(2, 3).reshape(-1, 128)
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    assert made(inputs).shape == (int(inputs.rows.sum()), WIDTH)
    assert len(made(inputs)) == (8 if projector in ("merge", "shuffle") else 32)


def test_folders_that_are_no_encoders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="projector='conv'; use 'mlp', 'linear', 'merge', 'shuffle' or a module"):
        hf_encoder(folder, WIDTH, projector="conv")
    with pytest.raises(ModelError, match="layer=-5, but CLIPVisionModel has 3 blocks; use a layer from -3 to 3"):
        hf_encoder(folder, WIDTH, layer=-5)
    with pytest.raises(ModelError, match="cannot be merged by 3"):
        hf_encoder(folder, WIDTH, projector="merge", merge=3)
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a LlamaModel, in which no part turns pictures or sound into rows"):
        hf_encoder(tmp_path, WIDTH)
    for field, words in (("auto_map", "code from a folder is not run"), ("quantization_config", "quantised")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", field: {"a": "b"}}))
        with pytest.raises(ModelError, match=words):
            hf_encoder(tmp_path, WIDTH)
    assert "tp=2, but attn.qkv, attn.proj of Qwen2_5_VisionTransformer" in encoder("qwen2_5_vl").check_tp(2)[0]
    assert encoder("clip").check_tp(2) == []
    assert encoder("clip").check_tp(3)[0] == "num heads 4 not divisible by tp 3; set tp=2 or 4"


def test_the_folder_says_how_pictures_are_read(folder: Path, tmp_path: Path) -> None:
    kind, side = "CLIPImageProcessor", {"height": 28, "width": 28}
    content = {"image_processor_type": kind, "size": {"shortest_edge": 28}, "crop_size": side, "resample": 3}
    more = {"image_mean": [0.4] * 3, "image_std": [0.3] * 3, "do_center_crop": True, "do_resize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps({**content, **more}))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    picture.save(tmp_path / "a.png")
    made = hf_encoder(folder, WIDTH)
    materialize(made, 0, name="vision")
    processor: Any = made.processor
    sizes, rows = processor.measure(tmp_path / "a.png")
    assert (rows, processor.inner_rows(np.array([sizes])).tolist()) == (16, [17])
    inputs = processor.collate([processor.load(tmp_path / "a.png")] * 2, np.array([sizes] * 2), np.array([rows] * 2))
    own = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(picture, return_tensors="pt")
    model = transformers.CLIPModel.from_pretrained(folder).vision_model.eval()
    expected = model(own["pixel_values"], output_hidden_states=True).hidden_states[-2][0, 1:]
    made.eval()
    torch.testing.assert_close(made.backbone(inputs), expected.repeat(2, 1), rtol=1e-5, atol=1e-5)
    blocks = list(made.blocks())
    first, last = made.stage(blocks[:1], first=True, last=False), made.stage(blocks[1:], first=False, last=True)
    assert torch.equal(last(inputs, hidden=first(inputs)), made(inputs))
    assert made(processor.collate([], np.zeros((0, len(sizes)), int), np.zeros(0, int))).shape == (0, WIDTH)


RESIZED = {"do_normalize": True, "image_mean": [0.4] * 3, "image_std": [0.3] * 3, "resample": 3}
OWN_SIZE = {
    "sides are no multiple of a patch": (
        transformers.SiglipVisionConfig(**{**SIZES, "image_size": 32}, patch_size=PATCH),
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}}, 16, 0,
    ),
    "a crop is smaller than the config's pictures": (
        transformers.Dinov2Config(**{**SIZES, "image_size": 56}, patch_size=PATCH, mlp_ratio=2),
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 30},
         "crop_size": {"height": 28, "width": 28}}, 16, 1,
    ),
    "a picture is no square": (
        transformers.CLIPVisionConfig(**SIZES, patch_size=PATCH),
        {"image_processor_type": "CLIPImageProcessor", "size": {"height": 28, "width": 56}, "do_center_crop": False},
        32, 1,
    ),
    "sizes differ": (
        transformers.CLIPVisionConfig(**SIZES, patch_size=PATCH),
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "do_center_crop": False}, 24, 1,
    ),
}  # fmt: skip
"""Model, processor, rows of a picture of 40 x 61 pixels, and rows before those of patches."""


@pytest.mark.parametrize("case", OWN_SIZE)
def test_pictures_have_the_size_that_the_processor_makes(case: str, tmp_path: Path) -> None:
    config, fields, count, class_rows = OWN_SIZE[case]
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**RESIZED, **fields}))
    made = hf_encoder(tmp_path, WIDTH, layer=-1)
    materialize(made, 0, name="vision")
    made.eval()
    processor: Any = pickle.loads(pickle.dumps(made.processor))
    loaded, expected = [], []
    for number, (height, width) in enumerate([(40, 61), (61, 40), (40, 61)]):
        picture = Image.fromarray(np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8))
        picture.save(file := tmp_path / f"{number}.png")
        loaded.append((processor.load(file), *processor.measure(file)))
        values = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(picture, return_tensors="pt")
        usual = tuple(values["pixel_values"].shape[2:]) == (config.image_size,) * 2
        other = {} if usual or "Dinov2" in type(model).__name__ else {"interpolate_pos_encoding": True}
        with torch.no_grad():
            expected.append(model(**values, **other).last_hidden_state[0, class_rows:])
    taken, sizes, rows = zip(*loaded, strict=True)
    inputs = processor.collate(taken, np.array(sizes), np.array(rows))
    assert rows[0] == count and inputs.packing.lengths[0] == count + class_rows
    assert made.runs_vary == (case == "sizes differ")
    with torch.no_grad():
        torch.testing.assert_close(made.backbone(inputs), torch.cat(expected), rtol=1e-5, atol=1e-5)
        blocks = list(made.blocks())
        first, last = made.stage(blocks[:1], first=True, last=False), made.stage(blocks[1:], first=False, last=True)
        assert torch.equal(last(inputs, hidden=first(inputs)), made(inputs))
    none = processor.collate([], np.zeros((0, len(sizes[0])), int), np.zeros(0, int))
    assert made(none).shape == last(none, hidden=first(none)).shape == (0, WIDTH)
    if made.runs_vary:
        with pytest.raises(ModelError, match="makes pictures of many sizes, whose patches cannot all be joined by 2"):
            hf_encoder(tmp_path, WIDTH, projector="merge")


def test_a_data_module_checks_a_language_model_with_values() -> None:
    fields = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    with models_without_values():  # a data module makes its model so
        made = hf_causal_lm(model_type="qwen2", num_hidden_layers=2, vocab_size=64, **fields)
    assert all(parameter.is_meta for parameter in made.parameters())


FEW = {
    "hidden_size": WIDTH, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64
}  # fmt: skip
"""Fields of a small language model."""


@pytest.mark.parametrize("name", ["clip", "internvl", "qwen2_5_vl"])
def test_blocks_can_be_measured(name: str) -> None:
    """Examples run in stages, with real and with fake values."""
    made = encoder(name, **({"grid": slice(3, 6)} if "qwen" in name else {}))  # of a composite's processor
    example = made.example(np.array([made.example_unit, 2 * made.example_unit]))
    assert example is not None and isinstance(example, TowerInputs) == ("qwen" in name)
    hidden = None
    for number, block in enumerate(made.blocks()):
        hidden = made.stage([block], first=not number, last=number == 2)(example, hidden=hidden)
    assert hidden is not None and len(hidden) == example.rows.sum()
    model = MultimodalModel(
        {"vision": made, "llm": hf_causal_lm(model_type="llama", check=False, **FEW)}, [("vision", "llm")]
    )
    assert activations_of(model)["vision"].blocks
