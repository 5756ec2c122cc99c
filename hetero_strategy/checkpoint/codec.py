"""What a checkpoint says besides its tensors, as JSON and a list of tensors; never a pickle.

A value of a type that JSON has (None, bool, int, str, finite float, list, dict with text keys) stands for itself. Any
other is an object with one reserved key, `"$"`, that names its type. Tensors are taken out into a list, which the
caller stores as safetensors. What has no form here is refused with the place and type of the value: running code found
in a checkpoint is the only other way to bring it back.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hetero_strategy.errors import CheckpointError

TAG = "$"


def encode(value: object) -> tuple[Any, list[torch.Tensor]]:
    """Returns a JSON value and the tensors it refers to by number.

    The tensors are detached host copies, so `value` may change afterwards. Subclasses of dict and list come back as
    dict and list (OrderedDict stays), OmegaConf containers as plain ones with their interpolations resolved.

    Raises:
        CheckpointError: a value has no form; the message gives its place (`callbacks.EMA.shadow`) and type.
    """
    tensors: list[torch.Tensor] = []
    return _encode(value, (), tensors, set()), tensors


def decode(encoded: object, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """The inverse of `encode`. Builds only values of the types listed there; imports and calls nothing by name.

    Raises:
        CheckpointError: `encoded` was not made by `encode`.
    """
    try:
        return _decode(encoded, tensors)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as fault:
        if isinstance(fault, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint metadata is damaged: {type(fault).__name__}: {fault}") from fault


def _tagged(kind: str, value: object, **more: object) -> dict[str, object]:
    return {TAG: kind, "v": value, **more}


def _encode(value: Any, place: tuple[str, ...], tensors: list[torch.Tensor], above: set[int]) -> Any:
    # numpy's float64 and str_ are Python floats and strings too, and some enums are: they come first
    if isinstance(value, np.generic):
        return _array(np.asarray(value), "scalar", value, place)
    if isinstance(value, enum.Enum):
        if isinstance(value, str):
            return str.__str__(value.value)
        if isinstance(value, int):
            return int(value)
        raise _refused(value, place)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _tagged("float", repr(float(value)))
    if isinstance(value, complex):
        return _tagged(
            "complex", [_encode(value.real, place, tensors, above), _encode(value.imag, place, tensors, above)]
        )
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) or value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise _refused(value, place, "a tensor here is a plain one, equal on all ranks")
        tensors.append(value.detach().to("cpu", copy=True).contiguous())
        return _tagged("tensor", len(tensors) - 1)
    if isinstance(value, np.ndarray):
        return _array(value, "array", value, place)
    leaf = _encode_leaf(value)
    if leaf is not None:
        return leaf

    if id(value) in above:
        raise _refused(value, place, "it contains itself")
    above = above | {id(value)}
    plain = _plain_config(value, place)
    if plain is not None:
        return _encode(plain, place, tensors, above)
    if isinstance(value, dict):
        return _encode_dict(value, place, tensors, above)
    sequences: dict[type, str | None] = {list: None, tuple: "tuple", set: "set", frozenset: "frozenset"}
    if isinstance(value, list) or type(value) in sequences:  # a named tuple would lose its names: refused
        items = [_encode(item, (*place, str(i)), tensors, above) for i, item in enumerate(value)]
        kind = sequences[list if isinstance(value, list) else type(value)]
        return items if kind is None else _tagged(kind, items)
    raise _refused(value, place)


def _encode_leaf(value: Any) -> object | None:
    if isinstance(value, (bytes, bytearray)):
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, PurePath):
        return _tagged("path", str(value))
    if isinstance(value, (torch.dtype, torch.device)):
        return _tagged(type(value).__name__, str(value).removeprefix("torch."))
    if isinstance(value, torch.Size):
        return _tagged("size", list(value))
    if isinstance(value, (range, slice)):
        bounds = [value.start, value.stop, value.step]
        if all(bound is None or type(bound) is int for bound in bounds):
            return _tagged(type(value).__name__, bounds)
    if isinstance(value, datetime.timedelta):
        return _tagged("timedelta", [value.days, value.seconds, value.microseconds])
    if isinstance(value, datetime.datetime):
        return _tagged("datetime", value.isoformat())
    if isinstance(value, type) and value.__module__.startswith("omegaconf."):
        return value.__name__  # Lightning's `hparams_type`; it reads a name as "attribute dict"
    return None


def _encode_dict(value: dict[Any, Any], place: tuple[str, ...], tensors: list[torch.Tensor], above: set[int]) -> Any:
    if not isinstance(value, OrderedDict) and all(type(key) is str for key in value) and TAG not in value:
        return {key: _encode(item, (*place, key), tensors, above) for key, item in value.items()}
    pairs = [
        [_encode(key, (*place, f"key {key!r}"), tensors, above), _encode(item, (*place, str(key)), tensors, above)]
        for key, item in value.items()
    ]
    return _tagged("ordered" if isinstance(value, OrderedDict) else "dict", pairs)


def _array(array: np.ndarray[Any, Any], kind: str, value: object, place: tuple[str, ...]) -> dict[str, object]:
    if array.dtype.hasobject or array.dtype.kind == "V":
        raise _refused(value, place, f"numpy dtype {array.dtype}")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return _tagged(kind, data, dtype=array.dtype.str, shape=list(array.shape))


def _plain_config(value: object, place: tuple[str, ...]) -> object | None:
    """A plain dict or list of an OmegaConf container, else None. Does not import omegaconf: its maker has done so."""
    if not type(value).__module__.startswith("omegaconf."):
        return None
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(value, Container):
        return None
    try:
        # interpolations may point outside this part of the config, which a later process does not have
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as fault:
        raise _refused(value, place, f"it does not resolve: {fault}") from fault


def _refused(value: object, place: tuple[str, ...], why: str = "") -> CheckpointError:
    kind = type(value)
    reason = f" ({why})" if why else ""
    return CheckpointError(
        f"checkpoint['{'.'.join(place)}'] is a {kind.__module__}.{kind.__qualname__}{reason}, which a checkpoint "
        "cannot hold without pickle. Store plain values: save_hyperparameters(ignore=[...]), or return them "
        "from state_dict()."
    )


def _decode(encoded: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if TAG not in encoded:
        return {key: _decode(item, tensors) for key, item in encoded.items()}
    kind, value = encoded[TAG], encoded["v"]
    match kind:
        case "float":
            return float(value)
        case "complex":
            return complex(*_decode(value, tensors))
        case "tensor":
            return tensors[value]
        case "array" | "scalar":
            array = np.frombuffer(base64.b64decode(value), dtype=np.dtype(encoded["dtype"])).reshape(encoded["shape"])
            return array.copy() if kind == "array" else array[()]
        case "bytes":
            return base64.b64decode(value)
        case "path":
            return Path(value)
        case "dtype":
            found = getattr(torch, value)
            if not isinstance(found, torch.dtype):
                raise ValueError(f"no dtype {value!r}")
            return found
        case "device":
            return torch.device(value)
        case "size":
            return torch.Size(value)
        case "range":
            return range(*value)
        case "slice":
            return slice(*value)
        case "timedelta":
            return datetime.timedelta(*value)
        case "datetime":
            return datetime.datetime.fromisoformat(value)
        case "tuple":
            return tuple(_decode(value, tensors))
        case "set":
            return set(_decode(value, tensors))
        case "frozenset":
            return frozenset(_decode(value, tensors))
        case "dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in value}
        case "ordered":
            return OrderedDict((_decode(key, tensors), _decode(item, tensors)) for key, item in value)
    raise CheckpointError(f"checkpoint metadata holds a value of kind {kind!r}, unknown to this version")
