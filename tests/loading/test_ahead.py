"""What is made ahead: how much, in which order, and how it ends."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import DataError
from hetero_strategy.loading import loader as loading
from hetero_strategy.loading.loader import Background, StepLoader
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.process_pool import _lent
from hetero_strategy.loading.steps import RankView, StepDataset
from tests.loading.test_loader import EDGES, MODULES, flat
from tests.small_models import digit_processors, kinds_of


@pytest.fixture(scope="module")
def index(digits: Path) -> DatasetIndex:
    return build_index(digits / "train.json", ChatTokenizer(digits), digit_processors(), progress=False)


GROUP: Any = object()
"""A group of whose collectives there are none: with it ``finish`` runs in the thread."""


class Noting(StepDataset):
    """Leaves a mark for every step that is made, in whatever process, and fails at one of them."""

    marks: Path
    fails: int | None = None
    seconds = 0.0

    def __getitem__(self, place: Any) -> Any:
        time.sleep(self.seconds)
        if place[1] == self.fails and not self.mended.exists():
            raise DataError(f"step {place[1]} is damaged")
        (self.marks / f"{place[0]}-{place[1]}").touch()
        return super().__getitem__(place)

    @property
    def mended(self) -> Path:
        return self.marks.with_suffix(".mended")

    def made(self) -> int:
        return len(list(self.marks.iterdir()))


def steps(index: DatasetIndex, folder: Path, **options: Any) -> Noting:
    options = {"kinds": kinds_of(MODULES), "global_batch_size": 2, "seed": 5, **options}
    made = Noting(index, digit_processors(), EDGES, RankView.whole(MODULES), **options)
    made.marks = folder / f"marks{len(list(folder.iterdir()))}"
    made.marks.mkdir()
    return made


def settles(count: Callable[[], int], at: int, still: float = 0.3, within: float = 60.0) -> bool:
    """Whether a count reaches a value within so many seconds and has it still some seconds later."""
    ended(lambda: at - count(), within)
    time.sleep(still)
    return count() == at


def ended(count: Callable[[], int], within: float = 30.0) -> bool:
    """Whether a count reaches 0 within so many seconds."""
    end = time.monotonic() + within
    while (left := count()) and time.monotonic() < end:
        time.sleep(0.02)
    return not left


def threads() -> list[str]:
    """Threads of loaders."""
    return [t.name for t in threading.enumerate() if t.name == "loading"]


def pids(loader: StepLoader) -> list[int]:
    """Processes of a loader."""
    return [worker.pid for worker in loader._pool._workers]  # type: ignore[union-attr]


@pytest.mark.parametrize("workers, prefetch", [(0, 1), (0, 3), (1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("finish", [False, True])
def test_back_pressure(index: DatasetIndex, tmp_path: Path, workers: int, prefetch: int, finish: bool) -> None:
    """Never more than the bound is made ahead, and never less once there was time."""
    done: list[int] = []

    def note(batch: Any) -> Any:
        done.append(batch.plan.metadata.step)
        return batch

    noting = steps(index, tmp_path)
    background = Background()
    loader = StepLoader(
        noting, workers=Workers(workers, prefetch), finish=note if finish else None, group=GROUP,
        background=background,
    )  # fmt: skip
    bound = workers * prefetch + (prefetch if finish or workers else 0)
    for number, _ in enumerate(loader, 1):
        assert noting.made() <= number + bound
        assert not finish or len(done) <= number + prefetch
        if number in (1, 5, 6):
            assert settles(noting.made, number + bound)
            assert not finish or settles(lambda: len(done), number + prefetch, 0.0)
    assert noting.made() == 30 and (done == list(range(30)) or not finish)
    loader.close()
    background.close()
    assert ended(lambda: len(threads()))


def test_without_workers_and_collectives_there_is_no_thread(index: DatasetIndex, tmp_path: Path) -> None:
    loader = StepLoader(steps(index, tmp_path), group=GROUP)
    iterator = iter(loader)
    next(iterator)
    assert not threads()
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_take_turns_keep_the_order_of_the_program(
    index: DatasetIndex, tmp_path: Path, workers: int
) -> None:
    """What runs in the thread, and so its collectives, follows from what the main thread does, not from who is fast."""

    def walk(train_seconds: float, val_seconds: float) -> tuple[list[tuple[str, int, int]], list[object]]:
        ran: list[tuple[str, int, int]] = []
        background = Background()

        def noting(name: str) -> Callable[[Any], Any]:
            def finish(batch: Any) -> Any:
                assert threading.current_thread() is not threading.main_thread()
                ran.append((name, batch.plan.metadata.epoch, batch.plan.metadata.step))
                return batch

            return finish

        loaders = {}
        for name, seconds in (("train", train_seconds), ("val", val_seconds)):
            made = steps(index, tmp_path, shuffle=name == "train", global_batch_size=6)
            made.seconds = seconds
            loaders[name] = StepLoader(
                made, workers=Workers(workers, 2), finish=noting(name), group=GROUP, background=background
            )
        seen: list[object] = []
        for epoch in range(2):
            loaders["train"].set_epoch(epoch)
            for number, batch in enumerate(loaders["train"]):
                seen.append(("train", flat(batch)))
                if number % 4 == 1:
                    for count, checked in enumerate(loaders["val"]):
                        seen.append(("val", flat(checked)))
                        if count == 2 + epoch:
                            break  # as with limit_val_batches
                if number == 7:
                    break  # as with limit_train_batches
        for loader in loaders.values():
            loader.close()
        background.close()
        assert ended(lambda: len(threads()))
        return ran, seen

    first, seen = walk(0.005, 0.0)
    second, again = walk(0.0, 0.005)
    assert first == second and seen == again
    assert len(seen) == 2 * 8 + 2 * 3 + 2 * 4
    plain: list[object] = []
    loaders = {
        n: StepLoader(steps(index, tmp_path, shuffle=n == "train", global_batch_size=6)) for n in ("train", "val")
    }
    for epoch in range(2):
        loaders["train"].set_epoch(epoch)
        for number, batch in enumerate(loaders["train"]):
            plain.append(("train", flat(batch)))
            if number % 4 == 1:
                plain += [("val", flat(b)) for _, b in zip(range(3 + epoch), loaders["val"], strict=False)]
            if number == 7:
                break
    assert seen == plain


@pytest.mark.parametrize("where", ["worker", "finish"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_at_its_step(index: DatasetIndex, tmp_path: Path, workers: int, where: str) -> None:
    noting = steps(index, tmp_path)
    noting.fails = 5 if where == "worker" else None

    def finish(batch: Any) -> Any:
        if where == "finish" and batch.plan.metadata.step == 5 and not noting.mended.exists():
            raise DataError("step 5 is damaged")
        return batch

    background = Background()
    loader = StepLoader(noting, workers=Workers(workers), finish=finish, group=GROUP, background=background)
    other = StepLoader(steps(index, tmp_path), finish=lambda b: b, group=GROUP, background=background)
    seen = []
    with pytest.raises(DataError, match=r"^step 5 is damaged$"):
        for batch in loader:
            seen.append(batch.plan.metadata.step)
            if len(seen) == 2:
                assert len(list(other)) == 30
    assert seen == [0, 1, 2, 3, 4]
    noting.mended.touch()
    assert len(list(loader)) == len(list(other)) == 30  # in a new thread
    for one in (loader, other):
        one.close()
    background.close()
    assert ended(lambda: len(threads()))


def test_after_an_error_nothing_runs_until_training_has_seen_it(index: DatasetIndex, tmp_path: Path) -> None:
    noting = steps(index, tmp_path)
    noting.fails = 2
    background = Background()
    loader, other = (
        StepLoader(made, finish=lambda b: b, group=GROUP, background=background)
        for made in (noting, steps(index, tmp_path))
    )
    next(iter(loader))
    assert ended(lambda: 2 - noting.made())
    with pytest.raises(DataError, match=r"^step 2 is damaged$"):
        list(other)  # its collectives would meet other ones
    background.close()


@pytest.mark.full
def test_an_error_of_a_batch_that_nobody_wants_is_none(index: DatasetIndex, tmp_path: Path) -> None:
    noting = steps(index, tmp_path)
    noting.fails, noting.seconds = 4, 0.05
    loader = StepLoader(noting, workers=Workers(1, 3))
    for number, _ in enumerate(loader, 1):
        if number == 3:
            break  # step 4 is on its way
    assert [b.plan.metadata.step for _, b in zip(range(4), loader, strict=False)] == [0, 1, 2, 3]
    loader.close()


def test_closing_does_not_wait_for_a_peer_that_is_gone(
    index: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = threading.Event()

    def finish(batch: Any) -> Any:
        if batch.plan.metadata.step == 2:
            hanging.wait(120)  # as a collective
        return batch

    monkeypatch.setattr(loading, "GRACE", 0.3)
    loader = StepLoader(steps(index, tmp_path), workers=Workers(1), finish=finish, group=GROUP)
    iterator = iter(loader)
    next(iterator)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 30 and loader._pool is None
    hanging.set()


@pytest.mark.parametrize("where", ["finish", "worker"])
def test_a_thread_that_was_left_behind_goes_on_without_harm(
    index: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    hanging, background = threading.Event(), Background()

    def finish(batch: Any) -> Any:
        if where == "finish" and batch.plan.metadata.step == 2:
            hanging.wait(60)
        return batch

    slow = steps(index, tmp_path)
    slow.seconds = 1.0 if where == "worker" else 0.0
    monkeypatch.setattr(loading, "GRACE", 0.3)
    loader = StepLoader(slow, workers=Workers(1), finish=finish, group=GROUP, background=background)
    other = StepLoader(steps(index, tmp_path), finish=lambda b: b, group=GROUP, background=background)
    kept = iter(loader)
    next(kept)
    loader.close()
    slow.seconds = 0.0
    restarted = iter(loader)
    hanging.set()
    assert next(restarted).plan.metadata.step == 0
    with pytest.raises(RuntimeError, match="used after the loader was closed or a later one began"):
        next(kept)
    assert len(list(other)) == 30 and len(list(restarted)) == 29
    monkeypatch.undo()
    for one in (loader, other):
        one.close()
    background.close()
    assert ended(lambda: len(threads()))


def started(index: DatasetIndex, folder: Path) -> Any:
    """A loader with workers whose thread waits for ever, as in a collective whose peer is gone."""

    def finish(batch: Any) -> Any:
        if batch.plan.metadata.step == 2:
            threading.Event().wait(300)
        return batch

    folder.mkdir()
    loader = StepLoader(steps(index, folder), workers=Workers(2), finish=finish, group=GROUP)
    iterator = iter(loader)
    next(iterator)
    (folder.parent / f"{folder.name}.pids").write_text(" ".join(map(str, pids(loader))))
    return loader, iterator


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.loading.test_ahead import *
digits = Path(sys.argv[2])
index = build_index(digits / "train.json", ChatTokenizer(digits), digit_processors(), progress=False)
kept = started(index, Path(sys.argv[3]))
"""


