"""How near to the lower bound does balancing come, and how long does it take? On one thread, numpy only.

quality  Items of OrchMLLM's three models (recipes/workloads) over 8 to 2560 instances with 60 samples each. Figures
         are the most loaded instance over the mean of all items' costs alone, 1 where nobody waits:
           sampled  as drawn: 60 samples in a row per instance
           paper    OrchMLLM's algorithm for the form: 1 (none), 2 (full) or 5 (attention)
           KK       Karmarkar and Karp's largest differencing, without padding and up to 512 instances only: it takes
                    a second there and ten times that at 2560
           ours     the default policy
           bound    that no assignment can be below: items too large or too equal to divide, and with full padding the
                    padding that no assignment avoids. With padded attention it is the cost of all items alone, which
                    nothing reaches
         and ours / bound. Costs are FLOPs: quadratic / linear = 1 / (6 width) in encoders, half of it with the LLM's
         causal mask, widths of the paper's table 1. "attention" is audio again as if only its attention were padded.
speed    Of the default, milliseconds in the median, of the thread's processor time (it waits for nothing, so on a free
         core that is the time it takes): the modules of one step at every size, the goal being 25 ms for
         all three at 2560 instances; DistTrain's intra-microbatch reordering (table 3: 1920 samples) beside the paper's
         times; and microseconds per item while sizes grow a hundredfold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import arguments, report, write_json
from benchmarks.peers.balancing import disttrain, karmarkar_karp, lower_bound, padded_ascending
from hetero_strategy.plan.balance import POLICIES, Cost, balance, loads
from hetero_strategy.plan.balance.auto import conv_transformer
from recipes.workloads import WORKLOADS

SAMPLES = 60
"""Of an instance: the mini-batch of OrchMLLM's table 2."""
WIDTHS = {"orchmllm_10b": (2048, 1280, 3584), "orchmllm_18b": (2400, 1280, 5120), "orchmllm_84b": (3200, 3072, 8192)}
"""Hidden sizes of vision, audio and LLM (OrchMLLM table 1)."""
MOST_DIFFERENCING = 512
PAPER = {"none": "lpt", "full": "padded", "attention": "conv"}
TABLE_3 = {30: 1.82, 60: 1.87, 120: 1.89}
"""DistTrain: data-parallel size -> milliseconds."""


class Module(NamedTuple):
    """One module's items of one step."""

    name: str
    lengths: np.ndarray
    sample: np.ndarray
    cost: Cost


def modules(workload: str, instances: int) -> Iterator[Module]:
    """Vision, audio and LLM of one step; audio also with padded attention."""
    drawn = WORKLOADS[workload](instances * SAMPLES, 0)
    vision, audio, llm = WIDTHS[workload]
    for name, width in (("vision", vision), ("audio", audio)):
        items = drawn.items[name]
        quadratic = 1 / (6 * width)
        yield Module(name, items.inner_rows, items.sample, Cost(1.0, quadratic, padding=drawn.padding[name]))  # type: ignore[arg-type]
        if name == "audio":
            yield Module("audio", items.inner_rows, items.sample, Cost(1.0, quadratic, padding="attention"))
    yield Module("llm", drawn.tokens(), np.arange(len(drawn.text)), Cost(1.0, 1 / (12 * llm)))


def assigned(module: Module, bins: int, policy: str) -> np.ndarray:
    """Bin of each item by a policy of the product or an algorithm of others."""
    if policy in POLICIES:
        return balance(module.lengths, bins, module.cost, policy=policy)
    if policy in ("disttrain", "karmarkar_karp"):
        peer = disttrain if policy == "disttrain" else karmarkar_karp
        return peer(module.cost.alone(module.lengths), bins)
    return {"padded": padded_ascending, "conv": conv_transformer}[policy](module.lengths, bins)


def measured(module: Module, bins: int, policy: str, rounds: int) -> tuple[float, np.ndarray]:
    """(median milliseconds, bin of each item)."""
    seconds = []
    for _ in range(rounds):
        start = time.thread_time()
        where = assigned(module, bins, policy)
        seconds.append(time.thread_time() - start)
    return 1000 * statistics.median(seconds), where


