"""Tensors of a Hugging Face folder that are not read yet: stacked, joined, cut and transposed before a part is read.

Example, experts that lie in a folder one by one and are one parameter in memory::

    folder: experts.0.gate_proj [I, H], experts.0.up_proj [I, H], experts.1.gate_proj ...
    memory: experts.gate_up_proj [E, 2 * I, H] = stack of (gate_proj and up_proj, joined)
    a part: expert 1, columns 0 and I  ->  row 0 of experts.1.gate_proj and row 0 of experts.1.up_proj
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_strategy.model.hf_folder import Selection, TensorFolder, select


class Unread:
    """A tensor that is read in parts, when it is asked for.

    torch's functions that only move whole slices take it and return another one; any other raises a TypeError.
    """

    shape: torch.Size
    dtype: torch.dtype

    def read(self, selection: Selection) -> Tensor:
        """Read the selected part to the CPU."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _MOVES:
            raise TypeError(f"{function} moves more than slices")
        return _MOVES[function](*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Return the size of a dimension."""
        return self.shape[dim]

    def contiguous(self) -> Unread:
        """Return this tensor: order in memory has no meaning yet."""
        return self

    def squeeze(self, dim: int) -> Unread:
        """Return this tensor without a dimension of size 1."""
        return _Squeezed(self, dim) if self.shape[dim] == 1 else self


class Stored(Unread):
    """A tensor of a folder under its name there."""

    def __init__(self, folder: TensorFolder, name: str) -> None:
        self.folder, self.name, self.shape = folder, name, torch.Size(folder.shape(name))
        self.dtype = folder.dtype(name)

    def read(self, selection: Selection) -> Tensor:
        return self.folder.read(self.name, selection)


class Picked(Unread):
    """Some indices of one dimension of another tensor, in this order."""

    def __init__(self, tensor: Unread, dim: int, index: Tensor) -> None:
        self.tensor, self.dim, self.index = tensor, dim % tensor.ndim, index
        self.shape, self.dtype = _resized(tensor.shape, self.dim, len(index)), tensor.dtype

    def read(self, selection: Selection) -> Tensor:
        wanted = selection.get(self.dim)
        return self.tensor.read({**selection, self.dim: self.index if wanted is None else self.index[wanted]})


class _Squeezed(Unread):
    def __init__(self, tensor: Unread, dim: int) -> None:
        self.tensor, self.dim = tensor, dim % tensor.ndim
        self.shape, self.dtype = tensor.shape[: self.dim] + tensor.shape[self.dim + 1 :], tensor.dtype

    def read(self, selection: Selection) -> Tensor:
        return self.tensor.read({d + (d >= self.dim): index for d, index in selection.items()}).squeeze(self.dim)


class _Stacked(Unread):
    """Tensors of one shape along a new first dimension."""

    def __init__(self, tensors: Sequence[Unread], dim: int = 0) -> None:
        self.tensors = tensors
        self.shape, self.dtype = torch.Size((len(tensors), *tensors[0].shape)), tensors[0].dtype
        if dim or any(tensor.shape != tensors[0].shape for tensor in tensors):
            raise TypeError("only tensors of one shape are stacked, along a first dimension")

    def read(self, selection: Selection) -> Tensor:
        inside = {dim - 1: index for dim, index in selection.items() if dim}
        rows = selection[0].tolist() if 0 in selection else list(range(len(self.tensors)))
        out = torch.empty(_selected(self.shape, selection), dtype=self.dtype)
        for place, row in enumerate(rows):
            out[place] = self.tensors[row].read(inside)
        return out


class _Joined(Unread):
    """Tensors end to end along a dimension."""

    def __init__(self, tensors: Sequence[Unread], dim: int = 0) -> None:
        self.tensors, self.dim, self.dtype = tensors, dim % tensors[0].ndim, tensors[0].dtype
        self.shape = _resized(tensors[0].shape, self.dim, sum(tensor.shape[self.dim] for tensor in tensors))
        if any(_resized(tensor.shape, self.dim, self.shape[self.dim]) != self.shape for tensor in tensors):
            raise TypeError("only tensors of one shape but for one dimension are joined")

    def read(self, selection: Selection) -> Tensor:
        wanted = selection.get(self.dim, torch.arange(self.shape[self.dim]))
        out, start = torch.empty(_selected(self.shape, selection), dtype=self.dtype), 0
        for tensor in self.tensors:
            here = ((wanted >= start) & (wanted < start + tensor.shape[self.dim])).nonzero()[:, 0]
            if len(here):
                out.index_copy_(self.dim, here, tensor.read({**selection, self.dim: wanted[here] - start}))
            start += tensor.shape[self.dim]
        return out


class _Transposed(Unread):
    def __init__(self, tensor: Unread, dim0: int, dim1: int) -> None:
        a, b = dim0 % tensor.ndim, dim1 % tensor.ndim
        self.tensor, self.dims, self.dtype = tensor, {a: b, b: a}, tensor.dtype
        self.shape = torch.Size(tensor.shape[self.dims.get(dim, dim)] for dim in range(tensor.ndim))

    def read(self, selection: Selection) -> Tensor:
        inside = {self.dims.get(dim, dim): index for dim, index in selection.items()}
        return self.tensor.read(inside).transpose(*self.dims).contiguous()


class Converted(Unread):
    """One result of a conversion that does more than move slices: all of its tensors are read whole."""

    def __init__(self, convert: Callable[[], Mapping[str, Any]], name: str, shape: torch.Size, dtype: Any) -> None:
        self.convert, self.name, self.shape, self.dtype = convert, name, shape, dtype

    def read(self, selection: Selection) -> Tensor:
        return select(self.convert()[self.name], selection).contiguous()


def _resized(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size((*shape[:dim], size, *shape[dim + 1 :]))


def _selected(shape: torch.Size, selection: Selection) -> tuple[int, ...]:
    return tuple(len(selection[dim]) if dim in selection else size for dim, size in enumerate(shape))


def _split(tensor: Unread, sizes: int | Sequence[int], dim: int = 0) -> tuple[Unread, ...]:
    total = tensor.shape[dim]
    ends = list(range(sizes, total, sizes)) if isinstance(sizes, int) else torch.tensor(sizes).cumsum(0)[:-1].tolist()
    return tuple(Picked(tensor, dim, index) for index in torch.arange(total).tensor_split(ends))


def _chunk(tensor: Unread, chunks: int, dim: int = 0) -> tuple[Unread, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_MOVES: Mapping[Any, Callable[..., Any]] = {
    torch.stack: _Stacked, torch.cat: _Joined, torch.split: _split, torch.chunk: _chunk, torch.transpose: _Transposed,
}  # fmt: skip