def rank(index: DatasetIndex, folder: Path, how: str) -> None:
    kept = started(index, folder)
    if how == "raises":
        raise SystemExit(3)
    if how == "stays":
        threading.Event().wait()
    del kept


@pytest.mark.full
def test_nothing_keeps_a_process_alive_and_nothing_outlives_it(
    index: DatasetIndex, digits: Path, tmp_path: Path
) -> None:
    """A whole interpreter, and forks that end, exit by an exception, or are killed."""
    root = str(Path(__file__).parents[2])
    whole = subprocess.Popen([sys.executable, "-c", SCRIPT, root, str(digits), str(tmp_path / "whole")])
    context = multiprocessing.get_context("fork")
    forks = {}
    for how in ("ends", "raises", "stays"):
        forks[how] = context.Process(target=rank, args=(index, tmp_path / how, how))
        forks[how].start()
    deadline = time.monotonic() + 60
    for how, process in forks.items():
        if how == "stays":
            while not (tmp_path / "stays.pids").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.1)
            process.kill()
        process.join(60)
        assert process.exitcode == {"ends": 0, "raises": 3, "stays": -9}[how]
    assert whole.wait(150) == 0
    for how in ("whole", *forks):
        found = [int(pid) for pid in (tmp_path / f"{how}.pids").read_text().split()]
        assert len(found) == 2
        deadline = time.monotonic() + 30
        while any(map(_runs, found)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(_runs, found)), how


