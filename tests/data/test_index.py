from __future__ import annotations

import hashlib
import json
import multiprocessing
import pickle
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from tokenizers import AddedToken, Tokenizer, processors

from hetero_strategy.data import build_index as index_room
from hetero_strategy.data import measured_files as files_room
from hetero_strategy.data.build_index import VERSION, DatasetIndex, build_index
from hetero_strategy.data.conversation import Turn, item_mark
from hetero_strategy.data.manifest import Faults, parse_manifests
from hetero_strategy.data.media import ImageProcessor
from hetero_strategy.data.tokenizer import ChatTokenizer, Encoded
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.loading.metadata import step_metadata
from recipes.digits import write_digits
from tests import stock
from tests.manifests import entry, write_manifest
from tests.small_models import digit_processors, draw_processors


def build(manifest: Any, tokenizer: Path, **options: Any) -> DatasetIndex:
    return build_index(manifest, ChatTokenizer(tokenizer), digit_processors(), progress=False, **options)


def media(folder: Path) -> None:
    Image.fromarray(np.zeros((16, 40), np.uint8)).save(folder / "a.png")
    Image.fromarray(np.zeros((16, 90), np.uint8)).save(folder / "b.png")
    soundfile.write(folder / "c.wav", np.zeros(1600), 8000, subtype="PCM_16")


