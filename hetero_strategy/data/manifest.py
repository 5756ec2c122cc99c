"""Manifests: what a data set holds, in LLaVA's JSON format. Pure Python.

A manifest is a JSON list, or JSON lines (``.jsonl``), of samples::

    {"id": "42", "image": ["a.png", "b.png"], "audio": "c.wav",
     "conversations": [{"from": "human", "value": "<image> and <image> with <audio>?"},
                       {"from": "gpt", "value": "..."}]}

Paths are relative to their manifest's folder or to a given media folder. The n-th ``<image>`` of the conversation
stands for the n-th path of ``image``, and likewise for every other field. What encoders read stands in questions, and
what a generator is to make stands in answers: ``"draw": "d.png"`` and ``{"from": "gpt", "value": "Here: <draw>"}``. The
format is that of LLaVA's training code (Liu et al. 2023). A data set is one manifest or several.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hetero_strategy.data.faults import FaultySample
from hetero_strategy.errors import ConfigError, DataError

ROLES = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt", "system": "system"}
"""Role names in manifests -> the three roles."""

MEDIA_FIELDS = ("image", "audio", "video", "draw")
"""Fields that hold media by convention. Where no module reads them they are refused, not ignored."""

ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that editors and shells of Windows put before it."""

PathLike = str | Path

SHOWN = 10
"""Faults that one error names."""


