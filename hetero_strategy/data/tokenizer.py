"""Turn conversations into token ids and loss masks.

Without a chat template every model has the same form::

    <bos>{human}\\n{gpt}<eos>\\n{human}\\n{gpt}<eos>

A ``system`` turn is written like a human one. Every turn but the last is followed by a newline, a ``gpt`` turn first by
``<eos>``. The loss is on the text of ``gpt`` turns and their ``<eos>``, and on nothing else. Each piece of text between
special tokens is tokenised on its own, so the mask is exact for any tokenizer. Text that merely looks like a special
token is tokenised as text. Tokens that begin and end reasoning, such as ``<think>``, are the exception: they are part
of an answer.

With a chat template (:mod:`hetero_strategy.data.chat_template`) all text between two items is tokenised as a whole, and
the loss is on tokens with any character of an answer or its end. A conversation whose text looks like a special token
is tokenised in pieces, as above.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from hetero_strategy.data.chat_items import ItemTokens, check_plain, with_items, without_dropped
from hetero_strategy.data.chat_template import ChatTemplate, Conversed, Written, read_json, read_template
from hetero_strategy.data.conversation import MARKS, SAID, Turn, placeholder
from hetero_strategy.errors import ConfigError, DataError

USUAL = {
    "bos": ("<bos>", "<s>", "<|begin_of_text|>"),
    "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"),
}
"""Names tried for a special token, in this order, when no file next to the tokenizer names it."""

ELSEWHERE = ("bos_token", "eos_token", "pad_token")
"""Settings that may name a token outside the vocabulary: bos and eos are looked up elsewhere, pad is unused."""


THINKING = re.compile("think|thought|reason(ing)?[^a-z]", re.IGNORECASE)
"""Special tokens that stand around reasoning: ``<think>``, ``[THINK]``, ``<|START_THINKING|>`` and the like."""


Rows = int | Sequence[str | int]
"""Rows of an item; or what is written for it: texts and numbers of rows, in turn, of which a text is the last."""


class Encoded(NamedTuple):
    """A tokenised sample of T tokens."""

    ids: np.ndarray
    """Token ids, int32 ``[T]``; every item is expanded to as many placeholder ids as it has rows."""
    loss: np.ndarray
    """Whether each token is to be predicted, bool ``[T]``; the first one never is."""
    starts: dict[str, np.ndarray]
    """Media field -> position of each item's first row, int64 ``[items]``."""
    runs: dict[str, np.ndarray]
    """Media field -> runs of rows of its items: number of the item, position of the first row, rows; int64 ``[r, 3]``.
    """
    unlearnt: int = 0
    """Number of answers without a loss, because the chat template removes text from them."""


