"""Local Hugging Face folders: config.json and safetensors, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from hetero_strategy.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        ModelError: there is none, or it is not JSON.
    """
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: checkpoint= takes a local Hugging Face folder") from None
    except json.JSONDecodeError as fault:
        raise ModelError(f"{path} is not JSON: {fault}") from None
    return config


def pairs_to_halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of a projection ``[heads * d, ...]`` whose rotary embedding turns neighbours, for one that turns halves."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def halves_to_pairs(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`pairs_to_halves`."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class TensorFolder:
    """Tensors of a folder by name, whichever file holds them. A context manager; reads are lazy and one by one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        if (self.folder / INDEX).exists():
            self._files: Mapping[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
        elif (self.folder / SINGLE).exists():
            self._files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise ModelError(f"{self.folder} has neither {SINGLE} nor {INDEX}: other formats are not read")

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._file(self._files[name]).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU."""
        tensor: Tensor = self._file(self._files[name]).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[name] = self._stack.enter_context(
                    safe_open(self.folder / name, framework="pt", device="cpu")
                )
            except (FileNotFoundError, SafetensorError) as fault:
                raise ModelError(f"{self.folder / name} cannot be read: {fault}") from None
        return self._open[name]
