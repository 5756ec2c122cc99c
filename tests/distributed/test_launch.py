"""Real scripts in real processes: every way to start them, and every way in which they may end."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.distributed import _destroy_dist_connection

from hetero_strategy.checkpoint import describe
from hetero_strategy.errors import ConfigError
from hetero_strategy.runtime.agreement import Stop
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.strategy.ending import end_together
from hetero_strategy.strategy.launch import bound_device, prepare_device
from hetero_strategy.testing import Pool
from tests.distributed.scenario import Job, train
from tests.distributed.scripts.train import STEPS

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
SECONDS = 150
"""From a rank's end to the job's end, however busy the machine is: without help the others would wait half an hour."""


@dataclass
class Run:
    process: subprocess.Popen[str] | BaseProcess
    folder: Path
    said: Connection | None = None
    """What a forked script and all that it started print."""

    @property
    def code(self) -> int | None:
        """As the process ended; None while it runs."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def pids(self) -> list[int]:
        """Of all ranks that began a step."""
        return [int(p.read_text() or 0) for p in self.folder.glob("pid*")]

    def end(self, timeout: float = 270) -> str:
        """Of the process and of all that could print; what was printed."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.communicate(timeout=timeout)[0]
        assert self.said is not None
        end, text = time.monotonic() + timeout, b""
        while self.said.poll(max(end - time.monotonic(), 0)) and (more := os.read(self.said.fileno(), 65536)):
            text += more
        self.process.join(max(end - time.monotonic(), 0))
        assert self.code is not None, f"did not end within {timeout} s\n{text.decode()}"
        return text.decode()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def survivors(run: Run, seconds: float = 30) -> list[int]:
    """Ranks still there some time after the end."""
    end = time.monotonic() + seconds
    while (left := [p for p in run.pids() if alive(p)]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


class Starter:
    def __init__(self, scenario_data: Path, folder: Path) -> None:
        self.scenario_data, self.folder, self.runs = scenario_data, folder, list[Run]()

    def __call__(self, *options: str, torchrun: int = 0) -> Run:
        """In interpreters of its own."""
        folder = self.made()
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
        environment = {k: v for k, v in os.environ.items() if k not in ALONE}
        process = subprocess.Popen(
            [sys.executable, *launcher, *self.command(folder, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | OURS,
        )
        self.runs.append(Run(process, folder))
        return self.runs[-1]

    def warm(self, *options: str) -> Run:
        """The same script in a process that is forked from one with its imports, which take longer than the rest; what
        it starts by popen has interpreters of its own all the same. Such a process ends without what a script has asked
        ``atexit`` for.
        """
        folder = self.made()
        context = multiprocessing.get_context("forkserver")
        said, output = context.Pipe(duplex=False)
        process = context.Process(target=_script, args=(self.command(folder, options), output))
        process.start()
        output.close()
        self.runs.append(Run(process, folder, said))
        return self.runs[-1]

    def made(self) -> Path:
        folder = self.folder / str(len(self.runs))
        folder.mkdir()
        return folder

    def command(self, folder: Path, options: tuple[str, ...]) -> list[str]:
        return [str(SCRIPT), str(folder), str(self.scenario_data), *options]


ALONE = ("LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE")
"""Variables that make a process one of several."""
OURS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _script(command: list[str], output: Connection) -> None:
    """What ``python SCRIPT ...`` does, in this process."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()  # and so the end of those that print is the end of what is read
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (open until the process ends)
    for name in ALONE:
        os.environ.pop(name, None)
    os.environ.update(OURS)
    multiprocessing.set_start_method("fork", force=True)  # as in a script
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


@pytest.fixture
def start(pool: Pool, scenario_data: Path, tmp_path: Path) -> Iterator[Starter]:
    """Of a session with a ``pool``, whose process :meth:`Starter.warm` forks."""
    starter = Starter(scenario_data, tmp_path)
    yield starter
    for run in starter.runs:
        for pid in run.pids():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.kill()
        run.process.wait() if isinstance(run.process, subprocess.Popen) else run.process.join()


def check_start(runs: dict[str, Run], expected: float) -> None:
    for way, run in runs.items():
        text, times = run.end(), 2 if "again" in way else 1
        assert run.code == 0, f"{way}\n{text}"
        losses = re.findall(r"loss=([\d.]+)", text)
        assert len(losses) == times, f"{way}\n{text}"
        assert [float(x) for x in losses] == pytest.approx([expected] * times, rel=1e-5), way
        refused = "an earlier Trainer made this process one of 2, but Trainer(devices x num_nodes) says 3"
        assert text.count(refused) == (2 if "again" in way else 0), f"{way}\n{text}"  # by both ranks
        assert survivors(run) == []
        assert (run.folder / "last.ckpt").exists(), way


