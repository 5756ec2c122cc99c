"""Profiles on disk: found again by what they are of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pipelines import Setting
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.planner.times import BlockSeconds, Line
from hetero_strategy.profiling.blocks import Fit, Profiled
from hetero_strategy.profiling.cache import cached, digest, folder

ALONE, CPU = ModuleLayout((0,)), torch.device("cpu")
SETTING = Setting("", {"vision": ALONE, "llm": ALONE}, vision=(64, 1), llm=(64, 2))
BLOCK = BlockSeconds(*(Line(1e-3 * n, 2e-5, 3e-8) for n in range(4)))
FOUND = Profiled({"llm": {1: [BLOCK, BLOCK], 2: [BLOCK, BLOCK]}}, {"llm": Fit(0.02, 0.1)})


def test_what_was_measured_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[int] = []

    def make() -> Profiled:
        made.append(1)
        return FOUND

    model = SETTING.model()
    first, again = (cached(make, model, CPU, torch.float32, (1, 2)) for _ in range(2))
    assert first == again == FOUND
    assert len(made) == 1
    assert [file.suffix for file in (tmp_path / "hetero_strategy" / "profiles").iterdir()] == [".json"]
    (file,) = folder().iterdir()
    file.write_text(file.read_text()[:50])
    assert cached(make, model, CPU, torch.float32, (1, 2)) == FOUND
    assert len(made) == 2


def test_another_model_dtype_or_degree_is_another_profile() -> None:
    model, frozen = SETTING.model(), SETTING.model()
    frozen.modules_by_name["vision"].requires_grad_(False)
    wider = replace(SETTING, llm=(128, 2)).model()
    heads, bfloat = SETTING.model(), torch.bfloat16
    next(iter(heads.modules_by_name["llm"].blocks().values())).attention.head_dim //= 2
    digests = [digest(m, CPU, torch.float32, (1,)) for m in (model, frozen, wider, heads)]
    digests += [digest(model, CPU, bfloat, (1,)), digest(model, CPU, torch.float32, (1, 2))]
    assert len(set(digests)) == 6
    assert digest(SETTING.model(), CPU, torch.float32, (1,)) == digests[0]
