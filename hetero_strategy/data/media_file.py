"""Read media files: every decoder error names the file, a recording is as long as its readable samples, and a picture's
file says how its pixels are to be read.

libsndfile silently shortens a truncated recording, and reads only the first of several. So headers and pages are
compared with the file's length, and formats without such a check are refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from PIL import Image, features

from hetero_strategy.errors import DataError

Result = TypeVar("Result")
BLOCK = 1 << 16
"""Samples, or bytes, that are read at once."""
LONG = 200
"""Most characters of a name that messages show in full; inline data in place of a name is longer."""
INLINE = "data is not read from a manifest; save it as a file, and name the file"
CONVERT = "convert it, such as by ffmpeg -i in.m4a out.flac"
WHERE = "where the run starts (for recipes in a module that imports= names)"
SCALED = ("PNG", "PPM")
"""Formats whose images of Pillow's mode I have 16 bits."""
UPRIGHT = dict(enumerate(map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), 2))
"""Orientation in EXIF -> transposition that turns the image upright, as in `ImageOps.exif_transpose`."""
FEW = 4096
"""A 16-bit picture with fewer grey values between its darkest and brightest pixel shows next to nothing."""
MOST_LEFT = 4096
"""Bytes at the end of a file that its header may leave out of its count."""
ALONE = "convert it anew, such as with ffmpeg, or cut it"
TAGS = (b"ID3", b"TAG", b"APETAGEX")
"""First bytes of tags that may follow a recording."""
CHECKED = ("WAV", "WAVEX", "RF64", "AIFF", "AU", "NIST", "SVX", "FLAC", "OGG", "MP3")
"""libsndfile's names of the formats that are read."""
QUOTING = ("FLAC", "OGG", "MP3")
"""Formats of which libsndfile's log quotes tags; their frames and pages are checked instead."""
CHUNKED = {b"RIFF": "little", b"RF64": "little", b"BW64": "little", b"RIFX": "big", b"FORM": "big"}
"""First bytes of WAV, AIFF and SVX -> byte order of their chunks' lengths."""
SUN = {b".snd": "big", b"dns.": "little"}
"""First bytes of AU -> byte order of its header."""
SOUND = {b"data": 0, b"SSND": 8, b"BODY": 0}
"""Name of the chunk that holds the samples -> bytes before the samples."""
WIDTHS = {
    "PCM_S8": 1, "PCM_U8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8, "ULAW": 1, "ALAW": 1,
}  # fmt: skip
"""libsndfile's name of a subtype -> bytes of a sample."""
UNKNOWN = 2**62
"""More samples than any recording has; libsndfile reports such a number if it does not know the length."""


def reading(path: str | Path, kind: str, read: Callable[[Any], Result]) -> Result:
    """Call ``read(path)`` and turn every decoder error into a DataError that names the file and what to do."""
    try:
        return read(str(path))
    except DataError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, LibsndfileError, ...
        raise _explained(str(path), kind, error) from None


def shortened(name: str) -> str:
    """Return a file's name as messages show it."""
    return name if len(name) <= LONG else f"{name[:60]}... ({len(name)} characters)"


def _explained(path: str, kind: str, error: Exception) -> DataError:
    """Return an error that says why a file cannot be read: its name, its type or its content."""
    if data := re.search(r"(?:^|/)(data:[\w.+-]*(/[\w.+-]*)?[;,].*)", path, re.DOTALL):
        return DataError(f"{shortened(data[1])}: {INLINE}", "inline data")
    if url := re.search(r"(?:^|/)([a-z][a-z0-9+.-]+):/+(.*)", path):
        shown = shortened(f"{url[1]}://{'/' * (url[1] == 'file')}{url[2]}")
        fix = "leave out file://" if url[1] == "file" else "download it, and name the file"
        return DataError(f"{shown}: only files are read, not URLs; {fix}", "URL")
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as unopened:  # missing, no permission, a name too long or with a zero byte
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
    if what := _known(head):
        return DataError(
            f"{path}: not a readable {kind} file: it is {what}",
            f"not {'a picture' if kind == 'image' else 'a recording'}",
        )
    if kind == "audio" and re.search("not recognised|unknown format", reason, re.IGNORECASE):
        unknown = f"libsndfile, which reads recordings, knows no such format; {CONVERT}"
        return DataError(f"{path}: not a readable audio file: {unknown}", "not a recording")
    return DataError(f"{path}: not a readable {kind} file (truncated or damaged?): {reason}", f"damaged {kind}")


def _known(head: bytes) -> str:
    """Return what a file is by its first bytes, and what to do, if it is no picture or recording; "" if unknown."""
    if not head:
        return "empty; write it anew"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"):
        return (
            "HEIC, which Pillow reads only with pillow-heif: pip install pillow-heif and call"
            f" pillow_heif.register_heif_opener() {WHERE}, or convert it to JPEG or PNG"
        )
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis") and not features.check("avif"):
        return "AVIF, which this Pillow was built without; install a newer Pillow, or convert it to PNG"
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "a web page, saved in the place of the file; download it anew"
    if head.lstrip().startswith((b"<svg", b"<?xml")):
        return "a drawing of lines (SVG) or other XML; save it as PNG"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS; fetch the file by git lfs pull"
    return ""


