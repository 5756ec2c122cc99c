"""Steps made by real Ray actors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_strategy import errors
from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.loading import ray_pool as remote
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.process_pool import WorkerDied
from hetero_strategy.loading.ray_pool import RayPool
from tests.loading.test_ahead import ended, settles, steps
from tests.loading.test_loader import flat
from tests.small_models import digit_processors


def test_ray_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    known = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "ray" else known(name))
    with pytest.raises(ConfigError, match=r"engine='ray' needs ray, .*pip install 'hetero-strategy\[ray\]'"):
        Workers(1, engine="ray")


ray = pytest.importorskip("ray")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def index(digits: Path) -> Iterator[DatasetIndex]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    yield build_index(digits / "train.json", ChatTokenizer(digits), digit_processors(), progress=False)
    ray.shutdown()


def crew(loader: StepLoader) -> RayPool:
    assert isinstance(loader._pool, RayPool)
    return loader._pool


def test_the_same_batches_in_order_bounded_and_resumable(index: DatasetIndex, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    noting = steps(index, tmp_path)
    loader = StepLoader(noting, workers=Workers(2, 2, engine="ray"))
    for epoch in range(2):
        plain = StepLoader(steps(index, tmp_path))
        for one in (loader, plain):
            one.set_epoch(epoch)
        for number, (found, expected) in enumerate(zip(loader, plain, strict=True), 1):
            assert flat(found) == flat(expected)
            for made in found.inputs.values():
                for x in made:
                    if x is not None:
                        x.packing.positions.add_(0)  # writable
            if epoch == 0 and number == 3:
                assert settles(noting.made, 3 + 2 + 2 * 2)  # the thread's, and the actors'
                state = loader.state_dict()
    assert signal.getsignal(signal.SIGTERM) is handler  # the trainer's
    rest = [flat(b) for b in _at(StepLoader(steps(index, tmp_path)), state)]
    iterator = iter(_at(loader, state))  # left early
    next(iterator)
    assert [flat(b) for b in _at(loader, state)] == rest and len(rest) == 27
    pids = crew(loader).pids()
    priority = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {priority}, "a busy trainer would starve them"
    loader.close()
    assert ended(lambda: sum(Path(f"/proc/{pid}").exists() for pid in pids))


def _at(loader: StepLoader, state: dict[str, Any]) -> StepLoader:
    loader.load_state_dict(state)
    return loader


def run(loader: StepLoader, found: list[Any]) -> None:
    """All of an epoch, in which an actor is killed."""
    for number, batch in enumerate(loader):
        found.append(flat(batch))
        if number == 5:
            os.kill(crew(loader).pids()[0], signal.SIGKILL)


def test_errors_keep_their_message(index: DatasetIndex, tmp_path: Path) -> None:
    noting = steps(index, tmp_path)
    noting.fails = 25
    loader = StepLoader(noting, workers=Workers(1, engine="ray"), on_error="skip")
    found = []
    with pytest.raises(DataError, match=r"^step 25 is damaged$"):
        for batch in loader:
            found.append(flat(batch))
    assert found == [flat(b) for _, b in zip(range(25), StepLoader(steps(index, tmp_path)), strict=False)]
    loader.close()


def test_a_dead_actor_stops_the_run(index: DatasetIndex, tmp_path: Path) -> None:
    loader = StepLoader(steps(index, tmp_path), workers=Workers(1, engine="ray"))
    assert [flat(b) for b in loader] == [flat(b) for b in StepLoader(steps(index, tmp_path))]
    with pytest.raises(DataError, match=r"Ray actor 0 of 1 died .*before step \d+ of epoch 0 was there; .*resume="):
        run(loader, [])
    loader.close()
    assert len(list(loader)) == 30  # with new actors
    loader.close()


@pytest.mark.parametrize("death", ["OutOfMemoryError", "LocalRayletDiedError"])
def test_an_actor_that_ends_for_want_of_memory_or_a_node_is_dead(death: str) -> None:
    def get(asked: object) -> None:
        raise getattr(ray.exceptions, death)("no more room")

    pool = object.__new__(RayPool)
    pool._ray, pool._actors = SimpleNamespace(exceptions=ray.exceptions, get=get), [None]
    with pytest.raises(WorkerDied, match="Ray actor 0 of 1 died "):
        pool._result(None, 0)


def test_too_few_processors(index: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 3.0)
    loader = StepLoader(steps(index, tmp_path), workers=Workers(200, engine="ray"))
    with pytest.raises(ConfigError, match=r"only \d+ of 200 Ray actors .* workers.count=200"):
        next(iter(loader))


def test_several_processes_need_an_address(
    index: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.shutdown()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"needs the address of one Ray cluster.*RAY_ADDRESS"):
        next(iter(StepLoader(steps(index, tmp_path), workers=Workers(1, engine="ray"))))
    assert not ray.is_initialized()
