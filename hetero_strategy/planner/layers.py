"""Times of a layer's forward and backward, which depend on what trains in it and upstream of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_strategy import ragged


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer for one microbatch, in seconds or any other unit.

    Args:
        trains: whether the layer has a trainable parameter.
        recomputed: whether its backward runs the forward again because activations are not kept.
        input: time of the gradient for its input; None: as the forward.
        weight: time of the gradient for its weights; None: as the forward.
        backward: measured time of its whole backward, recompute included; None: the sum of its parts. Ignored where the
            layer has no backward.

    Raises:
        ValueError: a time is negative or not finite.
    """

    forward: float
    trains: bool
    recomputed: bool = False
    input: float | None = None
    weight: float | None = None
    backward: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "backward"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a layer is {value}: not a time")


@dataclass(frozen=True, eq=False)
class Passes:
    """Times of several layers, or of several stages, in order; each float64 ``[layers]``."""

    forward: np.ndarray
    input: np.ndarray
    """Times of the input gradient, 0 where none is needed. A recomputed forward is in here, otherwise in ``weight``."""
    weight: np.ndarray
    """Times of the weight gradient, 0 where the layer is frozen."""
    backward: np.ndarray
    """Times of both gradients at once."""

    @property
    def total(self) -> np.ndarray:
        """Forward and backward: how long a microbatch keeps a stage busy."""
        return self.forward + self.backward

    def staged(self, counts: Sequence[int]) -> Passes:
        """Add up runs of layers: the stages of a split, or blocks together with what always goes with them.

        For example, ``costs([embedding, *blocks, head], ...).staged((2, 1, 2))`` keeps an embedding with the first of
        three blocks and a head with the last.

        Raises:
            ValueError: a run is empty, or the runs do not cover the layers.
        """
        if sum(counts) != len(self.forward) or min(counts, default=0) < 1:
            raise ValueError(f"runs of {tuple(counts)} layers are no split of {len(self.forward)} layers")
        starts = ragged.starts(np.asarray(counts))
        return Passes(*(np.add.reduceat(x, starts) for x in (self.forward, self.input, self.weight, self.backward)))

    def as_if_trained(self) -> Passes:
        """The same layers for a planner that knows nothing of frozen parts: every backward is twice its forward."""
        return Passes(self.forward, self.forward, self.forward, 2 * self.forward)


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
        gradient = (layer.forward if layer.input is None else layer.input) if upstream_trains else 0.0
        weight = (layer.forward if layer.weight is None else layer.weight) if layer.trains else 0.0
        if layer.recomputed and upstream_trains:
            gradient += layer.forward
        elif layer.recomputed and layer.trains:
            weight += layer.forward
        backward = gradient + weight
        if layer.backward is not None and (upstream_trains or layer.trains):
            backward = layer.backward
        rows.append((layer.forward, gradient, weight, backward))
        upstream_trains = upstream_trains or layer.trains
    return Passes(*np.array(rows, dtype=np.float64).reshape(len(rows), 4).T)
