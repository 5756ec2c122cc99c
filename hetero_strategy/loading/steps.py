"""Steps of an epoch as a data set: for each step, the payload that this rank computes.

The global batch of (seed, epoch, step) is the same for any number of ranks: the order comes from a seeded permutation,
never from the process's random state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.media import raw_rows, zero_rows
from hetero_strategy.errors import ConfigError, DataError, is_whole
from hetero_strategy.layout.spec import Placement
from hetero_strategy.loading.batch import Batch, LoadTimes
from hetero_strategy.loading.metadata import step_metadata, with_own_units
from hetero_strategy.model.context import in_context
from hetero_strategy.model.inputs import ModuleInputs
from hetero_strategy.model.kind import (
    Content,
    InstanceUnits,
    Items,
    Media,
    ModuleKind,
    PlacedItems,
    Processor,
    TargetProcessor,
)
from hetero_strategy.plan.masks import item_runs
from hetero_strategy.plan.packing import levelled
from hetero_strategy.plan.plan_step import ResolvedBalance, plan_step
from hetero_strategy.plan.step_plan import StepMetadata, StepPlan, edge_blocks, slots
from hetero_strategy.schedule.compile import StepProgram

Place = tuple[int, int]
"""(epoch, step)."""
OnError = Literal["stop", "skip"]
"""``stop``: the run ends with an error that names file and sample. ``skip``: the sample counts for nothing."""


@dataclass(frozen=True)
class RankView:
    """A rank's view of the work: which instances exist, and which of them it computes."""

    instances: Mapping[str, int]
    """Module -> number of its data-parallel instances."""
    mine: Mapping[str, int | None]
    """Module -> the instance this rank is part of, or None."""
    row_multiple: Mapping[str, int] = field(default_factory=dict)
    """Module -> multiple to which its rows per instance are padded; see `plan_step`."""
    without_first: frozenset[str] = frozenset()
    """Modules of which this rank holds later pipeline stages only: it reads no payload for them."""
    without_last: frozenset[str] = frozenset()
    """Modules of which this rank lacks the last pipeline stage: it needs no labels or targets for them."""
    cp: Mapping[str, tuple[int, int, bool]] = field(default_factory=dict)
    """Module -> (this rank's number among an instance's context-parallel ranks, their count, whether they exchange
    heads), if there are several."""

    @classmethod
    def of(
        cls, placement: Placement, modules: Sequence[str], rank: int, row_multiple: Mapping[str, int] | None = None
    ) -> RankView:
        """Return the view of a rank on some of the placed modules."""
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
                name: (seat.context, layout.cp, layout.cp_form == "heads")
                for name, seat in seats.items()
                if seat is not None and (layout := placement.layouts[name]).cp > 1
            },
        )

    def reads(self, module: str, *, target: bool = False) -> bool:
        """Return whether this rank takes payload of a module whose instance it is part of.

        Args:
            module: encoder, or generator if ``target``, whose first stage sees noised targets and whose last stage
                compares with the targets.
        """
        return module not in self.without_first or (target and module not in self.without_last)

    @classmethod
    def whole(cls, modules: tuple[str, ...]) -> RankView:
        """Return the view with one instance of every module, all on this rank."""
        return cls(dict.fromkeys(modules, 1), dict.fromkeys(modules, 0))


@lru_cache(maxsize=1)
def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch, int64 ``[samples]``, a function of its arguments alone. Each worker keeps the last
    one.
    """
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)
    order.flags.writeable = False  # shared by all callers
    return order


def check_counts(size: int, count: int | None, sizes: str = "global_batch_size", counts: str = "microbatches") -> None:
    """Refuse an invalid global batch size, or number of its microbatches (None: chosen in every step).

    Args:
        size: samples of a global batch.
        count: microbatches of it.
        sizes, counts: names of the two options in messages.
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
    """Refuse an epoch without steps."""
    if not samples or (drop_last and samples < global_batch_size):
        raise ConfigError(
            f"drop_last with global_batch_size {global_batch_size} leaves nothing of {samples} samples; use a smaller"
            " batch or drop_last=False"
        )


