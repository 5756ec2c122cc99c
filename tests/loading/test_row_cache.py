"""What a step holds of cached rows: every row at its place, whichever items are found."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_strategy.data.row_store import RowSegment
from hetero_strategy.loading.row_cache import RowCache
from hetero_strategy.loading.steps import StepDataset
from hetero_strategy.model.inputs import CachedRows, EncoderInputs
from tests.distributed.exact import on, setting_of
from tests.distributed.stepping import RankView, data, steps_of

BATCH = (7, 1, 3, 4, 8, 5, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return data(tmp_path_factory.mktemp("data"))


def steps_with(folder: str, cache: Path, *, inner: bool = False) -> StepDataset:
    layouts = {"vision": on(0), "llm": on(0)}
    setting = setting_of({False: folder}, layouts, "1f1b", batches=(BATCH, BATCH))
    steps = steps_of(setting, 1, RankView.whole(setting.modules))
    steps.caches["vision"] = RowCache(cache, inner=inner)
    return steps


def of(steps: StepDataset, epoch: int = 0) -> tuple[EncoderInputs, CachedRows]:
    (inputs,) = steps[epoch, 0].inputs["vision"]
    assert isinstance(inputs, EncoderInputs) and inputs.cached is not None
    return inputs, inputs.cached


def numbered(first: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """Rows that say which row of which item they are."""
    items = np.repeat(first, lengths)
    return torch.from_numpy(np.stack([items, np.concatenate([np.arange(n) for n in lengths])], axis=1)).double()


@pytest.mark.parametrize("inner", [False, True])
def test_every_row_is_in_its_place_whichever_items_are_found(folder: str, tmp_path: Path, inner: bool) -> None:
    whole, all_missed = of(steps_with(folder, tmp_path / "none", inner=inner))
    lengths, count = all_missed.lengths, len(all_missed.keys)
    assert count == 6 and not all_missed.found and all_missed.missed is None
    assert np.array_equal(lengths, whole.packing.lengths if inner else whole.rows)
    wanted = numbered(np.arange(count), lengths)
    parts = torch.split(wanted, lengths.tolist())
    for there in range(2**count):
        hit = np.array([there >> item & 1 for item in range(count)], bool)
        place = tmp_path / f"{there}"
        RowSegment(place).append(all_missed.keys[hit], [p for p, h in zip(parts, hit, strict=True) if h])
        inputs, cached = of(steps_with(folder, place, inner=inner))
        assert cached.found == hit.sum() and np.array_equal(cached.keys, all_missed.keys[~hit])
        missed = inputs if cached.missed is None else cached.missed
        assert np.array_equal(missed.sizes, whole.sizes[~hit])
        values = torch.split(whole.values, whole.sizes.prod(axis=1).tolist())
        assert torch.equal(missed.values, torch.cat([whole.values[:0], *(values[n] for n in np.flatnonzero(~hit))]))
        assert np.array_equal(inputs.sizes, whole.sizes) and np.array_equal(inputs.rows, whole.rows)
        assert torch.equal(inputs.packing.offsets, whole.packing.offsets)
        computed = numbered(np.flatnonzero(~hit), lengths[~hit]) if (~hit).any() else None
        assert torch.equal(cached.joined(computed), wanted)


def test_rows_in_place_of_a_sample_that_cannot_be_read_are_not_kept(folder: str, tmp_path: Path) -> None:
    """Its file may come back as it was, and those rows are zeros."""
    steps = steps_with(folder, tmp_path)
    assert of(steps)[1].keep.all()
    item = int(steps.index.items["vision"].offsets[4])
    path = Path(steps.index.path("vision", item))
    picture, steps.on_error = path.read_bytes(), "skip"
    try:
        path.write_bytes(b"nothing")
        made = steps[0, 0]
    finally:
        path.write_bytes(picture)
    assert [*made.failed] == [4]
    (inputs,) = made.inputs["vision"]
    assert isinstance(inputs, EncoderInputs) and inputs.cached is not None
    bad = np.repeat(np.array(BATCH) == 4, steps.index.counts("vision", np.array(BATCH)))
    assert bad.any() and np.array_equal(inputs.cached.keep, ~bad)


def test_a_file_that_changes_is_missed_and_new_rows_are_seen_when_an_epoch_begins(folder: str, tmp_path: Path) -> None:
    steps = steps_with(folder, tmp_path)
    _, missed = of(steps)
    rows = list(torch.split(numbered(np.arange(6), missed.lengths), missed.lengths.tolist()))
    RowSegment(tmp_path).append(missed.keys, rows)
    steps[0, 1]
    assert of(steps, 1)[1].found == 6
    path = steps.index.path("vision", int(steps.index.items["vision"].offsets[4]))
    known = os.stat(path)
    os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns + 1))
    assert of(steps)[1].found == 5
    os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert of(steps)[1].found == 6


def test_a_run_that_goes_back_in_its_epoch_looks_for_new_rows(tmp_path: Path) -> None:
    """As that of a second fit."""
    cache = RowCache(tmp_path, inner=False)
    cache.turn(0, 3)
    RowSegment(tmp_path).append(np.ones((1, 2), np.uint64), [torch.zeros(2, 4)])
    found = []
    for step in (4, 2):
        cache.turn(0, step)
        found.append(len(cache._store))
    assert found == [0, 1]
