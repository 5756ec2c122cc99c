"""What a module takes: ragged sequences end to end in one row dimension, and where attention finds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from typing_extensions import override

from hetero_strategy import ragged

if TYPE_CHECKING:
    from hetero_strategy.model.context import Context

IGNORE = -100
"""Label of a row without a loss."""

ALIKE_ROWS, ALIKE_MULTIPLE = 1024, 128
"""Fewest rows of sequences that are alike, and of what these are a multiple."""

_Data = TypeVar("_Data")


@dataclass(frozen=True)
class ImagePatches:
    """What an encoder's weights say of the ``ImageProcessor`` that its raw rows come from."""

    patch_size: int
    channels: int
    merge: int
    mean: float | tuple[float, ...] | None = None
    """None, here and below: no weights were trained with another than the usual one."""
    std: float | tuple[float, ...] | None = None
    resample: int | None = None
    """Number of Pillow's filter."""


@dataclass(frozen=True)
class MelFrames:
    """What an encoder's weights say of the ``AudioProcessor`` that its raw rows come from."""

    n_mels: int
    stack: int
    sampling_rate: int | None = None
    """None, here and below: no weights were trained with one."""
    hop_length: int | None = None
    n_fft: int | None = None


@dataclass(frozen=True)
class TargetPatches:
    """What a generator's weights say of the ``ImageTarget`` that its target rows come from."""

    patch_size: int
    channels: int


RawRows = ImagePatches | MelFrames | TargetPatches


class Movable:
    """A dataclass whose tensors are moved together; arrays stay on the host."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a copy in which each tensor is what ``change`` makes of it."""
        return _moved(self, change)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """Return a copy with its tensors on ``device``."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, from which copies to a device overlap with compute."""
        return self.each(torch.Tensor.pin_memory)


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


