"""Composites split into encoders and a language model give transformers' own logits."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

from hetero_strategy import checkpoint
from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.data.hf_processor import HFProcessor
from hetero_strategy.errors import ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import EncoderInputs, MultimodalModel, Packing
from hetero_strategy.model.inputs import IGNORE
from hetero_strategy.model.kind import PlacedItems
from hetero_strategy.model.materialize import materialize
from hetero_strategy.model.read_spec import spec_of_module
from hetero_strategy.parallelize.apply import check
from hetero_strategy.testing.composite_samples import (
    BATCHED,
    GRIDS,
    LEARNT,
    MANY,
    SEVERAL,
    SOUNDS,
    STATE,
    TILES,
    MediaSample,
    difference,
    in_double,
    one_by_one,
    samples_of,
)
from hetero_strategy.testing.composites import built, tiny
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from hetero_strategy.zoo.hf_composed import composite_class, whole_of
from hetero_strategy.zoo.hf_composite import encoder_of, has_media, hf_composite
from hetero_strategy.zoo.hf_encoder import hf_encoder
from hetero_strategy.zoo.hf_positions import HFTextKind
from tests.data.hf_folders import made
from tests.stock import tokenizer

FULL = pytest.mark.full
FEW = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl", "qwen2_5_omni_thinker")


def inputs_of(llm: Any, samples: list[MediaSample], config: Any, generator: torch.Generator) -> Any:
    ids = torch.cat([sample.ids for sample in samples])
    lengths = np.array([len(sample.ids) for sample in samples])
    placed, slots = [], {}
    for name in samples[0].items:
        items = [sample.items[name] for sample in samples]
        number = np.repeat(np.arange(len(samples)), [len(each.rows) for each in items])
        starts, rows = (
            np.array([n for each in items for n in getattr(each, of)], np.int64) for of in ("starts", "rows")
        )
        sizes = np.concatenate([each.sizes for each in items])
        placed.append(PlacedItems(name, items[0].kind, items[0].names, number, sizes, starts, rows))
        slots[name] = (ids == getattr(config, f"{items[0].kind}_token_id")).nonzero()[:, 0]
    learnt = np.concatenate([np.arange(count) >= count - LEARNT for count in lengths])
    content = SimpleNamespace(text=lambda _: (ids.numpy(), learnt), placed=lambda _: placed)
    units: Any = SimpleNamespace(
        content=content, numbers=np.arange(len(samples)), edge_rows=lengths, inner_rows=lengths, alike=False,
        slots=slots,
    )  # fmt: skip
    made = llm.kind.inputs(units)
    labels = torch.where(torch.rand(len(ids), generator=generator) < 0.5, torch.randint(3, 140, (len(ids),)), IGNORE)
    return replace(made, labels=labels, labelled=None)


def split(model: Any, folder: Path) -> tuple[MultimodalModel, list[MediaSample], dict[str, EncoderInputs], Any]:
    """The folder's modules, samples, the inputs of its encoders, and those of its language model."""
    model.save_pretrained(folder)
    parts = MultimodalModel(**hf_composite(folder)).eval()
    generator = torch.Generator().manual_seed(3)
    samples = samples_of(model, generator)
    if model.config.model_type in (*SEVERAL, *MANY):
        parts.vision.columns = {"image_sizes": slice(1, 3)}
    if model.config.model_type in MANY:
        parts.vision.runs_vary, parts.vision.columns["tile"] = True, slice(3, 5)
    given = {}
    for name in samples[0].items:
        items = [sample.items[name] for sample in samples]
        sizes, rows = np.concatenate([each.sizes for each in items]), [count for each in items for count in each.rows]
        packing, raw = Packing.of(sizes[:, :2].prod(1)), sizes[:, 0] if sizes.shape[1] > 3 else None
        values = torch.cat([each.values for each in items])
        given[name] = EncoderInputs(values, sizes, np.array(rows), packing, raw_rows=raw)
    return parts, samples, given, inputs_of(parts.llm, samples, model.config, generator)


