"""What other libraries say of themselves."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from hetero_strategy.model import hf_sources


def test_what_nobody_can_act_on_is_not_said_and_all_else_is(caplog: pytest.LogCaptureFixture) -> None:
    hf_sources.hush()
    for name, text in hf_sources.SAID.items():
        logger = logging.getLogger(name)
        assert len(logger.filters) == 1  # as importing the module has left it
        logger.propagate, before = True, logger.propagate
        logger.warning(f"x {text} y")
        logger.warning("%s: another matter", name)
        logger.propagate = before
    assert caplog.messages == [f"{name}: another matter" for name in hf_sources.SAID]


def test_the_command_that_exports_is_as_quiet() -> None:
    """It imports no zoo, but transformers' models."""
    task = "import hetero_strategy.checkpoint.__main__; from transformers import Qwen3ForCausalLM"
    done = subprocess.run([sys.executable, "-c", task], capture_output=True, text=True, timeout=300, check=True)
    assert not any(text in done.stderr for text in hf_sources.SAID.values()), done.stderr