def test_workers_end_when_their_loader_is_forgotten(index: DatasetIndex, tmp_path: Path) -> None:
    before = len(_lent)
    loader = StepLoader(steps(index, tmp_path), workers=Workers(1))
    iterator = iter(loader)
    next(iterator)
    found = pids(loader)
    assert len(_lent) > before
    del loader, iterator
    assert ended(lambda: gc.collect() * 0 + sum(map(_runs, found)))  # once the thread has made its batches
    assert len(_lent) <= before


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.cuda
def test_batches_arrive_in_page_locked_memory(index: DatasetIndex, tmp_path: Path) -> None:
    loader = StepLoader(steps(index, tmp_path), workers=Workers(1, pin_memory=True))
    for found, expected in zip(loader, StepLoader(steps(index, tmp_path)), strict=True):
        assert all(tensor.is_pinned() for tensor in found.tensors() if tensor.numel())
        assert flat(found) == flat(expected)
        labels = torch.from_numpy(found.plan.metadata.labels)
        assert not labels.is_pinned(), "training keeps plans of all steps"
    loader.close()


@given(st.lists(st.booleans(), max_size=30))
@settings(max_examples=60, deadline=None)
def test_tasks_run_in_the_order_submitted_up_to_the_first_that_fails(script: list[bool]) -> None:
    background = Background()
    ran: list[int] = []

    def task(number: int, fails: bool) -> Any:
        ran.append(number)
        if fails:
            raise ValueError(number)
        return number

    futures = [background.submit(partial(task, number, fails)) for number, fails in enumerate(script)]
    first = script.index(True) if True in script else len(script)
    for number, future in enumerate(futures):
        if number < first:
            assert future.result() == number
        else:
            assert str(future.exception()) == str(first)
    background.close()
    assert ran == list(range(len(script)))[: first + 1]


def test_a_thread_does_not_travel() -> None:
    background: Any = Background()
    assert background.submit(lambda: 3).result() == 3
    other = pickle.loads(pickle.dumps(background))
    assert other._tasks is None and other.submit(lambda: 4).result() == 4
    background.close()
    other.close()
