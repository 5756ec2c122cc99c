"""The steps of an epoch as a data set: for each of them the payload that this rank computes.

The global batch of (seed, epoch, step) is the same for any number of ranks: the order comes from a seeded permutation,
never from the process's random state.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import Dataset

from hetero_strategy.data.batch import Batch, LoadTimes, ModuleInputs
from hetero_strategy.data.index import DatasetIndex
from hetero_strategy.data.media import Processor, TargetProcessor
from hetero_strategy.data.plan import Assignment, StepPlan, edge_blocks, expand, plan_step, slots
from hetero_strategy.data.targets import targets
from hetero_strategy.errors import ConfigError
from hetero_strategy.model.inputs import IGNORE, EncoderInputs, Packing, SequenceInputs


@dataclass(frozen=True)
class Share:
    """Which instances exist and which of them this rank computes."""

    instances: Mapping[str, int]
    """Module -> number of its data-parallel instances."""
    mine: Mapping[str, int | None]
    """Module -> the instance this rank is part of, or None."""
    row_multiple: Mapping[str, int] = field(default_factory=dict)
    """Module -> its rows per instance are padded to a multiple of this; see `plan_step`."""
    without_first: frozenset[str] = frozenset()
    """Modules of which this rank holds later pipeline stages only: it reads no payload for them."""
    without_last: frozenset[str] = frozenset()
    """Modules of which this rank lacks the last pipeline stage: it needs no labels or targets for them."""

    @classmethod
    def whole(cls, modules: tuple[str, ...]) -> Share:
        """One instance of every module, all on this rank."""
        return cls(dict.fromkeys(modules, 1), dict.fromkeys(modules, 0))


@lru_cache(maxsize=4)
def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Order of an epoch: int64 [samples], a function of its arguments alone."""
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)
    order.flags.writeable = False  # shared by all callers
    return order


