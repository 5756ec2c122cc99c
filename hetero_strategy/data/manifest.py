"""Manifests: the samples of a data set, and the faults of samples that cannot be used.

A manifest is a list of samples. A JSON file, whatever its suffix, holds a list of samples or one sample in each line;
its content decides. A parquet file, a folder of parquet files and a folder of ``Dataset.save_to_disk`` have a sample in
each row, whose empty columns count as absent. A sample has LLaVA's format::

    {"id": "42", "image": ["a.png", "b.png"], "audio": "c.wav",
     "conversations": [{"from": "human", "value": "<image> and <image> with <audio>?"},
                       {"from": "gpt", "value": "..."}]}

or with OpenAI's ``messages`` (:mod:`hetero_strategy.data.conversation`). Paths are relative to the folder of the
manifest, or to a given media folder. The n-th ``<image>`` of the conversation stands for the n-th path of ``image``;
other fields work the same way. Files that encoders read stand in questions, and files that a generator learns to make
in answers: ``"draw": "d.png"`` and ``{"from": "gpt", "value": "Here: <draw>"}``. The format comes from LLaVA's training
code (Liu et al. 2023). A data set is one manifest or several.

Keys that change what is learnt are read, passed to the chat template, or raise an error that names them: see
:data:`~hetero_strategy.data.conversation.SAID`. All other keys, such as ``source`` or ``score``, are ignored.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hetero_strategy.data.conversation import SHOWN, Turn, holds, read_conversation, texts_of
from hetero_strategy.errors import ConfigError, DataError, require

PathLike = str | Path

ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that Windows editors and shells write."""

SPLITS = ("train", "val", "test", "dev", "eval")
"""First words of file or folder names that mark the splits of a data set."""

ARCHIVES = (".tar", ".tar.gz", ".tgz")

BATCH = 1024
"""Rows that are read at once."""

Fault = Callable[[int, str], None]
"""A callback with the number of a line and its fault."""


@dataclass(frozen=True)
class Sample:
    """A sample of a manifest; its media files are named, not opened."""

    position: tuple[int, int]
    """Number of its manifest, and of its line or list entry there, from 0."""
    id: str
    turns: tuple[Turn, ...]
    items: Mapping[str, tuple[str, ...]]
    """Media field -> paths, in the order of the items in the turns."""
    variables: Mapping[str, Any]
    """``tools`` and other values that a chat template reads."""


class FaultySample(NamedTuple):
    """A fault of one sample."""

    position: tuple[int, int]
    """Number of its manifest, and of its line or list entry there, from 0."""
    message: str
    sample: str | None = None
    """The sample's id; None if its entry has no readable id."""
    kind: str = "manifest"
    """A few words by which faults are counted."""
    file: str | None = None
    """The media file that is at fault, if any."""


@dataclass
class Faults:
    """A collection of faults in the manifests of a data set, to be reported in one error."""

    manifests: Sequence[Path]
    messages: list[FaultySample] = field(default_factory=list)
    left_out: int = 0
    """Number of samples left out because they contain media that the caller excludes."""
    unlearnt: int = 0
    """Number of answers without a loss, because the chat template shortens them once other turns follow."""

    def add(self, position: tuple[int, int], message: str, **more: Any) -> None:
        """Note one fault of the sample at ``position``; ``more``: other fields of a :class:`FaultySample`."""
        self.messages.append(FaultySample(position, message, **more))

    def check(self, listed: str = "") -> None:
        """Raise one DataError with the first faults in the order of the manifests, if there are any.

        Args:
            listed: place of the list of all faults, in words.
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
    """Return the manifests of an option that takes one or a list of them; none for None."""
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
        faults: collection that names the manifests and receives the samples' faults.
        fields: media fields that have an encoder or a generator.
        answers: whether every sample must have a non-empty answer.
        folders: folder of each manifest, put before relative media paths; None: paths stay as written.
        drawn: members of ``fields`` that have a generator.
        leave_out: media fields; samples with such media are left out.

    Returns:
        Samples without a fault.
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
        conversation = read_conversation(entry, fields, answers, drawn, problems)
        texts = (text for turn in conversation.turns for text in (turn.text, *texts_of(turn.extra)))
        try:
            "".join(chain(texts, texts_of(conversation.variables), *conversation.items.values())).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            problems.append(f"holds half a character, the lone surrogate {half}; write the manifest as UTF-8 anew")
        for problem in problems:
            faults.add(position, f"sample '{name}': {problem}", sample=name)
        if not problems:
            items = {f: tuple(os.path.join(folder, n) for n in names) for f, names in conversation.items.items()}
            yield Sample(position, name, conversation.turns, items, conversation.variables)


def read_entries(path: Path, fault: Fault) -> Iterator[tuple[int, Any]]:
    """Read the entries of a manifest unchanged, with the number of each entry, line or row."""
    if path.is_dir() or path.suffix.lower() == ".parquet":
        require("datasets", "datasets", f"{path}, parquet or a folder of the datasets library,")
        yield from enumerate(map(_without_empty, _rows(path)))
        return
    if path.name.lower().endswith(ARCHIVES):
        raise DataError(f"{path}: archives, as webdataset's, are not read; unpack it and list its samples in a .jsonl")
    try:
        yield from _json(path, fault)
    except FileNotFoundError:
        raise DataError(f"{path}: manifest is missing; check the path, or write it first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: manifest cannot be read as UTF-8 text: {error}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number too long, or brackets too deep
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None


def files_of(manifest: Path) -> list[Path]:
    """Return the files whose bytes are a manifest's content: the manifest, or the files of its folder that are read."""
    if not manifest.is_dir():
        return [manifest]
    saved = (file for file in manifest.iterdir() if file.suffix in (".arrow", ".json"))
    return sorted(manifest.rglob("*.parquet")) or sorted(saved)


