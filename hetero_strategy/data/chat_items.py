"""Write what a chat template puts around and between the items of a turn: markers, new lines, names of pictures.

A template whose contents may be lists of parts has text of its own for ``{"type": "image"}``. A turn with items is
rendered with its parts, and with one mark in place of all of them; the difference is the text that the template makes
of the turn. For example, with Qwen2.5-VL's template, where M and N are marks::

    <image>What?                                                                  the turn, with one item
    <|im_start|>user\\nM<|im_end|>                                                 with one mark
    <|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>N<|im_end|>      with parts
    <|vision_start|><image><|vision_end|>What?                                    the text of the turn

Tokens that the template adds stay tokens; words of the turn that look like them stay text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, NamedTuple

from hetero_strategy.data.chat_template import SPACE, ChatTemplate, Written, read_template
from hetero_strategy.data.conversation import ITEM_MARK, Turn, item_mark, placeholder
from hetero_strategy.errors import ConfigError, DataError

_PART = re.compile(f"({SPACE}?)\ue000(\\d+)\ue001({SPACE}?)")
_ONE = "\ue002"
_DROP = "\ufdd4"
"""A mark that takes the character before it out: some templates write a blank before texts, but not before items."""


class ItemTokens(NamedTuple):
    """The tokens of the items of one media field."""

    written: str
    """Token that a chat template writes for an item, such as ``<|image_pad|>``."""
    row: str
    """Token that fills each of the item's rows."""
    kind: str
    """The ``type`` of the item's part in a turn, such as ``image``, whatever the manifest calls the field."""


def with_items(
    template: ChatTemplate, turns: Sequence[Turn], tokens: Mapping[str, ItemTokens], variables: Mapping[str, Any]
) -> list[Turn]:
    """Return turns whose items have around them what the template writes there.

    Args:
        tokens: media field -> its tokens.

    Raises:
        ConfigError: the template writes markers around an item of which no token is known.
        DataError: the template writes an item more than once or not at all, or changes texts around it.
    """
    filled = list(turns)
    for number, turn in enumerate(turns):
        fields = dict.fromkeys(ITEM_MARK.findall(turn.text))
        known = {field: tokens.get(field) or _usual(template, field) for field in fields}
        known = {field: token for field, token in known.items() if item_text(template, token.kind)}
        if known:
            others = [replace(t, text=f"\ue003{n}" if t.text else "") for n, t in enumerate(turns)]
            filled[number] = replace(turn, text=_written(template, others, number, turn, known, variables))
    return filled


def _usual(template: ChatTemplate, field: str) -> ItemTokens:
    """Return the tokens of a field of which nothing is said: ``<field>``, if the template writes that for an item."""
    usual, text = placeholder(field), item_text(template, field)
    if text and usual not in text:
        there = [piece.text for piece in template.added(text) if piece.token]
        raise ConfigError(
            f"the chat template writes {text!r} for an item of {field}, and nothing says which of these tokens stands"
            f" for its rows; name it: placeholders={{'{field}': TOKEN}} with {' or '.join(there) or 'a special token'}"
        )
    return ItemTokens(usual, usual, field)


def without_dropped(pieces: Sequence[Written]) -> list[Written]:
    """Take out the blanks that marks in turns' texts say are not written."""
    kept = list[Written]()
    for piece in pieces:
        text = piece.text
        while (at := text.find(_DROP)) >= 0:
            if at == 0:
                kept[-1] = kept[-1]._replace(text=kept[-1].text[:-1])
            text = text[: max(at - 1, 0)] + text[at + 1 :]
        kept.append(piece._replace(text=text))
    return kept


def item_text(template: ChatTemplate, kind: str) -> str:
    """Return the text that a template writes for an item of a kind; empty if it takes no lists, or no such parts."""
    if kind not in template.items:
        turns, text = [Turn("human", _ONE)], {"type": "text", "text": _ONE}
        try:
            alone, both = (template.rendered(turns, {0: parts}) for parts in ([text], [{"type": kind}, text]))
        except DataError:
            alone = both = ""
        before, token, after = alone.partition(_ONE)
        there = token and both != alone and both.count(_ONE) == 1
        first, last = _shared(before, both), _shared(after[::-1], both[::-1])
        template.items[kind] = both[first : len(both) - last].replace(_ONE, "") if there else ""
    return template.items[kind]


