"""A small multimodal model in any layouts, and random ragged batches for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from hetero_strategy import ragged
from hetero_strategy.layout.registry import fake_world
from hetero_strategy.layout.spec import ModuleLayout, Placement, place
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.steps import RankView
from hetero_strategy.model.context import in_context
from hetero_strategy.model.inputs import IGNORE, EncoderInputs, ModuleInputs, Packing, SequenceInputs
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.parallelize.transforms import read_transforms
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.plan_step import ResolvedBalance, assignments_of, plan_step
from hetero_strategy.plan.step_plan import Assignment, StepItems, StepMetadata, StepPlan, edge_blocks, slots
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import Schedule
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import PlannedCosts, work_of
from hetero_strategy.strategy.assembly import Assembled, assemble
from hetero_strategy.strategy.blueprint import Blueprint, Options, checked_blueprint
from hetero_strategy.testing.parity import Trained, gradients_of
from hetero_strategy.zoo import siglip2_encoder, titan_llama, whisper_encoder
from hetero_strategy.zoo.hf_causal_lm import HFCausalLM, hf_causal_lm

MERGE, PATCH, MELS, VOCABULARY = 2, 8, 40, 512
ENCODERS = {"vision", "audio"}
FP64 = Storage(torch.float64, torch.float64)


def ragged_step(
    seed: int,
    samples: int,
    encoders: Mapping[str, Callable[[np.random.Generator, int], np.ndarray]],
    *,
    items: tuple[int, int] = (0, 3),
    text: tuple[int, int] = (16, 128),
) -> StepMetadata:
    """Draw the metadata of a global batch: samples of some items of each encoder, then text, each token with a loss.

    Args:
        seed: seed of all numbers.
        samples: number of samples in the global batch.
        encoders: function of each encoder that draws the rows of n items from a random generator.
        items: fewest and most items of one encoder in a sample.
        text: fewest and most text tokens of a sample.
    """
    rng = np.random.default_rng(seed)
    counts = {name: rng.integers(items[0], items[1] + 1, samples) for name in encoders}
    before = np.zeros(samples, dtype=np.int64)  # rows of the sample so far
    drawn = {}
    for name, rows_of in encoders.items():
        sample = np.repeat(np.arange(samples), counts[name])
        rows = np.asarray(rows_of(rng, len(sample)), dtype=np.int64)
        ahead = ragged.offsets(rows)
        start = ahead[:-1] - ahead[ragged.starts(counts[name])][sample]
        drawn[name] = StepItems(sample, rows, before[sample] + start, rows)
        before = before + np.bincount(sample, weights=rows, minlength=samples).astype(np.int64)
    tail = rng.integers(text[0], text[1] + 1, samples)
    return StepMetadata(0, 0, np.arange(samples), before + tail, tail - 1, drawn)


@dataclass(frozen=True)
class Setting:
    """A small model of an encoder of images, one of recordings and a language model, in its layouts and schedule.

    Its batches are drawn in memory and do not depend on the layouts. Pairs of numbers are the width and layers of a
    module, or the fewest and most of what a batch holds.
    """

    name: str
    layouts: Mapping[str, ModuleLayout]
    """Layouts of ``llm`` and any of ``vision`` and ``audio``."""
    schedule: str = "1f1b"
    vision: tuple[int, int] = (192, 4)
    audio: tuple[int, int] = (192, 4)
    llm: tuple[int, int] = (256, 6)
    experts: int = 0
    """Experts in each layer of the language model, of which a row visits two; 0: a dense model."""
    balance_loss: float = 0.0
    """Coefficient of the loss on the balance of these experts."""
    samples: int = 12
    microbatches: int = 6
    items: tuple[int, int] = (1, 2)
    """Items of each encoder in a sample."""
    cells: tuple[int, int] = (3, 5)
    """Output rows on a side of an image."""
    clip: tuple[int, int] = (32, 96)
    """Output rows of a recording."""
    text: tuple[int, int] = (16, 64)
    """Text tokens of a sample."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """``encoder_microbatch_rows``."""
    balance: Mapping[str, Any] | None = None
    """None: units are dealt in order."""
    transforms: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)
    reshard_after_forward: str = "auto"
    fill: str = "auto"
    freeze: tuple[str, ...] = ()
    storage: Storage = FP32

    @property
    def world(self) -> int:
        return max(rank for layout in self.layouts.values() for rank in layout.ranks) + 1

    @property
    def placement(self) -> Placement:
        return place(self.layouts, self.world)

    @property
    def scheduling(self) -> ScheduleConfig:
        return ScheduleConfig(self.schedule, reshard_after_forward=self.reshard_after_forward, fill=self.fill)

    def model(self, device: str = "meta") -> MultimodalModel:
        """Build the model; its values follow from its seed, wherever it is."""
        dim, blocks = self.llm
        with torch.device(device):
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
                "llm": mixture(dim, blocks, self.experts, self.balance_loss) if self.experts else titan_llama(
                    vocab_size=VOCABULARY, dim=dim, n_layers=blocks, n_heads=_heads(dim), n_kv_heads=_heads(dim),
                    multiple_of=16, max_seq_len=4096,
                ),
            }  # fmt: skip
            placed = {n: m for n, m in modules.items() if n in self.layouts}
            model = MultimodalModel(placed, freeze=self.freeze, seed=7).train()
        return model.double() if self.storage.master == torch.float64 else model

    @cached_property
    def blueprint(self) -> Blueprint:
        """Blueprint of the run."""
        options = Options(self.scheduling, read_transforms(self.transforms), self.storage)
        return checked_blueprint(self.model(), self.placement, options)

    def metadata(self, seed: int) -> StepMetadata:
        """Draw the metadata of a ragged global batch, the same on every rank."""
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

    def plan(self, seed: int) -> StepPlan:
        """Plan the global batch, the same on every rank."""
        instances = self.placement.instances()
        dealing = self.blueprint.context(self.world).dealing
        balancing = ResolvedBalance(dealing=dealing) if dealing else None
        parts = {node.module: stage.row_sharding.parts for node, stage in self.blueprint.graph.stages.items()}
        if self.balance is not None:
            balancing = BalanceConfig.of(self.balance).resolve(instances, self.blueprint.context(self.world))
        return plan_step(
            self.metadata(seed),
            instances,
            ("llm",),
            microbatches=self.microbatches,
            microbatch_rows=self.tokens,
            row_multiple={name: n for name, n in parts.items() if n > 1},
            balancing=balancing,
        )

    def batch(self, seed: int, rank: int) -> Batch:
        """Make a rank's part of the global batch; a unit has the same content wherever it is computed."""
        plan, placement = self.plan(seed), self.placement
        inputs: dict[str, tuple[ModuleInputs | None, ...]] = {}
        for module, assignments in plan.assignments.items():
            seat = placement.coordinate(module, rank)
            if seat is None:
                continue
            context = RankView.of(placement, [module], rank).cp.get(module)
            generator = torch.Generator()
            inputs[module] = tuple(
                None
                if assignment.idle
                else _tokens(plan, number, seat.instance, context, generator.manual_seed(seed))
                if module == "llm"
                else self.items_of(plan, module, assignment, seat.instance, generator.manual_seed(seed))
                for number, assignment in enumerate(assignments)
            )
        return Batch(plan, inputs)

    def items_of(
        self, plan: StepPlan, module: str, assignment: Assignment, instance: int, generator: torch.Generator
    ) -> EncoderInputs:
        """Make the inputs of an instance of an encoder in one microbatch."""
        return _items(plan, module, assignment, instance, generator)

    def assembled(self, rank: int) -> Assembled:
        """Put the model on its ranks; a collective."""
        with in_dtype(self.storage.master):
            return assemble("model", self.model(), self.blueprint, rank, torch.device("cpu"))

    @property
    def on_one_rank(self) -> Self:
        """Return the setting with all modules on one rank."""
        return replace(self, layouts=dict.fromkeys(self.layouts, ModuleLayout((0,))), balance=None, transforms={})

    def alone(self, seed: int = 0) -> Trained:
        """Return the losses and gradients of a step in one process."""
        one = self.on_one_rank
        with in_dtype(self.storage.master):
            model = one.model("cpu")
            out = model(one.batch(seed, 0))
            out.loss.backward()
        return Trained([float(loss.detach()) for loss in out.losses.values()], gradients_of(model.modules_by_name))


