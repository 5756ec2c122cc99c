"""Make the tensors of a tower's forward that follow from its items' sizes alone, in a loader.

No table of families: wrapped functions of ``transformers.vision_utils`` note what a forward asks of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.model.inputs import EncoderInputs, Packing


class Bounds(Packing):
    """A packing in the place of transformers' ``cu_seqlens``, which its towers hand on to the attention unread."""

    def __getitem__(self, index: Any) -> Tensor:
        return self.offsets[index]


@dataclass(frozen=True, eq=False)
class TowerInputs(EncoderInputs):
    """A batch of items with the tensors that follow from their sizes."""

    columns: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Keyword arguments of the tower's forward."""
    moved: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Keyword arguments that have values in other places: int64 numbers of values."""
    prepare: Prepare = field(kw_only=True)

    @override
    def only(self, units: np.ndarray) -> TowerInputs:
        return self.prepare(super().only(units))


@dataclass(frozen=True)
class _Result:
    """A placeholder in the arguments of a step for the grids, the values (-2) or a result of an earlier step."""

    step: int = -1
    number: int = 0


VALUES = _Result(-2)


class Prepare:
    """A function that adds the tensors that follow from the items' sizes; a loader runs it on the host.

    Args:
        least: sizes ``(t, h, w)`` of the item that stands in where there are none.
        grid: columns of the grid in items' sizes; sizes that end before them end with the grid.
    """

    argument = "grid_thw"
    """Name of the grids among the arguments of the tower's forward."""

    def __init__(self, least: tuple[int, int, int], grid: slice | None = None) -> None:
        self.least, self.grid = least, grid
        self._steps: list[tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = []

    def grids(self, sizes: np.ndarray) -> Tensor:
        """Return the grid (t, h, w) of each item, int64 ``[n, 3]`` on the host, or of one stand-in."""
        if not len(sizes):
            return torch.tensor([self.least], device="cpu")
        if self.grid is not None and self.grid.stop <= sizes.shape[1]:
            sizes = sizes[:, self.grid]
        grids = sizes[:, -3:] if sizes.shape[1] > 2 else np.insert(sizes, 0, 1, axis=1)
        return torch.from_numpy(np.ascontiguousarray(grids))

    def numbers(self, inputs: EncoderInputs) -> Tensor | None:
        """Return numbers, in floating point, that functions which move values move in their place."""
        return None

    def __call__(self, inputs: EncoderInputs) -> TowerInputs:
        results: list[list[Any]] = [[self.numbers(inputs)], [grids := self.grids(inputs.sizes)]]
        columns, moved = dict[str, Any]({self.argument: grids}), dict[str, Any]()
        for function, arguments, names in self._steps:
            moves = any(isinstance(argument, _Result) and argument == VALUES for argument in arguments.values())
            result = function(**_filled(arguments, results))
            results.append(list(result) if isinstance(result, tuple) else [result])
            for name, value in zip(names, results[-1], strict=True):
                is_bounds = isinstance(value, Tensor) and name.startswith("cu_")
                columns[name] = Bounds(**vars(Packing.of(value.diff().numpy()))) if is_bounds else value
                if moves and isinstance(value, Tensor) and value.is_floating_point():
                    moved[name] = columns.pop(name).long()
        fields = {name: value for name, value in vars(inputs).items() if name not in ("columns", "moved", "prepare")}
        return TowerInputs(**fields, columns=columns, moved=moved, prepare=self)

    @contextmanager
    def recording(self, tower: nn.Module, grids: Tensor, empty_values: Tensor | None = None) -> Iterator[Tensor]:
        """Note every call of ``transformers.vision_utils`` by a tower's forward, which gets results without values, and
        yield the grids without values.

        Args:
            empty_values: values without values, of a tower whose functions move them.
        """
        names = vars(sys.modules[type(tower).__module__])
        empty = grids.to("meta")
        known: dict[int, _Result] = {id(empty): _Result(), id(empty_values): VALUES}
        numbers = None if empty_values is None else torch.zeros_like(empty_values, device="cpu")
        values: list[list[Any]] = [[numbers], [grids]]
        kept: list[Any] = []  # a freed tensor's id may come again
        old = {name: function for name, function in names.items() if _takes_ready_results(function)}

        def wrapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(function).bind(*args, **kwargs)
            ready = bound.arguments.pop("kwargs", None)
            template = {name: known.get(id(value), value) for name, value in bound.arguments.items()}
            keywords = _Asked(ready or {})
            with torch.device("cpu"):
                made = function(**_filled(template, values), kwargs=keywords)
            results = list(made) if isinstance(made, tuple) else [made]
            without = [x.to("meta") if isinstance(x, Tensor) else x for x in results]
            for number, result in enumerate(without):
                if isinstance(result, Tensor):
                    known[id(result)] = _Result(len(self._steps), number)
            kept.append(without)
            values.append(results)
            self._steps.append((function, template, tuple(keywords.names)))
            return tuple(without) if isinstance(made, tuple) else without[0]

        try:
            names.update({name: partial(wrapped, function) for name, function in old.items()})
            yield empty
        finally:
            names.update(old)


class _Asked(dict[str, Any]):
    """Keyword arguments that note which ready results a function looks for."""

    def __init__(self, ready: Mapping[str, Any]) -> None:
        super().__init__(ready)
        self.names: list[str] = []

    @override
    def pop(self, name: str, *default: Any) -> Any:
        self.names.append(name)
        return super().pop(name, *default)


def _takes_ready_results(function: Any) -> bool:
    if not inspect.isfunction(function) or not function.__module__.startswith("transformers."):
        return False
    argument = inspect.signature(function).parameters.get("kwargs")
    return argument is not None and argument.kind is not inspect.Parameter.VAR_KEYWORD


def _filled(arguments: Mapping[str, Any], results: list[list[Any]]) -> dict[str, Any]:
    """Return noted arguments with results of earlier steps in their places."""
    return {n: results[x.step + 2][x.number] if isinstance(x, _Result) else x for n, x in arguments.items()}