def length_of(path: str | Path) -> tuple[int, int]:
    """Return a recording's number of samples and its sampling rate."""
    info = _info(path)
    samples = info.frames
    if info.format == "MP3" and not _says_its_length(path):
        samples = reading(path, "audio", lambda p: sum(map(len, _streamed(p))))
    return samples, info.samplerate


def waveform_of(path: str | Path) -> tuple[np.ndarray, int]:
    """Return samples averaged over channels, float32 ``[n]``, and their sampling rate."""
    import soundfile

    info = _info(path)
    _check_streams(path, info.format)
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
    """Return libsndfile's info of a file."""
    import soundfile

    info = reading(path, "audio", soundfile.info)
    _check_container(path, info)
    if info.frames >= UNKNOWN:
        raise DataError(
            f"{path}: its header does not say how long it is, as if written to a pipe; convert it anew", "no length"
        )
    return info


class Declared(NamedTuple):
    """A header's claims about its file, in bytes."""

    start: int
    """Position of the first sample."""
    length: int
    """Bytes of samples."""
    end: int
    """End of the last part that the header describes."""


def _check_container(path: str | Path, info: Any) -> None:
    """Compare a recording's header with its file's length and with libsndfile's number of samples."""
    if info.format not in CHECKED:
        raise DataError(
            f"{path}: {info.format} recordings are not read, because their length is not checked; convert it: ffmpeg -i"
            f" {Path(path).name} {Path(path).stem}.flac",
            f"{info.format} recording",
        )
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        declared = _declared(file, size)
        if declared is None:
            if info.format not in QUOTING and (logged := re.search(r".*(truncated|should be).*", info.extra_info)):
                note = logged[0].strip(" *.")
                raise DataError(
                    f"{path}: truncated audio; libsndfile notes of its {size} bytes: {note}; {ALONE}", "truncated audio"
                )
            return
        there = size - declared.start
        if declared.length > there:
            raise DataError(f"{path}: truncated audio: {there} of {declared.length} bytes are there", "truncated audio")
        file.seek(declared.end)
        rest = file.read(MOST_LEFT)
    beyond = info.frames * info.channels * WIDTHS.get(info.subtype, 0) > declared.length  # it reads the rest too
    another = rest[:4] in (*CHUNKED, *SUN)
    if beyond or another or (len(rest) == MOST_LEFT and any(rest) and not rest.startswith(TAGS)):
        raise DataError(
            f"{path}: its header counts {declared.end} bytes, but the file has {size}: several recordings in one, of"
            f" which readers take the first alone, or one that was written on; {ALONE}",
            "several recordings",
        )


def _declared(file: BinaryIO, size: int) -> Declared | None:
    """Read a header; return None for formats without lengths in bytes."""
    file.seek(0)
    head = file.read(1024)
    order: Any = CHUNKED.get(head[:4], SUN.get(head[:4]))
    if head[:4] in SUN:
        start, length = (int.from_bytes(head[at : at + 4], order) for at in (4, 8))
        length = size - start if length == 2**32 - 1 else length
        return Declared(start, length, start + length)
    if nist := re.match(rb"NIST_1A\s+(\d+)\s", head):
        fields = dict(re.findall(rb"(\w+) -i (\d+)", head))
        counts = (b"sample_count", b"channel_count", b"sample_n_bytes")
        start, length = int(nist[1]), prod(int(fields.get(name, b"1")) for name in counts)
        return Declared(start, length, start + length)
    if order is None:
        return None
    samples, at, large = None, 12, b""  # large: lengths that are too large for RF64's chunks
    whole = int.from_bytes(head[4:8], order) + 8
    while at + 8 <= size:
        file.seek(at)
        title = file.read(8)
        name, length = title[:4], int.from_bytes(title[4:], order)
        if name in CHUNKED or not (name.isascii() and name.decode().isprintable()) or (samples and at + length > size):
            break
        at += 8
        if name == b"ds64":
            large = file.read(16)
            whole = int.from_bytes(large[:8], order) + 8
        if name in SOUND:
            if length in (0, 2**32 - 1):  # RF64, or written as a stream
                length = int.from_bytes(large[8:], order) if large else size - at
            samples = Declared(at + SOUND[name], length - SOUND[name], 0)
        at += length
        at += at % 2
    return samples and samples._replace(end=max(at, whole))


def _check_streams(path: str | Path, kind: str) -> None:
    """Read an Ogg's pages, and look for a second FLAC behind the first; ``kind``: libsndfile's name of the format."""
    if kind not in ("OGG", "FLAC"):
        return
    data = Path(path).read_bytes()
    begins = len(re.findall(rb"fLaC[\0\x80]\0\0\x22", data)) if kind == "FLAC" else _check_pages(path, data)
    if begins > 1:
        raise DataError(
            f"{path}: {begins} recordings in one file, of which readers take the first alone; {ALONE}",
            "several recordings",
        )