@pytest.mark.parametrize(
    "model_type",
    [
        *FEW,
        *(pytest.param(n, marks=FULL) for n in (*GRIDS, *TILES, *SEVERAL, *BATCHED, *MANY, *SOUNDS) if n not in FEW),
    ],
)
def test_a_split_composite_gives_the_logits_of_the_whole(model_type: str, tmp_path: Path) -> None:
    config = tiny(model_type)
    if model_type == "gemma3":
        config.text_config.sliding_window = config.mm_tokens_per_image - 1  # an image is longer than the window
    model = built(config)
    parts, samples, given, inputs = split(model, tmp_path)
    with torch.no_grad():
        rows = {name: parts.get_submodule(name)(each) for name, each in given.items()}
        logits = parts.llm(inputs, rows, keep_logits=True).logits
        assert difference(logits, one_by_one(model, samples)) < 2e-5  # noise: Qwen3.5's states amplify it to 1.4e-5
    with torch.no_grad(), in_double(model, parts):
        wanted, rows = (
            one_by_one(model, samples),
            {name: parts.get_submodule(name)(each) for name, each in given.items()},
        )
        assert difference(parts.llm(inputs, rows, keep_logits=True).logits, wanted) < 1e-12
        wrong = {}
        for name, column in inputs.columns.items():
            if name == "positions" and len(column) == 1:  # from 1 on: rotary embeddings are relative
                continue
            less = {other: column for other, column in inputs.columns.items() if other != name}
            wrong[name] = replace(inputs, columns=less), rows
        if inputs.packing.masks:
            wrong["blocks"] = replace(inputs, packing=replace(inputs.packing, masks={})), rows
        if parts.llm.deepstack:
            bare = rows["vision"].clone()
            bare[:, parts.llm.hidden_width :] = 0
            wrong["deepstack"] = inputs, {**rows, "vision": bare}
        for name, (other, others) in wrong.items():
            off = difference(parts.llm(other, others, keep_logits=True).logits, wanted)
            assert off > (0.05 if model_type in STATE else 0.5), name
    assert {
        "qwen2_5_vl": {"positions"},
        "qwen2_5_omni_thinker": {"positions"},
        "qwen3_vl": {"positions", "deepstack"},
        "gemma3": {"blocks"},
    }.get(model_type, wrong.keys()) == wrong.keys()


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", pytest.param("gemma3", marks=FULL)])
def test_two_stages_are_the_whole_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    """Gradients of two microbatches added up, of the rows of pictures, too."""
    parts, _, given, inputs = split(built(tiny(model_type)), tmp_path)
    llm = parts.llm.train()
    with torch.no_grad():
        pictures = parts.vision(given["vision"])
    whole = pictures.clone().requires_grad_()
    for factor in (1.0, 0.5):
        (factor * llm(inputs, {"vision": whole}).loss_sum).backward()
    wanted = {name: parameter.grad for name, parameter in llm.named_parameters()}
    llm.zero_grad()
    blocks, first = list(llm.blocks()), llm.first_blocks
    one = llm.stage(blocks[:first], first=True, last=False)
    two = llm.stage(blocks[first:], first=False, last=True)
    cut = pictures.clone().requires_grad_()
    for factor in (1.0, 0.5):
        hidden = one(inputs, {"vision": cut})
        received = hidden.detach().requires_grad_()
        (factor * two(inputs, hidden=received).loss_sum).backward()
        hidden.backward(received.grad)
    assert torch.equal(cut.grad, whole.grad) and cut.grad.abs().sum(0).all()
    for name, parameter in llm.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name
    if first > 1:
        (fault,) = check("llm", llm, ModuleLayout(ranks=2, pp=2, split=[1, len(blocks) - 1]).resolved())
        assert f"the first {first} blocks of HFComposedLM take rows of other modules; give the first stage" in fault


