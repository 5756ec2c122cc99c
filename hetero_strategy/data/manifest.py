"""Manifests: the samples of a data set. Pure Python, but for parquet and folders of the `datasets` library.

A manifest is a list of samples, in one of the files of :mod:`hetero_strategy.data.manifest_file`, in LLaVA's format::

    {"id": "42", "image": ["a.png", "b.png"], "audio": "c.wav",
     "conversations": [{"from": "human", "value": "<image> and <image> with <audio>?"},
                       {"from": "gpt", "value": "..."}]}

or with OpenAI's ``messages`` (:mod:`hetero_strategy.data.conversation`). Paths are relative to the folder in which the
manifest lies, or to a given media folder. The n-th ``<image>`` of the conversation stands for the n-th path of
``image``, and likewise for every other field. What encoders read stands in questions, and what a generator is to make
stands in answers: ``"draw": "d.png"`` and ``{"from": "gpt", "value": "Here: <draw>"}``. The format is that of LLaVA's
training code (Liu et al. 2023). A data set is one manifest or several.

Keys that change what is learnt are read, given to the chat template, or refused by name: see
:data:`~hetero_strategy.data.conversation.SAID`. All others, such as ``source`` or ``score``, are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hetero_strategy.data.conversation import SHOWN, Turn, holds, read_conversation, texts_of
from hetero_strategy.data.faults import FaultySample
from hetero_strategy.data.manifest_file import read_entries
from hetero_strategy.errors import ConfigError, DataError

PathLike = str | Path


@dataclass(frozen=True)
class Sample:
    """One sample of a manifest; its media are named, not opened."""

    position: tuple[int, int]
    """Number of its manifest, and of its line or list entry in it, from 0."""
    id: str
    turns: tuple[Turn, ...]
    items: Mapping[str, tuple[str, ...]]
    """Media field -> paths, in the order of the items in the turns."""
    variables: Mapping[str, Any]
    """``tools`` and other values that a chat template reads."""


@dataclass
class Faults:
    """Faults of the manifests of a data set, collected to be reported in one error."""

    manifests: Sequence[Path]
    messages: list[FaultySample] = field(default_factory=list)
    left_out: int = 0
    """Number of samples left out because they hold media that the caller excludes."""
    unlearnt: int = 0
    """Number of answers that are not learnt because the chat template shortens them in what follows."""

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
        kinds = ".json, .jsonl, .parquet or a folder of the datasets library"
        raise ConfigError(f"{name} is {given!r}; give a manifest ({kinds}), or a list of manifests")
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
    def fault(line: int, message: str) -> None:
        faults.add((number, line), message)

    for line, entry in read_entries(path, fault):
        position, problems = (number, line), list[str]()
        if not isinstance(entry, dict):
            faults.add(position, f"entry {line}: expected an object, found {type(entry).__name__}")
            continue
        if any(holds(entry, name) for name in leave_out):
            faults.left_out += 1
            continue
        name = str(line if entry.get("id") is None else entry["id"]).encode(errors="backslashreplace").decode()
        said = read_conversation(entry, fields, answers, drawn, problems)
        texts = (text for turn in said.turns for text in (turn.text, *texts_of(turn.extra)))
        try:
            "".join(chain(texts, texts_of(said.variables), *said.items.values())).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            problems.append(f"holds half a character, the lone surrogate {half}; write the manifest as UTF-8 anew")
        for problem in problems:
            faults.add(position, f"sample '{name}': {problem}", sample=name)
        if not problems:
            items = {f: tuple(os.path.join(folder, n) for n in names) for f, names in said.items.items()}
            yield Sample(position, name, said.turns, items, said.variables)