@pytest.fixture(scope="module")
def alone(scenario_data: Path) -> float:
    """Last loss of one process."""
    return train(Job(str(scenario_data), steps=STEPS, batch=8, capture=False)).losses[-1]


@pytest.mark.full
def test_another_run_of_a_script_gives_the_same_loss(start: Starter, alone: float) -> None:
    """So do popen and torchrun: runs of tests/recipes that go on are compared digit by digit."""
    check_start({"popen, again": start.warm("--again")}, alone)


def check_message(way: str, run: Run, text: str, seconds: float) -> None:
    """Of a job in which the rank that ends ``way`` raised; the job has ended."""
    assert run.code != 0, way
    # Its words are those of a lost connection, and still they are the cause and not the other rank's.
    cause, other = int(way[-1]), 1 - int(way[-1])
    error = f"ConnectionError: rank {cause} has had enough: connection refused, broken pipe\n"
    assert re.search(rf"{error}(\[rank{cause}\]: )?rank {cause} ended the run with this", text), f"{way}\n{text}"
    assert f"rank {other} lost another rank, whose own message tells why (here: " in text, f"{way}\n{text}"
    for what in ("told", "finally"):
        assert sorted(p.name for p in run.folder.glob(f"{what}*")) == [f"{what}0", f"{what}1"], f"{way}\n{text}"
    assert seconds < SECONDS, f"{way} took {seconds:.0f} s to end\n{text}"
    assert survivors(run) == [], way
    assert not (run.folder / "last.ckpt").exists(), way


@pytest.mark.full
def test_a_rank_that_raises_ends_the_job(start: Starter) -> None:
    (raised,) = watch_all({"popen 0": start.warm("--fail", "0", "2")})
    check_message(*raised)


@pytest.mark.full
def test_a_rank_that_is_killed_ends_the_job(start: Starter) -> None:
    ((_, killed, text, seconds),) = watch_all({"killed": start.warm("--kill", "1", "2")})
    assert killed.code != 0
    assert seconds < SECONDS, text
    assert survivors(killed) == []


@pytest.mark.full
def test_a_rank_that_raises_ends_the_job_however_it_was_started(start: Starter) -> None:
    (raised,) = watch_all({"torchrun 1": start("--fail", "1", "2", torchrun=2)})
    check_message(*raised)


@pytest.mark.full
def test_a_rank_that_hangs_ends_the_job_soon(start: Starter) -> None:
    """After the first step collectives have five seconds, not half an hour."""
    run = start.warm("--sleep", "1", "2", "--step-timeout", str(5 / 60))
    wait_for(run.folder / "asleep")
    began = time.monotonic()
    text = run.end(2 * SECONDS)
    assert run.code != 0, text
    assert time.monotonic() - began < SECONDS, text
    waited = r"rank 0 waited for another rank until the timeout, in forward \(multimodal.py\), called by training_step "
    assert "Timed out waiting 5000ms" in text and re.search(waited, text), text
    assert "ranks [1] have not said where they are: they compute, sleep" in text, text
    assert survivors(run) == []


@pytest.mark.full
def test_a_signal_to_end_lets_ranks_save(start: Starter) -> None:
    """Whichever rank gets it. A script ends with code 0."""
    runs = {f"popen {rank}": start.warm("--tell", "SIGTERM", str(rank), "1") for rank in (0, 1)}
    for way, run, text, seconds in watch_all(runs):
        assert run.code == 0 and seconds < SECONDS, f"{way}\n{text}"
        assert describe(run.folder / "last.ckpt").step in (2, 3), way  # another process is told within a step or two
        assert len(list(run.folder.glob("told*"))) == 2 and "loss=" not in text, f"{way}\n{text}"
        assert survivors(run) == [], way


@pytest.mark.full
def test_ctrl_c_of_the_process_that_started_the_ranks_ends_them(start: Starter) -> None:
    """Schedulers and editors signal this process alone, and Lightning kills the other ranks with it."""
    run = start.warm("--tell", "SIGINT", "0", "1", "--sleep", "1", "2")
    text, seconds = watched(run)
    assert run.code == 1 and seconds < SECONDS, text
    assert (run.folder / "told0").exists() and (run.folder / "finally0").exists(), text
    assert not (run.folder / "last.ckpt").exists()
    assert survivors(run) == []


@pytest.mark.full
@pytest.mark.parametrize("waits", [0, 1])
def test_ctrl_c_ends_a_job_in_whose_teardown_a_rank_waits_for_ever(start: Starter, waits: int) -> None:
    """As a device does that waits for a message which no rank will send any more."""
    run = start.warm("--sleep", "all", "2", "--wait", str(waits))
    wait_for(run.folder / "asleep")
    time.sleep(1)
    began = time.monotonic()
    for pid in run.pids():  # as a terminal does
        os.kill(pid, signal.SIGINT)
    text = run.end()
    assert run.code == 1, text
    assert time.monotonic() - began < 60, text
    assert ("this process hangs since; ending" in text) == (waits == 0), text
    assert survivors(run) == []


