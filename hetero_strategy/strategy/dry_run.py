"""``dry_run``: what every rank of a run would build, built by one process on fake process groups and the meta device.

The process is one rank after another, and each time it runs the code of a real start (:func:`assemble`). Ranks that
host the same stages build the same, up to their coordinates, so of each such set the first and the last rank are built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float64

from hetero_strategy.checkpoint.inventory import pieces_of
from hetero_strategy.errors import ConfigError, HeteroError
from hetero_strategy.layout.fake import fake_world
from hetero_strategy.layout.placement import Placement, place
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.monitor.traffic import Traffic, sent
from hetero_strategy.parallelize.fsdp import whole_bytes
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.plan.ahead import computing, with_next
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.orchestrator import plan_step
from hetero_strategy.plan.step_plan import StepMetadata, StepPlan
from hetero_strategy.planner.context import aligned_rows, model_context
from hetero_strategy.runtime.connect import meetings_of, message_buffers
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import Schedule, StageGraph, StageId
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.check_program import program_faults
from hetero_strategy.schedule.compile import StepCompiler, StepProgram, compile_step
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.strategy.assembly import Assembled, assemble
from hetero_strategy.strategy.blueprint import Blueprint, blueprint
from hetero_strategy.strategy.coverage import Coverage

PROGRAMS = 4096
"""Most step programs of peers that are kept at a time."""
META = torch.device("meta")


@dataclass(frozen=True)
class Fault:
    """What would fail, or not fit, at a real start or in a step."""

    check: Literal["build", "groups", "schedule", "program", "connect", "memory", "checkpoint"]
    """What found it."""
    message: str
    rank: int | None = None
    """None: all ranks."""
    module: str | None = None
    stage: int | None = None


@dataclass(frozen=True)
class BuiltRank:
    """What one rank has built."""

    rank: int
    lane: int
    """Number among the sets of ranks that host the same stages."""
    alike: int
    """Ranks in this set."""
    stages: tuple[StageId, ...]
    bytes: Mapping[str, int]
    """``parameters``, ``buffers``, ``gradients`` and AdamW's ``states`` of what it owns; ``gathered``: whole weights
    and their gradients that it has at a time; ``rows``: rows of other stages that wait for their backward, at most.
    Activations inside its stages are not in them."""
    tensors: Mapping[str, tuple[int, ...]]
    """Owned parameters and persistent buffers by ``<module>.<fqn>``, and the shape of this rank's part."""
    groups: int
    """Process groups that it is in, apart from those of all ranks and of it alone."""
    channels: int
    """Groups of its own for rows, which NCCL needs beside these."""
    connections: int
    """Ranks to which it may send and sends at start; edges, directions and hops counted apart."""
    pieces: int
    """Tensors of the model of which it brings a piece to a checkpoint."""
    programs: tuple[StepProgram, ...]
    """Of each batch."""
    sent: tuple[Traffic, ...]
    """Bytes of rows that it sends in each batch."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class DryRun:
    """What a dry run found."""

    world_size: int
    plan: Blueprint
    ranks: tuple[BuiltRank, ...]
    """Those that were built, ascending."""
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
    scheduling: ScheduleConfig | None = None,
    recompute: Mapping[str, Recompute] = MappingProxyType({}),
    compile: Mapping[str, str] = MappingProxyType({}),
    offload: Mapping[str, Offload] = MappingProxyType({}),
    storage: Storage = FP32,
    memory: Float64[np.ndarray, "ranks"] | float | None = None,
    progress: Callable[[str], None] | None = None,
) -> DryRun:
    """Build a run of ``world_size`` ranks without them, and check what they would build and run.

    Args:
        model: as built, on the meta device; it stays as it is.
        layouts: of every module.
        batches: global batches whose steps are planned, scheduled and compiled.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``; default: all on one.
        microbatches, microbatch_rows: see :func:`hetero_strategy.plan.orchestrator.plan_step`.
        balance: how work is spread; default: as the strategy does by default.
        scheduling, recompute, compile, offload, storage: see :func:`hetero_strategy.strategy.assembly.assemble`.
        memory: bytes of a GPU, or of every rank's; a rank that needs more, with NCCL's buffers for rows, is a fault.
        progress: is told what is done next.

    Raises:
        LayoutError, ScheduleError, ConfigError: what a real start refuses before any process group exists; or a
            process group exists in this process.
    """
    if dist.is_initialized():
        raise ConfigError("dry_run: this process has a process group; run it in a process of its own")
    placement, tell = place(layouts, world_size), progress or (lambda _: None)
    scheduling = (scheduling or ScheduleConfig()).resolved(placement.layouts)
    tell("stages")
    plan = blueprint(model, placement.layouts, scheduling, recompute, compile, storage, offload)
    placement = Placement(plan.layouts, world_size)
    faults: list[Fault] = []
    steps = []
    around = model_context(plan.graph, plan.costs, model.language_models(), scheduling, placement, ranks_per_node)
    planned = []
    for number, metadata in enumerate(batches):
        tell(f"plan of batch {number + 1} of {len(batches)}")
        step = plan_step(
            metadata,
            placement.instances(),
            model.language_models(),
            microbatches=microbatches,
            row_multiple=aligned_rows(model.language_models(), plan.layouts),
            microbatch_rows=microbatch_rows,
            balancing=(balance or BalanceConfig()).resolve(placement.instances(), around),
        )
        planned.append(step)
    for number, alone in enumerate(planned):
        tell(f"schedule of batch {number + 1} of {len(batches)}")
        following = planned[(number + 1) % len(planned)]
        step = with_next(alone, following, scheduling.prefetch, held=True) if scheduling.prefetch else alone
        with _noted(faults, "schedule"):
            schedule = StepCompiler(plan.graph, plan.costs, scheduling).schedule(step, train=True)
            check(schedule)
            steps.append(_Programs(step, schedule))
    shapes = {name: module.state_dict() for name, module in model.modules_by_name.items()}
    coverage, rank_sets = Coverage(shapes, plan.layouts), dict[int, tuple[tuple[int, ...], ...]]()
    ranks: list[BuiltRank] = []
    sampled = _sampled(plan.graph, world_size)
    for number, (rank, (lane, alike, stages)) in enumerate(sorted(sampled.items())):
        tell(f"rank {rank}, {number + 1} of {len(sampled)}")
        with _noted(faults, "build", rank), fake_world(rank, world_size):
            made = assemble(
                "model", _copied(model), placement, rank, META, ranks_per_node=ranks_per_node, storage=storage,
                scheduling=scheduling, recompute=recompute, compile=compile, offload=offload, plan=plan,
            )  # fmt: skip
            rank_sets[rank] = made.registry.created
            faults += _program_faults(rank, steps, plan.graph)
            ranks.append(_built(rank, made, lane, alike, stages, steps, coverage, ranks_per_node))
    faults += _group_faults(rank_sets)
    faults += [Fault("checkpoint", message, None, stage.module, stage.stage) for stage, message in coverage.faults()]
    if memory is not None:
        room, buffers = np.broadcast_to(memory, world_size), message_buffers(plan.graph, world_size, ranks_per_node)
        faults += [
            _too_large(rank, int(buffers[rank.rank]), room[rank.rank])
            for rank in ranks
            if rank.total + buffers[rank.rank] > room[rank.rank]
        ]
    return DryRun(world_size, plan, tuple(ranks), tuple(faults))


@contextmanager
def _noted(faults: list[Fault], check: Literal["build", "schedule"], rank: int | None = None) -> Iterator[None]:
    """What is raised becomes a fault, and others are still found."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, HeteroError) else f"{type(error).__name__}: "
        faults.append(Fault(check, f"{kind}{error}", rank))


