"""Replays of traces find what hangs, and traces of the fake world are those of real processes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.launch_order import (
    Kernel,
    Setting,
    counted,
    hangs,
    most,
    setting_of,
    swapped,
    trace_of,
    traced,
)
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.testing import Pool

NOTHING = frozenset[int]()


def collective(group: str, after: frozenset[int] = NOTHING) -> Kernel:
    return Kernel(after, group, False, ((group, "all", 2, 0),))


def setting() -> Setting:
    layouts = {
        "vision": ModuleLayout([0, 1], dp_shard=2),
        "llm": ModuleLayout([0, 1, 2, 3], tp=2, pp=1, dp_shard=2),
    }
    return setting_of("small", layouts, 4)


def test_kernels_that_fill_the_device_hang_unless_they_start_in_order() -> None:
    """Rank 0 starts ``b`` first and rank 1 ``a``, and neither has room for both; in order both start ``a``."""
    traces = {
        0: [collective("a"), collective("b")],
        1: [collective("a", frozenset({1})), Kernel(NOTHING, "", False, ())],
    }
    traces[1].append(collective("b", frozenset({0})))
    for ctas, found in ((4, ""), (5, "2 ranks hang")):
        assert (
            hangs(traces, lambda k, n=ctas: n if k.communicator else 1, in_order=False, seed=0, places=8)[:12] == found
        )
        assert not hangs(traces, lambda k, n=ctas: n if k.communicator else 1, in_order=True, seed=0, places=8)


def test_hosts_of_another_order_hang_in_order() -> None:
    traces = {rank: [collective("a"), collective("b")] for rank in range(2)}
    assert not hangs(traces, lambda _: 5, in_order=True, seed=0, places=8)
    assert "2 ranks hang" in hangs(swapped(traces), lambda _: 5, in_order=True, seed=0, places=8)
    assert counted(traces[0], 8) == 65


def communications(kernels: list[Kernel]) -> list[tuple[str, Any]]:
    return [(kernel.communicator, kernel.meets) for kernel in kernels if kernel.communicator]


def traced_rank(rank: int, world: int) -> list[Kernel]:
    executor = setting().assembled(rank).executor
    batch = setting().batch(0, rank)
    with traced() as trace:
        executor.run(batch, train=True)
    return trace.kernels


def traced_alone(rank: int, world: int) -> list[list[Kernel]]:
    return [trace_of(setting(), one) for one in range(4)]


@pytest.mark.full
@pytest.mark.distributed
def test_traces_of_a_fake_world_are_those_of_real_processes(pool: Pool) -> None:
    real = pool.run(4, traced_rank)
    (alone,) = pool.run(1, traced_alone, group=False)
    for own, same in zip(real, alone, strict=True):  # gloo computes a little more around its sums
        assert communications(own) == communications(same)
    traces = dict(enumerate(real))
    assert most(traces, 8, 4, in_order=True) == 64
    assert most(swapped(traces), 8, 1, in_order=True) == 0
