from __future__ import annotations

from pathlib import Path

import pytest

from recipes.digits import write_digits, write_digits_draw


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training, 12 validation and 10 test samples."""
    return write_digits(tmp_path_factory.mktemp("data") / "digits", train=48, val=12, test=10, progress=False)


@pytest.fixture(scope="session")
def small_drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training, 12 validation and 14 test samples to draw."""
    return write_digits_draw(tmp_path_factory.mktemp("data") / "drawings", train=48, val=12, test=14, progress=False)


@pytest.fixture(scope="session")
def given(small: Path) -> tuple[str, ...]:
    """Overrides that train on it."""
    return data_at(small)


def data_at(folder: Path) -> tuple[str, ...]:
    return (
        "data.write=null",
        f"data.module.train={folder}/train.json",
        f"data.module.val={folder}/val.json",
        f"data.module.test={folder}/test.json",
        f"data.module.tokenizer.path={folder}",
    )