def test_tokens_are_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each, count = 20_000, 200
    monkeypatch.setattr(index_room, "CHUNK", 10)

    class Tokenizer:
        def encode_batch(self, turns: list[Any], rows: list[Any], *rest: Any) -> list[Encoded]:
            return [Encoded(np.arange(each, dtype=np.int32), np.ones(each, bool), {}, {}) for _ in turns]

    path = write_manifest(tmp_path, *(entry(str(number), "q") for number in range(count)))
    faults = Faults([path])
    samples = parse_manifests(faults, [], True)
    tracemalloc.start()
    arrays = index_room._arrays(samples, Tokenizer(), {}, None, None, faults, False, {})  # type: ignore[arg-type]
    index_room._write(tmp_path / "index", arrays, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert arrays["ids"].shape == arrays["loss"].shape == (each * count,) and arrays["loss"].dtype == bool
    assert arrays["labels"].tolist() == [each] * count and np.array_equal(arrays["ids"][-each:], np.arange(each))
    assert peak < 1.5 * sum(values.nbytes for values in arrays.values())


def test_by_hand(digits: Path, tmp_path: Path) -> None:
    media(tmp_path)
    manifest = write_manifest(
        tmp_path,
        entry("ü", "x<image>y<image>", "12", image=["b.png", "a.png"]),
        entry("text", "hi", "3"),
        entry("both", "<audio><image>", "4", image="a.png", audio="c.wav"),
    )
    index = build(manifest, digits)
    assert len(index) == 3 and [index.names[i] for i in range(3)] == ["ü", "text", "both"]
    vision, audio = index.items["vision"], index.items["audio"]
    assert vision.sample.tolist() == [0, 0, 2] and vision.offsets.tolist() == [0, 2, 2, 3]
    assert vision.sizes.tolist() == [[2, 12], [2, 4], [2, 4]] and vision.rows.tolist() == [6, 2, 2]
    assert vision.start.tolist() == [2, 9, 6]
    assert audio.sample.tolist() == [2] and audio.rows.tolist() == [5] and audio.start.tolist() == [1]
    assert index.offsets.tolist() == [0, 15, 21, 32] and index.labels.tolist() == [3, 2, 2]
    assert index.path("vision", 1) == tmp_path / "a.png"
    metadata = step_metadata(index, 1, 2, np.array([2, 0]), digit_processors())
    assert metadata.tokens.tolist() == [11, 15] and metadata.labels.tolist() == [2, 3]
    assert metadata.items["vision"].sample.tolist() == [0, 1, 1] and metadata.items["vision"].edge_rows.tolist() == [
        2,
        6,
        2,
    ]
    assert metadata.items["vision"].start.tolist() == [6, 2, 9] and metadata.items["vision"].targets is None
    assert metadata.items["vision"].inner_rows.tolist() == [8, 24, 8] and audio.inner_rows.tolist() == [5]
    assert index.item_numbers("vision", np.array([2, 0])).tolist() == [2, 0, 1]
    copy = pickle.loads(pickle.dumps(index))
    assert isinstance(copy.ids, np.memmap) and copy.ids.tolist() == index.ids.tolist()


def test_samples_with_media_that_nothing_reads_are_refused_or_left_out(digits: Path, tmp_path: Path) -> None:
    media(tmp_path)
    manifest = write_manifest(
        tmp_path,
        entry("both", "<audio><image>", "4", image="a.png", audio="c.wav"),
        entry("text", "hi", "3", audio=[]),
        entry("seen", "<image>", "4", image="a.png"),
    )
    vision = {"vision": digit_processors()["vision"]}
    with pytest.raises(DataError, match=r"'both': has 'audio', which no encoder reads; .* index\.leave_out=\[audio\]"):
        build_index(manifest, ChatTokenizer(digits), vision, progress=False)
    for _ in range(2):  # built, then read from its folder
        index = build_index(manifest, ChatTokenizer(digits), vision, leave_out=["audio"], progress=False)
        assert [index.names[i] for i in range(len(index))] == ["text", "seen"] and index.left_out == 1
    part = [{"type": "audio", "audio": "c.wav"}, {"type": "text", "text": "hi"}]
    for near in (entry("x", "what?", audios=["c.wav"]), {"id": "x", "messages": [{"role": "user", "content": part}]}):
        path = write_manifest(tmp_path, near, entry("text", "hi", "3"), name="near.json")
        with pytest.raises(DataError, match=r"'x': has 'audios?', which no encoder reads"):
            build_index(path, ChatTokenizer(digits), vision, progress=False)
        assert build_index(path, ChatTokenizer(digits), vision, leave_out=["audio"], progress=False).left_out == 1
    with pytest.raises(DataError, match="no samples without image, and all others are left out"):
        only = write_manifest(tmp_path, entry("x", "<image>", image="a.png"), name="only.json")
        build_index(only, ChatTokenizer(digits), {}, leave_out=["image"], progress=False)


def test_several_manifests_are_one_data_set(digits: Path, tmp_path: Path) -> None:
    """Paths of media are of their own manifest's folder, also through links; an index is of all of its files."""
    for name in ("one", "elsewhere/two"):
        (tmp_path / name).mkdir(parents=True)
        media(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "two")
    absolute = str(tmp_path / "one" / "c.wav")
    first = write_manifest(tmp_path / "one", entry("a", "<image>", "4", image="a.png"))
    second = write_manifest(
        tmp_path / "link", entry("b", "<image><audio>", "5", image="b.png", audio=absolute), entry("a", "hi", "3")
    )
    both = build([first, second], digits)
    assert [both.names[i] for i in range(len(both))] == ["a", "b", "a"]
    assert both.items["vision"].sample.tolist() == [0, 1] and both.items["vision"].sizes.tolist() == [[2, 4], [2, 12]]
    assert both.path("vision", 1).samefile(tmp_path / "elsewhere" / "two" / "b.png")
    assert both.path("audio", 0) == Path(absolute) and both.folder.parent == first.parent / ".hetero_index"
    assert both.folder == build([str(first), second], digits).folder != build([second, first], digits).folder
    ids = np.concatenate([build(path, digits).ids for path in (first, second)])
    assert np.array_equal(both.ids, ids)
    (tmp_path / "media").mkdir()
    media(tmp_path / "media")
    assert build([first, second], digits, media_folder=tmp_path / "media").path("vision", 1).parent.name == "media"
    write_manifest(tmp_path / "link", entry("b", "what?", "5"))
    assert len(build([first, second], digits)) == 2  # the second has changed


def test_faults_of_several_manifests_name_theirs(digits: Path, tmp_path: Path) -> None:
    good, empty = write_manifest(tmp_path, entry("x", "hi", "3"), name="good.json"), write_manifest(tmp_path)
    bad = [write_manifest(tmp_path, entry("x", "<image>"), 7, name=f"{name}.json") for name in ("b", "c")]
    with pytest.raises(DataError, match=r"b\.json: 2 faults; fix or remove these samples:\n  sample 'x': 1 <image>"):
        build([good, bad[0]], digits)
    with pytest.raises(
        DataError, match=r"4 faults(.|\n)*b\.json: entry 1(.|\n)*c\.json: sample 'x'(.|\n)*c\.json: entry"
    ):
        build([*bad, good], digits)
    with pytest.raises(DataError, match=r"manifest\.json: the manifest holds no samples; write at least one"):
        build([good, empty], digits)
    with pytest.raises(DataError, match=r"gone\.json: manifest is missing"):
        build([good, tmp_path / "gone.json"], digits)
    seen = write_manifest(tmp_path, entry("y", "<audio>", audio="c.wav"), name="seen.json")
    assert build([seen, good], digits, leave_out=["audio"]).left_out == 1
    for wrong in ([], {"a": good}, 5, [good, None]):
        with pytest.raises(ConfigError, match=r"manifests is .*; give a manifest \(\.json, .*\), or a list"):
            build(wrong, digits)


def test_what_is_drawn(digits: Path, drawings: Path, tmp_path: Path) -> None:
    """Rows that the language model gives stand at placeholders in the answer, without a loss of their own."""
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    Image.fromarray(np.zeros((8, 4), np.uint8)).save(tmp_path / "b.png")
    manifest = write_manifest(tmp_path, entry("x", "q", "4<draw>u<draw>", draw=["a.png", "b.png"]))
    tokenizer = ChatTokenizer(drawings)
    index = build_index(manifest, tokenizer, draw_processors(), progress=False)
    table = index.items["draw"]
    assert table.start.tolist() == [4, 7] and table.rows.tolist() == [2, 2] and table.sizes.tolist() == [[4, 4], [4, 2]]
    assert table.inner_rows.tolist() == [18, 10] and table.targets is not None and table.targets.tolist() == [64, 32]
    mark = tokenizer.placeholder_id("draw")  # bos q \n 4 mark mark u mark mark eos
    assert (index.ids == mark).tolist() == [False] * 4 + [True, True, False, True, True, False]
    assert index.loss.tolist() == [False] * 3 + [True, False, False, True, False, False, True]
    items = step_metadata(index, 0, 0, np.array([0]), draw_processors()).items
    assert items["draw"].targets is not None and items["draw"].targets.tolist() == [64, 32]
    assert items["draw"].inner_rows.tolist() == [18, 10] and items["vision"].targets is None
    with pytest.raises(ConfigError, match=r"has no token '<draw>' \(placeholders\['draw'\]\)"):
        build_index(manifest, ChatTokenizer(digits), draw_processors(), progress=False)


def test_cached_until_something_changes(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_digits(tmp_path / "d", train=8, val=4, progress=False)
    first = build(folder / "val.json", folder)
    built = []
    original = index_room.measured_files
    monkeypatch.setattr(index_room, "measured_files", lambda *a: built.append(1) or original(*a))
    assert build(folder / "val.json", folder).folder == first.folder and not built
    other = build_index(
        folder / "val.json",
        ChatTokenizer(folder),
        {**digit_processors(), "vision": ImageProcessor(patch_size=16, channels=1)},
        progress=False,
    )
    assert len(built) == 1 and other.folder != first.folder and other.content != first.content
    checked = build(folder / "val.json", folder, verify="header")
    assert len(built) == 2 and checked.content == first.content
    text = (folder / "val.json").read_text()
    (folder / "val.json").write_text(text + "\n")
    build(folder / "val.json", folder)
    assert len(built) == 3
    assert not [p for p in (folder / ".hetero_index").iterdir() if p.name.startswith(".")]  # no halves left
    elsewhere = build(folder / "val.json", folder, cache_folder=tmp_path / "cache")
    assert elsewhere.folder.parent == tmp_path / "cache"


def test_equal_manifests_of_other_media_share_no_index(digits: Path, tmp_path: Path) -> None:
    rows = []
    for name, width in (("a", 16), ("b", 64)):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((16, width), np.uint8)).save(tmp_path / name / "x.png")
        manifest = write_manifest(tmp_path / name, entry("x", "<image>", image="x.png"))
        rows.append(build(manifest, digits, cache_folder=tmp_path / "cache").items["vision"].rows.tolist())
    assert rows == [[1], [4]]


def test_an_index_of_relative_paths_is_found_from_another_folder(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media(tmp_path)
    write_manifest(tmp_path, entry("x", "<image>", image="a.png"))
    monkeypatch.chdir(tmp_path)
    given: list[dict[str, Any]] = [{}, {"media_folder": ".", "cache_folder": "cache"}]
    for options in given:
        sent = pickle.dumps(build(Path("manifest.json"), digits, **options))
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("/")
            copy = pickle.loads(sent)
            assert copy.items["vision"].rows.tolist() == [2] and copy.path("vision", 0).is_file()


def _build_one(folder: str, queue: Any) -> None:
    queue.put(build(Path(folder) / "train.json", Path(folder)).content)


def test_processes_that_build_at_once_agree(tmp_path: Path) -> None:
    folder = write_digits(tmp_path / "d", train=30, val=2, progress=False)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_build_one, args=(str(folder), queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    contents = {queue.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join(timeout=30)
    assert len(contents) == 1 and len(list((folder / ".hetero_index").iterdir())) == 1


def test_all_faults_of_files_in_one_error(digits: Path, tmp_path: Path) -> None:
    media(tmp_path)
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[:-20])
    soundfile.write(tmp_path / "zero.wav", np.zeros(0), 8000)
    manifest = write_manifest(
        tmp_path,
        entry("s0", "<image>", image="none.png"),
        entry("s1", "<audio>", image="a.png"),  # the picture begins the question
        entry("s2", "<image><image>", image=["a.png", "cut.png"]),
        entry("s3", "<audio>", audio="zero.wav"),
        entry("s4", "q", " "),
        entry("s5", "q" * 99),
    )
    with pytest.raises(DataError) as caught:
        build(manifest, digits, max_tokens=50)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{manifest}: 6 faults")
    expected = ["none.png: file is missing", "1 <audio>", "cut.png: not a readable image", "zero length"]
    expected += ["answer is empty", "103 tokens, more than max_tokens=50"]
    names = ["s0", "s1", "s2", "s3", "s4", "s5"]
    for line, name, text in zip(lines[1:-1], names, expected, strict=True):
        assert f"'{name}'" in line and text in line
    (listed,) = (tmp_path / ".hetero_index").iterdir()  # and no index
    assert lines[-1].strip() == f"all are listed in {listed}"
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [fault["sample"] for fault in found] == names
    kinds = ["missing file", "manifest", "damaged image", "zero length", "manifest", "too long"]
    assert [fault["kind"] for fault in found] == kinds
    assert [fault["file"] for fault in found] == ["none.png", None, "cut.png", "zero.wav", None, None]


def test_a_bad_file_is_a_fault_of_every_sample_that_has_it(digits: Path, tmp_path: Path) -> None:
    media(tmp_path)
    entries = [entry(f"s{number}", "<image>", image="none.png") for number in range(12)]
    entries[1] = entry("s1", "<image>", image="a.png")
    entries[2] = entry("s2", "<image><image>", image=["none.png", "none.png"])  # once of each sample
    with pytest.raises(DataError) as caught:
        build(write_manifest(tmp_path, *entries), digits)
    head, *lines, rest, where = str(caught.value).splitlines()
    assert ": 11 faults; " in head and rest.strip() == "... and 1 more"
    assert len(Path(where.split(" in ")[1]).read_text().splitlines()) == 11
    for line, number in zip(lines, [0, *range(2, 11)], strict=True):
        assert f"sample 's{number}'" in line and "none.png: file is missing" in line


def test_headers_only_misses_a_cut_file_by_choice(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media(tmp_path)
    (tmp_path / "a.png").write_bytes((tmp_path / "b.png").read_bytes()[:-20])
    manifest = write_manifest(tmp_path, entry("x", "<image>", image="a.png"))
    for options in ({"verify": "decode"}, {"verify": "auto"}):
        with pytest.raises(DataError, match=r"'x': .*a\.png: not a readable image"):
            build(manifest, digits, **options)
    monkeypatch.setattr(files_room, "DECODE_LIMIT", 0)
    assert len(build(manifest, digits, verify="auto")) == 1


def test_a_sample_too_long_by_its_pictures_says_so(digits: Path, tmp_path: Path) -> None:
    media(tmp_path)
    manifest = write_manifest(tmp_path, entry("x", "<image><image><audio>", image=["a.png", "b.png"], audio="c.wav"))
    fix = r"shorten it, lower processors\.vision\.max_patches or raise max_tokens"
    with pytest.raises(
        DataError, match=rf"17 tokens, of which 8 are rows of 'vision' and 5 .*'audio', more than .*; {fix}"
    ):
        build(manifest, digits, max_tokens=16)


def test_one_warning_names_pictures_of_a_narrow_range(digits: Path, tmp_path: Path) -> None:
    for name, most in (("a", 4095), ("b", 900), ("c", 65535)):
        Image.fromarray(np.linspace(0, most, 256).astype(np.uint16).reshape(16, 16)).save(tmp_path / f"{name}.png")
    entries = [entry(name, "<image>", image=f"{name}.png") for name in "abc"]
    with pytest.warns(UserWarning, match=r"a\.png: its pixels are 0 to 4095 of .*; scale them .* \(and 1 more") as said:
        build(write_manifest(tmp_path, *entries), digits)
    assert len(said) == 1


def test_refusals(digits: Path, tmp_path: Path) -> None:
    twins = {"left": ImageProcessor(), "right": ImageProcessor()}
    with pytest.raises(ConfigError, match="left, right read the fields image, image"):
        build_index(digits / "val.json", ChatTokenizer(digits), twins)
    with pytest.raises(DataError, match="manifest is missing"):
        build(tmp_path / "none.json", digits)
    (tmp_path / "empty.json").write_text(json.dumps([{"id": 1, "conversations": [{"from": "human", "value": ""}]}]))
    with pytest.raises(DataError, match="no tokens"):
        build_index(tmp_path / "empty.json", ChatTokenizer(digits, bos=None), {}, answers=False, progress=False)


IMAGE, AUDIO = item_mark("image"), item_mark("audio")
PINNED = (11, "872ae424bb9bfd48527a")
"""The version, and what the conversations below have given since."""
TEMPLATES = (
    None,
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "{{ eos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n<|im_end|>{% endfor %}",
)
TALKS: tuple[tuple[list[Turn], Mapping[str, list[int]]], ...] = (
    ([Turn("human", f"a{IMAGE} b{AUDIO}"), Turn("gpt", "1 2\n\n    3é\n")], {"image": [2], "audio": [1]}),
    ([Turn("system", "be brief"), Turn("human", " c "), Turn("gpt", "  4"), Turn("human", "d"), Turn("gpt", "5 ")], {}),
    ([Turn("human", "<|im_end|>"), Turn("gpt", "6 <|im_start|> \n7")], {}),
)


def digest(tmp_path: Path) -> str:
    file = stock.tokenizer(tmp_path, stock.QWEN_3, eos_token="<|im_end|>")
    own = Tokenizer.from_file(str(file))
    own.add_tokens([AddedToken(blank, special=False, normalized=False) for blank in ("\n\n", "    ")])
    own.post_processor = processors.ByteLevel(trim_offsets=True)
    own.save(str(file))
    found = hashlib.sha256()
    for number, template in enumerate(TEMPLATES):
        jinja = None if template is None else tmp_path / f"{number}.jinja"
        if jinja is not None:
            jinja.write_text(template or "")
        talks, rows = zip(*TALKS, strict=True)
        for encoded in ChatTokenizer(file, chat_template=jinja).encode_batch(talks, rows):
            found.update(repr((encoded.ids.tolist(), encoded.loss.tolist())).encode())
    return found.hexdigest()[:20]


def test_the_version_is_raised_where_ids_or_masks_change(tmp_path: Path) -> None:
    assert (VERSION, digest(tmp_path)) == PINNED, (
        "token ids or loss masks of the same files are others than before: raise VERSION in data/build_index.py, so"
        " that stored indices are built anew, and pin both here"
    )
