"""Filling bubbles: figures of the benchmark at a small size."""

from __future__ import annotations

import pytest

from benchmarks import filling


@pytest.mark.full
def test_an_encoder_in_bubbles_takes_less_than_in_turns() -> None:
    case = filling.Case("small", (6, 512), (16, 1024), 16, 2, 8, 2, 64, 512, 1024, 4, 2)
    found = filling.measure(case)
    assert found.least <= found.fine <= found.coarse * (1 + 1e-9)
    assert found.alone <= found.beside < found.fine < 0.92 * found.turns
    assert found.computed[1] < found.computed[2] <= 1
    assert found.efficiency(found.alone) == 1.0
    assert found.efficiency(found.alone + found.encoder) == pytest.approx(0.0, abs=1e-9)