@dataclass(eq=False)  # not frozen: of a frozen one torch 2.11 compiles every field, and buckets are never the same
class Packing(Movable):
    """Ragged sequences lying end to end in one row dimension ``[T]``, and where attention finds them."""

    lengths: np.ndarray
    """int64 ``[n]``, on the host: rows of each sequence."""
    positions: torch.Tensor
    """int64 ``[T]``: position of each row in its sequence."""
    sequence: torch.Tensor
    """int64 ``[T]``: number of the sequence that each row belongs to."""
    offsets: torch.Tensor
    """int32 ``[n + 1]``: first row of each sequence, and T; as kernels for packed sequences take them. With
    :attr:`context` of each segment."""
    extent: torch.Tensor
    """``[longest, 0]``, without data: compiled code sees :attr:`longest` as a size that changes."""
    alike: bool
    """Whether all sequences have one length that is worth a kernel made for it, and those of other microbatches too."""
    buckets: tuple[Bucket, ...]
    gather: torch.Tensor | None
    """int64 ``[padded rows]``: the row that each slot of the concatenated padded buckets holds; None where the rows
    need not move."""
    restore: torch.Tensor | None
    """int64 ``[T]``: the slot of each row in the concatenated padded buckets; None as in :attr:`gather`."""
    context: Context | None = None
    """Of context parallelism, where these rows are one rank's among those of all sequences, and attention has to look
    elsewhere for the others: then all above but :attr:`lengths` and :attr:`extent` is of these rows alone."""

    @staticmethod
    def of(lengths: np.ndarray, *, alike: bool = False) -> Packing:
        """Lay out sequences of these lengths (zero allowed); all index tensors are made here, on the host.

        ``alike`` says that sequences have one length in the whole step, of all instances. cuDNN makes a plan for each
        number and length of sequences, which takes it from 0.15 to 2 s (H100), and compiled code has a form of its own
        for them: where lengths are often other ones, neither is worth it for a microbatch in which they happen to be
        the same.

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
        slot = 0
        for members in _similar(lengths):
            longest = int(lengths[members].max())
            step = np.arange(longest)
            real = step < lengths[members, None]
            # A padding slot holds its sequence's first row: any finite value does, nothing real ever reads it.
            source = starts[members, None] + np.where(real, step, 0)
            restore[source[real]] = slot + np.flatnonzero(real)
            mask = None if real.all() else torch.from_numpy(real)[:, None, None, :]
            buckets.append(Bucket(len(members), longest, slot, mask))
            gathers.append(source.reshape(-1))
            slot += source.size
        gather = np.concatenate(gathers) if gathers else rows
        unmoved = np.array_equal(gather, rows)
        return Packing(
            lengths=lengths,
            positions=torch.from_numpy(rows - starts[sequence]),
            sequence=torch.from_numpy(sequence),
            offsets=torch.from_numpy(np.append(starts, len(rows)).astype(np.int32)),
            extent=torch.empty(int(lengths.max(initial=0)), 0, dtype=torch.float32),
            alike=bool(
                alike
                and len(lengths)
                and (lengths == lengths[0]).all()
                and lengths[0] >= ALIKE_ROWS
                and lengths[0] % ALIKE_MULTIPLE == 0
            ),
            buckets=tuple(buckets),
            gather=None if unmoved else torch.from_numpy(gather),
            restore=None if unmoved else torch.from_numpy(restore),
        )

    @property
    def rows(self) -> int:
        """The number of rows of all sequences, T."""
        return len(self.positions)

    @property
    def longest(self) -> int:
        """The length of the longest sequence, 0 if there is none."""
        return len(self.extent)


@dataclass(frozen=True, eq=False)
class ModuleInputs(Movable):
    """What one instance of a module takes in one microbatch besides rows."""

    slots: dict[Hashable, torch.Tensor] = field(default_factory=dict, kw_only=True)
    """(source, its microbatch) -> int64 positions among the rows inside the module that its rows fill, ascending; none
    where no edge leads to the module. A source is a module's name in one process; under `HeteroStrategy` it is a stage
    (a `StageId`, whose ``module`` is that name), and several stages of a module may each fill some."""

    def silenced(self, bad: np.ndarray) -> Self:
        """Return the same without a loss of the units that are ``bad``, bool ``[n]``; all shapes stay."""
        raise NotImplementedError(f"{type(self).__name__}.silenced: on_error='skip' needs it")

    def only(self, units: np.ndarray) -> Self:
        """Return the inputs of some of the units, int64 ``[n]``, in this order and without slots.

        Packed units are compared with each alone in classes that define it; a subclass does so again, for its fields.
        """
        raise NotImplementedError(f"{type(self).__name__}.only: packed units cannot be taken apart without it")

    def narrowed(self, dtype: torch.dtype) -> Self:
        """Return the same with the payload in the dtype that its module computes in, where the module casts it first
        of all.
        """
        return self


@dataclass(frozen=True, eq=False)
class EncoderInputs(ModuleInputs):
    """All items of one encoder instance in one microbatch. Zero items are allowed."""

    values: torch.Tensor
    """float32 ``[R, feature]``, raw rows of all items end to end (image: patches; audio: mel frames); uint8 on their
    way where there are :attr:`statistics`."""
    sizes: np.ndarray
    """int64 ``[n, k]``, on the host: image (grid height, grid width) in patches; audio (frames,)."""
    rows: np.ndarray
    """int64 ``[n]``, on the host: output rows of each item, which the edge carries."""
    packing: Packing
    """The rows that the backbone's transformer sees, packed."""
    cached: CachedRows | None = None
    """Where the backbone's rows are kept on disk: those of some items, whose values are not among ``values``."""
    statistics: torch.Tensor | None = None
    """Where values are pixels: with what :meth:`as_numbers` makes numbers of them, see :func:`normalised`."""

    @override
    def silenced(self, bad: np.ndarray) -> Self:
        return self

    @override
    def only(self, units: np.ndarray) -> Self:
        raw = self.sizes.prod(axis=1)
        values = runs_of(self.values, raw, units) if len(self.values) else self.values
        packing = Packing.of(self.packing.lengths[units])
        return replace(
            self, values=values, sizes=self.sizes[units], rows=self.rows[units], packing=packing, cached=None, slots={}
        )

    @override
    def narrowed(self, dtype: torch.dtype) -> Self:
        cached = None if self.cached is None else self.cached.narrowed(dtype)
        values = self.values.to(dtype) if self.values.is_floating_point() else self.values
        return replace(self, values=values, cached=cached)

    def as_numbers(self) -> Self:
        """Return the same with float32 values, normalised, where they have travelled as pixels."""
        cached = None if self.cached is None else self.cached.as_numbers()
        if self.statistics is None and cached is self.cached:
            return self
        values = self.values if self.statistics is None else normalised(self.values, self.statistics)
        return replace(self, values=values, statistics=None, cached=cached)


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Rows of a frozen backbone that were read from disk for some of the items, and what else there is to compute."""

    rows: torch.Tensor
    """``[R, width]``, of the items that were found, end to end."""
    found: int
    """Number of these items."""
    missed: EncoderInputs | None
    """The other items; None where none was found: then they are all."""
    order: torch.Tensor | None
    """int64: where each row of all items lies among those of the missed and of the found ones, end to end in this
    order; None where there are only such or only such."""
    keys: np.ndarray
    """uint64 ``[m, 2]``, on the host: of each missed item."""
    lengths: np.ndarray
    """int64 ``[m]``: rows of each of these."""
    keep: np.ndarray
    """bool ``[m]``: whether they are to be written; not those of files that could not be read."""

    def narrowed(self, dtype: torch.dtype) -> CachedRows:
        """Return the same with the payload of what was missed in this dtype."""
        return self if self.missed is None else replace(self, missed=self.missed.narrowed(dtype))

    def as_numbers(self) -> CachedRows:
        """Return the same with numbers in place of pixels in what was missed."""
        return self if self.missed is None else replace(self, missed=self.missed.as_numbers())

    def joined(self, computed: torch.Tensor | None) -> torch.Tensor:
        """Return the rows of all items in their order, from those that were ``computed`` of the missed ones."""
        if self.order is None:
            return self.rows if computed is None or not len(self.keys) else computed
        assert computed is not None
        return torch.cat([computed, self.rows]).index_select(0, self.order)


@dataclass(frozen=True, eq=False)
class SequenceInputs(ModuleInputs):
    """Token sequences of one language model instance in one microbatch."""

    ids: torch.Tensor
    """int64 ``[T]``: token numbers."""
    labels: torch.Tensor
    """int64 ``[T]``, already shifted: ``labels[t]`` is the token after ``t`` in the same sample, or -100."""
    packing: Packing
    """The T rows, packed; alignment rows form a last sequence of their own with labels -100."""
    labelled: torch.Tensor | None = None
    """int64: the rows that have a label, ascending; found where the inputs are made, on the host."""
    own_labels: np.ndarray | None = None
    """int64 ``[labels, 2]``, on the host: with context parallelism, of each label that these rows have its sequence and
    its number among the labels of that; None: these rows have all."""

    def __post_init__(self) -> None:
        if self.labelled is None:
            object.__setattr__(self, "labelled", torch.nonzero(self.labels != IGNORE)[:, 0])

    @override
    def silenced(self, bad: np.ndarray) -> Self:
        sequences = np.zeros(len(self.packing.lengths), bool)  # alignment rows, last, have no labels anyway
        sequences[: len(bad)] = bad
        silent = torch.from_numpy(sequences).to(self.labels.device).index_select(0, self.packing.sequence)
        labels = self.labels.masked_fill(silent, IGNORE)
        own = None if self.own_labels is None else self.own_labels[~sequences[self.own_labels[:, 0]]]
        return replace(self, labels=labels, labelled=None, own_labels=own)

    @override
    def only(self, units: np.ndarray) -> Self:
        lengths = self.packing.lengths
        ids, labels = (runs_of(column, lengths, units) for column in (self.ids, self.labels))
        return replace(self, ids=ids, labels=labels, labelled=None, packing=Packing.of(lengths[units]), slots={})


@dataclass(eq=False)  # not frozen: Lightning moves what predict_step returns to the host field by field
class Ragged:
    """Runs of values end to end: run ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: torch.Tensor
    offsets: np.ndarray
    """int64 ``[n + 1]``, on the host."""


