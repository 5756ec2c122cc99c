"""Convert the state that an optimizer keeps of one parameter to named tensors and back.

A tensor has the name of its state. A value of another type adds its type to the name, ``step:int``; items of a list or
tuple add numbers, ``factors[0]`` or ``factors(0)``. All other values are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from hetero_strategy.checkpoint.boxes import Box, boxes_of
from hetero_strategy.checkpoint.folder import StoredTensor
from hetero_strategy.errors import CheckpointError

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, AsyncCollectiveTensor)
"""Tensor classes whose values alone bring them back."""
_KEY = re.compile(r"[^.:\[\]()@]+")
_ITEM = re.compile(r"[\[(](\d+)[\])]")

States = dict[str, dict[str, torch.Tensor]]
"""Parameter's global name -> name of the state -> tensor."""


def to_tensors(number: int, states: Mapping[str, Mapping[Any, object]]) -> dict[str, torch.Tensor]:
    """Return the states of parameters as tensors by ``<fqn>.<state>``.

    Args:
        number: index of the optimizer, for messages.
        states: states by global name of the parameter; "" holds states of no parameter.
    """
    named: dict[str, torch.Tensor] = {}
    for fqn, state in states.items():
        for key, value in state.items():

            def refused(problem: str, where: str = f"{key!r} of {fqn}") -> CheckpointError:
                return CheckpointError(
                    f"checkpoint: optimizer {number} has a state {where} {problem}; a checkpoint holds plain tensors,"
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
    """Undo :func:`to_tensors` for one parameter, whose own name is no part of the names."""
    states: States = {}
    for name, tensor in named.items():
        key = re.split(r"[:\[(]", name, maxsplit=1)[0]
        states.setdefault(key, {})[name.removeprefix(key)] = tensor
    return {key: _value(parts) for key, parts in states.items()}


def _parts(name: str, value: object, refused: Callable[[str], CheckpointError]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a state, or of an item of one."""
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
    """Return a state, or an item of one, from its tensors by the rest of their names."""
    (first, tensor), *_ = parts.items()
    if not first:
        return tensor
    if first[0] == ":":
        empty: dict[str, Any] = {":none": None, ":list": [], ":tuple": ()}
        return empty[first] if first in empty else tensor.item()
    items: dict[int, dict[str, torch.Tensor]] = {}
    for name, part in parts.items():
        index = cast(re.Match[str], _ITEM.match(name))
        items.setdefault(int(index[1]), {})[name[index.end() :]] = part
    values = [_value(items[number]) for number in sorted(items)]
    return values if first[0] == "[" else tuple(values)


def room_for_states(
    number: int, optimizer: Optimizer, stored: Mapping[str, StoredTensor], owned: Mapping[int, str]
) -> States:
    """Allocate, in their stored shapes, the states that a checkpoint has for the parameters that this rank owns.

    Args:
        number: index of the optimizer in the checkpoint.
        stored: all tensors of the checkpoint.
        owned: global names of owned parameters by their ``id``.
    """
    keys, states = _keys_by_name(number, stored), States()
    for group, p in ((g, p) for g in optimizer.param_groups for p in g["params"]):
        fqn = owned.get(id(p), "")
        weight, on_device = stored.get(f"model.{fqn}"), group.get("fused") or group.get("capturable")
        for key in keys.get(fqn, []):
            entry = stored[f"optim.{number}.{fqn}.{key}"]
            # As in Optimizer.load_state_dict, every state but a counter takes the parameter's dtype and device, and a
            # counter is on that device for kernels that read it there. A dtype unlike the weight's was chosen by the
            # optimizer, and stays. The tensor of a plain number stays on the host.
            plain = ":" in key
            follows = key != "step" and not plain and weight is not None and entry.dtype == weight.dtype
            device = p.device if (key != "step" or on_device) and not plain else None
            states.setdefault(fqn, {})[key] = _empty(p, entry.shape, p.dtype if follows else entry.dtype, device)
    return states


def room_for_unknown_states(number: int, stored: Mapping[str, StoredTensor], known: Collection[str]) -> States:
    """Allocate whole states of parameters that an optimizer does not have, for a hook that renames them."""
    return {
        fqn: {
            key: torch.empty((entry := stored[f"optim.{number}.{fqn}.{key}"]).shape, dtype=entry.dtype) for key in keys
        }
        for fqn, keys in _keys_by_name(number, stored).items()
        if fqn not in known
    }


def _keys_by_name(number: int, stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """Return the names of the stored states of one optimizer, by the global name of their parameter."""
    keys: dict[str, list[str]] = {}
    for name in stored:
        if name.startswith(start := f"optim.{number}."):
            fqn, _, key = name.removeprefix(start).rpartition(".")
            keys.setdefault(fqn, []).append(key)
    return keys


def _empty(p: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Allocate a state of a parameter, sharded like the parameter if both have one shape."""
    if tuple(shape) == tuple(p.shape) and p.dim() > 0:
        return torch.zeros_like(p, dtype=dtype).detach()
    value = torch.zeros(shape, dtype=dtype, device=device)
    if not isinstance(p, DTensor) or not value.dim():
        return value
    replicated = [Replicate()] * p.device_mesh.ndim  # an optimizer computes it so from a sharded gradient
    return DTensor.from_local(value, p.device_mesh, replicated, run_check=False)


def part_of(p: torch.Tensor, value: Any) -> Any:
    """Return this rank's part of a whole tensor of a sharded parameter's shape; return any other value as it is."""
    if not isinstance(p, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != p.shape or value.is_meta or not value.dim():
        return value
    local = torch.empty_like(p.to_local(), dtype=value.dtype)
    for box in boxes_of(p):
        box.of(local).copy_(Box(box.offsets, box.sizes, box.offsets).of(value))
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
