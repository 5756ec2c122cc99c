"""Units of a kind of one's own: rows that do not exist, or that are given twice, are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hetero_strategy.errors import ConfigError
from hetero_strategy.loading.metadata import check_units
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, UnitRuns


def columns(*values: Sequence[int]) -> list[np.ndarray]:
    return [np.array(value, dtype=np.int64) for value in values]


def batch() -> StepMetadata:
    """Samples of 5, 3 and 4 tokens; one item of 2 rows in the first, two of 1 and 2 rows in the last."""
    sample, rows, start = columns([0, 2, 2], [2, 1, 2], [0, 0, 1])
    numbers, tokens = columns([0, 1, 2], [5, 3, 4])
    return StepMetadata(0, 0, numbers, tokens, tokens, {"vision": StepItems(sample, rows, start, rows)})


def pair(vision: Sequence[Sequence[int]], llm: Sequence[Sequence[int]]) -> StepItems:
    """Two units of 3 and 4 rows, from runs (source, source_start, target, target_start, rows)."""
    sample, rows = columns([0, 2], [3, 4])
    given = {
        "vision": UnitRuns(*columns(*zip(*vision, strict=True))),
        "llm": UnitRuns(*columns(*zip(*llm, strict=True))),
    }
    return StepItems(sample, rows, np.zeros_like(rows), rows, given=given)


ITEMS = [(0, 0, 0, 0, 2), (1, 0, 1, 0, 1), (2, 0, 1, 1, 2)]
LAST = [(0, 4, 0, 2, 1), (2, 3, 1, 3, 1)]


def test_every_row_once_passes() -> None:
    check_units("pair", pair(ITEMS, LAST), batch(), ["vision", "llm"])
    check_units("pair", pair(ITEMS, [*LAST, (1, 9, 1, 9, 0)]), batch(), ["vision", "llm"])  # a run of no rows
    check_units("pair", pair(ITEMS, [LAST[0], (2, 3, 1, 2, 1)]), batch(), ["vision", "llm"])  # added to a picture's


@pytest.mark.parametrize(
    ("vision", "llm", "words"),
    [
        (ITEMS[:2], [LAST[0], (0, 4, 1, 3, 1)], "row 4 of unit 0 of 'llm' is in two runs"),
        (ITEMS[:2], [LAST[0], (0, 3, 1, 1, 2)], "row 4 of unit 0 of 'llm' is in two runs"),
        ([*ITEMS, (0, 1, 1, 3, 1)], LAST[:1], "row 1 of unit 0 of 'vision' is in two runs"),
        (ITEMS, [(0, 5, 0, 2, 1)], "rows 5 to 5 of unit 0 of 'llm', which gives them, do not exist: the unit has 5"),
        (ITEMS, [(0, 4, 0, 2, 2)], "rows 4 to 5 of unit 0 of 'llm', which gives them, do not exist"),
        (ITEMS, [(3, 0, 0, 2, 1)], "of unit 3 of 'llm', which gives them, do not exist: the unit is none of 3"),
        (ITEMS, [(0, 4, 2, 0, 1)], "of unit 2 of 'pair', which takes them, do not exist: the unit is none of 2"),
        (ITEMS, [(0, 4, 0, 3, 1)], "rows 3 to 3 of unit 0 of 'pair', which takes them, do not exist: the unit has 3"),
    ],
)
def test_others_are_refused(vision: Sequence[Sequence[int]], llm: Sequence[Sequence[int]], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_units("pair", pair(vision, llm), batch(), ["vision", "llm"])
    assert str(error.value).startswith("units of 'pair': ") and words in str(error.value)


def test_a_source_without_runs_is_refused() -> None:
    units = pair(ITEMS, LAST)
    with pytest.raises(ConfigError, match="given lacks 'audio'"):
        check_units("pair", units, batch(), ["vision", "llm", "audio"])


def test_units_at_their_places_in_the_text_need_no_runs() -> None:
    units = replace(pair(ITEMS, LAST), given=None)
    check_units("draw", units, batch(), ["llm"])
    with pytest.raises(ConfigError, match="given lacks 'vision'"):  # nobody would know which unit an item is for
        check_units("draw", units, batch(), ["vision"])


def test_units_at_their_places_in_the_text_are_there_and_have_rows_of_their_own() -> None:
    """Rows of the sample behind it would be read otherwise, and of two gradients of a row one would be lost."""
    sample, rows, start = columns([1, 2, 2], [2, 1, 2], [1, 0, 2])
    fit = StepItems(sample, rows, start, rows)
    check_units("draw", fit, batch(), ["llm"], ["llm"])
    later, longer, both = columns([2, 0, 2], [2, 1, 3], [2, 3, 2])
    for beyond in (replace(fit, start=later), replace(fit, edge_rows=longer)):
        with pytest.raises(ConfigError, match="of 'llm', which gives them, do not exist"):
            check_units("draw", beyond, batch(), ["llm"])
        with pytest.raises(ConfigError, match="of 'llm', which takes them, do not exist"):
            check_units("draw", beyond, batch(), [], ["llm"])
    with pytest.raises(ConfigError, match="row 2 of unit 2 of 'llm' is in two runs"):
        check_units("draw", replace(fit, edge_rows=both), batch(), ["llm"])


def test_a_batch_without_units_passes() -> None:
    (none,) = columns([])
    empty = {"vision": UnitRuns(*[none] * 5), "llm": UnitRuns(*[none] * 5)}
    check_units("pair", StepItems(none, none, none, none, given=empty), batch(), ["vision", "llm"])
