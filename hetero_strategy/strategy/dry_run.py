"""Build in one process what every rank of a run would build, on fake process groups and the meta device.

The process plays one rank after another, and runs the code of a real start (:func:`assemble`) for each. Ranks that host
the same stages build the same objects, up to their coordinates, so only the first and the last rank of each such set
are built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist

from hetero_strategy.checkpoint.saving import pieces_of
from hetero_strategy.errors import ConfigError, HeteroError
from hetero_strategy.layout.registry import fake_world
from hetero_strategy.layout.spec import ModuleLayout, place
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.fsdp import whole_bytes
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepMetadata, StepPlan
from hetero_strategy.runtime.connect import meetings_of, message_buffers
from hetero_strategy.schedule.action import Schedule, StageGraph, StageId
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.check_program import program_faults
from hetero_strategy.schedule.compile import StepCompiler, StepProgram, Traffic, compile_step, sent
from hetero_strategy.strategy.assembly import Assembled, assemble
from hetero_strategy.strategy.blueprint import Blueprint, Options, checked_blueprint
from hetero_strategy.strategy.coverage import Coverage

PROGRAMS = 4096
"""Most step programs of peers that are kept at a time."""
META = torch.device("meta")


@dataclass(frozen=True)
class Fault:
    """A fault that would make a real start or a step fail."""

    check: Literal["build", "groups", "schedule", "program", "connect", "memory", "checkpoint"]
    """Check that found it."""
    message: str
    rank: int | None = None
    """Rank with the fault; None: all ranks."""
    module: str | None = None
    stage: int | None = None


@dataclass(frozen=True)
class BuiltRank:
    """A rank's objects in a dry run."""

    rank: int
    lane: int
    """Number of its set among the sets of ranks that host the same stages."""
    alike: int
    """Number of ranks in this set."""
    stages: tuple[StageId, ...]
    bytes: Mapping[str, int]
    """Bytes by kind: ``parameters``, ``buffers``, ``gradients`` and AdamW's ``states`` that the rank owns;
    ``gathered``: the most bytes of whole weights and their gradients at a time; ``rows``: the most bytes of other
    stages' rows that wait for their backward. Activations inside stages do not count."""
    tensors: Mapping[str, tuple[int, ...]]
    """Shape of this rank's part of each owned parameter and persistent buffer, by ``<module>.<fqn>``."""
    groups: int
    """Number of process groups that it is in, without those of all ranks and of this rank alone."""
    channels: int
    """Number of groups for rows alone, which NCCL needs besides these."""
    connections: int
    """Number of ranks to which it may send, and sends at start; each edge, direction and hop counts."""
    pieces: int
    """Number of the model's tensors of which it saves a piece to a checkpoint."""
    programs: tuple[StepProgram, ...]
    """Its program for each batch."""
    sent: tuple[Traffic, ...]
    """Bytes of rows that it sends in each batch."""

    @property
    def total(self) -> int:
        """Return the sum of all bytes."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class DryRun:
    """A result of a dry run."""

    world_size: int
    plan: Blueprint
    ranks: tuple[BuiltRank, ...]
    """Ranks that were built, ascending."""
    faults: tuple[Fault, ...]


def dry_run(
    model: MultimodalModel,
    layouts: Mapping[str, ModuleLayout],
    batches: Sequence[StepMetadata] = (),
    *,
    world_size: int,
    ranks_per_node: int = 1 << 30,
    microbatches: int | None = 1,
    microbatch_rows: Mapping[str, int | Literal["equal"]] | None = None,
    balance: BalanceConfig | None = None,
    options: Options = Options(),  # noqa: B008
    memory: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> DryRun:
    """Build a run of ``world_size`` ranks in this process, and check what the ranks would build and run.

    Args:
        model: model on the meta device; it is not changed.
        layouts: layout of every module.
        batches: global batches whose steps are planned, scheduled and compiled.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``; default: all on one.
        microbatches, microbatch_rows: see :func:`hetero_strategy.plan.plan_step.plan_step`.
        balance: spread of work over instances; default: the strategy's default.
        options: how the model runs.
        memory: bytes of a GPU; a rank that needs more, with NCCL's buffers for rows, is a fault.
        progress: callback with a description of the next part of the work.

    Raises:
        LayoutError, ScheduleError, ConfigError: a real start would refuse the options before any process group exists;
            or this process has a process group.
    """
    if dist.is_initialized():
        raise ConfigError("dry_run: this process has a process group; run it in a process of its own")
    tell = progress or (lambda _: None)
    tell("stages")
    plan = checked_blueprint(model, place(layouts, world_size), options)
    faults: list[Fault] = []
    steps = []
    for number, metadata in enumerate(batches):
        tell(f"plan and schedule of batch {number + 1} of {len(batches)}")
        step = plan.plan_step(
            metadata,
            balance or BalanceConfig(),
            ranks_per_node,
            microbatches=microbatches,
            microbatch_rows=microbatch_rows,
        )
        with _noted(faults, "schedule"):
            schedule = StepCompiler(plan.graph, plan.costs, plan.scheduling).schedule(step, train=True)
            check(schedule)
            steps.append(_Programs(step, schedule))
    shapes = {name: module.state_dict() for name, module in model.modules_by_name.items()}
    coverage, rank_sets = Coverage(shapes, plan.layouts), dict[int, tuple[tuple[int, ...], ...]]()
    ranks: list[BuiltRank] = []
    sampled = _sampled(plan.graph, world_size)
    for number, (rank, (lane, copies, stages)) in enumerate(sorted(sampled.items())):
        tell(f"rank {rank}, {number + 1} of {len(sampled)}")
        with _noted(faults, "build", rank), fake_world(rank, world_size):
            assembled = assemble("model", _copied(model), plan, rank, META)
            rank_sets[rank] = assembled.registry.created
            faults += _program_faults(rank, steps, plan.graph)
            ranks.append(_built(rank, assembled, lane, copies, stages, steps, coverage, ranks_per_node))
    faults += _group_faults(rank_sets)
    faults += [Fault("checkpoint", message, None, stage.module, stage.stage) for stage, message in coverage.faults()]
    if memory is not None:
        buffers = message_buffers(plan.graph, world_size, ranks_per_node)
        faults += [
            _too_large(rank, int(buffers[rank.rank]), memory)
            for rank in ranks
            if rank.total + buffers[rank.rank] > memory
        ]
    return DryRun(world_size, plan, tuple(ranks), tuple(faults))


@contextmanager
def _noted(faults: list[Fault], check: Literal["build", "schedule"], rank: int | None = None) -> Iterator[None]:
    """Turn an exception into a fault, so that the checks go on."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, HeteroError) else f"{type(error).__name__}: "
        faults.append(Fault(check, f"{kind}{error}", rank))


