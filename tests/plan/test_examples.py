"""Worked examples in docstrings."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["ragged", "plan.balance.greedy", "plan.nodes.level"])
def test_examples_in_docstrings_are_right(name: str) -> None:
    result = doctest.testmod(import_module(f"hetero_strategy.{name}"))
    assert result.attempted and not result.failed
