"""Profiles on disk: found again by what they are of."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_strategy.disk_cache import _plain, cached, digest, folder
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.profiling.blocks import Fit, Profiled
from hetero_strategy.profiling.cache import _profiled, memory_model, seconds_of, structure
from hetero_strategy.simulator.cost_model import Precision
from hetero_strategy.simulator.stage_times import BlockSeconds, Line
from hetero_strategy.testing import Setting

ALONE, CPU = ModuleLayout((0,)), torch.device("cpu")
SETTING = Setting("", {"vision": ALONE, "llm": ALONE}, vision=(64, 1), llm=(64, 2))
BLOCK = BlockSeconds(*(Line(1e-3 * n, 2e-5, 3e-8) for n in range(4)))
BATCHES = [SETTING.metadata(0)]
FOUND = Profiled({"llm": {1: [BLOCK, BLOCK], 2: [BLOCK, BLOCK]}}, {"llm": Fit(0.02, 0.1)})


def test_what_was_measured_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[int] = []

    def make() -> Profiled:
        made.append(1)
        return FOUND

    of = seconds_of(SETTING.model(), CPU, torch.float32, (1, 2), BATCHES, 2.0)
    first, again = (cached(make, of, _profiled) for _ in range(2))
    assert first == again == FOUND
    assert len(made) == 1
    assert [file.suffix for file in (tmp_path / "hetero_strategy" / "profiles").iterdir()] == [".json"]
    (file,) = folder().iterdir()
    file.write_text(file.read_text()[:50])
    assert cached(make, of, _profiled) == FOUND
    assert len(made) == 2


def test_another_model_dtype_degree_budget_or_data_is_another_profile() -> None:
    model, frozen = SETTING.model(), SETTING.model()
    frozen.modules_by_name["vision"].requires_grad_(False)
    wider = replace(SETTING, llm=(128, 2)).model()
    heads, bfloat = SETTING.model(), torch.bfloat16
    next(iter(heads.modules_by_name["llm"].blocks().values())).attention.head_dim //= 2
    batch = SETTING.metadata(0)
    longer = replace(batch, tokens=4 * batch.tokens, labels=4 * batch.labels)
    unlabelled = replace(batch, labels=0 * batch.labels)
    digests = [digest(seconds_of(m, CPU, torch.float32, (1,), BATCHES, 2.0)) for m in (model, frozen, wider, heads)]
    digests += [
        digest(seconds_of(model, CPU, *more))
        for more in (
            (bfloat, (1,), BATCHES, 2.0),
            (torch.float32, (1, 2), BATCHES, 2.0),
            (torch.float32, (1,), [longer], 2.0),
            (torch.float32, (1,), [unlabelled], 2.0),
            (torch.float32, (1,), BATCHES, 0.5),
        )
    ]
    assert len(set(digests)) == 9
    nearly = replace(batch, tokens=batch.tokens + (np.arange(len(batch.tokens)) == 0))
    assert digest(seconds_of(SETTING.model(), CPU, torch.float32, (1,), [nearly], 2.0)) == digests[0]


def test_other_code_of_a_module_is_another_profile(tmp_path: Path) -> None:
    """Two classes of the same name and sizes in files of their own, as before and after an edit."""
    digests = []
    for i, body in enumerate(("rows", "rows + 1", "rows")):
        file = tmp_path / f"{i}.py"
        file.write_text(f"import torch\nclass Own(torch.nn.Module):\n    def forward(self, rows): return {body}\n")
        spec = importlib.util.spec_from_file_location("own", file)
        assert spec is not None and spec.loader is not None
        sys.modules["own"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["own"])
        model = SETTING.model()
        model.modules_by_name["vision"].add_module("own", sys.modules["own"].Own())
        digests.append(digest(structure(model)))
    del sys.modules["own"]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.full
def test_activations_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept is the same to the bit, and another precision is not mistaken for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with torch.device("meta"):
        model = SETTING.model().train()
    shape, here = spec_of(model), "cpu"
    first = memory_model(model, shape, here, Precision(4, 4))
    other = memory_model(model, shape, here, Precision(2, 4))
    monkeypatch.setattr("hetero_strategy.profiling.cache.activations_of", None)
    again = memory_model(model, shape, here, Precision(4, 4))
    assert json.dumps(again.activations, default=_plain) == json.dumps(first.activations, default=_plain)
    assert json.dumps(other.activations, default=_plain) != json.dumps(first.activations, default=_plain)
    fields = [{k: type(v) for k, v in vars(m.activations["llm"].blocks[""]).items()} for m in (first, again)]
    assert fields[0] == fields[1] and type(again.activations["llm"].head) is type(first.activations["llm"].head)


def test_where_nothing_can_be_written_what_was_measured_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    of = seconds_of(SETTING.model(), CPU, torch.float32, (1,), BATCHES, 2.0)
    assert cached(lambda: FOUND, of, _profiled) == FOUND
    assert "set XDG_CACHE_HOME" in caplog.text
