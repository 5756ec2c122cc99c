"""Read local Hugging Face folders: config.json and safetensors, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_strategy.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXTRA = "extra.safetensors"
"""File of an export for tensors that have no place in the Hugging Face model, under our own names."""

PROCESSOR = "preprocessor_config.json"
"""File of a folder with settings of its files' processor."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Dtypes by their names in safetensors."""

Selection = Mapping[int, Tensor]
"""Part of a tensor: dimension -> int64 indices along it, in the order wanted. Missing dimensions are whole."""


def select(tensor: Tensor, selection: Selection) -> Tensor:
    """Return the selected part of a tensor; the tensor itself if nothing is left out."""
    for dim, index in selection.items():
        tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor


@dataclass(frozen=True)
class HFWeights:
    """A map between the parameters of a module and a Hugging Face folder."""

    names: Mapping[str, str]
    """FQN of each parameter and persistent buffer -> its name in a transformers model of this module alone."""
    config: Mapping[str, Any]
    """Content of config.json."""
    paired_heads: Mapping[str, int] = field(default_factory=dict)
    """FQN -> heads of projections whose rotary embedding turns neighbouring rows. Hugging Face's embedding turns
    halves, so its folders have another order of rows: :func:`pairs_to_halves`."""
    model_class: type | None = None
    """transformers class of the names. A folder's own class has precedence, and there names may have a prefix."""
    processor: Mapping[str, Any] | None = None
    """Settings of the weights' folder in :data:`PROCESSOR` that are used here."""

    def below(self, prefix: str) -> HFWeights:
        """Return the same weights for a module whose FQNs have ``prefix`` in front."""
        names = {prefix + fqn: name for fqn, name in self.names.items()}
        heads = {prefix + fqn: count for fqn, count in self.paired_heads.items()}
        return replace(self, names=names, paired_heads=heads)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read config.json of a folder."""
    return read_json(Path(folder) / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{path} does not exist: checkpoint= takes a local Hugging Face folder") from None
    except ValueError as fault:
        raise ModelError(f"{path} is not JSON: {fault}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, not names and values")
    return config


def read_processor(folder: str | Path, part: str) -> dict[str, Any]:
    """Read the processor settings of a folder; {} if there are none.

    They are in :data:`PROCESSOR` or, as transformers 5 saves a processor, in ``part`` of processor_config.json.
    """
    path, joined = (Path(folder) / name for name in (PROCESSOR, "processor_config.json"))
    if path.is_file():
        return read_json(path)
    return (read_json(joined).get(part) or {}) if joined.is_file() else {}


def pairs_to_halves(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a projection ``[heads * d, ...]`` from turning neighbours to turning halves."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def halves_to_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Undo :func:`pairs_to_halves`."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class SafetensorFiles(ExitStack):
    """A context manager for the safetensors files of a folder: it opens each on first use and closes all."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._open: dict[str, Any] = {}

    def opened(self, file: str) -> Any:
        """Return the open ``safe_open`` handle of a file; safetensors' and the system's errors pass through."""
        if file not in self._open:
            from safetensors import safe_open

            self._open[file] = self.enter_context(safe_open(self.folder / file, framework="pt", device="cpu"))
        return self._open[file]


class TensorFolder(SafetensorFiles):
    """The tensors of a Hugging Face folder by name, in whichever file; read one by one."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(Path(folder))
        if (self.folder / SINGLE).exists():  # preferred to shards, as in transformers
            self._files: Mapping[str, str] = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        elif (self.folder / INDEX).exists():
            self._files = read_json(self.folder / INDEX).get("weight_map", {})
            if not self._files or not isinstance(self._files, dict):
                raise ModelError(f"{self.folder / INDEX} has no weight_map, which says where tensors are")
        else:
            raise ModelError(f"{self.folder} has neither {SINGLE} nor {INDEX}: other formats are not read")
        self.own = frozenset(self._file(EXTRA).keys() if (self.folder / EXTRA).exists() else ())
        """Names of tensors in :data:`EXTRA`."""
        self._files = {**self._files, **dict.fromkeys(self.own, EXTRA)}

    def names(self) -> frozenset[str]:
        """Return the names of all tensors but the :attr:`own` ones."""
        return frozenset(self._files) - self.own

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        from safetensors import SafetensorError

        try:
            return self._file(self._files[name]).get_slice(name)
        except SafetensorError as fault:
            raise ModelError(f"{self.folder / self._files[name]} lacks {name!r}, against its index: {fault}") from None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading it."""
        dtype = self._slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ModelError(f"{name} in {self.folder} is {dtype}, which torch does not have: save it in bfloat16")
        return DTYPES[dtype]

    def read(self, name: str, selection: Selection) -> Tensor:
        """Read only the selected part of one tensor, to the CPU.

        The file is read in runs of neighbouring indices, which are then reordered.
        """
        file = self._file(self._files[name])
        if not selection:
            return file.get_tensor(name)
        runs, order = [[slice(None)]] * (max(selection) + 1), {}
        for dim, index in selection.items():
            ascending, places = index.sort()
            runs[dim], order[dim] = _runs(ascending), places.argsort()
        return select(_read_runs(file.get_slice(name), runs), order)

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError

        try:
            return self.opened(name)
        except (FileNotFoundError, SafetensorError) as fault:
            raise ModelError(f"{self.folder / name} cannot be read: {fault}") from None


def _runs(ascending: Tensor) -> list[slice]:
    """Return the runs of neighbours in ascending indices; one empty run if there are none."""
    if not len(ascending):
        return [slice(0, 0)]
    starts = torch.nn.functional.pad(ascending.diff() != 1, (1, 0), value=True)
    ends = starts.roll(-1)
    return [slice(a, b + 1) for a, b in zip(ascending[starts].tolist(), ascending[ends].tolist(), strict=True)]


def _read_runs(source: Any, runs: list[list[slice]], at: tuple[slice, ...] = ()) -> Tensor:
    """Read the product of the runs of every dimension from a slice of safetensors."""
    if len(at) == len(runs):
        return source[at]
    return torch.cat([_read_runs(source, runs, (*at, run)) for run in runs[len(at)]], dim=len(at))
