"""A dry run builds what processes build, and finds what is wrong with a run before it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero_strategy.boundary import transport
from hetero_strategy.boundary.route import Transfer
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout, registry
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.profiling.stage_memory import blocks_of, stage_bytes
from hetero_strategy.runtime.connect import message_buffers
from hetero_strategy.schedule import compile as compiling
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.compile import StepCompiler, StepProgram
from hetero_strategy.simulator.cost_model import MIXED as HALF
from hetero_strategy.strategy import coverage
from hetero_strategy.strategy.assembly import assemble
from hetero_strategy.strategy.blueprint import Options, checked_blueprint
from hetero_strategy.strategy.dry_run import DryRun, dry_run
from hetero_strategy.testing import Pool, Setting
from recipes.dry_run import report

MIXED = Storage(torch.bfloat16, torch.float32)
SIZES: dict[str, Any] = {"vision": (64, 2), "audio": (64, 1), "llm": (128, 4), "samples": 8, "microbatches": 2}
FEW: dict[str, Any] = SIZES | {"vision": (64, 1), "llm": (128, 2)}
"""Layers."""


def layout(ranks: Any, **degrees: Any) -> ModuleLayout:
    return ModuleLayout(ranks, **degrees)


FOUR = {
    "colocated": {"vision": layout(4), "audio": layout(4, dp_replicate=4), "llm": layout(4, tp=2, dp_shard=2)},
    "pipelined": {"vision": layout(4, dp_replicate=2, dp_shard=2), "llm": layout(4, pp=2, dp_shard=2)},
    "disjoint": {"vision": layout([0, 1]), "audio": layout([1]), "llm": layout([2, 3], tp=2)},
    "mixed": {"vision": layout([1, 2, 3]), "llm": layout(4, pp=2, tp=2, vpp=2)},
}


def dry(setting: Setting, **options: Any) -> DryRun:
    found: dict[str, Any] = {"world_size": setting.world, "microbatches": setting.microbatches}
    found["options"] = Options(setting.scheduling, storage=MIXED)
    return dry_run(setting.model(), setting.layouts, [setting.metadata(0)], **(found | options))


@dataclass
class Real:
    """What a process has built."""

    tensors: dict[str, tuple[int, ...]]
    parameters: int
    groups: int
    connections: int
    program: StepProgram


def really(rank: int, world: int, setting: Setting) -> Real:
    counts: Counter[str] = Counter()
    new_group, start = dist.new_group, transport.start_messages

    def group(ranks: Any = None, **options: Any) -> Any:
        counts["groups"] += ranks is not None and len(ranks) > 1 and rank in ranks
        return new_group(ranks, **options)

    def started(wire: transport.Wire, messages: Sequence[transport.WireMessage]) -> Any:
        counts["connections"] += sum(message.sends for message in messages)
        return start(wire, messages)

    with patch.object(dist, "new_group", group), patch.object(transport, "start_messages", started):
        planned = checked_blueprint(setting.model(), setting.placement, Options(setting.scheduling, storage=MIXED))
        made = assemble("model", setting.model(), planned, rank, torch.device("cpu"))
    plan = planned.plan_step(setting.metadata(0), BalanceConfig(), world, microbatches=setting.microbatches)
    return Real(
        {name.removeprefix("model."): tuple(local(x).shape) for name, x in made.state.model_tensors().items()},
        sum(local(p).nbytes for own in made.executor.local.values() for p in own.parameters),
        counts["groups"],
        counts["connections"],
        made.executor.compiler.program(plan, rank=rank, train=True),
    )


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("name", FOUR)
def test_a_dry_run_builds_what_processes_build(pool: Pool, name: str) -> None:
    schedule = "interleaved_1f1b" if name == "mixed" else "1f1b"
    setting = Setting(name, FOUR[name], schedule, **SIZES)
    found = dry(setting)
    assert not found.faults
    every = pool.run(4, really, setting, timeout=120)
    for one in found.ranks:
        real = every[one.rank]
        assert one.tensors == real.tensors
        assert one.bytes["parameters"] == real.parameters
        assert one.groups == real.groups
        assert one.connections == real.connections
        assert one.programs == (real.program,)
        assert np.array_equal(one.programs[0].index, real.program.index)


@pytest.mark.full
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_replicas_of_a_small_run_are_built_alike_in_a_large_one(world: int) -> None:
    """With ever more replicas a rank has the shards of its coordinate, and hence of some rank of the smallest run."""

    def layouts(count: int) -> dict[str, ModuleLayout]:
        return {
            "vision": layout(count, dp_replicate=-1, dp_shard=2),
            "llm": layout(count, pp=2, tp=2, dp_replicate=-1, dp_shard=1),
        }

    small = dry(Setting("small", layouts(4), **FEW))
    large = dry(Setting("large", layouts(world), **(FEW | {"samples": 2 * world})), ranks_per_node=8)
    assert not small.faults and not large.faults
    assert sum(one.alike for one in {r.lane: r for r in large.ranks}.values()) == world
    of = {(r.stages, r.rank % 2): r for r in small.ranks}
    for one in large.ranks:
        alike = of[one.stages, one.rank % 2]
        assert one.tensors == alike.tensors
        for what in ("parameters", "states", "gathered"):
            assert one.bytes[what] == alike.bytes[what]
        assert {a.action for a in one.programs[0].actions} == {a.action for a in alike.programs[0].actions}
    assert world <= 8 or any(sent.between for one in large.ranks for sent in one.sent)


def gathered(layouts: dict[str, ModuleLayout], keep: tuple[str, ...] = ()) -> tuple[list[int], list[float]]:
    """Return the bytes of whole weights and gradients on each built rank, and those of the formula."""
    setting = Setting("gathered", layouts, **SIZES)
    options = Options(storage=replace(MIXED, keep=keep))
    made = dry_run(setting.model(), layouts, world_size=setting.world, options=options)
    assert not made.faults
    plan, formula = made.plan, []
    for rank in made.ranks:
        sizes = [
            stage_bytes(
                plan.spec.modules[node.module], of := plan.layouts[node.module], *blocks_of(of, node),
                plan.graph.stages[node].sharded, HALF,
            )
            for node in rank.stages
        ]  # fmt: skip
        units = [(np.sort(size.gathered + size.reduced), size.once) for size in sizes]
        formula.append(sum(float((each if once else each[-2:]).sum()) for each, once in units))  # one gathered ahead
    return [rank.bytes["gathered"] for rank in made.ranks], formula


@pytest.mark.parametrize("layouts", [*FOUR.values(), {"llm": layout(1)}], ids=[*FOUR, "alone"])
def test_whole_weights_of_built_stages_are_those_of_the_formula(layouts: dict[str, ModuleLayout]) -> None:
    built, formula = gathered(layouts)
    assert built == formula and any(built)


def test_layers_in_fp32_make_one_rank_gather_all_weights_and_reduce_their_gradients() -> None:
    """Copies have one dtype, so a stage with such layers has FSDP, whose units hold gradients in fp32."""
    (copies,), _ = gathered({"llm": layout(1)})
    (units,), _ = gathered({"llm": layout(1)}, keep=("llm.*norm*",))
    assert units > 3 * copies


SMALL = Setting("small", FOUR["pipelined"], **FEW)


def test_a_model_stays_as_it_is_and_processes_are_refused() -> None:
    model = SMALL.model()
    before = {name: id(p) for name, p in model.named_parameters()}
    made = dry_run(model, SMALL.layouts, world_size=4)
    assert not made.faults and made.ranks[0].programs == ()
    assert before == {name: id(p) for name, p in model.named_parameters()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="has a process group"):
            dry_run(model, SMALL.layouts, world_size=4)
    finally:
        dist.destroy_process_group()


def test_a_group_that_is_missing_or_other_on_a_rank_is_found() -> None:
    right = registry.rank_sets

    def lost(*args: Any) -> list[tuple[int, ...]]:
        return [ranks for ranks in right(*args) if ranks != (2, 3)]

    with patch.object(registry, "rank_sets", lost):
        found = dry(SMALL)
    assert {f.rank for f in found.faults} == {2, 3} and {f.check for f in found.faults} == {"build"}
    assert all("vision: its mesh of" in f.message and "ranks (2, 3)" in f.message for f in found.faults)
    assert [one.rank for one in found.ranks] == [0, 1], "the others are built"

    def turned(*args: Any) -> list[tuple[int, ...]]:
        return right(*args)[:: -1 if dist.get_rank() == 1 else 1]

    with patch.object(registry, "rank_sets", turned):
        found = dry(SMALL)
    assert [(f.check, f.rank) for f in found.faults] == [("groups", 1)]

    def outside(*args: Any) -> list[tuple[int, ...]]:
        return [*right(*args), (3, 4)]

    with patch.object(registry, "rank_sets", outside):
        found = dry(SMALL)
    assert {f.rank for f in found.faults} == {0, 1, 2, 3}
    assert all("Rank 4 is out of range" in f.message for f in found.faults)


def test_lists_that_wait_for_each_other_are_found() -> None:
    right = StepCompiler.schedule

    def turned(self: StepCompiler, *args: Any, **options: Any) -> Any:
        made = right(self, *args, **options)
        lanes = list(made.lanes)
        first = Action("F", StageId("llm", 1), 0)
        k = next(k for k, lane in enumerate(lanes) if first in lane.actions)
        others = tuple(a for a in lanes[k].actions if a != first)
        place = others.index(Action("B", StageId("llm", 1), 1))
        lanes[k] = replace(lanes[k], actions=(*others[: place + 1], first, *others[place + 1 :]))
        return replace(made, lanes=tuple(lanes))

    with patch.object(StepCompiler, "schedule", turned):
        found = dry(SMALL)
    assert [f.check for f in found.faults] == ["schedule"]
    assert "llm.1" in found.faults[0].message
    assert len(found.ranks) == 4, "ranks are built all the same"


@pytest.mark.parametrize(("lane", "culprit"), [("sends", 3), ("receives", 1), ("shorter", 1)])
def test_a_route_that_misses_rows_is_found(lane: str, culprit: int) -> None:
    right = compiling.route

    def damaged(blocks: Any, source: Any, target: Any, rank: int) -> Any:
        made = right(blocks, source, target, rank)
        hop = made.forward.first
        if rank != culprit or not getattr(hop, "sends" if lane == "sends" else "receives"):
            return made
        if lane == "shorter":
            (peer, rows), *rest = hop.receives
            changed = replace(hop, receives=((peer, rows[:-1]), *rest))
        else:
            changed = replace(hop, **{lane: getattr(hop, lane)[1:]})
        forward: Transfer[Any] = replace(made.forward, first=changed)
        return replace(made, forward=forward)

    with patch.object(compiling, "route", damaged):
        found = dry(SMALL)
    assert found.faults and {f.check for f in found.faults} == {"program"}
    assert any(f.rank == culprit for f in found.faults)
    assert any(f.rank != culprit and f"rank {culprit}" in f.message for f in found.faults), (
        "the other side misses it too"
    )
    assert any(f"rows reach rank {culprit}" in f.message for f in found.faults) is (lane != "sends")


@pytest.mark.full
def test_a_stage_too_large_for_the_memory_is_found() -> None:
    made = dry(SMALL)
    buffers = message_buffers(made.plan.graph, made.world_size)
    assert buffers.all()
    needs = [one.total + int(buffers[one.rank]) for one in made.ranks]
    most = max(needs)
    assert not dry(SMALL, memory=most).faults
    found = dry(SMALL, memory=most - 1)
    assert found.faults and {f.check for f in found.faults} == {"memory"}
    assert all("NCCL's buffers for rows" in f.message for f in found.faults)
    large = [one for one, need in zip(found.ranks, needs, strict=True) if need == most]
    assert [f.rank for f in found.faults] == [one.rank for one in large]
    assert {f.module for f in found.faults} <= {"vision", "llm"}


def test_parts_that_make_up_no_tensor_are_found() -> None:
    right = coverage.Coverage._elements
    with patch.object(coverage.Coverage, "_elements", lambda self, tensor: right(self, tensor) - 1):
        found = dry(SMALL)
    assert {f.check for f in found.faults} == {"checkpoint"}
    assert {(f.module, f.stage) for f in found.faults} == {("vision", 0), ("llm", 0), ("llm", 1)}


def test_peers_that_do_not_meet_at_start_are_found() -> None:
    from hetero_strategy.runtime.connect import Meetings

    right = Meetings.peers
    with patch.object(Meetings, "peers", lambda self, rank: right(self, rank) - {3}):
        found = dry(SMALL)
    assert found.faults and {f.check for f in found.faults} == {"connect"}
    assert all("with rank 3, which it does not meet" in f.message for f in found.faults)


def test_the_report_shows_every_lane_and_fault(capsys: pytest.CaptureFixture[str]) -> None:
    found = dry(SMALL, memory=1, ranks_per_node=2)
    report(found)
    shown = capsys.readouterr().out
    assert "dry run of 4 ranks, of which 4 were built" in shown
    assert shown.count("2 (0 to 1)") == shown.count("2 (2 to 3)") == 2
    assert "4 faults" in shown and "memory vision.0, rank 0: vision.0, llm.0 on rank 0 need" in shown
    report(replace(found, faults=found.faults * 6))
    assert "and 4 more" in capsys.readouterr().out