@pytest.mark.full
def test_a_failure_after_fit_ends_the_job(start: Starter) -> None:
    late = start("--late")
    text = late.end()
    assert late.code != 0, "a failure after fit() went unnoticed"
    assert "LookupError: rank 1 failed late" in text


@pytest.mark.full
def test_nothing_is_left_of_a_killed_job(start: Starter) -> None:
    run = start.warm("--sleep", "1", "2")
    wait_for(run.folder / "asleep")
    pids = run.pids()
    assert len(pids) == 2 and all(alive(p) for p in pids)
    run.process.kill()
    assert survivors(run) == [], "ranks outlived the process that started them"


def watched(run: Run) -> tuple[str, float]:
    """What the job printed, and seconds from a rank's fall to the end of all that could print."""
    text = run.end(2 * SECONDS)
    ended = time.time()
    fell = run.folder / "fell"
    assert fell.exists(), text
    return text, ended - fell.stat().st_mtime


def watch_all(runs: dict[str, Run]) -> Iterator[tuple[str, Run, str, float]]:
    with ThreadPoolExecutor() as threads:
        for (way, run), (text, seconds) in zip(runs.items(), threads.map(watched, runs.values()), strict=True):
            yield way, run, text, seconds


def wait_for(path: Path, seconds: float = 360) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.05)


def test_a_notebook_trains_on_one_device() -> None:
    """There Lightning asks the launcher; a script would be run again for other devices, and a notebook is none."""
    for devices in (1, 2):
        strategy = HeteroStrategy({"llm": {"ranks": devices}})
        L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False)
        assert strategy.launcher is not None
        assert strategy.launcher.is_interactive_compatible == (devices == 1)


def test_nodes_on_which_nobody_starts_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be waited for until the time limit."""
    for name in ("MASTER_ADDR", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    layouts = {"llm": {"ranks": 4, "dp_shard": 4}}
    options = {"accelerator": "cpu", "devices": 2, "num_nodes": 2, "logger": False, "enable_checkpointing": False}
    with pytest.raises(ConfigError, match=r"Trainer\(num_nodes=2\) starts processes on this node only.*NODE_RANK"):
        L.Trainer(strategy=HeteroStrategy(layouts), **options)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")  # without its number every node would be the first
    with pytest.raises(ConfigError, match="NODE_RANK"):
        L.Trainer(strategy=HeteroStrategy(layouts), **options)
    monkeypatch.setenv("NODE_RANK", "0")
    assert L.Trainer(strategy=HeteroStrategy(layouts), **options).world_size == 4


def test_memory_grows_in_segments_unless_the_person_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        prepare_device(torch.device("cpu"))
        assert {n: v for n, v in os.environ.items() if n.endswith("ALLOC_CONF")} == said
        prepare_device(torch.device("cuda", 0))
        wanted = said or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert {n: v for n, v in os.environ.items() if n.endswith("ALLOC_CONF")} == wanted


@pytest.mark.parametrize(
    ("name", "wanted", "own"),
    [
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "0"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "8"),
    ],
)
def test_what_nccl_and_cuda_start_with_unless_the_person_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, wanted: str, own: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    prepare_device(torch.device("cpu"))
    assert name not in os.environ
    prepare_device(torch.device("cuda", 0))
    assert os.environ[name] == wanted
    monkeypatch.setenv(name, own)
    prepare_device(torch.device("cuda", 0))
    assert os.environ[name] == own


def test_a_setting_that_keeps_streams_from_running_beside_each_other_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(queues, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_device(torch.device("cuda", 0))
    monkeypatch.setenv(queues, "1")  # as Megatron asks for
    with pytest.warns(UserWarning, match=f"{queues}=1 is set, so messages, collectives, .* set it to 8 or more"):
        prepare_device(torch.device("cuda", 0))


def test_a_rank_that_raises_does_not_wait_for_the_others_when_it_exits() -> None:
    """Lightning's handler, which destroys NCCL's groups, would; it also puts back the system's Ctrl-C."""
    child = os.fork()
    if not child:
        atexit._clear()
        atexit.register(_destroy_dist_connection)
        end_together(ValueError("broken"), 0, None, Stop())
        atexit._run_exitfuncs()
        os._exit(int(signal.getsignal(signal.SIGINT) is signal.SIG_DFL))
    assert os.waitpid(child, 0)[1] == 0


def test_nccl_is_told_of_the_device() -> None:
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert bound_device(gpu, "nccl") == bound_device(gpu, "cpu:gloo,cuda:nccl") == gpu
    assert bound_device(gpu, "gloo") is None and bound_device(cpu, "gloo") is None
