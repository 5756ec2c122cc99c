"""Turn media files into the raw rows that an encoder reads, and images into the target rows of generators.

A processor counts a file's rows from its header alone (``measure``), so that a step can be planned before anything is
decoded; ``load`` then returns exactly that many rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import ceil, gcd, sqrt
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from typing_extensions import override

from hetero_strategy.data.media_file import (
    UPRIGHT,
    length_of,
    narrow_range,
    on_white,
    open_picture,
    orientation,
    reading,
    stored_as,
    waveform_of,
)
from hetero_strategy.errors import ConfigError, DataError, is_whole, require
from hetero_strategy.model.inputs import EncoderInputs, Packing, normalised
from hetero_strategy.model.kind import Media, Sizes, TargetProcessor

FILTERS = {int(one): one.name for one in Image.Resampling}
"""Number of a filter in Hugging Face's files -> Pillow's name."""


def of_items(media: Mapping[str, Media], rows: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, str]]:
    """Return module -> rows of its items in a sample, and the option that reduces them ("" if there is none).

    Args:
        media: module -> its processor.
        rows: field -> rows of each item.
    """
    rows_of_module = {}
    for module, one in media.items():
        scaled = hasattr(one, "max_patches") and not isinstance(one, TargetProcessor)
        rows_of_module[module] = sum(rows.get(one.field, ())), f"processors.{module}.max_patches" if scaled else ""
    return rows_of_module


def too_long(tokens: int, items: Mapping[str, tuple[int, str]], max_tokens: int) -> str:
    """Describe the fault of a sample that is too long; ``items`` are the result of :func:`of_items`."""
    parts = [f"{rows} are rows of '{module}'" for module, (rows, _) in items.items() if rows]
    fixes = ["shorten it", *(f"lower {option}" for rows, option in items.values() if rows and option)]
    of_which = f"of which {' and '.join(parts)}, " if parts else ""
    return f"{tokens} tokens, {of_which}more than max_tokens={max_tokens}; {', '.join(fixes)} or raise max_tokens"


def zero_rows(media: Media, count: int = 0) -> np.ndarray:
    """Return zeros, ``[count, feature]``, in the dtype of the media's rows."""
    return np.zeros((count, media.feature), getattr(media, "dtype", np.float32))


