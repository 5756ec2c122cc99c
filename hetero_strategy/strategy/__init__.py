"""`HeteroStrategy` and its Lightning parts: launch, precision, refusals, assembly."""

from hetero_strategy.strategy.strategy import HeteroStrategy

__all__ = ["HeteroStrategy"]
