"""Times of a layer's forward and backward, which depend on what trains in it and upstream of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer for one microbatch, in seconds or any other unit.

    Args:
        trains: whether the layer has a trainable parameter.
        recomputed: share of the forward that its backward runs again because activations are not kept.
        weight: time of the gradient for its weights; None: as the forward.
    """

    forward: float
    trains: bool
    recomputed: float = 0.0
    weight: float | None = None


@dataclass(frozen=True, eq=False)
class Passes:
    """Times of several layers, or of several stages, in order."""

    forward: Float64[np.ndarray, "layers"]
    input: Float64[np.ndarray, "layers"]
    """Times of the input gradient, 0 where none is needed. A recomputed forward is in here, otherwise in ``weight``."""
    weight: Float64[np.ndarray, "layers"]
    """Times of the weight gradient, 0 where the layer is frozen."""

    @property
    def backward(self) -> Float64[np.ndarray, "layers"]:
        """Times of both gradients."""
        return self.input + self.weight

    @property
    def total(self) -> Float64[np.ndarray, "layers"]:
        """Forward and backward: how long a microbatch keeps a stage busy."""
        return self.forward + self.backward


def costs(layers: Sequence[LayerCost], upstream_trains: bool) -> Passes:
    """Compute the times of a chain of layers, such as one module.

    A frozen layer with nothing trainable upstream has no backward; with something trainable upstream it has the input
    gradient alone. A trainable layer has the weight gradient, and the input gradient only if something upstream trains.
    Recompute adds a forward where there is a backward.

    The cases, with 1 x forward for each gradient, are Cornstarch's (arXiv:2503.11367, section 4.2). The paper takes 2 x
    forward for every trainable layer, which is one too many where nothing upstream trains.

    Args:
        upstream_trains: whether something that feeds the first layer has a trainable parameter.
    """
    rows = []
    for layer in layers:
        again = layer.forward * layer.recomputed
        gradient = weight = 0.0
        if layer.trains:
            weight = layer.forward if layer.weight is None else layer.weight
        if upstream_trains:
            gradient = layer.forward + again
        elif layer.trains:
            weight += again
        rows.append((layer.forward, gradient, weight))
        upstream_trains = upstream_trains or layer.trains
    return Passes(*np.array(rows, dtype=np.float64).reshape(len(rows), 3).T)


def fed_by_trainable(trainable: Mapping[str, bool], edges: Iterable[tuple[str, str]]) -> dict[str, bool]:
    """Find for each module whether one before it, along edges (source, target), has something trainable."""
    edges = list(edges)
    fed = dict.fromkeys(trainable, False)
    for _ in fed:  # a path has fewer edges than there are modules
        for source, target in edges:
            fed[target] = fed[target] or fed[source] or trainable[source]
    return fed
