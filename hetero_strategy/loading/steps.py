"""The steps of an epoch as a data set: for each of them the payload that this rank computes.

The global batch of (seed, epoch, step) is the same for any number of ranks: the order comes from a seeded permutation,
never from the process's random state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from hetero_strategy.data.build_index import DatasetIndex
from hetero_strategy.data.media import Processor, TargetProcessor
from hetero_strategy.errors import ConfigError, is_whole
from hetero_strategy.layout.placement import Placement
from hetero_strategy.loading.batch import Batch, LoadTimes
from hetero_strategy.loading.item_reader import OnError, Reader
from hetero_strategy.loading.metadata import step_metadata, with_own_units
from hetero_strategy.loading.payload import Content, InstanceUnits, fetched
from hetero_strategy.loading.row_cache import RowCache
from hetero_strategy.loading.worker_pool import Place
from hetero_strategy.model.context import in_context
from hetero_strategy.model.inputs import ModuleInputs
from hetero_strategy.model.kind import ModuleKind
from hetero_strategy.plan.ahead import ahead, with_next
from hetero_strategy.plan.orchestrator import ResolvedBalance, plan_step
from hetero_strategy.plan.packing import levelled
from hetero_strategy.plan.step_plan import StepMetadata, StepPlan, edge_blocks, slots
from hetero_strategy.schedule.compile import StepProgram


@dataclass(frozen=True)
class RankView:
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
    cp: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Module -> which of an instance's context-parallel ranks this one is, and of how many; of several alone."""

    @classmethod
    def of(
        cls, placement: Placement, modules: Sequence[str], rank: int, row_multiple: Mapping[str, int] | None = None
    ) -> RankView:
        """What a rank computes of some of the placed modules."""
        seats = {name: placement.coordinate(name, rank) for name in modules}
        pipelines = {name: placement.layouts[name].pipeline for name in modules}
        stages = {name: () if seat is None else pipelines[name].stages_of(seat.pp) for name, seat in seats.items()}
        return cls(
            instances={name: placement.layouts[name].dp for name in modules},
            mine={name: None if seat is None else seat.instance for name, seat in seats.items()},
            row_multiple=dict(row_multiple or {}),
            without_first=frozenset(name for name in modules if 0 not in stages[name]),
            without_last=frozenset(name for name in modules if pipelines[name].stages - 1 not in stages[name]),
            cp={
                name: (seat.shard // layout.tp, layout.cp)
                for name, seat in seats.items()
                if seat is not None and (layout := placement.layouts[name]).cp > 1
            },
        )

    def reads(self, module: str, *, target: bool = False) -> bool:
        """Whether this rank takes payload of a module whose instance it is part of.

        Args:
            module: encoder, or generator if ``target``: its first stage sees noised targets, its last compares with
                them.
        """
        return module not in self.without_first or (target and module not in self.without_last)

    @classmethod
    def whole(cls, modules: tuple[str, ...]) -> RankView:
        """One instance of every module, all on this rank."""
        return cls(dict.fromkeys(modules, 1), dict.fromkeys(modules, 0))


@lru_cache(maxsize=1)
def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Order of an epoch: int64 [samples], a function of its arguments alone. Each worker keeps the last one."""
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)
    order.flags.writeable = False  # shared by all callers
    return order


def check_counts(size: int, count: int | None, sizes: str = "global_batch_size", counts: str = "microbatches") -> None:
    """Refuse a global batch, or a number of its microbatches (None: found in every step), that cannot be.

    Args:
        size: samples of a global batch.
        count: microbatches of it.
        sizes, counts: what a person calls the two.

    Raises:
        ConfigError: naming the field.
    """
    for name, value in ((sizes, size), (counts, 1 if count is None else count)):
        if not is_whole(value, 1):
            raise ConfigError(f"{name} is {value}; use at least 1")
    if count is not None and count > size:
        raise ConfigError(
            f"{counts} is {count} but {sizes} is {size}: some microbatches would always be empty; use at most {size}"
            " microbatches"
        )


def check_steps(samples: int, global_batch_size: int, drop_last: bool) -> None:
    """Refuse an epoch without steps.

    Raises:
        ConfigError: with the numbers.
    """
    if not samples or (drop_last and samples < global_batch_size):
        raise ConfigError(
            f"drop_last with global_batch_size {global_batch_size} leaves nothing of {samples} samples; use a smaller"
            " batch or drop_last=False"
        )


class StepDataset(Dataset[Batch]):
    """Map-style data set over the steps of an epoch; an item is one global batch as this rank sees it.

    Args:
        edges: (source, target) pairs of modules.
        kinds: of all modules; the first samplewise one decides which sample is in which microbatch.
        global_batch_size: samples per step, over all ranks.
        microbatches: per step; None: as few as the first language model's budget allows.
        microbatch_rows: encoders and generators with microbatches of their own; see `plan_step`.
        balancing: how work is spread; default: all units are dealt in order.
        window: steps among which samples move so that steps have nearly as many tokens; 1: none leaves its step.
        shuffle: whether epochs are permuted; otherwise manifest order.
        drop_last: leave out the last step of an epoch if it is not full.
        same_noise: generators see the same noise and times in every epoch, so that validations compare.
        compute_dtype: of modules; payload that they cast first of all is in it. None: payload stays as it is.
        compiler: makes this rank's program of a step, which then says which rows edges fill; None: the inputs do.
        prefetch: modules whose payload comes a step early.
        imports: names of Python modules that a process which unpickles this imports first.
    """

    def __init__(
        self,
        index: DatasetIndex,
        processors: Mapping[str, Processor | TargetProcessor],
        edges: tuple[tuple[str, str], ...],
        share: RankView,
        *,
        kinds: Mapping[str, ModuleKind],
        global_batch_size: int,
        microbatches: int | None = 1,
        microbatch_rows: Mapping[str, int | Literal["equal"]] | None = None,
        balancing: ResolvedBalance | None = None,
        window: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        same_noise: bool = False,
        compute_dtype: torch.dtype | None = None,
        compiler: Callable[[StepPlan], StepProgram] | None = None,
        prefetch: Collection[str] = (),
        imports: tuple[str, ...] = (),
    ) -> None:
        self.imports = imports
        check_counts(global_batch_size, microbatches)
        self.index, self.processors, self.edges, self.share = index, dict(processors), edges, share
        self.kinds, self.balancing, self.window = dict(kinds), balancing, window
        self.language_models = tuple(name for name, kind in kinds.items() if kind.samplewise)
        self.microbatch_rows = dict(microbatch_rows or {})
        self.global_batch_size, self.microbatches = global_batch_size, microbatches
        self.seed, self.shuffle, self.drop_last, self.same_noise = seed, shuffle, drop_last, same_noise
        self.compute_dtype, self.compiler, self.prefetch = compute_dtype, compiler, frozenset(prefetch)
        self.on_error: OnError = "stop"
        """What an item that cannot be read does; the loader sets it."""
        self.caches: dict[str, RowCache] = {}
        """Of the rows of frozen encoders, by module; a strategy sets them."""
        check_steps(len(index), global_batch_size, drop_last)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in state["imports"]:  # what they register is known by its name alone
            import_module(name)
        self.__dict__.update(state)

    def __len__(self) -> int:
        full, rest = divmod(len(self.index), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def plan(self, epoch: int, step: int) -> StepPlan:
        """The step plan, the same on every rank."""
        return self.plan_of(step_metadata(self.index, epoch, step, self.samples(epoch, step)))

    def plan_of(self, metadata: StepMetadata) -> StepPlan:
        """The step plan of a global batch."""
        return plan_step(
            with_own_units(metadata, self.kinds, self.edges),
            self.share.instances,
            self.language_models,
            microbatches=self.microbatches,
            row_multiple=self.share.row_multiple,
            microbatch_rows=self.microbatch_rows,
            balancing=self.balancing,
        )

    def samples(self, epoch: int, step: int) -> np.ndarray:
        """Data set indices of a step's global batch, int64 ``[S]``."""
        size, total = self.global_batch_size, len(self.index)
        order = epoch_order(total, self.seed, epoch) if self.shuffle else np.arange(total, dtype=np.int64)
        first = step // self.window * self.window
        drawn = order[first * size : (first + self.window) * size]
        if self.window == 1 or len(drawn) < self.window * size:  # an epoch's last window keeps its steps
            return order[step * size : (step + 1) * size]
        # Not by costs, which layouts and options change: a run goes on with the same samples whatever they are.
        tokens = np.asarray(self.index.offsets[drawn + 1] - self.index.offsets[drawn], np.float64)
        return drawn[levelled(tokens, size, self.window) == step - first]

    def __getitem__(self, place: int | Place) -> Batch:
        """The batch of (epoch, step), or of a step of epoch 0. Raises DataError where a file has gone bad."""
        epoch, step, follows = self.place(place)
        began = time.perf_counter()
        plan = self.plan(epoch, step)
        following = self.plan(epoch, step + 1) if self.prefetch and step + 1 < len(self) else None
        if self.prefetch:
            plan = with_next(plan, following, self.prefetch, held=follows)
        assert plan.digest  # made here, ahead of the step that needs it
        for cache in self.caches.values():
            cache.turn(epoch, step)
        planned = time.perf_counter()
        reader = Reader(self.index, self.processors, self.on_error)
        inputs = self.inputs(plan, fetched(self.index, plan.samples, reader))
        if following is not None:
            early = self.inputs(following, fetched(self.index, following.samples, reader), self.prefetch)
            inputs |= {ahead(module): made for module, made in early.items()}
        times = LoadTimes(planned - began, time.perf_counter() - planned)
        return self.compiled(Batch(plan, inputs, times, mine=self.share.mine, failed=reader.failed))

    def place(self, place: int | Place) -> tuple[int, int, bool]:
        """(epoch, step, whether another ran before) of what was asked for; IndexError where there is no such step."""
        epoch, step, *follows = place if isinstance(place, tuple) else (0, place)
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        return epoch, step, any(follows)

    def compiled(self, batch: Batch) -> Batch:
        """A batch with its program, if steps have one."""
        return batch if self.compiler is None else batch.with_program(self.compiler(batch.plan))

    def inputs(
        self, plan: StepPlan, content: Content, only: Collection[str] | None = None
    ) -> dict[str, tuple[ModuleInputs | None, ...]]:
        """What this rank computes, by module and microbatch, or of some modules."""
        return {
            module: tuple(
                None if assignment.idle else self._inputs(plan, module, number, instance, content, alike)
                for number, assignment in enumerate(assignments)
            )
            for module, assignments in plan.assignments.items()
            if (instance := self.share.mine.get(module)) is not None and (only is None or module in only)
            for alike in [plan.alike(module)]
        }

    def _inputs(
        self, plan: StepPlan, module: str, number: int, instance: int, content: Content, alike: bool
    ) -> ModuleInputs:
        assignment = plan.assignments[module][number]
        made = self.kinds[module].inputs(
            InstanceUnits(
                module=module,
                numbers=assignment.of(instance),
                edge_rows=assignment.edge_rows_of(instance),
                inner_rows=assignment.inner_rows_of(instance),
                slots=self._slots(plan, number, module, instance),
                first=module not in self.share.without_first and not plan.holds(module, 0),
                last=module not in self.share.without_last,
                seed=(self.seed, 0 if self.same_noise else plan.metadata.epoch),
                processor=self.processors.get(module),
                content=content,
                alike=alike,
                cache=self.caches.get(module),
            )
        )
        if module in self.share.cp:
            made = in_context(made, *self.share.cp[module])
        return made if self.compute_dtype is None else made.narrowed(self.compute_dtype)

    def _slots(self, plan: StepPlan, number: int, target: str, instance: int) -> dict[Hashable, torch.Tensor]:
        """(source, its microbatch) -> rows of the instance that it fills; none where the step's program says it."""
        if self.compiler is not None:
            return {}
        return {
            (source, p): torch.from_numpy(slots(edge_blocks(plan, source, p, target, t), instance))
            for source, fed in self.edges
            if fed == target
            for p, t in plan.feeds(source, target)
            if t == number
        }
