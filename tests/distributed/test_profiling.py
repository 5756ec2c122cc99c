"""What a profiler sees of a step, and when Python collects garbage in a run."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from hetero_strategy.testing import Pool
from tests.distributed.exact import on
from tests.distributed.probe import PAIR, Case, Probe, observe
from tests.distributed.scenario import Job
from tests.distributed.scenario import data as digits
from tests.distributed.stepping import OnRank, Setting, data, reference


def profiled(rank: int, world: int, setting: Setting) -> tuple[list[str], list[str]]:
    """Names of ranges that are those of actions, in the order of time; and the actions."""
    made = OnRank(rank, world, setting)
    expected = reference(setting, 1)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        made.step(expected, 2, setting)
    actions = [str(action) for action, _, _ in made.executor.recorder.steps[-1].marks]
    ranges = sorted((e.time_range.start, e.name) for e in seen.events() if e.name in set(actions))
    return [name for _, name in ranges], actions


@pytest.mark.full
def test_a_profiler_sees_every_action_by_name(pool: Pool, tmp_path: Path) -> None:
    setting = Setting(data(tmp_path), {"vision": on(0), "llm": on(0, 1, pp=2)}, "zb_h1")
    for ranges, actions in pool.run(2, profiled, setting):
        assert len(actions) > 6
        assert ranges == actions


class Collects(Probe):
    collecting: list[bool]

    def on_train_start(self) -> None:
        super().on_train_start()
        self.collecting = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.collecting.append(gc.isenabled())
        self.seen.kept = self.collecting


def collected(rank: int, world: int, folder: str) -> tuple[list[bool], bool]:
    seen = observe(Case(Job(folder, steps=2, batch=8, capture=False), PAIR, lit=Collects))
    return seen.kept, gc.isenabled()


@pytest.mark.full
def test_garbage_is_not_collected_in_steps(pool: Pool, tmp_path: Path) -> None:
    for during, after in pool.run(2, collected, str(digits(tmp_path / "digits")), group=False):
        assert during == [False, False] and after
