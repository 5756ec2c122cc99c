"""What the main thread does in a step between kernels, and what loader workers do for it.

Three modules on 8 pipeline ranks x instances: the language model in 8 stages, both encoders data parallel on all ranks;
32 microbatches, 1F1B. One rank of that world runs here for real, all others are torch's fake process group, so the
time that is left once kernels are taken away is what Python does between them. Kernels are what blocks and the parts
beside them compute inside, autograd's backward, and the sums of gradients. Messages count, and so do the hooks of every
block, which seed its random numbers. Seconds are those of the thread, which other work on the machine lengthens less.

  schedule   the schedule of all ranks, in a loader worker
  compile    the program of this rank, in a loader worker
  main       of a step on the main thread, without kernels
  calls      calls of Python and C functions in ``main``: the same on every machine
  step       the whole of it, with the tiny modules of this benchmark

The second table is the language model alone, a stage in the middle of 8 whose one block is a small layer, beside
torch's own pipelining runtimes with the same layer and schedule: in turns, per action. Theirs have tensors of one
shape, no rows to route and no random numbers to set, and no adapter around the layer. The last line of the table is
what each further block of a stage adds to a forward.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import arguments, report, write_json
from benchmarks.peers import torch_pipeline
from benchmarks.pipelines import Setting, assembled
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.runtime import local_stage
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.compile import compile_step
from hetero_strategy.schedule.text import to_csv

STAGES, MICROBATCHES, WIDTH = 8, 32, 32


class Kernels:
    """Thread seconds spent in what is wrapped, nested calls counted once; and calls of all functions outside of it."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._inside = 0.0, 0, False

    def count(self, frame: Any, event: str, arg: Any) -> None:
        """What ``sys.setprofile`` takes."""
        self.calls += event in ("call", "c_call") and not self._inside

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if self._inside:
                return function(*given, **options)
            self._inside, began = True, time.thread_time()
            try:
                return function(*given, **options)
            finally:
                self.seconds, self._inside = self.seconds + time.thread_time() - began, False

        return call


def setting(instances: int, *, alone: bool = False) -> Setting:
    """Modules as small as they can be: what is measured does not depend on their size. The language model ``alone``,
    or with two encoders.
    """
    ranks = tuple(range(STAGES * instances))
    encoder = ModuleLayout(ranks, dp_replicate=len(ranks), dp_shard=1)
    llm = ModuleLayout(ranks, pp=STAGES, dp_replicate=instances, dp_shard=1)
    return Setting(
        "host_time", {"llm": llm} if alone else {"vision": encoder, "audio": encoder, "llm": llm},
        vision=(WIDTH, 1), audio=(WIDTH, 1), llm=(WIDTH, STAGES), samples=2 * MICROBATCHES * instances,
        microbatches=MICROBATCHES, cells=(1, 2), clip=(2, 6), text=(4, 9),
    )  # fmt: skip


