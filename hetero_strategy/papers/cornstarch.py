"""Algorithms of Cornstarch (arXiv:2503.11367), as published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def loosely_coupled(
    backbone: Mapping[int, float], encoders: Mapping[str, Mapping[int, float]]
) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the numbers of pipeline stages whose step times are to be compared (algorithm 1, lines 4 to 8).

    For every number of the backbone's stages, each encoder has the fewest stages of which none is slower than the
    backbone's slowest stage, or as many as it can have.

    >>> list(loosely_coupled({1: 4.0, 2: 2.0}, {"vision": {1: 3.0, 2: 1.5}}))
    [(1, {'vision': 1}), (2, {'vision': 2})]

    Args:
        backbone: number of the language model's stages -> seconds of the slowest, forward and backward.
        encoders: module -> number of its stages -> seconds of the slowest, forward and backward.
    """
    for stages, target in backbone.items():
        fit = {name: [n for n, seconds in times.items() if seconds <= target] for name, times in encoders.items()}
        yield stages, {name: min(numbers) if numbers else max(encoders[name]) for name, numbers in fit.items()}
