"""A module with its own loss that makes items from the rows of a language model."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError
from hetero_strategy.model.adapter import NO_ROWS, Adapter, previous_rows
from hetero_strategy.model.causal_lm import check_slots
from hetero_strategy.model.inputs import ModuleInputs, Packing, host_index, runs_of
from hetero_strategy.model.kind import InstanceUnits, LossOutput, ModuleKind

if TYPE_CHECKING:
    from hetero_strategy.plan.step_plan import StepMetadata


@dataclass(frozen=True, eq=False)
class GeneratorInputs(ModuleInputs):
    """A batch of all items that one generator instance draws in one microbatch. Zero items are allowed.

    Inside the module an item's rows are its condition rows, then its target rows.
    """

    values: Tensor
    """float32 ``[R, feature]``, raw target rows of all items end to end (image: patches). Like :attr:`noise`, ``[0,
    feature]`` on ranks with only inner pipeline stages."""
    noise: Tensor
    """float32 ``[R, feature]``, drawn from the standard normal distribution."""
    time: Tensor
    """float32 ``[n]``: the time of each item, from 0 (noise) to 1 (data)."""
    sizes: np.ndarray
    """int64 ``[n, k]``, on the host: image (grid height, grid width) in patches."""
    rows: np.ndarray
    """int64 ``[n]``, on the host: condition rows of each item, which the edge carries."""
    packing: Packing
    """Packing of the rows inside the module."""
    counted: Tensor | None = None
    """bool ``[n]``: items whose loss counts; None if all count."""

    @override
    def silenced(self, bad: np.ndarray) -> Self:
        return replace(self, counted=torch.from_numpy(~bad))

    @override
    def only(self, units: np.ndarray) -> Self:
        values, noise = self.values, self.noise
        if len(values):
            values, noise = (runs_of(each, self.target_rows, units) for each in (values, noise))
        place = host_index(units, self.time)
        return replace(
            self,
            values=values,
            noise=noise,
            time=self.time[place],
            sizes=self.sizes[units],
            rows=self.rows[units],
            packing=Packing.of(self.packing.lengths[units]),
            counted=None if self.counted is None else self.counted[place.to(self.counted.device)],
            slots={},
        )

    @property
    def target_rows(self) -> np.ndarray:
        """Return the number of target rows of each item, int64 ``[n]``, on the host."""
        return self.packing.lengths[: len(self.rows)] - self.rows


@dataclass
class GeneratorOutput(LossOutput):
    """A generator's output for one microbatch of R target rows. The loss is summed over target elements."""

    drawn: Tensor | None = None
    """``[R, feature]`` in evaluation: target rows drawn from the conditions. None if the module is pipelined, because
    drawing takes many passes through all stages."""


register_dataclass(GeneratorOutput)  # as for LossOutput


class GeneratorKind(ModuleKind):
    """A kind for generators: units are items, the loss counts target elements, evaluation gives drawn target rows."""

    name = "Generator"
    takes_from = ("CausalLM",)
    sources = 1

    @override
    def inputs(self, units: InstanceUnits) -> GeneratorInputs:
        """Make noise and times, which are functions of only (seed, epoch, generator, item of the data set)."""
        reads = units.first or units.last  # the first stage reads noised targets, the last compares with them
        items = units.content.items(units.module, units.numbers)
        empty = np.zeros((0, units.processor.feature), np.float32)
        values = units.content.values(units.module, units.numbers) if reads else []
        noise = [empty]
        time = np.zeros(len(units.numbers), np.float32)
        for place, item in enumerate(items.numbers.tolist()):
            random = np.random.Generator(np.random.PCG64([*units.seed, item, zlib.crc32(units.module.encode())]))
            time[place] = random.random(dtype=np.float32)  # first, so that ranks without payload draw the same
            if reads:
                noise.append(random.standard_normal(values[place].shape, np.float32))
        return GeneratorInputs(
            values=torch.from_numpy(np.concatenate([empty, *values])),
            noise=torch.from_numpy(np.concatenate(noise)),
            time=torch.from_numpy(time),
            sizes=items.sizes,
            rows=items.rows,
            packing=Packing.of(units.inner_rows, alike=units.alike),
            slots=units.slots,
        )

    @override
    def result(self, module: Adapter, metadata: StepMetadata, like: Tensor, *, pipelined: bool) -> Tensor | None:
        """Return zeros for the drawn target rows, in item order, ``[target rows, feature]``."""
        assert isinstance(module, Generator)
        return None if pipelined else like.new_zeros(int(_target_rows(metadata, module.name).sum()), module.feature)

    @override
    def placed(
        self, metadata: StepMetadata, module: str, units: np.ndarray, inputs: GeneratorInputs, output: GeneratorOutput
    ) -> tuple[np.ndarray, Tensor] | None:
        rows = _target_rows(metadata, module)
        place = ragged.expand(ragged.starts(rows)[units], rows[units])
        return None if output.drawn is None else (place, output.drawn)


