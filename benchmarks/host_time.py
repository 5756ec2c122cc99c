"""Time of the main thread between the kernels of a step, and of loader workers that prepare it.

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
torch's own pipelining runtimes with the same stage and schedule: in turns, per action. Theirs have tensors of one
shape, no rows to route and no random numbers to set. ``bound`` is a loop of what no runtime can leave out, in torch's
public calls: each action receives a message, calls the stage or autograd, and sends a message. The last line of the
table is what each further block of a stage adds to a forward.
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
from typing_extensions import override

from benchmarks.common import Options, option, program, report
from benchmarks.peers import torch_pipeline
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.runtime import actions
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import Action
from hetero_strategy.schedule.compile import compile_step
from hetero_strategy.testing import Setting, one_rank

STAGES, MICROBATCHES, WIDTH = 8, 32, 32


class Kernels:
    """Thread seconds spent in what is wrapped, nested calls counted once; and calls of all functions outside of it."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._inside = 0.0, 0, False

    def count(self, frame: Any, event: str, arg: Any) -> None:
        """Count a call, as ``sys.setprofile`` takes it."""
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
            (torch.autograd, "backward"), (torch.autograd, "grad"), (actions, "settle"), (dist, "all_reduce"),
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
    with one_rank(setting(instances), rank) as (executor, batch):
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


class Chained(nn.Module):
    """A stage as torch's pipelining takes it: from rows to rows."""

    def __init__(self, stage: Adapter, inputs: Any) -> None:
        super().__init__()
        self.stage, self.inputs = stage, inputs

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.stage(self.inputs, {}, rows)
        return made


def least(module: nn.Module, actions: Sequence[Action], rank: int) -> Callable[[], None]:
    """Return what runs the forwards and backwards of a step with nothing around them but their messages."""

    def step() -> None:
        live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        sent: list[Any] = []
        for action in actions:
            if action.kind == "F":
                came = torch.empty(8, WIDTH)
                dist.irecv(came, rank - 1).wait()  # type: ignore[union-attr]
                came.requires_grad_()
                live[action.microbatch] = came, module(came)
                sent.append(dist.isend(live[action.microbatch][1].detach(), rank + 1))
            elif action.kind == "B":
                gradient = torch.empty(8, WIDTH)
                dist.irecv(gradient, rank + 1).wait()  # type: ignore[union-attr]
                leaf, made = live.pop(action.microbatch)
                torch.autograd.backward([made], [gradient])
                assert leaf.grad is not None
                sent.append(dist.isend(leaf.grad, rank - 1))
        for work in sent:
            work.wait()

    return step


def beside_torch(rounds: int, rank: int = STAGES // 2) -> dict[str, dict[str, float]]:
    """Runtime -> microseconds without kernels, and calls, per action: the language model alone, in turns.

    ``bound``: see :func:`least`. ``a block``: microseconds and calls of one block in one forward beside what it
    computes, measured alone.
    """
    layer, kernels = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Kernels()
    with ExitStack() as stack:
        executor, batch = stack.enter_context(one_rank(setting(1, alone=True), rank))
        (stage,) = executor.stages.values()
        (block,) = stage.blocks().values()
        stack.enter_context(patch.object(block, "forward", lambda hidden, *_, **__: layer(hidden)))
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "schedule.csv"
        path.write_text(executor.compiler.schedule(batch.plan, train=True).to_csv())
        ready = executor.ready(batch, train=True)
        assert ready.program is not None
        steps = {"ours": stack.enter_context(stepping(executor, ready, kernels))}
        module = Chained(stage, batch.inputs["llm"][0])
        steps["bound"] = least(module, [action.action for action in ready.program.actions], rank)
        for name in torch_pipeline.RUNTIMES:
            steps[name] = torch_pipeline.prepared(name, module, WIDTH, rank, STAGES, MICROBATCHES, str(path))
        turns = [{name: time_step(step, kernels)[1] for name, step in steps.items()} for _ in range(rounds + 2)][2:]
        actions = 2 * MICROBATCHES  # of all: ours also starts the sum of gradients, which counts for nothing here
        found = {
            name: {
                "microseconds": 1e6 * statistics.median(turn[name] for turn in turns) / actions,
                "calls": calls_of(step, kernels) / actions,
            }
            for name, step in steps.items()
        }
        hidden = torch.zeros(8, WIDTH)

        def blocks() -> None:
            for _ in range(100):
                block(hidden)

        took = [time_step(blocks, kernels)[1] for _ in range(rounds + 2)][2:]
        alone = {"microseconds": 1e4 * statistics.median(took), "calls": calls_of(blocks, kernels) / 100}
        return found | {"a block": alone}


@program(
    option("--instances", type=int, nargs="+", default=[2, 8, 64], help="of the LLM (default 2 8 64)"),
    option("--rounds", type=int, default=7, help="of which the median is taken (default 7)"),
)
def main(given: Options) -> Any:
    """Run, print, write."""
    found = [{"instances": n, **measure(n, 0, given.rounds)} for n in given.instances]
    names = ("schedule", "compile", "main", "step")
    report(
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
    bound = peers["bound"]["microseconds"]
    report(
        "a stage of the language model alone beside torch's runtimes, between kernels, thread time",
        ("runtime", "us per action", "us / bound", "calls per action"),
        [(n, x["microseconds"], x["microseconds"] / bound, x["calls"]) for n, x in peers.items()],
        ["a block: what each further block of a stage adds to a forward of ours"],
    )
    return {"steps": found, "beside torch": peers}


if __name__ == "__main__":
    main()
