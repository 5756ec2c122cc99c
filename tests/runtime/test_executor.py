"""What every schedule asks of the executor, on one rank among fake ones."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero_strategy.boundary import transport
from hetero_strategy.boundary.transport import Wire, WireMessage
from hetero_strategy.layout.row_sharding import RowSharding
from hetero_strategy.layout.spec import Coordinate, ModuleLayout
from hetero_strategy.model.random_numbers import RandomNumbers
from hetero_strategy.parallelize import fsdp
from hetero_strategy.runtime.actions import LocalStage
from hetero_strategy.runtime.recorder import LEAD, Lead
from hetero_strategy.runtime.step import EVERY, GarbageCollection, _differ, _StepGradients, _upstream
from hetero_strategy.schedule.action import StageId
from hetero_strategy.testing import Setting, one_rank

RANK, CALL, STAGES, MICROBATCHES = 3, 2, 8, 32


def small(instances: int) -> Setting:
    """Return a pipeline of small stages with both encoders on all of its ranks."""
    ranks = tuple(range(STAGES * instances))
    encoder = ModuleLayout(ranks, dp_replicate=len(ranks), dp_shard=1)
    layouts = {"vision": encoder, "audio": encoder, "llm": ModuleLayout(ranks, pp=STAGES, dp_replicate=instances)}
    sizes = {"vision": (32, 1), "audio": (32, 1), "llm": (32, STAGES), "cells": (1, 2), "clip": (2, 6), "text": (4, 9)}
    return Setting("", layouts, samples=2 * MICROBATCHES * instances, microbatches=MICROBATCHES, **sizes)


def seeds_of_a_step(rank: int, world: int) -> dict[str, tuple[list[int], list[int], set[tuple[int, ...]]]]:
    """Of every module on the fourth of eight ranks: seeds of its forwards and of its backwards, in the order of 1F1B,
    and of which step, call, instance and rank of the instance they are.
    """
    forwards, backwards, start, again = defaultdict(list), defaultdict(list), RandomNumbers.start, RandomNumbers.again
    places = defaultdict(set)

    def started(numbers: RandomNumbers, metadata: Any, call: int, microbatch: int, *given: Any, **options: Any) -> int:
        seed = start(numbers, metadata, call, microbatch, *given, **options)
        backwards[numbers].remove(seed)
        forwards[numbers].append(seed)
        places[numbers].add((metadata.step, call, *given[:2]))
        return seed

    def begun_again(numbers: RandomNumbers, seed: int) -> None:
        backwards[numbers].append(seed)
        again(numbers, seed)

    with (
        one_rank(small(1), RANK) as (executor, batch),
        patch.object(RandomNumbers, "start", started),
        patch.object(RandomNumbers, "again", begun_again),
    ):
        executor.run(batch, train=True, call=CALL)
    modules = {node.module: local.random_numbers for node, local in executor.local.items()}
    return {name: (forwards[numbers], backwards[numbers], places[numbers]) for name, numbers in modules.items()}


@pytest.mark.distributed
def test_random_numbers_are_those_of_the_place_and_a_backward_has_those_of_its_forward(pool) -> None:
    """Recompute may run the forward again, when other microbatches have begun. Encoders have an instance on each rank,
    the language model has one on all of them.
    """
    (found,) = pool.run(1, seeds_of_a_step, group=False)
    assert len(found) == 3
    for module, (forwards, backwards, places) in found.items():
        assert len(set(forwards)) > MICROBATCHES // 4 and forwards == backwards
        assert places == {(0, CALL, 0 if module == "llm" else RANK, 0)}, module


def seeds_of_steps(rank: int, world: int) -> list[int]:
    """How often generators are seeded in each of three steps."""
    seed, found = RandomNumbers.seed, []

    def seeded(numbers: RandomNumbers, position: int) -> None:
        found[-1] += numbers._microbatch is not None
        seed(numbers, position)

    with one_rank(small(1), RANK) as (executor, batch), patch.object(RandomNumbers, "seed", seeded):
        for _ in range(3):
            found.append(0)
            executor.run(batch, train=True)
    return found


@pytest.mark.distributed
def test_where_nothing_draws_nothing_is_seeded_after_the_first_step(pool) -> None:
    ((first, *others),) = pool.run(1, seeds_of_steps, group=False)
    assert first > 10 and others == [0, 0]


@pytest.mark.parametrize("parts", [1, 2])
def test_random_numbers_are_apart_where_an_instances_ranks_have_other_rows(parts: int) -> None:
    adapter: Any = SimpleNamespace(random_numbers=object(), parameters=list, recomputed_parts=list)
    node: Any = SimpleNamespace(row_sharding=RowSharding(parts), grid=np.arange(2)[None])
    stage = LocalStage(adapter, node, Coordinate(0, 1, 0, 0, 1))
    assert stage.rows_of == parts - 1


def test_gradients_of_before_are_there_after_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = before = torch.ones(2)

    def fails(*_: Any, **__: Any) -> None:
        weight.grad = torch.full((2,), 7.0)
        raise MemoryError

    running: Any = SimpleNamespace(gradients={})
    executor = SimpleNamespace(weights={}, run=fails, running=running, stages={"llm": (stage := torch.nn.Module())})
    runner: Any = SimpleNamespace(_parameters=[weight], executor=executor)
    step = _StepGradients(runner, None, 0, None)  # type: ignore[arg-type]
    forgot: list[torch.nn.Module] = []
    monkeypatch.setattr(fsdp, "forget", forgot.append)
    with pytest.raises(MemoryError):
        step.run({})
    assert weight.grad is before and torch.equal(running.gradients[id(weight)], torch.full((2,), 7.0))
    with pytest.raises(MemoryError):
        step.run({}, drop=True)
    assert weight.grad is None and forgot == [stage, stage]


def test_factors_of_losses_that_are_no_numbers_are_others() -> None:
    """Or a step behind one whose weighting divided by nothing would keep its gradients."""
    nan = float("nan")
    assert _differ(nan, 1.0) and _differ(1.0, nan) and _differ(None, 1.0)
    assert not _differ(1.0, 1.0) and not _differ(None, None)


def messages_of(rank: int, world: int) -> tuple[set[tuple[bool, int, int]], set[tuple[bool, int, int]]]:
    """Which way, to or from whom and by which tag messages go while the model is put on its ranks, and in a step."""
    seen: list[tuple[bool, int, int]] = []
    start = transport.start_messages

    def started(wire: Wire, messages: Sequence[WireMessage]) -> list[dist.Work]:
        seen.extend((message.sends, message.peer, wire.tag) for message in messages)
        return start(wire, messages)

    with patch.object(transport, "start_messages", started), one_rank(small(2), RANK) as (executor, batch):
        met = set(seen)
        seen.clear()
        executor.run(batch, train=True)
    return met, set(seen)


@pytest.mark.distributed
def test_who_exchanges_rows_has_met_before_the_first_step(pool) -> None:
    """Else the first message of a pair would set up its connection in the middle of a step, which holds up both."""
    ((met, sent),) = pool.run(1, messages_of, group=False)
    assert len(sent) > 4 and sent <= met


class Moment:
    """Stands in for an event of a device that has run nothing until somebody waits for it."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append(self)


