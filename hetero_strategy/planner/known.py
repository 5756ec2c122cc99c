"""What is the same for many candidates, so that it is planned and simulated once. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from hetero_strategy.planner.times import NOTHING, StageTimes


class Took(NamedTuple):
    """By a simulated step."""

    seconds: float
    busiest: float
    """Seconds in which the busiest rank computes."""


def content(value: Any) -> Hashable:
    """Equal where all that values hold is; of plain data and arrays.

    >>> content({"a": np.arange(3)}) == content({"a": np.arange(3)})
    True
    """
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return tuple([(key, content(each)) for key, each in value.items()])
    if isinstance(value, (tuple, list)):
        return tuple(map(content, value))
    if is_dataclass(value):
        return type(value), tuple([content(getattr(value, field.name)) for field in fields(value)])
    return value


def during(times: StageTimes) -> tuple[object, ...]:
    """What of a stage's times its actions take: without what runs beside them and what follows the last of them."""
    beside = times.once and times.overlapped
    collectives = () if beside else (times.gather, times.reduce, times.beside)
    return times.forward, times.input, times.weight, times.whole or NOTHING, times.once, times.overlapped, *collectives
