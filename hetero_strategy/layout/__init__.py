"""Where modules live: layouts, their placement over a world, groups and meshes."""

from hetero_strategy.layout.pipeline import Pipeline
from hetero_strategy.layout.placement import Coordinate, Placement, place
from hetero_strategy.layout.spec import ModuleLayout

__all__ = ["Coordinate", "ModuleLayout", "Pipeline", "Placement", "place"]
