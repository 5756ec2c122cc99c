"""Loader workers end with their main process, and not before it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hetero_strategy.data.build_index import DatasetIndex
from hetero_strategy.loading.loader import StepLoader
from tests.loading.test_loader import flat
from tests.loading.test_loader_failures import in_order, photographs


@pytest.fixture
def index(digits: Path, tmp_path: Path) -> DatasetIndex:
    return photographs(tmp_path, digits)


def test_workers_outlast_an_end_that_the_whole_job_is_told_of(index: DatasetIndex) -> None:
    """torchrun and SLURM send SIGTERM to all processes, and the main one still makes and saves its last step."""
    expected = [flat(batch) for batch in StepLoader(in_order(index))]
    loader = StepLoader(in_order(index), num_workers=2)
    batches = iter(loader)
    found = [flat(next(batches)), flat(next(batches))]
    pids: list[int] = loader._pool.pids()  # type: ignore[union-attr]
    for pid in pids:
        os.setpgid(pid, pids[0])
    os.killpg(pids[0], signal.SIGTERM)
    assert found + [flat(batch) for batch in batches] == expected
    loader.close()


def _main(steps: Any, ends: str, pids: Any) -> None:
    """A process that ends without closing its loader."""
    global held
    held = StepLoader(steps, num_workers=2)
    next(iter(held))
    pids.send(held._pool.pids())
    if ends == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ends == "at once":
        os._exit(0)


@pytest.mark.parametrize("ends", ["in order", "at once", "killed"])
def test_no_worker_outlasts_its_main_process(index: DatasetIndex, ends: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    main = multiprocessing.get_context("fork").Process(target=_main, args=(in_order(index), ends, theirs))
    main.start()
    theirs.close()
    assert ours.poll(60)
    pids = ours.recv()
    main.join(60)
    left = time.monotonic() + 60
    try:
        assert main.exitcode == (-signal.SIGKILL if ends == "killed" else 0)
        while alive := [pid for pid in pids if running(pid)]:
            assert time.monotonic() < left, alive
            time.sleep(0.02)
    finally:
        for pid in filter(running, pids):
            os.kill(pid, signal.SIGKILL)
        main.kill()


def running(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
