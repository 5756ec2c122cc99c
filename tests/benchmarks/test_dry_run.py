"""``benchmarks.dry_run`` on small runs."""

from __future__ import annotations

import pytest

from benchmarks import dry_run


@pytest.mark.full
def test_large_runs_are_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"layers": 2, "pp": 2, "dim": 1024, "tp": 2, "encoder": (32, 1)}
    runs = [dry_run.LargeRun(16, **small), dry_run.LargeRun(24, apart=16, **small)]  # type: ignore[arg-type]
    monkeypatch.setattr(dry_run, "RUNS", runs)
    found = dry_run.main([])
    assert "messages" in capsys.readouterr().out
    assert [one["built"] for one in found] == [4, 6]
    for one in found:
        assert not one["faults"]
        # Above 1: norms are on every tensor-parallel rank, and the ranks at a lane's ends are not its mean.
        assert one["shards"] == pytest.approx(1, abs=1e-2)