def normalised(pixels: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    """Make numbers, float32, of pixels, uint8 ``[R, feature]``, whose features have the channels last.

    Args:
        statistics: float32 ``[2, channels]``, mean and deviation of pixels that are scaled to 0..1.
    """
    mean, std = statistics
    values = pixels.to(torch.float32, copy=True).div_(255.0).unflatten(1, (-1, len(mean)))
    return values.sub_(mean).div_(std).flatten(1)


def runs_of(rows: torch.Tensor, lengths: np.ndarray, units: np.ndarray) -> torch.Tensor:
    """Return the rows of some units, of all that lie end to end in ``rows`` with these lengths."""
    return rows[host_index(ragged.expand(ragged.starts(lengths)[units], lengths[units]), rows)]


def host_index(index: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Copy an index to the device of ``like``, without waiting for the device."""
    return without_waiting(torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)), like.device)


def without_waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device behind what is under way there, without waiting for it."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def tensors_of(data: Any) -> list[torch.Tensor]:
    """List every tensor in one of these dataclasses."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    _moved(data, note)
    return tensors


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Group sequence numbers by similar length; zero lengths are in no group."""
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    nonempty = int(np.count_nonzero(descending))
    groups = []
    first = 0
    while first < nonempty:
        shortest = -(-3 * int(descending[first]) // 4)
        last = int(np.searchsorted(-descending[:nonempty], -shortest, side="right"))
        groups.append(np.sort(order[first:last]))
        first = last
    # In order of first appearance, so that sequences already lying in bucket order need no gather.
    return sorted(groups, key=lambda group: int(group[0]))


def _moved(data: _Data, move: Callable[[torch.Tensor], Any]) -> _Data:
    """Copy a dataclass with ``move`` applied to every tensor in it."""
    fields = {name: _value(value, move) for name, value in vars(data).items()}
    return replace(data, **fields)  # type: ignore[type-var]


def _value(value: Any, move: Callable[[torch.Tensor], Any]) -> Any:
    """The same for what a field holds. No inner function: one that calls itself would keep tensors until garbage is
    collected.
    """
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict):
        return {key: _value(entry, move) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_value(entry, move) for entry in value)
    return _moved(value, move) if hasattr(value, "__dataclass_fields__") else value
