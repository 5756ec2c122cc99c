"""Loads, for each step, the payload that this rank computes.

The global batch of (seed, epoch, step) is the same for any number of ranks: the order comes from a seeded permutation,
never from the process's random state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from hetero_strategy.data.batch import Batch, ModuleInputs
from hetero_strategy.data.index import DatasetIndex
from hetero_strategy.data.media import Processor, TargetProcessor
from hetero_strategy.data.plan import Assignment, StepPlan, edge_blocks, expand, plan_step, slots
from hetero_strategy.data.targets import targets
from hetero_strategy.errors import CheckpointError, ConfigError
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
        plan = self.plan(epoch, step)
        inputs: dict[str, tuple[ModuleInputs | None, ...]] = {}
        for module, assignments in plan.assignments.items():
            instance = self.share.mine.get(module)
            if instance is not None:
                inputs[module] = tuple(
                    None if assignment.idle else self._inputs(plan, module, number, instance)
                    for number, assignment in enumerate(assignments)
                )
        return Batch(plan, inputs)

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


class StepLoader:
    """Batches of one epoch after another, resumable in the middle of an epoch.

    It is not a torch ``DataLoader``, so Lightning injects no distributed sampler and rebuilds nothing. Lightning calls
    ``sampler.set_epoch`` at the start of every epoch and saves :meth:`state_dict` with the fit loop. Iteration is lazy:
    the epoch and the place are read when the first batch is asked for, because Lightning calls ``iter`` before it sets
    the epoch. The process's random state is not touched.
    """

    def __init__(
        self, steps: StepDataset, *, num_workers: int = 0, prefetch_factor: int = 2, pin_memory: bool = False
    ) -> None:
        self.steps = steps
        self.epoch = 0
        self.consumed = 0
        """Steps of this epoch handed out, not counting prefetched ones."""
        self._resume_at = 0
        self._places = _Places()
        self._settings: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        if num_workers:
            self._settings |= {"prefetch_factor": prefetch_factor, "persistent_workers": True}
        self._torch_loader: DataLoader[Batch] | None = None
        self.batch_sampler = None  # Lightning reads it wherever it finds a sampler
        self.sampler: Sampler[int] = _ShuffledEpochs(self) if steps.shuffle else _OrderedEpochs(self)

    def __len__(self) -> int:
        return len(self.steps)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the place restored by `load_state_dict` survives in its own epoch."""
        if epoch != self.epoch:
            self.epoch, self.consumed, self._resume_at = epoch, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        if self._torch_loader is None:
            # An own generator: torch would otherwise draw a seed from the process's random state at every epoch.
            self._torch_loader = DataLoader(
                self.steps, batch_size=None, sampler=self._places, generator=torch.Generator(), **self._settings
            )
        first, self._resume_at = self._resume_at, 0
        self.consumed = first
        self._places.epoch, self._places.steps = self.epoch, range(first, len(self))
        for number, batch in enumerate(self._torch_loader, first + 1):
            self.consumed = number
            yield batch

    def close(self) -> None:
        """Stop the workers; the next iteration starts new ones."""
        self._torch_loader = None

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, and what must not change for that to have a meaning."""
        return {"epoch": self.epoch, "consumed": self.consumed, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: in the middle of an epoch, and the data set or the order is another one.
        """
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        if 0 < consumed < int(state["steps"]):
            now = self._identity()
            changed = [f"{name} was {state[name]}, is {now[name]}" for name in now if state[name] != now[name]]
            if changed:
                raise CheckpointError(
                    f"cannot resume in the middle of epoch {epoch}, after {consumed} of {state['steps']} steps:"
                    f" {'; '.join(changed)}; use the old values or a checkpoint from the end of an epoch"
                )
        self.epoch, self.consumed, self._resume_at = epoch, consumed, consumed

    def _identity(self) -> dict[str, Any]:
        steps = self.steps
        return {
            "steps": len(self),
            "samples": len(steps.index),
            "global_batch_size": steps.global_batch_size,
            "seed": steps.seed,
            "shuffle": steps.shuffle,
            "data": steps.index.content,
        }


class _Places(Sampler[tuple[int, int]]):
    """(epoch, step) of the batches to load; workers get the epoch with each step, so they can live on over epochs."""

    def __init__(self) -> None:
        self.epoch = 0
        self.steps = range(0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.epoch
        return iter([(epoch, step) for step in self.steps])

    def __len__(self) -> int:
        return len(self.steps)


class _ShuffledEpochs(Sampler[int]):
    """What Lightning finds as the loader's sampler: passes the epoch on."""

    def __init__(self, loader: StepLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._loader)))

    def __len__(self) -> int:
        return len(self._loader)


class _OrderedEpochs(SequentialSampler):
    """The same for a fixed order: Lightning recognises unshuffled data by this base class."""

    def __init__(self, loader: StepLoader) -> None:
        super().__init__(range(len(loader)))
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)
