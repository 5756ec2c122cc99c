"""Parity with one process, as users test it: of a small model with any schedule, and of their own module and data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_strategy import HeteroStrategy, ModuleLayout
from hetero_strategy.testing import FP64, Pool, Setting, Trained, differences, step, train
from tests.distributed.damage import damaged
from tests.distributed.scenario import Job, Lit, data, datamodule

pytestmark = pytest.mark.distributed
SIZES: dict[str, Any] = {"vision": (64, 2), "audio": (64, 2), "llm": (128, 3), "storage": FP64}
SETTINGS = {
    "pipelined": Setting(
        "",
        {"vision": ModuleLayout([0]), "llm": ModuleLayout([1, 2], pp=2)},
        "zb_h1",
        transforms={"llm": {"recompute": "all"}},
        **SIZES,
    ),
    "sharded rows": Setting(
        "", {"vision": ModuleLayout([0, 1]), "audio": ModuleLayout([2]), "llm": ModuleLayout([1, 2], tp=2)}, **SIZES
    ),
    "context": Setting("", {"vision": ModuleLayout([0, 1]), "llm": ModuleLayout([1, 2], cp=2)}, **SIZES),
}


def damaged_step(rank: int, world: int, setting: Setting) -> Trained:
    with damaged("backward:0"):
        return step(rank, world, setting)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_small_model_has_the_gradients_of_one_process(pool: Pool, name: str) -> None:
    setting = SETTINGS[name]
    alone = setting.alone()
    assert not differences(alone, pool.run(3, step, setting))
    assert differences(replace(setting, samples=11).alone(), [alone])
    if name == "pipelined":
        wrong = differences(alone, pool.run(3, damaged_step, setting))
        assert wrong and all(text.startswith("gradient of vision.") for text in wrong)


LAYOUTS = {"vision": ModuleLayout([0]), "audio": ModuleLayout([0]), "llm": ModuleLayout([0, 1], pp=2)}


def trained(rank: int, world: int, job: Job) -> Trained:
    return train(Lit(job, 512), datamodule(job), strategy=HeteroStrategy(LAYOUTS), devices=world)


def test_a_module_and_data_of_ones_own(pool: Pool, tmp_path: Path) -> None:
    job = Job(str(data(tmp_path)), capture=False)
    alone = train(Lit(job, 512), datamodule(job))
    assert len(alone.losses) == 3 and not differences(alone, pool.run(2, trained, job, group=False))


def test_what_differs_is_named() -> None:
    one = Trained([1.0, 2.0], {"a": torch.ones(2), "b": torch.full((2,), 1e-9)})
    other = Trained([1.0, 2.5], {"a": torch.full((2,), 1.5), "c": torch.ones(1)})
    assert differences(one, [other]) == [
        "no rank has a gradient of b",
        "loss of step 1 on rank 0 is 2.5, not 2.0",
        "gradient of a on rank 0 is off by 0.5",
        "gradient of c on rank 0 is off by inf",
    ]
    assert differences(one, [Trained([1.0], {**one.gradients, "b": torch.zeros(2)})]) == [
        "rank 0 has 1 losses, not 2",
        "gradient of b on rank 0 is off by 0.0001",
    ]
