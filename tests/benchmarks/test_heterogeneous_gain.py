"""What a layout per module is worth: tables at small sizes, and a plan beside every layout that they try."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import heterogeneous_gain as gain

SMALL: dict[str, Any] = {"ENCODERS": {"0.6B": (4, 1280, 16)}, "LLMS": {"8B": (4, 4096, 32, 1.3, 1024)}}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> gain.Row:
    """Models of four blocks on 8 GPUs."""
    for name, sizes in SMALL.items():
        monkeypatch.setattr(gain, name, sizes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return gain.Row("0.6B", "8B", 32768, 16, 8, ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1)))


@pytest.mark.full
def test_repeated_encoders_cost_what_the_formula_says_and_no_layout_beats_the_plan(small: gain.Row) -> None:
    by_cp, best, found = gain.long_contexts([small])
    share = found[str(small)]["share"]
    (of_two,) = (row for row in by_cp if row[2] == 2)
    assert float(of_two[5].rstrip("%")) == pytest.approx(100 * share, abs=20)
    assert best[0][-1] < 1.02


@pytest.mark.full
def test_ranks_are_added_to_pipelines(
    small: gain.Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gain, "TABLE_2", (replace(small, length=4096, samples=32, lay=((2, 1, 2),)),))
    found = gain.main(["--rows", "0", "1", "--added", "1"])["pipelines"]
    assert len(found) == 1
    assert all(seconds and seconds > 0 for of in found.values() for seconds in of.values())
    printed = capsys.readouterr().out
    assert all(way in printed for way in ("over lighter", "colocated, fill none", "colocated, fill fine", "added 1"))
