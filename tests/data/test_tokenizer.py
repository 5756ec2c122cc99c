from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hetero_strategy.data.conversation import Turn, item_mark
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError
from tests import stock

HUMAN, GPT = "human", "gpt"
IMAGE, AUDIO = item_mark("image"), item_mark("audio")


def pieces(tokenizer: ChatTokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.tokenizer.id_to_token(i) for i in ids]


def test_by_hand(digits: Path) -> None:
    tokenizer = ChatTokenizer(digits)
    turns = [Turn(HUMAN, f"a{IMAGE}b{AUDIO}"), Turn(GPT, "12"), Turn(HUMAN, f"{IMAGE}?"), Turn(GPT, "3")]
    encoded = tokenizer.encode_batch([turns], [{"image": [2, 1], "audio": [3]}])[0]
    i, a = "<image>", "<audio>"
    expected = ["<bos>", "a", i, i, "b", a, a, a, "\n", "1", "2", "<eos>", "\n", i, "?", "\n", "3", "<eos>"]
    assert pieces(tokenizer, encoded.ids.tolist()) == expected
    assert encoded.loss.nonzero()[0].tolist() == [9, 10, 11, 16, 17]
    assert encoded.starts["image"].tolist() == [2, 13] and encoded.starts["audio"].tolist() == [5]
    assert tokenizer.decode(encoded.ids[encoded.loss]) == "123"


def test_a_tokenizer_without_an_unknown_token_is_refused_where_it_needs_one(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"red": 0, "</s>": 1}, "<unk>")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot tokenise this data: .* give its model an unknown"):
        tokenizer.encode_batch([[Turn(HUMAN, "green"), Turn(GPT, "red")]], [{}])


def test_batch_equals_one_by_one(digits: Path) -> None:
    tokenizer = ChatTokenizer(digits)
    talks = [[Turn(HUMAN, f"{n}{IMAGE}"), Turn(GPT, "9" * n)] for n in range(1, 5)]
    rows = [{"image": [n]} for n in range(1, 5)]
    for one, talk, row in zip(tokenizer.encode_batch(talks, rows), talks, rows, strict=True):
        assert one.ids.tolist() == tokenizer.encode_batch([talk], [row])[0].ids.tolist()


def test_text_that_looks_special_stays_text(digits: Path) -> None:
    tokenizer = ChatTokenizer(digits)
    encoded = tokenizer.encode_batch([[Turn(HUMAN, "<eos>"), Turn(GPT, "<audio>")]], [{}])[0]
    assert (encoded.ids == tokenizer.eos_id).sum() == 1
    assert not (encoded.ids == tokenizer.placeholder_id("audio")).any()


def test_nothing_predicts_the_first_token(digits: Path) -> None:
    encoded = ChatTokenizer(digits, bos=None).encode_batch([[Turn(GPT, "12")]], [{}])[0]
    assert encoded.loss.tolist() == [False, True, True]


def test_truncation_and_padding_that_a_file_asks_for_are_off(digits: Path, tmp_path: Path) -> None:
    talks = [[Turn(HUMAN, "abc"), Turn(GPT, "123456")], [Turn(HUMAN, "a"), Turn(GPT, "7")]]
    whole = ChatTokenizer(digits)
    saved = ChatTokenizer(digits).tokenizer
    saved.enable_truncation(4)
    saved.enable_padding(pad_id=whole.eos_id, pad_token="<eos>")
    saved.save(str(tmp_path / "tokenizer.json"))
    for one, other in zip(
        ChatTokenizer(tmp_path).encode_batch(talks, [{}, {}]), whole.encode_batch(talks, [{}, {}]), strict=True
    ):
        assert one.ids.tolist() == other.ids.tolist() and one.loss.tolist() == other.loss.tolist()


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


@pytest.mark.parametrize(
    ("specials", "said", "bos", "eos"),
    [
        (stock.LLAMA_3, {}, "<|begin_of_text|>", "<|end_of_text|>"),
        (
            stock.LLAMA_3,
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            "<|begin_of_text|>",
            "<|eot_id|>",
        ),
        (stock.QWEN_3, {}, None, "<|im_end|>"),
        (stock.QWEN_3, {"bos_token": None, "eos_token": "<|endoftext|>"}, None, "<|endoftext|>"),
        (("<s>", "</s>"), {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}, "<s>", "</s>"),
        (("<s>", "</s>"), {"add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>"}, None, "</s>"),
    ],
)
def test_stock_tokenizers(
    tmp_path: Path, specials: tuple[str, ...], said: dict[str, Any], bos: str | None, eos: str
) -> None:
    """Begin and end are those of the tokenizer's folder; what an encoder fills needs no token."""
    tokenizer = ChatTokenizer(stock.tokenizer(tmp_path, specials, **said))
    turns = [Turn(HUMAN, f"a{IMAGE}b{AUDIO}"), Turn(GPT, "1é")]
    encoded = tokenizer.encode_batch([turns], [{"image": [2], "audio": [1]}])[0]
    expected = [*([bos] if bos else []), "a", eos, eos, "b", eos, "Ċ", "1", "Ã", "©", eos]
    assert pieces(tokenizer, encoded.ids.tolist()) == expected
    first = len(expected) - 4
    assert encoded.loss.nonzero()[0].tolist() == [first, first + 1, first + 2, first + 3]
    assert encoded.starts["image"].tolist() == [len(expected) - 9] and encoded.starts["audio"].tolist() == [first - 2]
    assert tokenizer.decode(encoded.ids[encoded.loss]) == "1é"
    with pytest.raises(ConfigError, match=r"no token '<draw>' \(placeholders\['draw'\]\)"):
        tokenizer.placeholder_id("draw", seen=True)
    named = ChatTokenizer(tokenizer.path, placeholders={"draw": specials[0]})
    assert named.placeholder_id("draw", seen=True) == 256 and named.settings() != tokenizer.settings()


def test_what_a_tokenizers_folder_says_must_be_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no token '<eos>' \(eos\).*<pad>"):
        ChatTokenizer(stock.tokenizer(tmp_path, ["<pad>"]))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<pad>"}))
    assert ChatTokenizer(tmp_path).eos == "<pad>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(ConfigError, match=r"no token '<end>' \(eos\)"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        ChatTokenizer(tmp_path)
