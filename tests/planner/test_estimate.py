"""The formula holds what the memory model does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import Degrees
from hetero_strategy.planner.stage_memory import stage_bytes
from hetero_strategy.planner.times import MIXED, Precision
from tests.planner.models import batch, cluster, model


@pytest.mark.parametrize("precision", [MIXED, Precision(4, 4)])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("module", ["vision", "llm"])
def test_parameters_take_the_bytes_of_the_memory_model(module: str, shards: int, precision: Precision) -> None:
    """Frozen weights of a module that nothing shards are there once."""
    made, degrees = model(frozen=True), Degrees(1, 1, 4 // shards, shards, whole=True)
    shape = made.modules[module]
    size = stage_bytes(shape, degrees.layout(range(4)), 0, shape.blocks, True, precision)
    expected = size.masters + size.optimizer + size.gathered.sum() + size.summed.sum()
    estimates = Estimates(made, cluster(4), [batch(4)], precision)
    assert estimates.held(module, degrees) == pytest.approx(expected)


def test_frozen_replicas_of_a_pipeline_need_the_ranks_that_hold_each_once() -> None:
    shape = model(frozen=True)
    module = replace(shape.modules["llm"], trained=shape.modules["llm"].trained * 0)
    shape = ModelShape({**shape.modules, "llm": module}, shape.edges)
    estimates = Estimates(shape, cluster(8), [batch(4)], MIXED)
    assert estimates.least_ranks("llm", 4) == pytest.approx(4 * 2 * module.parameters.sum() / estimates.memory)
