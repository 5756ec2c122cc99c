"""Inputs of modules: ragged sequences end to end in one row dimension, with index tensors for attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError

if TYPE_CHECKING:
    from hetero_strategy.model.context import Context
    from hetero_strategy.model.head_exchange import HeadExchange
    from hetero_strategy.model.spread_labels import SpreadLabels

IGNORE = -100
"""Label of a row without a loss."""

ALIKE_ROWS, ALIKE_MULTIPLE = 1024, 128
"""Fewest rows of uniform sequences, and the number of which their rows are a multiple."""

_Data = TypeVar("_Data")


@dataclass(frozen=True)
class ImagePatches:
    """The fields of ``ImageProcessor`` that an encoder's weights fix."""

    patch_size: int
    channels: int
    merge: int
    mean: float | tuple[float, ...] | None = None
    """None, here and below: the weights were trained with the default."""
    std: float | tuple[float, ...] | None = None
    resample: int | None = None
    """Number of Pillow's filter."""

    @property
    def example_unit(self) -> int:
        """Return the rows of two by two cells of merged patches."""
        return 4 * self.merge**2

    def example(self, lengths: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return sizes of items with these rows, multiples of :attr:`example_unit`, and the shape of their values."""
        side = 2 * self.merge
        sizes = np.stack([np.full_like(lengths, side), lengths // side], axis=1)
        return sizes, (int(lengths.sum()), self.channels * self.patch_size**2)


@dataclass(frozen=True)
class MelFrames:
    """The fields of ``AudioProcessor`` that an encoder's weights fix."""

    n_mels: int
    stack: int
    sampling_rate: int | None = None
    """None, here and below: the weights fix no value."""
    hop_length: int | None = None
    n_fft: int | None = None
    example_unit = 16

    def example(self, lengths: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return sizes of items with these rows, and the shape of their values."""
        return 2 * lengths[:, None], (2 * int(lengths.sum()), self.n_mels)


@dataclass(frozen=True)
class TargetPatches:
    """The fields of ``ImageTarget`` that a generator's weights fix."""

    patch_size: int
    channels: int


RawRows = ImagePatches | MelFrames | TargetPatches


class Movable:
    """A dataclass whose tensors are moved together; arrays stay on the host."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a copy with ``change`` applied to each tensor."""
        return _moved(self, change)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """Return a copy with its tensors on ``device``."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, from which copies to a device overlap with compute."""
        return self.each(torch.Tensor.pin_memory)


@dataclass(eq=False)  # not frozen: torch 2.11 would compile every field
class Packing(Movable):
    """A packing of ragged sequences end to end in one row dimension ``[T]``, with index tensors for attention."""

    lengths: np.ndarray
    """int64 ``[n]``, on the host: rows of each sequence."""
    positions: torch.Tensor
    """int64 ``[T]``: position of each row in its sequence."""
    sequence: torch.Tensor
    """int64 ``[T]``: number of the sequence that each row belongs to."""
    offsets: torch.Tensor
    """int32 ``[n + 1]``: first row of each sequence, and T, for kernels of packed sequences. With :attr:`context`, of
    each segment instead."""
    extent: torch.Tensor
    """``[longest, 0]``, without data: compiled code sees :attr:`longest` as a size that changes."""
    alike: bool
    """Whether all sequences, in other microbatches too, have one length that is worth specialised kernels."""
    masks: Mapping[int | None, torch.Tensor] = field(default_factory=dict)
    """Window of layers, None for those without one -> first keys and ends of the intervals that a rule lets their rows
    see, int32 ``[2, m, T]``, see :meth:`~hetero_strategy.mask.Slices.intervals`; empty: causal."""
    context: Context | HeadExchange | None = None
    """Context parallelism: these rows belong to one rank, and attention also reads other ranks' rows. All fields above
    but :attr:`lengths` and :attr:`extent` then describe only this rank's rows."""

    @staticmethod
    def of(lengths: np.ndarray, *, alike: bool = False) -> Packing:
        """Pack sequences of these lengths (zero allowed); all index tensors are made here, on the host.

        ``alike``: all sequences of the step, on all instances, have one length. cuDNN makes a plan for each number and
        length of sequences in 0.15 to 2 s (H100), and compiled code specialises on them. If lengths vary, neither is
        worth it for a microbatch whose lengths happen to be equal.
        """
        lengths = np.asarray(lengths, dtype=np.int64).reshape(-1)
        starts = ragged.starts(lengths)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        rows = np.arange(int(lengths.sum()))
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
        )

    def only(self, units: np.ndarray, more: int = 0) -> Packing:
        """Return the packing of some sequences, int64 ``[n]``, and of ``more`` rows that follow as one more."""
        lengths = self.lengths[units]
        packing = Packing.of(np.append(lengths, more) if more else lengths)
        source = ragged.expand(ragged.starts(self.lengths)[units], lengths)
        shift = torch.from_numpy((np.arange(len(source)) - source).astype(np.int32))
        for window, mask in self.masks.items():
            rest = mask.new_zeros(2, mask.shape[1], more)
            rest[:, 0] = torch.stack([torch.full((more,), len(source)), torch.arange(more) + len(source) + 1])
            longer = torch.cat([mask[..., torch.from_numpy(source)] + shift, rest], dim=2)
            packing.masks = {**packing.masks, window: longer}
        return packing

    @property
    def rows(self) -> int:
        """Return the number of rows of all sequences, T."""
        return len(self.positions)

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence, 0 if there is none."""
        return len(self.extent)


@dataclass(frozen=True, eq=False)
class ModuleInputs(Movable):
    """The inputs of one instance of a module in one microbatch, besides rows from other modules."""

    slots: dict[Hashable, torch.Tensor] = field(default_factory=dict, kw_only=True)
    """(source, its microbatch) -> int64 positions of the source's rows among the rows inside the module, ascending;
    empty if no edge leads to the module. A source is a module's name in one process. Under `HeteroStrategy` it is a
    stage (a `StageId` with that ``module``), and several stages of a module may fill slots."""

    def silenced(self, bad: np.ndarray) -> Self:
        """Return inputs without a loss of the units that are ``bad``, bool ``[n]``; all shapes stay."""
        raise NotImplementedError(f"{type(self).__name__}.silenced: on_error='skip' needs it")

    def only(self, units: np.ndarray) -> Self:
        """Return the inputs of some of the units, int64 ``[n]``, in this order and without slots.

        Only classes that define this method have packed units compared with units alone; a subclass redefines it for
        its fields.
        """
        raise NotImplementedError(f"{type(self).__name__}.only: packed units cannot be taken apart without it")

    def narrowed(self, dtype: torch.dtype) -> Self:
        """Return inputs with the payload in the dtype of the module's compute, if the module begins with that cast."""
        return self


@dataclass(frozen=True, eq=False)
class EncoderInputs(ModuleInputs):
    """A batch of all items of one encoder instance in one microbatch. Zero items are allowed."""

    values: torch.Tensor
    """float32 ``[R, feature]``, raw rows of all items end to end (image: patches; audio: mel frames); uint8 in transit
    if there are :attr:`statistics`."""
    sizes: np.ndarray
    """int64 ``[n, k]``, on the host: image (grid height, grid width) in patches; audio (frames,)."""
    rows: np.ndarray
    """int64 ``[n]``, on the host: output rows of each item, which the edge carries."""
    packing: Packing
    """Packing of the rows in the backbone's transformer."""
    statistics: torch.Tensor | None = None
    """Statistics of pixel values, with which :meth:`as_numbers` normalises them, see :func:`normalised`."""
    raw_rows: np.ndarray | None = None
    """int64 ``[n]``, on the host: raw rows of each item; None: the product of its sizes."""

    @override
    def silenced(self, bad: np.ndarray) -> Self:
        return self

    @override
    def only(self, units: np.ndarray) -> Self:
        raw = self.sizes.prod(axis=1) if self.raw_rows is None else self.raw_rows
        values = runs_of(self.values, raw, units) if len(self.values) else self.values
        packing = self.packing.only(units)
        sizes, rows = self.sizes[units], self.rows[units]
        return replace(self, values=values, sizes=sizes, rows=rows, packing=packing, raw_rows=raw[units], slots={})

    @override
    def narrowed(self, dtype: torch.dtype) -> Self:
        return replace(self, values=self.values.to(dtype)) if self.values.is_floating_point() else self

    def as_numbers(self) -> Self:
        """Return inputs with float32 values, normalised if they travelled as pixels."""
        if self.statistics is None:
            return self
        return replace(self, values=normalised(self.values, self.statistics), statistics=None)


@dataclass(frozen=True, eq=False)
class SequenceInputs(ModuleInputs):
    """The token sequences of one language model instance in one microbatch."""

    ids: torch.Tensor
    """int64 ``[T]``: token numbers."""
    labels: torch.Tensor
    """int64 ``[T]``, already shifted: ``labels[t]`` is the token after ``t`` in the same sample, or -100."""
    packing: Packing
    """The T rows, packed; alignment rows form a last sequence of their own with labels -100."""
    labelled: torch.Tensor | None = None
    """int64: rows with a label, ascending; computed when the inputs are made, on the host."""
    spread: SpreadLabels | None = None
    """Labels that this rank scores, with context parallelism; None: those of these rows."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name -> more numbers of each row, int64 or floating point ``[..., T]``, such as positions along several axes; 0
    at alignment rows. All stages and tensor-parallel ranks have them, a context-parallel rank those of its rows."""

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if column.shape[-1:] != self.ids.shape:
                raise DataError(
                    f"column {name!r} has shape {list(column.shape)} for {len(self.ids)} rows: its last dimension is"
                    " the rows, alignment rows included"
                )
        if self.labelled is None:
            object.__setattr__(self, "labelled", torch.nonzero(self.labels != IGNORE)[:, 0])

    @override
    def silenced(self, bad: np.ndarray) -> Self:
        sequences = np.zeros(len(self.packing.lengths), bool)  # alignment rows, which are last, have no labels
        sequences[: len(bad)] = bad
        silent = torch.from_numpy(sequences).to(self.labels.device).index_select(0, self.packing.sequence)
        labels = self.labels.masked_fill(silent, IGNORE)
        spread = None if self.spread is None else self.spread.silenced(sequences)
        return replace(self, labels=labels, labelled=None, spread=spread)

    @override
    def only(self, units: np.ndarray) -> Self:
        lengths = self.packing.lengths
        rows = host_index(ragged.expand(ragged.starts(lengths)[units], lengths[units]), self.ids)
        return replace(self.cut(rows), packing=self.packing.only(units), slots={})

    def cut(self, rows: torch.Tensor) -> Self:
        """Return inputs with the ids, labels and columns of some rows, int64 ``[n]``, and the packing of all."""
        columns = {name: column[..., rows] for name, column in self.columns.items()}
        return replace(self, ids=self.ids[rows], labels=self.labels[rows], labelled=None, columns=columns)


@dataclass(eq=False)  # not frozen: Lightning moves predict_step's result to the host field by field
class Ragged:
    """A list of runs of values end to end: run ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: torch.Tensor
    offsets: np.ndarray
    """int64 ``[n + 1]``, on the host."""


def normalised(pixels: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    """Normalise pixels, uint8 ``[R, feature]`` with channels last, to float32.

    Args:
        statistics: mean and deviation of pixels scaled to 0..1, float32 ``[2, channels]``.
    """
    mean, std = statistics
    values = pixels.to(torch.float32, copy=True).div_(255.0).unflatten(1, (-1, len(mean)))
    return values.sub_(mean).div_(std).flatten(1)


def runs_of(rows: torch.Tensor, lengths: np.ndarray, units: np.ndarray) -> torch.Tensor:
    """Return the rows of some units, where ``rows`` has all units of these lengths end to end."""
    return rows[host_index(ragged.expand(ragged.starts(lengths)[units], lengths[units]), rows)]


def host_index(index: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Copy an index to the device of ``like``, without waiting for the device."""
    return without_waiting(torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)), like.device)


def without_waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to a device, queued after the device's pending work, without waiting."""
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


def _moved(data: _Data, move: Callable[[torch.Tensor], Any]) -> _Data:
    """Copy a dataclass with ``move`` applied to every tensor in it."""
    fields = {name: _value(value, move) for name, value in vars(data).items()}
    return replace(data, **fields)  # type: ignore[type-var]


def _value(value: Any, move: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``move`` to a field's value. It is no inner function: a recursive one would keep tensors until garbage
    collection.
    """
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, Mapping):
        return {key: _value(entry, move) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_value(entry, move) for entry in value)
    return _moved(value, move) if hasattr(value, "__dataclass_fields__") else value