def leads_of_two_steps(rank: int, world: int) -> list[int]:
    """How many actions the host was ahead of the device before each one of its own."""
    waited: list[Moment] = []
    ends: list[Moment] = []
    ahead: list[int] = []
    with one_rank(small(2), RANK) as (executor, batch):
        ran = executor.recorder.ran

        def marked(*given: Any) -> None:
            ran(*given)
            ends.append(executor.recorder._current.marks[-1][-1])  # type: ignore[union-attr,arg-type]

        class Counted(Lead):
            def wait(self) -> None:
                super().wait()
                ahead.append(len(ends) - len(waited))

        executor.recorder.now = lambda: Moment(waited)  # type: ignore[assignment,return-value]
        executor.recorder.lead = Counted()  # as on CUDA
        with patch.object(executor.recorder, "ran", marked):
            for _ in range(2):
                executor.run(batch, train=True)
    assert waited == ends[: len(waited)], "the oldest first, each once"
    return ahead


@pytest.mark.distributed
def test_the_host_is_some_actions_ahead_of_a_device_and_not_a_step(pool) -> None:
    """Else rows of all microbatches would stay in the memory of messages. The device of the host itself is waited for
    by nobody.
    """
    (ahead,) = pool.run(1, leads_of_two_steps, group=False)
    assert ahead == [min(number, LEAD - 1) for number in range(len(ahead))] and len(ahead) > 4 * LEAD


def test_a_loss_reaches_all_modules_before_its_own() -> None:
    """Also those whose rows come to it through others, in whatever order edges are."""
    vision, llm, draw, other = (StageId(name, 0) for name in ("vision", "llm", "draw", "other"))
    graph = SimpleNamespace(stages=(draw, other, llm, vision), edges=((llm, draw), (vision, llm)))
    executor: Any = SimpleNamespace(compiler=SimpleNamespace(graph=graph))
    assert _upstream(executor) == {
        "vision": {"vision"}, "llm": {"vision", "llm"}, "draw": {"vision", "llm", "draw"}, "other": {"other"},
    }  # fmt: skip


class Ring:
    def __init__(self) -> None:
        self.ring = self


def test_rings_live_until_a_set_step() -> None:
    assert gc.isenabled()
    garbage = GarbageCollection()
    garbage.step()
    assert not gc.isenabled()
    ring = weakref.ref(Ring())
    for _ in range(1, EVERY):
        garbage.step()
    assert ring() is not None
    garbage.step()
    assert ring() is None
    garbage.stop()
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_so() -> None:
    gc.disable()
    try:
        garbage = GarbageCollection()
        garbage.step()
        garbage.stop()
        assert not gc.isenabled()
    finally:
        gc.enable()