def _target_rows(metadata: StepMetadata, module: str) -> np.ndarray:
    """Count the target rows of each item of a generator: rows inside the module that are not conditions."""
    items = metadata.items[module]
    return items.inner_rows - items.edge_rows


class Generator(Adapter):
    """A base of generators: rows of conditions and of noised targets, blocks, loss.

    :attr:`width` is the width of the condition rows, which come from a language model.
    """

    kind = GeneratorKind()
    feature: int
    """Width of a raw target row."""

    @abstractmethod
    def embed(self, inputs: GeneratorInputs, conditions: Tensor, index: Tensor) -> Tensor:
        """Turn noised targets and conditions into rows inside the module ``[T, hidden_width]``.

        Args:
            inputs: items with T packed rows.
            conditions: rows of the language model, ``[C, width]``.
            index: packed rows that the conditions fill, int64 ``[C]``.
        """

    @abstractmethod
    def transform(self, hidden: Tensor, inputs: GeneratorInputs) -> Tensor:
        """Run rows ``[T, hidden_width]`` through this stage's blocks."""

    @abstractmethod
    def loss(self, hidden: Tensor, inputs: GeneratorInputs) -> Tensor:
        """Sum the loss of the last block's rows ``[T, hidden_width]`` over target elements of
        :attr:`GeneratorInputs.counted` items.
        """

    @abstractmethod
    def draw(self, inputs: GeneratorInputs, conditions: Tensor, index: Tensor) -> Tensor:
        """Draw target rows ``[R, feature]`` from the inputs' noise and the conditions, without reading the values."""

    @override
    def example(self, lengths: np.ndarray) -> GeneratorInputs:
        packing, values = Packing.of(lengths), torch.empty(int(lengths.sum()) - len(lengths), self.feature)
        ones = np.ones_like(lengths)
        sizes = np.stack([ones, lengths - 1], axis=1)
        slots: dict[Any, Tensor] = {"": packing.offsets[:-1].to(torch.int64)}
        return GeneratorInputs(values, values.clone(), torch.empty(len(lengths)), sizes, ones, packing, slots=slots)

    @override
    def forward(
        self,
        inputs: GeneratorInputs,
        rows: Mapping[Hashable, Tensor] = NO_ROWS,
        hidden: Tensor | None = None,
    ) -> GeneratorOutput | Tensor:
        """Run one microbatch.

        Args:
            inputs: targets, noise and times.
            rows: (source, its microbatch) -> condition rows ``[len(slots), width]``.
            hidden: rows of the previous pipeline stage, unless this is the first.

        Returns:
            :class:`GeneratorOutput`, or rows for the next stage if this is not the last.

        Raises:
            DataError: rows and slots do not match, or a condition row is missing.
        """
        if self.first_stage:
            conditions, index = self.conditions(inputs, rows)
            hidden = self.embed(inputs, conditions, index)
        hidden = self.transform(previous_rows(hidden), inputs)
        if not self.last_stage:
            return hidden
        output = GeneratorOutput(self.loss(hidden, inputs))
        if self.first_stage and not self.training:
            with torch.no_grad():
                output.drawn = self.draw(inputs, conditions, index)
        return output

    def conditions(self, inputs: GeneratorInputs, rows: Mapping[Hashable, Tensor]) -> tuple[Tensor, Tensor]:
        """Return all condition rows ``[C, width]``, and the packed rows that they fill, int64 ``[C]``."""
        check_slots(inputs.slots, rows)
        count, needed = sum(map(len, rows.values())), int(inputs.rows.sum())
        if count != needed:
            raise DataError(f"{count} condition rows are given, but the items take {needed}: is an edge missing?")
        index = [slots for source, slots in inputs.slots.items() if source in rows]
        if not index:  # no items: the graph must still reach every parameter
            return inputs.time.new_zeros(0, self.width), inputs.packing.positions.new_zeros(0)
        conditions = [rows[source] for source in inputs.slots if source in rows]
        return (conditions[0], index[0]) if len(index) == 1 else (torch.cat(conditions), torch.cat(index))