class ChatTokenizer:
    """A Hugging Face ``tokenizer.json``, with the form above or a chat template.

    Args:
        path: the ``tokenizer.json``, or its folder.
        bos: token at the start of every sample; None for tokenizers that have none. ``auto`` reads it from
            ``tokenizer_config.json`` or ``special_tokens_map.json`` in the same folder, else takes one of
            :data:`USUAL`, else none.
        eos: token that ends every answer; ``auto`` looks it up like bos.
        placeholders: media field -> token that fills the rows of an item; default ``<field>``, such as ``<image>``.
        chat_template: ``auto`` writes conversations with the chat template next to the tokenizer, a path with that
            Jinja file, None in the form above. A template writes bos and the token that ends an answer itself.

    Raises:
        ConfigError: a file is missing or unreadable, or a special token is not in the vocabulary; or, with a chat
            template, a file next to the tokenizer adds a token that the tokenizer lacks.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        bos: str | None = "auto",
        eos: str = "auto",
        placeholders: Mapping[str, str] | None = None,
        chat_template: str | Path | None = None,
    ) -> None:
        if not isinstance(path, str | PathLike):
            raise ConfigError(f"tokenizer={path!r}; give a tokenizer.json, or the folder it lies in")
        path = Path(path)
        self.path = path / "tokenizer.json" if path.is_dir() else path
        if not self.path.is_file():
            raise ConfigError(f"tokenizer: {self.path} is missing; give a tokenizer.json or the folder that holds it")
        try:
            self.tokenizer = _read(self.path)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"tokenizer: {self.path} cannot be read: {error}") from None
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()  # the saved file may have truncation and padding on
        self.tokenizer.no_padding()
        self.tokenizer.post_processor = None  # it adds special tokens, and may take blanks out of a token's span
        self.bos = self._stock_token("bos") if bos == "auto" else bos
        self.eos = eos if eos not in (None, "auto") else self._stock_token("eos") or USUAL["eos"][0]
        self._placeholders = dict(placeholders or {})
        self.bos_id = None if self.bos is None else self._special("bos", self.bos)
        self.eos_id = self._special("eos", self.eos)
        for field in self._placeholders:
            self.placeholder_id(field)
        names = sorted((t.content for t in self.tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True)
        self._specials = re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else "(?!)")
        self._template: ChatTemplate | None = None
        self._variables: dict[str, str] = {}
        self._added: list[int] = []
        self._before = ""
        if chat_template is not None:
            source = read_template(str(chat_template), self.path.parent)
            self._check_added()
            tokens = self.tokenizer.get_added_tokens_decoder()  # added blanks, as Gemma's newlines, are text
            tokens = {number: t for number, t in tokens.items() if t.content.replace("\u2581", " ").strip()}
            self._added = [*tokens]
            alone = (t.content for t in tokens.values() if not (t.rstrip or t.single_word or t.normalized))
            self._before = next(alone, "")  # stands in for an item, as text behind it does not begin the sample
            self._variables = self._named(bos, eos)
            named = {token.content: token.special for token in tokens.values()}
            self._template = ChatTemplate(source, named, self._variables)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, special tokens included, that the language model's embedding must hold."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def settings(self) -> dict[str, object]:
        """Return the settings that decide the ids besides the file's bytes; they are part of the index's key."""
        settings: dict[str, object] = {"bos": self.bos, "eos": self.eos, "placeholders": self._placeholders}
        if self._template is not None:
            settings |= {"chat_template": self._template.source, "variables": self._variables}
        return settings

    def placeholder_id(self, media_field: str, *, seen: bool = False) -> int:
        """Return the token id that fills the rows of the field's items.

        Args:
            seen: whether the language model sees the token itself, as it does for an image to draw. Otherwise an
                encoder's rows replace the token and any id will do: eos if the vocabulary has no ``<field>``.
        """
        token = self._placeholders.get(media_field, placeholder(media_field))
        if not seen and media_field not in self._placeholders and self.tokenizer.token_to_id(token) is None:
            return self.eos_id
        return self._special(f"placeholders['{media_field}']", token)

    def check_items(self, tokens: Mapping[str, ItemTokens], ids: Mapping[str, int]) -> None:
        """Refuse items whose row token this tokenizer does not have, or whose markers would be left out.

        Args:
            tokens: media field -> tokens of its items.
            ids: media field -> id of its row token in the folder of its processor.
        """
        for field, token in tokens.items():
            number = self.tokenizer.token_to_id(token.row)
            if number != ids[field]:
                raise ConfigError(
                    f"tokenizer: {self.path}: the processor of {field} fills rows with {token.row!r}, which is token"
                    f" {ids[field]} there and {'none' if number is None else number} here; use the tokenizer in the"
                    " processor's folder"
                )
        if self._template is None:
            check_plain(self.path.parent, tokens)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Turn ids back into text without special tokens."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_batch(
        self,
        conversations: Sequence[Sequence[Turn]],
        rows: Sequence[Mapping[str, Sequence[Rows]]],
        fault: Callable[[int, str], None] | None = None,
        variables: Sequence[Mapping[str, Any]] | None = None,
        tokens: Mapping[str, ItemTokens] | None = None,
    ) -> list[Encoded]:
        """Tokenise conversations.

        Args:
            conversations: turns of each sample, with as many items of a field as ``rows`` has counts.
            rows: for each sample, media field -> rows of each of its items, in their order.
            fault: called with the number of a conversation that cannot be written, and the reason; the conversation
                then has no tokens. None: raise the error.
            variables: for each sample, values besides its turns that the chat template reads, such as ``tools``.
            tokens: media field -> tokens of its items, besides those that ``placeholders`` names.

        Raises:
            ConfigError: the chat template writes markers around items of a field without tokens.
        """
        known = {field: ItemTokens(token, token, field) for field, token in self._placeholders.items()} | dict(
            tokens or {}
        )
        fills = {field: self._special(f"rows of {field}", token.row) for field, token in known.items()}
        parts, unlearnt = [], []
        for number, turns in enumerate(conversations):
            try:
                written = self._written(turns, variables[number] if variables else {}, known)
            except DataError as error:
                if fault is None:
                    raise
                fault(number, str(error))
                written = Conversed([], 0)
            parts.append(self._parts(written.pieces, rows[number]))
            unlearnt.append(written.unlearnt)
        texts = [text for sample in parts for kind, text, _ in sample if kind == "text"]
        encodings = self._encodings(texts)
        self.tokenizer.encode_special_tokens = False
        texts = [text for sample in parts for kind, text, _ in sample if kind == "whole"]
        wholes = self._encodings(texts)
        self.tokenizer.encode_special_tokens = True
        encoded = []
        for sample, fields, left in zip(parts, rows, unlearnt, strict=True):
            ids: list[int] = []
            loss: list[bool] = []
            starts: dict[str, list[int]] = {name: [] for name in fields}
            runs: dict[str, list[tuple[int, int, int]]] = {name: [] for name in fields}
            for place, (kind, value, learn) in enumerate(sample):
                if kind == "whole":
                    whole, first = next(wholes), int(place > 0 and self._before != "")
                    ids += whole.ids[first:]
                    loss += self._learnt(whole, value, learn)[first:]
                    continue
                if kind == "text":
                    new = next(encodings).ids
                elif kind == "token":
                    new = [self._special("special token", value)]
                else:
                    field, count, begins = value
                    new = [fills[field] if field in fills else self.placeholder_id(field)] * count
                    starts[field] += [len(ids)] * begins
                    runs[field].append((len(starts[field]) - 1, len(ids), count))
                ids += new
                loss += [learn] * len(new)
            mask = np.array(loss, bool)
            mask[:1] = False  # nothing comes before the first token, so nothing can predict it
            arrays = {name: np.array(start, np.int64) for name, start in starts.items()}
            tables = {name: np.array(run, np.int64).reshape(-1, 3) for name, run in runs.items()}
            encoded.append(Encoded(np.array(ids, np.int32), mask, arrays, tables, left))
        return encoded

    def _encodings(self, texts: Sequence[str]) -> Iterator[Encoding]:
        try:
            return iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"tokenizer: {self.path} cannot tokenise this data: {error}; give its model an unknown token that is in"
                " its vocabulary, such as WordLevel({'<unk>': 0, ...}, '<unk>')"
            ) from None

    def _written(
        self, turns: Sequence[Turn], variables: Mapping[str, Any], tokens: Mapping[str, ItemTokens]
    ) -> Conversed:
        if self._template is not None:
            written = self._template.written(with_items(self._template, turns, tokens, variables), variables)
            return written._replace(pieces=without_dropped(written.pieces))
        keys = [key for turn in turns for key in SAID if key in turn.extra] + [*variables]
        keys += [f"role {turn.role}" for turn in turns if turn.role == "tool"]
        if keys:
            raise DataError(
                f"has '{keys[0]}', which only a chat template can write; give chat_template=auto, or make it part of"
                " the texts"
            )
        return Conversed(self._plain(turns), 0)

    def _parts(self, pieces: Sequence[Written], rows: Mapping[str, Sequence[Rows]]) -> list[tuple[str, Any, Any]]:
        """Return pieces as triples (``text`` or ``token``; it; whether it is learnt), and a triple (``item``; field,
        rows and whether they are the item's first; False) for each run of an item's rows.

        If text is tokenised as a whole, (``whole``; the text with its tokens; spans of learnt characters) replaces
        texts and tokens.
        """
        parts: list[tuple[str, Any, Any]] = []
        rest = {field: iter(items) for field, items in rows.items()}
        for text, token, learn in pieces:
            for place, piece in enumerate(MARKS.split(text)):
                if place % 3 == 0 and piece:
                    parts.append(("token" if token else "text", piece, learn))
                elif place % 3 == 1 and piece is not None:
                    parts += self._item(piece, next(rest[piece]))
                elif place % 3 == 2 and piece is not None and self._template is not None:
                    parts.append(("token", self._template.token_of(piece), learn))
        if self._template is None or any(kind == "text" and self._template.looks_special(t) for kind, t, _ in parts):
            return parts
        return _as_wholes(parts, self._before)

    def _item(self, field: str, rows: Rows) -> Iterator[tuple[str, Any, bool]]:
        """Yield the parts of one item, which has a run even if that has no rows, as later items are counted by runs."""
        parts = ("", rows) if isinstance(rows, int | np.integer) else rows
        for place, part in enumerate((*parts, 0)[: max(2, len(parts))]):
            if place % 2:
                yield "item", (field, int(part), place == 1), False
                continue
            for number, piece in enumerate(self._specials.split(str(part))):
                if piece:
                    yield "token" if number % 2 else "text", piece, False

    def _learnt(self, encoding: Encoding, text: str, spans: Sequence[tuple[int, int]]) -> list[bool]:
        """Return whether each token has any character of the spans; an added token's blanks do not count."""
        counted = np.zeros((2, len(text) + 1), np.int64)
        for first, last in spans:
            counted[:, first + 1 : last + 1] = 1
        counted[1, 1:] *= [not character.isspace() for character in text]
        before = np.cumsum(counted, axis=1)
        ends = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        added = np.isin(encoding.ids, self._added).astype(np.int64)
        return (before[added, ends[:, 1]] > before[added, ends[:, 0]]).tolist()

    def _named(self, bos: str | None, eos: str) -> dict[str, str]:
        """Return the values of ``bos_token`` and the like for a chat template; arguments override the tokenizer's
        files.
        """
        named: dict[str, str] = {"bos_token": self.bos or "", "eos_token": self.eos}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            for name, token in read_json(self.path.with_name(file)).items():
                text = token.get("content") if isinstance(token, dict) else token
                if name.endswith("_token") and isinstance(text, str):
                    named[name] = text
        options = {"bos_token": bos or "", "eos_token": eos}
        return named | {name: token for name, token in options.items() if token != "auto"}

    def _check_added(self) -> None:
        """Refuse tokens that files next to the tokenizer add, as transformers does: here they would be text."""
        more: list[Any] = []
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            content = read_json(self.path.with_name(file))
            for field in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
                tokens = content.get(field) or []
                more += tokens.values() if isinstance(tokens, dict) else tokens
            named = (token for name, token in content.items() if name.endswith("_token") and name not in ELSEWHERE)
            more += [token for token in named if token and isinstance(token, str | dict)]
        names = [token["content"] if isinstance(token, dict) else token for token in more]
        names += read_json(self.path.with_name("added_tokens.json"))
        lost = [repr(name) for name in dict.fromkeys(names) if self.tokenizer.token_to_id(name) is None]
        if lost:
            raise ConfigError(
                f"tokenizer: {self.path} has no token {', '.join(lost[:12])}, which tokenizer_config.json,"
                " special_tokens_map.json or added_tokens.json beside it add; save the tokenizer anew with transformers"
            )

    def _plain(self, turns: Sequence[Turn]) -> list[Written]:
        """Write the conversation in the form that is the same for every model."""
        pieces = [] if self.bos is None else [Written(self.bos, True, False)]
        for number, turn in enumerate(turns):
            answer = turn.role == "gpt"
            newline = "\n" if number + 1 < len(turns) else ""
            pieces.append(Written(turn.text if answer else turn.text + newline, False, answer and turn.learnt))
            if answer:
                pieces += [Written(self.eos, True, turn.learnt), Written(newline, False, False)]
        return pieces

    def _stock_token(self, name: str) -> str | None:
        """Return the ``bos`` or ``eos`` token that the tokenizer's files or its vocabulary name, or None."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            content = read_json(self.path.with_name(file))
            if name == "bos" and content.get("add_bos_token") is False:
                return None
            token = content.get(f"{name}_token")
            if token or (name == "bos" and "bos_token" in content):  # null: no bos is fine, but eos is needed
                return token["content"] if isinstance(token, dict) else token
        return next((token for token in USUAL[name] if self.tokenizer.token_to_id(token) is not None), None)

    def _special(self, option: str, token: str) -> int:
        number = self.tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is None:
            known = [t.content for _, t in sorted(self.tokenizer.get_added_tokens_decoder().items()) if t.special]
            raise ConfigError(
                f"tokenizer: {self.path} has no token {token!r} ({option}); name one of its special tokens"
                f" ({', '.join(known[:12]) or 'none'}) or add it with Tokenizer.add_special_tokens and save"
            )
        return int(number)


def _read(path: Path) -> Tokenizer:
    """Read a tokenizer and make special tokens of reasoning ordinary ones, so that they are found in texts."""
    tokenizer = Tokenizer.from_file(str(path))
    if any(token.special and THINKING.search(token.content) for token in tokenizer.get_added_tokens_decoder().values()):
        content = json.loads(tokenizer.to_str())
        for token in content["added_tokens"]:
            token["special"] = token["special"] and not THINKING.search(token["content"])
        tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer


def _as_wholes(parts: Sequence[tuple[str, str, Any]], before: str) -> list[tuple[str, str, Any]]:
    """Join the pieces between two items into one; the token ``before`` precedes it if it follows an item."""
    wholes: list[tuple[str, str, Any]] = []
    for kind, value, learn in parts:
        if kind == "item":
            wholes.append((kind, value, learn))
            continue
        if not wholes or wholes[-1][0] == "item":
            wholes.append(("whole", before if wholes else "", []))
        _, text, spans = wholes[-1]
        wholes[-1] = ("whole", text + value, [*spans, (len(text), len(text) + len(value))] if learn else spans)
    return wholes