def test_the_language_model_of_a_folder_alone(tmp_path: Path) -> None:
    model = built(tiny("llava"))
    model.save_pretrained(tmp_path)
    llm = MultimodalModel({"llm": hf_causal_lm(checkpoint=tmp_path, part="llm")}).eval().llm
    generator = torch.Generator().manual_seed(3)
    samples = [MediaSample(torch.randint(3, 140, (count,), generator=generator), {}) for count in (9, 14)]
    inputs = inputs_of(llm, samples, model.config, generator)
    with torch.no_grad():
        assert difference(llm(inputs, keep_logits=True).logits, one_by_one(model, samples)) < 1e-5
        llm.model.lm_head.weight[5] += 1
        assert difference(llm(inputs, keep_logits=True).logits, one_by_one(model, samples)) > 0.1
    assert not [name for name in llm.state_dict() if "vision" in name or "projector" in name]
    with pytest.raises(ModelError, match="is of a composite, 'llava'; hf_composite reads it, and part='llm'"):
        hf_causal_lm(checkpoint=tmp_path)
    with pytest.raises(ModelError, match="part='vision'; give part='llm' with checkpoint="):
        hf_causal_lm(checkpoint=tmp_path, part="vision")


REFUSED = {
    "mllama": r"language model of MllamaForConditionalGeneration by cross-attention \(cross_attention_states\)",
    "florence2": "Florence2ForConditionalGeneration is an encoder-decoder",
    "chameleon": "pictures of ChameleonForConditionalGeneration are tokens of its vocabulary",
    "llama": "llama/config.json has neither text_config nor a section for pictures or sound",
}


def folder_of(model_type: str, folder: Path, **content: Any) -> Path:
    """A folder that ends before its weights."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type).to_dict()
    names = {"llama": "LlamaForCausalLM", "mllama": "MllamaForConditionalGeneration"}
    names |= {"florence2": "Florence2ForConditionalGeneration", "chameleon": "ChameleonForConditionalGeneration"}
    config["architectures"] = [names.get(model_type, "LlavaForConditionalGeneration")]
    (where := folder / model_type).mkdir()
    (where / "config.json").write_text(json.dumps({**config, **content}, default=str))
    return where


@pytest.mark.parametrize("model_type", ["mllama", "florence2", "chameleon", "llama"])
def test_what_cannot_be_split_is_refused(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=REFUSED[model_type]):
        hf_composite(folder_of(model_type, tmp_path, vocabulary_map={"<image>": 4}))


def test_towers_that_encoders_cannot_run_are_refused(tmp_path: Path) -> None:
    few = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    text = {**few, "intermediate_size": 32, "vocab_size": 60, "vocab_size_per_layer_input": 60}
    parts: dict[str, Any] = {"vision_config": few, "text_config": text}
    with pytest.raises(ModelError, match=r"Gemma4VisionConfig has no num_channels .* hf_causal_lm\(part='llm'\)"):
        hf_composite(folder_of("gemma4", tmp_path, **parts, architectures=["Gemma4ForConditionalGeneration"]))
    tiny("qwen2_5_omni_thinker").save_pretrained(tmp_path / "omni")
    with pytest.raises(ModelError, match=r"TypeError .*; such a tower may need lengths: take the whole folder by"):
        hf_encoder(tmp_path / "omni", 8, media="audio")
    with pytest.raises(ModelError, match="it merges its own patches; take projector='mlp' or 'linear'"):
        hf_encoder(tmp_path / "omni", 8, media="image", projector="merge")
    whole = built(tiny("gemma4"))
    assert not has_media(whole, "image") and not has_media(whole, "audio")  # its config has none of these sections


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"text_config": None, "vision_config": None}, "has neither text_config nor a section for pictures or sound"),
        ({"auto_map": {"AutoModel": "code.py"}}, "has auto_map: code from a folder is not run"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
        ({"text_config": {"num_hidden_layers": "two"}}, r"llava/config.json: .*num_hidden_layers"),
        ({"architectures": ["NewModel"]}, r"architectures=\['NewModel'\], of which transformers has no class"),
    ],
)
def test_folders_that_no_class_reads_are_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        hf_composite(folder_of("llava", tmp_path, **content))


@pytest.mark.parametrize(
    "model_type", ["llava", pytest.param("internvl", marks=FULL), pytest.param("gemma3", marks=FULL)]
)
def test_an_encoder_takes_what_the_folders_processor_makes(model_type: str, tmp_path: Path) -> None:
    """Rows of pictures of two sizes, read from files, are those of transformers' processor and model."""
    folder = Path(made(tmp_path, model_type))
    token = HFProcessor(str(folder)).row_id
    assert token is not None
    config = tiny(model_type, image_token_id=token)
    sizes = (56, 14) if isinstance(config.vision_config.image_size, int) else ([56, 56], [14, 14])
    config.vision_config.image_size, config.vision_config.patch_size = sizes
    config.get_text_config().vocab_size = token + 50
    built(config).save_pretrained(folder)
    model = built(config)
    vision = MultimodalModel(**hf_composite(folder)).eval().vision
    processor, wanted, loaded = vision.processor, [], []
    for number, size in enumerate([(60, 90, 3), (120, 40, 3)]):
        path = folder / f"{number}.png"
        Image.fromarray(np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)).save(path)
        measured, rows = processor.measure(path)
        loaded.append((processor.load(path, measured), measured, rows))
        pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")([Image.open(path)], return_tensors="pt")
        with torch.no_grad():
            wanted += model.model.get_image_features(pixels["pixel_values"], return_dict=True).pooler_output
    values, measures, counts = zip(*loaded, strict=True)
    inputs = processor.collate(values, np.array(measures), np.array(counts))
    seen: list[int] = []
    next(iter(vision.blocks().values())).register_forward_pre_hook(
        lambda _, given: seen.append(given[0][..., 0].numel())
    )
    with torch.no_grad():
        rows = vision(inputs)
        assert seen == [inputs.packing.rows], "packing"  # FLOPs and plans count the rows in the blocks
        none = vision(processor.collate([], np.zeros((0, len(measures[0])), np.int64), np.zeros(0, np.int64)))
    assert difference(rows, torch.cat([part.reshape(-1, part.shape[-1]) for part in wanted])) < 1e-5
    assert none.shape == (0, 64)