class StepDataset(Dataset[Batch]):
    """A map-style data set over the steps of an epoch; an item is one global batch as this rank sees it.

    Args:
        edges: (source, target) pairs of modules.
        kinds: kinds of all modules; the first samplewise one decides which sample is in which microbatch.
        global_batch_size: samples per step, over all ranks.
        microbatches: microbatches per step; None: as few as the first language model's budget allows.
        microbatch_rows: encoders and generators with microbatches of their own; see `plan_step`.
        balancing: spread of work over instances and microbatches; default: units are dealt in order.
        window: steps among which samples move to level the steps' tokens; 1: no sample leaves its step.
        shuffle: whether epochs are permuted; otherwise they have manifest order.
        drop_last: whether to leave out the last step of an epoch if it is not full.
        same_noise: whether generators see the same noise and times in every epoch, so that validations are comparable.
        compute_dtype: dtype in which modules compute; payload that they cast first is loaded in it. None: payload keeps
            its dtype.
        compiler: maker of this rank's program of a step, which then says which rows edges fill; None: the inputs say
            it.
        imports: names of Python modules to import before this is unpickled.
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
        self.compute_dtype, self.compiler = compute_dtype, compiler
        self.on_error: OnError = "stop"
        """Policy for an item that cannot be read; the loader sets it."""
        check_steps(len(index), global_batch_size, drop_last)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in state["imports"]:  # registered policies are pickled by name
            import_module(name)
        self.__dict__.update(state)

    def __len__(self) -> int:
        full, rest = divmod(len(self.index), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def plan(self, epoch: int, step: int) -> StepPlan:
        """Return the step plan, the same on every rank."""
        return self.plan_of(step_metadata(self.index, epoch, step, self.samples(epoch, step), self.processors))

    def plan_of(self, metadata: StepMetadata) -> StepPlan:
        """Return the step plan of a global batch."""
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
        """Return the data set indices of a step's global batch, int64 ``[S]``."""
        size, total = self.global_batch_size, len(self.index)
        order = epoch_order(total, self.seed, epoch) if self.shuffle else np.arange(total, dtype=np.int64)
        first = step // self.window * self.window
        drawn = order[first * size : (first + self.window) * size]
        if self.window == 1 or len(drawn) < self.window * size:  # an incomplete last window is not levelled
            return order[step * size : (step + 1) * size]
        # Not by costs, which layouts and options change: a resumed run keeps its samples whatever they are.
        tokens = np.asarray(self.index.offsets[drawn + 1] - self.index.offsets[drawn], np.float64)
        return drawn[levelled(tokens, size, self.window) == step - first]

    def __getitem__(self, place: int | Place) -> Batch:
        """Return the batch of (epoch, step), or of a step of epoch 0; raise DataError if a file has gone bad."""
        epoch, step = self.place(place)
        began = time.perf_counter()
        plan = self.plan(epoch, step)
        assert plan.digest  # made here, ahead of the step that needs it
        planned = time.perf_counter()
        reader = Reader(self.index, self.processors, self.on_error)
        inputs = self.inputs(plan, fetched(self.index, plan.samples, reader))
        times = LoadTimes(planned - began, time.perf_counter() - planned)
        return self.compiled(Batch(plan, inputs, times, mine=self.share.mine, failed=reader.failed))

    def place(self, place: int | Place) -> Place:
        """Return (epoch, step) of the requested item; raise IndexError if there is no such step."""
        epoch, step = place if isinstance(place, tuple) else (0, place)
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        return epoch, step

    def compiled(self, batch: Batch) -> Batch:
        """Return a batch with its program, if steps have one."""
        return batch if self.compiler is None else batch.with_program(self.compiler(batch.plan))

    def inputs(self, plan: StepPlan, content: Content) -> dict[str, tuple[ModuleInputs | None, ...]]:
        """Make the inputs of this rank, by module and microbatch."""
        return {
            module: tuple(
                None if assignment.idle else self._inputs(plan, module, number, instance, own, alike)
                for number, assignment in enumerate(assignments)
            )
            for module, assignments in plan.assignments.items()
            if (instance := self.share.mine.get(module)) is not None
            for alike in [plan.alike(module)]
            for own in [replace(content, placed=partial(self._placed, module, plan.metadata, content.items))]
        }

    def _inputs(
        self, plan: StepPlan, module: str, number: int, instance: int, content: Content, alike: bool
    ) -> ModuleInputs:
        assignment = plan.assignments[module][number]
        inputs = self.kinds[module].inputs(
            InstanceUnits(
                module=module,
                numbers=assignment.of(instance),
                edge_rows=assignment.edge_rows_of(instance),
                inner_rows=assignment.inner_rows_of(instance),
                slots=self._slots(plan, number, module, instance),
                first=module not in self.share.without_first,
                last=module not in self.share.without_last,
                seed=(self.seed, 0 if self.same_noise else plan.metadata.epoch),
                processor=self.processors.get(module),
                content=content,
                alike=alike,
            )
        )
        if module in self.share.cp and self.kinds[module].samplewise:
            rank, ranks, by_heads = self.share.cp[module]
            dealt, windows = assignment.dealt(instance, ranks), self.kinds[module].rules
            scores = module not in self.share.without_last
            inputs = in_context(inputs, rank, dealt, windows, by_heads=by_heads, scores=scores)
        return inputs if self.compute_dtype is None else inputs.narrowed(self.compute_dtype)

    def _placed(
        self, module: str, metadata: StepMetadata, items: Callable[[str, np.ndarray], Items], samples: np.ndarray
    ) -> list[PlacedItems]:
        """Return the items of every encoder with an edge to a module, in some samples of the step."""
        placed = []
        for name, processor in self.processors.items():
            if (name, module) in self.edges:
                runs = item_runs(metadata, name, samples)
                places = runs.target, items(name, runs.source).sizes, runs.target_start, runs.rows
                placed.append(PlacedItems(name, processor.field, processor.size_names, *places))
        return placed

    def _slots(self, plan: StepPlan, number: int, target: str, instance: int) -> dict[Hashable, torch.Tensor]:
        """Return (source, its microbatch) -> rows of the instance that it fills; empty if the program says it."""
        if self.compiler is not None:
            return {}
        return {
            (source, p): torch.from_numpy(slots(edge_blocks(plan, source, p, target, t), instance))
            for source, fed in self.edges
            if fed == target
            for p, t in plan.feeds(source, target)
            if t == number
        }


