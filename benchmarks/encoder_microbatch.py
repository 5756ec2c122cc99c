"""What `encoder_microbatch_rows` should be: step time over how an encoder groups or splits the step's microbatches.

Two real ranks (gloo, one thread each), one model per placement, the same global batch under every budget, budgets in
turns in one run. A budget is a multiple of the encoder's mean rows per instance and microbatch of the step; "as the
step's" has none.

  disjoint    vision on rank 0, LLM on rank 1
  beside      vision and the LLM's first stage on rank 0, the second on rank 1
  colocated   vision and LLM both on both ranks, data parallel

large: an action of tens of ms; small: a few rows per microbatch, where the fixed cost of a pass counts. Ratios are
medians over rounds of budget / "as the step's" within a round; below 1 is faster. Simulated: the schedules with a mean
cost per row taken from "as the step's" alone, so without the fixed cost: what the order alone gains or loses.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import arguments, report, shown, write_json
from benchmarks.pipeline_timing import fitted, ran, scaled, simulated
from benchmarks.pipelines import DISTURBED, Gathered, Setting, Turn, gather, planned, run_turns
from hetero_strategy.layout import ModuleLayout
from tests.distributed.harness import Pool

FACTORS: tuple[float | None, ...] = (None, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Budgets, in mean rows of the encoder per instance and microbatch of the step."""


def _on(*ranks: int, **degrees: Any) -> ModuleLayout:
    return ModuleLayout(ranks=ranks, **degrees)


PLACEMENTS: Mapping[str, dict[str, ModuleLayout]] = {
    "disjoint": {"vision": _on(0), "llm": _on(1)},
    "beside": {"vision": _on(0), "llm": _on(0, 1, pp=2)},
    "colocated": {"vision": _on(0, 1, dp_replicate=2), "llm": _on(0, 1, dp_replicate=2)},
}
LARGE = Setting(
    "large", {}, vision=(192, 4), llm=(192, 4), samples=32, microbatches=8, items=(1, 3), cells=(2, 4), text=(16, 48)
)
SMALL = replace(LARGE, name="small", samples=16, items=(0, 2), cells=(1, 2), text=(4, 12))


def budgets(setting: Setting) -> list[Setting]:
    """The setting under every budget."""
    plan = setting.plan(0)
    hidden = float(plan.metadata.items["vision"].inner_rows.sum())
    mean = hidden / setting.microbatches / plan_instances(setting)
    found = []
    for factor in FACTORS:
        tokens = {} if factor is None else {"vision": max(1, round(factor * mean))}
        found.append(replace(setting, tokens=tokens))
    return found


def plan_instances(setting: Setting) -> int:
    """Of the encoder."""
    return setting.placement.instances()["vision"]


def compare(settings: Sequence[Setting], steps: Sequence[Gathered]) -> list[dict[str, Any]]:
    """One line per budget."""
    by_turn = [[s for s in steps if s.turn == number] for number in range(len(settings))]
    quiet = [max(s.lost for s in turns) <= DISTURBED for turns in zip(*by_turn, strict=True)]
    enough = sum(quiet) >= 3
    kept = [[s for s, q in zip(mine, quiet, strict=True) if q or not enough] for mine in by_turn]
    known = [planned(setting, 0) for setting in settings]
    basis = [ran(known[0], s) for s in kept[0]]
    predicted = [simulated(k, fitted(k, basis), 0.0).time for k in known]
    lines = []
    for factor, k, mine, seconds in zip(FACTORS, known, kept, predicted, strict=True):
        lines.append(
            {
                "budget": factor,
                "microbatches": len(k.plan.active("vision")),
                "step_ms": 1e3 * statistics.median(s.wall for s in mine),
                "ratio": statistics.median(a.wall / b.wall for a, b in zip(mine, kept[0], strict=True)),
                "simulated_ratio": seconds / predicted[0],
                "rounds": len(mine),
                "undisturbed": enough,
                "lost": statistics.median(s.lost for s in mine),
            }
        )
    return lines


def main(argv: Sequence[str] | None = None, pool: Pool | None = None) -> None:
    """Run, print, write.

    Args:
        argv: the command line.
        pool: starts the processes.
    """
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="measured (default 12)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before (default 2)")
    parser.add_argument("--scale", type=float, default=1.0, help="of widths (default 1)")
    parser.add_argument("--placements", nargs="*", choices=tuple(PLACEMENTS), default=list(PLACEMENTS))
    given = parser.parse_args(argv)
    results: dict[str, list[dict[str, Any]]] = {}
    for size in (LARGE, SMALL):
        for name in given.placements:
            settings = budgets(scaled(replace(size, layouts=PLACEMENTS[name]), given.scale))
            turns = [Turn(setting) for setting in settings]
            ranks = (pool or Pool()).run(2, run_turns, turns, given.warmup, given.rounds, timeout=600)
            results[f"{size.name}, {name}"] = compare(settings, gather(ranks))
    report(
        "encoder_microbatch",
        "step time by the encoder's budget, relative to the step's microbatches (simulated in brackets)",
        ("", "step ms", *("as the step's" if f is None else f"x {f:g}" for f in FACTORS), "rounds", "lost"),
        [
            (
                name,
                f"{lines[0]['step_ms']:.0f}",
                *(f"{shown(x['ratio'])} ({x['simulated_ratio']:.2f}) {x['microbatches']} mb" for x in lines),
                f"{lines[0]['rounds']}{'' if lines[0]['undisturbed'] else ' disturbed'}",
                f"{statistics.median(x['lost'] for x in lines):.0%}",
            )
            for name, lines in results.items()
        ],
        [
            "x: budget in mean rows of the encoder per instance and microbatch of the step; mb: its microbatches",
            "rounds: those in which no step was disturbed by other processes if there are 3, else all: 'disturbed'",
        ],
    )
    settings_ = {name: value for name, value in vars(given).items() if name != "json"}
    write_json(given.json, "encoder_microbatch", "cpu", settings_, results)


if __name__ == "__main__":
    main()
