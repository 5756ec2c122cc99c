"""Rows on disk: what was written is read, and nothing else, whatever happens to the files."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.data.row_store import DTYPES, RECORD, RowSegment, RowStore

WIDTH = 24


def items(first: int, last: int, dtype: torch.dtype = torch.float32) -> tuple[np.ndarray, list[torch.Tensor]]:
    """Keys and rows that follow from each item's number."""
    numbers = np.arange(first, last, dtype=np.uint64)
    keys = np.stack([numbers * np.uint64(0x9E3779B97F4A7C15), numbers + np.uint64(7)], axis=1)
    rows = [torch.full((int(n) % 5, WIDTH), float(n)).to(dtype) for n in numbers]
    return keys, rows


def lengths(rows: list[torch.Tensor]) -> np.ndarray:
    return np.array([len(r) for r in rows], dtype=np.int64)


def store(folder: Path) -> RowStore:
    made = RowStore(folder)
    made.refresh()
    return made


def written(folder: Path, count: int = 40) -> tuple[np.ndarray, list[torch.Tensor]]:
    segment = RowSegment(folder)
    for first in range(0, count, 8):
        segment.append(*items(first, first + 8))
    segment.close()
    return items(0, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_back_in_the_order_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    for first in (0, 10):
        RowSegment(tmp_path).append(*items(first, first + 10, dtype))
    keys, rows = items(0, 25, dtype)
    order = np.random.default_rng(0).permutation(25)
    found = pickle.loads(pickle.dumps(store(tmp_path))).read(keys[order], lengths(rows)[order])
    assert not found.hit.any()  # another process has seen nothing yet
    found = store(tmp_path).read(keys[order], lengths(rows)[order])
    assert np.array_equal(found.hit, order < 20)
    wanted = torch.cat([rows[n] for n in order if n < 20])
    assert found.rows.dtype == dtype and torch.equal(found.rows, wanted)


def test_other_keys_and_other_numbers_of_rows_are_not_there(tmp_path: Path) -> None:
    keys, rows = written(tmp_path)
    made = store(tmp_path)
    assert len(made) == 40
    assert not made.read(keys ^ np.uint64([0, 1]), lengths(rows)).hit.any()
    assert not made.read(keys ^ np.uint64([1, 0]), lengths(rows)).hit.any()
    assert not made.read(keys, lengths(rows) + 1).hit.any()


def test_what_is_written_later_is_seen_by_a_refresh(tmp_path: Path) -> None:
    made, segment = store(tmp_path / "not yet"), RowSegment(tmp_path / "not yet")
    keys, rows = items(0, 16)
    for first in (0, 8):
        segment.append(*items(first, first + 8))
        assert len(made) == first
        made.refresh()
        assert np.array_equal(made.read(keys, lengths(rows)).hit, np.arange(16) < first + 8)
    RowSegment(tmp_path / "not yet").append(*items(4, 12))  # once more, by another run
    made.refresh()
    assert len(made) == 16 and made.read(keys, lengths(rows)).hit.all()


@pytest.mark.parametrize("bytes_kept", [0, 1, 7 * RECORD.itemsize - 1, 7 * RECORD.itemsize])
def test_a_record_that_is_not_whole_is_not_there(tmp_path: Path, bytes_kept: int) -> None:
    keys, rows = written(tmp_path)
    (index,) = tmp_path.glob("*.index")
    os.truncate(index, bytes_kept)
    hit = store(tmp_path).read(keys, lengths(rows)).hit
    assert np.array_equal(hit, np.arange(40) < bytes_kept // RECORD.itemsize)
    os.truncate(index, 40 * RECORD.itemsize)  # zeros, as a network file system may give them
    assert np.array_equal(store(tmp_path).read(keys, lengths(rows)).hit, hit)


def test_any_changed_byte_makes_its_item_missing_and_no_other(tmp_path: Path) -> None:
    keys, rows = written(tmp_path)
    for path in (*tmp_path.glob("*.rows"), *tmp_path.glob("*.index")):
        data = path.read_bytes()
        for place in np.random.default_rng(1).integers(0, len(data), 60).tolist():
            path.write_bytes(data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :])
            found = store(tmp_path).read(keys, lengths(rows))
            assert found.hit.sum() == 39
            assert torch.equal(found.rows, torch.cat([rows[n] for n in np.flatnonzero(found.hit)]))
        path.write_bytes(data)


def test_files_that_are_cut_or_removed_are_missed(tmp_path: Path) -> None:
    keys, rows = written(tmp_path)
    ends = np.cumsum([r.nbytes for r in rows])
    (path,) = tmp_path.glob("*.rows")
    made = store(tmp_path)
    os.truncate(path, 1000)
    assert np.array_equal(made.read(keys, lengths(rows)).hit, (ends <= 1000) | (lengths(rows) == 0))
    path.unlink()
    assert (store(tmp_path).read(keys, lengths(rows)).hit == 0).all()
    RowSegment(tmp_path).append(keys, rows)  # written again, it is there again
    assert store(tmp_path).read(keys, lengths(rows)).hit.all()


def appending(folder: Path, first: int, last: int, pipe: Any) -> None:
    segment = RowSegment(folder)
    for number in range(first, last, 4):
        segment.append(*items(number, number + 4))
        if number == first:
            pipe.send("begun")


def test_several_processes_write_and_read_one_folder_and_one_of_them_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    spans = [(0, 4000), (2000, 6000), (0, 10**7)]
    writers = [context.Process(target=appending, args=(tmp_path, *span, theirs)) for span in spans]
    for writer in writers:
        writer.start()
    for _ in writers:
        ours.recv()
    made, seen = RowStore(tmp_path), [0]
    while writers[0].is_alive() or writers[1].is_alive() or len(made) < 6000:
        made.refresh()
        seen.append(len(made))
        keys, rows = items(0, seen[-1])
        found = made.read(keys, lengths(rows))
        assert torch.equal(
            found.rows, torch.cat([torch.zeros(0, WIDTH), *(rows[n] for n in np.flatnonzero(found.hit))])
        )
        time.sleep(0.01)
    writers[2].kill()
    for writer in writers:
        writer.join()
    assert seen == sorted(seen) and len(set(seen)) > 2
    keys, rows = items(0, 6000)
    found = store(tmp_path).read(keys, lengths(rows))
    assert found.hit.all() and torch.equal(found.rows, torch.cat(rows))