def check_picture(path: str | Path) -> str | None:
    """Verify checksums, then decode all pixels; return a warning about a 16-bit picture of a narrow range, if any."""
    with reading(path, "image", Image.open) as image:
        reading(path, "image", lambda _: image.verify())  # checksums; load() accepts a PNG without its end
    with reading(path, "image", Image.open) as image:
        stored = stored_as(image)
        reading(path, "image", lambda _: image.load())
        return narrow_range(image) if image.mode.startswith("I") or ";16" in stored else None


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return height and width of an opened picture once it is upright."""
    width, height = image.size
    return (width, height) if orientation(image) >= 5 else (height, width)  # the camera was held sideways


def upright(image: Image.Image) -> Image.Image:
    """Decode an opened picture: upright, and with 8 bits per channel."""
    opened = image.size
    image.load()
    if image.format == "TIFF" and image.size != opened:  # Pillow rotates it, and may have garbled it
        raise ValueError(f"{image.size} pixels, of which its header says {opened}; save it upright")
    if (turned := orientation(image)) in UPRIGHT:
        image = image.transpose(UPRIGHT[turned])
    if image.mode.startswith("I"):  # 16 bits, or 12 in a TIFF: convert() would clip instead of scaling
        tags = getattr(image, "tag_v2", {258: (16,), 262: 1})  # bits, and 0 where 0 is white
        values = np.asarray(image).astype(np.int64)
        grey = (values >> tags[258][0] - 8).clip(0, 255).astype(np.uint8)
        grey = grey if tags.get(262, 0) else 255 - grey
        image = Image.fromarray(np.where(values == image.info.get("transparency"), np.uint8(255), grey))
    return image


def at_rate(waveform: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Resample a waveform, float32 ``[n]``, to ``ceil(n * wanted / rate)`` samples."""
    if rate == wanted:
        return waveform
    from scipy.signal import resample_poly

    common = gcd(wanted, rate)
    return resample_poly(waveform, wanted // common, rate // common)


def raw_rows(media: Media, sizes: np.ndarray) -> int:
    """Return the raw rows of one item with these sizes, int64 ``[k]``."""
    own = getattr(media, "raw_rows", None)
    return int(sizes.prod() if own is None else own(sizes[None])[0])


class _FromFields:
    """A base of the processors here: settings from fields, and rows end to end."""

    def settings(self) -> dict[str, Any]:
        """Return the class's name and all fields."""
        return {"kind": type(self).__name__, **asdict(cast(Any, self))}

    def collate(self: Media, values: Sequence[np.ndarray], sizes: np.ndarray, rows: np.ndarray) -> EncoderInputs:
        """Put items end to end."""
        joined = np.concatenate([zero_rows(self), *values])
        sizes = np.asarray(sizes, np.int64).reshape(-1, len(self.size_names))
        packing = Packing.of(self.inner_rows(sizes).astype(np.int64))
        return EncoderInputs(torch.from_numpy(joined), sizes, np.asarray(rows, np.int64), packing)


def _check_whole(processor: object, *names: str) -> None:
    for name in names:
        if not is_whole(value := getattr(processor, name), 1):
            raise ConfigError(f"{type(processor).__name__}: {name} is {value!r}; use a whole number above 0")


@dataclass(frozen=True)
class ImageProcessor(_FromFields):
    """A processor of images into rows of patches, in their own resolution and aspect.

    Height and width are rounded to multiples of ``patch_size * merge`` pixels; an image with more than ``max_patches``
    patches is scaled down; no image is scaled up. Patches are in row-major (grid_h, grid_w) order with features in
    (patch_h, patch_w, channel) order, as in transformers' ``Siglip2ImageProcessor``. They travel as pixels, a byte
    each, and become floats on the encoder's rank. Transparent pixels are composited on white, as transformers'
    ``convert_to_rgb`` does. Only the first frame or page of an image is used.

    Args:
        patch_size: pixels on a side of a patch.
        merge: the projector joins ``merge`` x ``merge`` patches into one output row.
        channels: 3 (RGB) or 1 (grey).
        max_patches: most patches of one image.
        mean, std: mean and deviation of pixel values after scaling to 0..1; one number, or one per channel.
        field: manifest field that names the images.
        resample: number of Pillow's filter for resizing: 0 nearest, 1 lanczos, 2 bilinear, 3 bicubic, 4 box, 5 hamming.
    """

    patch_size: int = 16
    merge: int = 1
    channels: Literal[1, 3] = 3
    max_patches: int = 4096
    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.5
    field: str = "image"
    resample: int = 2

    def __post_init__(self) -> None:
        name = type(self).__name__
        _check_whole(self, "patch_size", "merge", "max_patches")
        for part in ("mean", "std"):  # hydra and JSON give lists
            value = getattr(self, part)
            if not isinstance(value, str | int | float | None):
                value = tuple(value)
                if len(value) != self.channels:
                    raise ConfigError(f"{name}: {part} has {len(value)} numbers for {self.channels} channels")
            least = 0 if part == "std" else -np.inf
            for number in value if isinstance(value, tuple) else [value]:
                if not isinstance(number, int | float) or not least < number < np.inf:
                    over = " above 0, by which pixels are divided" * (part == "std")
                    raise ConfigError(f"{name}: {part} is {value!r}; give a number{over}, or one for each channel")
            if isinstance(value, tuple):
                object.__setattr__(self, part, tuple(map(float, value)))
        if not is_whole(self.resample) or self.resample not in FILTERS:
            known = ", ".join(f"{number} ({filter.lower()})" for number, filter in sorted(FILTERS.items()))
            raise ConfigError(f"{name}: resample is {self.resample!r}; use one of Pillow's filters: {known}")
        if self.channels not in (1, 3):
            raise ConfigError(f"{name}: channels is {self.channels}; use 3 (RGB) or 1 (grey)")
        if self.max_patches < self.merge**2:
            raise ConfigError(
                f"{name}: max_patches {self.max_patches} is less than one output row of {self.merge}x{self.merge}"
                f" patches; use at least {self.merge**2}"
            )

    @property
    def feature(self) -> int:
        return self.patch_size**2 * self.channels

    @property
    def dtype(self) -> type[np.generic]:
        """Return the dtype of raw rows."""
        return np.uint8

    @property
    def statistics(self) -> torch.Tensor:
        """Return mean and deviation as :func:`~hetero_strategy.model.inputs.normalised` takes them."""
        both = np.broadcast_arrays(np.zeros(self.channels), self.mean, self.std)[1:]
        return torch.from_numpy(np.stack(both).astype(np.float32))

    @property
    def size_names(self) -> tuple[str, ...]:
        return ("grid_h", "grid_w")

    def measure(self, path: str | Path) -> tuple[Sizes, int]:
        with open_picture(path) as image:
            grid = self._grid(image)
        return grid, grid[0] * grid[1] // self.merge**2

    def check(self, path: str | Path) -> str | None:
        """Verify checksums, then decode all pixels; warn of a 16-bit image of a narrow range, such as 12-bit values."""
        return check_picture(path)

    def load(self, path: str | Path, sizes: Sizes | None = None) -> np.ndarray:
        """Return patches of the resized image, uint8."""
        with open_picture(path) as image:
            grid = self._grid(image)
            same_sizes(path, self.size_names, grid, sizes)
            pixels = reading(path, "image", lambda _: self._pixels(image, grid))
        p, (h, w) = self.patch_size, grid
        patches = pixels.reshape(h, p, w, p, self.channels).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(patches.reshape(h * w, self.feature))

    def collate(self, values: Sequence[np.ndarray], sizes: np.ndarray, rows: np.ndarray) -> EncoderInputs:
        """Put images end to end, with the statistics that normalise their pixels."""
        joined = super().collate(values, sizes, rows)
        return replace(joined, statistics=self.statistics) if joined.values.dtype == torch.uint8 else joined

    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return one row per patch."""
        return sizes.reshape(-1, 2).prod(axis=1)

    def _grid(self, image: Image.Image) -> tuple[int, int]:
        height, width = upright_size(image)
        unit, most = self.patch_size * self.merge, self.max_patches // self.merge**2
        h, w = max(1, round(height / unit)), max(1, round(width / unit))
        if h * w > most:
            scale = sqrt(most / (height * width))
            h, w = max(1, int(height * scale)), max(1, int(width * scale))
            h, w = min(h, most // w) if h > w else h, min(w, most // h) if w >= h else w  # very long strips
        return h * self.merge, w * self.merge

    def _pixels(self, image: Image.Image, grid: tuple[int, int]) -> np.ndarray:
        """Return pixels of the image resized to its grid, uint8 ``[height, width, channels]``."""
        stored = stored_as(image)
        image = upright(image)
        image = on_white(image, stored).convert("RGB" if self.channels == 3 else "L")
        size = (grid[1] * self.patch_size, grid[0] * self.patch_size)
        if image.size != size:
            image = image.resize(size, Image.Resampling(self.resample))
        return np.asarray(image).reshape(size[1], size[0], self.channels)


@dataclass(frozen=True, kw_only=True)
class ImageTarget(ImageProcessor):
    """A processor of images to draw, as rows of patches that :class:`ImageProcessor` cuts.

    ``<draw>`` in an answer becomes ``rows`` placeholder tokens. The generator receives the language model's rows at
    these tokens; the tokens themselves are not predicted. Every patch is a target row of its own: there is no
    ``merge``.

    Args:
        rows: condition rows of each image.
        patch_size, channels, max_patches, mean, std, field, resample: as in :class:`ImageProcessor`.
    """

    merge: int = field(default=1, init=False)
    rows: int = 1
    max_patches: int = 1024
    field: str = "draw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 1:
            raise ConfigError(f"ImageTarget: rows is {self.rows}; a drawing needs at least 1 row of the language model")

    @override
    def measure(self, path: str | Path) -> tuple[Sizes, int]:
        """Return the grid of patches and the number of condition rows."""
        return super().measure(path)[0], self.rows

    @override
    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the number of condition rows plus a row per patch."""
        return super().inner_rows(sizes) + self.rows

    @property
    @override
    def dtype(self) -> type[np.generic]:
        return np.float32

    @override
    def load(self, path: str | Path, sizes: Sizes | None = None) -> np.ndarray:
        """Return patches of the resized image, normalised, float32."""
        return normalised(torch.from_numpy(super().load(path, sizes)), self.statistics).numpy()

    def target_elements(self, sizes: np.ndarray) -> np.ndarray:
        """Return the number of values of all patches."""
        return super().inner_rows(sizes) * self.feature

    def pixels(self, values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Undo ``load``: rows, float32 ``[R, feature]``, become an image, uint8 ``[height, width, channels]``."""
        (h, w), p = (int(size) for size in sizes), self.patch_size
        patches = values.reshape(h, w, p, p, self.channels).transpose(0, 2, 1, 3, 4)
        image = patches.reshape(h * p, w * p, self.channels) * np.asarray(self.std) + np.asarray(self.mean)
        return np.rint(np.clip(image, 0.0, 1.0) * 255.0).astype(np.uint8)


@dataclass(frozen=True)
class AudioProcessor(_FromFields):
    """A processor of audio into rows of log-mel frames, as in Whisper's feature extractor but not padded to 30 s.

    A clip of n samples (after resampling, channels averaged) gives ``n // hop_length`` frames, at least 1. The encoder
    halves the frames and the projector joins ``stack`` of them: ``ceil(ceil(frames / 2) / stack)`` output rows.

    Args:
        sampling_rate: samples per second; clips of other rates are resampled.
        n_mels: number of mel bands, which reach up to min(8000 Hz, sampling_rate / 2).
        hop_length, n_fft: distance of frames and length of their window, in samples.
        stack: encoder rows per output row.
        max_seconds: longest clip in seconds; longer clips raise an error.
        field: manifest field that names the clips.
    """

    sampling_rate: int = 16000
    n_mels: int = 80
    hop_length: int = 160
    n_fft: int = 400
    stack: int = 1
    max_seconds: float = 30.0
    field: str = "audio"

    def __post_init__(self) -> None:
        _check_whole(self, "sampling_rate", "n_mels", "hop_length", "n_fft", "stack")
        if not isinstance(self.max_seconds, int | float) or not self.max_seconds > 0:
            raise ConfigError(f"AudioProcessor: max_seconds is {self.max_seconds!r}; use a positive number above 0")
        require("soundfile", "audio", "AudioProcessor")

    @property
    def feature(self) -> int:
        return self.n_mels

    @property
    def size_names(self) -> tuple[str, ...]:
        return ("frames",)

    def measure(self, path: str | Path) -> tuple[Sizes, int]:
        frames = self._frames(path, *length_of(path))
        return (frames,), ceil(ceil(frames / 2) / self.stack)

    def check(self, path: str | Path) -> None:
        waveform_of(path)

    def load(self, path: str | Path, sizes: Sizes | None = None) -> np.ndarray:
        """Return log-mel frames of the resampled clip."""
        waveform, rate = waveform_of(path)
        frames = self._frames(path, len(waveform), rate)
        same_sizes(path, self.size_names, (frames,), sizes)
        waveform = at_rate(waveform, rate, self.sampling_rate)
        return log_mel(waveform, frames, self.sampling_rate, self.n_mels, self.hop_length, self.n_fft)

    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return half the frames, rounded up."""
        return (sizes.reshape(-1) + 1) // 2

    def _frames(self, path: str | Path, samples: int, rate: int) -> int:
        if samples <= 0:
            raise DataError(f"{path}: audio of zero length", "zero length")
        if samples > self.max_seconds * rate:
            raise DataError(
                f"{path}: {samples / rate:.10g} s of audio, more than max_seconds={self.max_seconds:g}: {samples}"
                f" samples at {rate} Hz, {samples - int(self.max_seconds * rate)} too many; cut the clip, such as by"
                f" ffmpeg -t {self.max_seconds:g}, or raise max_seconds of the processor as far as the encoder has"
                " positions (Whisper's 1500 end at 30 s)",
                "too long",
            )
        return max(1, ceil(samples * self.sampling_rate / rate) // self.hop_length)


def log_mel(
    waveform: np.ndarray, frames: int, sampling_rate: int, n_mels: int, hop_length: int, n_fft: int
) -> np.ndarray:
    """Return the log-mel spectrogram with Whisper's scaling (Radford et al. 2022, section 2.2), float32 ``[frames,
    n_mels]``.

    Frames are centred, with reflected edges and a Hann window; values are clamped to 8 below the clip's maximum, then
    (x + 4) / 4. Clips too short for one reflected frame are padded with silence.
    """
    shortest = max(n_fft // 2 + 1, (frames - 1) * hop_length + 1)
    waveform = np.pad(waveform.astype(np.float64), (0, max(0, shortest - len(waveform))))
    padded = np.pad(waveform, n_fft // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop_length][:frames]
    power = np.abs(np.fft.rfft(windows * np.hanning(n_fft + 1)[:-1])) ** 2
    mel = np.log10(np.maximum(power @ _mel_filters(sampling_rate, n_mels, n_fft), 1e-10))
    mel = np.maximum(mel, mel.max() - 8.0)
    return np.ascontiguousarray((mel + 4.0) / 4.0, np.float32)


@lru_cache(maxsize=16)
def _mel_filters(sampling_rate: int, n_mels: int, n_fft: int) -> np.ndarray:
    from transformers.audio_utils import mel_filter_bank

    top = min(8000.0, sampling_rate / 2)
    return np.asarray(
        mel_filter_bank(n_fft // 2 + 1, n_mels, 0.0, top, sampling_rate, norm="slaney", mel_scale="slaney"), np.float64
    )


def same_sizes(path: str | Path, names: Sequence[str], sizes: Sizes, expected: Sizes | None) -> None:
    """Raise DataError if a file no longer has the expected sizes."""
    if expected is not None and tuple(sizes) != tuple(int(size) for size in expected):
        raise DataError(
            f"{path}: {', '.join(names)} is {tuple(sizes)} but {tuple(int(s) for s in expected)} when it was indexed;"
            " the file has changed: delete the index, in .hetero_index beside the manifest or in cache_folder"
        )
