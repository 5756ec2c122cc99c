"""Run a part of a transformers base through the base's own forward: stand-ins take the places of all other parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.zoo.hf_packed import AttentionCall, noted_attention


class StandIn(nn.Module):
    """A module in the place of one that does not run.

    Args:
        rows: rows that it returns; None: its first argument.
        like: module whose attributes transformers reads from the absent one.
        results: length of the tuple in which the rows are the first result; 0: the rows alone.
    """

    def __init__(self, rows: Tensor | None = None, like: nn.Module | None = None, results: int = 0) -> None:
        super().__init__()
        self.__dict__.update(rows=rows, like=like, results=results)  # neither submodules nor buffers

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


class Parts(NamedTuple):
    """The parts of a base, in the order in which its forward runs them on rows."""

    before: list[str]
    """Names of the parts with parameters that run before the blocks."""
    after: list[str]
    """Names of the parts with parameters that run after the blocks."""
    attention: list[list[AttentionCall]]
    """Calls of attention by each block."""
    results: int
    """Length of the tuple that a block returns; 0: rows alone."""
    finish: list[str] | None
    """Names of children that, called one after another, are all that happens to the last block's rows; None: there is
    more."""


def parts_of(base: nn.Module, layers: str, run: Callable[[nn.Module], Any]) -> Parts:
    """Find the parts of a base on the meta device by one run of its forward.

    Args:
        layers: name of the list of blocks.
        run: calls a base with a few rows on the meta device.

    Raises:
        ModelError: the forward fails.
    """
    order: list[str] = []
    blocks = {key: _Traced(block, order) for key, block in getattr(base, layers)._modules.items()}
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: order.append(name))
        for name, child in base.named_children()
        if name != layers and any(True for _ in child.parameters())
        for part in child.modules()
    ]
    calls: list[_Call] = []
    for name, child in base.named_children():
        note = partial(_note, calls, name)
        hooks.append(child.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            result = run(shallow(base, {layers: shallow(getattr(base, layers), blocks)}))
    except ModelError:
        raise
    except Exception as fault:  # several kinds
        reason = " ".join(str(fault).split())
        raise ModelError(
            f"{type(base).__name__}: its forward fails on rows and positions: {type(fault).__name__} {reason}; correct"
            " the config if it names a field, else the class cannot be run by stages"
        ) from fault
    finally:
        for hook in hooks:
            hook.remove()
    begin = order.index("") if "" in order else 0  # without blocks a norm runs after them
    before = list(dict.fromkeys(order[:begin]))
    after = list(dict.fromkeys(name for name in order[begin:] if name and name not in before))
    traced = list(blocks.values())
    results = max((block.results for block in traced), default=0)
    finish = _finish(traced[-1].returned, calls, result) if traced else None
    return Parts(before, after, [block.calls for block in traced], results, finish)


class _Call(NamedTuple):
    """A call of a child."""

    name: str
    alone: bool
    """Whether it has one argument."""
    given: Any
    result: Any
    version: int


def _note(calls: list[_Call], name: str, child: nn.Module, args: Any, more: Any, result: Any) -> None:
    alone = len(args) == 1 and not more
    calls.append(_Call(name, alone, args[0] if args else None, result, getattr(result, "_version", 0)))


def _finish(returned: tuple[Tensor, int], calls: list[_Call], result: Any) -> list[str] | None:
    """Return the names of the calls from a block's rows to a base's result, if there is nothing but these calls.

    Args:
        returned: rows of the last block, and their version then, which a change in place raises.
    """
    (rows, version), names = returned, []
    for call in calls:
        if call.alone and call.given is rows and rows._version == version:
            names.append(call.name)
            rows, version = call.result, call.version
    return names if first_of(result) is rows and rows._version == version else None


class _Traced(StandIn):
    """A block's stand-in that notes its place, its calls of attention and how many results it has."""

    def __init__(self, block: nn.Module, order: list[str]) -> None:
        super().__init__(like=block)
        self.__dict__.update(order=order, calls=[])

    @override
    def forward(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["order"].append("")
        for name, value in kwargs.items() | dict(enumerate(args, 1)).items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == hidden_states.shape:
                raise ModelError(
                    f"{type(self.__dict__['like']).__name__}: a block takes other rows ({name}) beside those of the"
                    " block before it, which stages do not have; such layers are not built"
                )
        with noted_attention() as self.__dict__["calls"]:
            try:
                result = self.__dict__["like"](hidden_states, *args, **kwargs)
            except ModelError:
                raise
            except Exception as fault:  # such as routing by values; attention has run before it
                if not isinstance(fault, RuntimeError) or "meta" not in str(fault).lower():
                    warnings.warn(
                        f"{type(self.__dict__['like']).__name__}: a run of a block without values ends with"
                        f" {type(fault).__name__}: {fault}; calls of attention after it are not counted",
                        stacklevel=2,
                    )
                result = hidden_states
        self.__dict__["results"] = len(result) if isinstance(result, tuple) else 0
        self.__dict__["returned"] = first_of(result), first_of(result)._version
        return result
