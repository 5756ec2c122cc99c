"""Programs run at a small size and print their tables; other files of this folder test what their figures mean."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks import filling, loader
from hetero_strategy.testing import Pool

SMALL = {
    "context": ["--masks", "1", "--rounds", "1", "--dim", "128", "--tokens", "256"],
    "masks": ["--masks", "22", "--rows", "256", "--long", "2048", "--rounds", "1", "--no-flex"],
    "experts": ["--dim", "32", "--tokens", "16", "--rounds", "1", "--large"],
    "published": ["--tables", "cornstarch"],
    "launch_order": ["--ranks", "8", "--layouts", "disjoint", "--rounds", "1", "--workers", "1"],
    "predicted_memory": ["--only", "text, 1 rank"],
    "predicted_steps": ["--only", "digits: d", "--seconds", "0.2", "--profile", "0.05"],
}
"""Program -> a short command line."""


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("program", SMALL)
def test_programs_print_tables(program: str, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(f"benchmarks.{program}").main(SMALL[program], pool)
    assert "━" in capsys.readouterr().out


@pytest.mark.full
def test_filling_prints_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(filling, "CASES", [filling.Case("small", (6, 512), (16, 1024), 16, 2, 8, 2, 64, 512, 1024, 4)])
    assert set(filling.main(["--cases", "0"])) == {"small"}
    assert "paper's fine" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.distributed
def test_loader_measures_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(loader.IMAGES, 1024, 12)
    found = loader.main(["--steps", "2", "--images", "1", "--only", "1 worker", "--folder", str(tmp_path)])
    assert 0 <= found["loops"]["1 worker"]["wait"] < found["loops"]["1 worker"]["step"]
