"""How evenly the work of a run is spread, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hetero_strategy.monitor.traffic import Traffic
from hetero_strategy.plan.step_plan import ModuleLoad


@dataclass(frozen=True)
class Spread:
    """Work of one module's instances over many steps: in every microbatch the busiest first, then averaged.

    The first number divided by the mean is how much longer a microbatch takes than if all instances were equal.
    """

    before: np.ndarray
    """Loads as sampled, in the unit of the module's cost, summed over microbatches, float64 ``[instances]``."""
    after: np.ndarray
    """The same as planned."""

    @classmethod
    def of(cls, load: ModuleLoad) -> Spread:
        """Sort and sum up the loads of one step."""
        before, after = (np.sort(x, axis=1)[:, ::-1].sum(axis=0) for x in (load.before, load.after))
        return cls(before, after)

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.before + other.before, self.after + other.after)

    @property
    def imbalance_before(self) -> float:
        """Load of the busiest over the mean."""
        return ModuleLoad.imbalance(self.before[None])

    @property
    def imbalance_after(self) -> float:
        return ModuleLoad.imbalance(self.after[None])

    @property
    def saved(self) -> float:
        """Share of the slowest instances' time that balancing saves."""
        return 1.0 - float(self.after[0]) / float(self.before[0]) if self.before[0] else 0.0


@dataclass(frozen=True)
class BalanceSummary:
    """Results of a run's balancing. Times are per step, of the slowest rank, in seconds."""

    steps: int
    spreads: Mapping[str, Spread]
    """Module -> spread of its work, where plans hold its loads."""
    traffic: Traffic | None
    """Bytes between ranks per step; None where there is no placement."""
    wait_seconds: float
    plan_seconds: float | None
    """This and the next two are None where batches do not hold their times."""
    payload_seconds: float | None
    plan_hidden_share: float | None
    microbatches: float
    skipped_samples: int
    worker_restarts: int

    def to_json(self) -> dict[str, Any]:
        """Summary ready for JSON, with loads divided by the mean before."""
        modules = {}
        for name, spread in self.spreads.items():
            unit = float(spread.before.mean()) or 1.0
            modules[name] = {
                "instances": len(spread.before),
                "imbalance_before": spread.imbalance_before,
                "imbalance_after": spread.imbalance_after,
                "slowest_saves": spread.saved,
                "sorted_loads_before": (spread.before / unit).round(4).tolist(),
                "sorted_loads_after": (spread.after / unit).round(4).tolist(),
            }
        rest = {k: v for k, v in asdict(self).items() if k not in ("spreads", "traffic")}
        within, between = self.traffic or (None, None)
        return {**rest, "bytes_within_nodes": within, "bytes_between_nodes": between, "modules": modules}
