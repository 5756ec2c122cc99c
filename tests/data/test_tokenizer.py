from __future__ import annotations

from pathlib import Path

import pytest

from hetero_strategy.data.manifest import Turn
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError

HUMAN, GPT = "human", "gpt"


def pieces(tokenizer: ChatTokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.tokenizer.id_to_token(i) for i in ids]


def test_by_hand(digits: Path) -> None:
    tokenizer = ChatTokenizer(digits)
    turns = [Turn(HUMAN, "a<image>b<audio>"), Turn(GPT, "12"), Turn(HUMAN, "<image>?"), Turn(GPT, "3")]
    encoded = tokenizer.encode(turns, {"image": [2, 1], "audio": [3]})
    i, a = "<image>", "<audio>"
    expected = ["<bos>", "a", i, i, "b", a, a, a, "\n", "1", "2", "<eos>", "\n", i, "?", "\n", "3", "<eos>"]
    assert pieces(tokenizer, encoded.ids.tolist()) == expected
    assert encoded.loss.nonzero()[0].tolist() == [9, 10, 11, 16, 17]
    assert encoded.starts["image"].tolist() == [2, 13] and encoded.starts["audio"].tolist() == [5]
    assert tokenizer.decode(encoded.ids[encoded.loss]) == "123"


def test_batch_equals_one_by_one(digits: Path) -> None:
    tokenizer = ChatTokenizer(digits)
    talks = [[Turn(HUMAN, f"{n}<image>"), Turn(GPT, "9" * n)] for n in range(1, 5)]
    rows = [{"image": [n]} for n in range(1, 5)]
    for one, talk, row in zip(tokenizer.encode_batch(talks, rows), talks, rows, strict=True):
        assert one.ids.tolist() == tokenizer.encode(talk, row).ids.tolist()


def test_text_that_looks_special_stays_text(digits: Path) -> None:
    tokenizer = ChatTokenizer(digits)
    encoded = tokenizer.encode([Turn(HUMAN, "<eos>"), Turn(GPT, "<audio>")], {})
    assert (encoded.ids == tokenizer.eos_id).sum() == 1
    assert not (encoded.ids == tokenizer.placeholder_id("audio")).any()


def test_nothing_predicts_the_first_token(digits: Path) -> None:
    encoded = ChatTokenizer(digits, bos=None).encode([Turn(GPT, "12")], {})
    assert encoded.loss.tolist() == [False, True, True]


def test_missing_specials_and_files(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no token '<s>' \(bos\).*<bos>"):
        ChatTokenizer(digits, bos="<s>")
    with pytest.raises(ConfigError, match=r"no token '<pad>' \(placeholders\['image'\]\)"):
        ChatTokenizer(digits, placeholders={"image": "<pad>"}).placeholder_id("image")
    with pytest.raises(ConfigError, match="missing"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTokenizer(tmp_path)
