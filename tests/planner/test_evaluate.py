"""Steps of candidates have what those of a run have."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.context import ROW_ALIGNMENT
from hetero_strategy.planner.evaluate import Candidate, Evaluator
from hetero_strategy.schedule.build import make_schedule
from tests.planner.models import batch, cluster, model


@pytest.mark.parametrize("parts", [1, 4])
def test_rows_of_tensor_parallel_language_models_are_filled_up_as_in_a_run(parts: int) -> None:
    """Whether or not ranks have parts of them; those of encoders are not."""
    shape, data = model(), batch(16)
    llm = replace(shape.modules["llm"], row_parts={1: 1, 2: 1, 4: parts})
    shape = replace(shape, modules={**shape.modules, "llm": llm})
    evaluator = Evaluator(shape, cluster(8), [data])
    layouts = {"vision": ModuleLayout(range(8), tp=4), "llm": ModuleLayout(range(8), tp=4)}
    plan = evaluator.step(evaluator.place(Candidate(layouts, microbatches=4))).plan
    rows = {name: np.stack([a.totals(inner=True) for a in plan.assignments[name]]) for name in layouts}
    assert not (rows["llm"] % (4 * ROW_ALIGNMENT)).any()
    assert 0 < rows["llm"].sum() - data.tokens.sum() < rows["llm"].size * 4 * ROW_ALIGNMENT
    assert rows["vision"].sum() == data.items["vision"].inner_rows.sum()


def test_steps_that_are_simulated_alike_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas and shards of pipelines differ in what runs beside their actions; stages, schedules and data do not."""
    given = [batch(16, seed) for seed in range(2)]
    evaluator, made = Evaluator(model(), cluster(8), given), Mock(wraps=make_schedule)
    monkeypatch.setattr("hetero_strategy.planner.evaluate.make_schedule", made)
    ways = [ModuleLayout(8, pp=2, dp_replicate=4 // n, dp_shard=n) for n in (1, 2, 4)]
    candidates = [Candidate(dict.fromkeys(("vision", "llm"), way), n, fill="none") for way in ways for n in (2, 4)]
    found = [evaluator.seconds(candidate) for candidate in candidates]
    assert made.call_count == 4 and len({*found}) == len(found)
    for count, other in enumerate((replace(candidates[1], schedule="zb_h1"), replace(candidates[1], fill="fine")), 3):
        evaluator.seconds(other)
        assert made.call_count == 2 * count
    assert found == [Evaluator(model(), cluster(8), given).seconds(one) for one in candidates]
