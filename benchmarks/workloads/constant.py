"""Samples of one size, for papers that state a sequence length and no data set (Optimus, Cornstarch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.workloads.workload import Workload, WorkloadItems
from hetero_strategy.errors import ConfigError


def sample(
    tokens: int,
    samples: int,
    seed: int,
    items: Mapping[str, Mapping[str, int]] | None = None,
    assumptions: Sequence[str] = (),
) -> Workload:
    """Return ``samples`` sequences of ``tokens``, each with one item of every encoder; the seed changes nothing.

    Args:
        tokens: length of a sequence, text and the rows of its items.
        items: encoder -> ``inner_rows`` (rows inside it) and ``rows`` (rows that reach the LLM); None: text alone.
        assumptions: what the paper does not state, one sentence each.

    Raises:
        ConfigError: the items leave no token of text.
    """
    every, encoders = np.arange(samples), {name: sizes for name, sizes in (items or {}).items() if sizes}
    text = tokens - sum(sizes["rows"] for sizes in encoders.values())
    if text < 1:
        raise ConfigError(
            f"data.sample: the items take {tokens - text} of {tokens} tokens; give more tokens or fewer rows of items"
        )
    made = {
        name: WorkloadItems(every, *(np.full(samples, sizes[rows], np.int64) for rows in ("inner_rows", "rows")))
        for name, sizes in encoders.items()
    }
    return Workload(
        np.full(samples, text, np.int64),
        made,
        tuple(assumptions),
    )