class StepDataset(Dataset[Batch]):
    """Map-style data set over the steps of an epoch; an item is one global batch as this rank sees it.

    Args:
        index: of the data set.
        processors: by encoder or generator name.
        edges: (encoder, consumer) and (consumer, generator) pairs; a consumer's units are whole samples.
        share: what this rank computes.
        global_batch_size: samples per step, over all ranks.
        microbatches: per step.
        microbatch_tokens: encoders and generators with microbatches of their own; see `plan_step`.
        seed: of the order.
        shuffle: whether epochs are permuted; otherwise manifest order.
        drop_last: leave out the last step of an epoch if it is not full.
        same_noise: generators see the same noise and times in every epoch, so that validations compare.
    """

    def __init__(
        self,
        index: DatasetIndex,
        processors: Mapping[str, Processor | TargetProcessor],
        edges: tuple[tuple[str, str], ...],
        share: Share,
        *,
        consumers: tuple[str, ...] = ("llm",),
        global_batch_size: int,
        microbatches: int = 1,
        microbatch_tokens: Mapping[str, int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        same_noise: bool = False,
    ) -> None:
        for name, value in (("global_batch_size", global_batch_size), ("microbatches", microbatches)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; use at least 1")
        if microbatches > global_batch_size:
            raise ConfigError(
                f"microbatches is {microbatches} but global_batch_size is {global_batch_size}: some microbatches would"
                f" always be empty; use at most {global_batch_size} microbatches"
            )
        self.index, self.processors, self.edges, self.share = index, dict(processors), edges, share
        self.consumers = consumers
        self.microbatch_tokens = dict(microbatch_tokens or {})
        self.global_batch_size, self.microbatches = global_batch_size, microbatches
        self.seed, self.shuffle, self.drop_last, self.same_noise = seed, shuffle, drop_last, same_noise
        if not len(self):
            raise ConfigError(
                f"drop_last with global_batch_size {global_batch_size} leaves nothing of {len(index)} samples;"
                " use a smaller batch or drop_last=False"
            )

    def __len__(self) -> int:
        full, rest = divmod(len(self.index), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def plan(self, epoch: int, step: int) -> StepPlan:
        """The step plan, the same on every rank."""
        first = step * self.global_batch_size
        if self.shuffle:
            samples = epoch_order(len(self.index), self.seed, epoch)[first : first + self.global_batch_size]
        else:
            samples = np.arange(first, min(first + self.global_batch_size, len(self.index)), dtype=np.int64)
        return plan_step(
            self.index.metadata(epoch, step, samples),
            self.share.instances,
            self.consumers,
            microbatches=self.microbatches,
            row_multiple=self.share.row_multiple,
            microbatch_tokens=self.microbatch_tokens,
        )

    def __getitem__(self, place: int | tuple[int, int]) -> Batch:
        """The batch of (epoch, step), or of a step of epoch 0. Raises DataError where a file has gone bad."""
        epoch, step = place if isinstance(place, tuple) else (0, place)
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        began = time.perf_counter()
        plan = self.plan(epoch, step)
        planned = time.perf_counter()
        inputs: dict[str, tuple[ModuleInputs | None, ...]] = {}
        for module, assignments in plan.assignments.items():
            instance = self.share.mine.get(module)
            if instance is not None:
                inputs[module] = tuple(
                    None if assignment.idle else self._inputs(plan, module, number, instance)
                    for number, assignment in enumerate(assignments)
                )
        return Batch(plan, inputs, LoadTimes(planned - began, time.perf_counter() - planned))

    def _inputs(self, plan: StepPlan, module: str, number: int, instance: int) -> ModuleInputs:
        if module in self.consumers:
            return self._sequence(plan, number, module, instance)
        processor = self.processors[module]
        if not isinstance(processor, TargetProcessor):
            return self._items(plan, module, processor, plan.assignments[module][number], instance)
        return targets(
            self.index,
            processor,
            plan,
            module,
            number,
            instance,
            self._slots(plan, number, module, instance),
            self.seed,
            epoch=0 if self.same_noise else plan.metadata.epoch,
            # The first stage sees noised targets, the last compares with them.
            reads=not (module in self.share.without_first and module in self.share.without_last),
        )

    def _items(
        self, plan: StepPlan, encoder: str, processor: Processor, assignment: Assignment, instance: int
    ) -> EncoderInputs:
        table = self.index.items[encoder]
        numbers = self.index.item_numbers(encoder, plan.samples)[assignment.of(instance)]
        sizes, rows = np.asarray(table.sizes[numbers]), np.asarray(table.rows[numbers])
        if encoder in self.share.without_first:
            empty = torch.zeros(0, processor.feature)
            return EncoderInputs(empty, sizes, rows, Packing.of(assignment.hidden_of(instance)))
        values = [
            processor.load(self.index.path(encoder, int(number)), tuple(size.tolist()))
            for number, size in zip(numbers, sizes, strict=True)
        ]
        return processor.collate(values, sizes, rows)

    def _sequence(self, plan: StepPlan, number: int, consumer: str, instance: int) -> SequenceInputs:
        assignment = plan.assignments[consumer][number]
        samples = plan.samples[assignment.of(instance)]
        lengths = assignment.rows_of(instance)
        tokens = expand(np.asarray(self.index.offsets[samples]), lengths)
        total = len(tokens) + int(assignment.padding[instance])
        ids = np.zeros(total, np.int64)
        ids[: len(tokens)] = self.index.ids[tokens]
        labels = np.full(total, IGNORE, np.int64)
        # Shifted within each sample: its last token predicts nothing, whatever sample lies behind it.
        last = np.zeros(len(tokens), bool)
        last[np.cumsum(lengths) - 1] = True
        source = np.flatnonzero(~last)
        learnt = source[self.index.loss[tokens[source + 1]]]
        labels[learnt] = ids[learnt + 1]
        packing = Packing.of(assignment.hidden_of(instance))
        places = self._slots(plan, number, consumer, instance)
        return SequenceInputs(torch.from_numpy(ids), torch.from_numpy(labels), packing, places)

    def _slots(self, plan: StepPlan, number: int, target: str, instance: int) -> dict[Hashable, torch.Tensor]:
        """(source, its microbatch) -> rows of the instance that it fills."""
        return {
            (source, p): torch.from_numpy(slots(edge_blocks(plan, source, p, target, t), instance))
            for source, consumer in self.edges
            if consumer == target
            for p, t in plan.feeds(source, target)
            if t == number
        }
