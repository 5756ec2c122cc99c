"""Files that hold samples: JSON lists and JSON lines, parquet, and folders of the `datasets` library.

What a JSON file holds is seen in it, whatever it is called: a list of samples, or one sample in each line. A parquet
file, or a folder of them, and a folder that ``Dataset.save_to_disk`` wrote have a sample in each row. Columns that a
row leaves empty count as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hetero_strategy.errors import DataError, require

ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that editors and shells of Windows put before it."""

SPLITS = ("train", "val", "test", "dev", "eval")
"""Words with which names of files or of their folders begin that are parts of different data sets."""

ARCHIVES = (".tar", ".tar.gz", ".tgz")

BATCH = 1024
"""Rows that are read at once."""

Fault = Callable[[int, str], None]
"""Is told the number of a line, and what is wrong with it."""


def read_entries(path: Path, fault: Fault) -> Iterator[tuple[int, Any]]:
    """Read the samples of a manifest as they stand in it, with the number of each entry, line or row.

    Raises:
        ConfigError: the manifest needs the `datasets` library, which is missing.
        DataError: the manifest cannot be read as a whole.
    """
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
    """Files whose bytes are the contents of a manifest: itself, or those of its folder that are read."""
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
    """Rows of a parquet file, of all in a folder, or of a folder of ``save_to_disk``; files in them stay undecoded."""
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
    except (OSError, ValueError) as error:  # pyarrow's errors are of these
        raise DataError(f"{path}: cannot be read: {error}") from None
    if isinstance(saved, datasets.DatasetDict):
        parts = ", ".join(str(path / split) for split in saved)
        raise DataError(f"{path}: a folder of several data sets; give one of {parts}")
    for table in saved.with_format("arrow").iter(BATCH):
        yield from table.to_pylist()


def _without_empty(value: Any) -> Any:
    """Leave out keys without a value, which a column has for every row if one has it."""
    if isinstance(value, dict):
        return {key: _without_empty(one) for key, one in value.items() if one is not None}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value