@pytest.mark.parametrize(
    "model_type",
    [
        "llava",
        "qwen2_5_vl",
        *(
            pytest.param(n, marks=FULL)
            for n in (*GRIDS, *TILES, *SEVERAL, *BATCHED, *MANY, *SOUNDS)
            if n not in ("llava", "qwen2_5_vl")
        ),
    ],
)
def test_a_composite_is_exported_as_its_folder(model_type: str, tmp_path: Path) -> None:
    """Every name and value, after a step that changes all values, and transformers finds nothing amiss."""
    model, origin = built(tiny(model_type)), tmp_path / "origin"
    model.save_pretrained(origin)
    before, found = load_file(origin / "model.safetensors"), exported(origin, tmp_path, type(model))
    assert found.keys() == before.keys()
    assert [name for name, tensor in before.items() if not torch.equal(found[name], 2 * tensor)] == []


def exported(origin: Path, folder: Path, model_class: Any) -> dict[str, Tensor]:
    """Double all values of a folder's modules, save and export them, and return the tensors of the new folder."""
    modules = hf_composite(origin)["modules"]
    for name, module in modules.items():
        materialize(module, 0, name=name)
        for tensor in {tensor.data_ptr(): tensor for tensor in module.state_dict().values()}.values():
            tensor.mul_(2)
    state = TrainingState("net", modules, group=None)
    state.save({"state_dict": state.model_tensors()}, folder / "saved")
    checkpoint.export(folder / "saved", folder / "out", whole=True)
    _, info = model_class.from_pretrained(folder / "out", output_loading_info=True)
    assert not any(info[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return load_file(folder / "out" / "model.safetensors")


@FULL
def test_a_composite_beside_other_models_is_taken_alone(tmp_path: Path) -> None:
    """Qwen2.5-Omni's thinker, out of a folder as it is published; the talker is copied."""
    model, origin = built(tiny("qwen2_5_omni_thinker")), tmp_path / "origin"
    model.save_pretrained(origin)
    thinker = load_file(origin / "model.safetensors")
    talker = {"talker.codec_head.weight": torch.ones(3)}
    before = {f"thinker.{name}": tensor for name, tensor in thinker.items()} | talker
    save_file(before, origin / "model.safetensors", metadata={"format": "pt"})
    names = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"]}
    (origin / "config.json").write_text(json.dumps({**names, "thinker_config": model.config.to_dict()}))
    with pytest.warns(UserWarning, match="thinker_config alone is built; an export copies the other parts"):
        found = exported(origin, tmp_path, type(model))
    assert found.keys() == before.keys()
    assert [name for name, tensor in thinker.items() if not torch.equal(found[f"thinker.{name}"], 2 * tensor)] == []
    assert torch.equal(found["talker.codec_head.weight"], torch.ones(3))


@dataclass(frozen=True)
class Sized:
    """What an encoder reads of a processor of pictures of many sizes."""

    packing_rows: Any = None
    columns: Any = field(
        default_factory=lambda: {"raw_rows": slice(0, 1), "image_sizes": slice(1, 3), "tile": slice(3, 5)}
    )


def test_pictures_of_many_sizes_run_one_by_one(tmp_path: Path) -> None:
    """Pixtral's rows, and gradients of two microbatches added up; weights are gathered once per step."""
    model = built(tiny("mistral3"))
    model.save_pretrained(tmp_path)
    whole = whole_of(*composite_class("hf_composite", tmp_path))
    vision: Any = encoder_of(whole, "image", checkpoint=tmp_path, processor=Sized())
    assert spec_of_module(vision).runs_vary
    materialize(vision, 0, name="vision")
    shapes = [(28, 56), (56, 56), (28, 56), (56, 28)]
    pixels = [torch.randn(3, *shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes)]
    for items in ([0, 1, 2, 3], [3, 0]):
        sizes = np.array([(h * w, h, w, h, w) for h, w in (shapes[item] for item in items)], np.int64)
        inner = vision.processor.packing_rows(sizes)
        assert inner.tolist() == (sizes[:, 0] // 49).tolist()
        values = torch.cat([pixels[item].flatten(1).T for item in items])
        rows = vision(EncoderInputs(values, sizes, inner // 4, Packing.of(inner), raw_rows=sizes[:, 0]))
        alone = [model.model.get_image_features(pixels[n][None], torch.tensor([shapes[n]])) for n in items]
        wanted = torch.cat([torch.cat([*each.pooler_output]) for each in alone])
        assert difference(rows.detach(), wanted.detach()) < 1e-5
        rows.square().sum().backward()
        wanted.square().sum().backward()
    of_model = dict(model.named_parameters())
    trained = [(n, p) for n, p in vision.named_parameters() if p.requires_grad]
    assert all(difference(p.grad, of_model[vision.origin[name]].grad) < 1e-4 for name, p in trained)


def test_sounds_run_end_to_end(tmp_path: Path) -> None:
    """Stages of Qwen2.5-Omni's tower are the whole bit for bit, with gradients of two microbatches added up."""
    parts, _, given, _ = split(built(tiny("qwen2_5_omni_thinker")), tmp_path)
    audio: Any = parts.audio.train()
    tower, sounds = audio.backbone, given["audio"]
    frozen = [name for name, parameter in audio.named_parameters() if not parameter.requires_grad]
    assert frozen == ["backbone.model.model.audio_tower.audio_bos_eos_token.weight"]
    assert tower.output_rows(sounds.sizes).tolist() == sounds.rows.tolist()
    sounds = replace(sounds, packing=Packing.of(tower.packing_rows(sounds.sizes)))
    weights = torch.randn(int(sounds.rows.sum()), audio.width)
    blocks = list(audio.blocks())
    one, two = (
        audio.stage(blocks[:1], first=True, last=False),
        audio.stage(blocks[1:], first=False, last=True),
    )
    assert torch.equal(audio(pickle.loads(pickle.dumps(tower.prepare))(sounds)), audio(sounds))  # made by a loader
    for sign in (1, -2):
        (audio(sounds) * weights * sign).sum().backward()
    wanted = {name: p.grad for name, p in audio.named_parameters() if p.requires_grad}
    audio.zero_grad()
    for sign in (1, -2):
        hidden = one(sounds)
        received = hidden.detach().requires_grad_()
        (two(sounds, hidden=received) * weights * sign).sum().backward()
        hidden.backward(received.grad)
    found = dict(audio.named_parameters())
    assert all(torch.equal(found[name].grad, gradient) for name, gradient in wanted.items())
    none = EncoderInputs(sounds.values[:0], sounds.sizes[:0], sounds.rows[:0], Packing.of(np.zeros(0, np.int64)))
    audio.zero_grad()
    audio(none).sum().backward()
    assert audio(none).shape == (0, 64) and all(not found[name].grad.any() for name in wanted)
    example = audio.example(np.array([40, 80]))
    assert example.packing.lengths.tolist() == [40, 80] and len(audio(example)) == example.rows.sum()


OMNI = {
    "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>", "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip


def test_sounds_come_from_files(tmp_path: Path) -> None:
    """Rows of recordings of several lengths are those of transformers' processor and model."""
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    classes = {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Qwen2_5OmniProcessor"}
    tokenizer(tmp_path, (*ends.values(), *OMNI.values()), **classes, **ends, extra_special_tokens=OMNI)
    kinds = {"image_processor_type": "Qwen2VLImageProcessor", "feature_extractor_type": "WhisperFeatureExtractor"}
    sizes = {"feature_size": 16, "chunk_length": 4, "patch_size": 7}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**kinds, **sizes, **classes}))
    texts = AutoTokenizer.from_pretrained(tmp_path)
    ids = {f"{kind}_token_id": texts.convert_tokens_to_ids(OMNI[f"{kind}_token"]) for kind in ("image", "audio")}
    config = tiny("qwen2_5_omni_thinker", **ids)
    config.text_config.vocab_size = len(texts)
    model = built(config)
    model.save_pretrained(tmp_path)
    audio = MultimodalModel(**hf_composite(tmp_path)).eval().audio
    processor, wanted, loaded = audio.processor, [], []
    for samples in (16000, 24017, 40001):
        path = tmp_path / f"{samples}.wav"
        soundfile.write(path, np.random.default_rng(samples).normal(size=samples) / 9, 16000)
        measured, rows = processor.measure(path)
        loaded.append((processor.load(path, measured), measured, rows))
        given = AutoFeatureExtractor.from_pretrained(tmp_path)(
            soundfile.read(path, dtype="float32")[0],
            sampling_rate=16000,
            return_tensors="pt",
            return_attention_mask=True,
        )
        with torch.no_grad():
            wanted.append(model.model.get_audio_features(*given.values()).last_hidden_state)
    values, measures, counts = zip(*loaded, strict=True)
    inputs = processor.collate(values, np.array(measures), np.array(counts))
    assert inputs.packing.lengths.tolist() == [50, 76, 126]
    with torch.no_grad():
        assert difference(audio(inputs), torch.cat(wanted)) < 1e-5


def test_only_rows_of_items_take_another_token(tmp_path: Path) -> None:
    """A text of another tokenizer is not read as token 0."""
    config = tiny("llava")
    kind = HFTextKind("LlavaForConditionalGeneration", config.to_dict())
    beyond = np.full(7, kind.vocabulary)
    one = np.ones(1, np.int64)
    item = PlacedItems("vision", "image", ("h",), one, one[:, None], 1 + one, one)  # row 2 of the second sample
    content = SimpleNamespace(text=lambda _: (beyond, np.zeros(7, bool)), placed=lambda _: [item])
    lengths = np.array([3, 4])
    units: Any = SimpleNamespace(
        content=content, numbers=np.arange(2), edge_rows=lengths, inner_rows=lengths, alike=False, slots={}
    )
    assert kind.inputs(units).ids.tolist() == [*beyond[:5].tolist(), 0, int(beyond[0])]


@pytest.mark.parametrize("model_type", ["gemma3", "paligemma"])
def test_rows_that_see_later_rows_have_context_parallelism(model_type: str, tmp_path: Path) -> None:
    built(tiny(model_type)).save_pretrained(tmp_path)
    llm = hf_composite(tmp_path, check=False)["modules"]["llm"]
    assert llm.kind.rules and llm.context_parallel
