"""Modality parallelism: two encoders beside each other, each on its own rank, against both in one stage of a chain.

Vision and audio have equal, dominant cost; the LLM is small. Two real ranks (gloo, one thread each), the same model and
the same global batch, both executions in turns in one run:

  parallel   vision on rank 0; audio on rank 1, with the LLM beside it
  chain      vision and audio both on rank 0, LLM on rank 1: the encoders as one stage before the LLM

Measured is a whole training step without optimizer, schedule building included; the ratio is the median over rounds of
parallel / chain within a round. Two ranks need two processors: rounds in which another process took one of them (a rank
was at an action but not on a processor for more than 5% of a step) say nothing of parallelism. Both medians are
printed, over undisturbed rounds and over all; with --tries N the run is repeated until half of --rounds were
undisturbed, at most N times, and all of its rounds are kept. Simulated: the same two
schedules, with the mean of every action's measured time. Goal: at most 0.65.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, report, shown, write_json
from benchmarks.pipeline_timing import mean, scaled, simulated, write_pair
from benchmarks.pipelines import DISTURBED, Gathered, Setting, Turn, gather, planned, run_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.monitor.prediction import durations
from hetero_strategy.monitor.timeline import from_measured, from_simulation
from tests.distributed.harness import Pool

GOAL = 0.65
FIRST, SECOND = ModuleLayout(ranks=(0,)), ModuleLayout(ranks=(1,))
LAYOUTS = {
    "parallel": {"vision": FIRST, "audio": SECOND, "llm": SECOND},
    "chain": {"vision": FIRST, "audio": FIRST, "llm": SECOND},
}


def settings(scale: float) -> list[Setting]:
    """Both executions of one model: per sample an image of 64 rows inside the encoder and a recording of 64."""
    made = [
        Setting(
            name, layouts, vision=(256, 6), audio=(256, 6), llm=(128, 1), samples=16, microbatches=8, items=(1, 1),
            cells=(4, 4), clip=(64, 64), text=(8, 8),
        )
        for name, layouts in LAYOUTS.items()
    ]  # fmt: skip
    return [scaled(one, scale) for one in made]


def compare(both: Sequence[Setting], steps: Sequence[Gathered], timeline: Path | None) -> dict[str, Any]:
    """Figures of both, and their ratio within every round."""
    found: dict[str, Any] = {}
    by_turn = [[s for s in steps if s.turn == number] for number in range(len(both))]
    quiet = [max(a.lost, b.lost) <= DISTURBED for a, b in zip(*by_turn, strict=True)]
    for setting, mine in zip(both, by_turn, strict=True):
        chosen = [s for s, q in zip(mine, quiet, strict=True) if q] or mine
        known = planned(setting, 0)
        costs = mean([durations(known.schedule, s.events) for s in chosen])
        simulation = simulated(known, costs, 0.0)
        by_module = dict.fromkeys(setting.layouts, 0.0)
        for action, seconds in costs.items():
            by_module[action.node.module] += 1e3 * float(seconds.max())
        found[setting.name] = {
            "step_ms": 1e3 * statistics.median(s.wall for s in chosen),
            "fastest_ms": 1e3 * min(s.wall for s in mine),
            "simulated_ms": 1e3 * simulation.time,
            "module_ms": by_module,
            "steps_ms": [1e3 * s.wall for s in mine],
        }
        if timeline is not None:
            middle = sorted(chosen, key=lambda s: s.seconds)[len(chosen) // 2]
            write_pair(timeline, setting, from_simulation(simulation), from_measured(middle.events, middle.span))
    parallel, chain = (found[s.name] for s in both)
    ratios = [a / b for a, b in zip(parallel["steps_ms"], chain["steps_ms"], strict=True)]
    undisturbed = [r for r, q in zip(ratios, quiet, strict=True) if q]
    found["rounds"], found["undisturbed"] = len(ratios), len(undisturbed)
    found["lost"] = statistics.median(s.lost for s in steps)
    found["ratio"] = statistics.median(undisturbed) if undisturbed else None
    found["ratio_of_all"] = statistics.median(ratios)
    found["ratio_of_fastest"] = parallel["fastest_ms"] / chain["fastest_ms"]
    found["simulated_ratio"] = parallel["simulated_ms"] / chain["simulated_ms"]
    found["ratios"] = ratios
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
    parser.add_argument("--rounds", type=int, default=15, help="measured (default 15)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before (default 2)")
    parser.add_argument("--tries", type=int, default=1, help="runs at most, until enough was undisturbed (default 1)")
    parser.add_argument("--scale", type=float, default=1.0, help="of widths (default 1)")
    parser.add_argument("--timeline", metavar="FOLDER", type=Path, help="picture and trace of a step of both")
    given = parser.parse_args(argv)
    both = settings(given.scale)
    turns = [Turn(setting, model=i) for i, setting in enumerate(both)]
    steps: list[Gathered] = []
    for _ in range(given.tries):
        steps += gather((pool or Pool()).run(2, run_turns, turns, given.warmup, given.rounds, timeout=600))
        found = compare(both, steps, given.timeline)
        if found["undisturbed"] >= given.rounds // 2:
            break
    report(
        "modality_parallel",
        f"one training step, 2 ranks, {both[0].microbatches} microbatches, {given.rounds} rounds",
        ("", "step ms", "fastest ms", "simulated ms", "vision ms", "audio ms", "llm ms"),
        [
            (
                s.name,
                *(f"{found[s.name][key]:.0f}" for key in ("step_ms", "fastest_ms", "simulated_ms")),
                *(f"{found[s.name]['module_ms'][module]:.0f}" for module in ("vision", "audio", "llm")),
            )
            for s in both
        ],
        [
            f"parallel / chain = {shown(found['ratio'])} in {found['undisturbed']} undisturbed rounds,"
            f" {found['ratio_of_all']:.3f} in all {found['rounds']}, {found['ratio_of_fastest']:.3f} of the fastest"
            f" steps, {found['simulated_ratio']:.3f} simulated (goal at most {GOAL})",
            f"{found['lost']:.0%} of a step lost to other processes, in the median over all",
            "vision, audio, llm ms: sum of the actions of a step; all ms are of undisturbed rounds if there are any",
        ],
    )
    options = {name: str(v) if isinstance(v, Path) else v for name, v in vars(given).items() if name != "json"}
    write_json(given.json, "modality_parallel", "cpu", options, {**found, "goal": GOAL})
    return found


if __name__ == "__main__":
    main()
