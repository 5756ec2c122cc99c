"""The jobs of a sweep, one after another, each in processes of its own; its folder holds what it takes to go on."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hetero_strategy.errors import CheckpointError, ConfigError, HeteroError
from recipes import cli, terminal

STATE = "sweep.json"
OUTPUT = "output.log"
REPORTED = ("split", "exact_match", "loss", "tokens_per_second", "steps", "processes", "layouts")
"""Of a job's report, what a sweep compares."""
REPORTING = ("recipes.train", "recipes.evaluate")
"""Programs that leave one."""
ENDING = 10.0
"""Seconds that a job has after Ctrl-C."""
SAVING = 300.0
"""Seconds that a job has to save where the sweep is told to end; whoever tells it may kill both before."""


@dataclass
class Job:
    """One run of a program."""

    command: list[str]
    """Without its run folder."""
    folder: str
    """Its run folder, below the sweep's."""
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    seconds: float = 0.0
    """Over all attempts but those that ended with the sweep."""
    code: int | None = None
    """Exit code of the last attempt; negative: the signal that ended it."""
    message: str | None = None
    """Why it failed."""
    report: dict[str, Any] | None = None
    """What it came to, if it is done."""

    @property
    def settings(self) -> dict[str, str]:
        """Field -> value, as given on its command line."""
        given = (a.lstrip("+").partition("=") for a in self.command if "=" in a and not a.startswith("-"))
        return {field: value for field, _, value in given}

    @property
    def reason(self) -> str:
        """Of its failure."""
        return f"exit code {self.code}: {self.message}"


@dataclass
class Sweep:
    """Jobs and how far they are."""

    folder: Path
    name: str
    """Group of the runs in Weights & Biases."""
    jobs: list[Job]
    environment: dict[str, str]
    """Variables of all jobs, beside those of this process."""
    key: str
    """Beginning of the jobs' run ids in Weights & Biases: a job that goes on stays one run."""

    def save(self) -> None:
        """Write the state, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {"name": self.name, "key": self.key, "environment": self.environment}
        new = self.folder / f".{STATE}.new"
        new.write_text(json.dumps({**state, "jobs": [asdict(job) for job in self.jobs]}, indent=1))
        new.replace(self.folder / STATE)

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """As :meth:`save` wrote it."""
        found = json.loads((folder / STATE).read_text())
        return cls(folder=folder, **{**found, "jobs": [Job(**job) for job in found["jobs"]]})

    def differences(self) -> list[dict[str, str]]:
        """Of every job: the settings that not all jobs share."""
        settings = [job.settings for job in self.jobs]
        shared = set.intersection(*(set(s.items()) for s in settings)) if settings else set()
        return [{field: value for field, value in s.items() if (field, value) not in shared} for s in settings]

    def label(self, number: int) -> str:
        """What is different in one job."""
        return " ".join(f"{field}={value}" for field, value in self.differences()[number].items()) or "as configured"


def prepare(
    folder: Path, name: str, jobs: Sequence[Job], first: int = 0, environment: dict[str, str] | None = None
) -> Sweep:
    """A new sweep, or the one that the folder holds, to go on with.

    Args:
        folder: absolute.
        name: of a new sweep.
        jobs: from number ``first`` on.
        first: number of the first of them.
        environment: variables of all jobs of a new sweep.

    Raises:
        ConfigError: the folder holds other jobs.
    """
    sweep = Sweep(folder, name, [], environment or {}, secrets.token_hex(3))
    if (folder / STATE).is_file():
        sweep = Sweep.load(folder)
        there = sweep.jobs[first : first + len(jobs)]
        if any((a.command, a.folder) != (b.command, b.folder) for a, b in zip(there, jobs, strict=False)):
            raise ConfigError(f"{folder} holds a sweep of other jobs; choose another folder, or {_go_on(folder)}")
    sweep.jobs += jobs[len(sweep.jobs) - first :]
    sweep.save()
    return sweep


def run(sweep: Sweep) -> HeteroError | None:
    """Run all jobs that are not done, one after another, and show what came of all.

    A job that has a checkpoint goes on there. One that fails does not stop the others.

    Returns:
        What failed, if anything did.

    Raises:
        ConfigError: torchrun or SLURM started this process, or another process is running the sweep.
    """
    from recipes.comparison import show  # matplotlib takes a second to import

    if cli.external():
        raise ConfigError("a sweep starts the processes of its jobs itself; start it without torchrun or srun")
    console, began = terminal.console(), time.monotonic()
    os.environ.update(sweep.environment)
    with _alone(sweep.folder):
        console.print(f"sweep       {cli.near(sweep.folder)}, jobs: {len(sweep.jobs)}", soft_wrap=True)
        console.print(f"resume      {_go_on(sweep.folder)}", soft_wrap=True)
        for number, job in enumerate(sweep.jobs):
            if job.state == "done":
                continue
            elapsed = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - began))
            console.rule(f"job {number} ({number + 1} of {len(sweep.jobs)}), {elapsed} elapsed: {sweep.label(number)}")
            try:
                told = _run(sweep, number)
            except KeyboardInterrupt:
                told = signal.SIGINT
            if told:
                with contextlib.suppress(OSError):  # of a terminal that is gone
                    console.print(f"\nstopped; {_go_on(sweep.folder)} goes on", soft_wrap=True)
                sys.exit(128 + told)
            if job.state == "failed":
                console.print(f"job {number} failed: {failure(sweep, number)}", style="red", soft_wrap=True)
        show(sweep, console)
    failed = [number for number, job in enumerate(sweep.jobs) if job.state == "failed"]
    if not failed:
        return None
    named = "; ".join(failure(sweep, number) for number in failed)
    return HeteroError(f"{len(failed)} of {len(sweep.jobs)} jobs failed: {named}. To try again: {_go_on(sweep.folder)}")


def failure(sweep: Sweep, number: int) -> str:
    """One line on a job that failed."""
    return f"{sweep.label(number)}, {sweep.jobs[number].reason}"


def _go_on(folder: Path) -> str:
    return cli.command("recipes.train", resume=folder)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse a second process on the same sweep; the system gives the lock back however this process ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process is running this sweep; wait for it or end it") from None
        yield


def _run(sweep: Sweep, number: int) -> int:
    """Run one job to its end and note what came of it, unless it was told to end; that signal is returned, or 0."""
    job, folder = sweep.jobs[number], sweep.folder / sweep.jobs[number].folder
    folder.mkdir(parents=True, exist_ok=True)
    job.state = "running"
    sweep.save()
    began = time.monotonic()
    process = subprocess.Popen(
        command_of(job, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(sweep, number),
        preexec_fn=functools.partial(_end_with, os.getpid()),
    )
    with _passed_on(process) as until:
        try:
            output = _copy(process, folder / OUTPUT, until)
        except KeyboardInterrupt:  # the job has it too
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)
            process.kill()
            raise
        finally:
            job.seconds = round(job.seconds + time.monotonic() - began, 2)
            sweep.save()
        job.code = process.wait()
        if not (until and job.code):
            conclude(job, output, folder)
        sweep.save()
    return signal.SIGTERM if until else 0


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[float]]:
    """Tell a job to end when this process is told; from then on what is given holds until when the job may save."""
    until: list[float] = []

    def told(signum: int, frame: object) -> None:
        until.append(time.monotonic() + SAVING)
        process.terminate()

    both = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, told) for number in both}
    try:
        yield until
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def conclude(job: Job, output: str, folder: Path) -> None:
    """Note what came of a job that has ended: one that should have left a report, and did not, is not done."""
    report = folder / "report.json"
    job.state, job.message = ("failed", cause(output, job.code)) if job.code else ("done", None)
    if job.state == "done" and report.is_file():
        found = json.loads(report.read_text())
        job.report = {name: found[name] for name in REPORTED if name in found}
    elif job.state == "done" and set(REPORTING) & set(job.command):
        job.state, job.message = "failed", f"it left no {report.name}"


def command_of(job: Job, folder: Path) -> list[str]:
    """A job's command line: to go on where its folder holds a checkpoint, to start otherwise."""
    try:
        cli.checkpoint_of(folder, "last")
    except (CheckpointError, ConfigError):
        return [*job.command, f'hydra.run.dir="{folder}"']
    program = [a for a in job.command if a.startswith("-") or "=" not in a]
    return [*program, f'resume="{folder}"']


