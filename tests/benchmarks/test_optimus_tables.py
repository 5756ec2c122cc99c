"""Optimus' tables at small sizes."""

from __future__ import annotations

import pytest

from benchmarks import optimus_tables
from benchmarks.optimus_tables import TABLE_1, Cluster


def test_causes_and_compute_make_up_a_step_and_compute_is_the_same_in_all_ways() -> None:
    found = optimus_tables.table_1(Cluster("h100", 128, 64), ("5B",), (16, 4096))
    efficiency, computes = found.pop("efficiency"), {}
    for name, seconds in found.items():
        assert all(seconds[cause] >= 0 for cause in TABLE_1), name
        computes[name] = 2 * seconds["step"] - sum(seconds.values())
    alone = computes.pop("pipeline alone")
    # One sample at a time on all ranks has more blocks to launch than two in a pipeline.
    launches = computes["filled"] - computes["balanced"]
    assert 0 < launches < 0.1 * computes["filled"]
    for name, seconds in computes.items():
        more = launches if name in ("filled", "filled, dp apart", "in turns", "beside") else 0.0
        assert seconds == pytest.approx(computes["balanced"] + more), name
    took = {name: seconds["step"] for name, seconds in found.items()}
    assert took["pipeline alone"] < took["beside"] < took["filled"] < took["in turns"]
    assert found["beside"]["tensor parallel"] < found["filled"]["tensor parallel"]
    # What lies in bubbles is what the step does not grow by, of the encoder's compute and its collectives.
    wait = found["filled"]["tensor parallel"] - found["pipeline alone"]["tensor parallel"]
    assert efficiency > 1 - (took["filled"] - took["pipeline alone"]) / (wait + computes["filled"] - alone)
    for cause in ("all-gather", "reduce-scatter", "step"):
        assert found["filled"][cause] < found["filled, dp apart"][cause]
    for name in ("Megatron-LM", "balanced"):
        beside = found[f"{name}, dp beside"]
        assert all(beside[n] < found[name][n] for n in ("all-gather", "reduce-scatter", "step"))
        assert beside["tensor parallel"] == pytest.approx(found[name]["tensor parallel"])


@pytest.mark.full
def test_every_way_of_table_4_has_a_layout() -> None:
    found = optimus_tables.table_4(vit="5B", llm=(40, 4096))  # of a smaller one sums of gradients are most of a step
    assert set(found) == {*optimus_tables.TABLE_4, "in turns", "beside"} - {"Alpa"}
    assert found["filled"][0] < found["in turns"][0]


@pytest.mark.full
def test_two_encoders_are_longer_before_a_pipeline_than_in_its_bubbles() -> None:
    found = optimus_tables.table_6(Cluster("h100", 128, 64), (16, 4096))
    assert len(found) == len(optimus_tables.TABLE_6)
    for took in found.values():
        assert took["filled"] < min(took["in turns"], took["Megatron-LM"])