def placeholder(media_field: str) -> str:
    """The text that stands for one item of a field: ``<image>`` for ``image``."""
    return f"<{media_field}>"


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation."""

    role: str
    """``human``, ``gpt`` or ``system``."""
    text: str


@dataclass(frozen=True)
class Sample:
    """One sample of a manifest; its media are named, not opened."""

    position: tuple[int, int]
    """Number of its manifest, and of its line or list entry in it, from 0."""
    id: str
    turns: tuple[Turn, ...]
    items: Mapping[str, tuple[str, ...]]
    """Media field -> paths, in placeholder order."""


@dataclass
class Faults:
    """Faults of the manifests of a data set, collected to be reported in one error."""

    manifests: Sequence[Path]
    messages: list[FaultySample] = field(default_factory=list)
    left_out: int = 0
    """Number of samples left out because they hold media that the caller excludes."""

    def add(self, position: tuple[int, int], message: str, **more: Any) -> None:
        """Note one fault of the sample at a position; ``more``: other fields of a :class:`FaultySample`."""
        self.messages.append(FaultySample(position, message, **more))

    def check(self, listed: str = "") -> None:
        """Raise one DataError with the first faults in the order of the manifests, if there are any.

        Args:
            listed: where all of them are listed, in words.
        """
        if not self.messages:
            return
        count = len(self.messages)
        several = len({fault.position[0] for fault in self.messages}) > 1
        first = sorted(self.messages, key=lambda fault: fault.position)[:SHOWN]
        lines = [f"{self.manifests[f.position[0]]}: {f.message}" if several else f.message for f in first]
        if count > SHOWN:
            lines.append(f"... and {count - SHOWN} more")
        if listed:
            lines.append(listed)
        text = "\n  ".join([f"{count} fault{'s' * (count > 1)}; fix or remove these samples:", *lines])
        where = "several manifests" if several else self.manifests[first[0].position[0]]
        raise DataError(f"{where}: {text}")


def manifest_paths(name: str, given: PathLike | Sequence[PathLike] | None) -> tuple[Path, ...]:
    """Manifests of an option that takes one or a list of them; None: none.

    Raises:
        ConfigError: it is neither, or an empty list.
    """
    if given is None:
        return ()
    paths = [given] if isinstance(given, str | os.PathLike) else given
    if not (isinstance(paths, Sequence) and paths and all(isinstance(path, str | os.PathLike) for path in paths)):
        raise ConfigError(f"{name} is {given!r}; give a manifest (.json or .jsonl), or a list of manifests")
    return tuple(map(Path, paths))


def parse_manifests(
    faults: Faults,
    fields: Sequence[str],
    answers: bool,
    *,
    folders: Sequence[str] | None = None,
    drawn: Sequence[str] = (),
    leave_out: Sequence[str] = (),
) -> list[Sample]:
    """Parse manifests, one after another, without touching a media file.

    Args:
        faults: names the manifests, and takes the faults of samples that have any.
        fields: media fields that have an encoder or a generator.
        answers: whether every sample must have a non-empty answer.
        folders: of each manifest, put before its media's paths unless they are absolute; None: paths are as written.
        drawn: those of ``fields`` that have a generator.
        leave_out: media fields; samples that hold one are left out.

    Returns:
        The samples without a fault.

    Raises:
        DataError: a manifest itself cannot be read or holds no samples, or all samples are left out.
    """
    samples: list[Sample] = []
    for number, path in enumerate(faults.manifests):
        before, left_out = len(samples), faults.left_out
        samples += _parse(number, path, folders[number] if folders else "", fields, answers, faults, drawn, leave_out)
        if len(samples) == before and left_out == faults.left_out and not faults.messages:
            raise DataError(f"{path}: the manifest holds no samples; write at least one")
    if not samples and not faults.messages:
        names = ", ".join(map(str, faults.manifests))
        rest = f"without {', '.join(leave_out)}, and all others are left out; write at least one"
        raise DataError(f"{names}: no samples {rest}")
    return samples


def _parse(
    number: int,
    path: Path,
    folder: str,
    fields: Sequence[str],
    answers: bool,
    faults: Faults,
    drawn: Sequence[str],
    leave_out: Sequence[str],
) -> Iterator[Sample]:
    for line, entry in _entries(path, number, faults):
        position, problems = (number, line), list[str]()
        if not isinstance(entry, dict):
            faults.add(position, f"entry {line}: expected an object, found {type(entry).__name__}")
            continue
        if any(entry.get(name) for name in leave_out):
            faults.left_out += 1
            continue
        name = str(entry.get("id", line)).encode(errors="backslashreplace").decode()
        turns = _turns(entry.get("conversations"), answers, problems)
        if entry.get("system"):  # as ShareGPT's format has it; the language model would never see it
            problems.append('has \'system\', which nothing reads; make it the first turn: {"from": "system", ...}')
        items = _items(entry, turns, fields, drawn, problems)
        try:
            "".join((*(turn.text for turn in turns), *chain(*items.values()))).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            problems.append(f"holds half a character, the lone surrogate {half}; write the manifest as UTF-8 anew")
        for problem in problems:
            faults.add(position, f"sample '{name}': {problem}", sample=name)
        if not problems:
            yield Sample(position, name, turns, {f: tuple(os.path.join(folder, n) for n in items[f]) for f in items})


def _entries(path: Path, manifest: int, faults: Faults) -> Iterator[tuple[int, Any]]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding=ENCODING) as file:
                yield from _lines(file, manifest, faults)
            return
        entries = json.loads(path.read_text(encoding=ENCODING))
    except FileNotFoundError:
        raise DataError(f"{path}: manifest is missing; check the path, or write it first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: manifest cannot be read as UTF-8 text: {error}") from None
    except json.JSONDecodeError as error:
        hint = "; JSON lines need the ending .jsonl" if error.msg == "Extra data" else ""
        raise DataError(
            f"{path}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}{hint}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number too long, or brackets too deep
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(entries, list):
        raise DataError(f"{path}: expected a JSON list of samples, found {type(entries).__name__}")
    yield from enumerate(entries)


def _lines(file: Iterable[str], manifest: int, faults: Faults) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file):
        if line.strip():
            try:
                yield number, json.loads(line.rstrip("\n"))
            except json.JSONDecodeError as error:
                faults.add(
                    (manifest, number), f"line {number + 1}: not valid JSON: {error.msg} at column {error.colno}"
                )
            except (ValueError, RecursionError) as error:  # a number too long, or brackets too deep
                faults.add((manifest, number), f"line {number + 1}: cannot be read as JSON: {error}")


def _turns(conversations: Any, answers: bool, problems: list[str]) -> tuple[Turn, ...]:
    if not isinstance(conversations, list) or not conversations:
        problems.append("'conversations' must be a list of at least one turn")
        return ()
    turns = []
    for number, turn in enumerate(conversations):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("from", "value")):
            problems.append(f"turn {number} must be an object with the texts 'from' and 'value'")
            continue
        role = ROLES.get(turn["from"])
        if role is None:
            problems.append(f"turn {number} is from {turn['from']!r}; use one of {', '.join(ROLES)}")
            continue
        if role == "gpt" and answers and not turn["value"].strip():
            problems.append(f"turn {number}: the answer is empty, so there is nothing to learn")
        turns.append(Turn(role, turn["value"]))
    if answers and not problems and not any(turn.role == "gpt" for turn in turns):
        problems.append("no turn is from 'gpt', so there is nothing to learn")
    return tuple(turns)


def _items(
    entry: Mapping[str, Any], turns: Sequence[Turn], fields: Sequence[str], drawn: Sequence[str], problems: list[str]
) -> dict[str, tuple[str, ...]]:
    items = {}
    for media_field in MEDIA_FIELDS:
        if entry.get(several := f"{media_field}s") and several not in fields:
            problems.append(f"has '{several}', which nothing reads; call the field '{media_field}', which takes a list")
    for media_field in dict.fromkeys((*fields, *MEDIA_FIELDS)):
        value = entry.get(media_field)
        names = [] if value is None or value == "" else [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            problems.append(f"'{media_field}' must be a path or a list of paths, found {value!r}")
            continue
        if media_field not in fields:
            if names:
                reader = "no generator draws" if media_field == "draw" else "no encoder reads"
                problems.append(
                    f"has '{media_field}', which {reader}; give a processor for it, drop the field, or leave such"
                    f" samples out with leave_out=[{media_field}]"
                )
            continue
        mark = placeholder(media_field)
        marks = sum(turn.text.count(mark) for turn in turns)
        answered = {turn.role == "gpt" for turn in turns if mark in turn.text}
        if media_field in drawn and False in answered:
            problems.append(f"{mark} stands in a question; what a generator draws can only be part of answers")
        elif media_field not in drawn and True in answered:
            problems.append(f"{mark} stands in an answer; items can only be part of questions")
        elif marks != len(names):
            problems.append(f"{marks} {mark} in the conversation but {len(names)} paths in '{media_field}'")
        if names:
            items[media_field] = tuple(names)
    return items
