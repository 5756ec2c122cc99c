"""Does our simulation of frozen-aware stage partition agree with what Cornstarch measured?

Cornstarch (arXiv:2503.11367) trains a projector between a frozen encoder and a frozen LLM. It prints for each model the
mean forward and backward time per stage and the throughput per GPU, with stages balanced by forward time ("unaware")
and by forward + backward time ("aware"): table 3 for the medium LLM, 11 for the large and 10 for the small one. Table 9
has stage counts; all runs have 24 microbatches. From these times and counts our 1F1B schedule over encoder stages ->
LLM stages, every stage on its own rank, is simulated, and the gain aware / unaware in throughput per GPU stands beside
the paper's.

Limits. Table 9's counts of the unaware runs contradict the text ("the number of pipeline stages are the same in both
cases") and the printed throughput, so it is used for the aware runs only. The unaware run is given the same total:

  same work  split so that stages x printed forward time of each module are nearest to the aware run's: the same layers
             in other stages. Nothing is taken from the printed throughput: this is a prediction.
  nearest    split so that the gain is nearest to the paper's: one whole number is fitted. It says what is possible.
  table 9    as printed, with another total.

Printed times are means, so all stages of a module are equal here; the projector's backward is all on the last encoder
stage; transfers are free. The unaware runs went through another code path of Cornstarch (its colocated baseline), and
what that costs is in no printed time. Absolute throughputs are not compared: with the one sample per microbatch that
the paper states, they exceed what the printed times allow.

Table 10 is not reproducible from what is printed: no split of the same total comes near the paper's gain for any model,
and for two models the run with the lower throughput has the smaller time in every column.

A last table lets the planner choose: from layer counts (table 1) and the aware run's work it allocates the same total
of stages (at most 6 for a module, as in the paper), aware and unaware.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import arguments, report, write_json
from benchmarks.peers.allocation import allocate, allocate_best, as_if_trained, simulated, staged
from hetero_strategy.planner.layers import Passes
from hetero_strategy.planner.partition import split

MICROBATCHES = 24
EDGES = (("encoder", "llm"),)
MOST_STAGES = 6
"""Of one module, in the paper."""


class Printed(NamedTuple):
    """One line of table 3, 10 or 11: milliseconds per stage and microbatch, and inputs per second and GPU."""

    encoder_forward: float
    llm_forward: float
    encoder_backward: float
    llm_backward: float
    throughput: float


class Counts(NamedTuple):
    """Stages of the two modules, in the order of table 9."""

    llm: int
    encoder: int


@dataclass(frozen=True)
class Model:
    """What the paper prints of one model."""

    table: int
    name: str
    layers: Counts
    """Table 1."""
    aware: Printed
    unaware: Printed
    aware_stages: Counts
    unaware_stages: Counts
    """As table 9 prints them."""

    @property
    def gain(self) -> float:
        return self.aware.throughput / self.unaware.throughput


def _models() -> tuple[Model, ...]:
    llm_layers = {3: 32, 10: 16, 11: 64}
    encoder_layers = {"VLM": {"S": 40, "M": 32, "L": 48}, "ALM": {"S": 32, "M": 40, "L": 48}}
    lines = (
        (3, "VLM-S", (49.06, 27.46, 0.12, 43.03, 6.47), (26.49, 28.13, 0.16, 51.32, 5.30), (6, 1), (3, 1)),
        (3, "VLM-M", (75.04, 28.15, 0.27, 51.30, 5.15), (45.90, 45.26, 0.16, 84.89, 3.73), (5, 2), (4, 3)),
        (3, "ALM-S", (57.25, 81.73, 0.38, 157.12, 1.94), (57.79, 81.94, 0.38, 157.14, 1.94), (6, 1), (5, 1)),
        (3, "ALM-M", (176.80, 82.19, 0.64, 157.51, 1.96), (93.39, 98.25, 0.34, 189.11, 1.70), (6, 1), (4, 4)),
        (3, "VLM-L", (101.02, 34.67, 0.20, 63.77, 3.17), (70.42, 67.03, 0.15, 127.34, 2.06), (5, 4), (3, 5)),
        (3, "ALM-L", (308.16, 100.20, 0.73, 188.50, 1.98), (145.97, 121.21, 0.33, 235.23, 1.69), (4, 2), (5, 5)),
        (11, "VLM-S", (52.54, 88.58, 0.10, 171.72, 2.39), (85.83, 106.26, 0.10, 171.38, 2.10), (5, 1), (3, 5)),
        (11, "VLM-M", (249.38, 88.95, 0.49, 171.68, 2.29), (132.16, 113.64, 0.26, 213.58, 1.85), (5, 1), (5, 1)),
        (11, "VLM-L", (481.44, 106.53, 0.74, 215.06, 1.76), (246.22, 146.62, 0.38, 287.14, 1.81), (4, 1), (4, 2)),
        (11, "ALM-S", (76.84, 286.16, 0.24, 596.40, 0.72), (78.80, 285.07, 0.24, 594.31, 0.73), (5, 1), (5, 1)),
        (11, "ALM-M", (197.21, 287.37, 0.45, 597.47, 0.72), (101.97, 359.27, 0.24, 743.91, 0.62), (5, 1), (3, 1)),
        (11, "ALM-L", (319.31, 286.31, 0.50, 596.50, 0.71), (177.29, 356.06, 0.27, 742.80, 0.61), (5, 1), (4, 2)),
        (10, "VLM-S", (25.57, 15.51, 0.05, 15.09, 12.64), (32.80, 18.80, 0.06, 20.09, 13.79), (4, 2), (4, 4)),
        (10, "VLM-M", (75.67, 17.31, 0.15, 20.08, 7.85), (45.25, 17.61, 0.09, 20.33, 7.63), (2, 4), (1, 4)),
        (10, "VLM-L", (98.27, 26.22, 0.11, 30.50, 4.81), (122.50, 47.39, 0.13, 60.31, 6.05), (1, 4), (1, 5)),
        (10, "ALM-S", (57.52, 42.73, 0.20, 70.21, 7.13), (30.14, 42.30, 0.10, 70.22, 5.34), (5, 1), (3, 2)),
        (10, "ALM-M", (92.19, 32.54, 0.17, 52.63, 4.85), (59.18, 72.90, 0.12, 105.22, 4.09), (4, 2), (2, 3)),
        (10, "ALM-L", (97.77, 33.27, 0.12, 52.88, 4.29), (76.81, 62.01, 0.09, 105.22, 3.59), (4, 3), (2, 4)),
    )
    return tuple(
        Model(
            table,
            name,
            Counts(llm_layers[table], encoder_layers[name[:3]][name[-1]]),
            Printed(*aware),
            Printed(*unaware),
            Counts(*aware_stages),
            Counts(*unaware_stages),
        )
        for table, name, aware, unaware, aware_stages, unaware_stages in lines
    )


MODELS = _models()


def parts(printed: Printed, runs: Counts, of: Counts | None = None) -> dict[str, Passes]:
    """Times of every stage, or with ``of`` (layer counts) those of every layer of the same modules."""
    of = of or runs
    zeros = np.zeros(of.encoder)
    projector = zeros.copy()
    projector[-1] = printed.encoder_backward * runs.encoder
    forward = np.full(of.encoder, printed.encoder_forward * runs.encoder / of.encoder)
    llm_forward = np.full(of.llm, printed.llm_forward * runs.llm / of.llm)
    llm_backward = np.full(of.llm, printed.llm_backward * runs.llm / of.llm)
    return {
        "encoder": Passes(forward, zeros, projector),
        "llm": Passes(llm_forward, llm_backward, np.zeros(of.llm)),
    }


def step_ms(printed: Printed, stages: Counts) -> float:
    """Simulated time of a step."""
    return simulated(parts(printed, stages), EDGES, MICROBATCHES)


def same_work(model: Model) -> Counts:
    """The unaware run's stages, of the aware run's total, whose modules have the work of the aware run's."""
    total = sum(model.aware_stages)
    encoder = model.aware_stages.encoder * model.aware.encoder_forward / model.unaware.encoder_forward
    llm = model.aware_stages.llm * model.aware.llm_forward / model.unaware.llm_forward
    splits = [Counts(total - e, e) for e in range(1, total)]
    return min(splits, key=lambda s: abs(math.log(s.encoder / encoder)) + abs(math.log(s.llm / llm)))


