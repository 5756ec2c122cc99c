from __future__ import annotations

import json
import pickle
import struct
import zlib
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image, ImageOps, PngImagePlugin, TiffImagePlugin, features

from hetero_strategy.data.media import AudioProcessor, ImageProcessor, ImageTarget
from hetero_strategy.data.media_file import _streamed, on_white, reading
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.model.kind import TargetProcessor

SUFFIXES = ["jpg", "png", "webp", *(["avif"] if features.check("avif") else [])]
"""Of pictures that say how the camera was held."""

RNG = np.random.default_rng(0)


def picture(path: Path, width: int, height: int, mode: str = "RGB") -> Path:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    Image.fromarray(RNG.integers(0, 256, shape).astype(np.uint8)).save(path)
    return path


def sound(path: Path, samples: int, rate: int = 16000, channels: int = 1) -> Path:
    soundfile.write(path, RNG.uniform(-0.5, 0.5, (samples, channels)), rate, subtype="PCM_16")
    return path


def numbers(processor: ImageProcessor, path: Path) -> np.ndarray:
    """What an encoder sees of an image, float32 ``[R, feature]``."""
    sizes, rows = processor.measure(path)
    inputs = processor.collate([processor.load(path, sizes)], np.array([sizes]), np.array([rows]))
    assert inputs.values.dtype == torch.uint8
    return inputs.as_numbers().values.numpy()


@pytest.mark.parametrize(("width", "height"), [(64, 48), (16, 16), (160, 16)])
def test_patches_are_siglip2s(tmp_path: Path, width: int, height: int) -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    path = picture(tmp_path / "a.png", width, height)
    grid = (height // 16, width // 16)
    reference = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=grid[0] * grid[1])
    expected = reference(Image.open(path), return_tensors="np")
    assert tuple(expected["spatial_shapes"][0]) == grid
    processor = ImageProcessor(patch_size=16)
    assert processor.measure(path) == (grid, grid[0] * grid[1])
    np.testing.assert_allclose(numbers(processor, path), expected["pixel_values"][0], atol=1e-6)


def test_native_resolution_aspect_and_limit(tmp_path: Path) -> None:
    processor = ImageProcessor(patch_size=8, merge=2, max_patches=64)
    assert processor.measure(picture(tmp_path / "a.png", 41, 23)) == ((2, 6), 3)  # 41 x 23 -> 48 x 16
    assert processor.measure(picture(tmp_path / "b.png", 3, 2)) == ((2, 2), 1)
    for width, height in ((320, 80), (80, 320), (4000, 16), (16, 4000), (129, 128), (1000, 999)):
        path = picture(tmp_path / "c.png", width, height)
        (h, w), rows = processor.measure(path)
        assert h * w <= 64 and h % 2 == w % 2 == 0 and rows == h * w // 4 >= 1
        assert processor.load(path).shape == (h * w, processor.feature)
    (h, w), _ = processor.measure(picture(tmp_path / "d.png", 320, 80))
    assert w == 4 * h


def test_grey_and_channel_statistics(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 16, 8, mode="L")
    grey = numbers(ImageProcessor(patch_size=8, channels=1, mean=0.0, std=1.0), path)
    pixels = np.asarray(Image.open(path), np.float32) / 255
    np.testing.assert_allclose(grey[1].reshape(8, 8), pixels[:, 8:], atol=1e-6)
    colour = numbers(ImageProcessor(patch_size=8, mean=(0.1, 0.2, 0.3), std=[1, 2, 4]), path)  # type: ignore[arg-type]
    np.testing.assert_allclose(colour[0].reshape(8, 8, 3)[..., 2], (pixels[:, :8] - 0.3) / 4, atol=1e-6)
    with pytest.raises(ConfigError, match="mean has 2 numbers for 3 channels"):
        ImageProcessor(mean=(1.0, 2.0))
    with pytest.raises(ConfigError, match="max_patches 3"):
        ImageProcessor(merge=2, max_patches=3)
    for fields, message in (
        ({"std": 0}, r"std is 0; give a number above 0, by which"),
        ({"std": (0.5, -0.5, 0.5)}, r"std is \(0.5, -0.5, 0.5\); give a number above 0"),
        ({"mean": None}, r"mean is None; give a number, or one for each channel"),
        ({"mean": "0.5"}, r"mean is '0.5'; give a number, or"),
        ({"max_patches": "64"}, r"max_patches is '64'; use a whole number above 0"),
        ({"resample": 17}, r"resample is 17; use one of Pillow's filters: 0 \(nearest\), 1 \(lanczos\), 2 \(bil"),
        ({"resample": "bicubic"}, r"resample is 'bicubic'; use one"),
        ({"merge": 1.5}, r"merge is 1.5; use a whole number above 0"),
    ):
        with pytest.raises(ConfigError, match=rf"^ImageProcessor: {message}"):
            ImageProcessor(**fields)


