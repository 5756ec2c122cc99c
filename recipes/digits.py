"""Two small real data sets: handwritten digits and touch tones to read, and handwritten digits to read and to draw.

Images are strips of 1 to 6 of scikit-learn's bundled handwritten digits (UCI "Optical Recognition of Handwritten
Digits", 8x8 pixels, here 16x16, grey PNG). Audio is 1 to 6 DTMF keys (ITU-T Q.23), one in every 160 ms, with noise,
8 kHz PCM16 WAV. Training, validation and test share no digit image. Nothing is downloaded.

The answer repeats, in characters, what the question holds: a tiny model learns that in minutes on a laptop. In the
data set to draw, an answer may be pictures instead: of digits that the question names or shows in another handwriting.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models
from tqdm import tqdm

from hetero_strategy.data.build_index import atomic_folder
from hetero_strategy.errors import DataError

VERSION = 3
DRAW_VERSION = 2
RATE = 8000
SLOT = RATE * 160 // 1000
"""Audio samples per key."""
KEYS = "0123456789*#"
LOW = dict(zip(KEYS, (941, 697, 697, 697, 770, 770, 770, 852, 852, 852, 941, 941), strict=True))
HIGH = dict(zip(KEYS, (1336, 1209, 1336, 1477, 1209, 1336, 1477, 1209, 1336, 1477, 1209, 1477), strict=True))
SPECIALS = ("<unk>", "<bos>", "<eos>", "<image>", "<audio>")
DRAW_SPECIALS = ("<unk>", "<bos>", "<eos>", "<image>", "<draw>")

QUESTIONS = ("Read {}", "Copy {}", "Tell {}", "Give {}")
TEXT = "0123456789abcdef"


def write_digits(
    folder: str | Path, *, train: int = 6000, val: int = 500, test: int = 0, seed: int = 0, progress: bool = True
) -> Path:
    """Write ``train.json``, ``val.json``, ``test.json``, ``tokenizer.json``, ``images/`` and ``audio/`` to a folder
    that appears only when it is complete.

    A quarter each of the samples has an image, a recording, both, or neither. A folder written with the same settings
    is kept as it is.

    Args:
        folder: target folder, created if missing.
        train, val, test: numbers of samples; a split without samples has no file.
        seed: seed of all draws.
        progress: show a progress bar.

    Returns:
        The folder.

    Raises:
        DataError: the folder holds other files.
    """
    stamp = {"data": "digits", "version": VERSION, "train": train, "val": val, "test": test, "seed": seed}
    return _write(Path(folder), stamp, ("images", "audio"), SPECIALS, _sample, progress)


def write_digits_draw(
    folder: str | Path, *, train: int = 4000, val: int = 300, test: int = 0, seed: int = 0, progress: bool = True
) -> Path:
    """Write ``train.json``, ``val.json``, ``test.json``, ``tokenizer.json``, ``images/`` and ``digits/`` to a folder
    that appears only when it is complete.

    A third each of the samples reads 1 to 3 digits from an image, draws 1 or 2 digits that are named, and draws 1 or 2
    digits that an image shows. Every drawing is an 8x8 picture of one digit, another one than the image shows; its
    file's name ends with the digit. Arguments, result and errors: see :func:`write_digits`.
    """
    stamp = {"data": "digits_draw", "version": DRAW_VERSION, "train": train, "val": val, "test": test, "seed": seed}
    return _write(Path(folder), stamp, ("images", "digits"), DRAW_SPECIALS, _drawing_sample, progress)


Digits = tuple[np.ndarray, np.ndarray]
"""Images uint8 [n, 8, 8] of 0..16, labels [n]."""


def _write(
    folder: Path,
    stamp: dict[str, object],
    subfolders: tuple[str, ...],
    specials: tuple[str, ...],
    make: Callable[[Path, str, Digits, np.random.Generator], dict[str, object]],
    progress: bool,
) -> Path:
    counts, seed = {split: int(str(stamp[split])) for split in ("train", "val", "test")}, int(str(stamp["seed"]))
    if folder.is_dir() and any(folder.iterdir()):
        written = folder / "digits.json"
        if written.is_file() and json.loads(written.read_text()) == stamp:
            return folder
        raise DataError(
            f"{folder}: holds other files or digits with other settings; delete it or choose another folder"
        )
    digits = split_digits(seed)
    total = sum(counts.values())
    with atomic_folder(folder) as new, tqdm(total=total, desc="write digits", disable=not progress) as bar:
        for subfolder in subfolders:
            (new / subfolder).mkdir()
        for number, (split, count) in enumerate(counts.items()):
            rng = np.random.default_rng([seed, number])
            samples = []
            for sample in range(count):
                samples.append(make(new, f"{split}-{sample:06d}", digits[split], rng))
                bar.update()
            if samples:
                (new / f"{split}.json").write_text(json.dumps(samples, indent=0))
        _tokenizer(specials).save(str(new / "tokenizer.json"))
        (new / "digits.json").write_text(json.dumps(stamp))
    return folder


def split_digits(seed: int = 0) -> dict[str, Digits]:
    """Return split -> (images uint8 [n, 8, 8] of 0..16, labels [n]). Validation and test have a tenth each; no image
    is in two splits.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([seed, 1797]).permutation(len(labels))
    images, labels = images[order].reshape(-1, 8, 8).astype(np.uint8), labels[order]
    ends = {"val": (0, len(labels) // 10), "test": (len(labels) // 10, len(labels) // 5)}
    parts = {"train": (len(labels) // 5, len(labels)), **ends}
    return {split: (images[first:last], labels[first:last]) for split, (first, last) in parts.items()}


def _sample(folder: Path, name: str, digits: Digits, rng: np.random.Generator) -> dict[str, object]:
    kind = int(rng.integers(4))
    entry: dict[str, object] = {"id": name}
    asked, answers = [], []
    if kind in (0, 2):
        chosen = rng.integers(len(digits[1]), size=rng.integers(1, 7))
        entry["image"] = f"images/{name}.png"
        Image.fromarray(_strip(digits[0][chosen])).save(folder / str(entry["image"]), compress_level=1)
        asked.append("<image>")
        answers.append("".join(str(label) for label in digits[1][chosen]))
    if kind in (1, 2):
        keys = [KEYS[k] for k in rng.integers(len(KEYS), size=rng.integers(1, 7))]
        entry["audio"] = f"audio/{name}.wav"
        _write_wave(folder / str(entry["audio"]), _tones(keys, rng))
        asked.append("<audio>")
        answers.append("".join(keys))
    if kind == 3:
        asked = answers = ["".join(rng.choice(list(TEXT), size=rng.integers(1, 7)))]
    question = QUESTIONS[rng.integers(len(QUESTIONS))].format(" ".join(asked))
    entry["conversations"] = [{"from": "human", "value": question}, {"from": "gpt", "value": " ".join(answers)}]
    return entry


def _drawing_sample(folder: Path, name: str, digits: Digits, rng: np.random.Generator) -> dict[str, object]:
    kind = ("read", "draw", "redraw")[rng.integers(3)]
    entry: dict[str, object] = {"id": name}
    chosen = rng.integers(len(digits[1]), size=rng.integers(1, 4 if kind == "read" else 3))
    text = "".join(str(label) for label in digits[1][chosen])
    if kind != "draw":
        entry["image"] = f"images/{name}.png"
        Image.fromarray(_strip(digits[0][chosen])).save(folder / str(entry["image"]), compress_level=1)
    if kind != "read":
        entry["draw"] = [_digit(folder, name.split("-")[0], digits, _other(k, digits, rng)) for k in chosen]
    question = f"{'Read' if kind == 'read' else 'Draw'} {text if kind == 'draw' else '<image>'}"
    answer = text if kind == "read" else "<draw>" * len(chosen)
    entry["conversations"] = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return entry


def _other(number: int, digits: Digits, rng: np.random.Generator) -> int:
    """Choose another picture of the same digit."""
    same = np.flatnonzero(digits[1] == digits[1][number])
    return int(rng.choice(same[same != number]))


def _digit(folder: Path, split: str, digits: Digits, number: int) -> str:
    """Return the file of one digit, which is written on first use."""
    name = f"digits/{split}-{number:04d}-{digits[1][number]}.png"
    if not (folder / name).is_file():
        Image.fromarray(digits[0][number] * 15).save(folder / name, compress_level=1)
    return name


def _strip(digits: np.ndarray) -> np.ndarray:
    """Return digits [n, 8, 8] doubled and side by side, uint8 [16, 16 n]."""
    return np.concatenate([np.kron(digit, np.ones((2, 2), np.uint8)) * 15 for digit in digits], axis=1)


def _tones(keys: list[str], rng: np.random.Generator) -> np.ndarray:
    """Return audio float [n] in -1..1; a key sounds 80 to 120 ms of its slot of 160 ms, 20 ms or more off its ends."""
    margin = RATE * 20 // 1000
    clean = np.zeros(SLOT * len(keys))
    for number, key in enumerate(keys):
        length = rng.integers(RATE * 80 // 1000, RATE * 120 // 1000 + 1)
        start = SLOT * number + rng.integers(margin, SLOT - margin - length + 1)
        time = np.arange(length) / RATE
        phase = 2 * np.pi * rng.random(2)
        tone = np.sin(2 * np.pi * LOW[key] * time + phase[0]) + np.sin(2 * np.pi * HIGH[key] * time + phase[1])
        clean[start : start + length] = 0.3 * tone
    return clean * rng.uniform(0.5, 1.0) + rng.normal(0.0, rng.uniform(0.002, 0.02), len(clean))


def _write_wave(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())


def _tokenizer(specials: tuple[str, ...]) -> Tokenizer:
    """Make a tokenizer with one token per printable ASCII character and newline."""
    characters = "\n" + "".join(chr(c) for c in range(32, 127))
    vocabulary = {token: number for number, token in enumerate((*specials, *characters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer
