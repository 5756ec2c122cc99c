"""Disks that really are full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_in(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of a size such as ``16k``; the test is skipped where none may be mounted."""
    place = folder / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