def compare(model: Model) -> dict[str, Any]:
    """Gains of one model: the paper's and the simulated ones."""
    aware, total = step_ms(model.aware, model.aware_stages), sum(model.aware_stages)
    unaware = {s: step_ms(model.unaware, s) for s in (Counts(total - e, e) for e in range(1, total))}
    gains = {s: ms / aware for s, ms in unaware.items()}
    kept = same_work(model)
    near = min(gains, key=lambda s: abs(gains[s] / model.gain - 1))
    literal = step_ms(model.unaware, model.unaware_stages) * sum(model.unaware_stages) / (aware * total)
    chosen = "aware" if aware <= unaware[kept] else "unaware"
    return {
        "table": model.table,
        "model": model.name,
        "paper": model.gain,
        "aware_stages": model.aware_stages._asdict(),
        "aware_ms": aware,
        "same_work": {"stages": kept._asdict(), "gain": gains[kept], "error": gains[kept] / model.gain - 1},
        "nearest": {"stages": near._asdict(), "gain": gains[near], "error": gains[near] / model.gain - 1},
        "table_9": {"stages": model.unaware_stages._asdict(), "gain": literal, "error": literal / model.gain - 1},
        "any_split": (min(gains.values()), max(gains.values())),
        "dominated": _dominated(model),
        "best_of": {
            "chosen": chosen,
            "gain": unaware[kept] / min(aware, unaware[kept]),
            "paper": model.gain if chosen == "aware" else 1.0,
        },
    }


def _dominated(model: Model) -> bool:
    """The slower run has the smaller times everywhere: no schedule explains that."""
    slow, fast = sorted((model.aware, model.unaware), key=lambda p: p.throughput)
    return all(s < f for s, f in zip(slow[:4], fast[:4], strict=True))


