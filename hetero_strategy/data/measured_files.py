"""Measure the media files of a data set, and decode them once to find damaged ones."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from hetero_strategy.data.manifest import Faults, Sample
from hetero_strategy.data.media_file import shortened
from hetero_strategy.errors import DataError
from hetero_strategy.model.kind import Media

DECODE_LIMIT = 20_000
"""``verify="auto"`` decodes every file if there are at most this many."""
CHUNK = 2048
"""Samples that are tokenised at once."""

Verify = Literal["auto", "header", "decode"]
Measured = Mapping[tuple[str, str], tuple[tuple[int, ...], int]]
"""(field, path) -> (sizes, rows) of a file."""


def measured_files(
    samples: Sequence[Sample],
    processors: Mapping[str, Media],
    folder: Path,
    verify: Verify,
    faults: Faults,
    progress: bool,
) -> Measured:
    """Measure every file.

    It uses threads, not processes: decoders release the GIL, and forking with process groups and CUDA is not safe.
    """
    distinct = dict.fromkeys((f, name) for s in samples for f, names in s.items.items() for name in names)
    by_field = {processor.field: processor for processor in processors.values()}
    decode = verify == "decode" or (verify == "auto" and len(distinct) <= DECODE_LIMIT)

    odd: list[str] = []

    def read(file: tuple[str, str]) -> tuple[tuple[int, ...], int] | Exception:
        field, name = file
        try:
            size = by_field[field].measure(folder / name)
            if decode and isinstance(warning := by_field[field].check(folder / name), str):
                odd.append(f"{folder / name}: {warning}")
            return size
        except (DataError, OSError) as error:
            return error

    measured, unread = {}, dict[tuple[str, str], Exception]()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        rest = iter(distinct)
        while files := list(islice(rest, CHUNK * 16)):  # bounded, as ``map`` would queue a future per file at once
            label = "check media" if decode else "measure media"
            for file, result in zip(
                files, progress_bar(pool.map(read, files), label, len(files), progress), strict=True
            ):
                if isinstance(result, Exception):
                    unread[file] = result
                else:
                    measured[file] = result
    if odd:
        more = f" (and {len(odd) - 1} more files like it)" if len(odd) > 1 else ""
        warnings.warn(f"{min(odd)}{more}", stacklevel=2)
    for field, processor in by_field.items():
        several = next((s for s in samples if len(s.items.get(field, ())) > 1), None)
        if several is not None and (rows := getattr(processor, "apart", lambda: None)()):
            warnings.warn(
                f"sample '{several.id}' has {len(several.items[field])} of {field}; of a small picture the folder's"
                f" processor makes {rows[0]} rows, but {rows[1]} beside others in a nested list. Here each is made"
                " alone; give the processor a flat list, images=[a, b], when the model generates",
                stacklevel=2,
            )
    for sample in samples if unread else ():
        for file in dict.fromkeys((f, name) for f, names in sample.items.items() for name in names):
            if (error := unread.get(file)) is not None:
                kind = error.kind if isinstance(error, DataError) else "cannot be opened"
                text = f"sample '{sample.id}': {error}"
                faults.add(sample.position, text, sample=sample.id, kind=kind, file=shortened(file[1]))
    return measured


def progress_bar(work: Any, what: str, total: int | None, progress: bool) -> Any:
    """Return an iterator over the work that shows how far it is."""
    return tqdm(work, desc=what, total=total, disable=not progress, leave=False, delay=1.0)
