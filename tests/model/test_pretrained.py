from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from hetero_strategy.checkpoint.__main__ import main
from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.data.processors import processors_of
from hetero_strategy.errors import ConfigError, ModelError
from hetero_strategy.model import Encoder, MultimodalModel, Projector
from hetero_strategy.model.inputs import normalised
from hetero_strategy.model.materialize import initial_units, materialize, unit_tensors
from hetero_strategy.zoo import flow_decoder, hf_llama, hf_qwen3, siglip2_encoder, titan_llama, whisper_encoder
from tests.model.helpers import LLAMA, TITAN, VIT, WHISPER, clips, images, ready, tokens


def logits_of(model, inputs):
    return torch.cat([model(ids[None]).logits[0] for ids in inputs.ids.split(inputs.packing.lengths.tolist())])


@pytest.mark.parametrize("kind", ["hf_llama", "titan_llama", "hf_qwen3", "tied", "sharded"])
def test_language_models_load_a_folder(tmp_path, kind):
    torch.manual_seed(0)
    if kind == "hf_qwen3":
        theirs, make = Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=4)), hf_qwen3
    else:
        config = LlamaConfig(**LLAMA, tie_word_embeddings=kind == "tied", initializer_range=0.3)
        theirs, make = LlamaForCausalLM(config), titan_llama if kind == "titan_llama" else hf_llama
    theirs.save_pretrained(tmp_path, max_shard_size="5KB" if kind == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (kind == "sharded")
    ours = make(checkpoint=tmp_path)
    block = {fqn: {} for fqn in unit_tensors(ours)[next(iter(ours.blocks()))]}
    assert dict(initial_units("m", ours, 0, block)).keys() == block.keys()
    materialize(ours, 0)
    inputs = tokens([5, 3])
    out = ours(inputs, {}, keep_logits=True)
    torch.testing.assert_close(out.logits, logits_of(theirs, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [titan_llama, hf_llama])
def test_what_a_folder_holds_is_not_drawn_first(tmp_path, make):
    """Tables beside the embedding and the head, which are as large as all of a rank's shards, are made alone."""
    LlamaForCausalLM(LlamaConfig(**LLAMA, max_position_embeddings=64)).save_pretrained(tmp_path)
    ours, real = make(checkpoint=tmp_path), []

    def initialize(prefix, unit):
        real.extend(f"{prefix} {fqn}" for fqn, tensor in unit.named_parameters() if not tensor.is_meta)
        type(ours).initialize(ours, prefix, unit)

    ours.initialize = initialize
    made = dict(initial_units("m", ours, 0))
    assert not real
    assert made.keys() == {fqn for tensors in unit_tensors(ours).values() for fqn in tensors}
    ours.checkpoint = None
    drawn = dict(initial_units("m", ours, 0))
    assert real
    for fqn, _ in ours.named_buffers():
        assert torch.equal(made[fqn], drawn[fqn]), fqn


@pytest.mark.parametrize("original", ["in the scaling", "beside it", "nowhere"])
def test_titan_takes_llama3_rope_scaling(tmp_path, original):
    """Where the folder does not say for how many positions frequencies were, it is as transformers has it."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    said = {} if original == "nowhere" else {"original_max_position_embeddings": 16}
    LlamaForCausalLM(LlamaConfig(**LLAMA, initializer_range=0.3, max_position_embeddings=64)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content |= {"rope_parameters": rope | said} if original == "in the scaling" else said | {"rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    ours = titan_llama(checkpoint=tmp_path)
    materialize(ours, 0)
    inputs = tokens([40])
    out = ours(inputs, {}, keep_logits=True)
    torch.testing.assert_close(out.logits, logits_of(theirs, inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [titan_llama, hf_llama])
def test_attention_that_sees_all_rows_is_refused(tmp_path, make):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "llama", "is_causal": False}))
    with pytest.raises(ModelError, match="is_causal"):
        make(checkpoint=tmp_path)


def test_a_tied_folder_may_hold_embedding_and_head(tmp_path):
    """Either, or both if they are the same; transformers unties those that are not."""
    config = LlamaConfig(**LLAMA, tie_word_embeddings=True, initializer_range=0.3)
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    table, names = saved["model.embed_tokens.weight"], ("model.embed_tokens.weight", "lm_head.weight")
    other = table.clone()
    other[-1, 0] += 1

    def load(*tables):
        rest = {name: tensor for name, tensor in saved.items() if name not in names}
        held = {name: tensor.clone() for name, tensor in zip(names, tables, strict=True) if tensor is not None}
        save_file(rest | held, tmp_path / "model.safetensors", metadata={"format": "pt"})
        ours = hf_llama(checkpoint=tmp_path)
        materialize(ours, 0, name="llm")
        assert torch.equal(ours.model.lm_head.weight, table) and ours.tied_weight() is not None

    for tables in ((table, None), (None, table), (table, table)):
        load(*tables)
    with pytest.raises(ModelError, match=r"llm: .* tie_word_embeddings=true, but .* are not the same; set it to false"):
        load(table, other)


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_titan_refuses_rope_scaling_that_it_does_not_compute(tmp_path, name):
    config = {**LLAMA, "model_type": "llama", "rope_scaling": {name: "linear", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="rope_type 'linear', known are default and llama3"):
        titan_llama(checkpoint=tmp_path)


def export(tmp_path, **modules):
    """What the command writes of a run's checkpoint."""
    state = TrainingState("net", modules, group=None)
    state.save({"state_dict": state.model_tensors()}, tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (titan_llama, TITAN),
        (titan_llama, TITAN | {"rope_scaling_args": {"scaling_factor": 1.0}}),
        (hf_llama, LLAMA),
        (hf_llama, LLAMA | {"tie_word_embeddings": True}),
        (hf_qwen3, LLAMA),
    ],
    ids=["titan_llama", "titan_llama without scaling", "hf_llama", "tied", "hf_qwen3"],
)
def test_language_models_export_a_folder(tmp_path, make, fields):
    ours = ready(make(**fields), dtype=torch.float32)
    folder = export(tmp_path, llm=ours) / "llm"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(theirs).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    inputs = tokens([11, 3])
    out = ours(inputs, {}, keep_logits=True)
    torch.testing.assert_close(out.logits, logits_of(theirs, inputs), rtol=1e-4, atol=1e-5)
    if make is titan_llama:
        scaled = ours.args.rope_scaling_args.scaling_factor != 1
        assert theirs.config.rope_parameters["rope_type"] == ("llama3" if scaled else "default")
        assert {theirs.config.bos_token_id, theirs.config.eos_token_id, theirs.config.pad_token_id} == {None}
        theirs.config.eos_token_id, theirs.config.pad_token_id = [7, 9], 3
        theirs.config.save_pretrained(folder)
    again = make(checkpoint=folder)
    if make is titan_llama:
        config = again.hf_weights().config
        assert [config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")] == [None, [7, 9], 3]
    materialize(again, 5)
    expected = ours.state_dict()
    for fqn, value in again.state_dict().items():
        assert torch.equal(value, expected[fqn]), fqn


@pytest.mark.parametrize(("make", "fields"), [(siglip2_encoder, VIT), (whisper_encoder, WHISPER)])
def test_projectors_of_an_export_are_read_again(tmp_path, make, fields):
    ours = ready(make(out_width=8, **fields), dtype=torch.float32)
    folder = export(tmp_path, m=ours) / "m"
    again = make(out_width=8, checkpoint=folder)
    assert again.processor == ours.processor  # of recordings neither says how they are read
    materialize(again, 5)
    expected = ours.state_dict()
    assert {fqn.split(".")[0] for fqn in expected} > {"projector"}
    for fqn, value in again.state_dict().items():
        assert torch.equal(value, expected[fqn]), fqn
    part = {"projector.up.weight": {0: torch.tensor([5, 2])}}
    assert torch.equal(
        dict(initial_units("m", again, 5, part))["projector.up.weight"], ours.projector.up.weight[[5, 2]]
    )
    with pytest.raises(ModelError, match=r"m: projector.* has shape .*: take extra.safetensors away to train it anew"):
        materialize(make(out_width=16, checkpoint=folder), 5, name="m")
    save_file({"head.weight": torch.zeros(2)}, folder / "extra.safetensors")
    with pytest.raises(ModelError, match=r"m: .*extra.safetensors holds 1 tensors that .* such as \['head.weight'\]"):
        materialize(make(out_width=8, checkpoint=folder), 5, name="m")


def test_modules_without_a_hugging_face_form_keep_their_names(tmp_path, capsys):
    own = Encoder(lambda: torch.nn.Linear(3, 4), Projector(4, 8))
    modules = {"draw": flow_decoder(width=8, patch_size=2, dim=8, n_layers=1, n_heads=2), "own": own}
    for name, module in modules.items():
        materialize(module, 0, name=name)
    folder = export(tmp_path, **modules)
    assert capsys.readouterr().out.count("tensors under their own names") == 2
    for name, module in modules.items():
        assert [path.name for path in (folder / name).iterdir()] == ["model.safetensors"]
        found, expected = load_file(folder / name / "model.safetensors"), module.state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("whole", [False, True])
def test_siglip2_loads_alone_or_from_a_whole_model(tmp_path, whole):
    torch.manual_seed(1)
    if whole:
        text = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
        text |= {"num_attention_heads": 2}
        theirs = Siglip2Model(Siglip2Config(vision_config=VIT, text_config=text))
    else:
        theirs = Siglip2VisionModel(Siglip2VisionConfig(**VIT))
    theirs.save_pretrained(tmp_path)
    encoder = siglip2_encoder(out_width=8, checkpoint=tmp_path)
    materialize(encoder, 0, name="vision")
    vision = theirs.vision_model if whole else theirs
    assert not any("head" in name for name, _ in encoder.named_parameters())
    inputs = images([(4, 4)])
    expected = vision(inputs.values[None], torch.ones(1, 16, dtype=torch.long), torch.tensor([[4, 4]]))
    torch.testing.assert_close(encoder.backbone(inputs), expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)
    fresh = siglip2_encoder(out_width=8, **VIT)
    materialize(fresh, 0, name="vision")
    assert torch.equal(encoder.projector.up.weight, fresh.projector.up.weight)


def test_pixels_are_normalised_as_a_folder_of_siglip2_says(tmp_path):
    Siglip2VisionModel(Siglip2VisionConfig(**VIT)).save_pretrained(tmp_path)

    def processor(folder, **said):
        (folder / "preprocessor_config.json").write_text(json.dumps(said))
        vision = siglip2_encoder(out_width=16, checkpoint=folder)
        model = MultimodalModel({"vision": vision, "llm": hf_llama(**LLAMA)})
        return model, processors_of(model, {})["vision"]

    assert processor(tmp_path, image_mean=[0.5] * 3, image_std=[0.5] * 3)[1].std == 0.5
    assert processor(tmp_path, image_mean=0.0)[1].mean == 0.0
    model, made = processor(tmp_path, image_mean=[0.1, 0.2, 0.3], image_std=[0.5] * 3)
    assert (made.mean, made.std) == ((0.1, 0.2, 0.3), 0.5)
    with pytest.raises(ConfigError, match=r"mean is 0.5, but the module has"):
        processors_of(model, {"vision": {"mean": 0.5}})
    again = siglip2_encoder(out_width=16, checkpoint=export(tmp_path, vision=model.vision) / "vision")
    assert again.processor == model.vision.processor
    with pytest.raises(ModelError, match=r"siglip2: .* says of its pixels resample='cubic'; correct it"):
        processor(tmp_path, resample="cubic")


@pytest.mark.parametrize("resample", [None, *range(6)])
def test_pictures_are_resized_as_a_folder_of_siglip2_says(tmp_path, resample):
    """In transformers' own processor; an export says it too."""
    Siglip2VisionModel(Siglip2VisionConfig(**VIT)).save_pretrained(tmp_path)
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))
    pixels.save(tmp_path / "a.png")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": resample}))
    encoder = siglip2_encoder(out_width=16, checkpoint=tmp_path)
    model = MultimodalModel({"vision": encoder, "llm": hf_llama(**LLAMA)})
    ours = processors_of(model, {"vision": {"max_patches": 64}})["vision"]
    (grid, rows), read = ours.measure(tmp_path / "a.png"), ours.load(tmp_path / "a.png")
    more = {} if resample is None else {"resample": resample}
    theirs = Siglip2ImageProcessorPil(patch_size=2, max_num_patches=rows, **more)(pixels, return_tensors="np")
    assert tuple(theirs["spatial_shapes"][0]) == grid and (resample is None or ours.resample == resample)
    found = normalised(torch.from_numpy(read), ours.statistics).numpy()
    np.testing.assert_allclose(found, theirs["pixel_values"][0], atol=1e-6)
    if resample not in (None, 2):
        folder = export(tmp_path, vision=encoder) / "vision"
        assert siglip2_encoder(out_width=16, checkpoint=folder).processor == encoder.processor


