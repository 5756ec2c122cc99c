"""``layouts="auto"``: planned at start, the same on all ranks; the gradients are those of one process."""

from __future__ import annotations

import importlib
import logging
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from hetero_strategy.errors import ConfigError, LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.planner import auto, search
from hetero_strategy.planner.auto import planned
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.ranking import Answer, Ranked
from hetero_strategy.profiling.memory import CUDA
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.hardware import DEVICES
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.testing import Pool
from tests.distributed.scenario import Job, data, datamodule, model_of, train, train_on_rank, worst_gradient, worst_loss


def train_with_cache(rank: int, world: int, job: Job, cache: str) -> Any:
    """What is measured is kept apart from the person's own."""
    importlib.import_module("tests.planner.brief_plans")
    os.environ["XDG_CACHE_HOME"] = cache
    return train_on_rank(rank, world, job)


@pytest.mark.full
def test_what_is_planned_trains_as_one_process(pool: Pool, tmp_path: Path) -> None:
    """With what the person gives, but no budget: the count of microbatches is planned too."""
    job = Job(str(data(tmp_path)), steps=2, precision="64-true")
    reference = train(job)
    given = {"llm": {"recompute": "all", "offload": "all"}}
    job = replace(job, layouts="auto", microbatches="auto", strategy={"transforms": given})
    cache = tmp_path / "cache"
    results = pool.run(2, train_with_cache, job, str(cache), timeout=360)
    assert len(list((cache / "hetero_strategy" / "profiles").glob("*.json"))) == 1
    assert worst_gradient(reference, results)[0] < 1e-9
    assert worst_loss(reference, results) < 1e-9


def two_h100(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """What a plan for two devices reads of a strategy and a trainer, and the model; no device is here."""
    with models_without_values():
        model = model_of(job, vocabulary=512)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=2**40))
    strategy = SimpleNamespace(
        root_device=torch.device("cuda", 0), num_nodes=1, num_processes=2, transforms={},
    )  # fmt: skip
    return strategy, model, SimpleNamespace(datamodule=datamodule(job), accumulate_grad_batches=1)


@pytest.mark.full
def test_on_cuda_the_memory_of_its_device_is_kept_to_and_none_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No device is here: nothing of the plan needs one, and the random state stays that of the other ranks."""
    monkeypatch.setattr(search, "NEIGHBOURS", 0)
    monkeypatch.setattr(auto, "Planner", partial(search.Planner, simulations=2))
    strategy, model, trainer = two_h100(Job(str(data(tmp_path)), steps=1), monkeypatch)
    storage, state = Storage(torch.bfloat16), torch.get_rng_state()
    caplog.set_level(logging.INFO)
    strategy.transforms = {"llm": {"offload": Offload()}}
    planned(strategy, model, trainer, storage, ScheduleConfig())
    assert re.search(
        r"memory: [01]\.\d+ of 74\.5 GiB predicted, with transforms=\{'llm': \{'offload': 'all'\}\}\n",
        f"{caplog.text}\n",
    )
    assert torch.equal(torch.get_rng_state(), state) and not torch.cuda.is_initialized()
    small = replace(DEVICES["h100"], memory=CUDA.communicator)  # less than communicators need, which only it knows of
    monkeypatch.setitem(DEVICES, "h100", small)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"candidates that were simulated needs .*, with transforms"):
        planned(strategy, model, trainer, storage, ScheduleConfig())


def test_a_run_is_cut_where_its_plan_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, model, trainer = two_h100(Job(str(data(tmp_path)), steps=1), monkeypatch)
    best = Candidate({name: ModuleLayout(2, pp=2 if name == "llm" else 1) for name in model.modules_by_name}, 2)
    answer = Answer((Ranked(best, 1.0, 1.0),), 1)
    monkeypatch.setattr("hetero_strategy.planner.search.Planner.plan", lambda *_, **__: answer)
    chosen = planned(strategy, model, trainer, Storage(torch.bfloat16), ScheduleConfig())
    split = chosen.layouts["llm"].split
    assert split is not None and sum(split) == len(model.modules_by_name["llm"].blocks())


def test_without_batches_to_plan_for_it_says_what_to_do() -> None:
    anyone: Any = SimpleNamespace(datamodule=None)
    with pytest.raises(ConfigError, match="MultimodalDataModule; pass one to the Trainer"):
        planned(anyone, anyone, anyone, anyone, anyone)


def test_what_names_no_module_or_no_plan_keeps_to_is_refused_before_processes_start() -> None:
    layouts = {"vision": {"ranks": [0]}, "llm": {"ranks": [0]}}
    for option, named in {"transforms": {"lm": {"recompute": "all"}}, "pieces": {"lm": 2}}.items():
        strategy = HeteroStrategy(layouts, **{option: named})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{option} names 'lm'; the modules are vision, llm"):
            L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
    for schedule in ("zbv", "interleaved_1f1b"):
        with pytest.raises(ConfigError, match=f"schedule='{schedule}': plans choose virtual stages"):
            HeteroStrategy(layouts="auto", schedule=schedule)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="layouts='best'; use 'auto', or a mapping"):
        HeteroStrategy(layouts="best")  # type: ignore[arg-type]
