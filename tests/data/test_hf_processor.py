"""Transformers' own processors: values, and sizes from blank items, against calls of transformers alone."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.hf_processor import HFProcessor
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, DataError
from tests.data.hf_folders import FAMILIES, made
from tests.stock import tokenizer

RNG = np.random.default_rng(0)


def processor_of(folder: Path, name: str) -> HFProcessor:
    counts = None if FAMILIES[name].texts else raw
    return HFProcessor(str(made(folder, name)), output_rows=counts)


def raw(sizes: np.ndarray) -> np.ndarray:
    return sizes[:, 0]


def picture(path: Path, size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    shape = (*size, len(mode)) if len(mode) > 1 else size
    image = Image.fromarray(RNG.integers(0, 256, shape, dtype=np.uint8), mode)
    image.save(path, compress_level=0)
    return image


def images_alone(folder: str, image: Image.Image) -> dict[str, np.ndarray]:
    """What the image processor makes of a picture, without anything of ours."""
    from transformers import AutoImageProcessor

    output = AutoImageProcessor.from_pretrained(folder, backend="pil")([image], return_tensors="pt")
    return {name: np.asarray(value) for name, value in output.items()}


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_of_blank_pictures_are_those_of_decoded_ones(tmp_path: Path, name: str, count: int) -> None:
    if needs := FAMILIES[name].needs:
        pytest.importorskip(needs)
    processor, path = processor_of(tmp_path, name), tmp_path / "a.png"
    alone = processor._parts[0]
    assert (processor._quick[0] is not alone) == (alone.backend == "pil")  # pixels of blank pictures are not computed
    for _ in range(count):
        size = tuple(int(side) for side in RNG.integers(20, 500, 2))
        image = picture(path, size)
        sizes, rows = processor.measure(path)
        values = processor.load(path, sizes)  # refuses other sizes than these
        assert sizes[1:3] == size and values.shape == (sizes[0], processor.feature)
        output = images_alone(processor.folder, image)
        pixels, mask = output["pixel_values"], output.get("pixel_attention_mask")
        if mask is not None and mask.shape == pixels.shape[: mask.ndim]:
            pixels = pixels[mask.astype(bool)]
        if "tile" in processor.columns:
            pixels = np.moveaxis(pixels, -3, -1)
        assert np.allclose(values.reshape(-1), pixels.reshape(-1), atol=1e-6)
        for column in processor.columns.keys() & output.keys():
            if "mask" in column:
                assert sizes[processor.columns[column]] == (output[column].sum(),)
                continue
            assert list(sizes[processor.columns[column]]) == output[column].reshape(-1).tolist()
        if processor.placeholder:
            whole = processor._parts[1](text=["a" + processor.placeholder], images=[image])
            assert np.ravel(whole["input_ids"]).tolist().count(processor.row_id) == rows
            written = processor.written(sizes)
            assert sum(written[1::2]) == rows and np.prod(np.shape(whole["pixel_values"])) == values.size


@pytest.mark.parametrize("fault", ["writes", "sizes"])
def test_a_processor_that_needs_pixels_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    def rescale(self: Any, image: np.ndarray, *_: Any, **options: Any) -> np.ndarray:
        if fault == "writes":
            image += 1
        return image[:, : 10 + image.strides[-1]].astype(np.float32)  # zeros that are not stored have no strides

    monkeypatch.setattr(CLIPImageProcessorPil, "rescale", rescale, raising=False)
    processor, image = processor_of(tmp_path, "clip"), picture(tmp_path / "a.png", (60, 90))
    assert processor._quick[0] is processor._parts[0]
    sizes, _ = processor.measure(tmp_path / "a.png")
    assert np.array_equal(
        processor.load(tmp_path / "a.png", sizes).reshape(-1),
        images_alone(processor.folder, image)["pixel_values"].reshape(-1),
    )


def test_tiles_of_several_sizes_are_rows_of_pixels(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(
            {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False, "size": {"shortest_edge": 32}}
        )
    )
    processor = HFProcessor(str(tmp_path), output_rows=raw)
    image = picture(tmp_path / "a.png", (40, 90))
    sizes, _ = processor.measure(tmp_path / "a.png")
    values = processor.load(tmp_path / "a.png", sizes)
    height, width = sizes[processor.columns["tile"]]
    assert (height, width) == (32, 72) and values.shape == (32 * 72, 3) == (sizes[0], processor.feature)
    pixels = images_alone(processor.folder, image)["pixel_values"][0]
    assert np.array_equal(values.reshape(height, width, 3).transpose(2, 0, 1), pixels)


def test_values_depend_on_the_config_and_so_does_the_key(tmp_path: Path) -> None:
    image = picture(tmp_path / "a.png", (60, 70))
    first = HFProcessor(str(made(tmp_path, "clip")), output_rows=raw)
    before, settings = first.load(tmp_path / "a.png"), first.settings()
    file = Path(first.folder) / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.2, 0.3]}))
    second = HFProcessor(first.folder, output_rows=raw)
    after = second.load(tmp_path / "a.png")
    assert np.array_equal(after.reshape(-1), images_alone(first.folder, image)["pixel_values"].reshape(-1))
    assert np.abs(after - before).max() > 0.1 and settings != second.settings()
    json.dumps(settings)


def test_the_key_has_all_that_decides_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, "qwen2_5_vl")
    first = HFProcessor(str(folder)).settings()
    assert first == HFProcessor(str(folder)).settings() and first["row"][0] == "<|image_pad|>"
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text() + " ")
    second = HFProcessor(str(folder)).settings()
    monkeypatch.setattr("transformers.__version__", "0.0")
    third = HFProcessor(str(folder)).settings()
    assert first != second != third
    monkeypatch.setattr(HFProcessor, "_written", lambda *_: ("<|vision_start|>", 5, ""))
    assert third["blank"] != HFProcessor(str(folder)).settings()["blank"]


def test_pictures_are_upright_and_rgb(tmp_path: Path) -> None:
    processor = HFProcessor(str(made(tmp_path, "llava")))
    image = Image.fromarray(RNG.integers(0, 256, (40, 80, 3), dtype=np.uint8))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    turned, upright = (processor.measure(tmp_path / f"{name}.png") for name in ("turned", "upright"))
    assert turned == upright and turned[0][1:3] == (80, 40)
    assert np.array_equal(*(processor.load(tmp_path / f"{name}.png") for name in ("turned", "upright")))
    for mode in ("L", "RGBA"):
        image = picture(tmp_path / "a.png", (50, 50), mode)
        alone = images_alone(processor.folder, image.convert("RGB"))["pixel_values"]
        assert np.array_equal(processor.load(tmp_path / "a.png").reshape(-1), alone.reshape(-1))


def test_inputs_of_an_encoder_and_their_parts(tmp_path: Path) -> None:
    processor = pickle.loads(pickle.dumps(processor_of(tmp_path, "llava_next")))
    sizes, rows, values = [], [], []
    for number, size in enumerate([(50, 50), (40, 200), (300, 90)]):
        picture(tmp_path / f"{number}.png", size)
        measured = processor.measure(tmp_path / f"{number}.png")
        sizes.append(measured[0])
        rows.append(measured[1])
        values.append(processor.load(tmp_path / f"{number}.png", measured[0]))
    inputs = processor.collate(values, np.array(sizes), np.array(rows))
    assert inputs.packing.lengths.tolist() == processor.raw_rows(np.array(sizes)).tolist() == list(map(len, values))
    part = inputs.only(np.array([2, 1]))
    assert torch.equal(part.values, torch.from_numpy(np.concatenate([values[2], values[1]])))
    assert torch.equal(part.only(np.array([1])).values, torch.from_numpy(values[1]))
    none = processor.collate([], np.zeros((0, len(processor.size_names))), np.zeros(0))
    assert none.values.shape == (0, processor.feature)


def test_sound_at_the_rate_of_its_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import soundfile

    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 2})
    )
    processor = HFProcessor(str(tmp_path), "audio", "audio", output_rows=raw)
    soundfile.write(tmp_path / "a.wav", RNG.uniform(-0.5, 0.5, 8000), 8000)
    processed, lengths = HFProcessor._processed, list[int]()

    def counted(own: HFProcessor, item: Any, parts: Any) -> Any:
        lengths.append(len(item))
        return processed(own, item, parts)

    monkeypatch.setattr(HFProcessor, "_processed", counted)
    sizes, rows = processor.measure(tmp_path / "a.wav")
    assert lengths == [16000, 40007, 32000, 64000, 16000]  # sound has no quick way to try: probes, most samples, it
    values = processor.load(tmp_path / "a.wav", sizes)
    assert sizes[:2] == (1, 16000) and rows == 1 and processor.tile == (8, 200) and values.shape == (1, 1600)
    from transformers import AutoFeatureExtractor

    from hetero_strategy.data.media import at_rate

    wave = at_rate(soundfile.read(tmp_path / "a.wav", dtype="float32")[0], 8000, 16000)
    alone = AutoFeatureExtractor.from_pretrained(tmp_path)(wave, sampling_rate=16000, return_tensors="np")
    assert np.allclose(values.reshape(-1), alone["input_features"].reshape(-1), atol=1e-5)


def test_rows_of_sound_are_those_that_its_processor_writes(tmp_path: Path) -> None:
    import soundfile

    extra = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": extra, "pad_token": "<pad>"}
    tokenizer(tmp_path, ("<pad>", *extra.values()), **config)
    sound = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"processor_class": "Qwen2AudioProcessor", **sound}))
    processor = HFProcessor(str(tmp_path), "audio", "audio")
    for samples in (5000, 16001, 32000):
        soundfile.write(tmp_path / "a.wav", RNG.uniform(-0.5, 0.5, samples), 16000)
        sizes, rows = processor.measure(tmp_path / "a.wav")
        assert processor.load(tmp_path / "a.wav", sizes).shape == (1, 8 * 200)
        wave = soundfile.read(tmp_path / "a.wav", dtype="float32")[0]
        output = processor._parts[1](text="<|AUDIO|>", audio=[wave], sampling_rate=16000)
        assert np.ravel(output["input_ids"]).tolist().count(processor.row_id) == rows
        assert processor.written(sizes) == ("", rows, "") and not processor.writes_text
        (frames,) = sizes[processor.columns["feature_attention_mask"]]
        assert frames == np.sum(output["feature_attention_mask"]) and 4 * rows <= frames < 4 * rows + 4
    soundfile.write(tmp_path / "a.wav", np.zeros(100), 16000)
    with pytest.raises(DataError, match=r"a\.wav: audio of 100 samples becomes no row") as error:
        processor.measure(tmp_path / "a.wav")
    assert error.value.kind == "no rows"


def test_recordings_are_not_cut_and_odd_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import soundfile

    sound = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(sound))
    processor = HFProcessor(str(tmp_path), "audio", "audio", output_rows=raw)
    for samples in (32000, 32001):
        soundfile.write(tmp_path / f"{samples}.wav", np.zeros(samples), 16000)
    assert processor.measure(tmp_path / "32000.wav")[1] == 1
    with pytest.raises(
        DataError, match=r"32001\.wav: 32001 samples at 16000 Hz, of which Whisper.* only the first 320"
    ):
        processor.measure(tmp_path / "32001.wav")

    processed = HFProcessor._processed

    def other(self: HFProcessor, item: Any, parts: Any) -> dict[str, Any]:  # twice the frames of other items
        output = dict(processed(self, item, parts))
        frames = np.concatenate([output["input_features"]] * (2 if len(item) == 999 else 1), axis=2)
        return output | {"input_features": frames} | ({"more": np.ones(1, int)} if len(item) == 998 else {})

    monkeypatch.setattr(HFProcessor, "_processed", other)
    for samples, reason in (
        (999, r"makes rows or tiles of \[8, 400\], and of other items \[8, 200\]"),
        (998, "gives .* 1"),
    ):
        path = tmp_path / f"{samples}.wav"
        soundfile.write(path, np.zeros(samples), 16000)
        for work in (processor.measure, processor.load):
            with pytest.raises(DataError, match=rf"{samples}\.wav: Whisper.* refuses this .*: it {reason}") as error:
                work(path)
            assert error.value.kind == "refused by the processor"


def test_a_picture_that_cannot_be_processed_is_named_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = HFProcessor(os.path.relpath(made(tmp_path, "llava")))
    picture(tmp_path / "a.png", (50, 50))
    processor.measure(tmp_path / "a.png")
    monkeypatch.chdir("/")  # as in a Ray actor
    assert pickle.loads(pickle.dumps(processor)).load(tmp_path / "a.png").size

    def refuse(self: HFProcessor, item: Any, parts: Any) -> Any:
        raise TypeError("not this one")

    monkeypatch.setattr(HFProcessor, "_processed", refuse)
    with pytest.raises(DataError, match=r"a\.png: CLIP.* refuses this image of 50 x 50 pixels: not this one"):
        processor.load(tmp_path / "a.png")


def test_an_index_keeps_sizes(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, "qwen2_5_vl")
    picture(tmp_path / "a.png", (60, 90))
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}]
    (tmp_path / "train.json").write_text(json.dumps([{"id": "0", "image": "a.png", "conversations": turns}]))
    texts = ChatTokenizer(processor.folder)
    index = build_index(tmp_path / "train.json", texts, {"vision": processor}, progress=False)
    sizes, rows = processor.measure(tmp_path / "a.png")
    table = index.items["vision"]
    assert table.sizes.tolist() == [list(sizes)] and table.rows.tolist() == [rows]
    assert (index.ids == processor.row_id).sum() == rows


def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path, match: str, **fields: Any) -> None:
        picture(tmp_path / "a.png", (60, 90))
        with pytest.raises(ConfigError, match=match):
            HFProcessor(str(folder), **fields).measure(tmp_path / "a.png")

    refused(tmp_path, "has neither")
    refused(made(tmp_path, "clip"), "does not say how many rows .* give output_rows=")
    refused(made(tmp_path, "clip"), "kind is 'video'", kind="video")
    file = made(tmp_path, "siglip") / "preprocessor_config.json"
    if importlib.util.find_spec("torchvision") is None:
        file.write_text(json.dumps({"image_processor_type": "Cohere2VisionImageProcessor"}))
        refused(file.parent, r"needs torchvision, which is not installed: pip install 'hetero-strategy\[vision\]'")
    if importlib.util.find_spec("num2words") is None:
        refused(made(tmp_path, "smolvlm"), r"needs num2words, which is not installed: .*hetero-strategy\[vision\]")
    file.write_text(json.dumps({"image_processor_type": "Other", "auto_map": {"AutoImageProcessor": "code.Other"}}))
    refused(file.parent, "transformers cannot make its processor: .*trust_remote_code")
    refused(
        made(tmp_path, "llava", model_type="llava", image_token_index=9),
        r"rows of image take the place of token 9 \(.*\), but the processor writes '<image>', which is token \d+",
    )
    picture(tmp_path / "a.png", (1, 900))
    with pytest.raises(DataError, match=r"a\.png: Qwen2VL.* refuses this image of 1 x 900 pixels: .*aspect ratio"):
        HFProcessor(str(made(tmp_path, "qwen2_5_vl"))).measure(tmp_path / "a.png")