def test_sixteen_bit_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for suffix in ("png", "tiff", "pgm"):  # of the last one Pillow makes 32 bit
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(values).save(path)
        patches = numbers(ImageProcessor(patch_size=8, channels=1, mean=0.0, std=1.0), path)
        np.testing.assert_allclose(patches.reshape(8, 8), values / 65535, atol=1 / 200)


def png(path: Path, bits: int, kind: int, row: bytes, width: int, transparent: bytes) -> Path:
    """Write a PNG of one row, with a tRNS chunk, such as Pillow does not write them."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, 1, bits, kind, 0, 0, 0)
    parts = ((b"IHDR", head), (b"tRNS", transparent), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))
    return path


def test_what_is_transparent_standson_white(tmp_path: Path) -> None:
    """As transformers has it; the colour below is black, at half alpha what is seen is grey."""
    from transformers.image_transforms import convert_to_rgb

    rgba = np.zeros((2, 4, 4), np.uint8)
    rgba[..., 3] = [[0, 128, 255, 60]] * 2
    rgba[1, :, 0] = 200
    whole = Image.fromarray(rgba)
    palette = Image.new("P", (4, 2), 1)
    palette.putpalette([9, 9, 9, 0, 0, 0])
    palette.putpixel((2, 0), 0)
    pictures: dict[str, tuple[Image.Image, dict[str, object]]] = {
        "rgba.png": (whole, {}),
        "rgba.webp": (whole, {"lossless": True, "exact": True}),
        "la.png": (whole.convert("LA"), {}),
        "p.png": (palette, {"transparency": 1}),
        "p.gif": (palette, {"transparency": 1}),
        "half.png": (palette, {"transparency": bytes([255, 128])}),
        "rgb.png": (whole.convert("RGB"), {"transparency": (0, 0, 0)}),
        "l.png": (whole.convert("L"), {"transparency": 0}),
    }
    for name, (image, options) in pictures.items():
        image.save(path := tmp_path / name, **options)
        with Image.open(path) as opened:
            expected = convert_to_rgb(opened, return_numpy=True)
        assert (expected > 100).any()  # not black alone
        assert (ImageProcessor(patch_size=1).load(path).reshape(2, 4, 3) == expected).all(), name
        drawn = ImageTarget(patch_size=2).load(path).reshape(2, 2, 2, 3).swapaxes(0, 1)
        assert np.allclose(drawn.reshape(2, 4, 3), expected / 127.5 - 1, atol=1e-6), name
        grey = ImageProcessor(patch_size=1, channels=1).load(path).reshape(2, 4)
        assert (grey == np.asarray(Image.fromarray(expected).convert("L"))).all(), name
    both = whole.convert("LA").convert("PA")  # which Pillow reads of some TIFFs, and writes to none
    assert (np.asarray(on_white(both, "").convert("RGB")) == convert_to_rgb(both, return_numpy=True)).all()


@pytest.mark.parametrize(
    ("bits", "kind", "row", "transparent", "expected"),
    [
        (16, 0, b"\x12\x34\x80\x34", b"\x12\x34", [255, 128]),
        (16, 2, b"\x12\x34" * 3 + b"\x80\x34" * 3, b"\x12\x34" * 3, [255, 128]),
        (8, 0, b"\x01\x09", b"\0\x01", [255, 9]),
        (2, 0, b"\x1b", b"\0\x02", [0, 85, 255, 255]),
        (4, 0, b"\x28", b"\0\x02", [255, 136]),
        (1, 0, b"\x1b", b"\0\0", [255] * 8),
    ],
)
def test_the_transparent_colour_of_a_png_is_of_its_own_bits(
    tmp_path: Path, bits: int, kind: int, row: bytes, transparent: bytes, expected: list[int]
) -> None:
    path = png(tmp_path / "a.png", bits, kind, row, len(expected), transparent)
    assert ImageProcessor(patch_size=1, channels=1).load(path).ravel().tolist() == expected


@pytest.mark.parametrize(("values", "odd"), [((0, 4095), True), ((40000, 40900), True), ((0, 4096), False)])
@pytest.mark.parametrize("colour", [False, True])
def test_sixteen_bits_of_a_narrow_range_are_odd(
    tmp_path: Path, values: tuple[int, int], odd: bool, colour: bool
) -> None:
    row = struct.pack(">2H", *values) if not colour else struct.pack(">6H", *np.repeat(values, 3))
    path = png(tmp_path / "a.png", 16, 2 if colour else 0, row, 2, b"\1\2" * (3 if colour else 1))
    said = ImageProcessor().check(path)
    assert (said is not None) == odd
    if said:
        low, high = np.array(values) // 256 * 256 if colour else values
        assert said.startswith(f"its pixels are {low} to {high} of 0 to 65535") and "scale them" in said
    Image.new("L", (160, 16), 3).save(tmp_path / "dark.tiff")
    assert ImageProcessor().check(tmp_path / "dark.tiff") is None


@pytest.mark.parametrize("resample", range(6))
def test_the_filter_is_pillows(tmp_path: Path, resample: int) -> None:
    path = picture(tmp_path / "a.png", 70, 100)
    found = ImageProcessor(patch_size=16, resample=resample).load(path)
    wanted = np.asarray(Image.open(path).resize((64, 96), Image.Resampling(resample)))
    assert (found.reshape(6, 4, 16, 16, 3).transpose(0, 2, 1, 3, 4).reshape(96, 64, 3) == wanted).all()


@pytest.mark.parametrize(("bits", "black"), [(12, True), (16, True), (16, False)])
def test_grey_tiffs_say_their_bits_and_which_end_is_black(tmp_path: Path, bits: int, black: bool) -> None:
    values = np.linspace(0, 2**bits - 1, 64).astype(np.uint16)
    data = values.astype("<u2").tobytes()
    if bits == 12:  # two in three bytes
        pairs = values.reshape(-1, 2).tolist()
        data = b"".join((first << 12 | second).to_bytes(3, "big") for first, second in pairs)
    tags = {256: 8, 257: 8, 258: bits, 259: 1, 262: int(black), 273: 8, 277: 1, 278: 8, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = struct.pack("<2sHI", b"II", 42, 8 + len(data))
    (tmp_path / "a.tiff").write_bytes(head + data + struct.pack("<H", len(tags)) + entries + bytes(4))
    found = ImageProcessor(patch_size=8, channels=1).load(tmp_path / "a.tiff").reshape(-1)
    grey = values >> bits - 8
    assert found.tolist() == (grey if black else 255 - grey).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_no_known_range_are_refused(tmp_path: Path, dtype: type) -> None:
    Image.fromarray(np.linspace(0, 200, 64, dtype=dtype).reshape(8, 8)).save(tmp_path / "a.tiff")
    for read in (ImageProcessor().measure, ImageProcessor().load):
        with pytest.raises(DataError, match=r"a.tiff: its pixels are 32-bit numbers .*; scale them and save 8"):
            read(tmp_path / "a.tiff")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_photographs_are_turned_upright(tmp_path: Path, suffix: str) -> None:
    exif, path = Image.Exif(), tmp_path / f"a.{suffix}"
    exif[0x0112] = 6
    Image.new("RGB", (64, 16), "red").save(path, exif=exif)
    processor = ImageProcessor(patch_size=16)
    assert processor.measure(path)[0] == (4, 1)
    assert processor.load(path).shape == (4, 768)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("turned", range(1, 9))
def test_photographs_are_turned_as_pillow_turns_them(tmp_path: Path, turned: int, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = turned
    pixels = np.arange(64 * 32, dtype=np.uint8).reshape(32, 64) // 8
    Image.fromarray(pixels).save(path, exif=exif)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("L"))
    found = ImageProcessor(patch_size=32, channels=1).load(path).reshape(2, 32, 32)
    assert np.array_equal(np.concatenate(list(found), axis=int(turned < 5)), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("turned", range(1, 9))
def test_tiffs_of_one_strip_are_turned(tmp_path: Path, turned: int, dtype: type) -> None:
    """Pillow maps these into memory, and garbles those that lie on a side."""
    path = tmp_path / "a.tiff"
    pixels = RNG.integers(0, np.iinfo(dtype).max, (32, 64), dtype, endpoint=True)
    Image.fromarray(pixels).save(path, tiffinfo={0x0112: turned})
    lying = pixels.T if turned > 4 else pixels  # 5 has its rows as columns, and the other sides are mirrored
    rows, columns = (turned in (3, 4, 7, 8), turned in (2, 3, 6, 7))
    expected = np.flip(lying, [axis for axis, flipped in enumerate((rows, columns)) if flipped])
    processor = ImageProcessor(patch_size=32, channels=1)
    sizes, _ = processor.measure(path)
    assert sizes == ((2, 1) if turned > 4 else (1, 2))
    found = np.concatenate(list(processor.load(path, sizes).reshape(2, 32, 32)), axis=int(turned < 5))
    assert np.array_equal(found, expected >> 8 if dtype is np.uint16 else expected)


def test_a_tiff_that_is_no_longer_as_it_was_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tiff"
    picture(path, 64, 32)
    monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "load_end", lambda image: setattr(image, "_size", (32, 64)))
    with pytest.raises(DataError, match=r"a\.tiff: .*\(32, 64\) pixels, of which its header says \(64, 32\)"):
        ImageProcessor().load(path)


def test_photographs_with_damaged_exif_are_upright(tmp_path: Path) -> None:
    text = b"Exif\0\0II*\0" + struct.pack("<IHHHI4sI", 8, 1, 0x0112, 2, 2, b"6", 0)  # one tag, of type text
    processor = ImageProcessor(patch_size=16)
    for exif in (b"Exif\0\0no TIFF header", text):
        Image.new("RGB", (64, 16), "red").save(tmp_path / "a.jpg", exif=exif, dpi=(72, 72))  # or Pillow looks there
        processor.check(tmp_path / "a.jpg")
        assert processor.measure(tmp_path / "a.jpg")[0] == (1, 4)
        assert processor.load(tmp_path / "a.jpg", (1, 4)).shape == (4, 768)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for name, reason in (("x" * 5000, "File name too long"), ("x\0.png", "embedded null byte")):
        for processor in (ImageProcessor(), AudioProcessor()):
            with pytest.raises(DataError, match=f": cannot be opened: {reason}") as caught:
                processor.measure(tmp_path / name)
            assert len(str(caught.value)) < 500


INLINE = "iVBORw0KGgoAAAANSUhEUgAAAEAAAAAwCAIAAA" * 30


@pytest.mark.parametrize(
    ("name", "message", "kind"),
    [
        ("https://example.com/a.png", "^https://example.com/a.png: only files are read, not URLs; download it", "URL"),
        ("s3://bucket/a b.png", "^s3://bucket/a b.png: only files are read, not URLs; download it", "URL"),
        ("file:///data/a.png", "^file:///data/a.png: only files are read, not URLs; leave out file://", "URL"),
        (
            f"data:image/png;base64,{INLINE}",
            r"^data:image/png;base64,iVB.*\.\.\. \(\d+ characters\): data is",
            "inline data",
        ),
        ("data:,x", "^data:,x: data is not read from a manifest; save it as a file", "inline data"),
        ("/9j/" + "4AAQSkZJRgABAQEAYABgAAD/" * 20, r"\.\.\. \(\d+ characters\): .*; save it as a file", "inline data"),
        (INLINE, r"cannot be opened: File name too long; data is not read from a manifest; save", "cannot be opened"),
        ("pictures", r"pictures: is a folder; list the \w+ files in it instead", "folder"),
        ("none.png", "none.png: file is missing$", "missing file"),
        ("pictures/a.png/b.png", "b.png: file is missing$", "missing file"),
        ("/dev/null", "/dev/null: is no file, but a device, a pipe or a socket", "no file"),
    ],
)
def test_names_that_are_no_files_say_what_to_do(tmp_path: Path, name: str, message: str, kind: str) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").touch()
    for processor in (ImageProcessor(), AudioProcessor()):
        with pytest.raises(DataError, match=message) as caught:
            processor.measure(tmp_path / name)
        assert caught.value.kind == kind and len(str(caught.value)) < 300
        assert pickle.loads(pickle.dumps(caught.value)).kind == kind  # on its way from a worker


@pytest.mark.parametrize(
    ("head", "audio", "message"),
    [
        (b"", False, "it is empty; write it anew"),
        (b"\n<!DOCTYPE html><html>", False, "it is a web page, saved in the place of the file; download it anew"),
        (b'<?xml version="1.0"?><svg/>', False, r"it is a drawing of lines \(SVG\) or other XML; save it as PNG"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            True,
            "it is a pointer of Git LFS; fetch the file by git lfs",
        ),
        (b"\0\0\0\x20ftypheic", False, "it is HEIC, which Pillow reads only with pillow-heif: pip install pillow-heif"),
        (
            b"\0\0\0\x20ftypM4A ",
            True,
            "libsndfile, which reads recordings, knows no such format; convert it, such as by",
        ),
        (b"\x1aE\xdf\xa3", True, "libsndfile, which reads recordings, knows no such format; convert it"),
        (b"anything", False, r"\(truncated or damaged\?\): cannot identify image file"),
    ],
)
def test_files_of_other_kinds_say_what_they_are(tmp_path: Path, head: bytes, audio: bool, message: str) -> None:
    path = tmp_path / ("a.wav" if audio else "a.png")
    path.write_bytes(head + bytes(300) * bool(head))
    with pytest.raises(DataError, match=rf"{path}: not a readable (image|audio) file.*{message}"):
        (AudioProcessor() if audio else ImageProcessor()).measure(path)


def test_avif_is_named_only_where_pillow_does_not_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.avif").write_bytes(b"\0\0\0\x20ftypavif" + bytes(300))
    for there, words in ((False, "AVIF, which this Pillow was built without; install a newer"), (True, "damaged")):
        monkeypatch.setattr(features, "check", lambda name, there=there: there)
        with pytest.raises(DataError, match=words):
            ImageProcessor().measure(tmp_path / "a.avif")


def test_what_pillow_takes_for_an_attack_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", "x" * (PngImagePlugin.MAX_TEXT_CHUNK + 1), zip=True)
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png", pnginfo=text)
    with pytest.raises(
        DataError, match=r"its metadata, not its pixels, is more than .*MAX_TEXT_CHUNK; save .* raise PIL"
    ):
        ImageProcessor().check(tmp_path / "a.png")
    picture(tmp_path / "b.png", 64, 64)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(
        DataError, match=r"b\.png: more pixels than Pillow reads: .*4096 pixels.* raise PIL.Image.MAX_IM"
    ):
        ImageProcessor().measure(tmp_path / "b.png")


@pytest.mark.parametrize(("rate", "more"), [(16000, 1), (22050, 294), (44100, 1)])
def test_a_clip_that_is_a_sample_too_long_says_so(tmp_path: Path, rate: int, more: int) -> None:
    path, processor = sound(tmp_path / "a.wav", 30 * rate, rate), AudioProcessor()
    assert processor.measure(path) == ((3000,), 1500)
    path = sound(tmp_path / "a.wav", 30 * rate + more, rate)
    with pytest.raises(
        DataError, match=rf"30\.0[0-9]+ s of .*: {30 * rate + more} samples at {rate} Hz, {more} too many"
    ):
        processor.measure(path)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_truncated_image(tmp_path: Path, suffix: str) -> None:
    path = picture(tmp_path / f"a.{suffix}", 64, 64)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    processor = ImageProcessor()
    assert processor.measure(path)[1] == 16  # the header is whole
    for read in (processor.check, processor.load):
        with pytest.raises(DataError, match=rf"a\.{suffix}: not a readable image"):
            read(path)
    path.write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"a\.{suffix}: not a readable image"):
        processor.measure(path)
    path.unlink()
    with pytest.raises(DataError, match="file is missing"):
        processor.load(path)


def test_changed_file_is_refused(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 32, 16)
    with pytest.raises(DataError, match=r"is \(1, 2\) but \(2, 1\) when it was indexed; .* or in cache_folder"):
        ImageProcessor().load(path, (2, 1))


@pytest.mark.parametrize("samples", [16000, 4567, 400])
def test_mel_is_whispers(tmp_path: Path, samples: int) -> None:
    from transformers import WhisperFeatureExtractor

    path = tmp_path / "a.wav"
    noise = RNG.uniform(-0.5, 0.5, samples) * (np.arange(samples) < samples / 2)  # the silent half meets the clamp
    soundfile.write(path, noise, 16000, subtype="PCM_16")
    waveform, _ = soundfile.read(path, dtype="float32")
    reference = WhisperFeatureExtractor(feature_size=80)._np_extract_fbank_features(waveform[None], "cpu")[0].T
    processor = AudioProcessor(n_mels=80)
    (frames,), rows = processor.measure(path)
    values = processor.load(path, (frames,))
    assert values.shape == (frames, 80) and frames == samples // 160 and rows == -(-frames // 2)
    np.testing.assert_allclose(values, reference[:frames], atol=2e-4)


@pytest.mark.parametrize(
    ("rate", "samples", "channels"), [(8000, 4000, 1), (44100, 12345, 2), (22050, 7, 1), (16000, 1, 1)]
)
@pytest.mark.parametrize("stack", [1, 3])
def test_frames_are_as_measured(tmp_path: Path, rate: int, samples: int, channels: int, stack: int) -> None:
    path = sound(tmp_path / "a.wav", samples, rate, channels)
    processor = AudioProcessor(n_mels=20, stack=stack)
    (frames,), rows = processor.measure(path)
    assert processor.load(path).shape == (frames, 20)
    assert frames >= 1 and rows == ceil(ceil(frames / 2) / stack)


def test_resampling_keeps_the_pitch(tmp_path: Path) -> None:
    peaks = []
    for rate in (16000, 44100):
        soundfile.write(tmp_path / "a.wav", 0.5 * np.sin(2 * np.pi * 1500 * np.arange(rate) / rate), rate)
        peaks.append(int(AudioProcessor(n_mels=40).load(tmp_path / "a.wav")[20].argmax()))
    assert peaks[0] == peaks[1]


def test_bad_audio(tmp_path: Path) -> None:
    processor = AudioProcessor(max_seconds=1.0)
    for read in (processor.measure, processor.load):
        with pytest.raises(DataError, match=r"a\.wav: audio of zero length"):
            read(sound(tmp_path / "a.wav", 0))
        with pytest.raises(DataError, match=r"1\.2 s of audio, more than max_seconds=1"):
            read(sound(tmp_path / "a.wav", 19200))
        path = sound(tmp_path / "a.wav", 8000)
        path.write_bytes(path.read_bytes()[:9000])
        with pytest.raises(DataError, match=r"a\.wav: truncated audio: 8956 of 16000 bytes"):
            read(path)
        path.write_bytes(b"RIFF")
        with pytest.raises(DataError, match=r"a\.wav: not a readable audio"):
            read(path)
        with pytest.raises(DataError, match="file is missing"):
            read(tmp_path / "none.wav")
    for number in (np.nan, np.inf):
        samples = np.zeros((800, 2), np.float32)
        samples[7, 1] = number
        soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
        for read in (processor.check, processor.load):
            with pytest.raises(DataError, match=r"a\.wav: 1 of 800 audio samples are NaN or .* the first .* number 7;"):
                read(tmp_path / "a.wav")
    for name, value, kind in (("hop_length", 0, "whole"), ("n_fft", None, "whole"), ("max_seconds", "4", "positive")):
        with pytest.raises(ConfigError, match=f"{name} is {value!r}; use a {kind} number above 0"):
            AudioProcessor(**{name: value})  # type: ignore[arg-type]


@pytest.mark.skipif("MP3" not in soundfile.available_formats(), reason="this libsndfile has no MP3")
@pytest.mark.parametrize("tag", [b"", b"ID3\4\0\0\0\0\2\1" + bytes(257)], ids=["bare", "tagged"])
def test_an_mp3_without_a_header_is_as_long_as_what_can_be_read(tmp_path: Path, tag: bytes) -> None:
    path, rate = tmp_path / "a.mp3", 16000
    quiet = 0.1 * np.sin(np.arange(2 * rate) / 9)
    processor = AudioProcessor(n_mels=20)
    for samples in (
        np.concatenate([quiet, RNG.standard_normal(rate)]),
        np.concatenate([RNG.standard_normal(rate), quiet]),
    ):
        soundfile.write(path, samples, rate, bitrate_mode="VARIABLE")
        assert processor.measure(path) == ((300,), 150)
        data = path.read_bytes()
        path.write_bytes(tag + data[data.find(data[:2], 4) :])  # its first frame counts the others
        assert soundfile.info(path).frames != len(samples)  # a guess
        (frames,), _ = processor.measure(path)
        assert 300 <= frames <= 330  # the encoder's own silence is no longer cut off
        assert processor.load(path, (frames,)).shape == (frames, 20)
        processor.check(path)
    with pytest.raises(DataError, match=r"more than max_seconds=3: \d+ samples at 16000 Hz, \d+ too many;"):
        AudioProcessor(max_seconds=3).measure(path)


@pytest.mark.skipif("MP3" not in soundfile.available_formats(), reason="this libsndfile has no MP3")
@pytest.mark.parametrize("tag", [b"", b"ID3\4\0\0\0\0\2\1" + bytes(257)], ids=["bare", "tagged"])
def test_several_mp3s_in_one_file_are_refused(tmp_path: Path, tag: bytes) -> None:
    """Readers take the first alone; what else may lie behind the frames is no reason."""
    path, processor = tmp_path / "a.mp3", AudioProcessor(n_mels=20)
    soundfile.write(path, RNG.standard_normal(32000), 16000, bitrate_mode="VARIABLE")
    one = tag + path.read_bytes()
    for behind in (b"", b"TAG" + bytes(125), b"APETAGEX" + bytes(9000), one[len(tag) :][-500:]):
        path.write_bytes(one + behind)
        assert processor.measure(path) == ((200,), 100)
    path.write_bytes(one + one)
    for read in (processor.measure, processor.check, processor.load):
        with pytest.raises(DataError, match=r"a\.mp3: several MP3s in one file"):
            read(path)


def test_a_flac_that_does_not_say_its_length_is_refused(tmp_path: Path) -> None:
    path, processor = tmp_path / "a.flac", AudioProcessor(n_mels=20)
    soundfile.write(path, RNG.standard_normal(1600), 16000)
    data = bytearray(path.read_bytes())
    data[21], data[22:26] = data[21] & 0xF0, bytes(4)
    path.write_bytes(data)
    for read in (processor.measure, processor.check, processor.load):
        with pytest.raises(DataError, match=r"a\.flac: its header does not say how long it is"):
            read(path)


def test_a_file_that_no_decoder_takes_from_a_pipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.mp3").write_bytes(bytes(1 << 20))
    with pytest.raises(DataError, match=r"a\.mp3: not a readable audio file"):
        reading(tmp_path / "a.mp3", "audio", lambda path: list(_streamed(path)))


def test_collate(tmp_path: Path) -> None:
    image, audio = ImageProcessor(patch_size=8, merge=2, channels=1), AudioProcessor(n_mels=10, stack=2)
    paths = [picture(tmp_path / "a.png", 32, 16), picture(tmp_path / "b.png", 16, 16)]
    found = [image.measure(path) for path in paths]
    inputs = image.collate(
        [image.load(p) for p in paths], np.array([f[0] for f in found]), np.array([f[1] for f in found])
    )
    assert inputs.values.shape == (12, 64) and inputs.values.dtype == torch.uint8
    assert inputs.as_numbers().values.dtype == torch.float32 and inputs.as_numbers().statistics is None
    assert inputs.sizes.tolist() == [[2, 4], [2, 2]] and inputs.rows.tolist() == [2, 1]
    assert inputs.packing.lengths.tolist() == [8, 4]
    path = sound(tmp_path / "a.wav", 160 * 7)
    (frames,), rows = audio.measure(path)
    heard = audio.collate([audio.load(path)], np.array([[frames]]), np.array([rows]))
    assert heard.values.shape == (7, 10) and heard.packing.lengths.tolist() == [4] and heard.rows.tolist() == [2]
    for processor in (image, audio):
        none = processor.collate([], np.zeros((0, len(processor.size_names)), np.int64), np.zeros(0, np.int64))
        assert none.values.shape == (0, processor.feature) and len(none.packing.lengths) == len(none.rows) == 0


def test_a_target_is_cut_and_put_together(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    target = ImageTarget(rows=3, patch_size=4, mean=[0.5, 0.4, 0.3], std=0.25)  # type: ignore[arg-type]
    sizes, rows = target.measure(tmp_path / "a.png")
    values = target.load(tmp_path / "a.png", sizes)
    assert (sizes, rows, values.shape) == ((2, 3), 3, (6, 48)) and values.dtype == np.float32
    assert (target.pixels(values, sizes) == pixels).all()
    assert target.inner_rows(np.array([sizes])).tolist() == [9]
    assert target.target_elements(np.array([sizes])).tolist() == [288]
    assert isinstance(target, TargetProcessor) and not isinstance(ImageProcessor(), TargetProcessor)
    json.dumps(target.settings())
    with pytest.raises(ConfigError, match="ImageTarget: rows is 0"):
        ImageTarget(rows=0)
    with pytest.raises(ConfigError, match="channels is 2"):
        ImageTarget(channels=2)  # type: ignore[arg-type]
