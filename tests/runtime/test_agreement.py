"""Whether all ranks run the same plan, from sums over them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero_strategy.errors import DataError
from hetero_strategy.runtime import agreement
from hetero_strategy.runtime.agreement import DIGITS, Agreement


def test_plans_that_differ_in_either_digit_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(agreement, "said", lambda name, mine: {0: mine, 1: mine})  # where there is no store
    digest = 0x1234_5678_9ABC_DEF0

    def compare(other: int) -> None:
        """Check the sums of two ranks."""
        metadata, sums = SimpleNamespace(step=3, epoch=1), torch.zeros(Agreement.SUMMANDS, dtype=torch.float64)
        plans: list[Any] = [SimpleNamespace(digest=one, metadata=metadata) for one in (digest, other)]
        ranks = [Agreement() for _ in plans]
        for plan, rank in zip(plans, ranks, strict=True):
            mine = torch.empty_like(sums)
            rank.write(plan, mine)
            sums += mine
        ranks[0].note(plans[0], sums)
        ranks[0].check()

    compare(digest)
    for bit in (0, DIGITS - 1, DIGITS, 2 * DIGITS - 1):
        with pytest.raises(DataError, match="different plans for step 3 of epoch 1"):
            compare(digest ^ 1 << bit)
