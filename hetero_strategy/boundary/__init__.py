"""The boundary between modules: which rows go where, and how they travel."""

from hetero_strategy.boundary.route import Route, Side, Transfer, least_rows, route
from hetero_strategy.boundary.transport import Boundary, Channel, exchange

__all__ = ["Boundary", "Channel", "Route", "Side", "Transfer", "exchange", "least_rows", "route"]
