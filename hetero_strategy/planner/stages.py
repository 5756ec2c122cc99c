"""Which blocks each pipeline stage of a module gets where the layout does not say. Works on modules as built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.planner.layers import LayerCost, costs, fed_by_trainable
from hetero_strategy.planner.partition import split_into
from hetero_strategy.planner.shape import trained_share

TYPICAL_ROWS = 1024
"""Length of the sequence whose FLOPs weigh the blocks against the embedding and the head."""


def with_splits(
    modules: Mapping[str, Adapter],
    topological: Sequence[str],
    edges: Sequence[tuple[str, str]],
    layouts: Mapping[str, ModuleLayout],
    recompute: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, ModuleLayout]:
    """Fill in every missing ``split`` of the layouts, from counted FLOPs and aware of frozen parts.

    Args:
        modules: modules as built, before anything is parallelised.
        topological: names of the modules, sources before targets.
        edges: pairs of source and target names.
        layouts: resolved layouts.
        recompute: share of its forward that a module runs again in backward.

    Raises:
        LayoutError: a module, or a rank's part of it, has fewer blocks than stages, or none.
    """
    trains = {name: any(p.requires_grad for p in modules[name].parameters()) for name in topological}
    fed = fed_by_trainable(trains, edges)
    split_layouts = {}
    for name in topological:
        module, layout = modules[name], layouts[name]
        if layout.split is None:
            blocks = list(module.blocks())
            counts: tuple[int, ...] = (len(blocks),)
            if layout.pipeline.stages > 1:
                if not blocks:
                    kind = type(module).__name__
                    raise LayoutError(f"layout of '{name}': {kind} has no blocks to cut it by; leave pieces out")
                layers = _layers(module, blocks, recompute.get(name, 0.0))
                try:
                    counts = split_into(layout.pipeline, costs(layers, fed[name]).total)
                except LayoutError as fault:
                    raise LayoutError(f"layout of '{name}': {fault}") from None
            layout = replace(layout, split=counts)
        split_layouts[name] = layout
    return {name: split_layouts[name] for name in layouts}


def _layers(module: Adapter, blocks: list[str], recomputed: float) -> list[LayerCost]:
    """Cost of each block; the embedding is in the first and the head in the last."""
    forward = module.stage_flops(np.array([TYPICAL_ROWS]), [1] * len(blocks))
    layers = []
    for number, (block, flops) in enumerate(zip(blocks, forward, strict=True)):
        stage = module.stage([block], first=number == 0, last=number == len(blocks) - 1)
        trains = any(p.requires_grad for p in stage.parameters())
        layers.append(LayerCost(float(flops), trains, recomputed, weight=float(flops) * trained_share(stage)))
    return layers
