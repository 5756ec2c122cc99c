"""Options are checked against their annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from hetero_strategy.errors import ConfigError, Count, check_types


def options(
    flag: bool,
    count: Count,
    rate: float,
    name: str | None,
    mode: Literal["fine", "none"],
    bounds: Mapping[str, Count],
    names: Sequence[str],
    counts: Sequence[Count],
    rates: Sequence[float | Path] | None,
    folder: Path | None,
    pair: Annotated[Sequence[int], ("two numbers", lambda pair: len(pair) == 2)],
    other: Any,
) -> None: ...


GOOD: dict[str, tuple[Any, ...]] = {
    "flag": (True, False),
    "count": (1, np.int64(3)),
    "rate": (1, 0.5, float("inf")),
    "name": ("x", None),
    "mode": ("fine", "none"),
    "bounds": ({}, {"llm": 2}),
    "names": ([], ("a", "b")),
    "counts": ([], (1, 2)),
    "rates": ([], [0.9, 1], None),
    "folder": (Path("x"), None),
    "pair": ([1, 2], (3, 4)),
    "other": (None, "x", 3),
}
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "flag": ((1, "no", None), "True or False"),
    "count": ((0, True, 1.0, "1", None), "a whole number of at least 1"),
    "rate": ((True, "1e-3", None), "a number"),
    "name": ((3, True), "a text or None"),
    "mode": (("fast", None, 1, ["fine"]), "one of fine, none"),
    "bounds": ((2, ["llm"], {"llm": 0}, {"llm": True}, None), "a whole number of at least 1 for each module"),
    "names": ((3, [1], {"a": 1}), "a list of texts"),
    "counts": ((3, "1", [0], [1.5], None), "a list of whole numbers of at least 1"),
    "rates": ((0.9, ["x"]), "a list of numbers or Paths or None"),
    "folder": (("x", 3), "a Path or None"),
    "pair": ((1, [1], [1, "2"]), "two numbers"),
}


@pytest.mark.parametrize("name", GOOD)
def test_values_of_the_type_pass(name: str) -> None:
    for value in GOOD[name]:
        check_types("f", options, **{name: value})


@pytest.mark.parametrize("name", WRONG)
def test_other_values_are_refused_by_name(name: str) -> None:
    values, words = WRONG[name]
    for value in values:
        with pytest.raises(ConfigError) as raised:
            check_types("f", options, **{name: value})
        assert str(raised.value) == f"f: {name}={value!r}; give {words}"


def test_a_text_in_place_of_a_list_is_shown_as_a_list() -> None:
    with pytest.raises(ConfigError, match=r"f: names='llm.norm'; give a list of texts, such as \['llm.norm'\]$"):
        check_types("f", options, names="llm.norm")


def test_a_name_without_annotation_is_not_checked() -> None:
    check_types("f", options, unknown=3)
