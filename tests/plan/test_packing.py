from __future__ import annotations

import numpy as np
import pytest

from hetero_strategy.plan import packing
from hetero_strategy.plan.balance import Cost

COST = Cost(0, 1, 1e-4)


def tried(
    tokens: np.ndarray, instances: int, budget: int, monkeypatch: pytest.MonkeyPatch, policy: str | None = "auto"
) -> tuple[packing.Packed, int]:
    """What is packed, and into how many numbers of microbatches it was tried."""
    tries, into = list[int](), packing._into
    with monkeypatch.context() as counted:
        counted.setattr(packing, "_into", lambda *given, **named: (tries.append(1), into(*given, **named))[1])
        found = packing.pack(
            tokens, instances, None, COST, module="llm", policy=policy, budget=budget, other_costs=np.ones(len(tokens))
        )
    return found, len(tries)


@pytest.mark.parametrize("policy", ["auto", "lpt", None])
def test_the_fewest_microbatches_are_found_as_by_trying_all(
    policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, saved = np.random.default_rng(0), 0
    for _ in range(60):
        budget, instances = int(rng.integers(8, 200)), int(rng.integers(1, 5))
        low = int(rng.integers(1, budget + 1))
        tokens = rng.integers(low, budget + 1, rng.integers(1, 40))
        found, tries = tried(tokens, instances, budget, monkeypatch, policy)
        with monkeypatch.context() as every:
            every.setattr(packing, "FULL_BINS", ())
            expected, all_tries = tried(tokens, instances, budget, monkeypatch, policy)
        assert found.count == expected.count and tries <= all_tries
        assert np.array_equal(found.microbatch, expected.microbatch)
        assert np.array_equal(found.instance, expected.instance)
        saved += all_tries - tries
    assert saved > 30


@pytest.mark.parametrize(("longest", "count"), [(9000, 32), (6500, 16), (4500, 11)])
def test_samples_of_which_few_fit_into_a_budget_are_packed_at_once(
    longest: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, two or three of the samples fill a budget, however much room they leave."""
    tokens = np.random.default_rng(0).integers(longest - 300, longest, 256)
    found, tries = tried(tokens, 8, 16384, monkeypatch)
    assert (found.count, tries) == (count, 1)
