"""Steps of real multimodal models on real processes, without a Trainer: what the benchmarks of pipelines run."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import ragged_step
from hetero_strategy.layout import ModuleLayout, Placement, place
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.context import in_context
from hetero_strategy.model.inputs import IGNORE, EncoderInputs, ModuleInputs, Packing, SequenceInputs
from hetero_strategy.parallelize.offload import offloads
from hetero_strategy.parallelize.recompute import recomputes
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.plan.ahead import computing, with_next
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.orchestrator import plan_step
from hetero_strategy.plan.step_plan import Assignment, StepMetadata, StepPlan, edge_blocks, slots
from hetero_strategy.planner.context import model_context
from hetero_strategy.schedule.action import Action, Schedule
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import PlannedCosts, work_of
from hetero_strategy.strategy.assembly import Assembled, assemble
from hetero_strategy.strategy.blueprint import Blueprint, blueprint
from hetero_strategy.zoo import siglip2_encoder, titan_llama, whisper_encoder

MERGE, PATCH, MELS, VOCABULARY = 2, 8, 40, 512
ENCODERS = {"vision", "audio"}


@dataclass(frozen=True)
class Setting:
    """A model, where it lives, in which order it runs, and what a global batch of it holds."""

    name: str
    layouts: Mapping[str, ModuleLayout]
    """Of ``llm`` and any of ``vision`` and ``audio``."""
    schedule: str = "1f1b"
    vision: tuple[int, int] = (192, 4)
    """Width and layers."""
    audio: tuple[int, int] = (192, 4)
    llm: tuple[int, int] = (256, 6)
    samples: int = 12
    microbatches: int = 6
    items: tuple[int, int] = (1, 2)
    """Fewest and most of every encoder in a sample."""
    cells: tuple[int, int] = (3, 5)
    """Fewest and most output rows on a side of an image."""
    clip: tuple[int, int] = (32, 96)
    """Fewest and most rows of a recording."""
    text: tuple[int, int] = (16, 64)
    """Fewest and most text tokens of a sample."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """``encoder_microbatch_rows``."""
    balance: Mapping[str, Any] | None = None
    """None: all units are dealt in order."""
    recompute: Mapping[str, str] = field(default_factory=dict)
    offload: Mapping[str, str] = field(default_factory=dict)
    reshard_after_forward: str = "auto"
    fill: str = "auto"
    freeze: tuple[str, ...] = ()
    prefetch: Mapping[str, int] = field(default_factory=dict)
    """Steps are such as have others of the same batch before and after them."""
    islands: int = 1
    """Above 1 with ``balance``."""
    storage: Storage = FP32

    @property
    def world(self) -> int:
        return max(rank for layout in self.layouts.values() for rank in layout.ranks) + 1

    @property
    def placement(self) -> Placement:
        return place(self.layouts, self.world)

    @property
    def scheduling(self) -> ScheduleConfig:
        return ScheduleConfig(
            self.schedule,
            reshard_after_forward=self.reshard_after_forward,
            fill=self.fill,
            prefetch=self.prefetch,
            islands=self.islands,
        )

    def model(self) -> MultimodalModel:
        """On the meta device."""
        dim, blocks = self.llm
        with torch.device("meta"):
            modules = {
                "vision": siglip2_encoder(
                    out_width=dim, merge=MERGE, hidden_size=self.vision[0], intermediate_size=4 * self.vision[0],
                    num_hidden_layers=self.vision[1], num_attention_heads=_heads(self.vision[0]), num_channels=3,
                    patch_size=PATCH, num_patches=256,
                ),
                "audio": whisper_encoder(
                    out_width=dim, d_model=self.audio[0], encoder_layers=self.audio[1],
                    encoder_attention_heads=_heads(self.audio[0]), encoder_ffn_dim=4 * self.audio[0],
                    num_mel_bins=MELS, max_source_positions=1500,
                ),
                "llm": titan_llama(
                    vocab_size=VOCABULARY, dim=dim, n_layers=blocks, n_heads=_heads(dim), n_kv_heads=_heads(dim),
                    multiple_of=16, max_seq_len=4096,
                ),
            }  # fmt: skip
            placed = {n: m for n, m in modules.items() if n in self.layouts}
            return MultimodalModel(placed, freeze=self.freeze, seed=7).train()

    @cached_property
    def blueprint(self) -> Blueprint:
        again = recomputes(self.recompute)
        return blueprint(
            self.model(),
            self.placement.layouts,
            self.scheduling,
            again,
            storage=self.storage,
            offload=offloads(self.offload),
        )

    def metadata(self, seed: int) -> StepMetadata:
        """Of a ragged global batch, the same on every rank."""
        low, high = self.cells
        draws = {
            "vision": lambda rng, n: rng.integers(low, high + 1, n) ** 2,
            "audio": lambda rng, n: rng.integers(self.clip[0], self.clip[1] + 1, n),
        }
        encoders = {name: draw for name, draw in draws.items() if name in self.layouts}
        metadata = ragged_step(seed, self.samples, encoders, items=self.items, text=self.text)
        if "vision" in encoders:
            images = metadata.items["vision"]
            merged = replace(images, inner_rows=images.edge_rows * MERGE**2)
            metadata = replace(metadata, items={**metadata.items, "vision": merged})
        return metadata

    def plan(self, seed: int, *, first: bool = False) -> StepPlan:
        """Of the global batch, the same on every rank; as the first of a run, or as one of the others."""
        alone = self._alone(seed)
        if not self.prefetch:
            return alone
        plan = with_next(alone, alone, self.prefetch, held=not first)
        return replace(plan, metadata=replace(plan.metadata, step=plan.metadata.step - first))

    def _alone(self, seed: int) -> StepPlan:
        instances = self.placement.instances()
        balancing = None
        parts = {node.module: stage.row_sharding.multiple for node, stage in self.blueprint.graph.stages.items()}
        if self.balance is not None:
            made = self.blueprint
            around = model_context(made.graph, made.costs, ("llm",), self.scheduling, self.placement, self.world)
            balancing = BalanceConfig.of(self.balance).resolve(instances, around)
        return plan_step(
            self.metadata(seed),
            instances,
            ("llm",),
            microbatches=self.microbatches,
            microbatch_rows=self.tokens,
            row_multiple={name: n for name, n in parts.items() if n > 1},
            balancing=balancing,
        )

    def batch(self, seed: int, rank: int, *, first: bool = False) -> Batch:
        """That global batch as a rank sees it, with random payloads."""
        plan, placement = self.plan(seed, first=first), self.placement
        generator = torch.Generator().manual_seed(seed)
        inputs: dict[str, tuple[ModuleInputs | None, ...]] = {}
        for module, assignments in plan.assignments.items():
            seat = placement.coordinate(computing(module), rank)
            if seat is None:
                continue
            layout = placement.layouts[computing(module)]
            context = seat.shard // layout.tp, layout.cp
            inputs[module] = tuple(
                None
                if assignment.idle
                else _tokens(plan, number, seat.instance, context, generator)
                if module == "llm"
                else _items(computing(module), assignment, seat.instance, generator)
                for number, assignment in enumerate(assignments)
            )
        return Batch(plan, inputs)


def _heads(width: int) -> int:
    return max(1, width // 64)


def _items(module: str, assignment: Assignment, instance: int, generator: torch.Generator) -> EncoderInputs:
    rows, hidden = assignment.edge_rows_of(instance), assignment.inner_rows_of(instance)
    if module == "audio":
        frames = 2 * rows[:, None]
        mels = torch.randn(int(frames.sum()), MELS, generator=generator)
        return EncoderInputs(mels, frames, rows, Packing.of(hidden))
    side = MERGE * np.sqrt(rows).astype(np.int64)
    patches = torch.randn(int(hidden.sum()), 3 * PATCH**2, generator=generator)
    return EncoderInputs(patches, np.stack([side, side], axis=1), rows, Packing.of(hidden))


def _tokens(
    plan: StepPlan, number: int, instance: int, context: tuple[int, int], generator: torch.Generator
) -> SequenceInputs:
    assignment = plan.assignments["llm"][number]
    lengths = assignment.inner_rows_of(instance)
    ids = torch.randint(0, VOCABULARY, (int(lengths.sum()),), generator=generator)
    labels = torch.full_like(ids, IGNORE)
    for end, count in zip(np.cumsum(lengths), plan.metadata.labels[assignment.of(instance)], strict=False):
        labels[end - 1 - count : end - 1] = ids[end - count : end]
    places: dict[Hashable, torch.Tensor] = {
        (encoder, p): torch.from_numpy(slots(edge_blocks(plan, encoder, p, "llm", t), instance))
        for encoder in ENCODERS & plan.assignments.keys()
        for p, t in plan.feeds(encoder, "llm")
        if t == number
    }
    made = SequenceInputs(ids, labels, Packing.of(lengths), slots=places)
    return made if context == (0, 1) else in_context(made, *context)


class Step(NamedTuple):
    """One step on one rank, in seconds of this machine's clock."""

    turn: int
    """Which of the things that take turns it was."""
    begin: float
    """Before the batch was given to the executor, after all ranks had met."""
    end: float
    span: tuple[float, float]
    """Of the schedule alone, without what builds it."""
    events: list[tuple[Action, float, float]]
    cpu: float
    """Processor seconds of this process from begin to end."""


