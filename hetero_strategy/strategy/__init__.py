"""`HeteroStrategy` and what it needs of Lightning: launch, precision, refusals, assembly."""

from hetero_strategy.strategy.strategy import HeteroStrategy

__all__ = ["HeteroStrategy"]
