"""What is gathered and summed once per step travels beside other work: nobody waits before it is needed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.placement import place
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.gradients import settle
from tests.distributed.harness import Pool
from tests.parallelize.pieces import MAKE, inputs_of, loss_of

LATE = 1.5
"""Seconds by which the second rank comes later."""
SHARDED = ModuleLayout(2, dp_shard=2)
REPLICATED = ModuleLayout(2, dp_replicate=2)


def seconds(rank: int, world: int, layout: ModuleLayout) -> dict[str, float]:
    """What a rank waits for another one: to begin with, and when it needs what that one has."""
    layout = replace(layout).resolved()
    registry = GroupRegistry(place({"m": layout}, world), [], "cpu")
    module, mesh = MAKE["titan"](), registry.mesh("m")
    assert mesh is not None
    stage = parallelize("m", module, layout, mesh, torch.device("cpu"), seed=3)[0]
    took: dict[str, float] = {}

    def timed(name: str, begun: float) -> None:
        took[name] = time.perf_counter() - begun

    for late in (0.0, LATE):
        time.sleep(late * rank)
        begun = time.perf_counter()
        if layout.dp_shard > 1:
            fsdp.gather(stage)
        timed("gather", begun)
        loss = loss_of(stage(inputs_of("titan", rank), {}, None))
        timed("forward", begun)
        loss.backward()
        if layout.dp_shard > 1:
            fsdp.reduce(stage)
            fsdp.finish(stage)
        else:
            time.sleep(late * rank)
            begun = time.perf_counter()
            finish = settle(stage.parameters(), mesh.get_group("dp_replicate"))
            timed("start", begun)
            finish()
            timed("finish", begun)
    return took


@pytest.mark.distributed
def test_weights_travel_until_the_first_forward_needs_them(pool: Pool) -> None:
    first, _ = pool.run(2, seconds, SHARDED)
    assert first["gather"] < LATE / 2 < LATE * 0.9 < first["forward"]


@pytest.mark.distributed
def test_gradients_of_replicas_travel_until_the_step_ends(pool: Pool) -> None:
    first, _ = pool.run(2, seconds, REPLICATED)
    assert first["start"] < LATE / 2 < LATE * 0.9 < first["finish"]
