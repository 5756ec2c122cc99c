"""Context parallelism by length: a step with rows dealt in the plan over a step with a fixed cp, simulated.

Eight ranks train a language model of Llama 3 8B's sizes on every workload. Ours has ``cp=8`` in all of them: sequences
that fit stay whole on a rank, and longer ones are cut for the fewest ranks. A fixed cp of 1, 2, 4 or 8 cuts every
sequence evenly over its ranks, and gathers all keys. Microbatches come from :func:`plan_step` in both, with at most so
many rows a rank; a cp whose ranks do not hold the longest sample does not fit. Backward takes twice as long as forward,
with all that travels, and attention hides the travel as :class:`RowCost` says. A step with fixed cp ends when its
slowest instance does, and instances wait for each other nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.common import Options, option, program, report
from benchmarks.context import LLAMA
from benchmarks.workloads import WORKLOADS
from hetero_strategy.mask import Causal, Spans
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.deal_rows import deal_rows, pairs_and_keys
from hetero_strategy.plan.plan_step import ResolvedBalance, plan_step
from hetero_strategy.plan.step_plan import StepMetadata, StepPlan

RANKS = 8
FIXED = (1, 2, 4, 8)
ROWS = {"video_long_tail": 16384}
"""Most rows of a rank in a microbatch; default: :data:`USUAL_ROWS`."""
USUAL_ROWS = 8192
LINKS = (200e9, 40e9)
"""Bytes a second that a rank receives."""
LINK = 200e9
"""Bytes a second of the links in :data:`LLAMA`."""


def packed(metadata: StepMetadata, cp: int, rows: int) -> StepPlan:
    """Plan a step of the language model on instances of ``cp`` ranks, with as few microbatches as hold it."""
    balancing = ResolvedBalance({"llm": "auto"}, {"llm": Cost(LLAMA.row, LLAMA.pair / 2)}, budget={"llm": cp * rows})
    multiple = {"llm": 2 * cp} if cp > 1 else {}
    return plan_step(
        metadata, {"llm": RANKS // cp}, ("llm",), microbatches=None, row_multiple=multiple, balancing=balancing
    )


def fixed(metadata: StepMetadata, cp: int, rows: int, key: float) -> float:
    """Return the FLOPs' worth of a step in which all sequences are cut over all ranks of an instance."""
    if int(metadata.tokens.max()) > cp * rows:
        return np.nan
    cost, time = LLAMA._replace(key=key), np.zeros(RANKS // cp)
    for assignment in packed(metadata, cp, rows).assignments["llm"]:
        for instance in range(len(time)):
            lengths = assignment.inner_rows_of(instance)
            total, pairs = int(lengths.sum()), float((lengths * (lengths + 1) / 2).sum())
            time[instance] += cost.of(total / cp, pairs / cp, total * (cp - 1) / cp)
    return float(time.max())


def dealt(metadata: StepMetadata, rows: int, key: float) -> tuple[float, float, float]:
    """Return the FLOPs' worth of a step with our rows on all ranks, its share of keys that travel, and its
    share of rows that fill instances up.
    """
    cost, time, lacked, total = LLAMA._replace(key=key), 0.0, 0.0, 0
    for assignment in packed(metadata, RANKS, rows).assignments["llm"]:
        lengths = assignment.inner_rows_of(0)
        mask = Causal().slices(lengths, Spans.none())
        pairs, keys = pairs_and_keys(deal_rows(lengths, mask, RANKS, cost), mask, RANKS)
        time += float(np.max(cost.of(mask.total / RANKS, pairs, keys)))
        lacked, total = lacked + float(keys.sum()), total + mask.total
    return time, lacked / (total * (RANKS - 1)), 1 - float(metadata.tokens.sum()) / total


def compared(name: str, microbatches: int, bandwidth: float) -> dict[str, float]:
    """Compare the steps of one workload with about so many microbatches of all ranks."""
    rows, key = ROWS.get(name, USUAL_ROWS), LLAMA.key * LINK / bandwidth
    mean = float(WORKLOADS[name](512, 1).tokens().mean())
    metadata = WORKLOADS[name](int(microbatches * RANKS * rows / mean), 0).metadata()
    ours, lacked, padding = dealt(metadata, rows, key)
    others = {f"cp {cp}": fixed(metadata, cp, rows, key) / ours for cp in FIXED}
    best = min(time for time in others.values() if time == time)
    return {"longest": float(metadata.tokens.max()), **others, "ours": 1 / best, "keys": lacked, "padding": padding}


@program(option("--microbatches", type=int, default=16, help="of a step of all ranks (default 16)"))
def main(chosen: Options) -> Any:
    """Print the table; returns its figures."""
    figures = {
        f"{name}, {bandwidth / 1e9:.0f} GB/s": compared(name, chosen.microbatches, bandwidth)
        for name in WORKLOADS
        for bandwidth in LINKS
    }
    lines = [
        [name, int(of["longest"])]
        + [None if np.isnan(of[key]) else of[key] for key in (*(f"cp {cp}" for cp in FIXED), "ours", "keys", "padding")]
        for name, of in figures.items()
    ]
    columns = ("workload, link", "longest", *(f"cp {cp}" for cp in FIXED), "ours / best", "keys sent", "filled up")
    report(f"seconds of a step with fixed cp over ours, {RANKS} ranks", columns, lines)
    return figures


if __name__ == "__main__":
    main()
