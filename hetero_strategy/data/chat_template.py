"""Render chat templates of Hugging Face tokenizers and locate the turns in the rendered text.

A template is rendered with a mark in place of each turn's text, which separates the template's text from the turns'
text. Special tokens in the template's text are tokens; in a turn's text they are text. The loss is on an answer and on
the token that the template writes after it, with which an instruct model ends its turn. The result is compared with a
rendering of the true texts.

A template may look into answers: templates of reasoning models remove the reasoning from earlier answers, and write
function calls in their own words. Then an answer is the text between its prompt and the text that would follow any
other answer. Earlier answers that the template shortens, or whose prompt differs, are not learnt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from hetero_strategy.data.conversation import SAID, Turn, texts_of
from hetero_strategy.errors import ConfigError, DataError

ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
"""Role in a manifest -> role in a template."""
DAY = datetime(2024, 7, 26)
"""The date that every template sees: token ids must not depend on the day on which a data set is indexed."""
SPACE = "\u2003"
"""A blank that no template writes; it is missing where a template trims."""
_MARK = re.compile(f"({SPACE}?)\ue000(\\d+)\ue001({SPACE}?)")
NONE: Mapping[int, list[dict[str, str]]] = {}
_ENDLESS = (
    "the chat template writes no token of its own right behind an answer, so a model would not learn to end it; use a"
    " template that does"
)
_UNWRITTEN = "the chat template does not write; leave it out, or take a template that does"
_GENERATION = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")


class Written(NamedTuple):
    """A part of a written conversation."""

    text: str
    token: bool
    """Whether it is a token that the template adds, and not text."""
    learn: bool
    """Whether it is to be predicted."""


class Conversed(NamedTuple):
    """A written conversation."""

    pieces: list[Written]
    unlearnt: int
    """Number of answers that should be learnt but are not, because the template removes text from them."""


class ChatTemplate:
    """A Jinja template as in ``chat_template.jinja`` or ``tokenizer_config.json``.

    It is rendered in a sandbox in which the date is always 26 July 2024, the default of Llama's template.

    Args:
        source: text of the template.
        added: token that the tokenizer knows as a whole -> whether it is special.
        variables: values that the template may name besides ``messages``, such as ``bos_token``.

    Raises:
        ConfigError: the source is no Jinja template.
    """

    def __init__(self, source: str, added: Mapping[str, bool], variables: Mapping[str, Any]) -> None:
        self.source, self._made_of = source, (source, added, variables)
        self.items: dict[str, str] = {}
        """Kind of items -> text that the template writes for an item, as far as it is known."""
        self._names = [*added]
        self._variables = {"add_generation_prompt": False, "tools": None, "documents": None, **variables}
        self._tokens, self._specials = _any_of(added), _any_of([token for token, special in added.items() if special])
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": DAY.strftime}
        try:  # a block that marks generated text is an answer, which is known here
            plain = _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
            self._template = environment.from_string(plain)
        except TemplateError as error:
            raise ConfigError(f"chat_template: not a Jinja template: {error}") from None
        self._lists = False
        self._lists = not self._takes_text()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: a compiled template cannot be pickled."""
        return ChatTemplate, self._made_of

    def written(self, turns: Sequence[Turn], variables: Mapping[str, Any] | None = None) -> Conversed:
        """Return the conversation as the template writes it.

        Args:
            variables: values besides the turns that the template reads, such as ``tools``.
        """
        talk = _Talk(self, turns, variables or {})
        talk.check_extra()
        marks = [f"{SPACE}\ue000{number}\ue001{SPACE}" if turn.text else "" for number, turn in enumerate(turns)]
        around = _MARK.split(talk.rendered(marks))
        numbers, expected = list(map(int, around[2::4])), [number for number, mark in enumerate(marks) if mark]
        if numbers != expected:
            lost = next((n for n in expected if numbers.count(n) != 1), 0)
            raise DataError(
                f"the chat template writes turn {lost + 1} ({turns[lost].role}) {numbers.count(lost)} times and turns"
                f" in the order {[n + 1 for n in numbers]}; merge turns, or leave that one out"
            )
        if any(turn.role == "gpt" and not turn.extra.keys().isdisjoint(SAID) for turn in turns):
            return talk.by_prompts()
        with_text = [turn for turn in turns if turn.text]
        kept = [turn.text if space else turn.text.lstrip() for turn, space in zip(with_text, around[1::4], strict=True)]
        kept = [text if space else text.rstrip() for text, space in zip(kept, around[3::4], strict=True)]
        written, pieces = talk.rendered(), self._pieces(with_text, kept, around[::4])
        if "".join(piece.text for piece in pieces) != written:  # the words around a turn depend on its text
            texts = [turn.text for turn in with_text]
            between = _between(written, texts, around[::4])
            if between is None:
                return talk.by_prompts()
            pieces = self._pieces(with_text, texts, between)
        return Conversed(_joined(pieces), 0)

    def _pieces(self, turns: Sequence[Turn], texts: Sequence[str], between: Sequence[str]) -> list[Written]:
        pieces = self.added(between[0])
        for turn, text, rest in zip(turns, texts, between[1:], strict=True):
            learn = turn.role == "gpt" and turn.learnt
            pieces.append(Written(text, False, learn))
            pieces += self.ending(rest) if learn else self.added(rest)
        return pieces

    def looks_special(self, text: str) -> bool:
        """Return whether a text contains a special token."""
        return self._specials is not None and self._specials.search(text) is not None

    def _takes_text(self) -> bool:
        """Return whether contents are texts. Else, as in templates for pictures, they are lists of parts."""
        try:
            return "\ue000" in self.rendered([Turn("human", "\ue000"), Turn("gpt", "1")])
        except DataError:
            return False

    def token_mark(self, token: str) -> str:
        """Return a mark for a token in a turn's text, where the token itself would be text; see :meth:`token_of`."""
        return f"\ufdd2{self._names.index(token)}\ufdd3"

    def token_of(self, mark: str) -> str:
        """Return the token whose mark has this number."""
        return self._names[int(mark)]

    def rendered(
        self, turns: Sequence[Turn], parts: Mapping[int, list[dict[str, str]]] = NONE, **variables: Any
    ) -> str:
        """Return the template's text for some turns.

        Args:
            parts: number of a turn -> its content as a list of parts, in place of its text.
        """
        contents = [[{"type": "text", "text": turn.text}] if self._lists else turn.text for turn in turns]
        messages = [
            {**turn.extra, "role": ROLES.get(turn.role, turn.role), "content": parts.get(number, content)}
            for number, (turn, content) in enumerate(zip(turns, contents, strict=True))
        ]
        try:
            return self._template.render(messages=messages, **{**self._variables, **variables})
        except Exception as error:  # a template may fail in any way
            raise DataError(f"the chat template refuses the conversation: {error}") from None

    def added(self, text: str) -> list[Written]:
        """Split text that the template adds into tokens and text."""
        parts = self._tokens.split(text) if self._tokens else [text]
        return [Written(part, bool(n % 2), False) for n, part in enumerate(parts) if part]

    def ending(self, text: str) -> list[Written]:
        """Split the text after an answer; it is learnt up to the first token."""
        pieces = self.added(text)
        end = next((n for n, piece in enumerate(pieces) if piece.token), None)
        if end is None or any(piece.text.strip() for piece in pieces[:end]):
            raise DataError(_ENDLESS)
        return [piece._replace(learn=n <= end) for n, piece in enumerate(pieces)]