@contextmanager
def one_rank(instances: int, rank: int, *, alone: bool = False) -> Iterator[tuple[Executor, Batch]]:
    """What runs a step on a rank, and its batch, in a world of which all other ranks are fake."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=STAGES * instances)
    new_group = dist.new_group
    try:
        with patch.object(dist, "new_group", lambda ranks=None, **_: new_group(ranks)):
            chosen = setting(instances, alone=alone)
            executor = assembled(chosen, rank).executor
        with patch.object(executor.agreement, "check"):  # the fake group sums nothing, so ranks seem to disagree
            yield executor, chosen.batch(0, rank)
    finally:
        dist.destroy_process_group()


def computing(stage: Adapter) -> list[nn.Module]:
    """Return the modules whose forward is kernels: blocks, and all outside of blocks that hold none of them."""
    blocks = list(stage.blocks().values())
    return [m for m in stage.modules() if m in blocks or not any(block in m.modules() for block in blocks)]


@contextmanager
def stepping(executor: Executor, batch: Batch, kernels: Kernels) -> Iterator[Callable[[], None]]:
    """Give what runs one step, of which ``kernels`` takes the seconds of kernels.

    What a block computes is its forward without the hooks around it.
    """
    with ExitStack() as patches:
        for stage in executor.stages.values():
            for module in computing(stage):
                patches.enter_context(patch.object(module, "forward", kernels.timed(module.forward)))
        for owner, name in (
            (torch.autograd, "backward"), (torch.autograd, "grad"), (local_stage, "settle"), (dist, "all_reduce"),
        ):  # fmt: skip
            patches.enter_context(patch.object(owner, name, kernels.timed(getattr(owner, name))))

        def step() -> None:
            executor.run(batch, train=True)

        yield step


def time_step(step: Callable[[], None], kernels: Kernels) -> tuple[float, float]:
    """Return the thread seconds of a step, and of it without kernels."""
    kernels.seconds, began = 0.0, time.thread_time()
    step()
    took = time.thread_time() - began
    return took, took - kernels.seconds


def calls_of(step: Callable[[], None], kernels: Kernels) -> int:
    """Calls of a step outside of kernels."""
    kernels.calls = 0
    sys.setprofile(kernels.count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return kernels.calls


def measure(instances: int, rank: int, rounds: int) -> dict[str, float]:
    """Medians in ms."""
    with one_rank(instances, rank) as (executor, batch):
        schedules, compiles = [], []
        for _ in range(rounds):
            batch.plan._places.clear()
            began = time.thread_time()
            schedule = executor.compiler.schedule(batch.plan, train=True)
            scheduled = time.thread_time()
            program = compile_step(batch.plan, schedule, rank)
            compiles.append(time.thread_time() - scheduled)
            schedules.append(scheduled - began)
        kernels = Kernels()
        with stepping(executor, batch.with_program(program), kernels) as step:
            took = []
            for _ in range(rounds + 2):
                took.append(time_step(step, kernels))
                for stage in executor.stages.values():
                    stage.zero_grad()
            calls = calls_of(step, kernels)
        steps, mains = zip(*took[2:], strict=True)
    columns = {"schedule": schedules, "compile": compiles, "main": mains, "step": steps}
    return {name: 1e3 * statistics.median(seconds) for name, seconds in columns.items()} | {
        "actions": len(program.actions),
        "transfers": len(program.transfers),
        "calls": calls,
    }


def beside_torch(rounds: int, rank: int = STAGES // 2) -> dict[str, dict[str, float]]:
    """Runtime -> microseconds without kernels, and calls, per action: the language model alone, in turns.

    ``a block``: microseconds and calls of one block in one forward beside what it computes, measured alone.
    """
    layer, kernels = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Kernels()
    with ExitStack() as stack:
        executor, batch = stack.enter_context(one_rank(1, rank, alone=True))
        (stage,) = executor.stages.values()
        (block,) = stage.blocks().values()
        stack.enter_context(patch.object(block, "forward", lambda hidden, *_, **__: layer(hidden)))
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "schedule.csv"
        path.write_text(to_csv(executor.compiler.schedule(batch.plan, train=True)))
        steps = {"ours": stack.enter_context(stepping(executor, executor.ready(batch, train=True), kernels))}
        for name in torch_pipeline.RUNTIMES:
            given = name, layer, WIDTH, rank, STAGES, MICROBATCHES, str(path)
            steps[name] = torch_pipeline.prepared(*given, kernels.timed)
        turns = [{name: time_step(step, kernels)[1] for name, step in steps.items()} for _ in range(rounds + 2)][2:]
        actions = 2 * MICROBATCHES  # of all: ours also starts the sum of gradients, which counts for nothing here
        found = {
            name: {
                "microseconds": 1e6 * statistics.median(turn[name] for turn in turns) / actions,
                "calls": calls_of(step, kernels) / actions,
            }
            for name, step in steps.items()
        }
        hidden, numbers = torch.zeros(8, WIDTH), stage.random_numbers
        assert numbers is not None
        numbers.start(batch.plan.metadata, 0, 0, 0, 0, hidden.device, rows_of=0)

        def blocks() -> None:
            for _ in range(100):
                block(hidden)

        took = [time_step(blocks, kernels)[1] for _ in range(rounds + 2)][2:]
        numbers.stop()
        alone = {"microseconds": 1e4 * statistics.median(took), "calls": calls_of(blocks, kernels) / 100}
        return found | {"a block": alone}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
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
        "one rank of a step of 3 modules, 8 stages x 32 microbatches, milliseconds of the thread",
        ("instances", "ranks", "actions", "transfers", "calls", *names),
        [
            (int(x["instances"]), int(STAGES * x["instances"]), int(x["actions"]), int(x["transfers"]), int(x["calls"]),
             *(f"{x[name]:.1f}" for name in names))
            for x in found
        ],
        ["schedule and compile run in loader workers, ahead of the step"],
    )  # fmt: skip
    peers = beside_torch(given.rounds)
    report(
        "host_time",
        "a stage of the language model alone beside torch's runtimes, between kernels, thread time",
        ("runtime", "us per action", "calls per action", "calls / ours"),
        [(name, x["microseconds"], x["calls"], x["calls"] / peers["ours"]["calls"]) for name, x in peers.items()],
        ["a block: what each further block of a stage adds to a forward of ours"],
    )
    figures = {"steps": found, "beside torch": peers}
    write_json(given.json, "host_time", "cpu", {"instances": given.instances, "rounds": given.rounds}, figures)
    return figures


if __name__ == "__main__":
    main()
