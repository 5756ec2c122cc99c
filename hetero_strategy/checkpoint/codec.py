"""Encode the values of a checkpoint besides its parameters as JSON and a list of tensors; never as a pickle.

A value of a type that JSON has (None, bool, int, str, finite float, list, dict with text keys) is stored as itself. A
value of another type becomes an object whose reserved key, ``"$"``, names the type. Tensors go to a list, which the
caller stores as safetensors. All other values are refused with their path and type: restoring them would need to run
code found in a checkpoint.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hetero_strategy.errors import CheckpointError

TAG = "$"


def encode(value: object) -> tuple[Any, list[torch.Tensor]]:
    """Return a JSON value and the tensors it refers to by number.

    The tensors are detached host copies, so ``value`` may change afterwards. Subclasses of dict and list come back as
    dict and list (OrderedDict and Counter stay), OmegaConf containers as plain ones with their interpolations resolved.

    Raises:
        CheckpointError: a value cannot be encoded; the message gives its path (``callbacks.EMA.shadow``) and type.
    """
    encoder = _Encoder()
    return encoder.encode(value), encoder.tensors


def decode(encoded: object, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """Undo :func:`encode`. Build only values of the types listed here; import and call nothing by name.

    Raises:
        CheckpointError: ``encoded`` was not made by :func:`encode`.
    """
    with damage("checkpoint metadata"):
        return _decode(encoded, tensors)


@contextmanager
def damage(what: object) -> Iterator[None]:
    """Raise CheckpointError that ``what`` is damaged if reading it raises an error of another kind."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as fault:
        raise CheckpointError(f"{what} is damaged: {type(fault).__name__}: {fault}") from fault


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype


_LEAVES: dict[str, tuple[type | tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, lambda value: repr(float(value)), float),  # infinite or NaN
    "bytes": ((bytes, bytearray), lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "path": (PurePath, str, Path),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype),
    "device": (torch.device, str, torch.device),
    "size": (torch.Size, list, torch.Size),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
}
"""Name in the file -> types, value to JSON, and JSON to value."""

_MAPPINGS: dict[str, type] = {"ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
"""Name in the file -> type. Subclasses of sequences are refused: a named tuple would lose its names."""


def _tagged(kind: str, value: object, **more: object) -> dict[str, object]:
    return {TAG: kind, "v": value, **more}


class _Encoder:
    """An encoder of one value, which collects its tensors and knows the path of the part that is being encoded."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._path: list[str] = []
        self._above: set[int] = set()

    def encode(self, value: Any) -> Any:
        """Return the JSON value of one part."""
        # numpy's float64 and str_ are Python floats and strings too, as are some enums: test for those types first
        if isinstance(value, (np.generic, np.ndarray)):
            return self._array(value)
        if isinstance(value, enum.Enum):
            if not isinstance(value, (str, int)):
                raise self._refused(value)
            value = value.value
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (str, int)):
            return str(value) if isinstance(value, str) else int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor) or value.layout is not torch.strided or value.is_meta or value.is_quantized:
                raise self._refused(value, "a tensor here is a plain one, equal on all ranks")
            self.tensors.append(value.detach().to("cpu", copy=True).contiguous())
            return _tagged("tensor", len(self.tensors) - 1)
        for kind, (types, to_json, _) in _LEAVES.items():
            if isinstance(value, types):
                return _tagged(kind, to_json(value))
        if isinstance(value, type) and value.__module__.startswith("omegaconf."):
            return value.__name__  # Lightning's `hparams_type`: Lightning reads a name as an attribute dict
        if id(value) in self._above:
            raise self._refused(value, "it contains itself")
        self._above.add(id(value))
        encoded = self._container(self._plain_config(value))
        self._above.remove(id(value))
        return encoded

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            pair_kind = next((name for name, mapping in _MAPPINGS.items() if isinstance(value, mapping)), "dict")
            if pair_kind == "dict" and all(type(key) is str for key in value) and TAG not in value:
                return {key: self._inside(key, item) for key, item in value.items()}
            pairs = [[self._inside(f"key {key!r}", key), self._inside(str(key), item)] for key, item in value.items()]
            return _tagged(pair_kind, pairs)
        kind = next((name for name, sequence in _SEQUENCES.items() if type(value) is sequence), None)
        if kind is None and not isinstance(value, list):
            raise self._refused(value)
        items = [self._inside(str(i), item) for i, item in enumerate(value)]
        return items if kind is None else _tagged(kind, items)

    def _inside(self, name: str, value: object) -> Any:
        self._path.append(name)
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def _array(self, value: np.generic | np.ndarray[Any, Any]) -> dict[str, object]:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.kind == "V":
            raise self._refused(value, f"numpy dtype {array.dtype}")
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return _tagged(kind, data, dtype=array.dtype.str, shape=list(array.shape))

    def _plain_config(self, value: Any) -> Any:
        """Turn an OmegaConf container into a plain one. Import omegaconf only if it is imported already."""
        if not type(value).__module__.startswith("omegaconf."):
            return value
        from omegaconf import Container, OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if not isinstance(value, Container):
            return value
        try:
            # interpolations may point outside this part of the config, to values that a later process does not have
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=False)
        except OmegaConfBaseException as fault:
            raise self._refused(value, f"it does not resolve: {fault}") from fault

    def _refused(self, value: object, why: str = "") -> CheckpointError:
        kind = type(value)
        reason = f" ({why})" if why else ""
        return CheckpointError(
            f"checkpoint['{'.'.join(self._path)}'] is a {kind.__module__}.{kind.__qualname__}{reason}, which a"
            " checkpoint cannot hold without pickle. Store plain values: save_hyperparameters(ignore=[...]), or return"
            " them from state_dict()."
        )


def _decode(encoded: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if TAG not in encoded:
        return {key: _decode(item, tensors) for key, item in encoded.items()}
    kind, value = encoded[TAG], encoded["v"]
    if kind in _LEAVES:
        return _LEAVES[kind][2](value)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(value, tensors))
    if kind == "tensor":
        return tensors[value]
    if kind in ("array", "scalar"):
        array = np.frombuffer(base64.b64decode(value), dtype=np.dtype(encoded["dtype"])).reshape(encoded["shape"])
        return array.copy() if kind == "array" else array[()]
    if kind in ("dict", *_MAPPINGS):
        pairs = {_decode(key, tensors): _decode(item, tensors) for key, item in value}
        return _MAPPINGS[kind](pairs) if kind in _MAPPINGS else pairs
    raise CheckpointError(f"checkpoint metadata holds a value of kind {kind!r}, unknown to this version")
