"""Cohorts: instances of a module that act on their own, so that each fills the bubbles of its own ranks. Pure.

Where a module shares its ranks with a pipeline, its instances lie on ranks that idle at different times. Nothing ties
them within a step if their parameters are gathered once at its start and their gradients reduced once at its end: then
instances on ranks of one pipeline stage act together, and those of other stages when they like (Optimus, section 4.1,
where every encoder has a plan of its own over the ranks of a language model's pipeline). A cohort is a node of the
stage graph like any other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import product

import numpy as np

from hetero_strategy.schedule.action import Stage, StageGraph, StageId


def in_cohorts(graph: StageGraph, apart: Collection[str]) -> StageGraph:
    """The graph in which instances of some modules act on their own where they share ranks with different stages.

    Args:
        graph: in which all instances of a stage act together.
        apart: modules whose instances nothing ties between UNSHARD and REDUCE; each has at least one cohort.
    """
    cohorts = {module: _cohorts(graph, module) for module in apart}
    nodes: dict[StageId, tuple[StageId, ...]] = {}
    stages: dict[StageId, Stage] = {}
    for stage_id, stage in graph.stages.items():
        members = cohorts.get(stage_id.module)
        if members is None:
            nodes[stage_id], stages[stage_id] = (stage_id,), stage
            continue
        nodes[stage_id] = tuple(stage_id._replace(cohort=k) for k in range(len(members)))
        for node, own in zip(nodes[stage_id], members, strict=True):
            islands = None if stage.islands is None else stage.islands[own]
            stages[node] = replace(stage, grid=stage.grid[own], members=own, islands=islands)
    edges: list[tuple[StageId, StageId]] = []
    for source, target in graph.edges:
        if source.module == target.module:
            edges += zip(nodes[source], nodes[target], strict=True)
        else:
            edges += product(nodes[source], nodes[target])
    return StageGraph(stages, tuple(edges), graph.pipelines)


def _cohorts(graph: StageGraph, module: str) -> list[np.ndarray]:
    """Instances of a module, those together whose ranks host the same stages."""
    hosted = np.zeros(1 + max(max(ranks) for ranks in graph.hosts.values()), dtype=np.int64)
    for number, ranks in enumerate(graph.hosts.values()):
        hosted[list(ranks)] = number
    grids = [hosted[graph.stages[stage_id].grid].tolist() for stage_id in graph.nodes_of(module)]
    found: dict[tuple[frozenset[int], ...], list[int]] = {}
    for instance, rows in enumerate(zip(*grids, strict=True)):
        found.setdefault(tuple(map(frozenset, rows)), []).append(instance)
    return [np.array(members) for members in found.values()]
