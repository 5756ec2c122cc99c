"""A few families of transformers in mixed layouts, and what the table says of one that leaks."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from benchmarks.hugging_face import (
    BOUND,
    COMPOSED,
    FEW,
    LAYOUTS,
    RANKS,
    RATE,
    STEPS,
    composite_setting,
    main,
    prepared,
    prepared_composite,
    worst,
)
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.causal_lm import CausalLMKind
from hetero_strategy.testing import Pool
from hetero_strategy.testing.composites import built, tiny
from hetero_strategy.testing.setting import steps_alone, steps_on_rank
from hetero_strategy.zoo import HFCausalLM


@pytest.mark.distributed
def test_few_families_equal_one_process(pool: Pool) -> None:
    tables = main(["--families", "few"], pool)
    models, composites = tables["language models"], tables["composites"]
    assert {*models, *composites} == {*FEW} and composites
    for line in models.values():
        assert line["stages"] == line["others"] == 0.0
        assert set(line) >= {"packed", "alone", "others", "stages", *LAYOUTS} - {"tp2 pp2"}
        assert max(line.values()) <= BOUND
    for line in composites.values():
        assert set(line) == {"split", "export", *COMPOSED}
        assert max(line.values()) <= BOUND


def test_a_microbatch_of_composites_is_text_alone(tmp_path: Path) -> None:
    _, _, settings = prepared_composite("llava", tmp_path / "llava")
    for setting in settings.values():
        first, second = setting.plan(0).assignments["vision"]
        assert first.idle and len(second.units) == 4


@pytest.mark.distributed
def test_images_are_cut_over_ranks(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's rows of images see later ones on each context-parallel rank, in layers with and without a window."""
    setting = composite_setting(built(tiny("gemma3")), tmp_path)
    llm = ModuleLayout(range(4), cp=2, pp=2, cp_order="blocks")
    setting = replace(setting, layouts={"vision": ModuleLayout((0,)), "llm": llm})
    for rank in range(RANKS):
        packing = setting.batch(0, rank).inputs["llm"][1].packing
        assert packing.masks.keys() == {None, 4}
        keys = packing.context.keys_of
        assert all((mask[1, 0] > keys(window).ends).any() for window, mask in packing.masks.items())
    results = pool.run(RANKS, steps_on_rank, {("gemma3", "cp"): setting}, STEPS, RATE)
    ranks = [found["gemma3", "cp"] for found in results]
    assert worst(steps_alone(setting, STEPS, RATE)[0], ranks)[0] <= BOUND
    monkeypatch.setattr(CausalLMKind, "masks", lambda *_: {})
    assert worst(steps_alone(setting, STEPS, RATE)[0], ranks)[0] > 1e-2


def test_a_family_that_leaks_is_far_off_without_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[HFCausalLM.__module__]
    monkeypatch.setattr(module, "mixers_of", lambda blocks, _: [[] for _ in blocks], raising=False)
    line, notes, runs = prepared("minimax")
    assert line["packed"] > 0.5 and not runs
    assert "MiniMaxForCausalLM of transformers" in notes[0]


def test_a_missing_gradient_and_a_wrong_one_count() -> None:
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    assert worst({"a": one, "b": two}, [{"a": one}, {"b": two * 1.5}])[0] == pytest.approx(0.5)
    assert worst({"a": one, "b": two}, [{"a": one}, {"a": one}]) == (inf, "b")
