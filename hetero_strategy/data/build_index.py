"""Build the index of a data set: token ids, loss masks, and the measured size of every media file.

It is built once and memory mapped by every rank and worker, so that step plans need no payload. The index is
``.hetero_index/<manifest>-<key>`` in the first manifest's folder; the key is a hash of all manifests, of the tokenizer
and of all settings that decide the contents. Arrays are plain ``.npy`` files and the header is JSON: nothing is
unpickled.

An index may also be built without opening a media file. Sizes then become known when items are decoded, and each item
is one placeholder token until then; see :mod:`hetero_strategy.loading.read_where_sampled`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.data.chat_items import ItemTokens
from hetero_strategy.data.dataset_index import DatasetIndex as DatasetIndex
from hetero_strategy.data.dataset_index import load_index
from hetero_strategy.data.manifest import (
    Faults,
    PathLike,
    Sample,
    check_skipped,
    counts,
    files_of,
    list_path,
    manifest_paths,
    parse_manifests,
    write_list,
)
from hetero_strategy.data.measured_files import CHUNK, Measured, Verify, measured_files, progress_bar
from hetero_strategy.data.media import of_items, too_long
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.model.kind import Media, TargetProcessor

VERSION = 11
"""Increased whenever ids, masks, the arrays or a processor's rows change meaning."""
ARRAY_HEADER = 128
"""Bytes of a ``.npy`` file besides its numbers."""


def build_index(
    manifests: PathLike | Sequence[PathLike],
    tokenizer: ChatTokenizer,
    processors: Mapping[str, Media],
    *,
    media_folder: str | Path | None = None,
    cache_folder: str | Path | None = None,
    verify: Verify = "auto",
    max_tokens: int | None = None,
    answers: bool = True,
    measure: bool = True,
    leave_out: Sequence[str] = (),
    skip: bool = False,
    max_skipped: int | None = None,
    most_rows: Mapping[str, int] | None = None,
    progress: bool = True,
) -> DatasetIndex:
    """Load the stored index of a data set, or build it if something has changed.

    Several processes may build at once: each writes its own folder and the first rename wins.

    Args:
        manifests: a file in the format of :mod:`hetero_strategy.data.manifest`, or several; their samples are
            concatenated.
        processors: encoder or generator -> its processor, which reads the manifest field it names.
        media_folder: folder that media paths are relative to; default: each manifest's folder.
        cache_folder: folder of all indices; default: ``.hetero_index`` in the first manifest's folder.
        verify: ``header`` reads headers only, ``decode`` decodes every file once, ``auto`` decodes if there are at most
            20000 files.
        max_tokens: most tokens of a sample; longer samples are faults.
        answers: whether every sample must have a non-empty answer.
        measure: if False, no media file is opened; sizes and faults of files become known when items are decoded.
        leave_out: media fields; samples with such media are left out, and counted in the index.
        skip: leave faulty samples out, too. The index counts them by kind, and leaves them out until it is deleted. An
            index without faults is the same with and without ``skip``.
        max_skipped: with ``skip``, more faulty samples raise an error; None: 1%, at least 10.
        most_rows: with ``skip``, module -> most rows of a sample (language models) or of an item inside the module;
            longer samples are faults.

    Faults are listed one a line in a file next to the index, `list_path` of its folder.

    Raises:
        DataError: the data set has faults (the error names the first ten), or too many to skip.
        ConfigError: two processors read the same field, or the tokenizer has no token for items to draw.
    """
    paths = manifest_paths("manifests", manifests)
    folder, folders = _folders(paths, media_folder)
    _check(paths, processors, verify, measure)
    settings = {
        "version": VERSION,
        "tokenizer": tokenizer.settings(),
        "processors": {name: processor.settings() for name, processor in processors.items()},
        "verify": verify,
        "max_tokens": max_tokens,
        "answers": answers,
        # Next to its manifest an index may move with the data; in a shared folder the same manifest may name other
        # files.
        "media_folder": str(folder) if media_folder is not None or cache_folder is not None else None,
        **({} if measure else {"measure": False}),
        **({"leave_out": sorted(leave_out)} if leave_out else {}),
        **({"folders": folders} if folders else {}),
    }
    caches = Path(cache_folder) if cache_folder is not None else paths[0].parent / ".hetero_index"

    def stored(settings: Mapping[str, Any]) -> Path:
        key = _key(settings, *(file for path in paths for file in files_of(path)), tokenizer.path)
        return caches.absolute() / f"{paths[0].stem}-{key}"  # a Ray actor has another working directory

    whole = target = stored(settings)
    skipping = settings | {"skip": True, "most_rows": dict(most_rows or {})}
    if skip and (_there(stored(skipping)) or not _takes_all(whole, folder, most_rows or {})):
        target = stored(skipping)
    if not _there(target):
        faults = Faults(paths)
        drawn = [p.field for p in processors.values() if isinstance(p, TargetProcessor)]
        for field in drawn:
            tokenizer.placeholder_id(field, seen=True)
        tokens = _tokens(tokenizer, processors, measure)
        fields = [processor.field for processor in processors.values()]
        samples = parse_manifests(faults, fields, answers, folders=folders, drawn=drawn, leave_out=leave_out)
        measured = measured_files(samples, processors, folder, verify, faults, progress) if measure else None
        most = most_rows if skip else None
        arrays = _arrays(samples, tokenizer, processors, measured, max_tokens, faults, progress, tokens, most)
        kept, skipped = len(arrays["labels"]), counts(faults.messages)
        target = target if skipped else whole  # without faults an index serves both
        listed = write_list(target, paths, faults.messages)
        if not skip or not kept:
            faults.check(listed)
        check_skipped(paths, kept, skipped, max_skipped, listed)
        widths = [len(processor.size_names) for processor in processors.values()]
        header: dict[str, Any] = {"settings": skipping if skipped else settings, "samples": kept}
        header |= {"modules": list(processors), "widths": widths, "left_out": faults.left_out, "skipped": skipped}
        header["unlearnt"] = faults.unlearnt
        _write(target, arrays, header | {"largest_id": int(arrays["ids"].max(initial=-1))})
    index = load_index(target, folder)
    check_skipped(paths, len(index), index.skipped, max_skipped, f"all are listed in {list_path(target)}")
    return index


