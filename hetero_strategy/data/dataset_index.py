"""The memory-mapped index of a data set: everything that is known without its payload."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetero_strategy import ragged


@dataclass(frozen=True)
class Strings:
    """A list of texts in one memory-mapped array."""

    data: np.ndarray
    """UTF-8 of all texts end to end, uint8."""
    offsets: np.ndarray
    """First byte of each text, int64 ``[n + 1]``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> str:
        return bytes(self.data[self.offsets[number] : self.offsets[number + 1]]).decode()


@dataclass(frozen=True)
class ItemTable:
    """A table of one encoder's or generator's items over the whole data set, by sample and position in the sample.

    An index that is not measured has zeros in ``sizes`` and ``inner_rows``, ones in ``rows``, and None as ``targets``.
    """

    sample: np.ndarray
    """Sample of each item, int64 ``[n]``, ascending."""
    sizes: np.ndarray
    """Sizes as the module's processor measures them, int64 ``[n, k]``."""
    rows: np.ndarray
    """Rows that cross the module's edges, int64 ``[n]``: an encoder's output, a generator's condition."""
    inner_rows: np.ndarray
    """Rows inside the module, int64 ``[n]``."""
    start: np.ndarray
    """Position of the first row in the sample's token sequence, int64 ``[n]``."""
    offsets: np.ndarray
    """Sample ``s`` has the items ``offsets[s] : offsets[s + 1]``, int64 ``[samples + 1]``."""
    paths: Strings
    """Paths, relative to the data set's ``media_folder`` or absolute."""
    targets: np.ndarray | None = None
    """Elements that a generator's loss counts, int64 ``[n]``; None for an encoder."""
    run_offsets: np.ndarray | None = None
    """Item ``i`` has the runs ``run_offsets[i] : run_offsets[i + 1]``, int64 ``[n + 1]``; None: each has one."""
    run_start: np.ndarray | None = None
    """Position of each run's first row in the sample's token sequence, int64 ``[r]``."""
    run_rows: np.ndarray | None = None
    """Rows of each run, int64 ``[r]``."""

    def runs(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the runs of some items, int64 ``[r]``: the place in ``numbers`` of its item, its start, its rows."""
        item = np.arange(len(numbers), dtype=np.int64)
        if self.run_offsets is None or self.run_start is None or self.run_rows is None:
            return item, np.asarray(self.start[numbers]), np.asarray(self.rows[numbers])
        count = np.asarray(self.run_offsets[numbers + 1] - self.run_offsets[numbers])
        runs = ragged.expand(np.asarray(self.run_offsets[numbers]), count)
        return np.repeat(item, count), np.asarray(self.run_start[runs]), np.asarray(self.run_rows[runs])


@dataclass(frozen=True)
class DatasetIndex:
    """A data set without its payload, as :func:`hetero_strategy.data.build_index.build_index` stored it."""

    folder: Path
    """Folder of the index; its name ends with the key."""
    media_folder: Path
    content: str
    """Hash of all arrays, equal for equal data at any path and however it was checked."""
    ids: np.ndarray
    """Token ids of all samples end to end, int32. Items are expanded to their rows, or to one id if not measured."""
    loss: np.ndarray
    """Whether each of these tokens is to be predicted, bool."""
    offsets: np.ndarray
    """Sample ``s`` has the tokens ``offsets[s] : offsets[s + 1]``, int64 ``[samples + 1]``."""
    largest_id: int
    """Largest of ``ids``; -1 if there are none."""
    labels: np.ndarray
    """Loss tokens of each sample, int64 ``[samples]``."""
    names: Strings
    """The manifests' sample ids."""
    items: Mapping[str, ItemTable]
    """Encoder or generator -> its items."""
    measured: bool = True
    """Whether sizes are known before items are decoded."""
    max_tokens: int | None = None
    """Longer samples are faults, detected when the index is built or, if it is not measured, when a sample is decoded.
    """
    left_out: int = 0
    """Number of the manifests' samples that were left out because of their media."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Kind of fault -> number of samples that were left out because of it, with ``on_error="skip"``."""
    unlearnt: int = 0
    """Number of earlier answers without a loss, because the chat template removes text from them."""
    prompts: np.ndarray | None = None
    """Tokens before the first predicted one of each sample, int64 ``[samples]``; None in an index without this
    column."""

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Callable[..., DatasetIndex], tuple[Path, Path]]:
        return load_index, (self.folder, self.media_folder)  # a worker maps the files itself instead of copying them

    def item_numbers(self, module: str, samples: np.ndarray) -> np.ndarray:
        """Return the item numbers of some samples: row ``k`` of the step's item table is item ``result[k]``."""
        return ragged.expand(self.items[module].offsets[samples], self.counts(module, samples))

    def counts(self, module: str, samples: np.ndarray) -> np.ndarray:
        """Return the number of items of each of some samples, int64 ``[n]``."""
        offsets = self.items[module].offsets
        return np.asarray(offsets[samples + 1] - offsets[samples])

    def path(self, module: str, item: int) -> Path:
        """Return the file of one item."""
        return self.media_folder / self.items[module].paths[item]

    def text(self, samples: np.ndarray, rows: Mapping[str, np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int32 ``[T]``, and whether each is to be predicted, bool ``[T]``, of samples end to end.

        Args:
            samples: sample numbers, int64.
            rows: module -> rows of each item of these samples, int64; for an index that is not measured.
        """
        lengths = np.asarray(self.offsets[samples + 1] - self.offsets[samples])
        tokens = ragged.expand(np.asarray(self.offsets[samples]), lengths)
        ids, loss = self.ids[tokens], self.loss[tokens]
        if rows is None:
            return ids, loss
        times, first = np.ones(len(tokens), np.int64), ragged.starts(lengths)
        for module, table in self.items.items():
            token = np.repeat(first, self.counts(module, samples)) + table.start[self.item_numbers(module, samples)]
            times[token] = rows[module]
        return np.repeat(ids, times), np.repeat(loss, times)


def load_index(folder: Path, media_folder: Path) -> DatasetIndex:
    """Map an index that ``build_index`` wrote."""
    header = json.loads((folder / "header.json").read_text())
    measured = bool(header["settings"].get("measure", True))

    def array(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    def strings(name: str) -> Strings:
        return Strings(array(f"{name}.data"), array(f"{name}.offsets"))

    tables = {}
    for number, module in enumerate(header["modules"]):
        names = ["sample", "start", "offsets"] + (["sizes", "rows", "inner_rows"] if measured else [])
        some = ("targets", "run_offsets", "run_start", "run_rows")
        names += [column for column in some if (folder / f"items{number}.{column}.npy").is_file()]
        columns = {column: array(f"items{number}.{column}") for column in names}
        if not measured:
            zero, one, count = np.int64(0), np.int64(1), len(columns["sample"])
            columns["sizes"] = np.broadcast_to(zero, (count, header["widths"][number]))
            columns["inner_rows"], columns["rows"] = np.broadcast_to(zero, count), np.broadcast_to(one, count)
        tables[module] = ItemTable(**columns, paths=strings(f"items{number}.paths"))
    return DatasetIndex(
        folder=folder,
        media_folder=media_folder,
        content=header["content"],
        ids=array("ids"),
        loss=array("loss"),
        offsets=array("offsets"),
        largest_id=header["largest_id"],
        labels=array("labels"),
        names=strings("names"),
        items=tables,
        measured=measured,
        max_tokens=header["settings"]["max_tokens"],
        left_out=header.get("left_out", 0),
        skipped=header.get("skipped", {}),
        unlearnt=header.get("unlearnt", 0),
        prompts=array("prompts") if (folder / "prompts.npy").is_file() else None,
    )
