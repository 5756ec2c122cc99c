from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.manifest import Faults, Sample, files_of, parse_manifests, read_entries
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import DataError
from tests.manifests import entry, write_manifest


def read_manifest(
    path: str | Path,
    *,
    fields: Sequence[str] = ("image", "audio"),
    drawn: Sequence[str] = (),
    media_folder: str | Path | None = None,
    answers: bool = True,
) -> list[Sample]:
    """Samples of a manifest whose files exist, or one error with all faults."""
    path = Path(path)
    faults = Faults([path])
    samples = parse_manifests(faults, fields, answers, drawn=drawn)
    folder = Path(media_folder) if media_folder is not None else path.parent
    for sample in samples:
        for names in sample.items.values():
            for name in names:
                if not (folder / name).is_file():
                    faults.add(sample.position, f"sample '{sample.id}': {folder / name}: file is missing")
    faults.check()
    return samples


def test_ordinary_samples(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.wav"):
        (tmp_path / name).touch()
    many = entry("many", "<image>" * 40, image=["a.png"] * 40)
    path = write_manifest(
        tmp_path,
        entry("both", "<image> then <audio> then <image>", image=["a.png", "b.png"], audio="c.wav"),
        entry("text", "hello", image=None, audio=[]),
        many,
    )
    both, text, forty = read_manifest(path)
    assert both.items == {"image": ("a.png", "b.png"), "audio": ("c.wav",)}
    assert [turn.role for turn in both.turns] == ["human", "gpt"]
    assert text.items == {} and len(forty.items["image"]) == 40


def test_json_lines_and_media_folder(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").touch()
    path = tmp_path / "m.jsonl"
    lines = [
        json.dumps(entry("one", "<image>?", image="a.png")),
        "",
        json.dumps(entry("two", "a\u2028b"), ensure_ascii=False),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [sample.id for sample in read_manifest(path, media_folder=tmp_path / "media")] == ["one", "two"]
    with pytest.raises(DataError, match=r"'one'.*a\.png: file is missing"):
        read_manifest(path)


def test_json_lines_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\r\n".join(json.dumps(entry(str(number), "q")) for number in range(3)))
    monkeypatch.delattr(Path, "read_text")
    assert [sample.id for sample in read_manifest(path)] == ["0", "1", "2"]


def test_a_byte_order_mark_before_the_text_is_no_fault(tmp_path: Path) -> None:
    one, two = entry("é", "q"), entry("two", "q")
    listed, lines = tmp_path / "m.json", tmp_path / "m.jsonl"
    listed.write_text(json.dumps([one, two], ensure_ascii=False), encoding="utf-8-sig")
    lines.write_text(f"{json.dumps(one, ensure_ascii=False)}\r\n{json.dumps(two)}\r\n", encoding="utf-8-sig")
    for path in (listed, lines):
        assert [sample.id for sample in read_manifest(path)] == ["é", "two"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (entry("x", "<image> <image>?", image="a.png"), r"'x': 2 <image> in the conversation but 1 paths in 'image'"),
        (entry("x", "<image>", image=["a.png"] * 2), r"'x': 1 <image> in the conversation but 2 paths in 'image'"),
        (entry("x", "<audio>"), r"'x': 1 <audio> in the conversation but 0 paths in 'audio'"),
        (entry("x", "q", " \n"), r"'x': turn 1: the answer is empty"),
        (entry("x", "q", "see <image>", image="a.png"), r"<image> stands in an answer"),
        (entry("x", "q", video="v.mp4"), r"has 'video', which no encoder reads"),
        (entry("x", "q", "<draw>", draw="a.png"), r"has 'draw', which no generator draws; give a processor for it"),
        (entry("x", "<image>", image=3), r"'image' must be a path or a list of paths, found 3"),
        (entry("x", "<image>", image=[{"bytes": "..", "path": "a"}]), r"bytes of a file"),
        (entry("x", "<image>", image="a.png", images=["a.png"]), r"has both 'image' and 'images'; keep one"),
        ({"id": "x", "conversations": [{"from": "human", "value": "q"}]}, r"no turn is from 'gpt'"),
        ({"id": "x", "conversations": [{"from": "robot", "value": "q"}]}, r"turn 0 is from 'robot'"),
        (entry("x", "half \ud83d"), r"'x': holds half a character, the lone surrogate '\\ud83d'"),
        (entry("x\ud83d", "<image>", image="\ude00.png"), r"'x\\ud83d': holds half .* surrogate '\\ude00'"),
        ({"id": "x", "text": "y"}, r"'conversations' or 'messages' must be a list .* the sample are id, text"),
        ("text", r"entry 1: expected an object, found str"),
    ],
)
def test_one_fault(tmp_path: Path, bad: object, message: str) -> None:
    (tmp_path / "a.png").touch()
    path = write_manifest(tmp_path, entry("fine", "q"), bad)
    with pytest.raises(DataError, match=message):
        read_manifest(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            entry("x", "<draw>", draw="a.png"),
            r"'x': <draw> stands in a question; what a generator draws can only be part",
        ),
        (entry("x", "q", "<draw>"), r"'x': 1 <draw> in the conversation but 0 paths in 'draw'"),
        (entry("x", "q", "no mark", draw="a.png"), r"'x': 0 <draw> in the conversation but 1 paths in 'draw'"),
        (entry("x", "q", "<draw>", draw="none.png"), r"'x': .*none\.png: file is missing"),
        (entry("x", "q", "see <image> <draw>", image="a.png", draw="a.png"), r"'x': <image> stands in an answer"),
    ],
)
def test_faults_of_what_is_drawn(tmp_path: Path, bad: object, message: str) -> None:
    (tmp_path / "a.png").touch()
    fine = entry("fine", "<image>?", "so <draw> and <draw>", image="a.png", draw=["a.png", "a.png"])
    with pytest.raises(DataError, match=message) as caught:
        read_manifest(write_manifest(tmp_path, fine, bad), fields=("image", "draw"), drawn=("draw",))
    assert "'fine'" not in str(caught.value)
    (sample,) = read_manifest(write_manifest(tmp_path, fine), fields=("image", "draw"), drawn=("draw",))
    assert sample.items == {"image": ("a.png",), "draw": ("a.png", "a.png")}


