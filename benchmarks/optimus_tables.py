"""Optimus' tables 1, 4 and 6 beside what the planner's model of devices says; tables 5 and 7: ``benchmarks.filling``.

Models at full size on all their ranks, simulated as in ``benchmarks.published``: counted on the meta device, real step
plans and schedules, shares of matmuls by width, and nothing fitted to Optimus. All is recomputed, as in its FLOPs;
microbatches hold 2 samples of 2048 rows unless said. ``Megatron-LM`` has all encoders on the first stage's ranks and
fewer LLM layers there; ``balanced`` cuts encoders and LLM evenly over the pipeline, one stage of the encoder and 12 of
the LLM on a rank; ``filled`` is an encoder on all ranks, in bubbles; ``beside`` also in those of tensor parallelism
(``tp_bubbles``); ``in turns`` the same without filling.

  table 1   Where a step of Megatron-LM goes on more than 3000 GPUs. The paper prints neither model nor layouts ("ViT
            and GPT, over 100B", 5.12 s); here ViT-22B and GPT-175B on 3072 H100, 1536 samples, in table 5's layouts.
            Seconds of a mean rank, and what they are of the step (where the paper prints 5.0% for warm-up, its seconds
            are 5.7%). "other" are waits for other stages and rows within the pipeline. Collectives of tensor
            parallelism count as if none ran beside compute; of data parallelism so too, or ("dp beside") but what fits
            beside the first forward and the last backward. Not simulated: stragglers, uneven kernels.
  table 4   ViT-3B and GPT-11B, 16 samples on 8 A100, taken as those of 80 GB. It prints no layouts but FSDP's, so each
            other way gets the best of all degrees with a pipeline, microbatches of 1 or 2 samples, virtual stages and
            pieces whose weights, gradients and optimizer leave 20 GB for the rest: theirs may not have been the best.
            Alpa cannot be run: the paper's figure only.
  table 6   Two encoders before GPT-175B, 256 samples on 512 H100 (appendix D.3), images of 2048 rows for each encoder.
            The paper prints no seconds (figure 16), only "up to" what Optimus is faster than Megatron-LM for each,
            taken in the order of the table, and leaves out the balanced way, whose program takes one encoder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from benchmarks.common import arguments, report, write_json
from benchmarks.published import VIT_22B, cut_around, equal, pipelined, vit_llm
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.evaluate import Candidate, Evaluator, Step
from hetero_strategy.planner.explain import work_of
from hetero_strategy.planner.exposed import ExposedCollectives
from hetero_strategy.planner.hardware import cluster
from hetero_strategy.planner.shape import ModelShape, shape_of
from hetero_strategy.planner.times import OURS, SEPARATE
from hetero_strategy.simulator.bubbles import Filling, inside_actions

Layouts = Mapping[str, ModuleLayout]
GPT_175B, GPT_11B = (96, 12288), (80, 3072)
VITS = {"3B": (48, 2304), "5B": (48, 3072), "11B": (48, 4096), "22B": VIT_22B["vision"]}
"""Layers and width; the 11B of table 6 is table 8's 10B."""
TABLE_1 = {
    "all-gather": 0.167, "reduce-scatter": 0.458, "warm-up": 0.291, "cool-down": 0.471, "other": 0.445,
    "tensor parallel": 0.585, "step": 5.12,
}  # fmt: skip
"""Seconds."""
TABLE_4 = {"Alpa": 8.61, "FSDP": 3.20, "Megatron-LM": 3.42, "balanced": 3.04, "filled": 2.78}
"""Seconds of a step; "filled" is Optimus."""
TABLE_6 = {("11B", "5B"): 1.25, ("22B", "5B"): 1.26, ("22B", "11B"): 1.27}
"""Encoders -> Megatron-LM's seconds over Optimus', at most."""
LENGTH, GB = 2048, 1e9
HELD = 60 * GB
"""Bytes of weights, gradients and optimizer on a rank of table 4's 80 GB."""


@dataclass(frozen=True)
class Cluster:
    """Where a table was measured, and its batch."""

    device: str
    gpus: int
    samples: int


LARGE, SMALL, MANY = Cluster("h100", 3072, 1536), Cluster("a100", 8, 16), Cluster("h100", 512, 256)


