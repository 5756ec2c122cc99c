"""What a layer's forward and backward cost, by what trains in it and upstream of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LayerCost:
    """One layer for one microbatch, in seconds or any other unit of time.

    Args:
        forward: time of the forward.
        trains: it has a trainable parameter.
        recomputed: its activations are not kept, its backward runs the forward again.
        input: time of the gradient for its input; None: as the forward.
        weight: time of the gradient for its weights; None: as the forward.
        backward: measured time of its whole backward, recompute included; None: the sum of its parts. A layer that
            has no backward ignores it.

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
    """Of the input gradient; 0 where none is needed. The recomputed forward is in it, or in ``weight`` without it."""
    weight: np.ndarray
    """Of the weight gradient; 0 where frozen."""
    backward: np.ndarray
    """Of both at once."""

    @property
    def total(self) -> np.ndarray:
        """Forward and backward: what a microbatch keeps a stage busy for."""
        return self.forward + self.backward

    def staged(self, counts: Sequence[int]) -> Passes:
        """Sums over runs of layers: the stages of a split, or blocks together with what always goes with them.

        An embedding that stays with the first of three blocks and a head that stays with the last:
        ``costs([embedding, *blocks, head], ...).staged((2, 1, 2))``.

        Raises:
            ValueError: a run is empty, or the runs do not cover the layers.
        """
        if sum(counts) != len(self.forward) or min(counts, default=0) < 1:
            raise ValueError(f"runs of {tuple(counts)} layers are no split of {len(self.forward)} layers")
        starts = np.cumsum(counts) - np.asarray(counts)
        return Passes(*(np.add.reduceat(x, starts) for x in (self.forward, self.input, self.weight, self.backward)))

    def as_if_trained(self) -> Passes:
        """What a planner believes that knows nothing of frozen parts: every backward is twice its forward."""
        return Passes(self.forward, self.forward, self.forward, 2 * self.forward)


def costs(layers: Sequence[LayerCost], upstream_trains: bool) -> Passes:
    """Times of a chain of layers, such as one module.

    A frozen layer with nothing trainable upstream has no backward; with something trainable upstream it has the input
    gradient alone. A trainable layer has the weight gradient, and the input gradient only if something upstream trains.
    Recompute adds a forward where there is a backward.

    The cases, with 1 x forward for each gradient, are Cornstarch's (arXiv:2503.11367, section 4.2); the paper takes 2 x
    forward for every trainable layer, which is one too many where nothing upstream trains.

    Args:
        layers: in order.
        upstream_trains: something that feeds the first of them has a trainable parameter.
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
