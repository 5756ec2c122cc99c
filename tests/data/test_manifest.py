from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero_strategy.data.manifest import Faults, Sample, parse_manifests
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
