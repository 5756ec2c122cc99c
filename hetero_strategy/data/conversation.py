"""Read conversations: the texts of a sample's turns, which turns are learnt, and which files they contain. Pure Python.

Two spellings are read. LLaVA's and ShareGPT's turns are ``{"from": "human", "value": "..."}`` in ``conversations``;
OpenAI's are ``{"role": "user", "content": ...}`` in ``messages``, where a content is a text or a list of parts. A
``<image>`` in a text stands for the next file of ``image`` or ``images``; a backslash before it, ``\\<image>``, makes
it text. In a part of type ``text`` it is always text, because files are parts of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CALLS = ("function_call", "tool_call")
"""Role names of turns whose text is a function call, as JSON."""

ROLES = {
    **dict.fromkeys(("human", "user"), "human"),
    **dict.fromkeys(("gpt", "assistant", *CALLS), "gpt"),
    "system": "system",
    **dict.fromkeys(("tool", "tool_response", "observation", "function"), "tool"),
}
"""Role names in manifests -> the four roles."""

MEDIA_FIELDS = ("image", "audio", "video", "draw")
"""Fields that hold media by convention. If no module reads them they raise an error; they are not ignored."""

PARTS = {
    **dict.fromkeys(("image", "image_url"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
}
"""Type of a part of a content -> media field of its file."""

LEARNT = ("loss", "loss_mask", "loss_scale", "weight", "train", "training")
"""Keys of a turn or of a sample that switch learning its answers on or off: ms-swift's, verl's, OpenAI's and axolotl's.
"""

SAID = ("reasoning_content", "reasoning", "thinking", "tool_calls", "name")
"""Keys of a turn that hold words of it. Code that writes the conversation must write these words or refuse them."""

VARIABLES = ("tools", "documents")
"""Keys of a sample that a chat template reads."""

UNREAD = ("chat_template_kwargs", "train_detail", "training_detail")
"""Keys of a sample or turn that change what other trainers learn, but that nothing reads here."""

SHOWN = 10
"""Most keys or faults that one error names."""

_FILES = (*MEDIA_FIELDS, *(f"{media_field}s" for media_field in MEDIA_FIELDS))
_SPELLING = ("from", "value", "role", "content", *LEARNT)


def placeholder(media_field: str) -> str:
    """Return the text that stands for one item of a field in a manifest: ``<image>`` for ``image``."""
    return f"<{media_field}>"


def item_mark(media_field: str) -> str:
    """Return the text that stands for one item of a field in a turn; no manifest holds its noncharacters."""
    return f"\ufdd0{media_field}\ufdd1"


ITEM_MARK = re.compile("\ufdd0([^\ufdd1]*)\ufdd1")
MARKS = re.compile("\ufdd0([^\ufdd1]*)\ufdd1|\ufdd2(\\d+)\ufdd3")
"""Mark of an item, or of a token that a chat template writes into a turn."""


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation."""

    role: str
    """``human``, ``gpt``, ``system`` or ``tool``."""
    text: str
    """Text of the turn, with :func:`item_mark` in place of each item."""
    learnt: bool = True
    """Whether an answer (``gpt``) is to be predicted; the text of other roles never is."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the turn, which a chat template reads: ``tool_calls``, ``reasoning_content`` and the like."""


@dataclass(frozen=True)
class Conversation:
    """The conversation of one sample."""

    turns: tuple[Turn, ...]
    items: Mapping[str, tuple[str, ...]]
    """Media field -> paths, in the order of the items in the turns."""
    variables: Mapping[str, Any]
    """``tools`` and the like, which a chat template reads."""


def read_conversation(
    sample: Mapping[str, Any],
    fields: Sequence[str],
    answers: bool,
    drawn: Sequence[str],
    problems: list[str],
) -> Conversation:
    """Read the conversation of a manifest's sample, and add its faults to ``problems``.

    Args:
        fields: media fields that have an encoder or a generator.
        answers: whether the sample must have an answer to learn, and no empty answer.
        drawn: members of ``fields`` that have a generator.
    """
    reader = _Reader(fields, drawn, problems)
    turns = reader.turns(sample, answers)
    items = {}
    for media_field in dict.fromkeys((*fields, *MEDIA_FIELDS)):
        if paths := reader.items(media_field, sample, turns):
            items[media_field] = paths
    for key in UNREAD:
        if sample.get(key):
            problems.append(f"has '{key}', which nothing reads; leave it out")
    return Conversation(tuple(turns), items, reader.variables(sample))


