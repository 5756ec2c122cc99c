"""Samples of one size: what systems are timed with whose papers say a sequence length and no data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetero_strategy.errors import ConfigError
from recipes.workloads.workload import Workload, WorkloadItems


def sample(
    tokens: int,
    samples: int,
    seed: int,
    items: Mapping[str, Mapping[str, int]] | None = None,
    assumptions: Sequence[str] = (),
) -> Workload:
    """``samples`` sequences of ``tokens``, each with one item of every encoder; the seed changes nothing.

    Args:
        tokens: of a sequence, text and the rows of its items.
        items: encoder -> ``inner_rows`` (rows inside it) and ``rows`` (those that reach the LLM); None: text alone.
        assumptions: what the paper does not print, one sentence each.

    Raises:
        ConfigError: the items leave no token of text.
    """
    every, given = np.arange(samples), items or {}
    text = tokens - sum(sizes["rows"] for sizes in given.values())
    if text < 1:
        raise ConfigError(
            f"data.sample: the items take {tokens - text} of {tokens} tokens; give more tokens or fewer rows of items"
        )
    made = {
        name: WorkloadItems(every, *(np.full(samples, sizes[rows], np.int64) for rows in ("inner_rows", "rows")))
        for name, sizes in given.items()
    }
    return Workload(
        "constant",
        np.full(samples, text, np.int64),
        made,
        {**dict.fromkeys(made, "none"), "llm": "none"},
        tuple(assumptions),
    )
