"""How much time do other orders of microbatches save, and what does it cost to find them?

Microbatches of published workloads (benchmarks/workloads) go through encoder -> LLM -> generator on a pipeline of p
ranks; the first and the last module have a rank, or two of 16. The step's schedule (1F1B, or interleaved with two
virtual stages per rank of the LLM) is made for every order and replayed, transfers free. Every rank has the same work
in the mean, as a planner would divide it; what remains is that microbatches differ.

  random     mean, and best of several orders
  disttrain  DistTrain's algorithm 3 (arXiv:2408.04275, section 5.2), taken as it is
  ours       `simulator.reordering.Reorderer`: a search over orders; ms is its time per step
  bound      no order of any schedule takes less: of each rank, the least time until its first microbatch can arrive,
             all its work, and the least time from its last backward to the first stage's (it starts with a forward of
             its first stage and ends with a backward of that stage); and the longest single microbatch

Figures are medians over seeds: bubble (idle part of all ranks' time) and step time over the bound's.

Assumptions. laion: a microbatch is one packed sequence, whose pictures are also generated, each at one resolution.
orchmllm_10b and llava: four samples, no generator; the encoders of both modalities share a rank. lognormal: encoder and
generator with a spread of 0.6, the LLM 0.3, independent. Time of a row grows with its sequence as in transformers of
width 1280 (encoder) and 8192 (LLM); a backward takes twice a forward.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Options, option, program, report
from benchmarks.workloads import WORKLOADS
from hetero_strategy.layout.spec import Pipeline
from hetero_strategy.papers.disttrain import interval_order
from hetero_strategy.plan.plan_step import Size
from hetero_strategy.schedule.action import Kind, Span, Stage, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import StageCost
from hetero_strategy.simulator.reordering import Reorderer, Replay

SAMPLES = {"lognormal": 0, "laion": 1, "orchmllm_10b": 4, "llava": 4}
"""Workload -> samples of a microbatch."""
WIDTHS = {"encoder": 1280, "llm": 8192}
RANDOM = 16


class Case(NamedTuple):
    """One step."""

    name: str
    schedule: str
    graph: StageGraph
    forward: dict[str, np.ndarray]
    """Of each stage's forward, by module: float64 ``[microbatches]``; a rank's mean is 1."""

    def work(self, order: np.ndarray) -> StepWork:
        """The step with its microbatches in this order; modules skip those in which they have nothing."""
        there = {m: [k for k, o in enumerate(order.tolist()) if times[o] > 0] for m, times in self.forward.items()}
        edges = [(s.module, t.module) for s, t in self.graph.edges if s.module != t.module]
        feeds = {(a, b): tuple((k, k) for k in sorted({*there[a]} & {*there[b]})) for a, b in edges}
        return StepWork({m: tuple(Span(k, k, k) for k in found) for m, found in there.items()}, feeds)

    def seconds(self, orders: np.ndarray) -> np.ndarray:
        """Return seconds of the step with the schedule of each order ``[n, microbatches]``: one schedule for all orders
        if no module skips a microbatch.
        """
        if len(orders) > 1 and any((times == 0).any() for times in self.forward.values()):
            return np.concatenate([self.seconds(order[None]) for order in orders])
        replay = Replay(make_schedule(self.schedule, self.graph, self.work(orders[0])))
        times: dict[tuple[Kind, StageId], np.ndarray] = {}
        for node in self.graph.stages:
            times["F", node] = self.forward[node.module]
            times["B", node] = 2 * times["F", node]
        return replay.of_orders(replay.table(times, orders.shape[1]), orders)

    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward time of every rank, each float64 ``[ranks, microbatches]``."""
        pipelines = self.graph.pipelines.items()
        forward = np.array([self.forward[m] * pipeline.vpp for m, pipeline in pipelines for _ in range(pipeline.pp)])
        return forward, 2 * forward

    def bound(self) -> float:
        """No schedule takes less time."""
        forward, backward = self.ranks()
        found = [float((forward + backward).sum(axis=0).max())]
        head, tail = np.zeros(forward.shape[1]), np.zeros(forward.shape[1])
        seen: set[int] = set()
        for node, stage in self.graph.stages.items():
            rank = int(stage.grid[0, 0])
            if rank not in seen:
                found.append(float(head.min() + forward[rank].sum() + backward[rank].sum() + tail.min()))
                seen.add(rank)
            head, tail = head + self.forward[node.module], tail + 2 * self.forward[node.module]
        return max(found)


def case(workload: str, ranks: int, vpp: int, microbatches: int, seed: int) -> Case:
    """Balanced modules on a pipeline."""
    times = drawn(workload, microbatches, seed)
    if ranks == 2:
        times.pop("generator", None)
    outer = 1 if ranks < 16 else 2
    pipelines = {m: Pipeline(outer) for m in times}
    pipelines["llm"] = Pipeline(ranks - outer * (len(times) - 1), vpp)
    stages: dict[StageId, Stage] = {}
    first = 0
    for module, pipeline in pipelines.items():
        for s in range(pipeline.stages):
            stages[StageId(module, s)] = Stage(np.array([[first + pipeline.rank_of(s)]]), trains=True, backward=True)
        first += pipeline.pp
    nodes = list(stages)
    forward = {m: t / t.mean() / pipelines[m].vpp for m, t in times.items()}
    name = "interleaved_1f1b" if vpp > 1 else "1f1b"
    return Case(workload, name, StageGraph(stages, tuple(pairwise(nodes)), pipelines), forward)


