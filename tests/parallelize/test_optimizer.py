"""Optimizers step on shards; outside of a step they hold whole parameters and states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hetero_strategy.layout.registry import fake_world
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.optimizer import ELEMENTWISE, _Shards, choose_kernels
from hetero_strategy.testing import Pool

STEPS = 3


def tensors(step: int) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return [torch.randn(5, 3, generator=numbers, dtype=torch.float64) for _ in range(2)]


def run(kind: type[optim.Optimizer], sharded: bool) -> tuple[list[Any], Any, optim.Optimizer]:
    """Parameters after some steps, the first of them a DTensor or not; what a closure saw; the optimizer."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def placed(number: int, tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded and not number else tensor.clone()

    own = [nn.Parameter(placed(i, t)) for i, t in enumerate(tensors(0))]
    optimizer = kind(own, lr=0.1)  # type: ignore[call-arg]
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if sharded:
        choose_kernels([optimizer], {}, lambda decision: decision)
    seen: list[Any] = []

    def closure() -> float:
        seen.append([p is mine for p, mine in zip(optimizer.param_groups[0]["params"], own, strict=True)])
        optimizer.zero_grad()
        for number, (p, gradient) in enumerate(zip(own, tensors(len(seen)), strict=True)):
            p.grad = placed(number, gradient)
        return 7.0 + len(seen)

    for step in range(STEPS):
        if step == 1 and sharded:  # as when a checkpoint is loaded: other tensors of the same values
            optimizer.state.update({p: copy.deepcopy(state) for p, state in optimizer.state.items()})
        assert optimizer.step(closure) == 8.0 + step
        schedule.step()
    return own, seen, optimizer


def kinds_on_rank(rank: int, world: int) -> dict[str, tuple[float, bool]]:
    """By optimizer: how far parameters and states are from one that knows no shards, and whether all is in place."""
    found = {}
    for kind in ELEMENTWISE:
        own, seen, optimizer = run(kind, True)
        expected, _, plain = run(kind, False)
        apart, holds = 0.0, all(all(one) for one in seen)
        for p, q in zip(own, expected, strict=True):
            pairs = [(p, q), *((optimizer.state[p][key], plain.state[q][key]) for key in plain.state[q])]
            for mine, theirs in pairs:
                if not isinstance(theirs, torch.Tensor):
                    continue
                holds &= isinstance(mine, DTensor) == (isinstance(p, DTensor) and theirs.dim() > 0)
                whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
                apart = max(apart, float((whole.detach().double() - theirs.detach().double()).abs().max()))
        holds &= set(optimizer.state) <= set(own) and optimizer.param_groups[0]["params"] == own
        holds &= own[0].grad is not None and isinstance(own[0].grad, DTensor) and local(own[0]).shape[0] < 5
        found[kind.__name__] = apart, holds
    return found


@pytest.mark.distributed
def test_every_elementwise_optimizer_steps_on_shards(pool: Pool) -> None:
    for found in pool.run(2, kinds_on_rank):
        assert len(found) == len(ELEMENTWISE)
        for kind, (apart, holds) in found.items():
            assert apart < 1e-8, kind  # ASGD keeps its rate in fp32
            assert holds, kind


def test_a_parameter_may_have_its_first_gradient_later() -> None:
    """That of an encoder whose first item comes in the second step."""
    for kind in (optim.SGD, optim.Adam, optim.AdamW):
        own = [nn.Parameter(torch.ones(2)) for _ in range(4)]
        for pair, chooses in ((own[:2], True), (own[2:], False)):
            optimizer = kind(pair, lr=0.1, **({"momentum": 0.9} if kind is optim.SGD else {}))  # type: ignore[arg-type]
            if chooses:
                _Shards(optimizer)
            for step in range(3):
                for p in pair[: 1 + (step > 0)]:
                    p.grad = torch.full((2,), 1.0 + step)
                optimizer.step()
        for p, q in zip(own[:2], own[2:], strict=True):
            torch.testing.assert_close(p, q, msg=kind.__name__)


def test_kernels_that_a_person_chose_stay() -> None:
    for kind in (optim.Adam, optim.AdamW):
        for given, fused, foreach in ((None, True, None), (False, False, True), (True, True, None)):
            optimizer = kind([nn.Parameter(torch.ones(2))], fused=given)
            choose_kernels([optimizer], {}, lambda decision: decision)
            assert [optimizer.param_groups[0][key] for key in ("fused", "foreach")] == [fused, foreach]
            # Else Lightning lets the kernel look for overflows, which sees those of this rank alone.
            assert not getattr(optimizer, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("mixed", [False, True])
def test_all_ranks_loop_where_one_has_sharded_and_plain_parameters_in_a_group(mixed: bool) -> None:
    """Other optimizers than elementwise ones: copies of a parameter would drift apart by rounding."""
    optimizer = optim.Adafactor([nn.Parameter(torch.ones(2))])
    choose_kernels([optimizer], {}, lambda own: own or mixed)
    assert optimizer.param_groups[0]["foreach"] is (False if mixed else None)


def test_a_scheduler_may_be_made_after_an_optimizer_steps_on_shards() -> None:
    """As LearningRateFinder does."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter], lr=1.0)
    _Shards(optimizer)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
    assert parameter.tolist() == [-0.5, -0.5]


def test_who_compares_versions_sees_which_sharded_parameters_a_step_has_changed() -> None:
    """A loss is not computed again with other weights."""
    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        one, other, gradient = (DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False) for _ in range(3))
        own = [nn.Parameter(one), nn.Parameter(other)]
        optimizer = optim.SGD(own, lr=0.1)
        _Shards(optimizer)
        own[0].grad, before = gradient, [p._version for p in own]
        optimizer.step()
        assert [p._version > version for p, version in zip(own, before, strict=True)] == [True, False]
