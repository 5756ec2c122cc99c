"""What media files hold: whatever a decoder raises names the file, and recordings are as long as what can be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np

from hetero_strategy.data.recording import MOST_LEFT, check_container, check_streams
from hetero_strategy.errors import DataError

Result = TypeVar("Result")
BLOCK = 1 << 16
"""Samples, or bytes, that are read at a time."""
UNKNOWN = 2**62
"""More samples than any recording has: libsndfile's number where it does not know."""


def reading(path: str | Path, kind: str, read: Callable[[Any], Result]) -> Result:
    """Call ``read(path)`` and turn whatever a decoder raises into a DataError that names the file."""
    try:
        return read(str(path))
    except FileNotFoundError:
        raise DataError(f"{path}: file is missing") from None
    except DataError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, LibsndfileError, ...
        try:
            there = stat.S_ISREG(os.stat(path).st_mode)
        except FileNotFoundError:
            there = False
        except (OSError, ValueError) as unopened:  # no permission, a name too long, or one with a zero in it
            why = getattr(unopened, "strerror", unopened)
            raise DataError(f"{str(path)[:300]}: cannot be opened: {why}") from None
        if not there:
            raise DataError(f"{path}: file is missing") from None
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: not a readable {kind} file (truncated or damaged?): {reason}") from None


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
        raise DataError(f"{path}: truncated audio: {len(samples)} of {info.frames} samples could be read")
    return _mono(path, samples), rate


def _info(path: str | Path) -> Any:
    """What libsndfile says of a file; DataError where that has no length, as a FLAC that was written to a pipe, or
    another one than its header says.
    """
    import soundfile

    info = reading(path, "audio", soundfile.info)
    check_container(path, info)
    if info.frames >= UNKNOWN:
        raise DataError(f"{path}: its header does not say how long it is, as if written to a pipe; convert it anew")
    return info


def _mono(path: str | Path, samples: np.ndarray) -> np.ndarray:
    """The mean over channels of float32 ``[n, channels]``; DataError where it is no number, as in a WAV of floats."""
    mono = samples.mean(axis=1)
    bad = np.flatnonzero(~np.isfinite(mono))
    if len(bad):
        raise DataError(
            f"{path}: {len(bad)} of {len(mono)} audio samples are NaN or infinite, the first of them number {bad[0]};"
            " write the recording anew"
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
            " ffmpeg, or cut it"
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