def drawn(workload: str, microbatches: int, seed: int) -> dict[str, np.ndarray]:
    """Time of every module per microbatch in any unit, float64 ``[microbatches]``; modules in topological order."""
    if workload == "lognormal":
        random = np.random.default_rng(seed)
        return {
            m: random.lognormal(0, s, microbatches) for m, s in (("encoder", 0.6), ("llm", 0.3), ("generator", 0.6))
        }
    samples = microbatches * SAMPLES[workload]
    made = WORKLOADS[workload](samples, seed)

    def summed(sample: np.ndarray, time: np.ndarray) -> np.ndarray:
        return np.bincount(sample * microbatches // samples, weights=time, minlength=microbatches)

    items = list(made.items.values())
    found = {"encoder": np.sum([summed(i.sample, _work(i.inner_rows, "encoder")) for i in items], axis=0)}
    found["llm"] = summed(np.arange(samples), _work(made.tokens(), "llm"))
    if workload == "laion":
        found["generator"] = summed(items[0].sample, np.ones(len(items[0].sample)))
    return found


def _work(length: np.ndarray, module: str) -> np.ndarray:
    """Return a transformer's work: per layer 24 width^2 FLOPs for each row, and 4 width for each pair of rows."""
    return length * (1.0 + length / (6.0 * WIDTHS[module]))


def measure(one: Case, seed: int) -> dict[str, float]:
    """Step times of all contenders, the bound, the ranks' mean work, and seconds of our search."""
    count = len(one.forward["llm"])
    random = np.random.default_rng(seed)
    reorderer = Reorderer(one.graph, one.schedule, dict.fromkeys(one.graph.stages, StageCost(1.0, 0.0)))
    sizes = {m: Size(t[:, None], 0.0 * t[:, None]) for m, t in one.forward.items()}
    reorderer(sizes)
    begin = time.perf_counter()
    order = reorderer(sizes)
    took = time.perf_counter() - begin
    forward, backward = one.ranks()
    chosen = [np.arange(count), interval_order(forward, backward), order]
    found = one.seconds(np.array(chosen + [random.permutation(count) for _ in range(RANDOM)]))
    return {
        **dict(zip(("planned", "disttrain", "ours"), found[:3].tolist(), strict=True)),
        "random": float(found[3:].mean()),
        "best random": float(found[3:].min()),
        "bound": one.bound(),
        "work": float((forward + backward).sum() / len(forward)),
        "ms": 1e3 * took,
    }


CONTENDERS = ("random", "best random", "disttrain", "ours")


def savings(workload: str, ranks: int, vpp: int, microbatches: int, seeds: int) -> dict[str, Any]:
    """Medians over seeds of one line of the table."""
    runs = [measure(case(workload, ranks, vpp, microbatches, seed), seed) for seed in range(seeds)]
    found: dict[str, Any] = {"workload": workload, "p": ranks, "vpp": vpp, "l": microbatches}
    found["bubble"] = {c: statistics.median(1 - r["work"] / r[c] for r in runs) for c in (*CONTENDERS, "bound")}
    found["over_bound"] = {c: statistics.median(r[c] / r["bound"] for r in runs) for c in CONTENDERS}
    found["over_random"] = {c: statistics.median(r[c] / r["random"] for r in runs) for c in CONTENDERS}
    found["worse"] = sum(r["ours"] > r["planned"] * (1 + 1e-9) for r in runs)
    found["disttrain_worse"] = sum(r["disttrain"] > r["planned"] * (1 + 1e-9) for r in runs)
    found["below_bound"] = sum(r[c] < r["bound"] * (1 - 1e-9) for r in runs for c in CONTENDERS)
    found["ms"] = statistics.median(r["ms"] for r in runs)
    return found


@program(
    option("--seeds", type=int, default=5, help="draws of every step (default 5)"),
    option("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="pipelines (default 2 4 8 16)"),
    option("--microbatches", type=int, nargs="+", default=[8, 32, 128], help="default 8 32 128"),
    option("--workloads", nargs="+", choices=SAMPLES, default=list(SAMPLES), help="default all"),
)
def main(given: Options) -> Any:
    """Run, print, write."""
    lines = [
        savings(workload, ranks, vpp, count, given.seeds)
        for workload in given.workloads
        for vpp in (1, 2)
        for ranks in given.ranks
        for count in given.microbatches
    ]
    columns = ("workload, schedule", "p", "l", *(f"bubble {c}" for c in (*CONTENDERS, "bound")))
    columns += (*(f"{c} / bound" for c in CONTENDERS), "ours / random", "disttrain / random", "ms")
    rows = [
        (
            f"{line['workload']}, {'interleaved' if line['vpp'] > 1 else '1f1b'}",
            *(line["p"], line["l"]),
            *(f"{line['bubble'][c]:.1%}" for c in (*CONTENDERS, "bound")),
            *(line["over_bound"][c] for c in CONTENDERS),
            *(line["over_random"]["ours"], line["over_random"]["disttrain"]),
            f"{line['ms']:.1f}",
        )
        for line in lines
    ]
    steps = len(lines) * given.seeds
    summary = {
        "steps": steps,
        **{key: sum(line[key] for line in lines) for key in ("worse", "disttrain_worse", "below_bound")},
        **{f"{c}_over_random": statistics.median(line["over_random"][c] for line in lines) for c in CONTENDERS},
    }
    notes = [
        f"ours is longer than the order as planned in {summary['worse']} of {steps} steps, DistTrain's in"
        f" {summary['disttrain_worse']}; below the bound: {summary['below_bound']} (both must be 0 for ours)",
        f"step time over a random order's, median of all lines: DistTrain {summary['disttrain_over_random']:.3f},"
        f" ours {summary['ours_over_random']:.3f}",
    ]
    report(f"Orders of microbatches, medians of {given.seeds} steps", columns, rows, notes)
    return {"orders": lines, "summary": summary}


if __name__ == "__main__":
    main()