def _shared(one: str, two: str) -> int:
    """Return the number of characters with which both texts begin."""
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def check_plain(folder: Any, tokens: Mapping[str, ItemTokens]) -> None:
    """Refuse the form without a template if the folder's template writes markers around items, which it would miss."""
    if not tokens:
        return
    try:
        template = ChatTemplate(read_template("auto", folder), {}, {"bos_token": "", "eos_token": ""})
    except ConfigError:
        return
    for field, token in tokens.items():
        if (text := item_text(template, token.kind)).replace(token.written, "").strip():
            raise ConfigError(
                f"the chat template in {folder} writes {text!r} for an item of {field}, which the form without a"
                " template leaves out; give chat_template=auto"
            )


def _written(
    template: ChatTemplate,
    others: list[Turn],
    number: int,
    turn: Turn,
    tokens: Mapping[str, ItemTokens],
    variables: Mapping[str, Any],
) -> str:
    """Return the text that the template makes of one turn's parts."""
    content, texts = _parts(turn.text, tokens)
    one = template.rendered(_with(others, number, _ONE), **variables)
    parts = template.rendered(others, {number: content}, **variables)
    before, marker, after = one.partition(_ONE)
    blanks = len(before)
    while before[-1:].isspace() and not parts.startswith(before):
        before = before[:-1]
    blanks -= len(before)
    inside = parts[len(before) : len(parts) - len(after)]
    pieces = _PART.split(inside)
    known = marker and parts == before + inside + after and list(map(int, pieces[2::4])) == list(range(len(texts)))
    if not known:
        raise DataError(
            f"the chat template writes turn {number + 1} ({turn.role}) with items in another way than without; give it"
            " one text after its items"
        )
    spaces = zip(pieces[1::4], pieces[3::4], texts, strict=True)
    kept = [(text if left else text.lstrip(), right) for left, right, text in spaces]
    kept_texts = [text if right else text.rstrip() for text, right in kept]
    order = {token.written: _fields(turn.text, tokens, token.written) for token in tokens.values()}
    between = [_marked(template, piece, order) for piece in pieces[::4]]
    text = between[0] + "".join(a + b for a, b in zip(kept_texts, between[1:], strict=True))
    for field, token in tokens.items():
        wanted, there = turn.text.count(item_mark(field)), "".join(between).count(item_mark(field))
        if wanted != there:
            raise DataError(
                f"turn {number + 1} ({turn.role}) has {wanted} items of {field}, but the chat template writes"
                f" {token.written!r}, which stands for one, {there} times: {inside[:80]!r}"
            )
    text = _DROP * blanks + text
    if template.rendered(_with(others, number, text), **variables) != one.replace(_ONE, text):
        raise DataError(
            f"the chat template changes turn {number + 1} ({turn.role}), which has items; shorten its blanks"
        )
    return text


def _with(turns: Sequence[Turn], number: int, text: str) -> list[Turn]:
    return [replace(turn, text=text) if n == number else turn for n, turn in enumerate(turns)]


def _parts(text: str, tokens: Mapping[str, ItemTokens]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the content of a turn as parts, with a mark in place of each text, and the texts."""
    content, texts, joined = list[dict[str, str]](), list[str](), False
    for place, piece in enumerate(ITEM_MARK.split(text)):
        if place % 2 and piece in tokens:
            content.append({"type": tokens[piece].kind})
            joined = False
        elif words := item_mark(piece) if place % 2 else piece:
            if joined:
                texts[-1] += words
                continue
            content.append({"type": "text", "text": f"{SPACE}\ue000{len(texts)}\ue001{SPACE}"})
            texts.append(words)
            joined = True
    return content, texts


def _fields(text: str, tokens: Mapping[str, ItemTokens], written: str) -> Iterator[str]:
    """Yield the fields of a turn's items for which one token is written; the last again and again."""
    fields = [field for field in ITEM_MARK.findall(text) if field in tokens and tokens[field].written == written]
    return chain(fields, repeat(fields[-1]))


def _marked(template: ChatTemplate, text: str, fields: Mapping[str, Iterator[str]]) -> str:
    """Return text of the template with its items and its tokens as marks.

    Args:
        fields: token of an item -> fields of the items that it stands for, in their order.
    """
    marked = ""
    for place, piece in enumerate(re.split("(" + "|".join(map(re.escape, fields)) + ")", text)):
        if place % 2:
            marked += item_mark(next(fields[piece]))
        else:
            marked += "".join(template.token_mark(p.text) if p.token else p.text for p in template.added(piece))
    return marked
