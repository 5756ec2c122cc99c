"""Conversations to token ids and loss masks.

Template, the same for every model::

    <bos>{human}\\n{gpt}<eos>\\n{human}\\n{gpt}<eos>

A ``system`` turn is written like a human one. Every turn but the last is followed by a newline, a ``gpt`` turn first
by ``<eos>``. The loss is on the text of ``gpt`` turns and their ``<eos>``, nothing else. Each piece of text between
special tokens is tokenised on its own, so the mask is exact for any tokenizer. Text that merely looks like a special
token is tokenised as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from hetero_strategy.data.manifest import Turn, placeholder
from hetero_strategy.errors import ConfigError

USUAL = {
    "bos": ("<bos>", "<s>", "<|begin_of_text|>"),
    "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"),
}
"""Names that a special token has where no file beside the tokenizer says which it is; the first in the vocabulary."""


class Encoded(NamedTuple):
    """One tokenised sample of T tokens."""

    ids: np.ndarray
    """int32 [T], every item expanded to as many placeholder ids as it has rows."""
    loss: np.ndarray
    """bool [T], True where the token itself is to be predicted; the first token never is."""
    starts: dict[str, np.ndarray]
    """Media field -> int64 [items], place of each item's first row."""


class ChatTokenizer:
    """A Hugging Face ``tokenizer.json`` and the template above.

    Args:
        path: the ``tokenizer.json``, or the folder it lies in.
        bos: token at the start of every sample; None for tokenizers that have none. ``auto``: what
            ``tokenizer_config.json`` or ``special_tokens_map.json`` beside it say, else a usual name (:data:`USUAL`),
            else none.
        eos: token that ends every answer; ``auto``: found in the same way.
        placeholders: media field -> token that fills the rows of an item; default ``<field>``, such as ``<image>``.

    Raises:
        ConfigError: a file is missing or unreadable, or a special token is not in it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        bos: str | None = "auto",
        eos: str = "auto",
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        path = Path(path)
        self.path = path / "tokenizer.json" if path.is_dir() else path
        if not self.path.is_file():
            raise ConfigError(f"tokenizer: {self.path} is missing; give a tokenizer.json or the folder that holds it")
        try:
            self.tokenizer = Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"tokenizer: {self.path} cannot be read: {error}") from None
        self.tokenizer.encode_special_tokens = True
        self.bos = self._found("bos") if bos == "auto" else bos
        self.eos = self._found("eos") if eos == "auto" else eos
        self._placeholders = dict(placeholders or {})
        self.bos_id = None if self.bos is None else self._special("bos", self.bos)
        self.eos_id = self._special("eos", USUAL["eos"][0] if self.eos is None else self.eos)
        self._ends = {"bos": [] if self.bos_id is None else [self.bos_id], "eos": [self.eos_id]}

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included: what the LLM's embedding must hold."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def settings(self) -> dict[str, object]:
        """What, besides the file's bytes, decides the ids; part of the index's key."""
        return {"bos": self.bos, "eos": self.eos, "placeholders": self._placeholders}

    def placeholder_id(self, media_field: str, *, seen: bool = False) -> int:
        """Token id that fills the rows of the field's items.

        Args:
            seen: the language model sees the token itself, as it does where something is to be drawn. Otherwise an
                encoder's rows take its place, any id will do, and a vocabulary without ``<field>`` gives that of eos.

        Raises:
            ConfigError: the token is not in the vocabulary.
        """
        token = self._placeholders.get(media_field, placeholder(media_field))
        if not seen and media_field not in self._placeholders and self.tokenizer.token_to_id(token) is None:
            return self.eos_id
        return self._special(f"placeholders['{media_field}']", token)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of some ids, special tokens left out."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode(self, turns: Sequence[Turn], rows: Mapping[str, Sequence[int]]) -> Encoded:
        """One conversation; see :meth:`encode_batch`."""
        return self.encode_batch([turns], [rows])[0]

    def encode_batch(
        self, conversations: Sequence[Sequence[Turn]], rows: Sequence[Mapping[str, Sequence[int]]]
    ) -> list[Encoded]:
        """Tokenise conversations.

        Args:
            conversations: the turns of each sample, as many placeholders of a field as ``rows`` has counts.
            rows: per sample, media field -> rows of each of its items, in placeholder order.
        """
        parts = [self._parts(turns, fields) for turns, fields in zip(conversations, rows, strict=True)]
        texts = [text for sample in parts for kind, text, _ in sample if kind == "text"]
        encodings = iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))
        encoded = []
        for sample, fields in zip(parts, rows, strict=True):
            ids: list[int] = []
            loss: list[bool] = []
            starts: dict[str, list[int]] = {name: [] for name in fields}
            for kind, value, learn in sample:
                if kind == "text":
                    new = next(encodings).ids
                elif kind in self._ends:
                    new = self._ends[kind]
                else:
                    new = [self.placeholder_id(value)] * int(fields[value][len(starts[value])])
                    starts[value].append(len(ids))
                ids += new
                loss += [learn] * len(new)
            mask = np.array(loss, bool)
            mask[:1] = False  # nothing comes before the first token, so nothing can predict it
            places = {name: np.array(start, np.int64) for name, start in starts.items()}
            encoded.append(Encoded(np.array(ids, np.int32), mask, places))
        return encoded

    def _parts(self, turns: Sequence[Turn], fields: Mapping[str, Sequence[int]]) -> list[tuple[str, str, bool]]:
        """(``text``, ``bos``, ``eos`` or ``item``; text or field; whether it is learnt) in order."""
        marks = {placeholder(name): name for name in fields}
        pattern = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
        parts = [("bos", "", False)]
        for number, turn in enumerate(turns):
            learn = turn.role == "gpt"
            newline = "\n" if number + 1 < len(turns) else ""
            text = turn.text if learn else turn.text + newline
            for piece in pattern.split(text) if pattern else [text]:
                if piece in marks:
                    parts.append(("item", marks[piece], False))
                elif piece:
                    parts.append(("text", piece, learn))
            if learn:
                parts.append(("eos", "", True))
                if newline:
                    parts.append(("text", newline, False))
        return parts

    def _found(self, name: str) -> str | None:
        """The token that a stock tokenizer has for ``bos`` or ``eos``; None: it has none."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            said = _read(self.path.with_name(file))
            if name == "bos" and said.get("add_bos_token") is False:
                return None
            token = said.get(f"{name}_token")
            if token or (name == "bos" and "bos_token" in said):  # null: a tokenizer may have no bos, but needs an eos
                return token["content"] if isinstance(token, dict) else token
        return next((token for token in USUAL[name] if self.tokenizer.token_to_id(token) is not None), None)

    def _special(self, option: str, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            known = [t.content for _, t in sorted(self.tokenizer.get_added_tokens_decoder().items()) if t.special]
            raise ConfigError(
                f"tokenizer: {self.path} has no token {token!r} ({option}); name one of its special tokens"
                f" ({', '.join(known[:12]) or 'none'}) or add it with Tokenizer.add_special_tokens and save"
            )
        return int(found)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object beside the tokenizer; nothing where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenizer: {path} is not JSON: {error}") from None
    return content
