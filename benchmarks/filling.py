"""How much of an encoder's work fits into the bubbles of a language model's pipeline on the same ranks?

Each row is a model at full size on all its ranks, simulated as the planner simulates candidates (models counted on the
meta device, real step plans and schedules): the language model alone on the same tokens, then with its encoder on all
of its ranks, in turns, with ``fill="coarse"``, with ``fill="fine"``, and with ``tp_bubbles``, too ("beside": it also
computes while the language model waits for collectives of tensor parallelism, on a stream of its own). The bound is the
longer one of the language model alone and of the mean rank's work for both; it takes waits inside actions for work.

The first kind of efficiency counts all: the share of the encoder's seconds per rank, its collectives included, by which
the step is not longer than the language model alone. The second, "computed in bubbles", is Optimus' (section 5.3.2),
which says how much of the encoder's computations bubbles hold: the same without the gathers of its parameters and the
sums of its gradients. "schedule" is how long a step's schedule takes to make, on one core, with ``tp_bubbles``.

``optimus`` rows are ViT-22B and GPT-175B of the paper's tables 5 and 7: 1536 samples of 2048 rows, microbatches of 2,
tensor parallel over 8 ranks, 8 pipeline ranks with 12 virtual stages, all recomputed as in ``benchmarks.published``.
The others have their encoder's and their language model's sizes and pipeline; a mixture of experts is a dense model of
its active parameters, whose stages take as long.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common import arguments, report, write_json
from benchmarks.published import equal, gpt, pipelined, vit_llm
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.action_seconds import ActionSeconds
from hetero_strategy.planner.evaluate import Candidate, Evaluator
from hetero_strategy.planner.explain import work_of
from hetero_strategy.planner.hardware import cluster
from hetero_strategy.planner.shape import ModelShape, shape_of
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import work_of as stages_work
from hetero_strategy.simulator.bubbles import Filling, work_on_rank

PAPER = {1536: (0.343, 0.575, 9.80, 322.2), 2048: (0.458, 0.693, 7.29, 89.6), 3072: (0.687, 0.850, 4.87, 15.1)}
"""GPUs -> Optimus' efficiency of coarse and of fine filling (table 7; 3172 there), seconds of a step (table 5), and of
making its schedule."""


@dataclass(frozen=True)
class Case:
    """A model in its layouts."""

    name: str
    vit: tuple[int, int]
    """Layers and width."""
    llm: tuple[int, int]
    gpus: int
    tp: int
    pp: int
    vpp: int
    samples: int
    length: int = 2048
    image_rows: int = 2048
    each: int = 2
    """Samples of a language model's microbatch."""
    pieces: int = 1
    """Of the encoder."""

    @property
    def microbatches(self) -> int:
        return self.samples // (self.gpus // self.tp // self.pp) // self.each


CASES = (
    *(Case(f"optimus, {gpus} GPUs", (48, 6144), (96, 12288), gpus, 8, 8, 12, 1536, pieces=8) for gpus in PAPER),
    Case("0.4B encoder, 1T-A32B, pp 16", (27, 1152), (64, 6656), 256, 1, 16, 2, 1024, 4096, 1024, 1),
    Case("0.4B encoder, 32B, pp 4", (27, 1024), (64, 5120), 64, 8, 4, 4, 256, 4096, 2048, 4),
    Case("5B encoder, 70B, pp 8", (40, 3072), (80, 8192), 128, 8, 8, 5, 128, 4096, 2048, 2, 4),
)


@dataclass(frozen=True)
class Filled:
    """Seconds of a step."""

    alone: float
    turns: float
    coarse: float
    fine: float
    beside: float
    encoder: float
    """Of a rank's encoder work, its collectives included."""
    least: float
    computed: tuple[float, float, float]
    """Share of the encoder's computations in bubbles, with coarse, fine and beside."""
    schedule: float
    """To make one."""

    def efficiency(self, step: float) -> float:
        return Filling(("vision",), self.alone, step, self.encoder).efficiency


