"""Recordings of which readers silently give a part, or more than there is."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile

from hetero_strategy.data.media_file import length_of, waveform_of
from hetero_strategy.errors import DataError

RATE, SAMPLES = 16000, 64000
NOISE = np.random.default_rng(0).uniform(-0.4, 0.4, SAMPLES)
FORMATS = [
    *[("WAV", kind, None) for kind in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "ALAW", "ULAW", "IMA_ADPCM")],
    *[("WAV", kind, None) for kind in ("MS_ADPCM", "GSM610")],
    *[("WAV", "PCM_16", "BIG"), ("WAVEX", "PCM_16", None), ("RF64", "PCM_16", None)],
    *[("AIFF", "PCM_16", None), ("AIFF", "FLOAT", None), ("AIFF", "PCM_16", "LITTLE"), ("SVX", "PCM_16", None)],
    *[("AU", "PCM_16", None), ("AU", "ULAW", "LITTLE"), ("NIST", "PCM_16", None), ("NIST", "ULAW", None)],
    *[("FLAC", "PCM_16", None), ("OGG", "VORBIS", None), ("OGG", "OPUS", None), ("MP3", "MPEG_LAYER_III", None)],
]
WORDS = r"truncated|in one file|several recordings|written on|not a readable audio|does not say how long"


def lengths(path: Path) -> list[int]:
    return [length_of(path)[0], len(waveform_of(path)[0])]


@pytest.mark.parametrize(("form", "subtype", "endian"), FORMATS)
def test_a_recording_is_whole_and_alone_or_refused(tmp_path: Path, form: str, subtype: str, endian: str | None) -> None:
    if form not in soundfile.available_formats() or subtype not in soundfile.available_subtypes(form):
        pytest.skip(f"this libsndfile has no {form} of {subtype}")
    path = tmp_path / f"a.{form.lower()}"
    soundfile.write(path, NOISE, RATE, format=form, subtype=subtype, endian=endian)
    whole = path.read_bytes()
    measured, read = lengths(path)
    assert measured == read and SAMPLES <= read < SAMPLES + 5000  # codecs fill their last block
    damaged = {"cut": whole[: len(whole) // 2 + 3], "less": whole[:-100], "twice": whole + whole}
    for what, data in damaged.items():
        path.write_bytes(data)
        with pytest.raises(DataError, match=WORDS) as caught:
            pytest.fail(f"{what}: {lengths(path)} samples")
        assert str(path) in str(caught.value)
    if form in ("WAV", "AIFF", "FLAC", "OGG"):
        path.write_bytes(whole + b"TAG" + bytes(125))
        assert lengths(path) == [measured, read]


@pytest.mark.parametrize("form", ["CAF", "VOC", "W64"])
def test_formats_whose_length_is_not_checked_are_refused(tmp_path: Path, form: str) -> None:
    soundfile.write(tmp_path / "a.snd", NOISE, RATE, format=form, subtype="PCM_16")
    for read in (length_of, waveform_of):
        with pytest.raises(DataError, match=rf"a\.snd: {form} .*; convert it: ffmpeg -i a.snd a.flac$") as caught:
            read(tmp_path / "a.snd")
        assert caught.value.kind == f"{form} recording"


def test_a_nist_file_without_its_number_of_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.nist"
    soundfile.write(path, NOISE, RATE, format="NIST", subtype="PCM_16")
    path.write_bytes(path.read_bytes().replace(b"sample_count -i", b"sample_other -i"))
    with pytest.raises(DataError, match=r"a\.nist: its header counts 1026 bytes, but the file has 129024"):
        length_of(path)


def wav(
    data: bytes, *, behind: bytes = b"", length: int | None = None, riff: int | None = None, pad: bool = True
) -> bytes:
    """A WAV of 8 bits whose header may lie."""
    body = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, RATE, RATE, 1, 8) + b"data"
    body += struct.pack("<I", len(data) if length is None else length) + data + bytes(pad and len(data) % 2) + behind
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


def test_wavs_of_careless_writers_are_read(tmp_path: Path) -> None:
    """As streams, never closed, without padding, with wrong sizes of all, with more chunks or tags behind."""
    data, most = bytes(range(128)) * 125 + b"\7", 2**32 - 1
    more = b"LIST" + struct.pack("<I", 9000) + bytes(9000)
    for careless in (
        wav(data, length=most, riff=most), wav(data, length=0, riff=8), wav(data, behind=more, pad=False),
        wav(data, behind=more), wav(data, riff=20), wav(data, riff=10**6), wav(data) + bytes(9000),
        wav(data) + b"ID3\4" + b"\5" * 9000,
    ):  # fmt: skip
        (tmp_path / "a.wav").write_bytes(careless)
        assert all(len(data) <= found <= len(data) + 1 for found in lengths(tmp_path / "a.wav"))
    for lie, message in (
        (wav(data, length=len(data) + 2), "16002 of 16003 bytes|16001 of 16003 bytes"),
        (wav(data, length=4000, riff=4036), "its header counts 4044 bytes, but the file has 16046: several recordings"),
    ):
        (tmp_path / "a.wav").write_bytes(lie)
        with pytest.raises(DataError, match=rf"a\.wav: .*({message})"):
            length_of(tmp_path / "a.wav")


@pytest.mark.parametrize("codec", ["VORBIS", "OPUS"])
def test_pages_of_an_ogg_say_whether_it_is_whole(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.ogg"
    soundfile.write(path, np.tile(NOISE, 2), RATE, format="OGG", subtype=codec)
    whole = path.read_bytes()
    starts = [at for at in range(len(whole)) if whole.startswith(b"OggS", at)]
    third, fourth = list(pairwise(starts))[3]
    other = bytes([whole[third + 2000] ^ 255])
    for data, message in (
        (whole[: starts[-2]], r"truncated audio: \d+ pages, of which none is marked as the last"),
        (whole[: starts[-1] + 300], r"truncated audio: its page \d+ ends at byte \d+, the file at \d+"),
        (whole[: starts[-1] + 9], r"truncated audio: its page \d+ ends at byte \d+, the file at \d+"),
        (whole[:third] + whole[fourth:], r"truncated audio: \d+ of 128000 samples could be read"),
        (
            whole[: third + 2000] + other + whole[third + 2001 :],
            r"truncated audio: \d+ of 128000 samples could be read",
        ),
        (whole + whole, "2 recordings in one file, of which readers take the first alone; convert it anew"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"a\.ogg: {message}"):
            waveform_of(path)


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_words_of_tags_say_nothing_about_the_recording(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a.snd"
    with soundfile.SoundFile(path, "w", RATE, 1, format=form) as file:
        file.title = "It should be louder (truncated)"
        file.write(NOISE)
    measured, read = lengths(path)
    assert measured == read and SAMPLES <= read < SAMPLES + 5000
