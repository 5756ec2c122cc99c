"""The real command line in processes of its own; the same entry point in processes that have its imports already."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hetero_strategy.testing import Pool, WorkerError

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


def start(
    folder: Path, *overrides: object, launcher: tuple[str, ...] = (), module: str = "recipes.train"
) -> subprocess.Popen[str]:
    """Run a recipe with its run folder at ``folder``."""
    command = [sys.executable, *launcher, "-m", module, f"hydra.run.dir={folder}", *map(str, overrides)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder: Path, *overrides: object, timeout: float = 450, **options: object) -> Ended:
    """:func:`start`, and wait."""
    process = start(folder, *overrides, **options)  # type: ignore[arg-type]
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {timeout} s:\n{output[-4000:]}") from None
    return Ended(process.returncode, output)


def run_forked(folder: Path, *overrides: object, timeout: float = 180, module: str = "recipes.train") -> Ended:
    """:func:`run` without its imports, which take longer than the rest: what ``python -m`` would call, called by a
    process forked from the one of the ``pool`` fixture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.output")
    arguments = [f"hydra.run.dir={folder}", *map(str, overrides)]
    process = multiprocessing.get_context("forkserver").Process(target=_enter, args=(module, arguments, str(log)))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"did not end within {timeout} s:\n{log.read_text()[-4000:]}")
    return Ended(process.exitcode, log.read_text())


def run_on_ranks(
    pool: Pool, world: int, folder: Path, *overrides: object, timeout: float = 450, module: str = "recipes.train"
) -> Ended:
    """:func:`run_forked` for every rank of a job, as torchrun would start them; the output is rank 0's."""
    log = folder.with_name(f"{folder.name}.output")
    arguments = [f"hydra.run.dir={folder}", *map(str, overrides)]
    try:
        pool.run(world, _enter_on_rank, module, arguments, str(log), timeout=timeout, group=False)
    except WorkerError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-4000:] if log.exists() else ''}") from None
    return Ended(0, log.read_text())


def _enter_on_rank(rank: int, world: int, module: str, arguments: list[str], log: str) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as in a script
    _enter(module, arguments, f"{log}{rank or ''}")


def _enter(module: str, arguments: list[str], log: str) -> None:
    """The last lines of a recipe, in this process."""
    output = open(log, "w", buffering=1)  # noqa: SIM115  (open until the process ends)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    os.chdir(ROOT)
    entry = importlib.import_module(module)
    sys.argv = [str(entry.__file__), *arguments]
    entry.cli.start(entry.main)


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


def wait_until_gone(marker: Path, seconds: float = 60) -> list[int]:
    """Processes of a run folder that are still there after so long."""
    end = time.monotonic() + seconds
    while (left := alive(marker)) and time.monotonic() < end:
        time.sleep(0.2)
    return left
