"""What media files hold: whatever a decoder raises names the file, and recordings are as long as what can be read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from hetero_strategy.data.recording import MOST_LEFT, check_container, check_streams
from hetero_strategy.errors import DataError

Result = TypeVar("Result")
BLOCK = 1 << 16
"""Samples, or bytes, that are read at a time."""
LONG = 200
"""Characters of a name that messages show; data in the place of a name is longer."""
INLINE = "data is not read from a manifest; save it as a file, and name the file"
CONVERT = "convert it, such as by ffmpeg -i in.m4a out.flac"
WHERE = "where the run starts (for recipes in a module that imports= names)"
UNREAD = {
    b"ftyp": "MP4 (m4a, mp4, mov, 3gp)", b"\x1aE\xdf\xa3": "WebM or Matroska", b"0&\xb2u": "Windows Media (wma, wmv)",
    b"\xff\xf1": "AAC", b"\xff\xf9": "AAC", b"#!AMR": "AMR",
}  # fmt: skip
"""First bytes of recordings that libsndfile does not know -> what they are."""
UNKNOWN = 2**62
"""More samples than any recording has: libsndfile's number where it does not know."""


def reading(path: str | Path, kind: str, read: Callable[[Any], Result]) -> Result:
    """Call ``read(path)`` and turn whatever a decoder raises into a DataError that names the file and what to do."""
    try:
        return read(str(path))
    except DataError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, LibsndfileError, ...
        raise _explained(str(path), kind, error) from None


def shortened(name: str) -> str:
    """A file's name as messages show it."""
    return name if len(name) <= LONG else f"{name[:60]}... ({len(name)} characters)"


def _explained(path: str, kind: str, error: Exception) -> DataError:
    """Say why a file cannot be read: its name, its place or what it holds."""
    if data := re.search(r"(?:^|/)(data:[\w.+-]*(/[\w.+-]*)?[;,].*)", path, re.DOTALL):
        return DataError(f"{shortened(data[1])}: {INLINE}", "inline data")
    if url := re.search(r"(?:^|/)([a-z][a-z0-9+.-]+):/+(.*)", path):
        shown = shortened(f"{url[1]}://{'/' * (url[1] == 'file')}{url[2]}")
        fix = "leave out file://" if url[1] == "file" else "download it, and name the file"
        return DataError(f"{shown}: only files are read, not URLs; {fix}", "URL")
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as unopened:  # missing, no permission, a name too long, or one with a zero in it
        inline = f"; {INLINE}" if re.search(r"[A-Za-z0-9+/]{200,}={0,2}$", path) else ""
        if isinstance(unopened, FileNotFoundError | NotADirectoryError):
            return DataError(f"{shortened(path)}: file is missing{inline}", "inline data" if inline else "missing file")
        why = getattr(unopened, "strerror", None) or unopened
        return DataError(f"{shortened(path)}: cannot be opened: {why}{inline}", "cannot be opened")
    if stat.S_ISDIR(mode):
        return DataError(f"{path}: is a folder; list the {kind} files in it instead", "folder")
    if not stat.S_ISREG(mode):
        return DataError(f"{path}: is no file, but a device, a pipe or a socket; save its content as a file", "no file")
    reason = " ".join(str(error).split())
    if isinstance(error, PermissionError):
        return DataError(f"{path}: cannot be opened: {error.strerror}", "cannot be opened")
    if isinstance(error, Image.DecompressionBombError):
        return DataError(
            f"{path}: more pixels than Pillow reads: {reason} Make the picture smaller, or raise"
            f" PIL.Image.MAX_IMAGE_PIXELS {WHERE}",
            "too many pixels",
        )
    if "MAX_TEXT" in reason:
        return DataError(
            f"{path}: its metadata, not its pixels, is more than Pillow reads: {reason}; save the picture without it,"
            f" such as by exiftool -all= {os.path.basename(path)}, or raise PIL.PngImagePlugin.MAX_TEXT_CHUNK {WHERE}",
            "long metadata",
        )
    with open(path, "rb") as file:
        head = file.read(512)
    if what := _known(head, kind):
        return DataError(
            f"{path}: not a readable {kind} file: it is {what}",
            f"not {'a picture' if kind == 'image' else 'a recording'}",
        )
    if kind == "audio" and re.search("not recognised|unknown format", reason, re.IGNORECASE):
        reason = f"libsndfile, which reads recordings, knows no such format; {CONVERT}"
    return DataError(f"{path}: not a readable {kind} file (truncated or damaged?): {reason}", f"damaged {kind}")


def _known(head: bytes, kind: str) -> str:
    """What a file is by its first bytes, of what is taken for a picture or a recording and is none, and what to do."""
    if not head:
        return "empty; write it anew"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"):
        return (
            "HEIC, which Pillow reads only with pillow-heif: pip install pillow-heif and call"
            f" pillow_heif.register_heif_opener() {WHERE}, or convert it to JPEG or PNG"
        )
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        return "AVIF, which this Pillow was built without; install a newer Pillow, or convert it to PNG"
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "a web page, saved in the place of the file; download it anew"
    if head.lstrip().startswith((b"<svg", b"<?xml")):
        return "a drawing of lines (SVG) or other XML; save it as PNG"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS; fetch the file by git lfs pull"
    if kind == "audio":
        for magic, name in UNREAD.items():
            if head.startswith(magic) or (magic == b"ftyp" and head[4:8] == magic):
                return f"{name}, which libsndfile does not read; {CONVERT}"
    return ""