def _environment(sweep: Sweep, number: int) -> dict[str, str]:
    """This process's, in which nothing was trained; `python` is the same one, and a run knows its group."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ours = {"PATH": path, "PYTHONUNBUFFERED": "1", "WANDB_RUN_ID": f"{sweep.key}-{number}"}
    found = {"WANDB_RUN_GROUP": sweep.name, **os.environ, **ours}
    found.pop("WANDB_SERVICE", None)  # of this process: it ends with the table of an earlier batch of jobs
    return found


def _end_with(parent: int) -> None:
    """In a process that is about to become a job: ask Linux to kill it when the sweep ends, however that ends."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


def _copy(process: subprocess.Popen[bytes], log: Path, until: Sequence[float], keep: int = 2**16) -> str:
    """Copy what a job says to the terminal and to its log until it ends, or for too long after it was told to; the last
    of it is returned.
    """
    assert process.stdout is not None
    sys.stdout.flush()
    tail = b""
    with log.open("ab") as file:
        while True:
            if until and time.monotonic() > until[0]:
                process.kill()
            if not select.select([process.stdout], [], [], 1.0)[0]:
                if process.poll() is not None:  # what it started may outlive it
                    break
                continue
            chunk = os.read(process.stdout.fileno(), 2**16)
            if not chunk:
                break
            for target in (file, sys.stdout.buffer):
                with contextlib.suppress(*[OSError] if until else []):  # of a terminal that is gone
                    target.write(chunk)
                    target.flush()
            tail = (tail + chunk)[-keep:]
    return tail.decode(errors="replace")


def cause(output: str, code: int) -> str:
    """Why a job failed: its last error message, or the signal that ended it.

    Args:
        output: the end of what it said.
        code: its exit code.
    """
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in re.split(r"[\r\n]+", output) if line.strip()]
    found = [n for n, line in enumerate(lines) if re.match(r"error: |[\w.]*(Error|Exception|Interrupt)(: |$)", line)]
    place = found[-1] if found else len(lines) - 1
    if not lines:
        return "it said nothing"
    message = " ".join(lines[place : place + 2]) if lines[place].endswith(":") else lines[place]
    return message.removeprefix("error: ")