def quality(workload: str, bins: int, rounds: int) -> list[dict[str, Any]]:
    """One line per module."""
    lines = []
    for module in modules(workload, bins):
        mean = float(module.cost.alone(module.lengths).sum()) / bins

        def reached(where: np.ndarray, module: Module = module, mean: float = mean) -> float:
            return float(loads(module.lengths, where, bins, module.cost).max()) / mean

        padding = module.cost.padding
        took, ours = measured(module, bins, "auto", rounds)
        differencing = padding == "none" and bins <= MOST_DIFFERENCING
        bound = lower_bound(module.lengths, bins, module.cost) / mean
        lines.append(
            {
                "workload": workload,
                "instances": bins,
                "module": module.name,
                "padding": padding,
                "items": len(module.lengths),
                "sampled": reached(module.sample // SAMPLES),
                "paper": reached(measured(module, bins, PAPER[padding], 1)[1]),
                "KK": reached(measured(module, bins, "karmarkar_karp", 1)[1]) if differencing else None,
                "ours": reached(ours),
                "bound": bound,
                "ours / bound": reached(ours) / bound,
                "ms": took,
            }
        )
    return lines


def table_3(rounds: int) -> list[dict[str, Any]]:
    """1920 samples of an interleaved set, by their image tokens as DistTrain measures a sample."""
    drawn = WORKLOADS["laion"](1920, 0)
    items = drawn.items["vision"]
    size = np.bincount(items.sample, weights=items.inner_rows, minlength=1920).astype(np.int64)
    module = Module("vision", size, np.arange(1920), Cost())
    lines = []
    for bins, printed in TABLE_3.items():
        line: dict[str, Any] = {"instances": bins, "paper ms": printed}
        for policy in ("disttrain", "auto"):
            took, where = measured(module, bins, policy, rounds)
            line[f"{policy} ms"] = took
            line[f"{policy} / bound"] = float(loads(size, where, bins, Cost()).max()) / lower_bound(size, bins, Cost())
        lines.append(line)
    return lines


def scaling(sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Microseconds per item of every module as the instances grow."""
    lines: list[dict[str, Any]] = []
    for bins in sizes:
        line: dict[str, Any] = {"instances": bins, "samples": bins * SAMPLES}
        for module in modules("orchmllm_10b", bins):
            took = measured(module, bins, "auto", rounds)[0]
            line[f"{module.name} {module.cost.padding}"] = 1000 * took / len(module.lengths)
        lines.append(line)
    return lines


def three_modules(bins: int, rounds: int) -> dict[str, Any]:
    """As many items as samples in all three modules: lengths of a log-normal with median 400, at most 16384."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, bins * SAMPLES).astype(np.int64) + 1, 16384)
    line: dict[str, Any] = {"instances": bins, "items each": len(lengths)}
    for cost in (Cost(1.0, 1e-5, 3.0), Cost(), Cost(1.0, 1e-5, 3.0, "full")):
        name = cost.padding if cost.padding == "full" else "squares" if cost.quadratic else "linear"
        line[f"{name} ms"] = measured(Module(name, lengths, lengths, cost), bins, "auto", rounds)[0]
    line["sum ms"] = sum(value for key, value in line.items() if key.endswith(" ms"))
    return line


def table(title: str, lines: list[dict[str, Any]], notes: tuple[str, ...] = (), digits: int = 4) -> None:
    """Print lines that have the same keys."""
    columns = list(lines[0])
    rows = [[f"{x:.{digits}f}" if isinstance(x, float) else x for x in line.values()] for line in lines]
    report("balance", title, columns, rows, notes)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, at most 64 instances (for the test suite)")
    parser.add_argument("--rounds", type=int, default=9, help="timings per figure, of which the median counts")
    options = parser.parse_args(argv)
    names = ["orchmllm_10b"] if options.quick else list(WIDTHS)
    sizes = (8, 64) if options.quick else (8, 64, 512, 2560)
    lines = [line for name in names for bins in sizes for line in quality(name, bins, options.rounds)]
    plain = [line for line in lines if line["padding"] == "none"]
    far = [line for line in plain if line["ours / bound"] > 1.001]
    table(
        "most loaded instance / mean",
        lines,
        (
            f"without padding ours / bound is {max(x['ours / bound'] for x in plain):.5f} at worst, above 1.001 in "
            f"{len(far)} of {len(plain)} lines",
        ),
        5,
    )
    three = [three_modules(bins, options.rounds) for bins in sizes]
    table("milliseconds for three modules (goal at 2560 instances: 25 together)", three, digits=2)
    intra = table_3(options.rounds)
    table("DistTrain table 3, intra-microbatch reordering of 1920 samples", intra, digits=3)
    growth = scaling((6, 64) if options.quick else (26, 256, 2560), options.rounds)
    table("microseconds per item", growth, digits=3)
    results = {"quality": lines, "three modules": three, "table 3": intra, "per item": growth}
    write_json(options.json, "balance", "cpu", {"quick": options.quick, "rounds": options.rounds}, results)


if __name__ == "__main__":
    main()
