"""Tests of what runs on a GPU run on the CPU too, so that the tests themselves are known to work."""

from __future__ import annotations

import pytest

EVERYWHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