def _json(path: Path, fault: Fault) -> Iterator[tuple[int, Any]]:
    with path.open(encoding=ENCODING) as file:
        first = next((line.strip() for line in file if line.strip()), "")
        if path.suffix.lower() != ".json" and not first.startswith("["):
            if first == "{":
                raise DataError(f"{path}: a sample has several lines; write each in one line, or all as a JSON list")
            file.seek(0)
            yield from _lines(file, fault)
            return
    text = path.read_text(encoding=ENCODING)
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data" or not first.startswith("{"):
            raise
        yield from _lines(text.split("\n"), fault)
        return
    if not isinstance(entries, list):
        raise DataError(f"{path}: expected a JSON list of samples, found {type(entries).__name__}")
    yield from enumerate(entries)


def _lines(file: Iterable[str], fault: Fault) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file):
        if line.strip():
            try:
                yield number, json.loads(line.rstrip("\n"))
            except json.JSONDecodeError as error:
                fault(number, f"line {number + 1}: not valid JSON: {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:  # a number too long, or brackets too deep
                fault(number, f"line {number + 1}: cannot be read as JSON: {error}")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a parquet file, of a folder of them, or of a folder of ``save_to_disk``; embedded files stay
    undecoded.
    """
    import datasets
    import pyarrow.parquet

    files = [file for file in files_of(path) if file.suffix.lower() == ".parquet"]
    names = [name for file in files for name in file.relative_to(path).parts]
    splits = sorted({word for name in names for word in SPLITS if name.startswith(word)})
    if len(splits) > 1:
        raise DataError(f"{path}: its files are of several splits, {', '.join(splits)}; give a list of files instead")
    try:
        for file in files:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(BATCH):
                yield from batch.to_pylist()
        if files:
            return
        saved = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise DataError(
            f"{path}: a folder without a parquet file that datasets.Dataset.save_to_disk has not written; give a"
            " manifest, such as a .json or .jsonl file"
        ) from None
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
        raise DataError(f"{path}: cannot be read: {error}") from None
    if isinstance(saved, datasets.DatasetDict):
        parts = ", ".join(str(path / split) for split in saved)
        raise DataError(f"{path}: a folder of several data sets; give one of {parts}")
    for table in saved.with_format("arrow").iter(BATCH):
        yield from table.to_pylist()


def _without_empty(value: Any) -> Any:
    """Leave out keys without a value: a column exists in every row if one row has it."""
    if isinstance(value, dict):
        return {key: _without_empty(one) for key, one in value.items() if one is not None}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


def most_skipped(given: int | None, samples: int) -> int:
    """Return how many samples may be left out: ``max_skipped``, or 1% and at least 10."""
    return max(10, samples // 100) if given is None else given


def counts(faults: Sequence[FaultySample]) -> dict[str, int]:
    """Count faulty samples by kind, the most frequent first; a sample with several faults counts by its first."""
    first: dict[tuple[int, int], str] = {}
    for fault in faults:
        first.setdefault(fault.position, fault.kind)
    return dict(Counter(first.values()).most_common())


def in_words(kinds: Mapping[str, int]) -> str:
    """Write counts by kind in words: ``3 missing file, 1 truncated audio``."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def list_path(index: Path) -> Path:
    """Return the file that lists the faults of a data set, next to the folder of its index."""
    return index.with_name(f"{index.name}.faults.jsonl")


def write_list(index: Path, manifests: Sequence[Path], faults: Sequence[FaultySample]) -> str:
    """Write a line of JSON for each fault, in the order of the manifests; return in words where the list is.

    Without faults, an older list is removed.
    """
    path = list_path(index)
    if not faults:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return ""
    lines = (
        {"sample": f.sample, "manifest": str(manifests[f.position[0]]), "entry": f.position[1], "file": f.file}
        | {"kind": f.kind, "message": f.message}
        for f in sorted(faults, key=lambda fault: fault.position)
    )
    written = path.with_name(f".{path.name}.{os.getpid()}")  # other processes may write the list too
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        written.replace(path)
    except OSError as error:
        with suppress(OSError):
            written.unlink(missing_ok=True)
        return f"their list {path} cannot be written ({error.strerror or error})"
    return f"all are listed in {path}"


def check_skipped(
    manifests: Sequence[Path], kept: int, skipped: Mapping[str, int], max_skipped: int | None, listed: str
) -> None:
    """Raise an error if more samples would be left out than the user allows.

    Args:
        kept: number of samples that remain.
        skipped: kind -> number of samples left out.
        listed: place of the list of left-out samples, in words.
    """
    count = sum(skipped.values())
    if count > (most := most_skipped(max_skipped, kept + count)):
        raise DataError(
            f"{', '.join(map(str, manifests))}: {count} of {kept + count} samples are faulty, more than max_skipped="
            f"{most}: {in_words(skipped)}; {listed}; mend them, or raise max_skipped to leave them out"
        )