def _there(folder: Path) -> bool:
    return (folder / "header.json").is_file()


def _takes_all(folder: Path, media_folder: Path, most_rows: Mapping[str, int]) -> bool:
    """Return whether there is an index without faults whose samples and items all modules can take."""
    if not _there(folder):
        return False
    index = load_index(folder, media_folder)
    tokens = np.diff(index.offsets)
    rows = {module: index.items[module].inner_rows if module in index.items else tokens for module in most_rows}
    return not index.measured or all(rows[module].max(initial=0) <= most for module, most in most_rows.items())


def _folders(manifests: Sequence[Path], media_folder: str | Path | None) -> tuple[Path, list[str] | None]:
    """Return the folder of the index's media paths, and the folder of each of several manifests relative to it."""
    if media_folder is not None:
        return Path(media_folder).absolute(), None
    folder = manifests[0].parent
    if len(manifests) == 1:
        return folder.absolute(), None
    folder = folder.resolve()  # otherwise ".." below would not lead out of a link
    own = [os.path.relpath(path.parent.resolve(), folder) for path in manifests]
    return folder, ["" if one == os.curdir else one for one in own]


def _check(manifests: Sequence[Path], processors: Mapping[str, Media], verify: str, measure: bool) -> None:
    fields = [processor.field for processor in processors.values()]
    if len(set(fields)) < len(fields):
        raise ConfigError(
            f"processors {', '.join(processors)} read the fields {', '.join(fields)}; give each its own field"
        )
    if not measure and verify != "auto":
        raise ConfigError(
            f"verify is {verify!r} but measure is False (payload='all_to_all'): no media file is opened before it is"
            " needed, so there is nothing to verify; leave verify out, or measure"
        )
    for manifest in manifests:
        if not manifest.exists():
            raise DataError(f"{manifest}: manifest is missing; check the path, or write it first")


