"""How much of an encoder's work fits into the bubbles of a language model's pipeline on the same ranks?

Each row is a model at full size on all its ranks, simulated as the planner simulates candidates (models counted on the
meta device, real step plans and schedules): the language model alone on the same tokens, then with its encoder on all
of its ranks, in turns, with ``fill="coarse"`` (``papers.optimus``) and with ``fill="fine"``. The bound is the longer
one of the language model alone and of the mean rank's work for both; it takes waits inside actions for work. "beside"
is what ``papers.optimus.beside_collectives`` predicts, relative to ``fine``: the encoder also computes while the
language model waits for collectives of tensor parallelism, which no run does. 0.8 of such a wait counts as room, since
collectives need some of the device themselves; that was not measured.

The first kind of efficiency counts all: the share of the encoder's seconds per rank, its collectives included, by which
the step is not longer than the language model alone. The second, "computed in bubbles", is Optimus' (section 5.3.2),
which says how much of the encoder's computations bubbles hold: the same without the gathers of its parameters and the
sums of its gradients. "schedule" is how long a step's schedule takes to make, on one core.

``optimus`` rows are ViT-22B and GPT-175B of the paper's tables 5 and 7: 1536 samples of 2048 rows, microbatches of 2,
tensor parallel over 8 ranks, 8 pipeline ranks with 12 virtual stages, all recomputed as in ``benchmarks.published``.
The encoder is cut into 8 pieces. The share in bubbles cannot reach Optimus' 0.85: with 16 microbatches the first stage
runs the backwards of the last 8 at the very end, and the encoder's backwards follow them. Optimus also fills waits for
gathers and sums; here other work already hides them.
The others have their encoder's and their language model's sizes and pipeline; a mixture of experts is a dense model of
its active parameters, whose stages take as long.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common import Options, option, program, report
from benchmarks.published import equal, gpt, pipelined, vit_llm
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.papers.optimus import beside_collectives
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.planner.explain import work_of
from hetero_strategy.planner.step_seconds import ActionSeconds
from hetero_strategy.schedule.action import Action
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import work_of as stages_work
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.simulator.hardware import cluster
from hetero_strategy.simulator.result import Filling, work_on_rank

PAPER = {1536: (0.343, 0.575, 9.80, 322.2), 2048: (0.458, 0.693, 7.29, 89.6), 3072: (0.687, 0.850, 4.87, 15.1)}
"""GPUs -> Optimus' efficiency of coarse and of fine filling (table 7; 3172 there), seconds of a step (table 5), and of
making its schedule."""

ROOM = 0.8
"""Share of a language model's wait for collectives in which an encoder can compute."""


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
    both, alone = spec_of(vit_llm({"vision": case.vit}, case.llm)), spec_of(gpt(*case.llm, 51200))
    llm = pipelined(case.llm[0], case.gpus, case.tp, case.pp, case.vpp)
    vision = ModuleLayout(case.gpus, dp_shard=case.gpus // case.tp, tp=case.tp)
    layouts = {"vision": vision, "llm": llm}
    schedule = "interleaved_1f1b" if case.vpp > 1 else "1f1b"

    def seconds(shape: ModelSpec, data: StepMetadata, given: Mapping[str, ModuleLayout], fill: str) -> float:
        return _evaluator(shape, case, data).seconds(_candidate(given, case, schedule, fill))

    evaluator = _evaluator(both, case, batch)
    step = evaluator.shown(evaluator.place(_candidate(layouts, case, schedule, "fine")))
    share = case.microbatches / max(a.microbatch + 1 for a in step.simulation.start)
    work = {name: share * work_on_rank(step.simulation, (name,)) for name in layouts}
    outside = work_of(step, ("vision",)) - work_on_rank(step.simulation, ("vision",))
    text = replace(batch, items={})
    only = seconds(alone, text, {"llm": llm}, "none")
    filled = [_candidate(layouts, case, schedule, fill) for fill in ("coarse", "fine")]
    took = [evaluator.seconds(candidate) for candidate in (_candidate(layouts, case, schedule, "none"), *filled)]
    first = _evaluator(alone, case, text)
    pipeline = first.shown(first.place(_candidate({"llm": llm}, case, schedule, "none"))).simulation
    gain, making = _beside(evaluator, filled[-1], batch)
    computed = []
    for candidate, share in ((filled[0], 1.0), (filled[1], 1.0), (filled[1], gain)):
        shown = evaluator.shown(evaluator.place(candidate)).simulation
        computed.append(1 - (share * shown.time - pipeline.time) / work_on_rank(shown, ("vision",)))
    whole, least = work["vision"] + outside, max(only, sum(work.values()))
    return Filled(only, *took, gain * took[-1], whole, least, tuple(computed), making)  # type: ignore[arg-type]


def _beside(evaluator: Evaluator, candidate: Candidate, batch: StepMetadata) -> tuple[float, float]:
    """Predict a whole step with its encoder beside collectives, over the step without that; time its schedule.

    Returns:
        That share, and what a loader worker takes for the schedule, the second time.
    """
    placed = evaluator.place(candidate)
    plan = evaluator._plan(placed, batch, candidate.microbatches, part=False)
    work = evaluator.rank_work(placed, plan)
    seconds = ActionSeconds(plan, placed.graph, placed.times, work)
    unlinked = ActionSeconds(plan, placed.graph, evaluator.unlinked(candidate), work)

    def waits(action: Action) -> float:
        share = 1.0 if action.node.module == "vision" else ROOM
        return share * max(0.0, seconds.usual(action) - unlinked.usual(action))

    step, name = stages_work(plan, placed.graph), placed.scheduling.schedule
    fine, beside = beside_collectives(name, placed.graph, step, seconds.usual, waits)
    began = time.perf_counter()
    make_schedule(name, placed.graph, step, seconds.usual, fill=candidate.fill)
    return beside / fine, time.perf_counter() - began


def _evaluator(shape: ModelSpec, case: Case, batch: StepMetadata) -> Evaluator:
    return Evaluator(CostModel(shape, cluster("h100", case.gpus // 8)), [batch])


def _candidate(layouts: Mapping[str, ModuleLayout], case: Case, schedule: str, fill: str) -> Candidate:
    again = dict.fromkeys(layouts, (Recompute(),))
    pieces = {"vision": case.pieces} if fill == "fine" and "vision" in layouts else {}
    return Candidate(layouts, case.microbatches, schedule, again, "never", fill, pieces)


@program(
    option("--cases", nargs="+", type=int, default=list(range(len(CASES))), help="only these, from 0"),
)
def main(args: Options) -> Any:
    """Print the table."""
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
    report("An encoder in the bubbles of its language model", head, rows)
    head = ("model", "coarse in bubbles", "fine", "beside", "coarse computed in bubbles", "fine computed",
            "beside computed", "paper's coarse", "paper's fine", "schedule s", "paper's s")  # fmt: skip
    report("How much of it lies there", head, shares)
    return found


if __name__ == "__main__":
    main()