@pytest.mark.parametrize(
    "said",
    [
        {"do_normalize": False, "image_mean": [0.1, 0.2, 0.3]},
        {"rescale_factor": 1 / 127.5, "image_mean": [0.1, 0.2, 0.3]},
        {"do_rescale": False, "image_mean": [90.0, 100.0, 110.0], "image_std": [50.0, 60.0, 70.0]},
        {"do_rescale": False, "do_normalize": False},
    ],
)
def test_pixels_are_scaled_as_a_folder_of_siglip2_says(tmp_path, said):
    Siglip2VisionModel(Siglip2VisionConfig(**VIT)).save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    theirs = Siglip2ImageProcessor(patch_size=2, max_num_patches=16, do_resize=False, **said)
    theirs.save_pretrained(tmp_path)
    wanted = theirs(pixels, return_tensors="pt")["pixel_values"][0].float()
    Image.fromarray(pixels).save(tmp_path / "a.png")
    model = MultimodalModel({"vision": siglip2_encoder(out_width=16, checkpoint=tmp_path), "llm": hf_llama(**LLAMA)})
    ours = processors_of(model, {})["vision"]
    found = normalised(torch.from_numpy(ours.load(tmp_path / "a.png")), ours.statistics)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_whisper_loads_from_a_whole_model(tmp_path):
    torch.manual_seed(2)
    fields = WHISPER | {"decoder_layers": 1, "decoder_ffn_dim": 8, "decoder_attention_heads": 2, "vocab_size": 30}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    theirs = WhisperForConditionalGeneration(WhisperConfig(**fields, **special))
    theirs.save_pretrained(tmp_path)
    encoder = whisper_encoder(out_width=16, checkpoint=tmp_path)
    materialize(encoder, 0)
    inputs = clips([24])
    expected = theirs.model.encoder(inputs.values.T[None]).last_hidden_state[0]
    torch.testing.assert_close(encoder.backbone(inputs), expected, rtol=1e-5, atol=1e-5)
    model = MultimodalModel({"audio": encoder, "llm": hf_llama(**LLAMA)})
    for given in ({"sampling_rate": 8000}, {"hop_length": 80}, {"n_fft": 200}):
        with pytest.raises(ConfigError, match=r"processors.audio: \w+ is \d+, but the module has \d+; leave it out"):
            processors_of(model, {"audio": given})
    (tmp_path / "preprocessor_config.json").write_text('{"sampling_rate": 8000, "hop_length": 80}')
    model = MultimodalModel({"audio": whisper_encoder(out_width=16, checkpoint=tmp_path), "llm": hf_llama(**LLAMA)})
    audio = processors_of(model, {"audio": {"sampling_rate": 8000}})["audio"]
    assert (audio.sampling_rate, audio.hop_length, audio.n_fft) == (8000, 80, 400)
    (tmp_path / "preprocessor_config.json").unlink()
    heard = {"feature_extractor": {"sampling_rate": 8000, "hop_length": 40, "n_fft": 256}}
    (tmp_path / "processor_config.json").write_text(json.dumps(heard))
    model = MultimodalModel({"audio": whisper_encoder(out_width=16, checkpoint=tmp_path), "llm": hf_llama(**LLAMA)})
    audio = processors_of(model, {"audio": {"sampling_rate": 8000}})["audio"]
    assert (audio.sampling_rate, audio.hop_length, audio.n_fft) == (8000, 40, 256)
    folder = export(tmp_path, audio=model.audio) / "audio"
    assert whisper_encoder(out_width=16, checkpoint=folder).processor == model.audio.processor
    assert WhisperFeatureExtractor.from_pretrained(folder).hop_length == 40