def _arrays(
    samples: Sequence[Sample],
    tokenizer: ChatTokenizer,
    processors: Mapping[str, Media],
    measured: Measured | None,
    max_tokens: int | None,
    faults: Faults,
    progress: bool,
    tokens: Mapping[str, ItemTokens],
    most: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    if measured is not None:
        samples = [s for s in samples if all((f, name) in measured for f, names in s.items.items() for name in names)]
    ids, loss = bytearray(), bytearray()  # they grow in place, so that there is never a second copy of all tokens
    kept, lengths, labels = list[Sample](), list[int](), list[int]()
    by_field = {processor.field: processor for processor in processors.values()}
    runs, items = {name: [np.zeros((0, 3), np.int64)] for name in processors}, dict.fromkeys(processors, 0)
    for chunk in progress_bar(range(0, len(samples), CHUNK), "tokenise", None, progress):
        batch = samples[chunk : chunk + CHUNK]
        rows, written = ([_written(s, by_field, measured, known) for s in batch] for known in ({}, tokens))
        here = {name: runs[name][:1] for name in processors}
        refused: dict[int, str] = {}
        variables = [s.variables for s in batch]
        encodings = tokenizer.encode_batch([s.turns for s in batch], written, refused.__setitem__, variables, tokens)
        for number, (sample, encoded) in enumerate(zip(batch, encodings, strict=True)):
            count = len(encoded.ids)
            if number in refused:
                kind, fault = "chat template", refused[number]
            elif not count:
                kind, fault = "no tokens", "the conversation has no tokens; give it some text"
            else:
                kind, fault = "too long", _beyond(sample, count, rows[number], processors, measured, max_tokens, most)
            if fault:
                faults.add(sample.position, f"sample '{sample.id}': {fault}", sample=sample.id, kind=kind)
                continue
            kept.append(sample)
            ids += np.ascontiguousarray(encoded.ids, np.int32).data
            loss += np.ascontiguousarray(encoded.loss, bool).data
            lengths.append(count)
            labels.append(int(encoded.loss.sum()))
            faults.unlearnt += encoded.unlearnt
            for name, processor in processors.items():
                if processor.field in encoded.runs:
                    here[name].append(encoded.runs[processor.field] + [items[name], 0, 0])
                    items[name] += len(rows[number][processor.field])
        for name, parts in here.items():
            runs[name].append(np.concatenate(parts))  # an array per sample would take more memory
    arrays = {
        "ids": np.frombuffer(ids, np.int32),
        "loss": np.frombuffer(loss, bool),
        "prompts": ragged.before_first(np.frombuffer(loss, bool), np.array(lengths, np.int64)),
        "offsets": ragged.offsets(np.array(lengths, np.int64)),
        "labels": np.array(labels, np.int64),
        **_strings("names", [sample.id for sample in kept]),
    }
    for number, (module, processor) in enumerate(processors.items()):
        columns = _columns(module, processor, kept, measured, np.concatenate(runs[module]))
        arrays |= {f"items{number}.{column}": values for column, values in columns.items()}
    return arrays


def _columns(
    module: str, processor: Media, samples: Sequence[Sample], measured: Measured | None, runs: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns of a module's items: their samples, files, places and sizes."""
    counts = np.array([len(sample.items.get(processor.field, ())) for sample in samples], np.int64)
    names = [name for sample in samples for name in sample.items.get(processor.field, ())]
    files = [((), 1) if measured is None else measured[processor.field, name] for name in names]
    rows = np.array([rows for _, rows in files], np.int64)
    columns = {
        "sample": np.repeat(np.arange(len(samples), dtype=np.int64), counts),
        "offsets": ragged.offsets(counts),
        **_strings("paths", names),
        **_placed(module, names, rows, runs),
    }
    if measured is not None:
        sizes = np.array([sizes for sizes, _ in files], np.int64).reshape(-1, len(processor.size_names))
        columns |= {"sizes": sizes, "rows": rows, "inner_rows": processor.inner_rows(sizes)}
        if isinstance(processor, TargetProcessor):
            columns["targets"] = processor.target_elements(sizes)
    return columns


def _placed(module: str, names: Sequence[str], rows: np.ndarray, runs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns that say where items lie in their samples.

    Args:
        names: files of the items.
        rows: rows of the items, int64 ``[n]``.
        runs: item, start and rows of each run, int64 ``[r, 3]``, by item.

    Raises:
        ConfigError: the runs of an item do not have its rows, or it has none.
    """
    item, start, run_rows = np.ascontiguousarray(runs.T)
    counted = np.bincount(item, minlength=len(names)).astype(np.int64)
    there = np.bincount(item, run_rows, len(names)).astype(np.int64)
    if (odd := np.flatnonzero((counted == 0) | (there != rows))).size:
        raise ConfigError(
            f"processor of '{module}': {names[odd[0]]} has {rows[odd[0]]} rows, but its text has places for"
            f" {there[odd[0]]} ({odd.size} such items); its measure() and written() must agree"
        )
    columns = {"start": start[ragged.starts(counted)]}
    if (counted > 1).any():  # else an item is one run, from its start on
        columns |= {"run_offsets": ragged.offsets(counted), "run_start": start, "run_rows": run_rows}
    return columns


def _tokens(tokenizer: ChatTokenizer, processors: Mapping[str, Any], measure: bool) -> dict[str, ItemTokens]:
    """Return media field -> tokens of its items, for processors that write texts around or between rows."""
    writers = {p.field: p for p in processors.values() if getattr(p, "placeholder", None) is not None}
    tokens = {field: ItemTokens(p.placeholder, p.row_token, getattr(p, "kind", field)) for field, p in writers.items()}
    tokenizer.check_items(tokens, {field: processor.row_id for field, processor in writers.items()})
    for field, processor in writers.items():
        if not measure and processor.writes_text:
            raise ConfigError(
                f"the processor of {field} writes tokens around rows, which depend on sizes that payload='all_to_all'"
                " does not know when texts are tokenised; use payload='fetch'"
            )
    return tokens


def _written(
    sample: Sample, processors: Mapping[str, Any], measured: Measured | None, tokens: Mapping[str, ItemTokens]
) -> dict[str, list[Any]]:
    """Return media field -> rows of each item of a sample, or what its processor writes for it if it has tokens."""

    def one(field: str, name: str) -> Any:
        if measured is None:
            return 1
        sizes, rows = measured[field, name]
        return processors[field].written(sizes) if field in tokens else rows

    return {field: [one(field, name) for name in names] for field, names in sample.items.items()}


def _beyond(
    sample: Sample,
    tokens: int,
    rows: Mapping[str, Sequence[int]],
    processors: Mapping[str, Media],
    measured: Measured | None,
    max_tokens: int | None,
    most_rows: Mapping[str, int] | None,
) -> str:
    """Return the fault of a sample that is too long, or too long for a module; empty if it fits."""
    if max_tokens is not None and tokens > max_tokens:
        return too_long(tokens, of_items(processors, rows), max_tokens)
    for module, most in (most_rows or {}).items():
        if module not in processors:
            longest = tokens
        elif measured is None:  # known when items are decoded
            continue
        else:
            processor = processors[module]
            sizes = [measured[processor.field, name][0] for name in sample.items.get(processor.field, ())]
            longest = int(processor.inner_rows(np.array(sizes, np.int64)).max()) if sizes else 0
        if longest > most:
            return f"{longest} rows, more than the {most} that '{module}' can take; shorten it"
    return ""


def _write(target: Path, arrays: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> None:
    need = sum(values.nbytes + ARRAY_HEADER for values in arrays.values())
    with atomic_folder(target, need=need, fix="free some room, or choose another cache_folder") as folder:
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values, allow_pickle=False)
        digest = hashlib.sha256()
        for name, values in sorted(arrays.items()):
            if name == "prompts":  # follows from the rest: indexes with and without it are equal
                continue
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(values).data)
        (folder / "header.json").write_text(json.dumps({**header, "content": digest.hexdigest()[:20]}, indent=1))


@contextmanager
def atomic_folder(target: Path, *, need: int | None = None, fix: str = "choose another folder") -> Iterator[Path]:
    """Open a new folder that takes its name only once everything in it is written.

    If another process was first, its folder stays. No partly written folder is left behind.

    Args:
        target: the folder's final path.
        need: bytes that will be written, for the message if they cannot be.
        fix: advice in that message.

    Raises:
        DataError: something cannot be written, for lack of permission, room or quota.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise DataError(_unwritten(target.parent, error, need, fix)) from None
    try:
        folder.chmod(0o755)
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # before the free room is measured
        raise DataError(_unwritten(target.parent, error, need, fix)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unwritten(folder: Path, error: OSError, need: int | None, fix: str) -> str:
    # For a full disk numpy raises "123 requested and 45 written" without an errno.
    reason = error.strerror or f"the disk took a part only: {error}"
    try:
        room = f"; {need} bytes are needed and {shutil.disk_usage(folder).free} are free" if need else ""
    except OSError:  # the folder itself could not be made
        room = f"; {need} bytes are needed" if need else ""
    return f"{folder}: cannot be written ({reason}){room}; {fix}"


def _key(settings: Mapping[str, Any], *files: Path) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:20]


def _strings(name: str, texts: Sequence[str]) -> dict[str, np.ndarray]:
    encoded = [text.encode() for text in texts]
    data = np.frombuffer(b"".join(encoded), np.uint8)
    lengths = np.array([len(text) for text in encoded], np.int64)
    return {f"{name}.data": data, f"{name}.offsets": ragged.offsets(lengths)}
