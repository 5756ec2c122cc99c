"""The real command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = (
    "trainer.max_steps=3",
    "trainer.val_check_interval=3",
    "trainer.log_every_n_steps=1",
    "data.module.global_batch_size=8",
    "model.modules.llm.dim=32",
    "model.modules.vision.hidden_size=32",
    "model.modules.audio.d_model=32",
    "monitor.progress_bar=false",
)
"""A job of seconds."""


@dataclass
class Ended:
    code: int
    output: str
    """stdout and stderr."""
    seconds: float


def start(
    folder: Path, *overrides: object, launcher: tuple[str, ...] = (), module: str = "recipes.train"
) -> subprocess.Popen[str]:
    """Run a recipe with its run folder at ``folder``."""
    command = [sys.executable, *launcher, "-m", module, f"hydra.run.dir={folder}", *map(str, overrides)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder: Path, *overrides: object, timeout: float = 150, **options: object) -> Ended:
    """:func:`start`, and wait."""
    began = time.monotonic()
    process = start(folder, *overrides, **options)  # type: ignore[arg-type]
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {timeout} s:\n{output[-4000:]}") from None
    return Ended(process.returncode, output, time.monotonic() - began)


def alive(marker: Path) -> list[int]:
    """Processes whose command line names a run folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if str(marker) in (place / "cmdline").read_text() and int(place.name) != os.getpid():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def wait_until_gone(marker: Path, seconds: float = 15) -> list[int]:
    """Processes of a run folder that are still there after so long."""
    end = time.monotonic() + seconds
    while (left := alive(marker)) and time.monotonic() < end:
        time.sleep(0.2)
    return left
