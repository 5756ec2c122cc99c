"""Whether a recording is whole and alone in its file.

libsndfile shortens a recording to what is there of it, and reads the first of several, without a word. So what headers
and pages say is compared with the file here.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hetero_strategy.errors import DataError

MOST_LEFT = 4096
"""Bytes at the end of a file that its header may have left out of its count."""
ALONE = "convert it anew, such as with ffmpeg, or cut it"
TAGS = (b"ID3", b"TAG", b"APETAGEX")
"""What may follow a recording."""


class Chunks(NamedTuple):
    """How a container lays its chunks."""

    order: str
    """Byte order of lengths."""
    first: int
    """Position of the first chunk."""
    name: int = 4
    """Bytes of a chunk's name."""
    length: int = 4
    """Bytes of its length."""
    align: int = 2
    """Chunks start at multiples of so many bytes."""
    inclusive: bool = False
    """Whether a length counts its chunk's name and length."""


CHUNKED = {
    b"RIFF": Chunks("little", 12), b"RF64": Chunks("little", 12), b"BW64": Chunks("little", 12),
    b"RIFX": Chunks("big", 12), b"FORM": Chunks("big", 12), b"caff": Chunks("big", 8, length=8, align=1),
    b"riff": Chunks("little", 40, name=16, length=8, align=8, inclusive=True),
}  # fmt: skip
"""WAV, AIFF, SVX, CAF and W64, by how they begin."""
SUN = {b".snd": "big", b"dns.": "little"}
SOUND = {b"data": 0, b"SSND": 8, b"BODY": 0}
"""Name of the chunk that holds the samples -> bytes before them."""
WIDTHS = {
    "PCM_S8": 1, "PCM_U8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8, "ULAW": 1, "ALAW": 1,
}  # fmt: skip
"""Bytes of a sample, in libsndfile's words."""


class Declared(NamedTuple):
    """What a header says of its file, in bytes."""

    start: int
    """Where samples begin."""
    length: int
    """Bytes of samples."""
    end: int
    """Where the last of what it says anything of ends."""


def check_container(path: str | Path, info: Any) -> None:
    """Compare what a recording's header says with its file's length and with what libsndfile would read.

    Args:
        info: libsndfile's, whose log is searched where the header is of a kind that is not read here. Headers without
            any length (IRCAM, PAF, PVF, XI) say nothing.

    Raises:
        DataError: the samples end beyond the file, or the file goes on behind what its header says.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        declared = _declared(file, size)
        if declared is None:
            frames = re.search(r"^ *Frames *: (\d+)", info.extra_info, re.MULTILINE)
            if info.format in ("AVR", "MPC2K") and frames and int(frames[1]) != info.frames:
                raise DataError(
                    f"{path}: truncated audio: {info.frames} of {frames[1]} samples are there; {ALONE}",
                    "truncated audio",
                )
            if found := re.search(r".*(truncated|should be).*", info.extra_info):
                note = found[0].strip(" *.")
                raise DataError(
                    f"{path}: truncated audio; libsndfile notes of its {size} bytes: {note}; {ALONE}", "truncated audio"
                )
            return
        there = size - declared.start
        if declared.length > there:
            raise DataError(f"{path}: truncated audio: {there} of {declared.length} bytes are there", "truncated audio")
        file.seek(declared.end)
        rest = file.read(MOST_LEFT)
    beyond = info.frames * info.channels * WIDTHS.get(info.subtype, 0) > declared.length  # it would read the rest too
    another = rest[:4] in (*CHUNKED, *SUN)
    if beyond or another or (len(rest) == MOST_LEFT and any(rest) and not rest.startswith(TAGS)):
        raise DataError(
            f"{path}: its header counts {declared.end} bytes, but the file has {size}: several recordings in one, of"
            f" which readers take the first alone, or one that was written on; {ALONE}",
            "several recordings",
        )


def _declared(file: BinaryIO, size: int) -> Declared | None:
    """Read a header; None where the file is of a kind without lengths in bytes."""
    file.seek(0)
    head = file.read(1024)
    if (order := SUN.get(head[:4])) is not None:
        start, length = (int.from_bytes(head[at : at + 4], order) for at in (4, 8))  # type: ignore[arg-type]
        length = size - start if length == 0xFFFFFFFF else length
        return Declared(start, length, start + length)
    if head.startswith(b"NIST_1A"):
        fields = dict(re.findall(rb"(\w+) -i (\d+)", head))
        counts = [int(fields.get(name, b"1")) for name in (b"sample_count", b"channel_count", b"sample_n_bytes")]
        start = int(head[8:16])
        return Declared(start, prod(counts), start + prod(counts)) if b"sample_count" in fields else None
    chunks = CHUNKED.get(head[:4])
    return None if chunks is None else _chunked(file, size, head, chunks)


def _chunked(file: BinaryIO, size: int, head: bytes, chunks: Chunks) -> Declared | None:
    def number(data: bytes) -> int:
        return int.from_bytes(data, chunks.order)  # type: ignore[arg-type]

    found, at, before = None, chunks.first, chunks.name + chunks.length
    whole = 0 if head[:4] == b"caff" else number(head[chunks.name : before]) + (0 if chunks.inclusive else before)
    large: bytes | None = None  # RF64 keeps there what is too large for its chunks
    while at + before <= size:
        file.seek(at)
        title = file.read(before)
        name, length = title[:4], number(title[chunks.name :])
        if name in CHUNKED or not (name.isascii() and name.decode().isprintable()):
            break
        if found and at + length > size:
            break
        at += before
        if name == b"ds64":
            large = file.read(16)
            whole = number(large[:8]) + before
        if name in SOUND:
            if length in (0, 256**chunks.length - 1):  # of RF64, or written as a stream
                length = number(large[8:]) if large else size - at
            skipped = SOUND[name] + (4 if head[:4] == b"caff" else 0)
            found = Declared(at + skipped, length - before * chunks.inclusive - skipped, 0)
        at += length - before * chunks.inclusive
        at += -at % chunks.align
    return found and found._replace(end=max(at, whole))


def check_streams(path: str | Path, kind: str) -> None:
    """Read an Ogg's pages, and look for a second FLAC behind the first.

    Args:
        kind: what libsndfile calls the container; others pass.

    Raises:
        DataError: a stream has no end, ends within a page, or is not alone.
    """
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