def _copied(model: MultimodalModel) -> MultimodalModel:
    """Copy a model to build from; the copies share the modules' originals from before anything is parallelised."""
    originals = [module.meta_copy() for module in model.modules_by_name.values()]
    return copy.deepcopy(model, {id(original): original for original in originals})


def _sampled(graph: StageGraph, world_size: int) -> dict[int, tuple[int, int, tuple[StageId, ...]]]:
    """Return rank -> (number and size of its set of ranks that host the same stages, these stages), for the first and
    the last rank of each set.

    Ranks lie in a module by ascending coordinate, so these two have the extreme coordinates in each of their modules.
    """
    hosts: list[tuple[tuple[StageId, ...], Collection[int]]] = list(graph.hosts.items())
    busy = {rank for _, ranks in hosts for rank in ranks}
    if idle := [rank for rank in range(world_size) if rank not in busy]:
        hosts.append(((), idle))
    return {
        rank: (lane, len(ranks), stages)
        for lane, (stages, ranks) in enumerate(hosts)
        for rank in (min(ranks), max(ranks))
    }


@dataclass
class _Programs:
    """A cache of the programs of one step, made on demand."""

    plan: StepPlan
    schedule: Schedule
    of: Callable[[int], StepProgram] = field(init=False)

    def __post_init__(self) -> None:
        self.of = lru_cache(PROGRAMS)(lambda rank: compile_step(self.plan, self.schedule, rank))


def _built(
    rank: int,
    made: Assembled,
    lane: int,
    alike: int,
    stages: tuple[StageId, ...],
    steps: Sequence[_Programs],
    coverage: Coverage,
    ranks_per_node: int,
) -> BuiltRank:
    executor = made.executor
    assert {*executor.stages} == {*stages}, f"rank {rank} has stages {[*executor.stages]}, its plan {stages}"
    tensors = _owned(made)
    pieces = pieces_of(rank, tensors)
    coverage.add(rank, stages, tensors, pieces)
    programs = tuple(step.of(rank) for step in steps)
    graph = executor.compiler.graph
    peers = _peers(graph, rank)
    groups = [ranks for ranks in made.registry.created[1:] if rank in ranks]
    channels = {
        (graph.firsts[edge], back, hop)
        for (edge, back), channel in executor.channels.items()
        for hop, group in enumerate((channel.group, channel.second))
        if group is not None
    }
    return BuiltRank(
        rank=rank,
        lane=lane,
        alike=alike,
        stages=stages,
        bytes=_bytes(made, programs),
        tensors={name: tuple(local(tensor).shape) for name, tensor in tensors.items()},
        groups=len(groups),
        channels=len(channels),
        connections=sum(len(sent_to) for hops in peers.values() for sent_to, _ in hops),
        pieces=sum(map(len, pieces.values())),
        programs=programs,
        sent=tuple(sent(rank, program, executor.row_bytes, ranks_per_node) for program in programs),
    )