def mixture(width: int, layers: int, experts: int, balance_loss: float = 0.0) -> HFCausalLM:
    """Build a small language model, of whose experts a row visits two."""
    return hf_causal_lm(
        model_type="qwen3_moe", vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_experts=experts,
        num_attention_heads=_heads(width), num_key_value_heads=_heads(width), num_experts_per_tok=2,
        moe_intermediate_size=width, check=False, balance_loss=balance_loss,
    )  # fmt: skip


def step(rank: int, world: int, setting: Setting, seed: int = 0) -> Trained:
    """Run a step of a setting on this rank of a world and return its losses and gradients."""
    executor = setting.assembled(rank).executor
    outcome = executor.run(setting.batch(seed, rank), train=True)
    losses = [executor.weights[name] * float(loss.detach()) for name, loss in outcome.losses.items()]
    return Trained(losses, gradients_of(executor.modules))


def steps_alone(setting: Setting, steps: int, rate: float) -> tuple[dict[str, Tensor], MultimodalModel]:
    """Return the gradients of some steps of SGD in one process, by "step N: parameter", and the trained model."""
    one, gradients = setting.on_one_rank, dict[str, Tensor]()
    with in_dtype(one.storage.master):
        model = one.model("cpu")
        for seed in range(steps):
            model(one.batch(seed, 0)).loss.backward()
            gradients |= _descended(seed, model.modules_by_name, rate)
    return gradients, model


def steps_on_rank(
    rank: int, world: int, settings: Mapping[Any, Setting], steps: int, rate: float
) -> dict[Any, dict[str, Tensor]]:
    """Return the gradients of some steps of SGD of each setting on this rank of a world, as :func:`steps_alone`."""
    gradients: dict[Any, dict[str, Tensor]] = {}
    for name, setting in settings.items():
        executor, gradients[name] = setting.assembled(rank).executor, {}
        for seed in range(steps):
            executor.run(setting.batch(seed, rank), train=True)
            gradients[name] |= _descended(seed, executor.modules, rate)
    return gradients


