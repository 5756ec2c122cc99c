"""What balancing is worth in real steps: 2 ranks, compute-bound modules, samples of incoherent composition.

Vision, audio and LLM are each data parallel over both ranks, as in OrchMLLM; each sample is mostly image, mostly
recording or mostly text. The same global batches are trained on

  as sampled   samples dealt in order, items where their samples are
  llm only     the LLM balanced on its sequences, items where their samples are: what balancing before the step can do
  all          every module balanced on its own cost

in turns in one run, without optimizer. By loads: the same ratio of FLOPs of the slowest instance of every module, which
is max/mean of loads over all modules, since the ranks meet at every edge.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common import arguments, report, write_json
from benchmarks.pipeline_timing import fitted, ran, scaled, simulated
from benchmarks.pipelines import MERGE, Gathered, Planned, Setting, Turn, gather, planned, run_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.plan.step_plan import ModuleLoad, StepItems, StepMetadata
from tests.distributed.harness import Pool

BOTH = ModuleLayout(ranks=(0, 1), dp_replicate=2)
NONE: Mapping[str, Any] = {"policy": "none", "reorder": "none"}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "as sampled": NONE,
    "llm only": {"policy": {"llm": "auto", "vision": "none", "audio": "none"}},
    "all": {"policy": "auto"},
}


class Incoherent(Setting):
    """Samples that are mostly image, mostly recording or mostly text, with lognormal sizes."""

    def metadata(self, seed: int) -> StepMetadata:
        rng = np.random.default_rng(seed)
        kind = rng.integers(0, 3, self.samples)
        text = np.maximum(4, rng.lognormal(np.where(kind == 2, 6.0, 3.0), 0.5)).astype(np.int64)
        side = np.clip(rng.lognormal(2.3, 0.35, self.samples), 2, 20).astype(np.int64)
        clip = np.clip(rng.lognormal(6.0, 0.5, self.samples), 16, 1400).astype(np.int64)
        items, before = {}, np.zeros(self.samples, dtype=np.int64)
        for name, mine, rows in (("vision", kind == 0, side**2), ("audio", kind == 1, clip)):
            sample = np.flatnonzero(mine)
            hidden = rows[sample] * (MERGE**2 if name == "vision" else 1)
            items[name] = StepItems(sample, rows[sample], before[sample], hidden)
            before[sample] += rows[sample]
        return StepMetadata(0, 0, np.arange(self.samples), before + text, text - 1, items)


def settings(scale: float) -> dict[str, Setting]:
    """One model, one placement, three ways to spread the work."""
    layouts = dict.fromkeys(("vision", "audio", "llm"), BOTH)
    one = Incoherent(
        "incoherent", layouts, vision=(192, 3), audio=(192, 4), llm=(192, 4), samples=24, microbatches=1
    )  # fmt: skip
    return {name: replace(scaled(one, scale), balance=balance) for name, balance in VARIANTS.items()}


def expected(known: Planned) -> tuple[float, dict[str, float]]:
    """FLOPs of the slowest instance, summed over the step; max/mean of each module's loads."""
    flops = sum(known.costs(action) for action in known.schedule.of(0) if action.microbatch >= 0)
    found = {}
    for name in known.plan.assignments:
        per_instance = np.stack([known.costs.of_instances(a) for a in known.schedule.of(0)
                                 if a.kind == "F" and a.node.module == name])  # fmt: skip
        found[name] = ModuleLoad.imbalance(per_instance)
    return flops, found


def compare(variants: Mapping[str, Setting], steps: Sequence[Gathered], seeds: int) -> dict[str, Any]:
    """Step time of each variant over "as sampled", measured and expected."""
    found: dict[str, Any] = {}
    turns = {name: [[s for s in steps if s.turn == i * seeds + k] for k in range(seeds)]
             for i, name in enumerate(variants)}  # fmt: skip
    known = {name: [planned(setting, seed) for seed in range(seeds)] for name, setting in variants.items()}
    sampled = [ran(known["as sampled"][seed], step) for seed, group in enumerate(turns["as sampled"]) for step in group]
    base = [expected(k)[0] for k in known["as sampled"]]
    seconds = {name: [simulated(k, fitted(k, sampled), 0.0).time for k in plans] for name, plans in known.items()}
    for name, setting in variants.items():
        pairs = list(zip(turns[name], turns["as sampled"], strict=True))
        ratios = [a.wall / b.wall for mine, other in pairs for a, b in zip(mine, other, strict=True)]
        fastest = [min(s.wall for s in mine) / min(s.wall for s in other) for mine, other in pairs]
        loads = [expected(k) for k in known[name]]
        found[name] = {
            "step_ms": 1e3 * statistics.median(s.wall for group in turns[name] for s in group),
            "ratio": statistics.median(ratios),
            "ratio_of_fastest": statistics.mean(fastest),
            "ratios": ratios,
            "expected": statistics.mean(flops / b for (flops, _), b in zip(loads, base, strict=True)),
            "simulated": statistics.mean(a / b for a, b in zip(seconds[name], seconds["as sampled"], strict=True)),
            "imbalance": {m: statistics.mean(k[1][m] for k in loads) for m in setting.layouts},
        }
    return found


def main(argv: Sequence[str] | None = None, pool: Pool | None = None) -> dict[str, Any]:
    """Run, print, write.

    Args:
        argv: the command line.
        pool: starts the processes.

    Returns:
        The figures.
    """
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measured, each over all batches (default 7)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before (default 1)")
    parser.add_argument("--batches", type=int, default=4, help="global batches (default 4)")
    parser.add_argument("--scale", type=float, default=1.0, help="of widths (default 1)")
    given = parser.parse_args(argv)
    variants = settings(given.scale)
    turns = [Turn(setting, seed) for setting in variants.values() for seed in range(given.batches)]
    steps = gather((pool or Pool()).run(2, run_turns, turns, given.warmup, given.rounds, timeout=900))
    found = compare(variants, steps, given.batches)
    report(
        "balanced_steps",
        f"training steps on 2 ranks, {given.batches} global batches, {given.rounds} rounds",
        (
            "",
            "step ms",
            "over as sampled",
            "of the fastest",
            "by loads",
            "simulated",
            "max/mean vision",
            "audio",
            "llm",
        ),
        [
            (
                name,
                f"{x['step_ms']:.0f}",
                x["ratio"],
                x["ratio_of_fastest"],
                x["expected"],
                x["simulated"],
                *(x["imbalance"][m] for m in variants[name].layouts),
            )
            for name, x in found.items()
        ],
        [
            "over as sampled: median over rounds and batches; of the fastest: of every batch's fastest steps, mean",
            "by loads: FLOPs of the slowest instance of every module, summed over a step; simulated: with the seconds"
            " that actions took as sampled, fitted as constant + FLOPs",
        ],
    )
    options = {name: v for name, v in vars(given).items() if name != "json"}
    write_json(given.json, "balanced_steps", "cpu", options, found)
    return found


if __name__ == "__main__":
    main()
