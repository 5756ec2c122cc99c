"""A data set without its payload, as `hetero_strategy.data.build_index` stored it; memory mapped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.data.manifest import resolve


@dataclass(frozen=True)
class Strings:
    """Texts in one memory-mapped array."""

    data: np.ndarray
    """uint8, UTF-8 of all texts end to end."""
    offsets: np.ndarray
    """int64 [n + 1]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> str:
        return bytes(self.data[self.offsets[number] : self.offsets[number + 1]]).decode()


@dataclass(frozen=True)
class ItemTable:
    """Items of one encoder or generator over the whole data set, in (sample, order within the sample) order.

    Of an index that is not measured, ``sizes`` and ``inner_rows`` are zeros, ``rows`` ones and ``targets`` None.
    """

    sample: np.ndarray
    """int64 [n], ascending."""
    sizes: np.ndarray
    """int64 [n, k], as the module's processor measures them."""
    rows: np.ndarray
    """int64 [n], rows that cross the module's edges: an encoder's output, a generator's condition."""
    inner_rows: np.ndarray
    """int64 [n], rows inside the module."""
    start: np.ndarray
    """int64 [n], first row inside the sample's token sequence."""
    offsets: np.ndarray
    """int64 [samples + 1]: sample s has items offsets[s] : offsets[s + 1]."""
    paths: Strings
    """As written in the manifest."""
    targets: np.ndarray | None = None
    """int64 [n], elements that a generator's loss counts; None for an encoder."""


@dataclass(frozen=True)
class DatasetIndex:
    """A data set without its payload; see `hetero_strategy.data.build_index`."""

    folder: Path
    """Where the index lies; its name ends with the key."""
    media_folder: Path
    content: str
    """Hash of all arrays: equal for equal data, wherever it lies and however it was checked."""
    ids: np.ndarray
    """int32, token ids of all samples end to end, items expanded to their rows; if not measured, one id per item."""
    loss: np.ndarray
    """bool, which of these tokens are to be predicted."""
    offsets: np.ndarray
    """int64 [samples + 1]."""
    labels: np.ndarray
    """int64 [samples], loss tokens of each sample."""
    names: Strings
    """The manifest's sample ids."""
    items: Mapping[str, ItemTable]
    """By encoder or generator name."""
    measured: bool = True
    """Whether sizes are known; otherwise they are once an item is decoded."""
    max_tokens: int | None = None
    """Longer samples are faults: found when the index is built or, if it is not measured, when a sample is decoded."""
    left_out: int = 0
    """Samples of the manifest that are not here, as they hold media that were to be left out."""

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Callable[..., DatasetIndex], tuple[Path, Path]]:
        return load_index, (self.folder, self.media_folder)  # a worker maps the files itself instead of copying them

    def item_numbers(self, module: str, samples: np.ndarray) -> np.ndarray:
        """Items of some samples, in (sample, order) order: row k of the step's item table is item ``result[k]``."""
        offsets = self.items[module].offsets
        return ragged.expand(offsets[samples], offsets[samples + 1] - offsets[samples])

    def counts(self, module: str, samples: np.ndarray) -> np.ndarray:
        """Items of each of some samples, int64 ``[n]``."""
        offsets = self.items[module].offsets
        return np.asarray(offsets[samples + 1] - offsets[samples])

    def path(self, module: str, item: int) -> Path:
        """File of one item."""
        return resolve(self.media_folder, self.items[module].paths[item])

    def text(self, samples: np.ndarray, rows: Mapping[str, np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(token ids int32 ``[T]``, whether each is to be predicted bool ``[T]``) of some samples end to end.

        Args:
            samples: of the data set, int64.
            rows: if the index is not measured: by module, rows of each item of these samples, int64.
        """
        lengths = np.asarray(self.offsets[samples + 1] - self.offsets[samples])
        tokens = ragged.expand(np.asarray(self.offsets[samples]), lengths)
        ids, loss = self.ids[tokens], self.loss[tokens]
        if rows is None:
            return ids, loss
        times, first = np.ones(len(tokens), np.int64), ragged.starts(lengths)
        for module, table in self.items.items():
            times[np.repeat(first, self.counts(module, samples)) + table.start[self.item_numbers(module, samples)]] = (
                rows[module]
            )
        return np.repeat(ids, times), np.repeat(loss, times)


def load_index(place: Path, media_folder: Path) -> DatasetIndex:
    """Map an index that `build_index` wrote."""
    header = json.loads((place / "header.json").read_text())
    measured = bool(header["settings"].get("measure", True))

    def array(name: str) -> np.ndarray:
        return np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    def strings(name: str) -> Strings:
        return Strings(array(f"{name}.data"), array(f"{name}.offsets"))

    tables = {}
    for number, module in enumerate(header["modules"]):
        names = ["sample", "start", "offsets"] + (["sizes", "rows", "inner_rows"] if measured else [])
        if (place / f"items{number}.targets.npy").is_file():
            names.append("targets")
        columns = {column: array(f"items{number}.{column}") for column in names}
        if not measured:
            zero, one, count = np.int64(0), np.int64(1), len(columns["sample"])
            columns["sizes"] = np.broadcast_to(zero, (count, header["widths"][number]))
            columns |= {"rows": np.broadcast_to(one, count), "inner_rows": np.broadcast_to(zero, count)}
        tables[module] = ItemTable(**columns, paths=strings(f"items{number}.paths"))
    return DatasetIndex(
        folder=place,
        media_folder=media_folder,
        content=header["content"],
        ids=array("ids"),
        loss=array("loss"),
        offsets=array("offsets"),
        labels=array("labels"),
        names=strings("names"),
        items=tables,
        measured=measured,
        max_tokens=header["settings"]["max_tokens"],
        left_out=header.get("left_out", 0),
    )
