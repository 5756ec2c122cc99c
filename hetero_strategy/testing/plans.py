"""Small models without values, clusters and batches that plans are made for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero_strategy.layout.row_sharding import RowSharding
from hetero_strategy.model.spec import Experts, ModelSpec, ModuleSpec
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.simulator.cluster import Cluster, Device, Links

SIMULATIONS = 8
"""Candidates to simulate: a third of the default also finds the best one where it is known."""
DEVICE = Device("test", 1e12, 4e9, 1e11, 0.5, 0.4, 1e-5)


def module(
    blocks: int,
    width: int,
    *,
    samplewise: bool = False,
    trains: bool = True,
    tp: tuple[int, ...] = (1, 2, 4),
    edge_width: int | None = None,
    experts: int = 0,
) -> ModuleSpec:
    """Return a transformer of equal blocks, with experts in place of dense layers, of which a row visits two."""
    routed = np.full(blocks, 4 * width * width * experts, np.int64)
    parameters = np.full(blocks, (4 if experts else 12) * width * width, np.int64) + routed
    stored = _divided(parameters, trains)
    shares = Experts(
        stored=_divided(routed, trains)[:, 0],
        largest=routed // 2 * trains,
        per_row=np.full(blocks, 16.0 * width * width),
        sent=np.full(blocks, 2.0 * width),
        sizes=((experts, width),),
    )
    return ModuleSpec(
        per_row=np.full(blocks, 24.0 * width * width),
        per_pair=np.full(blocks, 4.0 * width),
        parameters=parameters,
        trained=parameters * trains,
        trained_share=np.full(blocks, float(trains)),
        has_blocks=True,
        width=width,
        edge_width=edge_width or width,
        tp=tp,
        row_shardings={n: RowSharding(n if samplewise else 1) for n in tp},
        samplewise=samplewise,
        stored=stored,
        largest=(parameters - routed) // 3 * trains,
        buffers=0,
        moved=np.zeros(blocks),
        experts=shares if experts else None,
    )


def _divided(parameters: np.ndarray, trains: bool) -> np.ndarray:
    """Return parameters that are all in blocks and divided by tensor parallelism, int64 ``[blocks, 2, 2, 2]``."""
    stored = np.zeros((len(parameters), 2, 2, 2), np.int64)
    stored[:, 0, int(trains), 1] = parameters
    return stored


def model(
    encoder: tuple[int, int] = (4, 256),
    llm: tuple[int, int] = (8, 512),
    *,
    frozen: bool = False,
    tp: tuple[int, ...] = (1, 2, 4),
    experts: int = 0,
) -> ModelSpec:
    """Return an encoder before a language model, maybe with experts; pairs are the blocks and width of a module."""
    vision = module(*encoder, trains=not frozen, tp=tp, edge_width=llm[1])
    return ModelSpec(
        {"vision": vision, "llm": module(*llm, samplewise=True, tp=tp, experts=experts)}, (("vision", "llm"),)
    )


def cluster(
    ranks: int, per_node: int | None = None, *, memory: float = 4e9, bandwidth: float = 1e10, launch: float = 1e-5
) -> Cluster:
    """Return a cluster of slow devices; memory in bytes, bandwidth in bytes per second."""
    per_node = ranks if per_node is None else per_node
    device = Device("test", 1e12, memory, 1e11, 0.5, 0.4, launch)
    return Cluster(device, ranks // per_node, per_node, Links(1e-5, bandwidth), Links(2e-5, bandwidth / 4))


def batch(samples: int, seed: int = 0, *, images: int = 2, rows: int = 96, text: int = 128) -> StepMetadata:
    """Draw samples of ragged text, each with some ragged images in front of it."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, images + 1, samples)
    sample = np.repeat(np.arange(samples), counts)
    edge = rng.integers(rows // 4, rows + 1, len(sample))
    ahead = np.concatenate([[0], np.cumsum(edge)])
    first = np.concatenate([[0], np.cumsum(counts)])[sample]
    start = ahead[:-1] - ahead[first]
    tokens = rng.integers(text // 4, text + 1, samples) + np.bincount(sample, weights=edge, minlength=samples).astype(
        int
    )
    items = {"vision": StepItems(sample, edge, start, 4 * edge)}
    return StepMetadata(0, 0, np.arange(samples), tokens, tokens // 2, items)


def generator(samples: int = 16, *, trains: bool = True) -> tuple[ModelSpec, StepMetadata]:
    """Return a language model before a generator, and a batch for them."""
    draw = module(4, 256, edge_width=512, trains=trains)
    shape = ModelSpec({"llm": module(8, 512, samplewise=True), "draw": draw}, (("llm", "draw"),))
    data = batch(samples)
    items = data.items["vision"]
    return shape, replace(data, items={"draw": replace(items, targets=items.edge_rows)})
