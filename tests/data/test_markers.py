"""Tokens that processors and chat templates write around and between items, against transformers' own calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ProcessorMixin

from hetero_strategy import ragged
from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.chat_items import ItemTokens, check_plain
from hetero_strategy.data.conversation import read_conversation
from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.hf_processor import HFProcessor
from hetero_strategy.data.media import ImageProcessor
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.loading.metadata import step_metadata
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.model.kind import Items
from recipes.report import _question
from tests.data.hf_folders import FAMILIES, made
from tests.small_models import kinds_of
from tests.stock import tokenizer as stock

QWEN = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAVA = """\
{% for message in messages %}{{ message.role.upper() + ': ' }}{% for part in message.content %}\
{% if part.type == 'image' %}{{ '<image>\\n' }}{% endif %}{% endfor %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text + ' ' }}{% endif %}{% endfor %}{% if message.role == 'assistant' %}</s>\
{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""
GEMMA = """\
{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message.role + '\\n' }}\
{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}\
<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant
{% endif %}"""
INTERN = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
IDEFICS = """\
<|im_start|>{% for message in messages %}{{ message.role | capitalize }}\
{% if message.content[0].type == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for part in message.content %}\
{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}"""
TEMPLATES = {
    "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "llava": LLAVA, "llava_next": LLAVA, "gemma3": GEMMA, "internvl": INTERN,
    "idefics3": IDEFICS, "glm4v": QWEN.replace("<|image_pad|>", "<|image|>"),
    "llava_onevision": INTERN.replace("<IMG_CONTEXT>", "<image>"),
    "aya_vision": INTERN.replace("<IMG_CONTEXT>", "<image>"), "smolvlm": IDEFICS,
    "pixtral": INTERN.replace("<IMG_CONTEXT>\n", "[IMG]"),
    "cohere2_vision": INTERN.replace("<IMG_CONTEXT>", "<|IMG_PATCH|>"),
}  # fmt: skip
RUNS = ("idefics3", "smolvlm", "aya_vision", "pixtral", "cohere2_vision")
"""Families in which a picture is several runs of rows."""
TALKS = {
    0: [("user", ["what is red?"]), ("assistant", ["hello"])],
    1: [("user", [None, "hello\nworld"]), ("assistant", ["hello world"])],
    3: [("user", [None, None, " what? "]), ("assistant", ["one"]), ("user", [None, "and <b>"]), ("assistant", ["two"])],
}
SIZES = [(60, 100), (150, 40), (70, 70)]


def talk(number: int, pictures: Sequence[Any] = range(3)) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages of a sample in a manifest, and as transformers takes them."""
    images = iter(pictures)
    ours, theirs = [], []
    for role, parts in TALKS[number]:
        ours.append(
            {"role": role, "content": [(p and {"type": "text", "text": p}) or {"type": "image"} for p in parts]}
        )
        content = [(p and {"type": "text", "text": p}) or {"type": "image", "image": next(images)} for p in parts]
        theirs.append({"role": role, "content": content})
    return ours, theirs


def folder_of(tmp_path: Path, name: str, template: str | None) -> tuple[HFProcessor, list[Image.Image]]:
    folder = made(tmp_path, name)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    images = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (*s, 3), "u1")) for n, s in enumerate(SIZES)]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    return HFProcessor(str(folder)), images


def index_of(tmp_path: Path, processor: Any, samples: list[dict[str, Any]], **options: Any) -> DatasetIndex:
    (tmp_path / "train.json").write_text(json.dumps(samples))
    tokenizer = ChatTokenizer(tmp_path / options.pop("folder"), **{"chat_template": "auto", **options})
    return build_index(tmp_path / "train.json", tokenizer, {"vision": processor}, progress=False)


@pytest.mark.filterwarnings("ignore:sample '3' has 3 of image")
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_the_processor(tmp_path: Path, name: str) -> None:
    if needs := FAMILIES[name].needs:
        pytest.importorskip(needs)
    processor, images = folder_of(tmp_path, name, TEMPLATES[name])
    whole = processor._parts[1]
    for count in TALKS:
        ours, theirs = talk(count, images)
        sample = {"id": str(count), "messages": ours, "image": [f"{n}.png" for n in range(count)]}
        index = index_of(tmp_path, processor, [sample], folder=name)
        if name in ("llava_onevision", "smolvlm"):  # other rows in nested lists; a processor of videos
            own = {"images": images[:count]} if count else {}
            text = ProcessorMixin.apply_chat_template(whole, theirs, tokenize=False)
            expected = whole(text=[text], **own)["input_ids"]
        else:
            expected = whole.apply_chat_template(theirs, tokenize=True)
        assert index.ids.tolist() == np.ravel(expected).tolist()
        learnt = whole.tokenizer.decode(index.ids[index.loss])
        assert "".join(learnt.split()).startswith("".join(TALKS[count][1][1][0].split()))
        # Rows are where the tokens are, run by run.
        runs = step_metadata(index, 0, 0, np.array([0]), {"vision": processor}).runs("vision", "llm")
        at = [range(start, start + rows) for start, rows in zip(runs.target_start, runs.rows, strict=True)]
        assert [place for run in at for place in run] == np.flatnonzero(index.ids == processor.row_id).tolist()
        table = index.items["vision"]
        assert np.bincount(runs.source, runs.rows, count).tolist() == table.rows.tolist()
        assert (len(runs.rows) > count) == (name in RUNS and count > 0)


def test_pictures_that_have_other_rows_beside_others_are_named(tmp_path: Path) -> None:
    processor, images = folder_of(tmp_path, "llava_onevision", TEMPLATES["llava_onevision"])
    ours, theirs = talk(3, images)
    sample = {"id": "a", "messages": ours, "image": ["0.png", "1.png", "2.png"]}
    with pytest.warns(
        UserWarning, match=r"'a' has 3 of image; .* processor makes \d+ rows, but 17 beside .* a flat list"
    ):
        index = index_of(tmp_path, processor, [sample], folder="llava_onevision")
    nested = np.ravel(processor._parts[1].apply_chat_template(theirs, tokenize=True))
    assert (nested == processor.row_id).sum() == 3 * 17 < (index.ids == processor.row_id).sum()
    assert HFProcessor(str(made(tmp_path, "idefics3"))).apart() is None


def test_a_template_writes_what_paligemma_writes_around_a_prompt(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ bos_token + part.text }}{% endif %}{% endfor %}{% endif %}"
        "{{ '\\n' if m.role == 'user' else eos_token }}{% endfor %}"
    )
    processor, images = folder_of(tmp_path, "paligemma", template)
    for count in (1, 3):
        prompt = [{"type": "image"}] * count + [{"type": "text", "text": "what?"}]
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "red"}]
        sample = {"id": "0", "messages": turns, "image": [f"{n}.png" for n in range(count)]}
        index = index_of(tmp_path, processor, [sample], folder="paligemma")
        text = "<image>" * count + "what?"
        output = processor._parts[1](text=[text], images=[images[:count]], suffix=["red"])
        assert index.ids.tolist() == np.ravel(output["input_ids"]).tolist()
        assert np.array_equal(index.loss, np.ravel(output["labels"]) != -100)


def test_a_picture_of_several_tiles_and_texts_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Gemma3Processor

    pan = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    monkeypatch.setattr(Gemma3Processor, "images_kwargs", Gemma3Processor.images_kwargs | pan)
    processor, images = folder_of(tmp_path, "gemma3", GEMMA)
    ours, theirs = talk(3, images)
    sample = {"id": "0", "messages": ours, "image": ["0.png", "1.png", "2.png"]}
    index = index_of(tmp_path, processor, [sample], folder="gemma3")
    expected = processor._parts[1].apply_chat_template(theirs, tokenize=True)
    assert index.ids.tolist() == np.ravel(expected).tolist()
    tiles = [len(processor.load(tmp_path / f"{n}.png")) for n in range(3)]
    assert tiles == [3, 5, 1] == index.items["vision"].sizes[:, 0].tolist()
    assert index.items["vision"].rows.tolist() == [4 * n for n in tiles]


def test_rows_of_an_item_in_runs_fill_its_places(tmp_path: Path) -> None:
    processor, _ = folder_of(tmp_path, "idefics3", IDEFICS)
    samples = []
    for number in (3, 0, 1):
        images = [f"{n}.png" for n in range(number)]
        samples.append({"id": str(number), "messages": talk(number)[0], "image": images})
    index = index_of(tmp_path, processor, samples, folder="idefics3")
    edges, kinds = (("vision", "llm"),), kinds_of(("vision", "llm"))
    steps = StepDataset(
        index, {"vision": processor}, edges, RankView.whole(("vision", "llm")), kinds=kinds, global_batch_size=3
    )
    batch = steps[0]
    (inputs,), (vision,) = batch.inputs["llm"], batch.inputs["vision"]
    (slots,) = inputs.slots.values()
    assert torch.equal(slots, torch.nonzero(inputs.ids == processor.row_id)[:, 0])
    assert len(slots) == vision.rows.sum() and len(vision.rows) == 4
    table = index.items["vision"]
    items = lambda name, units: Items(units, table.sizes[units], table.rows[units])  # noqa: E731
    (seen,) = steps._placed("llm", batch.plan.metadata, items, np.array([0, 1, 2]))
    first = batch.plan.metadata.tokens.cumsum() - batch.plan.metadata.tokens
    assert torch.equal(torch.from_numpy(ragged.expand(first[seen.sample] + seen.start, seen.rows)), slots)
    data: Any = SimpleNamespace(tokenizer=ChatTokenizer(processor.folder), processors={"vision": processor})
    asked = ["<image><image>what?Assistant:User:<image>and<b>", "whatisred?", "<image>helloworld"]
    for sample, question in enumerate(asked):
        assert "".join(_question(data, index, sample).split()) == f"User:{question}Assistant:"


def test_words_that_look_like_tokens_stay_text(tmp_path: Path) -> None:
    processor, _ = folder_of(tmp_path, "qwen2_5_vl", QWEN)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<|vision_end|>?"}]}]
    turns.append({"role": "assistant", "content": "red"})
    index = index_of(tmp_path, processor, [{"id": "0", "messages": turns, "image": "0.png"}], folder="qwen2_5_vl")
    end = processor._parts[1].tokenizer.convert_tokens_to_ids("<|vision_end|>")
    assert (index.ids == end).sum() == 1  # the template's own


def test_an_item_without_a_known_token_is_refused(tmp_path: Path) -> None:
    processor, _ = folder_of(tmp_path, "qwen2_5_vl", QWEN)
    sample = {"id": "0", "messages": talk(1)[0], "image": "0.png"}
    own = ImageProcessor(patch_size=14, merge=2)
    tower = HFProcessor(processor.folder, output_rows=lambda sizes: sizes[:, 0] // 4)  # as hf_encoder has it
    for other in (own, tower):
        with pytest.raises(
            ConfigError, match=r"writes '<\|vision_start\|><\|image_pad\|><\|vision_end\|>' .*placeholders="
        ):
            index_of(tmp_path, other, [sample], folder="qwen2_5_vl")
    index = index_of(tmp_path, own, [sample], folder="qwen2_5_vl", placeholders={"image": "<|image_pad|>"})
    start, rows = index.items["vision"].start[0], index.items["vision"].rows[0]
    around = processor._parts[1].tokenizer.convert_ids_to_tokens(index.ids[[start - 1, start, start + rows]].tolist())
    assert around == ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


def test_the_usual_token_of_an_item_needs_no_naming(tmp_path: Path) -> None:
    folder_of(tmp_path, "llava", LLAVA)
    sample = {"id": "0", "messages": talk(1)[0], "image": "0.png"}
    index = index_of(tmp_path, ImageProcessor(patch_size=14, merge=2), [sample], folder="llava")
    image = ChatTokenizer(tmp_path / "llava").placeholder_id("image", seen=True)
    table = index.items["vision"]
    assert np.flatnonzero(index.ids == image).tolist() == list(range(table.start[0], table.start[0] + table.rows[0]))


def test_the_template_is_asked_by_the_kind_of_an_item(tmp_path: Path) -> None:
    processor, _ = folder_of(tmp_path, "qwen2_5_vl", QWEN)
    photos = HFProcessor(processor.folder, "photo")
    turns = [{"from": "human", "value": "<photo> or <image>?"}, {"from": "gpt", "value": "red"}]
    sample = {"id": "0", "conversations": turns, "image": "0.png", "photo": "1.png"}
    (tmp_path / "train.json").write_text(json.dumps([sample]))
    tokenizer = ChatTokenizer(tmp_path / "qwen2_5_vl", chat_template="auto")
    index = build_index(tmp_path / "train.json", tokenizer, {"a": photos, "b": processor}, progress=False)
    around = []
    for table in index.items.values():
        places = [table.start[0] - 1, table.start[0] + table.rows[0]]
        around += processor._parts[1].tokenizer.convert_ids_to_tokens(index.ids[places].tolist())
    assert around == ["<|vision_start|>", "<|vision_end|>"] * 2
    assert index.items["a"].start[0] < index.items["b"].start[0]
    one, two = (processor.measure(tmp_path / f"{n}.png")[1] for n in (0, 1))
    assert one != two and [table.rows.tolist() for table in index.items.values()] == [[two], [one]]


def test_the_form_without_a_template_leaves_no_marker_out(tmp_path: Path) -> None:
    processor, _ = folder_of(tmp_path, "qwen2_5_vl", QWEN)
    sample = {"id": "0", "messages": talk(1)[0], "image": "0.png"}
    with pytest.raises(ConfigError, match=r"the form without a template leaves out; give chat_template=auto"):
        index_of(tmp_path, processor, [sample], folder="qwen2_5_vl", chat_template=None)
    processor, _ = folder_of(tmp_path, "internvl", None)  # its processor writes markers, and no template does
    index = index_of(tmp_path, processor, [sample], folder="internvl", chat_template=None)
    start, rows = index.items["vision"].start[0], index.items["vision"].rows[0]
    around = processor._parts[1].tokenizer.convert_ids_to_tokens(index.ids[[start - 1, start + rows]].tolist())
    assert around == ["<img>", "</img>"]
    processor, _ = folder_of(tmp_path, "gemma3", GEMMA.replace("{{ bos_token }}", "{{ bos_token + 'x' }}"))
    with pytest.raises(ConfigError, match=r"writes '<start_of_image>' for an item of image, which the form without"):
        check_plain(Path(processor.folder), {"image": ItemTokens("<|image_pad|>", "<|image_pad|>", "image")})


def test_faults(tmp_path: Path) -> None:
    sample = {"id": "0", "messages": talk(1)[0], "image": "0.png"}
    processor, _ = folder_of(tmp_path, "qwen2_5_vl", QWEN.replace("<|image_pad|>", "<|video_pad|>"))
    with pytest.raises(
        DataError, match=r"has 1 items of image, but the chat template writes '<\|image_pad\|>'.* 0 times"
    ):
        index_of(tmp_path, processor, [sample], folder="qwen2_5_vl")
    other = made(tmp_path, "gemma3")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace("<|image_pad|>", "<|picture|>"))
    (other / "chat_template.jinja").write_text(QWEN)
    with pytest.raises(ConfigError, match=r"fills rows with '<\|image_pad\|>', which is token \d+ there and none here"):
        index_of(tmp_path, processor, [sample], folder="gemma3")
    intern = HFProcessor(str(made(tmp_path, "internvl")))
    tokenizer = ChatTokenizer(intern.folder)
    with pytest.raises(ConfigError, match=r"writes tokens around rows.*use payload='fetch'"):
        build_index(tmp_path / "train.json", tokenizer, {"vision": intern}, measure=False, progress=False)
    assert read_conversation(sample, ["image"], True, [], []).items == {"image": ("0.png",)}


@pytest.mark.parametrize("name", ["gemma3", "idefics3"])
def test_rows_that_a_function_counts_are_those_of_the_text(tmp_path: Path, name: str) -> None:
    processor, _ = folder_of(tmp_path, name, None)
    counted = HFProcessor(processor.folder, output_rows=lambda sizes: 7 * sizes[:, 0])
    stock(tmp_path, ("<image>", "</s>"), eos_token="</s>")  # of a language model that does not know the folder's tokens
    samples = [{"id": str(n), "messages": talk(n)[0], "image": [f"{i}.png" for i in range(n)]} for n in (1, 3)]
    index = index_of(tmp_path, counted, samples, folder=".", chat_template=None)
    table = index.items["vision"]
    assert table.rows.tolist() == [7 * counted.measure(tmp_path / f"{n}.png")[0][0] for n in (0, 0, 1, 2)]
    runs = step_metadata(index, 0, 0, np.array([0, 1]), {"vision": counted}).runs("vision", "llm")
    places = np.repeat(index.offsets[runs.target] + runs.target_start, runs.rows) + ragged.within(runs.rows)
    image = ChatTokenizer(tmp_path).placeholder_id("image")
    assert places.tolist() == np.flatnonzero(index.ids == image).tolist() and len(places) == table.rows.sum()


def test_an_item_without_rows_shifts_no_other(tmp_path: Path) -> None:
    processor, _ = folder_of(tmp_path, "qwen2_5_vl", None)

    class Odd(HFProcessor):
        def written(self, sizes: Any) -> tuple[str | int, ...]:
            return ("",) if tuple(sizes) == self.measure(tmp_path / "0.png")[0] else super().written(sizes)

    samples = [{"id": "0", "messages": talk(3)[0], "image": ["0.png", "1.png", "2.png"]}]
    with pytest.raises(ConfigError, match=r"'vision': 0\.png has \d+ rows, but its text has places for 0 \(1 such"):
        index_of(tmp_path, Odd(processor.folder), samples, folder="qwen2_5_vl", chat_template=None)