def measure(case: Case) -> Filled:
    """Simulate one case."""
    batch = equal(case.samples, case.length, case.image_rows)
    both, alone = shape_of(vit_llm({"vision": case.vit}, case.llm)), shape_of(gpt(*case.llm, 51200))
    llm = pipelined(case.llm[0], case.gpus, case.tp, case.pp, case.vpp)
    vision = ModuleLayout(case.gpus, dp_shard=case.gpus // case.tp, tp=case.tp)
    layouts = {"vision": vision, "llm": llm}
    schedule = "interleaved_1f1b" if case.vpp > 1 else "1f1b"

    def seconds(shape: ModelShape, data: StepMetadata, given: Mapping[str, ModuleLayout], fill: str) -> float:
        return _evaluator(shape, case, data).seconds(_candidate(given, case, schedule, fill))

    evaluator = _evaluator(both, case, batch)
    step = evaluator.shown(evaluator.place(_candidate(layouts, case, schedule, "fine")))
    share = case.microbatches / max(a.microbatch + 1 for a in step.simulation.start)
    work = {name: share * work_on_rank(step.simulation, (name,)) for name in layouts}
    beside = work_of(step, ("vision",)) - work_on_rank(step.simulation, ("vision",))
    text = replace(batch, items={})
    only = seconds(alone, text, {"llm": llm}, "none")
    filled = [_candidate(layouts, case, schedule, fill) for fill in ("coarse", "fine")]
    filled.append(replace(filled[-1], tp_bubbles=case.tp > 1))
    took = [evaluator.seconds(candidate) for candidate in (_candidate(layouts, case, schedule, "none"), *filled)]
    first = _evaluator(alone, case, text)
    pipeline = first.shown(first.place(_candidate({"llm": llm}, case, schedule, "none"))).simulation
    computed = []
    for shown in (evaluator.shown(evaluator.place(candidate)).simulation for candidate in filled):
        computed.append(1 - (shown.time - pipeline.time) / work_on_rank(shown, ("vision",)))
    making = _seconds_to_schedule(evaluator, filled[-1], batch)
    whole = work["vision"] + beside
    return Filled(only, *took, whole, max(only, sum(work.values())), tuple(computed), making)  # type: ignore[arg-type]


def _seconds_to_schedule(evaluator: Evaluator, candidate: Candidate, batch: StepMetadata) -> float:
    """What a loader worker takes for the schedule of a whole step, the second time."""
    placed = evaluator.place(candidate)
    plan = evaluator._plan(placed, batch, candidate.microbatches, part=False)
    seconds = ActionSeconds(plan, placed)
    bubbles = evaluator.bubbles(placed, plan).usual if candidate.tp_bubbles else None
    step, name = stages_work(plan, placed.graph), placed.scheduling.schedule
    for _ in range(2):
        began = time.perf_counter()
        make_schedule(name, placed.graph, step, seconds.usual, fill=candidate.fill, bubbles=bubbles)
    return time.perf_counter() - began


def _evaluator(shape: ModelShape, case: Case, batch: StepMetadata) -> Evaluator:
    return Evaluator(shape, cluster("h100", case.gpus // 8), [batch])


def _candidate(layouts: Mapping[str, ModuleLayout], case: Case, schedule: str, fill: str) -> Candidate:
    again = dict.fromkeys(layouts, Recompute())
    pieces = {"vision": case.pieces} if fill == "fine" and "vision" in layouts else {}
    return Candidate(layouts, case.microbatches, schedule, again, "never", fill, pieces)


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))), help="only these, from 0")
    args = parser.parse_args()
    rows, shares, found = [], [], dict[str, Any]()
    for case in (CASES[i] for i in args.cases):
        began = time.perf_counter()
        x = measure(case)
        paper = PAPER.get(case.gpus, ("", "", "", ""))
        steps = (x.coarse, x.fine, x.beside)
        rows.append([case.name, case.microbatches, x.alone, x.least, x.turns, *steps, x.beside / x.alone])
        shares.append([case.name, *map(x.efficiency, steps), *x.computed, *paper[:2], x.schedule, paper[3]])
        found[case.name] = {**asdict(x), "seconds": time.perf_counter() - began}
    head = ("model", "microbatches", "llm alone s", "bound s", "turns s", "coarse s", "fine s", "beside s",
            "beside / alone")  # fmt: skip
    report("filling", "An encoder in the bubbles of its language model", head, rows, [])
    head = ("model", "coarse in bubbles", "fine", "beside", "coarse computed in bubbles", "fine computed",
            "beside computed", "paper's coarse", "paper's fine", "schedule s", "paper's s")  # fmt: skip
    report("filling", "How much of it lies there", head, shares, [])
    write_json(args.json, "filling", "cpu", {"cases": args.cases}, found)


if __name__ == "__main__":
    main()
