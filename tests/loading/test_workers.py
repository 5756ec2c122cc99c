"""Loader workers end with their main process, and not before it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_strategy.data.build_index import DatasetIndex
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.process_pool import Blocks, ProcessPool, _lent, pack, unpack
from hetero_strategy.loading.steps import StepDataset
from tests.loading.test_ahead import pids
from tests.loading.test_loader import flat
from tests.loading.test_loader_failures import in_order, photographs


@pytest.fixture
def index(digits: Path, tmp_path: Path) -> DatasetIndex:
    return photographs(tmp_path, digits)


def test_workers_outlast_an_end_that_the_whole_job_is_told_of(index: DatasetIndex) -> None:
    """torchrun and SLURM send SIGTERM to all processes, and the main one still makes and saves its last step."""
    expected = [flat(batch) for batch in StepLoader(in_order(index))]
    loader = StepLoader(in_order(index), workers=Workers(2))
    batches = iter(loader)
    found = [flat(next(batches)), flat(next(batches))]
    group = pids(loader)
    for pid in group:
        os.setpgid(pid, group[0])
    os.killpg(group[0], signal.SIGTERM)
    assert found + [flat(batch) for batch in batches] == expected
    loader.close()


class Stuck(StepDataset):
    def __getitem__(self, place: Any) -> Any:
        time.sleep(60)


def test_stuck_workers_do_not_hold_up_the_end(index: DatasetIndex) -> None:
    pool = ProcessPool(in_order(index, Stuck), 3, 1)
    pool.run([(0, step) for step in range(6)])
    found = [worker.pid for worker in pool._workers]
    assert len(found) == 3
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 20 and not any(map(running, found))
    del pool  # torch's own shutdown
    assert time.monotonic() - began < 20


def _main(steps: Any, ends: str, pipe: Any) -> None:
    """A process that ends without closing its loader."""
    global held
    if ends == "killed, with a server":
        multiprocessing.set_start_method("forkserver", force=True)
        forkserver._forkserver.__init__()  # type: ignore[misc]  # without a server of the process that it was forked from
    held = StepLoader(steps, workers=Workers(2))
    next(iter(held))
    pipe.send(pids(held))
    if ends.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if ends == "at once":
        os._exit(0)


@pytest.mark.full_cases("at once")
@pytest.mark.parametrize("ends", ["in order", "at once", "killed", "killed, with a server"])
def test_no_worker_outlasts_its_main_process(index: DatasetIndex, ends: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    main = multiprocessing.get_context("fork").Process(target=_main, args=(in_order(index), ends, theirs))
    main.start()
    theirs.close()
    assert ours.poll(60)
    found = ours.recv()
    main.join(60)
    left = time.monotonic() + 60
    try:
        assert main.exitcode == (-signal.SIGKILL if ends.startswith("killed") else 0)
        while alive := [pid for pid in found if running(pid)]:
            assert time.monotonic() < left, alive
            time.sleep(0.02)
    finally:
        for pid in filter(running, found):
            os.kill(pid, signal.SIGKILL)
        main.kill()


def running(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


TORCH = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.int32]
NUMPY = [np.float32, np.float64, np.int64, np.uint8, np.bool_]


def through(value: object) -> object:
    return unpack(torch.from_numpy(pack(value)))


LOOKS = ("plain", "turned", "part", "spread")
"""Whole, transposed, a slice, one row as many."""


@given(
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 4), max_size=3), st.sampled_from(LOOKS)), max_size=8)
)
def test_arrays_and_tensors_arrive_as_they_were(wanted: list[tuple[int, list[int], str]]) -> None:
    random = torch.Generator().manual_seed(len(wanted))
    sent: list[object] = []
    for kind, shape, look in wanted:
        drawn = torch.randint(0, 2, shape, generator=random)
        value: Any = drawn.to(TORCH[kind]) if kind < len(TORCH) else drawn.numpy().astype(NUMPY[kind - len(TORCH)])
        if look == "turned" and len(shape) == 2:
            value = value.T
        elif look == "part" and shape:
            value = value[1::2]
        elif look == "spread" and kind < len(TORCH) and shape:
            value = value[:1].expand(1 if len(value) else 0, *shape[1:]) if shape[0] % 2 else value.sum().expand(1)
        sent.append(value)
    got = through({"values": sent, "first": sent[:1]})
    assert isinstance(got, dict)
    assert len(got["values"]) == len(sent)
    for before, after in zip(sent, got["values"], strict=True):
        assert type(after) is type(before) and after.dtype == before.dtype and after.shape == before.shape
        assert (after == before).all()
        if isinstance(after, torch.Tensor):
            after.fill_(1)  # writable, and nobody's else
        else:
            after[...] = 1


def test_one_element_of_any_stride() -> None:
    got = through([torch.arange(3)[1].expand(1), torch.arange(6).reshape(2, 3)[:, 1:2][:1]])
    assert isinstance(got, list) and got[0].tolist() == [1] and got[1].tolist() == [[1]]


def test_numbers_are_not_pickled_but_lie_in_the_block_once() -> None:
    tensor, array = torch.arange(1000.0), np.arange(1000)
    block = torch.from_numpy(pack({"a": tensor, "b": array, "c": "text", "d": [tensor, array]}))
    assert 12000 < len(block) < 13500
    got = unpack(block)
    assert got["a"].data_ptr() == got["d"][0].data_ptr() and np.shares_memory(got["b"], block.numpy())
    assert got["a"].equal(tensor) and (got["d"][1] == array).all()


def test_blocks_end_with_their_owner() -> None:
    before = len(_lent)
    blocks = Blocks()
    blocks.lend()
    blocks.lend()
    assert len(_lent) == before + 2
    del blocks
    gc.collect()
    assert len(_lent) == before


def test_a_gradient_or_a_strange_layout_is_left_to_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    got = through([sparse, torch.nn.Parameter(torch.ones(2))])
    assert isinstance(got, list) and got[0].is_sparse and got[0].to_dense().equal(torch.eye(3))
    assert isinstance(got[1], torch.nn.Parameter) and got[1].requires_grad
    with pytest.raises(Exception, match="pickle"):
        pack(lambda: None)
