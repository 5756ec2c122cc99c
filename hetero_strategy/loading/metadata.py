"""Metadata of a global batch before its payload is read, and a check of units that a user's own kind gives. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64

from hetero_strategy import ragged
from hetero_strategy.data.dataset_index import DatasetIndex, ItemTable
from hetero_strategy.errors import ConfigError
from hetero_strategy.model.kind import Media, ModuleKind
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, UnitRuns


@dataclass(frozen=True)
class ItemSizes:
    """The sizes of all items of an encoder or generator in a global batch, by sample, then order; int64 ``[n]``."""

    sizes: np.ndarray
    """Sizes that the module's processor measures, int64 ``[n, k]``."""
    length: np.ndarray
    """Raw rows, which the processor loads."""
    rows: np.ndarray
    """Rows that cross the module's edges; 0 for an item that was not read."""
    inner_rows: np.ndarray
    """Rows inside the module."""
    read: np.ndarray
    """Whether each item was read, bool ``[n]``; unread items are not part of the step."""
    targets: np.ndarray | None = None
    """Elements that a generator's loss counts; None for an encoder."""


def step_metadata(
    index: DatasetIndex,
    epoch: int,
    step: int,
    samples: np.ndarray,
    processors: Mapping[str, Media],
    measured: Mapping[str, ItemSizes] | None = None,
) -> StepMetadata:
    """Return the metadata from which the step plan of a global batch is made.

    Args:
        samples: data set indices of the samples, int64 ``[S]``.
        processors: processors of modules with files.
        measured: sizes of the items of these samples by module, if the index is not measured. Items that could not be
            read are left out.
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
        source, these = (table, numbers) if measured is None else (measured[module], slice(None))
        sample = np.repeat(np.arange(len(samples), dtype=np.int64), index.counts(module, samples))
        items[module] = StepItems(
            sample=sample,
            edge_rows=np.asarray(source.rows[these]),
            start=np.asarray(table.start[numbers]),
            inner_rows=np.asarray(source.inner_rows[these]),
            targets=None if source.targets is None else np.asarray(source.targets[these]),
            placed=_placed(table, numbers, sample),
            field=processors[module].field,
        )
    prompts = None if index.prompts is None else np.asarray(index.prompts[samples])
    if measured is not None:
        read = {module: sizes.read for module, sizes in measured.items()}
        tokens, prompts, items = expanded(tokens, prompts, items, read)
    return StepMetadata(epoch, step, samples, tokens, labels, items, prompts)


def _placed(table: ItemTable, numbers: np.ndarray, sample: np.ndarray) -> UnitRuns | None:
    """Return the runs of some items' rows in their samples; None if every item is one run.

    For example, an item of 4 and 3 rows with two tokens between them, at the start of sample 0::

        source [0, 0]    source_start [0, 4]    target [0, 0]    target_start [0, 6]    rows [4, 3]
    """
    if table.run_offsets is None:
        return None
    item, start, rows = table.runs(numbers)
    ahead = ragged.starts(rows)
    first = ragged.starts(np.bincount(item, rows, len(numbers)).astype(np.int64))
    return UnitRuns(item, ahead - first[item], sample[item], start, rows)


def with_own_units(
    metadata: StepMetadata, kinds: Mapping[str, ModuleKind], edges: Collection[tuple[str, str]]
) -> StepMetadata:
    """Return a global batch with the units of modules that read no files; the modules' kinds define these units."""
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
    tokens: np.ndarray,
    prompts: np.ndarray | None,
    items: Mapping[str, StepItems],
    read: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, np.ndarray | None, dict[str, StepItems]]:
    """Expand each item of a global batch to its rows.

    Args:
        tokens: tokens of each sample, with one token for each item, int64 ``[S]``.
        prompts: tokens of each sample before the first predicted one, int64 ``[S]``, or None.
        items: all items of the samples by module; ``start`` counts such tokens.
        read: items that are kept, bool ``[n]``, by module; all other items have no rows.

    Returns:
        Tokens of each sample, those before the first predicted one, and the kept items with their positions among
        these tokens.
    """
    if not items:
        return tokens, prompts, {}
    sample = np.concatenate([table.sample for table in items.values()])
    rows = np.concatenate([table.edge_rows for table in items.values()])
    order = np.lexsort((np.concatenate([table.start for table in items.values()]), sample))
    more = rows[order] - 1
    ahead = ragged.starts(more)  # of all items before, earlier samples included
    counts = np.bincount(sample, minlength=len(tokens))
    first = ragged.starts(counts)[sample[order]]
    shift = np.empty(len(rows), np.int64)
    shift[order] = ahead - ahead[first]
    grown = tokens + np.bincount(sample, weights=rows - 1, minlength=len(tokens)).astype(np.int64)
    if prompts is not None:
        starts = np.concatenate([table.start for table in items.values()])
        before = (rows - 1) * (starts < prompts[sample])
        prompts = prompts + np.bincount(sample, weights=before, minlength=len(tokens)).astype(np.int64)
    moved, place = {}, 0
    for module, table in items.items():
        keep = np.flatnonzero(read[module])
        own_shift = shift[place : place + len(table.sample)]
        place += len(table.sample)
        moved[module] = replace(
            table,
            sample=table.sample[keep],
            edge_rows=table.edge_rows[keep],
            start=(table.start + own_shift)[keep],
            inner_rows=table.inner_rows[keep],
            targets=None if table.targets is None else table.targets[keep],
        )
    return grown, prompts, moved


