"""Callbacks: throughput, FLOP/s and utilisation per module, memory, balance, timelines, traces."""

from __future__ import annotations

from hetero_strategy.monitor.balance_monitor import BalanceMonitor
from hetero_strategy.monitor.memory_monitor import MemoryMonitor
from hetero_strategy.monitor.profile_monitor import ProfileMonitor
from hetero_strategy.monitor.throughput import ThroughputMonitor
from hetero_strategy.monitor.timeline_monitor import TimelineMonitor

__all__ = [
    "BalanceMonitor",
    "MemoryMonitor",
    "ProfileMonitor",
    "ThroughputMonitor",
    "TimelineMonitor",
]
