"""Towers of transformers for sound by their folders: the rows of its own eager forward, in stages, with zero clips."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.encoder import Encoder
from hetero_strategy.model.inputs import EncoderInputs, Packing
from hetero_strategy.model.materialize import materialize
from hetero_strategy.model.read_spec import in_no_stage
from hetero_strategy.zoo.hf_encoder import hf_encoder
from tests.zoo.encoder_stages import assert_two_stages_are_the_whole, gradients

WIDTH, BANDS, FRAMES = 8, 8, 24
LAYERS = {"encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
SPECTRA = {"d_model": 32, **LAYERS, "num_mel_bins": BANDS, "max_source_positions": FRAMES // 2}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 60}
DECODER = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "vocab_size": 60}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WAVES = {
    **TEXT, "num_hidden_layers": 3, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


class Case(NamedTuple):
    """A model, tiny."""

    config: Callable[[], Any]
    tower: str = ""
    """FQN of its tower."""
    numbers: int = BANDS * FRAMES
    """Numbers of a raw row."""
    frozen: str = ""
    """A parameter that the rows do not reach."""


CASES = {
    "whisper": Case(lambda: transformers.WhisperConfig(**SPECTRA, **DECODER, **IDS, encoder_layerdrop=0.9), "encoder"),
    "qwen2_audio": Case(
        lambda: transformers.Qwen2AudioConfig(
            audio_config={"model_type": "qwen2_audio_encoder", **SPECTRA}, text_config={"model_type": "qwen2", **TEXT}
        ),
        "audio_tower",
    ),
    "voxtral": Case(
        lambda: transformers.models.voxtral.configuration_voxtral.VoxtralEncoderConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_mel_bins=BANDS, max_source_positions=FRAMES // 2,
        )
    ),
    "wav2vec2": Case(lambda: transformers.Wav2Vec2Config(**WAVES), "", 1, "masked_spec_embed"),
    "hubert": Case(lambda: transformers.HubertConfig(**WAVES, do_stable_layer_norm=True), "", 1, "masked_spec_embed"),
    "wav2vec2-bert": Case(
        lambda: transformers.Wav2Vec2BertConfig(**TEXT | {"num_hidden_layers": 3}, feature_projection_input_dim=BANDS),
        "", BANDS, "masked_spec_embed",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a model with random values, norms included, once."""
    root = tmp_path_factory.mktemp("sound")

    def folder(name: str) -> Path:
        if not (path := root / name).exists():
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(CASES[name].config())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.05)
            model.save_pretrained(path)
        return path

    return folder


def encoder(folder: Path, **options: Any) -> Encoder:
    torch.manual_seed(1)
    made = hf_encoder(folder, WIDTH, **options)
    materialize(made, 0, name="audio")
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # type: ignore[assignment]
    return made


def clips(name: str, made: Encoder) -> EncoderInputs:
    """Draw windows, or clips of several lengths."""
    backbone: Any = made.backbone
    lengths = (400, 333, 5, 400) if name == "wav2vec2-bert" else (400, 333, 400)  # 5 frames are fewer than bands
    sizes = np.array([[1], [2], [1]] if backbone.is_fixed else [[length] for length in lengths])
    return inputs_of(backbone, sizes, CASES[name].numbers)


def inputs_of(backbone: Any, sizes: np.ndarray, numbers: int) -> EncoderInputs:
    values = torch.randn(int(sizes[:, 0].sum()), numbers, generator=torch.Generator().manual_seed(1))
    rows, packing = backbone.output_rows(sizes), Packing.of(backbone.packing_rows(sizes))
    return EncoderInputs(values, sizes, rows, packing, raw_rows=sizes[:, 0])


