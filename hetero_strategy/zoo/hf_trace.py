"""Find by one forward on the meta device what runs before a tower's blocks, in them and after them, and cut it there.

No table of families: hooks note which parts run before the first block and after the last, autograd notes which
parameters reach the output, and wrapped functions of ``transformers.vision_utils`` note which tensors follow from the
items' sizes alone, so that a loader can make them.
"""

from __future__ import annotations

import copy
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
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.model.inputs import EncoderInputs, Packing

META = torch.device("meta")


class Reached(Exception):
    """An end of a forward at the block behind the last one needed; it has that block's input."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def stop(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """End the forward at a block, as a pre-hook of it."""
    raise Reached(_first(args, kwargs))


class Absent(nn.Module):
    """A stand-in for a block of another stage: it returns the rows received from that stage, or else its input.

    Args:
        received: list that has the received rows while a forward runs; None: the block's input.
        ends: whether the forward ends here, because the next blocks are in a later stage.
    """

    def __init__(self, received: list[Tensor] | None, ends: bool) -> None:
        super().__init__()
        self._received, self._ends = received, ends

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._ends:
            raise Reached(_first(args, kwargs))
        return self._received[0] if self._received else _first(args, kwargs)


class Hollow(nn.Module):
    """A stand-in for a part of an earlier stage: it returns zeros of the right shapes, found on the meta device."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.__dict__["part"] = without_values(part)  # no submodule: it has no parameters here

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["part"], name)

    @override
    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = _first(args, kwargs).device
        with _disable_current_modes():  # a profile's, in which the part has no weights
            args, kwargs = tree_map_only(
                Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=META), (args, kwargs)
            )
            made = self.__dict__["part"](*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(1, dtype=x.dtype, device=device).expand(x.shape), made)


def without_values(module: nn.Module) -> Any:
    """Copy a module to the meta device without its values."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = torch.empty_like(tensor, device=META)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


@dataclass(frozen=True)
class Trace:
    """The structure of a tower; FQNs are those in the traced model."""

    block_list: str
    blocks: int
    """Number of blocks that the output needs, from the first."""
    before: tuple[str, ...]
    """Parts with parameters that run before the blocks alone."""
    after: tuple[str, ...]
    """Parts that run after the blocks, and parts that no output reaches."""
    unreached: tuple[str, ...]
    """Parameters that no output reaches."""
    rows_in: tuple[int, ...]
    """Shape of the first block's input."""
    rows_out: tuple[int, ...]
    """Shape of the output."""


def trace(model: nn.Module, path: str, run: Callable[[Any], Tensor], layer: int | None) -> Trace:
    """Trace ``run`` of a model, on the meta device.

    Args:
        model: transformers module; it is copied.
        path: FQN of the tower in it, "" for the model itself.
        run: call of a copy of the model; returns its rows.
        layer: number of the wanted state as in transformers' ``hidden_states``: state ``k`` is the output of ``k``
            blocks, -1 that of all. None: the result of ``run``.

    Raises:
        ModelError: the tower has no list of blocks, or not so many.
    """
    meta = without_values(model)
    block_list, blocks = longest_list(meta.get_submodule(path), path)
    wanted = len(blocks) if layer is None else layer if layer >= 0 else len(blocks) + 1 + layer
    if not 1 <= wanted <= len(blocks):
        raise ModelError(
            f"layer={layer}, but {type(meta.get_submodule(path)).__name__} has {len(blocks)} blocks; use a layer from"
            f" {-len(blocks)} to {len(blocks)}"
        )
    seen = _Seen(meta, block_list)
    if wanted < len(blocks):
        blocks[wanted].register_forward_pre_hook(stop, with_kwargs=True)
    for parameter in meta.parameters():
        parameter.requires_grad_(True)
    with META, torch.enable_grad():
        try:
            rows = run(meta)
        except Reached as reached:
            rows = reached.rows
    named = dict(meta.named_parameters())
    gradients = torch.autograd.grad(rows.sum(), list(named.values()), allow_unused=True)
    unreached = {fqn for fqn, gradient in zip(named, gradients, strict=True) if gradient is None}
    needed = max(
        n
        for n in range(1, wanted + 1)
        if any(f"{block_list}.{n - 1}.{fqn}" not in unreached for fqn, _ in blocks[n - 1].named_parameters())
    )
    return Trace(
        block_list,
        needed,
        *seen.around(unreached, needed),
        tuple(fqn for fqn in named if fqn in unreached),
        seen.rows_in,
        tuple(rows.shape),
    )


