"""Layouts of modules, their placement over a world, process groups and meshes."""

from hetero_strategy.layout.spec import Coordinate, ModuleLayout, Pipeline, Placement, place

__all__ = ["Coordinate", "ModuleLayout", "Pipeline", "Placement", "place"]