def ways(shape: ModelShape, gpus: int, tp: int, pp: int, vpp: int, pieces: int) -> dict[str, Candidate]:
    """All ways to train a model on one pipeline layout, of one microbatch each."""
    dp, encoders = gpus // (tp * pp), [name for name in shape.modules if name != "llm"]
    heads = {name: max(n for n in shape.modules[name].tp if tp % n == 0) for name in encoders}
    llm = pipelined(shape.modules["llm"].blocks, gpus, tp, pp, vpp)
    first = {name: ModuleLayout(gpus // pp, dp_shard=gpus // pp // n, tp=n) for name, n in heads.items()}
    around = ModuleLayout(gpus, dp_shard=dp, tp=tp, pp=pp, split=cut_around(shape, LENGTH, pp))
    everywhere = {name: ModuleLayout(gpus, dp_shard=gpus // n, tp=n) for name, n in heads.items()}
    cut = {name: pipelined(shape.modules[name].blocks, gpus, n, pp, 1) for name, n in heads.items()}
    schedule = "interleaved_1f1b" if vpp > 1 else "1f1b"

    def candidate(layouts: Layouts, schedule: str = schedule, fill: str = "none", parts: int = 1) -> Candidate:
        again = dict.fromkeys(layouts, Recompute())
        cuts = dict.fromkeys(encoders, parts) if fill == "fine" else {}
        return Candidate(layouts, 1, schedule, again, "never", fill, cuts)

    shared = {**everywhere, "llm": llm}
    filled = candidate(shared, fill="fine", parts=pieces)
    return {
        "Megatron-LM": candidate({**first, "llm": around}, "1f1b"),
        "balanced": candidate({**cut, "llm": llm}),
        "in turns": candidate(shared),
        "filled": filled,
        **({"beside": replace(filled, tp_bubbles=True)} if tp > 1 else {}),
    }


@cache
def model(vits: tuple[str, ...], llm: tuple[int, int]) -> ModelShape:
    """Encoders before a language model."""
    names = ("vision", "second")
    return shape_of(vit_llm({name: VITS[vit] for name, vit in zip(names, vits, strict=False)}, llm))


def evaluators(shape: ModelShape, on: Cluster) -> dict[str, Evaluator]:
    """What simulates each way: others gather and sum before and after the step's work (paper, figure 4)."""
    encoders = tuple(name for name in shape.modules if name != "llm")
    batch, cluster_ = equal(on.samples, LENGTH, LENGTH, encoders), cluster(on.device, on.gpus // 8)
    apart, ours = (Evaluator(shape, cluster_, [batch], overlap=overlap) for overlap in (SEPARATE, OURS))
    return {"Megatron-LM": apart, "balanced": apart, "FSDP": apart, "in turns": ours, "filled": ours, "beside": ours}


def causes(found: Evaluator, step: Step) -> dict[str, float]:
    """Seconds of a step in which a mean rank does not compute, as table 1 has them, and the step's."""
    simulation = step.simulation
    waits: dict[str, float] = {**inside_actions(simulation, ExposedCollectives(found, step))}
    idle = {cause: float(seconds.mean()) for cause, seconds in simulation.idle.items()}
    ends = {cause: idle.pop(cause) for cause in ("warm-up", "cool-down")}
    waits["all-gather"] += step.after.gathers
    waits["reduce-scatter"] += step.after.sums
    return {**waits, **ends, "other": sum(idle.values()), "optimizer": step.after.rest, "step": step.seconds}


def table_1(on: Cluster = LARGE, vits: tuple[str, ...] = ("22B",), llm: tuple[int, int] = GPT_175B) -> dict[str, Any]:
    """Way -> cause -> seconds, and how much of the encoder is in bubbles."""
    shape = model(vits, llm)
    of_way = evaluators(shape, on)
    pp, vpp = 8, llm[0] // 8
    microbatches = on.samples // (on.gpus // (8 * pp)) // 2
    every = {name: replace(way, microbatches=microbatches) for name, way in ways(shape, on.gpus, 8, pp, vpp, 4).items()}
    found: dict[str, Any] = {}
    apart, ours = of_way["balanced"], of_way["filled"]
    for name, candidate, made in (
        *((name, way, of_way[name]) for name, way in every.items()),
        *((f"{name}, dp beside", every[name], ours) for name in ("Megatron-LM", "balanced")),
        ("filled, dp apart", every["filled"], apart),
    ):
        step = made.step(made.place(candidate))
        found[name] = causes(made, step)
        if name == "filled":
            modules = step.placed.graph.filling
            alone = made.simulated(step.placed.without(modules), step.plan)
            found["pipeline alone"] = causes(made, alone)
            found["efficiency"] = Filling(modules, alone.seconds, step.seconds, work_of(step, modules)).efficiency
    return found


def options(shape: ModelShape, on: Cluster) -> Iterator[tuple[str, Candidate]]:
    """All candidates of table 4 that fit, with their ways."""
    whole = ModuleLayout(on.gpus, dp_shard=on.gpus)
    sharded = dict.fromkeys(shape.modules, whole)
    for count in (1, 2):
        yield "FSDP", Candidate(sharded, count, recompute=dict.fromkeys(sharded, Recompute()))
    for tp, pp, vpp, pieces, each in product((1, 2, 4), (2, 4, 8), (1, 5), (1, 4), (1, 2)):
        count, rest = on.samples * tp * pp // on.gpus // each, on.gpus % (tp * pp)
        if rest or not count:
            continue
        for name, way in ways(shape, on.gpus, tp, pp, vpp, pieces).items():
            alike = (pieces > 1 and name not in ("filled", "beside")) or (vpp > 1 and name == "Megatron-LM")
            if not alike and held(shape, way.layouts) < HELD:
                yield name, replace(way, microbatches=count)


def held(shape: ModelShape, layouts: Layouts) -> float:
    """Bytes of whole bf16 weights and fp32 gradients on a rank, and of its share of masters and moments."""
    parameters = {name: float(module.parameters.sum()) for name, module in shape.modules.items()}
    return sum(6 * n / layouts[name].tp / layouts[name].pp + 12 * n / 8 for name, n in parameters.items())


def table_4(on: Cluster = SMALL, vit: str = "3B", llm: tuple[int, int] = GPT_11B) -> dict[str, tuple[float, str]]:
    """Way -> seconds of its best, and what that is."""
    shape = model((vit,), llm)
    of_way, best = evaluators(shape, on), dict[str, tuple[float, str]]()
    for name, candidate in options(shape, on):
        layouts, count = candidate.layouts, candidate.microbatches
        said = ", ".join(f"{k} {v}" for k, v in layouts["llm"].resolved().degrees().items() if v > 1)
        pieces = f", {candidate.pieces['vision']} pieces" if candidate.pieces else ""
        took = of_way[name].seconds(candidate)
        best[name] = min(best.get(name, (float("inf"), "")), (took, f"{said}, {count} microbatches{pieces}"))
    return best


def table_6(on: Cluster = MANY, llm: tuple[int, int] = GPT_175B) -> dict[str, dict[str, float]]:
    """Encoders -> way -> seconds."""
    found: dict[str, dict[str, float]] = {}
    for vits in TABLE_6:
        shape = model(vits, llm)
        of_way, count = evaluators(shape, on), on.samples // (on.gpus // 64) // 2
        every = ways(shape, on.gpus, 8, 8, llm[0] // 8, 4)
        found[", ".join(vits)] = {n: of_way[n].seconds(replace(way, microbatches=count)) for n, way in every.items()}
    return found


def main() -> None:
    """Print the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="+", type=int, choices=(1, 4, 6), default=[1, 4, 6], help="only these")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for number, (table, show) in {1: (table_1, _show_1), 4: (table_4, _show_4), 6: (table_6, _show_6)}.items():
        if number in args.tables:
            began = time.perf_counter()
            found[str(number)] = table()
            show(found[str(number)])
            found[f"seconds of {number}"] = time.perf_counter() - began
    write_json(args.json, "optimus_tables", "cpu", {"tables": args.tables}, found)


def _show_1(found: Mapping[str, Any]) -> None:
    names = [name for name in found if name != "efficiency"]
    rows = []
    for cause in (*TABLE_1, "optimizer"):
        paper = TABLE_1.get(cause)
        shares = [f"{found[name][cause]:.3f} ({found[name][cause] / found[name]['step']:.1%})" for name in names]
        rows.append([cause, "" if paper is None else f"{paper:.3f} ({paper / TABLE_1['step']:.1%})", *shares])
    note = f"{found['efficiency']:.1%} of the encoder's work lies in bubbles"
    title = "Table 1: seconds of a mean rank, and shares of the step"
    report("optimus_tables", title, ("cause", "paper", *names), rows, [note])


def _show_4(found: Mapping[str, tuple[float, str]]) -> None:
    rows = []
    for name in (*TABLE_4, *(name for name in found if name not in TABLE_4)):
        paper, (took, layout) = TABLE_4.get(name), found.get(name, (None, ""))
        gains = ["" if x is None else x for x in (paper and TABLE_4["FSDP"] / paper, took and found["FSDP"][0] / took)]
        rows.append([name, paper or "", took or "", *gains, layout])
    columns = ("way", "paper s", "simulated s", "FSDP over it, paper", "simulated", "the LLM's layout")
    report("optimus_tables", "Table 4: seconds of a step", columns, rows)


def _show_6(found: Mapping[str, Mapping[str, float]]) -> None:
    rows = []
    for paper, (name, took) in zip(TABLE_6.values(), found.items(), strict=True):
        rows.append([name, *took.values(), took["Megatron-LM"] / took["filled"], paper])
    columns = ("encoders", *(f"{name} s" for name in next(iter(found.values()))), "Megatron-LM / filled", "paper")
    report("optimus_tables", "Table 6: two encoders before GPT-175B", columns, rows)


if __name__ == "__main__":
    main()
