"""Files that hold samples, and what is said of those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.manifest_file import files_of, read_entries
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import DataError
from tests.manifests import entry


def read(path: Path) -> list[Any]:
    def fault(number: int, message: str) -> None:
        raise DataError(message)

    return [sample for _, sample in read_entries(path, fault)]


def test_what_a_file_holds_is_seen_in_it(tmp_path: Path) -> None:
    samples = [entry("a", "q\u2028", score=None), entry("b", "q")]
    lines = "\n\n".join(json.dumps(sample, ensure_ascii=False) for sample in samples)
    for name in ("m.json", "m.JSON", "m.jsonl", "m.JSONL", "m.txt"):
        for text in (json.dumps(samples), json.dumps(samples, indent=2), f"\n{lines}", f"\ufeff{lines}\n"):
            (tmp_path / name).write_text(text, encoding="utf-8")
            assert read(tmp_path / name) == samples
    for name in ("m.jsonl", "m.JSONL"):  # one line
        (tmp_path / name).write_text(json.dumps(samples[0]))
        assert read(tmp_path / name) == samples[:1]


def test_empty_columns_are_absent(tmp_path: Path) -> None:
    import datasets

    turns = [{"from": "human", "value": "q", "weight": None}, {"from": "gpt", "value": "a", "weight": 1}]
    rows = datasets.Dataset.from_list([{"image": None, "conversations": turns}, {"image": ["a"], "conversations": []}])
    rows.select([1, 0]).save_to_disk(tmp_path / "saved")  # with indices of rows
    told = [{"from": "human", "value": "q"}, turns[1]]
    assert read(tmp_path / "saved") == [{"image": ["a"], "conversations": []}, {"conversations": told}]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"splits: a folder of several data sets; give one of .*splits/train, .*/test"):
        read(tmp_path / "splits")
    (tmp_path / "hub").mkdir()
    for name in ("train-00000-of-00001.parquet", "test/0000.parquet"):
        (tmp_path / "hub" / name).parent.mkdir(exist_ok=True)
        rows.to_parquet(tmp_path / "hub" / name)
    with pytest.raises(DataError, match="hub: its files are of several splits, test, train; give a list of files"):
        read(tmp_path / "hub")


def test_an_index_is_of_all_files_of_a_folder(digits: Path, tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "parts"
    folder.mkdir()
    rows = datasets.Dataset.from_list([entry("a", "q"), entry("b", "q")])
    names = set()
    for count in (1, 2):
        rows.to_parquet(folder / f"{count}.parquet")
        index = build_index(folder, ChatTokenizer(digits), {}, progress=False)
        assert len(index) == 2 * count and index.folder.parent == tmp_path / ".hetero_index"
        names.add(index.folder.name)
        (folder / "notes.txt").touch()  # which is not read
        assert build_index(folder, ChatTokenizer(digits), {}, progress=False).folder == index.folder
    assert len(names) == 2 and files_of(folder) == [folder / "1.parquet", folder / "2.parquet"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("shard.tar", b"..", r"shard\.tar: archives, as webdataset's, are not read; unpack it and list its samples"),
        ("bad.parquet", b"PAR1 no", r"bad\.parquet: cannot be read: "),
        ("folder/a.txt", b"..", "folder: a folder without a parquet file that .*save_to_disk has not written"),
        ("pretty.jsonl", b'{\n "id": 1\n}', r"pretty\.jsonl: a sample has several lines; write each in one line"),
        ("one.json", b'{"id": 1}', r"one\.json: expected a JSON list of samples, found dict"),
        ("two.jsonl", b"[1]\n[2]", r"two\.jsonl: line 2, column 1: not valid JSON: Extra data"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read(tmp_path / name.partition("/")[0])