def test_faults_are_reported_together_and_at_most_ten(tmp_path: Path) -> None:
    entries = [
        entry(f"s{20 - i:02d}", "<image>", image=f"{i}.png") if i % 2 else entry(f"s{20 - i:02d}", "q", "")
        for i in range(14)
    ]
    with pytest.raises(DataError) as caught:
        read_manifest(write_manifest(tmp_path, *entries))
    message = str(caught.value)
    assert "14 faults" in message and "and 4 more" in message
    assert [f"'s{20 - i:02d}'" in message for i in range(14)] == [True] * 10 + [False] * 4
    assert str(tmp_path / "1.png") in message and "answer is empty" in message


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        read_manifest(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('[\n{"id": 1},\n{"id": }\n]')
    with pytest.raises(DataError, match=r"line 3, column 8: not valid JSON"):
        read_manifest(broken)
    lines = tmp_path / "broken.jsonl"
    lines.write_text('{"id":\n')
    with pytest.raises(DataError, match=r"line 1: not valid JSON: Expecting value at column 7"):
        read_manifest(lines)
    lines.write_bytes(json.dumps(entry("a", "q")).encode() + b"\n\xff\xfe\xff")
    with pytest.raises(DataError, match="UTF-8"):
        read_manifest(lines)
    lines.write_text(json.dumps(entry("a", "q")) + "\n\n{oops\n" + json.dumps(entry("b", "q", "")) + "\n")
    with pytest.raises(DataError, match=r"(?s)2 faults.*line 3: not valid JSON.*'b'"):
        read_manifest(lines)
    broken.write_text("{}")
    with pytest.raises(DataError, match="expected a JSON list"):
        read_manifest(broken)
    broken.write_text("[]")
    with pytest.raises(DataError, match="no samples"):
        read_manifest(broken)
    broken.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="UTF-8"):
        read_manifest(broken)


@pytest.mark.parametrize(
    ("bad", "why"), [('{"id": 1' + "0" * 5000 + "}", "Exceeds the limit"), ("[" * 100_000, ".* while decoding")]
)
def test_json_that_python_does_not_take_is_a_fault(tmp_path: Path, bad: str, why: str) -> None:
    (tmp_path / "m.json").write_text(bad)
    with pytest.raises(DataError, match=rf"m\.json: cannot be read as JSON: {why}"):
        read_manifest(tmp_path / "m.json")
    (tmp_path / "m.jsonl").write_text(f"{json.dumps(entry('a', 'q'))}\n{bad}\n{{oops")
    with pytest.raises(DataError, match=rf"(?s)2 faults.*line 2: cannot be read as JSON: {why}.*line 3: not valid"):
        read_manifest(tmp_path / "m.jsonl")


def test_prediction_needs_no_answer(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, {"id": "x", "conversations": [{"from": "human", "value": "q"}]})
    assert len(read_manifest(path, answers=False)) == 1


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
