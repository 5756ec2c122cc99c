"""Whether the units that a kind of one's own gives can be moved and trained on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int64

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.step_plan import StepItems, StepMetadata


def check_units(
    module: str, units: StepItems, metadata: StepMetadata, sources: Sequence[str], targets: Sequence[str] = ()
) -> None:
    """Refuse runs of rows that do not exist, and rows of a source that are given twice.

    A row of a source may go to one row of the module only, as its gradient comes back from one place. A row of the
    module may come from several, which the module adds up.

    Args:
        module: its name.
        units: what its kind made of the metadata.
        metadata: of the global batch, with the items of the sources.
        sources: modules from which edges lead to the module.
        targets: modules of whole samples to which edges lead from it.

    Raises:
        ConfigError: naming the module, the source, the unit and its rows.
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