def alone(name: str, folder: Path, inputs: EncoderInputs, layer: int = -1) -> Tensor:
    """Run transformers' own forward clip by clip."""
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tower, rows = model.get_submodule(CASES[name].tower), []
    for values in inputs.values.split(inputs.sizes[:, 0].tolist()):
        if CASES[name].numbers == 1:
            values = values.T
        elif CASES[name].numbers == BANDS:
            values = values[None]
        else:
            values = values.view(-1, BANDS, FRAMES)
        out = tower(values, output_hidden_states=True)
        state = out.last_hidden_state if layer == -1 else out.hidden_states[layer]
        rows.append(state.flatten(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("layer", [-1, -2])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_transformers(name: str, layer: int, folders: Callable[[str], Path]) -> None:
    made = encoder(folders(name), layer=layer).eval()
    inputs = clips(name, made)
    with torch.no_grad():
        rows, expected = made.backbone(inputs), alone(name, folders(name), inputs, layer)
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_stages_are_the_whole_bit_for_bit(name: str, folders: Callable[[str], Path]) -> None:
    made = encoder(folders(name))
    assert len(made.blocks()) == 3 and not in_no_stage(made)
    assert_two_stages_are_the_whole(made, clips(name, made))


@pytest.mark.parametrize("name", CASES)
def test_an_instance_without_clips_has_zero_gradients(name: str, folders: Callable[[str], Path]) -> None:
    made = encoder(folders(name))
    inputs = inputs_of(made.backbone, np.zeros((0, 1), np.int64), CASES[name].numbers)
    rows = made(inputs)
    assert rows.shape == (0, WIDTH)
    found = gradients(made, lambda: rows.sum().backward())
    assert found.keys() == {fqn for fqn, p in made.named_parameters() if p.requires_grad}
    assert not any(gradient.any() for gradient in found.values())
    weights = made.hf_weights()
    assert weights is not None
    if CASES[name].frozen:
        fqn = f"backbone.model.{CASES[name].frozen}"
        assert not made.get_parameter(fqn).requires_grad and fqn in weights.names
    if name == "whisper":
        assert weights.config["encoder_layerdrop"] == 0.9  # layers are not skipped here, and an export keeps it


@pytest.mark.parametrize("projector", ["mlp", "linear", "merge", "shuffle"])
@pytest.mark.parametrize("name", ["whisper", "wav2vec2"])
def test_projectors_join_neighbours_in_time(name: str, projector: str, folders: Callable[[str], Path]) -> None:
    made = encoder(folders(name), projector=projector).eval()
    inputs, joins = clips(name, made), 2 if projector in ("merge", "shuffle") else 1
    expected = alone(name, folders(name), inputs)
    lengths = encoder(folders(name)).backbone.output_rows(inputs.sizes)  # type: ignore[operator, union-attr]
    padded = [nn.functional.pad(rows, (0, 0, 0, -len(rows) % joins)) for rows in expected.split(lengths.tolist())]
    with torch.no_grad():
        found = made.backbone(inputs)
    torch.testing.assert_close(found, torch.cat(padded).view(-1, joins * 32), rtol=1e-5, atol=1e-4)
    assert made(inputs).shape == (int(inputs.rows.sum()), WIDTH) and len(found) == inputs.rows.sum()


def test_the_folder_says_how_sound_is_read(folders: Callable[[str], Path], tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    rng = np.random.default_rng(0)
    for name, samples in (("a", 1900), ("b", 2400)):
        soundfile.write(tmp_path / f"{name}.wav", rng.normal(size=samples).astype(np.float32) / 9, 2400)
    whisper = transformers.WhisperFeatureExtractor(BANDS, 2400, hop_length=100, n_fft=200, chunk_length=1)
    for name, extractor in (("whisper", whisper), ("wav2vec2", transformers.Wav2Vec2FeatureExtractor(1, 2400))):
        extractor.save_pretrained(folders(name))
        made = encoder(folders(name)).eval()
        processor: Any = pickle.loads(pickle.dumps(made.processor))
        files = [tmp_path / "a.wav", tmp_path / "b.wav"]
        measured = [processor.measure(file) for file in files]
        values = [processor.load(file) for file in files]
        inputs = processor.collate(values, np.array([s for s, _ in measured]), np.array([r for _, r in measured]))
        rows = made.backbone(inputs)
        expected = alone(name, folders(name), inputs).split(processor.packing_rows(inputs.sizes).tolist())
        counts = [r for _, r in measured]
        if name == "whisper":
            assert counts == [10, 12]  # of 12 rows of a window, those of sound: 19 frames and 24
        expected = torch.cat([each[:count] for each, count in zip(expected, counts, strict=True)])
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-4)
        assert made.runs_vary == made.backbone.runs_vary == (name != "whisper")


def test_folders_that_have_no_tower_for_sound_are_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a WhisperModel, in which no part turns pictures into rows"):
        hf_encoder(folders("whisper"), WIDTH, media="image")
    made = encoder(folders("whisper"))
    with pytest.raises(DataError, match="raw rows have 8 numbers, expected windows of 8 x 24 = 192"):
        made(inputs_of(made.backbone, np.array([[20]]), BANDS))
    with pytest.raises(ModelError, match="12 rows of a window cannot be merged by 5"):
        hf_encoder(folders("whisper"), WIDTH, projector="merge", merge=5)
    assert made.check_tp(2) == [] and made.check_tp(3)
    few = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    text = {**few, "intermediate_size": 32, "vocab_size": 60, "vocab_size_per_layer_input": 60}
    parts: dict[str, Any] = {"audio_config": few, "vision_config": few, "text_config": text}
    transformers.AutoConfig.for_model("gemma4", **parts).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="a Gemma4Model, which has towers for both; say media='image' or"):
        hf_encoder(tmp_path, WIDTH)
