"""Leaks between packed rows are measured by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.inputs import Packing
from hetero_strategy.testing import packing_errors
from hetero_strategy.zoo import titan_llama

EXACT = 1e-6


def model(leak: Callable[[Tensor, Packing], Tensor] | None = None) -> CausalLM:
    module = titan_llama(vocab_size=40, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, max_seq_len=64)
    MultimodalModel({"llm": module}, seed=1).eval()
    if leak is not None:
        whole: Any = module.transform

        def transform(hidden: Tensor, given: Any) -> Tensor:
            return whole(hidden + leak(hidden, getattr(given, "packing", given)), given)

        module.transform = transform  # type: ignore[method-assign]
    return module


def following(hidden: Tensor, packing: Packing) -> Tensor:
    """Return for each row the next one of its sequence."""
    last = packing.positions.roll(-1) == 0
    return hidden.roll(-1, 0).masked_fill(last[:, None], 0.0)


def preceding(hidden: Tensor, packing: Packing) -> Tensor:
    return hidden.roll(1, 0).masked_fill((packing.positions == 0)[:, None], 0.0)


def test_a_good_module_has_none() -> None:
    assert max(packing_errors(model()).values()) < EXACT


@pytest.mark.parametrize(
    ("leak", "wrong"),
    [
        (lambda hidden, packing: hidden.cumsum(0), {"others", "alone", "context"}),  # a state
        (following, {"earlier", "context"}),
        (preceding, {"context"}),  # right but for the ends of a rank's rows
        (lambda hidden, packing: torch.full_like(hidden, len(hidden) / 10), {"alone", "context"}),
    ],
)
def test_a_leak_shows_by_name(leak: Callable[[Tensor, Packing], Tensor], wrong: set[str]) -> None:
    errors = packing_errors(model(leak))
    assert {name for name, error in errors.items() if error > EXACT} == wrong
    assert all(errors[name] > 0.01 for name in wrong)


def test_an_error_on_one_context_parallel_rank_ends_the_other() -> None:
    def leak(hidden: Tensor, packing: Packing) -> Tensor:
        if packing.context is not None and packing.context.rank == 1:
            raise RuntimeError("rank 1 fails")
        return hidden

    with pytest.raises(RuntimeError, match="rank 1 fails"):
        packing_errors(model(leak))


def test_a_context_parallel_rank_that_exchanges_once_more_ends_the_other() -> None:
    def leak(hidden: Tensor, packing: Packing) -> Tensor:
        if packing.context is not None and packing.context.rank == 1:
            packing.context.send(hidden, [0, len(hidden)], [0, len(hidden)])
        return hidden * 0

    with pytest.raises(RuntimeError, match="one context-parallel rank exchanges keys more often than the other"):
        packing_errors(model(leak))


def test_a_rank_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    wait = threading.Barrier.wait
    monkeypatch.setattr(
        threading.Barrier, "wait", lambda self, timeout=None: limits.append(self._timeout) or wait(self, timeout)
    )
    packing_errors(model())
    assert limits and not any(limits)


def test_modules_without_context_parallelism_have_no_such_number() -> None:
    module = model()
    module.context_parallel = False
    assert set(packing_errors(module)) == {"others", "earlier", "alone"}
