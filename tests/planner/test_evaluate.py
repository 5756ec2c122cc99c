"""Steps of candidates have what those of a run have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.context import ROW_ALIGNMENT
from hetero_strategy.planner.evaluate import Candidate, Evaluator
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
