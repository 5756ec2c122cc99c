"""How rows cross an edge: routes (pure) and the autograd exchange."""

from hetero_strategy.boundary.route import Route, Side, Transfer, least_rows, route

__all__ = ["Route", "Side", "Transfer", "least_rows", "route"]
