"""What is known of a global batch before its payload: from the index, or from decoding its items. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.errors import ConfigError
from hetero_strategy.model.kind import ModuleKind
from hetero_strategy.plan.check_units import check_units
from hetero_strategy.plan.step_plan import StepItems, StepMetadata


@dataclass(frozen=True)
class ItemSizes:
    """Of all items of one encoder or generator in a global batch, by sample, then order within it; int64 ``[n]``."""

    sizes: np.ndarray
    """int64 ``[n, k]``, as the module's processor measures them."""
    length: np.ndarray
    """Raw rows: what the processor loads."""
    rows: np.ndarray
    """Rows that cross the module's edges; 0 of an item that was not read."""
    inner_rows: np.ndarray
    """Rows inside the module."""
    read: np.ndarray
    """bool ``[n]``; the others are not part of the step."""
    targets: np.ndarray | None = None
    """Elements that a generator's loss counts; None for an encoder."""


def step_metadata(
    index: DatasetIndex, epoch: int, step: int, samples: np.ndarray, measured: Mapping[str, ItemSizes] | None = None
) -> StepMetadata:
    """What a step plan is made of, for the global batch of these samples.

    Args:
        samples: of the data set, int64 ``[S]``.
        measured: if the index is not measured: by module, the sizes of the items of these samples. Items that
            could not be read are left out.

    Raises:
        ConfigError: the index is not measured and no sizes are given.
    """
    if not index.measured and measured is None:
        raise ConfigError(
            f"{index.folder}: the index was built without measuring media, so sizes are known only once items are"
            " decoded; use payload='all_to_all', or build it with measure=True"
        )
    tokens = np.asarray(index.offsets[samples + 1] - index.offsets[samples])
    labels = np.asarray(index.labels[samples])
    items = {}
    for module, table in index.items.items():
        numbers = index.item_numbers(module, samples)
        found, these = (table, numbers) if measured is None else (measured[module], slice(None))
        items[module] = StepItems(
            sample=np.repeat(np.arange(len(samples), dtype=np.int64), index.counts(module, samples)),
            edge_rows=np.asarray(found.rows[these]),
            start=np.asarray(table.start[numbers]),
            inner_rows=np.asarray(found.inner_rows[these]),
            targets=None if found.targets is None else np.asarray(found.targets[these]),
        )
    if measured is not None:
        tokens, items = expanded(tokens, items, {module: sizes.read for module, sizes in measured.items()})
    return StepMetadata(epoch, step, samples, tokens, labels, items)


def with_own_units(
    metadata: StepMetadata, kinds: Mapping[str, ModuleKind], edges: Collection[tuple[str, str]]
) -> StepMetadata:
    """A global batch with the units of modules that read no files; their kinds say what these are."""
    sources = {
        name: [source for source, target in edges if target == name]
        for name, kind in kinds.items()
        if name not in metadata.items and not kind.samplewise
    }
    own = {name: kinds[name].units(metadata, fed_by) for name, fed_by in sources.items()}
    metadata = replace(metadata, items={**metadata.items, **own})
    for name, fed_by in sources.items():
        fed = [target for source, target in edges if source == name and kinds[target].samplewise]
        check_units(name, own[name], metadata, fed_by, fed)
    return metadata


def expanded(
    tokens: np.ndarray, items: Mapping[str, StepItems], read: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, StepItems]]:
    """A global batch in which items have become their rows.

    Args:
        tokens: tokens of each sample with one of them for each item, int64 ``[S]``.
        items: all items of the samples by module; ``start`` counts such tokens.
        read: module -> which of its items are kept, bool ``[n]``; the rows of the others are 0.

    Returns:
        Tokens of each sample, int64 ``[S]``, and the kept items with their places among these.
    """
    if not items:
        return tokens, {}
    sample = np.concatenate([table.sample for table in items.values()])
    rows = np.concatenate([table.edge_rows for table in items.values()])
    order = np.lexsort((np.concatenate([table.start for table in items.values()]), sample))
    more = rows[order] - 1
    ahead = ragged.starts(more)  # of all items before, those of earlier samples included
    counts = np.bincount(sample, minlength=len(tokens))
    first = ragged.starts(counts)[sample[order]]
    shift = np.empty(len(rows), np.int64)
    shift[order] = ahead - ahead[first]
    grown = tokens + np.bincount(sample, weights=rows - 1, minlength=len(tokens)).astype(np.int64)
    moved, place = {}, 0
    for module, table in items.items():
        keep = np.flatnonzero(read[module])
        mine = shift[place : place + len(table.sample)]
        place += len(table.sample)
        moved[module] = replace(
            table,
            sample=table.sample[keep],
            edge_rows=table.edge_rows[keep],
            start=(table.start + mine)[keep],
            inner_rows=table.inner_rows[keep],
            targets=None if table.targets is None else table.targets[keep],
        )
    return grown, moved
