"""What experts exchange in a step, counted by the benchmark and by hand."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from benchmarks.experts import counted, setting_of
from hetero_strategy.model.experts import routed
from hetero_strategy.testing import Pool, Setting
from hetero_strategy.zoo import hf_experts


def steps_counted(rank: int, world: int, settings: list[Setting]) -> list[dict[str, int]]:
    """Return what each setting's step exchanged, and the choices of experts on other ranks in all its forwards."""
    return [_step_counted(rank, world, setting) for setting in settings]


def _step_counted(rank: int, world: int, setting: Setting) -> dict[str, int]:
    elsewhere, ep = list[Tensor](), setting.layouts["llm"].ep
    here = setting.experts // ep

    def noted(rows: Tensor, chosen: Tensor, *rest: Any) -> Tensor:
        if not chosen.is_meta:
            elsewhere.append(chosen // here != rank % ep)
        return routed(rows, chosen, *rest)

    with patch.object(hf_experts, "routed", noted):
        return {**counted(rank, world, setting), "elsewhere": sum(int(each.sum()) for each in elsewhere)}


@pytest.mark.full
@pytest.mark.distributed
def test_a_step_sends_rows_whose_expert_is_elsewhere_and_waits_once_for_a_layer(pool: Pool) -> None:
    """Such a row goes there and back in every forward, and so does its gradient. A recomputed layer waits not again."""
    settings = [setting_of(*way, 32, 16) for way in ((1, False), (2, False), (4, False), (4, True))]
    ranks = pool.run(4, steps_counted, settings, timeout=120)
    alone, pairs, plain, again = (
        {key: sum(run[n][key] for run in ranks) for key in ("bytes", "waits", "elsewhere")} for n in range(4)
    )
    assert alone["bytes"] == 0 and again["elsewhere"] == 2 * plain["elsewhere"] > 0
    row = settings[0].llm[0] * 4
    assert pairs["bytes"] == 4 * pairs["elsewhere"] * row > 0
    assert plain["bytes"] == 4 * plain["elsewhere"] * row and again["bytes"] == 6 * plain["elsewhere"] * row
    calls = len(ranks) * settings[0].llm[1] * settings[0].microbatches
    assert plain["waits"] - alone["waits"] == again["waits"] - alone["waits"] == calls