def rearranged(
    plan: StepPlan, instances: Mapping[str, int], instance_of: Mapping[str, np.ndarray], row_multiple: Mapping[str, int]
) -> StepPlan:
    """Return a plan with the same microbatches, and each unit of every module on a chosen instance."""
    known, assignments = plan.metadata, {}
    for name, chosen in instance_of.items():
        number, items = plan.places(name).microbatch, known.items.get(name)
        rows = (known.tokens, known.tokens) if items is None else (items.edge_rows, items.inner_rows)
        assignments[name] = assignments_of(
            number, len(plan.assignments[name]), chosen, number, *rows, instances[name], row_multiple.get(name, 1)
        )
    return replace(plan, assignments=assignments)


@contextmanager
def one_rank(setting: Setting, rank: int) -> Iterator[tuple[Executor, Batch]]:
    """Yield a rank's executor and first batch in a world of which all other ranks are fake."""
    with fake_world(rank, setting.world):
        executor = setting.assembled(rank).executor
        with patch.object(executor.agreement, "check"):  # the fake group sums nothing, so ranks seem to disagree
            yield executor, setting.batch(0, rank)


class Planned(NamedTuple):
    """Facts about a step that are known before it runs."""

    plan: StepPlan
    blueprint: Blueprint
    costs: PlannedCosts
    schedule: Schedule


def planned(setting: Setting, seed: int) -> Planned:
    """Return the plan and schedule that every rank makes of a batch."""
    frame, plan = setting.blueprint, setting.plan(seed)
    costs = PlannedCosts(plan, frame.graph, frame.costs)
    schedule = make_schedule(setting.schedule, frame.graph, work_of(plan, frame.graph), costs, fill=setting.fill)
    return Planned(plan, frame, costs, schedule)


@contextmanager
def in_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of this data type by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _descended(step: int, modules: Mapping[str, nn.Module], rate: float) -> dict[str, Tensor]:
    """Take a step of SGD and return its gradients by "step N: parameter"."""
    gradients = {f"step {step}: {name}": gradient for name, gradient in gradients_of(modules).items()}
    with torch.no_grad():
        for parameter in (parameter for module in modules.values() for parameter in module.parameters()):
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
                parameter.grad = None
    return gradients


def _heads(width: int) -> int:
    return max(1, width // 64)


def _content(drawn: Tensor, lengths: np.ndarray, units: np.ndarray, padding: int) -> Tensor:
    """Return the rows of some units of all units' rows, and zeros for rows that align them."""
    rows = drawn[torch.from_numpy(ragged.expand(ragged.starts(lengths)[units], lengths[units]))]
    return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])


def _items(
    plan: StepPlan, module: str, assignment: Assignment, instance: int, generator: torch.Generator
) -> EncoderInputs:
    units, packing = assignment.of(instance), Packing.of(assignment.inner_rows_of(instance))
    items, padding = plan.metadata.items[module], int(assignment.padding[instance])
    rows = items.edge_rows[units]
    if module == "audio":
        frames = 2 * items.edge_rows
        mels = torch.randn(int(frames.sum()), MELS, generator=generator, dtype=torch.float32)
        return EncoderInputs(_content(mels, frames, units, 0), 2 * rows[:, None], rows, packing)
    side = MERGE * np.sqrt(rows).astype(np.int64)
    patches = torch.randn(int(items.inner_rows.sum()), 3 * PATCH**2, generator=generator, dtype=torch.float32)
    content = _content(patches, items.inner_rows, units, padding)
    return EncoderInputs(content, np.stack([side, side], axis=1), rows, packing)


def _tokens(
    plan: StepPlan, number: int, instance: int, context: tuple[int, int, bool] | None, generator: torch.Generator
) -> SequenceInputs:
    assignment, known = plan.assignments["llm"][number], plan.metadata
    units, lengths = assignment.of(instance), assignment.inner_rows_of(instance)
    drawn = torch.randint(0, VOCABULARY, (int(known.tokens.sum()),), generator=generator)
    ids = _content(drawn, known.tokens, units, int(assignment.padding[instance]))
    labels = torch.full_like(ids, IGNORE)
    for end, count in zip(np.cumsum(lengths), known.labels[units], strict=False):
        labels[end - 1 - count : end - 1] = ids[end - count : end]
    places: dict[Hashable, Tensor] = {
        (encoder, p): torch.from_numpy(slots(edge_blocks(plan, encoder, p, "llm", t), instance))
        for encoder in ENCODERS & plan.assignments.keys()
        for p, t in plan.feeds(encoder, "llm")
        if t == number
    }
    inputs = SequenceInputs(ids, labels, Packing.of(lengths), slots=places)
    if context is None:
        return inputs
    own, ranks, by_heads = context
    return in_context(inputs, own, assignment.dealt(instance, ranks), by_heads=by_heads)
