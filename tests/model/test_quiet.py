"""What other libraries say of themselves."""

from __future__ import annotations

import logging

import pytest

from hetero_strategy.zoo import hf


def test_what_nobody_can_act_on_is_not_said_and_all_else_is(caplog: pytest.LogCaptureFixture) -> None:
    hf.hush()
    for name, text in hf.SAID.items():
        logger = logging.getLogger(name)
        assert len(logger.filters) == 1  # as importing the zoo has left it
        logger.propagate, before = True, logger.propagate
        logger.warning(f"x {text} y")
        logger.warning("%s: another matter", name)
        logger.propagate = before
    assert caplog.messages == [f"{name}: another matter" for name in hf.SAID]
