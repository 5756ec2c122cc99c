"""Small real data for the data room's tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_strategy.data.digits import write_digits, write_digits_draw


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training, 20 validation and 20 test samples of the digits data."""
    return write_digits(tmp_path_factory.mktemp("data") / "digits", train=60, val=20, test=20, seed=3, progress=False)


@pytest.fixture(scope="session")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training, 20 validation and 20 test samples of the data to draw."""
    return write_digits_draw(
        tmp_path_factory.mktemp("data") / "drawings", train=60, val=20, test=20, seed=3, progress=False
    )


def entry(name: str, question: str, answer: str = "1", **media: object) -> dict[str, object]:
    """One manifest entry with one question and one answer."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": name, **media, "conversations": turns}


def write_manifest(folder: Path, *entries: object, name: str = "manifest.json") -> Path:
    """Write a manifest as a list."""
    path = folder / name
    path.write_text(json.dumps(entries))
    return path
