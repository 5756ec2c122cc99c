"""Long steps are known from shorter ones: how short these are, and their data. Pure."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool

from hetero_strategy.plan.step_plan import StepItems, StepMetadata, UnitRuns

Columns = TypeVar("Columns", StepItems, UnitRuns)
MOST_FORWARDS = 1024
"""Forwards, of all stages, up to which a step is simulated whole."""
LEAST_SHARE = 1 / 16
"""Of a simulation that a short step counts as."""


def few(stages: int) -> int:
    """Microbatches up to which a step is simulated whole."""
    return max(2 * stages, MOST_FORWARDS // stages)


def share(microbatches: int, stages: int) -> float:
    """As what share of a simulation one counts: its forwards over those of a long step of few stages."""
    return max(LEAST_SHARE, stages * min(microbatches, few(stages)) / MOST_FORWARDS)


def first_samples(metadata: StepMetadata, count: int) -> StepMetadata:
    """A global batch of the first samples of another."""
    items, units = {}, {name: int(np.searchsorted(table.sample, count)) for name, table in metadata.items.items()}
    for name, table in metadata.items.items():
        cut = _some(table, slice(units[name]))
        runs = {source: (run, run.source < units.get(source, count)) for source, run in (table.given or {}).items()}
        given = {source: _some(run, fed & (run.target < units[name])) for source, (run, fed) in runs.items()}
        items[name] = replace(cut, given=given) if given else cut
    return replace(
        metadata,
        samples=metadata.samples[:count],
        tokens=metadata.tokens[:count],
        labels=metadata.labels[:count],
        items=items,
    )


def _some(table: Columns, chosen: slice | Bool[np.ndarray, "rows"]) -> Columns:
    """Some rows of all its columns."""
    columns = {f.name: getattr(table, f.name) for f in fields(table)}
    cut: dict[str, Any] = {key: value[chosen] for key, value in columns.items() if isinstance(value, np.ndarray)}
    return replace(table, **cut)