def length_of(path: str | Path) -> tuple[int, int]:
    """Samples of a recording and how many of them are a second.

    Raises:
        DataError: it cannot be read, or ends before its header says.
    """
    info = _info(path)
    samples = info.frames
    if info.format == "MP3" and not _says_its_length(path):
        samples = reading(path, "audio", lambda p: sum(map(len, _streamed(p))))
    return samples, info.samplerate


def waveform_of(path: str | Path) -> tuple[np.ndarray, int]:
    """Samples averaged over channels, float32 ``[n]``, and their sampling rate.

    Raises:
        DataError: as :func:`length_of`; also where the file holds other samples than its header and its pages say, or
            samples are NaN or infinite.
    """
    import soundfile

    info = _info(path)
    check_streams(path, info.format)
    if info.format == "MP3" and not _says_its_length(path):
        samples = reading(path, "audio", lambda p: np.concatenate([np.zeros((0, info.channels), "f4"), *_streamed(p)]))
        return _mono(path, samples), info.samplerate
    samples, rate = reading(path, "audio", lambda p: soundfile.read(p, dtype="float32", always_2d=True))
    if len(samples) != info.frames:
        raise DataError(
            f"{path}: truncated audio: {len(samples)} of {info.frames} samples could be read", "truncated audio"
        )
    return _mono(path, samples), rate


def _info(path: str | Path) -> Any:
    """What libsndfile says of a file; DataError where that has no length, as a FLAC that was written to a pipe, or
    another one than its header says.
    """
    import soundfile

    info = reading(path, "audio", soundfile.info)
    check_container(path, info)
    if info.frames >= UNKNOWN:
        raise DataError(
            f"{path}: its header does not say how long it is, as if written to a pipe; convert it anew", "no length"
        )
    return info


def _mono(path: str | Path, samples: np.ndarray) -> np.ndarray:
    """The mean over channels of float32 ``[n, channels]``; DataError where it is no number, as in a WAV of floats."""
    mono = samples.mean(axis=1)
    bad = np.flatnonzero(~np.isfinite(mono))
    if len(bad):
        raise DataError(
            f"{path}: {len(bad)} of {len(mono)} audio samples are NaN or infinite, the first of them number {bad[0]};"
            " write the recording anew",
            "NaN or infinite",
        )
    return mono


def _says_its_length(path: str | Path) -> bool:
    """Whether an MP3 begins with a frame that counts the others; otherwise libsndfile guesses from the first ones.

    Raises:
        DataError: another recording begins where the count ends: it would be left out.
    """
    with open(path, "rb") as file:
        start = 0
        while (head := file.read(10))[:3] == b"ID3":  # tags, each with its size in four times seven bits
            high, *low = head[6:10]
            size = high
            for seven in low:
                size = size << 7 | seven
            start += 10 + size
            file.seek(start)
        frame = head + file.read(54)
        for place in (place + 4 for name in (b"Xing", b"Info") if (place := frame.find(name)) > 0):
            flags, _, size = (int.from_bytes(frame[at : at + 4], "big") for at in range(place, place + 12, 4))
            if flags & 1:
                if flags & 2:
                    file.seek(start + size)
                    _check_end(path, file.read(MOST_LEFT))
                return True
    return False


def _check_end(path: str | Path, after: bytes) -> None:
    """Refuse an MP3 that goes on, for more than some frames that were not counted, as files begin: frame or tag."""
    if len(after) == MOST_LEFT and (after[:3] == b"ID3" or (after[0] == 0xFF and after[1] >= 0xE0)):
        raise DataError(
            f"{path}: several MP3s in one file, of which readers take the first alone; convert it anew, such as with"
            " ffmpeg, or cut it",
            "several recordings",
        )


def _streamed(path: str) -> Iterator[np.ndarray]:
    """Decode a file through a pipe, float32 ``[n, channels]`` at a time: of a file libsndfile reads as much as it takes
    it to be long, of a stream all there is.
    """
    import soundfile

    out, into = os.pipe()
    feeder = Thread(target=_feed, args=(path, into), daemon=True)
    feeder.start()
    try:
        with soundfile.SoundFile(out, closefd=False) as stream:
            while len(block := stream.read(BLOCK, dtype="float32", always_2d=True)):
                yield block
    finally:
        os.close(out)
        feeder.join()


def _feed(path: str, into: int) -> None:
    """Write a file to a pipe, until nobody reads it any more."""
    with suppress(BrokenPipeError), open(into, "wb") as pipe, open(path, "rb") as file:
        while block := file.read(BLOCK):
            pipe.write(block)