class _Talk:
    """A conversation and a template that looks into its answers."""

    def __init__(self, template: ChatTemplate, turns: Sequence[Turn], variables: Mapping[str, Any]) -> None:
        self.template, self.turns, self.variables = template, turns, variables

    def rendered(self, texts: Sequence[str] | None = None) -> str:
        """Render the whole conversation, optionally with other texts in its turns."""
        turns = self.turns if texts is None else [replace(t, text=s) for t, s in zip(self.turns, texts, strict=True)]
        return self.up_to(turns)

    def up_to(self, turns: Sequence[Turn], prompt: bool = False) -> str:
        """Render turns as the start of a conversation, with the prompt for the next answer if ``prompt``."""
        return self.template.rendered(turns, **self.variables, add_generation_prompt=prompt)

    def check_extra(self) -> None:
        """Refuse variables and keys of turns that the template does not write."""
        for key, value in self.variables.items():
            rest = {name: other for name, other in self.variables.items() if name != key}
            if self._gives(self.rendered(), self.turns, rest):
                raise DataError(f"has '{key}', which {_UNWRITTEN}")
            self._check_text(f"'{key}'", value)
        for number, turn in enumerate(self.turns):
            for key in SAID:
                if key not in turn.extra or (key == "name" and turn.role == "tool"):  # it names the function
                    continue
                before = self.turns[:number]
                if self._gives(self.up_to([*before, turn]), [*before, _without(turn, key)], self.variables):
                    raise DataError(f"turn {number + 1} ({turn.role}) has '{key}', which {_UNWRITTEN}")
                self._check_text(f"turn {number + 1} ({turn.role}), '{key}',", turn.extra[key])

    def _check_text(self, what: str, value: Any) -> None:
        for text in texts_of(value):
            if self.template.looks_special(text):
                raise DataError(f"{what} holds what the tokenizer takes for a special token: {text[:80]!r}; change it")

    def by_prompts(self) -> Conversed:
        """Write the conversation, locating each answer after the prompt for it."""
        for number, turn in enumerate(self.turns):
            self._check_text(f"turn {number + 1} ({turn.role}), which the chat template changes,", turn.text)
        whole = self.rendered()
        learnt = [number for number, turn in enumerate(self.turns) if turn.role == "gpt" and turn.learnt]
        spans = [self._span(number, whole) for number in learnt]
        if spans and spans[-1] is None:
            raise DataError(
                f"the chat template changes turn {learnt[-1] + 1}, the last that is to be learnt, for what is in it or"
                " follows it, such as reasoning in <think>; write turns as the template leaves them, or take one that"
                " does not"
            )
        pieces, end = list[Written](), 0
        for first, last in filter(None, spans):
            pieces += self.template.added(whole[end:first])
            pieces += [piece._replace(learn=True) for piece in self.template.added(whole[first:last])]
            end = last
        return Conversed(_joined([*pieces, *self.template.added(whole[end:])]), spans.count(None))

    def _span(self, number: int, whole: str) -> tuple[int, int] | None:
        """Return the span of an answer and its end token; None if the template leaves out words of the answer.

        For example, with the turns ``2+2?`` and ``4``::

            <user>2+2?<end>                    the turns before
            <user>2+2?<end><assistant>         with the prompt for the answer
            <user>2+2?<end><assistant>4<end>   the whole, of which 4<end> is learnt
        """
        turn = self.turns[number]
        keys = [key for key in SAID if key in turn.extra]
        if _solid(turn.text) not in _solid(whole):  # the usual case, decided without rendering again
            return None
        try:
            before = self.up_to(self.turns[:number]) if number else ""
            prompted = self.up_to(self.turns[:number], prompt=True) if number else ""
            head, rest = self._around(number, before, whole)
        except DataError:
            return None
        last = len(whole) - len(rest)
        if not (whole.startswith(before) and whole.endswith(rest) and len(before) <= last):
            return None
        if not keys and whole.startswith(head) and whole[len(head) : last].strip() == turn.text.strip():
            first = len(head)
        else:
            prompt = prompted if prompted != before else head
            pairs = enumerate(zip(prompt, whole, strict=False))
            first = next((place for place, (one, two) in pairs if one != two), len(prompt))
        if _solid(turn.text) not in _solid(whole[len(before) : last]):
            return None
        if any(self._gives(whole, self._with(number, _without(turn, key)), self.variables) for key in keys):
            return None
        return first, last + sum(len(piece.text) for piece in self.template.ending(rest) if piece.learn)

    def _around(self, number: int, before: str, whole: str) -> tuple[str, str]:
        """Return the text before an answer, and the text after it, beginning with the token that ends it.

        Raises:
            DataError: the template refuses another answer in its place, and changes this one once turns follow.
        """
        turn = self.turns[number]
        plain = replace(turn, text="\ue000", extra={k: v for k, v in turn.extra.items() if k not in SAID})
        try:
            other = self.up_to(self._with(number, plain))
        except DataError:  # such as an answer without its function call, twice in turn
            after = self.up_to(self.turns[: number + 1]).rstrip()
            tokens = [piece.text for piece in self.template.added(after[len(before) :])]
            if not tokens or not whole.startswith(after):
                raise
            return before, whole[len(after) - len(tokens[-1]) :]
        head, _, rest = other.partition("\ue000")
        return head, rest

    def _with(self, number: int, turn: Turn) -> list[Turn]:
        """Return all turns with turn ``number`` replaced."""
        return [*self.turns[:number], turn, *self.turns[number + 1 :]]

    def _gives(self, text: str, turns: Sequence[Turn], variables: Mapping[str, Any]) -> bool:
        """Return whether the template renders some turns as ``text``; False if it refuses them."""
        try:
            return self.template.rendered(turns, **variables) == text
        except DataError:
            return False