def holds(sample: Mapping[str, Any], media_field: str) -> bool:
    """Return whether a sample has files of a media field, in a list or in a part of a turn."""
    if sample.get(media_field) or (media_field in MEDIA_FIELDS and sample.get(f"{media_field}s")):
        return True
    turns = _decoded(sample.get("conversations") or sample.get("messages"))
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(_field_of(part, (media_field,)) == media_field for part in parts)


class _Reader:
    """A reader of one sample: texts first, which note their items, then the items' files."""

    def __init__(self, fields: Sequence[str], drawn: Sequence[str], problems: list[str]) -> None:
        self.fields, self.drawn, self.problems = fields, drawn, problems
        self.placed: dict[str, list[str | None]] = {}
        """Media field -> path of each item in the turns; None for the next path of the sample's list."""
        names = "|".join(map(re.escape, dict.fromkeys((*fields, *MEDIA_FIELDS))))
        self.tag = re.compile(rf"(\\?)<({names})>")

    def turns(self, sample: Mapping[str, Any], answers: bool) -> list[Turn]:
        """Read the turns, in the order in which the language model sees them."""
        both = [key for key in ("conversations", "messages") if sample.get(key)]
        if len(both) > 1:
            self.problems.append("has both 'conversations' and 'messages'; keep one of them")
        listed = _decoded(sample.get(both[0])) if both else None
        if isinstance(listed, dict) and listed and all(isinstance(column, list) for column in listed.values()):
            listed = [dict(zip(listed, turn, strict=False)) for turn in zip(*listed.values(), strict=False)]  # columns
        if not isinstance(listed, list) or not listed:
            keys = ", ".join(map(str, [*sample][:SHOWN])) or "none"
            self.problems.append(
                f"'conversations' or 'messages' must be a list of at least one turn; the keys of the sample are {keys}"
            )
            return []
        if system := sample.get("system"):  # ShareGPT's format
            listed = [{"role": "system", "content": system}, *listed]
        before, learnt = len(self.problems), self.learnt("the sample", sample)
        turns = [turn for number, one in enumerate(listed) if (turn := self.turn(number, one, answers, learnt))]
        if system and any(turn.role == "system" for turn in turns[1:]):
            self.problems.append("has 'system' and a turn from 'system'; keep one of them")
        if answers and len(self.problems) == before and not any(turn.role == "gpt" and turn.learnt for turn in turns):
            answered = any(turn.role == "gpt" for turn in turns)
            why = "every answer is switched off by " + " or ".join(LEARNT) if answered else "no turn is from 'gpt'"
            self.problems.append(f"{why}, so there is nothing to learn")
        return turns

    def turn(self, number: int, turn: Any, answers: bool, learnt: bool) -> Turn | None:
        """Read one turn; return None if it has no role or text."""
        name = f"turn {number}"
        values = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else {}
        role_name, content = values.get("from", values.get("role")), values.get("value", values.get("content"))
        extra = {key: value for key, value in values.items() if key not in _SPELLING}
        self.calls(name, extra)
        if content is None and not extra.keys().isdisjoint(SAID):
            content = ""
        if not isinstance(role_name, str) or not isinstance(content, str | list):
            spellings = "an object with the texts 'from' and 'value', or 'role' and 'content'"
            self.problems.append(f"{name} must be {spellings}")
            return None
        if (role := ROLES.get(role_name)) is None:
            self.problems.append(f"{name} is from {role_name!r}; use one of {', '.join(ROLES)}")
            return None
        for key in sorted(extra.keys() & {*UNREAD, *_FILES}):
            fix = "name files in the sample or in parts of the content" if key in _FILES else "leave it out"
            self.problems.append(f"{name} has '{key}', which nothing reads there; {fix}")
        if role_name in CALLS and isinstance(content, str):
            extra, content = {**extra, "tool_calls": self.called(name, content)}, ""
        text = self.parts(name, content) if isinstance(content, list) else self.text(content)
        if role == "gpt" and answers and not text.strip() and not extra.get("tool_calls"):
            self.problems.append(f"{name}: the answer is empty, so there is nothing to learn")
        own = self.learnt(name, values, role)
        return Turn(role, text, learnt and own if role == "gpt" else True, extra)

    def learnt(self, name: str, holder: Mapping[str, Any], role: str = "gpt") -> bool:
        """Return whether a turn, or a sample, is to be learnt according to its keys."""
        learnt = True
        for key in LEARNT:
            value = holder.get(key)
            if value is None:
                continue
            if not isinstance(value, int | float) or value not in (0, 1):
                fix = "answers are learnt or not, without weights; give 0 or 1, false or true"
                self.problems.append(f"{name} has '{key}': {value!r}; {fix}")
            elif value and role != "gpt":
                self.problems.append(f"{name} has '{key}': {value!r}, but only answers (gpt) are learnt; leave it out")
            learnt = learnt and bool(value)
        return learnt

    def text(self, text: str) -> str:
        """Read a text: tags stand for items, or for themselves after a backslash."""

        def read(tag: re.Match[str]) -> str:
            if tag[1] or tag[2] not in self.fields:
                return placeholder(tag[2])
            self.placed.setdefault(tag[2], []).append(None)
            return item_mark(tag[2])

        return self.tag.sub(read, text)

    def parts(self, name: str, parts: Sequence[Any]) -> str:
        """Read a content that is a list of parts: texts, and files at their places."""
        text = ""
        for place, part in enumerate(parts):
            of, values = f"{name}: part {place}", part if isinstance(part, dict) else {}
            if values.get("type") == "text" and isinstance(values.get("text"), str):
                text += values["text"]
            elif (media_field := _field_of(values, self.fields)) is not None:
                self.placed.setdefault(media_field, []).append(self.part_path(of, values))
                text += item_mark(media_field)
            else:
                known = ", ".join(PARTS)
                self.problems.append(f"{of} must be a text with its 'text', or have as 'type' one of {known}")
        return text

    def part_path(self, of: str, part: Mapping[str, Any]) -> str | None:
        """Return the path that a part names; None if it is the next one of the sample's list."""
        values = [part.get(key) for key in (part["type"], "path", "url")]
        value = next((value for value in values if value is not None), None)
        if isinstance(value, dict) and value.get("bytes") is None:
            value = next((value[key] for key in ("url", "path", "data") if value.get(key) is not None), value)
        if value is not None and not (isinstance(value, str) and value):
            self.problems.append(f"{of} must have a path, {_no_path(value)}")
            return ""
        return value

    def items(self, media_field: str, sample: Mapping[str, Any], turns: list[Turn]) -> tuple[str, ...]:
        """Return paths of a field's items in the order of their tags; without tags, they begin the first question."""
        names, key = self.names(media_field, sample)
        placed = self.placed.get(media_field, [])
        if names is None:
            return ()
        if media_field not in self.fields:
            if names or placed:
                reader = "no generator draws" if media_field == "draw" else "no encoder reads"
                self.problems.append(
                    f"has '{key}', which {reader}; give a processor for it, drop the field, or leave such"
                    f" samples out with index.leave_out=[{media_field}]"
                )
            return ()
        mark = placeholder(media_field)
        if names and not placed and media_field not in self.drawn:
            first = next((number for number, turn in enumerate(turns) if turn.role == "human"), None)
            if first is not None:
                text = item_mark(media_field) * len(names) + turns[first].text
                turns[first] = replace(turns[first], text=text)
                return tuple(names)
        in_text = [turn.role == "gpt" for turn in turns for _ in range(turn.text.count(item_mark(media_field)))]
        if media_field in self.drawn and False in in_text:
            self.problems.append(f"{mark} stands in a question; what a generator draws can only be part of answers")
        elif media_field not in self.drawn and True in in_text:
            self.problems.append(f"{mark} stands in an answer; items can only be part of questions; {_escaped(mark)}")
        elif (marks := sum(path is None for path in placed)) != len(names):
            count = f"{marks} {mark} in the conversation but {len(names)} paths in '{key}'"
            self.problems.append(f"{count}; {_escaped(mark)}" if marks > len(names) else count)
        rest = iter(names)
        return tuple(next(rest, "") if path is None else path for path in placed)

    def names(self, media_field: str, sample: Mapping[str, Any]) -> tuple[list[str] | None, str]:
        """Return the paths in a sample's list of a field, or None if they are no paths, and the list's key."""
        keys = [media_field]
        if media_field in MEDIA_FIELDS and f"{media_field}s" not in self.fields:
            keys.append(f"{media_field}s")
        keys = [key for key in keys if sample.get(key) not in (None, "", [])] or keys[:1]
        if len(keys) > 1:
            self.problems.append(f"has both '{keys[0]}' and '{keys[1]}'; keep one of them")
        value = sample.get(keys[0])
        names = [] if value is None or value == "" else value if isinstance(value, list) else [value]
        paths = [name.get("path") if _is_file(name) else name for name in names]
        for path in paths:
            if not (isinstance(path, str) and path):
                self.problems.append(f"'{keys[0]}' must be a path or a list of paths, {_no_path(path)}")
                return None, keys[0]
        return paths, keys[0]

    def variables(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of a sample for the chat template."""
        variables = {key: value for key in VARIABLES if (value := _decoded(sample.get(key)))}
        if functions := _decoded(sample.get("functions")):
            if "tools" in variables:
                self.problems.append("has both 'tools' and 'functions'; keep one of them")
            variables["tools"] = functions
        for key, value in variables.items():
            if not isinstance(value, list) or not all(isinstance(_decoded(one), dict) for one in value):
                self.problems.append(f"'{key}' must be a list of objects, or such a list as JSON")
                return {}
        if "tools" in variables:
            variables["tools"] = [_tool(_decoded(tool)) for tool in variables["tools"]]
        return variables

    def calls(self, name: str, extra: dict[str, Any]) -> None:
        """Bring function calls into the form that chat templates read: arguments are objects."""
        if (call := extra.pop("function_call", None)) is not None:
            extra["tool_calls"] = [call]
        calls = _decoded(extra.pop("tool_calls", None))
        if not calls:
            return
        extra["tool_calls"] = converted = []
        for call in calls if isinstance(calls, list) else [calls]:
            function = call.get("function", call) if isinstance(call, dict) else call
            if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
                shown = repr(call)[:80]
                self.problems.append(f"{name}: a call of a function must be an object with its 'name', found {shown}")
                continue
            function = {**function, "arguments": _decoded(function.get("arguments", {}))}
            rest = call if "function" in call else {}
            converted.append({**rest, "type": "function", "function": function})

    def called(self, name: str, text: str) -> Any:
        """Return the function calls that are the text of a turn."""
        extra = {"tool_calls": text}
        self.calls(name, extra)
        return extra.get("tool_calls")


def _field_of(part: Mapping[str, Any], fields: Sequence[str]) -> str | None:
    """Return the media field of a part of a content; None if the part is no file."""
    kind = part.get("type")
    return PARTS.get(kind, kind if kind in fields else None) if isinstance(kind, str) else None


def _is_file(value: Any) -> bool:
    """Return whether a value is a file as the `datasets` library stores media, but without its bytes."""
    return isinstance(value, dict) and "path" in value and value.get("bytes") is None


def _escaped(mark: str) -> str:
    return f"where it is text, write \\{mark}, which is \\\\{mark} in JSON"


def _no_path(value: Any) -> str:
    if isinstance(value, dict) and value.get("bytes") is not None:
        return "found the bytes of a file; save the file and give its path"
    shown = repr(value)
    return f"found {shown if len(shown) < 80 else shown[:80] + '...'}"


def _decoded(value: Any) -> Any:
    """Parse a text that is a JSON object or list; return everything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function in the form of OpenAI's format and chat templates."""
    return tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}


def texts_of(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (str(key), *texts_of(one))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_of(one)
