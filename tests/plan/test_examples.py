"""Worked examples in docstrings."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["ragged", "plan.balance.greedy", "plan.nodes.level"])
def test_examples_in_docstrings_are_right(name: str) -> None:
    module, runner = import_module(f"hetero_strategy.{name}"), doctest.DocTestRunner()
    # Functions seem to be of another module, as the check of shapes is around them.
    for example in doctest.DocTestFinder().find(module, module=False, globs=vars(module)):
        runner.run(example)
    assert runner.tries and not runner.failures
