"""Whole steps whose labelled rows lie unevenly on context-parallel ranks, which share them out before the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hetero_strategy.model import context
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.model.spread_labels import SpreadLabels
from hetero_strategy.testing import Pool
from tests.distributed.exact import NOTICED, Given, differences, expected, on, run_together, setting_of
from tests.distributed.stepping import (
    Reference,
    Run,
    Setting,
    evaluations_on_rank,
    placed,
    reference,
    share_of,
    steps_of,
    steps_on_rank,
)

pytestmark = pytest.mark.distributed

WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp": {"tp": 2},
    "1f1b": {"pp": 2},
    "zb_h1": {"pp": 2},
    "dp": {"dp_replicate": 2, "dp_shard": 1},
    "FSDP": {"dp_shard": 2},
    "whole recompute": {},
    "compiled": {},
}
TRANSFORMS = {"whole recompute": {"recompute": "whole"}, "compiled": {"compile": "aot_eager"}}
ONE, OVER = ("alone", "whole recompute", "compiled"), ("tp", "1f1b", "zb_h1", "dp", "FSDP")
"""Ways with one instance of one stage, and the others."""
BOUNDS = {"64-true": 1e-10, "32-true": 1e-5}


def setting_with(folders: dict[bool, str], cp: int, way: str, **options: Any) -> Setting:
    """Two chunks of the rows a rank, on which answers lie unevenly."""
    degrees = {"dp_shard": 1} | WAYS[way]
    world = cp * (2 if WAYS[way] else 1)
    llm = on(*range(world), cp=cp, cp_order="zigzag", **degrees)
    layouts = {"vision": on(0, 1), "audio": on(world - 1), "llm": llm}
    options |= {"transforms": {"llm": TRANSFORMS[way]}} if way in TRANSFORMS else {}
    return setting_of(folders, layouts, "zb_h1" if way == "zb_h1" else "1f1b", **options)


def inputs_on(setting: Setting, microbatches: int) -> list[list[SequenceInputs]]:
    """The language model's inputs on each rank, by microbatch."""
    placement = placed(setting, setting.world)
    ranks = range(setting.world)
    around = [steps_of(setting, microbatches, share_of(placement, setting, rank))[0].inputs["llm"] for rank in ranks]
    return [[one for one in own if one is not None] for own in zip(*around, strict=True)]


def counts_of(inputs: Sequence[SequenceInputs]) -> tuple[list[int], list[int]]:
    """Labelled rows of each rank before and after they travel."""
    before = [len(own.labelled) for own in inputs if own.labelled is not None]
    return before, [len(own.spread.tokens) for own in inputs if own.spread is not None]


def check(pool: Pool, settings: Sequence[Setting], microbatches: int = 2) -> None:
    given: dict[str, Given] = {
        str(k): (one, expected(one) if one.precision == "64-true" else reference(one, 2), (microbatches,), 0)
        for k, one in enumerate(settings)
    }
    for name, runs in run_together(pool, given).items():
        setting, wanted = given[name][:2]
        for steps in zip(*(run.steps for run in runs), strict=True):
            assert not differences(wanted, steps, BOUNDS[setting.precision]), setting


@pytest.mark.parametrize(
    ("ways", "cp"),
    [
        (ONE, 2),
        (OVER, 2),
        pytest.param(ONE, 3, marks=pytest.mark.full),
        pytest.param(OVER, 4, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(
    pool: Pool, folders: dict[bool, str], ways: tuple[str, ...], cp: int
) -> None:
    settings = [setting_with(folders, cp, way) for way in ways]
    before, after = np.swapaxes([counts_of(x) for x in inputs_on(setting_with(folders, cp, "alone"), 2)], 0, 1)
    assert np.ptp(before, axis=1).max() > 2 and np.ptp(after, axis=1).max() <= 1
    check(pool, [*settings, replace(settings[0], precision="32-true")])


def test_ranks_without_the_head_have_no_labels_to_score(folders: dict[bool, str]) -> None:
    for inputs in inputs_on(setting_with(folders, 2, "1f1b"), 2):
        assert [own.spread is None for own in inputs] == [True, True, False, False]


def test_labels_on_one_rank_and_on_none(pool: Pool, folders: dict[bool, str]) -> None:
    """A sample a microbatch, on one of two instances: the other has no label."""
    setting = setting_with(folders, 2, "dp")
    labels = np.array([counts_of(inputs)[0] for inputs in inputs_on(setting, 9)])
    assert ((labels > 0).sum(axis=1) == 1).all()
    check(pool, [setting], 9)


def test_a_label_off_by_one_is_noticed(pool: Pool, folders: dict[bool, str]) -> None:
    setting = setting_with(folders, 2, "alone")
    for runs in pool.run(2, with_labels_off_by_one, setting, expected(setting)):
        assert max(runs.steps[0].errors.values()) > NOTICED


def with_labels_off_by_one(rank: int, world: int, setting: Setting, wanted: Reference) -> Run:
    """A step in which each label of the rows that rank 0 scores is that of the row before."""
    original = context.spread_labels

    def off(inputs: SequenceInputs, place: int, dealt: np.ndarray) -> SpreadLabels:
        spread = original(inputs, place, dealt)
        return spread if place else replace(spread, tokens=spread.tokens.roll(1))

    with mock.patch.object(context, "spread_labels", off):
        return steps_on_rank(rank, world, setting, wanted, (2,))


def test_predictions_are_those_of_one_process(pool: Pool, folders: dict[bool, str]) -> None:
    setting = setting_with(folders, 2, "1f1b")
    wanted = reference(setting, 2, train=False)
    assert wanted.predicted is not None
    for rank in pool.run(setting.world, evaluations_on_rank, setting, (1, 4, 9), timeout=120):
        for found in rank:
            assert found.losses == pytest.approx(wanted.losses, rel=1e-10)
            assert torch.equal(found.predicted, wanted.predicted)
