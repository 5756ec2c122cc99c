"""Samples that cannot be used: counted by kind, listed in a file, and left out or refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hetero_strategy.errors import DataError


class FaultySample(NamedTuple):
    """What is wrong with one sample."""

    position: tuple[int, int]
    """Number of its manifest, and of its line or list entry in it, from 0."""
    message: str
    sample: str | None = None
    """The sample's id; None where its entry has none that can be read."""
    kind: str = "manifest"
    """A few words by which faults are counted."""
    file: str | None = None
    """The media file, where it is one's fault."""


def most_skipped(given: int | None, samples: int) -> int:
    """How many samples may be left out: as ``max_skipped`` says, or 1%, at least 10."""
    return max(10, samples // 100) if given is None else given


def counts(faults: Sequence[FaultySample]) -> dict[str, int]:
    """Count faulty samples by kind, the most frequent first; a sample of several faults counts by its first."""
    first: dict[tuple[int, int], str] = {}
    for fault in faults:
        first.setdefault(fault.position, fault.kind)
    return dict(Counter(first.values()).most_common())


def in_words(kinds: Mapping[str, int]) -> str:
    """Say counts by kind: ``3 missing file, 1 truncated audio``."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def list_path(index: Path) -> Path:
    """Where the faults of a data set are listed: beside the folder of its index."""
    return index.with_name(f"{index.name}.faults.jsonl")


def write_list(index: Path, manifests: Sequence[Path], faults: Sequence[FaultySample]) -> str:
    """Write a line of JSON for each fault, in the order of the manifests; return in words where they are.

    Without faults an older list is removed.
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
    written = path.with_name(f".{path.name}.{os.getpid()}")  # others may write it too
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
    """Refuse to leave out more samples than a person wants to lose.

    Args:
        kept: samples that are left.
        skipped: kind -> samples that are left out.
        listed: where these are listed, in words.

    Raises:
        DataError: with counts by kind.
    """
    count = sum(skipped.values())
    if count > (most := most_skipped(max_skipped, kept + count)):
        raise DataError(
            f"{', '.join(map(str, manifests))}: {count} of {kept + count} samples are faulty, more than max_skipped="
            f"{most}: {in_words(skipped)}; {listed}; mend them, or raise max_skipped to leave them out"
        )
