"""What is gathered and summed once per step travels beside other work: nobody waits before it is needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import GroupRegistry, fake_world
from hetero_strategy.layout.spec import place
from hetero_strategy.model import Backbone
from hetero_strategy.model.materialize import materialize
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.gradients import Reached, settle
from hetero_strategy.testing import Pool
from tests.parallelize.pieces import MAKE, inputs_of, loss_of

LATE = 4.0
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
            fsdp.reduce(stage, {})
            fsdp.finish(stage)
        else:
            time.sleep(late * rank)
            begun = time.perf_counter()
            finish = settle(stage.parameters(), mesh.get_group("dp_replicate"), None, {})
            timed("start", begun)
            finish()
            timed("finish", begun)
    return took


@pytest.mark.full
@pytest.mark.distributed
def test_weights_travel_until_the_first_forward_needs_them(pool: Pool) -> None:
    first, _ = pool.run(2, seconds, SHARDED)
    assert first["gather"] < LATE / 2 < first["forward"]


@pytest.mark.full
@pytest.mark.distributed
def test_gradients_of_replicas_travel_until_the_step_ends(pool: Pool) -> None:
    first, _ = pool.run(2, seconds, REPLICATED)
    assert first["start"] < LATE / 2 < first["finish"]


def summed(rank: int, world: int, idle: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What happens in a last backward, in order, and gradients; with ``idle`` the second rank has no rows in it."""
    layout = SHARDED.resolved()
    registry = GroupRegistry(place({"m": layout}, world), [], "cpu")
    module, mesh = MAKE["titan"](), registry.mesh("m")
    assert mesh is not None
    stage = parallelize("m", module.double(), layout, mesh, torch.device("cpu"), seed=3)[0]
    names = {id(group): fqn for fqn, part in stage.named_modules() if hasattr(part, "_get_fsdp_state")
             for group in fsdp._groups(part._get_fsdp_state())}  # fmt: skip
    events: list[str] = []
    original = fsdp._reduce

    def noted(stage: torch.nn.Module, group: Any, reached: Reached) -> None:
        events.append(f"sum of {names[id(group)] or 'the rest'}")
        original(stage, group, reached)

    fsdp._reduce = noted
    try:
        fsdp.gather(stage)
        losses = [loss_of(stage(inputs_of("titan", rank), {}, None))]
        for fqn, block in stage.blocks().items():

            def begins(_: Any, __: Any, out: torch.Tensor, fqn: str = fqn) -> None:
                out.register_hook(lambda _: events.append(f"backward of {fqn}"))

            block.register_forward_hook(begins)
        losses.append(loss_of(stage(inputs_of("titan", 2 + rank), {}, None)))
        losses[0].backward()
        assert not events
        with fsdp.reducing(stage, {}):
            if not (idle and rank):
                losses[1].backward()
        during = len(events)
        fsdp.reduce(stage, {})
        assert during == (0 if idle and rank else len(events))
        fsdp.finish(stage)
    finally:
        fsdp._reduce = original
    assert all(isinstance(p.grad, DTensor) for p in stage.parameters())
    return events, {fqn: p.grad.full_tensor() for fqn, p in stage.named_parameters()}  # type: ignore[union-attr]


def alone(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Gradients of one process."""
    module = MAKE["titan"]().double()
    materialize(module, 3, name="m")
    for number in numbers:
        loss_of(module(inputs_of("titan", number), {}, None)).backward()
    return {fqn: p.grad for fqn, p in module.named_parameters() if p.grad is not None}


@pytest.mark.distributed
@pytest.mark.parametrize("idle", [False, True])
def test_gradients_of_a_block_travel_while_the_last_backward_goes_on(pool: Pool, idle: bool) -> None:
    """Also where a rank has nothing to do in it, which then sums in the same order."""
    ranks = pool.run(2, summed, idle)
    events = ranks[0][0]
    blocks = [event.removeprefix("backward of ") for event in events if event.startswith("backward")]
    assert len(blocks) > 1 and [e for e in events if e.startswith("sum")][-1] == "sum of the rest"
    for last, before in pairwise(blocks):
        assert events.index(f"sum of {last}") < events.index(f"backward of {before}")
    sums = [[event for event in one if event.startswith("sum")] for one, _ in ranks]
    assert sums[0] == sums[1]
    wanted = alone((0, 1, 2) if idle else (0, 1, 2, 3))
    for _, gradients in ranks:
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)


class Twice(Backbone):
    """Its first block runs twice."""

    block_list = "layers"
    width = hidden_width = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
        self.events: list[str] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for number in (0, 0, 1):
            rows = self.layers[number](rows)
            rows.register_hook(lambda _, number=number: self.events.append(f"backward of {number}"))
        return rows


def test_sums_over_shards_that_wait_for_replicas_end_with_a_step_that_fails() -> None:
    """Or the next step would add to them."""
    with fake_world(0, 4):
        module = Twice()
        fsdp.apply_fsdp(module, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
        module.to_empty(device="cpu")
        groups = [group for part in fsdp._parts(module) for group in fsdp._groups(part._get_fsdp_state())]
        for last, waits in ((False, 2), (True, 0), (False, 2)):
            out = module(torch.zeros(3, 8, requires_grad=True))
            fsdp.per_microbatch(module, last, {})
            out.sum().backward()
            assert sum(group._partial_reduce_output is not None for group in groups) == waits
        fsdp.forget(module)
        assert all(group._partial_reduce_output is None for group in groups)
        fsdp.release(module)


def test_a_block_that_runs_twice_is_summed_after_both_of_its_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    original, module = fsdp._reduce, Twice()

    def noted(stage: torch.nn.Module, group: Any, reached: Reached) -> None:
        number = [group in fsdp._groups(layer._get_fsdp_state()) for layer in module.layers]  # type: ignore[operator]
        module.events.append(f"sum of {number.index(True) if any(number) else 'the rest'}")
        original(stage, group, reached)

    monkeypatch.setattr(fsdp, "_reduce", noted)
    with fake_world(0, 2):
        fsdp.apply_fsdp(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
        module.to_empty(device="cpu")
        fsdp.gather(module)
        out = module(torch.zeros(3, 8, requires_grad=True))
        with fsdp.reducing(module, {}):
            out.sum().backward()
        fsdp.reduce(module, {})
        fsdp.finish(module)
    assert module.events == ["backward of 1", "sum of 1", "backward of 0", "backward of 0", "sum of 0"]