def _copied(model: MultimodalModel) -> MultimodalModel:
    """A model to build from; what its modules were before anything is parallelised is shared."""
    originals = [module.meta_copy() for module in model.modules_by_name.values()]
    return copy.deepcopy(model, {id(original): original for original in originals})


def _sampled(graph: StageGraph, world_size: int) -> dict[int, tuple[int, int, tuple[StageId, ...]]]:
    """Rank -> number and size of its set of ranks that host the same stages, and these; first and last of each set.

    Ranks lie in a module by ascending coordinate, so these two have the extreme coordinates in every module of theirs.
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
    """The programs of one step, made when they are asked for."""

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
    coverage.add(rank, tuple(s for s in stages if s.module in executor.modules), tensors, pieces)
    programs = tuple(step.of(rank) for step in steps)
    ahead = max((_ahead_rows(executor, step.plan) for step in steps), default=0)
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
        bytes=_bytes(made, programs, ahead),
        tensors={name: tuple(local(tensor).shape) for name, tensor in tensors.items()},
        groups=len(groups),
        channels=len(channels),
        connections=sum(len(sent_to) for hops in peers.values() for sent_to, _ in hops),
        pieces=len(pieces),
        programs=programs,
        sent=tuple(sent(rank, program, executor.row_bytes, ranks_per_node) for program in programs),
    )


def _owned(made: Assembled) -> dict[str, torch.Tensor]:
    """What of a rank a checkpoint holds, by ``<module>.<fqn>``: on meta nothing else tells it from the rest."""
    stages = made.executor.stages.values()
    own = {id(tensor) for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
    return {
        f"{name}.{fqn}": tensor.detach()
        for name, module in made.executor.modules.items()
        for fqn, tensor in module.state_dict(keep_vars=True).items()
        if id(tensor) in own
    }


def _bytes(made: Assembled, programs: Iterable[StepProgram], ahead: int) -> dict[str, int]:
    stages, graph = made.executor.stages, made.executor.compiler.graph
    parameters = {id(p): p for stage in stages.values() for p in stage.parameters()}.values()
    trained = sum(local(p).nbytes for p in parameters if p.requires_grad)
    return {
        "parameters": sum(local(p).nbytes for p in parameters),
        "buffers": sum(b.nbytes for b in {id(b): b for stage in stages.values() for b in stage.buffers()}.values()),
        "gradients": trained,
        "states": 2 * trained,
        "gathered": sum(
            whole_bytes(stage, once=graph.stages[node].sharded)
            for node, stage in stages.items()
            if node.module in made.executor.modules
        ),
        "rows": ahead + max((_held_rows(program, graph, made.executor.row_bytes) for program in programs), default=0),
    }


def _ahead_rows(executor: Executor, plan: StepPlan) -> int:
    """Bytes of rows of this step and of the next one that what runs ahead computes on this rank."""
    graph, total = executor.compiler.graph, 0
    for node in executor.stages:
        if (module := computing(node.module)) == node.module:
            continue
        instance = executor.coordinates[module].instance
        read = next(k for k, (s, _) in enumerate(graph.edges) if s.all_instances == StageId(module, 0))
        inner = graph.edges[read][1].module == module
        rows = sum(
            int(part.totals(inner=inner)[instance]) for n in (module, node.module) for part in plan.assignments[n]
        )
        total += rows * executor.row_bytes[read]
    return total


def _held_rows(program: StepProgram, graph: StageGraph, row_bytes: Sequence[int]) -> int:
    """Most bytes of rows that came in and wait for the backward of their microbatch."""
    held: dict[tuple[StageId, int], int] = {}
    most = 0
    for step in program.actions:
        kind, node, microbatch = step.action
        if kind == "F" and graph.stages[node].backward:
            read = [program.transfers[number] for number in step.reads]
            held[node, microbatch] = sum(one.transfer.outputs * row_bytes[one.edge] for one in read)
            most = max(most, sum(held.values()))
        elif kind in ("B", "I"):
            held.pop((node, microbatch))
    return most


def _peers(graph: StageGraph, rank: int) -> dict[tuple[int, bool], list[tuple[set[int], set[int]]]]:
    """(edge, whether backward) -> for each hop, to whom a rank may send at start, and who may send to it."""
    return {
        (number, back): [(meetings.peers(rank), meetings.back.peers(rank)) for meetings in hops]
        for number in range(len(graph.edges))
        for back, hops in meetings_of(graph, number).items()
    }


def _program_faults(rank: int, steps: Sequence[_Programs], graph: StageGraph) -> Iterator[Fault]:
    """Of a rank's programs: rows that are missing, messages that do not fit, peers that it does not meet at start."""
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
    """Ranks that do not create the groups that the first rank creates, in its order."""
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
