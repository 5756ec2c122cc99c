from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.scenario import data


@pytest.fixture(scope="session")
def scenario_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 training and 24 validation samples, only to be read."""
    return data(tmp_path_factory.mktemp("scenario") / "digits")
