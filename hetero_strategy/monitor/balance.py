"""Measures of how evenly the work of a run is spread over instances. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hetero_strategy.plan.step_plan import ModuleLoad
from hetero_strategy.schedule.compile import Traffic


@dataclass(frozen=True)
class Spread:
    """The sums over steps of one module's loads, of which each microbatch is sorted from the busiest instance.

    The first number divided by the mean is the factor by which a microbatch takes longer than with equal instances.
    """

    before: np.ndarray
    """Loads as sampled, in the unit of the module's cost, summed over microbatches, float64 ``[instances]``."""
    after: np.ndarray
    """Loads as planned, in the same unit and shape."""

    @classmethod
    def of(cls, load: ModuleLoad) -> Spread:
        """Sort and sum up the loads of one step."""
        before, after = (np.sort(x, axis=1)[:, ::-1].sum(axis=0) for x in (load.before, load.after))
        return cls(before, after)

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.before + other.before, self.after + other.after)

    @property
    def imbalance_before(self) -> float:
        """Return the load of the busiest instance over the mean."""
        return ModuleLoad.imbalance(self.before[None])

    @property
    def imbalance_after(self) -> float:
        return ModuleLoad.imbalance(self.after[None])

    @property
    def saved(self) -> float:
        """Return the share of the slowest instances' time that balancing saves."""
        return 1.0 - float(self.after[0]) / float(self.before[0]) if self.before[0] else 0.0


@dataclass(frozen=True)
class BalanceSummary:
    """The results of balancing in a run. Times are seconds per step, of the slowest rank."""

    steps: int
    spreads: Mapping[str, Spread]
    """Module -> spread of its work, if plans have its loads."""
    traffic: Traffic | None
    """Bytes between ranks per step; None without a placement."""
    wait_seconds: float
    plan_seconds: float | None
    """Planning time. This and the next two fields are None if batches have no times."""
    payload_seconds: float | None
    plan_hidden_share: float | None
    microbatches: float
    skipped_samples: int

    def to_json(self) -> dict[str, Any]:
        """Return the summary ready for JSON, with loads divided by the mean before balancing."""
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