def complaint(index: DatasetIndex, module: str, sample: int, error: Exception) -> str:
    """Describe the fault of an item of a sample; the error names the file."""
    return f"{error} (sample '{index.names[sample]}', module '{module}')"


class Reader:
    """A reader of the items of one batch."""

    def __init__(self, index: DatasetIndex, processors: Mapping[str, Media], on_error: OnError) -> None:
        self._index, self._processors, self._on_error = index, processors, on_error
        self.failed: dict[int, str] = {}
        """Data set index of every sample with an item that could not be read -> reason, with the file's name."""

    def __call__(self, module: str, item: int, sizes: np.ndarray) -> np.ndarray:
        """Return rows ``[R, feature]`` of one item of the data set; zeros if it is skipped.

        Args:
            item: number in the module's item table.
            sizes: sizes in the index, int64 ``[k]``, of R raw rows.
        """
        processor = self._processors[module]
        try:
            return processor.load(self._index.path(module, item), tuple(sizes.tolist()))
        except (DataError, OSError) as error:
            sample = int(self._index.items[module].sample[item])
            message = complaint(self._index, module, sample, error)
            if self._on_error == "stop":
                raise DataError(f"{message}; mend the file, or train without such samples: on_error='skip'") from None
            self.failed.setdefault(sample, message)
            return zero_rows(processor, raw_rows(processor, sizes))


def fetched(index: DatasetIndex, samples: np.ndarray, reader: Reader) -> Content:
    """Return content that the step's reader reads when it is asked for; the index knows all sizes."""
    numbers = cache(lambda module: index.item_numbers(module, samples))

    def items(module: str, units: np.ndarray) -> Items:
        table, these = index.items[module], numbers(module)[units]
        return Items(these, np.asarray(table.sizes[these]), np.asarray(table.rows[these]))

    def values(module: str, units: np.ndarray) -> list[np.ndarray]:
        selected = items(module, units)
        return [
            reader(module, item, sizes) for item, sizes in zip(selected.numbers.tolist(), selected.sizes, strict=True)
        ]

    return Content(lambda units: index.text(samples[units]), items, values)