def test_faults_of_a_folder_are_named(tmp_path):
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    good = load_file(tmp_path / "model.safetensors")

    def load(**changes):
        tensors = {name: value for name, value in (good | changes).items() if value is not None}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        materialize(hf_llama(checkpoint=tmp_path), 0, name="llm")

    load()
    with pytest.raises(ModelError, match=r"llm: .* lacks 1 tensors, such as \['model.norm.weight'\]"):
        load(**{"model.norm.weight": None})
    with pytest.raises(ModelError, match=r"no place for, such as \['extra'\]"):
        load(extra=torch.zeros(1))
    with pytest.raises(ModelError, match=r"has shape \(3,\), the model has \(16,\)"):
        load(**{"model.norm.weight": torch.zeros(3)})
    with pytest.raises(ModelError, match="'llama' model, and it takes 'qwen3'; use hf_llama"):
        hf_qwen3(checkpoint=tmp_path)
    with pytest.raises(ModelError, match="remove"):
        hf_llama(checkpoint=tmp_path, vocab_size=3)
    with pytest.raises(ModelError, match=r"config.json does not exist"):
        hf_llama(checkpoint=tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config.json does not exist: checkpoint= takes a local"):
        hf_llama(checkpoint=tmp_path / "config.json")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        materialize(hf_llama(checkpoint=tmp_path), 0)
    save_file({"t": torch.zeros(1)}, tmp_path / "some.safetensors")
    misplaced = json.dumps({"weight_map": dict.fromkeys(good, "some.safetensors")})
    for index, said in {
        "{}": "index.json has no weight_map",
        '{"weight_map": []}': "index.json has no weight_map",
        "[]": "index.json holds a list",
        misplaced: r"some.safetensors lacks '.*', against its index",
    }.items():
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ModelError, match=said):
            materialize(hf_llama(checkpoint=tmp_path), 0)


