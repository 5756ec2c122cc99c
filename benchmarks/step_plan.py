"""How long preparing a step takes: balance three modules, keep items near their samples, pack, compile a rank's part.

One thread, OrchMLLM's 10B workload: vision and audio encoders and the LLM on every instance, 60 samples per instance, 8
instances per node. Beside it OrchMLLM's overhead per step in its table 2 (64 to 2560 H100; its solver is C++, and the
figure holds what it could not hide; the paper names no microbatches). Parts are timed alone:

  plan      all of plan_step: every module balanced on its own cost, items near samples, loads before and after; beyond
            1 microbatch also packing: samples into microbatches, and every module balanced in each of them
  compile   the schedule of all ranks, and the program of one: its actions, and which rows travel between which ranks
  total     both; here nothing of it is hidden, in training all of it runs in loader workers
  wall      total by the clock; the others are processor time of the thread, which other work disturbs less

The last rows have up to 100 times as many samples as the first of them, at 8 instances, for the cost per sample.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from benchmarks.common import Options, option, program, report
from benchmarks.workloads import WORKLOADS
from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.plan_step import Near, ResolvedBalance, plan_step
from hetero_strategy.plan.step_plan import ModuleLoad, StepMetadata
from hetero_strategy.schedule.action import StageGraph, StageId
from hetero_strategy.schedule.compile import StepCompiler
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import StageCost, stage_graph

PAPER = {64: 16.66, 128: 18.49, 256: 21.32, 512: 24.64, 1024: 31.37, 2560: 53.88}
"""Instances -> ms (OrchMLLM, table 2)."""
MODULES = ("vision", "audio", "llm")
COSTS = {
    "vision": Cost(linear=12 * 2048.0, quadratic=2.0),
    "audio": Cost(linear=12 * 1280.0, quadratic=2.0),
    "llm": Cost(linear=12 * 3584.0, quadratic=2.0),
}
"""FLOPs of a layer's forward over its width, of OrchMLLM's 10B model: 24 h^2 per row and 4 h per pair of rows."""
PER_NODE = 8


def balancing(instances: int, rearrange: Literal["home", "none"]) -> ResolvedBalance:
    """Every module on every instance."""
    nodes = np.arange(instances) // PER_NODE
    near = {} if rearrange == "none" else {name: Near(nodes, nodes, "llm") for name in ("vision", "audio")}
    return ResolvedBalance(
        policy=dict.fromkeys(MODULES, "auto"),
        costs=COSTS,
        near=near,
    )


def placed(instances: int) -> tuple[StageGraph, dict[StageId, StageCost]]:
    """All three modules on every rank, each rank an instance of each, and what they cost."""
    layouts = place({name: ModuleLayout(tuple(range(instances))) for name in MODULES}, instances).layouts
    stages = {StageId(name, 0): StageCost(COSTS[name].linear, COSTS[name].quadratic) for name in MODULES}
    edges = [("vision", "llm"), ("audio", "llm")]
    return stage_graph(MODULES, edges, layouts, dict.fromkeys(stages, True)), stages


def measure(
    metadata: StepMetadata,
    instances: int,
    rearrange: Literal["home", "none"],
    microbatches: int,
    rounds: int,
) -> dict[str, Any]:
    """Medians in ms, of processor time but for ``wall_ms``, and how balanced it is."""
    chosen = balancing(instances, rearrange)
    count = dict.fromkeys(MODULES, instances)
    graph, costs = placed(instances)
    compiler = StepCompiler(graph, costs, ScheduleConfig("1f1b"))
    plans, compiles, walls = [], [], []
    for _ in range(rounds):
        wall, began = time.perf_counter(), time.thread_time()
        plan = plan_step(metadata, count, ("llm",), microbatches=microbatches, balancing=chosen)
        planned = time.thread_time()
        compiler.program(plan, rank=instances // 3, train=True)
        plans.append(1e3 * (planned - began))
        compiles.append(1e3 * (time.thread_time() - planned))
        walls.append(1e3 * (time.perf_counter() - wall))
    return {
        "instances": instances,
        "samples": len(metadata.samples),
        "rearrange": rearrange,
        "microbatches": microbatches,
        "plan_ms": statistics.median(plans),
        "compile_ms": statistics.median(compiles),
        "total_ms": statistics.median(a + b for a, b in zip(plans, compiles, strict=True)),
        "wall_ms": statistics.median(walls),
        "before": {m: ModuleLoad.imbalance(x.before) for m, x in plan.loads.items()},
        "after": {m: ModuleLoad.imbalance(x.after) for m, x in plan.loads.items()},
    }


def row(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a row of the table."""
    return (
        f"{found['instances']} x {found['samples'] // found['instances']}",
        found["rearrange"],
        found["microbatches"],
        *(f"{found[key]:.1f}" for key in ("plan_ms", "compile_ms", "total_ms", "wall_ms")),
        f"{1e3 * found['total_ms'] / found['samples']:.2f}",
        PAPER.get(found["instances"]),
        *(f"{found['before'][m]:.2f} {found['after'][m]:.4f}" for m in MODULES),
    )


@program(
    option("--instances", type=int, nargs="+", default=[64, 512, 2560], help="default 64 512 2560"),
    option("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8], help="default 1 2 4 8"),
    option("--samples", type=int, default=60, help="per instance (default 60)"),
    option("--rounds", type=int, default=7, help="of which the median is taken (default 7)"),
    option("--growth", type=int, default=100, help="of the samples in the last rows (default 100)"),
)
def main(given: Options) -> Any:
    """Run, print, write."""
    make = WORKLOADS["orchmllm_10b"]
    found = []
    for instances in given.instances:
        metadata = make(instances * given.samples, 0).metadata()
        found.append(measure(metadata, instances, "none", 1, given.rounds))
        for microbatches in given.microbatches:
            found.append(measure(metadata, instances, "home", microbatches, given.rounds))
    for times in sorted({1, max(1, given.growth // 10), given.growth}):
        metadata = make(8 * given.samples * times, 0).metadata()
        found.append(measure(metadata, 8, "none", 1, given.rounds))
    report(
        "a whole step plan, one thread, milliseconds of processor time",
        ("instances x samples", "near", "microbatches", "plan", "compile", "total", "wall", "us/sample", "OrchMLLM",
         *(f"{m} max/mean" for m in MODULES)),
        [row(x) for x in found],
        ["max/mean: as sampled, then as planned"],
    )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
