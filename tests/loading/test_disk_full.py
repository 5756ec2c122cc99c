"""A disk that is full, or a quota, while an index is written."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import DataError
from recipes.digits import write_digits
from tests.disks import small_disk_in
from tests.small_models import digit_processors

MESSAGE = r"{folder}: cannot be written \(.+\); (\d+) bytes are needed and (\d+) are free; free some room.*cache_folder"


def build(digits: Path, cache: Path) -> DatasetIndex:
    return build_index(
        digits / "train.json", ChatTokenizer(digits), digit_processors(), cache_folder=cache, progress=False
    )


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def limited(digits: Path, cache: Path, limit: int, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        build(digits, cache)
        pipe.send("")
    except Exception as error:
        pipe.send(f"{type(error).__name__} {error}")


@pytest.mark.parametrize("limit", [100, 3000])
def test_a_file_that_may_not_grow(digits: Path, tmp_path: Path, limit: int) -> None:
    """A limit of the process, at the first bytes and in the middle of an array."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=limited, args=(digits, tmp_path / "cache", limit, theirs))
    process.start()
    message = ours.recv()
    process.join()
    assert message.startswith("DataError ")
    found = re.search(MESSAGE.format(folder=tmp_path / "cache"), message)
    assert found and "\n" not in message
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half-written
    index = build(digits, tmp_path / "cache")  # a later attempt works
    need = int(found.group(1))
    assert 0.9 * size(index.folder) < need < 1.2 * size(index.folder) and len(index) == 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB of its own."""
    with small_disk_in(tmp_path, "16k") as place:
        yield place


def test_a_full_disk(digits: Path, tmp_path: Path, small_disk: Path) -> None:
    with pytest.raises(DataError, match=MESSAGE.format(folder=small_disk / "cache")) as error:
        build(digits, small_disk / "cache")
    found = re.search(r"(\d+) bytes are needed and (\d+) are free", str(error.value))
    assert found and int(found.group(1)) > int(found.group(2)) > 0
    assert list((small_disk / "cache").iterdir()) == []
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert len(build(digits, small_disk / "cache")) == 60
    with pytest.raises(DataError, match="cannot be written"):  # other writers of whole folders too
        write_digits(small_disk / "digits", train=3000, val=1, progress=False)
    assert not (small_disk / "digits").exists()
    (small_disk / "rest").write_bytes(os.urandom(_free(small_disk)))
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        build(digits, small_disk / "other")


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
