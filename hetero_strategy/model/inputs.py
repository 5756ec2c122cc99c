"""What a module takes: ragged sequences end to end in one row dimension, and how attention finds them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from hetero_strategy import ragged

IGNORE = -100
"""Label of a row without a loss."""

_Self = TypeVar("_Self")


@dataclass(frozen=True, eq=False)
class Bucket:
    """Sequences of similar length, padded together inside attention only."""

    count: int
    length: int
    """Rows each sequence is padded to."""
    start: int
    """First row of the bucket in the concatenated padded buckets."""
    mask: torch.Tensor | None
    """bool ``[count, 1, 1, length]``, true at real rows; None where every sequence fills the bucket's length."""


@dataclass(frozen=True, eq=False)
class Packing:
    """Ragged sequences lying end to end in one row dimension ``[T]``; how attention finds them."""

    lengths: np.ndarray
    """int64 ``[n]``, on the host."""
    positions: torch.Tensor
    """int64 ``[T]``, position of each row in its sequence."""
    sequence: torch.Tensor
    """int64 ``[T]``, number of each row's sequence."""
    buckets: tuple[Bucket, ...]
    gather: torch.Tensor | None
    """int64 ``[padded_rows]``, row that each place of the concatenated padded buckets holds; None where a view does."""
    restore: torch.Tensor | None
    """int64 ``[T]``, place of each row in the concatenated padded buckets; None where a view does."""

    @staticmethod
    def of(lengths: np.ndarray) -> Packing:
        """Lay out sequences of these lengths (zero allowed). All index tensors are made here, on the host.

        A bucket holds lengths of at least 3/4 of its longest, so padding is at most a third of the rows and the number
        of buckets at most ``1 + log(longest / shortest) / log(4/3)``.
        """
        lengths = np.asarray(lengths, dtype=np.int64).reshape(-1)
        starts = ragged.starts(lengths)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        rows = np.arange(int(lengths.sum()))
        buckets: list[Bucket] = []
        gathers: list[np.ndarray] = []
        restore = np.zeros(len(rows), dtype=np.int64)
        place = 0
        for members in _similar(lengths):
            longest = int(lengths[members].max())
            step = np.arange(longest)
            real = step < lengths[members, None]
            # A padding place holds its sequence's first row: any finite value does, nothing real ever reads it.
            source = starts[members, None] + np.where(real, step, 0)
            restore[source[real]] = place + np.flatnonzero(real)
            mask = None if real.all() else torch.from_numpy(real)[:, None, None, :]
            buckets.append(Bucket(len(members), longest, place, mask))
            gathers.append(source.reshape(-1))
            place += source.size
        gather = np.concatenate(gathers) if gathers else rows
        in_place = np.array_equal(gather, rows)
        return Packing(
            lengths=lengths,
            positions=torch.from_numpy(rows - starts[sequence]),
            sequence=torch.from_numpy(sequence),
            buckets=tuple(buckets),
            gather=None if in_place else torch.from_numpy(gather),
            restore=None if in_place else torch.from_numpy(restore),
        )

    @property
    def rows(self) -> int:
        """T."""
        return len(self.positions)

    @property
    def longest(self) -> int:
        """Length of the longest sequence, 0 without any."""
        return int(self.lengths.max(initial=0))

    @property
    def padded_rows(self) -> int:
        """Rows attention computes, padding included."""
        return sum(bucket.count * bucket.length for bucket in self.buckets)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Packing:
        """This packing with its tensors on ``device``."""
        return _moved(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Packing:
        """This packing in page-locked memory, for copies that overlap with compute."""
        return _moved(self, torch.Tensor.pin_memory)


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """All items of one encoder instance in one microbatch. Zero items are allowed."""

    values: torch.Tensor
    """float32 ``[R, feature]``, raw rows of all items end to end (image: patches; audio: mel frames)."""
    sizes: np.ndarray
    """int64 ``[n, k]``, on the host: image (grid height, grid width) in patches; audio (frames,)."""
    rows: np.ndarray
    """int64 ``[n]``, on the host: output rows of each item, what the edge carries."""
    packing: Packing
    """Over the rows that the backbone's transformer sees."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> EncoderInputs:
        """These inputs with their tensors on ``device``."""
        return _moved(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> EncoderInputs:
        """These inputs in page-locked memory."""
        return _moved(self, torch.Tensor.pin_memory)


@dataclass(frozen=True, eq=False)
class SequenceInputs:
    """Token sequences of one language model instance in one microbatch."""

    ids: torch.Tensor
    """int64 ``[T]``."""
    labels: torch.Tensor
    """int64 ``[T]``, already shifted: ``labels[t]`` is the token after ``t`` in the same sample, or -100."""
    packing: Packing
    """Over T; alignment rows form a last sequence of their own with labels -100."""
    slots: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """(source module, its microbatch) -> int64 positions in ``[0, T)`` that its rows fill, ascending."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> SequenceInputs:
        """These inputs with their tensors on ``device``."""
        return _moved(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SequenceInputs:
        """These inputs in page-locked memory."""
        return _moved(self, torch.Tensor.pin_memory)


@dataclass(frozen=True, eq=False)
class GeneratorInputs:
    """All items that one generator instance draws in one microbatch. Zero items are allowed.

    Inside the module an item's rows are its condition rows, then its target rows.
    """

    values: torch.Tensor
    """float32 ``[R, feature]``, raw target rows of all items end to end (image: patches). ``[0, feature]`` on ranks
    that hold inner pipeline stages only, as is :attr:`noise`."""
    noise: torch.Tensor
    """float32 ``[R, feature]``, standard normal."""
    time: torch.Tensor
    """float32 ``[n]`` in 0..1, of each item: 0 is noise, 1 is data."""
    sizes: np.ndarray
    """int64 ``[n, k]``, on the host: image (grid height, grid width) in patches."""
    rows: np.ndarray
    """int64 ``[n]``, on the host: condition rows that each item is given over the edge."""
    packing: Packing
    """Over the rows inside the module."""
    slots: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """(source module, its microbatch) -> int64 positions in the packed rows that its rows fill, ascending."""
    counted: torch.Tensor | None = None
    """bool ``[n]``, items whose loss counts; None: all."""

    @property
    def target_rows(self) -> np.ndarray:
        """Target rows of each item, int64 ``[n]``, on the host."""
        return self.packing.lengths[: len(self.rows)] - self.rows

    def to(self, device: torch.device | str, non_blocking: bool = True) -> GeneratorInputs:
        """These inputs with their tensors on ``device``."""
        return _moved(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> GeneratorInputs:
        """These inputs in page-locked memory."""
        return _moved(self, torch.Tensor.pin_memory)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Runs of values end to end: run ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: torch.Tensor
    offsets: np.ndarray
    """int64 ``[n + 1]``, on the host."""


def host_index(index: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """An index made on the host, on the device of ``like``; the copy does not wait for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
    if like.device.type == "cuda":
        return tensor.pin_memory().to(like.device, non_blocking=True)
    return tensor.to(like.device)


def tensors_of(data: Any) -> list[torch.Tensor]:
    """Every tensor in one of these dataclasses."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _moved(data, keep)
    return found


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups of sequence numbers of similar length; zero lengths are in none."""
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    used = int(np.count_nonzero(descending))
    groups = []
    first = 0
    while first < used:
        shortest = -(-3 * int(descending[first]) // 4)
        last = int(np.searchsorted(-descending[:used], -shortest, side="right"))
        groups.append(np.sort(order[first:last]))
        first = last
    # In order of first appearance, so that sequences already lying in bucket order need no gather.
    return sorted(groups, key=lambda group: int(group[0]))


def _moved(data: _Self, move: Any) -> _Self:
    """A copy of a dataclass with ``move`` applied to every tensor in it."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return move(value)
        if isinstance(value, dict):
            return {key: moved(entry) for key, entry in value.items()}
        if isinstance(value, tuple):
            return tuple(moved(entry) for entry in value)
        return _moved(value, move) if hasattr(value, "__dataclass_fields__") else value

    return replace(data, **{name: moved(value) for name, value in vars(data).items()})  # type: ignore[type-var]
