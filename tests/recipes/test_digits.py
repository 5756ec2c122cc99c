from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image
from transformers import LlamaConfig

from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import DataError
from recipes import digits as room
from recipes.digits import split_digits, write_digits, write_digits_draw
from recipes.tiny import tiny_llama
from tests.model.helpers import LLAMA
from tests.small_models import digit_processors


def blocks(strip: np.ndarray) -> set[bytes]:
    """Every 8x8 picture that stands doubled anywhere in the strip."""
    found = set()
    for left in range(strip.shape[1] - 15):
        window = strip[:, left : left + 16]
        small = window[::2, ::2]
        if (np.kron(small, np.ones((2, 2), np.uint8)) == window).all():
            found.add((small // 15).astype(np.uint8).tobytes())
    return found


def test_splits_share_no_digit(digits: Path) -> None:
    splits = {name: {image.tobytes() for image in images} for name, (images, _) in split_digits(3).items()}
    assert set(splits) == {"train", "val", "test"} and len(set().union(*splits.values())) == 1797
    assert sum(map(len, splits.values())) == 1797, "none is in two"
    seen = {
        name: set().union(*(blocks(np.asarray(Image.open(p))) for p in digits.glob(f"images/{name}-*")))
        for name in splits
    }
    for name, others in ((name, set(splits) - {name}) for name in splits):
        assert len(seen[name] & splits[name]) > 15  # the strips are made of these digits ...
        assert not any(seen[name] & splits[other] for other in others)  # ... and of none of the others


def test_answers_are_right(digits: Path) -> None:
    """Digits by their pictures, keys by their two strongest frequencies; read without the writer's code."""
    labels = {
        image.tobytes(): label
        for images, ls in split_digits(3).values()
        for image, label in zip(images, ls, strict=True)
    }
    kinds = set()
    for sample in json.loads((digits / "train.json").read_text()):
        question, answer = (turn["value"] for turn in sample["conversations"])
        kinds.add(("image" in sample, "audio" in sample))
        assert question.count("<image>") == ("image" in sample) and question.count("<audio>") == ("audio" in sample)
        parts = answer.split(" ")
        assert len(parts) == 1 + ("image" in sample and "audio" in sample)
        if "image" in sample:
            strip, read, left = np.asarray(Image.open(digits / sample["image"])), [], 0
            while left + 16 <= strip.shape[1]:
                small = (strip[::2, left : left + 16 : 2] // 15).astype(np.uint8).tobytes()
                left += 16 if small in labels else 1
                read += [str(labels[small])] if small in labels else []
            assert "".join(read) == parts[0]
        if "audio" in sample:
            assert heard(*soundfile.read(digits / sample["audio"])) == list(parts[-1])
        if len(sample) == 2:
            assert answer in question
    assert len(kinds) == 4


def heard(waveform: np.ndarray, rate: int) -> list[str]:
    keypad = {697: "123", 770: "456", 852: "789", 941: "*0#"}
    columns = (1209, 1336, 1477)
    hop = rate // 100
    loud = [np.abs(waveform[i : i + hop]).mean() > 0.06 for i in range(0, len(waveform) - hop, hop)]
    keys, start = [], None
    for place, on in enumerate([*loud, False]):
        if on and start is None:
            start = place
        elif not on and start is not None:
            piece = waveform[start * hop : place * hop]
            time = np.arange(len(piece)) / rate
            power = {f: abs(np.exp(-2j * np.pi * f * time) @ piece) for f in (*keypad, *columns)}
            keys.append(keypad[max(keypad, key=power.__getitem__)][columns.index(max(columns, key=power.__getitem__))])
            start = None
    return keys


def test_small_in_rows(digits: Path) -> None:
    index = build_index(digits / "train.json", ChatTokenizer(digits), digit_processors(), progress=False)
    assert index.items["vision"].rows.max() <= 6 and index.items["audio"].rows.max() <= 24
    assert ChatTokenizer(digits).vocab_size == 101


def test_idempotent_and_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write_digits(tmp_path / "a", train=6, val=3, progress=False)
    b = write_digits(tmp_path / "b", train=6, val=3, progress=False)
    files = sorted(p.relative_to(a) for p in a.rglob("*") if p.is_file())
    assert all((a / f).read_bytes() == (b / f).read_bytes() for f in files)
    c = write_digits(tmp_path / "c", train=6, val=3, seed=1, progress=False)
    assert (a / "train.json").read_bytes() != (c / "train.json").read_bytes()
    monkeypatch.setattr(room, "_sample", None)  # writing again would fail
    assert write_digits(a, train=6, val=3) == a
    assert {p.name for p in a.glob("*.json")} == {"train.json", "val.json", "tokenizer.json", "digits.json"}
    for other in ({"train": 7, "val": 3}, {"train": 6, "val": 3, "test": 1}):
        with pytest.raises(DataError, match="other settings"):
            write_digits(a, **other)
    with pytest.raises(TypeError):
        write_digits(tmp_path / "d", train=1, val=1, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]  # nothing half written


def test_drawings_are_asked_for_truly(drawings: Path) -> None:
    """Questions, images and files to draw agree, judged by the digits' own labels; splits share no digit."""
    pictures = {
        image.tobytes(): (split, int(label))
        for split, (images, labels) in split_digits(3).items()
        for image, label in zip(images, labels, strict=True)
    }
    kinds, files = [], set()
    for split in ("train", "val", "test"):
        for sample in json.loads((drawings / f"{split}.json").read_text()):
            question, answer = (turn["value"] for turn in sample["conversations"])
            asked, shown = question.split(" ")[1], []
            if "image" in sample:
                strip = np.asarray(Image.open(drawings / sample["image"]))[::2, ::2] // 15
                assert strip.shape[0] == 8 and asked == "<image>"
                shown = [np.ascontiguousarray(part).tobytes() for part in np.split(strip, strip.shape[1] // 8, axis=1)]
                asked = "".join(str(pictures[part][1]) for part in shown)
                assert {pictures[part][0] for part in shown} == {split}
            kinds.append((question.split(" ")[0], "image" in sample, len(asked)))
            if "draw" not in sample:
                assert answer == asked and question == "Read <image>"
                continue
            assert answer == "<draw>" * len(asked) and len(sample["draw"]) == len(asked)
            for place, (digit, name) in enumerate(zip(asked, sample["draw"], strict=True)):
                found = np.asarray(Image.open(drawings / name)) // 15
                assert found.shape == (8, 8) and pictures[found.tobytes()] == (split, int(digit)) and name[-5] == digit
                assert not shown or found.tobytes() != shown[place]
                files.add(name)
    wanted = {("Read", True, n) for n in (1, 2, 3)} | {("Draw", image, n) for image in (True, False) for n in (1, 2)}
    assert set(kinds) == wanted and len(files) > 40


def test_both_data_sets_keep_to_their_folder(drawings: Path, digits: Path) -> None:
    assert write_digits_draw(drawings, train=60, val=20, test=20, seed=3, progress=False) == drawings
    with pytest.raises(DataError, match="holds other files or digits with other settings"):
        write_digits_draw(digits, train=60, val=20, test=20, seed=3, progress=False)


def test_a_tiny_model_takes_what_the_one_it_is_made_of_takes(tmp_path: Path) -> None:
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    seen: list[object] = []
    model = tiny_llama(checkpoint=tmp_path, before=seen.append)
    assert (model.checkpoint, model.before, model.width) == (tmp_path, seen.append, LLAMA["hidden_size"])
