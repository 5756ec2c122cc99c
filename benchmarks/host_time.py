"""What the main thread does in a step besides kernels, and what loader workers do for it.

Three modules on 8 pipeline ranks x instances: the language model in 8 stages, both encoders data parallel on all ranks;
32 microbatches, 1F1B. One rank of that world runs here for real, all others are torch's fake process group, so the
time that is left once kernels and collectives are taken away is what Python does between them.

  schedule   the schedule of all ranks, in a loader worker
  compile    the program of this rank, in a loader worker
  main       of a step on the main thread, without kernels and collectives
  calls      calls of Python and C functions in ``main``: the same on every machine
  step       the whole of it, with the tiny modules of this benchmark
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import arguments, report, write_json
from benchmarks.pipelines import Setting, assembled
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.loading.batch import Batch
from hetero_strategy.runtime import backward
from hetero_strategy.runtime import executor as running
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.compile import compile_step

STAGES, MICROBATCHES = 8, 32


class Kernels:
    """Seconds spent in what is wrapped, nested calls counted once; and calls of all functions outside of it."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._inside = 0.0, 0, False

    def count(self, frame: Any, event: str, arg: Any) -> None:
        """What ``sys.setprofile`` takes."""
        self.calls += event in ("call", "c_call") and not self._inside

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if self._inside:
                return function(*given, **options)
            self._inside, began = True, time.perf_counter()
            try:
                return function(*given, **options)
            finally:
                self.seconds, self._inside = self.seconds + time.perf_counter() - began, False

        return call


def setting(instances: int) -> Setting:
    """Modules as small as they can be: what is measured does not depend on their size."""
    ranks = tuple(range(STAGES * instances))
    encoder = ModuleLayout(ranks, dp_replicate=len(ranks), dp_shard=1)
    llm = ModuleLayout(ranks, pp=STAGES, dp_replicate=instances, dp_shard=1)
    return Setting(
        "host_time", {"vision": encoder, "audio": encoder, "llm": llm}, vision=(32, 1), audio=(32, 1),
        llm=(32, STAGES), samples=2 * MICROBATCHES * instances, microbatches=MICROBATCHES, cells=(1, 2), clip=(2, 6),
        text=(4, 9),
    )  # fmt: skip


@contextmanager
def one_rank(instances: int, rank: int) -> Iterator[tuple[Executor, Batch]]:
    """What runs a step on a rank, and its batch, in a world of which all other ranks are fake."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=STAGES * instances)
    new_group = dist.new_group
    try:
        with patch.object(dist, "new_group", lambda ranks=None, **_: new_group(ranks)):
            chosen = setting(instances)
            executor = assembled(chosen, rank).executor
        with patch.object(executor.agreement, "check"):  # the fake group sums nothing, so ranks seem to disagree
            yield executor, chosen.batch(0, rank)
    finally:
        dist.destroy_process_group()


def measure(instances: int, rank: int, rounds: int) -> dict[str, float]:
    """Medians in ms."""
    with one_rank(instances, rank) as (executor, batch):
        schedules, compiles, mains, steps = [], [], [], []
        for _ in range(rounds):
            batch.plan._places.clear()
            began = time.perf_counter()
            schedule = executor.compiler.schedule(batch.plan, train=True)
            scheduled = time.perf_counter()
            program = compile_step(batch.plan, schedule, rank)
            compiles.append(time.perf_counter() - scheduled)
            schedules.append(scheduled - began)
        batch, kernels = batch.with_program(program), Kernels()
        with ExitStack() as patches:
            for stage in executor.stages.values():
                patches.enter_context(patch.object(stage, "forward", kernels.timed(stage.forward)))
            for owner, name in (
                (backward, "whole"), (backward, "inputs_first"), (running, "settle"), (dist, "all_reduce"),
                (dist, "batch_isend_irecv"),
            ):  # fmt: skip
                patches.enter_context(patch.object(owner, name, kernels.timed(getattr(owner, name))))
            for number in range(rounds + 2):
                kernels.seconds, began = 0.0, time.perf_counter()
                executor.run(batch, train=True)
                if number >= 2:
                    steps.append(time.perf_counter() - began)
                    mains.append(steps[-1] - kernels.seconds)
                for stage in executor.stages.values():
                    stage.zero_grad()
            sys.setprofile(kernels.count)
            try:
                executor.run(batch, train=True)
            finally:
                sys.setprofile(None)
    columns = {"schedule": schedules, "compile": compiles, "main": mains, "step": steps}
    return {name: 1e3 * statistics.median(seconds) for name, seconds in columns.items()} | {
        "actions": len(program.actions),
        "transfers": len(program.transfers),
        "calls": kernels.calls,
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Run, print, write.

    Args:
        argv: the command line.

    Returns:
        The figures.
    """
    parser = arguments(__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[2, 8, 64], help="of the LLM (default 2 8 64)")
    parser.add_argument("--rounds", type=int, default=7, help="of which the median is taken (default 7)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = [{"instances": n, **measure(n, 0, given.rounds)} for n in given.instances]
    names = ("schedule", "compile", "main", "step")
    report(
        "host_time",
        "one rank of a step of 3 modules, 8 stages x 32 microbatches, milliseconds",
        ("instances", "ranks", "actions", "transfers", "calls", *names),
        [
            (int(x["instances"]), int(STAGES * x["instances"]), int(x["actions"]), int(x["transfers"]), int(x["calls"]),
             *(f"{x[name]:.1f}" for name in names))
            for x in found
        ],
        ["schedule and compile run in loader workers, ahead of the step"],
    )  # fmt: skip
    write_json(given.json, "host_time", "cpu", {"instances": given.instances, "rounds": given.rounds}, found)
    return found


if __name__ == "__main__":
    main()
