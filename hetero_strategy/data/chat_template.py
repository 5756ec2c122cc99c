"""Chat templates of Hugging Face tokenizers: which text stands around the turns of a conversation.

A template is rendered with a mark in place of each turn's text, so what it adds is told from what the turns say:
special tokens in the former are tokens, in the latter they are text. The loss is on an answer and on the token that the
template writes behind it, with which an instruct model ends its turn. What it writes around the true texts is compared:
a template that looks into them, as those that take reasoning out of earlier answers, is refused where it changes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from hetero_strategy.data.manifest import Turn
from hetero_strategy.errors import ConfigError, DataError

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
"""What templates call the roles of a manifest."""
DAY = datetime(2024, 7, 26)
"""On which every template is written: token ids may not follow from the day on which a data set is indexed."""
_SPACE = "\u2003"  # one that no template writes, and that is missing where a template trims
_MARK = re.compile(f"({_SPACE}?)\ue000(\\d+)\ue001({_SPACE}?)")
_GENERATION = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")


class Written(NamedTuple):
    """A part of a written conversation."""

    text: str
    token: bool
    """Whether it is a token of its own that the template adds, and not text."""
    learn: bool
    """Whether it is to be predicted."""


class ChatTemplate:
    """A Jinja template as in ``chat_template.jinja`` or ``tokenizer_config.json``.

    It is rendered in a sandbox in which it is always the same day, 26 July 2024, as Llama's falls back to.

    Args:
        source: text of the template.
        added: tokens that the tokenizer knows as a whole, and of each whether it is special.
        variables: what it may name beside ``messages``, such as ``bos_token``.

    Raises:
        ConfigError: it is no Jinja template.
    """

    def __init__(self, source: str, added: Mapping[str, bool], variables: Mapping[str, Any]) -> None:
        self.source, self._made_of = source, (source, added, variables)
        self._variables = {"add_generation_prompt": False, "tools": None, "documents": None, **variables}
        self._tokens, self._specials = _any_of(added), _any_of([token for token, special in added.items() if special])
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": DAY.strftime}
        try:  # where a template says what a model generates, that is an answer, which is known here
            plain = _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
            self._template = environment.from_string(plain)
        except TemplateError as error:
            raise ConfigError(f"chat_template: not a Jinja template: {error}") from None
        self._lists = False
        self._lists = not self._takes_text()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """A compiled template cannot be pickled: it is compiled again."""
        return ChatTemplate, self._made_of

    def written(self, turns: Sequence[Turn]) -> list[Written]:
        """Return the conversation as the template writes it.

        Raises:
            DataError: the template refuses it, leaves a turn out, repeats or changes one, or lets an answer end without
                a special token.
        """
        marks = [f"{_SPACE}\ue000{number}\ue001{_SPACE}" for number in range(len(turns))]
        around = _MARK.split(self._rendered(turns, marks))
        numbers = list(map(int, around[2::4]))
        if numbers != list(range(len(turns))):
            lost = next((n for n in range(len(turns)) if numbers.count(n) != 1), 0)
            raise DataError(
                f"the chat template writes turn {lost + 1} ({turns[lost].role}) {numbers.count(lost)} times and turns"
                f" in the order {[n + 1 for n in numbers]}; merge turns, or leave that one out"
            )
        kept = [turn.text if space else turn.text.lstrip() for turn, space in zip(turns, around[1::4], strict=True)]
        kept = [text if space else text.rstrip() for text, space in zip(kept, around[3::4], strict=True)]
        written, pieces = self._rendered(turns, [turn.text for turn in turns]), self._pieces(turns, kept, around[::4])
        if "".join(piece.text for piece in pieces) != written:  # other words around a turn for what is in it
            texts = [turn.text for turn in turns]
            pieces = self._pieces(turns, texts, _between(written, texts, around[::4]))
        return _joined(pieces)

    def _pieces(self, turns: Sequence[Turn], texts: Sequence[str], between: Sequence[str]) -> list[Written]:
        pieces = self._added(between[0])
        for turn, text, rest in zip(turns, texts, between[1:], strict=True):
            pieces.append(Written(text, False, turn.role == "gpt"))
            pieces += self._ending(rest) if turn.role == "gpt" else self._added(rest)
        return pieces

    def looks_special(self, text: str) -> bool:
        """Whether it holds what would be a special token."""
        return self._specials is not None and self._specials.search(text) is not None

    def _takes_text(self) -> bool:
        """Whether contents are texts. Else, as in templates for pictures, they are lists of parts."""
        try:
            return "\ue000" in self._rendered([Turn("human", ""), Turn("gpt", "")], ["\ue000", "1"])
        except DataError:
            return False

    def _rendered(self, turns: Sequence[Turn], texts: Sequence[str]) -> str:
        messages = [
            {
                "role": ROLES.get(turn.role, turn.role),
                "content": [{"type": "text", "text": text}] if self._lists else text,
            }
            for turn, text in zip(turns, texts, strict=True)
        ]
        try:
            return self._template.render(messages=messages, **self._variables)
        except Exception as error:  # a template may fail in any way
            raise DataError(f"the chat template refuses the conversation: {error}") from None

    def _added(self, text: str) -> list[Written]:
        """What the template adds, tokens apart."""
        parts = self._tokens.split(text) if self._tokens else [text]
        return [Written(part, bool(n % 2), False) for n, part in enumerate(parts) if part]

    def _ending(self, text: str) -> list[Written]:
        """What follows an answer: up to the first token it is learnt."""
        pieces = self._added(text)
        end = next((n for n, piece in enumerate(pieces) if piece.token), None)
        if end is None or any(piece.text.strip() for piece in pieces[:end]):
            raise DataError(
                "the chat template writes no token of its own right behind an answer, so a model would not learn to end"
                " it; use a template that does"
            )
        return [piece._replace(learn=n <= end) for n, piece in enumerate(pieces)]


def read_template(chat_template: str, folder: Path) -> str:
    """Return the text of a template.

    Args:
        chat_template: ``auto``: the one beside the tokenizer, ``chat_template.jinja`` or in ``chat_template.json`` or
            ``tokenizer_config.json``; else a file.
        folder: the tokenizer's.

    Raises:
        ConfigError: there is none.
    """
    file = folder / "chat_template.jinja" if chat_template == "auto" else Path(chat_template)
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if chat_template != "auto":
        raise ConfigError(f"chat_template: {file} is missing; give a Jinja file, or auto for the tokenizer's own")
    config = folder / "tokenizer_config.json"
    found = read_json(folder / "chat_template.json").get("chat_template") or read_json(config).get("chat_template")
    if isinstance(found, list):  # several by name
        found = {one["name"]: one["template"] for one in found}.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            f"chat_template: neither {file} nor {config} has one; name a Jinja file, or leave chat_template out"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object beside the tokenizer; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenizer: {path} is not JSON: {error}") from None
    return content


def _joined(pieces: Sequence[Written]) -> list[Written]:
    """Texts that follow each other become one, as they are tokenised where a whole conversation is."""
    joined: list[Written] = []
    for piece in pieces:
        if joined and not (piece.token or joined[-1].token) and piece.learn == joined[-1].learn:
            joined[-1] = piece._replace(text=joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def _between(written: str, texts: Sequence[str], usual: Sequence[str]) -> list[str]:
    """What a conversation has before, between and behind these texts of its turns.

    Args:
        usual: what it has there where the template knows nothing of the texts. Only where something else stands before
            a text is that searched for: short ones may also be found in words of the template.

    Raises:
        DataError: one of them is not in it.
    """
    between, end = [], 0
    for text, words in zip(texts, usual[:-1], strict=True):
        at = end + len(words) if written.startswith(words + text, end) else written.find(text, end)
        if at < 0:
            raise DataError(
                "the chat template changes a turn for what is in it, such as reasoning in <think>; write turns as the"
                " template leaves them, or take one that does not"
            )
        between.append(written[end:at])
        end = at + len(text)
    return [*between, written[end:]]


def _any_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if tokens else None


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers writes it: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
