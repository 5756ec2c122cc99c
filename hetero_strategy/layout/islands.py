"""Islands: sets of instances of all modules that exchange rows only among themselves. Pure.

Balancing over all instances lets any rank of an encoder send to any rank of a language model, in one step or another.
With thousands of ranks that is more than a network's connections and a GPU's memory for them bear. A sample that stays
in one island, with its items and all that reads them, bounds whom a rank may meet by the size of an island.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int64

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout


def check_islands(layouts: Mapping[str, ModuleLayout], count: int) -> None:
    """Refuse a number of islands that does not divide every module's instances.

    Args:
        layouts: resolved.

    Raises:
        ConfigError: naming modules and numbers.
    """
    instances = {name: layout.dp for name, layout in layouts.items()}
    uneven = [f"{name} has {n}" for name, n in instances.items() if count < 1 or n % count]
    if uneven:
        most = int(np.gcd.reduce(list(instances.values())))
        raise ConfigError(
            f"HeteroStrategy: islands={count} does not divide the instances (dp_replicate * dp_shard) of every module:"
            f" {', '.join(uneven)}; use 1 or another divisor of {most}"
        )


def islands_of(
    layouts: Mapping[str, ModuleLayout], language_model: str, count: int
) -> dict[str, Int64[np.ndarray, "instances"]]:
    """Number of the island of each module's instances, equally many in each island.

    Those of the language model are cut in runs. A module whose instances each lie on ranks of one of these islands,
    equally many in each, goes with them; another one is cut in runs, too.

    Args:
        layouts: resolved.
        count: number of islands.

    Returns:
        Nothing where there is one island.

    Raises:
        ConfigError: see :func:`check_islands`.
    """
    check_islands(layouts, count)
    if count == 1:
        return {}
    runs = {name: np.repeat(np.arange(count), layout.dp // count) for name, layout in layouts.items()}
    home = layouts[language_model]
    at = np.full(1 + max(max(layout.ranks) for layout in layouts.values()), -1)
    for stage in range(home.pipeline.stages):
        at[home.stage_grid(stage)] = runs[language_model][:, None]
    chosen = {}
    for name, layout in layouts.items():
        there = at[layout.stage_grid(0)]
        together = (there == there[:, :1]).all() and there.min() >= 0
        even = together and (np.bincount(there[:, 0], minlength=count) == layout.dp // count).all()
        chosen[name] = there[:, 0] if even else runs[name]
    return chosen