def _without(turn: Turn, key: str) -> Turn:
    return replace(turn, extra={name: value for name, value in turn.extra.items() if name != key})


def read_template(chat_template: str, folder: Path) -> str:
    """Return the text of a template.

    Args:
        chat_template: ``auto`` for the tokenizer's own, in ``chat_template.jinja``, ``chat_template.json`` or
            ``tokenizer_config.json``; else a file.
        folder: folder of the tokenizer.
    """
    file = folder / "chat_template.jinja" if chat_template == "auto" else Path(chat_template)
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if chat_template != "auto":
        raise ConfigError(f"chat_template: {file} is missing; give a Jinja file, or auto for the tokenizer's own")
    config = folder / "tokenizer_config.json"
    template = read_json(folder / "chat_template.json").get("chat_template") or read_json(config).get("chat_template")
    if isinstance(template, list):  # several templates by name
        template = {one["name"]: one["template"] for one in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"chat_template: neither {file} nor {config} has one; name a Jinja file, or leave chat_template out"
        )
    return template


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from the tokenizer's folder; return an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenizer: {path} is not JSON: {error}") from None
    return content


def _joined(pieces: Sequence[Written]) -> list[Written]:
    """Join texts that follow each other, because a whole conversation is tokenised that way."""
    joined: list[Written] = []
    for piece in pieces:
        if joined and not (piece.token or joined[-1].token) and piece.learn == joined[-1].learn:
            joined[-1] = piece._replace(text=joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def _between(written: str, texts: Sequence[str], usual: Sequence[str]) -> list[str] | None:
    """Return the text before, between and after the texts of a conversation's turns.

    Args:
        usual: the text there if the template does not look into the turns. A turn's text is searched for only if it
            does not follow this text: a short text may also occur in words of the template.

    Returns:
        None: the conversation lacks one of the texts.
    """
    between, end = [], 0
    for text, words in zip(texts, usual[:-1], strict=True):
        at = end + len(words) if written.startswith(words + text, end) else written.find(text, end)
        if at < 0:
            return None
        between.append(written[end:at])
        end = at + len(text)
    return [*between, written[end:]]


def _solid(text: str) -> str:
    """Return a text without its blanks."""
    return "".join(text.split())


def _any_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if tokens else None


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON as transformers does: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
