"""What a schedule would cost: the schedule that the runtime runs, with costs in place of devices. Pure."""

from __future__ import annotations

from hetero_strategy.simulator.account import Host
from hetero_strategy.simulator.links import Links
from hetero_strategy.simulator.result import CAUSES, Cause, Simulation
from hetero_strategy.simulator.simulate import ActionCosts, RowsSent, simulate

__all__ = [
    "CAUSES",
    "ActionCosts",
    "Cause",
    "Host",
    "Links",
    "RowsSent",
    "Simulation",
    "simulate",
]