def assembled(setting: Setting, rank: int) -> Assembled:
    """The model on its ranks."""
    return assemble(
        "model", setting.model(), setting.placement, rank, torch.device("cpu"), storage=setting.storage,
        scheduling=setting.scheduling, recompute=recomputes(setting.recompute), offload=offloads(setting.offload),
    )  # fmt: skip


class Turn(NamedTuple):
    """One of the things that take turns."""

    setting: Setting
    seed: int = 0
    """Of its batch."""
    model: int = 0
    """Turns of one number share a model, and so must agree in all but the batch."""


def run_turns(rank: int, world: int, turns: Sequence[Turn], warmup: int, rounds: int) -> list[Step]:
    """On every rank: training steps without optimizer, every turn once a round, in a new random order each round.

    The steps after the warm-up rounds; a collective.
    """
    models: dict[int, Assembled] = {}
    for turn in turns:
        if turn.model not in models:
            models[turn.model] = assembled(turn.setting, rank)
    batches = [turn.setting.batch(turn.seed, rank) for turn in turns]
    for turn in turns:
        if turn.setting.prefetch:
            _step(models[turn.model], turn.setting.batch(turn.seed, rank, first=True), -1)
    random = np.random.default_rng(0)
    steps = []
    for number in range(warmup + rounds):
        for i in random.permutation(len(turns)):
            step = _step(models[turns[i].model], batches[i], int(i))
            if number >= warmup:
                steps.append(step)
    dist.barrier()
    return steps


