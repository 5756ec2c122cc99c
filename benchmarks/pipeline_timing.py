"""Does a step take as long as the simulator says? On real processes, with costs profiled in the same run.

Every setting runs two ragged global batches in turns, on gloo processes of one thread each. The very schedule that ran
is simulated; measured is from the first rank's first action to the last rank's last. Measured / simulated, by what the
simulator is given as the seconds of an action (all from the same run):

  repeat    mean over the other steps of the same batch, the step itself left out: is the simulator right?
  fitted    a line in rows and squared lengths per stage and kind, fitted to the steps of the other batch: are
            predictions of steps that never ran right? (hetero_strategy/simulator/recorded_steps.py)
  own       what the very step measured: what is left is what the simulator does not model (gaps between actions,
            the speed of transfers); no prediction

An action of several ranks lasts from the moment all of them have begun until the last has ended. Transfers take the
latency that was measured in the other steps: the median time from the end of the action that sent rows to the start of
the action that waited for them. Stages are uneven, since layers are few and inputs ragged.

Processes share cores with whatever else runs here, and where there are more ranks than cores with one another: costs
contain that on average only, so single steps scatter more than their median.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Options, machine, option, program, report
from benchmarks.pipelines import Gathered, Turn, gather, run_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.monitor.timeline import Timeline, from_measured, from_simulation, write_trace
from hetero_strategy.schedule.action import Action
from hetero_strategy.simulator.cluster import Links
from hetero_strategy.simulator.recorded_steps import Ran, durations, fitted_lines, points, starts, terms, transfers
from hetero_strategy.simulator.result import Simulation
from hetero_strategy.simulator.simulate import rows_between, simulate
from hetero_strategy.testing import Planned, Setting, planned

GOAL = 0.1
"""How far the median of measured / simulated may be from 1."""
SEEDS = (0, 1)
FIGURES = ("repeat", "fitted", "own")
Seconds = Mapping[Action, np.ndarray]
"""Of every action, float64 ``[instances of its node]``."""


def _on(*ranks: int, **degrees: Any) -> ModuleLayout:
    return ModuleLayout(ranks=ranks, **degrees)


SETTINGS = (
    Setting("vision -> llm", {"vision": _on(0), "llm": _on(1)}),
    Setting("vision -> llm, gpipe", {"vision": _on(0), "llm": _on(1)}, "gpipe"),
    Setting("vision, audio beside llm pp2", {"vision": _on(0), "audio": _on(1), "llm": _on(0, 1, pp=2)}),
    Setting("llm pp2, vision colocated, zb_h1", {"vision": _on(0), "llm": _on(0, 1, pp=2, split=(2, 4))}, "zb_h1"),
    Setting("llm pp2*vpp2, vision colocated", {"vision": _on(1), "llm": _on(0, 1, pp=2, vpp=2)}, "interleaved_1f1b"),
    Setting("llm v, vision colocated, zbv", {"vision": _on(0), "llm": _on(0, 1, pp=2, vpp=2, pp_style="v")}, "zbv"),
    Setting("vision | audio -> llm pp2", {"vision": _on(0), "audio": _on(1), "llm": _on(2, 3, pp=2)}),
    Setting("vision pp2 -> llm pp2, zb_h1", {"vision": _on(0, 1, pp=2), "llm": _on(2, 3, pp=2, split=(2, 4))}, "zb_h1"),
    Setting("vision dp2 -> llm pp2", {"vision": _on(0, 1, dp_replicate=2), "llm": _on(2, 3, pp=2)}),
    Setting(
        "llm pp2*dp2, vision dp2 colocated",
        {"vision": _on(0, 1, dp_replicate=2), "llm": _on(0, 1, 2, 3, pp=2, dp_replicate=2)},
    ),
)


def ran(known: Planned, step: Gathered) -> Ran:
    """A measured step with what was known of it before; of the schedule alone."""
    return Ran(known.plan, known.schedule, step.events, dict.fromkeys(step.events, step.span))


def latencies(step: Ran) -> list[float]:
    """Seconds from the end of an action that sent rows to the start of the one that waited for them elsewhere."""
    return [seconds for _, seconds in transfers(starts(step, rows_between(step.plan, step.schedule.graph)))]


def mean(costs: Sequence[Seconds]) -> dict[Action, np.ndarray]:
    """Average the costs of several steps of one batch."""
    return {action: np.mean([c[action] for c in costs], axis=0) for action in costs[0]}


def fitted(known: Planned, steps: Iterable[Ran]) -> dict[Action, np.ndarray]:
    """Costs of a batch from steps of others."""
    lines, graph = fitted_lines(map(points, steps)), known.schedule.graph
    actions = {a for lane in known.schedule.lanes for a in lane.actions}
    return {a: terms(known.plan, graph, a) @ np.array(lines[a.node.all_instances, a.kind]) for a in actions}


def simulated(known: Planned, costs: Seconds, latency: float) -> Simulation:
    """The step with these costs; bandwidth is no matter here."""
    return simulate(
        known.schedule, costs.__getitem__, Links(latency=latency), rows_between(known.plan, known.schedule.graph)
    )


def compare(setting: Setting, steps: Sequence[Gathered]) -> dict[str, Any]:
    """Ratios of every step, and the pair of timelines of the step whose `repeat` is the median one."""
    known = [planned(setting, seed) for seed in SEEDS]
    found = [ran(known[s.turn], s) for s in steps]
    costs = [durations(one.schedule, one.events) for one in found]
    waits = [latencies(one) for one in found]
    ratios: dict[str, list[float]] = defaultdict(list)
    pairs: list[tuple[float, Timeline, Timeline]] = []
    for i, step in enumerate(steps):
        here = known[step.turn]
        same = [c for j, c in enumerate(costs) if j != i and steps[j].turn == step.turn]
        others = [one for one, s in zip(found, steps, strict=True) if s.turn != step.turn]
        latency = statistics.median([x for j, w in enumerate(waits) if j != i for x in w] or [0.0])
        made = {"repeat": mean(same), "fitted": fitted(here, others), "own": costs[i]}
        for figure in FIGURES:
            simulation = simulated(here, made[figure], latency)
            ratios[figure].append(step.seconds / simulation.time)
            if figure == "repeat":
                pairs.append((ratios[figure][-1], from_simulation(simulation), from_measured(step.events, step.span)))
    actions = [float(x) for c in costs for a, found in c.items() if a.microbatch >= 0 for x in found]
    middle = sorted(pairs, key=lambda p: p[0])[len(pairs) // 2]
    return {
        "setting": setting.name,
        "ranks": setting.world,
        "schedule": setting.schedule,
        "ratios": dict(ratios),
        "step_ms": 1e3 * statistics.median(s.seconds for s in steps),
        "action_ms": [1e3 * float(x) for x in np.quantile(actions, (0.1, 0.5, 0.9))],
        "latency_ms": 1e3 * statistics.median([x for w in waits for x in w] or [0.0]),
        "bubble": middle[2].bubble,
        "lost": statistics.median(s.lost for s in steps),
        "load": machine()["load"][0],
        "pair": middle[1:],
    }


def spread(ratios: Sequence[float]) -> str:
    """10% and 90% quantile."""
    low, high = np.quantile(ratios, (0.1, 0.9))
    return f"{low:.2f} to {high:.2f}"


@program(
    option("--steps", type=int, default=10, help="measured per batch (default 10)"),
    option("--warmup", type=int, default=2, help="steps per batch before (default 2)"),
    option("--settings", default="", help="only settings whose name contains this"),
    option("--ranks", type=int, nargs="*", default=[2, 4], help="only settings of so many ranks"),
    option("--scale", type=float, default=1.0, help="of widths (default 1)"),
    option("--timeline", metavar="FOLDER", type=Path, help="picture and trace of every setting's median step"),
)
def main(given: Options) -> Any:
    """Run, simulate, print, write."""
    results = []
    for setting in SETTINGS:
        if given.settings not in setting.name or setting.world not in given.ranks:
            continue
        one = scaled(setting, given.scale)
        turns = [Turn(one, seed) for seed in SEEDS]
        ranks = given.pool.run(one.world, run_turns, turns, given.warmup, given.steps, timeout=600)
        found = compare(one, gather(ranks))
        simulation, measured = found.pop("pair")
        results.append(found)
        if given.timeline is not None:
            write_pair(given.timeline, setting, simulation, measured)
    everything = {f: [x for r in results for x in r["ratios"][f]] for f in FIGURES}
    medians = {f: statistics.median(x) for f, x in everything.items()}
    report(
        f"measured / simulated step time: median (10% to 90%) over {len(SEEDS) * given.steps} steps each",
        ("", "ranks", "schedule", "step ms", "action ms", "latency ms", "bubble", *FIGURES, "lost", "load"),
        [
            (
                r["setting"], r["ranks"], r["schedule"], f"{r['step_ms']:.0f}",
                " / ".join(f"{x:.0f}" for x in r["action_ms"]), f"{r['latency_ms']:.1f}", f"{r['bubble']:.0%}",
                *(f"{statistics.median(r['ratios'][f]):.3f} ({spread(r['ratios'][f])})" for f in FIGURES),
                f"{r['lost']:.0%}", r["load"],
            )
            for r in results
        ],
        [
            *(f"{f}: median over all steps {medians[f]:.3f} ({spread(everything[f])})" for f in FIGURES),
            f"goal: repeat within {GOAL:.0%} of 1: {'yes' if abs(medians['repeat'] - 1) <= GOAL else 'NO'}",
            "action ms: 10%, 50% and 90% quantile; repeat: costs are means over the other steps of the same batch;"
            " fitted: a line in planned FLOPs through the steps of the other batch; own: costs of the very step",
            "lost: part of a step in which its most disturbed rank was at an action but not on a processor (median)",
        ],
    )  # fmt: skip
    return {"settings": results, "medians": medians, "goal": GOAL}


def scaled(setting: Setting, scale: float) -> Setting:
    """Return the same setting with other widths (multiples of 64, at least 64)."""
    sizes = {
        n: (max(1, round(getattr(setting, n)[0] * scale / 64)) * 64, getattr(setting, n)[1]) for n in setting.layouts
    }
    return replace(setting, **sizes)  # type: ignore[arg-type]


def write_pair(folder: Path, setting: Setting, *pair: Timeline) -> None:
    """Picture and trace, simulated above measured."""
    from hetero_strategy.monitor.draw import draw_timelines  # matplotlib is slow to import

    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "_" for c in setting.name)
    write_trace(folder / f"{name}.json", *pair)
    draw_timelines(folder / f"{name}.png", *pair, title=f"{setting.name}, {setting.schedule}")


if __name__ == "__main__":
    main()
