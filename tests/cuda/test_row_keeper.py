"""Rows on their way from a device to disk: what is there is what was computed, and nobody waits for it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hetero_strategy.data.row_store import RowStore
from hetero_strategy.errors import DataError
from hetero_strategy.model.inputs import CachedRows
from hetero_strategy.runtime import row_keeper
from hetero_strategy.runtime.row_keeper import RowKeeper
from tests.cuda.devices import EVERYWHERE

LENGTHS = np.array([3, 1, 0, 4], np.int64)


def missed(number: int) -> CachedRows:
    """One microbatch of items that were not found, the last of which could not be read."""
    keys = np.array([[10 * number + item, item] for item in range(4)], np.uint64)
    keep = np.array([True, True, True, False])
    return CachedRows(torch.zeros(0, 0), 0, None, None, keys, LENGTHS, keep)


def computed(number: int, device: str) -> torch.Tensor:
    rows = torch.randn(int(LENGTHS.sum()), 64, generator=torch.Generator().manual_seed(number))
    return rows.to(device, torch.bfloat16)


@EVERYWHERE
def test_what_is_on_disk_is_what_was_computed(tmp_path: Path, device: str) -> None:
    keeper = RowKeeper("vision", tmp_path, [], 12, bool, always=False)
    for number in (0, 1, 2, 0):  # one of them comes twice
        rows = computed(number, device)
        keeper(rows, missed(number))
        rows.zero_()  # memory that is used again while the rows are on their way
    keeper(None, missed(3))
    keeper.close()
    assert (keeper.found, keeper.missed, keeper.written, keeper.dropped) == (0, 20, 9, 0)
    store = RowStore(tmp_path)
    store.refresh()
    for number in range(3):
        found = store.read(missed(number).keys, LENGTHS)
        assert found.hit.tolist() == [True, True, True, False]
        assert torch.equal(found.rows, computed(number, "cpu")[:4])


@EVERYWHERE
def test_rows_that_come_faster_than_the_disk_takes_them_are_left_out_and_counted(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_keeper, "MOST", computed(0, device).nbytes)
    keeper = RowKeeper("vision", tmp_path, [], 400, bool, always=False)
    append, slow = keeper._append, 0.05
    monkeypatch.setattr(keeper, "_append", lambda piece: (time.sleep(slow), append(piece)))
    began = time.perf_counter()
    for number in range(100):
        keeper(computed(number, device), missed(number))
    assert time.perf_counter() - began < 100 * slow / 2
    with caplog.at_level(logging.WARNING):
        keeper.close()
    assert keeper.written + keeper.dropped == 300 and keeper.dropped > 100
    assert f"{keeper.dropped} items were not written, as rows came faster" in caplog.text


def test_a_microbatch_of_any_size_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_keeper, "MOST", 1)
    keeper = RowKeeper("vision", tmp_path, [], 4, bool, always=False)
    keeper(computed(0, "cpu"), missed(0))
    keeper.close()
    assert (keeper.written, keeper.dropped) == (3, 0)


def test_rows_that_are_not_those_of_their_items_alone_are_refused(tmp_path: Path) -> None:
    keeper = RowKeeper("vision", tmp_path, [], 4, lambda: True, always=False)
    with pytest.raises(DataError, match="the backbone of 'vision' drew random numbers"):
        keeper(computed(0, "cpu"), missed(0))
    keeper.close()
    keeper = RowKeeper("vision", tmp_path, [], 4, bool, always=False)
    with pytest.raises(DataError, match=r"made 1 rows of 4 items, its processor says \d+, so nobody knows"):
        keeper(computed(0, "cpu")[:1], missed(0))
    keeper.close()
    assert keeper.written == 0


def test_a_forward_that_runs_again_in_backward_is_noted_once(tmp_path: Path) -> None:
    keeper = RowKeeper("vision", tmp_path, [], 4, bool, always=False)

    def forward(scale: torch.Tensor) -> torch.Tensor:
        keeper(computed(0, "cpu"), missed(0))
        return scale * scale

    checkpoint(forward, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    keeper.close()
    assert (keeper.missed, keeper.written) == (4, 3)


def test_weights_that_change_are_noticed(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    keeper = RowKeeper("vision", tmp_path, [weight], 4, bool, always=False)
    keeper(computed(0, "cpu"), missed(0))
    weight[0] = 1
    with pytest.raises(DataError, match="weights of 'vision' have changed since this fit began"):
        keeper(computed(1, "cpu"), missed(1))
    keeper.close()