def _step(made: Assembled, batch: Batch, turn: int) -> Step:
    executor = made.executor
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    executor.run(batch, train=True)
    end, cpu = time.perf_counter(), time.process_time() - cpu
    for stage in executor.stages.values():
        for parameter in stage.parameters():
            parameter.grad = None
    last = executor.recorder.steps[-1]
    return Step(turn, begin, end, last.span(), last.events(), cpu)


DISTURBED = 0.05
"""A step that lost more than this part of its time to other processes says little of its layout."""


class Gathered(NamedTuple):
    """One step on all ranks."""

    turn: int
    wall: float
    """Seconds from the first rank's begin to the last rank's end, schedule building included."""
    span: tuple[float, float]
    """Of the schedule, over all ranks."""
    events: dict[int, list[tuple[Action, float, float]]]
    lost: float
    """Part of the wall time in which the most disturbed rank was at an action but not on a processor."""

    @property
    def seconds(self) -> float:
        """Of the schedule."""
        return self.span[1] - self.span[0]


def gather(ranks: Sequence[Sequence[Step]]) -> list[Gathered]:
    """Steps of all ranks, each a list of the same turns; ranks of one machine have one clock."""
    found = []
    for steps in zip(*ranks, strict=True):
        span = min(s.span[0] for s in steps), max(s.span[1] for s in steps)
        wall = max(s.end for s in steps) - min(s.begin for s in steps)
        busy = [sum(end - start for _, start, end in s.events) for s in steps]
        lost = max(0.0, *((b - s.cpu) / wall for b, s in zip(busy, steps, strict=True)))
        found.append(Gathered(steps[0].turn, wall, span, {rank: s.events for rank, s in enumerate(steps)}, lost))
    return found


class Planned(NamedTuple):
    """What is known of a step before it runs."""

    plan: StepPlan
    blueprint: Blueprint
    costs: PlannedCosts
    schedule: Schedule


def planned(setting: Setting, seed: int) -> Planned:
    """The schedule that every rank makes of this batch."""
    made, plan = setting.blueprint, setting.plan(seed)
    costs = PlannedCosts(plan, made.graph, made.costs)
    schedule = make_schedule(setting.schedule, made.graph, work_of(plan, made.graph), costs, fill=setting.fill)
    return Planned(plan, made, costs, schedule)
