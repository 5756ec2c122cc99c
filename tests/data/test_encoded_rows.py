"""Rows of a frozen backbone in a folder: those of the backbone, or a message."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetero_strategy.data.encoded_rows import EncodedRows, encoded, write_rows
from hetero_strategy.data.media import ImageProcessor
from hetero_strategy.data.processors import processors_of
from hetero_strategy.errors import ConfigError, DataError, HeteroError
from hetero_strategy.model import Encoder, MultimodalModel
from hetero_strategy.model.inputs import EncoderInputs
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.zoo import hf_llama, siglip2_encoder
from recipes.digits import write_digits
from recipes.encode import encode_rows

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8,
    "num_channels": 1, "num_patches": 16,
}  # fmt: skip
PROCESSOR = ImageProcessor(patch_size=8, merge=2, channels=1, max_patches=128)


def encoder(**options: Any) -> Encoder:
    return siglip2_encoder(**{"out_width": 16, "merge": 2, **(SIZES if "checkpoint" not in options else {}), **options})


def model_of(vision: Encoder, *, seed: int = 7, values: bool = False) -> MultimodalModel:
    sizes = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    if values:
        return MultimodalModel({"vision": vision, "llm": hf_llama(vocab_size=64, hidden_size=16, **sizes)}, seed=seed)
    with models_without_values():
        return model_of(vision, seed=seed, values=True)


def encode(paths: list[Path], folder: Path, **options: Any) -> int:
    more = {"rows": 40, "file_bytes": 1500, **options}
    return encode_rows(model_of(encoder()), "vision", PROCESSOR, paths, folder, **more)


def reader(folder: Path, *, seed: int = 7, processor: Any = PROCESSOR, **options: Any) -> EncodedRows:
    """The processor of the data module, when it has started."""
    made = processors_of(model_of(encoded(encoder(**options), folder), seed=seed), {"vision": processor})["vision"]
    assert isinstance(made, EncodedRows)
    made.check_weights()
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = write_digits(tmp_path_factory.mktemp("digits"), train=30, val=4, seed=3, progress=False)
    return sorted(folder.rglob("*.png"))


@pytest.fixture
def folder(pictures: list[Path], tmp_path: Path) -> Path:
    assert encode(pictures, tmp_path / "rows") == len(pictures)
    return tmp_path / "rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_those_of_the_backbone(pictures: list[Path], tmp_path: Path, dtype: torch.dtype) -> None:
    encode(pictures, tmp_path, dtype=dtype)
    rows, live = reader(tmp_path), model_of(encoder(), values=True).modules_by_name["vision"]
    backbone: Any = live.backbone.to(dtype)
    few = pictures[:3]
    assert [rows.measure(path)[1] for path in few] == [PROCESSOR.measure(path)[1] for path in few]
    sizes = np.array([rows.measure(path)[0] for path in few])
    inputs = rows.collate([rows.load(path) for path in few], sizes, sizes[:, 0]).narrowed(dtype)
    for number, path in enumerate(few):
        grid, count = PROCESSOR.measure(path)
        alone = PROCESSOR.collate([PROCESSOR.load(path)], np.array([grid]), np.array([count])).as_numbers()
        wanted = backbone(alone.narrowed(dtype)).detach().double()
        found = inputs.only(np.array([number])).values
        assert found.dtype == dtype and found.shape == (count, 64)
        bound = torch.finfo(dtype).eps * 20
        assert torch.allclose(found.double(), wanted, rtol=bound, atol=bound * float(wanted.abs().max()))
    empty = rows.collate([], np.zeros((0, 1)), np.zeros(0))
    assert empty.values.shape == (0, 64) and empty.values.dtype == dtype


def test_a_loader_worker_reads_the_same(pictures: list[Path], folder: Path) -> None:
    rows = reader(folder)
    copy = pickle.loads(pickle.dumps(rows))
    assert copy.settings() == rows.settings()
    assert all(np.array_equal(copy.load(path), rows.load(path)) for path in pictures)


def killed(pictures: list[Path], folder: Path) -> None:
    """Encode, and die at the tenth picture."""
    load, count = ImageProcessor.load, iter(range(10))

    def counted(self: ImageProcessor, *given: Any) -> np.ndarray:
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return load(self, *given)

    ImageProcessor.load = counted  # type: ignore[method-assign]
    encode(pictures, folder, rows=1, file_bytes=1)


def test_a_job_that_was_killed_goes_on(pictures: list[Path], tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(pictures, tmp_path))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    there = len(list(tmp_path.glob("*.safetensors")))
    assert there <= 10 < len(pictures)
    if there:
        with pytest.raises(DataError, match=r"is new or has changed: .* run python -m recipes.encode"):
            for path in pictures:
                reader(tmp_path).load(path)
    assert encode(pictures, tmp_path) == len(pictures) - there
    assert encode(pictures, tmp_path) == 0
    rows = reader(tmp_path)
    assert all(len(rows.load(path)) == PROCESSOR.measure(path)[1] for path in pictures)


def test_two_processes_encode_a_share_each(pictures: list[Path], folder: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    assert sum(encode(pictures[first::2], both) for first in (0, 1)) == len(pictures)
    one, other = reader(folder), reader(both)
    assert all(np.allclose(one.load(path), other.load(path), rtol=1e-4, atol=1e-5) for path in pictures)


def test_damage_is_noticed_wherever_it_is(pictures: list[Path], folder: Path) -> None:
    """Each part of a file, one byte at a time, and a file that is cut short."""
    (path, *_) = sorted(folder.glob("*.safetensors"))
    whole, sound = path.read_bytes(), reader(folder)
    data = 8 + int.from_bytes(whole[:8], "little")
    expected = {picture: sound.load(picture) for picture in pictures}
    noticed = 0
    for place in [*range(0, data, 7), data, (data + len(whole)) // 2, len(whole) - 1]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            damaged = reader(folder)
            for picture in pictures:
                assert np.array_equal(damaged.load(picture), expected[picture]), place
        except HeteroError as error:
            assert "recipes.encode" in str(error), error
            noticed += 1
        assert noticed or place < data
    assert noticed > 20
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"{path.name} is damaged .*; delete it and run python -m recipes.encode"):
        reader(folder)
    path.unlink()
    assert 0 < encode(pictures, folder) < len(pictures)
    assert all(np.allclose(reader(folder).load(p), rows, rtol=1e-4, atol=1e-5) for p, rows in expected.items())


def test_a_picture_that_has_changed_has_no_rows(pictures: list[Path], folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.png"
    changed.write_bytes(pictures[0].read_bytes())
    assert np.array_equal(reader(folder).load(changed), reader(folder).load(pictures[0])), "wherever the file is"
    changed.write_bytes(pictures[0].read_bytes() + b"0")
    with pytest.raises(DataError, match=r"changed.png is new or has changed: .* has no rows of it; run python"):
        reader(folder).measure(changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 8}, "weights is '.*' there and '.*' here"),
        ({"processor": {"max_patches": 64}}, "processor.max_patches is 128 there and 64 here"),
        ({"processor": {"mean": 0.4}}, "processor.mean is 0.5 there and 0.4 here"),
        ({"hidden_act": "relu"}, "structure is"),
        ({"layer_norm_eps": 1e-3}, "structure is"),
    ],
)
def test_rows_of_another_encoder_are_refused_when_the_data_module_starts(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    given = {"processor": {"max_patches": 128}, **options}
    with pytest.raises(
        ConfigError, match=f"holds rows of another encoder: .*{message}.*; run python -m recipes.encode"
    ):
        reader(folder, **given)


def test_rows_of_another_dtype_are_refused(pictures: list[Path], folder: Path) -> None:
    rows = reader(folder).collate([], np.zeros((0, 1)), np.zeros(0))
    assert rows.narrowed(torch.float32) is rows
    with pytest.raises(DataError, match="encoded rows are float32, but the module computes in bfloat16; run python"):
        rows.narrowed(torch.bfloat16)
    with pytest.raises(ConfigError, match="dtype is 'float32' there and 'bfloat16' here, weights is"):
        encode(pictures, folder, dtype=torch.bfloat16)


def test_what_cannot_be_encoded_is_refused(pictures: list[Path], tmp_path: Path) -> None:
    same = lambda inputs: inputs  # noqa: E731
    with pytest.raises(ConfigError, match="the encoder has before=, which may read values or sizes; leave it out"):
        encode_rows(model_of(encoder(before=same)), "vision", PROCESSOR, pictures, tmp_path)
    marked = type("Marked", (ImageProcessor,), {"placeholder": "<|image_pad|>"})()
    with pytest.raises(
        ConfigError, match=r"writes for an item, such as <\|image_pad\|>, .* give the processor output_rows="
    ):
        encode_rows(model_of(encoder()), "vision", marked, pictures, tmp_path)
    with pytest.raises(ConfigError, match="encoded names 'llm', which is no encoder; the modules are"):
        encode_rows(model_of(encoder()), "llm", PROCESSOR, pictures, tmp_path)
    with pytest.raises(DataError, match=f"{tmp_path} has no encoded rows; run python -m recipes.encode"):
        reader(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written: File exists; mend that"):
        write_rows(tmp_path / "file", [], torch.zeros(1, 1), {})


def test_the_projector_begins_as_behind_the_live_backbone(folder: Path) -> None:
    live = model_of(encoder(), values=True).state_dict()
    model = model_of(encoded(encoder(), folder), values=True)
    assert {name for name in live if name not in model.state_dict()} == {n for n in live if "vision.backbone." in n}
    assert all(torch.equal(value, live[name]) for name, value in model.state_dict().items())


def test_a_projector_that_was_exported_with_the_backbone_is_kept(folder: Path, tmp_path: Path) -> None:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    torch.manual_seed(3)
    config = Siglip2VisionConfig(**{**SIZES, "vision_use_head": False})
    Siglip2VisionModel(config).save_pretrained(tmp_path / "hf")
    projector = {f"projector.{n}": torch.randn_like(p) for n, p in encoder_projector().items()}
    save_file(projector, tmp_path / "hf" / "extra.safetensors")
    for make in (encoder, lambda **options: encoded(encoder(**options), folder)):
        found = model_of(make(checkpoint=tmp_path / "hf"), values=True).modules_by_name["vision"].state_dict()
        assert all(torch.equal(found[name], value) for name, value in projector.items())


def encoder_projector() -> dict[str, torch.Tensor]:
    return model_of(encoder(), values=True).modules_by_name["vision"].projector.state_dict()


def test_rows_pass_a_module_that_has_its_projector_alone(pictures: list[Path], folder: Path) -> None:
    rows, live = reader(folder), model_of(encoder(), values=True).modules_by_name["vision"]
    module = model_of(encoded(encoder(), folder), values=True).modules_by_name["vision"]
    grid, count = PROCESSOR.measure(pictures[0])
    inputs: EncoderInputs = PROCESSOR.collate([PROCESSOR.load(pictures[0])], np.array([grid]), np.array([count]))
    read = rows.collate([rows.load(pictures[0])], np.array([[count]]), np.array([count]))
    assert torch.allclose(module(read), live(inputs), rtol=1e-4, atol=1e-5)
    assert (
        module.flops(np.array([count]))
        == sum(2 * p.numel() for p in live.projector.parameters() if p.ndim == 2) * count
    )