def check_units(
    module: str, units: StepItems, metadata: StepMetadata, sources: Sequence[str], targets: Sequence[str] = ()
) -> None:
    """Refuse runs of rows that do not exist, and rows of a source that are given twice.

    A row of a source may go to one row of the module only, as its gradient comes back from one place. A row of the
    module may come from several source rows, which the module adds up.

    Args:
        module: name of the module.
        units: units that the module's kind made of the metadata.
        metadata: metadata of the global batch, with the items of the sources.
        sources: modules from which edges lead to the module.
        targets: modules of whole samples to which edges lead from it.
    """
    for target in targets:
        _check_there(
            module, f"'{target}', which takes them", units.sample, units.start, units.edge_rows, metadata.tokens
        )
    # Without ``given`` whole samples give the rows at the units' places, as they do to a generator.
    placed = units.given is None and not any(source in metadata.items for source in sources)
    if missing := [] if placed else [source for source in sources if source not in (units.given or {})]:
        raise ConfigError(f"units of '{module}': given lacks '{missing[0]}', from which an edge leads to the module")
    known = replace(metadata, items={**metadata.items, module: units})
    for source in sources:
        runs = known.runs(source, module)
        from_ = metadata.items[source].edge_rows if source in metadata.items else metadata.tokens
        _check_there(module, f"'{source}', which gives them", runs.source, runs.source_start, runs.rows, from_)
        if not placed:
            _check_there(
                module, f"'{module}', which takes them", runs.target, runs.target_start, runs.rows, units.inner_rows
            )
        some = np.flatnonzero(runs.rows)
        first = ragged.starts(from_)[runs.source[some]] + runs.source_start[some]
        order = np.argsort(first, kind="stable")
        twice = first[order][1:] < (first + runs.rows[some])[order][:-1]
        if twice.any():
            at = int(some[order[1:][twice][0]])
            raise ConfigError(
                f"units of '{module}': row {runs.source_start[at]} of unit {runs.source[at]} of '{source}' is in two"
                " runs; a row goes to one place, as its gradient comes back from one: give it to one unit, and use it"
                " there for all"
            )


def _check_there(
    module: str,
    side: str,
    unit: Int64[np.ndarray, "runs"],
    start: Int64[np.ndarray, "runs"],
    rows: Int64[np.ndarray, "runs"],
    size: Int64[np.ndarray, "units"],
) -> None:
    """Refuse runs that lead out of their unit."""
    beyond = (unit < 0) | (unit >= len(size)) | (start < 0)
    beyond |= start + rows > size[np.where(beyond, 0, unit)] if len(size) else True
    beyond = (beyond & (rows > 0)) | (rows < 0)
    if beyond.any():
        at = int(np.argmax(beyond))
        of = f"has {size[unit[at]]} rows" if 0 <= unit[at] < len(size) else f"is none of {len(size)}"
        raise ConfigError(
            f"units of '{module}': rows {start[at]} to {start[at] + rows[at] - 1} of unit {unit[at]} of {side},"
            f" do not exist: the unit {of}"
        )
