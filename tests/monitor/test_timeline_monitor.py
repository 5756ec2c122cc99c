"""`TimelineMonitor` where it cannot work; what it leaves of real runs is tested with the recipes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_strategy.errors import ConfigError
from hetero_strategy.monitor import TimelineMonitor


def test_a_strategy_without_a_schedule_is_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace())
    module: Any = None
    with pytest.raises(ConfigError, match="SimpleNamespace has no schedule; use HeteroStrategy"):
        TimelineMonitor().on_train_start(trainer, module)
