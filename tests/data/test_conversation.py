"""What conversations say in the spellings of other trainers: roles, parts, files, what is learnt."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_strategy.data.conversation import Conversation, Turn, item_mark, read_conversation

IMAGE, AUDIO = item_mark("image"), item_mark("audio")
ANSWER = {"role": "assistant", "content": "a"}


def read(problems: list[str] | None = None, answers: bool = True, **sample: Any) -> Conversation:
    found: list[str] = []
    said = read_conversation(sample, ["image", "audio"], answers, [], found)
    if problems is None:
        assert not found, found
    else:
        problems += found
    return said


def fault(**sample: Any) -> str:
    problems: list[str] = []
    read(problems, **sample)
    assert problems, "no fault"
    return "\n".join(problems)


def asked(content: Any, **sample: Any) -> Conversation:
    return read(messages=[{"role": "user", "content": content}, ANSWER], **sample)


@pytest.mark.parametrize("key", ["loss", "loss_mask", "loss_scale", "weight", "train", "training"])
def test_answers_are_learnt_as_they_say(key: str) -> None:
    for off in (False, 0, 0.0):
        turns = read(conversations=[{"from": "gpt", "value": "no", key: off}, {"from": "gpt", "value": "yes"}]).turns
        assert [(turn.text, turn.learnt) for turn in turns] == [("no", False), ("yes", True)]
    talk = [{"role": "user", "content": "q", key: 0}, {**ANSWER, key: 1}, {**ANSWER, key: None}]
    assert [turn.learnt for turn in read(messages=talk, **{key: True}).turns] == [True] * 3
    for holder, weighed in (({}, 0.5), ({}, "yes"), ({}, 2), ({key: 0.5}, 1)):
        words = fault(messages=[{"role": "user", "content": "q"}, {**ANSWER, key: weighed}], **holder)
        assert f"has '{key}': " in words and "without weights; give 0 or 1" in words
    assert "but only answers (gpt) are learnt" in fault(messages=[{"role": "user", "content": "q", key: 1}, ANSWER])
    for talk, holder in (([{**ANSWER, key: 0}], {}), ([ANSWER], {key: False})):
        assert "every answer is switched off" in fault(messages=talk, **holder)
        assert not read(messages=talk, answers=False, **holder).turns[0].learnt


def test_both_spellings_say_the_same() -> None:
    shared = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    openai = [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "q", "image": None}]}, ANSWER]
    columns = {"role": ["user", "assistant"], "content": ["q", "a"]}
    expected = (Turn("system", "s"), Turn("human", "q"), Turn("gpt", "a"))
    for sample in (
        {"conversations": shared},
        {"messages": shared, "conversations": None},
        {"conversations": openai, "system": "s", "tools": "[]", "images": None, "id": 3, "score": 0.1},
        {"messages": parts, "system": "s"},
        {"messages": columns, "system": "s"},
    ):
        said = read(**sample)
        assert said.turns == expected and not said.items and not said.variables
    assert "both 'conversations' and 'messages'" in fault(messages=openai, conversations=shared)
    assert "has 'system' and a turn from 'system'" in fault(conversations=shared, system="s")
    assert "'chat_template_kwargs', which nothing reads" in fault(messages=openai, chat_template_kwargs={"a": 1})


def test_parts_stand_in_their_order() -> None:
    parts = [
        {"type": "text", "text": "see <image> "},
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "b.png"}},
        {"type": "text", "text": "hear"},
        {"type": "input_audio", "input_audio": {"data": "c.wav", "format": "wav"}},
        {"type": "audio"},
        {"type": "image", "path": "d.png"},
        {"type": "image", "image": {"bytes": None, "path": "e.png"}},
    ]
    said = asked(parts, audios=["d.wav"])
    assert said.turns[0].text == f"see <image> {IMAGE}{IMAGE}hear{AUDIO}{AUDIO}{IMAGE}{IMAGE}"
    assert said.items == {"image": ("a.png", "b.png", "d.png", "e.png"), "audio": ("c.wav", "d.wav")}
    wrong: list[tuple[Any, str]] = [
        ({"type": "image", "image": {"bytes": "..", "path": "a.png"}}, "found the bytes of a file; save the file"),
        ({"type": "image", "image": 3}, "turn 0: part 0 must have a path, found 3"),
        ({"type": "image"}, "1 <image> in the conversation but 0 paths in 'image'"),
        ({"type": "video", "video": "v.mp4"}, "has 'video', which no encoder reads"),
        ({"type": "text"}, "part 0 must be a text with its 'text', or have as 'type' one of image,"),
        ("text", "part 0 must be"),
    ]
    for part, words in wrong:
        assert words in fault(messages=[{"role": "user", "content": [part]}, ANSWER])
    in_turn = {"role": "user", "content": "q", "images": ["a.png"]}
    assert "turn 0 has 'images', which nothing reads there; name files in the" in fault(messages=[in_turn, ANSWER])


def test_files_without_a_tag_begin_the_first_question() -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, ANSWER]
    said = read(messages=talk, images=["a.png", {"path": "b.png", "bytes": None}], audio="c.wav")
    assert [turn.text for turn in said.turns] == ["s", f"{AUDIO}{IMAGE}{IMAGE}q", "a"]
    assert said.items == {"image": ("a.png", "b.png"), "audio": ("c.wav",)}
    assert "0 <image> in the conversation but 1 paths" in fault(messages=[ANSWER], image="a.png")


def test_tags_behind_a_backslash_are_text() -> None:
    said = asked(r"<image> how to write \<image>, \\<image>, \<audio>, \<video> or \<p>?", image="a.png")
    assert said.turns[0].text == rf"{IMAGE} how to write <image>, \<image>, <audio>, <video> or \<p>?"
    said = read(messages=[{"role": "user", "content": r"a \<image>?"}, {"role": "assistant", "content": r"\<image>"}])
    assert [turn.text for turn in said.turns] == ["a <image>?", "<image>"] and not said.items
    said = asked([{"type": "text", "text": r"<image>\<image>"}])
    assert said.turns[0].text == r"<image>\<image>" and not said.items
    no_vision = read_conversation({"messages": [ANSWER, {**ANSWER, "content": r"<image>\<image>"}]}, [], True, [], [])
    assert no_vision.turns[1].text == "<image><image>"
    for sample in ({"content": "what is <image>?"}, {"content": "<image><image>", "role": "user"}):
        words = fault(messages=[{"role": "user", **sample}, ANSWER])
        assert r"where it is text, write \<image>, which is \\<image> in JSON" in words


def test_calls_of_functions_have_one_form() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    spellings: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"role": "tool_call", "content": '[{"name": "f", "arguments": {"x": 1}}]'},
    ]
    for turn in spellings:
        assert read(messages=[turn]).turns == (Turn("gpt", "", True, {"tool_calls": [call]}),)
    assert "a call of a function must be an object with its 'name', found 'f(1)'" in fault(
        messages=[{"from": "function_call", "value": "f(1)"}]
    )
    thought = {"role": "assistant", "content": None, "reasoning_content": "r"}
    assert "turn 0: the answer is empty, so there is nothing to learn" in fault(messages=[thought])
    tools = [{"name": "f"}]
    wrapped = [{"type": "function", "function": tools[0]}]
    for given in (tools, wrapped, '[{"name": "f"}]', ['{"name": "f"}']):
        assert read(messages=[ANSWER], tools=given).variables == {"tools": wrapped}
        assert read(messages=[ANSWER], functions=given).variables == {"tools": wrapped}
    assert "'tools' must be a list of objects" in fault(messages=[ANSWER], tools="f(x)")