def _check_pages(path: str | Path, data: bytes) -> int:
    """Count the recordings of an Ogg (RFC 3533, section 6)."""
    recordings, pages, unended = 0, 0, set[bytes]()
    at = data.find(b"OggS")
    while at >= 0:
        pages, head = pages + 1, data[at : at + 27].ljust(27, b"\0")
        flags, serial, first = head[5], head[14:18], at + 27 + head[26]
        end = first + sum(data[at + 27 : first])
        if len(data) < max(end, at + 28):
            raise DataError(
                f"{path}: truncated audio: its page {pages} ends at byte {end}, the file at {len(data)}",
                "truncated audio",
            )
        if flags & 2:
            recordings += data[first:].startswith((b"\1vorbis", b"OpusHead", b"\x7fFLAC", b"Speex"))
            unended.add(serial)
        if flags & 4:
            unended.discard(serial)
        at = data.find(b"OggS", end)
    if unended:
        raise DataError(
            f"{path}: truncated audio: {pages} pages, of which none is marked as the last; {ALONE}", "truncated audio"
        )
    return recordings


def _mono(path: str | Path, samples: np.ndarray) -> np.ndarray:
    """Return the mean over channels of float32 ``[n, channels]``; DataError if any is not finite."""
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
    """Return whether an MP3's first frame counts the frames; otherwise libsndfile guesses from the first frames."""
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
    """Refuse an MP3 in which a frame or tag, as files begin, and more than a few frames follow the counted ones."""
    if len(after) == MOST_LEFT and (after[:3] == b"ID3" or (after[0] == 0xFF and after[1] >= 0xE0)):
        raise DataError(
            f"{path}: several MP3s in one file, of which readers take the first alone; {ALONE}", "several recordings"
        )


def _streamed(path: str) -> Iterator[np.ndarray]:
    """Decode a file through a pipe, yielding float32 ``[n, channels]``.

    libsndfile reads a file up to the length it assumes, but a stream to its end.
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
    """Write a file to a pipe until its reader closes it."""
    with suppress(BrokenPipeError), open(into, "wb") as pipe, open(path, "rb") as file:
        while block := file.read(BLOCK):
            pipe.write(block)


def open_picture(path: str | Path) -> Image.Image:
    """Open a picture without decoding it; DataError if it cannot be opened or its pixels have no known range."""
    image = reading(path, "image", Image.open)
    if image.format == "TIFF":  # else Pillow maps its pixels into memory, in the wrong shape if it is rotated
        image.filename = ""
    if image.mode == "F" or (image.mode == "I" and image.format not in SCALED):
        image.close()
        raise DataError(
            f"{path}: its pixels are 32-bit numbers (Pillow's mode {image.mode}), of no known range; scale them and"
            " save 8 or 16 bits per channel",
            "32-bit pixels",
        )
    return image


def stored_as(image: Image.Image) -> str:
    """Return how a picture that is not decoded yet is stored, in Pillow's words, such as L;2 or RGB;16B."""
    tiles = getattr(image, "tile", None)  # missing if a plugin decodes at once
    args = tiles[0].args if tiles else ""
    return str(args[0] if isinstance(args, tuple) else args)


def on_white(image: Image.Image, stored: str) -> Image.Image:
    """Composite a decoded picture on white, if any of it is transparent."""
    if not image.has_transparency_data:
        return image
    colour = image.info.get("transparency")  # a PNG's colour is as in its file, but its pixels have 8 bits now
    if isinstance(colour, int) and image.mode == "L":
        image.info["transparency"] = colour * {"L;2": 85, "L;4": 17}.get(stored, 1)
    elif isinstance(colour, tuple) and ";16" in stored:
        image.info["transparency"] = tuple(channel >> 8 for channel in colour)
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def narrow_range(image: Image.Image) -> str | None:
    """Return a warning about a decoded 16-bit picture that uses a small part of its range."""
    scale = 1 if image.mode.startswith("I") else 256  # Pillow keeps the upper 8 of 16 bits a channel
    ends = np.array(image.getextrema(), np.int64).reshape(-1, 2)
    seen = ends[[band != "A" for band in image.getbands()]]
    low, high = int(seen.min()) * scale, int(seen.max()) * scale
    if not 0 < high - low < FEW or getattr(image, "tag_v2", {}).get(258, (16,))[0] < 16:
        return None
    return (
        f"its pixels are {low} to {high} of 0 to 65535, next to {'black' if high < FEW else 'one colour'} for a model;"
        " scale them to the whole range, or save them with 8 bits"
    )


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of formats that know it once opened; else, or if EXIF is damaged, 1 (upright)."""
    try:
        # Not image.getexif(): for a PNG whose EXIF is not read yet, that decodes the image.
        exif = Image.Image.getexif(image) if image.format in ("JPEG", "MPO", "WEBP", "AVIF", "PNG") else {}
        turned = exif.get(0x0112, 1)
    except Exception:  # SyntaxError, struct.error, ...
        return 1
    return turned if isinstance(turned, int) and turned in UPRIGHT else 1
