"""Run a part of a transformers model through the model's own forward: stand-ins take the places of all other parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from typing_extensions import override

_BARE = nn.Module().__dict__


class Joined(nn.Module):
    """A base of classes that :func:`join` puts before classes of transformers."""

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the two classes, as no module has the joined one."""
        return _blank, type(self).__bases__, vars(self)


def join(module: nn.Module, first: type[Joined]) -> None:
    """Change a module in place: ``first`` comes before its class."""
    module.__class__ = _joined(first, type(module))  # type: ignore[arg-type]


@cache
def _joined(first: Hashable, second: Hashable) -> Any:
    """Return a class of one name for all modules of a class; FSDP makes such classes, too."""
    bases: Any = (first, second)
    return type(bases[1].__name__, bases, {"__module__": bases[1].__module__})


def _blank(first: type, second: type) -> Any:
    """Return a module without its state."""
    kind = _joined(first, second)
    return kind.__new__(kind)


class StandIn(nn.Module):
    """A module in the place of one that does not run.

    Args:
        rows: rows that it returns; None: its first argument.
        like: module whose attributes transformers reads from the absent one.
        results: length of the tuple in which the rows are the first result; 0: the rows alone.
    """

    def __init__(self, rows: Tensor | None = None, like: nn.Module | None = None, results: int = 0) -> None:
        # One is made for each block of every microbatch, and torch's constructor takes longer than the rest.
        self.__dict__.update(_BARE, rows=rows, like=like, results=results)  # neither submodules nor buffers

    @override
    def forward(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        rows = hidden_states if self.__dict__["rows"] is None else self.__dict__["rows"]
        results: int = self.__dict__["results"]
        return (rows, *[None] * (results - 1)) if results else rows

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["like"], name)


class Kept(StandIn):
    """A block's stand-in that runs it and keeps its result."""

    result: Any = None

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["result"] = self.__dict__["like"](*args, **kwargs)
        return self.result


class Given(StandIn):
    """A block's stand-in that runs it with more arguments."""

    def __init__(self, block: nn.Module, **more: Any) -> None:
        super().__init__(like=block)
        self.__dict__["more"] = more

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["like"](*args, **kwargs, **self.__dict__["more"])


class Result(StandIn):
    """A module's stand-in that returns a result which the module has computed before."""

    def __init__(self, result: Any, like: nn.Module | None) -> None:
        super().__init__(like=like)
        self.__dict__["result"] = result

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["result"]


class Calling(StandIn):
    """A base's stand-in that runs a function on the rows ``inputs_embeds``."""

    def __init__(self, function: Callable[[Tensor], Tensor], like: nn.Module | None) -> None:
        super().__init__(like=like)
        self.__dict__["function"] = function

    @override
    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> RowsOutput:
        return RowsOutput(self.__dict__["function"](inputs_embeds))


class RowsOutput:
    """A base's output of which only the rows exist; whatever else a head reads is None."""

    def __init__(self, rows: Tensor) -> None:
        self.last_hidden_state = rows

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def shallow(module: nn.Module, children: Mapping[str, nn.Module | None]) -> Any:
    """Return a module that shares everything with another but these children."""
    duplicate = module.__new__(type(module))
    duplicate.__dict__.update(module.__dict__)
    duplicate.__dict__["_modules"] = {**module._modules, **children}
    return duplicate


def first_of(result: Any) -> Any:
    """Return the rows among the results of a block or base."""
    return result if isinstance(result, Tensor) else result[0]


class Reached(Exception):
    """An end of a forward at the block behind the last one needed; it has that block's input."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, which is the rows."""
    return args[0] if args else next(iter(kwargs.values()))


def stop(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """End the forward at a block, as a pre-hook of it."""
    raise Reached(first_argument(args, kwargs))


class Absent(nn.Module):
    """A stand-in for a block of another stage: it returns the rows received from that stage, or else its input.

    Args:
        received: list that has the received rows while a forward runs; None: the block's input.
        ends: whether the forward ends here, because the next blocks are in a later stage.
        results: length of the tuple in which the rows are the first result; 0: the rows alone.
    """

    def __init__(self, received: list[Tensor] | None, ends: bool, results: int) -> None:
        super().__init__()
        self._received, self._ends, self._results = received, ends, results

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._ends:
            raise Reached(first_argument(args, kwargs))
        rows = self._received[0] if self._received else first_argument(args, kwargs)
        return (rows, *[None] * (self._results - 1)) if self._results else rows


class Hollow(StandIn):
    """A stand-in for a part of an earlier stage: it returns zeros of the right shapes, found on the meta device.

    Its own tensors, which a forward may read, are zeros on the device of the rows received from the earlier stage.
    """

    def __init__(self, part: nn.Module, received: list[Tensor]) -> None:
        super().__init__(like=without_values(part))  # no submodule: it has no parameters here
        self.__dict__["received"] = received

    @override
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return zeros_like(value, self.__dict__["received"][0].device) if isinstance(value, Tensor) else value

    @override
    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = first_argument(args, kwargs).device
        with _disable_current_modes():  # a profile's, in which the part has no weights
            args, kwargs = tree_map_only(
                Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), (args, kwargs)
            )
            example = self.__dict__["like"](*args, **kwargs)
        return tree_map_only(Tensor, lambda x: zeros_like(x, device), example)


def zeros_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return zeros of a tensor's shape and dtype, which take no memory."""
    return torch.zeros(1, dtype=tensor.dtype, device=device).expand(tensor.shape)


def without_values(module: nn.Module) -> Any:
    """Copy a module to the meta device without its values."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)
