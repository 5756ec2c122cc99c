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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common import arguments, report, write_json
from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.monitor.balance import BalanceSummary, Spread
from hetero_strategy.monitor.balance_draw import draw
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.orchestrator import Near, ResolvedBalance, plan_step
from hetero_strategy.plan.step_plan import ModuleLoad, StepMetadata
from hetero_strategy.schedule.action import StageGraph, StageId
from hetero_strategy.schedule.compile import StepCompiler
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import StageCost, stage_graph
from recipes.workloads import WORKLOADS

PAPER = {64: 16.66, 128: 18.49, 256: 21.32, 512: 24.64, 1024: 31.37, 2560: 53.88}
"""Instances -> ms (OrchMLLM, table 2)."""
MODULES = ("vision", "audio", "llm")
COSTS = {
    "vision": Cost(linear=12 * 2048.0, quadratic=2.0),
    "audio": Cost(linear=12 * 1280.0, quadratic=2.0, padding="full"),
    "llm": Cost(linear=12 * 3584.0, quadratic=2.0),
}
"""FLOPs of a layer's forward over its width, of OrchMLLM's 10B model: 24 h^2 per row and 4 h per pair of rows."""
PER_NODE = 8


def balancing(instances: int, rearrange: Literal["home", "permute", "none"], islands: int = 1) -> ResolvedBalance:
    """Every module on every instance."""
    nodes = np.arange(instances) // PER_NODE
    own = np.repeat(np.arange(islands), instances // islands)
    near = {} if rearrange == "none" else {name: Near(nodes, nodes, "llm") for name in ("vision", "audio")}
    return ResolvedBalance(
        policy=dict.fromkeys(MODULES, "auto"),
        costs=COSTS,
        near=near,
        rearrange="home" if rearrange == "none" else rearrange,
        islands={} if islands == 1 else dict.fromkeys(MODULES, own),
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
    rearrange: Literal["home", "permute", "none"],
    microbatches: int,
    rounds: int,
    islands: int = 1,
) -> dict[str, Any]:
    """Medians in ms, of processor time but for ``wall_ms``, and how balanced it is."""
    chosen = balancing(instances, rearrange, islands)
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
        "islands": islands,
        "microbatches": microbatches,
        "plan_ms": statistics.median(plans),
        "compile_ms": statistics.median(compiles),
        "total_ms": statistics.median(a + b for a, b in zip(plans, compiles, strict=True)),
        "wall_ms": statistics.median(walls),
        "before": {m: ModuleLoad.imbalance(x.before) for m, x in plan.loads.items()},
        "after": {m: ModuleLoad.imbalance(x.after) for m, x in plan.loads.items()},
    }


def picture(file: str, samples: int, instances: int = 32) -> None:
    """Loads of one step's instances."""
    plan = plan_step(
        WORKLOADS["orchmllm_10b"](instances * samples, 0).metadata(),
        dict.fromkeys(MODULES, instances),
        ("llm",),
        balancing=balancing(instances, "home"),
    )
    spreads = {module: Spread.of(load) for module, load in plan.loads.items()}
    draw(Path(file), BalanceSummary(1, spreads, None, 0.0, None, None, None, 1.0, 0, 0))


def row(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """As the table shows it."""
    return (
        f"{found['instances']} x {found['samples'] // found['instances']}",
        found["rearrange"],
        found["islands"],
        found["microbatches"],
        *(f"{found[key]:.1f}" for key in ("plan_ms", "compile_ms", "total_ms", "wall_ms")),
        f"{1e3 * found['total_ms'] / found['samples']:.2f}",
        PAPER.get(found["instances"]),
        *(f"{found['before'][m]:.2f} {found['after'][m]:.4f}" for m in MODULES),
    )


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print, write.

    Args:
        argv: the command line.

    Returns:
        The figures.
    """
    parser = arguments(__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[64, 512, 2560], help="default 64 512 2560")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8], help="default 1 2 4 8")
    parser.add_argument("--islands", type=int, nargs="*", default=[], help="numbers of islands, besides one for all")
    parser.add_argument("--samples", type=int, default=60, help="per instance (default 60)")
    parser.add_argument("--rounds", type=int, default=7, help="of which the median is taken (default 7)")
    parser.add_argument("--growth", type=int, default=100, help="of the samples in the last rows (default 100)")
    parser.add_argument(
        "--picture", metavar="FILE", help="also draw the loads of 32 instances, as sampled and as planned"
    )
    given = parser.parse_args(argv)
    make = WORKLOADS["orchmllm_10b"]
    found = []
    for instances in given.instances:
        metadata = make(instances * given.samples, 0).metadata()
        for rearrange in ("none", "permute"):
            found.append(measure(metadata, instances, rearrange, 1, given.rounds))  # type: ignore[arg-type]
        for microbatches in given.microbatches:
            counts = [1, *(n for n in given.islands if instances % n == 0)]
            found += [measure(metadata, instances, "home", microbatches, given.rounds, n) for n in counts]
    for times in sorted({1, max(1, given.growth // 10), given.growth}):
        metadata = make(8 * given.samples * times, 0).metadata()
        found.append(measure(metadata, 8, "none", 1, given.rounds))
    report(
        "step_plan",
        "a whole step plan, one thread, milliseconds of processor time",
        ("instances x samples", "near", "islands", "microbatches", "plan", "compile", "total", "wall", "us/sample",
         "OrchMLLM",
         *(f"{m} max/mean" for m in MODULES)),
        [row(x) for x in found],
        ["max/mean: as sampled, then as planned"],
    )  # fmt: skip
    if given.picture:
        picture(given.picture, given.samples)
    write_json(given.json, "step_plan", "cpu", {k: v for k, v in vars(given).items() if k != "json"}, found)
    return found


if __name__ == "__main__":
    main()