@pytest.mark.parametrize("make", [titan_llama, hf_llama])
def test_a_folder_of_another_model_is_refused_with_what_takes_it(tmp_path, make):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mistral"}))
    with pytest.raises(ModelError, match=r"of a 'mistral' model, and it takes 'llama'; use hf_causal_lm or hf_encoder"):
        make(checkpoint=tmp_path)


def test_parts_of_json_that_are_null_are_as_in_transformers(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"image_processor": null}')
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "siglip2", "vision_config": null}')
    with torch.device("meta"):
        assert siglip2_encoder(out_width=16, checkpoint=tmp_path).backbone.hidden_width == 768
    config.write_text('{"model_type": "siglip2", "vision_config": [1]}')
    with pytest.raises(ModelError, match=r"config.json has vision_config=\[1\]; give names and values there"):
        siglip2_encoder(out_width=16, checkpoint=tmp_path)


def test_plain_weights_are_not_exported_as_quantised_ones(tmp_path):
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert "quantization_config" not in hf_llama(checkpoint=tmp_path).hf_weights().config


def test_a_model_takes_checkpoints_of_its_modules(tmp_path):
    theirs = LlamaForCausalLM(LlamaConfig(**LLAMA))
    theirs.save_pretrained(tmp_path)
    model = MultimodalModel({"audio": whisper_encoder(out_width=16, **WHISPER), "llm": hf_llama(checkpoint=tmp_path)})
    assert torch.equal(model.llm.model.lm_head.weight, theirs.lm_head.weight)
