"""A module with a loss of its own that makes items from the rows of a language model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from hetero_strategy.errors import DataError
from hetero_strategy.model.adapter import NO_ROWS, Adapter, given_rows
from hetero_strategy.model.inputs import GeneratorInputs


@dataclass
class GeneratorOutput:
    """What a generator makes of one microbatch of R target rows."""

    loss_sum: Tensor
    """fp32 (fp64 for an fp64 model) scalar: the loss summed over target elements."""
    drawn: Tensor | None = None
    """``[R, feature]`` in evaluation: target rows made from the conditions. None where the module is pipelined: making
    them takes many passes through all stages."""


register_dataclass(GeneratorOutput)  # as LMOutput


class Generator(Adapter):
    """Base of generators: rows of conditions and of noised targets, blocks, loss.

    A subclass provides :meth:`embed`, :meth:`transform`, :meth:`loss` and :meth:`draw`. :attr:`width` is that of the
    language model's rows it is given.
    """

    has_loss = True
    feature: int
    """Width of a raw target row."""

    @abstractmethod
    def embed(self, inputs: GeneratorInputs, conditions: Tensor, places: Tensor) -> Tensor:
        """Rows inside the module ``[T, hidden_width]``, of noised targets and of conditions.

        Args:
            inputs: of T packed rows.
            conditions: the language model's rows ``[C, width]``.
            places: int64 ``[C]``, packed rows that they fill.
        """

    @abstractmethod
    def transform(self, hidden: Tensor, inputs: GeneratorInputs) -> Tensor:
        """Rows ``[T, hidden_width]`` through the blocks that are here."""

    @abstractmethod
    def loss(self, hidden: Tensor, inputs: GeneratorInputs) -> Tensor:
        """Scalar, summed over target elements of the items that count (:attr:`GeneratorInputs.counted`), of the last
        blocks' rows ``[T, hidden_width]``.
        """

    @abstractmethod
    def draw(self, inputs: GeneratorInputs, conditions: Tensor, places: Tensor) -> Tensor:
        """Target rows ``[R, feature]`` from the inputs' noise and the conditions; :attr:`GeneratorInputs.values` are
        not looked at.
        """

    def forward(
        self,
        inputs: GeneratorInputs,
        rows: Mapping[Hashable, Tensor] = NO_ROWS,
        hidden: Tensor | None = None,
    ) -> GeneratorOutput | Tensor:
        """One microbatch.

        Args:
            inputs: targets, noise and times.
            rows: (source, its microbatch) -> ``[len(slots), width]``.
            hidden: rows from the previous pipeline stage, where this one is not the first.

        Returns:
            :class:`GeneratorOutput`, or rows for the next stage where this one is not the last.

        Raises:
            DataError: rows and slots do not match, or a condition row is not given.
        """
        if self.first_stage:
            conditions, places = self.conditions(inputs, rows)
            hidden = self.embed(inputs, conditions, places)
        hidden = self.transform(given_rows(hidden), inputs)
        if not self.last_stage:
            return hidden
        output = GeneratorOutput(self.loss(hidden, inputs))
        if self.first_stage and not self.training:
            with torch.no_grad():
                output.drawn = self.draw(inputs, conditions, places)
        return output

    def conditions(self, inputs: GeneratorInputs, rows: Mapping[Hashable, Tensor]) -> tuple[Tensor, Tensor]:
        """All condition rows ``[C, width]``, and the packed rows they fill, int64 ``[C]``.

        Raises:
            DataError: rows and slots do not match, or not every condition row is given.
        """
        if unknown := [source for source in rows if source not in inputs.slots]:
            raise DataError(f"rows of {unknown} have no slots: slots exist for {list(inputs.slots)}")
        given, places = [], []
        for source, index in inputs.slots.items():
            have = len(rows[source]) if source in rows else 0
            if have != len(index):
                raise DataError(f"source {source!r} gives {have} rows for {len(index)} slots")
            if source in rows:
                given.append(rows[source])
                places.append(index)
        found, wanted = sum(map(len, given)), int(inputs.rows.sum())
        if found != wanted:
            raise DataError(f"{found} condition rows are given, but the items take {wanted}: is an edge missing?")
        if not given:  # no items: the graph still reaches every parameter
            return inputs.time.new_zeros(0, self.width), inputs.packing.positions.new_zeros(0)
        if len(given) == 1:
            return given[0], places[0]
        return torch.cat(given), torch.cat(places)
