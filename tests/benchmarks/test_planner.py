"""The planner's benchmark runs, and its figures hold on a few problems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import planner
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.search import Planner


@pytest.mark.full
def test_small_problems(tmp_path: Path) -> None:
    counts = ["--problems", "1", "--larger", "1", "--experts", "1", "--long", "1"]
    found = planner.main(["--sizes", *counts, "--json", str(tmp_path / "found.json")])
    for name in ("best", "best_of_more_ranks", "best_with_experts", "best_with_long_sequences"):
        assert found[name]["problems"] >= 1
        assert found[name]["within_1_percent"] == found[name]["problems"]
    assert (tmp_path / "found.json").stat().st_size > 100


CUT_OTHERWISE = Candidate(
    {"vision": ModuleLayout((0, 1), pp=2, split=(2, 3)), "llm": ModuleLayout((2, 3), pp=2, split=(1, 2))}, 3, "zb_h1"
)
FILLED = Candidate(
    {"vision": ModuleLayout(range(15), dp_shard=15), "llm": ModuleLayout(range(15), pp=3, dp_shard=5)},
    2,
    "zb_h1",
    fill="fine",
)
"""All that the formula ranks first lies otherwise."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "seed", "best"),
    [
        pytest.param(planner.problem, 3, CUT_OTHERWISE, id="cut otherwise"),
        pytest.param(planner.larger_problem, 68, FILLED, id="filled"),
    ],
)
def test_what_no_formula_names_is_found_on_few_ranks(
    make: Callable[[int], tuple[Planner, int | None]], seed: int, best: Candidate
) -> None:
    made, _ = make(seed)
    assert made.plan().best.seconds <= made.evaluator.seconds(best) * (1 + 1e-9)