def planned(model: Model) -> dict[str, Any]:
    """What the planner allocates from layers whose times the aware run shows."""
    layers = parts(model.aware, model.aware_stages, model.layers)
    total = sum(model.aware_stages)
    ranges = {name: range(1, MOST_STAGES + 1) for name in layers}
    theirs = {
        name: staged(layers[name], split(layers[name].total, n)) for name, n in model.aware_stages._asdict().items()
    }
    found: dict[str, Any] = {"table": model.table, "model": model.name, "paper_gain": model.gain}
    found["paper"] = {"stages": model.aware_stages._asdict(), "ms": simulated(theirs, EDGES, MICROBATCHES)}
    options: Mapping[str, Mapping[str, Passes]] = {
        "aware": layers,
        "unaware": {name: as_if_trained(p) for name, p in layers.items()},
    }
    for name, believed in options.items():
        made = allocate(believed, EDGES, MICROBATCHES, total=total, ranges=ranges)
        really = {module: staged(layers[module], counts) for module, counts in made.splits.items()}
        found[name] = {"stages": made.stages, "ms": simulated(really, EDGES, MICROBATCHES)}
    best = allocate_best(layers, EDGES, MICROBATCHES, total=total, ranges=ranges)
    found["gain"] = found["unaware"]["ms"] / found["aware"]["ms"]
    found["best_of_gain"] = found["unaware"]["ms"] / best.seconds
    found["over_paper"] = found["paper"]["ms"] / best.seconds
    return found


def errors(lines: Sequence[Mapping[str, Any]], table: int, reading: str) -> dict[str, float]:
    """Worst and median size of the relative error of a table's gains."""
    sizes = [abs(line[reading]["error"]) for line in lines if line["table"] == table]
    return {"worst": max(sizes), "median": statistics.median(sizes)}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    options = arguments(__doc__).parse_args(argv)
    lines = [compare(model) for model in MODELS]
    choices = [planned(model) for model in MODELS if model.table != 10]
    summary = {str(t): {r: errors(lines, t, r) for r in ("same_work", "nearest", "table_9")} for t in (3, 11, 10)}
    for table in (3, 11, 10):
        _print_gains(table, [line for line in lines if line["table"] == table], summary[str(table)])
    _print_choices(choices)
    settings = {"microbatches": MICROBATCHES, "order": "1f1b", "most_stages": MOST_STAGES}
    results = {"gains": lines, "errors": summary, "planned": choices}
    write_json(options.json, "cornstarch_tables", "cpu", settings, results)


def _print_gains(table: int, lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Mapping[str, float]]) -> None:
    rows = []
    for line in lines:
        same, near, best = line["same_work"], line["nearest"], line["best_of"]
        rows.append(
            [
                line["model"],
                _counts(line["aware_stages"]),
                f"{line['paper']:.2f}",
                *(_counts(same["stages"]), f"{same['gain']:.2f}", f"{same['error']:+.1%}"),
                *(_counts(near["stages"]), f"{near['gain']:.2f}", f"{near['error']:+.1%}"),
                "{:.2f}–{:.2f}".format(*line["any_split"]),
                f"{line['table_9']['gain']:.2f}",
                f"{best['gain']:.2f}",
                f"{best['paper']:.2f}",
            ]
        )
    columns = ["model", "aware llm,enc", "paper", "same work", "gain", "error", "nearest", "gain", "error"]
    columns += ["any split", "table 9", "best of", "paper's, of that"]
    said = [
        f"table {table}, {name}: error of the gain {summary[reading]['worst']:.1%} at worst, "
        f"{summary[reading]['median']:.1%} in the median"
        for reading, name in (("same_work", "same work"), ("nearest", "nearest"))
    ]
    title = f"Table {table}: gain aware / unaware in throughput per GPU"
    if table == 10:
        title += " (not reproducible)"
        far = [line["model"] for line in lines if not line["any_split"][0] <= line["paper"] <= line["any_split"][1]]
        dominated = [line["model"] for line in lines if line["dominated"]]
        said.append(f"the paper's gain is outside what any split of the same total gives: {', '.join(far)}")
        said.append(f"every printed time is smaller in the run with the lower throughput: {', '.join(dominated)}")
    report("cornstarch_tables", title, columns, rows, said)


def _print_choices(choices: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        [
            f"table {c['table']} {c['model']}",
            *(_counts(c[key]["stages"]) for key in ("paper", "aware", "unaware")),
            *(f"{c[key]:.2f}" for key in ("paper_gain", "gain", "best_of_gain", "over_paper")),
        ]
        for c in choices
    ]
    columns = ["model", "paper's aware llm,enc", "planner aware", "planner unaware"]
    columns += ["paper's gain", "planner's gain", "best of", "over paper's stages"]
    same = sum(c["aware"]["stages"] == c["paper"]["stages"] for c in choices)
    said = f"the planner's aware stages are those of table 9 for {same} of {len(choices)} models"
    report("cornstarch_tables", "The planner's own stages, same total", columns, rows, [said])


def _counts(stages: Mapping[str, int]) -> str:
    return f"{stages['llm']},{stages['encoder']}"


if __name__ == "__main__":
    main()
