"""Predicted memory beside that of real steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.predicted_memory import ALONE, SETTINGS, predicted, steps_on_rank
from hetero_strategy.testing import Pool, Setting

MIXTURES = ("8 experts, ep 2", "8 experts, tp 2, ep 2, long")
NAMES = {"offload all": 0.05, "llm cp 2": 0.05, **dict.fromkeys(MIXTURES, 0.1)}
"""Of the settings of ``python -m benchmarks.predicted_memory``, which tries all -> the most that it is off by."""
WITHIN = 0.05


@pytest.mark.full
@pytest.mark.parametrize(("name", "within"), NAMES.items())
def test_peaks_are_predicted(pool: Pool, name: str, within: float) -> None:
    (setting,) = (one for one in SETTINGS if one.name == name)
    peaks = np.array([rank.peak for rank in pool.run(setting.world, steps_on_rank, setting, timeout=400)])
    np.testing.assert_allclose(predicted(setting).peak, peaks, rtol=within)
    llm = setting.layouts["llm"]
    if setting.experts and llm.tp == 1:
        other = replace(setting, layouts={**setting.layouts, "llm": replace(llm, ep=1)})
    else:
        other = replace(setting, transforms={} if setting.transforms else {"llm": {"recompute": "all"}})
    apart = np.abs(predicted(other).peak / peaks - 1)
    assert (apart > within).any(), "nothing would be noticed"


@pytest.mark.full
@pytest.mark.parametrize("trains", [False, True])
def test_copies_of_inputs_are_predicted(pool: Pool, trains: bool) -> None:
    """Of pictures that are most of what a step needs: microbatch by microbatch, and whole."""
    sizes = {"vision": (16, 1), "llm": (16, 1), "cells": (5, 8), "samples": 32, "microbatches": 8, "schedule": "gpipe"}
    setting = Setting("", {"vision": ALONE, "llm": ALONE}, freeze=() if trains else ("vision",), **sizes)  # type: ignore[arg-type]
    (copied,), (whole,) = (pool.run(1, steps_on_rank, setting, copies) for copies in (True, False))
    found = [predicted(setting, copies).peak[0] for copies in (True, False)]
    print(np.array(found) / (copied.peak, whole.peak))
    np.testing.assert_allclose(found, (copied.peak, whole.peak), rtol=WITHIN)
    if not trains:
        assert copied.peak < 0.6 * whole.peak
