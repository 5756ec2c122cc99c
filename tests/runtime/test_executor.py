"""What every schedule asks of the executor, on one rank among fake ones."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.host_time import MICROBATCHES, one_rank
from hetero_strategy.model.random_numbers import RandomNumbers
from hetero_strategy.runtime.step import _differ, _StepGradients


def seeds_of_a_step(rank: int, world: int) -> list[tuple[list[int], list[int]]]:
    """Of every module: seeds of its forwards and of its backwards, in the order of 1F1B."""
    forwards, backwards, start, again = defaultdict(list), defaultdict(list), RandomNumbers.start, RandomNumbers.again

    def started(numbers: RandomNumbers, *given: Any, **options: Any) -> int:
        seed = start(numbers, *given, **options)
        backwards[numbers].remove(seed)
        forwards[numbers].append(seed)
        return seed

    def begun_again(numbers: RandomNumbers, seed: int) -> None:
        backwards[numbers].append(seed)
        again(numbers, seed)

    with (
        one_rank(1, 0) as (executor, batch),
        patch.object(RandomNumbers, "start", started),
        patch.object(RandomNumbers, "again", begun_again),
    ):
        executor.run(batch, train=True)
    return [(forwards[numbers], backwards[numbers]) for numbers in forwards]


@pytest.mark.distributed
def test_a_backward_has_the_random_numbers_of_its_forward(pool) -> None:
    """Recompute may run the forward again, when other microbatches have begun."""
    (seeds,) = pool.run(1, seeds_of_a_step, group=False)
    assert len(seeds) == 3
    for forwards, backwards in seeds:
        assert len(set(forwards)) > MICROBATCHES // 4 and forwards == backwards


def test_gradients_of_before_are_there_after_a_step_that_fails() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = before = torch.ones(2)

    def fails(*_: Any, **__: Any) -> None:
        weight.grad = torch.full((2,), 7.0)
        raise MemoryError

    running: Any = SimpleNamespace(gradients={})
    runner: Any = SimpleNamespace(
        _parameters=[weight], executor=SimpleNamespace(weights={}, run=fails, running=running)
    )
    step = _StepGradients(runner, None, 0, None)  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        step.run({})
    assert weight.grad is before and torch.equal(running.gradients[id(weight)], torch.full((2,), 7.0))
    with pytest.raises(MemoryError):
        step.run({}, drop=True)
    assert weight.grad is None


def test_factors_of_losses_that_are_no_numbers_are_others() -> None:
    """Or a step behind one whose weighting divided by nothing would keep its gradients."""
    nan = float("nan")
    assert _differ(nan, 1.0) and _differ(1.0, nan) and _differ(None, 1.0)
    assert not _differ(1.0, 1.0) and not _differ(None, None)
