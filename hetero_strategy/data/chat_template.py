"""Chat templates of Hugging Face tokenizers: which text stands around the turns of a conversation.

A template is rendered with a mark in place of each turn's text, so what it adds is told from what the turns say:
special tokens in the former are tokens, in the latter they are text. The loss is on an answer and on the token that the
template writes behind it, with which an instruct model ends its turn. What it writes around the true texts is compared.

A template may look into answers: those of reasoning models take the reasoning out of earlier ones, and calls of
functions are written in words of the template. Then an answer is what stands between the prompt for it and what would
follow any other answer. Earlier ones that the template shortens, or whose prompt differs, are not learnt.
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
"""What templates call the roles of a manifest."""
DAY = datetime(2024, 7, 26)
"""On which every template is written: token ids may not follow from the day on which a data set is indexed."""
_SPACE = "\u2003"  # one that no template writes, and that is missing where a template trims
_MARK = re.compile(f"({_SPACE}?)\ue000(\\d+)\ue001({_SPACE}?)")
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
    """Whether it is a token of its own that the template adds, and not text."""
    learn: bool
    """Whether it is to be predicted."""


class Conversed(NamedTuple):
    """A conversation as it is written."""

    pieces: list[Written]
    unlearnt: int
    """Answers that are to be learnt and are not, as the template takes text out of them."""


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

    def written(self, turns: Sequence[Turn], variables: Mapping[str, Any] | None = None) -> Conversed:
        """Return the conversation as the template writes it.

        Args:
            variables: values beside the turns that the template reads, such as ``tools``.

        Raises:
            DataError: the template refuses it, leaves a turn or a variable out, repeats a turn, changes the last
                answer, or lets an answer end without a special token.
        """
        talk = _Talk(self, turns, variables or {})
        talk.check_extra()
        marks = [f"{_SPACE}\ue000{number}\ue001{_SPACE}" if turn.text else "" for number, turn in enumerate(turns)]
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
        said = [turn for turn in turns if turn.text]
        kept = [turn.text if space else turn.text.lstrip() for turn, space in zip(said, around[1::4], strict=True)]
        kept = [text if space else text.rstrip() for text, space in zip(kept, around[3::4], strict=True)]
        written, pieces = talk.rendered(), self._pieces(said, kept, around[::4])
        if "".join(piece.text for piece in pieces) != written:  # other words around a turn for what is in it
            texts = [turn.text for turn in said]
            between = _between(written, texts, around[::4])
            if between is None:
                return talk.by_prompts()
            pieces = self._pieces(said, texts, between)
        return Conversed(_joined(pieces), 0)

    def _pieces(self, turns: Sequence[Turn], texts: Sequence[str], between: Sequence[str]) -> list[Written]:
        pieces = self.added(between[0])
        for turn, text, rest in zip(turns, texts, between[1:], strict=True):
            learn = turn.role == "gpt" and turn.learnt
            pieces.append(Written(text, False, learn))
            pieces += self.ending(rest) if learn else self.added(rest)
        return pieces

    def looks_special(self, text: str) -> bool:
        """Whether it holds what would be a special token."""
        return self._specials is not None and self._specials.search(text) is not None

    def _takes_text(self) -> bool:
        """Whether contents are texts. Else, as in templates for pictures, they are lists of parts."""
        try:
            return "\ue000" in self.rendered([Turn("human", "\ue000"), Turn("gpt", "1")])
        except DataError:
            return False

    def rendered(self, turns: Sequence[Turn], **variables: Any) -> str:
        """Return the text that the template makes of some turns."""
        messages = [
            {
                **turn.extra,
                "role": ROLES.get(turn.role, turn.role),
                "content": [{"type": "text", "text": turn.text}] if self._lists else turn.text,
            }
            for turn in turns
        ]
        try:
            return self._template.render(messages=messages, **{**self._variables, **variables})
        except Exception as error:  # a template may fail in any way
            raise DataError(f"the chat template refuses the conversation: {error}") from None

    def added(self, text: str) -> list[Written]:
        """What the template adds, tokens apart."""
        parts = self._tokens.split(text) if self._tokens else [text]
        return [Written(part, bool(n % 2), False) for n, part in enumerate(parts) if part]

    def ending(self, text: str) -> list[Written]:
        """What follows an answer: up to the first token it is learnt."""
        pieces = self.added(text)
        end = next((n for n, piece in enumerate(pieces) if piece.token), None)
        if end is None or any(piece.text.strip() for piece in pieces[:end]):
            raise DataError(_ENDLESS)
        return [piece._replace(learn=n <= end) for n, piece in enumerate(pieces)]


class _Talk:
    """One conversation and a template that looks into its answers."""

    def __init__(self, template: ChatTemplate, turns: Sequence[Turn], variables: Mapping[str, Any]) -> None:
        self.template, self.turns, self.variables = template, turns, variables

    def rendered(self, texts: Sequence[str] | None = None) -> str:
        """Return the whole conversation, or with other texts in its turns."""
        turns = self.turns if texts is None else [replace(t, text=s) for t, s in zip(self.turns, texts, strict=True)]
        return self.up_to(turns)

    def up_to(self, turns: Sequence[Turn], prompt: bool = False) -> str:
        """Return some turns as they begin a conversation, with the prompt for the next answer if so wanted."""
        return self.template.rendered(turns, **self.variables, add_generation_prompt=prompt)

    def check_extra(self) -> None:
        """Refuse what is said beside the texts where the template does not write it.

        Raises:
            DataError: naming the key, and the turn that has it.
        """
        for key, value in self.variables.items():
            rest = {name: other for name, other in self.variables.items() if name != key}
            if self._gives(self.rendered(), self.turns, rest):
                raise DataError(f"has '{key}', which {_UNWRITTEN}")
            self._check_text(f"'{key}'", value)
        for number, turn in enumerate(self.turns):
            for key in SAID:
                if key not in turn.extra or (key == "name" and turn.role == "tool"):  # which says whose answer it is
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
        """Return the conversation with answers found by what the prompts before them leave.

        Raises:
            DataError: the template changes the last answer that is to be learnt, so that none would be.
        """
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
        """First and last character of an answer with the token that ends it; None: the template leaves words of it out.

        For example, with the turns ``2+2?`` and ``4``::

            <user>2+2?<end>                    the turns before
            <user>2+2?<end><assistant>         with the prompt for the answer
            <user>2+2?<end><assistant>4<end>   the whole, of which 4<end> is learnt
        """
        turn = self.turns[number]
        said = [key for key in SAID if key in turn.extra]
        if _solid(turn.text) not in _solid(whole):  # the usual case, told without writing anything again
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
        if not said and whole.startswith(head) and whole[len(head) : last].strip() == turn.text.strip():
            first = len(head)
        else:
            prompt = prompted if prompted != before else head
            pairs = enumerate(zip(prompt, whole, strict=False))
            first = next((place for place, (one, two) in pairs if one != two), len(prompt))
        if _solid(turn.text) not in _solid(whole[len(before) : last]):
            return None
        if any(self._gives(whole, self._with(number, _without(turn, key)), self.variables) for key in said):
            return None
        return first, last + sum(len(piece.text) for piece in self.template.ending(rest) if piece.learn)

    def _around(self, number: int, before: str, whole: str) -> tuple[str, str]:
        """What stands before any text of an answer, and what follows this one, beginning with the token that ends it.

        Raises:
            DataError: the template refuses another answer in its place, and changes it later.
        """
        turn = self.turns[number]
        plain = replace(turn, text="\ue000", extra={k: v for k, v in turn.extra.items() if k not in SAID})
        try:
            other = self.up_to(self._with(number, plain))
        except DataError:  # as an answer without its call of a function would come twice in turn
            after = self.up_to(self.turns[: number + 1]).rstrip()
            tokens = [piece.text for piece in self.template.added(after[len(before) :])]
            if not tokens or not whole.startswith(after):
                raise
            return before, whole[len(after) - len(tokens[-1]) :]
        head, _, rest = other.partition("\ue000")
        return head, rest

    def _with(self, number: int, turn: Turn) -> list[Turn]:
        """All turns, one of them another."""
        return [*self.turns[:number], turn, *self.turns[number + 1 :]]

    def _gives(self, text: str, turns: Sequence[Turn], variables: Mapping[str, Any]) -> bool:
        """Whether the template makes a text of some turns; where it refuses them, it does not."""
        try:
            return self.template.rendered(turns, **variables) == text
        except DataError:
            return False


def _without(turn: Turn, key: str) -> Turn:
    return replace(turn, extra={name: value for name, value in turn.extra.items() if name != key})


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


def _between(written: str, texts: Sequence[str], usual: Sequence[str]) -> list[str] | None:
    """What a conversation has before, between and behind these texts of its turns.

    Args:
        usual: what it has there where the template knows nothing of the texts. Only where something else stands before
            a text is that searched for: short ones may also be found in words of the template.

    Returns:
        None: one of them is not in it.
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
    """A text without its blanks."""
    return "".join(text.split())


def _any_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if tokens else None


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers writes it: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