def _owned(made: Assembled) -> dict[str, torch.Tensor]:
    """Return the tensors of a rank in a checkpoint, by ``<module>.<fqn>``: on meta only identity marks them."""
    stages = made.executor.stages.values()
    own = {id(tensor) for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
    return {
        f"{name}.{fqn}": tensor.detach()
        for name, module in made.executor.modules.items()
        for fqn, tensor in module.state_dict(keep_vars=True).items()
        if id(tensor) in own
    }


def _bytes(made: Assembled, programs: Iterable[StepProgram]) -> dict[str, int]:
    stages, graph = made.executor.stages, made.executor.compiler.graph
    parameters = {id(p): p for stage in stages.values() for p in stage.parameters()}.values()
    trained = sum(local(p).nbytes for p in parameters if p.requires_grad)
    return {
        "parameters": sum(local(p).nbytes for p in parameters),
        "buffers": sum(b.nbytes for b in {id(b): b for stage in stages.values() for b in stage.buffers()}.values()),
        "gradients": trained,
        "states": 2 * trained,
        "gathered": sum(whole_bytes(stage, once=graph.stages[node].sharded) for node, stage in stages.items()),
        "rows": max((_held_rows(program, graph, made.executor.row_bytes) for program in programs), default=0),
    }


def _held_rows(program: StepProgram, graph: StageGraph, row_bytes: Sequence[int]) -> int:
    """Return the most bytes of incoming rows that wait for the backward of their microbatch."""
    live_bytes: dict[tuple[StageId, int], int] = {}
    most = 0
    for step in program.actions:
        kind, node, microbatch = step.action
        if kind == "F" and graph.stages[node].backward:
            read = [program.transfers[number] for number in step.reads]
            live_bytes[node, microbatch] = sum(one.transfer.outputs * row_bytes[one.edge] for one in read)
            most = max(most, sum(live_bytes.values()))
        elif kind in ("B", "I"):
            live_bytes.pop((node, microbatch))
    return most


def _peers(graph: StageGraph, rank: int) -> dict[tuple[int, bool], list[tuple[set[int], set[int]]]]:
    """Return (edge, whether backward) -> for each hop, the ranks to which a rank may send, and those that may send to
    it.
    """
    return {
        (number, back): [(meetings.peers(rank), meetings.back.peers(rank)) for meetings in hops]
        for number in range(len(graph.edges))
        for back, hops in meetings_of(graph, number).items()
    }


def _program_faults(rank: int, steps: Sequence[_Programs], graph: StageGraph) -> Iterator[Fault]:
    """Yield faults of a rank's programs: missing rows, messages that do not fit, peers not met at start."""
    met = _peers(graph, rank)
    for step in steps:
        program = step.of(rank)
        for stage, message in program_faults(step.plan, step.schedule, rank, program, step.of):
            yield Fault("program", message, rank, stage.module, stage.stage)
        strangers = {
            (one.edge, peer)
            for one in program.transfers
            for hop, peers in zip((one.transfer.first, one.transfer.second), met[one.edge, one.backward], strict=True)
            for messages, known in zip((hop.sends, hop.receives), peers, strict=True)
            for peer, _ in messages
            if peer not in known
        }
        for edge, peer in sorted(strangers):
            source, target = graph.edges[edge]
            stage = next(stage for stage in (source, target) if rank in graph.stages[stage].ranks)
            yield Fault(
                "connect",
                f"{source} to {target}: rank {rank} exchanges rows with rank {peer}, which it does not meet at start",
                rank,
                stage.module,
                stage.stage,
            )


def _group_faults(found: Mapping[int, tuple[tuple[int, ...], ...]]) -> Iterator[Fault]:
    """Yield ranks that create other groups than the first rank, or in another order."""
    if not found:
        return
    first, *others = sorted(found)
    for rank in others:
        if found[rank] == found[first]:
            continue
        pairs = zip(found[first], found[rank], strict=False)
        k = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(found[first]), len(found[rank])))
        there, here = ((f"ranks {one[k]}" if k < len(one) else "none") for one in (found[first], found[rank]))
        yield Fault("groups", f"group {k}: rank {rank} creates {here}, rank {first} {there}", rank)


def _too_large(rank: BuiltRank, buffers: int, memory: float) -> Fault:
    sizes = {**rank.bytes, "NCCL's buffers for rows": buffers}
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if size)
    needed, stages = sum(sizes.values()) / 2**30, ", ".join(map(str, rank.stages))
    module, stage, _ = rank.stages[0]
    return Fault(
        "memory",
        f"{stages} on rank {rank.rank} need {needed:.2f} GiB ({parts}) beside activations, the device has"
        f" {memory / 2**30:.2f} GiB; shard more, or give them more stages or ranks",
        rank.rank,
        module,
        stage,
    )