def longest_list(tower: nn.Module, path: str) -> tuple[str, list[nn.Module]]:
    """Return the FQN and the members of the tower's longest list of parts; of equally long ones, the largest."""
    lists = [(fqn, part) for fqn, part in tower.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        raise ModelError(f"{type(tower).__name__} has no list of blocks: it cannot be an encoder here")
    fqn, blocks = max(lists, key=lambda one: (len(one[1]), sum(p.numel() for p in one[1].parameters())))
    return ".".join(name for name in (path, fqn) if name), list(blocks)


class _Seen:
    """Notes of when the parts of a model run: before, between or after its blocks."""

    def __init__(self, model: nn.Module, block_list: str) -> None:
        self._model, self._block_list = model, block_list
        self._ended, self._begun = 0, 0
        self._moments: dict[str, set[tuple[int, int]]] = {}
        """Part -> numbers of blocks that had begun and ended when it ran."""
        self.rows_in: tuple[int, ...] = ()
        """Shape of the first block's input."""
        for number, block in enumerate(model.get_submodule(block_list).children()):
            block.register_forward_pre_hook(partial(self._begin, number), with_kwargs=True)
            block.register_forward_hook(partial(self._end, number))
        for fqn, part in model.named_modules():
            if not self._holds_blocks(fqn) and not fqn.startswith(f"{block_list}."):
                part.register_forward_pre_hook(partial(self._note, fqn))

    def around(self, unreached: set[str], needed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the outermost parts before the blocks, and those after them or in no path to the output.

        A part that runs between blocks, or whose parameters are read without it, is in neither.
        """
        before: list[str] = []
        after = [f"{self._block_list}.{name}" for name, _ in self._children(self._block_list) if int(name) >= needed]
        waiting = [""]
        while waiting:
            owner = self._model.get_submodule(start := waiting.pop(0))
            named = {f"{start}.{name}".lstrip("."): part for name, part in owner.named_children()}
            after += [
                fqn
                for n, _ in owner.named_parameters(recurse=False)
                if (fqn := f"{start}.{n}".lstrip(".")) in unreached
            ]
            for fqn, part in named.items():
                names = {f"{fqn}.{inner}" for inner, _ in part.named_parameters()}
                moments = self._moments.get(fqn, set())
                if not names or fqn == self._block_list:
                    continue
                inside = {m for other, ms in self._moments.items() if f"{other}.".startswith(f"{fqn}.") for m in ms}
                runs_between = any(begun and ended < needed for begun, ended in inside)
                if not runs_between and (names <= unreached or (moments and all(n >= needed for _, n in moments))):
                    after.append(fqn)
                elif moments and not any(begun for begun, _ in moments):
                    before.append(fqn)
                elif self._holds_blocks(fqn) or not moments:
                    waiting.append(fqn)
        return tuple(before), tuple(after)

    def _children(self, fqn: str) -> list[tuple[str, nn.Module]]:
        return list(self._model.get_submodule(fqn).named_children())

    def _holds_blocks(self, fqn: str) -> bool:
        return not fqn or f"{self._block_list}.".startswith(f"{fqn}.")

    def _note(self, fqn: str, *_: Any) -> None:
        self._moments.setdefault(fqn, set()).add((self._begun, self._ended))

    def _begin(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begun = max(self._begun, number + 1)
        if not number:
            self.rows_in = tuple(_first(args, kwargs).shape)

    def _end(self, number: int, *_: Any) -> None:
        self._ended = max(self._ended, number + 1)


# ---- tensors that follow from sizes ---------------------------------------------------------------------------------


class Bounds(Packing):
    """A packing in the place of transformers' ``cu_seqlens``, which its towers hand on to the attention unread."""

    def __getitem__(self, index: Any) -> Tensor:
        return self.offsets[index]


@dataclass(frozen=True, eq=False)
class TowerInputs(EncoderInputs):
    """A batch of items with the tensors that follow from their sizes."""

    columns: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Keyword arguments of the tower's forward."""
    prepare: Prepare = field(kw_only=True)

    @override
    def only(self, units: np.ndarray) -> TowerInputs:
        return self.prepare(super().only(units))


@dataclass(frozen=True)
class _Result:
    """A placeholder in the arguments of a step for the grids or for a result of an earlier step."""

    step: int = -1
    number: int = 0


class Prepare:
    """A function that adds the tensors that follow from the items' sizes; a loader runs it on the host.

    Args:
        least: sizes ``(t, h, w)`` of the item that stands in where there are none.
        grid: columns of the grid in items' sizes; sizes that end before them end with the grid.
    """

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

    def __call__(self, inputs: EncoderInputs) -> TowerInputs:
        results: list[list[Any]] = [[grids := self.grids(inputs.sizes)]]
        columns: dict[str, Any] = {"grid_thw": grids}
        for function, arguments, names in self._steps:
            made = function(**_filled(arguments, results))
            results.append(list(made) if isinstance(made, tuple) else [made])
            for name, value in zip(names, results[-1], strict=True):
                is_bounds = isinstance(value, Tensor) and name.startswith("cu_")
                columns[name] = Bounds(**vars(Packing.of(value.diff().numpy()))) if is_bounds else value
        fields = {name: value for name, value in vars(inputs).items() if name not in ("columns", "prepare")}
        return TowerInputs(**fields, columns=columns, prepare=self)

    @contextmanager
    def recording(self, tower: nn.Module, grids: Tensor) -> Iterator[Tensor]:
        """Note every call of ``transformers.vision_utils`` by a tower's forward, which gets results without values, and
        yield the grids without values.
        """
        names = vars(sys.modules[type(tower).__module__])
        empty = grids.to(META)
        known: dict[int, _Result] = {id(empty): _Result()}
        values: list[list[Any]] = [[grids]]
        kept: list[Any] = []  # a freed tensor's id may come again
        old = {name: function for name, function in names.items() if _takes_ready_results(function)}

        def wrapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(function).bind(*args, **kwargs)
            ready = bound.arguments.pop("kwargs", None)
            template = {name: known.get(id(value), value) for name, value in bound.arguments.items()}
            asked = _Asked(ready or {})
            with torch.device("cpu"):
                made = function(**_filled(template, values), kwargs=asked)
            results = list(made) if isinstance(made, tuple) else [made]
            without = [x.to(META) if isinstance(x, Tensor) else x for x in results]
            for number, result in enumerate(without):
                if isinstance(result, Tensor):
                    known[id(result)] = _Result(len(self._steps), number)
            kept.append(without)
            values.append(results)
            self._steps.append((function, template, tuple(asked.names)))
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
    found = inspect.signature(function).parameters.get("kwargs")
    return found is not None and found.kind is not inspect.Parameter.VAR_KEYWORD


def _filled(arguments: Mapping[str, Any], results: list[list[Any]]) -> dict[str, Any]:
    """Return noted arguments with results of earlier steps in their places."""
    return {n: results[x.step + 1][x.number] if isinstance(x, _Result) else x for n, x in arguments.items()}
