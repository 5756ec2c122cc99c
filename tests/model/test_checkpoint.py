from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Siglip2Config,
    Siglip2Model,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hetero_strategy.errors import ModelError
from hetero_strategy.model import (
    MultimodalModel,
    hf_llama,
    hf_qwen3,
    materialize,
    siglip2_encoder,
    titan_llama,
    whisper_encoder,
)
from hetero_strategy.model.init import initial_units, unit_tensors
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
    block = set(unit_tensors(ours)[next(iter(ours.blocks()))])
    assert dict(initial_units("m", ours, 0, block)).keys() == block
    materialize(ours, 0)
    inputs = tokens([5, 3])
    out = ours(inputs, {}, keep_logits=True)
    torch.testing.assert_close(out.logits, logits_of(theirs, inputs), rtol=1e-4, atol=1e-5)


def test_titan_takes_llama3_rope_scaling(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    config = LlamaConfig(**LLAMA, rope_parameters=rope, initializer_range=0.3, max_position_embeddings=64)
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path)
    ours = titan_llama(checkpoint=tmp_path)
    materialize(ours, 0)
    inputs = tokens([40])
    out = ours(inputs, {}, keep_logits=True)
    torch.testing.assert_close(out.logits, logits_of(theirs, inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: titan_llama(**TITAN), lambda: hf_llama(**LLAMA)])
def test_language_models_export_a_folder(tmp_path, make):
    ours = ready(make(), dtype=torch.float32)
    parameters = dict(ours.named_parameters())
    names = ours.export_names()
    assert names.keys() == parameters.keys()
    folder = {theirs: ours.to_export(fqn, parameters[fqn].detach()).contiguous() for fqn, theirs in names.items()}
    save_file(folder, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(ours.export_config()))
    theirs, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    inputs = tokens([5, 3])
    out = ours(inputs, {}, keep_logits=True)
    torch.testing.assert_close(out.logits, logits_of(theirs, inputs), rtol=1e-4, atol=1e-5)
    again = (type(ours).__name__ == "TitanLlama" and titan_llama) or hf_llama
    again = again(checkpoint=tmp_path)
    materialize(again, 5)
    for fqn, value in again.state_dict().items():
        assert torch.equal(value, parameters[fqn]), fqn


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


def test_whisper_loads_from_a_whole_model(tmp_path):
    torch.manual_seed(2)
    fields = WHISPER | {"decoder_layers": 1, "decoder_ffn_dim": 8, "decoder_attention_heads": 2, "vocab_size": 30}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    theirs = WhisperForConditionalGeneration(WhisperConfig(**fields, **special))
    theirs.save_pretrained(tmp_path)
    encoder = whisper_encoder(out_width=8, checkpoint=tmp_path)
    materialize(encoder, 0)
    inputs = clips([24])
    expected = theirs.model.encoder(inputs.values.T[None]).last_hidden_state[0]
    torch.testing.assert_close(encoder.backbone(inputs), expected, rtol=1e-5, atol=1e-5)


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
    with pytest.raises(ModelError, match="'llama' model"):
        hf_qwen3(checkpoint=tmp_path)
    with pytest.raises(ModelError, match="remove"):
        hf_llama(checkpoint=tmp_path, vocab_size=3)
    with pytest.raises(ModelError, match=r"config.json does not exist"):
        hf_llama(checkpoint=tmp_path / "nowhere")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        materialize(hf_llama(checkpoint=tmp_path), 0)


def test_a_model_takes_checkpoints_of_its_modules(tmp_path):
    theirs = LlamaForCausalLM(LlamaConfig(**LLAMA))
    theirs.save_pretrained(tmp_path)
    model = MultimodalModel({"audio": whisper_encoder(out_width=16, **WHISPER), "llm": hf_llama(checkpoint=tmp_path)})
    assert torch.equal(model.llm.model.lm_head.weight, theirs.lm_head.weight)
