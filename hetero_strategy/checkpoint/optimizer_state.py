"""What an optimizer keeps of one parameter, as named tensors and back.

A tensor has the name of its state. Of what else there is the name says what it was: ``step:int``, and of a list or a
tuple its items, ``factors[0]`` or ``factors(0)``. Nothing else has a form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from hetero_strategy.errors import CheckpointError

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, AsyncCollectiveTensor)
"""Tensors that come back as they were: the values of others need what their class knows."""
_KEY = re.compile(r"[^.:\[\]()@]+")
_ITEM = re.compile(r"[\[(](\d+)[\])]")


def to_tensors(number: int, states: Mapping[str, Mapping[Any, object]]) -> dict[str, torch.Tensor]:
    """Return the states of parameters as tensors by ``<fqn>.<state>``.

    Args:
        number: of the optimizer.
        states: by the parameter's global name; "" stands for none.

    Raises:
        CheckpointError: a state has no form.
    """
    named: dict[str, torch.Tensor] = {}
    for fqn, state in states.items():
        for key, value in state.items():

            def refused(what: str, where: str = f"{key!r} of {fqn}") -> CheckpointError:
                return CheckpointError(
                    f"checkpoint: optimizer {number} has a state {where} {what}; a checkpoint holds plain tensors,"
                    " numbers and lists of them: take another optimizer, or save the model alone"
                    " (save_weights_only=True)"
                )

            if not fqn:
                raise refused("which is of no parameter", f"{key!r}")
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise refused("whose name is no plain word")
            named.update((f"{fqn}.{name}", tensor) for name, tensor in _parts(key, value, refused))
    return named


def from_tensors(named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Undo :func:`to_tensors` for one parameter, of whose name nothing is left in the names."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        key = re.split(r"[:\[(]", name, maxsplit=1)[0]
        states.setdefault(key, {})[name.removeprefix(key)] = tensor
    return {key: _value(parts) for key, parts in states.items()}


def _parts(name: str, value: object, refused: Callable[[str], CheckpointError]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        local = value._local_tensor if isinstance(value, DTensor) else value
        if type(local) not in PLAIN:
            raise refused(f"which is a {type(local).__qualname__}")
        yield name, value
    elif value is None or (type(value) in (list, tuple) and not value):
        yield f"{name}:{'none' if value is None else type(value).__name__}", torch.tensor(False)
    elif type(value) in (list, tuple):
        for number, item in enumerate(cast(Sequence[object], value)):
            yield from _parts(f"{name}[{number}]" if type(value) is list else f"{name}({number})", item, refused)
    elif isinstance(value, float):
        yield f"{name}:float", torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        kind, dtype = ("bool", torch.bool) if isinstance(value, bool) else ("int", torch.int64)
        yield f"{name}:{kind}", torch.tensor(value, dtype=dtype)
    else:
        raise refused(f"which is or holds a {type(value).__qualname__}")


def _value(parts: Mapping[str, torch.Tensor]) -> Any:
    """Of a state, or an item of one, from what its tensors are called beyond its own name."""
    (first, tensor), *_ = parts.items()
    if not first:
        return tensor
    if first[0] == ":":
        empty: dict[str, Any] = {":none": None, ":list": [], ":tuple": ()}
        return empty[first] if first in empty else tensor.item()
    items: dict[int, dict[str, torch.Tensor]] = {}
    for name, part in parts.items():
        step = cast(re.Match[str], _ITEM.match(name))
        items.setdefault(int(step[1]), {})[name[step.end() :]] = part
    made = [_value(items[number]) for number in sorted(items)]
    return made if first[0] == "[" else tuple(made)
